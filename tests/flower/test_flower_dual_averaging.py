"""Dual averaging as a strategy: the paper's numbers, what a peer pays, restarts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from raising import raises
from routing_peers import client, first

from flower_privdec.algorithms.proximal import Regularizer
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import DualAveraging, LocalGrid
from flower_privdec.flower.mods.peer_messages import PeerRequest
from flower_privdec.graph.mixing import mixing_matrix
from flower_privdec.graph.topology import build_topology
from flower_privdec.peer.dual_step import DualStep
from flower_privdec.privacy.ledger.segments import read_chain

CENTERS = np.array([[1.0, -2.0, 0.3], [3.0, 1.0, 0.0], [-1.0, 0.5, 0.1], [2.0, 2.0, -0.2]])


def gradient_step(arrays: list[np.ndarray], peer: int, server_round: int) -> list[np.ndarray]:
    """Take a step of learning rate 1 on ‖x - center‖² / 2."""
    return [CENTERS[peer] + 0 * arrays[0]]


def start(strategy: DualAveraging, rounds: int, folder: Path | None = None, **options: Any) -> np.ndarray:
    grid = LocalGrid(client(gradient_step, **options), 4, folder=folder)
    return first(strategy.start(grid, ArrayRecord([np.full(3, 9.0)]), rounds).arrays)


STEPS = {
    "convex": ({}, DualStep(False, 2.0)),
    "l1": ({"regularizer": {"kind": "l1", "weight": 0.3}}, DualStep(False, 2.0, l1=0.3)),
    "box": ({"regularizer": {"kind": "box", "lower": -0.5, "upper": 0.5}}, DualStep(False, 2.0, lower=-0.5, upper=0.5)),
    "ball": ({"regularizer": {"kind": "ball", "radius": 0.7}}, DualStep(False, 2.0, radius=0.7)),
    "strongly-convex": (
        {
            "regularizer": {"kind": "elastic-net", "weight": 0.5, "l1_weight": 0.1},
            "schedule": "strongly-convex",
        },
        DualStep(True, 2.0, l2=0.5, l1=0.1),
    ),
}


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_are_the_papers(name: str, seal: bool) -> None:
    options, step = STEPS[name]
    ours = start(DualAveraging("ring", gamma=2.0, fraction_evaluate=0.0, **options), 6, seal=seal)
    graph = build_topology("ring", 4)
    sums, averages, total = np.zeros((4, 3)), np.zeros((4, 3)), 0.0
    for t in range(1, 7):
        weight = step.weight(t)
        total += weight
        x = np.stack([step.point(s, t) for s in sums])
        averages += weight / total * (x - averages)
        mixed = mixing_matrix(graph.edges(t - 1), 4, "metropolis", np.ones(4, bool)).dense()
        sums = mixed @ (sums + weight * (CENTERS - x))
    np.testing.assert_allclose(ours, averages.mean(0), atol=1e-6 if seal else 1e-12)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_engines(name: str) -> None:
    step, s = STEPS[name][1], np.random.default_rng(1).normal(size=(5, 3)) * 3
    regularizer = Regularizer(step.l2, step.l1, step.lower, step.upper, step.radius)
    for t in (1, 4):
        scale = t * (t + 1) / 2 if step.strongly_convex else t
        theirs = regularizer.minimizer(-torch.from_numpy(s), scale, step.pull(t)).numpy()
        np.testing.assert_allclose([step.point(row, t) for row in s], theirs, rtol=1e-12)
    assert DualStep.from_json(step.to_json()) == step


def test_it_minimises_the_regularized_mean_loss() -> None:
    strategy = DualAveraging("complete", regularizer={"kind": "l1", "weight": 0.5}, gamma=2.0, fraction_evaluate=0.0)
    best = np.sign(CENTERS.mean(0)) * np.maximum(np.abs(CENTERS.mean(0)) - 0.5, 0)
    assert np.abs(start(strategy, 120) - best).max() < 0.2


def test_a_peer_pays_for_active_rounds_across_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip_norm": 0.5, "noise_multiplier": 3.0, "delta": 1e-3}
    for rounds in (2, 6):
        strategy = DualAveraging("ring", name="law", fraction_train=0.5, min_train_nodes=1, fraction_evaluate=0.0)
        start(strategy, rounds, tmp_path, **options)
    entries = [read_chain(tmp_path / f"peer-{peer}" / "peer-updates.jsonl")[1] for peer in range(4)]
    assert sum(map(len, entries)) == 6 * 2
    assert all("noise multiplier 3" in report.spent for report in strategy.reports.values())


def test_an_interrupted_run_ends_with_the_same_numbers(tmp_path: Path) -> None:
    def run(rounds: int, folder: Path) -> np.ndarray:
        return start(DualAveraging("ring", name="law", gamma=2.0, fraction_evaluate=0.0), rounds, folder)

    run(2, tmp_path / "a")
    np.testing.assert_allclose(run(5, tmp_path / "a"), run(5, tmp_path / "b"), rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"topology": "directed-exponential"},
        {"gamma": 0.0},
        {"schedule": "strongly-convex"},
        {"regularizer": {"kind": "l3"}},
        {"regularizer": {"kind": "l1", "weight": -1.0}},
    ],
)
def test_options_that_have_no_least_value_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ScenarioError):
        DualAveraging(**options)


WRONG = ["x", "{}", "[1]", DualStep(False, 0.0).to_json(), DualStep(False, 1.0, lower=np.nan).to_json()]


@pytest.mark.parametrize("text", WRONG)
def test_a_server_cannot_invent_a_step(text: str, tmp_path: Path) -> None:
    with raises(RunError, "flower.dual"):
        DualStep.from_json(text)
    grid = LocalGrid(client(gradient_step), 1, folder=tmp_path)
    fields = {"run": "r", "folder": str(tmp_path), "founding": True, "dual": text}
    content = {"privdec.says": PeerRequest("join", peer=0, **fields).record(), "config": ConfigRecord({})}
    content["privdec.initial"] = ArrayRecord([np.zeros(3)])
    (reply,) = grid.send_and_receive([Message(RecordDict(content), 100, "train")])
    assert reply.has_error()
    assert not list(tmp_path.glob("*/run-*"))
