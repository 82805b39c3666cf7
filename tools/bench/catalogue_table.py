"""`privdec bench --algorithms`: every algorithm of the catalogue beside its loop over peers and beside its floor.

An algorithm is timed only if it makes the loop's rounds, in float64 and with the same noise. Memory is measured in a
process for each: `python -m tools.bench.catalogue_table TITLE` prints it.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from flower_privdec.common.errors import RunError, ScenarioError
from tools.bench.catalogue_loops import ReplayedNoise, build_loop, engine_rows
from tools.bench.catalogue_tasks import TASKS, Task
from tools.bench.peak_memory import PROCESS, TIMEOUT, reset_peak, resident
from tools.bench.timing import paired, quiet, ratio

CPU = torch.device("cpu")
TOLERANCE = 1e-9  # in float64, of the largest number of a row
CHECKED = 3  # units
ENGINE = "engine"
LOOP = "loop"
LEAST_LOOPS = 3.0  # times the loop, and
MOST_FLOORS = 2.0  # times the floor: beyond these a reason is given
WIDTH = 200

Results = dict[str, dict[str, Any]]


def measure_catalogue(titles: list[str], rounds: int, *, memory: bool = True) -> Results:
    """Check and time some tasks, all for none.

    Returns:
        By title: description, engine_ms of one unit, times_the_loop, times_the_floor, floor (the milliseconds of its
        parts), error (of the check), reason ("" if both figures are within the bounds), memory_mib.

    Raises:
        ScenarioError: there is no such task.
        RunError: an engine computes something else than its loop; nothing more is timed.
    """
    for title in titles:
        if title not in TASKS:
            raise ScenarioError(f"algorithm={title!r} must be one of {'; '.join(TASKS)}", code="bench.unknown")

    results: Results = {}
    for title in titles or TASKS:
        print(f"{title}: comparing in float64, then timing", file=sys.stderr, flush=True)
        results[title] = measure_task(TASKS[title], rounds)
        if memory and PROCESS.is_dir():
            results[title]["memory_mib"] = peak(title)
    return results


def measure_task(task: Task, rounds: int) -> dict[str, Any]:
    """Check and time one task."""
    with quiet():
        error = check_task(task.small())
        setup = task.setup()
        engine = task.engine(setup)
        loop = build_loop(task, setup, engine)
        floors = task.floors()
        works = {name: work for name, (work, _) in floors.items()}
        times = paired({LOOP: loop.rounds, ENGINE: lambda: engine.rounds(task.unit)} | works, rounds, CPU)

    clock = times[ENGINE].clock
    floor = np.sum([times[name].clock * count for name, (_, count) in floors.items()], axis=0)
    of_loop = ratio(times[LOOP].clock, clock)
    of_floor = ratio(clock, floor)
    reason = ""
    if of_loop < LEAST_LOOPS or of_floor > MOST_FLOORS:
        reason = task.reason or "not known"
    return {
        "description": f"{task.describe()}, d = {setup.d:,}",
        "engine_ms": float(np.median(clock)) * 1e3,
        "times_the_loop": of_loop,
        "times_the_floor": of_floor,
        "floor": {name: float(np.median(times[name].clock)) * count * 1e3 for name, (_, count) in floors.items()},
        "error": error,
        "reason": reason,
    }


def check_task(task: Task) -> float:
    """Return by how much the rows of engine and loop differ in float64, relative to their largest number.

    Both draw the same examples and noise, so that models differ from peer to peer after the first round.

    Raises:
        RunError: they differ by more than TOLERANCE.
    """
    setup = task.setup(torch.float64)
    noise = ReplayedNoise(setup.d)
    engine = task.engine(setup, noise)
    loop = build_loop(task, setup, engine, noise)
    for _ in range(CHECKED):
        engine.rounds(task.unit)
        loop.rounds()

    worst = 0.0
    found = engine_rows(engine.algorithm, engine.state.rows)
    for name, expected in loop.rows().items():
        wanted = torch.stack(expected)
        error = float((found[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1))
        if not error <= TOLERANCE:
            raise RunError(
                f"{task.title}: after {CHECKED * task.unit} rounds the engine's {name!r} differs from the loop's by "
                f"{error:.1e} in float64, more than {TOLERANCE:.0e}; nothing was timed: run the tests of the algorithm",
                code="bench.differs",
            )
        worst = max(worst, error)
    return worst


def peak(title: str) -> float:
    """Return by how many MiB a few rounds raise the memory of a fresh process, beside data and compiled code."""
    done = subprocess.run([sys.executable, "-m", __name__, title], capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise RunError(f"the process that measures memory failed: {done.stderr.strip()[-300:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def _measure_peak(title: str) -> float:
    torch.set_num_threads(1)
    task = TASKS[title]

    # What a smaller run compiles and imports is there before the measurement.
    small = task.small()
    small.engine(small.setup()).rounds(small.unit)

    setup = task.setup()
    gc.collect()
    reset_peak()
    before = resident("VmRSS")
    engine = task.engine(setup)
    for _ in range(CHECKED):
        engine.rounds(task.unit)
    return (resident("VmHWM") - before) / 2**20


def print_catalogue(results: Results) -> None:
    """Print the table, and below it the reasons."""
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("algorithm", "task", "ms", "times the loop", "over its floor", "floor, ms", "memory, MiB", "reason"):
        table.add_column(column, justify="left" if column in ("algorithm", "task", "floor, ms", "reason") else "right")

    for title, result in results.items():
        floor = " + ".join(f"{name} {ms:.2f}" for name, ms in result["floor"].items())
        memory = f"{result['memory_mib']:.0f}" if "memory_mib" in result else "-"
        figures = [f"{result[key]:.2f}" for key in ("engine_ms", "times_the_loop", "times_the_floor")]
        table.add_row(title, result["description"], *figures, floor, memory, result["reason"])
    console.print(table)

    worst = max(result["error"] for result in results.values())
    console.print(
        f"Before the timing engine and loop agreed to {worst:.0e} in float64 (at most {TOLERANCE:.0e}, of a row's "
        "largest number), with the same examples and noise."
    )


if __name__ == "__main__":
    print(json.dumps(_measure_peak(sys.argv[1])))
