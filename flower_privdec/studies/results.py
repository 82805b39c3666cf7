"""The results of a study's cells: mean and spread over the seeds, and whether they bear out a paper's claims."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from flower_privdec.common.catalogue import MetricKind
from flower_privdec.common.formatting import NOTHING, number
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.reporting.wording import measured
from flower_privdec.studies.cells import Cell, Labels, folder_of, is_finished
from flower_privdec.studies.spec import (
    Above,
    Axis,
    Best,
    Check,
    Ordered,
    Part,
    Reading,
    Slope,
    Speedup,
    kinds_of,
    metric,
)


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation (None for one seed) over the n seeds whose value is finite.

    Attributes:
        diverged: how many further seeds have a value that is not.
    """

    mean: float
    std: float | None
    n: int
    diverged: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """Estimate from values; None without a finite one."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        std = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
        return cls(float(np.mean(finite)), std, len(finite), len(values) - len(finite))


CONFIDENCE = 0.95


class Finding(StrEnum):
    """What runs make of a claim."""

    CONTRADICTED = "contradicted"
    NOT_RUN = "not run"
    NOT_SHOWN = "not shown"
    UNDECIDED = "undecided"
    SHOWN = "shown"

    @classmethod
    def of_all(cls, outcomes: Iterable[Finding]) -> Finding:
        """Return the outcome of a claim that asks for several things: the first of these that one of them has."""
        return min(outcomes, key=list(cls).index)


def difference(less: Estimate | None, more: Estimate | None) -> tuple[float, float] | None:
    """Return Welch's interval for the difference of two means, at CONFIDENCE.

    Returns:
        Its ends; None where nothing is known of the spread: a side without values, of one seed, or with a run that
        diverged.
    """
    sides = [side for side in (less, more) if side is not None and side.n > 1 and not side.diverged]
    if less is None or more is None or len(sides) < 2:
        return None
    variances = [(side.std or 0.0) ** 2 / side.n for side in sides]
    total = sum(variances)
    mean = more.mean - less.mean
    if total == 0:
        return mean, mean
    freedom = total**2 / sum(v**2 / (side.n - 1) for v, side in zip(variances, sides, strict=True))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total)
    return mean - half, mean + half


def compare(less: Estimate | None, more: Estimate | None, by: float = 0.0) -> Finding:
    """Judge the claim that one mean is larger than another, by the interval of `difference`.

    Args:
        by: how much larger at least; a negative one allows it to be smaller by as much.

    Returns:
        Shown, where the whole interval is as claimed; contradicted, where the whole interval has the other sign (or,
        for a negative `by`, is below it); not shown, where it lies below what is claimed, or both are equal without any
        spread; undecided, where it has both what is claimed and what is not, or there is no interval.
    """
    interval = difference(less, more)
    if interval is None:
        return Finding.UNDECIDED
    low, high = interval
    if low > by or low == by != 0:
        return Finding.SHOWN
    if high < min(by, 0.0):
        return Finding.CONTRADICTED
    return Finding.NOT_SHOWN if high < by or low == high else Finding.UNDECIDED


@dataclass(frozen=True)
class Group:
    """The runs of one point of a part's grid, over the seeds.

    Attributes:
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
    def n_runs(self) -> int:
        """Return how many runs are finished."""
        return len(self.runs)

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
        """Return a metric of each finished run, reduced over the rounds: the last one by default.

        It is NaN where it is not finite, as after a run diverged. None have it where no run of the group ever does.
        """
        reading = self.metric(name)
        values = self._values(reading)
        if all(value is None for row in values for value in row):
            return []
        return [reading.over([math.nan if value is None else value for value in row] or [math.nan]) for row in values]

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
            counts.append(steps * (run.scenario.data.batch.size or 1) * run.scenario.algorithm.steps_per_round)
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
        axes: at the study's size, without those in `best_over`.
        chosen: the axes in `best_over`.
        groups: one for each combination of labels, in order.
        cells: all its cells.
        seconds: of CPU that its cells took, all processes together.
        finished: the keys of its finished cells.
    """

    part: Part
    axes: dict[str, Axis]
    chosen: dict[str, Axis]
    groups: tuple[Group, ...]
    cells: tuple[Cell, ...]
    seconds: float
    finished: frozenset[str] = frozenset()

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
    kinds = kinds_of(cell.scenario for cell in mine)
    axes = part.axes_at(size)
    rivals: dict[Labels, list[Group]] = {}  # groups that differ only along the axes in `best_over`
    for labels in dict.fromkeys(cell.labels for cell in mine):
        keys = [cell.key for cell in mine if cell.labels == labels]
        finished = tuple(runs[key] for key in keys if key in runs)
        by_axis = dict(zip(axes, labels, strict=True))
        remaining = tuple(label for name, label in by_axis.items() if name not in part.best_over)
        chosen = tuple(label for name, label in by_axis.items() if name in part.best_over)
        group = Group(remaining, finished, len(keys) - len(finished), kinds, chosen)
        rivals.setdefault(remaining, []).append(group)

    def score(group: Group) -> tuple[bool, float]:
        value = group.final(part.metrics[0])
        if value is None:
            return False, -math.inf
        return group.complete and not value.diverged, group.metric(part.metrics[0]).sign * value.mean

    groups = [replace(max(some, key=score), missing=sum(group.missing for group in some)) for some in rivals.values()]
    varied = {name: axis for name, axis in axes.items() if name not in part.best_over}
    best = {name: axis for name, axis in axes.items() if name in part.best_over}
    return PartResult(part, varied, best, tuple(groups), tuple(mine), seconds, frozenset(runs))


class Case(NamedTuple):
    """One place of a claim: its labels, the claim's outcome there, and the numbers."""

    where: str
    outcome: Finding
    numbers: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    cases: tuple[Case, ...]
    detail: str = ""

    @property
    def summary(self) -> str:
        """Return in how many cells each outcome stands, as `shown in 3 of 4 cells, undecided in 1`."""
        counts = [(name, sum(case.outcome is name for case in self.cases)) for name in reversed(Finding)]
        present = [(name, count) for name, count in counts if count]
        if len(present) == 1:
            name, count = present[0]
            return name + {1: "", 2: " in both cells"}.get(count, f" in all {count} cells")
        (first, count), *others = present
        return ", ".join(
            [f"{first} in {count} of {len(self.cases)} cells", *(f"{name} in {count}" for name, count in others)]
        )

    @property
    def sentence(self) -> str:
        """Return `summary`, and what else there is, as a sentence."""
        return f"{self.summary.capitalize()}{self.detail and '; '}{self.detail}."


def judge(check: Check, result: PartResult) -> Verdict:
    """Decide a check."""
    match check:
        case Ordered():
            return _ordered(check, result)
        case Above():
            return _above(check, result)
        case Best():
            return Verdict(tuple(_best(check, result)))
        case Slope():
            return Verdict(tuple(_slope(check, result)))
        case _:
            return Verdict(tuple(_speedup(check, result)))


def criterion(check: Check, result: PartResult) -> str:
    """Describe what a check requires."""
    name = result.metric(check.metric).title
    low = result.metric(check.metric).low
    if isinstance(check, Ordered):
        order = " < ".join(check.order or result.axes[check.axis].labels())
        size = "" if check.by == 0 else f", each {_size(result.metric(check.metric), check.by)}"
        return f"{name} in the order {order}{size}"
    if isinstance(check, Best):
        near = f", or at most {check.reach} place from it" if check.reach else ""
        return f"the best {name} at {result.title(check.axis)} {check.label}{near}"
    if isinstance(check, Above):
        left_out = " or ".join(f"{result.title(n)} {', '.join(labels)}" for n, labels in check.without.items())
        rest = f", not counting cells with {left_out}" if left_out else ""
        return f"{'lower' if low else 'higher'} {name} than at {_name(result, check.baseline, {})}{rest}"
    if isinstance(check, Slope):
        return f"{name} falling as rounds to the power {check.at_most:g}, or faster, from round {check.first:,} on"
    return f"the same {name} in n times fewer rounds, or in fewer still (within a factor of {check.within:g})"


def _size(reading: Reading, by: float) -> str:
    """Describe the least difference that a claim asks for."""
    points = f"{100 * abs(by):g}"
    amount = f"{points} point{'' if points == '1' else 's'}" if reading.share else f"{abs(by):g}"
    return f"by {amount} or more" if by > 0 else f"by no more than {amount} below the one before"


def value_text(reading: Reading, estimate: Estimate | None, spread: bool = False) -> str:
    """Return a metric's mean as text, with its standard deviation where `spread` is true; see `wording.measured`.

    Both are first rounded as in the CSV table, so that a value that ends in 5 reads the same from there.
    """
    if estimate is None:
        return NOTHING
    mean, std = (None if value is None else float(csv_number(value)) for value in (estimate.mean, estimate.std))
    text = measured(mean, {"share": reading.share}, std if spread else None)
    lost = estimate.diverged
    runs = estimate.n + estimate.diverged
    return f"{text} ({lost} of {runs} without a number)" if lost else text


def csv_number(value: float) -> str:
    """Return a measured value as it stands in a CSV table."""
    return f"{value:.6g}"


def _places(check: Ordered | Best, labels: Sequence[str], result: PartResult) -> Iterator[tuple[str, list[Group]]]:
    """Yield, for each combination of the other axes, its name and the groups along the check's axis."""
    for place in result.places(check.where, [check.axis]):
        yield _name(result, place, check.where), [result.at(place | {check.axis: label}) for label in labels]


def _compared(less: Group, more: Group, name: str, by: float = 0.0, sign: int = 1) -> Finding:
    """Judge the claim that a metric of one group is larger than of another, or smaller where the sign is -1."""
    if not (less.complete and more.complete):
        return Finding.NOT_RUN
    first, second = (less, more) if sign > 0 else (more, less)
    return compare(first.final(name), second.final(name), by)


def _name(result: PartResult, place: dict[str, str], where: dict[str, str]) -> str:
    """Name a place by the axes that vary."""
    return ", ".join(f"{result.title(n)} {label}" for n, label in place.items() if n not in where)


def _interval_text(reading: Reading, interval: tuple[float, float] | None) -> str:
    """Return the ends of a difference's interval, shares in points; as ` (+2.1 to +3.4)`."""
    if interval is None:
        return ""
    low, high = (f"{100 * end:+.1f}" if reading.share else f"{end:+.3g}" for end in interval)
    return f" ({low} to {high})"


def _ordered(check: Ordered, result: PartResult) -> Verdict:
    labels = check.order or result.axes[check.axis].labels()
    reading = result.metric(check.metric)
    cases: list[Case] = []
    steps: list[tuple[float, Finding]] = []
    for place, groups in _places(check, labels, result):
        values = [group.final(check.metric) for group in groups]
        text = f"{labels[0]}: {value_text(reading, values[0], spread=True)}"  # `a: 45.4 % < b: 81.1 % (+35 to +36)`
        outcomes = [_compared(less, more, check.metric, check.by) for less, more in pairwise(groups)]
        for label, (a, b), outcome in zip(labels[1:], pairwise(values), outcomes, strict=True):
            gap = math.nan if a is None or b is None else b.mean - a.mean
            sign = "<" if gap > 0 else ">" if gap < 0 else "=" if gap == 0 else "?"
            text += f" {sign} {label}: {value_text(reading, b, spread=True)}"
            if outcome is not Finding.NOT_RUN:
                text += _interval_text(reading, difference(a, b))
                steps.append((gap, outcome))
        cases.append(Case(place, Finding.of_all(outcomes), text))
    detail = ""
    if len(labels) > 2 and steps:
        rising = sum(gap > max(check.by, 0.0) or gap >= check.by < 0 for gap, _ in steps)
        shown = sum(outcome is Finding.SHOWN for _, outcome in steps)
        detail = f"of {len(steps)} neighbouring pairs {rising} in the claimed order, {shown} by more than the spread"
    return Verdict(tuple(cases), detail)


def _best(check: Best, result: PartResult) -> Iterator[Case]:
    """Compare the best point within reach with every point outside."""
    labels = result.axes[check.axis].labels()
    reading = result.metric(check.metric)
    claimed = labels.index(check.label)
    for place, groups in _places(check, labels, result):
        values = [group.final(check.metric) for group in groups]

        def mean(i: int, values: list[Estimate | None] = values) -> float:
            value = values[i]
            return -math.inf if value is None else reading.sign * value.mean

        order = sorted(range(len(labels)), key=mean, reverse=True)
        inside = max((i for i in order if abs(i - claimed) <= check.reach), key=mean)
        outside = [groups[i] for i in order if abs(i - claimed) > check.reach]
        outcomes = [_compared(rival, groups[inside], check.metric, sign=reading.sign) for rival in outside]
        numbers = ", ".join(f"{labels[i]} {value_text(reading, values[i], spread=True)}" for i in order)
        yield Case(place, Finding.of_all(outcomes), f"best first: {numbers}")


def _above(check: Above, result: PartResult) -> Verdict:
    cases = []
    reading = result.metric(check.metric)
    fixed = {name: label for name, label in check.where.items() if name not in check.baseline}
    free = [name for name in result.axes if name not in check.baseline]
    low: list[str] = []
    for outer in result.places(fixed, list(check.baseline)):
        base = result.at(outer | check.baseline)
        for inner in result.places({}, free):
            if inner == check.baseline or any(inner[name] in labels for name, labels in check.without.items()):
                continue
            group = result.at(outer | inner)
            where = _name(result, outer | inner, fixed)
            text = value_text(reading, group.final(check.metric), spread=True)
            text += _interval_text(reading, difference(base.final(check.metric), group.final(check.metric)))
            cases.append(Case(where, _compared(base, group, check.metric, sign=reading.sign), text))
        low.append(
            f"{_name(result, outer, fixed)} {value_text(reading, base.final(check.metric), spread=True)}".strip()
        )
    return Verdict(tuple(cases), f"the baseline has {', '.join(low)}")


def _slope(check: Slope, result: PartResult) -> Iterator[Case]:
    """Fit a line to the logarithms of each seed's curve, and compare the powers with the claimed one."""
    for labels in result.places(check.where, []):
        group = result.at(labels)
        place = _name(result, labels, check.where)
        curves = group.curves(check.metric) if group.complete else None
        if curves is None:
            yield _without_curves(place, [group])
            continue
        late = curves[0] >= check.first
        rounds = curves[0][late]
        values = curves[1][:, late]
        if len(rounds) < 2 or not (values > 0).all():
            yield Case(place, Finding.UNDECIDED, f"{check.metric} has no logarithm")
            continue
        powers = Estimate.of([float(np.polyfit(np.log(rounds), np.log(row), 1)[0]) for row in values])
        spread = "" if powers is None or powers.std is None else f" ± {powers.std:.2f}"
        fell = f"{number(values[:, 0].mean())} to {number(values[:, -1].mean())}"
        power = f"power {powers.mean if powers else math.nan:.2f}{spread}"
        text = f"{power} from round {rounds[0]:,} to {rounds[-1]:,}, {fell}"
        yield Case(place, compare(powers, Estimate(check.at_most, 0.0, 2)), text)


def _without_curves(place: str, groups: Sequence[Group]) -> Case:
    """Return the case of groups some of which lack curves: not run, or of runs that have no number somewhere."""
    if all(group.complete for group in groups):
        return Case(place, Finding.UNDECIDED, "a run has no number in some evaluation")
    return Case(place, Finding.NOT_RUN, NOTHING)


def _speedup(check: Speedup, result: PartResult) -> Iterator[Case]:
    """Compare the rounds that two sizes take to reach a level with the ratio of the sizes."""
    points = sorted(result.axes[check.axis].all_points(), key=lambda point: point.value or 0.0)
    reading = result.metric(check.metric)
    low = reading.low
    for labels in result.places(check.where, [check.axis]):
        place = _name(result, labels, check.where)
        groups = [result.at(labels | {check.axis: point.label}) for point in points]
        curves = [group.curves(check.metric) if group.complete else None for group in groups]
        complete = [curve for curve in curves if curve is not None]
        if len(complete) < len(points):
            yield _without_curves(place, groups)
            continue
        best = [(values.min(axis=1) if low else values.max(axis=1)) for _, values in complete]
        common = float(max(run.max() for run in best) if low else min(run.min() for run in best))  # that all runs reach
        for level in check.levels or [common]:
            reached = [_rounds_to(level, *curve, low) for curve in complete]
            for (a, first), (b, second) in pairwise(zip(points, reached, strict=True)):
                case = f"{place}{', ' if place else ''}{a.label} to {b.label}"
                if first is None or second is None:
                    yield Case(case, Finding.UNDECIDED, f"{reading.title} {number(level)} is not reached")
                    continue
                ratio = np.mean(first) / np.mean(second)
                claimed = (b.value or 0) / (a.value or 0)
                took = f"{np.mean(first):.0f} and {np.mean(second):.0f} rounds to {reading.title} {number(level)}"
                outcome = compare(
                    Estimate.of([math.log(rounds) for rounds in second]),
                    Estimate.of([math.log(rounds) for rounds in first]),
                    math.log(claimed / check.within),
                )
                yield Case(case, outcome, f"{took}, {ratio:.2f} times fewer where {claimed:g} is claimed")


def _rounds_to(level: float, rounds: np.ndarray, values: np.ndarray, low: bool) -> list[float] | None:
    """Return after how many rounds runs first reach a level, interpolating linearly between evaluations."""
    sign = 1.0 if low else -1.0
    reached = []
    for row in values:
        gap = sign * (row - level)
        there = np.flatnonzero(gap <= 1e-12)
        if not len(there):
            return None
        i = int(there[0])
        share = gap[i - 1] / (gap[i - 1] - gap[i]) if i else 1.0
        start = rounds[i - 1] if i else 0.0
        reached.append(float(start + share * (rounds[i] - start)))
    return reached
