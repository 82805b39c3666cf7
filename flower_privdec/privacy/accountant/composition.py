"""The composition of many steps: sums of independent privacy losses, tilted, and the ε at a δ.

A loss distribution p is held *tilted* by an order t >= 0: w ∝ p e^{tL}, with the logarithm K of its total, so that
    δ(ε) = E[(1 - e^{ε - L})_+] + P(L = ∞) = e^{K - tε} Σ_{L > ε} w(L) e^{-t (L - ε)} (1 - e^{-(L - ε)}) + P(L = ∞).
Tilted distributions of independent losses compose like others: the w convolve, the K add up. With t where e^{K - tε}
is least (the saddle point), w lies around ε, whatever δ is: a window of some standard deviations holds nearly all of
it, and errors of rounding are relative to e^{K - tε}, which is not far above δ; those of a plain Fourier transform
(t = 0) are relative to 1.

Upper bounds. Every approximation adds loss, or is paid for as `slack`, tilted mass that counts as if it lay where it
does most harm: mass s adds at most s e^{K - tε} max_x e^{-tx} (1 - e^{-x}) to δ(ε); see `log_harm`.
  - The window of a convolution leaves out at most CUT of w on each side (Chernoff's bound). What is above comes in
    again at the bottom, where it counts for less than it is or for nothing: slack. What is below comes in at the
    top, which only adds to δ.
  - Rounding: a transform of n numbers errs by some u log n of their norm, u = 2^-53, and a power to the k by k times
    that: slack of ROUNDING (k + 64). Only what lies off a distribution's peak counts in k: see `convolve`.

The grid is refined until ε stays the same. A grid of interval h errs upwards, by an amount between one in proportion to
h and one in proportion to h² (the rule joins a profile's values by straight lines): so the change of ε from one grid to
a finer one bounds the change that is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.privacy.accountant.loss_distributions import Losses, Steps, quietly, step_losses

CUT = 2.0**-44  # tilted mass that one convolution may leave out on each side
ROUNDING = 2.0**-50
CHUNK = 2**18  # numbers transformed at once
MOST_POINTS = 2**21  # in a window


@dataclass(frozen=True)
class Tilted:
    """One loss distribution on a grid of interval h, tilted by an order t.

    Attributes:
        interval: h.
        order: t.
        lowest: index of the grid's first point.
        weights: w, float64 [n], summing to 1.
        log_mass: K.
        slack: tilted mass that may be missing or misplaced.
        infinite: P(L = ∞).
    """

    interval: float
    order: float
    lowest: int
    weights: np.ndarray
    log_mass: float
    slack: float
    infinite: float


class WindowError(Exception):
    """A window would have more than MOST_POINTS points; a coarser grid needs fewer."""


def compose(losses: Losses, interval: float, order: float) -> Tilted:
    """Return the sum of independent losses, `counts` draws from each row, tilted."""
    counts = losses.counts
    weights, log_masses = tilt(losses, interval, order)

    # Leave out columns that all draws together hardly reach: CUT of their mass at most, half on each side.
    expected = counts @ weights
    below = np.cumsum(expected)
    above = np.cumsum(expected[::-1])
    first = int(np.searchsorted(below, CUT / 2, side="right"))
    last = len(expected) - int(np.searchsorted(above, CUT / 2, side="right"))

    start, total, slack = convolve(weights[:, first:last], counts)
    lowest = (losses.lowest + first) * int(counts.sum()) + start
    infinite = together(losses.infinite, counts)
    return Tilted(interval, order, lowest, total, float(counts @ log_masses), slack + CUT, infinite)


def tilt(losses: Losses, interval: float, order: float) -> tuple[np.ndarray, np.ndarray]:
    """Return every row's w, [b, n], and K, [b], rounded up."""
    points = np.arange(losses.lowest, losses.lowest + losses.mass.shape[1])
    logs = np.log(losses.mass) + order * interval * points
    top = logs.max(axis=1, keepdims=True)
    weights = np.exp(logs - top)
    sums = weights.sum(axis=1, keepdims=True)
    log_masses = (top + np.log(sums))[:, 0]
    return weights / sums, log_masses + ROUNDING * (1 + np.abs(log_masses))


def together(chances: np.ndarray | Sequence[float], counts: np.ndarray | float = 1.0) -> float:
    """Return the chance that some of many independent events happens."""
    log_none = np.log1p(-np.minimum(np.asarray(chances), 1 - 2.0**-53))
    return -math.expm1(float(np.sum(counts * log_none)))


def combine(parts: Sequence[Tilted]) -> Tilted:
    """Return the sum of one loss of each part, some at a time; all have one grid and one order."""
    while len(parts) > 1:
        width = max(2, CHUNK // max(len(part.weights) for part in parts))
        parts = [_combined(parts[start : start + width]) for start in range(0, len(parts), width)]
    return parts[0]


def _combined(parts: Sequence[Tilted]) -> Tilted:
    """Return the sum of one loss of each part."""
    rows = np.zeros((len(parts), max(len(part.weights) for part in parts)))
    for row, part in zip(rows, parts, strict=True):
        row[: len(part.weights)] = part.weights
    low, weights, slack = convolve(rows, np.ones(len(parts)))

    # The parts' misplaced masses compound: Π (1 + s) - 1.
    slacks = (slack, *(part.slack for part in parts))
    return Tilted(
        interval=parts[0].interval,
        order=parts[0].order,
        lowest=sum(part.lowest for part in parts) + low,
        weights=weights,
        log_mass=math.fsum(part.log_mass for part in parts),
        slack=math.expm1(math.fsum(math.log1p(s) for s in slacks)),
        infinite=together([part.infinite for part in parts]),
    )


@quietly
def convolve(rows: np.ndarray, counts: np.ndarray) -> tuple[int, np.ndarray, float]:
    """Return the distribution of a sum, `counts` draws from each row: (its lowest index, weights, slack).

    Every row is written as 1 - s at the rows' common peak and s in all elsewhere, and only what is elsewhere is
    transformed: if a step mostly has no loss, the transform then errs by a share of s, not of 1.
    """
    draws = int(counts.sum())
    if len(rows) == 1 and draws == 1:
        return 0, rows[0], 0.0

    low, high = _window(rows, counts)
    size = scipy.fft.next_fast_len(high - low + 1, real=True)
    peak = int(np.argmax(counts @ rows))
    n_columns = rows.shape[1]
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    moves = 0.0  # how many draws are elsewhere, on average
    width = max(1, CHUNK // size)
    for start in range(0, len(rows), width):
        some = slice(start, start + width)

        # Indices modulo the size: the transform's sum is circular, and the window has all of it.
        padded = np.zeros((len(rows[some]), -(-n_columns // size) * size))
        padded[:, :n_columns] = rows[some]
        elsewhere = padded.reshape(len(padded), -1, size).sum(axis=1)  # [rows, size]
        elsewhere[:, peak % size] -= rows[some, peak]
        sums = elsewhere.sum(axis=1)  # s of each row

        # A row's transform, seen from the peak, is 1 + z.
        parts = scipy.fft.rfft(np.roll(elsewhere, -peak % size, axis=1)) - sums[:, None]
        once = counts[some] == 1
        spectrum *= np.prod(parts[once] + 1, axis=0)
        for z, count in zip(parts[~once], counts[some][~once], strict=True):
            # (1 + z)^count by its logarithm, which is precise for small z.
            log = 0.5 * np.log1p(np.maximum(z.real * (2 + z.real) + z.imag * z.imag, -1.0))
            angle = count * np.arctan2(z.imag, 1 + z.real)
            spectrum *= np.exp(count * log) * (np.cos(angle) + 1j * np.sin(angle))
        moves += float(counts[some] @ sums)

    turned = np.roll(scipy.fft.irfft(spectrum, size), (draws * peak - low) % size)
    weights = np.maximum(turned, 0.0)
    return low, weights, CUT + ROUNDING * (moves + 64)


def _window(rows: np.ndarray, counts: np.ndarray) -> tuple[int, int]:
    """Return indices between which all but CUT of a sum's mass lies, each side, by Chernoff's bound."""
    length = rows.shape[1]
    draws = float(counts.sum())
    index = np.arange(length, dtype=np.float64)
    variances = np.maximum(_dot(rows, index * index) - _dot(rows, index) ** 2, 0.0)
    first = min(16 / math.sqrt(max(float(counts @ variances), 0.05)), 600 / length)

    def reach(positions: np.ndarray) -> float:
        """Return the sum that is exceeded with a chance of CUT at most: the best bound of orders that halve."""
        best = math.inf
        order = float(first)
        while True:
            cumulant = float(counts @ np.log(_dot(rows, np.exp(order * positions))))
            bound = (cumulant - math.log(CUT)) / order
            if bound >= best:
                return float(min(best, draws * (length - 1)))
            best = bound
            order = order / 2

    low = math.floor(draws * (length - 1) - reach(index[::-1]))
    high = math.ceil(reach(index))
    if high - low >= MOST_POINTS:
        raise WindowError
    return low, high


def _dot(rows: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return rows · column without BLAS, whose threads wait for each other where other work runs."""
    return np.asarray(np.einsum("bn,n->b", rows, column))


def exceedance(tilted: Tilted) -> np.ndarray:
    """Return Σ_{L > ε} w(L) e^{-t (L - ε)} (1 - e^{-(L - ε)}) at every ε of the grid, [n].

    With B(ε) = Σ_{L >= ε} w(L) e^{-(t + 1) (L - ε)} it is e^{-th} times itself at ε + h, and
    (e^h - 1) e^{-(t + 1) h} B(ε + h): two recursions from the top, of positive numbers.
    """
    fade = math.exp(-tilted.order * tilted.interval)
    steep = math.exp(-(tilted.order + 1) * tilted.interval)
    tails = _faded_sums(tilted.weights[::-1], steep)
    gain = -math.expm1(-tilted.interval) * fade
    return _faded_sums(np.append(0.0, gain * tails[:-1]), fade)[::-1]


def _faded_sums(values: np.ndarray, fade: float) -> np.ndarray:
    """Return y_j = values_j + fade y_{j-1}, in this order: the solution of a system of two diagonals, by LAPACK."""
    n = len(values)
    if n < 2:
        return values
    *_, sums, failed = scipy.linalg.lapack.dgtsv(np.full(n - 1, -fade), np.ones(n), np.zeros(n - 1), values)
    assert not failed  # a diagonal of ones
    return np.asarray(sums)


def epsilon_at(tilted: Tilted, delta: float) -> tuple[float, float]:
    """Find where a composition's profile is at most δ.

    Returns:
        The least such ε >= 0 up to slack, or ∞; and how far δ takes there to fall by a factor e, or 0 if unknown.
    """
    rest = delta - tilted.infinite
    if rest <= 0:
        return math.inf, 0.0
    log_rest = math.log(rest)

    # log δ(ε) at each ε >= 0 of the grid.
    first = max(0, -tilted.lowest)
    epsilons = tilted.interval * np.arange(tilted.lowest + first, tilted.lowest + len(tilted.weights))
    slack = tilted.slack * math.exp(log_harm(tilted.order))
    sums = exceedance(tilted)[first:] + slack
    logs = np.log(sums) + tilted.log_mass - tilted.order * epsilons

    scale = 0.0
    enough = np.flatnonzero(logs <= log_rest)
    if not len(enough):
        # Above the window there is only the slack.
        value = math.inf
        if tilted.order > 0:
            value = (tilted.log_mass + math.log(slack) - log_rest) / tilted.order
    elif enough[0] == 0:
        value = float(epsilons[0])
    else:
        # Between two points of the grid the profile lies below a straight line in e^ε.
        j = int(enough[0])
        high = math.exp(min(logs[j - 1], 0.0))
        low = math.exp(logs[j])
        share = 1.0
        if high > low:
            share = min(max((high - rest) / (high - low), 0.0), 1.0)
        h = tilted.interval
        if h < 700:
            beyond = math.log1p(share * math.expm1(h))
        else:
            beyond = h + math.log(max(share, 1e-300))  # e^h would overflow
        value = float(epsilons[j - 1]) + beyond
        scale = h / (logs[j - 1] - logs[j])
    return max(0.0, min(value, renyi_epsilon(tilted.log_mass, tilted.order, log_rest))), float(scale)


def log_harm(order: float) -> float:
    """Return log max_x e^{-tx} (1 - e^{-x}) = -log(t + 1) - t log(1 + 1/t)."""
    if order == 0:
        return 0.0
    return -math.log1p(order) - order * math.log1p(1 / order)


def renyi_epsilon(log_mass: float, order: float, log_delta: float) -> float:
    """Return an ε from only K, as if all mass lay where it does most harm (Canonne et al. 2020, arXiv:2004.00010)."""
    if order <= 0:
        return math.inf
    return (log_mass + log_harm(order) - log_delta) / order


TOLERANCE = 3e-4  # of ε, that a finer grid may still change
ENORMOUS = 1e6  # the ε from which on the next tolerance is enough
ROUGH = 0.05
NEARLY_NONE = 0.05  # of the scale of ε's fall, below which ε counts as this for the tolerance
POWERS = (1.0, 1.25, 1.5, 1.75, 2.0)
TAIL = 1e-5  # share of δ for losses beyond a step's range, which count as ∞
CHANCE = 1e-4  # that some loss lies below a step's range, whose lowest it then counts as
SLACK = 1e-4  # share of δ that slack may take without a tilt
FIRST_POINTS = 64  # intervals of the coarsest grid in the longest range of a step
FADED = 45.0  # t |L| from which a negative loss counts for nothing
MOST_ELEMENTS = 2**23  # numbers in the distributions of single steps
RENYI_ELEMENTS = 2**20  # the same, if a Rényi bound is all there is
FEW_ELEMENTS = 2**14  # the same, if there are many of them
STEEPEST = 32.0  # t h
MOST_ORDERS = 100  # looked at in one search
TRIES = 8  # of an order on one grid


@quietly
def composed_epsilon(groups: Sequence[Steps], delta: float) -> float:
    """Return an ε of all steps together, the larger of both directions."""
    remove = _Direction(groups, delta, add=False).epsilon()
    if all(steps.symmetric for steps in groups):
        return remove
    return max(remove, _Direction(groups, delta, add=True).epsilon(enough=remove))


@quietly
def divergences(
    groups: Sequence[Steps], delta: float, orders: Sequence[float], *, add: bool
) -> tuple[np.ndarray, float]:
    """Return upper bounds on a composition's losses in one direction.

    Returns:
        log E e^{tL} of the finite losses at each order t, float64 [n], and the chance of an infinite loss, far below δ.
    """
    direction = _Direction(groups, delta, add)
    interval = direction.interval_of(direction.coarsest(), FEW_ELEMENTS)
    losses = direction.losses(interval, 0.0)
    return np.array([_cumulant(losses, interval, t) for t in orders]), _infinite(losses)


@dataclass(frozen=True)
class _Level:
    """The result on one grid.

    Attributes:
        scale: the increase of ε over which δ falls by a factor e.
        elements: numbers in the distributions of single steps.
    """

    interval: float
    order: float
    epsilon: float
    scale: float
    slack: float
    elements: int

    @property
    def tolerance(self) -> float:
        """Return how far ε may be above that of a finer grid."""
        share = TOLERANCE if self.epsilon < ENORMOUS else ROUGH
        return share * max(self.epsilon, NEARLY_NONE * self.scale)


class _Direction:
    """Steps whose losses with an example against without it (or the reverse, `add`) are composed."""

    def __init__(self, groups: Sequence[Steps], delta: float, add: bool) -> None:
        self._delta = delta
        self._add = add
        self._draws = math.fsum(float(steps.counts.sum()) for steps in groups)
        tail = math.log(TAIL) + math.log(delta) - math.log(self._draws)
        chance = math.log(CHANCE / self._draws)
        # Steps, and how far above and below 0 their losses are computed.
        self._parts = [(s, s.reach(tail)[add], s.spread(chance)[not add]) for s in groups]

    def epsilon(self, enough: float = 0.0) -> float:
        """Return ε; or, if it is at most `enough`, any number up to that.

        The grid is made finer, `ratio` times at once, until a still finer one would not change ε by its tolerance.
        """
        coarsest = self.coarsest()
        try:
            level = self._level(coarsest, None)
        except WindowError:
            return self._renyi(coarsest)

        ratio = 4.0
        gain = math.inf  # what the last refinement lowered ε by
        finer_by = 4.0  # how many times finer it was
        while enough < level.epsilon < math.inf and 2 * level.elements <= MOST_ELEMENTS:
            ratio = min(ratio, 2.0 ** math.floor(math.log2(MOST_ELEMENTS / level.elements)))
            try:
                finer = self._level(level.interval / ratio, level)
            except WindowError:
                if ratio == 2:
                    return min(level.epsilon, self._renyi(coarsest))
                ratio = 2.0
                continue

            # An error in proportion to h^p, with the largest p in [1, 2] that explains both gains.
            before = gain
            gain = abs(level.epsilon - finer.epsilon)
            power = 1.0
            if math.isfinite(before):
                fits = [p for p in POWERS if gain * ratio**p * (finer_by**p - 1) <= before * (ratio**p - 1)]
                power = max(fits, default=1.0)
            level = finer
            finer_by = ratio

            # What all finer grids together would still gain.
            left = gain / (ratio**power - 1)
            if left <= level.tolerance:
                break
            halvings = 3
            if level.tolerance > 0:
                halvings = min(math.ceil(math.log2(left / level.tolerance) / power), 3)
            ratio = 2.0**halvings
        return level.epsilon

    def _renyi(self, coarsest: float) -> float:
        """Return an ε without a convolution, for more steps than one can hold: then it is nearly as good."""
        interval = self.interval_of(coarsest, RENYI_ELEMENTS)
        losses = self.losses(interval, 0.0)
        rest = self._delta - _infinite(losses)
        if rest <= 0:
            return math.inf

        def bound(order: float) -> float:
            return renyi_epsilon(_cumulant(losses, interval, order), order, math.log(rest))

        return max(0.0, bound(_least(bound, 1 / coarsest, STEEPEST / interval)))

    def coarsest(self) -> float:
        """Return the interval of the coarsest grid, a power of two."""
        longest = max(max(up, down) for _, up, down in self._parts)
        return 2.0 ** math.ceil(math.log2(longest / FIRST_POINTS))

    def interval_of(self, coarsest: float, elements: int) -> float:
        """Return the interval of a grid on which all steps together take about `elements` numbers."""
        rows = sum(len(steps.counts) for steps, *_ in self._parts)
        halvings = math.floor(math.log2(elements / (2 * FIRST_POINTS * rows)))
        return coarsest / 2.0 ** max(0, halvings)

    def _level(self, interval: float, coarser: _Level | None) -> _Level:
        """Return the result on a grid, tilted if slack requires it."""
        if coarser is None:
            losses = self.losses(interval, 0.0)
            order = self._order(losses, interval, ROUNDING * (self._draws + 64), None)
        else:
            losses = self.losses(interval, coarser.order)
            order = self._order(losses, interval, coarser.slack, coarser)

        elements = sum(part.mass.size for part in losses)
        for _ in range(TRIES):
            total = combine([compose(part, interval, order) for part in losses])
            value, scale = epsilon_at(total, self._delta)
            level = _Level(interval, order, value, scale, total.slack, elements)

            # Try another order if slack takes much of δ at this one.
            harm = total.log_mass - order * value + log_harm(order)
            share = total.slack / self._delta * math.exp(min(harm, 700.0))
            if share > 10 * SLACK:
                order = self._order(losses, interval, total.slack, level)
            if abs(order - level.order) <= 0.05 * level.order:
                break
        return level

    def losses(self, interval: float, order: float) -> list[Losses]:
        """Return every step's losses on a grid; only those negative ones that matter at a tilt of this order."""
        faded = FADED / order if order > 0 else math.inf
        return [step_losses(steps, interval, up, min(down, faded), add=self._add) for steps, up, down in self._parts]

    def _order(self, losses: Sequence[Losses], interval: float, slack: float, near: _Level | None) -> float:
        """Return the order of tilt: 0 if slack is below SLACK of δ without one, else the least harmful."""
        log_delta = math.log(self._delta)
        steepest = STEEPEST / interval
        if math.log(slack) <= math.log(SLACK) + log_delta:
            return 0.0

        if near is None:
            # ε is not known yet: take the order whose Rényi bound is least.
            def bound(order: float) -> float:
                return renyi_epsilon(_cumulant(losses, interval, order), order, log_delta)

            return _least(bound, steepest / 512, steepest)

        def harm(order: float) -> float:
            return _cumulant(losses, interval, order) - order * near.epsilon + log_harm(order)

        start = near.order or 1 / max(near.epsilon, interval)
        return _least(harm, min(start, steepest), steepest)


def _infinite(losses: Sequence[Losses]) -> float:
    """Return the chance that any draw is infinite."""
    return together([together(part.infinite, part.counts) for part in losses])


def _cumulant(losses: Sequence[Losses], interval: float, order: float) -> float:
    return math.fsum(float(part.counts @ tilt(part, interval, order)[1]) for part in losses)


def _least(function: Callable[[float], float], start: float, most: float) -> float:
    """Return an order, up to `most`, near the minimum of a function that falls and then rises."""
    values: dict[float, float] = {}

    def at(log_order: float) -> float:
        if log_order not in values:
            values[log_order] = math.inf
            if log_order <= math.log(most):
                values[log_order] = function(math.exp(log_order))
        return values[log_order]

    x = math.log(start)
    step = 2.0
    while step > 0.05 and len(values) < MOST_ORDERS:
        best = min((x - step, x, x + step), key=at)
        if best == x:
            step = step / 2
        x = best
    return math.exp(x)
