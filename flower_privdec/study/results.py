"""The results of a study's cells: mean and spread over the seeds, for each combination of labels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.formatting import NOTHING
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.scenario.sections import steps_per_round
from flower_privdec.study.cells import Cell, Labels, folder_of, is_finished
from flower_privdec.study.measured import Reading, kinds_of, metric
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
    """The runs of one point of a part's grid, over the seeds.

    Attributes:
        labels: one for each axis.
        runs: the finished runs, in the order of the seeds.
        missing: how many runs are not finished.
        kinds: the metrics of the whole part, some of which these runs may not have.
        chosen: the labels of the axes in `best_over`.
    """

    labels: Labels
    runs: tuple[Result, ...]
    missing: int
    kinds: Mapping[str, MetricKind]
    chosen: Labels = ()

    @property
    def complete(self) -> bool:
        """Return whether every run is finished."""
        return self.missing == 0

    def metric(self, name: str) -> Reading:
        """Return a metric's reading."""
        return metric(name, self.kinds)

    def _values(self, reading: Reading) -> list[list[float | None]]:
        return [[reading.read(line, run.scenario.algorithm.name) for line in run.metrics] for run in self.runs]

    def finals(self, name: str) -> list[float]:
        """Return a metric of each finished run that has it, reduced over the rounds: the last one by default."""
        reading = self.metric(name)
        present = [[value for value in values if value is not None] for values in self._values(reading)]
        return [reading.over(values) for values in present if values]

    def final(self, name: str) -> Estimate | None:
        """Return mean and spread of `finals`."""
        return Estimate.of(self.finals(name))

    def curves(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rounds of the evaluations [T], and a metric [n_runs, T]; None where a run lacks a value."""
        values = self._values(self.metric(name))
        if not values or any(None in row or len(row) != len(values[0]) for row in values):
            return None
        return np.asarray([line["round"] for line in self.runs[0].metrics]), np.asarray(values, dtype=float)

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
        """Return a key of the scenario, as `algorithm.learning_rate`, as text."""
        if not self.runs:
            return NOTHING
        value: Any = self.runs[0].scenario
        for name in path.split("."):
            value = getattr(value, name, None)
        return f"{value:g}" if isinstance(value, float) else NOTHING if value is None else str(value)


@dataclass(frozen=True)
class PartResult:
    """A part with the runs of its grid.

    Attributes:
        part: its definition.
        axes: at the study's size, without those in `best_over`.
        chosen: the axes in `best_over`.
        groups: one for each combination of labels, in order.
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
        """Return a metric's reading."""
        return self.groups[0].metric(name)

    def title(self, axis: str) -> str:
        """Return an axis' title, by default its name."""
        return (self.axes | self.chosen)[axis].title or axis

    @cached_property
    def claims_epsilon(self) -> bool:
        """Return whether some run's noise was computed by a paper's formula."""
        return any(group.budgets("claimed_epsilon") for group in self.groups)

    @property
    def complete(self) -> bool:
        """Return whether every cell is finished."""
        return all(group.complete for group in self.groups)

    @cached_property
    def _by_labels(self) -> dict[Labels, Group]:
        return {group.labels: group for group in self.groups}

    def at(self, labels: Mapping[str, str]) -> Group:
        """Return the group with these labels."""
        return self._by_labels[tuple(labels[name] for name in self.axes)]

    def places(self, where: Mapping[str, str], free: Sequence[str]) -> list[dict[str, str]]:
        """Return all combinations of labels, with the axes of `where` fixed and those of `free` left out."""
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
    kinds, axes = kinds_of(cell.scenario for cell in mine), part.axes_at(size)
    rivals: dict[Labels, list[Group]] = {}  # groups that differ only along the axes in `best_over`
    for labels in dict.fromkeys(cell.labels for cell in mine):
        keys = [cell.key for cell in mine if cell.labels == labels]
        finished = tuple(runs[key] for key in keys if key in runs)
        by_axis = dict(zip(axes, labels, strict=True))
        remaining = tuple(label for name, label in by_axis.items() if name not in part.best_over)
        chosen = tuple(label for name, label in by_axis.items() if name in part.best_over)
        group = Group(remaining, finished, len(keys) - len(finished), kinds, chosen)
        rivals.setdefault(remaining, []).append(group)

    def score(group: Group) -> float:
        value = group.final(part.metrics[0])
        return -math.inf if value is None else group.metric(part.metrics[0]).sign * value.mean

    groups = [replace(max(some, key=score), missing=sum(group.missing for group in some)) for some in rivals.values()]
    varied = {name: axis for name, axis in axes.items() if name not in part.best_over}
    best = {name: axis for name, axis in axes.items() if name in part.best_over}
    return PartResult(part, varied, best, tuple(groups), tuple(mine), seconds)
