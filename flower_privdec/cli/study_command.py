"""`privdec study`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import duration
from flower_privdec.reporting.progress import counting_bar, error_console
from flower_privdec.scenario.loading import shipped
from flower_privdec.studies.cells import CACHE, Cell, OnCell, Outcome, expand, missing_cells
from flower_privdec.studies.publish import columns, row, scope_of_epsilon
from flower_privdec.studies.results import PartResult, criterion, judge
from flower_privdec.studies.runner import choices_of, run_and_publish
from flower_privdec.studies.spec import load_study


@contextmanager
def study_progress(name: str, cells: Sequence[Cell], console: Console | None = None) -> Iterator[OnCell]:
    """Show on stderr how many cells are done while the context lasts; yield a function to call after each."""
    console = console or error_console()
    began = time.monotonic()
    work = sum(cell.work for cell in cells)  # cells take very different times: what is left is told by their work
    done = 0
    work_done = 0.0

    with counting_bar(console) as bar:
        task = bar.add_task(f"study {name}", total=len(cells), left="")

        def on_cell(outcome: Outcome) -> None:
            nonlocal done, work_done
            done += 1
            work_done += outcome.cell.work
            seconds_for_one = (time.monotonic() - began) / work_done
            left = f"{duration(seconds_for_one * (work - work_done))} left"
            bar.update(task, completed=done, left=left)

            if outcome.error is not None:
                console.print(f"failed: {outcome.cell.title}: {outcome.error}", soft_wrap=True)
            elif not console.is_terminal:
                console.print(f"{done}/{len(cells)}  {outcome.cell.title}  {left}".rstrip(), soft_wrap=True)

        yield on_cell


def run_study(
    name: str,
    *,
    size: str | None = None,
    out: Path | None = None,
    jobs: int = 2,
    only: Sequence[str] = (),
    settings: Sequence[str] = (),
    cache: Path = CACHE,
    console: Console | None = None,
) -> list[PartResult]:
    """Run a study's missing cells and publish its tables, figures and verdicts.

    Args:
        jobs: processes, each of one thread; 0 runs nothing and publishes the finished cells.
        only: parts to run; any other is published if all its cells are finished already.

    Returns:
        The published parts.

    Raises:
        ScenarioError: a study or a cell breaks a rule; nothing has run then.
        RunError: some cells failed; the others are published.
    """
    progress = partial(study_progress, console=console)
    published = run_and_publish(
        name, progress, size=size, out=out, jobs=jobs, only=only, settings=settings, cache=cache
    )
    print_verdicts(published.parts, published.folder, console)

    failed = published.failed
    if failed:
        raise RunError(
            f"{len(failed)} cells failed, the first: {failed[0].cell.title}: {failed[0].error}; "
            "the others are published; the same command tries the failed ones again",
            code="study.cells-failed",
        )
    return published.parts


def print_verdicts(results: Sequence[PartResult], out: Path, console: Console | None = None) -> None:
    """Print each part's verdicts, or its table if it claims nothing, and the path of the published page."""
    console = console or Console(highlight=False, markup=False, emoji=False)
    for result in results:
        console.print(result.part.heading, style="bold")
        if not result.part.checks:
            table = Table(*columns(result), box=None, pad_edge=False)
            for group in result.groups:
                table.add_row(*row(result, group))
            console.print(table)
        for check in result.part.checks:
            console.print(f"  {criterion(check, result)}: {judge(check, result).sentence}")

    if scope := scope_of_epsilon(results):
        console.print(scope)
    console.print(f"published: {out}/README.md")


def print_studies() -> None:
    """List the studies and their parts."""
    table = Table("study", "part", "question", box=None, pad_edge=False)
    for name in shipped("studies"):
        study, _ = load_study(name)
        table.add_row(name, "", study.heading)
        for part in study.parts:
            table.add_row("", part.name, part.heading)
    Console(highlight=False, markup=False, emoji=False).print(table)


def print_cells(name: str, size: str | None, only: Sequence[str], settings: Sequence[str]) -> None:
    """Print how many cells each part has and how many are still to run; run nothing."""
    study, base = load_study(name)
    size = study.size(size)
    parts = study.chosen(only)

    # Some cells depend on what others have chosen, so the list is made twice.
    cells: list[Cell] = expand(study, base, size, parts, settings)
    cells = expand(study, base, size, parts, settings, choices_of(study, size, cells, CACHE))

    table = Table("part", "cells", "to run", box=None, pad_edge=False)
    for part in parts:
        mine = [cell for cell in cells if cell.part == part.name]
        table.add_row(part.name, str(len(mine)), str(len(missing_cells(mine, CACHE))))
    table.add_row("together", str(len(cells)), str(len(missing_cells(cells, CACHE))))
    Console(highlight=False, markup=False, emoji=False).print(table)
