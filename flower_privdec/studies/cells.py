"""The cells of a study: one scenario for each combination of its axes and each seed.

`expand` turns a study into cells and checks all of them before any runs. `check_data` reads what they name. `run_cells`
runs those that are not finished, in parallel processes.

A cell's results lie in a folder of the cache that its key names (`cell_key`, `folder_of`). Cells of equal keys, also of
different studies, share one folder and therefore one run. `cell.json` is written last: a folder with a valid one is
finished (`is_finished`), and any other is resumed from its checkpoint or run again.

A part may be "chosen in" another: its cells take the points that were best in that part, on the axes that it names in
`best_over`. Until those are known its cells wait, with the first points in their place so that they can be checked.
"""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flower_privdec import __version__
from flower_privdec.common.catalogue import DATASETS
from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError, did_you_mean, option
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import shown
from flower_privdec.common.user_code import Given, raised_at
from flower_privdec.data.datasets import Examples, PublicSet, check_fit, open_dataset, read_public
from flower_privdec.data.intake import listed
from flower_privdec.experiment.source_code import code_of
from flower_privdec.scenario import Scenario, anchored, own_parts, parse_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.loading import PATHS, read_text
from flower_privdec.scenario.sections import PEER
from flower_privdec.studies.spec import (
    Axis,
    Part,
    Point,
    Size,
    Study,
    class_in,
    for_cells,
    is_of_extreme_peers,
    kinds_of,
    metric,
)

MOST_CELLS = 20_000  # of one part
CACHE = Path("runs") / "cells"

# Files in a cell's folder.
CELL = "cell.json"  # the mark of a finished cell
INPUTS = "inputs.json"  # when the input files of a run that has not finished were written
READ_FILES = ("summary.json", "metrics.jsonl", "scenario.yaml")  # the results
RESULT_FILES = (*READ_FILES, CELL, "lock")  # all that a finished cell keeps

MODEL_FILES = ("model.safetensors", "scenario.yaml", "summary.json")  # in the folder of a run that model.from names
CHANGED = "one of your files or modules changed while the study ran; run the same command again"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Labels = tuple[str, ...]
Choices = dict[
    str, dict[Labels, Labels]
]  # part name -> labels on its other axes -> best labels on its `best_over` axes


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        part: the name of its part; "" outside of a study.
        labels: one label for each axis, in the order of the axes.
        seed: the scenario's seed.
        scenario: what it runs.
        key: see `cell_key`; cells with equal keys share one run.
        ignores: the indices of the axes that its scenario does not depend on.
        waits: whether some of its settings are not known yet, because the part that they are chosen in is not finished.
        own: the settings of its points and cases, without those chosen in another part.
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
        where = f"{self.part}: " if self.part else ""
        return f"{where}{', '.join(self.labels)}, seed {self.seed}"

    @property
    def work(self) -> float:
        """Return its estimated cost, from which the time left is estimated: the number of examples computed.

        Only ratios between cells matter. A missing number of examples counts as 10,000, and a peer's round as 4
        examples more than its batch.
        """
        scenario = self.scenario
        examples_per_peer = (scenario.data.samples or 10_000) / scenario.n_peers
        batch = scenario.data.batch.size or (scenario.data.batch.rate or 1) * examples_per_peer
        trained = scenario.rounds * (batch + 4)

        # An evaluation has no backward pass, which takes about two thirds of a gradient.
        evaluations = scenario.rounds / scenario.evaluation.every
        evaluated = evaluations * (scenario.data.test_samples or 10_000) / 3
        return scenario.n_peers * (trained + evaluated)


def expand(
    study: Study,
    base: Path,
    size: str | None,
    parts: Iterable[Part],
    settings: Sequence[str] = (),
    choices: Choices | None = None,
) -> list[Cell]:
    """Return all cells of some parts, with every scenario checked.

    Settings override each other in this order: the base file, the study, its size, the part, the part's size, the
    points of the axes in order, the part's cases, `settings`, and the seed.

    Args:
        study: the study.
        base: the scenario file that all cells start from.
        size: the name of the study's size; None is the full one.
        parts: the parts to expand.
        settings: the settings of the command line (`--set`).
        choices: what was best in the parts that others are chosen in; a cell whose choice is missing waits.

    Raises:
        ScenarioError: a part has too many cells, or a cell's scenario breaks a rule; it names the cell.
    """
    text = read_text(base)
    _check_settings(settings)
    all_cells = []
    for part in parts:
        layers = [study, study.sizes.get(size or ""), part, part.sizes.get(size or "")]
        common = [line for layer in layers if layer is not None for line in layer.settings]
        common_after = [*settings, f"name={json.dumps(study.name)}"]

        # The last layer that gives seeds decides them; if none does, the base's seed is the only one.
        seeds = [layer.seeds for layer in layers if isinstance(layer, Study | Size) and layer.seeds]
        repetitions: list[list[str]] = [[]]
        if seeds:
            repetitions = [[f"seed={seed}"] for seed in seeds[-1]]

        points = [axis.all_points() for axis in part.axes_at(size).values()]
        count = math.prod(map(len, points)) * len(repetitions)
        if count > MOST_CELLS:
            raise ScenarioError(
                f"part {part.name}: {count:,} cells must be at most {MOST_CELLS:,}; use fewer points, axes or seeds",
                code="study.too-many-cells",
            )

        cells: list[Cell] = []
        source = next((other for other in study.parts if other.name == part.chosen_in), None)
        for combination in itertools.product(*points):
            best = None
            if source is not None:
                # A choice was made for each combination of the source's other axes, all of which this part has too.
                labels = {name: point.label for name, point in zip(part.axes, combination, strict=True)}
                shared = tuple(labels[name] for name in source.axes_at(size) if name not in source.best_over)
                best = (choices or {}).get(source.name, {}).get(shared)
            waits = source is not None and best is None

            own = _own_settings(part, source, size, combination, best)
            unchosen = tuple(_own_settings(part, None, size, combination, None))
            for seed in repetitions:
                # Paths in a study file are relative to its folder; those of the command line are not.
                lines = [*anchored([*common, *own], study.folder), *common_after, *seed]
                cell = replace(_cell(part, combination, text, base, lines), own=unchosen)

                # A waiting cell has stand-in settings: its key must not find the results of a run that has them.
                if waits:
                    cell = replace(cell, waits=True, key=f"waits-{cell.key}")
                cells.append(cell)

        _check_part(part, cells, part.axes_at(size), len(repetitions))
        all_cells += cells
    return all_cells


def _check_part(part: Part, cells: Sequence[Cell], axes: Mapping[str, Axis], n_seeds: int) -> None:
    """Refuse cells that are not what the part's tables and figures would say of them."""
    _check_rows(part, cells)
    for cell in cells:
        _check_labels(cell, axes)
    _check_seeds_differ(part, cells, n_seeds)
    _check_fields(part, cells)
    _check_figures(part, cells)
    _check_metrics(part, cells)


def _check_seeds_differ(part: Part, cells: Sequence[Cell], n_seeds: int) -> None:
    """Refuse seeds that change nothing because the scenario sets a seed for each kind of random draw."""
    # The cells of one combination follow each other, one for each seed.
    for start in range(0, len(cells), n_seeds):
        keys = [cell.key for cell in cells[start : start + n_seeds]]
        if len(set(keys)) < len(keys):
            raise ScenarioError(
                f"part {part.name}: the scenario sets all of the seeds data, model and run, so the study's seeds "
                "change nothing; leave out those that the study's seeds should vary",
                code="study.seeds-fixed",
            )


def _check_fields(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a column unless it is a key of some cell's scenario."""
    for i, path in enumerate(part.fields):
        if not any(_has_field(cell.scenario, path) for cell in cells):
            raise ScenarioError(
                f"part {part.name}: fields.{i}={path!r} must be a key of a scenario, such as algorithm.learning_rate",
                code="study.unknown-field",
            )


def _check_figures(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a figure whose x-axis counts gradients if a cell in it has no fixed batch size to count them by."""
    for i, figure in enumerate(part.figures):
        if figure.along != "gradients":
            continue
        places = [list(part.axes).index(name) for name in figure.where]
        labels = list(figure.where.values())
        drawn = [cell for cell in cells if [cell.labels[place] for place in places] == labels]
        if any(cell.scenario.data.batch.size is None for cell in drawn):
            raise ScenarioError(
                f"part {part.name}, figures.{i}: gradients are counted by data.batch.size, which a cell does not set; "
                "set it in all cells, or draw along rounds",
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

        if class_in(name) is not None and not all(cell.scenario.evaluation.by_class for cell in cells):
            raise ScenarioError(
                f"part {part.name}, {key}: '{name}' is measured only if a scenario asks for it; set "
                "evaluation.by_class=true in all cells",
                code="study.by-class",
            )
        if is_of_extreme_peers(name) and any(cell.scenario.evaluation.peers is not None for cell in cells):
            raise ScenarioError(
                f"part {part.name}, {key}: '{name}' is of all peers, and evaluation.peers tries a sample of them, "
                "whose worst and best are others: leave evaluation.peers out of all cells",
                code="study.sample",
            )
        if name == "training-loss" and not all(cell.scenario.evaluation.training_loss for cell in cells):
            raise ScenarioError(
                f"part {part.name}, {key}: '{name}' is measured only if a scenario asks for it; set "
                "evaluation.training_loss=true (and, with privacy, evaluation.private=ignored) in all cells",
                code="study.training-loss",
            )


def _check_settings(settings: Sequence[str]) -> None:
    """Refuse a `--set` that the study would overwrite."""
    try:
        for_cells(list(settings))
    except ValueError as error:
        raise ScenarioError(f"--set: {error}", code="study.set") from error


def _check_labels(cell: Cell, axes: Mapping[str, Axis]) -> None:
    """Refuse a cell if its scenario has a different value from the one that its axis label shows.

    Raises:
        ScenarioError: it names the axis, both values and the remedy.
    """
    for index, (label, axis) in enumerate(zip(cell.labels, axes.values(), strict=True)):
        if axis.key is None or index in cell.ignores:
            continue

        wanted = (axis.values or [])[axis.labels().index(label)]
        actual = _value_at(cell.scenario, axis.key)

        # Only plain values can be compared: lists and sections are completed when they are parsed, and paths anchored.
        # None is a key that does not apply.
        are_plain = isinstance(wanted, int | float | str | None) and isinstance(actual, int | float | str | None)
        is_path = tuple(axis.key.split(".")) in PATHS
        if are_plain and actual not in (None, wanted) and not is_path:
            raise ScenarioError(
                f"part {cell.part}, cell {', '.join(cell.labels)}: {axis.key}={shown(actual)}, but its axis label is "
                f"{label}; a later axis, a case or {option('set', axis.key)} sets it too: leave that out",
                code="study.label",
            )


def _value_at(value: Any, path: str) -> Any:
    """Return the value at a dotted path; None if a name on the way is missing."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _own_settings(
    part: Part, source: Part | None, size: str | None, combination: Sequence[Point], best: Labels | None
) -> list[str]:
    """Return the settings that a cell's points and cases make.

    The order matters, because later settings override earlier ones. If the part is chosen in another, the points chosen
    there come in the place that their axes have there, so that both parts resolve overrides in the same way.

    Args:
        combination: the cell's point on each axis of its part.
        source: the part that this one is chosen in, or None.
        best: the labels chosen there; None stands in the first label of each axis.
    """
    points = dict(zip(part.axes, combination, strict=True))
    cases = list(part.cases)
    if source is not None:
        axes = source.axes_at(size)
        names = [name for name in axes if name in source.best_over]
        if best is None:
            best = tuple(axes[name].labels()[0] for name in names)
        chosen = dict(zip(names, best, strict=True))

        # The source's axes come first, in its order, then this part's other axes. An axis that both parts have takes
        # this cell's point.
        all_points = {(name, point.label): point for name, axis in axes.items() for point in axis.all_points()}
        points = {name: points.get(name) or all_points[name, chosen[name]] for name in axes} | points

        # Of the source's cases, those that depend on a chosen label were part of what was chosen.
        source_cases = [case for case in source.cases if not case.where.keys().isdisjoint(chosen)]
        cases = source_cases + cases

    lines = [line for point in points.values() for line in point.settings]
    labels = {name: point.label for name, point in points.items()}
    for case in cases:
        if labels.items() >= case.where.items():
            lines += case.settings
    return lines


def _cell(part: Part, combination: Sequence[Point], text: str, base: Path, settings: list[str]) -> Cell:
    """Parse the base's text with a cell's settings; an error names the cell."""
    labels = tuple(point.label for point in combination)
    try:
        scenario = parse_scenario(text, where=str(base), overrides=settings, folder=base.parent)
    except ScenarioError as error:
        problem = str(error).removeprefix("--set: ")  # most settings are the study's
        raise ScenarioError(f"part {part.name}, cell {', '.join(labels)}: {problem}", code=error.code) from error
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"part {part.name}: leave out privacy.ledger: every cell of a study has its own", code="study.ledger"
        )
    places = {name: place for place, name in enumerate(part.axes)}
    ignores = frozenset(places[name] for point in combination for name in point.ignores)
    return Cell(part.name, labels, scenario.seed, scenario, cell_key(scenario), ignores)


def cell_key(scenario: Scenario) -> str:
    """Return a hash of everything that decides a run's results: its scenario, and the code of the user's parts in it.

    Raises:
        ScenarioError: a part cannot be loaded.
    """
    key = scenario_hash(scenario, movable=False)
    parts = own_parts(scenario, metrics=True)
    if not parts:
        return key

    # A part that was passed as an object (`Given`) is known by its target only.
    digest = hashlib.sha256(key.encode())
    targets = [part.target.encode() for part in parts if isinstance(part, Given)]
    code = code_of([part for part in parts if not isinstance(part, Given)])
    for item in (*code, *targets):
        # Each item with its length, so that no two lists of items have the same bytes.
        digest.update(len(item).to_bytes(8, "little") + item)
    return digest.hexdigest()


def stamps_of(scenario: Scenario) -> dict[str, int]:
    """Return when the files that a scenario names were last written: data, graphs, initial parameters.

    Privacy: these are times and not hashes, because anyone who reads the cells could test guesses of private data
    against a hash.

    Returns:
        Nanoseconds since the epoch, by path; of a folder of images the sum over all that is in it.
    """
    data = scenario.data
    roots = [data.root and data.root.replace(PEER, str(peer)) for peer in range(scenario.n_peers)]
    named = [*dict.fromkeys(roots), data.test, *_graphs_and_model(scenario).values()]
    paths = [Path(path) for path in named if path]

    # model.from names the folder of a run.
    run_folders = [path for path in paths if (path / MODEL_FILES[0]).is_file()]
    run_files = [folder / name for folder in run_folders for name in MODEL_FILES]
    stamps = {str(path): _stamp(path) for path in (*paths, *run_files) if path.is_file()}

    # A folder of images is known by all files in it; one of a public benchmark by its name.
    dataset = data.dataset
    if isinstance(dataset, str) and DATASETS[dataset].own_files:
        stamps |= {str(path): _stamp(path) for path in paths if path.is_dir()}
    return stamps


def _stamp(path: Path) -> int:
    """Return when a file was last written, or a sum of that over a folder and everything below it."""
    if not path.is_dir():
        return path.stat().st_mtime_ns

    total = 0
    for folder, _, files in os.walk(path):
        for name in (".", *files):
            with suppress(FileNotFoundError):  # a link that leads nowhere, or a file that is being replaced
                total += Path(folder, name).stat().st_mtime_ns
    return total


def _graphs_and_model(scenario: Scenario) -> dict[str, str]:
    """Return the paths of graphs, secrets and initial parameters, by the keys that name them."""
    named = {key: _value_at(scenario, key) for key in ("topology.file", "privacy.noise.secrets.file")}
    named["model.from"] = scenario.model.origin
    return {key: path for key, path in named.items() if path}


def _check_rows(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse table rows whose labels mislead about which cells are equal.

    Two cells with different labels must be different runs, unless they differ only on axes that both ignore. And two
    cells that differ only on ignored axes must be the same run.

    Raises:
        ScenarioError: it names the two cells.
    """
    axes = list(part.axes)
    first_of_run: dict[tuple[str, int], Cell] = {}
    first_of_row: dict[tuple[Labels, int], Cell] = {}
    for cell in cells:
        first = first_of_run.setdefault((cell.key, cell.seed), cell)
        label_pairs = zip(first.labels, cell.labels, strict=True)
        differing = {index for index, (one, other) in enumerate(label_pairs) if one != other}

        # A choice may happen to equal the settings of another row: that is a result, not a mistake.
        chosen = part.chosen_in is not None and first.own != cell.own
        if differing - (first.ignores & cell.ignores) and not chosen:
            raise ScenarioError(
                f"part {part.name}: {_row(first)} and {_row(cell)} are the same run, so one of these two labels is "
                "wrong; let their settings differ, or, if a point does not use an axis, give it "
                f"`ignores: [{', '.join(axes[index] for index in sorted(differing))}]`",
                code="study.one-run",
            )

        used_labels = tuple("" if index in cell.ignores else label for index, label in enumerate(cell.labels))
        same_row = first_of_row.setdefault((used_labels, cell.seed), cell)
        if same_row.key != cell.key:
            ignored = ", ".join(axes[index] for index in sorted(cell.ignores))
            raise ScenarioError(
                f"part {part.name}: {_row(same_row)} and {_row(cell)} are different runs, though one of their points "
                f"has `ignores: [{ignored}]`; leave that out",
                code="study.ignores",
            )


def _row(cell: Cell) -> str:
    return f"'{', '.join(cell.labels)}'"


def check_data(cells: Iterable[Cell], checked: set[str]) -> None:
    """Read the test sets and training targets of some cells, so that a wrong path fails before the first cell runs.

    Args:
        cells: the cells.
        checked: the data that was read before, which is skipped; data read now is added.

    Raises:
        ScenarioError: some data cannot be read; it names the cell.
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
                    raise ScenarioError(
                        f"{name}={path}: {needed} does not exist; give a path that does", code="study.no-file"
                    )

            public = read_public(section, cell.scenario.seed_of("data"), targets)
            for peer in range(peers):
                root = section.root and section.root.replace(PEER, str(peer))
                split = open_dataset(section, root, targets).train()
                first_example = split.read(slice(0, 1))
                check_fit(Examples(first_example, torch.from_numpy(split.labels), ()), public, root)
        except ScenarioError as error:
            raise ScenarioError(f"{cell.title}: {error}", code=error.code) from error


def check_builds(cells: Iterable[Cell], checked: set[str], metrics: Mapping[str, Iterable[str]]) -> None:
    """Build what some cells run, so that a scenario that cannot run fails before the first cell runs.

    One cell of those that differ only in their seeds is built, with its data, graph, model, noise and memory. What is
    solved for it is kept for the run (`privacy.accountant.calibration`).

    Args:
        cells: the cells; of one that waits, its stand-in settings are built.
        checked: what was built before, which is skipped; what is built now is added.
        metrics: what is read of the runs of each part.

    Raises:
        ScenarioError: a scenario cannot run, or has not the class that a metric is of; it names the cell.
    """
    # Imported late: see `run_cell`.
    from flower_privdec.experiment import Experiment
    from flower_privdec.experiment.memory_estimate import shortage

    for cell in cells:
        classes = {label for name in metrics[cell.part] if (label := class_in(name)) is not None}
        key = f"builds {sorted(classes)} {cell.scenario.model_copy(update={'seed': 0}).model_dump_json()}"
        if key in checked:
            continue
        checked.add(key)

        try:
            experiment = Experiment.build(cell.scenario)
            too_large = shortage(experiment)
            if too_large is not None:
                raise ScenarioError(too_large, code="memory.short")
            _check_classes(experiment.public, classes)
        except PrivdecError as error:
            problem = _without_line(str(error))
            raise ScenarioError(f"{cell.title}: {problem}; nothing was run", code=error.code) from error


def _check_classes(public: PublicSet, classes: Iterable[str]) -> None:
    """Raise ScenarioError if one of the classes that metrics are of is not there."""
    known = [public.intake.class_name(place) for place in range(public.n_classes)]
    for label in classes:
        if label not in known:
            raise ScenarioError(
                f"metric 'by_class.{label}.f1' or its like: class {label} must be one of {listed(known)}"
                f"{did_you_mean(label, known)}",
                code="study.unknown-class",
            )


def _without_line(message: str) -> str:
    """Return an error without its place in a scenario that was made from a study's settings, or in Python."""
    return re.sub(r"^(--set|scenario(:[0-9]+)?): ", "", message)


def _has_field(value: Any, path: str) -> bool:
    """Return whether a dotted path is a key of a scenario, even if its value is None."""
    for name in path.split("."):
        if name not in getattr(type(value), "model_fields", ()):
            return False
        value = getattr(value, name)
    return True


def folder_of(cache: Path, key: str) -> Path:
    """Return the folder of a cell by its key."""
    return cache / key[:20]


def make_cache(cache: Path) -> None:
    """Create the folder of the cells.

    Raises:
        ScenarioError: it cannot be created or written to.
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
    """Return whether a cell ran to its end in this version, and neither its inputs nor its results changed since."""
    # cell.json is written last, so a folder without one, or with half of one, is not finished.
    try:
        facts = json.loads((folder / CELL).read_bytes())
        same = all(_stamp(Path(path)) == written for path, written in facts["inputs"].items())
        return bool(same and facts["version"] == __version__ and facts["files"] == _digests(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in READ_FILES}


def check_unchanged(cells: Iterable[Cell]) -> None:
    """Refuse to continue if a user's module has changed since the cells were made.

    Raises:
        RunError: it names the first cell that uses such a module.
    """
    checked: set[tuple[int, ...]] = set()
    for cell in cells:
        # Most cells share their parts, and a key takes long to compute: one cell for each set of parts is enough.
        parts = tuple(map(id, own_parts(cell.scenario, metrics=True)))
        if cell.waits or not parts or parts in checked:
            continue
        checked.add(parts)
        if cell_key(cell.scenario) != cell.key:
            raise RunError(f"{cell.title}: {CHANGED}", code="study.changed")


def run_cell(text: str, folder: Path) -> None:
    """Run a cell's scenario to its end, from its checkpoint if it has one, and keep only its results.

    If two studies share the cell, a lock on the folder makes the second one wait and then find it finished.

    Raises:
        RunError: a file or module changed since the cell was made, or while it ran.
    """
    # Imported late: the study's own process needs neither unless it runs cells itself.
    from flower_privdec.engine.run import run
    from flower_privdec.experiment import Experiment

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if is_finished(folder):
            return

        # The key is computed again, in the process that runs the code: a module may have changed since.
        began = time.process_time()
        scenario = parse_scenario(text)
        if folder != folder_of(folder.parent, cell_key(scenario)):
            raise RunError(CHANGED, code="study.changed")

        # Resume only if the checkpoint was made from the same inputs. Otherwise clear what is left of a run that ended
        # before its first checkpoint, or that was on other data.
        stamps = stamps_of(scenario)
        inputs = json.dumps(stamps).encode()
        resume = (folder / "checkpoint").exists() and _read(folder / INPUTS) == inputs
        if not resume:
            _clear(folder, {"lock"})
            write_atomically(folder / INPUTS, inputs, public=True)
        run(Experiment.build(scenario), folder, resume=resume, lean=True, workers=1)

        # If inputs changed during the run, its results belong to neither the old nor the new ones.
        if stamps_of(scenario) != stamps:
            raise RunError(CHANGED, code="study.changed")

        # The checkpoint goes first. If this process is killed here, a checkpoint must not resume a half-cleared folder.
        (folder / "checkpoint").unlink(missing_ok=True)
        _clear(folder, set(RESULT_FILES))

        seconds = round(time.process_time() - began, 1)
        facts = {"seconds": seconds, "version": __version__, "inputs": stamps, "files": _digests(folder)}
        write_atomically(folder / CELL, json.dumps(facts).encode(), public=True)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _clear(folder: Path, keep: set[str]) -> None:
    """Delete everything in a folder except the files to keep."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


class Outcome(NamedTuple):
    """A cell that has run; `error` says why it failed, or is None."""

    cell: Cell
    error: str | None = None


def missing_cells(cells: Sequence[Cell], cache: Path) -> list[Cell]:
    """Return the cells that are not finished; of cells with equal keys only the first."""
    first_by_key = {cell.key: cell for cell in reversed(cells)}
    firsts = [cell for cell in cells if first_by_key[cell.key] is cell]
    return [cell for cell in firsts if not is_finished(folder_of(cache, cell.key))]


OnCell = Callable[[Outcome], None]


def run_cells(cells: Sequence[Cell], cache: Path, jobs: int, on_cell: OnCell) -> list[Outcome]:
    """Run cells, each in one thread; return the outcomes of those that failed. A failure does not stop the others.

    Args:
        cells: cells of distinct keys that are not finished; see `missing_cells`.
        cache: the folder of all cells.
        jobs: the number of processes; 1 runs the cells in this process.
        on_cell: called with each outcome, as soon as it is known.
    """
    runs = [(cell, to_yaml(cell.scenario), folder_of(cache, cell.key)) for cell in cells]
    outcomes: Iterator[Outcome]
    if jobs == 1:
        outcomes = (Outcome(cell, attempt(text, folder)) for cell, text, folder in runs)
    else:
        outcomes = _in_processes(runs, jobs)

    failed = []
    for outcome in outcomes:
        on_cell(outcome)
        if outcome.error is not None:
            failed.append(outcome)
    return failed


def _in_processes(runs: Sequence[tuple[Cell, str, Path]], jobs: int) -> Iterator[Outcome]:
    """Yield outcomes as cells end, in any order."""
    # The new processes inherit these. Libraries read them when they are imported, so the children could not set them.
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")

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
    """Let a worker end without a traceback on Ctrl-C, and also when its parent is killed; its cell can be resumed."""
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
        return _without_line(str(failure))
    except Exception as failure:
        # A bug in one cell must not stop the others.
        return f"{raised_at(failure)}: {failure}"
    return None
