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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft, optimize, special

from flower_privdec.privacy.events import Release

Profile = Callable[[np.ndarray], np.ndarray]

TAIL = float(-special.ndtri(0.5 * math.exp(-50)))  # std's of a Gaussian beyond which its mass is let go
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


def gaussian_profile(epsilon: np.ndarray, mu: float) -> np.ndarray:
    """Return δ(ε) between N(μ, 1) and N(0, 1): Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) (Balle and Wang 2018)."""
    upper = special.ndtr(mu / 2 - epsilon / mu)
    lower = np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
    return np.asarray(np.maximum(0.0, upper - lower))


def _unsampled(epsilon: np.ndarray, q: float) -> np.ndarray:
    """Return log(1 + (e^ε - 1) / q), for ε > log(1 - q): the ε before sampling that becomes this one."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / q)
    large = epsilon - math.log(q) + np.log1p(-(1 - q) * np.exp(-np.abs(epsilon)))
    return np.asarray(np.where(epsilon < 1, small, large))


def _sampled(epsilon: float, q: float) -> float:
    """Return log(1 + q (e^ε - 1)): the ε after sampling."""
    return float(np.logaddexp(math.log1p(-q), math.log(q) + epsilon)) if q < 1 else epsilon


def poisson_profiles(q: float, mu: float) -> tuple[Profile, Profile]:
    """Return the exact profiles (remove, add) of a Poisson-sampled Gaussian, P = (1 - q) N(0, 1) + q N(μ, 1).

    remove: ∫ [P - e^ε N]_+ = q δ(log α), α = 1 + (e^ε - 1) / q, or 1 - e^ε where α <= 0.
    add:    ∫ [N - e^ε P]_+ = c δ(log(q e^ε / c)), c = 1 - (1 - q) e^ε, or 0 where c <= 0;
    δ is `gaussian_profile`. Zeroing an example and removing it are the same here.
    """

    def remove(epsilon: np.ndarray) -> np.ndarray:
        out: np.ndarray = -np.expm1(np.minimum(epsilon, 0.0))
        inside = epsilon > math.log1p(-q)
        out[inside] = q * gaussian_profile(_unsampled(epsilon[inside], q), mu)
        return out

    def add(epsilon: np.ndarray) -> np.ndarray:
        out = np.zeros_like(epsilon)
        inside = epsilon < -math.log1p(-q)
        inner = epsilon[inside]
        c = q * np.exp(inner) - np.expm1(inner)
        with np.errstate(divide="ignore"):
            out[inside] = c * gaussian_profile(math.log(q) + inner - np.log(c), mu)
        return out

    return remove, add


def uniform_profiles(q: float, mu: float) -> tuple[Profile, Profile]:
    """Return upper bounds on the profiles (remove, add) of a Gaussian sum over exactly b of J examples.

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
    both also at most δ_1(log α') (couple all of S); α' < 1 follows from D_α(P|Q) = 1 - α + α D_{1/α}(Q|P).
    Each bound is the same function at every step whatever happened before, so it composes.  ∎
    """

    def remove_up(epsilon: np.ndarray) -> np.ndarray:
        inner = _unsampled(epsilon, q)
        beta = np.exp(epsilon - inner)
        mixed = (1 - beta) * gaussian_profile(inner, 2 * mu) + beta * gaussian_profile(inner, mu)
        return np.asarray(np.minimum(q * mixed, gaussian_profile(epsilon, mu)))

    def add_up(epsilon: np.ndarray) -> np.ndarray:
        sampled = q * gaussian_profile(_unsampled(epsilon, q), mu)
        return np.asarray(np.minimum(sampled, gaussian_profile(epsilon, mu)))

    return _mirrored(remove_up, add_up), _mirrored(add_up, remove_up)


def _mirrored(forward: Profile, backward: Profile) -> Profile:
    """Return the profile that is `forward` for ε >= 0 and 1 - e^ε + e^ε backward(-ε) below."""

    def profile(epsilon: np.ndarray) -> np.ndarray:
        below = np.minimum(epsilon, 0.0)
        mirrored = -np.expm1(below) + np.exp(below) * backward(np.abs(epsilon))
        return np.where(epsilon >= 0, forward(np.abs(epsilon)), mirrored)

    return profile


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


def table_sensitivities(q: float) -> tuple[float, float]:
    """Return how far one example can move a step with a table, in clip norms: (not drawn, drawn) = (q, 2 - q).

    Proof. Over the batch S, each of J examples with probability q = b / J, and clip norm C, b times the step is
        Σ_{j in S} (g_j - t_j) + q Σ_j t_j,    |g_j|, |t_j| <= C,
    t_j being the table's gradient of example j. What example z adds is q t_z when it is not drawn, of norm at
    most q C, and g_z - (1 - q) t_z when it is, of norm at most (2 - q) C. Zeroing z removes just that.
    t_z depends on when z was drawn before, which is hidden. But whether z is drawn now is independent of that
    and of everything published so far; so, given what was published, the step is a mixture over the hidden past
    of (1 - q) N(v_0, σ²) + q N(v_1, σ²) with |v_0| <= q C, |v_1| <= (2 - q) C, against N(0, σ²), around
    what the other examples add. The profile is jointly convex, so no mixture exceeds its worst component,
    which is the one-dimensional one with both at their bounds (mixture-of-Gaussians mechanisms, Choquette-Choo
    et al. 2023, arXiv:2310.15526). The bound is the same whatever was published, so it composes.  ∎

    This is why PrivSGP-VR's amplification by 1/J (Theorem 2) does not hold as claimed: every step shows q t_z.
    """
    return q, 2 - q


def mixture_profiles(q: float, low: float, high: float) -> tuple[Profile, Profile]:
    """Return the exact profiles (remove, add) of P = (1 - q) N(low, 1) + q N(high, 1) against N(0, 1).

    log(P / N) grows with x, so both integrals end where it equals ±ε, found by bisection.
    """

    def end(epsilon: np.ndarray) -> np.ndarray:
        left, right = np.full(epsilon.shape, -2 * TAIL), np.full(epsilon.shape, high + 2 * TAIL)
        for _ in range(60):
            middle = (left + right) / 2
            above = mixture_loss(middle, q, low, high) > epsilon
            left, right = np.where(above, left, middle), np.where(above, middle, right)
        return np.asarray((left + right) / 2)

    def remove(epsilon: np.ndarray) -> np.ndarray:
        x = end(epsilon)
        inside = (1 - q) * special.ndtr(low - x) + q * special.ndtr(high - x)
        return np.asarray(np.maximum(0.0, inside - np.exp(epsilon + special.log_ndtr(-x))))

    def add(epsilon: np.ndarray) -> np.ndarray:
        x = end(-epsilon)
        inside = np.logaddexp(math.log1p(-q) + special.log_ndtr(x - low), math.log(q) + special.log_ndtr(x - high))
        return np.asarray(np.maximum(0.0, special.ndtr(x) - np.exp(epsilon + inside)))

    return remove, add


def mixture_loss(x: np.ndarray, q: float, low: float, high: float) -> np.ndarray:
    """Return log of ((1 - q) N(low, 1) + q N(high, 1)) / N(0, 1) at x."""
    return np.logaddexp(math.log1p(-q) + low * x - low * low / 2, math.log(q) + high * x - high * high / 2)


def shown_profile(q: float, low: float, high: float) -> Profile:
    """Return the profile of a step whose choice of examples is public: (1 - q) δ_low + q δ_high.

    It bounds every way of drawing examples that does not look at them, since keeping the choice secret only
    helps; `uniform-table` and `blocks-table` use it, where all examples of a batch are drawn together.
    """
    return lambda epsilon: (1 - q) * gaussian_profile(epsilon, low) + q * gaussian_profile(epsilon, high)


MIXTURES: dict[str, Callable[[float], tuple[float, float]]] = {
    "poisson": lambda q: (0.0, 1.0),
    "poisson-table": table_sensitivities,
}
SHOWN = ("uniform-table", "blocks-table")


@lru_cache(maxsize=256)
def step_losses(sampling: str, q: float, mu: float, interval: float) -> tuple[Losses, Losses]:
    """Return the loss distributions (remove, add) of one step.

    Args:
        sampling: of a `Release`; of `full` and `shuffle` a plain Gaussian.
        q: sampling rate.
        mu: one over the noise multiplier.
        interval: h, the grid's.
    """
    down, up = loss_range(sampling, q, mu)
    if q >= 1 or sampling in ("full", "shuffle"):
        plain = connect_the_dots(lambda e: gaussian_profile(e, mu), -down, up, interval)
        return plain, plain
    if sampling == "poisson":
        remove, add = poisson_profiles(q, mu)
    elif sampling in MIXTURES:
        low, high = MIXTURES[sampling](q)
        remove, add = mixture_profiles(q, low * mu, high * mu)
    elif sampling in SHOWN:
        low, high = table_sensitivities(q)
        remove = add = shown_profile(q, low * mu, high * mu)
    else:
        remove, add = (convex_minorant(bound, interval) for bound in uniform_profiles(q, mu))
    return connect_the_dots(remove, -down, up, interval), connect_the_dots(add, -up, down, interval)


def loss_range(sampling: str, q: float, mu: float) -> tuple[float, float]:
    """Return how far below and above 0 the loss (remove) of one step reaches, but for e^-50 of its mass."""
    reach = mu * mu / 2 + mu * TAIL
    if q >= 1 or sampling in ("full", "shuffle"):
        return reach, reach
    if sampling in MIXTURES:
        low, high = (mu * part for part in MIXTURES[sampling](q))
        ends = mixture_loss(np.array([-TAIL, high + TAIL]), q, low, high)
        return -float(ends[0]), float(ends[1])
    if sampling in SHOWN:
        high = mu * table_sensitivities(q)[1]
        return high * high / 2 + high * TAIL, high * high / 2 + high * TAIL
    return _sampled(reach, q), min(_sampled(2 * mu * mu + 2 * mu * TAIL, q), reach)


def loss_stds(sampling: str, q: float, mu: float) -> tuple[float, float]:
    """Return about how much the loss (remove) of one step varies, without the example and with it."""
    if q >= 1 or sampling in ("full", "shuffle"):
        return mu, mu
    low, high = (mu * part for part in MIXTURES.get(sampling, MIXTURES["poisson"])(q))
    if sampling in SHOWN:
        low, high = (mu * part for part in table_sensitivities(q))
        return math.sqrt((1 - q) * low**2 + q * high**2), math.sqrt((1 - q) * low**2 + q * high**2)
    x = np.linspace(-8.0, 8.0, 161)
    weight = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    drawn, not_drawn, without = (mixture_loss(y, q, low, high) for y in (x + high, x + low, x))
    variance = float(weight @ (without - weight @ without) ** 2)
    with_it = q * float(weight @ drawn**2) + (1 - q) * float(weight @ not_drawn**2)
    return math.sqrt(variance), math.sqrt(with_it)


def grid_interval(releases: Sequence[Release]) -> float:
    """Return h, a power of 2: a 32nd of the root-mean-square loss of a step, or more where tails are long.

    Rounding to the grid adds at most about h²/6 to the variance of a step's loss, 0.02 % of it where h is a
    32nd; distributions with long tails, which take a larger h, are rounded over a small part of their mass.
    """
    mechanisms = [(r.sampling, r.sampling_rate, 1 / r.noise_multiplier) for r in releases]
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
        mean = losses.mass @ index
        variance += count * float(losses.mass @ (index - mean) ** 2)
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
            out[i] = np.log(losses.mass @ power)
            power *= power
    return out
