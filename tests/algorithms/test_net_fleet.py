"""NET-FLEET with noise: its reference in NumPy, what it tracks, that noise does not pile up, and what it is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algorithm_references import ROUNDS, NoiseTape, clipped_step, engine_with
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine

RATE = 0.5
HALF = "participation={kind: uniform, fraction: 0.5}"
laws = settings(max_examples=8)


def settings_of(steps: int, *more: str) -> list[str]:
    algorithm = f"algorithm={{name: dp-net-fleet, learning_rate: {RATE}, local_steps: {steps}}}"
    return [algorithm, "topology.name=ring", "n_peers=6", *more]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("more", [[], [HALF]], ids=["all", "some"])
def test_it_follows_its_reference(build: Any, steps: int, more: list[str]) -> None:
    experiment, tape = build(*settings_of(steps, *more)), NoiseTape(650)
    engine = engine_with(experiment, tape)
    x = np.tile(experiment.initial.numpy(), (6, 1))
    v, last = np.zeros_like(x), np.zeros_like(x)
    for k in range(ROUNDS):
        engine.round()
        active = experiment.participation.active(k)
        for i in range(6):
            for step in range(steps if active[i] else 0):
                g = clipped_step(experiment, tape, steps * k + step, i, x[i])
                v[i] += g - last[i]
                last[i] = g
                x[i] -= RATE * v[i]
            if not active[i]:
                v[i], last[i] = v[i] - last[i], 0
        w = experiment.mixing.matrix(k).dense()
        x, v = w @ x, w @ v
    rows = engine.state.rows
    assert np.abs(x - experiment.initial.numpy()).max() > 1e-2
    np.testing.assert_allclose(rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(rows["correction"].numpy(), -RATE * v, rtol=1e-9, atol=1e-11)


@laws
@given(
    st.integers(1, 4),
    st.sampled_from(["ring", "bipartite", "star", "complete", "random-edges", "server", "directed-ring"]),
    st.booleans(),
    st.sampled_from(["privacy=none", "privacy.epsilon=1"]),
)
def test_the_corrections_sum_to_the_last_gradients(
    build: Any, steps: int, graph: str, some: bool, privacy: str
) -> None:
    """Σ_i v_i = Σ_i ĝ_i after every round, with the noise, whoever is active."""
    absent = [HALF] if some and graph not in ("server", "directed-ring") else []
    experiment = build(*settings_of(steps, f"topology={{name: {graph}}}", privacy, *absent))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(4):
        engine.round()
        rows = engine.state.rows
        assert float(rows["gradient"].sum(0).norm()) > 0
        torch.testing.assert_close(rows["correction"].sum(0), rows["gradient"].sum(0), rtol=1e-9, atol=1e-12)


def test_mean_correction_is_the_mean_gradient_for_full_batches(build: Any) -> None:
    """Without noise, all peers with the same examples: mean v is the gradient at the model the last step began at."""
    full = ["privacy=none", "data.batch={sampling: full}", "data.samples=240"]
    experiment = build(*settings_of(3, *full))
    one = experiment.own.examples.parts[0]
    for part in experiment.own.examples.parts:
        part[:] = one
    engine = testing.run_rounds(experiment, 4)
    rows, cohort = engine.state.rows, experiment.cohort()
    before = rows["x"] - rows["correction"]  # alike in every row, so mixing changed neither
    torch.testing.assert_close(rows["x"], rows["x"][:1].expand(6, -1), rtol=1e-9, atol=1e-12)
    step = torch.zeros_like(before)
    cohort.add_step_(step, before.contiguous(), 0)
    torch.testing.assert_close(rows["correction"].mean(0), step.mean(0), rtol=1e-8, atol=1e-12)


def test_noise_does_not_pile_up_in_the_correction(build: Any) -> None:
    """After 200 rounds it is as large as after 20; a random walk would be three times that."""
    noise = [
        "rounds=200",
        "privacy={noise_multiplier: 4.0, delta: 1.0e-3, clip_norm: 0.01}",
        "algorithm.learning_rate=1e-3",
    ]
    experiment = build(*settings_of(2, *noise))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    sizes = []
    for _ in range(200):
        engine.round()
        sizes.append(float(engine.state.rows["correction"].norm()))
    assert np.mean(sizes[-20:]) < 1.2 * np.mean(sizes[10:30])


def test_unlike_peers_meet_at_the_optimum_unlike_local_steps(build: Any, label_partitions: None) -> None:
    """With three digits a peer, all examples and no noise: nearer to the optimum, and to each other."""
    data = "data.partition={kind: pathological, classes_per_peer: 3}"
    common = [data, "privacy=none", "data.batch={sampling: full}", "rounds=100"]
    slope, apart = {}, {}
    for name, own in (("dp-net-fleet", []), ("fedavg", ["algorithm.weighting=uniform"])):
        experiment = build(*settings_of(5), *common, f"algorithm.name={name}", "algorithm.learning_rate=0.2", *own)
        rows = testing.run_rounds(experiment, 100).state.rows
        mean, step = experiment.algorithm.network_mean(rows), torch.zeros_like(rows["x"])
        experiment.cohort().add_step_(step, mean.expand(6, -1).contiguous(), 0)
        slope[name] = float(step.mean(0).norm())  # of the network's loss at the mean model
        apart[name] = float(experiment.algorithm.debiased(rows).std(0).norm())
    assert slope["dp-net-fleet"] < 0.7 * slope["fedavg"]
    assert apart["dp-net-fleet"] < 0.1 * apart["fedavg"]


def test_a_spent_peer_leaves_nothing_stale_behind(build: Any) -> None:
    experiment = build(*settings_of(2, "privacy.epsilon=1"))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    engine.round()
    engine.round()
    never = np.zeros(6, dtype=bool)
    cohort.active = lambda round_index: never  # type: ignore[method-assign]
    before = engine.state.rows["x"].clone()
    engine.round()
    rows = engine.state.rows
    assert float(rows["gradient"].norm()) == 0
    torch.testing.assert_close(rows["correction"].sum(0), torch.zeros(650).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(rows["x"].sum(0), before.sum(0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["topology.name=server", HALF], ("participation.kind",)),
        (["algorithm.local_steps=0"], ("scenario.greater_than_equal", "algorithm.local_steps=0")),
        (["topology.weights=column-stochastic"], ("mixing.mean-not-kept", "dp-net-fleet")),
        (["privacy.calibration=paper"], ("privacy.no-formula", "dp-net-fleet")),
    ],
)
def test_wrong_settings_are_refused_in_one_line(build: Any, more: list[str], refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as refused:
        build(*settings_of(5, *more))
    assert "\n" not in str(refused.value)
