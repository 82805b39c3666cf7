"""What an ε lets a test find at most: against closed forms, other accountants and the limits."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paths import ROOT
from raising import raises
from scipy.optimize import brentq
from scipy.stats import binom, norm

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.readings import (
    group_epsilon,
    log_group_factor,
    of_group,
    points_of,
    right_guesses,
    true_positive_rate,
)
from flower_privdec.privacy.mechanism.events import Release

PAGE = ROOT / "docs" / "data-protection.md"
RATES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.9, 1.0)
FULL = Release("full", 1.0, 100, 100, 5.0, 30)
POISSON = Release("poisson", 0.25, 180, 45, 1.4333, 20)

epsilons = st.floats(0, 1000) | st.just(math.inf)
deltas = st.floats(0, 1.5)
rates = st.floats(0, 1)


@given(epsilons, deltas, rates)
@example(0.0, 0.0, 0.0)
@example(math.inf, 0.0, 0.0)
@example(800.0, 1e-300, 5e-324)
@settings(max_examples=200)
def test_bounds_are_chances_and_no_less_than_guessing(epsilon: float, delta: float, rate: float) -> None:
    found_at_most = true_positive_rate([(epsilon, delta)], rate)
    assert rate <= found_at_most <= 1
    right = right_guesses([(epsilon, delta)])
    assert 0.5 <= right <= 1
    # A test with this false positive rate is right (1 + TPR - FPR) / 2 of the time: the other bound covers it.
    assert (1 + found_at_most - rate) / 2 <= right + 1e-12


@pytest.mark.parametrize(("epsilon", "right"), [(0.1, 0.52498), (1, 0.73106), (3, 0.95257), (8, 0.99966), (54, 1.0)])
def test_right_guesses_of_usual_budgets(epsilon: float, right: float) -> None:
    assert right_guesses([(epsilon, 0.0)]) == pytest.approx(right, abs=1e-5)


def test_no_privacy_loss_leaves_guessing_and_infinity_leaves_nothing() -> None:
    assert right_guesses([(0.0, 0.0)]) == 0.5
    assert right_guesses([(0.0, 0.2)]) == pytest.approx(0.6)
    for nothing in ((math.inf, 1e-5), (1.0, 1.0), (1.0, 2.0)):
        assert right_guesses([nothing]) == 1
        assert [true_positive_rate([nothing], rate) for rate in RATES] == [1.0] * len(RATES)
    assert right_guesses([]) == 1
    assert true_positive_rate([], 0.1) == 1
    assert [true_positive_rate([(0.0, 0.0)], rate) for rate in RATES] == pytest.approx(RATES)


@pytest.mark.parametrize("point", [(math.nan, 0.1), (-1.0, 0.1), (1.0, math.nan), (1.0, -0.1)])
def test_a_wrong_guarantee_is_refused(point: tuple[float, float]) -> None:
    with raises(ScenarioError, "reading.point"):
        right_guesses([point])
    with raises(ScenarioError, "reading.point"):
        true_positive_rate([point], 0.1)


def test_a_rate_outside_of_0_to_1_is_refused() -> None:
    for rate in (-0.1, 1.1, math.nan):
        with raises(ScenarioError, "reading.rate"):
            true_positive_rate([(1.0, 0.0)], rate)


def test_a_gaussians_bounds_are_its_trade_off_curve() -> None:
    """The best test of a Gaussian is known (Neyman and Pearson): Φ(Φ⁻¹(α) + μ) at a false positive rate α."""
    mu = math.sqrt(FULL.steps) / FULL.noise_multiplier
    points = points_of(partial(epsilon, [FULL]))
    for rate in (0.001, 0.01, 0.05, 0.25, 0.5, 0.9):
        best = norm.cdf(norm.ppf(rate) + mu)
        assert best <= true_positive_rate(points, rate) <= best + 0.01
    assert norm.cdf(mu / 2) <= right_guesses(points) <= norm.cdf(mu / 2) + 0.005


def test_sampled_steps_agree_with_another_accountants_profile() -> None:
    noise, steps = POISSON.noise_multiplier, POISSON.steps
    other = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=POISSON.sampling_rate, value_discretization_interval=1e-3
    ).self_compose(steps)
    grid = np.linspace(0, 8, 400)
    theirs = list(zip(grid.tolist(), other.get_delta_for_epsilon(grid.tolist()), strict=True))
    ours = points_of(partial(epsilon, [POISSON]))
    for rate in (0.001, 0.01, 0.05, 0.25, 0.5):
        assert true_positive_rate(ours, rate) == pytest.approx(true_positive_rate(theirs, rate), abs=0.01)
    assert right_guesses(ours) == pytest.approx(right_guesses(theirs), abs=0.003)


def test_no_test_of_one_sampled_step_does_better() -> None:
    """A threshold on the release, in both directions: with the example against without it."""
    release = Release("poisson", 0.3, 100, 30, 0.8)
    points = points_of(partial(epsilon, [release]))
    thresholds = np.linspace(-6, 8, 200)
    without = norm.sf(thresholds / 0.8)
    with_it = 0.7 * without + 0.3 * norm.sf((thresholds - 1) / 0.8)
    for finds, errs in ((with_it, without), (1 - without, 1 - with_it)):
        assert all(
            found <= true_positive_rate(points, min(1.0, float(rate))) + 1e-9
            for found, rate in zip(finds, errs, strict=True)
        )


@pytest.mark.parametrize("line", re.findall(r"^\| (\d.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
def test_figures_of_the_page_for_officers(line: str) -> None:
    """By ε and δ only, and of many noised steps, which are as one Gaussian."""
    budget, *figures = (float(text.removesuffix(" %")) for text in line.split(" | "))
    pair = (budget, 1e-5)
    sigma = brentq(lambda noise: epsilon([Release("full", 1.0, 100, 100, noise)], 1e-5) - budget, 0.02, 200)
    points = points_of(partial(epsilon, [Release("full", 1.0, 100, 100, sigma)]))
    exact = [
        f(one)
        for one in ([pair], points)
        for f in (right_guesses, partial(true_positive_rate, false_positive_rate=0.05))
    ]
    assert figures == [math.ceil(1000 * chance - 1e-9) / 10 for chance in exact]


# --- several examples ---


def test_a_group_costs_no_less_than_its_mixture() -> None:
    """With k examples drawn each by itself, a sum moves by as many as are drawn (Ganesh 2024, arXiv:2401.10294)."""
    for examples, most in ((2, 1.1), (5, 1.35)):
        chances = [float(binom.pmf(j, examples, POISSON.sampling_rate)) for j in range(examples + 1)]
        exact = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            POISSON.noise_multiplier, list(range(examples + 1)), chances, value_discretization_interval=1e-2
        ).self_compose(POISSON.steps)
        least = exact.get_epsilon_for_delta(1e-3)
        ours = epsilon(of_group([POISSON], examples) or (), 1e-3)
        assert least * 0.99 <= ours <= most * least
        assert ours <= group_epsilon(partial(epsilon, [POISSON]), 1e-3, examples)


def test_a_group_of_full_batches_is_exact() -> None:
    for sampling in ("full", "shuffle"):
        release = Release(sampling, 1.0 if sampling == "full" else 0.1, 100, 100 if sampling == "full" else 10, 5.0, 30)
        alone = Release("full", 1.0, 100, 100, 5.0 / 3, 30)
        assert epsilon(of_group([release], 3) or (), 1e-5) == pytest.approx(epsilon([alone], 1e-5), rel=1e-9)


def test_a_group_drawn_together_has_the_general_bound_only() -> None:
    uniform = Release("uniform", 0.25, 180, 45, 3.0, 5)
    assert of_group([uniform], 2) is None
    assert of_group([uniform], 1) == (uniform,)
    at = partial(epsilon, [uniform])
    assert group_epsilon(at, 1e-5, 1) == at(1e-5)
    assert 2 * at(1e-5) < group_epsilon(at, 1e-5, 2) < math.inf
    assert group_epsilon(lambda delta: math.inf, 1e-5, 2) == math.inf


@given(st.floats(0, 700), st.integers(1, 50))
@settings(max_examples=50)
def test_delta_of_a_group_grows_by_a_geometric_sum(epsilon: float, examples: int) -> None:
    logs = [epsilon * j for j in range(examples)]
    assert log_group_factor(epsilon, examples) == pytest.approx(float(np.logaddexp.reduce(logs)), abs=1e-9)


def test_a_group_of_none_is_refused() -> None:
    with raises(ScenarioError, "reading.examples"):
        of_group([POISSON], 0)
