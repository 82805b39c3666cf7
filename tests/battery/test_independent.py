"""The battery's own accountant, against closed forms and against dp-accounting."""

from __future__ import annotations

import math

import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from tools.battery.independent import bracket, counted


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the ε of a Gaussian that an example moves by mu standard deviations."""

    def excess(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    return brentq(excess, 0, 50 * mu + mu**2)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_gaussians_lie_between_the_bounds(mu: float, steps: int) -> None:
    low, high = bracket(counted([(1.0, mu, 0.0)] * steps), 1e-4)
    exact = gaussian_epsilon(mu * math.sqrt(steps), 1e-4)
    assert low <= exact <= high
    assert high - low <= 0.01 * exact + 1e-3


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.3, 1.5, 4), (0.06, 0.8, 8), (0.5, 5.0, 6)])
def test_sampled_steps_lie_between_the_bounds(rate: float, noise: float, steps: int) -> None:
    low, high = bracket(counted([(rate, 1 / noise, 0.0)] * steps), 1e-4)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 1e-3)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    other = accountant.get_epsilon(1e-4)
    assert low <= other * 1.002
    assert other * 0.998 <= high
    assert high - low <= 0.02 * other


def test_movement_by_an_undrawn_example_costs() -> None:
    without, half, drawn_always = (
        bracket(counted([(rate, 0.7, idle)] * 4), 1e-4) for rate, idle in ((0.3, 0.0), (0.3, 0.35), (1.0, 0.0))
    )
    assert without[1] < half[0] < half[1] < drawn_always[0]


def test_steps_without_noise_and_no_steps() -> None:
    assert bracket(counted([(0.5, math.inf, 0.0)]), 1e-3) == (math.inf, math.inf)
    assert bracket(counted([]), 1e-3) == (0.0, 0.0)
