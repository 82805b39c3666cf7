"""Run a study's missing cells, and publish it."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from flower_privdec.common.errors import ScenarioError
from flower_privdec.studies.cells import (
    CACHE,
    CELL,
    Cell,
    Choices,
    OnCell,
    Outcome,
    check_builds,
    check_data,
    check_unchanged,
    expand,
    folder_of,
    is_finished,
    make_cache,
    missing_cells,
    run_cells,
)
from flower_privdec.studies.publish import make_folder, publish
from flower_privdec.studies.results import PartResult, collect
from flower_privdec.studies.spec import Study, load_study


@dataclass(frozen=True)
class Publication:
    """What was published, and its folder.

    Attributes:
        parts: the published parts.
        failed: the cells whose runs failed.
        folder: the folder of README.md, the tables and the figures.
    """

    parts: list[PartResult]
    failed: list[Outcome]
    folder: Path


def choices_of(
    study: Study, size: str | None, cells: Sequence[Cell], cache: Path, failed: Sequence[Outcome] = ()
) -> Choices:
    """Return what is chosen in the parts that others are chosen in, for each place whose cells are finished.

    Args:
        failed: cells that count as finished: a learning rate at which a run fails is not the best.
    """
    sources = {part.chosen_in for part in study.parts}
    tried = {outcome.cell.key for outcome in failed}
    choices = Choices()
    for part in study.parts:
        if part.name not in sources:
            continue

        # A place is decided when all cells along the axes in `best_over` are finished, or have failed.
        free = [name not in part.best_over for name in part.axes_at(size)]
        waiting = set[tuple[str, ...]]()
        for cell in cells:
            if cell.part == part.name and cell.key not in tried and not is_finished(folder_of(cache, cell.key)):
                waiting.add(tuple(itertools.compress(cell.labels, free)))
        groups = collect(part, size, cells, cache).groups
        decided = [group for group in groups if group.runs and group.labels not in waiting]

        first = part.metrics[0]
        for group in decided:
            if not group.finals(first):
                raise ScenarioError(
                    f"part {part.name}: no run of '{', '.join(group.labels)}' has the {group.metric(first).title} by "
                    "which the best is chosen; put another metric first",
                    code="study.nothing-chosen",
                )
        choices[part.name] = {group.labels: group.chosen for group in decided if group.final(first) is not None}
    return choices


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
        only: parts to run; any other is published if all its cells are finished already.

    Raises:
        ScenarioError: a study or a cell breaks a rule, and nothing has run then; or no run is finished.
    """
    study, base = load_study(name)
    chosen = study.chosen(only)
    size = study.size(size)
    title = study.name if size is None else f"{study.name}-{size}"
    out = out or Path("results") / title
    names = {part.name for part in chosen}

    failed: list[Outcome] = []
    checked = set[str]()
    choices = Choices()
    before = None
    # What one part chooses, another runs: it ends when a pass over all parts chooses nothing new.
    while choices != before:
        cells = expand(study, base, size, study.parts, settings, choices)
        tried = {outcome.cell.key for outcome in failed}
        if jobs:
            missing = missing_cells([cell for cell in cells if cell.part in names], cache)
        else:
            missing = []
        to_run = [cell for cell in missing if not cell.waits and cell.key not in tried]

        # All that can be wrong is looked at before hours of cells are run.
        check_data(missing, checked)
        check_builds(missing, checked, {part.name: part.all_metrics().values() for part in study.parts})
        make_folder(study, size, out)
        if to_run:
            make_cache(cache)
        with progress(title, to_run) as on_cell:
            failed += run_cells(to_run, cache, jobs, on_cell)
        check_unchanged(to_run)
        before = choices
        choices = choices_of(study, size, cells, cache, failed)

    results = [collect(part, size, cells, cache) for part in study.parts]
    shown = [result for result in results if result.part.name in names or result.complete]
    if not failed and not any(group.runs for result in shown for group in result.groups):
        stale = sum((folder_of(cache, key) / CELL).is_file() for key in {cell.key for cell in cells})
        remedy = "run the study in the folder of its cells, or with --jobs 1"
        if stale:
            remedy = f"{stale} cells there are of another version, or were changed; run them again, with --jobs 1"
        raise ScenarioError(
            f"no run of study {study.name} is finished in {cache}, the folder of its cells: nothing is published to "
            f"{out}; {remedy}",
            code="study.nothing-finished",
        )

    command = ["privdec", "study", name]
    if size is not None:
        command += ["--size", size]
    if len(shown) < len(study.parts):
        for result in shown:
            command += ["--only", result.part.name]
    for setting in settings:
        command += ["--set", setting]
    publish(study, size, shlex.join(command), shown, failed, out)
    return Publication(shown, failed, out)
