"""The ε of a composition, on a grid made finer until ε stays the same.

A grid of interval h errs upwards, by an amount between one in proportion to h and one in proportion to h² (the rule
joins a profile's values by straight lines): so what a finer grid changes says how much there is left to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flower_privdec.privacy.accountant.composition import (
    ROUNDING,
    Frame,
    WindowError,
    combine,
    compose,
    epsilon_at,
    log_harm,
    renyi_epsilon,
    tilt,
    together,
)
from flower_privdec.privacy.accountant.loss_distributions import Losses, Steps, quietly, step_losses

TOLERANCE = 3e-4  # of ε, that a finer grid may still change
ENORMOUS, ROUGH = 1e6, 0.05  # the ε from which on this tolerance is enough
NEARLY_NONE = 0.05  # of the scale of ε's fall, below which ε counts as this for the tolerance
POWERS = (1.0, 1.25, 1.5, 1.75, 2.0)
TAIL = 1e-5  # share of δ for losses beyond a step's range, which count as ∞
CHANCE = 1e-4  # that some loss lies below a step's range, whose lowest it then counts as
SLACK = 1e-4  # share of δ that slack may take without a tilt
FIRST_POINTS = 64  # intervals of the coarsest grid in the longest range of a step
FADED = 45.0  # t |L| from which a negative loss is as good as none
MOST_ELEMENTS = 2**23  # numbers in the distributions of single steps
RENYI_ELEMENTS = 2**20  # likewise, where a Rényi bound is all there is
FEW_ELEMENTS = 2**14  # likewise, where there are many of them
STEEPEST = 32.0  # t h
MOST_ORDERS = 100  # looked at in one search
TRIES = 8  # of an order on one grid


@quietly
def composed_epsilon(groups: Sequence[Steps], delta: float) -> float:
    """Return an ε of all steps together, both directions looked at."""
    remove = _Direction(groups, delta, add=False).epsilon()
    if all(steps.symmetric for steps in groups):
        return remove
    return max(remove, _Direction(groups, delta, add=True).epsilon(enough=remove))


@dataclass(frozen=True)
class Divergences:
    """Bounds on what a composition's losses may do, at some orders.

    Attributes:
        log_masses: log E e^{tL} of the finite losses at each order t, float64 [n].
        infinite: the chance of an infinite loss.
    """

    log_masses: np.ndarray
    infinite: float


@quietly
def divergences(groups: Sequence[Steps], delta: float, orders: Sequence[float], *, add: bool) -> Divergences:
    """Return upper bounds at given orders, in one direction; of a chance to lose more far below δ."""
    return _Direction(groups, delta, add).divergences(orders)


@dataclass(frozen=True)
class _Ranged:
    """Steps, and how far above and below 0 their losses are looked at."""

    steps: Steps
    up: float
    down: float


@dataclass(frozen=True)
class _Level:
    """What was found on one grid.

    Attributes:
        scale: how far δ takes at ε to fall by a factor e.
        share: of δ that slack took.
        elements: numbers in the distributions of single steps.
    """

    frame: Frame
    epsilon: float
    scale: float
    slack: float
    share: float
    elements: int

    @property
    def tolerance(self) -> float:
        """Return how much ε may be above what a finer grid would find."""
        share = TOLERANCE if self.epsilon < ENORMOUS else ROUGH
        return share * max(self.epsilon, NEARLY_NONE * self.scale)


@dataclass(frozen=True)
class _Gains:
    """By how much refining has lowered ε, and what is to be expected of more.

    Attributes:
        power: p, of an error in proportion to h^p, in [1, 2].
        gain, ratio: the last one, and how many times finer that grid was.
    """

    power: float = 1.0
    gain: float = math.inf
    ratio: float = 4.0

    def then(self, gain: float, ratio: float) -> _Gains:
        """Return this after another gain, with the largest power that explains both."""
        gain = abs(gain)
        fits = [p for p in POWERS if gain * ratio**p * (self.ratio**p - 1) <= self.gain * (ratio**p - 1)]
        return _Gains(max(fits, default=1.0) if math.isfinite(self.gain) else 1.0, gain, ratio)

    def next_ratio(self, tolerance: float) -> float:
        """Return how many times finer the next grid should be, a power of 2; 1 where it need not be."""
        left = self.gain / (self.ratio**self.power - 1)
        if left <= tolerance:
            return 1.0
        return 2.0 ** min(math.ceil(math.log2(left / tolerance) / self.power), 3) if tolerance > 0 else 8.0


class _Direction:
    """Steps whose losses with an example against without it (or the reverse, `add`) are composed."""

    def __init__(self, groups: Sequence[Steps], delta: float, add: bool) -> None:
        self._delta, self._add = delta, add
        self._draws = math.fsum(float(steps.counts.sum()) for steps in groups)
        tail, chance = math.log(TAIL) + math.log(delta) - math.log(self._draws), math.log(CHANCE / self._draws)
        self._parts = [_Ranged(s, s.reach(tail)[add], s.spread(chance)[not add]) for s in groups]

    def epsilon(self, enough: float = 0.0) -> float:
        """Return ε; or, where it is no more than `enough`, anything that is neither."""
        coarsest = self._coarsest()
        try:
            level, ratio, gains = self._level(coarsest, None), 4.0, _Gains()
        except WindowError:
            return self._renyi(coarsest)
        while enough < level.epsilon < math.inf and 2 * level.elements <= MOST_ELEMENTS:
            ratio = min(ratio, 2.0 ** math.floor(math.log2(MOST_ELEMENTS / level.elements)))
            try:
                finer = self._level(level.frame.interval / ratio, level)
            except WindowError:
                if ratio == 2:
                    return min(level.epsilon, self._renyi(coarsest))
                ratio = 2.0
                continue
            gains = gains.then(level.epsilon - finer.epsilon, ratio)
            level, ratio = finer, gains.next_ratio(finer.tolerance)
            if ratio == 1:
                break
        return level.epsilon

    def _renyi(self, coarsest: float) -> float:
        """Return an ε that needs no convolution, for more steps than one can hold: then it is nearly as good."""
        interval = self._renyi_interval(coarsest, RENYI_ELEMENTS)
        losses = self._losses(interval, 0.0)
        rest = self._delta - _infinite(losses)
        if rest <= 0:
            return math.inf

        def bound(order: float) -> float:
            return renyi_epsilon(_cumulant(losses, interval, order), order, math.log(rest))

        return max(0.0, bound(_least(bound, 1 / coarsest, STEEPEST / interval)))

    def divergences(self, orders: Sequence[float]) -> Divergences:
        """Return bounds at given orders."""
        interval = self._renyi_interval(self._coarsest(), FEW_ELEMENTS)
        losses = self._losses(interval, 0.0)
        return Divergences(np.array([_cumulant(losses, interval, t) for t in orders]), _infinite(losses))

    def _coarsest(self) -> float:
        """Return the interval of the coarsest grid."""
        return 2.0 ** math.ceil(math.log2(max(max(part.up, part.down) for part in self._parts) / FIRST_POINTS))

    def _renyi_interval(self, coarsest: float, elements: int) -> float:
        """Return the interval of a grid on which all steps take about so many numbers."""
        rows = sum(len(part.steps.counts) for part in self._parts)
        return coarsest / 2.0 ** max(0, math.floor(math.log2(elements / (2 * FIRST_POINTS * rows))))

    def _level(self, interval: float, coarser: _Level | None) -> _Level:
        """Return what is found on a grid, tilted where slack asks for it."""
        losses = self._losses(interval, coarser.frame.order if coarser else 0.0)
        order = self._order(losses, interval, coarser.slack if coarser else ROUNDING * (self._draws + 64), coarser)
        for _ in range(TRIES):
            frame = Frame(interval, order)
            total = combine([compose(part, frame) for part in losses])
            value, scale = epsilon_at(total, frame, self._delta)
            harm = total.log_mass - order * value + log_harm(order)
            share = total.slack / self._delta * math.exp(min(harm, 700.0))
            level = _Level(frame, value, scale, total.slack, share, sum(part.mass.size for part in losses))
            order = self._order(losses, interval, total.slack, level) if share > 10 * SLACK else frame.order
            if abs(order - frame.order) <= 0.05 * frame.order:
                break
        return level

    def _losses(self, interval: float, order: float) -> list[Losses]:
        """Return every step's losses on a grid; of the negative ones those that a tilt of about this order shows."""
        faded = FADED / order if order > 0 else math.inf
        return [step_losses(p.steps, interval, p.up, min(p.down, faded), add=self._add) for p in self._parts]

    def _order(self, losses: Sequence[Losses], interval: float, slack: float, near: _Level | None) -> float:
        """Return the order of tilt: 0 where slack is below SLACK of δ even so, or else where it does least harm."""
        log_delta, steepest = math.log(self._delta), STEEPEST / interval
        if math.log(slack) <= math.log(SLACK) + log_delta:
            return 0.0
        if near is None:
            return _least(
                lambda t: renyi_epsilon(_cumulant(losses, interval, t), t, log_delta), steepest / 512, steepest
            )
        start = min(near.frame.order or 1 / max(near.epsilon, interval), steepest)
        return _least(lambda t: _cumulant(losses, interval, t) - t * near.epsilon + log_harm(t), start, steepest)


def _infinite(losses: Sequence[Losses]) -> float:
    """Return the chance that any draw is infinite."""
    return together([together(part.infinite, part.counts) for part in losses])


def _cumulant(losses: Sequence[Losses], interval: float, order: float) -> float:
    """Return K of all draws."""
    frame = Frame(interval, order)
    return math.fsum(float(part.counts @ tilt(part.mass, part.lowest, frame)[1]) for part in losses)


def _least(function: Callable[[float], float], start: float, most: float) -> float:
    """Return about where a function of an order, falling and then rising, is least, up to `most`."""
    values: dict[float, float] = {}

    def at(log_order: float) -> float:
        if log_order not in values:
            values[log_order] = function(math.exp(log_order)) if log_order <= math.log(most) else math.inf
        return values[log_order]

    x, step = math.log(start), 2.0
    while step > 0.05 and len(values) < MOST_ORDERS:
        better = min((x - step, x, x + step), key=at)
        x, step = better, step if better != x else step / 2
    return math.exp(x)
