"""Privacy-loss distributions of single steps, on a grid, from their privacy profiles: what `composition` adds up.

A *profile* is δ(ε) of a step's worst neighbours, for every way of drawing the batch:

    δ(ε) = sup over neighbours of ∫ [p(x) - e^ε q(x)]_+ dx

Every neighbouring pair is computed in both directions: P with the example and Q without it (`remove`), and the
reverse (`add`); δ at ε < 0 follows from the other direction, D_α(P | Q) = 1 - α + α D_{1/α}(Q | P). The noise has
standard deviation 1, so sensitivities are given over it. All profiles broadcast: parameters [b, 1] and ε [n] give
[b, n]. They keep their relative precision far out in the tails and for the smallest sensitivities and rates.

A *distribution* is a probability mass function on the grid {k h}, made with the pessimistic Connect-the-Dots
rule (Doroshenko et al. 2022, arXiv:2207.04380, Algorithm 1) from a profile, so its own profile is
at least the true one everywhere, and stays so under composition (Zhu, Dong and Wang 2022, arXiv:2106.08567,
Theorem 10). With x = e^ε a profile is convex in x; the rule joins its values on the grid by straight lines in x.
It is computed from δ(ε) - [1 - e^ε]_+, which is small on both sides of 0, so that no digits are lost: below 0 it
is e^ε times the other direction's profile at -ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.privacy.accountant.gaussian_steps import FAR, NARROW
from flower_privdec.privacy.mechanism.events import Release

Profile = Callable[[np.ndarray], np.ndarray]
Numbers = np.ndarray | float

SHOWN_FROM = 8.0  # 1 / noise multiplier from which `uniform` counts as if the choice of examples were public
LEAST_SAMPLED_NOISE = 1e-3  # below, sampling is not credited
LEAST = 1e-150  # a smaller sampling rate or sensitivity over noise counts as this
TOGETHER = 32  # mechanisms in a group, which share a range of losses
MOST_DISTINCT = 4096  # mechanisms of a kind; more are binned
FINEST_BIN = 2.0**-13  # relative width of a bin, at least
TINY = 2.3e-308  # mass that counts at infinity at least where a range was cut: tails may underflow before they end
CHUNK = 2**16  # numbers of a profile worked out together
REACH_POINTS = 2.0 ** (-np.arange(48) / 4)

NEWTON_STEPS = 100  # at most; some 6 are taken
quietly = np.errstate(divide="ignore", over="ignore", under="ignore")  # where 0 and ∞ are what is meant


def gaussian_profile(epsilon: np.ndarray, mu: Numbers) -> np.ndarray:
    """Return δ(ε) between N(μ, 1) and N(0, 1), for any real ε (Balle and Wang 2018).

    With a = ε/μ - μ/2 and the Mills ratio m(x) = Φ(-x) / φ(x), Φ(-a) - e^ε Φ(-a - μ) = φ(a) [m(a) - m(a + μ)].
    """
    # At |ε| first; the last lines bring it to ε < 0.
    size = np.abs(epsilon)
    mu = np.asarray(mu, dtype=np.float64)
    middle = size / mu
    low = np.clip(middle - mu / 2, -FAR, FAR)
    density = np.exp(-low * low / 2) / np.sqrt(2 * np.pi)
    above = np.zeros(np.broadcast_shapes(size.shape, mu.shape))
    narrow = mu < NARROW

    if not narrow.all():
        far = low < -5  # the Mills ratio overflows there, and Φ is 1 up to 1e-6
        upper = np.where(far, scipy.special.ndtr(-low), density * _mills(np.maximum(low, -5.0)))
        above = upper - density * _mills(low + mu)

    # The difference of two nearly equal Mills ratios would lose its digits.
    if narrow.any():
        above = np.where(narrow, density * _narrow(np.minimum(middle, FAR), np.minimum(mu, NARROW)), above)

    above = np.maximum(above, 0.0)
    if np.all(epsilon >= 0):
        return np.asarray(above)
    return np.asarray(np.where(epsilon >= 0, above, -np.expm1(-size) + np.exp(-size) * above))


def _mills(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.pi / 2) * scipy.special.erfcx(x / np.sqrt(2)))


def _narrow(x: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Return m(x - μ/2) - m(x + μ/2) for small μ: -μ m'(x) - μ³/24 m'''(x), with m' = x m - 1."""
    m = _mills(x)
    square = x * x
    return np.asarray(mu * (1 - x * m) + mu**3 / 24 * (2 + square - x * (3 + square) * m))


@np.errstate(divide="ignore")
def unsampled(epsilon: np.ndarray, q: Numbers) -> np.ndarray:
    """Return log(1 + (e^ε - 1) / q): the ε before sampling that becomes this one, or -∞."""
    small = np.log1p(np.maximum(np.expm1(np.minimum(epsilon, 1.0)) / q, -1.0))
    large = epsilon - np.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return np.asarray(np.where(epsilon < 1, small, large))


def sampled(epsilon: np.ndarray, q: Numbers) -> np.ndarray:
    """Return log(1 + q (e^ε - 1)): the ε after sampling."""
    small = np.log1p(q * np.expm1(np.minimum(epsilon, 1.0)))
    return np.asarray(np.where(epsilon < 1, small, np.logaddexp(np.log1p(-q), np.log(q) + epsilon)))


def poisson_remove(epsilon: np.ndarray, q: Numbers, mu: Numbers) -> np.ndarray:
    """Return ∫ [P - e^ε N]_+ of a Poisson-sampled Gaussian, P = (1 - q) N(0, 1) + q N(μ, 1) and N = N(0, 1).

    It is q δ(log α), α = 1 + (e^ε - 1) / q, with δ `gaussian_profile`. Zeroing an example and removing it are
    the same here.
    """
    return np.asarray(q * gaussian_profile(unsampled(epsilon, q), mu))


def poisson_add(epsilon: np.ndarray, q: Numbers, mu: Numbers) -> np.ndarray:
    """Return ∫ [N - e^ε P]_+ = c δ(log(q e^ε / c)), c = 1 - (1 - q) e^ε, or 0 if c <= 0."""
    inside = np.minimum(epsilon, -np.log1p(-q))
    c = q * np.exp(inside) - np.expm1(inside)
    inner = np.log(q) + inside - np.log(np.where(c > 0, c, 1.0))
    return np.asarray(np.where(c > 0, c * gaussian_profile(inner, mu), 0.0))


def uniform_remove(epsilon: np.ndarray, q: Numbers, mu: Numbers) -> np.ndarray:
    """Return an upper bound on δ(ε) with an example against without it, of a sum over exactly b of J examples.

    Proof. Let z be the example, S the batch (|S| = b, every S equally likely), q = b / J, and
        A  the output given that z is not in S (the same with and without z's gradient),
        B  the output given that z is in S, and B' the same with z's gradient zeroed.
    With z the output is (1 - q) A + q B, without it (1 - q) A + q B'. Let D_α(P | Q) = ∫ [P - α Q]_+. By
    advanced joint convexity (Balle, Barthe and Gaboardi 2018, Theorem 2), for α' >= 1,
    α = 1 + (α' - 1) / q and β = α' / α,
        D_α'(with | without) = q D_α(B | (1 - β) A + β B') <= q [(1 - β) D_α(B | A) + β D_α(B | B')],
        D_α'(without | with) = q D_α(B' | (1 - β) A + β B) <= q [(1 - β) D_α(B' | A) + β D_α(B' | B)].
    Couple B and B' by the same S: the sums differ by g(z), at most the clip norm C. Couple A's batch S with
    B's batch S - {y} + {z}, y uniform in S: A and B differ by g(z) - g(y), at most 2 C; A and B' by g(y), at
    most C. A pair of Gaussian mixtures coupled at distance <= t C has D_α <= δ_t(log α), the profile of
    N(t μ, 1) against N(0, 1), by joint convexity. Hence, with μ = C / std,
        remove(α') <= q [(1 - β) δ_2(log α) + β δ_1(log α)]    and    add(α') <= q δ_1(log α),
    both also at most q δ_1(log α'), what they were if z's being drawn were public (by joint convexity, as
    D_α'(A | A) = 0). Each bound is the same function at every step whatever happened before, so it composes.  ∎
    """
    inner = unsampled(epsilon, q)
    beta = np.exp(epsilon - inner)
    mixed = (1 - beta) * gaussian_profile(inner, 2 * np.asarray(mu)) + beta * gaussian_profile(inner, mu)
    return np.asarray(q * np.minimum(mixed, gaussian_profile(epsilon, mu)))


def mixture_remove(epsilon: np.ndarray, q: Numbers, low: Numbers, high: Numbers) -> np.ndarray:
    """Return ∫ [P - e^ε N]_+ of P = (1 - q) N(low, 1) + q N(high, 1), 0 < low <= high, against N = N(0, 1).

    log(P / N) grows with x. Where it is ε, e^ε = Σ p_j e^{ε_j} with ε_j = s_j x - s_j² / 2 and s = (low, high); so
        ∫ [P - e^ε N]_+ = Σ p_j [Φ(s_j - x) - e^{ε_j} Φ(-x)] = Σ p_j δ_j(ε_j),    δ_j that of N(s_j, 1), and
        ∫ [N - e^ε P]_+ = Σ p_j e^{ε + ε_j} δ_j(-ε_j)    where log(P / N) is -ε.
    """
    x = mixture_end(epsilon, q, low, high)
    by_low = (1 - q) * gaussian_profile(low * x - low * low / 2, low)
    by_high = q * gaussian_profile(high * x - high * high / 2, high)
    return np.asarray(by_low + by_high)


def mixture_add(epsilon: np.ndarray, q: Numbers, low: Numbers, high: Numbers) -> np.ndarray:
    """Return ∫ [N - e^ε P]_+: see `mixture_remove`."""
    x = mixture_end(-epsilon, q, low, high)

    def part(log_p: np.ndarray, s: Numbers) -> np.ndarray:
        loss = s * x - s * s / 2
        return np.asarray(np.exp(np.minimum(log_p + epsilon + loss, 0.0)) * gaussian_profile(-loss, s))

    return np.asarray(part(np.log1p(-q), low) + part(np.log(q), high))


def mixture_end(loss: np.ndarray, q: Numbers, low: Numbers, high: Numbers) -> np.ndarray:
    """Return the x at which log(P / N) of a mixture is `loss`.

    By Newton's method from above, where log(P / N) >= `loss`: it is convex and rises, so no step passes the
    solution. Near 0 it is P / N - 1 that is solved for, which keeps the digits of a small loss.
    """
    q = np.asarray(q)
    low = np.asarray(low)
    high = np.asarray(high)
    x = _mixture_start(loss, q, low, high)
    small = np.minimum(loss, 1.0)
    for _ in range(NEWTON_STEPS):
        a = low * x - low * low / 2  # the losses of the two components
        b = high * x - high * high / 2

        # Newton's step for P / N - 1, ...
        u = np.minimum(a, 1.0)
        v = np.minimum(b, 1.0)
        excess = (1 - q) * np.expm1(u) + q * np.expm1(v) - np.expm1(small)
        slope = (1 - q) * low * np.exp(u) + q * high * np.exp(v)

        # ... and for log(P / N).
        whole = np.logaddexp(np.log1p(-q) + a, np.log(q) + b)
        share = np.exp(np.log(q) + b - whole)

        near = (np.maximum(a, b) < 1) & (np.abs(loss) < 1)
        step = np.where(near, excess / np.where(near, slope, 1.0), (whole - loss) / (low + (high - low) * share))
        x = x - step
        if np.all(np.abs(step) <= 1e-14 * np.maximum(1.0, np.abs(x))):
            break
    return np.asarray(x)


def _mixture_start(loss: np.ndarray, q: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return an x, not far off, at which log(P / N) of a mixture is at least `loss`.

    It is at least each component's part of it; and if the other component adds something (s x > s² / 2), it is at least
    what it would be if that one added nothing.
    """
    bounds = []
    for p, s, other in ((1 - q, low, high), (q, high, low)):
        bounds.append((loss - np.log(p) + s * s / 2) / s)
        alone = (unsampled(loss, p) + s * s / 2) / s
        bounds.append(np.where(alone >= other / 2, alone, np.inf))
    return np.asarray(np.fmin.reduce(bounds))


def shown_profile(epsilon: np.ndarray, q: Numbers, low: Numbers, high: Numbers) -> np.ndarray:
    """Return the profile of a step whose choice of examples is public: (1 - q) δ_low + q δ_high.

    It bounds every way of drawing examples that does not look at them, since keeping the choice secret only
    helps. `blocks` uses it, `uniform` with idle examples (all examples of a batch are drawn together), and `uniform`
    with so little noise that its own bound is no better.
    """
    low = np.asarray(low)
    not_drawn = np.where(low > 0, gaussian_profile(epsilon, np.maximum(low, 1e-300)), 0.0)
    return np.asarray((1 - q) * not_drawn + q * gaussian_profile(epsilon, high))


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
        q = self.q
        low = self.idle
        high = self.drawn
        if self.kind == "poisson":
            return lambda e: poisson_remove(e, q, high), lambda e: poisson_add(e, q, high)
        if self.kind == "mixture":
            return lambda e: mixture_remove(e, q, low, high), lambda e: mixture_add(e, q, low, high)
        if self.kind == "uniform":
            return lambda e: uniform_remove(e, q, high), lambda e: poisson_remove(e, q, high)  # add: the same bound

        # Symmetric.
        if self.kind == "gaussian":
            return (lambda e: gaussian_profile(e, high),) * 2
        return (lambda e: shown_profile(e, q, low, high),) * 2

    def reach(self, log_tail: float) -> tuple[float, float]:
        """Return the ε beyond which no profile exceeds e^log_tail: for removing an example, and for adding it."""
        ends = []
        for profile, grid in self._falling(log_tail):
            is_small = np.all(profile(grid) <= math.exp(log_tail), axis=0)
            ends.append(float(grid[_last_of_first(is_small)]))
        return ends[0], ends[1]

    def spread(self, log_chance: float) -> tuple[float, float]:
        """Return ε, (remove, add), such that the loss *the other way* is below -ε with no more than a small chance.

        The chance is -dδ(ε)/de^ε, and δ is convex in e^ε, so its fall between two points bounds it at the second.
        """
        ends = []
        for profile, grid in self._falling(log_chance + math.log(float(self.q.min()))):
            falls = np.diff(profile(grid), axis=1)
            widths = np.exp(np.minimum(grid[:-1], 700.0)) * -np.expm1(np.diff(grid))
            is_rare = np.all(falls <= math.exp(log_chance) * widths, axis=0)
            ends.append(float(grid[_last_of_first(is_rare)]))
        return ends[0], ends[1]

    def _falling(self, log_tail: float) -> list[tuple[Profile, np.ndarray]]:
        """Return (remove, add), each profile and the ε to evaluate it at, from far out inwards."""
        tops = [max(float(top.max()), 1e-300) for top in self._tops(log_tail)]
        return [(profile, top * REACH_POINTS) for profile, top in zip(self.profiles(), tops, strict=True)]

    def _tops(self, log_tail: float) -> tuple[np.ndarray, np.ndarray]:
        """Return bounds for `reach`, each from the mass beyond one point."""
        q = self.q
        low = self.idle
        high = self.drawn
        z = _deviation(log_tail - math.log(2) + 0 * q)
        rare = _deviation(log_tail - np.log(q))
        if self.kind == "poisson":
            return sampled(high * high / 2 + high * rare, q), -np.log1p(-q)
        if self.kind == "uniform":
            up = sampled(2 * high * high + 2 * high * rare, q)
            return np.minimum(up, high * high / 2 + high * rare), sampled(high * high / 2 + high * rare, q)
        if self.kind == "mixture":

            def loss(x: np.ndarray) -> np.ndarray:
                """Return log(P / N) at a point."""
                by_low = np.log1p(-q) + low * x - low * low / 2
                by_high = np.log(q) + high * x - high * high / 2
                return np.asarray(np.logaddexp(by_low, by_high))

            above = np.maximum(high + _deviation(log_tail - np.log(2 * q)), low + z)
            return np.maximum(loss(above), 0.0), np.maximum(-loss(-z), 0.0)
        return high * high / 2 + high * z, high * high / 2 + high * z


def _last_of_first(holds: np.ndarray) -> int:
    """Return the index of the last one of those at the beginning that all hold, or 0."""
    count = len(holds)
    if not holds.all():
        count = int(np.argmin(holds))
    return max(count - 1, 0)


def _deviation(log_tail: np.ndarray) -> np.ndarray:
    """Return the number of standard deviations that a Gaussian exceeds with a small probability, at least 0."""
    return np.asarray(np.maximum(-scipy.special.ndtri_exp(np.minimum(log_tail, -1e-3)), 0.0))


@quietly
def group_steps(releases: Iterable[Release]) -> list[Steps]:
    """Return releases as groups of a kind, of at most TOGETHER, all Gaussians of full sums as one.

    Each must have noise.
    """
    kinds: dict[str, list[tuple[float, float, float, float]]] = {}  # q, idle, drawn, count
    plain = []
    for release in releases:
        kind = kind_of(release)
        if kind == "gaussian":
            plain.append(release)
            continue
        rate = max(release.sampling_rate, LEAST)
        drawn = max(1 / release.noise_multiplier, LEAST)
        idle = 0.0
        if release.idle > 0:
            idle = min(max(release.idle * drawn, LEAST), drawn)
        kinds.setdefault(kind, []).append((rate, idle, drawn, float(release.steps)))

    # Rates of `uniform` cannot be binned (`_binned`): too many of them count as shown, which is an upper bound.
    if len({rate for rate, *_ in kinds.get("uniform", [])}) > MOST_DISTINCT:
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
    δ(ε) of a mixture grows with its rate and sensitivities. The bound for `uniform` need not grow with the rate, so
    only equal rates go together there (not `any_rate`).
    """
    rows = _merged(rows, rows[:, :3])
    width = FINEST_BIN
    while len(rows) > MOST_DISTINCT:
        keys = np.floor(np.log(rows[:, :3]) / width)
        if not any_rate:
            keys = np.column_stack([rows[:, 0], keys[:, 1:]])
        rows = _merged(rows, keys)
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

    A sampled one of next to no noise counts as a Gaussian over all examples: its ε is in the thousands anyhow.
    """
    whole = release.sampling in ("full", "shuffle") or release.sampling_rate >= 1
    if whole or release.noise_multiplier < LEAST_SAMPLED_NOISE:
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
    above = remove
    below = reverse
    if add:
        above = reverse
        below = remove

    # δ(ε) - [1 - e^ε]_+ from -m h to n h. Below 0 it is e^ε times the other direction's profile at -ε.
    n = max(1, math.ceil(up / interval))
    m = max(1, math.ceil(down / interval))
    uneven = steps.kind == "uniform"
    values = np.empty((len(steps.counts), m + 1 + n))
    values[:, m:] = _on_grid(above, n, interval, uneven)
    values[:, m::-1] = _on_grid(below, m, interval, uneven) * np.exp(-interval * np.arange(m + 1))
    return connect_the_dots(values, -m, interval, steps.counts)


def _on_grid(profile: Profile, n: int, interval: float, uneven: bool) -> np.ndarray:
    """Return a profile at 0, h, ..., n h, falling, [b, n + 1]; convex in e^ε.

    Args:
        uneven: whether it is a bound that need not be convex.
    """
    rows = profile(np.zeros(1)).shape[0]
    width = max(1, CHUNK // rows)
    parts = []
    for start in range(0, n + 1, width):
        parts.append(profile(interval * np.arange(start, min(start + width, n + 1))))
    values = np.concatenate(parts, axis=1)

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
