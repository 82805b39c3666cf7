"""The command line itself: help, version, completion, wrong options, Ctrl-C, and terminals of every kind."""

from __future__ import annotations

import errno
import io
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import privdec
from paths import ROOT

from flower_privdec import __version__
from flower_privdec.cli import main
from flower_privdec.cli.versions import DISTRIBUTIONS, versions_text
from flower_privdec.common.formatting import printable
from flower_privdec.engine.engine import Engine
from flower_privdec.network.transport.transport import STREAMS
from flower_privdec.pushsum import frames

COMMANDS = ("run", "show", "list", "plan", "topology", "report", "study", "bench")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_plain_whole_and_fits_sixty_columns(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert privdec(command, flag) == 0
    said = capsys.readouterr().out
    assert "\\" not in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 60
    if command in ("run", "plan"):
        assert "A scenario file (YAML), or the name of a" in said


def test_versions_say_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_privdec.cli.versions.DISTRIBUTIONS", ("numpy", "no-such-distribution"))
    assert "\nno-such-distribution not installed\n" in versions_text()


def test_version_module_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert privdec("--version") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["privdec"] == __version__
    assert said["python"].startswith(f"{platform.python_version()} ")
    assert said["torch"] == torch.__version__
    assert said["numpy"] == np.__version__
    assert (said["frames"], said["streams"]) == (str(frames.VERSION), str(STREAMS))
    assert set(said) == {"privdec", "python", *DISTRIBUTIONS, "frames", "streams"}
    env = {**os.environ, "_PRIVDEC_COMPLETE": "complete_bash", "COMP_WORDS": "privdec to", "COMP_CWORD": "1"}
    completed = subprocess.run(
        [sys.executable, "-m", "flower_privdec"], env=env, capture_output=True, text=True, check=False, timeout=500
    )
    assert completed.stdout.split() == ["topology"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "No such command 'rum'. Did you mean 'run'"),
        (["compare"], "`privdec report RUN RUN --out curves.pdf` draws finished runs"),
        (["Train"], "`privdec run SCENARIO` trains"),
        (["run", "a.yaml", "--epsilon", "3"], "write --set privacy.epsilon=VALUE"),
        (["plan", "a.yaml", "--eps", "3"], "write --set privacy.epsilon=VALUE"),
        (["run", "a.yaml", "--algorithm", "pdsl"], "write --set algorithm.name=VALUE"),
        (["run", "a.yaml", "--lr=1"], "write --set algorithm.learning_rate=VALUE"),
        (["run"], "Missing argument"),
        (["run", "a.yaml", "b.yaml"], "unexpected extra argument"),
        (["run", "a.yaml", "--nope"], "No such option"),
        (["run", "a.yaml", "--out"], "requires an argument"),
        (["run", "a.yaml", "--cpus", "x"], "'--cpus'"),
        (["run", "a.yaml", "--cpus", "0"], "'--cpus'"),
        (["run", "a.yaml", "--runtime", "nowhere"], "'--runtime'"),
        (["bench", "--rounds", "1"], "'--rounds'"),
        (["study"], "--list"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert privdec(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said
    assert "--help`" in said


@pytest.fixture
def scenario(tmp_path: Path, tiny_text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a scenario file in the folder where the command runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.yaml"
    path.write_text(tiny_text)
    return path


def _pressed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kept", [False, True])
def test_ctrl_c_says_how_to_go_on(
    scenario: Path, kept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (Engine, "round") if kept else ("flower_privdec.engine.run.Run.__init__",)
    monkeypatch.setattr(*place, _pressed)
    assert privdec("run", "s.yaml") == 130
    said = capsys.readouterr().err
    wanted = "the same command with --resume goes on from runs/tiny" if kept else "nothing was kept yet"
    assert said.splitlines()[-1].startswith(f"interrupted: {wanted}")
    assert (scenario.parent / "runs").exists() == kept
    monkeypatch.undo()
    monkeypatch.chdir(scenario.parent)
    assert privdec("run", "s.yaml", *(["--resume"] if kept else [])) == 0


def test_ctrl_c_elsewhere_is_one_line_too(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_privdec.planner.plan.make_plan", _pressed)
    assert privdec("plan", scenario) == 130
    assert capsys.readouterr().err == "interrupted: run the same command again\n"


PRESSED_WHILE_IMPORTING = """
import os, signal, sys
from flower_privdec.__main__ import main

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "flower_privdec.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
main()
"""


def test_ctrl_c_during_startup_is_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", PRESSED_WHILE_IMPORTING], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == "interrupted: nothing has begun; run the same command again\n"


def test_plan_begins_with_what_will_happen(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert privdec("plan", scenario) == 0
    brief = capsys.readouterr().out
    assert [line.split()[0] for line in brief.splitlines()[:5]] == ["tiny:", "ε", "noise", "memory", "time"]
    assert "K*" not in brief
    assert privdec("plan", scenario, "--verbose") == 0
    whole = capsys.readouterr().out
    assert all(word in whole for word in ("ε after each quarter", "graph", "gradients", "memory"))


def test_one_kind_of_parts_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("models", "model"):
        assert privdec("list", kind) == 0
        listed = capsys.readouterr().out
        assert "resnet18-gn" in listed
        assert "privsgp" not in listed


def test_columns_sets_the_width_without_a_terminal(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert privdec("list", "algorithms") == 0
        widths.append(max(map(len, capsys.readouterr().out.splitlines())))
    assert widths[0] <= 60 < widths[1] <= 200


def test_memory_that_runs_out_is_one_line(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("flower_privdec.planner.plan.make_plan", fail)
        assert privdec("plan", scenario) == 1
        assert capsys.readouterr().err.startswith("error: memory ran out; use a smaller model")


def test_a_bug_is_not_hidden(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("flower_privdec.planner.plan.make_plan", fail)
    with pytest.raises(KeyError):
        main.main(["plan", str(scenario)])


def test_a_terminal_without_greek_gets_what_it_can_show(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert privdec("list") == 0
    stream.flush()
    assert b"\\xb5" in stream.buffer.getvalue() or b"\\u" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_closed_or_full_output_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        assert privdec("list") == 0
    monkeypatch.setattr("flower_privdec.reporting.console.print_parts", _full)
    assert privdec("list") == 1
    remedy = "free some space on its disk, then run the same command again"
    assert capsys.readouterr().err == f"error: the output: No space left on device; {remedy}\n"


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_that_is_gone_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert privdec("list") == 2
    assert capsys.readouterr().err == "error: the folder this was started in is gone; cd to one that is there\n"


@pytest.mark.usefixtures("pictures")
def test_a_strange_name_is_shown_and_can_be_plotted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_text: str
) -> None:
    name = "a:b $x_$ 100 % [red]x é"
    (tmp_path / "s.yaml").write_text(tiny_text)
    monkeypatch.chdir(tmp_path)
    assert privdec("run", "s.yaml", "--set", f"name='{name}'", "--set", "rounds=2") == 0
    shown = capsys.readouterr()
    assert shown.err.endswith("done\n")
    assert f"{name}: round 2/2" in shown.err
    assert f"{name}: mean model" in shown.out
    odd = os.fsdecode(os.fsencode(f"runs/{name}") + b"\xff")
    os.rename(f"runs/{name}", odd)  # a folder's name need be no text
    assert privdec("report", odd, "--out", "page.html") == 0


def test_an_error_cannot_write_elsewhere_on_the_terminal() -> None:
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert len(printable("x" * 10**6)) < 3000
