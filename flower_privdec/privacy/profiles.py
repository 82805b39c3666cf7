"""Privacy profiles of one release: δ(ε) of its worst neighbours, for every way of drawing the batch.

    δ(ε) = sup over neighbours of ∫ [p(x) - e^ε q(x)]_+ dx

Every neighbouring pair is looked at in both directions: P with the example and Q without it (`remove`), and the
reverse (`add`). The noise has standard deviation 1, so sensitivities are given over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

Profile = Callable[[np.ndarray], np.ndarray]

TAIL = float(-special.ndtri(0.5 * math.exp(-50)))  # std's of a Gaussian beyond which its mass is let go


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


def sampled_epsilon(epsilon: float, q: float) -> float:
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
    both also at most q δ_1(log α'), what they were if z's being drawn were public (by joint convexity, as
    D_α'(A | A) = 0); α' < 1 follows from D_α(P|Q) = 1 - α + α D_{1/α}(Q|P). Each bound is the same function at
    every step whatever happened before, so it composes.  ∎
    """

    def remove_up(epsilon: np.ndarray) -> np.ndarray:
        inner = _unsampled(epsilon, q)
        beta = np.exp(epsilon - inner)
        mixed = (1 - beta) * gaussian_profile(inner, 2 * mu) + beta * gaussian_profile(inner, mu)
        return np.asarray(q * np.minimum(mixed, gaussian_profile(epsilon, mu)))

    def add_up(epsilon: np.ndarray) -> np.ndarray:
        return np.asarray(q * gaussian_profile(_unsampled(epsilon, q), mu))

    return _mirrored(remove_up, add_up), _mirrored(add_up, remove_up)


def _mirrored(forward: Profile, backward: Profile) -> Profile:
    """Return the profile that is `forward` for ε >= 0 and 1 - e^ε + e^ε backward(-ε) below."""

    def profile(epsilon: np.ndarray) -> np.ndarray:
        below = np.minimum(epsilon, 0.0)
        mirrored = -np.expm1(below) + np.exp(below) * backward(np.abs(epsilon))
        return np.where(epsilon >= 0, forward(np.abs(epsilon)), mirrored)

    return profile


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
    helps. `blocks` uses it, `uniform` with idle examples, where all examples of a batch are drawn together, and
    `uniform` with so little noise that its own bound is no better.
    """

    def profile(epsilon: np.ndarray) -> np.ndarray:
        not_drawn = gaussian_profile(epsilon, low) if low > 0 else -np.expm1(np.minimum(epsilon, 0.0))
        return np.asarray((1 - q) * not_drawn + q * gaussian_profile(epsilon, high))

    return profile
