"""The accountant against closed forms, exact integrals and other accountants; its laws; what it assumes."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from delta_of_releases import delta
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from scipy import special, stats

from flower_privdec.common.errors import ScenarioError
from flower_privdec.privacy.accountant import accounting, gaussian_steps, loss_distributions
from flower_privdec.privacy.accountant.accounting import dp_accounting_epsilon, epsilon
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical, epoch_steps, event, plan_spends

ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL
ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
laws = settings(max_examples=20)


def poisson(q: float, noise: float, steps: int = 1) -> Release:
    return Release("poisson", q, 1000, max(1, round(1000 * q)), noise, steps)


def uniform(size: int, batch: int, noise: float, steps: int = 1) -> Release:
    return Release("uniform", batch / size, size, batch, noise, steps)


def full(noise: float, steps: int = 1) -> Release:
    return Release("full", 1.0, 100, 100, noise, steps)


def gaussian_delta(eps: float, mu: float) -> float:
    """δ of N(μ, 1) against N(0, 1) (Balle and Wang 2018), written from the paper."""
    return float(stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu))


def other_epsilon(event: dp_accounting.DpEvent, target: float, relation: NeighboringRelation, accountant=None):
    accountant = accountant or PLDAccountant(relation, 1e-3)
    accountant.compose(event)
    return accountant.get_epsilon(target)


# --- what dp-accounting 0.6 means by its neighbouring relations: everything here rests on it ---


@pytest.mark.parametrize(("relation", "sensitivity"), [(ADD_REMOVE, 1), (ZERO_OUT, 1), (REPLACE, 2)])
def test_pld_accountant_doubles_sensitivity_only_under_replace_one(relation, sensitivity):
    accountant = PLDAccountant(relation, 1e-4)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0))
    assert accountant.get_delta(1.0) == pytest.approx(gaussian_delta(1.0, sensitivity / 2.0), rel=1e-4)


@pytest.mark.parametrize("relation", [ADD_REMOVE, ZERO_OUT, REPLACE])
def test_rdp_accountant_doubles_no_sensitivity(relation):
    accountant = RdpAccountant(orders=[2, 8], neighboring_relation=relation)
    accountant.compose(dp_accounting.GaussianDpEvent(2.0))
    np.testing.assert_allclose(accountant.rdp, [2 / 8, 8 / 8])


@pytest.mark.slow
def test_pld_accountant_takes_zero_out_as_add_or_remove():
    step = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1))
    many = dp_accounting.SelfComposedDpEvent(step, 100)
    assert other_epsilon(many, 1e-5, ZERO_OUT) == other_epsilon(many, 1e-5, ADD_REMOVE)
    assert other_epsilon(many, 1e-5, REPLACE) > 1.3 * other_epsilon(many, 1e-5, ZERO_OUT)


def test_no_accountant_has_sampling_without_replacement_under_zero_out():
    step = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(1.0))
    assert not PLDAccountant(ZERO_OUT).supports(step)
    assert not RdpAccountant(neighboring_relation=ZERO_OUT).supports(step)
    assert RdpAccountant(neighboring_relation=REPLACE).supports(step)


# --- values from elsewhere ---


@pytest.mark.parametrize(("noise", "steps", "eps"), [(1.0, 1, 1.0), (5.0, 30, 0.5), (20.0, 4000, 3.0)])
def test_gaussian_closed_form(noise, steps, eps):
    exact = gaussian_delta(eps, math.sqrt(steps) / noise)
    assert delta([full(noise, steps)], eps) == pytest.approx(exact, rel=1e-9)
    assert epsilon([full(noise, steps)], exact) == pytest.approx(eps, rel=1e-6)


@pytest.mark.parametrize("mu", [1e-4, 0.0099, 0.0101, 0.3, 1.0, 5.0, 60.0, 1e4])
def test_plain_gaussians_cost_the_same_without_scipy(mu):
    """Against the solver for any step, which takes the Mills ratio from SciPy."""
    x = np.array([-5.0, -1e-9, 0.0, 3.0, 7.0, 11.999, 12.0, 26.0, 42.5])
    np.testing.assert_allclose([gaussian_steps._erfcx(float(each)) for each in x], special.erfcx(x), rtol=1e-14)

    one = np.ones((1, 1))
    step = loss_distributions.Steps("gaussian", one, 0 * one, mu * one, np.ones(1))
    for target in (1e-15, 1e-5, 0.2):
        if gaussian_steps.gaussian_delta(0.0, mu) > target:
            found = gaussian_steps.gaussian_epsilon(mu, target)
            assert found == pytest.approx(accounting._step_epsilon(step, target), rel=2e-12)
            assert gaussian_steps.gaussian_delta(found, mu) <= target


@pytest.mark.parametrize(("q", "noise"), [(0.01, 0.5), (0.2, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("eps", [0.01, 0.1, 1.0])
def test_one_poisson_step_is_the_exact_hockey_stick_divergence(q, noise, eps):
    x = np.linspace(-12 * noise, 12 * noise + 1, 400_001)
    without = stats.norm.pdf(x, 0, noise)
    with_it = (1 - q) * without + q * stats.norm.pdf(x, 1, noise)
    pairs = ((with_it, without), (without, with_it))
    exact = max(float(np.trapezoid(np.maximum(p - math.exp(eps) * o, 0), x)) for p, o in pairs)
    found = delta([poisson(q, noise)], eps)
    assert exact * (1 - 1e-6) - 1e-12 <= found <= exact * 1.02 + 1e-9


CASES = [  # and the interval of a grid fine enough for dp-accounting
    (64 / 3750, 1.0, 400, 1e-5, 1e-4),
    (0.25, 2.5, 100, 1e-3, 1e-4),
    (1 / 1200, 0.6, 2000, 1e-5, 1e-4),
    (0.1, 6.0, 5000, 1e-5, 5e-5),
    (1 / 3125, 5.0, 3120, 1e-6, 5e-7),
    (0.5, 20.0, 50, 1e-7, 1e-4),
    (1e-6, 0.5, 30_000, 1e-9, 1e-4),
]


@pytest.mark.parametrize(("q", "noise", "steps", "target", "interval"), CASES)
def test_agrees_with_googles_accountant_on_a_fine_grid(q, noise, steps, target, interval):
    release = poisson(q, noise, steps)
    fine = other_epsilon(event([release]), target, ZERO_OUT, PLDAccountant(ZERO_OUT, interval))
    assert epsilon([release], target) == pytest.approx(fine, rel=5e-4)


def test_the_distribution_of_one_step_is_googles():
    interval, q, mu = 2.0**-8, 0.05, 1.25
    (steps,) = loss_distributions.group_steps([poisson(q, 1 / mu)])
    ours = loss_distributions.step_losses(steps, interval, 9.0, -math.log1p(-q))
    epsilons = interval * np.arange(ours.lowest, ours.lowest + ours.mass.shape[1])
    above, below = loss_distributions.poisson_remove(epsilons, q, mu), loss_distributions.poisson_add(-epsilons, q, mu)
    values = np.where(epsilons >= 0, above, -np.expm1(epsilons) + np.exp(epsilons) * below)
    highest = ours.lowest + len(values) - 1
    theirs = create_pmf_pessimistic_connect_dots_fixed_gap(interval, ours.lowest, highest, values)
    assert theirs.size == len(values)
    np.testing.assert_allclose(ours.mass[0], theirs._probs, rtol=1e-6, atol=1e-14)


def test_different_mechanisms_together_agree_with_googles_accountant():
    releases = [poisson(0.02, 1.0, 100), full(30.0, 10), poisson(0.1, 3.0, 50), full(20.0, 5)]
    fine = other_epsilon(event(releases), 1e-5, ZERO_OUT, PLDAccountant(ZERO_OUT, 5e-5))
    assert epsilon(releases, 1e-5) == pytest.approx(fine, rel=5e-4)


RANDOM = np.random.default_rng(2026)
CONFIGURATIONS = [  # rate, noise, steps, δ
    (10 ** RANDOM.uniform(-3, -0.2), 10 ** RANDOM.uniform(-0.1, 1), int(10 ** RANDOM.uniform(1.5, 3.5)), 10.0**-digits)
    for digits in [3, 4, 5, 6, 7] * 4
]


@pytest.mark.parametrize(("q", "noise", "steps", "target"), CONFIGURATIONS)
def test_it_is_between_dp_accountings_bounds(q: float, noise: float, steps: int, target: float) -> None:
    """Twenty random configurations: above its lower bound, 0.05 % from its upper one, and below Rényi's."""
    release = poisson(q, noise, steps)
    found, upper = epsilon([release], target), dp_accounting_epsilon([((release,),)], target)
    options = {"pessimistic_estimate": False, "use_connect_dots": False, "sampling_prob": q}
    optimistic = from_gaussian_mechanism(
        noise, value_discretization_interval=2e-4 * min(max(found, 0.02), 1), **options
    )
    assert optimistic.self_compose(steps).get_epsilon_for_delta(target) <= found
    assert found == pytest.approx(upper, rel=5e-4)
    assert found <= other_epsilon(event([release]), target, ZERO_OUT, RdpAccountant(neighboring_relation=ZERO_OUT))


@pytest.mark.parametrize(("sampling", "idle"), [("uniform", 0.0), ("uniform", 0.1), ("blocks", 0.0), ("blocks", 0.1)])
def test_a_coarser_event_does_not_replace_ours(sampling, idle):
    release = Release(sampling, 0.1, 100, 10, 2.0, 20, idle)
    assert dp_accounting_epsilon([((release,),)], 1e-5) is None
    everything = replace(release, sampling_rate=1.0, batch_size=100, idle=0.0)
    assert dp_accounting_epsilon([((everything,),)], 1e-5) == pytest.approx(epsilon([everything], 1e-5), rel=1e-5)


@pytest.mark.slow
def test_agrees_with_opacus():
    """On the twenty random configurations: within 0.012 of PRV, whose error is 0.01, and below Rényi's."""
    accountants = pytest.importorskip("opacus.accountants")
    for q, noise, steps, target in CONFIGURATIONS:
        prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
        prv.history = rdp.history = [(noise, q, steps)]
        found = epsilon([poisson(q, noise, steps)], target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert found == pytest.approx(prv.get_epsilon(target, eps_error=0.01), abs=0.012)
            assert found <= rdp.get_epsilon(target) + 1e-9


# --- sampling without replacement: the bound that is ours ---


def exact_batches(others: np.ndarray, batch: int, z: float, noise: float, x: np.ndarray) -> np.ndarray:
    """Density of the noised sum over a uniform batch of `others` and one more example of gradient z."""
    sums: dict[tuple[int, float], float] = {(0, 0.0): 1.0}
    for value in others:
        for (count, total), ways in list(sums.items()):
            key = (count + 1, total + float(value))
            sums[key] = sums.get(key, 0.0) + ways
    ways_in = {total: ways for (count, total), ways in sums.items() if count == batch - 1}
    ways_out = {total: ways for (count, total), ways in sums.items() if count == batch}
    density = sum(w * stats.norm.pdf(x, t + z, noise) for t, w in ways_in.items())
    density = density + sum(w * stats.norm.pdf(x, t, noise) for t, w in ways_out.items())
    return density / math.comb(len(others) + 1, batch)


@pytest.mark.parametrize("noise", [0.3, 0.7, 2.0])
@pytest.mark.parametrize(("size", "batch"), [(2, 1), (4, 2), (6, 1), (6, 5)])
def test_uniform_bound_holds_always_and_is_sometimes_tight(size, batch, noise):
    x = np.linspace(-10 * noise - size, 10 * noise + size, 8001)
    eps = np.arange(101) * 2.0**-6
    ours = (
        f(eps, batch / size, 1 / noise) for f in (loss_distributions.uniform_remove, loss_distributions.poisson_remove)
    )
    bounds = [loss_distributions.convex_minorant(values, 2.0**-6) for values in ours]
    tightest = 0.0
    for ups in range(size):
        for downs in range(size - ups):
            others = np.array([1.0] * ups + [-1.0] * downs + [0.0] * (size - 1 - ups - downs))
            with_it = exact_batches(others, batch, 1.0, noise, x)
            without = exact_batches(others, batch, 0.0, noise, x)
            for bound, (p, o) in zip(bounds, ((with_it, without), (without, with_it)), strict=True):
                exact = np.trapezoid(np.maximum(p - np.exp(eps)[:, None] * o, 0), x, axis=1)
                assert np.all(exact <= bound + 1e-5)
                tightest = max(tightest, float(exact[0] / bound[0]))
    assert tightest > 0.99


def test_uniform_bound_holds_for_two_steps_together():
    noise, eps = 1.0, 0.8
    x = np.linspace(-9, 10, 1201)
    for others in ([-1.0], [1.0], [0.0]):
        p, o = (exact_batches(np.array(others), 1, z, noise, x) * (x[1] - x[0]) for z in (1.0, 0.0))
        for a, b in ((p, o), (o, p)):
            exact = np.maximum(np.outer(a, a) - math.exp(eps) * np.outer(b, b), 0).sum()
            assert exact <= delta([uniform(2, 1, noise, 2)], eps) + 1e-4


@pytest.mark.parametrize(
    ("size", "batch", "noise", "steps"),
    [
        (3750, 64, 1.0, 400),
        (3750, 64, 5.0, 400),
        (180, 45, 4.0, 100),
        (180, 90, 20.0, 100),
        (60, 48, 2.0, 50),
    ],
)
def test_uniform_is_between_poisson_and_every_other_known_bound(size, batch, noise, steps):
    found = epsilon([uniform(size, batch, noise, steps)], 1e-5)
    halved = dp_accounting.SampledWithoutReplacementDpEvent(size, batch, dp_accounting.GaussianDpEvent(noise / 2))
    many = dp_accounting.SelfComposedDpEvent(halved, steps)
    replace_one = other_epsilon(many, 1e-5, REPLACE, RdpAccountant(neighboring_relation=REPLACE))
    assert epsilon([poisson(batch / size, noise, steps)], 1e-5) < found < replace_one
    assert found <= epsilon([full(noise, steps)], 1e-5) * 1.001


def test_uniform_costs_about_as_poisson_and_is_monotone():
    noises = [0.011, 0.02, 0.05, 0.0624, 0.0625, 0.0626, 0.07, 0.1]
    found = [epsilon([uniform(1200, 1, noise, 2400)], 1e-5) for noise in noises]
    assert found == sorted(found, reverse=True)
    for noise, eps in zip(noises, found, strict=True):
        assert 1 < eps / epsilon([poisson(1 / 1200, noise, 2400)], 1e-5) < 1.2


def test_uniform_of_everything_is_full():
    assert epsilon([uniform(50, 50, 7.0, 20)], 1e-5) == epsilon([full(7.0, 20)], 1e-5)


# --- laws ---

noises, rates = st.floats(0.5, 30.0), st.floats(0.001, 0.9)


@laws
@given(rates, noises, st.integers(1, 500), st.floats(1.05, 3.0))
def test_epsilon_is_monotone_in_each_parameter(q, noise, steps, factor):
    base = epsilon([poisson(q, noise, steps)], 1e-5)
    slack = 1e-3 * base + 1e-5
    assert epsilon([poisson(q, noise, math.ceil(steps * factor))], 1e-5) >= base - slack
    assert epsilon([poisson(q, noise * factor, steps)], 1e-5) <= base + slack
    assert epsilon([poisson(min(1.0, q * factor), noise, steps)], 1e-5) >= base - slack
    assert epsilon([poisson(q, noise, steps)], 1e-5 * factor) <= base
    assert base <= epsilon([full(noise, steps)], 1e-5) * 1.001 + 1e-6


@pytest.mark.slow
@laws
@given(rates, noises, st.integers(1, 300), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_delta_is_the_inverse_of_epsilon(q, noise, steps, target):
    releases = [poisson(q, noise, steps)]
    if (eps := epsilon(releases, target)) > 0:
        assert delta(releases, eps) == pytest.approx(target, rel=0.01)


@laws
@given(st.lists(st.tuples(st.sampled_from([0.01, 0.1, 1.0]), st.integers(0, 50)), max_size=6), st.randoms())
def test_only_the_multiset_counts(parts, rng):
    releases = [poisson(q, 2.0, steps) for q, steps in parts]
    single = [r.times(1) for r in releases for _ in range(r.steps)]
    rng.shuffle(single)
    assert canonical(single) == canonical(releases)
    assert epsilon(single, 1e-5) == epsilon(releases, 1e-5)


def test_releases_with_unlike_idle_examples_are_two_mechanisms():
    plain, idle = poisson(0.1, 2.0, 5), replace(poisson(0.1, 2.0, 5), idle=0.25)
    assert canonical([idle, plain, idle]) == (plain, idle.times(10))
    assert epsilon([plain], 1e-5) < epsilon([idle], 1e-5) < epsilon([full(2.0, 5)], 1e-5)


@pytest.mark.parametrize("sampling", ["poisson", "uniform", "blocks"])
def test_epsilon_grows_with_movement_of_idle_examples(sampling):
    release = Release(sampling, 0.1, 1000, 100, 2.0, 40)
    found = [epsilon([replace(release, idle=idle)], 1e-5) for idle in (0.0, 1e-9, 0.01, 0.1, 0.5, 1.0)]
    assert all(less <= more * (1 + 1e-6) for less, more in itertools.pairwise(found))
    assert found[-1] == pytest.approx(epsilon([full(2.0, 40)], 1e-5), rel=0.01)
    if sampling != "uniform":  # whose bound without idle examples is another one
        assert found[1] == pytest.approx(found[0], rel=0.01)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilon([], 1e-5) == epsilon([poisson(0.1, 0.0, 0)], 1e-5) == delta([], 0.0) == 0.0
    assert epsilon([poisson(0.1, 0.0), full(3.0)], 1e-5) == math.inf
    assert delta([poisson(0.1, 0.0)], 3.0) == 1.0


# --- releases and the rounds they pay for ---


def test_release_survives_json_and_numpy():
    release = Release(
        "uniform", np.float64(0.1), np.int64(50), np.int32(5), np.float32(1.5), np.int64(7), np.float32(0.5)
    )
    again = Release.from_json(json.loads(json.dumps(release.to_json())))
    assert again == release
    assert again.accountant == release.accountant
    assert "zero-out PLD" in release.accountant
    assert Release("full", 1.0, 5, 5, 1.0, 1, accountant="another") == Release("full", 1.0, 5, 5, 1.0, 1)


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        ({"sampling": "weird"}, "catalogue.unknown", "sampling='weird'"),
        ({"sampling_rate": 0.0}, "release.range", "sampling_rate=0.0"),
        ({"sampling_rate": 1.5}, "release.range", "sampling_rate=1.5"),
        ({"dataset_size": 0}, "release.range", "dataset_size=0"),
        ({"batch_size": 0}, "release.range", "batch_size=0"),
        ({"noise_multiplier": -1.0}, "release.range", "noise_multiplier=-1.0"),
        ({"noise_multiplier": math.inf}, "release.range", "noise_multiplier=inf"),
        ({"noise_multiplier": math.nan}, "release.range", "noise_multiplier=nan"),
        ({"steps": -1}, "release.range", "steps=-1"),
        ({"steps": "3"}, "release.kind", "steps='3'"),
        ({"steps": True}, "release.kind", "steps=True"),
        ({"idle": -0.1}, "release.range", "idle=-0.1"),
        ({"idle": 1.1}, "release.range", "idle=1.1"),
        ({"idle": math.nan}, "release.range", "idle=nan"),
        ({"sampling": "full", "sampling_rate": 1.0, "idle": 0.1}, "release.idle", "idle=0.1 .*sampling=full"),
        ({"sampling": "shuffle", "idle": 0.1}, "release.idle", "idle=0.1 .*sampling=shuffle"),
        ({"sampling": "poisson-table"}, "catalogue.unknown", "sampling='poisson-table'"),
    ],
)
def test_a_release_that_is_none_is_refused(change, code, names):
    with raises(ScenarioError, code, names):
        Release.from_json(poisson(0.1, 1.0).to_json() | change)
    with raises(ScenarioError, "release.keys"):
        Release.from_json(poisson(0.1, 1.0).to_json() | {"extra": 1})
    with raises(ScenarioError, "release.keys"):
        Release.from_json({name: value for name, value in poisson(0.1, 1.0).to_json().items() if name != "idle"})


def test_uniform_refuses_a_rate_that_is_not_its_own():
    with raises(ScenarioError, "release.rate", "0.2 .*10/100"):
        Release("uniform", 0.2, 100, 10, 1.0)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, math.nan])
def test_delta_outside_its_range_is_refused(bad):
    with raises(ScenarioError, "privacy.delta", f"delta={bad}"):
        epsilon([full(1.0)], bad)


@laws
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.lists(st.sampled_from([1.0, 2.0]), min_size=40))
def test_spends_pay_for_exactly_the_active_rounds(active, noise):
    spends = plan_spends(poisson(0.1, 1.0), np.array(active), noise[: len(active)])
    paid = np.zeros(len(active), dtype=int)
    for spend in spends:
        paid[spend.from_step : spend.to_step] += 1
        assert {noise[k] for k in range(spend.from_step, spend.to_step)} == {spend.release.noise_multiplier}
    assert paid.tolist() == [int(a) for a in active]


def test_an_epoch_of_shuffle_is_one_gaussian_release():
    release = Release("shuffle", 0.1, 100, 10, 4.0)
    assert epoch_steps(100, 10) == 10
    assert epoch_steps(109, 10) == 10
    rounds = np.zeros(45, dtype=bool)
    rounds[[0, 3, 12, 40, 41]] = True
    spends = plan_spends(release, rounds)
    assert [(s.from_step, s.to_step, s.release.steps) for s in spends] == [
        (0, 10, 1),
        (10, 20, 1),
        (40, 45, 1),
    ]
    three = epsilon([s.release for s in spends], 1e-5)
    assert three == epsilon([full(4.0, 3)], 1e-5)
    noise = np.full(45, 4.0)
    noise[[3, 5]] = [2.0, 1.0]  # round 5 is idle: its noise is nobody's
    assert plan_spends(release, rounds, noise)[0].release.noise_multiplier == 2.0


def test_a_spend_is_cut_by_rounds_or_epochs():
    steps = Spend(10, 20, poisson(0.1, 1.0, 10))
    assert steps.between(15, 40) == Spend(15, 20, poisson(0.1, 1.0, 5))
    assert steps.between(0, 10) is None
    epoch = Spend(10, 20, Release("shuffle", 0.1, 100, 10, 1.0))
    assert epoch.between(19, 21) is epoch
    with raises(ScenarioError, "release.paid-steps", "0 to 10 .* 3"):
        Spend(0, 10, poisson(0.1, 1.0, 3))


def test_events_are_what_dp_accounting_would_call_them():
    composed = event([poisson(0.1, 1.0, 5), uniform(10, 2, 1.0), full(2.0), poisson(1.0, 3.0)])
    kinds = {type(e.event).__name__ for e in composed.events}
    assert kinds == {"PoissonSampledDpEvent", "SampledWithoutReplacementDpEvent", "GaussianDpEvent"}
    mixture = replace(poisson(0.1, 2.0, 3), idle=0.5).event().event
    assert type(mixture).__name__ == "MixtureOfGaussiansDpEvent"
    assert (list(mixture.sensitivities), list(mixture.sampling_probs)) == ([0.5, 1.0], [0.9, 0.1])
    shown = [Release("blocks", 0.5, 4, 2, 3.0), Release("uniform", 0.5, 4, 2, 3.0, 1, 0.5)]
    assert [release.event().event for release in shown] == [dp_accounting.GaussianDpEvent(3.0)] * 2
