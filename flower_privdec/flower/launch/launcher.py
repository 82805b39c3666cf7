"""`privdec run --runtime flower`: submit a run to a SuperLink of its own, follow it, and clean up."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flower_privdec import __version__
from flower_privdec.catalogue import FLOWER_MODES
from flower_privdec.common.files import FolderLock
from flower_privdec.engine.recorder import OnMetrics, Recorder
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.flower.launch.local_grid import read_app
from flower_privdec.flower.launch.superlink import INSTALL, LocalSuperLink, submit, tail
from flower_privdec.flower.node_settings import FOLDER
from flower_privdec.scenario import Scenario, to_yaml

PYPROJECT = f"""\
[project]
name = "privdec-run"
version = "{__version__}"
description = "Runs a scenario with the installed flower_privdec"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "privdec"

[tool.flwr.app.components]
serverapp = "privdec_run.server_app:app"
clientapp = "privdec_run.client_app:app"

[tool.flwr.app.config]
scenario = ""
out = ""
mode = "cohort"
base = ""
resume = false
"""

APP, RUN_CONFIG = "privdec-run", "run.toml"
MODULES = {
    "__init__.py": "",
    "server_app.py": "from pathlib import Path\n\nfrom flower_privdec.flower.apps.server_app import server_app\n\n"
    "app = server_app(Path.cwd())\n",
    "client_app.py": "from flower_privdec.flower.apps.client_app import client_app\n\napp = client_app()\n",
}


def flower_run(
    scenario: Scenario | Experiment,
    out: Path,
    *,
    mode: str = "cohort",
    n_supernodes: int | None = None,
    cpus: int = 1,
    gpus: float = 0.0,
    resume: bool = False,
    on_metrics: OnMetrics | None = None,
) -> dict[str, Any]:
    """Run a scenario by `flwr run` in Flower's simulation, to its summary.

    Args:
        scenario: what to train; an experiment spares building it a second time.
        out: the run's folder.
        mode: how SuperNodes host the peers: "cohort", "sharded" or "relay", see `catalogue.FLOWER_MODES`.
        n_supernodes: how many SuperNodes; one in cohort mode, by default one a peer in relay mode, and in sharded mode
            as many as there are CPUs for.
        cpus, gpus: what each ClientApp gets; where the scenario computes on a GPU and gpus is 0, the
            ClientApps share one.
        resume: go on from the checkpoint in `out`.
        on_metrics: called with each evaluation's metrics.

    Returns:
        The summary, as written to summary.json.

    Raises:
        ScenarioError: when the input is wrong, or Flower's simulation is not installed; nothing was started or written.
        RunError: when the run failed.
    """
    if find_spec("ray") is None:
        raise ScenarioError(f"Flower's simulation needs ray, which is not installed: {INSTALL}")
    experiment = scenario if isinstance(scenario, Experiment) else Experiment.build(scenario)
    nodes = _check_nodes(experiment, mode, n_supernodes, cpus)
    gpus = _check_resources(experiment, nodes, cpus, gpus)
    own = experiment.own if mode == "cohort" else None  # elsewhere the nodes keep what is the peers' own
    Recorder(experiment, own, out, "flower", resume)  # refuses a folder that holds another run
    resources = {"num-supernodes": nodes, "client-resources-num-cpus": cpus, "client-resources-num-gpus": gpus}
    config = {"out": str(out.absolute()), "mode": mode, "base": str(Path.cwd()), "resume": resume}
    with LocalSuperLink() as superlink:
        _write_app(superlink.folder, experiment.scenario, config)
        progress = _Progress(out / "metrics.jsonl", resume, on_metrics)
        submit(superlink, APP, resources, [RUN_CONFIG], out / "flower.log", lambda _: progress.poll())
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _check_nodes(experiment: Experiment, mode: str, n_supernodes: int | None, cpus: int) -> int:
    """Return how many SuperNodes to simulate."""
    n_peers, places = experiment.scenario.n_peers, max(1, (os.cpu_count() or 1) // max(cpus, 1))
    FLOWER_MODES.check(mode, "mode")
    if n_supernodes is None:
        return {"cohort": 1, "sharded": min(places, n_peers), "relay": n_peers}[mode]
    if mode == "cohort" and n_supernodes > 1:
        raise ScenarioError(
            f"n_supernodes={n_supernodes} must be 1 in mode cohort, where one SuperNode hosts all peers: "
            "choose mode sharded or relay, or leave it out"
        )
    if not 1 <= n_supernodes <= n_peers:
        raise ScenarioError(
            f"n_supernodes={n_supernodes} must be 1 to n_peers={n_peers}: a SuperNode hosts at least one peer"
        )
    if mode == "sharded" and n_supernodes > places:
        raise ScenarioError(
            f"n_supernodes={n_supernodes} with cpus={cpus} each must be at most {places} in mode sharded, where all "
            "run at the same time: give fewer, or choose mode relay"
        )
    return n_supernodes


def _check_resources(experiment: Experiment, nodes: int, cpus: int, gpus: float) -> float:
    """Return how much of a GPU each ClientApp gets; refuse what this machine does not have."""
    check_machine(cpus, gpus)
    shared = gpus == 0 and experiment.device.type == "cuda"
    return 1 / nodes if shared else float(gpus)


def check_machine(cpus: int, gpus: float) -> None:
    """Refuse resources for a ClientApp that this machine does not have.

    Raises:
        ScenarioError: naming them.
    """
    have = os.cpu_count() or 1
    if not 1 <= cpus <= have:
        raise ScenarioError(f"cpus={cpus} must be 1 to {have}, the CPUs of this machine; give fewer")
    if gpus > torch.cuda.device_count():
        raise ScenarioError(
            f"gpus={gpus} must be at most {torch.cuda.device_count()}, the GPUs of this machine; give fewer"
        )


def _write_app(folder: Path, scenario: Scenario, config: dict[str, Any]) -> None:
    """Write a Flower app that only names the installed package's, with its run-config beside it."""
    package = folder / APP / "privdec_run"
    package.mkdir(parents=True)
    (folder / APP / "pyproject.toml").write_text(PYPROJECT)
    for name, text in MODULES.items():
        (package / name).write_text(text)
    (folder / "scenario.yaml").write_text(to_yaml(scenario))
    config = {"scenario": str(folder / "scenario.yaml")} | config
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items()]
    (folder / RUN_CONFIG).write_text("".join(lines))


class _Progress:
    """Passes on each line that metrics.jsonl gains, once."""

    def __init__(self, path: Path, resume: bool, on_metrics: OnMetrics | None) -> None:
        self.path, self.on_metrics = path, on_metrics
        self.seen = {metrics["round"] for metrics in self._read()} if resume else set()

    def _read(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = self.path.read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def poll(self) -> None:
        if self.on_metrics is None:
            return
        for metrics in self._read():
            if metrics["round"] not in self.seen:
                self.seen.add(metrics["round"])
                self.on_metrics(metrics)


ROUND = re.compile(rb"\[ROUND (\d+)/(\d+)\]")  # as Flower's strategies and ours say it
LOG = "flower.log"
OnRound = Callable[[int, int], object]


def run_flower_app(
    app: Path,
    out: Path,
    *,
    n_supernodes: int = 8,
    cpus: int = 1,
    gpus: float = 0.0,
    run_config: Sequence[str] = (),
    on_round: OnRound | None = None,
) -> str:
    """Run a Flower app to its end, in the Python environment of this process.

    Args:
        app: the app's folder; nothing in it is changed.
        out: the folder in which the app's processes run: what they save by a relative path is there afterwards, with
            the log, and the peers' own folders of strategies of this package.
        n_supernodes: how many SuperNodes are simulated.
        cpus, gpus: what each ClientApp gets.
        run_config: laid over the app's own, as KEY=VALUE.
        on_round: called with the round that began and how many there are, where the app's log says so.

    Returns:
        The last lines of the log.

    Raises:
        ScenarioError: the input is wrong, or Flower's simulation is not installed; nothing was started.
        RunError: the run failed.
    """
    if find_spec("ray") is None:
        raise ScenarioError(f"Flower's simulation needs ray, which is not installed: {INSTALL}")
    _check_config(read_app(app)["config"], run_config)
    if n_supernodes < 1:
        raise ScenarioError(f"n_supernodes={n_supernodes} must be >= 1")
    check_machine(cpus, gpus)
    lock, out = FolderLock(out), out.absolute()
    lock.take()
    resources = {"num-supernodes": n_supernodes, "client-resources-num-cpus": cpus, "client-resources-num-gpus": gpus}
    try:
        with LocalSuperLink(out, {FOLDER: str(out / "peers")}) as superlink:
            submit(superlink, str(app.absolute()), resources, run_config, out / LOG, _Rounds(on_round))
    except RunError as error:
        raise RunError(f"{error}\nThe last lines of {out / LOG}:\n{tail(out / LOG)}") from error
    finally:
        lock.release()
    return tail(out / LOG)


def _check_config(known: dict[str, object], given: Sequence[str]) -> None:
    for each in given:
        key, equals, _ = each.partition("=")
        if not equals or key.strip() not in known:
            raise ScenarioError(f"run-config {each!r} must be KEY=VALUE with a key of the app's: {', '.join(known)}")


class _Rounds:
    """Passes on which round a log is in, when that changes."""

    def __init__(self, on_round: OnRound | None) -> None:
        self._on_round, self._last = on_round, (0, 0)

    def __call__(self, log: Path) -> None:
        found = ROUND.findall(log.read_bytes()) if self._on_round and log.exists() else []
        latest = (int(found[-1][0]), int(found[-1][1])) if found else self._last
        if self._on_round and latest != self._last:
            self._last = latest
            self._on_round(*latest)
