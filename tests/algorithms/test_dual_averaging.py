"""DP-DDA: its reference in plain NumPy, the edges it samples, its schedules, and who pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import NoiseTape
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from tiny_scenario import Build

from flower_privdec.algorithms.dual_averaging import DualSchedule
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import State
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import EdgeParticipation, build_participation
from flower_privdec.graph.topology import build_topology, sample_edges
from flower_privdec.scenario import Scenario, to_yaml

CANCER = ["data={dataset: breast-cancer, samples: 200, batch: {sampling: poisson, size: 10}}", "model={name: linear}"]
L2 = "algorithm={name: dp-dda, loss: hinge, regularizer: {kind: l2, weight: 0.01}, gamma: 2}"
L1 = "algorithm={name: dp-dda, loss: logistic, schedule: convex, gamma: 0.5, regularizer: {kind: l1, weight: 0.01}}"
ONE_EDGE = "participation={kind: edges, count: 1}"
COMPLETE = "topology={name: complete}"


def finished(experiment: Experiment, rounds: int, tape: NoiseTape | None = None) -> dict[str, torch.Tensor]:
    """Return the rows after some rounds, with noise that can be replayed where it is given."""
    cohort = experiment.cohort()
    if tape is not None:
        cohort.noise = tape
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine.state.rows


def reference(experiment: Experiment, tape: NoiseTape, rounds: int, loss: str, iota: float, law: Any) -> np.ndarray:
    """Run Algorithm 1 as its pseudocode reads, and return every peer's running average, [n, d]."""
    n, d = 4, 31
    features = np.concatenate([experiment.own.examples.x.double().numpy(), np.ones((200, 1))], axis=1)
    sign = 2.0 * experiment.own.examples.y.numpy() - 1
    z, x, total = np.zeros((n, d)), np.zeros((n, d)), np.zeros((n, d))
    weight, gamma, step = law
    for t in range(1, rounds + 1):
        active = experiment.participation.active(t - 1)
        total += weight(t) * x
        sent = z.copy()
        for i in np.flatnonzero(active):
            drawn = experiment.own.sampler.batch(t - 1, [i])
            rows = experiment.own.examples.parts[i][drawn.index[0][drawn.weight[0] > 0]]
            margin = sign[rows] * (features[rows] @ x[i])
            pull = np.where(margin < 1, -1.0, 0.0) if loss == "hinge" else -1 / (1 + np.exp(margin))
            g = (pull * sign[rows])[:, None] * features[rows]
            g /= np.maximum(1, np.linalg.norm(g, axis=1, keepdims=True))
            noise = experiment.own.protection.noise_multiplier(t - 1)[i] * tape.draw(t - 1, i)
            sent[i] += weight(t) * (g.sum(0) - noise) / 10  # the steps are of -z, so the tape's noise has its sign
        edges = {tuple(sorted(edge)) for edge in experiment.mixing.topology.edges(t - 1).tolist()}
        edges = [edge for edge in edges if active[list(edge)].all()]
        degree = np.bincount(np.array(edges, dtype=int).ravel(), minlength=n)
        W = np.eye(n)
        for i, j in edges:
            W[i, j] = W[j, i] = 1 / (1 + max(degree[i], degree[j]))
        W[np.diag_indices(n)] = 2 - W.sum(1)
        z = W @ sent
        A = sum(weight(s) for s in range(1, t + 2))
        x[active] = step(z[active], iota * A, gamma(t + 1))
    return total / sum(weight(t) for t in range(1, rounds + 1))


def shrunk(z: np.ndarray, scale: float, gamma: float) -> np.ndarray:
    return np.asarray(-np.sign(z) * np.maximum(np.abs(z) - 0.01 * scale, 0) / gamma)


LAWS = {
    "hinge": (lambda t: t, lambda t: 2.0, lambda z, scale, gamma: -z / (0.01 * scale + gamma)),
    "logistic": (lambda t: 1.0, lambda t: 0.5 * math.sqrt(t), shrunk),
}


@pytest.mark.parametrize(("loss", "algorithm"), [("hinge", L2), ("logistic", L1)])
@pytest.mark.parametrize(
    ("who", "graph", "iota"),
    [
        (ONE_EDGE, COMPLETE, 0.5),
        ("participation={kind: edges, count: 2}", COMPLETE, 0.8),  # 1 - C(3, 2) / C(6, 2)
        ("participation={kind: uniform, fraction: 0.75}", "topology={name: ring}", 0.75),
        ("participation={kind: all}", "topology={name: ring}", 1.0),
    ],
)
def test_it_follows_its_reference(build: Build, loss: str, algorithm: str, who: str, graph: str, iota: float) -> None:
    experiment, tape = build(*CANCER, algorithm, who, graph, "rounds=12"), NoiseTape(31)
    expected = reference(experiment, tape, 12, loss, iota, LAWS[loss])
    rows = finished(experiment, 12, tape)
    np.testing.assert_allclose(rows["average"].numpy(), expected, rtol=1e-9, atol=1e-12)
    mean = experiment.algorithm.network_mean(rows)
    np.testing.assert_allclose(mean.numpy(), expected.mean(0), rtol=1e-9, atol=1e-12)
    assert torch.equal(experiment.algorithm.debiased(rows), rows["average"])


# --- who is active ---


@settings(max_examples=60)
@given(
    st.sampled_from(["complete", "ring", "star", "random-regular"]),
    st.integers(6, 12),
    st.one_of(st.integers(1, 5), st.floats(0.3, 1.0)),
    st.integers(0, 99),
)
def test_every_draw_is_doubly_stochastic_and_skips_inactive_peers(name: str, n: int, drawn: float, seed: int) -> None:
    graph = build_topology(name, 2 * (n // 2) if name == "random-regular" else n, seed=seed)
    if isinstance(drawn, int):
        graph = sample_edges(graph, drawn, seed)
        participation: Any = EdgeParticipation(graph)
    else:
        participation = build_participation("uniform", graph.n_peers, seed, fraction=drawn)
    mixing = Mixing(graph, "metropolis", participation)
    for k in range(4):
        W, active = mixing.matrix(k).dense(), participation.active(k)
        np.testing.assert_allclose(W.sum(0), 1, atol=1e-12)
        np.testing.assert_allclose(W.sum(1), 1, atol=1e-12)
        assert W.min() >= 0
        idle = np.flatnonzero(~active)
        np.testing.assert_array_equal(W[idle], np.eye(graph.n_peers)[idle])
        np.testing.assert_array_equal(W[:, idle], np.eye(graph.n_peers)[:, idle])
        if isinstance(drawn, int):
            np.testing.assert_array_equal(active, (W - np.diag(W.diagonal())).any(0))


@pytest.mark.parametrize(("name", "count"), [("complete", 1), ("complete", 3), ("star", 2), ("ring", 6), ("ring", 2)])
def test_a_peer_is_active_at_its_rate(name: str, count: int) -> None:
    participation = EdgeParticipation(sample_edges(build_topology(name, 6), count, seed=5))
    often = np.mean([participation.active(k) for k in range(3000)], axis=0)
    chances = participation.chances
    assert np.abs(often - chances).max() < 5 * math.sqrt(0.25 / 3000)
    if (name, count) == ("ring", 6):
        np.testing.assert_array_equal(chances, 1)
    if (name, count) == ("complete", 1):
        np.testing.assert_allclose(chances, 2 / 6)
    assert build_participation("uniform", 10, fraction=0.25).chances.tolist() == [0.3] * 10
    assert build_participation("all", 3).chances.tolist() == [1.0] * 3


def test_only_drawn_edges_of_the_topology_are_used(build: Build) -> None:
    experiment = build(*CANCER, L2, "topology={name: ring}", "n_peers=6", "participation={kind: edges, count: 2}")
    ring = {tuple(edge) for edge in build_topology("ring", 6).edges(0).tolist()}
    for k in range(20):
        links = experiment.mixing.links(k)
        assert {tuple(link) for link in links.tolist()} <= ring
        assert len(links) == 4
        assert set(links.ravel()) == set(np.flatnonzero(experiment.participation.active(k)))


def test_a_peer_pays_only_when_it_is_active(build: Build) -> None:
    experiment = build(*CANCER, L2, ONE_EDGE, COMPLETE, "rounds=30")
    active = np.stack([experiment.participation.active(k) for k in range(30)])
    for peer, account in enumerate(experiment.own.protection.accounts):
        paid = {k for spend in account.spends for k in range(spend.from_step, spend.to_step)}
        assert paid == set(np.flatnonzero(active[:, peer]).tolist())
    everybody = build(*CANCER, L2, COMPLETE, "rounds=30").own.protection
    assert experiment.own.protection.noise_multiplier(0).max() < everybody.noise_multiplier(0).min()


# --- the schedules and the average ---


@pytest.mark.parametrize("strongly_convex", [True, False])
def test_the_schedule_s_sums_are_sums(strongly_convex: bool) -> None:
    schedule = DualSchedule(strongly_convex, 3.0)
    assert [schedule.total(t) for t in range(1, 9)] == np.cumsum([schedule.weight(t) for t in range(1, 9)]).tolist()
    assert schedule.pull(4) == (3.0 if strongly_convex else 6.0)


def test_the_running_average_stays_precise_over_a_million_rounds(build: Build) -> None:
    """In float32, beside the same in float64: A_t passes 10^11, whose last digits float32 does not hold."""
    algorithm: Any = build(*CANCER, L2, COMPLETE).algorithm
    state, exact = State(np.arange(1), rows={name: torch.zeros(1, 1) for name in ("x", "average")}), 0.0
    for t in [*range(1, 1000), *range(999_000, 1_000_001)]:
        state.round_index = t - 1
        state.rows["x"].fill_(math.sin(t) + 0.5)
        algorithm.average(None, state)
        exact += algorithm.schedule.weight(t) / algorithm.schedule.total(t) * (float(state.rows["x"]) - exact)
    assert float(state.rows["average"]) == pytest.approx(exact, rel=1e-5)


def test_the_average_covers_all_rounds_inactive_peers_included(build: Build) -> None:
    experiment = build(*CANCER, L2, ONE_EDGE, COMPLETE, "privacy=none")
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    total = torch.zeros_like(engine.state.rows["x"])
    for t in range(1, 10):
        total += t * engine.state.rows["x"]
        engine.round()
        torch.testing.assert_close(engine.state.rows["average"], total / (t * (t + 1) / 2), rtol=1e-10, atol=1e-12)


def test_unregularized_start_begins_inside_the_box(build: Build) -> None:
    box = "algorithm={name: dp-dda, schedule: convex, gamma: 1, regularizer: {kind: box, lower: 0.5, upper: 1}}"
    rows = finished(build(box, "topology={name: ring}"), 0)
    assert bool((rows["x"] == 0.5).all())


@pytest.mark.parametrize("settings_", [[L2, ONE_EDGE], [L1, ONE_EDGE], [L2], [L1]], ids=str)
def test_it_learns(build: Build, settings_: list[str]) -> None:
    experiment = build(*CANCER, COMPLETE, *settings_, "privacy=none", "rounds=150")
    model = experiment.algorithm.network_mean(finished(experiment, 150))
    outputs = experiment.kernel.logits(model.unsqueeze(0), experiment.public.x.double())[0]
    assert float((experiment.loss.predict(outputs) == experiment.public.y).double().mean()) > 0.85


# --- the section ---


def test_the_section_may_name_the_tasks_loss(tiny: Callable[..., Scenario]) -> None:
    scenario = tiny(*CANCER, L2, COMPLETE)
    assert scenario.task.loss == "hinge"
    assert tiny(*CANCER, L2, COMPLETE, "task={loss: hinge}") == scenario
    assert "loss: hinge" in to_yaml(scenario).split("algorithm:")[0]
    with raises(ScenarioError, "task.loss-twice", r"algorithm\.loss='hinge'"):
        tiny(*CANCER, L2, COMPLETE, "task={loss: logistic}")
    with raises(ScenarioError, "scenario.extra_forbidden", r"'algorithm\.loss'"):
        tiny("algorithm={name: sgp, learning_rate: 0.1, loss: hinge}")


@pytest.mark.parametrize(
    ("settings_", "refusal"),
    [
        ([L2, ONE_EDGE, "topology={name: directed-ring}"], ("topology.supergraph", "participation.kind=edges")),
        ([L2, ONE_EDGE, "topology={name: server}"], ("topology.supergraph",)),
        ([L2, ONE_EDGE, "topology={name: random-edges}"], ("topology.supergraph", "random-edges")),
        (
            [L2, "participation={kind: edges, count: 5}", "topology={name: ring}"],
            ("topology.edge-count", "participation.count=5"),
        ),
        ([L2, "participation={kind: edges}"], ("scenario.incomplete",)),
        ([L2, "participation={kind: all, count: 1}"], ("scenario.other-choice",)),
        ([L2, "participation={kind: uniform, fraction: 0.25}", COMPLETE], ("mixing.participation",)),
        (
            ["algorithm={name: local, learning_rate: 0.1}", ONE_EDGE],
            ("participation.no-graph", "participation.kind=edges"),
        ),
        (["algorithm={name: dda}", "model={name: softmax}", ONE_EDGE, COMPLETE], ("participation.kind",)),
        ([L2, "model={name: mlp, hidden: [3]}", COMPLETE], ("model.not-linear",)),
        (["algorithm={name: dp-dda, learning_rate: 0.1}"], ("scenario.extra_forbidden", "'algorithm.learning_rate'")),
        (["algorithm={name: dp-dda, schedule: convex, gamma: 0}"], ("regularizer.not-strongly-convex", "gamma=0.0")),
        (["algorithm={name: dp-dda, regularizer: {kind: l1, weight: 1}}"], ("regularizer.not-strongly-convex",)),
        (["algorithm={name: dp-dda, loss: hinge}", "data.dataset=digits"], ("loss.classes", "task.loss='hinge'")),
    ],
)
def test_wrong_settings_are_refused_in_one_line(build: Build, settings_: list[str], refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as refused:
        build(*CANCER, *settings_)
    assert "\n" not in str(refused.value)


def test_noise_is_scaled_together_with_the_gradient(build: Build) -> None:
    """Round t's noise is a_t times the plan's, on a sum that one example moves by a_t clip norms over the batch."""
    experiment = build(*CANCER, L2, COMPLETE)
    tape, silent = NoiseTape(31), NoiseTape(31)
    silent.draw = lambda *_: np.zeros(31)  # type: ignore[method-assign]
    rows, moved = finished(experiment, 2, silent), []
    for noise in (tape, silent):
        cohort, dual = experiment.cohort(), rows["dual"].clone()
        cohort.noise = noise
        cohort.add_step_(dual, rows["x"], 2)
        moved.append(dual.numpy())
    scale = 3 * experiment.own.protection.noise_multiplier(2)[:, None] / 10
    drawn = np.stack([tape.draw(2, i) for i in range(4)])
    np.testing.assert_allclose(moved[0] - moved[1], scale * drawn, rtol=1e-9)
