"""`privdec study`."""

from __future__ import annotations

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

SETTLED = 60.0  # seconds; a cell so long shows the pace even if its process had to compile first


class TimeLeft:
    """Estimates the time that the cells of a study still take, from those that are done.

    The first cell of a process compiles kernels, so it counts only if it was long. Each algorithm has its own pace.
    """

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        """Start with all cells to run."""
        self._waiting = {cell.key: cell for cell in cells}
        self._jobs = max(1, min(jobs, len(cells)))
        self._paces: dict[str, list[tuple[float, float]]] = {}  # by algorithm: seconds and work of a cell

    def after(self, outcome: Outcome) -> float | None:
        """Return the seconds left after a cell, or None where no pace is known yet."""
        cell = self._waiting.pop(outcome.cell.key)
        if outcome.warm or outcome.seconds > SETTLED:
            self._paces.setdefault(cell.scenario.algorithm.name, []).append((outcome.seconds, cell.work))
        if not self._waiting:
            return 0.0
        every = [pair for pairs in self._paces.values() for pair in pairs]
        if not every:
            return None

        def expected(cell: Cell) -> float:
            pairs = self._paces.get(cell.scenario.algorithm.name, every)
            return cell.work * sum(seconds for seconds, _ in pairs) / sum(work for _, work in pairs)

        seconds = [expected(cell) for cell in self._waiting.values()]
        begun = sum(seconds[: self._jobs - 1]) / 2  # those that other processes have begun are half done on average
        return (sum(seconds) - begun) / min(self._jobs, len(seconds))


@contextmanager
def study_progress(name: str, cells: Sequence[Cell], jobs: int, console: Console | None = None) -> Iterator[OnCell]:
    """Show on stderr how many cells are done while the context lasts; yield a function to call after each."""
    console = console or error_console()
    time_left, done = TimeLeft(cells, jobs), 0
    with counting_bar(console) as bar:
        task = bar.add_task(f"study {name}", total=len(cells), left="")

        def on_cell(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            seconds = time_left.after(outcome)
            left = "" if seconds is None else f"{duration(seconds)} left"
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
        only: parts to run; others are published where all their cells are finished already.

    Returns:
        The published parts.

    Raises:
        ScenarioError: a study or a cell that breaks a rule; nothing has run then.
        RunError: when cells failed; the others are published.
    """
    progress = partial(study_progress, jobs=jobs, console=console)
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
    """Print each part's verdicts, or its table where it claims nothing, and the path of the published page."""
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
    size, parts = study.size(size), study.chosen(only)
    cells: list[Cell] = expand(study, base, size, parts, settings)
    cells = expand(study, base, size, parts, settings, choices_of(study, size, cells, CACHE))
    table = Table("part", "cells", "to run", box=None, pad_edge=False)
    for part in parts:
        mine = [cell for cell in cells if cell.part == part.name]
        table.add_row(part.name, str(len(mine)), str(len(missing_cells(mine, CACHE))))
    table.add_row("together", str(len(cells)), str(len(missing_cells(cells, CACHE))))
    Console(highlight=False, markup=False, emoji=False).print(table)
