"""The cells of a study: one scenario for each combination of its axes and each seed, run once each, in parallel."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flower_privdec import __version__
from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.common.user_code import Given, raised_at
from flower_privdec.data.datasets import open_dataset, read_public
from flower_privdec.experiment.run_key import code_of
from flower_privdec.scenario import Scenario, anchored, own_parts, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.loading import read_text
from flower_privdec.studies.spec import Part, Point, Size, Study, kinds_of, metric

RESULT_FILES = {"summary.json", "metrics.jsonl", "scenario.yaml", "cell.json", "lock"}
CACHE = Path("runs") / "cells"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
Labels = tuple[str, ...]
Choices = dict[str, dict[Labels, Labels]]  # by part: the labels of its groups, and those that were best there
MOST_CELLS = 20_000


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        labels: one label for each axis, in the order of the axes.
        key: of its scenario, see `cell_key`: cells that share it share one run.
        ignores: places of axes on which it does not depend.
        waits: whether its settings are not all known, for the part that they are chosen in is not finished.
    """

    part: str
    labels: Labels
    seed: int
    scenario: Scenario
    key: str
    ignores: frozenset[int] = frozenset()
    waits: bool = False

    @property
    def title(self) -> str:
        """Return its name in messages."""
        return f"{self.part}: {', '.join(self.labels)}, seed {self.seed}"

    @property
    def work(self) -> float:
        """Return its estimated cost, to estimate the time left: examples trained on and evaluated."""
        scenario = self.scenario
        evaluations = scenario.rounds / scenario.evaluation.every
        per_peer = (scenario.data.samples or 10_000) / scenario.n_peers
        batch = scenario.data.batch.size or (scenario.data.batch.rate or 1) * per_peer
        evaluated = evaluations * (scenario.data.test_samples or 10_000) / 3  # forward only
        return scenario.n_peers * (scenario.rounds * (batch + 4) + evaluated)


def expand(
    study: Study,
    base: Path,
    size: str | None,
    parts: Iterable[Part],
    settings: Sequence[str] = (),
    choices: Choices | None = None,
) -> list[Cell]:
    """Return all cells of some parts, every scenario checked.

    Settings are laid over the base in this order: the study, its size, the part, the part's size, the points of
    the axes in order, the part's cases, `settings`, and the seed.

    Args:
        choices: of the parts that others are chosen in; where one lacks, a cell waits, and has the first point.

    Raises:
        ScenarioError: naming the cell whose scenario breaks a rule, or a part of too many cells.
    """
    text = read_text(base)
    all_cells = []
    for part in parts:
        layers = [study, study.sizes.get(size or ""), part, part.sizes.get(size or "")]
        common = [line for layer in layers if layer is not None for line in layer.settings]
        seeds = [layer.seeds for layer in layers if isinstance(layer, Study | Size) and layer.seeds]
        repetitions = [[f"seed={seed}"] for seed in seeds[-1]] if seeds else [[]]
        points = [axis.all_points() for axis in part.axes_at(size).values()]
        source = next((other for other in study.parts if other.name == part.chosen_in), None)
        count = math.prod(map(len, points)) * len(repetitions)
        if count > MOST_CELLS:
            raise ScenarioError(
                f"part {part.name}: {count:,} cells must be at most {MOST_CELLS:,}; use fewer points, axes or seeds",
                code="study.too-many-cells",
            )
        common_after = [*settings, f"name={json.dumps(study.name)}"]
        cells: list[Cell] = []
        for combination in itertools.product(*points):
            best = None
            if source is not None:
                place = {name: point.label for name, point in zip(part.axes, combination, strict=True)}
                shared = tuple(place[name] for name in source.axes_at(size) if name not in source.best_over)
                best = (choices or {}).get(source.name, {}).get(shared)
            waits = source is not None and best is None
            own = _own_settings(part, source, size, combination, best)
            for seed in repetitions:
                lines = [*anchored([*common, *own], study.folder), *common_after, *seed]
                cell = _cell(part, combination, text, base, lines)
                cells.append(replace(cell, waits=True, key=f"waits-{cell.key}") if waits else cell)
        _check_rows(part, cells)
        if len({cell.key for cell in cells[: len(repetitions)]}) < len(repetitions):
            raise ScenarioError(
                f"part {part.name}: seeds data, model and run are all given in the scenario, so that another seed "
                "changes nothing; leave out those that the study's seeds should vary",
                code="study.seeds-fixed",
            )
        for i, path in enumerate(part.fields):
            if not any(_has_field(cell.scenario, path) for cell in cells):
                raise ScenarioError(
                    f"part {part.name}: fields.{i}={path!r} must be a key of a scenario, as algorithm.learning_rate",
                    code="study.unknown-field",
                )
        kinds = kinds_of(cell.scenario for cell in cells)
        for key, name in part.all_metrics().items():
            try:
                metric(name, kinds)
            except ScenarioError as error:
                raise ScenarioError(f"part {part.name}, {key}: {error}", code=error.code) from error
            if name == "training-loss" and not all(cell.scenario.evaluation.training_loss for cell in cells):
                raise ScenarioError(
                    f"part {part.name}, {key}: '{name}' is measured where a scenario asks for it; set "
                    "evaluation.training_loss=true (and, with privacy, evaluation.private=ignored) in all cells",
                    code="study.training-loss",
                )
        all_cells += cells
    return all_cells


def _own_settings(
    part: Part, source: Part | None, size: str | None, combination: Sequence[Point], best: Labels | None
) -> list[str]:
    """Return a cell's settings of its points and cases, as if an axis chosen in another part stood where it does there.

    Args:
        source: the part that this one is chosen in.
        best: the labels chosen there; None takes the first.
    """
    points, cases = dict(zip(part.axes, combination, strict=True)), list(part.cases)
    if source is not None:
        axes = source.axes_at(size)
        names = [name for name in axes if name in source.best_over]
        chosen = dict(zip(names, best or [axes[name].labels()[0] for name in names], strict=True))
        everything = {(name, point.label): point for name, axis in axes.items() for point in axis.all_points()}
        points = {name: points.get(name) or everything[name, chosen[name]] for name in axes} | points
        cases = [case for case in source.cases if not case.where.keys().isdisjoint(chosen)] + cases
    labels = {name: point.label for name, point in points.items()}.items()
    lines = [line for point in points.values() for line in point.settings]
    return lines + [line for case in cases if labels >= case.where.items() for line in case.settings]


def _cell(part: Part, combination: Sequence[Point], text: str, base: Path, settings: list[str]) -> Cell:
    labels = tuple(point.label for point in combination)
    try:
        scenario = parse_scenario(text, where=str(base), overrides=settings, folder=base.parent)
    except ScenarioError as error:
        problem = str(error).removeprefix("--set: ")  # most settings are the study's
        raise ScenarioError(f"part {part.name}, cell {', '.join(labels)}: {problem}", code=error.code) from error
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"part {part.name}: privacy.ledger must be left out of a study: every cell has its own", code="study.ledger"
        )
    places = {name: place for place, name in enumerate(part.axes)}
    ignores = frozenset(places[name] for point in combination for name in point.ignores)
    return Cell(part.name, labels, scenario.seed, scenario, cell_key(scenario), ignores)


def cell_key(scenario: Scenario) -> str:
    """Return what decides a run's results: the scenario, and the code of the user's own parts that it names.

    Raises:
        ScenarioError: a part cannot be loaded.
    """
    key, parts = scenario_hash(scenario, movable=False), own_parts(scenario, metrics=True)
    if not parts:
        return key
    digest = hashlib.sha256(key.encode())
    targets = [part.target.encode() for part in parts if isinstance(part, Given)]
    for code in (*code_of([part for part in parts if not isinstance(part, Given)]), *targets):
        digest.update(len(code).to_bytes(8, "little") + code)
    return digest.hexdigest()


def _check_rows(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse rows that are not what they are called: one run in two of them, or several where a point ignores an axis.

    Raises:
        ScenarioError: naming the two cells.
    """
    axes, runs, rows = list(part.axes), dict[tuple[str, int], Cell](), dict[tuple[Labels, int], Cell]()
    for cell in cells:
        first = runs.setdefault((cell.key, cell.seed), cell)
        differing = {
            place for place, pair in enumerate(zip(first.labels, cell.labels, strict=True)) if len({*pair}) > 1
        }
        if differing - (first.ignores & cell.ignores):
            raise ScenarioError(
                f"part {part.name}: {_row(first)} and {_row(cell)} are one run, so that one of the two rows is not "
                "what it is called; let their settings differ, or, where a point makes no use of an axis, give it "
                f"`ignores: [{', '.join(axes[place] for place in sorted(differing))}]`",
                code="study.one-run",
            )
        used = tuple("" if place in cell.ignores else label for place, label in enumerate(cell.labels))
        same = rows.setdefault((used, cell.seed), cell)
        if same.key != cell.key:
            ignored = ", ".join(axes[place] for place in sorted(cell.ignores))
            raise ScenarioError(
                f"part {part.name}: {_row(same)} and {_row(cell)} are different runs, and a point of theirs has "
                f"`ignores: [{ignored}]`; leave that out",
                code="study.ignores",
            )


def _row(cell: Cell) -> str:
    return f"'{', '.join(cell.labels)}'"


def check_data(cells: Iterable[Cell]) -> None:
    """Read the public test sets of some cells, and find their training sets, before the first of them runs.

    Raises:
        ScenarioError: naming the cell whose data cannot be read.
    """
    checked = set[str]()
    for cell in cells:
        section, targets = cell.scenario.data, cell.scenario.task.targets
        key = f"{section.model_dump_json(exclude={'batch', 'partition', 'samples'})} {targets}"
        if key in checked:
            continue
        checked.add(key)
        try:
            read_public(section, cell.scenario.seed_of("data"), targets)
            if section.test is not None and not section.each_its_own:
                open_dataset(section, section.root, targets)
        except ScenarioError as error:
            raise ScenarioError(f"{cell.title}: {error}", code=error.code) from error


def _has_field(value: Any, path: str) -> bool:
    for name in path.split("."):
        if name not in getattr(type(value), "model_fields", ()):
            return False
        value = getattr(value, name)
    return True


def folder_of(cache: Path, key: str) -> Path:
    """Return the folder of the cell with a key."""
    return cache / key[:20]


def is_finished(folder: Path) -> bool:
    """Return whether a cell ran to its end: cell.json is the last file written."""
    return (folder / "cell.json").is_file()


def run_cell(text: str, folder: Path) -> None:
    """Run a cell's scenario to its end, from its checkpoint if it has one, and keep only its results.

    A lock on the folder makes two studies that share a cell run it once.
    """
    from flower_privdec.engine.run import run
    from flower_privdec.experiment import Experiment

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if is_finished(folder):
            return
        began = time.process_time()
        resume = (folder / "checkpoint").exists()
        if not resume:
            _clear(folder, {"lock"})  # files of a run that ended before its first checkpoint
        run(Experiment.build(parse_scenario(text)), folder, resume=resume, lean=True, workers=1)
        _clear(folder, RESULT_FILES)
        facts = {"seconds": round(time.process_time() - began, 1), "version": __version__}
        write_atomically(folder / "cell.json", json.dumps(facts).encode())


def _clear(folder: Path, keep: set[str]) -> None:
    """Delete all but some files, such as the checkpoint and the ledgers of this one run."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


class Outcome(NamedTuple):
    """A cell that has run.

    Attributes:
        error: why it failed, or None.
    """

    cell: Cell
    error: str | None = None


def missing_cells(cells: Sequence[Cell], cache: Path) -> list[Cell]:
    """Return the cells that are not finished, each scenario once."""
    distinct = {cell.key: cell for cell in reversed(cells)}
    firsts = [cell for cell in cells if distinct[cell.key] is cell]
    return [cell for cell in firsts if not is_finished(folder_of(cache, cell.key))]


OnCell = Callable[[Outcome], None]


def run_cells(cells: Sequence[Cell], cache: Path, jobs: int, on_cell: OnCell) -> list[Outcome]:
    """Run cells that are not finished, each in one thread; return those that failed, which stop no others.

    Args:
        cells: distinct ones; see `missing_cells`.
        jobs: processes; 1 runs them in this one.
    """
    failed = []
    runs = [(cell, to_yaml(cell.scenario), folder_of(cache, cell.key)) for cell in cells]
    here = (Outcome(cell, attempt(text, folder)) for cell, text, folder in runs)
    for outcome in here if jobs == 1 else _in_processes(runs, jobs):
        on_cell(outcome)
        if outcome.error is not None:
            failed.append(outcome)
    return failed


def _in_processes(runs: Sequence[tuple[Cell, str, Path]], jobs: int) -> Iterator[Outcome]:
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")  # the processes inherit it
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(runs)) or 1, mp_context=spawn, initializer=_end_with_the_study)
    try:
        waiting = {pool.submit(attempt, text, folder): cell for cell, text, folder in runs}
        for future in as_completed(waiting):
            try:
                yield Outcome(waiting[future], future.result())
            except BrokenProcessPool:
                error = "its process was ended from outside (out of memory?); the same command resumes it"
                yield Outcome(waiting[future], error)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_the_study() -> None:
    """End a worker at Ctrl-C without a traceback, and when its parent is killed; its cell resumes another time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def attempt(text: str, folder: Path) -> str | None:
    """Run a cell; return why it failed, or None."""
    try:
        run_cell(text, folder)
    except PrivdecError as failure:
        return str(failure)
    except Exception as failure:  # one cell's bug must not cost the others
        return f"{raised_at(failure)}: {failure}"
    return None
