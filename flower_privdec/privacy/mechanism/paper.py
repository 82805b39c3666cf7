"""The papers' own noise formulas, for comparison: their ε is a claim, and the accountant's stands beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from flower_privdec.common.errors import ScenarioError


def moments_sigma(
    epsilon: float,
    delta: float,
    rounds: int,
    dataset_size: int,
    c_2: float,
    *,
    factor: float = 3.0,
    clip_norm: float = 1.0,
) -> float:
    """Return σ = factor c_2 G sqrt(K log(1/δ)) / (J ε), the noise std on the averaged gradient.

    Args:
        factor: 3 for a gradient with a table, whose norm is at most 3 G; 1 for a plain one (Abadi et al. 2016).

    Source: PrivSGP-VR (Zhu et al.), Theorem 2, eq. 11.
    """
    return factor * c_2 * clip_norm * math.sqrt(rounds * math.log(1 / delta)) / (dataset_size * epsilon)


def cross_gradient_sigma(epsilon: float, delta: float, phi_min: float, weight_factor: float) -> float:
    """Return σ / C = 2 factor sqrt(2 ln(1.25/δ)) / (φ̂_min ε), σ the noise std on a cross-gradient, for one round.

    Args:
        phi_min: φ̂_min, the smallest share of any weight in any round; eq. 19 makes it 0.
        weight_factor: the largest of (1/ω_min + Σ_j 1/ω_ij) / sqrt(Σ_j 1/ω_ij²) over the peers i.

    Source: PDSL (Wang et al.), Theorem 1, eq. 27.
    """
    return 2 * weight_factor * math.sqrt(2 * math.log(1.25 / delta)) / (phi_min * epsilon)


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return δ = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2). Source: Dyn-D2P, Proposition 2, eq. 4."""
    upper = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    lower = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    return float(-math.exp(upper) * math.expm1(lower - upper))


def gdp_mu(epsilon: float, delta: float) -> float:
    """Return μ_tot of a budget: the solution of eq. 4."""

    def excess(log_mu: float) -> float:
        return math.log(max(gdp_delta(math.exp(log_mu), epsilon), 1e-300)) - math.log(delta)

    return math.exp(_crossing(excess))


def _crossing(rising: Callable[[float], float]) -> float:
    """Return where a rising function crosses 0."""
    low = -1.0
    high = 1.0
    while rising(low) > 0:
        high = low
        low = 2 * low
    while rising(high) < 0:
        low = high
        high = 2 * high
    return float(scipy.optimize.brentq(rising, low, high, xtol=1e-14, rtol=1e-14))


def gdp_mu_0(mu_total: float, rate: float, growth: np.ndarray) -> float:
    """Return μ_0 with μ_tot² = p² Σ_k (exp(μ_0² growth_k) - 1), over the rounds k in which the peer is active.

    Args:
        mu_total: μ_tot.
        rate: p, 1/J for one example a step.
        growth: (μ_k / μ_0)², ρ_μ^{2k/K} in eq. 8; ones give μ̄ of eq. 9. [active rounds]

    Source: Dyn-D2P (Zhu et al.), Proposition 3 with eq. 7: eq. 8, and eq. 9.
    """
    goal = 2 * math.log(mu_total / rate)

    def excess(log_square: float) -> float:
        x = math.exp(log_square) * growth
        return float(scipy.special.logsumexp(x + np.log(-np.expm1(-x)))) - goal  # log Σ (e^x - 1), of any size

    return math.exp(_crossing(excess) / 2)


def proposition_4(mu_total: float, rate: float, noise_shape: np.ndarray) -> float:
    """Return σ̃ = (p / μ_tot) sqrt(2 Σ_k (C_k / σ̃_k)²), the scale of a general schedule.

    Args:
        noise_shape: σ̃_k / C_k, [rounds].

    Raises:
        ScenarioError: some μ_k = C_k / (σ̃ σ̃_k) > 1, for which its proof (e^x - 1 <= 2 x) does not hold.

    Source: Dyn-D2P (Zhu et al.), Proposition 4, eq. 10.
    """
    scale = rate / mu_total * math.sqrt(2 * float((noise_shape**-2.0).sum()))
    largest = float((1 / (scale * noise_shape)).max())
    if largest > 1:
        raise ScenarioError(
            f"privacy.calibration=paper: Proposition 4 needs every μ_k <= 1 and the largest here is {largest:.4g}; "
            "lower privacy.epsilon, take more rounds, or use calibration rigorous",
            code="paper.proposition-4",
        )
    return scale


def subsampled_sigma(
    epsilon: float, delta: float, *, rounds: int, dataset_size: int, share: float, clip_norm: float = 1.0
) -> float:
    """Return σ = ι L sqrt(32 T log(2/δ0)) / (q ε), the noise std on the averaged gradient.

    The paper draws one example a step. A batch of b makes its sensitivity 2 L b times smaller and its rate b times
    larger, which leaves σ as it is.

    Args:
        delta: δ0. What the theorem promises at is another δ, see `docs/epsilon.md`.
        rounds: T, including those in which the peer is not active.
        dataset_size: q.
        share: ι.
        clip_norm: L.

    Source: DP-DDA (Liu et al.), Theorem 1.
    """
    return share * clip_norm * math.sqrt(32 * rounds * math.log(2 / delta)) / (dataset_size * epsilon)


@dataclass(frozen=True)
class Breach:
    """A condition of a formula that does not hold.

    Attributes:
        condition: the condition.
        given: what there is instead.
        least: what the condition comes to, if that follows from how many examples a peer has; else empty. A plan shows
            it to those who have the data, and nothing that leaves a peer does.
    """

    condition: str
    given: str
    least: str = ""

    def text(self, *, with_least: bool) -> str:
        """Return it in words."""
        least = f" = {self.least}" if with_least and self.least else ""
        return f"{self.condition}{least}, not {self.given}"


def subsampling_breach(epsilon: float, *, rounds: int, dataset_size: int, batch: float, share: float) -> Breach | None:
    """Say which condition of the theorem does not hold: ε <= 1, and T >= 5 q² ε² / (4 ι²); None if both do.

    By the second a step's own ε² is at most 0.2. With b examples a step it is that of q / b.

    Source: DP-DDA (Liu et al.), Theorem 1, and eq. 16.
    """
    least = 5 * (dataset_size / batch * epsilon / share) ** 2 / 4
    if epsilon > 1:
        return Breach("Theorem 1 of DP-DDA needs ε <= 1", f"{epsilon:g}")
    if rounds < least:
        return Breach("Theorem 1 of DP-DDA needs T >= 5 q² ε² / (4 ι²)", f"{rounds:,} rounds", f"{least:,.0f}")
    return None


def epsilon_after(epsilon: float, share: float) -> float:
    """Return ε̂(t) = sqrt(3 t / (5 T)) ε + t ε² / (5 T), at the share t / T of the rounds.

    Source: DP-DDA (Liu et al.), eq. 7.
    """
    return math.sqrt(3 * share / 5) * epsilon + share * epsilon**2 / 5


def optimal_rounds(
    *,
    smoothness: float,
    gradient_bound: float,
    initial_gap: float,
    heterogeneity: float,
    initial_norm_squared: float,
    dataset_size: float,
    dimension: float,
    c_2: float,
    epsilons: np.ndarray,
    deltas: np.ndarray,
) -> float:
    """Return K* = (13 F0 + 6 L |x0|² + 18 L b²) J² n / (216 L d c_2² G² Σ_i log(1/δ_i) / ε_i²).

    Args:
        smoothness: L.
        gradient_bound: G.
        initial_gap: F0 = f(x0) - f*.
        heterogeneity: b².
        initial_norm_squared: |x0|².
        dataset_size: J.
        dimension: d.
        c_2: the constant of eq. 11.
        epsilons, deltas: budgets of the n peers.

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    error = 13 * initial_gap + 6 * smoothness * initial_norm_squared + 18 * smoothness * heterogeneity
    privacy = float((np.log(1 / deltas) / epsilons**2).sum())
    noise = 216 * smoothness * dimension * c_2**2 * gradient_bound**2 * privacy
    return error * dataset_size**2 * len(epsilons) / noise
