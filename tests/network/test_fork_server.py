"""Processes that are forked with all imports done behave as if each had been started anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from networked import wait_until

from flower_privdec.common.machine import can_fork
from flower_privdec.network.local import fork_server
from flower_privdec.network.local.fork_server import SERVER, Process, start_process

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_fork(), reason="NOT TESTED: nothing can be forked here")]

FACTS = """
import atexit, json, os, signal, sys
import numpy as np
import torch
torch.ones(300, 300) @ torch.ones(300, 300)
facts = {
    "arguments": sys.argv[1:], "folder": os.getcwd(), "group": os.getpgid(0), "name": __name__,
    "environment": os.environ.get("FACT"), "draws": [np.random.random(), torch.rand(()).item()],
    "interrupted by": str(signal.getsignal(signal.SIGINT)),
    "files": [file for file in range(3, 50) if os.path.exists(f"/proc/self/fd/{file}")],
}
print(json.dumps(facts), flush=True)
atexit.register(print, "left in order", flush=True)
sys.stdin.read()
sys.exit(7)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Process, Path]]:
    """Return a function that starts a module of its own and returns the process and its log."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FACT", "as it is now")
    monkeypatch.chdir(tmp_path)

    def starting(code: str, *arguments: str) -> tuple[Process, Path]:
        number = len(list(tmp_path.glob("*.log")))
        (folder / f"started_{number}.py").write_text(code)
        log = tmp_path / f"{number}.log"
        with log.open("wb") as file:
            return start_process("one of many", (sys.executable, "-m", f"started_{number}", *arguments), file), log

    return starting


def facts_in(log: Path) -> dict[str, Any]:
    wait_until(lambda: b"\n" in log.read_bytes())
    return json.loads(log.read_text().splitlines()[0])


def end_stdin(process: Any) -> None:
    (process.stdin if isinstance(process, subprocess.Popen) else process._stdin).close()


def test_a_forked_process_is_like_a_new_one(
    start: Callable[..., tuple[Process, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked, forked_log = start(FACTS, "--id", "3")
    monkeypatch.setattr(fork_server, "can_fork", lambda: False)
    anew, anew_log = start(FACTS, "--id", "3")
    assert isinstance(anew, subprocess.Popen)
    assert not isinstance(forked, subprocess.Popen)
    facts, wanted = facts_in(forked_log), facts_in(anew_log)
    assert (facts.pop("group"), wanted.pop("group")) == (forked.pid, anew.pid)
    assert not {*facts.pop("draws")} & {*wanted.pop("draws")}
    assert facts == wanted
    assert (facts["folder"], facts["environment"]) == (str(tmp_path), "as it is now")
    assert Path(f"/proc/{forked.pid}/comm").read_text() == "one of many\n"
    for process, log in ((forked, forked_log), (anew, anew_log)):
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        end_stdin(process)
        assert process.wait(200) == process.poll() == 7
        assert log.read_text().splitlines()[1:] == ["left in order"]


def test_forked_processes_share_no_draw_and_report_endings(
    start: Callable[..., tuple[Process, Path]],
) -> None:
    processes = [start(FACTS) for _ in range(2)]
    draws = {draw for _, log in processes for draw in facts_in(log)["draws"]}
    assert len(draws) == 4
    os.kill(processes[0][0].pid, signal.SIGKILL)
    end_stdin(processes[1][0])
    assert [process.wait(200) for process, _ in processes] == [-signal.SIGKILL, 7]
    failed, log = start("raise ValueError('on purpose')")
    assert failed.wait(200) == 1
    assert log.read_text().splitlines()[-1] == "ValueError: on purpose"


def test_a_killed_server_takes_its_processes_and_is_replaced(
    start: Callable[..., tuple[Process, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    orphan, log = start(FACTS)
    facts_in(log)
    assert SERVER._server is not None
    SERVER._server.kill()
    assert orphan.wait(200) == -signal.SIGKILL
    state = Path(f"/proc/{orphan.pid}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")
    process, _ = start("")
    assert process.wait(200) == 0
    try:
        assert len(list(Path(f"/proc/{SERVER._server.pid}/task").iterdir())) == 1  # a fork takes one along
    finally:
        SERVER.end()  # which has another environment than other tests
