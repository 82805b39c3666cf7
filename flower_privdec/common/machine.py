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

import torch

from flower_privdec import __version__
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import memory

CGROUP = Path("/sys/fs/cgroup")
HEADROOM = 0.9  # how much of the free memory may be planned with


def available_bytes(device: torch.device) -> int:
    """Return how much memory is free on a device, within the limits of this process's control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError, IndexError):  # "max" is no number: no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        reclaimable = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        free = min(free, max(0, limit - used + reclaimable))
    return free


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, and the quota of its control group, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # "max" is no number, and -1 no limit
            quota_us, period_us = (int(text) for name in files for text in (CGROUP / name).read_text().split())
            if quota_us > 0:
                cores = min(cores, quota_us // period_us)
    return max(1, cores)


@cache
def can_fork() -> bool:
    """Return whether this system can fork a process whose libraries go on working, and end it with its parent."""
    try:
        for file in (os.memfd_create("tried"), os.eventfd(0), os.pidfd_open(os.getpid())):
            os.close(file)
    except (AttributeError, OSError):  # no Linux, or a container that forbids it
        return False
    return True


def cpu_model() -> str:
    """Return the name of this machine's CPU, by which libraries choose how they multiply."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def provenance() -> dict[str, str]:
    """Return what made a run, for its report: versions, hardware, command, and the commit of the folder it runs in.

    Privacy: of other programs than `privdec` the name alone: Flower's processes have tokens among their arguments.
    """
    try:
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    program, *arguments = sys.argv or [""]
    is_ours = Path(program).name == "privdec" or Path(program).parent.name == "flower_privdec"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return {
        "versions": f"flower-privdec {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "hardware": f"{cpu_model()}, {os.cpu_count()} cores{gpu}",
        "commit": commit or "none",
        "command": shlex.join(["privdec", *arguments]) if is_ours else Path(program).name,
    }


def check_room(needed: int, what: str, remedy: str) -> None:
    """Refuse what does not fit, in bytes, into free memory; `what` begins with the key that decides it.

    Raises:
        ScenarioError: naming what is needed and what is free.
    """
    free = available_bytes(torch.device("cpu"))
    if needed > HEADROOM * free:
        raise ScenarioError(
            f"{what} needs about {memory(needed)}, and {memory(free)} are free; {remedy}", code="memory.short"
        )
