"""What a study's cells came to: mean and spread over the seeds, place by place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.scenario.algorithm_sections import steps_per_round
from flower_privdec.study.cells import Cell, Labels
from flower_privdec.study.measured import Reading, kinds_of, metric
from flower_privdec.study.runner import folder_of, is_finished
from flower_privdec.study.spec import Axis, Part
from flower_privdec.tasks.kinds import MetricKind


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation (None for one seed) over n seeds."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Estimate from finite values; None without any."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        std = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
        return cls(float(np.mean(finite)), std, len(finite))


@dataclass(frozen=True)
class Group:
    """The runs of one place of a part's grid, over the seeds.

    Attributes:
        labels: the place.
        runs: the finished runs, in the order of the seeds.
        missing: how many more there should be.
        kinds: the metrics of all places, some of which these runs may not have.
        chosen: the labels of the axes that were chosen from.
    """

    labels: Labels
    runs: tuple[Result, ...]
    missing: int
    kinds: Mapping[str, MetricKind]
    chosen: Labels = ()

    @property
    def complete(self) -> bool:
        """Return whether every seed is there."""
        return self.missing == 0

    def metric(self, name: str) -> Reading:
        """Return what is known of a metric of the runs."""
        return metric(name, self.kinds)

    def finals(self, name: str) -> list[float]:
        """Return a metric of each finished run that has it, after the last round unless it looks at more of them."""
        reading = self.metric(name)
        lines = [[reading.read(line, run.scenario.algorithm.name) for line in run.metrics] for run in self.runs]
        present = [[value for value in line if value is not None] for line in lines]
        return [reading.over(values) for values in present if values]

    def final(self, name: str) -> Estimate | None:
        """Return mean and spread of `finals`."""
        return Estimate.of(self.finals(name))

    def curves(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rounds at which every run was tried [T], and a metric then [n_runs, T]; None without it."""
        if not self.runs:
            return None
        read = self.metric(name).read
        rounds = [line["round"] for line in self.runs[0].metrics]
        values = [[read(line, run.scenario.algorithm.name) for line in run.metrics] for run in self.runs]
        if any(value is None for row in values for value in row) or any(len(row) != len(rounds) for row in values):
            return None
        return np.asarray(rounds), np.asarray(values, dtype=float)

    def gradients_per_round(self) -> float:
        """Return how many examples' gradients all peers together compute in a round, on average over the runs."""
        counts = []
        for run in self.runs:
            steps = sum(row["rounds_run"] for row in run.summary["privacy"]) / run.scenario.rounds
            counts.append(steps * (run.scenario.data.batch.size or 1) * steps_per_round(run.scenario.algorithm))
        return float(np.mean(counts))

    def budgets(self, key: str) -> list[float]:
        """Return every ε (key `epsilon`), claimed ε or δ of a peer in some run, ascending; none without privacy."""
        values = [row.get(key) for run in self.runs for row in run.summary["privacy"]]
        return sorted(float(value) for value in values if value is not None)

    def field(self, path: str) -> str:
        """Return a key of the scenario, as `algorithm.learning_rate`, in words."""
        if not self.runs:
            return "–"
        value: Any = self.runs[0].scenario
        for name in path.split("."):
            value = getattr(value, name, None)
        return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)


@dataclass(frozen=True)
class PartResult:
    """A part with the runs of its grid.

    Attributes:
        part: its definition.
        axes: at the study's size, without those that were chosen from.
        chosen: the axes that were.
        groups: one for each place, in order.
        cells: all its cells.
        seconds: of CPU that its cells took, all processes together.
    """

    part: Part
    axes: dict[str, Axis]
    chosen: dict[str, Axis]
    groups: tuple[Group, ...]
    cells: tuple[Cell, ...]
    seconds: float

    def metric(self, name: str) -> Reading:
        """Return what is known of a metric of the cells."""
        return metric(name, self._kinds)

    @cached_property
    def _kinds(self) -> dict[str, MetricKind]:
        return kinds_of(cell.scenario for cell in self.cells)

    @property
    def complete(self) -> bool:
        """Return whether every cell is finished."""
        return all(group.complete for group in self.groups)

    @cached_property
    def _by_labels(self) -> dict[Labels, Group]:
        return {group.labels: group for group in self.groups}

    def at(self, labels: Mapping[str, str]) -> Group:
        """Return the place where every axis has this label."""
        return self._by_labels[tuple(labels[name] for name in self.axes)]

    def places(self, where: Mapping[str, str], free: Sequence[str]) -> list[dict[str, str]]:
        """Return all combinations of labels with some axes held and some left out."""
        places: list[dict[str, str]] = [{}]
        for name, axis in self.axes.items():
            if name not in free:
                labels = [where[name]] if name in where else axis.labels()
                places = [place | {name: label} for place in places for label in labels]
        return places


def collect(part: Part, size: str | None, cells: Sequence[Cell], cache: Path) -> PartResult:
    """Read the finished cells of a part from the cache."""
    mine = [cell for cell in cells if cell.part == part.name]
    runs: dict[str, Result] = {}
    seconds = 0.0
    for cell in mine:
        folder = folder_of(cache, cell.key)
        if cell.key not in runs and is_finished(folder):
            runs[cell.key] = read_result(folder)
            seconds += float(json.loads((folder / "cell.json").read_text())["seconds"])
    groups, kinds = [], kinds_of(cell.scenario for cell in mine)
    for labels in dict.fromkeys(cell.labels for cell in mine):
        keys = [cell.key for cell in mine if cell.labels == labels]
        finished = tuple(runs[key] for key in keys if key in runs)
        groups.append(Group(labels, finished, len(keys) - len(finished), kinds))
    axes = part.axes_at(size)
    chosen = {name: axis for name, axis in axes.items() if name in part.best_over}
    left = {name: axis for name, axis in axes.items() if name not in chosen}
    first = metric(part.metrics[0], kinds)
    return PartResult(part, left, chosen, _choose(part, list(axes), groups, first), tuple(mine), seconds)


def _choose(part: Part, names: Sequence[str], groups: Sequence[Group], measured: Reading) -> tuple[Group, ...]:
    """Keep, of the places that differ along chosen axes alone, the one with the best first metric."""
    name = part.metrics[0]
    sign = -1 if measured.low else 1
    rivals: dict[Labels, list[Group]] = {}
    for group in groups:
        remaining = tuple(label for axis, label in zip(names, group.labels, strict=True) if axis not in part.best_over)
        chosen = tuple(label for axis, label in zip(names, group.labels, strict=True) if axis in part.best_over)
        rivals.setdefault(remaining, []).append(replace(group, labels=remaining, chosen=chosen))

    def score(group: Group) -> float:
        value = group.final(name)
        return -math.inf if value is None else sign * value.mean

    missing = {labels: sum(group.missing for group in some) for labels, some in rivals.items()}
    return tuple(replace(max(some, key=score), missing=missing[labels]) for labels, some in rivals.items())
