"""ε of Gaussians of full sums, in closed form and without SciPy.

Many Gaussian steps are one, N(μ, 1) against N(0, 1) (`loss_distributions.gaussian_mu`), and its δ(ε) needs only the
Mills ratio. A process of a deployed peer answers one message, and importing SciPy's functions takes longer than that.
`loss_distributions.gaussian_profile` is the same function for arrays, with which a test compares this one.
"""

from __future__ import annotations

import math

FAR = 60.0  # std's of a Gaussian beyond which its mass is 0 in double precision
NARROW = 0.01  # a Taylor series is used for sensitivities below
SERIES_FROM = 12.0  # where the series of e^(x²) erfc(x) ends within double precision
HEAD = 2.0**20  # a number rounded to this fraction has a square without rounding, if it is below 64
RESOLVED = 1e-12  # of ε: how close it is bracketed


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least ε, rounded up, at which δ(ε) between N(μ, 1) and N(0, 1) is at most δ.

    Args:
        mu: μ > 0, finite.
        delta: δ in (0, 1), below δ(0).
    """
    # The loss exceeds μ²/2 + μ z with the chance of a normal above z, which is at most e^(-z²/2) / 2.
    low = 0.0
    high = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    while high - low > RESOLVED * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if gaussian_delta(middle, mu) <= delta:
            high = middle
        else:
            low = middle
    return high


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return δ(ε) between N(μ, 1) and N(0, 1), for ε >= 0 (Balle and Wang 2018).

    With a = ε/μ - μ/2 and the Mills ratio m(x) = Φ(-x) / φ(x), Φ(-a) - e^ε Φ(-a - μ) = φ(a) [m(a) - m(a + μ)].
    """
    middle = epsilon / mu
    low = min(max(middle - mu / 2, -FAR), FAR)
    density = math.exp(-low * low / 2) / math.sqrt(2 * math.pi)

    # The difference of two nearly equal Mills ratios would lose its digits.
    if mu < NARROW:
        return max(density * _narrow(min(middle, FAR), mu), 0.0)

    upper = math.erfc(low / math.sqrt(2)) / 2
    if low > 0:
        upper = density * _mills(low)
    return max(upper - density * _mills(low + mu), 0.0)


def _mills(x: float) -> float:
    return math.sqrt(math.pi / 2) * _erfcx(x / math.sqrt(2))


def _narrow(x: float, mu: float) -> float:
    """Return m(x - μ/2) - m(x + μ/2) for small μ: -μ m'(x) - μ³/24 m'''(x), with m' = x m - 1."""
    m = _mills(x)
    square = x * x
    return mu * (1 - x * m) + mu**3 / 24 * (2 + square - x * (3 + square) * m)


def _erfcx(x: float) -> float:
    """Return e^(x²) erfc(x), for x above -26."""
    if x < SERIES_FROM:
        # The head's square is exact, so that rounding x² costs no digits of the exponential.
        head = math.trunc(x * HEAD) / HEAD
        return math.exp(head * head) * math.exp((x - head) * (x + head)) * math.erfc(x)

    # 1 / (x √π) Σ_k (-1)^k (2k - 1)!! / (2 x²)^k
    term = 1.0
    total = 1.0
    for factor in range(1, 22, 2):
        term *= -factor / (2 * x * x)
        total += term
    return total / (x * math.sqrt(math.pi))
