"""Finished cells on disk, found by their scenario's hash."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flower_privdec import __version__
from flower_privdec.common.files import write_atomically
from flower_privdec.scenario import parse_scenario

KEPT = {"summary.json", "metrics.jsonl", "scenario.yaml", "cell.json", "lock"}
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
        _clear(folder, KEPT)
        facts = {"seconds": round(time.process_time() - began, 1), "version": __version__}
        write_atomically(folder / "cell.json", json.dumps(facts).encode())


def _clear(folder: Path, kept: set[str]) -> None:
    """Delete what a study does not read: the checkpoint and the ledgers of this one run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
