"""Run a command and measure it: seconds, CPU seconds, and the memory of every process that it started.

Processes are told by a mark in the environment, which children inherit, so that a daemon that has left the process tree
(a SuperLink) counts too; by their parents, for some write their title over their environment (Ray's workers); and
once seen they stay known. None of them outlives the measurement.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "SIDE_BY_SIDE_MARK"
PROC = Path("/proc")
EVERY, GRACE = 0.25, 10.0  # seconds between two looks, and for a daemon to end by itself
PARENT, USER, SYSTEM, STARTED = 1, 11, 12, 19  # fields of /proc/PID/stat behind the name


@dataclass(frozen=True)
class Measured:
    """What a command took.

    Attributes:
        seconds: from its start to its end.
        cpu_seconds: of all its processes, as last seen of each.
        peak_bytes: the most memory at one look, pages that processes share counted once (PSS).
        load: the machine's load average of the last minute when it began.
        stopped: why it was ended before its time, or empty.
        status: its exit status.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    load: float
    stopped: str
    status: int


@dataclass
class Watch:
    """Looks at all processes of a mark, again and again.

    Attributes:
        mark: theirs.
        peak_bytes: the most memory they held at one look.
        cpu: CPU seconds, by process and when it started.
    """

    mark: str
    peak_bytes: int = 0
    cpu: dict[tuple[int, int], float] = field(default_factory=dict)

    def look(self) -> list[int]:
        """Add up what the processes hold and have used by now, and return them."""
        present = processes()
        found = self._family(present)
        for process in found:
            self.cpu[process, present[process][STARTED]] = cpu_seconds(present[process])
        self.peak_bytes = max(self.peak_bytes, sum(map(held_bytes, found)))
        return found

    def _family(self, present: dict[int, list[int]]) -> list[int]:
        """Return the processes that have the mark, or are known, or descend from such a one."""
        family = {
            process
            for process, facts in present.items()
            if (process, facts[STARTED]) in self.cpu or is_marked(process, self.mark)
        }
        grown = -1
        while grown != len(family):
            grown = len(family)
            family |= {process for process, facts in present.items() if facts[PARENT] in family}
        return sorted(family)


def processes() -> dict[int, list[int]]:
    """Return the numbers in /proc/PID/stat behind the name, of every process that runs."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            state, *numbers = _read(folder / "stat").rpartition(b")")[2].split() or [b"Z"]
            if state != b"Z":
                found[int(folder.name)] = [0, *map(int, numbers)]
    return found


def is_marked(process: int, mark: str) -> bool:
    """Say whether a process's environment holds a mark."""
    return f"{MARK}={mark}".encode() in _read(PROC / str(process) / "environ").split(b"\0")


def held_bytes(process: int) -> int:
    """Return a process's proportional share of the memory it holds; 0 when it is gone."""
    for line in _read(PROC / str(process) / "smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(facts: list[int]) -> float:
    """Return the CPU seconds that a process has used."""
    return (facts[USER] + facts[SYSTEM]) / os.sysconf("SC_CLK_TCK")


def _read(path: Path) -> bytes:
    """Return what a file under /proc says; nothing when its process ended meanwhile, or is somebody else's."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def measure(
    command: Sequence[str], folder: Path, log: Path, limit: float, environment: Mapping[str, str] | None = None
) -> Measured:
    """Run a command to its end, or to a limit in seconds, and end what it leaves running.

    Args:
        command: the words.
        folder: where it runs.
        log: the file that takes what it prints.
        limit: after how many seconds it is ended.
        environment: what is laid over this process's.
    """
    watch, load = Watch(uuid.uuid4().hex), os.getloadavg()[0]
    variables = {**os.environ, **(environment or {}), MARK: watch.mark}
    with log.open("wb") as out:
        began = time.monotonic()
        running = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT)
        try:
            stopped = _wait(running, watch, began + limit)
            seconds = time.monotonic() - began
        finally:
            _end(watch)
            running.wait()
    return Measured(seconds, sum(watch.cpu.values()), watch.peak_bytes, load, stopped, running.returncode)


def _wait(running: subprocess.Popen[bytes], watch: Watch, until: float) -> str:
    """Look until a command ends; return why it was given up, or nothing."""
    while True:
        watch.look()
        try:
            running.wait(EVERY)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                return "time limit"
        else:
            return ""


def _end(watch: Watch) -> None:
    """End every process of a watch: first by asking, then by force."""
    number, until = signal.SIGTERM, time.monotonic() + GRACE
    while left := watch.look():
        for process in left:
            _signal(process, number)
        time.sleep(EVERY)
        number = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL


def _signal(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return  # it ended by itself
