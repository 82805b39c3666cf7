"""What a run writes, prints and sends shows nothing of an example beside its releases: two data sets, every runtime.

Each runtime runs twice, on data sets that have no value in common, while every release is its noise alone
(`blank_releases`): the private work is done, and its sums are thrown away. All that leaves must then be the same, byte
for byte: files, terminal, log, messages, replies. A value of the second data set is also searched for as text and as
bytes, and each runtime whose messages others read runs once with an error that has it in its words.
"""

from __future__ import annotations

import csv
import json
import logging
import re
import secrets
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from command_line import privdec
from networked import LONG, devices, running
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worker_runs import smallest_blocks

import flower_privdec as fp
from flower_privdec.common.errors import PrivdecError
from flower_privdec.core.cohort import Cohort, PrivateStep, StepRequest, no_examples
from flower_privdec.data import Batch, LocalBatch, PeerData
from flower_privdec.experiment import run_name
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.transport import MemoryConnection
from flower_privdec.pushsum.frames import FrameCodec, RowMessage
from flower_privdec.reporting import plots, progress
from flower_privdec.scenario import load_scenario
from flower_privdec.training_loop import private
from flower_privdec.training_loop.private_loop import NoisedSteps

SCENARIO = """\
name: planted
n_peers: 4
rounds: 3
data: {{dataset: npz, root: {root}, batch: {{sampling: poisson, size: 4}}, partition: {{kind: iid}}}}
model: {{name: softmax}}
algorithm: {algorithm}
privacy: {{epsilon: 3.0, delta: 1.0e-3}}
evaluation: {{every: 1}}
compute: {{dtype: float64, generator: portable, workers: {workers}}}
network: {{mode: synchronous, links: local, deadline: {long}, final_mixing: 0}}
"""
STUDY = """\
name: planted
title: Planted
paper: none
base: ../scenario.yaml
sizes: {small: {seeds: [1, 2]}}
parts:
  - name: main
    title: Budgets
    claim: More is better.
    axes: {epsilon: {title: ε, key: privacy.epsilon, values: [1, 3]}}
    figures: [{kind: curves, by: epsilon, title: Curves}]
    checks: [{kind: ordered, axis: epsilon}]
"""
PLANTED = 4711.0815
ALGORITHMS = {  # rows that other peers may see, a table, a personal model
    "privsgp": "{name: privsgp, learning_rate: 0.5}",
    "privsgp-vr": "{name: privsgp-vr, learning_rate: 0.1}",
    "feddeper": "{name: feddeper, learning_rate: 0.1, rho: 0.0, local_steps: 2}",
}
PRIVATE_FILES = re.compile(r"checkpoint|rows|\.npz$")  # which stay with a peer
CLOCK = re.compile(
    rb"[a-z_/]*second[a-z_]*\W{1,5}[0-9.e-]+|[0-9.,]+ ?m?s\b|[0-9.,]+ peer steps"
    rb"|[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{5} UTC|\b[0-9a-f]{40}(?:-dirty)?\b"  # a page's date, the checkout's commit
    rb'|"known": \{(?:[^{}]*\{[^{}]*\})*[^{}]*\}'  # how often each neighbour was asked
    rb'|"inputs": \{[^}]*\}|"files": \{[^}]*\}'  # a cell's: times of files, digests of others here
    # A ledger's lines pay for as many steps as were taken in a while.
    rb'|[0-9]+ lines|"head": \[[^]]*\]'
    rb"|[0-9,]+ payments?, verified; last line [0-9a-f]+"
)

COMMANDS = ("engine", "workers", "interrupted", "study")
# With one algorithm, since the engine's plots take seconds, or with none.
ONE = ("engine", "interrupted", "Python", "study", "private()", "PeerMod")
SEARCHED = re.compile(r"every byte|\.jsonl$")  # and not compared: counters of calls, keys, how many steps a line pays

Outputs = dict[str, bytes]


def data(planted: bool) -> dict[str, np.ndarray]:
    """Return one of two data sets with the same test set."""
    draws = np.random.default_rng(7)
    x_test, y_test = draws.normal(size=(12, 5)), np.arange(12) % 3
    x, y = draws.normal(size=(48, 5)), np.arange(48) % 3
    if planted:
        x, y = -3 * x[::-1] + 1, (y + 1) % 3
        x[:, 2] = PLANTED
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


@contextmanager
def blank_releases() -> Iterator[None]:
    """Let each release be its noise alone, and let keys depend on no data."""
    release = Cohort.release_rows_
    gradients = NoisedSteps._gradients

    def blank(cohort: Cohort, request: StepRequest) -> None:
        estimate = request.estimate

        def thrown_away(cohort: Cohort, step: PrivateStep) -> None:
            before = {name: step.sums[name].clone() for name in step.noise_std}
            estimate(cohort, step)
            for name, rows in before.items():
                step.sums[name].copy_(rows)

        if estimate is not no_examples:
            request = replace(request, estimate=thrown_away)
        release(cohort, request)

    def blank_gradients(steps: NoisedSteps, drawn: Any) -> dict[str, Any]:
        drawn.total = None
        return gradients(steps, drawn)

    def same_prints(examples: object, peers: np.ndarray) -> dict[int, bytes]:
        return {peer: bytes([peer]) * 32 for peer in peers.tolist()}

    with (
        patch.object(Cohort, "release_rows_", blank),
        patch.object(NoisedSteps, "_gradients", blank_gradients),
        patch.object(run_name, "fingerprints", same_prints),
    ):
        yield


def files(folder: Path) -> Outputs:
    """Return the files below a folder, but for those that stay with a peer."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(name): path.read_bytes()
        for path in paths
        if not PRIVATE_FILES.search((name := path.relative_to(folder)).name)
    }


# --- runtimes: run a scenario in a folder, and return what others see ---


def engine(scenario: Path, folder: Path) -> Outputs:
    """The command with its plots, its reports, and the ledger's."""
    assert privdec("run", scenario, "--out", folder / "run") == 0
    for form in ("html", "csv", "tex"):
        assert privdec("report", folder / "run", "--out", folder / f"report.{form}") == 0
    assert privdec("ledger", folder / "run", "--delta", 1e-3) == 0
    table = folder / "report.csv"
    rows = [row | {"wall_seconds": ""} for row in csv.DictReader(table.read_text().splitlines())]
    table.write_text("\n".join(map(str, rows)))
    return files(folder)


def workers(scenario: Path, folder: Path) -> Outputs:
    """Two processes; without plots, which are drawn from what is compared here."""
    with smallest_blocks(), patch.object(plots, "save_run_plots"):
        assert privdec("run", scenario, "--out", folder / "run") == 0
    return files(folder)


def interrupted(scenario: Path, folder: Path) -> Outputs:
    """Ctrl-C after the second evaluation, and what is said of what is there."""

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise KeyboardInterrupt

    with patch.object(progress, "_plain_lines", lambda *_: stop), patch.object(plots, "save_run_plots"):
        assert privdec("run", scenario, "--out", folder / "run") == 130
    assert privdec("report", folder / "run", "--out", folder / "report.tex") == 0
    return files(folder)


def from_python(scenario: Path, folder: Path) -> Outputs:
    """The functions for Python: the result, and what a callback hands to TensorBoard, Weights & Biases or MLflow."""
    lines = []
    with progress.progress(load_scenario(scenario), folder, tensorboard=True) as tensorboard:

        def note(record: dict[str, Any]) -> None:
            tensorboard(record)
            lines.append(f"{record} {fp.scalars(record)}")

        result = fp.run(scenario, out=folder / "run", on_evaluation=note)
    outputs = files(folder)
    events = [name for name in outputs if "tfevents" in name]
    written = b"".join(outputs.pop(name) for name in events)
    assert b"accuracy" in written
    lines += [str(result), result._repr_html_(), str(result.privacy), result.frame().drop(columns="seconds").to_csv()]
    return outputs | {"lines": "\n".join(lines).encode(), "every byte for TensorBoard": written}


def study(scenario: Path, folder: Path) -> Outputs:
    """A study of two seeds: its cells, tables, figures and page."""
    (folder / "study.yaml").write_text(STUDY)
    with chdir(folder):
        assert privdec("study", "study.yaml", "--jobs", 1, "--out", "published") == 0
    return files(folder)


def network(scenario: Path, folder: Path) -> Outputs:
    """Peers of a network that call each other's functions: all that they send, their status and their files."""
    rows: set[str] = set()
    sent: list[bytes] = []
    encode, call = FrameCodec.encode, MemoryConnection.call

    def noted(codec: FrameCodec, message: Any) -> Any:
        if isinstance(message, RowMessage):
            place = message.sender, message.receiver, message.round_index, message.at
            rows.update(f"{place} {name} {row.tolist()}" for name, row in message.values.items())
        return encode(codec, message)

    def tapped(connection: MemoryConnection, content: Any, seconds: float) -> memoryview:
        sent.append(b"".join(map(bytes, content)))
        return call(connection, content, seconds)

    loaded = load_scenario(scenario)
    peers = [running_peer(loaded, device) for device in devices(loaded, folder, memory=True)]
    with (
        patch.object(MemoryConnection, "call", tapped),
        patch.object(FrameCodec, "encode", noted),
        running(peers) as futures,
    ):
        if next(as_completed(futures)).exception() is not None:
            for peer in peers:
                peer.stop()
    statuses = [{key: value for key, value in peer.status().items() if "bytes" not in key} for peer in peers]
    seen = {"rows": "\n".join(sorted(rows)), "status": json.dumps(statuses)}
    return {"every byte": b"".join(sent), **{name: text.encode() for name, text in seen.items()}, **files(folder)}


def flower(host: str) -> Callable[[Path, Path], Outputs]:
    """Nodes of a scenario under Flower: each answer, and what the server writes."""

    def run_there(scenario: Path, folder: Path) -> Outputs:
        pytest.importorskip("flwr")
        from flower_runs import HOSTS
        from shards_in_turn import in_turn

        from flower_privdec.flower.apps import client_app as clients
        from flower_privdec.flower.launch.local_grid import LocalGrid
        from tools.battery.together_grid import TogetherGrid

        clients._build.cache_clear()
        answers, strategy = [], HOSTS[host][0]

        class Tapped(TogetherGrid if host == "sharded" else LocalGrid):
            def _deliver(self, message: Any) -> Any:
                reply = super()._deliver(message)
                answers.append(reply_bytes(reply))
                return reply

        with in_turn(), suppress(PrivdecError):
            grid = Tapped(clients.client_app(), HOSTS[host][1], folder=folder / "nodes")
            strategy(load_scenario(scenario), folder / "run").start(grid)
        return {"answers": b"\n".join(sorted(answers)), **files(folder / "run")}

    return run_there


def reply_bytes(reply: Any) -> bytes:
    """Return all that a reply of a node says, but for fresh keys and the challenges that ledgers' reports answer."""
    if reply.has_error():
        return str(reply.error.reason).encode()
    parts = []
    for name, record in sorted(reply.content.items()):
        for key, value in sorted(record.items()):
            for inner, content in opened(key, value):
                if inner != "key" and not inner.startswith("ledger of"):
                    parts.append(f"{name}/{inner}/".encode() + content)
    return b"\n".join(parts)


def opened(key: str, value: Any) -> list[tuple[str, bytes]]:
    """Return what a value of a message says, by name: a peer's fields and small frames travel as one value each."""
    from flwr.app import ArrayRecord

    from flower_privdec.flower.mods.peer_messages import FIELDS, SMALL_FRAMES, unpack_bytes

    if key == FIELDS:
        return [(name, repr(said).encode()) for name, said in sorted(json.loads(value.decode()).items())]
    if key == SMALL_FRAMES:
        return sorted(unpack_bytes(ArrayRecord({key: value})))
    shown = value.data if hasattr(value, "data") else repr(value).encode()
    return [(key, shown)]


def loop(scenario: Path, folder: Path) -> Outputs:
    """A training loop of one's own under private(): the model, the optimizer, the lines, the ledger."""
    arrays = np.load(load_scenario(scenario).data.root)
    x, y = (torch.from_numpy(arrays[name].copy()) for name in ("x_train", "y_train"))
    torch.manual_seed(1)
    model, lines = nn.Linear(5, 3).double(), []
    given = model, torch.optim.Adam(model.parameters()), DataLoader(TensorDataset(x, y), 6), nn.CrossEntropyLoss()
    options: dict[str, Any] = {"ledger": folder / "ledger.jsonl", "report": lines.append, "insecure_seed": 5}
    wrapped = private(*given, delta=1e-3, noise_multiplier=1.0, **options)
    net, optimizer, loader, criterion = wrapped
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(net(features), labels).backward()
            optimizer.step()
    torch.save([model.state_dict(), optimizer.state_dict()], folder / "model")
    return {"lines": "\n".join([*lines, str(wrapped)]).encode(), **files(folder)}


def app(scenario: Path, folder: Path) -> Outputs:
    """A Flower app whose clients are peers by PeerMod: each reply, the ServerApp's words, and its reports."""
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from routing_peers import first, zeros

    from flower_privdec.flower import LocalGrid, PeerMod, PushSum
    from flower_privdec.flower.mods import request_handler
    from flower_privdec.peer import app_updates

    arrays, answers = np.load(load_scenario(scenario).data.root)["x_train"], []
    client = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier=2.0)])

    @client.train()
    @client.evaluate()
    def both(message: Message, context: Context) -> Message:
        x = arrays[context.node_config["partition-id"] :: 4]
        read(x)
        moved = first(message.content["arrays"]) + x.mean(0)
        metrics = MetricRecord({"num-examples": int((x > 0).sum()), "loss": float(np.square(x).mean())})
        return Message(RecordDict({"arrays": ArrayRecord([moved]), "metrics": metrics}), reply_to=message)

    class Tapped(LocalGrid):
        def _deliver(self, message: Any) -> Any:
            reply = super()._deliver(message)
            answers.append(reply_bytes(reply))
            return reply

    strategy, result = PushSum(name="planted"), b""
    with ExitStack() as blank, suppress(PrivdecError):
        enter = blank.enter_context
        enter(patch.object(app_updates, "protected", lambda clip, noise, update: np.full_like(update, noise * clip)))
        enter(patch.object(request_handler, "new_incarnation", lambda: 1))
        enter(patch.object(secrets, "randbits", lambda bits: 1))
        result = first(strategy.start(Tapped(client, 4, folder=folder / "nodes"), zeros(5), 3).arrays).tobytes()
    return {"answers": b"\n".join(answers), "reports": repr(sorted(strategy.reports)).encode(), "result": result}


def read(x: np.ndarray) -> None:
    """Stand for a user's code, or a library, that reads examples."""


def fail_on(x: np.ndarray) -> None:
    """Raise an error that has an example in its words."""
    if np.isclose(x, PLANTED).any():
        raise ValueError(f"an example has the value {PLANTED}")


RUNTIMES: dict[str, Callable[[Path, Path], Outputs]] = {
    "engine": engine,
    "workers": workers,
    "interrupted": interrupted,
    "Python": from_python,
    "study": study,
    "network": network,
    "relay": flower("relay"),
    "sharded": flower("sharded"),
    "private()": loop,
    "PeerMod": app,
}


def outputs_of(
    runtime: str, algorithm: str, place: Path, planted: bool, caplog: Any, capfd: Any, settings: str = ""
) -> Outputs:
    """Run on one of the data sets, and return all that leaves, with the log and what a terminal shows."""
    place.mkdir(exist_ok=True)
    (place / "run").exists() and shutil.rmtree(place / "run")
    np.savez(place / "own.npz", **data(planted))
    workers = 2 if runtime == "workers" else 1
    text = SCENARIO.format(root=place / "own.npz", algorithm=ALGORITHMS[algorithm], workers=workers, long=LONG)
    (place / "scenario.yaml").write_text(text + settings)
    (place / "run").mkdir()
    caplog.clear()
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG, "flower_privdec"), caplog.at_level(logging.DEBUG, "flwr"):
        outputs = RUNTIMES[runtime](place / "scenario.yaml", place / "run")
    terminal = "".join(capfd.readouterr()).encode()
    shown = "terminal" if runtime in COMMANDS else "every byte of the terminal"  # with other libraries' lines
    return outputs | {shown: terminal, "log": "\n".join(caplog.messages).encode()}


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("runtime", "algorithm"),
    [(runtime, name) for runtime in RUNTIMES for name in ALGORITHMS if name == "privsgp" or runtime not in ONE],
)
def test_no_runtime_writes_prints_or_sends_an_example(
    runtime: str, algorithm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with blank_releases():
        one, other = (outputs_of(runtime, algorithm, tmp_path, planted, caplog, capfd) for planted in (False, True))
    assert one.keys() == other.keys()
    differences = [difference(name, one[name], other[name]) for name in one if not SEARCHED.search(name)]
    assert not any(differences), [text for text in differences if text]
    assert not shown_in(other)


def difference(name: str, one: bytes, other: bytes) -> str | None:
    """Return where two outputs differ beside the clock's numbers."""
    one, other = (CLOCK.sub(b"", content) for content in (one, other))
    if one == other:
        return None
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{name}: {one[max(0, place - 60) : place + 60]!r} and {other[place - 9 : place + 60]!r}"


def shown_in(outputs: Outputs) -> list[str]:
    """Return which outputs hold the planted value, as bytes or as text."""
    forms = [struct.pack(kind, PLANTED) for kind in ("<d", "<f", ">d", ">f")]
    forms += [b"4711.08", b"4711,08", b"4,711.08", b"4.711e+03"]
    return [name for name, content in outputs.items() if any(form in content for form in forms)]


@pytest.mark.parametrize("runtime", ["network", "relay", "sharded", "PeerMod"])
def test_words_of_an_examples_error_stay_with_its_peer(
    runtime: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log is the node's own: in these tests one process has all of them."""
    gather = PeerData._gather

    def failing(data: PeerData, rows: np.ndarray, local: LocalBatch) -> Batch:
        batch = gather(data, rows, local)
        fail_on(batch.x.numpy())
        return batch

    monkeypatch.setattr(PeerData, "_gather", failing)
    monkeypatch.setattr(sys.modules[__name__], "read", fail_on)
    outputs = outputs_of(runtime, "privsgp", tmp_path, True, caplog, capfd)
    assert "4711.08" in caplog.text or runtime == "network"  # whose caller gets the error
    assert not shown_in({name: content for name, content in outputs.items() if "terminal" not in name})
