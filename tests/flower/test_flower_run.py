"""Real `flwr run`: a SuperLink, Ray and SuperNodes, started and stopped by the tests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from paths import ROOT, python_path
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Tiny

import flower_privdec as fp
from flower_privdec.common.errors import RunError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.flower.launch.launcher import LocalSuperLink, first_exception, flower_run
from flower_privdec.flower.launch.supervisor import family

pytestmark = pytest.mark.slow
REPOSITORY = ROOT


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
    scenario = tiny("rounds=2", "evaluation.every=1")
    summary = flower_run(
        scenario,
        tmp_path / "flower",
        mode="relay",
        cpus=os.cpu_count() or 1,  # one process for all nodes, one after the other
        on_metrics=lambda metrics: seen.append(metrics["round"]),
    )
    run(Experiment.build(scenario), tmp_path / "engine")
    assert_same_models(tmp_path / "flower", tmp_path / "engine")
    assert (summary["runtime"], summary["n_peers"], seen) == ("flower", 4, [1, 2])
    assert list((tmp_path / "flower" / "nodes").rglob("*.jsonl"))


DYING_SHARD = """\
import os
import signal

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_privdec.flower.apps.client_app import reply_partition
from flower_privdec.flower.apps.client_app import Node
from flower_privdec.flower.apps.client_app import train_sharded

app = ClientApp()
app.query("partition")(reply_partition)


@app.train("sharded")
def train(message: Message, context: Context) -> Message:
    save = Node.save

    def die(node, state, cohort):
        if node.experiment.own.peers[0] == 2 and state.round_index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        save(node, state, cohort)

    Node.save = die
    return train_sharded(message, context)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two shards run at the same time, each on a CPU")
def test_a_killed_shard_is_named_and_the_run_continues(
    tiny: Tiny, tmp_path: Path, nothing_left: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setitem(launcher_modules(), "client_app.py", DYING_SHARD)
        with raises(RunError, "flower.failed", "the SuperNode of peers 2 to 3 failed: its process has ended") as caught:
            flower_run(tiny(), tmp_path / "flower", mode="sharded", n_supernodes=2)
    assert "the shards keep round 2: mend it, then run the same command with --resume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "flower" / "summary.json").exists()
    log = (tmp_path / "flower" / "flower.log").read_text()
    assert log.rstrip().splitlines()[-1].endswith("with --resume")
    flower_run(tiny(), tmp_path / "flower", mode="sharded", n_supernodes=2, resume=True)
    run(Experiment.build(tiny()), tmp_path / "engine")
    assert_same_models(tmp_path / "flower", tmp_path / "engine")


def launcher_modules() -> dict[str, str]:
    from flower_privdec.flower.launch import launcher

    return launcher.MODULES


@pytest.mark.versions
def test_python_runs_by_flower_and_stops_there(tiny: Tiny, tmp_path: Path, nothing_left: list[Path]) -> None:
    """A callback that stops a run leaves no process, and what the engine would have recorded until then."""
    scenario = tiny("rounds=4000", "evaluation.every=4")
    stopped = fp.run(scenario, out=tmp_path / "run", runtime="flower", on_evaluation=lambda metrics: True)
    assert not stopped.finished
    assert 0 < stopped.summary["rounds_done"] < 4000
    assert stopped.summary["stopped_by"] == "callback"
    assert stopped.summary["stopped_at"] == stopped.metrics[-1]["round"]
    done = stopped.metrics[-1]["round"]
    engine = fp.run(scenario, on_evaluation=lambda metrics: metrics["round"] == done)
    for ours, theirs in zip(stopped.metrics, engine.metrics, strict=True):
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
    assert (tmp_path / "run" / "checkpoint").is_file()
    assert not stopped.model(0).training


class User:
    """A user of `flwr run`, with an empty home and no variables set."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.socket() as one, socket.socket() as other:
            for probe in (one, other):
                probe.bind(("127.0.0.1", 0))
            ports = [str(probe.getsockname()[1]) for probe in (one, other)]
        own = {
            "FLWR_HOME": str(home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
            "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PYTHONPATH": python_path(),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")} | own

    def types(self, folder: Path, *words: str) -> str:
        """Run a command in a folder and return what it prints, without colours."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).parent / "flwr"), *words]
        done = subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
            check=True,
        )
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)

    def ends_the_superlink(self) -> None:
        """Do what `pkill -f flower-superlink` does, to this SuperLink alone; insist where that is not the end of it."""
        for pid in family(-1, str(self.home)):
            with suppress(OSError):
                if b"flower-superlink" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 200
        while (left := family(-1, str(self.home))) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """Return a user, whose SuperLink ends with the test."""
    user = User(tmp_path / "home")
    yield user
    user.ends_the_superlink()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the command's folder is looked up in /proc")
@pytest.mark.versions
def test_flwr_run_of_the_readme_writes_its_results(user: User, tmp_path: Path) -> None:
    """The command needs no variable; the quickstart by relay and the repository by a cohort end with the same models.

    The second run meets the SuperLink that the first has started.
    """
    settings = "set='rounds=4;evaluation.every=2'"
    apps = {
        REPOSITORY / "simulations" / "quickstart": settings,
        REPOSITORY: f"mode='auto' {settings}",
    }
    pyprojects = [(app / "pyproject.toml").read_bytes() for app in apps]
    outs = []
    for i, (app, config) in enumerate(apps.items()):
        printed = user.types(tmp_path / str(i), "run", str(app), "--stream", "-c", config)
        outs += (tmp_path / str(i) / "runs").iterdir()
        assert f"Done: {outs[-1] / 'summary.json'}" in printed
        assert (outs[-1] / "summary.json").exists()
    assert [(app / "pyproject.toml").read_bytes() for app in apps] == pyprojects
    assert_same_models(*outs)
    assert os.listdir(outs[1] / "ledger")
    printed = user.types(tmp_path / "wrong", "run", str(REPOSITORY), "--stream", "-c", "mode='rely'")
    last = printed.rstrip().splitlines()[-1]
    assert "mode='rely' must be one of auto, sharded, relay; did you mean 'relay'?" in last
    assert "Traceback" not in printed
    assert not (tmp_path / "wrong" / "runs").exists()


def test_a_failed_runs_first_exception_is_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    assert first_exception(log) is None
    log.write_text(
        "INFO: begins\n\x1b[91mTraceback (most recent call last):\n  File 'a.py', line 1, in f\n    g()\n"
        "ray.exceptions.NodeError: no node: timed out\n\nThe above exception was the direct cause\n\n"
        "Traceback (most recent call last):\n  File 'b.py', line 1, in g\nRuntimeError: Ending simulation.\n"
    )
    assert first_exception(log) == "ray.exceptions.NodeError: no node: timed out"
