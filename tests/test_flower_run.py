"""Real `flwr run`: a SuperLink, Ray and SuperNodes, started and stopped by the tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import flower_privdec as fp
from flower_privdec.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.runtime.flower.keeper import family
from flower_privdec.runtime.flower.launcher import flower_run
from flower_privdec.runtime.flower.superlink import LocalSuperLink
from flower_privdec.runtime.run import run
from flower_privdec.scenario import Scenario

pytestmark = pytest.mark.slow
Tiny = Callable[..., Scenario]
REPOSITORY = Path(__file__).parents[1]
BROKEN_CLIENT = """\
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_privdec.runtime.flower.client_app import answer_place

app = ClientApp()
app.query("place")(answer_place)


@app.train("relay")
def train(message: Message, context: Context) -> Message:
    raise ValueError("the disk is on fire")
"""


def assert_same_models(one: Path, other: Path) -> None:
    ours, theirs = (load_file(out / "model.safetensors") for out in (one, other))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Check that the SuperLinks of a test left neither a folder nor a process."""
    folders: list[Path] = []
    enter = LocalSuperLink.__enter__
    monkeypatch.setattr(LocalSuperLink, "__enter__", lambda self: folders.append(self.folder) or enter(self))
    yield folders
    assert folders
    for folder in folders:
        assert not folder.exists()
        assert family(-1, str(folder)) == set()


def test_launcher_runs_the_peers_of_a_scenario_by_relay(tiny: Tiny, tmp_path: Path, nothing_left: list[Path]) -> None:
    seen: list[int] = []
    summary = flower_run(
        tiny(), tmp_path / "flower", mode="relay", on_metrics=lambda metrics: seen.append(metrics["round"])
    )
    run(Experiment.build(tiny()), tmp_path / "engine")
    assert_same_models(tmp_path / "flower", tmp_path / "engine")
    assert (summary["runtime"], summary["n_peers"], seen) == ("flower", 4, [2, 4, 6])
    assert list((tmp_path / "flower" / "nodes").rglob("*.jsonl"))


def test_failing_client_app_fails_the_run(
    tiny: Tiny, tmp_path: Path, nothing_left: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(launcher_modules(), "client_app.py", BROKEN_CLIENT)
    with pytest.raises(RunError, match=r"the SuperNode of peers . to . .*failed: the disk is on fire"):
        flower_run(tiny(), tmp_path / "flower", mode="relay", n_supernodes=2)
    assert not (tmp_path / "flower" / "summary.json").exists()
    assert "the disk is on fire" in (tmp_path / "flower" / "flower.log").read_text()


def launcher_modules() -> dict[str, str]:
    from flower_privdec.runtime.flower import launcher

    return launcher.MODULES


def test_flwr_run_takes_the_repository_and_the_quickstart(tmp_path: Path, nothing_left: list[Path]) -> None:
    apps = {
        REPOSITORY: "mode='cohort'",
        REPOSITORY / "simulations" / "quickstart": "mode='relay' scenario='digits.yaml'",
    }
    pyprojects = [(app / "pyproject.toml").read_bytes() for app in apps]
    with LocalSuperLink() as superlink:
        for i, (app, config) in enumerate(apps.items()):
            config += f" out='{tmp_path / str(i)}' set='rounds=4;evaluation.every=2'"
            log = tmp_path / f"{i}.log"
            superlink.popen("flwr", "run", str(app), "--stream", "-c", config, output=log).wait(timeout=200)
            assert (tmp_path / str(i) / "summary.json").exists(), log.read_text()
        runs = json.loads(superlink.call("flwr", "list", "--format", "json"))["runs"]
    assert [listed["status"] for listed in runs] == ["finished:completed"] * len(apps)
    assert [(app / "pyproject.toml").read_bytes() for app in apps] == pyprojects
    assert_same_models(tmp_path / "0", tmp_path / "1")
    assert os.listdir(tmp_path / "0" / "ledger")


def test_python_runs_by_flower_and_stops_there(tiny: Tiny, tmp_path: Path, nothing_left: list[Path]) -> None:
    """A callback that stops a run leaves no process, and what the engine would have recorded until then."""
    scenario = tiny("rounds=4000", "evaluation.every=4")
    stopped = fp.run(scenario, out=tmp_path / "run", runtime="flower", on_metrics=lambda metrics: True)
    assert not stopped.finished
    assert 0 < stopped.summary["rounds_done"] < 4000
    done = stopped.metrics[-1]["round"]
    engine = fp.run(scenario, on_metrics=lambda metrics: metrics["round"] == done)
    for ours, theirs in zip(stopped.metrics, engine.metrics, strict=True):
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
    assert (tmp_path / "run" / "checkpoint").is_file()
    assert not stopped.model(0).training
