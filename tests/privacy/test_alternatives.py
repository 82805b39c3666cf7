"""Several runs over the same data: never below what any choice of a peer in each of them costs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.accountant import accounting
from flower_privdec.privacy.accountant.accounting import epsilon, epsilon_of_runs
from flower_privdec.privacy.mechanism.events import Release, canonical

DELTA = 1e-5
releases = st.builds(
    lambda sampling, rate, noise, steps: (Release(sampling, rate, 1000, max(1, int(1000 * rate)), noise, steps),),
    st.sampled_from(["poisson", "blocks", "full"]),
    st.sampled_from([0.01, 0.05, 0.2]),
    st.floats(3.0, 30.0),
    st.integers(1, 300),
).map(lambda each: canonical(each))
runs = st.lists(st.lists(releases, min_size=1, max_size=3).map(lambda each: tuple(dict.fromkeys(each))), max_size=3)


def dearest(several: list[accounting.Alternatives]) -> float:
    choices = itertools.product(*several)
    return max((epsilon(itertools.chain(*choice), DELTA) for choice in choices), default=0.0)


@settings(max_examples=30)
@given(runs)
def test_an_example_is_charged_what_the_dearest_peers_paid(several):
    assert epsilon_of_runs(several, DELTA) == pytest.approx(dearest(several), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=30)
@given(runs.filter(bool))
def test_a_bound_on_many_choices_is_close(several):
    kept, accounting.MOST_CHOICES = accounting.MOST_CHOICES, 0
    try:
        bound = epsilon_of_runs(several, DELTA)
    finally:
        accounting.MOST_CHOICES = kept
    exact = dearest(several)
    assert exact <= bound <= 1.35 * exact + 0.02


def test_a_thousand_choices_are_bounded_and_more_cost_more():
    run = tuple(canonical([Release("poisson", q / 1000, 1000, q, 0.05 * q + 2, 500)]) for q in range(10, 42))
    two, three = epsilon_of_runs([run] * 2, DELTA), epsilon_of_runs([run] * 3, DELTA)
    assert max(epsilon([*each, *each], DELTA) for each in run) <= two < three < math.inf


def test_releases_without_noise_are_infinite_for_every_peer():
    run = tuple(canonical([Release("poisson", 0.01, 1000, 10, noise, 50)]) for noise in (0.0, *range(2, 20)))
    assert epsilon_of_runs([run, run], DELTA) == math.inf
    assert epsilon_of_runs([], DELTA) == 0


def test_a_delta_outside_its_range_is_refused():
    with raises(ScenarioError, "privacy.delta", r"delta=2\.0"):
        epsilon_of_runs([], 2.0)
