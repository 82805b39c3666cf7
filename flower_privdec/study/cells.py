"""From a study to its cells: one scenario for each place of a grid and each seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario, parse_scenario, scenario_hash
from flower_privdec.scenario.loading import read_text
from flower_privdec.study.spec import Part, Point, Size, Study

Labels = tuple[str, ...]


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
        batch = scenario.data.batch.size or 100
        tried = evaluations * (scenario.data.test_samples or 10_000) / 3  # forward only
        return scenario.n_peers * (scenario.rounds * (batch + 4) + tried)


def expand(study: Study, base: Path, size: str, parts: Iterable[Part], settings: Sequence[str] = ()) -> list[Cell]:
    """Return all cells of some parts, every scenario checked.

    Settings are laid over the base in this order: the study's size, the part, the part's size, the points of
    the axes in order, `settings`, and the seed.

    Raises:
        ScenarioError: naming the cell whose scenario breaks a rule.
    """
    text = read_text(base)
    return [
        cell
        for part in parts
        for cell in _expand_part(study, study.sizes[size], size, part, text, base, settings)  # type: ignore[index]
    ]


def _expand_part(
    study: Study, whole: Size, size: str, part: Part, text: str, base: Path, settings: Sequence[str]
) -> Iterable[Cell]:
    changes = part.sizes.get(size)  # type: ignore[call-overload]
    common = [*whole.settings, *part.settings, *(changes.settings if changes else ())]
    seeds = (changes and changes.seeds) or whole.seeds
    points = [axis.all_points() for axis in part.axes_at(size).values()]
    for place in itertools.product(*points):
        own = [line for point in place for line in point.settings]
        for seed in seeds:
            name = [f"name={study.name}", f"seed={seed}"]
            yield _cell(part, place, seed, text, base, [*common, *own, *settings, *name])


def _cell(part: Part, place: Sequence[Point], seed: int, text: str, base: Path, settings: list[str]) -> Cell:
    labels = tuple(point.label for point in place)
    try:
        scenario = parse_scenario(text, where=str(base), overrides=settings)
    except ScenarioError as error:
        raise ScenarioError(f"part {part.name}, cell {', '.join(labels)}: {error}") from error
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(f"part {part.name}: privacy.ledger must be left out of a study: every cell has its own")
    return Cell(part.name, labels, seed, scenario, scenario_hash(scenario))
