"""Run the cells of a study that are not in the cache, some at a time, and go on when one fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from flower_privdec.errors import PrivdecError
from flower_privdec.scenario import to_yaml
from flower_privdec.study.cache import folder_of, is_finished, run_cell
from flower_privdec.study.cells import Cell

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
OnCell = Callable[["Outcome"], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: which.
        error: why it failed, or None.
    """

    cell: Cell
    error: str | None = None


def missing_cells(cells: Sequence[Cell], cache: Path) -> list[Cell]:
    """Return the cells to run, each scenario once."""
    distinct = {cell.key: cell for cell in reversed(cells)}
    wanted = [cell for cell in cells if distinct[cell.key] is cell]
    return [cell for cell in wanted if not is_finished(folder_of(cache, cell.key))]


def run_cells(cells: Sequence[Cell], cache: Path, jobs: int, on_cell: OnCell) -> list[Outcome]:
    """Run cells that are not finished, each in one thread, and return those that failed.

    Args:
        cells: distinct ones; see `missing_cells`.
        cache: the folder of the cells' folders.
        jobs: processes; 1 runs them in this one.
        on_cell: called after each.
    """
    failed = []
    for outcome in _here(cells, cache) if jobs == 1 else _in_processes(cells, cache, jobs):
        on_cell(outcome)
        if outcome.error is not None:
            failed.append(outcome)
    return failed


def _here(cells: Sequence[Cell], cache: Path) -> Iterator[Outcome]:
    for cell in cells:
        yield Outcome(cell, attempt(to_yaml(cell.scenario), folder_of(cache, cell.key)))


def _in_processes(cells: Sequence[Cell], cache: Path, jobs: int) -> Iterator[Outcome]:
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")  # the processes inherit it
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(cells)) or 1, mp_context=spawn, initializer=_end_with_the_study)
    try:
        waiting = {pool.submit(attempt, to_yaml(c.scenario), folder_of(cache, c.key)): c for c in cells}
        for future in as_completed(waiting):
            yield Outcome(waiting[future], _error_of(future))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_the_study() -> None:
    """End a worker by Ctrl-C without a traceback, and when its study is killed; its cell goes on another time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_wait_for_the_study, daemon=True).start()


def _wait_for_the_study() -> None:
    study = multiprocessing.parent_process()
    if study is not None:
        study.join()
        os._exit(1)


def _error_of(future: Future[str | None]) -> str | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return "its process was ended from outside (out of memory?); the same command goes on"


def attempt(text: str, folder: Path) -> str | None:
    """Run a cell; return why it failed, or None."""
    try:
        run_cell(text, folder)
    except PrivdecError as error:
        return str(error)
    except Exception as error:  # one cell's bug must not cost the others
        return f"{type(error).__name__}: {error}"
    return None
