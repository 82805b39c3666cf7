"""The papers' own noise formulas, for comparison. Their ε is only a claim; reports print the accountant's beside it.

Four papers have a formula here, chosen by the algorithm (`paper_noise`) if a scenario sets `calibration: paper`:

- PrivSGP-VR: `moments_sigma`, and `optimal_rounds`, which minimizes its error bound;
- PDSL: `cross_gradient_sigma`;
- Dyn-D2P, by Gaussian DP: `gdp_mu` turns a budget into μ_tot, `gdp_mu_0` and `proposition_4` turn that into noise;
- DP-DDA: `subsampled_sigma`, its conditions (`subsampling_breach`), and ε on the way (`epsilon_after`).

Names follow this package, and each docstring maps them to the paper's symbols.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.common.errors import ScenarioError

SMALLEST_DELTA = 1e-300  # keeps the logarithm of a δ that underflows finite


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
        epsilon, delta: the peer's budget.
        rounds: K.
        dataset_size: J, the number of the peer's examples.
        c_2: the paper's constant, which it leaves open.
        factor: the largest gradient norm over G: 3 with a table of past gradients, 1 without (Abadi et al. 2016).
        clip_norm: G.

    Source: PrivSGP-VR (Zhu et al.), Theorem 2, eq. 11.
    """
    return factor * c_2 * clip_norm * math.sqrt(rounds * math.log(1 / delta)) / (dataset_size * epsilon)


def cross_gradient_sigma(epsilon: float, delta: float, phi_min: float, weight_factor: float) -> float:
    """Return σ / C = 2 factor sqrt(2 ln(1.25/δ)) / (φ̂_min ε), for the noise std σ on a cross-gradient.

    The budget is that of a single round: the paper does not compose rounds.

    Args:
        epsilon, delta: the budget of one round.
        phi_min: φ̂_min, the smallest share of any weight in any round. The paper assumes it > 0, though its own eq. 19
            makes it 0, so users give it.
        weight_factor: the largest of (1/ω_min + Σ_j 1/ω_ij) / sqrt(Σ_j 1/ω_ij²) over the peers i.

    Source: PDSL (Wang et al.), Theorem 1, eq. 27.
    """
    return 2 * weight_factor * math.sqrt(2 * math.log(1.25 / delta)) / (phi_min * epsilon)


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return the δ at ε of μ-Gaussian DP: δ = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2).

    Source: Dyn-D2P (Zhu et al.), Proposition 2, eq. 4.
    """
    # In logs, because both terms underflow and nearly cancel for a small δ: δ = e^upper (1 - e^(lower - upper)).
    upper = scipy.special.log_ndtr(-epsilon / mu + mu / 2)
    lower = epsilon + scipy.special.log_ndtr(-epsilon / mu - mu / 2)
    return float(-math.exp(upper) * math.expm1(lower - upper))


def gdp_mu(epsilon: float, delta: float) -> float:
    """Return μ_tot, the μ at which a budget (ε, δ) is spent: the solution of `gdp_delta` for μ."""

    def excess(log_mu: float) -> float:
        found = gdp_delta(math.exp(log_mu), epsilon)
        return math.log(max(found, SMALLEST_DELTA)) - math.log(delta)

    return math.exp(_crossing(excess))


def _crossing(rising: Callable[[float], float]) -> float:
    """Return the zero of an increasing function."""
    # Brent's method needs a bracket around the zero: double one end until it has passed it.
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
    """Return the μ_0 that solves μ_tot² = p² Σ_k (exp(μ_0² growth_k) - 1), over the rounds k in which a peer is active.

    Args:
        mu_total: μ_tot.
        rate: p, 1/J for one example a step.
        growth: (μ_k / μ_0)² of each active round k: ρ_μ^{2k/K} in eq. 8; all ones give μ̄ of eq. 9. [active rounds]

    Source: Dyn-D2P (Zhu et al.), eq. 8 and 9 (Proposition 3 with eq. 7).
    """
    log_target = 2 * math.log(mu_total / rate)

    def excess(log_mu_0_squared: float) -> float:
        x = math.exp(log_mu_0_squared) * growth

        # log Σ (e^x - 1) with e^x - 1 = e^x (1 - e^-x): neither a large nor a small x loses its digits.
        log_sum = scipy.special.logsumexp(x + np.log(-np.expm1(-x)))
        return float(log_sum) - log_target

    return math.exp(_crossing(excess) / 2)


def proposition_4(mu_total: float, rate: float, noise_shape: np.ndarray) -> float:
    """Return σ̃ = (p / μ_tot) sqrt(2 Σ_k (C_k / σ̃_k)²), by which a given noise schedule σ̃_k must be multiplied.

    Args:
        mu_total: μ_tot.
        rate: p.
        noise_shape: σ̃_k / C_k, [rounds].

    Raises:
        ScenarioError: some μ_k = C_k / (σ̃ σ̃_k) is larger than 1. The proof uses e^x - 1 <= 2 x for x = μ_k², which then
            may not hold.

    Source: Dyn-D2P (Zhu et al.), Proposition 4, eq. 10.
    """
    scale = rate / mu_total * math.sqrt(2 * float((noise_shape**-2.0).sum()))
    largest = float((1 / (scale * noise_shape)).max())
    if largest > 1:
        raise ScenarioError(
            f"privacy.calibration=paper: Proposition 4 needs every μ_k <= 1, but the largest is {largest:.4g}; "
            "lower privacy.epsilon, use more rounds, or set privacy.calibration=rigorous",
            code="paper.proposition-4",
        )
    return scale


def subsampled_sigma(
    epsilon: float, delta: float, *, rounds: int, dataset_size: int, share: float, clip_norm: float = 1.0
) -> float:
    """Return σ = ι L sqrt(32 T log(2/δ0)) / (q ε), the noise std on the averaged gradient.

    The paper draws one example a step. With a batch of b, the sensitivity 2 L of the mean is b times smaller and the
    sampling rate is b times larger, so σ stays the same.

    Args:
        delta: δ0. The theorem's guarantee holds at a different δ, see `docs/epsilon.md`.
        rounds: T, including those in which the peer is not active.
        dataset_size: q, the number of examples (not a rate, as elsewhere).
        share: ι, the chance that a peer is active in a round.
        clip_norm: L.

    Source: DP-DDA (Liu et al.), Theorem 1.
    """
    return share * clip_norm * math.sqrt(32 * rounds * math.log(2 / delta)) / (dataset_size * epsilon)


@dataclass(frozen=True)
class Breach:
    """A condition of a paper's formula that a scenario does not meet.

    Attributes:
        condition: the condition in the paper's symbols.
        given: the scenario's value, which breaks it.
        least: the smallest value that would meet it, if that reveals how many examples the peer has; else empty.

    Privacy: `least` may be shown only to those who have the peer's data. Nothing that leaves a peer contains it.
    """

    condition: str
    given: str
    least: str = ""

    def text(self, *, with_least: bool) -> str:
        """Return the breach as part of a sentence."""
        least = f" = {self.least}" if with_least and self.least else ""
        return f"{self.condition}{least}, not {self.given}"


def subsampling_breach(epsilon: float, *, rounds: int, dataset_size: int, batch: float, share: float) -> Breach | None:
    """Return the first of the theorem's two conditions that is not met; None if both are.

    They are ε <= 1 and T >= 5 q² ε² / (4 ι²). The latter keeps ε² of a single step at 0.2 or below. With b examples a
    step, q / b takes the place of q.

    Source: DP-DDA (Liu et al.), Theorem 1, and eq. 16.
    """
    least_rounds = 5 * (dataset_size / batch * epsilon / share) ** 2 / 4
    if epsilon > 1:
        return Breach("Theorem 1 of DP-DDA needs ε <= 1", f"{epsilon:g}")
    if rounds < least_rounds:
        condition = "Theorem 1 of DP-DDA needs T >= 5 q² ε² / (4 ι²)"
        return Breach(condition, f"{rounds:,} rounds", f"{least_rounds:,.0f}")
    return None


def epsilon_after(epsilon: float, share: float) -> float:
    """Return ε̂(t) = sqrt(3 t / (5 T)) ε + t ε² / (5 T), the claimed ε after t of T rounds.

    Args:
        epsilon: ε after all rounds.
        share: t / T, in [0, 1].

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

    More rounds lower the optimization error, but each then needs more noise; K* balances the two.

    Args:
        smoothness: L, the Lipschitz constant of the gradients.
        gradient_bound: G, the largest norm of an example's gradient.
        initial_gap: F0 = f(x0) - f*.
        heterogeneity: b², how far the peers' gradients are from their mean.
        initial_norm_squared: |x0|².
        dataset_size: J, the number of examples of a peer.
        dimension: d, the number of parameters.
        c_2: the constant of eq. 11, see `moments_sigma`.
        epsilons, deltas: the budgets of the n peers, [n].

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    optimization = 13 * initial_gap + 6 * smoothness * initial_norm_squared + 18 * smoothness * heterogeneity
    strictness = float((np.log(1 / deltas) / epsilons**2).sum())
    noise = 216 * smoothness * dimension * c_2**2 * gradient_bound**2 * strictness
    return optimization * dataset_size**2 * len(epsilons) / noise
