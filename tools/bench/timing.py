"""Time several variants of the same work side by side on a shared machine.

One thread on one core, the garbage collector off; every variant once a round, in alternating order;
ratios are taken within a round. Process time is the measure on a CPU, for it does not count what others do; on a
GPU it is wall time, with the device synchronised.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

STRETCH = 0.03  # seconds that one timed stretch should last at least
LONGEST = 100  # repetitions in a stretch
WARM_UP = 2

Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds each repetition took, one number for each timed round.

    Attributes:
        clock: process time on a CPU, wall time on a GPU.
        wall: wall time.
        first: wall time of the very first call, which compiles what has to be compiled.
    """

    clock: np.ndarray
    wall: np.ndarray
    first: float

    def facts(self) -> dict[str, float]:
        """Return median and minimum by the clock and the median by the wall, in milliseconds."""
        return {
            "ms": float(np.median(self.clock)) * 1e3,
            "min_ms": float(self.clock.min()) * 1e3,
            "wall_ms": float(np.median(self.wall)) * 1e3,
        }


@contextmanager
def quiet() -> Iterator[None]:
    """Keep to one core and one thread, without garbage collection; restore all three afterwards."""
    threads = torch.get_num_threads()
    collecting = gc.isenabled()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        if cores is not None:
            os.sched_setaffinity(0, {max(cores)})

        torch.set_num_threads(1)
        gc.collect()
        gc.disable()
        yield
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def once(work: Work, device: torch.device) -> tuple[float, float]:
    """Return what one call took by the clock and by the wall, in seconds."""
    _synchronize(device)
    wall = time.perf_counter()
    process = time.process_time()
    work()
    _synchronize(device)
    process = time.process_time() - process
    wall = time.perf_counter() - wall
    return (process if device.type == "cpu" else wall), wall


def paired(works: Mapping[str, Work], rounds: int, device: torch.device) -> dict[str, Times]:
    """Time all works side by side.

    Args:
        works: what to time, by name.
        rounds: how many times each is timed.
        device: what to synchronise with.
    """
    first = {name: once(work, device)[1] for name, work in works.items()}
    repeat = {name: _repetitions(work, device) for name, work in works.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for index in range(rounds):
        for name in list(works) if index % 2 == 0 else reversed(list(works)):
            if repeat[name] > 1:
                works[name]()  # fills the caches, as the round before does in a run
            took = once(_repeated(works[name], repeat[name]), device)
            samples[name].append((took[0] / repeat[name], took[1] / repeat[name]))
    columns = {name: np.array(samples[name]).T for name in works}
    return {name: Times(clock, wall, first[name]) for name, (clock, wall) in columns.items()}


def ratio(over: np.ndarray, under: np.ndarray) -> float:
    """Return the median of the ratios within each round."""
    return float(np.median(over / under))


def _repetitions(work: Work, device: torch.device) -> int:
    least = min(once(work, device)[0] for _ in range(WARM_UP))
    return min(LONGEST, max(1, math.ceil(STRETCH / max(least, 1e-9))))


def _repeated(work: Work, count: int) -> Work:
    def run() -> None:
        for _ in range(count):
            work()

    return run


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
