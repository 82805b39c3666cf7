"""Processes one has started, directly or through others: finding them and ending them, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def family(root: int, marker: str) -> set[int]:
    """Return the ids of a process and all that descends from it.

    A process whose parent has ended is no longer known as a descendant; on Linux it is still found by
    its environment.

    Args:
        root: the first process's id.
        marker: text that only these processes have in their environment.
    """
    parents, marked = _scan(marker.encode()) if PROC.is_dir() else (_parents_by_ps(), set())
    found = {root} | marked
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
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def end_family(root: subprocess.Popen[bytes], marker: str, grace: float = 5.0) -> None:
    """End a process and all its descendants: ask, wait, then insist.

    Args:
        root: the first process.
        marker: as in `family`.
        grace: seconds between asking and insisting.
    """
    _signal(family(root.pid, marker), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := family(root.pid, marker)) and time.monotonic() < deadline:
        root.poll()  # reaps it
        time.sleep(0.05)
    while left:
        _signal(left, signal.SIGKILL)
        root.poll()
        time.sleep(0.05)
        left = family(root.pid, marker)
    root.wait()


def _signal(processes: set[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
