"""Check a paper's claims against the means over the seeds, with the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from flower_privdec.common.formatting import NOTHING, number
from flower_privdec.study.measured import Reading
from flower_privdec.study.results import Estimate, Group, PartResult
from flower_privdec.study.spec import Above, Best, Check, Ordered, Slope, Speedup


class Case(NamedTuple):
    """One place of a claim: its labels, whether the claim holds there (None: a run is missing), and the numbers."""

    where: str
    holds: bool | None
    numbers: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    cases: tuple[Case, ...]
    detail: str = ""

    @property
    def sentence(self) -> str:
        """Return whether the claim shows, and in how many cells, as a sentence."""
        decided = [case.holds for case in self.cases if case.holds is not None]
        if not decided:
            return "The claim is not decided: runs are missing."
        if len(decided) == 1:
            sentence = "The claim shows" if decided[0] else "The claim does not show"
        elif len(set(decided)) == 1:
            sentence = f"The claim {'shows in all' if decided[0] else 'does not show in any of'} {len(decided)} cells"
        else:
            sentence = f"The claim shows in {sum(decided)} of {len(decided)} cells"
        undecided = len(self.cases) - len(decided)
        tail = f" ({undecided} more not decided: runs are missing)" if undecided else ""
        return f"{sentence}{tail}{self.detail and '; '}{self.detail}."


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
    name, low = result.metric(check.metric).title, result.metric(check.metric).low
    if isinstance(check, Ordered):
        return f"{name} in the order {' < '.join(check.order or result.axes[check.axis].labels())}"
    if isinstance(check, Best):
        near = f", or at most {check.reach} place from it" if check.reach else ""
        return f"the best {name} at {result.title(check.axis)} {check.label}{near}"
    if isinstance(check, Above):
        return f"{'lower' if low else 'higher'} {name} than at {_name(result, check.baseline, {})}"
    if isinstance(check, Slope):
        return f"{name} falling as rounds to the power {check.at_most:g}, or faster, from round {check.first:,} on"
    return f"the same {name} in n times fewer rounds (within a factor of {check.within:g})"


def value_text(reading: Reading, estimate: Estimate | None, spread: bool = False) -> str:
    """Return a metric's mean as text, a fraction in percent, with its standard deviation where `spread` is true."""
    if estimate is None:
        return NOTHING
    if reading.share:
        text, std = f"{100 * estimate.mean:.1f} %", f"{100 * (estimate.std or 0):.1f}"
    else:
        text, std = number(estimate.mean), number(estimate.std)
    return f"{text} ± {std}" if spread and estimate.std is not None else text


def _finals(
    check: Ordered | Best, labels: Sequence[str], result: PartResult
) -> Iterator[tuple[str, list[Estimate | None]]]:
    """Yield, for each combination of the other axes, its name and the final metric along the check's axis."""
    for place in result.places(check.where, [check.axis]):
        groups = [result.at(place | {check.axis: label}) for label in labels]
        yield _name(result, place, check.where), [_decided(group, check.metric) for group in groups]


def _decided(group: Group, name: str) -> Estimate | None:
    return group.final(name) if group.complete else None


def _name(result: PartResult, place: dict[str, str], where: dict[str, str]) -> str:
    """Name a place by the axes that vary."""
    return ", ".join(f"{result.title(n)} {label}" for n, label in place.items() if n not in where)


def _ordered(check: Ordered, result: PartResult) -> Verdict:
    labels, reading = check.order or result.axes[check.axis].labels(), result.metric(check.metric)
    cases: list[Case] = []
    steps: list[tuple[Estimate, Estimate]] = []
    for place, values in _finals(check, labels, result):
        holds, text = None, f"{labels[0]}: {value_text(reading, values[0])}"  # `a: 45.4 % < b: 81.1 % > c: 80.0 %`
        for label, (a, b) in zip(labels[1:], pairwise(values), strict=True):
            sign = "?" if a is None or b is None else "<" if b.mean > a.mean else ">" if b.mean < a.mean else "="
            text += f" {sign} {label}: {value_text(reading, b)}"
        present = [value for value in values if value is not None]
        if len(present) == len(values) > 1:
            steps += pairwise(present)
            holds = all(b.mean > a.mean for a, b in pairwise(present))
        cases.append(Case(place, holds, text))
    detail = ""
    if steps:
        rising = sum(b.mean > a.mean for a, b in steps)
        detail = f"of {len(steps)} neighbouring pairs {rising} in the claimed order"
        if all(a.std is not None and b.std is not None for a, b in steps):
            clear = sum(b.mean - a.mean > math.hypot(a.std or 0, b.std or 0) for a, b in steps)
            detail += f", {clear} by more than the spread over seeds"
    return Verdict(tuple(cases), detail)


def _best(check: Best, result: PartResult) -> Iterator[Case]:
    labels, reading = result.axes[check.axis].labels(), result.metric(check.metric)
    for place, values in _finals(check, labels, result):
        present = [value for value in values if value is not None]
        if len(present) < len(values):
            yield Case(place, None, NOTHING)
            continue
        order = sorted(range(len(labels)), key=lambda i: -reading.sign * present[i].mean)
        away = abs(order[0] - labels.index(check.label))
        numbers = ", ".join(f"{labels[i]} {value_text(reading, present[i], spread=True)}" for i in order)
        yield Case(place, away <= check.reach, f"best first: {numbers}")


def _above(check: Above, result: PartResult) -> Verdict:
    cases, reading = [], result.metric(check.metric)
    fixed = {name: label for name, label in check.where.items() if name not in check.baseline}
    free = [name for name in result.axes if name not in check.baseline]
    low: list[str] = []
    for outer in result.places(fixed, list(check.baseline)):
        base = _decided(result.at(outer | check.baseline), check.metric)
        for inner in result.places({}, free):
            value = _decided(result.at(outer | inner), check.metric)
            if inner == check.baseline:
                continue
            where = _name(result, outer | inner, fixed)
            holds = None if base is None or value is None else reading.sign * (value.mean - base.mean) > 0
            cases.append(Case(where, holds, value_text(reading, value, spread=True)))
        low.append(f"{_name(result, outer, fixed)} {value_text(reading, base, spread=True)}".strip())
    return Verdict(tuple(cases), f"the baseline has {', '.join(low)}")


def _slope(check: Slope, result: PartResult) -> Iterator[Case]:
    """Fit a line to the logarithms of the mean curve of each place."""
    for labels in result.places(check.where, []):
        group, place = result.at(labels), _name(result, labels, check.where)
        curves = group.curves(check.metric) if group.complete else None
        if curves is None:
            yield Case(place, None, NOTHING)
            continue
        late = curves[0] >= check.first
        rounds, means = curves[0][late], curves[1].mean(axis=0)[late]
        if len(rounds) < 2 or not (means > 0).all():
            yield Case(place, False, f"{check.metric} has no logarithm")
            continue
        power = float(np.polyfit(np.log(rounds), np.log(means), 1)[0])
        fell = f"{number(means[0])} to {number(means[-1])}"
        yield Case(
            place, power <= check.at_most, f"power {power:.2f} from round {rounds[0]:,} to {rounds[-1]:,}, {fell}"
        )


def _speedup(check: Speedup, result: PartResult) -> Iterator[Case]:
    """Compare the rounds that two sizes take to reach a level with the ratio of the sizes."""
    points, low = result.axes[check.axis].all_points(), result.metric(check.metric).low
    for labels in result.places(check.where, [check.axis]):
        place = _name(result, labels, check.where)
        groups = [result.at(labels | {check.axis: point.label}) for point in points]
        curves = [group.curves(check.metric) if group.complete else None for group in groups]
        complete = [curve for curve in curves if curve is not None]
        if len(complete) < len(points):
            yield Case(place, None, NOTHING)
            continue
        best = [(values.min(axis=1) if low else values.max(axis=1)) for _, values in complete]
        common = float(max(run.max() for run in best) if low else min(run.min() for run in best))  # that all runs reach
        for level in check.levels or [common]:
            reached = [_rounds_to(level, *curve, low) for curve in complete]
            for (a, first), (b, second) in pairwise(zip(points, reached, strict=True)):
                case = f"{place}{', ' if place else ''}{a.label} to {b.label}"
                if first is None or second is None:
                    yield Case(case, False, f"{check.metric} {number(level)} is not reached")
                    continue
                ratio, claimed = first.mean / second.mean, (b.value or 0) / (a.value or 0)
                took = f"{first.mean:.0f} and {second.mean:.0f} rounds to {check.metric} {number(level)}"
                holds = claimed / check.within <= ratio <= claimed * check.within
                yield Case(case, holds, f"{took}, {ratio:.2f} times fewer where {claimed:g} is claimed")


def _rounds_to(level: float, rounds: np.ndarray, values: np.ndarray, low: bool) -> Estimate | None:
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
    return Estimate.of(reached)
