"""Count the files and functions that one operation calls: `python -m tools.walk [--names] [NAME ...]`.

A reader who follows an operation through the code visits each of these once. `sys.setprofile` counts, in one process
and all its threads; a lambda, a nested function and a generator count as functions, a comprehension does not.

A *return* is a call from one module back into another that is still waiting for it further up: the reader goes to and
fro. The same two functions count once. The table shows the pair of modules with the most returns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flower_privdec"
DIGITS = "scenarios/digits.yaml"
NO_FUNCTIONS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
STEADY = 4  # the round or step that is counted: caches are full, files are open, neighbours have met
NETWORK = """\
name: walk
n_peers: 4
rounds: 8
data: {dataset: digits, batch: {size: 20}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.1}
topology: {name: directed-exponential}
privacy: {epsilon: 3.0, delta: 1.0e-3, clip_norm: 1.0}
evaluation: {every: 100}
"""

Function = tuple[str, str]  # file, qualified name


class Walk:
    """The functions of a package that are called while `recording`."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}/"
        self._codes: set[CodeType] = set()
        self._returns: set[tuple[CodeType, CodeType]] = set()
        self._is_recording = False

    @contextmanager
    def watching(self) -> Iterator[Walk]:
        """Install the profiler in this thread and in those that start meanwhile."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count what is called, in any watched thread."""
        self.record()
        try:
            yield
        finally:
            self.pause()

    def record(self) -> None:
        """Count from here."""
        self._is_recording = True

    def pause(self) -> None:
        """Count up to here."""
        self._is_recording = False

    def forget(self) -> None:
        """Count from none again."""
        self._codes.clear()
        self._returns.clear()

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._is_recording or event != "call":
            return
        code = frame.f_code
        self._codes.add(code)
        if not code.co_filename.startswith(self._prefix):
            return

        # The callers in the package, the nearest first, whatever other code lies between.
        callers = list[CodeType]()
        outer = frame.f_back
        while outer is not None:
            if outer.f_code.co_filename.startswith(self._prefix):
                callers.append(outer.f_code)
            outer = outer.f_back
        is_from_another = bool(callers) and callers[0].co_filename != code.co_filename
        if is_from_another and any(caller.co_filename == code.co_filename for caller in callers):
            self._returns.add((callers[0], code))

    @property
    def returns(self) -> list[tuple[str, str, int]]:
        """Return the pairs of modules that call back into each other, and how often, the most first."""
        pairs = Counter[tuple[str, str]]()
        for caller, called in self._returns:
            one, other = sorted(code.co_filename.removeprefix(self._prefix) for code in (caller, called))
            pairs[one, other] += 1
        return [(one, other, count) for (one, other), count in sorted(pairs.items(), key=lambda pair: (-pair[1], pair))]

    @property
    def functions(self) -> list[Function]:
        """Return the package's functions that were called, sorted by file."""
        codes = [code for code in self._codes if code.co_filename.startswith(self._prefix)]
        calls = {
            (code.co_filename.removeprefix(self._prefix), code.co_qualname)
            for code in codes
            if code.co_name not in NO_FUNCTIONS
        }
        return sorted(calls)


def engine_round(walk: Walk, folder: Path) -> None:
    """Record one round of the engine in which the ledger writes to the disk."""
    from flower_privdec.engine.workers import start_engine
    from flower_privdec.experiment import Experiment
    from flower_privdec.scenario import load_scenario

    experiment = Experiment.build(load_scenario(ROOT / DIGITS))
    cohort = experiment.cohort(folder)
    engine = start_engine(experiment, cohort, experiment.initial_state(cohort), workers=1)
    engine.rounds(STEADY)
    _record_a_write(walk, folder, lambda round_index: engine.rounds(1))
    engine.close()


def _record_a_write(walk: Walk, folder: Path, step: Callable[[int], None]) -> None:
    """Record the next step, counted from STEADY, in which the ledger in a folder grows: a payment covers several."""

    def size() -> int:
        return sum(path.stat().st_size for path in folder.iterdir())

    before = size()
    index = STEADY
    while size() == before:
        walk.forget()
        with walk.recording():
            step(index)
        index += 1


def gradient_step(walk: Walk, folder: Path) -> None:
    """Record one step of a torch loop under `private`: draw a batch, pay, clip, add noise, update."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from flower_privdec.training_loop import private

    model = nn.Linear(64, 10)
    data = TensorDataset(torch.ones(400, 64), torch.zeros(400, dtype=torch.long))
    model, optimizer, loader, criterion = private(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        DataLoader(data, batch_size=20),
        nn.CrossEntropyLoss(),
        ledger=folder / "ledger.jsonl",
        delta=1e-3,
        noise_multiplier=1.0,
        reserve=1,
        report=lambda line: None,
    )
    batches = iter(loader)
    for index in range(STEADY + 1):
        if index == STEADY:
            walk.record()
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    walk.pause()


def ledger_payment(walk: Walk, folder: Path) -> None:
    """Record one payment of a cohort's ledger that is written to the disk."""
    from flower_privdec.experiment import Experiment
    from flower_privdec.scenario import load_scenario

    cohort = Experiment.build(load_scenario(ROOT / DIGITS)).cohort(folder)
    ledger = cohort.ledger
    assert ledger is not None
    for step in range(STEADY):
        ledger.charge(step, cohort.rows)
    _record_a_write(walk, folder, lambda step: ledger.charge(step, cohort.rows))
    ledger.close()


def network_round(mode: str) -> Callable[[Walk, Path], None]:
    """Return what records one round of network peers over TLS, from all peers' round ends to the next."""

    def record(walk: Walk, folder: Path) -> None:
        from flower_privdec.network.local.peer_processes import on_this_machine
        from flower_privdec.network.peer.driver import Driver, PeerDevice
        from flower_privdec.network.peer.foreground import running_peer
        from flower_privdec.network.transport.tls import Authority, identities
        from flower_privdec.scenario import parse_scenario

        scenario = on_this_machine(parse_scenario(NETWORK, overrides=[f"network.mode={mode}"]))
        assert scenario.network.peers is not None
        addresses = tuple(peer.address for peer in scenario.network.peers)
        authority = Authority.create(scenario.name)
        peers = [
            running_peer(scenario, PeerDevice(index, folder / str(index), authority.issue(name), addresses))
            for index, name in enumerate(identities(scenario))
        ]
        reached = Counter[int]()
        lock = threading.Lock()

        def on_round(peer: Any) -> None:
            """Record from the round end of the last peer to the next; no peer waits for that."""
            with lock:
                reached[peer.state.round_index] += 1
                if reached[STEADY + 1] == len(peers):
                    walk.pause()
                elif reached[STEADY] == len(peers):
                    walk.record()

        def run(peer: Any) -> None:
            driver = Driver(peer)
            try:
                driver.open()
                driver.run(on_round)
            finally:
                driver.close()

        with ThreadPoolExecutor(len(peers)) as pool:
            for future in [pool.submit(run, peer) for peer in peers]:
                future.result()

    return record


def app_share(walk: Walk, folder: Path) -> None:
    """Record how one peer of a Flower app answers a message: absorb, train, clip, pay, add noise, split, seal."""
    import logging

    import numpy as np
    from flwr.app import ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    from flower_privdec.flower import LocalGrid, PeerMod, PushSum

    peer_mod = PeerMod(clip_norm=1.0, epsilon=3.0, seal=True)

    def recorded(message: Message, context: Context, call_next: Any) -> Message:
        if context.node_config["partition-id"] != 0 or trained[0] != STEADY:
            return peer_mod(message, context, call_next)
        with walk.recording():
            return peer_mod(message, context, call_next)

    trained = [0]
    app = ClientApp(mods=[recorded])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained[0] += context.node_config["partition-id"] == 0
        arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
        return Message(RecordDict({"arrays": ArrayRecord([array + 0.01 for array in arrays])}), reply_to=message)

    logging.getLogger("flwr.privdec").setLevel(logging.WARNING)
    grid = LocalGrid(app, 4, folder=folder)
    strategy = PushSum(name="walk", fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord([np.zeros(10)]), 2 * STEADY)


def build_digits(walk: Walk, folder: Path) -> None:
    """Record how an experiment is built from scenarios/digits.yaml."""
    from flower_privdec.experiment import Experiment
    from flower_privdec.scenario import load_scenario

    Experiment.build(load_scenario(ROOT / DIGITS, ["privacy.epsilon=2"]))  # imports; other noise is solved for
    with walk.recording():
        Experiment.build(load_scenario(ROOT / DIGITS))


WALKS: dict[str, tuple[str, Callable[[Walk, Path], None]]] = {
    "engine": ("one engine round, ledger write included", engine_round),
    "step": ("one gradient step of a torch loop with its payment", gradient_step),
    "payment": ("one ledger payment", ledger_payment),
    "synchronous": ("one round of network peers that wait", network_round("synchronous")),
    "asynchronous": ("one round of network peers that do not wait", network_round("asynchronous")),
    "share": ("a Flower app's private sealed share at one peer", app_share),
    "build": ("building digits", build_digits),
}


def measure(name: str) -> Walk:
    """Return an operation's walk.

    Args:
        name: of WALKS.
    """
    import flower_privdec

    (package,) = flower_privdec.__path__
    with tempfile.TemporaryDirectory() as folder, Walk(Path(package)).watching() as walk:
        WALKS[name][1](walk, Path(folder))
    return walk


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the walks, or the functions of each."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description=__doc__)
    parser.add_argument("walks", nargs="*", metavar="NAME", help=f"of {', '.join(WALKS)}; all by default")
    parser.add_argument("--names", action="store_true", help="list the functions by file")
    options = parser.parse_args(arguments)
    unknown = set(options.walks) - set(WALKS)
    if unknown:
        parser.error(f"NAME={min(unknown)} must be one of {', '.join(WALKS)}")

    print("| walk | files | functions | most returns between two modules |\n|---|---:|---:|---:|")
    for name in options.walks or WALKS:
        walk = measure(name)
        functions = walk.functions
        files = {file for file, _ in functions}
        most = max((count for _, _, count in walk.returns), default=0)
        print(f"| {WALKS[name][0]} | {len(files)} | {len(functions)} | {most} |")
        if options.names:
            for file, function in functions:
                print(f"    {file} {function}")
            for one, other, count in walk.returns:
                print(f"  {count} returns between {one} and {other}")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main()
