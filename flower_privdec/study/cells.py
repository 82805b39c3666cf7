"""From a study to its cells: one scenario for each place of a grid and each seed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario, parse_scenario, scenario_hash
from flower_privdec.scenario.loading import read_text
from flower_privdec.study.measured import kinds_of, metric
from flower_privdec.study.spec import Part, Point, Size, Study

Labels = tuple[str, ...]
MOST_CELLS = 20_000


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        part: the name of its part.
        labels: its place, one label for each axis, in the order of the axes.
        seed: its repetition.
        scenario: what is run.
        key: the scenario's hash: cells that share it share one run.
    """

    part: str
    labels: Labels
    seed: int
    scenario: Scenario
    key: str

    @property
    def title(self) -> str:
        """Return what to call it."""
        return f"{self.part}: {', '.join(self.labels)}, seed {self.seed}"

    @property
    def work(self) -> float:
        """Return a guess at its cost, to estimate the time left: examples used and examples tried."""
        scenario = self.scenario
        evaluations = scenario.rounds / scenario.evaluation.every
        per_peer = (scenario.data.samples or 10_000) / scenario.n_peers
        batch = scenario.data.batch.size or (scenario.data.batch.rate or 1) * per_peer
        tried = evaluations * (scenario.data.test_samples or 10_000) / 3  # forward only
        return scenario.n_peers * (scenario.rounds * (batch + 4) + tried)


def expand(
    study: Study, base: Path, size: str | None, parts: Iterable[Part], settings: Sequence[str] = ()
) -> list[Cell]:
    """Return all cells of some parts, every scenario checked.

    Settings are laid over the base in this order: the study, its size, the part, the part's size, the points of
    the axes in order, `settings`, and the seed.

    Raises:
        ScenarioError: naming the cell whose scenario breaks a rule, or a part of too many cells.
    """
    text = read_text(base)
    return [cell for part in parts for cell in _expand_part(study, size, part, text, base, settings)]


def _expand_part(
    study: Study, size: str | None, part: Part, text: str, base: Path, settings: Sequence[str]
) -> list[Cell]:
    layers = _layers(study, size, part)
    common = [line for layer in layers for line in layer.settings]
    seeds = next((layer.seeds for layer in reversed(layers) if isinstance(layer, Study | Size) and layer.seeds), None)
    repetitions = [[f"seed={seed}"] for seed in seeds] if seeds else [[]]
    points = [axis.all_points() for axis in part.axes_at(size).values()]
    _check_count(part, math.prod(map(len, points)) * len(repetitions))
    name = f"name={json.dumps(study.name)}"
    cells = []
    for place in itertools.product(*points):
        own = [line for point in place for line in point.settings]
        for repetition in repetitions:
            cells.append(_cell(part, place, text, base, [*common, *own, *settings, name, *repetition]))
    _check_repetitions(part, cells, len(repetitions))
    _check_fields(part, cells)
    _check_metrics(part, cells)
    return cells


def _layers(study: Study, size: str | None, part: Part) -> list[Study | Size | Part]:
    """Return what is laid over the base, in order: the study, its size, the part, the part's size."""
    layers = (study, study.sizes.get(size or ""), part, part.sizes.get(size or ""))
    return [layer for layer in layers if layer is not None]


def _check_count(part: Part, count: int) -> None:
    if count > MOST_CELLS:
        raise ScenarioError(
            f"part {part.name}: {count:,} cells must be at most {MOST_CELLS:,}; use fewer points, axes or seeds"
        )


def _check_repetitions(part: Part, cells: Sequence[Cell], count: int) -> None:
    if len({cell.key for cell in cells[:count]}) < count:
        raise ScenarioError(
            f"part {part.name}: seeds data, model and run are all given in the scenario, so that another seed changes "
            "nothing; leave out those that the study's seeds should vary"
        )


def _check_fields(part: Part, cells: Sequence[Cell]) -> None:
    for i, path in enumerate(part.fields):
        if not any(has_field(cell.scenario, path) for cell in cells):
            raise ScenarioError(
                f"part {part.name}: fields.{i}={path!r} must be a key of a scenario, as algorithm.learning_rate"
            )


def _check_metrics(part: Part, cells: Sequence[Cell]) -> None:
    """Refuse a metric that no cell's task has."""
    kinds = kinds_of(cell.scenario for cell in cells)
    for where, name in part.all_metrics().items():
        try:
            metric(name, kinds)
        except ScenarioError as error:
            raise ScenarioError(f"part {part.name}, {where}: {error}") from error


def has_field(scenario: Scenario, path: str) -> bool:
    """Return whether a scenario has a key, as `algorithm.learning_rate`."""
    value: Any = scenario
    for name in path.split("."):
        if name not in getattr(type(value), "model_fields", ()):
            return False
        value = getattr(value, name)
    return True


def _cell(part: Part, place: Sequence[Point], text: str, base: Path, settings: list[str]) -> Cell:
    labels = tuple(point.label for point in place)
    try:
        scenario = parse_scenario(text, where=str(base), overrides=settings)
    except ScenarioError as error:
        problem = str(error).removeprefix("--set: ")  # most settings are the study's
        raise ScenarioError(f"part {part.name}, cell {', '.join(labels)}: {problem}") from error
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(f"part {part.name}: privacy.ledger must be left out of a study: every cell has its own")
    return Cell(part.name, labels, scenario.seed, scenario, scenario_hash(scenario))
