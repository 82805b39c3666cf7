"""The papers' formulas against 40-digit arithmetic, and what their ε are worth by the exact accountant."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment.spent import Spent, privacy_rows
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.events import Release, event
from flower_privdec.reporting.console import plan_text

BUDGETS = [(0.05, 1e-8), (0.3, 1e-4), (0.7, 1e-4), (1.0, 1e-5), (3.0, 1e-5), (12.0, 1e-6)]
RESNET18 = {
    "smoothness": 25.0,
    "gradient_bound": 10.0,
    "initial_gap": 2.8,
    "heterogeneity": 500_000.0,
    "initial_norm_squared": 780_000.0,
    "dataset_size": 3125,
    "dimension": 11_173_962,
    "c_2": 0.3724,
}


@pytest.fixture(autouse=True)
def forty_digits():
    with mp.workdps(40):
        yield


def delta_of_mu(mu, eps):
    """Eq. 4 of Dyn-D2P."""
    return mp.ncdf(-eps / mu + mu / 2) - mp.exp(eps) * mp.ncdf(-eps / mu - mu / 2)


def mu_of_budget(eps, delta):
    return bisected(lambda mu: delta_of_mu(mu, mp.mpf(eps)) - mp.mpf(delta), mp.mpf("1e-4"), mp.mpf(100))


def bisected(rising, low, high):
    """Return where a function that grows crosses 0."""
    for _ in range(110):
        middle = mp.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return low


@pytest.mark.parametrize(("eps", "delta"), BUDGETS)
def test_eq_4_mu_of_a_budget(eps, delta):
    assert paper.gdp_mu(eps, delta) == pytest.approx(float(mu_of_budget(eps, delta)), rel=1e-8)


@pytest.mark.parametrize("eps", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("mu", [0.05, 0.5, 3.0])
def test_eq_4_keeps_its_digits_in_the_tail(mu, eps):
    assert paper.gdp_delta(mu, eps) == pytest.approx(float(delta_of_mu(mp.mpf(mu), mp.mpf(eps))), rel=1e-8, abs=1e-290)


@pytest.mark.parametrize("rho_mu", [1.0, 1.5, 4.0])
@pytest.mark.parametrize(("total", "size", "rounds"), [(0.3, 2500, 60), (0.05, 60, 200), (2.0, 3125, 7)])
def test_eq_8_mu_0_of_a_growing_budget(total, size, rounds, rho_mu):
    growth = [mp.mpf(rho_mu) ** (mp.mpf(2 * k) / rounds) for k in range(rounds)]
    goal = (size * mp.mpf(total)) ** 2
    with mp.workdps(25):
        expected = bisected(lambda mu_0: sum(mp.expm1(mu_0**2 * g) for g in growth) - goal, mp.mpf("1e-6"), mp.mpf(20))
    assert paper.gdp_mu_0(total, 1 / size, rho_mu ** (2 * np.arange(rounds) / rounds)) == pytest.approx(
        float(expected), rel=1e-8
    )


@pytest.mark.parametrize(("eps", "delta"), BUDGETS)
def test_eq_9_equals_eq_8_at_rho_1(eps, delta):
    total, size, rounds = mu_of_budget(eps, delta), 2500, 2000
    expected = mp.sqrt(mp.log((size * total) ** 2 / rounds + 1))
    assert paper.gdp_mu_0(float(total), 1 / size, np.ones(rounds)) == pytest.approx(float(expected), rel=1e-8)


def test_eq_10_scale_of_a_general_schedule():
    clip, noise, total, size = np.linspace(2, 1, 40), np.linspace(3, 1.4, 40), 0.031, 250
    squares = sum((mp.mpf(c) / mp.mpf(s)) ** 2 for c, s in zip(clip, noise, strict=True))
    expected = mp.sqrt(2 * squares) / (size * mp.mpf(total))
    assert paper.proposition_4(total, 1 / size, noise / clip) == pytest.approx(float(expected), rel=1e-8)


def test_proposition_4_refuses_mu_k_above_1():
    shape = np.ones(100)
    largest = 250 * 0.1 / math.sqrt(2 * 100)  # μ_k = J μ_tot / sqrt(2 K) of a constant schedule
    assert largest > 1
    with raises(ScenarioError, "paper.proposition-4", r"1\.768"):
        paper.proposition_4(0.1, 1 / 250, shape)
    scale = paper.proposition_4(0.1, 1 / 125, shape)
    assert 1 / scale == pytest.approx(largest / 2)
    few = np.append(np.ones(99), 0.4)  # one round of little noise is enough
    with raises(ScenarioError, "paper.proposition-4"):
        paper.proposition_4(0.1, 1 / 125, few)


@pytest.mark.parametrize(("eps", "delta"), BUDGETS)
def test_eq_11_sigma(eps, delta):
    rounds, size, clip, c_2 = 3120, 3125, 10.0, 0.3724
    expected = 3 * mp.mpf(c_2) * clip * mp.sqrt(rounds * mp.log(1 / mp.mpf(delta))) / (size * mp.mpf(eps))
    found = paper.moments_sigma(eps, delta, rounds=rounds, dataset_size=size, clip_norm=clip, c_2=c_2)
    assert found == pytest.approx(float(expected), rel=1e-8)


def optimal_rounds(epsilons, deltas):
    return paper.optimal_rounds(**RESNET18, epsilons=np.array(epsilons), deltas=np.array(deltas))


def test_eq_12_optimal_rounds():
    c = {key: mp.mpf(value) for key, value in RESNET18.items()}
    epsilons, deltas = [0.5, 1.0, 3.0], [1e-5, 1e-4, 1e-6]
    top = 13 * c["initial_gap"] + 6 * c["smoothness"] * c["initial_norm_squared"]
    top += 18 * c["smoothness"] * c["heterogeneity"]
    budget = sum(mp.log(1 / mp.mpf(delta)) / mp.mpf(eps) ** 2 for eps, delta in zip(epsilons, deltas, strict=True))
    below = 216 * c["smoothness"] * c["dimension"] * c["c_2"] ** 2 * c["gradient_bound"] ** 2 * budget
    expected = top * c["dataset_size"] ** 2 * 3 / below
    assert optimal_rounds(epsilons, deltas) == pytest.approx(float(expected), rel=1e-8)


def test_optimal_rounds_of_the_papers_resnet18_are_3120():
    assert round(optimal_rounds([3.0] * 16, [1e-5] * 16)) == 3120
    assert optimal_rounds([6.0] * 16, [1e-5] * 16) == pytest.approx(4 * optimal_rounds([3.0] * 16, [1e-5] * 16))


@pytest.mark.parametrize(("eps", "delta"), [(0.05, 1e-8), (0.3, 1e-4), (1.0, 0.01)])
@pytest.mark.parametrize(("share", "batch"), [(0.1, 1), (1.0, 1), (0.2, 10)])
def test_theorem_1_of_dp_dda(eps, delta, share, batch):
    size, clip = 100, 2.0
    least = 5 * (mp.mpf(size) / batch) ** 2 * mp.mpf(eps) ** 2 / (4 * mp.mpf(share) ** 2)
    rounds = math.ceil(least)
    square = 32 * mp.mpf(share) ** 2 * clip**2 * rounds * mp.log(2 / mp.mpf(delta)) / (size * mp.mpf(eps)) ** 2
    sigma = paper.subsampled_sigma(eps, delta, rounds=rounds, dataset_size=size, share=share, clip_norm=clip)
    assert sigma == pytest.approx(float(mp.sqrt(square)), rel=1e-8)
    step = 2 * clip / batch * math.sqrt(2 * math.log(2 / delta)) / sigma  # the ε of a step, eq. 16
    assert step**2 == pytest.approx(0.2 * float(least) / rounds, rel=1e-6)
    facts = {"dataset_size": size, "batch": batch, "share": share}
    assert paper.subsampling_breach(eps, rounds=rounds, **facts) is None
    assert "5 q² ε² / (4 ι²)" in paper.subsampling_breach(eps, rounds=rounds - 1, **facts).condition
    above = paper.subsampling_breach(1.5, rounds=10**9, **facts)
    assert above.text(with_least=True) == "Theorem 1 of DP-DDA needs ε <= 1, not 1.5"


def test_eq_7_of_dp_dda():
    assert paper.epsilon_after(0.8, 1.0) == pytest.approx(math.sqrt(0.6) * 0.8 + 0.64 / 5)
    assert paper.epsilon_after(1.0, 0.25) == pytest.approx(math.sqrt(0.15) + 0.05)


# --- in a scenario: the run's noise is the formula's, and the two ε stand side by side ---


def paper_mode(build, *settings):
    return build("privacy.calibration=paper", "privacy.paper.c_2=0.3724", "data.batch.size=1", *settings)


@pytest.mark.parametrize(("name", "factor"), [("privsgp-vr", 3), ("privsgp", 1)])
def test_paper_noise_of_privsgp_is_eq_11(build, name, factor):
    experiment = paper_mode(build, f"algorithm={{name: {name}, learning_rate: 0.1}}", "privacy.epsilon=[1,2,3,4]")
    expected = [factor * 0.3724 * math.sqrt(6 * math.log(1e3)) / (60 * eps) for eps in (1, 2, 3, 4)]
    np.testing.assert_allclose(experiment.own.protection.noise_multiplier(5), expected, rtol=1e-12)


def test_paper_noise_of_dyn_d2p_is_eq_8(build):
    experiment = paper_mode(build, "algorithm={name: dyn-d2p, learning_rate: 0.1, rho_c: 2.0, rho_mu: 3.0}")
    total = paper.gdp_mu(3.0, 1e-3)
    mu_0 = paper.gdp_mu_0(total, 1 / 60, 3.0 ** (np.arange(6) / 3))
    found = [experiment.own.protection.noise_multiplier(k)[0] for k in range(6)]
    np.testing.assert_allclose(found, [3 ** (-k / 6) / mu_0 for k in range(6)], rtol=1e-12)
    claim = experiment.own.protection.claims[0]
    assert (claim.epsilon, claim.mu_total, claim.mu_0) == (3.0, total, mu_0)


def test_paper_noise_of_dyn_d2p_counts_active_rounds(build):
    some = "participation={kind: uniform, fraction: 0.5}"
    experiment = paper_mode(build, "algorithm={name: dyn-d2p, learning_rate: 0.1, rho_mu: 3.0}", some)
    total, found = paper.gdp_mu(3.0, 1e-3), set()
    for peer in range(4):
        active = np.flatnonzero([experiment.participation.active(k)[peer] for k in range(6)])
        mu_0 = paper.gdp_mu_0(total, 1 / 60, 3.0 ** (2 * active / 6))
        assert experiment.own.protection.claims[peer].mu_0 == pytest.approx(mu_0, rel=1e-12)
        spent = (1 / 60) ** 2 * np.expm1(mu_0**2 * 3.0 ** (2 * active / 6)).sum()
        assert math.sqrt(spent) == pytest.approx(total, rel=1e-9)
        found.add(round(mu_0, 9))
    assert len(found) > 1


def test_no_paper_claims_an_epsilon_for_other_algorithms(build):
    for name in ("feddeper", "fedavg", "d-psgd", "local", "sgp"):
        graph = ["topology.name=ring"] if name == "d-psgd" else []
        with raises(ScenarioError, "privacy.no-formula", f" {name}:"):
            paper_mode(build, f"algorithm={{name: {name}, learning_rate: 0.1}}", *graph)


def test_paper_noise_of_dp_dda_is_theorem_1(build):
    dda = "algorithm={name: dp-dda, regularizer: {kind: l2, weight: 0.01}}"
    some = ["participation={kind: edges, count: 2}", "topology={name: complete}", "rounds=600"]
    experiment = paper_mode(build, dda, *some, "privacy.epsilon=[0.1,0.2,0.2,0.05]", "privacy.clip_norm=3")
    iota = 1 - 3 / 15  # a peer has 3 of the 6 edges: none of the two is its own with chance C(3, 2) / C(6, 2)
    noise = experiment.own.protection.noise_multiplier(5)
    squares = [32 * iota**2 * 600 * math.log(2e3) / (60 * eps) ** 2 for eps in (0.1, 0.2, 0.2, 0.05)]
    np.testing.assert_allclose(noise**2, squares, rtol=1e-12)
    claims = experiment.own.protection.claims
    assert [claim.epsilon for claim in claims] == [0.1, 0.2, 0.2, 0.05]
    assert claims[0].quarters == tuple(paper.epsilon_after(0.1, t) for t in (0.25, 0.5, 0.75, 1))
    rows = privacy_rows(experiment.scenario, Spent.of(experiment.cohort(), 600), experiment.participation, 600)
    assert [row["expected_rounds"] for row in rows] == [480.0] * 4
    assert all(abs(row["rounds_run"] - 480) < 60 for row in rows)
    assert [claim.breach for claim in claims] == [None] * 4
    assert all(row["epsilon"] < row["claimed_epsilon"] for row in rows)  # it holds, where its condition does
    with raises(ScenarioError, "privacy.no-formula", "dp-dda with a schedule"):
        paper_mode(build, dda, *some, "privacy.epsilon=0.1", "privacy.schedule={rho_c: 2}")


def test_paper_noise_of_a_given_schedule_is_proposition_4(build):
    lists = "privacy.schedule={clip_norms: [2.0, 1.5, 1.0, 1.0, 0.5, 0.5], noise: [3.0, 2.0, 2.0, 1.0, 1.0, 1.0]}"
    experiment = paper_mode(build, lists, "privacy.epsilon=0.01")
    clip, noise = np.array([2, 1.5, 1, 1, 0.5, 0.5]), np.array([3, 2, 2, 1, 1, 1.0])
    scale = paper.proposition_4(paper.gdp_mu(0.01, 1e-3), 1 / 60, noise / clip)
    found = [
        experiment.own.protection.noise_multiplier(k)[0] * experiment.own.protection.clip_norm(k)[0] for k in range(6)
    ]
    np.testing.assert_allclose(found, scale * noise, rtol=1e-12)
    with raises(ScenarioError, "paper.proposition-4"):
        paper_mode(build, lists, "privacy.epsilon=30")


@pytest.mark.parametrize("name", ["const-d2p", "privsgp-vr"])
def test_claimed_and_exact_epsilon_stand_side_by_side(build, name):
    experiment = paper_mode(build, f"algorithm={{name: {name}, learning_rate: 0.1}}", "privacy.epsilon=[1,2,3,4]")
    rows = privacy_rows(experiment.scenario, Spent.of(experiment.cohort(), 6), experiment.participation, 6)
    assert [row["claimed_epsilon"] for row in rows] == [1, 2, 3, 4]
    assert {row["calibration"] for row in rows} == {"paper"}
    for row, account in zip(rows, experiment.own.protection.accounts, strict=True):
        assert row["epsilon"] == epsilon([spend.release for spend in account.spends], 1e-3)
        assert row["epsilon"] > 1.1 * row["claimed_epsilon"]
        assert account.budget is None  # a claim stops no run: it is not what is spent
    rigorous = build("algorithm={name: privsgp-vr, learning_rate: 0.1}")
    rows = privacy_rows(rigorous.scenario, Spent.of(rigorous.cohort(), 6), rigorous.participation, 6)
    assert {row["claimed_epsilon"] for row in rows} == {None}


@pytest.mark.parametrize(("budget", "delta"), [(1e6, 1e-3), (1e-7, 1e-9)])
def test_extreme_budgets_have_a_mu_and_a_mu_0(budget, delta):
    mu = paper.gdp_mu(budget, delta)
    assert paper.gdp_delta(mu, budget) == pytest.approx(delta, rel=1e-6)
    for total in (mu, 1e150):
        mu_0 = paper.gdp_mu_0(total, 1e-3, np.ones(10))  # 10 (e^x - 1) = (1000 μ_tot)², x = μ_0²
        assert math.log(10) + mu_0**2 + math.log(-math.expm1(-(mu_0**2))) == pytest.approx(2 * math.log(1e3 * total))


def test_a_broken_condition_of_dp_dda_is_named(build, tmp_path):
    dda = "algorithm={name: dp-dda, regularizer: {kind: l2, weight: 0.01}}"
    some = ["participation={kind: edges, count: 1}", "topology={name: complete}", "rounds=20"]
    experiment = paper_mode(build, dda, *some, "privacy.epsilon=0.9", "privacy.clip_norm=3")
    plan = make_plan(experiment)
    said = "Theorem 1 of DP-DDA needs T >= 5 q² ε² / (4 ι²) = 14,580, not 20 rounds"
    assert sum(said in warning for warning in plan["warnings"]) == 1
    assert plan["peers"][0]["claimed_after_quarters"] == pytest.approx(
        [paper.epsilon_after(0.9, k / 4) for k in (1, 2, 3, 4)]
    )
    assert sum(row["active_rounds"] for row in plan["peers"]) == 40
    assert [row["expected_rounds"] for row in plan["peers"]] == [10.0] * 4
    summary = run(experiment, tmp_path / "run")
    assert said.replace(" = 14,580", "") in summary["claim_note"]  # from which a peer's examples could be counted
    assert "active rounds" in plan_text(plan, verbose=True)


# --- what the claims are worth at the papers' own settings ---


def test_const_d2p_claims_1_and_spends_more():
    rate, rounds, delta = 1 / 2500, 2000, 1e-4
    mu_bar = paper.gdp_mu_0(paper.gdp_mu(1.0, delta), rate, np.ones(rounds))
    poisson, uniform = (Release(kind, rate, 2500, 1, 1 / mu_bar, rounds) for kind in ("poisson", "uniform"))
    exact = epsilon([poisson], delta)
    assert 3.2 < exact < 3.5
    google = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 2e-3)
    google.compose(event([poisson]))
    assert google.get_epsilon(delta) == pytest.approx(exact, rel=0.02)
    assert 22 < epsilon([uniform], delta) < 23  # exactly one example a step, as the paper draws: our bound


def test_privsgp_vr_claims_3_and_spends_tens_of_thousands():
    sigma = paper.moments_sigma(3.0, 1e-5, rounds=3120, dataset_size=3125, clip_norm=1.0, c_2=0.3724)
    plain = Release("poisson", 1 / 3125, 3125, 1, sigma, 3120)
    idle, drawn = 1 / 3125, 2 - 1 / 3125
    table = replace(plain, noise_multiplier=sigma / drawn, idle=idle / drawn)
    assert epsilon([table], 1e-5) > 10_000
    assert epsilon([plain], 1e-5) > 1_000  # even without a table


@pytest.mark.parametrize(("share", "poisson", "uniform"), [(0.1, 73.5, 128), (0.2, 21.3, 65.3), (1.0, 0.32, 11.9)])
def test_dp_dda_claims_1_and_spends_more(share, poisson, uniform):
    """Over three passes through a9a's share of one of 20 peers, far below the rounds that its theorem asks for."""
    size, passes, delta = 1628, 3, 0.01
    rounds = round(passes * size / share)
    assert paper.subsampling_breach(1.0, rounds=rounds, dataset_size=size, batch=1, share=share) is not None
    sigma = paper.subsampled_sigma(1.0, delta, rounds=rounds, dataset_size=size, share=share, clip_norm=1.0)
    for sampling, exact in (("poisson", poisson), ("uniform", uniform)):
        release = Release(sampling, 1 / size, size, 1, sigma, round(rounds * share))
        assert epsilon([release], delta) == pytest.approx(exact, rel=0.01)
