"""What one peer sees of another: projectors beside covariances by hand, real runs, and the ε against everybody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_scenario import TINY
from torch import Tensor
from variants import settings_for

from flower_privdec.core import advance
from flower_privdec.core.cohort import STEPS, Cohort, PrivateStep
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.planner.pairwise import (
    MIXED_LINEARLY,
    by_colluders,
    messages,
    not_computed,
    projectors,
    views,
    with_noise_times,
)
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.spending import Account
from flower_privdec.privacy.mechanism.events import EVERYBODY, Release, Spend
from flower_privdec.scenario import parse_scenario

SHORT = ["rounds=3", "data.samples=48", "data.batch={sampling: poisson, size: 4}"]


def experiment_of(*overrides: str) -> Experiment:
    return Experiment.build(parse_scenario(TINY, overrides=[*SHORT, *overrides]))


def test_a_projector_is_the_whitened_covariance_of_messages() -> None:
    """Gossip on a ring of four: x <- W x + step, and each message is a neighbour's x."""
    n, rounds, observer = 4, 3, 0
    experiment = experiment_of("topology.name=ring", "algorithm={name: d-psgd, learning_rate: 0.5}")
    W = sum(np.roll(np.eye(n), shift, 0) for shift in (-1, 0, 1)) / 3
    x, seen = np.zeros((n, n * rounds)), []
    for k in range(rounds):
        seen += [x[1], x[3]]
        x = W @ x + np.eye(n * rounds)[np.arange(n) * rounds + k]
    M = np.array(seen)
    noise = M[:, rounds:]  # the observer knows its own
    for peer in (1, 2, 3):
        own = M[:, peer * rounds : (peer + 1) * rounds]
        exact = own.T @ np.linalg.pinv(noise @ noise.T) @ own
        np.testing.assert_allclose(projectors(messages(experiment))[observer, peer], exact, atol=1e-9)


def test_two_messages_of_a_neighbour_show_two_hops() -> None:
    gossip = "algorithm={{name: muffliato, gossip_steps: {}, learning_rate: 0.5}}"
    for steps, shown in ((1, 0.0), (2, 1.0)):
        experiment = experiment_of(
            "n_peers=3", "topology.name=star", gossip.format(steps), "rounds=1", "data.samples=36"
        )
        assert projectors(messages(experiment))[1, 2] == pytest.approx(np.array([[shown]]), abs=1e-9)


class DrawnNoise:
    """Adds given normals to each sum, and no examples."""

    def __init__(self, normals: Tensor) -> None:
        self.normals = normals

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        for part, noise_std in step.noise_std.items():
            step.sums[part] += noise_std[:, None] * self.normals[torch.from_numpy(step.peers), step.step]


@pytest.mark.parametrize("name", MIXED_LINEARLY)
def test_messages_of_a_run_are_sums_of_its_normals(name: str) -> None:
    """Of steps without examples, from a model of zeros."""
    experiment = experiment_of(*settings_for(f"algorithm.name={name}"))
    n, rounds = experiment.scenario.n_peers, experiment.scenario.rounds
    drawn = torch.from_numpy(np.random.default_rng(5).normal(size=(n, rounds, 7)))
    cohort = replace(experiment, initial=torch.zeros(7, dtype=torch.float64)).cohort()
    engine, number = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort)), dict.fromkeys(range(n), 0)
    expected = messages(experiment)
    assert experiment.mixing is not None
    with STEPS.open_to(DrawnNoise(drawn)):
        for _ in range(rounds):
            while (exchange := advance(experiment.algorithm, cohort, engine.state)) is not None:
                for (_, receiver), payload in exchange.outgoing(engine.state, experiment.mixing).items():
                    for row in (row for row in payload.values() if row.ndim):
                        weights = torch.from_numpy(expected[receiver][number[receiver]])
                        combined = torch.einsum("nk,nkd->d", weights, drawn)
                        torch.testing.assert_close(row, combined, rtol=1e-9, atol=1e-12)
                        number[receiver] += 1
                engine.perform(exchange)
    assert all(number[peer] == len(rows) for peer, rows in enumerate(expected))
    assert any(len(rows) for rows in expected)


@pytest.mark.parametrize("name", MIXED_LINEARLY)
def test_one_peer_learns_less_than_everybody(name: str) -> None:
    experiment = experiment_of(*settings_for(f"algorithm.name={name}"), "n_peers=6", "data.samples=72")
    plan = experiment.own.protection
    assert plan is not None
    assert not_computed(experiment) is None
    seen = views(experiment)
    first = max(epsilon(account.releases(0, 1), account.delta) for account in plan.accounts)
    assert sum(one.pairs for one in seen) == 6 * 5
    for one in seen:
        assert 0 <= one.one_step <= first * (1 + 1e-6)
        assert 0 <= one.all_rounds <= max(plan.epsilons(3)) * (1 + 1e-6)
        assert one.one_step == 0 or one.hops == 1 or name == "muffliato"  # whose round mixes more than once
    assert seen[-1].all_rounds < 0.9 * max(plan.epsilons(3)) or name == "muffliato"


def test_the_noise_of_a_view_is_never_overstated() -> None:
    """f^-2 on a diagonal is above every projector, by sums of rows and by the largest eigenvalue."""
    draws = np.random.default_rng(3)
    for size in (1, 3, 8):
        basis = np.linalg.qr(draws.normal(size=(12, 5)))[0].T[:, :size]
        part = basis.T @ basis
        for squares in (np.abs(part).sum(axis=1), np.full(size, np.linalg.eigvalsh(part)[-1])):
            assert np.linalg.eigvalsh(np.diag(squares) - part)[0] > -1e-12


def test_noise_is_rounded_down_and_unseen_releases_cost_nothing() -> None:
    account = Account(0, (Spend(0, 3, Release("poisson", 0.1, 100, 10, 2.0, 3)),), None, 1e-3)
    releases = with_noise_times(account, np.array([1.00019, np.inf, 1.5]))
    assert sorted((release.noise_multiplier, release.steps) for release in releases) == [(2.0002, 1), (3.0, 1)]


@pytest.mark.parametrize("budget", ["3", "[1, 2, 3, 4]"])
def test_epsilon_by_colluders_agrees_with_the_plan(budget: str) -> None:
    cancelling = "privacy.noise={kind: cancelling, colluding: 1, secrets: complete}"
    experiment = experiment_of(cancelling, "topology.name=complete", f"privacy.epsilon={budget}")
    plan, figures = experiment.own.protection, dict(by_colluders(experiment))
    assert plan is not None
    planned = max(plan.epsilons(3))
    assert figures[1] <= planned  # peers with more budget may have more noise left than they need
    assert figures[1] == pytest.approx(planned, rel=1e-3) or budget != "3"
    assert figures[3] == pytest.approx(max(plan.epsilons(3, EVERYBODY)), rel=1e-3)
    assert list(figures.values()) == sorted(figures.values())


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["privacy=none"], "nothing is noised"),
        (["algorithm={name: feddeper, learning_rate: 0.1}"], "feddeper sends is not known to be linear"),
        (["algorithm.optimizer={name: adam}"], "is not known to be linear"),
        (["participation={kind: uniform, fraction: 0.5}"], "not all peers are active"),
        (["privacy.noise={module: 'own_noises:Declared'}"], "own_noises:Declared is not known to be independent"),
        (["rounds=257"], "1,028 releases are more"),
    ],
)
def test_an_uncomputed_epsilon_says_why(overrides: list[str], why: str) -> None:
    assert why in str(not_computed(experiment_of(*overrides)))
