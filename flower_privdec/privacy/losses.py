"""Privacy-loss distributions of one release, and their composition: the numbers under the accountant.

A distribution is a probability mass function on the grid {k h}, made with the pessimistic Connect-the-Dots
rule of dp-accounting (Doroshenko et al. 2022, arXiv:2207.04380, Algorithm 1) from the privacy profile
    δ(ε) = sup over neighbours of ∫ [p(x) - e^ε q(x)]_+ dx,
so its own profile is at least the true one everywhere, and stays so under composition (Zhu, Dong and Wang
2022, arXiv:2106.08567, Theorem 10). Every neighbouring pair is looked at in both directions: P with the
example and Q without it (`remove`), and the reverse (`add`).

What this adds to dp-accounting's PLDAccountant: vectorised profiles, a grid that follows the size of one
step's loss, one Fourier transform for many different steps, and a profile for sampling without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft, optimize

from flower_privdec.privacy.events import Release
from flower_privdec.privacy.profiles import (
    TAIL,
    Profile,
    gaussian_profile,
    mixture_loss,
    mixture_profiles,
    poisson_profiles,
    sampled_epsilon,
    shown_profile,
    uniform_profiles,
)

COMPOSED_TAIL = 1e-16  # mass of a composition that may lie outside the window; added to the loss ∞
FINEST, COARSEST = 2.0**-22, 2.0**6  # bounds of the grid's interval h
STEPS_PER_STD = 32  # grid intervals wanted in a standard deviation of one step's loss
STEPS_PER_RANGE = 2**14  # grid intervals that one step may take before h grows (up to one standard deviation)
MOST_STEPS = 2**18  # grid intervals that a step's range, or 10 standard deviations of all steps, may take at all


@dataclass(frozen=True)
class Losses:
    """A distribution of privacy losses: mass `mass[k]` at (lowest + k) h, and `infinite` at ∞."""

    lowest: int
    mass: np.ndarray
    infinite: float


def connect_the_dots(profile: Profile, low: float, high: float, interval: float) -> Losses:
    """Return the distribution on the grid whose profile touches `profile` on the grid in [low, high]."""
    lowest, highest = math.floor(low / interval), math.ceil(high / interval)
    deltas = np.minimum.accumulate(profile(np.arange(lowest, highest + 1) * interval))
    slopes = np.diff(deltas) / math.expm1(interval)
    mass = np.empty_like(deltas)
    mass[0] = 1 - deltas[0] + slopes[0]
    mass[1:-1] = slopes[1:] - slopes[:-1] * math.exp(interval)
    mass[-1] = -slopes[-1] * math.exp(interval)
    return Losses(lowest, np.maximum(mass, 0.0), float(deltas[-1]))


def convex_minorant(bound: Profile, interval: float) -> Profile:
    """Return, on a contiguous part of the grid, the largest function below `bound` that is convex in e^ε.

    A profile is convex in e^ε, so a profile below `bound` is below its minorant too. Found by isotonic
    regression of the slopes (pool adjacent violators), summed from the top, where the numbers are small.
    """

    def profile(epsilon: np.ndarray) -> np.ndarray:
        values = bound(epsilon)
        widths = np.exp(epsilon[:-1]) * math.expm1(interval)
        slopes = optimize.isotonic_regression(np.diff(values) / widths, weights=widths).x
        falls = np.append(-slopes * widths, values[-1])
        return np.asarray(np.minimum(np.cumsum(falls[::-1])[::-1], 1.0))

    return profile


SHOWN_FROM = 16.0  # C / std from which sampling `uniform` counts as if the choice of examples were public


@lru_cache(maxsize=256)
def step_losses(sampling: str, q: float, idle: float, mu: float, interval: float) -> tuple[Losses, Losses]:
    """Return the loss distributions (remove, add) of one step.

    Args:
        sampling, q, idle: of a `Release`; of `full` and `shuffle` a plain Gaussian.
        mu: one over the noise multiplier.
        interval: h, the grid's.
    """
    down, up = loss_range(sampling, q, idle, mu)
    if q >= 1 or sampling in ("full", "shuffle"):
        plain = connect_the_dots(lambda e: gaussian_profile(e, mu), -down, up, interval)
        return plain, plain
    if shows_choice(sampling, idle, mu):
        remove = add = shown_profile(q, idle * mu, mu)
    elif sampling == "poisson" and idle == 0:
        remove, add = poisson_profiles(q, mu)
    elif sampling == "poisson":
        remove, add = mixture_profiles(q, idle * mu, mu)
    else:
        remove, add = (convex_minorant(bound, interval) for bound in uniform_profiles(q, mu))
    return connect_the_dots(remove, -down, up, interval), connect_the_dots(add, -up, down, interval)


def shows_choice(sampling: str, idle: float, mu: float) -> bool:
    """Return whether a step counts as if the choice of its examples were public."""
    return sampling == "blocks" or (sampling == "uniform" and (idle > 0 or mu >= SHOWN_FROM))


def loss_range(sampling: str, q: float, idle: float, mu: float) -> tuple[float, float]:
    """Return how far below and above 0 the loss (remove) of one step reaches, but for e^-50 of its mass."""
    reach = mu * mu / 2 + mu * TAIL
    if q >= 1 or sampling in ("full", "shuffle") or shows_choice(sampling, idle, mu):
        return reach, reach
    if sampling == "poisson":
        ends = mixture_loss(np.array([-TAIL, mu + TAIL]), q, idle * mu, mu)
        return -float(ends[0]), float(ends[1])
    return sampled_epsilon(reach, q), min(sampled_epsilon(2 * mu * mu + 2 * mu * TAIL, q), reach)


def loss_stds(sampling: str, q: float, idle: float, mu: float) -> tuple[float, float]:
    """Return about how much the loss (remove) of one step varies, without the example and with it."""
    if q >= 1 or sampling in ("full", "shuffle"):
        return mu, mu
    if shows_choice(sampling, idle, mu):
        std = mu * math.sqrt((1 - q) * idle**2 + q)
        return std, std
    x = np.linspace(-8.0, 8.0, 161)
    weight = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    drawn, not_drawn, without = (mixture_loss(y, q, idle * mu, mu) for y in (x + mu, x + idle * mu, x))
    variance = float(weight @ (without - weight @ without) ** 2)
    with_it = q * float(weight @ drawn**2) + (1 - q) * float(weight @ not_drawn**2)
    return math.sqrt(variance), math.sqrt(with_it)


def grid_interval(releases: Sequence[Release]) -> float:
    """Return h, a power of 2: a 32nd of the root-mean-square loss of a step, or more where tails are long.

    Rounding to the grid adds at most about h²/6 to the variance of a step's loss, 0.02 % of it where h is a
    32nd; distributions with long tails, which take a larger h, are rounded over a small part of their mass.
    """
    mechanisms = [(r.sampling, r.sampling_rate, r.idle, 1 / r.noise_multiplier) for r in releases]
    counts = np.array([r.steps for r in releases], dtype=np.float64)
    without, with_it = np.array([loss_stds(*mechanism) for mechanism in mechanisms]).T
    typical = math.sqrt(float(np.average(without**2, weights=counts)))
    longest = max(sum(loss_range(*mechanism)) for mechanism in mechanisms)
    wanted = max(typical / STEPS_PER_STD, min(typical, longest / STEPS_PER_RANGE), FINEST)
    affordable = max(longest, 10 * math.sqrt(float(counts @ with_it**2))) / MOST_STEPS
    return min(2.0 ** math.ceil(math.log2(max(wanted / 2, affordable))), COARSEST)


def compose(parts: Sequence[tuple[Losses, int]], interval: float) -> Losses:
    """Return the distribution of the sum of independent losses, `count` draws from each part.

    One Fourier transform per part; the window holds all but `COMPOSED_TAIL` of the mass on either side
    (Chernoff). What lies above it is added to the loss ∞, what lies below wraps to its top: both upwards.
    """
    low, high = _window(parts, interval)
    size = fft.next_fast_len(high - low + 1, real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    for losses, count in parts:
        padded = np.zeros(-(-len(losses.mass) // size) * size)
        padded[: len(losses.mass)] = losses.mass
        spectrum *= np.power(fft.rfft(padded.reshape(-1, size).sum(axis=0)), count)
    lowest = sum(losses.lowest * count for losses, count in parts)
    mass = np.roll(fft.irfft(spectrum, size), (lowest - low) % size)
    log_finite = sum(count * math.log1p(-losses.infinite) for losses, count in parts)
    return Losses(low, np.maximum(mass, 0.0), -math.expm1(log_finite) + COMPOSED_TAIL)


def _window(parts: Sequence[tuple[Losses, int]], interval: float) -> tuple[int, int]:
    """Return grid indices between which all but COMPOSED_TAIL of a composition's mass lies, each side."""
    variance = 0.0
    for losses, count in parts:
        index = np.arange(len(losses.mass))
        mean = _dot(losses.mass, index)
        variance += count * _dot(losses.mass, (index - mean) ** 2)
    lowest = sum(losses.lowest * count for losses, count in parts)
    highest = sum((losses.lowest + len(losses.mass) - 1) * count for losses, count in parts)
    longest = max(abs(losses.lowest) + len(losses.mass) for losses, _ in parts)
    smallest = min(1 / (32 * math.sqrt(max(variance, 1.0))), 300 / longest)
    ups = [_cumulants(losses, smallest) * count for losses, count in parts]
    downs = [_cumulants(losses, -smallest) * count for losses, count in parts]
    orders = smallest * 2.0 ** np.arange(len(ups[0]))
    spread = -math.log(COMPOSED_TAIL)
    above, below = (np.sum(ups, axis=0) + spread) / orders, (np.sum(downs, axis=0) + spread) / orders
    high = math.ceil(np.nanmin(np.where(np.isfinite(above), above, np.inf)))
    low = math.floor(-np.nanmin(np.where(np.isfinite(below), below, np.inf)))
    return max(low, lowest), min(high, highest)


def _cumulants(losses: Losses, order: float, doublings: int = 11) -> np.ndarray:
    """Return log E e^{t L / h} for t = order, 2 order, 4 order, ...; ∞ or nan where it overflows."""
    index = np.arange(losses.lowest, losses.lowest + len(losses.mass), dtype=np.float64)
    out = np.empty(doublings)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        power = np.exp(order * index)
        for i in range(doublings):
            out[i] = np.log(_dot(losses.mass, power))
            power *= power
    return out


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return a · b of long vectors without BLAS, whose threads wait for each other where other work runs."""
    return float(np.einsum("i,i->", a, b))
