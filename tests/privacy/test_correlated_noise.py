"""Noise that is correlated over steps: its law, its cost against all patterns of draws, and its memory."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from tiny_scenario import Build, Tiny
from torch import Tensor
from worker_runs import whole

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.correlation_plan import correlation_of
from flower_privdec.planner.bands import band_facts
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.mechanism.correlation import (
    BandChoice,
    Correlation,
    Workload,
    best_choice,
    best_correlation,
    choices,
)
from flower_privdec.privacy.mechanism.declared import Drawing, ReleasedSum
from flower_privdec.privacy.mechanism.events import Release
from flower_privdec.privacy.mechanism.peer_mechanism import Mechanism
from flower_privdec.privacy.noise import NoisedSum, PairSecrets, build_noise
from flower_privdec.privacy.noise.kinds.correlated_noise import CorrelatedNoise
from flower_privdec.reporting import console
from flower_privdec.rows.keys import seed_keys
from flower_privdec.testing import assert_noise, assert_nothing_else_leaves, recording

C = Correlation((1.0, 0.6, 0.4))
PEERS = np.arange(2)


def noise(bands: int | str = 3, budget: str = "epsilon: 3.0") -> str:
    return f"privacy={{{budget}, delta: 1.0e-3, noise: {{kind: correlated, bands: {bands}}}}}"


def matrix(correlation: Correlation, steps: int) -> np.ndarray:
    """Return C, written out."""
    rows = np.zeros((steps, steps))
    for lag, coefficient in enumerate(correlation.coefficients):
        rows += np.diag(np.full(steps - lag, coefficient), -lag)
    return rows


def final_rows(experiment: Experiment, rounds: int) -> dict[str, Tensor]:
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(rounds)
    return engine.state.rows


class Activity:
    """Who is active in which round."""

    def __init__(self, active: np.ndarray) -> None:
        self._active = active
        self.chances = active.mean(axis=0)

    def active(self, round_index: int) -> np.ndarray:
        return self._active[round_index]


def noises_of(
    mechanism: CorrelatedNoise, steps: int, active: np.ndarray, d: int = 3000, in_one_cohort: bool = True
) -> np.ndarray:
    """Return what a mechanism adds at standard deviations of 1, 2, 3, ..., over these, [steps, peers, d].

    Args:
        in_one_cohort: whether all peers are rows of one cohort; else each has one of its own.
    """
    normals = build_noise(seed_keys(5, PEERS))
    state = {name: torch.zeros(len(PEERS), d, dtype=torch.float64) for name in mechanism.state}
    added = np.zeros((steps, len(PEERS), d))
    for step, cohort in product(range(steps), [PEERS] if in_one_cohort else PEERS[:, None]):
        rows = np.flatnonzero(active[step, cohort])
        peers = cohort[rows]
        out = torch.zeros(len(rows), d, dtype=torch.float64)
        std = torch.full((len(rows),), step + 1.0, dtype=torch.float64)
        noised = NoisedSum(
            normals=normals,
            secrets=PairSecrets({}),
            name="gradient",
            step=step,
            round_index=step,
            peers=peers,
            rows=rows,
            receivers=None,
            scale=std,
            clip_norm=None,
            participation=Activity(active),
            state=state,
        )
        mechanism.add_(out, std, noised)
        added[step, peers] = out.numpy() / (step + 1.0)
    return added


def normals_of(steps: int, d: int = 3000) -> np.ndarray:
    """Return the independent normals of the same keys, [steps, peers, d]."""
    source = build_noise(seed_keys(5, PEERS))
    drawn = torch.zeros(steps, len(PEERS), d, dtype=torch.float64)
    for step in range(steps):
        source.add_(drawn[step], torch.ones(len(PEERS), dtype=torch.float64), step, PEERS, "gradient")
    return drawn.numpy()


# --- the law of the noise


@pytest.mark.parametrize("draws_anew", [False, True])
def test_c_times_the_noise_is_independent_normals(draws_anew: bool) -> None:
    steps = 9
    added = noises_of(CorrelatedNoise(C, draws_anew=draws_anew), steps, np.ones((steps, 2), dtype=bool))
    whitened = np.einsum("ts,spd->tpd", matrix(C, steps), added)
    np.testing.assert_allclose(whitened, normals_of(steps), atol=1e-12)

    inverse = np.linalg.inv(matrix(C, steps))
    covariance = np.einsum("tpd,spd->ts", added, added) / (2 * 3000)
    np.testing.assert_allclose(covariance, inverse @ inverse.T, atol=0.07)


@pytest.mark.parametrize("draws_anew", [False, True])
def test_a_peer_forgets_after_a_gap(draws_anew: bool) -> None:
    """Steps before and after are mechanisms of their own; the other peer goes on."""
    steps = 8
    active = np.ones((steps, 2), dtype=bool)
    active[3, 0] = False
    added = noises_of(CorrelatedNoise(C, draws_anew=draws_anew), steps, active)
    drawn = normals_of(steps)
    np.testing.assert_allclose(matrix(C, 3) @ added[:3, 0], drawn[:3, 0], atol=1e-12)
    np.testing.assert_allclose(matrix(C, 4) @ added[4:, 0], drawn[4:, 0], atol=1e-12)
    np.testing.assert_allclose(matrix(C, steps) @ added[:, 1], drawn[:, 1], atol=1e-12)


def test_blocks_of_peers_share_no_memory() -> None:
    """A process may compute its peers in several cohorts, whose rows are numbered from 0 each."""
    steps = 6
    mechanism = CorrelatedNoise(C, draws_anew=True)
    added = noises_of(mechanism, steps, np.ones((steps, 2), dtype=bool), in_one_cohort=False)
    whitened = np.einsum("ts,spd->tpd", matrix(C, steps), added)
    np.testing.assert_allclose(whitened, normals_of(steps), atol=1e-12)


def test_one_band_is_independent_noise(build: Build) -> None:
    one = build(noise(1))
    plain = build("privacy={epsilon: 3.0, delta: 1.0e-3}")
    assert one.own.protection is not None
    assert plain.own.protection is not None
    assert one.own.protection.accounts == plain.own.protection.accounts
    assert CorrelatedNoise().state == ()
    np.testing.assert_allclose(noises_of(CorrelatedNoise(), 2, np.ones((2, 2), dtype=bool)), normals_of(2), atol=1e-12)


# --- its cost


def divergence(rows: np.ndarray, chances: np.ndarray, sigma: float, at: float, seed: int) -> tuple[float, float]:
    """Return δ(ε) of a mixture of normals around some rows against one around 0, by simulation, and its error."""
    draws = np.random.default_rng(seed)
    trials = 400_000
    chosen = draws.choice(len(chances), size=trials, p=chances)
    seen = rows[chosen] + sigma * draws.standard_normal((trials, rows.shape[1]))
    exponents = seen @ rows.T / sigma**2 - np.square(rows).sum(axis=1) / (2 * sigma**2) + np.log(chances)
    losses = np.logaddexp.reduce(exponents, axis=1)
    values = np.clip(1 - np.exp(at - losses), 0.0, None)
    return float(values.mean()), float(values.std() / math.sqrt(trials))


@pytest.mark.parametrize("group", [0, 1, 2])
def test_cost_is_exact_over_all_patterns_of_draws(group: int) -> None:
    """The release that a block costs, against the mixture over every pattern in which an example may be drawn."""
    steps, rate, sigma = 9, 0.4, 1.5
    own_steps = np.arange(group, steps, C.bands)
    rows = []
    chances = []
    for pattern in product([0, 1], repeat=len(own_steps)):
        drawn = np.zeros(steps)
        drawn[own_steps] = pattern
        rows.append(matrix(C, steps) @ drawn)
        chances.append(math.prod(rate if one else 1 - rate for one in pattern))

    charged = [Release("poisson", rate, 100, 13, sigma / C.norm, 3)]
    at = 1.0
    delta, error = divergence(np.array(rows), np.array(chances), sigma, at, group)
    bound = brentq_delta(charged, at)
    assert delta <= bound + 4 * error
    if group == 0:  # whose last block is not cut off by the end: exactly that
        assert delta == pytest.approx(bound, abs=4 * error)


def brentq_delta(releases: list[Release], at: float) -> float:
    """Return the δ at which releases have an ε, by halving."""
    low, high = 1e-8, 0.9
    for _ in range(40):
        middle = math.sqrt(low * high)
        if epsilon(releases, middle) > at:
            low = middle
        else:
            high = middle
    return high


def test_no_pattern_moves_a_block_further_than_its_norm() -> None:
    """Rows of different draws do not overlap, and one draw moves its own by |c| at most, at every position."""
    for bands in (2, 3, 4):
        correlation = best_correlation(bands, Workload((1.0,) * 12))
        c = matrix(correlation, 12)
        for group in range(bands):
            columns = c[:, group::bands]
            assert (np.count_nonzero(columns, axis=1) <= 1).all()
            assert np.linalg.norm(columns, axis=0).max() <= correlation.norm
        assert np.linalg.norm(c[:, 0]) == pytest.approx(correlation.norm)


def test_a_block_of_steps_is_paid_once_and_whole() -> None:
    drawing = Drawing("poisson", 0.6, 60, 12.0, groups=3)
    mechanism = Mechanism(drawing, ((ReleasedSum(drawn=2.0),),), np.zeros(8, dtype=np.int64), np.ones(8))
    active = np.ones(8, dtype=bool)
    spends = mechanism.spends(active, 4.0)
    assert [(one.from_step, one.to_step, one.release.steps, one.whole) for one in spends] == [
        (0, 3, 1, True),
        (3, 6, 1, True),
        (6, 8, 1, True),
    ]
    assert {one.release.noise_multiplier for one in spends} == {2.0}
    assert spends[1].between(4, 5) == spends[1]
    assert mechanism.releases(active, 4.0) == [spends[0].release.times(3)]

    # A block costs at its least noise, and nothing if the peer is idle in all of it.
    active[3:6] = False
    uneven = replace(mechanism, shape=np.array([3.0, 1.0, 2.0, 1, 1, 1, 2.0, 5.0]))
    levels = sorted((one.release.noise_multiplier, one.from_step) for one in uneven.spends(active, 4.0))
    assert levels == [(2.0, 0), (4.0, 6)]
    assert sorted(one.noise_multiplier for one in uneven.releases(active, 4.0)) == [2.0, 4.0]


def test_a_process_beginning_within_a_block_pays_it_again(tiny: Tiny, tmp_path: Path) -> None:
    experiment = Experiment.build(tiny(noise(3), "compute.generator=system", "rounds=8"))
    assert experiment.own.protection is not None
    epsilons = []
    for start in (0, 4):
        cohort = experiment.cohort(tmp_path, start=start)
        assert cohort.ledger is not None
        assert cohort.mechanism.state == ()  # noise of past steps is on no disk
        for step in range(start, 6):
            cohort.ledger.charge(step, cohort.rows)
        epsilons.append(cohort.ledger.spending.epsilons(6)[0])
        cohort.ledger.close()

    block = experiment.own.protection.accounts[0].spends[0].release
    assert epsilons == pytest.approx([epsilon([block.times(2)], 1e-3), epsilon([block.times(3)], 1e-3)])


def test_peers_keep_their_budget(build: Build) -> None:
    for bands in (1, 2, 4):
        protection = build(noise(bands), "rounds=20").own.protection
        assert protection is not None
        for value in protection.epsilons(20):
            assert 0.99 * 3.0 <= value <= 3.0


# --- what is remembered


def test_noise_of_a_run_is_correlated_as_planned(build: Build) -> None:
    """What steps of the engine add, over their standard deviations, uncorrelates to the draws of independent noise."""
    experiment = build(noise(3), "algorithm.learning_rate_decay=0.5")
    plan = experiment.own.protection
    assert plan is not None
    assert plan.correlation is not None
    with recording() as tape:
        rows = final_rows(experiment, 6)
    assert {"noise.past0", "noise.past1"} <= rows.keys()

    stds = [plan.noise_multipliers[step.step] * step.unit.abs().numpy() for step in tape.steps]
    added = [step.after["gradient"] - step.before["gradient"] - step.raw["gradient"] for step in tape.steps]
    ratios = torch.stack([one / torch.as_tensor(std)[:, None] for one, std in zip(added, stds, strict=True)])
    whitened = np.einsum("ts,spd->tpd", matrix(plan.correlation, 6), ratios.numpy())

    source = build_noise(experiment.own.keys)
    for step in range(6):
        drawn = torch.zeros(*added[0].shape, dtype=torch.float64)
        source.add_(drawn, torch.ones(4, dtype=torch.float64), step, experiment.own.peers, "gradient")
        np.testing.assert_allclose(whitened[step], drawn, atol=1e-9)


def test_resume_and_workers_have_the_same_bits(build: Build, tmp_path: Path) -> None:
    experiment = build(noise(3))
    rows, _ = whole(experiment, tmp_path / "one", 1)
    shared, _ = whole(experiment, tmp_path / "two", 2)
    assert all(torch.equal(shared[name], part) for name, part in rows.items())

    under_way = Run(experiment, tmp_path / "again")
    under_way.advance()
    under_way.close()
    resumed = Run(experiment, tmp_path / "again", resume=True)
    while resumed.round_index < experiment.scenario.rounds:
        resumed.advance()
    assert all(torch.equal(resumed.engine.state.rows[name], part) for name, part in final_rows(experiment, 6).items())
    resumed.finish()
    resumed.close()


def test_noise_is_on_plan_and_nothing_else_leaves(build: Build) -> None:
    for bands in (1, 3):
        assert_noise(build(noise(bands)), 6)
    assert_nothing_else_leaves(build(noise(3)))


def test_a_step_taken_again_in_one_process_is_refused() -> None:
    mechanism = CorrelatedNoise(C, draws_anew=True)
    everyone = np.ones((3, 2), dtype=bool)
    noises_of(mechanism, 3, everyone, d=2)
    with raises(RunError, "noise.step-again", names="step 0 of peer 0"):
        noises_of(mechanism, 1, everyone, d=2)


def test_system_noise_runs_and_leaves_no_memory_on_disk(tiny: Tiny, tmp_path: Path) -> None:
    experiment = Experiment.build(tiny(noise(3), "compute.generator=system"))
    summary = run(experiment, tmp_path / "run")
    assert summary["rounds_done"] == 6 if "rounds_done" in summary else True
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(b"noise.past" in data for data in files)
    run(Experiment.build(tiny(noise(3))), tmp_path / "keyed")
    files = [path.read_bytes() for path in (tmp_path / "keyed").rglob("*") if path.is_file()]
    assert any(b"noise.past" in data for data in files)


# --- which correlation is taken


def brute_noise(correlation: Correlation, weights: np.ndarray, momentum: float, horizon: float) -> tuple[float, float]:
    steps = len(weights)
    inverse = np.linalg.inv(matrix(correlation, steps))
    gathered = np.tril(momentum ** np.maximum(np.subtract.outer(np.arange(steps), np.arange(steps)), 0))
    age = np.maximum(np.subtract.outer(np.arange(steps), np.arange(steps)), 0)
    in_model = np.tril((1 - 1 / horizon) ** age) @ np.diag(weights) @ gathered @ inverse
    squares = np.square(in_model).sum(axis=1)
    return math.sqrt(squares.mean()), math.sqrt(squares[-1])


@pytest.mark.parametrize(("momentum", "horizon"), [(0.0, math.inf), (0.8, 20.0), (0.0, 64.0)])
def test_noise_in_models_is_that_of_whole_matrices(momentum: float, horizon: float) -> None:
    for steps, precision in ((50, 1e-12), (700, 1e-2)):  # of more steps some draws stand for all
        weights = np.linspace(1.0, 0.2, steps)
        workload = Workload(tuple(weights.tolist()), momentum, horizon)
        on_average, at_end = brute_noise(C, weights, momentum, horizon)
        assert workload.on_average(C) == pytest.approx(on_average, rel=precision)
        assert workload.at_end(C) == pytest.approx(at_end, rel=1e-12)


def test_a_single_epoch_comes_near_the_nuclear_norm_bound() -> None:
    """No C at all has |C|² times the mean square below (Σ singular values of the prefix sums)² / n²."""
    steps = 32
    workload = Workload((1.0,) * steps, horizon=math.inf)
    correlation = best_correlation(steps, workload)
    mean_square = (workload.on_average(correlation) * correlation.norm) ** 2
    bound = (np.linalg.svd(np.tril(np.ones((steps, steps))), compute_uv=False).sum() / steps) ** 2
    assert bound <= mean_square <= 1.2 * bound


def test_more_bands_at_one_norm_leave_less_noise() -> None:
    workload = Workload((1.0,) * 200)
    costs = []
    for bands in (1, 2, 4, 8, 16):
        correlation = best_correlation(bands, workload)
        assert correlation.bands == bands
        assert list(correlation.coefficients) == sorted(correlation.coefficients, reverse=True)
        square_root = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, bands))])
        begun = Correlation(tuple(square_root.tolist()))
        costs.append(correlation.norm * workload.on_average(correlation))
        assert costs[-1] <= 1.001 * begun.norm * workload.on_average(begun)
    assert costs == sorted(costs, reverse=True)


def test_auto_takes_amplification_or_correlation_by_the_budget() -> None:
    facts = {"size": 3000, "rate": 0.02, "batch": 60.0, "delta": 1e-5}
    workload = Workload((1.0,) * 200)
    taken = []
    for budget in (0.3, 3.0, 12.0):
        found = choices(workload, (1, 2, 4, 8, 16), epsilon=budget, **facts)
        taken.append(best_choice(found).correlation.bands)
        assert min(one.in_models for one in found) >= 0.98 * best_choice(found).in_models
    assert taken == sorted(taken)
    assert taken[0] < taken[-1]


def test_fewer_bands_are_taken_if_more_gain_little() -> None:
    few = BandChoice(Correlation(), 1.0, 10.0, 10.0)
    more = BandChoice(C, 1.0, 9.85, 9.0)
    most = BandChoice(Correlation((1.0,) * 4), 1.0, 9.7, 9.0)
    assert best_choice([few, more]) is few
    assert best_choice([few, more, most]) is more


def test_all_processes_take_the_same_bands(build: Build, tiny: Tiny) -> None:
    settings = (noise("auto", "epsilon: 8.0"), "data.partition={kind: sizes, sizes: [90, 40, 60, 50]}")
    everyone = build(*settings).own
    one = Experiment.build(tiny(*settings), peers=np.array([1])).own
    assert everyone.protection is not None
    assert one.protection is not None
    assert everyone.protection.correlation == one.protection.correlation
    assert everyone.protection.correlation is not None
    assert 1 < everyone.protection.correlation.bands <= 3  # three batches of 12 fill the smallest peer
    np.testing.assert_array_equal(everyone.protection.noise_multipliers[:, 1], one.protection.noise_multipliers[:, 0])


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ((noise(6),), "noise.bands", "bands=6 must be at most 5"),
        ((noise(3), "data.batch.sampling=shuffle"), "noise.correlated-sampling", "not shuffle"),
        ((noise("auto", "noise_multiplier: 1.0"),), "noise.bands", "give epsilon"),
        ((noise(2), "algorithm.name=privsgp-vr"), "noise.correlated-sums", "drawn"),
        ((noise(0),), "scenario.literal_error", "bands=0"),
        ((noise(2, "hardened: true, epsilon: 3.0"),), "privacy.own-noise", "hardened"),
    ],
)
def test_what_has_no_proof_is_refused(tiny: Tiny, settings: tuple[str, ...], code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names):
        Experiment.build(tiny(*settings))


def test_peers_with_data_of_their_own_name_bands(tiny: Tiny) -> None:
    """How many examples the others have is private, so nobody knows what is best for all."""
    for settings, taken in (((noise("auto"),), None), ((noise(3),), 3), ((noise("auto"), "data.at_least=60"), 3)):
        agreement = Agreement.of(tiny(*settings))
        if taken is None:
            with raises(ScenarioError, "noise.bands", names="data.at_least"):
                correlation_of(agreement, np.array([1]), np.array([500]), None, whole=True)
            continue
        found = correlation_of(agreement, np.array([1]), np.array([500]), None, whole=True)
        assert found is not None
        assert found.bands <= taken


# --- what a plan says


def test_a_plan_says_if_correlation_or_amplification_wins(build: Build) -> None:
    small = band_facts(build(noise(2, "epsilon: 0.3"), "rounds=40"))
    large = band_facts(build(noise(2, "epsilon: 12.0"), "rounds=40"))
    assert small is not None
    assert large is not None
    assert small["best_bands"] == 1
    assert small["in_models"] > 1 > large["in_models"]
    assert large["in_models"] == pytest.approx(large["choices"][1]["in_models"], rel=0.01)
    assert band_facts(build()) is None

    plan = make_plan(build(noise(2, "epsilon: 0.3")))
    assert "privacy.noise.bands=1 does better" in console.plan_text(plan)
    assert "at the end" in console.plan_text(plan, verbose=True)
    assert "1 band" in console.plan_text(make_plan(build(noise(1, "noise_multiplier: 1.0"))))
