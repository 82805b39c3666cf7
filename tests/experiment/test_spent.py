"""Every printed ε is of one adversary, and composes over all runs of a ledger against that adversary."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from tiny_scenario import Build
from variants import settings_for

from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.spent import Spent
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.cancelling import PairPlan
from flower_privdec.privacy.mechanism.events import EVERYBODY, ONE_NEIGHBOUR, Adversary, Release

PAIRS = ["privacy.noise={kind: cancelling, colluding: 1, secrets: complete}", "topology.name=complete"]
FIXED = ["rounds=4", "privacy.epsilon=30", "privacy.noise_multiplier=2"]
REPLIES = settings_for("algorithm.name=dp-cga")


def charge_all(experiment: Experiment, folder: Path) -> Spent:
    """Charge all steps of a run, without taking them, and return what its summary would say."""
    cohort: Cohort = experiment.cohort(folder)
    assert cohort.ledger is not None
    with cohort.ledger as ledger:
        for step in range(ledger.spending.steps):
            ledger.charge(step, np.flatnonzero(ledger.allowed(step)))
        return Spent.of(cohort, experiment.scenario.rounds)


def left_by_colluders(plan: PairPlan, peer: int, colluding: int) -> float:
    """Return a peer's noise over V in step 0, whitened against each set of colluders: the least."""
    needed = plan.needed[0]
    n = len(needed)
    own = plan.own[0] * needed
    pair = plan.pair_std(0, np.arange(n), own / plan.weights)
    worst = math.inf
    for gone in combinations([other for other in range(n) if other != peer], colluding):
        honest = [one for one in range(n) if one not in gone]
        covariance = np.diag(own[honest] ** 2)
        for (one, other), std in zip(plan.edges.tolist(), pair.tolist(), strict=True):
            if one in honest and other in honest:
                both = [honest.index(one), honest.index(other)]
                covariance[np.ix_(both, both)] += std**2 * np.array([[1, -1], [-1, 1]])
        at = honest.index(peer)
        worst = min(worst, float(np.linalg.inv(covariance)[at, at]) ** -0.5)
    return worst / float(needed[peer])


def composed(parts: list[tuple[float, float, int]], delta: float) -> float:
    """Return dp-accounting's ε of Poisson-sampled Gaussian steps: rate, noise multiplier, number."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-3)
    for rate, noise, steps in parts:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


@pytest.mark.slow
def test_each_adversarys_epsilon_composes_over_runs(build: Build, tmp_path: Path) -> None:
    runs = [
        [*FIXED, *PAIRS],
        [*FIXED, *PAIRS, "seed=5"],
        [*FIXED, *PAIRS, "seed=6", "privacy.noise.colluding=2"],
        [*FIXED, "seed=7", "privacy.noise_multiplier=8"],
    ]
    past: list[Experiment] = []
    for settings in runs:
        experiment = build(*settings)
        past.append(experiment)
        spent = charge_all(experiment, tmp_path)
        printed = {spent.colluding: spent.epsilons[0]}
        if spent.if_all_collude:
            printed[None] = spent.if_all_collude[0]
        assert set(printed) <= {1, 2, None}
        for colluding, epsilon in printed.items():
            parts = []
            for one in past:
                plan = one.own.protection
                assert plan is not None
                noise = 2.0 if plan.pairs is not None else 8.0
                if plan.pairs is not None:
                    n = one.scenario.n_peers
                    noise *= left_by_colluders(plan.pairs, 0, n - 1 if colluding is None else colluding)
                rate = plan.accounts[0].spends[0].release.sampling_rate
                parts.append((rate, noise, 4))
            truth = composed(parts, spent.deltas[0])
            assert 0.999 * truth <= epsilon <= 1.02 * truth


def test_replies_to_one_neighbour_compose_over_runs(build: Build, tmp_path: Path) -> None:
    first = charge_all(build("rounds=4", *REPLIES), tmp_path)
    again = charge_all(build("rounds=4", *REPLIES, "seed=9"), tmp_path)
    costs = costs_in(read_entries(tmp_path, "digits"), ONE_NEIGHBOUR)
    assert first.replies[0] < again.replies[0] < again.epsilons[0]
    assert again.replies[0] == pytest.approx(epsilon_of_runs(costs, again.deltas[0]))


def test_a_stronger_adversary_has_no_smaller_epsilon(build: Build, tmp_path: Path) -> None:
    charge_all(build(*FIXED, *PAIRS), tmp_path)
    charge_all(build("rounds=2", *REPLIES, "seed=3"), tmp_path)
    entries = read_entries(tmp_path, "digits")
    adversaries = [*(Adversary(colluding) for colluding in range(4)), EVERYBODY]
    values = [epsilon_of_runs(costs_in(entries, adversary), 1e-3) for adversary in adversaries]
    assert values == sorted(values)
    assert values[0] < values[-1]
    assert epsilon_of_runs(costs_in(entries, ONE_NEIGHBOUR), 1e-3) <= values[1]


def test_an_unrecorded_number_counts_as_the_next_larger() -> None:
    release = Release("full", 1.0, 10, 10, 1.0, against=((1, 5.0), (4, 3.0)), one_neighbour=2.0)
    noises = {colluding: release.towards(Adversary(colluding)).noise_multiplier for colluding in (0, 1, 2, 4, 5, None)}
    assert noises == {0: 5.0, 1: 5.0, 2: 3.0, 4: 3.0, 5: 1.0, None: 1.0}
    assert release.towards(ONE_NEIGHBOUR).noise_multiplier == 5.0
    assert release.towards(EVERYBODY) == Release("full", 1.0, 10, 10, 1.0)


def test_runs_of_one_partition_are_charged_peer_by_peer(build: Build, tmp_path: Path) -> None:
    budgets = ["rounds=4", "privacy.epsilon=[1, 2, 4, 8]"]
    alone = charge_all(build(*budgets), tmp_path / "one")
    charge_all(build("rounds=4", "privacy.epsilon=null", "privacy.noise_multiplier=40"), tmp_path / "two")
    # The second run deals the same examples out to the same peers, so each pays only for its own first part.
    beside = build(*budgets, "privacy.epsilon=[2, 4, 8, 16]", "compute.generator=system")
    both = charge_all(beside, tmp_path / "one")
    for first, total, budget in zip(alone.epsilons, both.epsilons, (2, 4, 8, 16), strict=True):
        assert first < total <= budget
    # Another partition may have had an example at the peer that paid most.
    other = build("rounds=4", "privacy.epsilon=null", "privacy.noise_multiplier=40", "seed=5")
    moved = charge_all(other, tmp_path / "one")
    assert min(moved.epsilons) >= max(both.epsilons)
