"""One row of the battery: its files, its scenario in the forms that a user may write it in, and its runs."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from safetensors.torch import save_file
from torch import Tensor

from flower_privdec.api.scenarios import make_scenario
from flower_privdec.common.errors import RunError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.recorder import with_more_rounds
from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import CohortRun, Relay, Sharded
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.tls import Authority, identities
from flower_privdec.network.transport.transport import MemoryNetwork
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.scenario import Scenario, load_scenario
from flower_privdec.scenario.loading import PATHS, put
from tools.battery import parts
from tools.battery.levels import FACTORS, LEVELS, NAMES, Facts, applies
from tools.battery.together_grid import TogetherGrid, parsing_in_turn

N_PEERS, ROUNDS, STOPS_AT = 4, 4, 2
HOSTS: dict[str, tuple[Callable[..., Any], int]] = {
    "cohort": (CohortRun, 1),
    "relay": (Relay, 4),
    "sharded": (Sharded, 2),
}
ODD = "files of ward é=1, [x]"
Data = dict[str, Any]

BASE: Data = {
    "name": "row",
    "seed": 3,
    "n_peers": N_PEERS,
    "rounds": ROUNDS,
    "data": {"dataset": "digits", "batch": {"sampling": "poisson", "size": 5}},
    "model": {},
    "algorithm": {},
    "privacy": {"epsilon": 3.0, "delta": 1e-3},
    "evaluation": {"every": STOPS_AT},
    "compute": {"dtype": "float64", "generator": "portable"},
}


def written(value: Any) -> str:
    """Return a value as `--set` takes it."""
    text: str = yaml.dump(
        value, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=True, width=10**6, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _yaml(data: Data) -> str:
    text: str = yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return text


@dataclass
class Case:
    """A row that is written into a folder.

    Attributes:
        names: of each factor's level.
        folder: the row's own.
        number: of the row, which its module's name has.
        changed: settings laid over those of the levels: remedies, and what a law varies.
        removed: keys that remedies removed.
        is_varied: whether it differs from the row that was written.
    """

    names: Mapping[str, str]
    folder: Path
    number: int = 0
    changed: Data = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    is_varied: bool = False

    @classmethod
    def of(cls, row: tuple[int, ...], folder: Path, number: int = 0) -> Case:
        """Return the case of an array's row."""
        return cls({name: LEVELS[name][level] for name, level in zip(NAMES, row, strict=True)}, folder, number)

    @property
    def meaning(self) -> dict[str, str]:
        """Return the levels that mean something beside the others."""
        row = {NAMES.index(name): LEVELS[name].index(level) for name, level in self.names.items()}
        return {NAMES[factor]: self.names[NAMES[factor]] for factor in applies(row)}

    def option(self, name: str, default: Any = None) -> Any:
        """Return how the row is to be written or run."""
        for factor, level in self.meaning.items():
            if f"@{name}" in FACTORS[factor][level]:
                return FACTORS[factor][level][f"@{name}"]
        return default

    @property
    def module(self) -> str:
        """Return the name of the module that the row writes."""
        return f"battery_row_{self.number}"

    def settings(self) -> Data:
        """Return all settings of the scenario by dotted keys, in the order in which they are laid over each other."""
        meaning = self.meaning
        n_peers = 1 if meaning.get("algorithm") == "dp-sgd" else N_PEERS
        facts = Facts(meaning | {"data": self.names["data"]}, n_peers)
        settings: Data = {}
        for factor in NAMES:
            level = meaning.get(factor, LEVELS[factor][0])
            for key, value in FACTORS[factor][level].items():
                if key.startswith("@"):
                    continue
                chosen = value(facts) if callable(value) else value
                settings[key] = _named(chosen, self.module)
        return settings

    def data(self) -> Data:
        """Return the scenario's sections, with relative paths and with objects."""
        data: Data = json.loads(json.dumps(BASE))
        for key, value in self.settings().items():
            put(data, key.split("."), _copied(value))
        for key in self.removed:
            _remove(data, key.split("."))
        for key, value in self.changed.items():
            put(data, key.split("."), _copied(value))
        kind = self.option("data")
        if kind is not None:
            data["data"] |= _arrays(kind, data["n_peers"])
            if data["privacy"] != "none" and data["privacy"].get("ledger"):
                data["data"]["source"] = "ward"
        return data

    @property
    def has_objects(self) -> bool:
        """Whether the scenario holds Python objects, so that no file can have it."""
        return any(FACTORS[factor][level].get("@python") for factor, level in self.meaning.items())

    # --- files ---

    def write(self, *, in_yaml: bool = True) -> None:
        """Write all files of the row.

        Args:
            in_yaml: whether the scenario is written too.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.option("place", "beside")
        files = self.folder / {"odd": ODD, "linked": "real"}.get(place, "")
        files.mkdir(exist_ok=True)
        text = str(self.data())
        for name, (write, seed, count) in FILES.items():
            if f"'{name}'" in text:
                write(files / name, seed, count)
                if place == "linked":
                    for path in files.iterdir():
                        if not (self.folder / path.name).exists():
                            (self.folder / path.name).symlink_to(path)
        if self.module in text:
            self._write_module(self.folder)
        if in_yaml and not self.has_objects:
            (self.folder / "row.yaml").write_text(_yaml(self.placed()))
            (self.folder / "base.yaml").write_text(_yaml(BASE))

    def _write_module(self, folder: Path) -> None:
        (folder / "read.json").write_text(json.dumps({"factor": 0.5}))
        (folder / f"{self.module}.py").write_text(parts.WRITTEN.format(read="read.json"))

    def path_of(self, name: str) -> Path:
        """Return where a file of the row lies."""
        place = self.option("place", "beside")
        return self.folder / {"odd": ODD, "linked": "real"}.get(place, "") / name

    def placed(self) -> Data:
        """Return the scenario's sections with paths as the row's place has them."""
        data, place = self.data(), self.option("place", "beside")
        for path in PATHS:
            section: Any = data
            for part in path[:-1]:
                section = section.get(part) if isinstance(section, dict) else None
            if not isinstance(section, dict) or not isinstance(section.get(path[-1]), str):
                continue
            value = section[path[-1]]
            if self.option("data") == "arrays-per-peer" and path == ("data", "test"):
                continue
            if place == "absolute":
                section[path[-1]] = str(self.folder / value)
            elif place == "odd" and path[-1] != "ledger":
                section[path[-1]] = f"{ODD}/{value}"
        return data

    # --- the scenario ---

    def scenario(self, form: str | None = None) -> Scenario:
        """Return the scenario as a user would write it: in a file, in settings over a file, or in Python.

        Args:
            form: `file`, `settings` of whole sections, `leaves` (settings of one key each), or `python`; by default
                that of the row.

        Raises:
            ScenarioError: it is refused.
        """
        form = form or self.option("written", "file")
        data = self.placed()
        if self.has_objects or form == "python":
            return make_scenario(data)
        if form == "file" and not self.is_varied:
            return load_scenario(self.folder / "row.yaml")
        if form == "file":
            (self.folder / "varied.yaml").write_text(_yaml(data))
            return load_scenario(self.folder / "varied.yaml")
        if form == "leaves":
            settings = _leaves(data, BASE)
        else:
            settings = [f"{key}={written(value)}" for key, value in data.items() if value != BASE.get(key)]
        return load_scenario(self.folder / "base.yaml", settings)

    def other(self, **changed: Any) -> Case:
        """Return the same row with other settings, by dotted key (`__` for a dot)."""
        more = {key.replace("__", "."): value for key, value in changed.items()}
        return Case(self.names, self.folder, self.number, {**self.changed, **more}, set(self.removed), is_varied=True)

    @contextmanager
    def entered(self, *, at_home: bool = False) -> Iterator[None]:
        """Run where the row's command would run, and import its module from there.

        Args:
            at_home: run in the row's folder, wherever its command would run.
        """
        before = Path.cwd()
        elsewhere = self.option("place") == "elsewhere" and self.option("written", "file") == "file" and not at_home
        where = self.folder / "elsewhere" if elsewhere and not self.has_objects else self.folder
        where.mkdir(exist_ok=True)
        os.chdir(where)
        sys.path.insert(0, str(self.folder))
        keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            yield
        finally:
            sys.dont_write_bytecode = keep
            sys.path.remove(str(self.folder))
            os.chdir(before)
            self.forget()

    def forget(self) -> None:
        """Let the next import read the row's module again, as a new process would."""
        sys.modules.pop(self.module, None)
        importlib.invalidate_caches()


def _leaves(data: Data, base: Data, before: str = "") -> list[str]:
    """Return settings of one key each that make a base into some data."""
    settings = []
    for key, value in data.items():
        path = f"{before}{key}"
        under = base.get(key)
        if value == under:
            continue
        # What a section of the base has beyond this one could not be taken away key by key.
        if (
            value
            and isinstance(value, dict)
            and isinstance(under, dict | None)
            and not (under or {}).keys() - value.keys()
        ):
            settings += _leaves(value, under or {}, f"{path}.")
        else:
            settings.append(f"{path}={written(value)}")
    return settings


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def _named(value: Any, module: str) -> Any:
    """Return a level's value with the name of the row's module."""
    if isinstance(value, str):
        return value.replace("@module", module)
    if isinstance(value, dict):
        return {key: _named(part, module) for key, part in value.items()}
    if isinstance(value, list):
        return [_named(part, module) for part in value]
    return value


def _remove(data: Data, path: list[str]) -> None:
    section: Any = data
    for part in path[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(path[-1], None)


# --- data ---


@cache
def _points(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    y = np.arange(count) % parts.CLASSES
    x = (generator.normal(size=(count, parts.FEATURES)) * 0.6 + y[:, None]).astype(np.float32)
    return x, y


def _arrays(kind: str, n_peers: int) -> Data:
    test = _points(2, 42)
    if kind == "arrays":
        return {"train": _points(1, 80), "test": test, "dataset": None}
    return {"train": [_points(10 + peer, 18 + peer) for peer in range(n_peers)], "test": test, "dataset": None}


def _write_npz(path: Path, seed: int, count: int) -> None:
    x, y = _points(seed, count)
    x_test, y_test = _points(2, 42)
    np.savez(path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def _columns(seed: int, count: int) -> dict[str, list[Any]]:
    generator = np.random.default_rng(seed)
    age = generator.integers(20, 90, count)
    dose = generator.random(count).round(3)
    ward = [("A", "B")[one % 2] for one in range(count)]
    ill = [("no", "yes")[int(value > 55)] for value in age]
    return {
        **{"age": age.tolist(), "dose": dose.tolist(), "ward": ward, "ill": ill},
        "weight": (50 + age / 3 + 10 * dose).round(2).tolist(),
    }


def _write_csv(path: Path, seed: int, count: int) -> None:
    columns = _columns(seed, count)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


def _write_parquet(path: Path, seed: int, count: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table(_columns(seed, count)), path)


def _write_svmlight(path: Path, seed: int, count: int) -> None:
    x, y = _points(seed, count)
    lines = [
        f"{label} " + " ".join(f"{at + 1}:{value:.4f}" for at, value in enumerate(row))
        for row, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


def _write_images(folder: Path, seed: int, count: int) -> None:
    from PIL import Image

    generator = np.random.default_rng(seed)
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count // 2):
            pixels = generator.integers(0, 128, (6, 6, 3)) + 100 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


def _write_peers(path: Path, _seed: int, _count: int) -> None:
    for peer in range(N_PEERS):
        _write_npz(path.with_name(f"peer-{peer}.npz"), 10 + peer, 18 + peer)


def _writing(text: str) -> Callable[[Path, int, int], None]:
    def write(path: Path, _seed: int, _count: int) -> None:
        path.write_text(text)

    return write


RING = "0 1\n1 2\n2 3\n3 0\n"
FILES: dict[str, tuple[Callable[[Path, int, int], None], int, int]] = {  # by name: what writes it, a seed, how many
    "rows.npz": (_write_npz, 1, 80),
    "peer-{peer}.npz": (_write_peers, 0, 0),
    "rows.csv": (_write_csv, 1, 80),
    "test.csv": (_write_csv, 2, 42),
    "rows.parquet": (_write_parquet, 1, 80),
    "test.parquet": (_write_parquet, 2, 42),
    "rows.svm": (_write_svmlight, 1, 80),
    "test.svm": (_write_svmlight, 2, 42),
    "images": (_write_images, 1, 80),
    "images-test": (_write_images, 2, 40),
    "edges.txt": (_writing(RING), 0, 0),
    "arcs.txt": (_writing(RING + "0 2\n"), 0, 0),
    "secrets.txt": (_writing(RING + "0 2\n"), 0, 0),
}


# --- runs ---


class Killed(BaseException):
    """What nothing catches: the process is gone."""


def run_row(
    experiment: Experiment, out: Path, runtime: str, *, resume: bool = False, ends: str = ""
) -> dict[str, Any] | None:
    """Run a scenario to its end, or to where it is stopped or killed.

    Args:
        ends: "", or `stopped` at an evaluation, or `killed` in the round after it.

    Returns:
        The summary; None of a run that was killed.
    """
    if runtime == "network":
        return _run_on_network(experiment, out)
    if runtime in HOSTS:
        return _run_under_flower(experiment.scenario, out, runtime, resume, ends)
    # One process in place of as many as pay off: what other processes draw, nobody here sees.
    workers = 2 if runtime == "workers" else 1

    def on_metrics(metrics: dict[str, Any]) -> bool:
        return ends == "stopped" and metrics["round"] == STOPS_AT

    def on_round(round_index: int) -> None:
        if ends == "killed" and round_index == STOPS_AT + 1:
            raise Killed

    try:
        return run(
            experiment,
            out,
            resume=resume,
            workers=workers,
            on_metrics=on_metrics,
            on_round=on_round if ends == "killed" else None,
        )
    except Killed:
        return None


def _run_under_flower(scenario: Scenario, out: Path, host: str, resume: bool, ends: str) -> dict[str, Any] | None:
    strategy, nodes = HOSTS[host]
    grid = TogetherGrid if host == "sharded" else LocalGrid
    app = client_app()
    if ends:
        # A relay answers once for each of 4 peers and exchange; without exchanges, only at evaluations.
        messages = {"cohort": 1, "relay": 12, "sharded": 2}[host]
        if scenario.algorithm.name in ("local", "dp-sgd"):
            messages = 1
        app = _dying(host, messages)
    try:
        strategy(scenario, out, resume=resume).start(grid(app, nodes, folder=out.with_name(out.name + "-nodes")))
    except RunError as error:
        if ends and "it was killed" in str(error):
            return None
        raise
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _run_on_network(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Run all peers as threads that call each other, and return what they state as a summary has it."""
    scenario, network = experiment.scenario, MemoryNetwork()
    authority = Authority.create(scenario.name)
    names = identities(scenario)
    insecure = experiment.own.unsalted is None  # with code of a user's own, peers draw from their operating systems
    peers = []
    for number in range(scenario.n_peers):
        device = PeerDevice(
            number,
            out / f"peer-{number}",
            authority.issue(names[number]),
            insecure_seeds=insecure,
            transport=network.transport(number),
        )
        peers.append(running_peer(scenario, device))
    try:
        with parsing_in_turn(), ThreadPoolExecutor(len(peers)) as pool:
            stated = list(pool.map(_to_its_end, peers))
    finally:
        for peer in peers:
            peer.close()
    save_file(_stacked([rows for _, rows in stated]), out / "checkpoint")
    (out / "checkpoint").chmod(0o600)
    private = scenario.private
    deltas: Any = 0.0 if private is None else private.delta
    privacy = []
    for number, (status, _) in enumerate(stated):
        delta = deltas[number] if isinstance(deltas, tuple) else deltas
        row = {"peer": number, "epsilon": status["epsilon"], "delta": delta}
        if status["colluding"] is not None:
            row |= {name: status[name] for name in ("colluding", "epsilon_if_all_collude")}
        privacy.append(row)
    return {"privacy": privacy}


def _stacked(of_peers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of all peers together; tables that have as many entries as a peer has examples are left out."""
    stacked = {}
    for name in of_peers[0]:
        rows = [of_peer[name] for of_peer in of_peers]
        if len({row.shape for row in rows}) == 1:
            stacked[name] = torch.cat(rows)
    return stacked


def _to_its_end(peer: RunningPeer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    driver = Driver(peer)
    try:
        driver.open()
        driver.run()
        return peer.trainer.status(peer.state), peer.state.rows
    finally:
        driver.close()


def _dying(host: str, messages: int) -> ClientApp:
    """Return a ClientApp that answers as many train messages, and fails at the next."""
    good = client_app()
    app = ClientApp()
    left = [messages]

    @app.train(host)
    def train(message: Message, context: Context) -> Message:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("it was killed")
        reply: Message = good(message, context)
        return reply

    app.query("partition")(good)
    app.query("pairs")(good)
    return app


def more_rounds(case: Case, scenario: Scenario, out: Path) -> Scenario:
    """Return the scenario with more rounds, as `--resume` makes it."""
    private = scenario.private
    changed: Data = {"rounds": ROUNDS + 2}
    if private is not None and private.epsilon is not None:
        twice = private.epsilon
        changed["privacy.epsilon"] = [2 * one for one in twice] if isinstance(twice, tuple) else 2 * twice
    return with_more_rounds(
        case.other(**{key.replace(".", "__"): value for key, value in changed.items()}).scenario(), out
    )
