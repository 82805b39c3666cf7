"""Laws and refusals of mixing: stochasticity, conservation, and equal bits however rows are partitioned."""

import gc
import weakref
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.catalogue import TOPOLOGIES
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.graph import mixing as kernels
from flower_privdec.graph.mixing import (
    RULES,
    AverageMatrix,
    Mixing,
    MixingMatrix,
    SparseMatrix,
    mixing_matrix,
)
from flower_privdec.graph.mixing_speed import spectral_gap
from flower_privdec.graph.participation import build_participation
from flower_privdec.graph.topology import StaticTopology, build_topology, edge_array

laws = settings(max_examples=30)
NAMED = [name for name in TOPOLOGIES if name not in ("edge-list", "server")]
UNDIRECTED = [name for name in NAMED if not name.startswith("directed")]
REGULAR = [name for name in NAMED if name not in ("star", "erdos-renyi", "small-world", "random-edges")]
OPTIONS: dict[str, dict[str, Any]] = {"random-edges": {"edges": 5}}
COMBINATIONS = [
    *((name, "column-stochastic", "column") for name in NAMED),
    *((name, weights, "doubly") for name in UNDIRECTED for weights in ("metropolis", "max-degree")),
    *((name, "doubly-stochastic", "doubly") for name in REGULAR),
    ("server", "server", "row"),
]
combinations = pytest.mark.parametrize(("name", "weights", "kind"), COMBINATIONS)


def mixing(name: str, weights: str, n: int = 12, fraction: float = 1.0, seed: int = 5) -> Mixing:
    """Build the mixing of a named graph; all of them fit 12 peers."""
    topology = build_topology(name, n, seed=seed, **OPTIONS.get(name, {}))
    if fraction == 1:
        return Mixing(topology, weights, build_participation("all", n, seed))
    return Mixing(topology, weights, build_participation("uniform", n, seed, fraction))


def payload(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Draw a normal payload."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def partial_matrices() -> list[tuple[str, MixingMatrix]]:
    """List a few matrices of every form: shifts, halves, averages, irregular rows."""
    cases = [
        ("directed-exponential", "column-stochastic", 1.0),
        ("directed-exponential", "column-stochastic", 0.5),
        ("directed-exponential-full", "column-stochastic", 1.0),
        ("star", "metropolis", 1.0),
        ("erdos-renyi", "metropolis", 0.7),
        ("erdos-renyi", "column-stochastic", 1.0),
        ("bipartite", "doubly-stochastic", 1.0),
        ("complete", "metropolis", 1.0),
        ("complete", "metropolis", 0.4),
        ("server", "server", 1.0),
        ("server", "server", 0.4),
    ]
    return [
        (f"{name} {fraction}", mixing(name, weights, fraction=fraction).matrix(2)) for name, weights, fraction in cases
    ]


MATRICES = partial_matrices()
every_form = pytest.mark.parametrize("matrix", [matrix for _, matrix in MATRICES], ids=[name for name, _ in MATRICES])


def refused(name: str, weights: str, fraction: float) -> bool:
    """Say whether absent peers rule these weights out: see test_weights_a_graph_does_not_have_are_refused."""
    return fraction < 1 and weights == "doubly-stochastic" and name.startswith("directed")


@pytest.mark.parametrize(
    ("name", "weights", "kind", "fraction"),
    [(*case, share) for case in COMBINATIONS for share in (1.0, 0.5) if not refused(*case[:2], share)],
)
def test_weights_sum_to_one_over_any_active_peers(name: str, weights: str, kind: str, fraction: float) -> None:
    mix = mixing(name, weights, fraction=fraction)
    for k in range(5):
        assert_lawful(mix, k, kind)


@laws
@given(st.sampled_from(COMBINATIONS), st.integers(3, 12), st.integers(2, 10), st.integers(0, 500))
def test_weights_sum_to_one_at_any_size(case: tuple[str, str, str], half: int, tenths: int, k: int) -> None:
    name, weights, kind = case
    fraction = 1.0 if refused(name, weights, tenths / 10) else max(tenths / 10, 1 / half)
    assert_lawful(mixing(name, weights, 2 * half, fraction, seed=k), k, kind)


def assert_lawful(mix: Mixing, k: int, kind: str) -> None:
    """Check one round: sums, the identity of absent peers, and symmetry where it is due."""
    matrix, active = mix.matrix(k), mix.participation.active(k)
    dense, idle, identity = matrix.dense(), ~active, np.eye(mix.n_peers)
    assert dense.min() >= 0
    for axis in {"row": (1,), "column": (0,), "doubly": (0, 1)}[kind]:
        np.testing.assert_allclose(dense.sum(axis), 1, rtol=0, atol=1e-12)
    if kind == "row":
        assert np.allclose(dense, active / active.sum())
        return
    assert np.array_equal(dense[idle], identity[idle])
    assert np.array_equal(dense[:, idle], identity[:, idle])
    if kind == "doubly" and not mix.topology.directed:
        assert np.array_equal(dense, dense.T)


@combinations
def test_weights_sit_on_active_edges_and_the_diagonal(name: str, weights: str, kind: str) -> None:
    mix = mixing(name, weights, fraction=1.0 if weights == "doubly-stochastic" else 0.5)
    for k in range(3):
        support = np.eye(12, dtype=bool)
        support[tuple(mix.links(k)[:, ::-1].T)] = True
        if kind == "row":
            support[:] = mix.participation.active(k)
        assert np.array_equal(mix.matrix(k).dense() > 0, support)


def test_weights_of_small_graphs_match_paper() -> None:
    path = edge_array([[0, 1], [1, 2]], 3, symmetric=True)
    column = [[1 / 2, 1 / 3, 0], [1 / 2, 1 / 3, 1 / 2], [0, 1 / 3, 1 / 2]]
    metropolis = [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    assert np.allclose(mixing_matrix(path, 3, "column-stochastic").dense(), column)
    assert np.allclose(mixing_matrix(path, 3, "metropolis").dense(), metropolis)
    largest = [[2 / 3, 1 / 3, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0, 1 / 3, 1 / 3, 1 / 3], [0, 0, 1 / 3, 2 / 3]]
    line = edge_array([[0, 1], [1, 2], [2, 3]], 4, symmetric=True)
    assert np.allclose(mixing_matrix(line, 4, "max-degree").dense(), largest)
    ring = edge_array([[0, 1], [1, 2], [2, 3], [3, 0]], 4)
    half = (np.eye(4) + np.roll(np.eye(4), 1, axis=0)) / 2
    assert np.array_equal(mixing_matrix(ring, 4, "doubly-stochastic").dense(), half)
    active = np.array([True, False, True, True])
    assert np.allclose(mixing_matrix(ring, 4, "server", active).dense(), active / 3)
    both = edge_array([[0, 1], [1, 2], [2, 3], [3, 0]], 4, symmetric=True)
    absent = mixing_matrix(both, 4, "doubly-stochastic", active).dense()
    thirds = np.array([[2, 0, 0, 1], [0, 3, 0, 0], [0, 0, 2, 1], [1, 0, 1, 1]]) / 3
    assert np.allclose(absent, thirds)


@laws
@given(st.sampled_from(["bipartite", "star", "ring", "erdos-renyi", "complete"]), st.integers(2, 17))
def test_max_degree_weights_are_one_step_along_the_laplacian(name: str, n: int) -> None:
    topology = build_topology(name, n, seed=n)
    laplacian = nx.laplacian_matrix(nx.Graph(topology.support().tolist()), range(topology.n_peers)).toarray()
    expected = np.eye(n) - laplacian / (laplacian.diagonal().max() + 1)
    assert np.allclose(Mixing(topology, "max-degree").matrix(0).dense(), expected, rtol=0, atol=1e-15)


def test_an_odd_bipartite_graph_has_uniform_weights() -> None:
    graph = build_topology("bipartite", 15)
    assert sorted(np.bincount(graph.edges(0)[:, 0])) == [7] * 8 + [8] * 7
    with raises(ScenarioError, "mixing.degrees"):
        Mixing(graph, "doubly-stochastic")
    uniform = Mixing(graph, "max-degree").matrix(0).dense()
    assert set(np.unique(uniform.round(12))) == {0, round(1 / 9, 12), round(2 / 9, 12)}
    assert np.array_equal(uniform, uniform.T)


@every_form
def test_apply_is_the_dense_product(matrix: MixingMatrix) -> None:
    for shape in [(12,), (12, 1), (12, 7), (12, 3, 5)]:
        x = payload(*shape)
        expected = np.tensordot(matrix.dense(), x.numpy(), axes=1)
        assert np.allclose(matrix.apply(x).numpy(), expected, rtol=0, atol=1e-14)
        out = torch.full(shape, torch.nan, dtype=torch.float64)
        assert matrix.apply(x, out) is out
        assert torch.equal(out, matrix.apply(x))


@pytest.mark.parametrize("shape", [(12,), (12, 7), (12, 5, 3001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_form
def test_replacing_rows_gives_the_bits_of_apply(
    matrix: MixingMatrix, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "IN_PLACE_FROM", 2**12)
    x = payload(*shape, dtype=dtype)
    expected = matrix.apply(x)
    spare = None
    for _ in range(2):  # with a buffer and without
        mixed, spare = matrix.replace(x.clone(), spare)
        assert torch.equal(mixed, expected)
        assert spare is None or spare.data_ptr() != mixed.data_ptr()


@pytest.mark.parametrize("n", [3, 4, 7, 12])
def test_long_rows_of_shift_graphs_mix_in_place(n: int) -> None:
    weights = mixing("directed-exponential", "column-stochastic", n)
    for k in range(weights.topology.period or 1):
        x = payload(n, 2**14 + 1, dtype=torch.float32)
        expected = weights.matrix(k).apply(x)
        mixed, spare = weights.matrix(k).replace(x)
        assert mixed is x
        assert spare is None
        assert torch.equal(x, expected)


@pytest.mark.parametrize("edges", [[], [(3, 7), (7, 3)], [(0, 5), (5, 0), (5, 11), (11, 5)]])
def test_rows_that_few_of_change_are_mixed_in_place(edges: list[tuple[int, int]]) -> None:
    matrix = mixing_matrix(edge_array(edges, 12), 12, "metropolis")
    for shape in [(12,), (12, 3, 301)]:
        x = payload(*shape, dtype=torch.float32)
        expected = matrix.apply(x)
        mixed, spare = matrix.replace(x)
        assert mixed is x
        assert spare is None
        assert torch.equal(x, expected)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@every_form
def test_apply_keeps_the_dtype(matrix: MixingMatrix, dtype: torch.dtype, atol: float) -> None:
    x = payload(12, 9).to(dtype)
    mixed = matrix.apply(x)
    assert mixed.dtype == dtype
    assert np.allclose(mixed.double().numpy(), matrix.dense() @ x.double().numpy(), rtol=0, atol=atol)


@every_form
def test_apply_takes_strided_payloads_and_gradients(matrix: MixingMatrix) -> None:
    x = payload(12, 8)
    assert torch.equal(matrix.apply(payload(12, 8)[:, ::2]), matrix.apply(x[:, ::2].contiguous()))
    assert torch.equal(matrix.apply(x.requires_grad_()), matrix.apply(x.detach()))


@combinations
def test_mass_is_conserved_where_columns_sum_to_one(name: str, weights: str, kind: str) -> None:
    mix = mixing(name, weights, fraction=1.0 if weights == "doubly-stochastic" else 0.6)
    x = payload(12, 50)
    for k in range(6):
        mixed = mix.matrix(k).apply(x)
        if kind != "row":
            assert torch.allclose(mixed.sum(0), x.sum(0), rtol=0, atol=1e-13)
        if kind != "column":
            assert torch.allclose(mix.matrix(k).apply(torch.ones(12, dtype=torch.float64)), torch.ones(1).double())
        x = mixed


def test_a_mean_of_ones_is_exactly_one() -> None:
    for n in (3, 7, 12, 49, 100):
        ones = torch.ones(n, dtype=torch.float64)
        assert torch.equal(mixing("server", "server", n).matrix(0).apply(ones), ones)


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_with_their_sources_give_the_whole_bits(matrix: MixingMatrix, dtype: torch.dtype) -> None:
    whole_of = {d: matrix.apply(payload(12, d, dtype=dtype)) for d in (1, 3, 1000)}
    for peers in ([0], [11], [3, 7], [9, 2, 4], list(range(12))):
        part = matrix.rows(peers)
        assert part.receivers.tolist() == peers
        assert np.array_equal(part.dense(), matrix.dense()[peers])
        assert set(part.sources) == set(np.flatnonzero(part.dense().any(0)))
        for d, whole in whole_of.items():
            x = payload(12, d, dtype=dtype)
            assert torch.equal(part.apply(x), whole[peers])
            assert torch.equal(part.apply_sources(x[torch.from_numpy(part.sources)]), whole[peers])


@every_form
def test_rows_of_rows_and_absent_rows(matrix: MixingMatrix) -> None:
    part = matrix.rows([8, 1, 5])
    assert np.array_equal(part.rows([5, 8]).dense(), matrix.dense()[[5, 8]])
    assert np.array_equal(part.rows(1).dense(), matrix.dense()[[1]])
    assert part.rows([]).apply(payload(12, 3)).shape == (0, 3)
    with raises(ArgumentError, "mixing.peers", r"\[2\]"):
        part.rows([2])


@laws
@given(
    st.integers(3, 40),
    st.integers(1, 60),
    st.sampled_from(["column-stochastic", "metropolis", "max-degree"]),
    st.integers(0, 1000),
    st.data(),
)
def test_slices_of_random_graphs_have_the_same_bits(n: int, d: int, weights: str, seed: int, data: Any) -> None:
    topology = build_topology("erdos-renyi", n, seed=seed, probability=0.6)
    matrix = Mixing(topology, weights, build_participation("uniform", n, seed, 0.8)).matrix(seed)
    peers = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=6, unique=True))
    part, x = matrix.rows(peers), payload(n, d, dtype=torch.float32)
    assert torch.equal(part.apply_sources(x[torch.from_numpy(part.sources)]), matrix.apply(x)[peers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_form
def test_the_fused_loop_gives_the_bits_of_torch(
    matrix: MixingMatrix, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = payload(12, 333, dtype=dtype)
    monkeypatch.setattr(kernels, "FUSED_FROM", 1)
    with monkeypatch.context() as without_torch:
        without_torch.delattr(kernels, "slots")
        fused = matrix.apply(x)
    monkeypatch.setattr(kernels, "fused", lambda *_: False)
    plain = matrix.apply(x)
    monkeypatch.setattr(kernels, "CHUNK_BYTES", {"cpu": 5 * 333 * 8})
    assert torch.equal(fused, plain)
    assert torch.equal(fused, matrix.apply(x))


def test_forms_are_the_fast_ones_where_they_can_be() -> None:
    exponential = mixing("directed-exponential", "column-stochastic").matrix(1)
    assert isinstance(exponential, SparseMatrix)
    assert exponential.halves
    for name, weights in (
        ("complete", "metropolis"),
        ("server", "server"),
        ("complete", "column-stochastic"),
    ):
        assert isinstance(mixing(name, weights).matrix(0), AverageMatrix)
    listed = build_topology("complete", 6).edges(0)
    for weights in (*RULES, "server"):
        clique = mixing_matrix(listed, 6, weights)
        assert isinstance(clique, AverageMatrix)
        assert np.allclose(clique.dense(), 1 / 6)


@pytest.mark.parametrize("m", range(1, 8))
def test_push_sum_reaches_the_mean_in_m_rounds(m: int) -> None:
    mix = mixing("directed-exponential", "column-stochastic", 2**m)
    x, push_weight = payload(2**m, 33), torch.ones(2**m, dtype=torch.float64)
    mean = x.mean(0)
    for k in range(m):
        x, push_weight = mix.matrix(k).apply(x), mix.matrix(k).apply(push_weight)
    assert (x / push_weight[:, None] - mean).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["directed-exponential", "directed-ring", "star", "erdos-renyi", "random-edges"])
def test_push_sum_reaches_the_mean_with_some_peers_active(name: str) -> None:
    mix = mixing(name, "column-stochastic", fraction=0.75)
    x, push_weight = payload(12, 4), torch.ones(12, dtype=torch.float64)
    mean = x.mean(0)
    for k in range(600):
        x, push_weight = mix.matrix(k).apply(x), mix.matrix(k).apply(push_weight)
    assert (x / push_weight[:, None] - mean).abs().max() < 1e-6


def test_matrices_repeat_with_the_period_and_are_kept() -> None:
    mix = mixing("directed-exponential", "column-stochastic")
    assert mix.matrix(0) is mix.matrix(4)
    assert mix.matrix(3) is mix.matrix(7)
    assert not np.array_equal(mix.matrix(0).dense(), mix.matrix(1).dense())
    fresh = mixing("random-edges", "metropolis")
    assert fresh.matrix(0) is fresh.matrix(0)
    assert not np.array_equal(fresh.matrix(0).dense(), fresh.matrix(4).dense())
    some = mixing("ring", "metropolis", fraction=0.5)
    first = some.matrix(0).dense()
    assert not np.array_equal(first, some.matrix(1).dense())
    assert np.array_equal(first, some.matrix(0).dense())


@laws
@given(st.sampled_from(COMBINATIONS), st.sets(st.integers(0, 11), min_size=1), st.permutations(range(12)))
def test_a_hosting_process_mixes_by_the_same_weights(
    case: tuple[str, str, str], chosen: set[int], order: list[int]
) -> None:
    """Whoever asks, and whoever asked before: messages to and from peers are W's own, their terms its rows."""
    name, weights, _ = case
    mix, peers = mixing(name, weights), np.array([peer for peer in order if peer in chosen])
    for k in range(3):
        dense = mix.matrix(k).dense()
        links = [(int(j), int(i)) for i, j in np.argwhere(dense) if i != j]
        for asked in (np.arange(12), peers):
            hosted, here = mix.hosted(k, asked), set(asked.tolist())
            sent = [(j, i) for j, i in links if j in here]
            assert sorted((j, i) for j, i, _ in hosted.sent) == sorted(sent)
            assert all(weight == dense[i, j] for j, i, weight in hosted.sent)
            assert list(hosted.heard) == sorted(
                (link for link in links if link[1] in here), key=lambda link: link[::-1]
            )
            assert list(hosted.answered) == [(i, j) for j, i in sorted(sent)]
            for peer, terms in zip(asked.tolist(), hosted.terms, strict=True):
                assert {(j, i): weight for j, i, weight in terms} == {
                    (j, peer): dense[peer, j] for j in np.flatnonzero(dense[peer])
                }
            assert np.array_equal(hosted.rows.dense(), dense[asked])


def test_lookups_are_kept_for_the_last_request_only() -> None:
    mix = mixing("ring", "metropolis")
    found = mix.hosted(0, np.array([2, 3]))
    assert mix.hosted(0, np.array([2, 3])) is found
    kept = weakref.ref(found)
    del found
    mix.hosted(0, np.array([3, 2]))
    gc.collect()
    assert kept() is None


def test_sources_are_the_receiver_and_its_in_neighbors() -> None:
    mix = mixing("erdos-renyi", "metropolis", fraction=0.7)
    for peer in range(12):
        expected = sorted({peer, *(sender for sender, receiver in mix.links(3).tolist() if receiver == peer)})
        assert mix.matrix(3).rows([peer]).sources.tolist() == expected


@pytest.mark.parametrize(
    ("name", "n", "expected"),
    [
        ("complete", 9, 1.0),
        ("server", 9, 1.0),
        ("directed-exponential", 16, 1.0),
        ("ring", 10, 2 / 3 * (1 - np.cos(2 * np.pi / 10))),
        ("directed-ring", 10, 1 - np.cos(np.pi / 10)),
        ("star", 10, 1 / 10),
        ("bipartite", 10, 1 / 3),
    ],
)
def test_spectral_gaps_are_the_known_ones(name: str, n: int, expected: float) -> None:
    weights = "column-stochastic" if name.startswith("directed") else "metropolis"
    assert spectral_gap(mixing(name, weights, n)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("name", ["directed-exponential", "erdos-renyi", "directed-exponential-full"])
def test_spectral_gaps_are_the_eigenvalue_of_the_period(name: str) -> None:
    mix = mixing(name, "column-stochastic", 11)
    period = mix.topology.period or 0
    product = np.linalg.multi_dot([np.eye(11), *(mix.matrix(k).dense() for k in reversed(range(period)))])
    second = np.sort(np.abs(np.linalg.eigvals(product)))[-2]
    assert spectral_gap(mix) == pytest.approx(1 - second ** (1 / period), abs=1e-9)


def test_spectral_gaps_of_random_rounds_use_their_product() -> None:
    mix = mixing("random-edges", "metropolis")
    product = np.eye(12)
    for k in range(20):
        product = mix.matrix(k).dense() @ product
    second = np.sort(np.abs(np.linalg.eigvals(product)))[-2]
    assert spectral_gap(mix, horizon=20) == pytest.approx(1 - second ** (1 / 20), rel=1e-8)
    slow, fast = (spectral_gap(mixing("ring", "metropolis", fraction=share)) for share in (0.3, 0.9))
    assert 0 < slow < fast < 1


@pytest.mark.parametrize(
    ("name", "weights", "fraction", "refusal"),
    [
        ("ring", "uniform", 1.0, ("catalogue.unknown", "topology.weights='uniform'")),
        (
            "directed-ring",
            "metropolis",
            1.0,
            ("mixing.directed", "weights=metropolis"),
        ),
        ("directed-ring", "max-degree", 1.0, ("mixing.directed", "weights=max-degree")),
        (
            "star",
            "doubly-stochastic",
            1.0,
            ("mixing.degrees", "out-degrees"),
        ),
        ("random-edges", "doubly-stochastic", 1.0, ("mixing.degrees", "out-degrees")),
        ("directed-exponential", "doubly-stochastic", 0.5, ("mixing.participation",)),
        ("ring", "server", 1.0, ("mixing.server", "weights=server")),
        ("ring", "metropolis", 0.05, ("mixing.participation", "participation.kind=uniform")),
    ],
)
def test_weights_a_graph_does_not_have_are_refused(
    name: str, weights: str, fraction: float, refusal: tuple[str, ...]
) -> None:
    with raises(ScenarioError, *refusal) as refused:
        mixing(name, weights, fraction=fraction)
    assert "\n" not in str(refused.value)


def test_graphs_that_never_agree_and_mismatched_peers_are_refused() -> None:
    parted = StaticTopology("edge-list", 4, False, edge_array([[0, 1], [2, 3]], 4, symmetric=True))
    with raises(ScenarioError, "topology.disconnected", "peers 2"):
        Mixing(parted, "metropolis")
    with raises(ScenarioError, "mixing.participation"):
        Mixing(build_topology("ring", 4), "metropolis", build_participation("all", 5))


@pytest.mark.parametrize(
    ("pairs", "weights", "active", "refusal"),
    [
        ([[0, 1], [1, 2], [2, 1]], "metropolis", None, ("mixing.directed",)),
        ([[0, 1], [1, 1]], "column-stochastic", None, ("mixing.edges",)),
        ([[0, 3]], "column-stochastic", None, ("mixing.edges", "peers 0")),
        ([[0, 1], [1, 2], [2, 0]], "doubly-stochastic", [True, True, False], ("mixing.participation",)),
        ([[0, 1]], "mine", None, ("catalogue.unknown", "topology.weights='mine'")),
    ],
)
def test_bad_edges_are_refused(pairs: Any, weights: str, active: list[bool] | None, refusal: tuple[str, ...]) -> None:
    mask = None if active is None else np.array(active)
    with raises(ScenarioError, *refusal):
        mixing_matrix(np.array(pairs), 3, weights, mask)


def test_payloads_that_do_not_fit_are_refused() -> None:
    matrix, x = mixing("ring", "metropolis").matrix(0), payload(12, 3)
    with raises(ArgumentError, "mixing.payload", r"\[11, 3\].*12"):
        matrix.apply(x[:11])
    with raises(ArgumentError, "mixing.payload"):
        matrix.apply(torch.ones(12, dtype=torch.int64))
    with raises(ArgumentError, "mixing.out", r"\[12, 3\].*not"):
        matrix.apply(x, x)
    with raises(ArgumentError, "mixing.out", r"\[12, 2\]"):
        matrix.apply(x, payload(12, 2))
    with raises(ArgumentError, "mixing.out", ".*float32"):
        matrix.apply(x, payload(12, 3).float())
    assert matrix.apply(payload(12, 0)).shape == (12, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_form
def test_a_device_mixes_as_the_processor_does(matrix: MixingMatrix) -> None:
    x = payload(12, 100)
    on_device = matrix.apply(x.cuda())
    assert torch.allclose(on_device.cpu(), matrix.apply(x), rtol=0, atol=1e-14)
    part = matrix.rows([3, 7])
    assert torch.equal(part.apply_sources(x[torch.from_numpy(part.sources)].cuda()), on_device[[3, 7]])
