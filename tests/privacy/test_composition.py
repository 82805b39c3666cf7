"""The numbers under the accountant: profiles to 50 digits, compositions against contour integrals, and extremes."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from delta_of_releases import delta
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from exact_accounting import exact_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.accountant import accounting, composition, loss_distributions
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.composition import composed_epsilon
from flower_privdec.privacy.accountant.loss_distributions import Steps, group_steps
from flower_privdec.privacy.mechanism.events import Release, canonical

laws = settings(max_examples=25)
HALF_A_PERCENT = 1.005


def poisson(q: float, noise: float, steps: int = 1, idle: float = 0.0) -> Release:
    return Release("poisson", q, 1000, 100, noise, steps, idle)


def full(noise: float, steps: int = 1) -> Release:
    return Release("full", 1.0, 100, 100, noise, steps)


def fresh_epsilon(releases: list[Release], target: float) -> float:
    """ε, past the cache."""
    return accounting._epsilon.__wrapped__(canonical(releases), target)


# --- profiles, to 50 digits ---


def exact_profile(chances: list[float], moves: list[float], x: float, add: bool) -> tuple[float, mp.mpf]:
    """The loss at x of a mixture of Gaussians against N(0, 1), and ∫ [P - e^ε Q]_+ where it ends there."""
    with mp.workdps(50):
        p, s = [mp.mpf(c) for c in chances], [mp.mpf(m) for m in moves]
        p[0] = 1 - p[1] if len(p) == 2 else p[0]

        def loss(at):
            return mp.log(mp.fsum(c * mp.exp(m * at - m * m / 2) for c, m in zip(p, s, strict=True)))

        eps = mp.mpf(float(loss(mp.mpf(x))))  # as the code is told it; so x moves a little
        end = mp.findroot(lambda at: loss(at) - eps, x)
        if add:
            inside = mp.fsum(c * mp.ncdf(end - m) for c, m in zip(p, s, strict=True))
            return -float(eps), mp.ncdf(end) - mp.exp(-eps) * inside
        inside = mp.fsum(c * mp.ncdf(m - end) for c, m in zip(p, s, strict=True))
        return float(eps), inside - mp.exp(eps) * mp.ncdf(-end)


@laws
@given(st.floats(-8, 2.5), st.floats(-4, 30))
def test_the_gaussian_profile_keeps_its_digits(log_mu, x):
    mu = 10.0**log_mu
    eps, exact = exact_profile([1.0], [mu], x + mu, add=False)
    assert float(loss_distributions.gaussian_profile(np.array([eps]), mu)[0]) == pytest.approx(float(exact), rel=1e-8)


@laws
@given(st.floats(-12, -0.1), st.floats(-4, 1), st.floats(-4, 6), st.sampled_from([0.0, 1e-6, 0.1, 1.0]))
def test_sampled_profiles_keep_their_digits(log_q, log_mu, x, idle):
    q, mu = 10.0**log_q, 10.0**log_mu
    with mp.workdps(50):
        there = (1 - q) * mp.exp(idle * mu * x - (idle * mu) ** 2 / 2) + q * mp.exp(mu * x - mu * mu / 2)
    add = bool(there < 1)
    eps, exact = exact_profile([1 - q, q], [idle * mu, mu], x, add)
    if idle == 0:
        found = (loss_distributions.poisson_add if add else loss_distributions.poisson_remove)(np.array([eps]), q, mu)
    else:
        found = (loss_distributions.mixture_add if add else loss_distributions.mixture_remove)(
            np.array([eps]), q, idle * mu, mu
        )
    assert float(found[0]) == pytest.approx(float(exact), rel=1e-6)


# --- compositions, against contour integrals ---

mechanisms = st.builds(  # drawn 30 to 500 times, for the transform to fall off
    lambda log_q, log_noise, idle, draws: (10.0**log_q, 10.0**log_noise, idle, math.ceil(draws / 10.0**log_q)),
    st.floats(-4, -0.1),
    st.floats(-0.3, 1.2),
    st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    st.floats(30, 500),
)


def assert_close_above(found: float, exact: float) -> None:
    assert exact * (1 - 1e-9) <= found <= exact * HALF_A_PERCENT


@pytest.mark.slow
@settings(max_examples=12)
@given(mechanisms, st.floats(-9, -3))
def test_one_mechanism_composed_is_tight_from_above(mechanism, log_delta):
    q, noise, idle, steps = mechanism
    found = epsilon([poisson(q, noise, steps, idle)], 10.0**log_delta)
    if found > 0:
        assert_close_above(found, exact_epsilon([mechanism], 10.0**log_delta, found))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(mechanisms, min_size=2, max_size=4), st.floats(-9, -3))
def test_different_mechanisms_composed_are_tight_from_above(several, log_delta):
    found = epsilon([poisson(q, noise, steps, idle) for q, noise, idle, steps in several], 10.0**log_delta)
    if found > 0:
        assert_close_above(found, exact_epsilon(several, 10.0**log_delta, found))


@pytest.mark.parametrize(
    ("q", "noise", "steps", "target"),
    [(1e-5, 1.0, 10**6, 1e-5), (1e-4, 0.7, 10**6, 1e-7), (1e-3, 0.5, 10**5, 1e-9), (1e-4, 0.5, 30_000, 1e-5)],
)
def test_rare_sampling_composed_is_tight_from_above(q, noise, steps, target):
    found = epsilon([poisson(q, noise, steps)], target)
    assert_close_above(found, exact_epsilon([(q, noise, 0.0, steps)], target, found))


@pytest.mark.parametrize(("q", "noise", "ratio", "target"), [(0.5, 8.0, 4.0, 1e-5), (0.9, 40.0, 3.0, 1e-8)])
def test_a_schedule_of_distinct_noise_is_tight_from_above(q, noise, ratio, target):
    noises = [noise * ratio ** (-k / 20) for k in range(20)]
    found = epsilon([poisson(q, s, 3) for s in noises], target)
    assert_close_above(found, exact_epsilon([(q, s, 0.0, 3) for s in noises], target, found))


@pytest.mark.slow
def test_thousands_of_distinct_noises_each_cost_their_own():
    noises = 4.0 ** (1 - np.arange(1500) / 1500)
    found = epsilon([poisson(0.01, s) for s in noises], 1e-5)
    by_threes = noises.reshape(500, 3)
    less, more = (epsilon([poisson(0.01, s, 3) for s in row], 1e-5) for row in (by_threes.max(1), by_threes.min(1)))
    assert less < found < more < less * HALF_A_PERCENT


@pytest.mark.parametrize("target", [0.3, 1e-3, 1e-9, 1e-30, 1e-120, 1e-290])
@pytest.mark.parametrize(("mu", "steps"), [(0.01, 400), (0.3, 50), (4.0, 3), (300.0, 7)])
def test_gaussians_over_a_grid_keep_digits_at_every_delta(mu, steps, target):
    one = np.ones((1, 1))
    found = composed_epsilon([Steps("gaussian", one, 0 * one, mu * one, np.array([float(steps)]))], target)
    exact = epsilon([full(1 / (mu * math.sqrt(steps)))], target)
    if exact == 0:
        assert found <= 1e-4 * mu
    else:
        assert_close_above(found, exact)


@laws
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1, 2, 17, 1000]))
def test_a_convolution_is_the_sums_distribution(seed, length, count):
    rng = np.random.default_rng(seed)
    rows = rng.random((3, length)) ** 8
    rows /= rows.sum(axis=1, keepdims=True)
    start, weights, slack = composition.convolve(rows, np.array([1.0, float(count), 2.0]))
    exact = np.ones(1)
    for row, times in zip(rows, (1, count, 2), strict=True):
        for _ in range(times):
            exact = np.convolve(exact, row)
    placed = np.zeros(len(exact) + len(weights))
    placed[start : start + len(weights)] = weights[: len(placed) - start]
    assert slack < 1e-10
    np.testing.assert_allclose(placed[: len(exact)], exact, atol=slack)


@pytest.mark.parametrize("fade", [0.0, 5e-324, 1e-300, 0.3, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_faded_sums_are_added_one_after_the_other(size, fade):
    rng = np.random.default_rng(size)
    values = (rng.random(size) * 10.0 ** rng.uniform(-320, 300, size))[::-1]
    exact = list(itertools.accumulate(values.tolist(), lambda before, value: value + fade * before))
    np.testing.assert_allclose(composition._faded_sums(values, fade), exact, rtol=1e-13)


def test_more_steps_than_a_window_get_their_own_bound(monkeypatch):
    releases = [poisson(0.05, 2.0, 4000)]
    exact = fresh_epsilon(releases, 1e-6)
    monkeypatch.setattr(composition, "MOST_POINTS", 8)
    assert exact <= fresh_epsilon(releases, 1e-6) <= 1.2 * exact


# --- small rates: what once took minutes and gigabytes ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "noise"),
    [(1e-2, 0.3), (1e-4, 2.0), (1e-6, 0.3), (1e-8, 10.0)],
)
def test_rare_sampling_is_between_its_bounds(q, noise):
    one = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    one.compose(poisson(q, noise).event())
    for target in (1e-3, 1e-9):
        found = [epsilon([poisson(q, noise, steps)], target) for steps in (1, 100, 30_000, 10**6)]
        assert all(fewer <= more * (1 + 1e-3) for fewer, more in itertools.pairwise(found))
        for eps, steps in zip(found, (1, 100, 30_000, 10**6), strict=True):
            assert eps <= epsilon([full(noise, steps)], target)
            renyi, _ = compute_epsilon(one.orders, steps * one.rdp, target)
            assert eps <= renyi * (1 + 1e-9)


def test_less_of_it_than_delta_costs_nothing():
    assert epsilon([poisson(1e-8, 0.3, 100)], 1e-5) == 0
    assert epsilon([poisson(1e-310, 0.3, 10**12)], 1e-5) == 0
    assert epsilon([full(1e300, 10**12)], 1e-5) == 0
    assert epsilon([poisson(1e-8, 0.3, 10**4)], 1e-5) > 0


# --- many distinct releases ---


def test_too_many_mechanisms_are_rounded_to_costlier_ones(monkeypatch):
    schedule = [poisson(0.01, 1.5 * 4 ** (-k / 200), 2, k % 2 * 0.01) for k in range(200)]
    exact = fresh_epsilon(schedule, 1e-5)
    monkeypatch.setattr(loss_distributions, "MOST_DISTINCT", 20)
    (steps,) = [group for group in group_steps(schedule) if group.kind == "mixture"]
    assert len(steps.counts) <= 20
    assert steps.counts.sum() == 200
    assert exact < fresh_epsilon(schedule, 1e-5) < 1.5 * exact


def test_rounding_raises_every_parameter_and_keeps_the_counts():
    rng = np.random.default_rng(5)
    rows = np.column_stack([rng.uniform(0.1, 0.2, 9000), rng.uniform(0, 0.1, 9000), rng.uniform(1, 2, 9000)])
    rows = np.column_stack([rows, np.ones(9000)])
    binned = loss_distributions._binned(rows, any_rate=True)
    assert len(binned) <= loss_distributions.MOST_DISTINCT
    assert binned[:, 3].sum() == 9000
    for row in rows[::500]:
        costlier = np.all(binned[:, :3] >= row[:3], axis=1) & np.all(binned[:, :3] <= row[:3] * 2 + 1e-300, axis=1)
        assert costlier.any()


def test_rates_of_uniform_sampling_are_not_rounded(monkeypatch):
    monkeypatch.setattr(loss_distributions, "MOST_DISTINCT", 20)
    schedule = [Release("uniform", b / 1000, 1000, b, 1.5 * 2 ** (-k / 60)) for b in (10, 20) for k in range(60)]
    groups = group_steps(schedule)
    assert {group.kind for group in groups} == {"uniform"}
    assert {float(q) for group in groups for q in group.q[:, 0]} == {0.01, 0.02}
    assert sum(len(group.counts) for group in groups) <= 20
    rates = [Release("uniform", b / 1000, 1000, b, 1.5) for b in range(1, 30)]
    assert {group.kind for group in group_steps(rates)} == {"shown"}
    assert epsilon(rates, 1e-5) > 0


def test_the_last_bit_of_a_noise_multiplier_decides_nothing():
    noise = 1.1
    steps = [poisson(0.02, noise := float(np.nextafter(noise, 2.0))) for _ in range(300)]
    assert len(canonical(steps)) == 300
    assert epsilon(steps, 1e-6) == pytest.approx(epsilon([poisson(0.02, 1.1, 300)], 1e-6), rel=1e-6)


# --- extremes ---

NOISES = [5e-324, 1e-300, 1e-160, 1e-4, 1e-3, 0.011, 0.125, 0.3, 1.0, 1e3, 1e10, 1e149, 1e155, 1e300]
RATES = [5e-324, 1e-310, 1e-200, 1e-20, 1e-8, 0.3, 1 - 1e-10, 1 - 2.0**-53, 1.0]
DELTAS = [1e-300, 1e-200, 1e-30, 1e-5, 0.5, 1 - 2.0**-53]
releases = st.builds(
    Release,
    st.sampled_from(["poisson", "blocks"]),
    st.sampled_from(RATES),
    st.just(1000),
    st.just(10),
    st.sampled_from(NOISES),
    st.sampled_from([0, 1, 2, 100, 10**6, 10**9]),
    st.sampled_from([0.0, 5e-324, 1e-20, 1e-3, 1 - 2.0**-53, 1.0]),
)
plain = st.builds(full, st.sampled_from(NOISES), st.sampled_from([1, 10**9]))
uniform = st.builds(
    lambda batch, noise, steps: Release("uniform", batch / 1000, 1000, batch, noise, steps),
    st.sampled_from([1, 481, 999, 1000]),
    st.sampled_from(NOISES),
    st.sampled_from([1, 3, 10**6]),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.one_of(releases, plain, uniform), min_size=1, max_size=3), st.sampled_from(DELTAS))
def test_extremes_are_answered_quietly_and_not_below_their_parts(several, target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epsilon(several, target)
        parts = [epsilon([part], target) for part in several]
    assert found >= max(parts) * (1 - 1e-3)
    assert all(part >= 0 for part in parts)


@pytest.mark.parametrize("target", [1e-301, 5e-324])
def test_a_delta_beyond_numbers_is_refused(target):
    with raises(ScenarioError, "privacy.delta", "1e-300"):
        epsilon([full(1.0)], target)


def test_more_steps_than_can_be_counted_are_refused():
    with raises(ScenarioError, "release.range", "steps=1000000000001"):
        poisson(0.1, 1.0, 10**12 + 1)


def test_little_noise_beside_much_is_composed_well():
    releases = [full(0.009), replace(poisson(1e-6, 1.0), steps=10**6)]
    assert epsilon([full(0.009)], 1e-5) <= epsilon(releases, 1e-5) <= epsilon([full(0.009)], 1e-5) * 1.01


def test_delta_is_found_at_any_epsilon():
    releases = [poisson(0.01, 1.0, 500)]
    found = [delta(releases, eps) for eps in (0.0, 0.1, 1.0, 5.0, 40.0, 2000.0)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == accounting.LEAST_DELTA
    for eps, one in zip((0.1, 1.0, 5.0, 40.0), found[1:-1], strict=True):
        assert epsilon(releases, one) <= eps * (1 + 1e-12)
        assert epsilon(releases, one * 0.9) > eps


def test_no_grid_fills_the_memory(monkeypatch):
    sizes = []
    original = composition.step_losses

    def counted(*arguments, **options):
        found = original(*arguments, **options)
        sizes.append(found.mass.size)
        return found

    monkeypatch.setattr(composition, "step_losses", counted)
    fresh_epsilon([poisson(1e-6, 0.5, 30_000)], 1e-5)
    fresh_epsilon([poisson(1e-8, 0.3, 30_000), full(0.01)], 1e-5)
    assert max(sizes) <= composition.MOST_ELEMENTS
