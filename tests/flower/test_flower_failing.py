"""How a run under Flower ends when it fails, and where its results lie: without Ray or a SuperLink."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flower_runs import run_under_flower
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from raising import raises
from tiny_scenario import Tiny

from flower_privdec.cli.main import main
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.machine import COMMAND
from flower_privdec.flower.apps.caller_folder import find_caller
from flower_privdec.flower.apps.client_app import client_app, reply_partition
from flower_privdec.flower.apps.server_app import ScenarioStrategy, scenario_strategy
from flower_privdec.flower.error_formatting import one_line_failure, one_line_replies, reason
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.scenario import to_yaml

FLOWER = logging.getLogger("flwr")


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Return what Flower logs in the test, formatted as its console does, and leave its log as it was."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    FLOWER.addHandler(handler)
    yield lines
    FLOWER.removeHandler(handler)
    with one_line_failure():
        pass


def end_as_flower_does(error: Exception) -> None:
    """Log what Flower logs of a ServerApp that raised: the failure with its traceback, then how to read exit codes."""
    FLOWER.error("Simulation raised an exception", exc_info=error)
    FLOWER.error("Exit Code: 700\n\nAn unhandled exception occurred\n\nFor more information, visit: <https://x>")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ScenarioError("mode='rely' must be one of auto, relay"), "mode='rely' must be one of auto, relay"),
        (RunError("the SuperNode of peer 3 failed:\n  no answer"), "the SuperNode of peer 3 failed: no answer"),
        (OSError(28, "No space left on device", "runs/a"), "OSError: [Errno 28] No space left on device: 'runs/a'"),
    ],
)
def test_a_mendable_failure_is_the_logs_last_line(logged: list[str], error: Exception, line: str) -> None:
    @one_line_failure()
    def main() -> None:
        raise error from ValueError("how it came about")

    with pytest.raises(type(error)):
        main()
    end_as_flower_does(error)
    assert logged == [line]


def test_a_failure_of_the_code_keeps_its_traceback(logged: list[str]) -> None:
    with pytest.raises(ZeroDivisionError) as caught, one_line_failure():
        _ = 1 / 0
    end_as_flower_does(caught.value)
    assert "Traceback" in logged[0]
    assert "Exit Code: 700" in logged[1]


def test_a_run_after_a_failed_one_is_logged_whole(logged: list[str]) -> None:
    with pytest.raises(RunError), one_line_failure():
        raise RunError("first")
    end_as_flower_does(RunError("first"))
    with one_line_failure():
        FLOWER.error("second")
    FLOWER.error("third")
    assert logged == ["first", "second", "third"]


def test_a_dead_node_is_reported_once(logged: list[str]) -> None:
    class RayActorError(Exception):
        """Of the name of Ray's."""

    class ActorDiedError(RayActorError):
        """Likewise."""

    def report(error: Exception) -> None:  # as Flower's backend does, while it handles the error
        try:
            raise error
        except Exception as caught:
            FLOWER.error(caught)

    with one_line_failure():
        report(ActorDiedError("The actor died unexpectedly\n\tclass_name: ClientAppActor\n\tpid: 7"))
        report(ValueError("the code is wrong"))
    assert logged == ["the code is wrong"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("budget=0 must be > 0: write 'inf'", "budget=0 must be > 0: write 'inf'"),
        (
            "<class 'ValueError'>:<'a\n\nException ClientAppException occurred. Message: the disk is on fire'>",
            "the disk is",
        ),
        (
            "<class 'ray.exceptions.ActorDiedError'>:<'The actor died\n\tpid: 7\n(1) OOM killer'>",
            "its process has ended",
        ),
        (None, "unknown"),
        ("\n \n", "unknown"),
    ],
)
def test_a_nodes_error_is_one_line(text: str | None, line: str) -> None:
    assert reason(text).startswith(line)
    assert "\n" not in reason(text)


@pytest.mark.parametrize("error", [RunError("peer 3\nhas no data"), FileNotFoundError(2, "No such file", "a.npz")])
def test_a_handler_answers_a_failure_with_one_line(error: Exception) -> None:
    app = ClientApp()

    @app.train("relay")
    @one_line_replies
    def train(message: Message, context: Context) -> Message:
        raise error

    (reply,) = LocalGrid(app, 1).send_and_receive([Message(RecordDict(), 100, "train.relay")])
    assert reply.has_error()
    assert reply.error.reason in ("peer 3 has no data", "FileNotFoundError: [Errno 2] No such file: 'a.npz'")


def test_a_failing_client_app_names_its_peers(tiny: Tiny, tmp_path: Path) -> None:
    app = ClientApp()
    app.query("partition")(reply_partition)

    @app.train("relay")
    def train(message: Message, context: Context) -> Message:
        raise ValueError("the disk is on fire")

    with raises(RunError, "nodes.failed", "the SuperNode of peer 0 .*failed: the disk is on fire"):
        run_under_flower(tiny(), tmp_path / "run", "relay", app)
    assert not (tmp_path / "run" / "summary.json").exists()


# --- where the command was typed ---


def write_app(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "1"\n')
    return folder


@pytest.fixture
def flwr(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that starts a command named flwr, which waits; they end with the test."""
    command = tmp_path / "bin" / "flwr"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\necho up\nsleep 300\n")
    command.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)

        # Two that start in one tick of the clock are told apart by their numbers, which begin anew at the largest.
        time.sleep(2 / os.sysconf("SC_CLK_TCK"))
        process = subprocess.Popen(
            [str(command), *arguments], cwd=folder, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_the_folder_belongs_to_the_latest_command(tmp_path: Path, flwr: Callable[..., None]) -> None:
    app, other = write_app(tmp_path / "app", "one"), write_app(tmp_path / "other", "two")
    installed = write_app(tmp_path / "home" / "apps" / "one", "one")  # Flower's copy, from which the ServerApp runs
    assert find_caller(installed) is None
    flwr(other, "run", ".", "--stream")
    flwr(app, "log", "7")
    assert find_caller(installed) is None

    def latest() -> tuple[Path, str]:
        caller = find_caller(installed)
        assert caller is not None
        return caller.folder, caller.command

    flwr(app, "run", "--stream")
    assert latest() == (app, "flwr run --stream")
    flwr(tmp_path / "work", "run", "../app", "--stream", "-c", "rounds=1")
    assert latest() == (tmp_path / "work", "flwr run ../app --stream -c rounds=1")
    flwr(tmp_path / "elsewhere", "run", "--stream", str(other))
    assert latest() == (tmp_path / "work", "flwr run ../app --stream -c rounds=1")
    assert find_caller(tmp_path / "no-app") is None


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_results_and_paths_start_in_the_commands_folder(
    tiny: Tiny, tmp_path: Path, flwr: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, work = write_app(tmp_path / "app", "one"), tmp_path / "work"
    flwr(work, "run", str(app), "--stream")
    (work / "mine.yaml").write_text(to_yaml(tiny()))
    (work / "deeper").mkdir()

    def read(**config: str) -> ScenarioStrategy:
        context = Context(7, 0, {}, RecordDict(), {"scenario": "mine.yaml", **config})
        return scenario_strategy(LocalGrid(client_app(), 1), context, app)

    assert read().out == work / "runs" / "tiny-7"
    assert read(out="mine").out == work / "mine"
    assert read(base=str(tmp_path), scenario="work/mine.yaml").out == tmp_path / "runs" / "tiny-7"
    assert read(base="deeper", scenario="../mine.yaml").out == work / "deeper" / "runs" / "tiny-7"

    monkeypatch.chdir(tmp_path)  # which is left for the command's folder
    read().start(LocalGrid(client_app(), 1))
    summary = json.loads((work / "runs" / "tiny-7" / "summary.json").read_text())
    assert summary["made"]["command"] == f"flwr run {app} --stream"

    monkeypatch.setenv(COMMAND, "privdec run mine.yaml --runtime flower")  # which calls `flwr run` itself
    assert read().command == "privdec run mine.yaml --runtime flower"


# --- the command line ---


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["--mode", "relay"], "--mode relay"),
        (["--mode", "auto"], "--mode auto"),
        (["--supernodes", "4"], "--supernodes 4"),
        (["--cpus", "1"], "--cpus 1"),
        (["--gpus", "0.5", "--runtime", "engine"], "--gpus 0.5"),
    ],
)
def test_options_of_flower_are_refused_in_the_engine(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], flag: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny()))
    with pytest.raises(SystemExit) as leaving:
        main(["run", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "out"), *options])
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {flag} is for --runtime flower: add that, or leave {flag.split()[0]} out"
    assert not (tmp_path / "out").exists()
