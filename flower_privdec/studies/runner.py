"""Run a study's missing cells, and publish it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from flower_privdec.studies.cells import CACHE, Cell, OnCell, Outcome, check_data, expand, missing_cells, run_cells
from flower_privdec.studies.publish import make_folder, publish
from flower_privdec.studies.results import PartResult, collect
from flower_privdec.studies.spec import load_study


@dataclass(frozen=True)
class Publication:
    """What was published, and where.

    Attributes:
        parts: the published parts.
        failed: the cells whose runs failed.
        folder: of README.md, the tables and the figures.
    """

    parts: list[PartResult]
    failed: list[Outcome]
    folder: Path


def run_and_publish(
    name: str,
    progress: Callable[[str, Sequence[Cell]], AbstractContextManager[OnCell]],
    *,
    size: str | None = None,
    out: Path | None = None,
    jobs: int = 2,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    cache: Path = CACHE,
) -> Publication:
    """Run a study's missing cells and publish its tables, figures and verdicts.

    Args:
        progress: takes the title and the cells to run; gives a function to call after each.
        jobs: processes, each of one thread; 0 runs nothing and publishes the finished cells.
        only: parts to run; others are published where all their cells are finished already.

    Raises:
        ScenarioError: a study or a cell that breaks a rule; nothing has run then.
    """
    study, base = load_study(name)
    chosen, size = study.chosen(only), study.size(size)
    title = study.name if size is None else f"{study.name}-{size}"
    out = out or Path("results") / title
    cells = expand(study, base, size, study.parts, settings)
    names = {part.name for part in chosen}
    missing = missing_cells([cell for cell in cells if cell.part in names], cache) if jobs else []
    check_data(missing)
    make_folder(out)
    with progress(title, missing) as on_cell:
        failed = run_cells(missing, cache, jobs, on_cell)
    results = [collect(part, size, cells, cache) for part in study.parts]
    shown = [result for result in results if result.part.name in names or result.complete]
    parts = [] if len(shown) == len(study.parts) else [result.part.name for result in shown]
    options = [("--size", size)] if size is not None else []
    options += [("--only", part) for part in parts] + [("--set", setting) for setting in settings]
    command = shlex.join(["privdec", "study", name, *(word for option in options for word in option)])
    publish(study, size, command, shown, failed, out)
    return Publication(shown, failed, out)
