"""PrivSGP-VR: its tables against each other and against NumPy, what they remember, and where they lead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_references import NoiseTape, exponential_graph, softmax_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.algorithms.tables import TABLES, stacked
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data import Sampler
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import memory_estimate
from flower_privdec.scenario.sections import BatchSection

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
def test_factored_is_dense(build, alike, privacy, model, more):
    first, second = (build(*vr(table), privacy, *model, *more) for table in ("factored", "dense"))
    factored, dense = (after(experiment, 6) for experiment in (first, alike(second, first)))
    for name in ("x", "w", "table.mean"):
        torch.testing.assert_close(factored[name], dense[name], rtol=1e-10, atol=1e-12)
    assert dense["table"].abs().max() > 0


@pytest.mark.parametrize("table", ["factored", "dense"])
def test_an_empty_batch_still_takes_the_tables_step(build, table):
    experiment = build(*vr(table), "data.batch.size=1", "data.samples=8", "privacy=none", "seed=11")
    engine, stayed = engine_of(experiment), 0
    for k in range(20):
        rows = {name: value.clone() for name, value in engine.state.rows.items()}
        empty = experiment.own.sampler.batch(k, np.arange(4)).weight.sum(1) == 0
        experiment.algorithm.program[0](engine.cohort, engine.state)
        moved = rows["x"] - 0.5 * rows["table.mean"]
        torch.testing.assert_close(engine.state.rows["x"][empty], moved[empty], rtol=1e-12, atol=1e-14)
        assert torch.equal(engine.state.rows["table.mean"][empty], rows["table.mean"][empty])
        stayed += empty.sum()
        engine.state.round_index += 1
    assert stayed > 10


# --- the mean that a table keeps is the mean of what it keeps ---


def mean_of_table(experiment, rows, table):
    """Return the mean of the gradients a table keeps, added up afresh in double precision."""
    sizes, peers = experiment.own.sampler.partition_sizes, np.arange(experiment.scenario.n_peers)
    counts = (
        torch.from_numpy(experiment.own.sampler.blocks(peers) if table == "blocks" else sizes).double().unsqueeze(1)
    )
    if table != "factored":
        return rows["table"].double().sum(1) / counts
    kernel, mean = stacked(experiment.kernel), torch.zeros_like(rows["x"], dtype=torch.float64)
    batch = experiment.cohort().data.examples(peers, 0, int(sizes.max()))
    inputs = [batch.x.flatten(2), *(rows[f"table.input{n}"] for n in range(1, len(kernel.layers)))]
    for n, layer in enumerate(kernel.layers):
        layer.push_(mean, (rows[f"table.delta{n}"] * batch.weight.unsqueeze(-1)).double(), inputs[n].double())
    return mean / counts


@settings(max_examples=10)
@given(st.sampled_from(["dense", "factored", "blocks"]), st.integers(0, 40), st.integers(1, 99), st.booleans())
def test_the_tables_mean_stays_exact_after_many_rounds(build, table, rounds, seed, some):
    experiment = build(*vr(table), *MLP, *UNEQUAL, f"seed={seed}", "rounds=40", *(SOME if some else []))
    rows = after(experiment, rounds)
    torch.testing.assert_close(mean_of_table(experiment, rows, table), rows["table.mean"], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_mean_hardly_drifts_in_single_precision(build):
    experiment = build(*vr("factored"), "compute.dtype=float32", "rounds=500", "n_peers=2", *MLP)
    rows = after(experiment, 500)
    exact = mean_of_table(experiment, rows, "factored")
    assert 0 < float((rows["table.mean"] - exact).norm() / exact.norm()) < 1e-5


# --- against references in NumPy ---


class Reference:
    """What a reference needs of an experiment: each peer's clipped gradients, batches, and noise."""

    def __init__(self, experiment, clip):
        self.experiment, self.clip, self.tape = experiment, clip, NoiseTape(650)
        self.features = experiment.own.examples.x.double().numpy().reshape(-1, 64)
        self.labels = experiment.own.examples.y.numpy()
        self.start = experiment.initial.numpy()

    def gradients(self, i, z, local):
        """Clipped gradients of local examples of peer i at z, [b, d]."""
        rows = self.experiment.own.examples.parts[i][local]
        g = softmax_gradients(self.features[rows], z[:640].reshape(10, 64), z[640:], self.labels[rows])
        return g * np.minimum(1, self.clip / np.linalg.norm(g, axis=1, keepdims=True))

    def batch(self, k, i):
        batch = self.experiment.own.sampler.batch(k, [i])
        return batch.index[0][batch.weight[0] > 0]

    def noise(self, k, i, divided_by):
        """Noise on an averaged gradient (the engine adds it to x, and -N and N are alike)."""
        return -self.experiment.own.protection.noise_multiplier(k)[i] * self.clip * self.tape.draw(k, i) / divided_by


def reference_privsgp_vr(ref, rounds, rate, b):
    """PrivSGP-VR, Algorithm 1, as its pseudocode reads: tables filled at x^0, eq. 6, eq. 7, push-sum."""
    n, sizes = 4, ref.experiment.own.sampler.partition_sizes
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


def test_one_example_a_step_follows_eq_6(build):
    experiment = build(*vr("factored"), "data.batch={sampling: uniform, size: 1}", "privacy.clip_norm=0.6")
    ref = Reference(experiment, 0.6)
    x, _, _ = reference_privsgp_vr(ref, 6, 0.5, 1)
    np.testing.assert_allclose(after(experiment, 6, ref.tape)["x"].numpy(), x, rtol=1e-9, atol=1e-11)


def reference_blocks(ref, rounds, rate, b):
    """The same with one entry a block: the sum over J / c of the clipped gradients of examples j, j + c, ..."""
    n, sizes = 4, ref.experiment.own.sampler.partition_sizes
    x, w = np.tile(ref.start, (n, 1)), np.ones(n)
    blocks = [[np.arange(j, size, size // b) for j in range(size // b)] for size in sizes]
    assert [sum(map(len, each)) for each in blocks] == sizes.tolist()  # nobody is left out
    b = sizes / [len(each) for each in blocks]
    tables = [np.stack([ref.gradients(i, ref.start, block).sum(0) / b[i] for block in blocks[i]]) for i in range(n)]
    for k in range(rounds):
        half = x.copy()
        for i in range(n):
            chosen = ref.batch(k, i)
            number = next(j for j, block in enumerate(blocks[i]) if set(block) == set(chosen))
            now = ref.gradients(i, x[i] / w[i], chosen).sum(0) / b[i]
            g = now - tables[i][number] + tables[i].mean(0)
            tables[i][number] = now
            half[i] -= rate * (g + ref.noise(k, i, b[i]))
        p = exponential_graph(k, n)
        x, w = p @ half, p @ w
    return x, w


def test_blocks_follow_their_reference(build):
    experiment = build(*vr("blocks"), *UNEQUAL, "data.batch.size=7", "privacy.clip_norm=0.6", "rounds=12")
    ref = Reference(experiment, 0.6)
    rows, (x, _) = after(experiment, 12, ref.tape), reference_blocks(ref, 12, 0.5, 7)
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
                everything = np.arange(experiment.own.sampler.partition_sizes[i])
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


# --- no noise: to the optimum, where SGP stalls ---

PEERS, EXAMPLES, RATE, ROUNDS = 4, 80, 0.3, 1500


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    """Write noisy two-class data; return the file, the pooled optimum and the least curvature there (Newton)."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(EXAMPLES, 3)).astype(np.float32)
    chance = 1 / (1 + np.exp(-(x @ np.array([1.5, -1.0, 0.5]) + 0.3)))
    y = (rng.random(EXAMPLES) < chance).astype(np.int64)
    path = tmp_path_factory.mktemp("data") / "two-classes.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    inputs, best = np.column_stack([x.astype(np.float64), np.ones(EXAMPLES)]), np.zeros(4)
    for _ in range(30):
        p = 1 / (1 + np.exp(-inputs @ best))
        gradient, hessian = inputs.T @ (p - y) / EXAMPLES, (inputs.T * (p * (1 - p))) @ inputs / EXAMPLES
        best -= np.linalg.solve(hessian, gradient)
    assert np.abs(gradient).max() < 1e-12
    return path, torch.from_numpy(best), float(np.linalg.eigvalsh(hessian)[0])


def logistic(build, data, algorithm, *more):
    set_up = [f"data={{dataset: npz, root: {data}, batch: {{sampling: uniform, size: 1}}}}", "privacy=none"]
    set_up += ["model={name: linear, init: zeros}", "task.loss=logistic", "topology.name=complete", f"rounds={ROUNDS}"]
    return build(*set_up, *algorithm, *more)


def distances(experiment, best):
    """Return the farthest peer's distance to the optimum every 50 rounds."""
    engine, found = engine_of(experiment), []
    for k in range(ROUNDS):
        engine.round()
        if k % 50 == 49:
            found.append(float((experiment.algorithm.debiased(engine.state.rows) - best).norm(dim=1).max()))
    return np.array(found)


@pytest.mark.parametrize("table", ["factored", "snapshot", "blocks"])
def test_it_converges_linearly_to_the_pooled_optimum(build, two_classes, table):
    path, best, curvature = two_classes
    blocks = ["data.batch.size=5"] if table == "blocks" else []
    experiment = logistic(build, path, vr(table, RATE, snapshot_every=25), *blocks)
    found = distances(experiment, best)
    slope = np.polyfit(50 * np.arange(10, len(found)), np.log(found[10:]), 1)[0]
    assert slope == pytest.approx(np.log(1 - RATE * curvature), rel=0.2)  # that of gradient descent
    assert found[-1] < 2e-5


def test_sgp_stalls_at_its_noise_floor(build, two_classes):
    path, best, _ = two_classes
    found = distances(logistic(build, path, [f"algorithm={{name: sgp, learning_rate: {RATE}}}"]), best)
    assert found[-10:].min() > 0.02
    assert found[-10:].mean() > 0.3 * found[-20:-10].mean()  # and gets no better


@pytest.mark.slow
def test_over_a_sparse_graph_it_converges_up_to_disagreement(build, two_classes):
    path, best, _ = two_classes
    sparse = logistic(build, path, vr("factored", RATE), "topology.name=directed-exponential")
    orders = [np.random.default_rng(seed).permutation(EXAMPLES) for seed in range(PEERS)]
    sampler = Sampler(BatchSection(sampling="uniform", size=1), [EXAMPLES] * PEERS, dict.fromkeys(range(PEERS), 3))
    examples = replace(sparse.own.examples, parts=tuple(orders))
    same = replace(sparse, own=replace(sparse.own, examples=examples, sampler=sampler))
    agreed, split = distances(same, best), distances(sparse, best)
    assert agreed[-1] < 1e-3 < 0.05 * agreed[0]
    assert 1e-3 < split[-1] < 0.05  # a constant rate keeps O(rate) of ∇f_i - ∇f, which nothing tracks


def test_it_repeats_bit_for_bit_and_follows_the_seed(build):
    first, again, other = (after(build(*vr("factored"), seed), 6) for seed in ("seed=3", "seed=3", "seed=4"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["x"], other["x"])


# --- memory ---


@pytest.mark.parametrize("table", ["factored", "dense", "blocks", "snapshot"])
@pytest.mark.parametrize("more", [[], UNEQUAL, MLP + UNEQUAL], ids=["softmax", "unequal", "mlp"])
def test_the_forecast_of_a_tables_memory_is_right(build, table, more):
    experiment = build(*vr(table), *more)
    rows = engine_of(experiment).state.rows
    kept = {name: value for name, value in rows.items() if name not in ("x", "w")}
    assert memory_estimate.table_bytes(experiment)[table] == sum(value.nbytes for value in kept.values())
    if table in TABLES:
        widths = [(layer.weight.shape[1], layer.weight.shape[0]) for layer in stacked(experiment.kernel).layers]
        sizes, batch = experiment.own.sampler.partition_sizes, int(experiment.own.sampler.normalizer[0])
        said = TABLES[table].floats(sizes, rows["x"].shape[1], widths, batch)
        assert said == sum(value.numel() for value in kept.values())


def test_factors_take_a_small_part_of_what_gradients_do():
    widths = [(784, 100), (100, 10)]  # 50 peers of 1,200 MNIST examples and a 784-100-10 MLP, in single precision
    d = sum((inputs + 1) * outputs for inputs, outputs in widths)
    dense, factored = (4 * TABLES[name].floats(np.full(50, 1200), d, widths, 1) for name in ("dense", "factored"))
    assert dense > 19e9
    assert factored < 0.1e9


# --- refused ---


def test_a_table_too_large_is_refused_before_any_write(build, monkeypatch, tmp_path):
    experiment = build(*vr("dense"))
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda device: 1 << 20)
    with raises(ScenarioError, "memory.short", "algorithm.table='dense'"):
        experiment.cohort(tmp_path / "ledger")
    assert list(tmp_path.iterdir()) == []
    build(*vr("factored")).cohort()


def test_a_factored_table_of_a_cnn_is_refused(build):
    with raises(ScenarioError, "tables.not-stacked", "table='factored'"):
        build(*vr("factored"), "model={name: cnn-small}")


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["rounds=0"], ("scenario.greater_than_equal", "rounds=0")),
        (["rounds=-2"], ("scenario.greater_than_equal", "rounds=-2")),
        (["data.batch={sampling: blocks, size: 6}"], ("batch.blocks",)),
        (["data.batch.size=61"], ("batch.too-large", "size=61")),
        (["algorithm.snapshot_every=0"], ("scenario.greater_than_equal", "algorithm.snapshot_every=0")),
        (["algorithm.table=sparse"], ("scenario.literal_error", "algorithm.table='sparse'")),
    ],
)
def test_bad_settings_are_refused_in_one_line(build, settings, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal) as refused:
        build(*vr("factored"), *settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("edges", ["0 1\n1 0\n2 3\n3 2\n", "0 1\n1 2\n2 3\n"])
def test_a_graph_that_never_joins_its_peers_is_refused(build, tmp_path, edges):
    path = tmp_path / "edges.txt"
    path.write_text(edges)
    with raises(ScenarioError, "topology.disconnected", "topology.name=edge-list"):
        build(*vr("factored"), f"topology={{name: edge-list, file: {path}}}")
