"""ε of a few steps, bracketed from below and above by sums over a grid: no line of it is the package's accountant.

A step is (1 - q) N(i, σ²) + q N(d, σ²) against N(0, σ²), see `events.Release.event`. Its privacy loss rises with the
noise, so how much of it lies between two losses is a difference of normal distributions. Rounded down to a grid these
give an ε that is too small, rounded up one that is too large; both differ from the truth by less than a step of the
grid for each step of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy.signal import fftconvolve
from scipy.special import ndtr

Step = tuple[float, float, float]  # q, and over the noise's standard deviation how far d and i an example moves the sum
TAIL = 8.0  # standard deviations beyond which noise is left out: 1e-15 of it
BINS = 15_000  # over the largest loss of a step


@lru_cache(maxsize=4096)
def bracket(steps: frozenset[tuple[Step, int]], delta: float) -> tuple[float, float]:
    """Return a lower and an upper bound of ε at a δ, for steps and how often each is taken; infinite without noise."""
    kinds = [(step, count) for step, count in steps if step[1] > 0 and count]
    if not kinds:
        return 0.0, 0.0
    if any(not np.isfinite(step[1]) for step, _ in kinds):
        return float("inf"), float("inf")
    width = sum(count * float(np.ptp(_losses(step)[1])) for step, count in kinds) / BINS
    bounds = [[_epsilon(kinds, delta, width, add=add, up=up) for add in (False, True)] for up in (False, True)]
    return max(bounds[0]), max(bounds[1])


def counted(steps: Iterable[Step]) -> frozenset[tuple[Step, int]]:
    """Return steps, equal ones to 10 digits together, and how often each is taken."""
    rounded = (tuple(float(f"{number:.10g}") for number in step) for step in steps)
    return frozenset(Counter(rounded).items())  # type: ignore[arg-type]


def _losses(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """Return noise, and the log of how much likelier it is with the example, which rises."""
    q, drawn, idle = step
    noise = np.linspace(-TAIL, drawn + TAIL, 6001)
    with_it = np.log(q) + drawn * noise - drawn**2 / 2
    if q == 1:
        return noise, with_it
    return noise, np.logaddexp(np.log1p(-q) + idle * noise - idle**2 / 2, with_it)


def _epsilon(kinds: list[tuple[Step, int]], delta: float, width: float, *, add: bool, up: bool) -> float:
    """Return ε on a grid of losses, in one direction and rounded one way."""
    lowest, masses = 0, np.ones(1)
    for step, count in kinds:
        first, mass = _grid(step, width, add=add, up=up)
        lowest += count * first
        size = count * (len(mass) - 1) + 1
        length = 1 << (size - 1).bit_length()
        several = np.fft.irfft(np.fft.rfft(mass, length) ** count, length)[:size]
        masses = np.maximum(fftconvolve(masses, np.maximum(several, 0.0)), 0.0)
    losses = width * (lowest + np.arange(len(masses)))
    beyond = 0.0
    if up:  # what the tails hide counts as revealed
        beyond = 2e-15 * sum(count for _, count in kinds)

    def divergence(epsilon: float) -> float:
        above = losses > epsilon
        return beyond + float((masses[above] * -np.expm1(epsilon - losses[above])).sum())

    low, high = 0.0, float(losses[-1])
    if divergence(0.0) <= delta:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        if divergence(middle) > delta:
            low = middle
        else:
            high = middle
    return high


def _grid(step: Step, width: float, *, add: bool, up: bool) -> tuple[int, np.ndarray]:
    """Return the first grid point of a step's losses, and the chance of each."""
    q, drawn, idle = step
    noise, loss = _losses(step)

    def chance(x: np.ndarray) -> np.ndarray:
        plain: np.ndarray = ndtr(x)
        if add:
            return plain
        mixed: np.ndarray = (1 - q) * ndtr(x - idle) + q * ndtr(x - drawn)
        return mixed

    edges = np.arange(np.floor(loss[0] / width), np.ceil(loss[-1] / width) + 1)
    at = np.interp(edges * width, loss, noise)
    mass = np.maximum(np.diff(chance(at)), 0.0)
    if add:  # the loss is the negative one, and ascends the other way
        edges, mass = -edges[::-1], mass[::-1]
    return int(edges[1 if up else 0]), mass
