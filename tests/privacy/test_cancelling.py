"""Noise that cancels between peers: what each observer can learn, by numbers that the solver did not compute."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dp_accounting
import networkx as nx
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from raising import raises
from scipy.optimize import linprog
from tiny_scenario import Build
from torch import Tensor
from variants import VARIANTS, settings_for
from worker_runs import whole

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.core import Exchange, Mix
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.pair_plan import pair_plan
from flower_privdec.experiment.view import pair_run
from flower_privdec.graph.participation import build_participation
from flower_privdec.planner.pairs import pair_facts
from flower_privdec.privacy.accountant import accounting
from flower_privdec.privacy.mechanism import cancelling
from flower_privdec.privacy.mechanism.cancelling import PairPlan, solve_pairs
from flower_privdec.privacy.mechanism.events import EVERYBODY, Release
from flower_privdec.privacy.noise import NoisedSum, NoiseSource, PairSecrets, build_noise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.rows.keys import seed_keys
from flower_privdec.testing import assert_noise, assert_nothing_else_leaves, assert_sensitivity, recording

PAIRS = "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0}"


def complete(n: int) -> np.ndarray:
    return np.stack(np.triu_indices(n, 1), axis=1)


def covariance(own: np.ndarray, edges: np.ndarray, pair: np.ndarray, honest: list[int]) -> np.ndarray:
    """Return what the honest peers' noise looks like to whoever knows the others' secrets, summed draw by draw."""
    columns = [np.eye(len(own))[i] * own[i] for i in honest]
    for (i, j), c in zip(edges.tolist(), pair.tolist(), strict=True):
        if i in honest and j in honest:
            columns.append((np.eye(len(own))[i] - np.eye(len(own))[j]) * c)
    drawn = np.stack(columns, axis=1)[honest]
    return drawn @ drawn.T


@st.composite
def networks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, float]:
    n = draw(st.integers(2, 7))
    needed = np.array(draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]), min_size=n, max_size=n)))
    edges = [pair for pair in complete(n).tolist() if draw(st.booleans())]
    return needed, np.array(edges, dtype=np.int64).reshape(-1, 2), draw(st.integers(0, n - 1)), draw(st.floats(0.1, 30))


@given(networks())
def test_every_honest_peer_has_enough_noise_against_colluders(network) -> None:
    """Against the inverse covariance of every set of honest peers, for any graph, needs and strength."""
    needed, edges, colluding, strength = network
    noise = solve_pairs(needed, edges, colluding, strength)
    active = np.flatnonzero(needed > 0).tolist()
    exact, least = noise.own * needed, math.inf
    for honest in combinations(active, max(1, len(active) - colluding)):
        whitened = np.linalg.inv(covariance(exact, edges, noise.pair, list(honest)))
        least = min(least, float(np.min(np.diag(whitened) ** -0.5 / needed[list(honest)])))
    if active:
        assert least >= 1 - 1e-7
    assert ((noise.own > 0) & (noise.own <= 1)).all()
    assert (noise.own[needed == 0] == 1).all()
    assert (noise.pair[(needed[edges] == 0).any(axis=1)] == 0).all()


def test_the_own_noise_is_the_least() -> None:
    """On the complete graph 1/V² = (1/m)/D² + (1 - 1/m)/(D² + m c²), with m honest peers."""
    for colluding in range(8):
        noise, m = solve_pairs(np.full(9, 3.0), complete(9), colluding, 4.0), 9 - colluding
        own, pair = noise.own[0] * 3.0, noise.pair[0]
        assert (1 / m) / own**2 + (1 - 1 / m) / (own**2 + m * pair**2) == pytest.approx(1 / 9, rel=1e-7)
    strong = solve_pairs(np.ones(9), complete(9), 0, 1e6)
    assert strong.own == pytest.approx(1 / 3, rel=1e-6)  # of the noise of a trusted server


def least_sum(needed: np.ndarray, edges: np.ndarray, pair: np.ndarray, colluding: int) -> float:
    """Return the least Σ D² by linear programs, with no D above V and none below a trusted server's share of it.

    The noise left at a peer is the least x' Σ_H x over x with 1 at the peer: each x found so far is a linear condition.
    """
    active = np.flatnonzero(needed > 0).tolist()
    graph = nx.Graph(edges[(needed[edges] > 0).all(axis=1)].tolist())
    graph.add_nodes_from(active)
    parts = {peer: part for part in nx.connected_components(graph) for peer in part}
    shares = [len(parts[peer]) - min(colluding, len(parts[peer]) - 1) for peer in active]
    bounds = [(needed[peer] ** 2 / share, needed[peer] ** 2) for peer, share in zip(active, shares, strict=True)]
    own, rows, values = np.where(needed > 0, needed, 1.0) ** 2, [], []
    for _ in range(40):
        for honest in combinations(active, max(1, len(active) - colluding)):
            inverse = np.linalg.inv(covariance(np.sqrt(own), edges, pair, list(honest)))
            between = covariance(np.zeros(len(own)), edges, pair, list(honest))
            for row, peer in enumerate(honest):
                x = inverse[row] / inverse[row, row]
                rows.append(np.zeros(len(own)))
                rows[-1][list(honest)] = -(x**2)
                values.append(x @ between @ x - needed[peer] ** 2)
        found = linprog(np.ones(len(active)), np.array(rows)[:, active], np.array(values), bounds=bounds)
        before, own[active] = own[active].sum(), found.x
        if abs(found.fun - before) < 1e-4 * before:
            break
    return float(found.fun)


@hypothesis_settings(max_examples=40)
@given(networks())
def test_little_more_noise_stays_in_the_sum_than_must(network) -> None:
    """Than by linear programs: 3 % for what is left if all others collude, and what was not worth another shape."""
    needed, edges, colluding, strength = network
    if not needed.any():
        return
    noise = solve_pairs(needed, edges, colluding, strength)
    active = needed > 0
    assert np.square(noise.own * needed)[active].sum() <= 1.1 * least_sum(needed, edges, noise.pair, colluding)


def test_a_peer_with_one_partner_costs_the_others_nothing() -> None:
    """With the partner colluding it has only itself to hide behind; seven peers with all secrets need 0.42 V each."""
    leaf = np.concatenate([complete(7), [[0, 7]]])
    noise = solve_pairs(np.ones(8), leaf, 1, 4.0)
    assert noise.own[7] == pytest.approx(1, rel=1e-6)
    assert (noise.own[:7] < 0.45).all()


@pytest.mark.parametrize("strength", [0.5, 4.0, 32.0])
def test_alike_peers_have_one_factor(strength: float) -> None:
    for edges in (complete(8), np.array([(i, i + 1) for i in range(7)] + [(0, 7)])):
        own = solve_pairs(np.full(8, 0.7), edges, 1, strength).own
        assert own == pytest.approx(own[0], rel=1e-12)


@given(networks(), st.floats(1e-12, 1e12))
def test_units_and_roundings_change_no_factor(network, unit: float) -> None:
    """Peers solve for themselves, on machines that round differently, and have to come to the same."""
    needed, edges, colluding, strength = network
    here = solve_pairs(needed, edges, colluding, strength).own
    elsewhere = solve_pairs(needed * unit * (1 + 1e-14), edges, colluding, strength).own
    assert elsewhere == pytest.approx(here, rel=1e-9)


def test_peers_that_solved_otherwise_share_no_secret(build: Build) -> None:
    experiment = build(PAIRS)
    own, run = experiment.own, pair_run(experiment)
    for change, is_same in ((1e-12, True), (1e-4, False)):
        plan = replace(own.protection.pairs)
        plan.__dict__["own"] = own.protection.pairs.own * (1 + change)  # as another solver would have it
        other = replace(experiment, own=replace(own, protection=replace(own.protection, pairs=plan)))
        assert (pair_run(other) == run) is is_same


@given(networks())
def test_many_sets_are_bounded_from_above(network) -> None:
    needed, edges, colluding, strength = network
    exact = solve_pairs(needed, edges, colluding, strength)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cancelling, "LARGEST_WORK", 0)
        bounded = solve_pairs(needed, edges, colluding, strength)
    assert np.square(bounded.own * needed).sum() >= np.square(exact.own * needed).sum() * (1 - 1e-9)


def test_the_bound_is_exact_for_like_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = solve_pairs(np.ones(12), complete(12), 3, 4.0).own
    monkeypatch.setattr(cancelling, "LARGEST_WORK", 0)
    assert solve_pairs(np.ones(12), complete(12), 3, 4.0).own == pytest.approx(exact, rel=1e-7)


# --- colluders, and peers that restart ---


@given(networks())
def test_one_more_colluder_learns_at_most_the_printed_epsilon(network) -> None:
    """q + 1 peers learn more than ε against q says, where the graph is whole; all others together the own noise's."""
    needed, edges, colluding, strength = network
    noise, active = solve_pairs(needed, edges, colluding, strength), np.flatnonzero(needed > 0).tolist()
    exact = noise.own * needed
    for honest in combinations(active, max(1, len(active) - colluding - 1)):
        inverse = np.linalg.inv(covariance(exact, edges, noise.pair, list(honest)))
        assert (np.diag(inverse) ** -0.5 >= exact[list(honest)] * (1 - 1e-7)).all()


def test_a_colluder_beyond_q_is_noticed() -> None:
    noise = solve_pairs(np.ones(6), complete(6), 2, 4.0)
    for colluders, holds in ((2, True), (3, False)):
        honest = list(range(6 - colluders))
        inverse = np.linalg.inv(covariance(noise.own, complete(6), noise.pair, honest))
        assert (float(np.diag(inverse)[0] ** -0.5) >= 1 - 1e-7) is holds


@given(networks(), st.data())
def test_a_pair_drawing_apart_removes_no_noise(network, data: st.DataObject) -> None:
    """Any shared draws replaced by as much noise of each end's own."""
    needed, edges, colluding, strength = network
    noise, active = solve_pairs(needed, edges, colluding, strength), np.flatnonzero(needed > 0).tolist()
    apart = np.array([data.draw(st.booleans()) for _ in edges], dtype=bool)
    alone = np.zeros_like(needed)
    np.add.at(alone, edges[apart].ravel(), np.repeat(noise.pair[apart] ** 2, 2))
    own = np.sqrt((noise.own * needed) ** 2 + alone)
    for honest in combinations(active, max(1, len(active) - colluding)):
        inverse = np.linalg.inv(covariance(own, edges[~apart], noise.pair[~apart], list(honest)))
        assert (np.diag(inverse) ** -0.5 >= needed[list(honest)] * (1 - 1e-7)).all()


@given(networks(), st.data())
def test_repeated_steps_have_independent_noise(network, data: st.DataObject) -> None:
    """Several releases of a step by each peer, which share draws with any of the others' as the two rules allow."""
    needed, edges, colluding, strength = network
    noise, active = solve_pairs(needed, edges, colluding, strength), np.flatnonzero(needed > 0).tolist()
    times = {peer: data.draw(st.integers(1, 3)) for peer in active}
    nodes = [(peer, attempt) for peer in active for attempt in range(times[peer])]
    for honest in combinations(active, max(1, len(active) - colluding)):
        chosen = [node for node in nodes if node[0] in honest]
        sigma = np.diag([(noise.own[peer] * needed[peer]) ** 2 for peer, _ in chosen])
        for (i, j), c in zip(edges.tolist(), noise.pair.tolist(), strict=True):
            ends = [[at for at, node in enumerate(chosen) if node[0] == peer] for peer in (i, j)]
            partners = data.draw(st.permutations([*ends[1], *[None] * len(ends[0])]))[: len(ends[0])]
            for one, other in zip(ends[0], partners, strict=True):
                sigma[one, one] += c**2
                if other is not None:
                    sigma[one, other] -= c**2
                    sigma[other, one] -= c**2
            for other in ends[1]:
                sigma[other, other] += c**2
        for peer in honest:
            of_peer = np.diag([needed[peer] ** 2 * (node[0] == peer) for node in chosen])
            assert np.linalg.eigvalsh(sigma - of_peer).min() >= -1e-7 * sigma.max()


# --- in a run ---


class Watched:
    """A noise source that keeps what it adds, by step and purpose."""

    def __init__(self, source: NoiseSource) -> None:
        self.source, self.added = source, dict[tuple[int, str], Tensor]()

    def add_(self, out, std, step, peers, purpose="noise", receivers=None) -> None:
        before = out.clone()
        self.source.add_(out, std, step, peers, purpose, receivers)
        self.added[step, purpose] = out - before


def shared_noise(experiment: Experiment, rounds: int = 2) -> list[tuple[int, str, np.ndarray, Tensor]]:
    """Return the step, the sum's name, the peers, and their noise less what is their own, of each release."""
    cohort = experiment.cohort()
    cohort.noise = watched = Watched(cohort.noise)
    with recording() as tape:
        Engine(experiment.algorithm, cohort, experiment.initial_state(cohort)).rounds(rounds)
    return [
        (
            step.step,
            name,
            step.peers,
            step.after[name] - step.before[name] - step.raw[name] - watched.added[step.step, name],
        )
        for step in tape.steps
        for name in step.public
    ]


def mixes(experiment: Experiment) -> bool:
    exchanges = [item for item in experiment.algorithm.program if isinstance(item, Exchange)]
    return bool(exchanges) and all(isinstance(item, Mix) for item in exchanges)


@pytest.mark.parametrize("settings", [v for v in VARIANTS if "optimizer" not in " ".join(v)], ids=" ".join)
def test_algorithms_that_only_mix_conserve_sums_others_are_refused(build: Build, settings) -> None:
    """The pairs' noise of a release is there, and its sum over peers is 0 in the units that mixing conserves."""
    plain = build(*settings_for(*settings))
    if not mixes(plain):
        with raises(ScenarioError, "noise.cancelling-sum", plain.algorithm.name):
            build(*settings_for(*settings), PAIRS)
        return
    experiment = build(*settings_for(*settings), PAIRS)
    weights = torch.from_numpy(experiment.algorithm.conserved_weights(experiment.own.sampler.partition_sizes))
    releases = shared_noise(experiment)
    assert releases
    for step, name, peers, noise in releases:
        plan = experiment.own.protection.pairs
        assert (plan.own[step, peers] < 1).all() or len(peers) <= 2  # of which one colludes
        assert torch.allclose((weights[peers, None] * noise).sum(0), torch.zeros(()).double(), atol=1e-9), name
        assert (float(noise.std()) > 0) == (len(peers) > 1)


def test_the_mean_model_has_only_own_noise(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, means = build(PAIRS, "topology.mixing_steps=3"), []
    for factor in (1.0, 0.0):
        whole_std = PairPlan.pair_std
        monkeypatch.setattr(PairPlan, "pair_std", lambda *a, f=factor, w=whole_std: w(*a) * f)
        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        engine.rounds(1)
        means.append(experiment.algorithm.network_mean(engine.state.rows))
        monkeypatch.undo()
    assert torch.allclose(*means, atol=1e-12)


def test_an_observer_sees_the_planned_noise(build: Build) -> None:
    """Sampled: without the draws that one colluding peer knows, whitened, an example's coordinate has noise V."""
    experiment = build(PAIRS, "n_peers=5", "rounds=40", "topology.name=complete", "privacy.noise.colluding=1")
    releases, plan = shared_noise(experiment, 40), experiment.own.protection.pairs
    pair = plan.pair_std(0, np.arange(5), np.sqrt(np.diag(np.diag(plan.own[0] * plan.needed[0]) ** 2)))
    joint = torch.cat([noise for *_, noise in releases], dim=1).numpy()
    expected = covariance(np.zeros(5), plan.edges, pair, list(range(5)))
    assert joint @ joint.T / joint.shape[1] == pytest.approx(expected, abs=0.03 * expected.max())
    own = plan.own[0] * plan.needed[0]
    for colluder in range(5):
        honest = [peer for peer in range(5) if peer != colluder]
        inverse = np.linalg.inv(covariance(own, plan.edges, pair, honest))
        assert np.diag(inverse) ** -0.5 == pytest.approx(plan.needed[0, honest], rel=1e-7)


def test_both_epsilons_are_those_of_another_accountant(build: Build) -> None:
    """The printed ε is of the noise that was asked for, and the larger one of the own noise alone."""
    experiment = build(PAIRS)
    protection, sampler = experiment.own.protection, experiment.own.sampler
    account = protection.accounts[0]
    seen = account.towards(account.adversary).spends[0].release
    assert protection.own_alone[0].spends[0].release.noise_multiplier == protection.noise_multipliers[0, 0]
    for noise, epsilon in (
        (seen.noise_multiplier, protection.epsilons(6)[0]),
        (float(protection.noise_multipliers[0, 0]), protection.epsilons(6, EVERYBODY)[0]),
    ):
        step = dp_accounting.PoissonSampledDpEvent(sampler.sampling_rate[0], dp_accounting.GaussianDpEvent(noise))
        other = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-3)
        other.compose(dp_accounting.SelfComposedDpEvent(step, 6))
        assert epsilon == pytest.approx(other.get_epsilon(1e-3), rel=0.01)
    assert protection.epsilons(6, EVERYBODY)[0] > 2 * protection.epsilons(6)[0]


def test_with_all_others_colluding_there_is_one_epsilon(build: Build) -> None:
    protection = build(PAIRS, "privacy.noise.colluding=3").own.protection
    assert protection.epsilons(6, EVERYBODY) == pytest.approx(protection.epsilons(6), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["data.batch.size=4", "data.batch={sampling: poisson, rate: 0.1}"])
def test_unequal_peers_have_what_each_needs(build: Build, batch: str) -> None:
    """Budgets, clip norms, learning rates, sizes, batches and participation that differ: by an inverse, step by step.

    ε by another accountant, from these inverses, is no more than what is charged.
    """
    experiment = build(
        PAIRS,
        batch,
        "privacy.epsilon=[1.0, 2.0, 3.0, 8.0]",
        "privacy.clip_norm=[0.5, 1.0, 1.0, 2.0]",
        "algorithm.learning_rate=[0.1, 0.5, 0.5, 1.0]",
        "data.partition={kind: sizes, sizes: [30, 50, 60, 100]}",
        "participation={kind: uniform, fraction: 0.75}",
        "privacy.schedule={rho_c: 2.0, rho_mu: 2.0}",
    )
    protection, sampler = experiment.own.protection, experiment.own.sampler
    rates, least = [experiment.learning_rate.at(k) for k in range(6)], np.full((6, 4), math.inf)
    for step in range(6):
        plan, active = protection.pairs, np.flatnonzero(experiment.participation.active(step))
        scale = np.abs(rates[step]) / sampler.normalizer
        own = scale * protection.clip_norms[step] * protection.noise_multipliers[step]
        pair = plan.pair_std(step, active, own[active])
        for honest in combinations(active.tolist(), len(active) - 1):
            inverse = np.linalg.inv(covariance(own, plan.edges, pair, list(honest)))
            noise = np.diag(inverse) ** -0.5 / (scale * protection.clip_norms[step])[list(honest)]
            least[step, list(honest)] = np.minimum(least[step, list(honest)], noise)
        for peer in active.tolist():
            spends = protection.accounts[peer].spends
            charged = next(s.release.noise_multiplier for s in spends if s.from_step <= step < s.to_step)
            assert least[step, peer] >= charged * (1 - 1e-7)
    for peer, epsilon in enumerate(protection.epsilons(6)):
        other = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
        for noise in least[:, peer][np.isfinite(least[:, peer])].tolist():
            gaussian = dp_accounting.GaussianDpEvent(noise)
            other.compose(dp_accounting.PoissonSampledDpEvent(sampler.sampling_rate[peer], gaussian))
        assert other.get_epsilon(1e-3) <= epsilon * 1.01


@st.composite
def unequal_steps(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Draw multipliers, clip norms, learning rates, batch sizes, weights and activity of 3 to 5 peers, and q."""
    n = draw(st.integers(3, 5))

    def each(*values: float) -> np.ndarray:
        return np.array(draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)))

    active = np.array([True, True, *draw(st.lists(st.booleans(), min_size=n - 2, max_size=n - 2))])
    numbers = each(0.5, 1.0, 4.0), each(0.1, 1.0, 3.0), each(0.05, 0.5, 2.0), each(1.0, 4.0, 64.0), each(0.5, 1.0, 1.5)
    return *numbers, active, np.array(draw(st.integers(0, n - 2)))


def noised_sum(n: int, peers: np.ndarray) -> NoisedSum:
    return NoisedSum(
        normals=build_noise(seed_keys(6, range(n))),
        secrets=PairSecrets(seed_keys(5, range(n))),
        name="gradient",
        step=0,
        round_index=0,
        peers=peers,
        rows=peers,
        receivers=None,
        scale=torch.ones(len(peers)),
        clip_norm=None,
        participation=build_participation("all", n),
        state={},
    )


@given(unequal_steps(), st.sampled_from([0.5, 2.0, 8.0]), st.data())
def test_common_draws_have_the_law_of_pairs(step, strength: float, data: st.DataObject) -> None:
    """What one draw a peer comes to has the covariance of what all pairs draw, whoever is idle, gone or elsewhere."""
    multiplier, clip, rate, batch, weights, active, _ = step
    n = len(rate)
    needed = multiplier * rate * clip / batch * weights * active
    gone = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    plan = PairPlan(complete(n), 0, strength, needed[None], weights, False, by_partners="leaving", dropped=gone[None])

    # Some are gone and not noticed yet: the others still draw with them.
    silent = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    peers = np.flatnonzero(active & ~gone & ~silent)
    if not len(peers):
        return
    std = (plan.own[0] * needed / weights)[peers]
    pair = plan.pair_std(0, peers, std)

    drawn = []
    with patch.object(PhiloxNoise, "add_common_", lambda _, *given: drawn.append(given)):
        CancellingNoise(plan).add_(torch.zeros(len(peers), 3), torch.from_numpy(std), noised_sum(n, peers))

    mixed = np.zeros((n, n))  # by how much of each draw every peer adds, in units of what the network conserves
    for _, rows, (gains, shares, parts), _, members, _ in drawn:
        assert np.array_equal(rows[rows >= 0], np.flatnonzero(np.isin(peers, members)))
        mixed[np.ix_(members, members)] = (np.diag(gains) - np.outer(parts, shares)) * weights[members, None]
    between = cancelling._squares(n, plan.edges, pair)
    expected = np.diag(between.sum(axis=1)) - between
    here = np.ix_(peers, peers)
    np.testing.assert_allclose((mixed @ mixed.T)[here], expected[here], atol=1e-9 * between.max())
    if not (active & ~gone & silent).any():
        np.testing.assert_allclose(mixed.sum(axis=0), 0, atol=1e-9 * between.max() ** 0.5)


@given(unequal_steps(), st.sampled_from([0.5, 2.0, 8.0]))
def test_sampled_noise_of_unequal_peers_matches_their_charges(step, strength: float) -> None:
    """What the mechanism adds, less what colluders can compute, whitened by its own sampled covariance."""
    multiplier, clip, rate, batch, weights, active, colluding = step
    n, d, peers = len(rate), 20_000, np.flatnonzero(active)
    sensitivity = rate * clip / batch  # in units of the rows
    needed = multiplier * sensitivity * weights * active
    plan = PairPlan(complete(n), int(colluding), strength, needed[None], weights, same_rates=False)
    noised = noised_sum(n, peers)
    secrets = noised.secrets
    out, mechanism = torch.zeros(len(peers), d, dtype=torch.float64), CancellingNoise(plan)
    mechanism.draws_apart = bool(colluding)
    mechanism.add_(out, torch.from_numpy(plan.own[0] * multiplier * sensitivity)[peers], noised)
    pair = plan.pair_std(0, peers, (plan.own[0] * multiplier * sensitivity)[peers])
    for honest in combinations(peers.tolist(), max(1, len(peers) - int(colluding))):
        seen = {peer: out[row].clone() for row, peer in enumerate(peers.tolist()) if peer in honest}
        for number, (i, j) in enumerate(plan.edges.tolist()):
            if pair[number] == 0 or (i in seen) == (j in seen):
                continue
            drawn = torch.zeros(1, d, dtype=torch.float64)  # by a colluder, from the secret that it has
            source = build_noise({number: secrets.of(i, j)})
            source.add_(drawn, torch.ones(1), 0, np.array([number]), "pair gradient")
            peer, sign = (i, 1.0) if i in seen else (j, -1.0)
            seen[peer] -= sign * pair[number] / weights[peer] * drawn[0]
        sampled = torch.stack([seen[peer] / sensitivity[peer] for peer in honest]).numpy()
        whitened = np.diag(np.linalg.inv(sampled @ sampled.T / d)) ** -0.5
        assert (whitened >= 0.97 * multiplier[list(honest)]).all()


def test_local_steps_use_weaker_pair_noise(build: Build) -> None:
    chosen = []
    for steps in (1, 4):
        lines = [f"algorithm={{name: fedavg, learning_rate: 0.5, local_steps: {steps}}}", "n_peers=8"]
        noise = "privacy.noise={kind: cancelling, colluding: 1}"
        plan = build(*lines, noise, "topology={name: directed-exponential, mixing_steps: 3}").own.protection.pairs
        chosen.append((plan.strength, plan.trades[-1].models))
    (once, exact), (often, left) = chosen
    assert often < once
    assert exact < 1e-9 < left


UNEVEN = [
    "privacy.epsilon=[1, 2, 4, 8]",
    "data.partition={kind: sizes, sizes: [30, 50, 60, 100]}",
    "data.batch={rate: 0.1}",
]


@pytest.mark.parametrize("algorithm", ["privsgp", "privsgp-vr", "privsgp-vr, table: snapshot"])
def test_the_laws_hold_for_peers_that_differ_in_all(build: Build, algorithm: str) -> None:
    """With a table of gradients, and with steps of two kinds, each of its own noise."""
    experiment = build(PAIRS, f"algorithm={{name: {algorithm}, learning_rate: [0.1, 0.5, 0.5, 1.0]}}", *UNEVEN)
    assert_noise(experiment, 2)
    assert_sensitivity(experiment, 2)


def test_the_laws_hold_for_it(build: Build) -> None:
    experiment = build(PAIRS)
    assert_noise(experiment, 2)
    assert_sensitivity(experiment, 2)
    assert_nothing_else_leaves(experiment)


def test_blocks_of_peers_draw_their_common_noise_alike(build: Build, tmp_path: Path) -> None:
    experiment = build(PAIRS, "n_peers=6")
    (one, _), (two, _) = whole(experiment, tmp_path / "one", 1), whole(experiment, tmp_path / "two", 2)
    assert torch.equal(one["x"], two["x"])


def test_an_algorithm_that_leaves_unequal_rates_out_is_stopped(build: Build) -> None:
    experiment = build(PAIRS, "algorithm.learning_rate=[0.1, 0.5, 0.5, 1.0]")
    cohort = experiment.cohort()
    x = torch.zeros(4, len(cohort.initial), dtype=torch.float64)
    with raises(RunError, "noise.pair-scale"):
        cohort.add_step_(x, x, 0, factor=1.0)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["privacy.noise={kind: cancelling}"], "scenario.missing"),
        ([PAIRS, "privacy.noise.colluding=-1"], "scenario.greater_than_equal"),
        ([PAIRS, "privacy.calibration=paper"], "privacy.own-noise"),
        ([PAIRS, "privacy.hardened=true"], "privacy.own-noise"),
        ([PAIRS, "privacy.noise.secrets=server"], "noise.secrets-graph"),
        ([PAIRS, "privacy.noise.colluding=4"], "noise.colluding"),
    ],
)
def test_settings_without_a_proof_are_refused(build: Build, settings: list[str], code: str) -> None:
    with raises(ScenarioError, code):
        build(*settings)


@pytest.mark.parametrize("workers", [1, 2])
def test_noise_of_the_operating_system_cancels_too(build: Build, tmp_path: Path, workers: int) -> None:
    """With a tenth of the noise on the mean that independent noise has, however many processes draw it."""
    lines = ["compute.generator=system", "n_peers=6", "privacy.clip_norm=1e-6", "algorithm.learning_rate=1e6"]
    means = []
    for noise in (PAIRS.replace("2.0", "64.0"), "privacy.noise=null"):
        experiment = build(*lines, noise)
        rows, _ = whole(experiment, tmp_path / noise[:20], workers)
        start = experiment.initial_state(experiment.cohort()).rows["x"]
        means.append(float((rows["x"] - start).mean(0).std()))
    assert means[0] < 0.8 * means[1]


def test_a_process_with_system_noise_shares_no_secret(build: Build) -> None:
    """It stops before it adds noise that would never cancel: whoever runs several agrees on secrets first."""
    cohort = Experiment.build(build(PAIRS, "compute.generator=system").scenario, np.array([0, 1])).cohort()
    x = torch.zeros(2, len(cohort.initial), dtype=cohort.initial.dtype)
    with raises(ScenarioError, "noise.pair-secret", r"peers 0 and 2 .* those of \[0, 1\]"):
        cohort.add_step_(x, x, 0)


def test_a_network_uses_weaker_noise_for_restarts(build: Build) -> None:
    """One restart leaves 3 strength² V² / n² in the mean: what partners draw with it in three steps without it."""
    noise = "privacy.noise={kind: cancelling, colluding: 1}"
    experiment = build(noise, "n_peers=8", "topology={name: directed-exponential, mixing_steps: 3}")
    agreement = Agreement.of(experiment.scenario)
    alone, deployed = (pair_plan(agreement, experiment.own.sampler, one, np.ones((6, 8))) for one in (False, True))
    assert deployed.strength < alone.strength
    assert (deployed.accounting, alone.accounting) == ("partners", "covariance")
    assert deployed.trades[-1].restart == pytest.approx(3 * deployed.trades[-1].strength ** 2 / 64)
    facts = pair_facts(experiment)
    assert (facts["strength"], facts["network_strength"]) == (alone.strength, deployed.strength)


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        (["topology={name: directed-exponential, mixing_steps: 2}"], False),
        (["topology.name=complete", "algorithm.name=d-psgd", "network.mode=synchronous"], False),
        (["topology.name=complete", "algorithm.name=d-psgd"], True),
    ],
)
def test_the_plan_advises_the_mode_that_a_network_needs(build: Build, settings: list[str], advised: bool) -> None:
    """Where a network would refuse the scenario's mode, and only there."""
    from flower_privdec.peer.trainer import network_mixing

    noise = "privacy.noise={kind: cancelling, colluding: 1, secrets: complete, strength: 2.0}"
    experiment = build(*settings, noise, "n_peers=3")
    advice = pair_facts(experiment)["mode_advice"]
    assert (advice is not None) is advised
    agreement = Agreement.of(experiment.scenario)
    if advised:
        assert "network.mode=synchronous" in advice
        with pytest.raises(ScenarioError) as refused:
            network_mixing(agreement)
        assert refused.value.code == "noise.cancelling-late"
    else:
        network_mixing(agreement)


def test_a_spent_peer_adds_its_noise_without_examples(build: Build) -> None:
    """So that its neighbours' noise cancels; of the others, of which it is no part, examples are read and charged."""
    experiment = build(PAIRS.replace("2.0", "64.0"), "topology={name: directed-exponential, mixing_steps: 2}")
    cohort, charged = experiment.cohort(), list[list[int]]()
    cohort.ledger, cohort.kernel = Limited([True, True, False, True], charged), Unmoved(cohort.kernel)
    x = torch.zeros(4, len(cohort.initial), dtype=torch.float64)
    cohort.add_step_(x, x, 0)
    assert charged == [[0, 1, 3]]
    assert cohort.kernel.rows == [3]
    assert float(x[2].std()) > 1
    assert float(x.sum(0).std()) < 0.1 * float(x[2].std())  # nothing but own noise is left in the sum


class Limited:
    """A ledger in which some peers' budgets are spent."""

    def __init__(self, allowed: list[bool], charged: list[list[int]]) -> None:
        self._allowed, self._charged = np.array(allowed), charged

    def allowed(self, step: int) -> np.ndarray:
        return self._allowed

    def charge(self, step: int, rows: np.ndarray) -> None:
        self._charged.append(rows.tolist())


class Unmoved:
    """A kernel that reads examples and adds nothing; it counts the rows."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.rows = kernel, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def add_clipped_(self, out: Tensor, *arguments: Any) -> None:
        self.rows.append(len(out))


@pytest.mark.parametrize("size", [21, 60, 400])
def test_a_peer_with_extra_examples_spends_less(size: int) -> None:
    """Batches of 4, as `data.at_least: 20` plans them: a step's noise is the same, and an example's chance smaller."""
    planned, actual = (Release("poisson", 4 / examples, examples, 4, 1.0, steps=50) for examples in (20, size))
    assert 0 < accounting.epsilon([actual], 1e-3) < accounting.epsilon([planned], 1e-3)


@pytest.mark.parametrize(("name", "refused"), [("privsgp", False), ("privsgp-vr", True), ("feddeper", False)])
def test_a_least_number_that_changes_releases_is_refused(build: Build, name: str, refused: bool) -> None:
    """A table's mean moves by 2 - q clip norms: a peer with more examples than planned for would spend more."""
    settings = [*settings_for(f"algorithm.name={name}"), PAIRS, "data.at_least=6", "data.batch.size=5"]
    if refused:
        with raises(ScenarioError, "noise.cancelling-sizes", name):
            build(*settings)
    else:
        assert build(*settings).own.protection is not None


# --- what a ledger records of each number of colluders ---


@given(st.integers(0, 2**32 - 1))
@hypothesis_settings(max_examples=25)
def test_recorded_noise_is_never_more_than_colluders_leave(seed: int) -> None:
    draws = np.random.default_rng(seed)
    n = int(draws.integers(3, 8))
    edges = np.array([pair for pair in combinations(range(n), 2) if draws.random() < 0.7] or [(0, 1)])
    needed = np.exp(draws.normal(0, 0.4, (1, n)))
    plan = PairPlan(edges, int(draws.integers(n)), float(np.exp(draws.normal(0.5, 1))), needed, np.ones(n), True)

    recorded = plan.left_against()
    for colluding in range(n):
        exact = plan.left(colluding)
        assert exact is not None
        (bound,) = plan._left_at_least([colluding]).values()
        assert (bound <= exact * (1 + 1e-9)).all()
        assert (bound >= plan.own * (1 - 1e-9)).all()
        if colluding in recorded:
            assert (recorded[colluding] <= exact * (1 + 1e-6)).all()
    values = [recorded[colluding].min() for colluding in sorted(recorded)]
    assert values == sorted(values, reverse=True)


def test_many_peers_have_a_bound_for_every_recorded_number() -> None:
    n = 40
    edges = np.array(list(combinations(range(n), 2)))
    plan = PairPlan(edges, 2, 4.0, np.ones((1, n)), np.ones(n), True)
    recorded = plan.left_against()
    assert sorted(recorded) == [0, 1, 2, 3, 4, 8, 16, 32]
    assert plan.own.min() < recorded[32].min() < recorded[4].min() < recorded[2].min() == 1 < recorded[0].min()
