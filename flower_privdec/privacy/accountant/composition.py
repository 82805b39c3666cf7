"""The composition of many steps: sums of independent privacy losses, tilted, and the ε at a δ.

A loss distribution p is held *tilted* by an order t >= 0: w ∝ p e^{tL}, with the logarithm K of its total, so that
    δ(ε) = E[(1 - e^{ε - L})_+] + P(L = ∞) = e^{K - tε} Σ_{L > ε} w(L) e^{-t (L - ε)} (1 - e^{-(L - ε)}) + P(L = ∞).
Tilted distributions of independent losses compose like others: the w convolve, the K add up. With t where e^{K - tε}
is least (the saddle point), w lies around ε, whatever δ is: a window of some standard deviations holds nearly all
of it, and errors of rounding are relative to e^{K - tε}, which is not far above δ, where those of a plain Fourier
transform (t = 0) are relative to 1.

Upper bounds. Every approximation adds loss, or is paid for as `slack`, tilted mass that counts as if it lay where it
does most harm: mass s adds at most s e^{K - tε} max_x e^{-tx} (1 - e^{-x}) to δ(ε); see `log_harm`.
  - The window of a convolution leaves out at most CUT of w on each side (Chernoff's bound). What is above comes in
    again at the bottom, where it counts for less than it is or for nothing: slack. What is below comes in at the
    top, which only adds to δ.
  - Rounding: a transform of n numbers errs by some u log n of their norm, u = 2^-53, and a power to the k by k times
    that: slack of ROUNDING (k + 64). Only what lies off a distribution's peak counts in k: see `convolve`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from flower_privdec.privacy.accountant.loss_distributions import Losses, quietly

CUT = 2.0**-44  # tilted mass that one convolution may leave out on each side
ROUNDING = 2.0**-50
CHUNK = 2**18  # numbers transformed at once
MOST_POINTS = 2**21  # in a window


@dataclass(frozen=True)
class Frame:
    """How losses are held.

    Attributes:
        interval: h of the grid.
        order: t of the tilt.
    """

    interval: float
    order: float


@dataclass(frozen=True)
class Tilted:
    """One loss distribution, tilted in a frame.

    Attributes:
        lowest: index of the grid's first point.
        weights: w, float64 [n], summing to 1.
        log_mass: K.
        slack: tilted mass that may be missing or misplaced.
        infinite: P(L = ∞).
    """

    lowest: int
    weights: np.ndarray
    log_mass: float
    slack: float
    infinite: float


class WindowError(Exception):
    """A window would have more than MOST_POINTS points; a coarser grid needs fewer."""


def compose(losses: Losses, frame: Frame) -> Tilted:
    """Return the sum of independent losses, `counts` draws from each row."""
    counts = losses.counts
    weights, log_masses = tilt(losses.mass, losses.lowest, frame)
    first, last = _ends(counts @ weights)
    start, total, slack = convolve(weights[:, first:last], counts)
    lowest = (losses.lowest + first) * int(counts.sum()) + start
    return Tilted(lowest, total, float(counts @ log_masses), slack + CUT, together(losses.infinite, counts))


def tilt(mass: np.ndarray, lowest: int, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return every row's w, [b, n], and K, [b], rounded up."""
    logs = np.log(mass) + frame.order * frame.interval * np.arange(lowest, lowest + mass.shape[1])
    top = logs.max(axis=1, keepdims=True)
    weights = np.exp(logs - top)
    sums = weights.sum(axis=1, keepdims=True)
    log_masses = (top + np.log(sums))[:, 0]
    return weights / sums, log_masses + ROUNDING * (1 + np.abs(log_masses))


def together(chances: np.ndarray | Sequence[float], counts: np.ndarray | float = 1.0) -> float:
    """Return the chance that some of many independent events happens."""
    log_kept = np.log1p(-np.minimum(np.asarray(chances), 1 - 2.0**-53))
    return -math.expm1(float(np.sum(counts * log_kept)))


def _ends(expected: np.ndarray) -> tuple[int, int]:
    """Return the slice that holds all but CUT of what is expected of all draws together."""
    below, above = np.cumsum(expected), np.cumsum(expected[::-1])
    first = int(np.searchsorted(below, CUT / 2, side="right"))
    return first, len(expected) - int(np.searchsorted(above, CUT / 2, side="right"))


def combine(parts: Sequence[Tilted]) -> Tilted:
    """Return the sum of one loss of each part."""
    while len(parts) > 1:
        width = max(2, CHUNK // max(len(part.weights) for part in parts))
        parts = [_combined(parts[start : start + width]) for start in range(0, len(parts), width)]
    return parts[0]


def _combined(parts: Sequence[Tilted]) -> Tilted:
    """Return the same of few parts, at once."""
    rows = np.zeros((len(parts), max(len(part.weights) for part in parts)))
    for row, part in zip(rows, parts, strict=True):
        row[: len(part.weights)] = part.weights
    start, weights, slack = convolve(rows, np.ones(len(parts)))
    slack = math.expm1(math.fsum(math.log1p(s) for s in (slack, *(part.slack for part in parts))))
    log_mass, infinite = math.fsum(part.log_mass for part in parts), together([part.infinite for part in parts])
    return Tilted(sum(part.lowest for part in parts) + start, weights, log_mass, slack, infinite)


@quietly
def convolve(rows: np.ndarray, counts: np.ndarray) -> tuple[int, np.ndarray, float]:
    """Return the distribution of a sum, `counts` draws from each row: (its lowest index, weights, slack).

    All is looked at from the rows' common peak. A row is 1 - s there and s in all elsewhere: of a step that mostly
    has no loss the transform then errs by a share of s, not of 1.
    """
    draws = int(counts.sum())
    if len(rows) == 1 and draws == 1:
        return 0, rows[0], 0.0
    low, high = _window(rows, counts)
    size = scipy.fft.next_fast_len(high - low + 1, real=True)
    peak = int(np.argmax(counts @ rows))
    spectrum, moves = np.ones(size // 2 + 1, dtype=np.complex128), 0.0
    width = max(1, CHUNK // size)
    for some in (slice(start, start + width) for start in range(0, len(rows), width)):
        elsewhere = _wrapped(rows[some], size)
        elsewhere[:, peak % size] -= rows[some, peak]
        sums = elsewhere.sum(axis=1)
        parts = scipy.fft.rfft(np.roll(elsewhere, -peak % size, axis=1)) - sums[:, None]
        once = counts[some] == 1
        spectrum *= np.prod(parts[once] + 1, axis=0)
        for part, count in zip(parts[~once], counts[some][~once], strict=True):
            spectrum *= _power(part, count)
        moves += float(counts[some] @ sums)
    weights = np.maximum(np.roll(scipy.fft.irfft(spectrum, size), (draws * peak - low) % size), 0.0)
    return low, weights, CUT + ROUNDING * (moves + 64)


def _wrapped(rows: np.ndarray, size: int) -> np.ndarray:
    """Return rows added up modulo a size, [b, size]."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // size) * size))
    padded[:, : rows.shape[1]] = rows
    return np.asarray(padded.reshape(len(rows), -1, size).sum(axis=1))


def _power(z: np.ndarray, count: float) -> np.ndarray:
    """Return (1 + z)^count, precise for small z."""
    log = 0.5 * np.log1p(np.maximum(z.real * (2 + z.real) + z.imag * z.imag, -1.0))
    angle = count * np.arctan2(z.imag, 1 + z.real)
    return np.asarray(np.exp(count * log) * (np.cos(angle) + 1j * np.sin(angle)))


def _window(rows: np.ndarray, counts: np.ndarray) -> tuple[int, int]:
    """Return indices between which all but CUT of a sum's mass lies, each side, by Chernoff's bound."""
    length, draws = rows.shape[1], float(counts.sum())
    index = np.arange(length, dtype=np.float64)
    variances = np.maximum(_dot(rows, index * index) - _dot(rows, index) ** 2, 0.0)
    first = min(16 / math.sqrt(max(float(counts @ variances), 0.05)), 600 / length)

    def reach(positions: np.ndarray) -> float:
        best, order = math.inf, float(first)
        while True:
            cumulant = float(counts @ np.log(_dot(rows, np.exp(order * positions))))
            bound = (cumulant - math.log(CUT)) / order
            if bound >= best:
                return float(min(best, draws * (length - 1)))
            best, order = bound, order / 2

    low, high = math.floor(draws * (length - 1) - reach(index[::-1])), math.ceil(reach(index))
    if high - low >= MOST_POINTS:
        raise WindowError
    return low, high


def _dot(rows: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return rows · column without BLAS, whose threads wait for each other where other work runs."""
    return np.asarray(np.einsum("bn,n->b", rows, column))


def exceedance(tilted: Tilted, frame: Frame) -> np.ndarray:
    """Return Σ_{L > ε} w(L) e^{-t (L - ε)} (1 - e^{-(L - ε)}) at every ε of the grid, [n].

    With B(ε) = Σ_{L >= ε} w(L) e^{-(t + 1) (L - ε)} it is e^{-th} times itself at ε + h, and
    (e^h - 1) e^{-(t + 1) h} B(ε + h): two recursions from the top, of positive numbers.
    """
    fade = math.exp(-frame.order * frame.interval)
    steep = math.exp(-(frame.order + 1) * frame.interval)
    tails = _faded_sums(tilted.weights[::-1], steep)
    gain = -math.expm1(-frame.interval) * fade
    return _faded_sums(np.append(0.0, gain * tails[:-1]), fade)[::-1]


def _faded_sums(values: np.ndarray, fade: float) -> np.ndarray:
    """Return y_j = values_j + fade y_{j-1}, in this order: the solution of a system of two diagonals, by LAPACK."""
    n = len(values)
    if n < 2:
        return values
    *_, sums, failed = scipy.linalg.lapack.dgtsv(np.full(n - 1, -fade), np.ones(n), np.zeros(n - 1), values)
    assert not failed  # a diagonal of ones
    return np.asarray(sums)


def epsilon_at(tilted: Tilted, frame: Frame, delta: float) -> tuple[float, float]:
    """Find where a composition's profile is at most δ.

    Returns:
        The least such ε >= 0 up to slack, or ∞; and how far δ takes there to fall by a factor e, or 0 if unknown.
    """
    rest = delta - tilted.infinite
    if rest <= 0:
        return math.inf, 0.0
    log_rest, first = math.log(rest), max(0, -tilted.lowest)  # ε < 0 need not be looked at
    epsilons = frame.interval * np.arange(tilted.lowest + first, tilted.lowest + len(tilted.weights))
    slack, scale = tilted.slack * math.exp(log_harm(frame.order)), 0.0
    sums = exceedance(tilted, frame)[first:] + slack
    logs = np.log(sums) + tilted.log_mass - frame.order * epsilons
    enough = np.flatnonzero(logs <= log_rest)
    if not len(enough):  # only what may lie anywhere is above the window
        value = (tilted.log_mass + math.log(slack) - log_rest) / frame.order if frame.order > 0 else math.inf
    elif (j := int(enough[0])) == 0:
        value = float(epsilons[0])
    else:  # straight lines in e^ε between the grid's points
        high, low = math.exp(min(logs[j - 1], 0.0)), math.exp(logs[j])
        share = min(max((high - rest) / (high - low), 0.0), 1.0) if high > low else 1.0
        value, scale = float(epsilons[j - 1]) + _part(share, frame.interval), frame.interval / (logs[j - 1] - logs[j])
    return max(0.0, min(value, renyi_epsilon(tilted.log_mass, frame.order, log_rest))), float(scale)


def _part(share: float, interval: float) -> float:
    """Return log(1 + share (e^h - 1)), of any h."""
    return math.log1p(share * math.expm1(interval)) if interval < 700 else interval + math.log(max(share, 1e-300))


def log_harm(order: float) -> float:
    """Return log max_x e^{-tx} (1 - e^{-x}) = -log(t + 1) - t log(1 + 1/t)."""
    return -math.log1p(order) - (order * math.log1p(1 / order) if order > 0 else 0.0)


def renyi_epsilon(log_mass: float, order: float, log_delta: float) -> float:
    """Return an ε from K alone, as if all mass lay where it does most harm (Canonne et al. 2020, arXiv:2004.00010)."""
    return (log_mass + log_harm(order) - log_delta) / order if order > 0 else math.inf
