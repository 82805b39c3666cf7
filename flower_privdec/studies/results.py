"""The results of a study's cells: mean and spread over the seeds, and whether they bear out a paper's claims."""

from __future__ import annotations

import json
import math
import statistics
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
        diverged: how many other seeds have a value that is not finite.
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

        # In fractions, rounded once. Sums of floats give three runs of 0.1 another mean than four, and a deviation of
        # 1e-17: a claim that one is larger would be shown.
        mean = statistics.mean(finite)
        std = None
        if len(finite) > 1:
            std = statistics.stdev(finite)
        return cls(mean, std, len(finite), len(values) - len(finite))


@dataclass(frozen=True)
class MeanCurve:
    """A metric over the rounds.

    Attributes:
        rounds: of the evaluations [T].
        mean: over the seeds [T].
        std: their sample standard deviation [T]; None for one seed.
        by_seed: each seed's values [n_runs, T]; None if they are not known.
    """

    rounds: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None
    by_seed: np.ndarray | None

    def cells(self, k: int) -> list[str]:
        """Return mean, deviation and each seed's value at one evaluation, as they stand in a CSV table."""
        mean = csv_number(self.mean[k])
        std = "" if self.std is None else csv_number(self.std[k])
        by_seed = "" if self.by_seed is None else " ".join(map(csv_number, self.by_seed[:, k]))
        return [mean, std, by_seed]


CONFIDENCE = 0.95


class Finding(StrEnum):
    """What runs make of a claim, from the worst to the best."""

    CONTRADICTED = "contradicted"
    NOT_RUN = "not run"
    NOT_SHOWN = "not shown"
    UNDECIDED = "undecided"
    SHOWN = "shown"

    @classmethod
    def of_all(cls, outcomes: Iterable[Finding]) -> Finding:
        """Return the outcome of a claim that asks for several things: the worst of theirs."""
        return min(outcomes, key=list(cls).index)


def difference(less: Estimate | None, more: Estimate | None) -> tuple[float, float] | None:
    """Return Welch's interval for the difference of two means, at CONFIDENCE.

    Returns:
        Its ends; None if nothing is known of the spread: one side has no values, one seed, or a run that diverged.
    """
    sides = [side for side in (less, more) if side is not None and side.n > 1 and not side.diverged]
    if less is None or more is None or len(sides) < 2:
        return None

    mean = more.mean - less.mean
    variances = [(side.std or 0.0) ** 2 / side.n for side in sides]  # of each side's mean
    variance = sum(variances)
    if variance == 0:
        # Accuracies are so many hits of so many: 0.57 - 0.56 is 0.01, and not below it.
        exact = round(mean, 12)
        return exact, exact

    # Welch and Satterthwaite's degrees of freedom.
    spread = sum(variance_of_one**2 / (side.n - 1) for variance_of_one, side in zip(variances, sides, strict=True))
    freedom = variance**2 / spread
    half_width = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return mean - half_width, mean + half_width


def compare(less: Estimate | None, more: Estimate | None, by: float = 0.0) -> Finding:
    """Judge the claim that one mean is larger than another, by the interval of `difference`.

    Args:
        by: how much larger at least; if negative, how much smaller it may be.

    Returns:
        Shown if the whole interval is as claimed. Contradicted if the whole interval has the other sign (or, for a
        negative `by`, is below it). Not shown if it lies below what is claimed, or both are equal without any spread.
        Undecided if it contains both what is claimed and what is not, or there is no interval.
    """
    interval = difference(less, more)
    if interval is None:
        return Finding.UNDECIDED
    low, high = interval
    if low > by or low == by != 0:
        return Finding.SHOWN
    if high < min(by, 0.0):
        return Finding.CONTRADICTED
    if high < by or low == high:
        return Finding.NOT_SHOWN
    return Finding.UNDECIDED


@dataclass(frozen=True)
class Group:
    """The runs of one point of a part's grid, over the seeds.

    Attributes:
        runs: the finished runs, in the order of the seeds.
        missing: number of runs that are not finished.
        kinds: the metrics of the whole part; these runs may lack some.
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
        """Return a metric of each run at each of its evaluations."""
        rows = []
        for run in self.runs:
            algorithm = run.scenario.algorithm.name
            rows.append([reading.read(line, algorithm) for line in run.metrics])
        return rows

    def finals(self, name: str) -> list[float]:
        """Return a metric of each finished run, reduced over the rounds: the last one by default.

        It is NaN if it is not finite, as after a run diverged. The list is empty if no run of the group ever has it.
        """
        reading = self.metric(name)
        values = self._values(reading)
        if all(value is None for row in values for value in row):
            return []

        finals = []
        for row in values:
            numbers = [math.nan if value is None else value for value in row]
            finals.append(reading.over(numbers or [math.nan]))
        return finals

    def final(self, name: str) -> Estimate | None:
        """Return mean and spread of `finals`."""
        return Estimate.of(self.finals(name))

    def curves(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the rounds of the evaluations [T], and a metric [n_runs, T]; None if a run lacks a value."""
        values = self._values(self.metric(name))
        if not values or any(None in row or len(row) != len(values[0]) for row in values):
            return None
        rounds = np.asarray([line["round"] for line in self.runs[0].metrics])
        return rounds, np.asarray(values, dtype=float)

    def mean_curve(self, name: str) -> MeanCurve | None:
        """Return mean and spread of `curves`."""
        curves = self.curves(name)
        if curves is None:
            return None
        rounds, values = curves
        std = values.std(axis=0, ddof=1) if len(values) > 1 else None
        return MeanCurve(rounds, values.mean(axis=0), std, values)

    def gradients_per_round(self) -> float:
        """Return how many examples' gradients all peers together compute in a round, on average over the runs."""
        counts = []
        for run in self.runs:
            rounds_of_all_peers = sum(row["rounds_run"] for row in run.summary["privacy"])
            active_peers = rounds_of_all_peers / run.scenario.rounds
            batch = run.scenario.data.batch.size or 1
            counts.append(active_peers * batch * run.scenario.algorithm.steps_per_round)
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
        if value is None:
            return NOTHING
        return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class PartResult:
    """A part with the runs of its grid.

    Attributes:
        axes: at the study's size, without those in `best_over`.
        chosen: the axes in `best_over`.
        groups: one for each combination of labels, in order.
        cells: all its cells.
        seconds: the CPU seconds that its cells took in all processes together.
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
            if name in free:
                continue
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
        remaining = tuple(label for name, label in zip(axes, labels, strict=True) if name not in part.best_over)
        chosen = tuple(label for name, label in zip(axes, labels, strict=True) if name in part.best_over)
        group = Group(remaining, finished, len(keys) - len(finished), kinds, chosen)
        rivals.setdefault(remaining, []).append(group)

    def score(group: Group) -> tuple[bool, float]:
        value = group.final(part.metrics[0])
        if value is None:
            return False, -math.inf
        # One that is complete comes before any that is not, however good that one's runs are so far.
        return group.complete and not value.diverged, group.metric(part.metrics[0]).sign * value.mean

    groups = []
    for competing in rivals.values():
        best_of_them = max(competing, key=score)
        missing = sum(group.missing for group in competing)
        groups.append(replace(best_of_them, missing=missing))

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
        """Return the number of cells with each outcome: `shown in 3 of 4 cells, undecided in 1`."""
        counts: dict[str, int] = {}
        for outcome in reversed(Finding):
            count = sum(case.outcome is outcome for case in self.cases)
            if count:
                counts[outcome] = count

        (first, count), *others = counts.items()
        if others:
            rest = [f"{outcome} in {n_cells}" for outcome, n_cells in others]
            return ", ".join([f"{first} in {count} of {len(self.cases)} cells", *rest])
        if count == 1:
            return first
        if count == 2:
            return f"{first} in both cells"
        return f"{first} in all {count} cells"

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
    reading = result.metric(check.metric)
    name = reading.title

    if isinstance(check, Ordered):
        order = " < ".join(check.order or result.axes[check.axis].labels())
        size = "" if check.by == 0 else f", each {_size(reading, check.by)}"
        return f"{name} in the order {order}{size}"

    if isinstance(check, Best):
        near = f", or at most {check.reach} place from it" if check.reach else ""
        return f"the best {name} at {result.title(check.axis)} {check.label}{near}"

    if isinstance(check, Above):
        better = "lower" if reading.low else "higher"
        left_out = [f"{result.title(axis)} {', '.join(labels)}" for axis, labels in check.without.items()]
        rest = ""
        if left_out:
            rest = f", not counting cells with {' or '.join(left_out)}"
        return f"{better} {name} than at {_name(result, check.baseline, {})}{rest}"

    if isinstance(check, Slope):
        return f"{name} falling as rounds to the power {check.at_most:g}, or faster, from round {check.first:,} on"
    return f"the same {name} in n times fewer rounds, or in fewer still (within a factor of {check.within:g})"


def _size(reading: Reading, by: float) -> str:
    """Describe the least difference that a claim asks for."""
    amount = f"{abs(by):g}"
    if reading.share:
        points = f"{100 * abs(by):g}"
        amount = "1 point" if points == "1" else f"{points} points"
    if by > 0:
        return f"by {amount} or more"
    return f"by no more than {amount} below the one before"


def value_text(reading: Reading, estimate: Estimate | None, spread: bool = False) -> str:
    """Return a metric's mean as text, with its standard deviation if `spread` is true; see `wording.measured`."""
    if estimate is None:
        return NOTHING

    # Rounded as in the CSV table first, so that a value that ends in 5 reads the same from there.
    mean = float(csv_number(estimate.mean))
    std = None
    if spread and estimate.std is not None:
        std = float(csv_number(estimate.std))
    text = measured(mean, {"share": reading.share}, std)

    if estimate.diverged:
        runs = estimate.n + estimate.diverged
        return f"{text} ({estimate.diverged} of {runs} without a number)"
    return text


def csv_number(value: float) -> str:
    """Return a measured value as it stands in a CSV table."""
    return f"{value:.6g}"


def _places(check: Ordered | Best, labels: Sequence[str], result: PartResult) -> Iterator[tuple[str, list[Group]]]:
    """Yield, for each combination of the other axes, its name and the groups along the check's axis."""
    for place in result.places(check.where, [check.axis]):
        yield _name(result, place, check.where), [result.at(place | {check.axis: label}) for label in labels]


def _compared(less: Group, more: Group, name: str, by: float = 0.0, sign: int = 1) -> Finding:
    """Judge the claim that a metric of one group is larger than of another; smaller if the sign is -1."""
    if not (less.complete and more.complete):
        return Finding.NOT_RUN
    if sign > 0:
        return compare(less.final(name), more.final(name), by)
    return compare(more.final(name), less.final(name), by)


def _name(result: PartResult, place: dict[str, str], where: dict[str, str]) -> str:
    """Name a place by the axes that vary."""
    return ", ".join(f"{result.title(n)} {label}" for n, label in place.items() if n not in where)


def _interval_text(reading: Reading, interval: tuple[float, float] | None) -> str:
    """Return the ends of a difference's interval, shares in points: ` (+2.1 to +3.4)`."""
    if interval is None:
        return ""
    low, high = interval
    if reading.share:
        return f" ({100 * low:+.1f} to {100 * high:+.1f})"
    return f" ({low:+.3g} to {high:+.3g})"


def _ordered(check: Ordered, result: PartResult) -> Verdict:
    labels = check.order or result.axes[check.axis].labels()
    reading = result.metric(check.metric)
    cases: list[Case] = []
    steps: list[tuple[float, Finding]] = []
    for place, groups in _places(check, labels, result):
        values = [group.final(check.metric) for group in groups]
        outcomes = [_compared(less, more, check.metric, check.by) for less, more in pairwise(groups)]

        # As `a: 45.4 % < b: 81.1 % (+35 to +36)`.
        text = f"{labels[0]}: {value_text(reading, values[0], spread=True)}"
        for label, (before, after), outcome in zip(labels[1:], pairwise(values), outcomes, strict=True):
            if before is None or after is None:
                gap = math.nan
            else:
                gap = after.mean - before.mean
            text += f" {_sign(gap)} {label}: {value_text(reading, after, spread=True)}"
            if outcome is not Finding.NOT_RUN:
                text += _interval_text(reading, difference(before, after))
                steps.append((gap, outcome))
        cases.append(Case(place, Finding.of_all(outcomes), text))

    detail = ""
    if len(labels) > 2 and steps:
        rising = sum(gap > max(check.by, 0.0) or gap >= check.by < 0 for gap, _ in steps)
        shown = sum(outcome is Finding.SHOWN for _, outcome in steps)
        detail = f"of {len(steps)} neighbouring pairs {rising} in the claimed order, {shown} by more than the spread"
    return Verdict(tuple(cases), detail)


def _sign(gap: float) -> str:
    """Return the sign between two means: the second minus the first is `gap`."""
    if math.isnan(gap):
        return "?"
    if gap == 0:
        return "="
    return "<" if gap > 0 else ">"


def _best(check: Best, result: PartResult) -> Iterator[Case]:
    """Compare the best point within reach with every point outside."""
    labels = result.axes[check.axis].labels()
    reading = result.metric(check.metric)
    claimed = labels.index(check.label)
    for place, groups in _places(check, labels, result):
        values = [group.final(check.metric) for group in groups]

        scores = [-math.inf if value is None else reading.sign * value.mean for value in values]
        order = sorted(range(len(labels)), key=scores.__getitem__, reverse=True)

        best_within = max((i for i in order if abs(i - claimed) <= check.reach), key=scores.__getitem__)
        outside = [groups[i] for i in order if abs(i - claimed) > check.reach]
        outcomes = [_compared(rival, groups[best_within], check.metric, sign=reading.sign) for rival in outside]
        numbers = ", ".join(f"{labels[i]} {value_text(reading, values[i], spread=True)}" for i in order)
        yield Case(place, Finding.of_all(outcomes), f"best first: {numbers}")


def _above(check: Above, result: PartResult) -> Verdict:
    """Compare every point with the baseline, along the baseline's axes, for each combination of the other axes."""
    reading = result.metric(check.metric)
    fixed = {name: label for name, label in check.where.items() if name not in check.baseline}
    others = [name for name in result.axes if name not in check.baseline]

    cases = []
    baselines: list[str] = []
    for outer in result.places(fixed, list(check.baseline)):
        baseline = result.at(outer | check.baseline)
        estimate = baseline.final(check.metric)
        for inner in result.places({}, others):
            left_out = any(inner[name] in labels for name, labels in check.without.items())
            if left_out or inner == check.baseline:
                continue
            group = result.at(outer | inner)
            place = _name(result, outer | inner, fixed)
            text = value_text(reading, group.final(check.metric), spread=True)
            text += _interval_text(reading, difference(estimate, group.final(check.metric)))
            cases.append(Case(place, _compared(baseline, group, check.metric, sign=reading.sign), text))
        baselines.append(f"{_name(result, outer, fixed)} {value_text(reading, estimate, spread=True)}".strip())

    return Verdict(tuple(cases), f"the baseline has {', '.join(baselines)}")


def _slope(check: Slope, result: PartResult) -> Iterator[Case]:
    """Fit a line to the logarithms of each seed's curve, and compare the powers with the claimed one."""
    for labels in result.places(check.where, []):
        group = result.at(labels)
        place = _name(result, labels, check.where)
        curves = group.curves(check.metric) if group.complete else None
        if curves is None:
            yield _without_curves(place, [group])
            continue

        rounds, values = curves  # [T], [n_runs, T]
        late = rounds >= check.first
        rounds = rounds[late]
        values = values[:, late]
        if len(rounds) < 2 or not (values > 0).all():
            yield Case(place, Finding.UNDECIDED, f"{check.metric} has no logarithm")
            continue

        slopes = [float(np.polyfit(np.log(rounds), np.log(row), 1)[0]) for row in values]
        powers = Estimate.of(slopes)
        mean = math.nan if powers is None else powers.mean
        spread = "" if powers is None or powers.std is None else f" ± {powers.std:.2f}"
        fell = f"{number(values[:, 0].mean())} to {number(values[:, -1].mean())}"
        text = f"power {mean:.2f}{spread} from round {rounds[0]:,} to {rounds[-1]:,}, {fell}"
        yield Case(place, compare(powers, Estimate(check.at_most, 0.0, 2)), text)


def _without_curves(place: str, groups: Sequence[Group]) -> Case:
    """Return the case of groups of which some lack curves: not run, or a run has no number somewhere."""
    if all(group.complete for group in groups):
        return Case(place, Finding.UNDECIDED, "a run has no number in some evaluation")
    return Case(place, Finding.NOT_RUN, NOTHING)


def _speedup(check: Speedup, result: PartResult) -> Iterator[Case]:
    """Compare the rounds that two sizes take to reach a level with the ratio of the sizes."""
    points = sorted(result.axes[check.axis].all_points(), key=lambda point: point.value or 0.0)
    reading = result.metric(check.metric)
    for labels in result.places(check.where, [check.axis]):
        place = _name(result, labels, check.where)
        groups = [result.at(labels | {check.axis: point.label}) for point in points]
        curves = [group.curves(check.metric) if group.complete else None for group in groups]
        complete = [curve for curve in curves if curve is not None]
        if len(complete) < len(points):
            yield _without_curves(place, groups)
            continue

        for level in check.levels or [_common_level([values for _, values in complete], reading.low)]:
            reached = [_rounds_to(level, rounds, values, reading.low) for rounds, values in complete]
            for (small, first), (large, second) in pairwise(zip(points, reached, strict=True)):
                case = f"{small.label} to {large.label}"
                if place:
                    case = f"{place}, {case}"
                if first is None or second is None:
                    yield Case(case, Finding.UNDECIDED, f"{reading.title} {number(level)} is not reached")
                    continue

                claimed = (large.value or 0) / (small.value or 0)
                ratio = np.mean(first) / np.mean(second)
                took = f"{np.mean(first):.0f} and {np.mean(second):.0f} rounds to {reading.title} {number(level)}"
                # A ratio of rounds is a difference of their logarithms.
                outcome = compare(
                    Estimate.of([math.log(rounds) for rounds in second]),
                    Estimate.of([math.log(rounds) for rounds in first]),
                    math.log(claimed / check.within),
                )
                yield Case(case, outcome, f"{took}, {ratio:.2f} times fewer where {claimed:g} is claimed")


def _common_level(values: Sequence[np.ndarray], low: bool) -> float:
    """Return the best value that all runs reach, from the values of each group's runs, each [n_runs, T]."""
    if low:
        return float(max(runs.min(axis=1).max() for runs in values))
    return float(min(runs.max(axis=1).min() for runs in values))


def _rounds_to(level: float, rounds: np.ndarray, values: np.ndarray, low: bool) -> list[float] | None:
    """Return after how many rounds each run first reaches a level; None if one never does.

    Between two evaluations a curve is taken to be a line.
    """
    sign = 1.0 if low else -1.0
    reached = []
    for row in values:
        gap = sign * (row - level)  # positive until the level is reached
        at_level = np.flatnonzero(gap <= 1e-12)
        if not len(at_level):
            return None

        i = int(at_level[0])
        if i == 0:
            reached.append(float(rounds[0]))
            continue
        share = gap[i - 1] / (gap[i - 1] - gap[i])
        reached.append(float(rounds[i - 1] + share * (rounds[i] - rounds[i - 1])))
    return reached
