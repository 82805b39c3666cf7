"""PrivSGP-VR: its tables against each other and against NumPy, what they remember, and where they lead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_algorithms import NoiseTape, softmax_gradients

from flower_privdec import memory
from flower_privdec.algorithms.tables import TABLES, stacked
from flower_privdec.errors import ScenarioError
from flower_privdec.runtime.engine import Engine

UNEQUAL = ["data.partition={kind: sizes, sizes: [100, 60, 50, 30]}"]
SOME = ["participation={kind: uniform, fraction: 0.5}"]
MLP = ["model={name: mlp, hidden: [7, 5], activation: tanh}"]


def vr(table, rate=0.5, **options):
    given = {"name": "privsgp-vr", "learning_rate": rate, "table": table, **options}
    inside = ", ".join(f"{key}: {value}" for key, value in given.items())
    batch = ["data.batch={sampling: blocks, size: 6}"] if table == "blocks" else []
    return [f"algorithm={{{inside}}}", *batch]


def engine_of(experiment, tape=None):
    cohort = experiment.cohort()
    if tape is not None:
        cohort.noise = tape
    return Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))


def after(experiment, rounds, tape=None):
    engine = engine_of(experiment, tape)
    for _ in range(rounds):
        engine.round()
    return engine.state.rows


# --- the factored table is the dense one ---


@pytest.mark.parametrize("privacy", ["privacy.clip_norm=0.4", "privacy=none"])
@pytest.mark.parametrize("model", [[], MLP], ids=["softmax", "mlp"])
@pytest.mark.parametrize("more", [[], UNEQUAL, SOME, UNEQUAL + SOME], ids=["all", "unequal", "some", "unequal some"])
def test_factored_is_dense(build, privacy, model, more):
    factored, dense = (after(build(*vr(table), privacy, *model, *more), 8) for table in ("factored", "dense"))
    for name in ("x", "w", "table.mean"):
        torch.testing.assert_close(factored[name], dense[name], rtol=1e-10, atol=1e-12)
    assert dense["table"].abs().max() > 0


@pytest.mark.parametrize("table", ["factored", "dense"])
def test_a_batch_of_nobody_still_takes_the_step_of_the_table(build, table):
    experiment = build(*vr(table), "data.batch.size=1", "data.samples=8", "privacy=none", "seed=11")
    engine, stayed = engine_of(experiment), 0
    for k in range(20):
        rows = {name: value.clone() for name, value in engine.state.rows.items()}
        empty = experiment.sampler.batch(k, np.arange(4)).weight.sum(1) == 0
        experiment.algorithm.program[0](engine.cohort, engine.state)
        moved = rows["x"] - 0.5 * rows["table.mean"]
        torch.testing.assert_close(engine.state.rows["x"][empty], moved[empty], rtol=1e-12, atol=1e-14)
        assert torch.equal(engine.state.rows["table.mean"][empty], rows["table.mean"][empty])
        stayed += empty.sum()
        engine.state.round_index += 1
    assert stayed > 10


# --- the mean that a table keeps is the mean of what it keeps ---


def mean_of_table(experiment, rows, table):
    sizes = torch.from_numpy(experiment.sampler.partition_sizes).double().unsqueeze(1)
    if table == "dense":
        return rows["table"].sum(1) / sizes
    if table == "blocks":
        counts = torch.from_numpy(experiment.sampler.blocks(np.arange(len(sizes)))).double().unsqueeze(1)
        return rows["table"].sum(1) / counts
    kernel, cohort = stacked(experiment.kernel), experiment.cohort()
    batch = cohort.data.examples(cohort.peers, 0, int(sizes.max()))
    inputs = [batch.x.flatten(2), *(rows[f"table.input{n}"] for n in range(1, len(kernel.layers)))]
    mean = torch.zeros_like(rows["x"])
    for n, layer in enumerate(kernel.layers):
        layer.push_(mean, rows[f"table.delta{n}"] * batch.weight.unsqueeze(-1), inputs[n])
    return mean / sizes


@settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["dense", "factored", "blocks"]), st.integers(0, 40), st.integers(1, 99), st.booleans())
def test_the_mean_is_the_mean_of_the_table_after_any_number_of_rounds(build, table, rounds, seed, some):
    experiment = build(*vr(table), *MLP, *UNEQUAL, f"seed={seed}", "rounds=40", *(SOME if some else []))
    rows = after(experiment, rounds)
    torch.testing.assert_close(mean_of_table(experiment, rows, table), rows["table.mean"], rtol=1e-10, atol=1e-12)


def test_in_single_precision_the_mean_hardly_drifts_in_many_rounds(build):
    experiment = build(*vr("dense"), "compute.dtype=float32", "rounds=400")
    rows = after(experiment, 400)
    exact = rows["table"].double().sum(1) / 60
    assert float((rows["table.mean"] - exact).norm() / exact.norm()) < 1e-5


# --- against references in NumPy ---


class Reference:
    """What a reference needs of an experiment: each peer's clipped gradients, batches, and noise."""

    def __init__(self, experiment, clip):
        self.experiment, self.clip, self.tape = experiment, clip, NoiseTape(650)
        self.features = experiment.dataset.x_train.double().numpy().reshape(-1, 64)
        self.labels = experiment.dataset.y_train.numpy()
        self.start = experiment.initial.numpy()

    def gradients(self, i, z, local):
        """Clipped gradients of local examples of peer i at z, [b, d]."""
        rows = self.experiment.partition[i][local]
        g = softmax_gradients(self.features[rows], z[:640].reshape(10, 64), z[640:], self.labels[rows])
        return g * np.minimum(1, self.clip / np.linalg.norm(g, axis=1, keepdims=True))

    def batch(self, k, i):
        batch = self.experiment.sampler.batch(k, [i])
        return batch.index[0][batch.weight[0] > 0]

    def noise(self, k, i, divided_by):
        """Noise on an averaged gradient (the engine adds it to x, and -N and N are alike)."""
        return -self.experiment.plan.noise_multiplier(k)[i] * self.clip * self.tape.draw(k, i) / divided_by


def exponential_graph(k, n):
    hop = 2 ** (k % (int(np.log2(n - 1)) + 1))
    p = np.zeros((n, n))
    for j in range(n):
        p[j, j] = p[(j + hop) % n, j] = 0.5
    return p


def reference_privsgp_vr(ref, rounds, rate, b):
    """PrivSGP-VR, Algorithm 1, as its pseudocode reads: tables filled at x^0, eq. 6, eq. 7, push-sum."""
    n, sizes = 4, ref.experiment.sampler.partition_sizes
    x, w = np.tile(ref.start, (n, 1)), np.ones(n)
    tables = [ref.gradients(i, ref.start, np.arange(sizes[i])) for i in range(n)]
    for k in range(rounds):
        half = x.copy()
        for i in range(n):
            z, chosen = x[i] / w[i], ref.batch(k, i)
            now = ref.gradients(i, z, chosen)
            g = (now - tables[i][chosen]).sum(0) / b + tables[i].mean(0)  # eq. 6, over a batch
            tables[i][chosen] = now
            half[i] -= rate * (g + ref.noise(k, i, b))
        p = exponential_graph(k, n)
        x, w = p @ half, p @ w
    return x, w, np.stack([table.mean(0) for table in tables])


@pytest.mark.parametrize("table", ["factored", "dense"])
def test_privsgp_vr_follows_algorithm_1(build, table):
    experiment = build(*vr(table), *UNEQUAL, "privacy.clip_norm=0.6", "rounds=12")
    ref = Reference(experiment, 0.6)
    rows = after(experiment, 12, ref.tape)
    x, w, mean = reference_privsgp_vr(ref, 12, 0.5, 12)
    np.testing.assert_allclose(rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(rows["w"].numpy(), w, rtol=1e-12)
    np.testing.assert_allclose(rows["table.mean"].numpy(), mean, rtol=1e-9, atol=1e-12)


def test_with_one_example_a_step_it_is_eq_6_word_for_word(build):
    experiment = build(*vr("factored"), "data.batch={sampling: uniform, size: 1}", "privacy.clip_norm=0.6")
    ref = Reference(experiment, 0.6)
    x, _, _ = reference_privsgp_vr(ref, 6, 0.5, 1)
    np.testing.assert_allclose(after(experiment, 6, ref.tape)["x"].numpy(), x, rtol=1e-9, atol=1e-11)


def reference_blocks(ref, rounds, rate, b):
    """The same with one entry a block: the mean of the clipped gradients of examples j, j + c, j + 2 c, ..."""
    n, sizes = 4, ref.experiment.sampler.partition_sizes
    x, w = np.tile(ref.start, (n, 1)), np.ones(n)
    blocks = [[np.arange(j, size // b * b, size // b) for j in range(size // b)] for size in sizes]
    tables = [np.stack([ref.gradients(i, ref.start, block).mean(0) for block in blocks[i]]) for i in range(n)]
    for k in range(rounds):
        half = x.copy()
        for i in range(n):
            chosen = ref.batch(k, i)
            number = next(j for j, block in enumerate(blocks[i]) if set(block) == set(chosen))
            now = ref.gradients(i, x[i] / w[i], chosen).mean(0)
            g = now - tables[i][number] + tables[i].mean(0)
            tables[i][number] = now
            half[i] -= rate * (g + ref.noise(k, i, b))
        p = exponential_graph(k, n)
        x, w = p @ half, p @ w
    return x, w


def test_blocks_follow_their_reference(build):
    experiment = build(*vr("blocks"), *UNEQUAL, "privacy.clip_norm=0.6", "rounds=12")
    ref = Reference(experiment, 0.6)
    rows, (x, _) = after(experiment, 12, ref.tape), reference_blocks(ref, 12, 0.5, 6)
    np.testing.assert_allclose(rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)


def reference_snapshot(ref, rounds, rate, b, every):
    """SVRG over push-sum: a noised full gradient every so many rounds, corrected batches between them."""
    n, experiment = 4, ref.experiment
    x, w = np.tile(ref.start, (n, 1)), np.ones(n)
    kept = [None] * n
    for k in range(rounds):
        half, gamma = x.copy(), rate * min(1, (rounds - k) / (0.5 * rounds))
        for i in np.flatnonzero(experiment.participation.active(k)):
            z, chosen = x[i] / w[i], ref.batch(k, i)
            if k % every == 0:
                everything = np.arange(experiment.sampler.partition_sizes[i])
                kept[i] = z, ref.gradients(i, z, everything).mean(0) + ref.noise(k, i, b)
                half[i] -= gamma * kept[i][1]
                continue
            g = ref.gradients(i, z, chosen).sum(0) / b + ref.noise(k, i, b)
            if kept[i] is not None:  # a peer that has missed every snapshot takes plain steps
                g = g - ref.gradients(i, kept[i][0], chosen).sum(0) / b + kept[i][1]
            half[i] -= gamma * g
        p = experiment.mixing.matrix(k).dense()
        x, w = p @ half, p @ w
    return x, w


@pytest.mark.parametrize("more", [[], SOME], ids=["all", "some"])
def test_snapshots_follow_their_reference(build, more):
    algorithm = vr("snapshot", snapshot_every=4, learning_rate_decay=0.5)
    experiment = build(*algorithm, *UNEQUAL, *more, "privacy.clip_norm=0.6", "rounds=14")
    ref = Reference(experiment, 0.6)
    rows, (x, w) = after(experiment, 14, ref.tape), reference_snapshot(ref, 14, 0.5, 12, 4)
    np.testing.assert_allclose(rows["w"].numpy(), w, rtol=1e-12)
    np.testing.assert_allclose(rows["x"].numpy(), x, rtol=1e-9, atol=1e-11)
