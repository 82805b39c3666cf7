"""Two workers against one, on a machine that has the cores to itself and on one that has not.

Both take the same blocks, in one process and in two, in turn and in an order that turns round each time; ratios are of
wall time within a round. Nothing is pinned to a core, for that is what is compared.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import available_cores, can_fork
from flower_privdec.engine.workers import Partitioning, WorkerPool
from flower_privdec.engine.workers.partitioning import block_count, multiplications, round_seconds
from tools.bench.timing import LONGEST, WARM_UP
from tools.bench.workloads import Setup, Workload

WORKERS = 2
BUSY = 2
STRETCH = 0.1  # seconds that one timed stretch should last at least
BUSY_LOOP = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
BUSY_SECONDS = 600  # after which a busy loop ends by itself


def compare_workers(workload: Workload, rounds: int) -> dict[str, Any]:
    """Time a workload by one worker and by two.

    Returns:
        blocks; and, alone and beside two busy loops, milliseconds a round by one and by two, and how many times as many
        rounds two take in a time (the median of the ratios within each turn).

    Raises:
        ScenarioError: there are no two cores, or nothing can be forked here.
    """
    if available_cores() < WORKERS or not can_fork():
        raise ScenarioError(f"two workers need Linux and {WORKERS} cores, and {available_cores()} may be used here")

    setup = Setup.build(workload)
    estimate = round_seconds(
        workload.n_peers, setup.d, workload.batch, multiplications(setup.module, setup.examples.x[:1])
    )
    blocks = block_count(workload.n_peers, estimate)
    if blocks == 1:
        return {"blocks": 1}

    cuts = tuple(number * workload.n_peers // blocks for number in range(blocks + 1))
    pools = [_pool(setup, Partitioning(cuts, workers)) for workers in (1, WORKERS)]
    try:
        with _one_thread():
            result = {"blocks": blocks, "alone": _turns(pools, rounds)}
            with busy_loops(BUSY):
                return result | {"busy": _turns(pools, rounds)}
    finally:
        for pool in pools:
            pool.close()


def _pool(setup: Setup, partitioning: Partitioning) -> WorkerPool:
    engine = setup.engine()
    return WorkerPool(engine.algorithm, engine.cohort, engine.state, partitioning)


def _turns(pools: list[WorkerPool], rounds: int) -> dict[str, float]:
    least = min(_seconds(pool, 1) for pool in pools for _ in range(WARM_UP))
    repeat = min(LONGEST, max(1, round(STRETCH / least)))
    taken = np.empty((rounds, len(pools)))
    for turn in range(rounds):
        order = range(len(pools)) if turn % 2 == 0 else reversed(range(len(pools)))
        for number in order:
            taken[turn, number] = _seconds(pools[number], repeat)
    one, two = taken.T
    return {
        "one_ms": float(np.median(one)) * 1e3,
        "two_ms": float(np.median(two)) * 1e3,
        "times": float(np.median(one / two)),
    }


def _seconds(pool: WorkerPool, count: int) -> float:
    began = time.perf_counter()
    pool.rounds(count)
    pool.collected()  # which waits for everybody
    return (time.perf_counter() - began) / count


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep to one thread in each product, without garbage collection; restore both afterwards."""
    threads = torch.get_num_threads()
    collecting = gc.isenabled()
    try:
        torch.set_num_threads(1)
        gc.disable()
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep so many processes busy beside this one."""
    code = BUSY_LOOP.format(seconds=BUSY_SECONDS)
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            with suppress(ProcessLookupError):
                loop.kill()
            loop.wait()
