"""Run the cells of a study that are not yet finished, in parallel; a failing cell does not stop the others."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flower_privdec import __version__
from flower_privdec.common.files import write_atomically
from flower_privdec.errors import PrivdecError
from flower_privdec.scenario import parse_scenario, to_yaml
from flower_privdec.study.cells import Cell

RESULT_FILES = {"summary.json", "metrics.jsonl", "scenario.yaml", "cell.json", "lock"}
CACHE = Path("runs") / "cells"


def folder_of(cache: Path, key: str) -> Path:
    """Return where the cell with a scenario's hash lies."""
    return cache / key[:20]


def is_finished(folder: Path) -> bool:
    """Return whether a cell ran to its end: its own note is the last file written."""
    return (folder / "cell.json").is_file()


def run_cell(text: str, folder: Path) -> None:
    """Run a cell's scenario to its end, from its checkpoint where it has one, and keep only its results.

    Two studies that share a cell wait for one another; the second finds it finished.
    """
    from flower_privdec.engine.run import run
    from flower_privdec.experiment import Experiment

    with _locked(folder):
        if is_finished(folder):
            return
        began = time.process_time()
        resume = (folder / "checkpoint").exists()
        if not resume:
            _clear(folder, {"lock"})  # what a run left that ended before its first checkpoint
        run(Experiment.build(parse_scenario(text)), folder, resume=resume, lean=True, workers=1)
        _clear(folder, RESULT_FILES)
        facts = {"seconds": round(time.process_time() - began, 1), "version": __version__}
        write_atomically(folder / "cell.json", json.dumps(facts).encode())


def _clear(folder: Path, names: set[str]) -> None:
    """Delete what a study does not read: the checkpoint and the ledgers of this one run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    firsts = [cell for cell in cells if distinct[cell.key] is cell]
    return [cell for cell in firsts if not is_finished(folder_of(cache, cell.key))]


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
