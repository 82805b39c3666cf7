"""`privdec run --runtime flower`: submit a run to a SuperLink of its own, follow it, and clean up."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flower_privdec import __version__
from flower_privdec.catalogue import FLOWER_MODES
from flower_privdec.engine.recorder import OnMetrics, Recorder
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.flower.launch.submitting import submit
from flower_privdec.flower.launch.superlink import INSTALL, LocalSuperLink
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
