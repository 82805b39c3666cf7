"""Process supervisor: ends a server when the process that needs it closes a pipe or dies. Run as a script:

    python supervisor.py FOLDER COMMAND...

It starts the command and waits for the end of its own standard input. Then it ends the command and all its
descendants, and removes the folder. It imports only the standard library, so that it starts at once.

Why it reads /proc: a SuperLink (flwr 1.41 to 1.43) starts each ServerApp and Ray in sessions of their own, so no
process group has them all, and Ray's daemons outlive their parent. They are recognised as children of children, and,
once their parent is gone, by the folder's name in their environment.
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
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
POLL = 0.2  # seconds between two looks at the command


def family(root: int, marker: str) -> set[int]:
    """Return the ids of a living process and its descendants, without this one.

    On Linux a descendant whose parent has ended is recognised by its environment.

    Args:
        root: the first process's id.
        marker: text that only these processes have in their environment.
    """
    parents, marked = _parents_and_marked(marker.encode())
    members = marked | {root}
    while True:
        children = {pid for pid, parent in parents.items() if parent in members}
        if children <= members:
            break
        members |= children
    return (members - {os.getpid()}) & set(parents)


def _parents_and_marked(marker: bytes) -> tuple[dict[int, int], set[int]]:
    """Return every living process's parent, and which have the marker in their environment."""
    if not PROC.is_dir():
        return _parents_by_ps(), set()

    parents: dict[int, int] = {}
    marked: set[int] = set()
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            pid = int(entry.name)
            # The command's name stands in parentheses and may itself hold blanks and parentheses.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            state = fields[0]
            threads = int(fields[17])

            # It has ended, and only waits to be reaped. The first thread may have ended before the others: as long as
            # one of those is there, so are its open files, and the locks on them.
            if state == "Z" and threads <= 1:
                continue
            parents[pid] = int(fields[1])
            if pid != os.getpid() and marker in _environment(entry):
                marked.add(pid)
    return parents, marked


def _environment(entry: Path) -> bytes:
    """Return a process's environment, from the first of its threads that still runs."""
    for thread in sorted((entry / "task").iterdir()):
        with suppress(ProcessLookupError):  # a thread that has ended has none
            return (thread / "environ").read_bytes()
    return b""


def _parents_by_ps() -> dict[int, int]:
    """Return every living process's parent on a system without /proc."""
    command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parents = {}
    for line in listing.splitlines():
        pid, parent, state = line.split()
        if not state.startswith("Z"):
            parents[int(pid)] = int(parent)
    return parents


def end_family(root: subprocess.Popen[bytes], marker: str) -> None:
    """End a process and all its descendants, see `family`: SIGTERM, then SIGKILL after GRACE seconds."""
    deadline = time.monotonic() + GRACE
    _signal(family(root.pid, marker), signal.SIGTERM)

    # Counted again each time: a process may start another while it ends.
    while alive := family(root.pid, marker):
        if time.monotonic() > deadline:
            _signal(alive, signal.SIGKILL)
        root.poll()  # reaps it, or it would count as alive
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
        ready, _, _ = select.select([sys.stdin], [], [], POLL)
        input_open = not ready or bool(os.read(sys.stdin.fileno(), 1024))
    end_family(process, marker=folder)

    # If the command ended by itself, the caller still has to read its log in the folder.
    if not input_open:
        shutil.rmtree(folder, ignore_errors=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], sys.argv[2:]))
