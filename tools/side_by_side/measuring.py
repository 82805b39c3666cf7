"""Run a command and measure it: seconds, CPU seconds, and the memory of every process that it started.

Processes are recognized by a mark in the environment, which children inherit, so that a daemon that has left the
process tree (a SuperLink) counts too; by their parents, for some overwrite their environment with their title (Ray's
workers); and they stay recognized. None of them outlives the measurement.
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
# Seconds between two samples, and for a daemon to end by itself
EVERY = 0.25
GRACE = 10.0
# Fields of /proc/PID/stat behind the name
PARENT = 1
USER = 11
SYSTEM = 12
STARTED = 19


@dataclass(frozen=True)
class Measured:
    """The time and memory of a command.

    Attributes:
        seconds: from its start to its end.
        cpu_seconds: of all its processes, as last seen of each.
        peak_bytes: the most memory at one sample, pages that processes share counted once (PSS).
        load: the machine's load average over one minute at the start.
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
    """Samples all processes with a mark.

    Attributes:
        mark: theirs.
        peak_bytes: their most memory at one sample.
        cpu: CPU seconds, by process and when it started.
    """

    mark: str
    peak_bytes: int = 0
    cpu: dict[tuple[int, int], float] = field(default_factory=dict)

    def look(self) -> list[int]:
        """Sample the processes' memory and CPU time, and return them."""
        present = processes()
        family = self._family(present)
        for process in family:
            self.cpu[process, present[process][STARTED]] = cpu_seconds(present[process])
        self.peak_bytes = max(self.peak_bytes, sum(map(held_bytes, family)))
        return family

    def _family(self, present: dict[int, list[int]]) -> list[int]:
        """Return the processes that have the mark, are recognized, or descend from one of these."""
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
    running = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            state, *numbers = _read(folder / "stat").rpartition(b")")[2].split() or [b"Z"]
            if state != b"Z":
                running[int(folder.name)] = [0, *map(int, numbers)]
    return running


def is_marked(process: int, mark: str) -> bool:
    """Return whether a process's environment holds a mark."""
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
    """Read a file under /proc; return nothing when its process has ended, or is another user's."""
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
        log: the file for its output.
        limit: seconds after which it is ended.
        environment: variables that override this process's.
    """
    watch = Watch(uuid.uuid4().hex)
    load = os.getloadavg()[0]
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
    """Sample until a command ends; return why it was stopped, or nothing."""
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
    """End every process of a watch, first by SIGTERM, then by SIGKILL."""
    number = signal.SIGTERM
    until = time.monotonic() + GRACE
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
