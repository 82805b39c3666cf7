"""Privacy profiles of one step: δ(ε) of its worst neighbours for ε >= 0, for every way of drawing the batch.

    δ(ε) = sup over neighbours of ∫ [p(x) - e^ε q(x)]_+ dx

Every neighbouring pair is looked at in both directions: P with the example and Q without it (`remove`), and the
reverse (`add`); δ at ε < 0 follows from the other direction, D_α(P | Q) = 1 - α + α D_{1/α}(Q | P). The noise has
standard deviation 1, so sensitivities are given over it. All functions broadcast: parameters [b, 1] and ε [n] give
[b, n]. They keep their relative precision far out in the tails and for the smallest sensitivities and rates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy

Profile = Callable[[np.ndarray], np.ndarray]

FAR = 60.0  # std's of a Gaussian beyond which its mass is 0 in double precision
NEWTON_STEPS = 100  # at most; some 6 are taken
NARROW = 0.01  # a Taylor series is used for sensitivities below


def gaussian_profile(epsilon: np.ndarray, mu: np.ndarray | float) -> np.ndarray:
    """Return δ(ε) between N(μ, 1) and N(0, 1), for any real ε (Balle and Wang 2018).

    With a = ε/μ - μ/2 and the Mills ratio m(x) = Φ(-x) / φ(x), Φ(-a) - e^ε Φ(-a - μ) = φ(a) [m(a) - m(a + μ)].
    """
    size, mu = np.abs(epsilon), np.asarray(mu, dtype=np.float64)
    middle = size / mu
    low = np.clip(middle - mu / 2, -FAR, FAR)
    density = np.exp(-low * low / 2) / np.sqrt(2 * np.pi)
    above, narrow = np.zeros(np.broadcast_shapes(size.shape, mu.shape)), mu < NARROW
    if not narrow.all():
        far = low < -5  # the Mills ratio overflows there, and Φ is 1 but for 1e-6
        upper = np.where(far, scipy.special.ndtr(-low), density * _mills(np.maximum(low, -5.0)))
        above = upper - density * _mills(low + mu)
    if narrow.any():
        above = np.where(narrow, density * _narrow(np.minimum(middle, FAR), np.minimum(mu, NARROW)), above)
    above = np.maximum(above, 0.0)
    if np.all(epsilon >= 0):
        return np.asarray(above)
    return np.asarray(np.where(epsilon >= 0, above, -np.expm1(-size) + np.exp(-size) * above))


def _mills(x: np.ndarray) -> np.ndarray:
    """Return Φ(-x) / φ(x)."""
    return np.asarray(np.sqrt(np.pi / 2) * scipy.special.erfcx(x / np.sqrt(2)))


def _narrow(x: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Return m(x - μ/2) - m(x + μ/2) for small μ: -μ m'(x) - μ³/24 m'''(x), with m' = x m - 1."""
    m, square = _mills(x), x * x
    return np.asarray(mu * (1 - x * m) + mu**3 / 24 * (2 + square - x * (3 + square) * m + 1))


@np.errstate(divide="ignore")
def unsampled(epsilon: np.ndarray, q: np.ndarray | float) -> np.ndarray:
    """Return log(1 + (e^ε - 1) / q): the ε before sampling that becomes this one, or -∞."""
    small = np.log1p(np.maximum(np.expm1(np.minimum(epsilon, 1.0)) / q, -1.0))
    large = epsilon - np.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return np.asarray(np.where(epsilon < 1, small, large))


def sampled(epsilon: np.ndarray, q: np.ndarray | float) -> np.ndarray:
    """Return log(1 + q (e^ε - 1)): the ε after sampling."""
    small = np.log1p(q * np.expm1(np.minimum(epsilon, 1.0)))
    return np.asarray(np.where(epsilon < 1, small, np.logaddexp(np.log1p(-q), np.log(q) + epsilon)))


def poisson_remove(epsilon: np.ndarray, q: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """Return ∫ [P - e^ε N]_+ of a Poisson-sampled Gaussian, P = (1 - q) N(0, 1) + q N(μ, 1) and N = N(0, 1).

    It is q δ(log α), α = 1 + (e^ε - 1) / q, with δ `gaussian_profile`. Zeroing an example and removing it are
    the same here.
    """
    return np.asarray(q * gaussian_profile(unsampled(epsilon, q), mu))


def poisson_add(epsilon: np.ndarray, q: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """Return ∫ [N - e^ε P]_+ = c δ(log(q e^ε / c)), c = 1 - (1 - q) e^ε, or 0 where c <= 0."""
    inside = np.minimum(epsilon, -np.log1p(-q))
    c = q * np.exp(inside) - np.expm1(inside)
    inner = np.log(q) + inside - np.log(np.where(c > 0, c, 1.0))
    return np.asarray(np.where(c > 0, c * gaussian_profile(inner, mu), 0.0))


def uniform_remove(epsilon: np.ndarray, q: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
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


def uniform_add(epsilon: np.ndarray, q: np.ndarray | float, mu: np.ndarray | float) -> np.ndarray:
    """Return the same without an example against with it: see `uniform_remove`."""
    return np.asarray(q * gaussian_profile(unsampled(epsilon, q), mu))


def mixture_remove(
    epsilon: np.ndarray, q: np.ndarray | float, low: np.ndarray | float, high: np.ndarray | float
) -> np.ndarray:
    """Return ∫ [P - e^ε N]_+ of P = (1 - q) N(low, 1) + q N(high, 1), 0 < low <= high, against N = N(0, 1).

    log(P / N) grows with x. Where it is ε, e^ε = Σ p_j e^{ε_j} with ε_j = s_j x - s_j² / 2 and s = (low, high); so
        ∫ [P - e^ε N]_+ = Σ p_j [Φ(s_j - x) - e^{ε_j} Φ(-x)] = Σ p_j δ_j(ε_j),    δ_j that of N(s_j, 1), and
        ∫ [N - e^ε P]_+ = Σ p_j e^{ε + ε_j} δ_j(-ε_j)    where log(P / N) is -ε.
    """
    x = mixture_end(epsilon, q, low, high)
    parts = [(1 - q, low), (q, high)]
    return np.asarray(sum(p * gaussian_profile(s * x - s * s / 2, s) for p, s in parts))


def mixture_add(
    epsilon: np.ndarray, q: np.ndarray | float, low: np.ndarray | float, high: np.ndarray | float
) -> np.ndarray:
    """Return ∫ [N - e^ε P]_+: see `mixture_remove`."""
    x = mixture_end(-epsilon, q, low, high)
    parts = [(log_p, s, s * x - s * s / 2) for log_p, s in ((np.log1p(-q), low), (np.log(q), high))]
    return np.asarray(
        sum(np.exp(np.minimum(log_p + epsilon + e, 0.0)) * gaussian_profile(-e, s) for log_p, s, e in parts)
    )


def mixture_end(
    loss: np.ndarray, q: np.ndarray | float, low: np.ndarray | float, high: np.ndarray | float
) -> np.ndarray:
    """Return the x at which log(P / N) of a mixture is `loss`.

    By Newton's method from above, where log(P / N) >= `loss`: it is convex and rises, so no step passes the
    solution. Near 0 it is P / N - 1 that is solved for, which keeps the digits of a small loss.
    """
    q, low, high = np.asarray(q), np.asarray(low), np.asarray(high)
    x = _mixture_start(loss, q, low, high)
    for _ in range(NEWTON_STEPS):
        a, b = low * x - low * low / 2, high * x - high * high / 2
        small, u, v = np.minimum(loss, 1.0), np.minimum(a, 1.0), np.minimum(b, 1.0)
        excess = (1 - q) * np.expm1(u) + q * np.expm1(v) - np.expm1(small)
        slope = (1 - q) * low * np.exp(u) + q * high * np.exp(v)
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

    It is at least each component's part of it, and where the other component adds something (s x > s² / 2) it is
    at least what it would be if that one added nothing.
    """
    bounds = []
    for p, s, other in ((1 - q, low, high), (q, high, low)):
        bounds.append((loss - np.log(p) + s * s / 2) / s)
        alone = (unsampled(loss, p) + s * s / 2) / s
        bounds.append(np.where(alone >= other / 2, alone, np.inf))
    return np.asarray(np.fmin.reduce(bounds))


def mixture_loss(x: np.ndarray, q: np.ndarray | float, low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
    """Return log(P / N) of a mixture at x."""
    return np.asarray(np.logaddexp(np.log1p(-q) + low * x - low * low / 2, np.log(q) + high * x - high * high / 2))


def shown_profile(
    epsilon: np.ndarray, q: np.ndarray | float, low: np.ndarray | float, high: np.ndarray | float
) -> np.ndarray:
    """Return the profile of a step whose choice of examples is public: (1 - q) δ_low + q δ_high.

    It bounds every way of drawing examples that does not look at them, since keeping the choice secret only
    helps. `blocks` uses it, `uniform` with idle examples, where all examples of a batch are drawn together, and
    `uniform` with so little noise that its own bound is no better.
    """
    low = np.asarray(low)
    not_drawn = np.where(low > 0, gaussian_profile(epsilon, np.maximum(low, 1e-300)), 0.0)
    return np.asarray((1 - q) * not_drawn + q * gaussian_profile(epsilon, high))
