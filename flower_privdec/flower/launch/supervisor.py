"""Process supervisor: ends a server when the process that needs it closes a pipe or dies. Run as a script:

    python supervisor.py FOLDER COMMAND...

It starts the command and waits for the end of its own standard input. Then it ends the command and all its
descendants, and removes the folder. It imports the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
GRACE = 3.0


def family(root: int, marker: str) -> set[int]:
    """Return the ids of a living process and its descendants, without this one.

    On Linux a descendant whose parent has ended is recognised by its environment.

    Args:
        root: the first process's id.
        marker: text that these processes alone have in their environment.
    """
    parents, pids = _parents_and_marked(marker.encode())
    pids |= {root}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return (pids - {os.getpid()}) & set(parents)


def _parents_and_marked(marker: bytes) -> tuple[dict[int, int], set[int]]:
    """Return every living process's parent, and which have the marker in their environment."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    if not PROC.is_dir():
        command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listing.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}, marked
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                parents[int(entry.name)] = int(parent)
                if int(entry.name) != os.getpid() and marker in (entry / "environ").read_bytes():
                    marked.add(int(entry.name))
    return parents, marked


def end_family(root: subprocess.Popen[bytes], marker: str) -> None:
    """End a process and all its descendants, see `family`: SIGTERM, then SIGKILL after GRACE seconds."""
    deadline = time.monotonic() + GRACE
    _signal(family(root.pid, marker), signal.SIGTERM)
    while alive := family(root.pid, marker):
        if time.monotonic() > deadline:
            _signal(alive, signal.SIGKILL)
        root.poll()  # reaps it
        time.sleep(0.05)
    root.wait()


def _signal(processes: set[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def supervise(folder: str, command: list[str]) -> int:
    """Run the command until standard input ends or the command does; return its exit status.

    Args:
        folder: removed at the end; its path stands in the environment of the command.
        command: what to run.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    input_open = True
    while input_open and process.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        input_open = not ready or bool(os.read(sys.stdin.fileno(), 1024))
    end_family(process, marker=folder)
    if not input_open:  # else the log is still to be read
        shutil.rmtree(folder, ignore_errors=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], sys.argv[2:]))
