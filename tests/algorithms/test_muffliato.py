"""Muffliato: its pseudocode in NumPy, what acceleration is worth, and where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import ROUNDS, NoiseTape, clipped_step, engine_with
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.algorithms.muffliato import relaxation
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import spectral_gap
from flower_privdec.graph.topology import build_topology

laws = settings(max_examples=30)


def settings_of(graph: str, steps: int, acceleration: str) -> list[str]:
    algorithm = (
        f"algorithm={{name: muffliato, learning_rate: 0.5, gossip_steps: {steps}, acceleration: {acceleration}}}"
    )
    return [algorithm, f"topology.name={graph}", "n_peers=7"]


def gossip(w: np.ndarray, x: np.ndarray, steps: int, acceleration: str) -> np.ndarray:
    """Gossip as the recursion reads, with the gap from the eigenvalues of W."""
    gap = 1 - np.sort(np.abs(np.linalg.eigvalsh(w)))[-2]
    omega = 2 * (1 - np.sqrt(gap * (1 - gap / 4))) / (1 - gap / 2) ** 2 if acceleration == "chebyshev" else 1
    before, x = x, w @ x
    for _ in range(steps - 1):
        before, x = x, omega * w @ x + (1 - omega) * before
    return x


@pytest.mark.parametrize("acceleration", ["none", "chebyshev"])
@pytest.mark.parametrize(("graph", "steps"), [("ring", 1), ("ring", 2), ("bipartite", 5), ("star", 4)])
def test_it_follows_its_reference(build: Any, graph: str, steps: int, acceleration: str) -> None:
    experiment, tape = build(*settings_of(graph, steps, acceleration)), NoiseTape(650)
    engine, w = engine_with(experiment, tape), experiment.mixing.matrix(0).dense()
    x = np.tile(experiment.initial.numpy(), (7, 1))
    for k in range(ROUNDS):
        engine.round()
        x = np.stack([x[i] - 0.5 * clipped_step(experiment, tape, k, i, x[i]) for i in range(7)])
        x = gossip(w, x, steps, acceleration)
    assert np.abs(x - experiment.initial.numpy()).max() > 1e-2
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("more", [["topology.name=random-edges", "topology.edges=3"], ["topology.name=server"], []])
def test_plain_gossip_takes_one_matrix_a_round(build: Any, more: list[str]) -> None:
    half = "participation={kind: uniform, fraction: 0.5}"
    experiment, tape = build(*settings_of("ring", 3, "none"), half, *more), NoiseTape(650)
    engine, x = engine_with(experiment, tape), np.tile(experiment.initial.numpy(), (7, 1))
    for k in range(ROUNDS):
        engine.round()
        for i in np.flatnonzero(experiment.participation.active(k)):
            x[i] -= 0.5 * clipped_step(experiment, tape, k, i, x[i])
        x = np.linalg.matrix_power(experiment.mixing.matrix(k).dense(), 3) @ x
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)


def gossiped(build: Any, graph: str, steps: int, acceleration: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random models before and after one round in which nobody descends."""
    experiment = build(*settings_of(graph, steps, acceleration), "privacy=none", "algorithm.learning_rate=1e-300")
    cohort = experiment.cohort()
    state = experiment.initial_state(cohort)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(state.rows["x"].shape)))
    state.rows["x"] = x.clone()
    Engine(experiment.algorithm, cohort, state).round()
    return x, state.rows["x"]


@pytest.mark.parametrize("graph", ["ring", "bipartite", "star", "complete", "server"])
@pytest.mark.parametrize("acceleration", ["none", "chebyshev"])
def test_gossip_conserves_the_mean(build: Any, graph: str, acceleration: str) -> None:
    before, after = gossiped(build, graph, 6, acceleration)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-12, atol=1e-13)
    if graph in ("complete", "server"):  # one step is enough, and no step undoes it
        torch.testing.assert_close(after, before.mean(0).expand_as(after), rtol=1e-12, atol=1e-13)


def test_acceleration_agrees_sooner_where_plain_gossip_is_slow(build: Any) -> None:
    apart = {
        acceleration: float(gossiped(build, "ring", 12, acceleration)[1].std(0).norm())
        for acceleration in ("none", "chebyshev")
    }
    assert apart["chebyshev"] < 0.5 * apart["none"]


@laws
@given(st.sampled_from(["ring", "star", "bipartite", "erdos-renyi", "small-world"]), st.integers(5, 24), st.booleans())
def test_the_recursion_contracts_at_its_rate_on_any_graph(name: str, n: int, uniform: bool) -> None:
    """Every eigenvalue of W but 1 makes a recursion whose roots lie within the unit circle; mostly sqrt(ω - 1)."""
    mixing = Mixing(build_topology(name, n, seed=n), "max-degree" if uniform else "metropolis")
    gap, omega = spectral_gap(mixing), relaxation(mixing)
    assume(gap < 1)
    assert 1 < omega < 2
    eigenvalues = np.linalg.eigvalsh(mixing.matrix(0).dense())[:-1]
    roots = np.abs([np.roots([1, -omega * value, omega - 1]) for value in eigenvalues])
    assert roots.max() < 1
    assert roots.max() <= max(1 - gap, np.sqrt(omega - 1)) + 1e-12


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (
            ["topology.name=directed-ring"],
            ("muffliato.chebyshev", "directed-ring"),
        ),
        (["topology={name: random-edges, edges: 3}"], ("muffliato.chebyshev", "random-edges")),
        (["participation={kind: uniform, fraction: 0.5}"], ("muffliato.chebyshev",)),
        (["n_peers=1030", "data.samples=1100"], ("muffliato.many-peers", "n_peers")),
        (["algorithm.gossip_steps=0"], ("scenario.greater_than_equal", "algorithm.gossip_steps=0")),
        (["algorithm.gossip_steps=100000000"], ("scenario.less_than_equal", "algorithm.gossip_steps=100000000")),
        (["algorithm.acceleration=fast"], ("scenario.literal_error", "algorithm.acceleration='fast'")),
        (["topology.weights=column-stochastic"], ("mixing.mean-not-kept",)),
        (["privacy.calibration=paper"], ("privacy.no-formula",)),
    ],
)
def test_wrong_settings_are_refused_in_one_line(build: Any, more: list[str], refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as refused:
        build(*settings_of("ring", 5, "chebyshev"), *more)
    assert "\n" not in str(refused.value)


def test_more_gossip_costs_traffic_and_no_privacy(build: Any) -> None:
    one, five = (build(*settings_of("ring", steps, "none")) for steps in (1, 5))
    np.testing.assert_array_equal(one.own.protection.noise_multipliers, five.own.protection.noise_multipliers)
