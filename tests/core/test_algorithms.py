"""The laws every algorithm keeps, and reference trajectories in plain NumPy."""

import copy

import numpy as np
import pytest
import torch
from algorithm_references import ROUNDS, NoiseTape, clipped_step, engine_with, softmax_gradients
from hosting import hosting
from raising import raises
from variants import VARIANTS, settings_for

from flower_privdec.common.errors import RunError
from flower_privdec.core import Edges, Exchange, State
from flower_privdec.core.cohort import LearningRate
from flower_privdec.engine.engine import Engine

ALL_ACTIVE = ("algorithm.name=adp2-sgd", "algorithm={name: dda}")


@pytest.fixture(params=VARIANTS, ids=" ".join)
def variant(request):
    """Return the settings of every algorithm in every variant."""
    return settings_for(*request.param)


def final_state(experiment, rounds=ROUNDS):
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine.state


def slice_of(state, row):
    rows = {name: value[row : row + 1].clone() for name, value in state.rows.items()}
    edges = {name: each.of(int(state.peers[row])) for name, each in state.edges.items()}
    edges = {name: Edges(each.own, each.other, each.values.clone()) for name, each in edges.items()}
    return State(state.peers[row : row + 1], state.round_index, state.at, rows, edges)


@pytest.mark.parametrize("participation", ["kind=all", "kind=uniform"])
def test_row_law_every_step_computes_a_row_from_itself(build, variant, participation):
    alone = {*ALL_ACTIVE, "n_peers=1", "algorithm.acceleration=chebyshev"}
    if participation == "kind=uniform" and alone & set(variant):
        pytest.skip("one peer at a time, or all: it has no other participation")
    extra = ["participation={kind: uniform, fraction: 0.5}"] if participation != "kind=all" else []
    experiment = build(*variant, *extra)
    whole = experiment.cohort()
    state = experiment.initial_state(whole)
    engine = Engine(experiment.algorithm, whole, state)
    cohorts = [hosting(experiment, [peer]).cohort() for peer in state.peers]
    for _ in range(3):
        for item in experiment.algorithm.program:
            if isinstance(item, Exchange):
                engine.perform(item)
                state.at = 0
                continue
            alone = [slice_of(state, row) for row in range(len(state.peers))]
            whole.state = state
            item(whole, state)
            for row, one in enumerate(alone):
                cohorts[row].state = one
                item(cohorts[row], one)
                assert one.rows.keys() == state.rows.keys()
                assert one.edges.keys() == state.edges.keys()
                for key, value in one.rows.items():
                    torch.testing.assert_close(value[0], state.rows[key][row], rtol=1e-10, atol=1e-12)
                for key, found in one.edges.items():
                    part = state.edges[key].of(int(one.peers[0]))
                    assert np.array_equal(found.other, part.other)
                    torch.testing.assert_close(found.values, part.values, rtol=1e-10, atol=1e-12)
        state.round_index += 1


@pytest.mark.parametrize("name", ["sgp", "privsgp"])
def test_mass_is_conserved_and_push_weights_sum_to_n(build, name):
    experiment = build(f"algorithm.name={name}", "topology.name=star", "privacy=none", "algorithm.learning_rate=1e-30")
    start = experiment.initial.double().sum() * 4
    state = final_state(experiment)
    assert float(state.rows["w"].sum()) == pytest.approx(4, abs=1e-12)
    assert float(state.rows["w"].min()) > 0
    assert float(state.rows["w"].std()) > 0.01  # the star is not regular: the weights have to differ
    assert float(state.rows["x"].sum()) == pytest.approx(float(start), rel=1e-12)


def test_gossip_conserves_the_mean(build):
    experiment = build(*settings_for("algorithm.name=d-psgd"), "privacy=none", "algorithm.learning_rate=1e-30")
    state = final_state(experiment)
    torch.testing.assert_close(state.rows["x"].mean(0), experiment.initial, rtol=1e-12, atol=1e-14)


def test_local_peers_never_learn_of_each_other(build):
    together = final_state(build("algorithm.name=local"))
    experiment = hosting(build("algorithm.name=local"), [2])
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(ROUNDS):
        engine.round()
    torch.testing.assert_close(engine.state.rows["x"][0], together.rows["x"][2], rtol=1e-10, atol=1e-12)


def test_inactive_peers_take_no_step_and_pay_for_none(build):
    experiment = build("participation={kind: uniform, fraction: 0.5}", "algorithm.name=local")
    cohort = experiment.cohort()
    state = experiment.initial_state(cohort)
    before = state.rows["x"].clone()
    Engine(experiment.algorithm, cohort, state).round()
    moved = (state.rows["x"] != before).any(1).numpy()
    np.testing.assert_array_equal(moved, experiment.participation.active(0))
    assert moved.sum() == 2


def reference_privsgp(experiment, tape, rounds, expected=(12, 12, 12, 12)):
    """PrivSGP (Alg. 2 of the paper) as its pseudocode reads, clipped per example, in NumPy.

    Args:
        expected: examples in a batch of each peer, by which its sum is divided.
    """
    n, rate, clip = 4, 0.5, 1.0
    x = np.tile(experiment.initial.numpy(), (n, 1))
    w = np.ones(n)
    features = experiment.own.examples.x.double().numpy().reshape(240, -1)
    labels = experiment.own.examples.y.numpy()
    sigma = experiment.own.protection.noise_multiplier(0)
    for k in range(rounds):
        half = x.copy()
        for i in range(n):
            z = x[i] / w[i]
            batch = experiment.own.sampler.batch(k, [i])
            rows = experiment.own.examples.parts[i][batch.index[0][batch.weight[0] > 0]]
            g = softmax_gradients(features[rows], z[:640].reshape(10, 64), z[640:], labels[rows])
            g *= np.minimum(1, clip / np.linalg.norm(g, axis=1, keepdims=True))
            half[i] -= rate * (g.sum(0) - sigma[i] * clip * tape.draw(k, i)) / expected[i]  # -N and N are alike
        hop = 2 ** (k % 2)  # floor(log2(3)) + 1 = 2
        p = np.zeros((n, n))
        for j in range(n):
            p[j, j] = p[(j + hop) % n, j] = 0.5
        x, w = p @ half, p @ w
    return x, w


UNEVEN = "data.partition={kind: sizes, sizes: [3, 20, 90, 127]}"
BATCHES = {
    "size": ([], (12, 12, 12, 12)),
    "rate": ([UNEVEN, "data.batch={sampling: poisson, rate: 0.13}"], (0.39, 2.6, 11.7, 16.51)),
    "small peers": ([UNEVEN, "data.batch.small_peers=full"], (3, 12, 12, 12)),
}


@pytest.mark.parametrize("batches", BATCHES)
def test_privsgp_follows_the_numpy_reference(build, batches):
    settings, expected = BATCHES[batches]
    experiment = build(*settings)
    tape = NoiseTape(650)
    cohort = experiment.cohort()
    cohort.noise = tape
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(ROUNDS):
        engine.round()
    x, w = reference_privsgp(experiment, tape, ROUNDS, expected)
    assert np.abs(x - experiment.initial.numpy()).max() > 1e-2
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(engine.state.rows["w"].numpy(), w, rtol=1e-12)


GRAPHS = ["star", "erdos-renyi, probability: 0.5", "random-edges, edges: 3, supergraph: complete"]


@pytest.mark.parametrize("graph", GRAPHS)
def test_push_sum_takes_its_gradient_at_the_debiased_model(build, graph):
    """On graphs whose push weights leave 1, where x and z = x / w are different points."""
    experiment, tape = build(f"topology={{name: {graph}}}"), NoiseTape(650)
    engine = engine_with(experiment, tape)
    x, w = np.tile(experiment.initial.numpy(), (4, 1)), np.ones(4)
    for k in range(ROUNDS):
        engine.round()
        half = np.stack([x[i] - 0.5 * clipped_step(experiment, tape, k, i, x[i] / w[i]) for i in range(4)])
        p = experiment.mixing.matrix(k).dense()
        x, w = p @ half, p @ w
    assert np.ptp(w) > 0.1
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(engine.state.rows["w"].numpy(), w, rtol=1e-12)


@pytest.mark.parametrize("name", ["d-psgd", "dp2-sgd", "dp-dpsgd"])
def test_gossip_mixes_models_and_descends_at_the_old_ones(build, name):
    """Lian et al. 2017: x_i ← Σ_j W_ij x_j - γ g_i(x_i), not W (x - γ g), nor with g at the mixed model."""
    experiment, tape = build(f"algorithm.name={name}", "topology.name=ring", "n_peers=6"), NoiseTape(650)
    engine = engine_with(experiment, tape)
    x = np.tile(experiment.initial.numpy(), (6, 1))
    for k in range(ROUNDS):
        engine.round()
        w = experiment.mixing.matrix(k).dense()
        x = w @ x - 0.5 * np.stack([clipped_step(experiment, tape, k, i, x[i]) for i in range(6)])
    np.testing.assert_allclose(engine.state.rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0.0, [1, 1, 1, 1, 1, 1, 1, 1]),
        (0.5, [1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        (1.0, [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ],
)
def test_the_learning_rate_falls_to_0_at_the_end(decay, expected):
    rate = LearningRate(np.array([2.0, 0.5]), decay, 8)
    for k, share in enumerate(expected):
        np.testing.assert_allclose(rate.at(k), [2.0 * share, 0.5 * share], rtol=1e-15)


def test_runs_repeat_bit_for_bit_and_follow_the_seed(build):
    first, again, other = (final_state(build(s)) for s in ("seed=3", "seed=3", "seed=4"))
    assert torch.equal(first.rows["x"], again.rows["x"])
    assert not torch.equal(first.rows["x"], other.rows["x"])


def test_push_sum_reaches_the_mean_in_log2_n_rounds(build):
    experiment = build("n_peers=8", "privacy=none", "algorithm.learning_rate=1e-300")
    cohort = experiment.cohort()
    state = experiment.initial_state(cohort)
    state.rows["x"] = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(state.rows["x"].shape)))
    mean = copy.deepcopy(state.rows["x"]).mean(0)
    engine = Engine(experiment.algorithm, cohort, state)
    for _ in range(3):
        engine.round()
    error = (experiment.algorithm.debiased(engine.state.rows) - mean).abs().max()
    assert float(error) < 1e-12


@pytest.mark.parametrize("wrong", ["shape", "dtype", "removed"])
def test_a_step_that_changes_a_row_fails_by_name(build, wrong):
    """The round of the step is named, not a later exchange or checkpoint."""
    experiment = build("algorithm.name=privsgp")
    engine = Engine(experiment.algorithm, experiment.cohort(), experiment.initial_state(experiment.cohort()))
    engine.round()

    def widen(cohort, state):
        if wrong == "removed":
            del state.rows["w"]
        else:
            w = state.rows["w"]
            state.rows["w"] = w[:, None] if wrong == "shape" else w.float()

    experiment.algorithm.program = (widen, *experiment.algorithm.program)
    with raises(RunError, "algorithm.row-changed", "in round 1 the step widen turned row 'w'"):
        engine.round()
