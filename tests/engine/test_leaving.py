"""Peers that leave a simulation: what they and the others draw, pay and show, in the engine and in Flower's modes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flower_runs import final_rows, metrics, run_under_flower
from raising import raises
from tiny_scenario import Build, Tiny
from torch import Tensor
from worker_runs import smallest_blocks, whole

from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.pair_plan import pair_plan
from flower_privdec.experiment.recorder import model_tensors
from flower_privdec.peer.trainer import network_mixing
from flower_privdec.testing import recording

PAIRS = "privacy.noise={kind: cancelling, colluding: 1, absent: 1, strength: 2.0}"
CORRELATED_PAIRS = "privacy.noise={kind: cancelling, colluding: 1, bands: 3}"
GONE = "participation={leaving: [{peer: 2, round: 2}], noticed_after: 1}"
BACK = "participation={leaving: [{peer: 0, round: 1, until: 4}, {peer: 3, round: 5}], noticed_after: 2}"
SIX = ["n_peers=6", "topology={name: directed-exponential, mixing_steps: 3}"]


def rows_after(experiment: Experiment, rounds: int) -> dict[str, Tensor]:
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.rounds(rounds)
    return {name: row.clone() for name, row in engine.state.rows.items()}


def test_nobody_knows_beforehand_who_leaves(build: Build) -> None:
    """Until a peer leaves all numbers are those of a run in which it stays; what it has then stays as it was."""
    stays = build(*SIX, "privacy=none")
    leaves = build(*SIX, "privacy=none", GONE)
    before = rows_after(stays, 2)
    assert torch.equal(before["x"], rows_after(leaves, 2)["x"])

    after = rows_after(leaves, 4)
    assert torch.equal(after["x"][2], before["x"][2])
    assert not torch.equal(after["x"][1], before["x"][1])
    assert not torch.equal(after["x"], rows_after(stays, 4)["x"])


def test_pairs_are_as_weak_as_on_a_network(build: Build) -> None:
    """If peers leave, what the others drew with them stays in the sum: so `auto` weighs that as a network does."""
    noise = "privacy.noise={kind: cancelling, colluding: 1}"
    eight = ["n_peers=8", "topology={name: directed-exponential, mixing_steps: 3}", noise]
    stays = build(*eight)
    agreement = Agreement.of(stays.scenario)
    network = pair_plan(agreement, stays.own.sampler, True, np.ones((6, 8)))
    leaves = build(*eight, GONE).own.protection
    assert leaves.pairs.strength == network.strength < stays.own.protection.pairs.strength


def test_the_mean_model_kept_is_that_of_who_stays(build: Build) -> None:
    """The one of which the accuracy is printed."""
    experiment = build(*SIX, "privacy=none", GONE, "algorithm.name=d-psgd", "topology.name=complete")
    rows = rows_after(experiment, 4)
    models = model_tensors(experiment, rows, 4)
    for name in [name for name in models if name.startswith("mean/")]:
        those = [models[f"peer-{peer}/{name.removeprefix('mean/')}"] for peer in (0, 1, 3, 4, 5)]
        torch.testing.assert_close(models[name], torch.stack(those).mean(0))


def test_who_leaves_is_planned_as_one_that_stays(build: Build) -> None:
    """The noise of pairs, and that of each peer's own, until it is noticed; another run has other keys."""
    stays = build(*SIX, PAIRS.replace("2.0", "auto")).own.protection
    leaves = build(*SIX, PAIRS.replace("2.0", "auto"), GONE).own.protection
    assert leaves.pairs.strength == stays.pairs.strength
    assert np.array_equal(leaves.pairs.planned, stays.pairs.planned)
    assert np.array_equal(leaves.pairs.needed, stays.pairs.needed)
    assert np.array_equal(leaves.noise_multipliers[:3], stays.noise_multipliers[:3])


@pytest.mark.parametrize("leaving", [GONE, BACK])
def test_everybody_pays_for_the_steps_it_takes(build: Build, leaving: str) -> None:
    """At the noise that was planned for all rounds: who is away for some pays less, and the others pay as planned."""
    planned = build(*SIX, PAIRS).own.protection
    protection = build(*SIX, PAIRS, leaving).own.protection
    participation = build(*SIX, PAIRS, leaving).participation
    for peer in range(6):
        there = [k for k in range(6) if participation.present(k)[peer]]
        spends = protection.accounts[peer].spends
        assert [step for spend in spends for step in range(spend.from_step, spend.to_step)] == there
    away = {absence.peer for absence in participation.absences}
    for peer, (ours, theirs) in enumerate(zip(protection.epsilons(6), planned.epsilons(6), strict=True)):
        assert ours < theirs if peer in away else ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("absent", [0, 1])
def test_every_step_is_hidden_while_peers_are_away(build: Build, absent: int) -> None:
    """By the covariance of what those that are there release, with any one colluding, one that is gone included.

    For the rounds in which a peer is gone unnoticed the others add what they draw with it, and then own noise for it.
    """
    experiment = build(*SIX, PAIRS, BACK, f"privacy.noise.absent={absent}")
    plan = experiment.own.protection.pairs
    participation = experiment.participation
    topped = False
    for step in range(6):
        needed = plan.needed[step]
        there = np.flatnonzero(participation.present(step))
        pair = plan.planned_pairs(step)
        dropped = participation.noticed(step)
        assert ((pair == 0) == dropped[plan.edges].any(axis=1)).all()
        topped |= bool((plan.own[step] > plan.planned[step])[there].any())

        for colluder in range(6):
            honest = [peer for peer in there.tolist() if peer != colluder]
            columns = [np.eye(6)[peer] * plan.own[step, peer] * needed[peer] for peer in honest]
            for (i, j), std in zip(plan.edges.tolist(), pair.tolist(), strict=True):
                if colluder not in (i, j):
                    columns.append((np.eye(6)[i] - np.eye(6)[j]) * std)
            drawn = np.stack(columns, axis=1)[honest]
            left = np.diag(np.linalg.inv(drawn @ drawn.T)) ** -0.5
            assert (left >= needed[honest] * (1 - 1e-9)).all()
    assert topped is (absent == 0)


def test_sampled_noise_is_as_planned_when_peers_leave(build: Build) -> None:
    """Sampled: in the sum over those that are there only own noise is left, and what they drew with one unnoticed."""
    experiment = build(*SIX, PAIRS, BACK, "privacy.noise.absent=0")
    plan = experiment.own.protection.pairs
    with recording() as tape:
        rows_after(experiment, 6)
    for step in tape.steps:
        noise = (step.after["gradient"] - step.before["gradient"] - step.raw["gradient"]).sum(0)
        own = np.square(plan.own[step.step] * plan.needed[step.step])[step.peers].sum()
        pair = plan.planned_pairs(step.step)
        one_sided = np.isin(plan.edges, step.peers).sum(axis=1) == 1
        expected = (own + np.square(pair[one_sided]).sum()) ** 0.5
        assert float(noise.std()) == pytest.approx(expected, rel=0.15)
        assert one_sided.any() == (step.step in (1, 2, 3, 5))


def test_figures_are_of_the_peers_that_are_there(build: Build) -> None:
    """While a peer is away, neither the mean nor the least of the peers' models has it."""
    experiment = build(*SIX, PAIRS, BACK)
    rows = rows_after(experiment, 3)
    rows["x"][0] = 1e9  # what a gone peer has is seen by no one
    measured = evaluate(experiment, rows, 3)
    others = {name: row[1:] for name, row in rows.items()}
    assert measured == evaluate(build(*SIX, PAIRS), others, 3)
    assert evaluate(experiment, rows, 4)["consensus_distance"] == measured["consensus_distance"]
    assert evaluate(experiment, rows, 5)["consensus_distance"] > 1e6  # it is back


def test_workers_and_flower_leave_alike(build: Build, tiny: Tiny, tmp_path: Path) -> None:
    """The same numbers, whoever hosts the peers, of which one comes back and one does not."""
    settings = [PAIRS, "participation={leaving: [{peer: 0, round: 1, until: 4}, {peer: 3, round: 5}]}", "n_peers=4"]
    (one, figures), (two, others) = (whole(build(*settings), tmp_path / str(n), n) for n in (1, 2))
    assert torch.equal(one["x"], two["x"])
    assert figures == others

    out = run_under_flower(tiny(*settings), tmp_path / "relay", "relay")
    run(build(*settings), tmp_path / "engine")
    torch.testing.assert_close(final_rows(out)["x"], one["x"])
    assert [line["round"] for line in metrics(out)] == [line["round"] for line in metrics(tmp_path / "engine")]
    for ours, theirs in zip(metrics(out), metrics(tmp_path / "engine"), strict=True):
        assert ours["accuracy"] == theirs["accuracy"]


@pytest.mark.parametrize("noise", [PAIRS, "privacy.noise={kind: correlated, bands: 3}", CORRELATED_PAIRS])
def test_a_run_resumed_in_an_absence_goes_on_alike(build: Build, tmp_path: Path, noise: str) -> None:
    """By other numbers of processes, with a peer away at the stop that comes back: the same rows, and the same cost."""
    settings = [*SIX, noise, BACK, "evaluation.every=1"]
    rows, _ = whole(build(*settings), tmp_path / "one", 1)
    with smallest_blocks():
        under_way = Run(build(*settings), tmp_path / "again", workers=3)
    for _ in range(3):
        under_way.advance()
    under_way.close()
    resumed, _ = whole(build(*settings), tmp_path / "again", 2, resume=True)
    assert all(torch.equal(resumed[name], part) for name, part in rows.items())
    spent = [json.loads((tmp_path / name / "summary.json").read_text())["privacy"] for name in ("one", "again")]
    assert spent[0] == spent[1]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["participation={leaving: [{peer: 4, round: 2}]}"], "participation.leaving"),
        (["participation={leaving: [{peer: 1, round: 6}]}"], "participation.leaving"),
        (["participation={leaving: [{peer: 1, round: 3, until: 3}]}"], "participation.leaving"),
        (["participation={leaving: [{peer: 1, round: 1}, {peer: 1, round: 3}]}"], "participation.leaving"),
        (
            ["participation={leaving: [{peer: 0, round: 1}, {peer: 1, round: 1}, {peer: 2, round: 3}]}"],
            "participation.leaving",
        ),
        (["participation={leaving: [{peer: -1, round: 1}]}"], "scenario.greater_than_equal"),
        (["participation={noticed_after: 2}"], "participation.noticed"),
        ([GONE, "participation.noticed_after=-1"], "scenario.greater_than_equal"),
        (["algorithm.name=d-psgd", "topology={name: directed-ring}", GONE], "mixing.participation"),
    ],
)
def test_absences_that_cannot_be_are_refused(build: Build, settings: list[str], code: str) -> None:
    with raises(ScenarioError, code):
        build(*settings)


def test_peers_of_a_network_leave_by_themselves(tiny: Tiny) -> None:
    with raises(ScenarioError, "participation.leaving", "--kill"):
        network_mixing(Agreement.of(tiny(GONE)))
