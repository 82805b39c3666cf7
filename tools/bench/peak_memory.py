"""Peak memory of the engine in a process of its own: `python -m tools.bench.peak_memory W1 1000 auto`."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flower_privdec.common.errors import RunError
from tools.bench.workloads import WORKLOADS, Setup

PROCESS = Path("/proc/self")
ROUNDS = 3
TIMEOUT = 300


def peak_memory(workload: str, n_peers: int) -> dict[str, Any]:
    """Run a few rounds in a fresh process.

    Returns:
        bytes: how far its memory rose above what the program, the data and the compiled code take.
        batch_bytes: what of that is the examples of one round.
        rows: the rest in units of n d numbers.
    """
    if not PROCESS.is_dir():
        raise RunError("peak memory is read from /proc, which this system does not have")
    command = [sys.executable, "-m", __name__, workload, str(n_peers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RunError(f"the process that measures memory failed: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def resident(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    """Let the peak of this process's memory be what it is now, if the system can."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def _measure(workload: str, n_peers: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    small = Setup.build(WORKLOADS[workload].resized(2)).engine()
    for _ in range(ROUNDS):
        small.round()
    setup = Setup.build(WORKLOADS[workload].resized(n_peers))
    gc.collect()
    reset_peak()
    before = resident("VmRSS")
    engine = setup.engine()
    for _ in range(ROUNDS):
        engine.round()
    used = resident("VmHWM") - before
    batch = engine.cohort.data.batch(0, engine.cohort.peers).x.nbytes
    rows = (used - batch) / (n_peers * setup.d * setup.dtype.itemsize)

    return {"peers": n_peers, "bytes": used, "batch_bytes": batch, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
