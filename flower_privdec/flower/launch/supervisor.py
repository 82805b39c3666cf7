"""Keeps a server for as long as the process that wants it lives: run as a script, by its file name.

    python keeper.py FOLDER COMMAND...

It starts the command and waits for the end of its own standard input, which comes when the process at
the other end closes it or dies, however it dies. Then it ends the command and all that descends from it,
and removes the folder. It imports nothing but the standard library, so that it starts at once.
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


def family(root: int, marker: str) -> set[int]:
    """Return the ids of a process and all that descends from it, without this one.

    A process whose parent has ended is no longer known as a descendant; on Linux it is still found by
    its environment.

    Args:
        root: the first process's id.
        marker: text that only these processes have in their environment.
    """
    parents, marked = _scan(marker.encode()) if PROC.is_dir() else (_parents_by_ps(), set())
    found = {root} | marked - {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return (found - {os.getpid()}) & set(parents)


def _scan(marker: bytes) -> tuple[dict[int, int], set[int]]:
    """Return every living process's parent, and which have the marker in their environment."""
    parents: dict[int, int] = {}
    marked = set()
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                parents[int(entry.name)] = int(parent)
                if marker in (entry / "environ").read_bytes():
                    marked.add(int(entry.name))
    return parents, marked


def _parents_by_ps() -> dict[int, int]:
    command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def end_family(root: subprocess.Popen[bytes], marker: str, grace: float = 3.0) -> None:
    """End a process and all its descendants: ask, wait, then insist.

    Args:
        root: the first process.
        marker: as in `family`.
        grace: seconds between asking and insisting.
    """
    deadline = time.monotonic() + grace
    _signal(family(root.pid, marker), signal.SIGTERM)
    while left := family(root.pid, marker):
        if time.monotonic() > deadline:
            _signal(left, signal.SIGKILL)
        root.poll()  # reaps it
        time.sleep(0.05)
    root.wait()


def _signal(processes: set[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def keep(folder: str, command: list[str]) -> int:
    """Run the command until standard input ends or the command does; return its exit status.

    Args:
        folder: removed at the end; its path stands in the environment of the command.
        command: what to run.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    wanted = True
    while wanted and process.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], 0.2)
        wanted = not ready or bool(os.read(sys.stdin.fileno(), 1024))
    end_family(process, marker=folder)
    if not wanted:  # else somebody still has to read the log
        shutil.rmtree(folder, ignore_errors=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], sys.argv[2:]))
