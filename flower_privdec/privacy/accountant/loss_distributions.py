"""Privacy-loss distributions of single steps, on a grid: what `composition` adds up.

A distribution is a probability mass function on the grid {k h}, made with the pessimistic Connect-the-Dots
rule (Doroshenko et al. 2022, arXiv:2207.04380, Algorithm 1) from a privacy profile δ(ε), so its own profile is at
least the true one everywhere, and stays so under composition (Zhu, Dong and Wang 2022, arXiv:2106.08567,
Theorem 10). With x = e^ε a profile is convex in x; the rule joins its values on the grid by straight lines in x.
It is worked out from δ(ε) - [1 - e^ε]_+, which is small on both sides of 0, so that no digits are lost: below 0 it
is e^ε times the other direction's profile at -ε.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scipy

from flower_privdec.privacy.accountant import profiles
from flower_privdec.privacy.accountant.profiles import Profile
from flower_privdec.privacy.mechanism.events import Release

SHOWN_FROM = 8.0  # 1 / noise multiplier from which `uniform` counts as if the choice of examples were public
LEAST_SAMPLED_NOISE = 1e-3  # below, sampling is not credited
LEAST = 1e-150  # a smaller sampling rate or sensitivity over noise counts as this
TOGETHER = 32  # mechanisms in a group, which share a range of losses
MOST_DISTINCT = 4096  # mechanisms of a kind; more are binned
FINEST_BIN = 2.0**-13  # relative width of a bin, at least
TINY = 2.3e-308  # mass that counts at infinity at least where a range was cut: tails may underflow before they end
CHUNK = 2**16  # numbers of a profile worked out together
REACH_POINTS = 2.0 ** (-np.arange(48) / 4)

quietly = np.errstate(divide="ignore", over="ignore", under="ignore")  # where 0 and ∞ are what is meant


@dataclass(frozen=True)
class Losses:
    """Loss distributions on a common part of the grid, and how often each one is drawn.

    Attributes:
        lowest: index of the grid's first point: column j is the loss (lowest + j) h.
        mass: float64 [b, n].
        infinite: float64 [b], the mass at ∞.
        counts: float64 [b].
    """

    lowest: int
    mass: np.ndarray
    infinite: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Steps:
    """Mechanisms of one kind, with parameters as columns [b, 1], and how often each one is run.

    Attributes:
        kind: gaussian, poisson, mixture, shown or uniform.
        q: sampling rates.
        idle, drawn: how far an example that is not drawn, or is, moves the sum, over the noise's std.
        counts: float64 [b].
    """

    kind: str
    q: np.ndarray
    idle: np.ndarray
    drawn: np.ndarray
    counts: np.ndarray

    @property
    def symmetric(self) -> bool:
        """Return whether losses are the same with an example against without it as the reverse."""
        return self.kind in ("gaussian", "shown")

    def profiles(self) -> tuple[Profile, Profile]:
        """Return δ(ε) for ε >= 0, (remove, add), each [n] -> [b, n]."""
        q, low, high = self.q, self.idle, self.drawn
        if self.kind == "poisson":
            return lambda e: profiles.poisson_remove(e, q, high), lambda e: profiles.poisson_add(e, q, high)
        if self.kind == "mixture":
            return lambda e: profiles.mixture_remove(e, q, low, high), lambda e: profiles.mixture_add(e, q, low, high)
        if self.kind == "uniform":
            return lambda e: profiles.uniform_remove(e, q, high), lambda e: profiles.uniform_add(e, q, high)

        def same(epsilon: np.ndarray) -> np.ndarray:
            if self.kind == "gaussian":
                return profiles.gaussian_profile(epsilon, high)
            return profiles.shown_profile(epsilon, q, low, high)

        return same, same

    def reach(self, log_tail: float) -> tuple[float, float]:
        """Return ε, (remove, add), from which on no profile exceeds a small number, given by its logarithm."""
        ends = [(profile(grid) <= math.exp(log_tail), grid) for profile, grid in self._falling(log_tail)]
        remove, add = (float(grid[_last_of_first(np.all(small, axis=0))]) for small, grid in ends)
        return remove, add

    def spread(self, log_chance: float) -> tuple[float, float]:
        """Return ε, (remove, add), such that the loss *the other way* is below -ε with no more than a small chance.

        The chance is -dδ(ε)/de^ε, and δ is convex in e^ε, so its fall between two points bounds it at the second.
        """
        ends = []
        for profile, grid in self._falling(log_chance + math.log(float(self.q.min()))):
            falls = np.diff(profile(grid), axis=1)
            widths = np.exp(np.minimum(grid[:-1], 700.0)) * -np.expm1(np.diff(grid))
            ends.append(float(grid[_last_of_first(np.all(falls <= math.exp(log_chance) * widths, axis=0))]))
        return ends[0], ends[1]

    def _falling(self, log_tail: float) -> list[tuple[Profile, np.ndarray]]:
        """Return (remove, add), each profile and where to look at it, from far out inwards."""
        tops = self._tops(log_tail)
        return [
            (profile, max(float(top.max()), 1e-300) * REACH_POINTS)
            for profile, top in zip(self.profiles(), tops, strict=True)
        ]

    def _tops(self, log_tail: float) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds for `reach`, each from the mass beyond one point."""
        q, low, high = self.q, self.idle, self.drawn
        z, rare = _deviation(log_tail - math.log(2) + 0 * q), _deviation(log_tail - np.log(q))
        if self.kind == "poisson":
            return profiles.sampled(high * high / 2 + high * rare, q), -np.log1p(-q)
        if self.kind == "uniform":
            up = profiles.sampled(2 * high * high + 2 * high * rare, q)
            return np.minimum(up, high * high / 2 + high * rare), profiles.sampled(high * high / 2 + high * rare, q)
        if self.kind == "mixture":
            above = np.maximum(high + _deviation(log_tail - np.log(2 * q)), low + z)
            ends = [profiles.mixture_loss(x, q, low, high) for x in (above, -z)]
            return np.maximum(ends[0], 0.0), np.maximum(-ends[1], 0.0)
        return high * high / 2 + high * z, high * high / 2 + high * z


def _last_of_first(holds: np.ndarray) -> int:
    """Return the index of the last of the first that hold in a row, or 0."""
    return max((len(holds) if holds.all() else int(np.argmin(holds))) - 1, 0)


def _deviation(log_tail: np.ndarray) -> np.ndarray:
    """Return how many standard deviations a Gaussian exceeds with a small probability, at least 0."""
    return np.asarray(np.maximum(-scipy.special.ndtri_exp(np.minimum(log_tail, -1e-3)), 0.0))


@quietly
def group_steps(releases: Iterable[Release]) -> list[Steps]:
    """Return releases as groups of a kind, of at most TOGETHER, all Gaussians of full sums as one.

    None may be without noise.
    """
    kinds: dict[str, list[tuple[float, float, float, float]]] = {}
    plain = []
    for r in releases:
        if (kind := kind_of(r)) == "gaussian":
            plain.append(r)
        else:
            drawn = max(1 / r.noise_multiplier, LEAST)
            idle = min(max(r.idle * drawn, LEAST), drawn) if r.idle > 0 else 0.0
            kinds.setdefault(kind, []).append((max(r.sampling_rate, LEAST), idle, drawn, float(r.steps)))
    if len({row[0] for row in kinds.get("uniform", [])}) > MOST_DISTINCT:
        kinds["shown"] = kinds.get("shown", []) + kinds.pop("uniform")
    groups = []
    for kind, rows in sorted(kinds.items()):
        binned = _binned(np.array(rows), any_rate=kind != "uniform")
        for start in range(0, len(binned), TOGETHER):
            q, idle, drawn, counts = binned[start : start + TOGETHER].T
            groups.append(Steps(kind, q[:, None], idle[:, None], drawn[:, None], counts))
    if plain:
        one = np.ones((1, 1))
        groups.append(Steps("gaussian", one, 0 * one, gaussian_mu(plain) * one, np.ones(1)))
    return groups


def _binned(rows: np.ndarray, *, any_rate: bool) -> np.ndarray:
    """Return at most MOST_DISTINCT mechanisms (q, idle, drawn, count), each in place of some that cost no more.

    Each of the first three, raised, only adds loss: a Gaussian of more noise is one of less, noised again, and
    δ(ε) of a mixture grows with its rate and sensitivities. The bound for `uniform` need not grow with the rate,
    so that only equal ones go together there (not `any_rate`).
    """
    rows, width = _merged(rows, rows[:, :3]), FINEST_BIN
    while len(rows) > MOST_DISTINCT:
        keys = np.floor(np.log(rows[:, :3]) / width)
        rows = _merged(rows, keys if any_rate else np.column_stack([rows[:, 0], keys[:, 1:]]))
        width *= 2
    return rows


def _merged(rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return rows of equal keys as one: the largest of each parameter, and the sum of the counts."""
    _, which = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(which, kind="stable")
    starts = np.flatnonzero(np.diff(which[order], prepend=-1))
    parameters = np.maximum.reduceat(rows[order, :3], starts, axis=0)
    return np.column_stack([parameters, np.add.reduceat(rows[order, 3], starts)])


def kind_of(release: Release) -> str:
    """Return the kind of one step's mechanism.

    A sampled one of next to no noise counts as a Gaussian of everybody: its ε is in the thousands anyhow.
    """
    if release.sampling in ("full", "shuffle") or release.sampling_rate >= 1:
        return "gaussian"
    if release.noise_multiplier < LEAST_SAMPLED_NOISE:
        return "gaussian"
    little = release.noise_multiplier <= 1 / SHOWN_FROM
    if release.sampling == "blocks" or (release.sampling == "uniform" and (release.idle > 0 or little)):
        return "shown"
    if release.sampling == "poisson":
        return "mixture" if release.idle > 0 else "poisson"
    return "uniform"


def gaussian_mu(plain: Iterable[Release]) -> float:
    """Return μ of the one Gaussian N(μ, 1) against N(0, 1) that many are together: μ² = Σ 1/σ_k²; or ∞."""
    parts = [(1 / r.noise_multiplier, float(r.steps)) for r in plain]
    largest = max(mu for mu, _ in parts)
    if math.isinf(largest):
        return math.inf
    return largest * math.sqrt(math.fsum(count * (mu / largest) ** 2 for mu, count in parts))


def step_losses(steps: Steps, interval: float, up: float, down: float, *, add: bool = False) -> Losses:
    """Return the loss distributions of mechanisms on the grid of an interval.

    Args:
        up, down: losses above `up` count as ∞, losses below -`down` as -`down`, up to a rounding upwards.
        add: whether the losses are those without an example against with it.
    """
    remove, reverse = steps.profiles()
    above, below = (reverse, remove) if add else (remove, reverse)
    n, m = _points(up, interval), _points(down, interval)
    values = np.empty((len(steps.counts), m + 1 + n))
    values[:, m:] = _on_grid(above, n, interval, steps.kind == "uniform")
    values[:, m::-1] = _on_grid(below, m, interval, steps.kind == "uniform") * np.exp(-interval * np.arange(m + 1))
    return connect_the_dots(values, -m, interval, steps.counts)


def _points(width: float, interval: float) -> int:
    return max(1, math.ceil(width / interval))


def _on_grid(profile: Profile, n: int, interval: float, uneven: bool) -> np.ndarray:
    """Return a profile at 0, h, ..., n h, falling, [b, n + 1]; convex in e^ε."""
    rows = profile(np.zeros(1)).shape[0]
    width = max(1, CHUNK // rows)
    values = np.concatenate(
        [profile(interval * np.arange(start, min(start + width, n + 1))) for start in range(0, n + 1, width)], axis=1
    )
    if uneven:
        values = np.stack([convex_minorant(row, interval) for row in values])
    return np.asarray(np.minimum.accumulate(values, axis=1))


def convex_minorant(bound: np.ndarray, interval: float) -> np.ndarray:
    """Return, at 0, h, 2 h, ..., the largest function below `bound` that is convex in e^ε.

    A profile is convex in e^ε, so a profile below `bound` is below its minorant too. Found by isotonic
    regression of the slopes (pool adjacent violators), summed from the top, where the numbers are small.
    """
    widths = np.exp(interval * np.arange(2 - len(bound), 1))  # over the last: slopes may have any scale
    slopes = scipy.optimize.isotonic_regression(np.diff(bound) / widths, weights=widths).x
    falls = np.append(-slopes * widths, bound[-1])
    return np.asarray(np.cumsum(falls[::-1])[::-1])


def connect_the_dots(values: np.ndarray, lowest: int, interval: float, counts: np.ndarray) -> Losses:
    """Return the distributions whose profiles touch given ones on the grid.

    Args:
        values: δ(ε) - [1 - e^ε]_+ at ε = (lowest + j) h, [b, n], with 0 between the first ε and the last.
    """
    falls = -np.diff(values, axis=1)
    share = -1 / math.expm1(-interval)  # e^h / (e^h - 1)
    mass = np.empty_like(values)
    mass[:, 1:-1] = falls[:, :-1] * share - falls[:, 1:] * (share - 1)
    mass[:, -lowest] += 1
    mass[:, -1] = falls[:, -1] * share
    mass[:, 0] = -falls[:, 0] * (share - 1) - values[:, 0]
    return Losses(lowest, np.maximum(mass, 0.0), np.maximum(values[:, -1], TINY), counts)
