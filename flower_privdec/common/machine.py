"""Free memory, cores and CPU of this machine; a plan that does not fit is refused before anything is allocated."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from flower_privdec import __version__
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import memory

CGROUP = Path("/sys/fs/cgroup")
HEADROOM = 0.9  # the share of the free memory that a plan may use


def available_bytes(device: torch.device) -> int:
    """Return how much memory is free on a device, within the limits of this process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])

    # All of the memory, unless the system says how much of it is in use.
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, KeyError, IndexError):
        free = 1024 * _number_after("MemAvailable:", Path("/proc/meminfo"))

    with suppress(OSError, ValueError):  # without a limit, `memory.max` holds the word "max"
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())

        # A control group's use includes cached files, which the kernel gives up when memory is short.
        reclaimable = 0
        with suppress(KeyError, IndexError):
            reclaimable = _number_after("inactive_file", CGROUP / "memory.stat")
        free = min(free, max(0, limit - used + reclaimable))
    return free


def _number_after(word: str, path: Path) -> int:
    """Return the whole number after a word that begins a line of a file.

    Raises:
        KeyError: no line begins with the word.
    """
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == word:
            return int(words[1])
    raise KeyError(word)


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, and the quota of its control group, rounded down."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cores = len(os.sched_getaffinity(0))

    # Version 2 of control groups has one file with both numbers, version 1 has two files.
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # without a limit, the quota is the word "max" in version 2, and -1 in 1
            text = " ".join((CGROUP / name).read_text() for name in files)
            quota_us, period_us = map(int, text.split())
            if quota_us > 0:
                cores = min(cores, quota_us // period_us)
    return max(1, cores)


@cache
def can_fork() -> bool:
    """Return whether this system can fork a process whose libraries go on working, and end it with its parent."""
    try:
        os.close(os.memfd_create("tried"))
        os.close(os.eventfd(0))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # no Linux, or a container that forbids it
        return False
    return True


def cpu_model() -> str:
    """Return the name of this machine's CPU; libraries choose by it how they multiply."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


COMMAND = "PRIVDEC_COMMAND"  # environment: the command that was typed, for processes that it starts
NO_FILES = {"": "python", "-c": "python -c", "-m": "python -m", "ipykernel_launcher.py": "a notebook"}


def typed_command() -> str:
    """Return the command that somebody typed to start what this process does.

    Privacy: of programs other than `privdec` only the name is returned, for Flower's processes have tokens among their
        arguments.
    """
    given = os.environ.get(COMMAND)
    if given:
        return given

    program, *arguments = sys.argv or [""]
    name = Path(program).name
    if name == "privdec" or Path(program).parent.name == "flower_privdec":
        return shlex.join(["privdec", *arguments])
    return NO_FILES.get(name, name)


def provenance(command: str = "") -> dict[str, str]:
    """Return the origin of a run for its report: versions, hardware, command, and the commit of the current folder.

    Args:
        command: that started it, if it is not this process's.
    """
    try:
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""

    hardware = f"{cpu_model()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        hardware += f", {torch.cuda.get_device_name()}"

    return {
        "versions": f"flower-privdec {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "hardware": hardware,
        "commit": commit or "none",
        "command": command or typed_command(),
    }


def check_room(needed: int, what: str, remedy: str) -> None:
    """Refuse a plan that does not fit into the free memory.

    Args:
        needed: in bytes.
        what: what needs it; begins with the key that decides it.
        remedy: what to do about it.

    Raises:
        ScenarioError: it names what is needed and what is free.
    """
    free = available_bytes(torch.device("cpu"))
    if needed > HEADROOM * free:
        raise ScenarioError(
            f"{what} needs about {memory(needed)}, and {memory(free)} are free; {remedy}", code="memory.short"
        )
