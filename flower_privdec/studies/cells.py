"""The cells of a study: one scenario for each combination of its axes and each seed, run once each, in parallel."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flower_privdec import __version__
from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError, option
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import shown
from flower_privdec.common.user_code import Given, raised_at
from flower_privdec.data.datasets import Examples, check_fit, open_dataset, read_public
from flower_privdec.experiment.source_code import code_of
from flower_privdec.scenario import Scenario, anchored, own_parts, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.loading import PATHS, read_text
from flower_privdec.scenario.sections import PEER
from flower_privdec.studies.spec import Axis, Part, Point, Size, Study, for_cells, kinds_of, metric

MODEL_FILES = ("model.safetensors", "scenario.yaml", "summary.json")  # of the run that model.from names
READ_FILES = ("summary.json", "metrics.jsonl", "scenario.yaml")
CELL = "cell.json"
INPUTS = "inputs.json"
RESULT_FILES = (*READ_FILES, CELL, "lock")
CACHE = Path("runs") / "cells"
CHANGED = "a file or a module of yours changed while the study ran; run the same command again"
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
        own: the settings of its points and cases, without those that are chosen.
    """

    part: str
    labels: Labels
    seed: int
    scenario: Scenario
    key: str
    ignores: frozenset[int] = frozenset()
    waits: bool = False
    own: tuple[str, ...] = ()

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
        choices: of the parts that others are chosen in; without one, a cell waits, and has the first point.

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
        _check_settings(settings)

        cells: list[Cell] = []
        for combination in itertools.product(*points):
            best = None
            if source is not None:
                # What was chosen at the same place of the axes that both parts have.
                place = {name: point.label for name, point in zip(part.axes, combination, strict=True)}
                shared = tuple(place[name] for name in source.axes_at(size) if name not in source.best_over)
                best = (choices or {}).get(source.name, {}).get(shared)
            waits = source is not None and best is None
            own = _own_settings(part, source, size, combination, best)
            unchosen = tuple(_own_settings(part, None, size, combination, None))
            for seed in repetitions:
                lines = [*anchored([*common, *own], study.folder), *common_after, *seed]
                cell = replace(_cell(part, combination, text, base, lines), own=unchosen)
                if waits:
                    cell = replace(cell, waits=True, key=f"waits-{cell.key}")
                cells.append(cell)

        _check_rows(part, cells)
        for cell in cells:
            _check_labels(cell, part.axes_at(size))
        _check_seeds_differ(part, cells, len(repetitions))
        _check_fields(part, cells)
        _check_figures(part, cells)
        _check_metrics(part, cells)
        all_cells += cells
    return all_cells


def _check_seeds_differ(part: Part, cells: Sequence[Cell], n_seeds: int) -> None:
    """Refuse seeds that change nothing, because the scenario gives a seed for each kind of draws."""
    for start in range(0, len(cells), n_seeds):
        keys = [cell.key for cell in cells[start : start + n_seeds]]
        if len(set(keys)) < len(keys):
            raise ScenarioError(
                f"part {part.name}: seeds data, model and run are all given in the scenario, so that another seed "
                "changes nothing; leave out those that the study's seeds should vary",
                code="study.seeds-fixed",
            )


def _check_fields(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a column that is no key of any cell's scenario."""
    for i, path in enumerate(part.fields):
        if not any(_has_field(cell.scenario, path) for cell in cells):
            raise ScenarioError(
                f"part {part.name}: fields.{i}={path!r} must be a key of a scenario, as algorithm.learning_rate",
                code="study.unknown-field",
            )


def _check_figures(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a figure along gradients of cells whose gradients cannot be counted."""
    for i, figure in enumerate(part.figures):
        if figure.along != "gradients":
            continue
        places = [list(part.axes).index(name) for name in figure.where]
        labels = list(figure.where.values())
        drawn = [cell for cell in cells if [cell.labels[place] for place in places] == labels]
        if any(cell.scenario.data.batch.size is None for cell in drawn):
            raise ScenarioError(
                f"part {part.name}, figures.{i}: gradients are counted by data.batch.size, which a cell lacks; "
                "give it in all cells, or draw along rounds",
                code="study.gradients",
            )


def _check_metrics(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a metric that no cell has, or that some cells do not measure."""
    kinds = kinds_of(cell.scenario for cell in cells)
    for key, name in part.all_metrics().items():
        try:
            metric(name, kinds)
        except ScenarioError as error:
            raise ScenarioError(f"part {part.name}, {key}: {error}", code=error.code) from error

        if name == "training-loss" and not all(cell.scenario.evaluation.training_loss for cell in cells):
            raise ScenarioError(
                f"part {part.name}, {key}: '{name}' is measured only if a scenario asks for it; set "
                "evaluation.training_loss=true (and, with privacy, evaluation.private=ignored) in all cells",
                code="study.training-loss",
            )


def _check_settings(settings: Sequence[str]) -> None:
    """Refuse `--set` of what a study sets itself."""
    try:
        for_cells(list(settings))
    except ValueError as error:
        raise ScenarioError(f"--set: {error}", code="study.set") from error


def _check_labels(cell: Cell, axes: Mapping[str, Axis]) -> None:
    """Refuse a cell whose scenario has another value than the label of its axis says.

    Raises:
        ScenarioError: naming the axis, both values and the remedy.
    """
    for place, (label, axis) in enumerate(zip(cell.labels, axes.values(), strict=True)):
        if axis.key is None or place in cell.ignores:
            continue
        wanted = (axis.values or [])[axis.labels().index(label)]
        has = _value_at(cell.scenario, axis.key)
        plain = isinstance(wanted, int | float | str | None) and isinstance(has, int | float | str | None)
        if plain and has not in (None, wanted) and tuple(axis.key.split(".")) not in PATHS:
            raise ScenarioError(
                f"part {cell.part}, cell {', '.join(cell.labels)}: {axis.key}={shown(has)}, but its axis' label is "
                f"{label}; a later axis, a case or {option('set', axis.key)} sets it too: leave that out",
                code="study.label",
            )


def _value_at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _own_settings(
    part: Part, source: Part | None, size: str | None, combination: Sequence[Point], best: Labels | None
) -> list[str]:
    """Return a cell's settings of its points and cases, as if an axis chosen in another part stood where it does there.

    Args:
        source: the part that this one is chosen in.
        best: the labels chosen there; None takes the first.
    """
    points = dict(zip(part.axes, combination, strict=True))
    cases = list(part.cases)
    if source is not None:
        axes = source.axes_at(size)
        names = [name for name in axes if name in source.best_over]
        if best is None:
            best = tuple(axes[name].labels()[0] for name in names)
        chosen = dict(zip(names, best, strict=True))

        # The source's axes in their order, with the points chosen there, and then this part's other axes.
        all_points = {(name, point.label): point for name, axis in axes.items() for point in axis.all_points()}
        points = {name: points.get(name) or all_points[name, chosen[name]] for name in axes} | points
        cases = [case for case in source.cases if not case.where.keys().isdisjoint(chosen)] + cases

    lines = [line for point in points.values() for line in point.settings]
    labels = {name: point.label for name, point in points.items()}
    for case in cases:
        if labels.items() >= case.where.items():
            lines += case.settings
    return lines


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
    key = scenario_hash(scenario, movable=False)
    parts = own_parts(scenario, metrics=True)
    if not parts:
        return key

    digest = hashlib.sha256(key.encode())
    targets = [part.target.encode() for part in parts if isinstance(part, Given)]
    code = code_of([part for part in parts if not isinstance(part, Given)])
    for item in (*code, *targets):
        digest.update(len(item).to_bytes(8, "little") + item)
    return digest.hexdigest()


def stamps_of(scenario: Scenario) -> dict[str, int]:
    """Return when the files that a scenario names were last written, in ns: data, graphs, first parameters.

    Times, and no hashes, by which a reader of the cells could test guesses of private data.
    """
    data = scenario.data
    roots = [data.root and data.root.replace(PEER, str(peer)) for peer in range(scenario.n_peers)]
    named = [*dict.fromkeys(roots), data.test, *_graphs_and_model(scenario).values()]
    paths = [Path(path) for path in named if path]
    of_runs = [path / name for path in paths for name in MODEL_FILES if (path / MODEL_FILES[0]).is_file()]
    return {str(path): path.stat().st_mtime_ns for path in (*paths, *of_runs) if path.is_file()}


def _graphs_and_model(scenario: Scenario) -> dict[str, str]:
    """Return the paths of graphs and of the first parameters, by the keys that name them."""
    named = {key: _value_at(scenario, key) for key in ("topology.file", "privacy.noise.secrets.file")}
    named["model.from"] = scenario.model.origin
    return {key: path for key, path in named.items() if path}


def _check_rows(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse rows that are not what they are called: one run in two rows, or several though a point ignores an axis.

    Raises:
        ScenarioError: naming the two cells.
    """
    axes = list(part.axes)
    runs = dict[tuple[str, int], Cell]()
    rows = dict[tuple[Labels, int], Cell]()
    for cell in cells:
        first = runs.setdefault((cell.key, cell.seed), cell)
        differing = {
            place for place, pair in enumerate(zip(first.labels, cell.labels, strict=True)) if len({*pair}) > 1
        }
        chosen = part.chosen_in is not None and first.own != cell.own  # a choice may be what another row has
        if differing - (first.ignores & cell.ignores) and not chosen:
            raise ScenarioError(
                f"part {part.name}: {_row(first)} and {_row(cell)} are one run, so that one of the two rows is not "
                "what it is called; let their settings differ, or, if a point makes no use of an axis, give it "
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


def check_data(cells: Iterable[Cell], checked: set[str]) -> None:
    """Read the public test sets of some cells, and the targets of their training sets, before the first of them runs.

    Args:
        checked: what was read before; what is read now is added.

    Raises:
        ScenarioError: naming the cell whose data cannot be read.
    """
    for cell in cells:
        section = cell.scenario.data
        targets = cell.scenario.task.targets
        named = _graphs_and_model(cell.scenario)
        peers = cell.scenario.n_peers if section.each_its_own else 1
        key = f"{section.model_dump_json(exclude={'batch', 'partition', 'samples'})} {targets} {named} {peers}"
        if key in checked:
            continue
        checked.add(key)
        try:
            for name, path in named.items():
                needed = Path(path) / MODEL_FILES[0] if name == "model.from" else Path(path)
                if not needed.is_file():
                    raise ScenarioError(f"{name}={path}: {needed} is not there; give what is", code="study.no-file")
            public = read_public(section, cell.scenario.seed_of("data"), targets)
            for peer in range(peers):
                root = section.root and section.root.replace(PEER, str(peer))
                split = open_dataset(section, root, targets).train()
                check_fit(Examples(split.read(slice(0, 1)), torch.from_numpy(split.labels), ()), public, root)
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


def make_cache(cache: Path) -> None:
    """Create the folder of the cells.

    Raises:
        ScenarioError: it cannot be created, or not be written to.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ScenarioError(
            f"{cache}, which keeps the cells' results, cannot be written to ({error.strerror}); run the study in "
            "another folder",
            code="study.cache",
        ) from error


def is_finished(folder: Path) -> bool:
    """Return whether a cell ran to its end, by this version, and nothing changed since: cell.json is written last."""
    try:
        facts = json.loads((folder / CELL).read_bytes())
        same = all(Path(path).stat().st_mtime_ns == written for path, written in facts["inputs"].items())
        return bool(same and facts["version"] == __version__ and facts["files"] == _digests(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in READ_FILES}


def check_unchanged(cells: Iterable[Cell]) -> None:
    """Refuse to continue if a user's module is no longer what it was when the cells were made.

    Raises:
        RunError: naming the first such cell.
    """
    checked = set[tuple[int, ...]]()
    for cell in cells:
        parts = tuple(map(id, own_parts(cell.scenario, metrics=True)))
        if cell.waits or not parts or parts in checked:
            continue
        checked.add(parts)
        if cell_key(cell.scenario) != cell.key:
            raise RunError(f"{cell.title}: {CHANGED}", code="study.changed")


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
        scenario = parse_scenario(text)
        if folder != folder_of(folder.parent, cell_key(scenario)):
            raise RunError(CHANGED, code="study.changed")
        stamps = stamps_of(scenario)
        inputs = json.dumps(stamps).encode()
        resume = (folder / "checkpoint").exists() and _read(folder / INPUTS) == inputs
        if not resume:
            _clear(folder, {"lock"})  # files of a run that ended before its first checkpoint, or on other data
            write_atomically(folder / INPUTS, inputs, public=True)
        run(Experiment.build(scenario), folder, resume=resume, lean=True, workers=1)

        # Results on inputs that changed under the run would be found as results of what lies there now.
        if stamps_of(scenario) != stamps:
            raise RunError(CHANGED, code="study.changed")
        (folder / "checkpoint").unlink(missing_ok=True)  # first: it would resume what is cleared below
        _clear(folder, set(RESULT_FILES))
        seconds = round(time.process_time() - began, 1)
        facts = {"seconds": seconds, "version": __version__, "inputs": stamps, "files": _digests(folder)}
        write_atomically(folder / CELL, json.dumps(facts).encode(), public=True)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


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
        return re.sub(r"^scenario:\d+: ", "", str(failure))  # a line of a text that the user never sees
    except Exception as failure:  # one cell's bug must not cost the others
        return f"{raised_at(failure)}: {failure}"
    return None
