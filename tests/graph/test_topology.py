"""Laws and refusals of the communication graphs."""

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from flower_privdec.common.catalogue import TOPOLOGIES
from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.topology import (
    StaticTopology,
    Topology,
    build_topology,
    check_topology,
    edge_array,
    joint_connectivity,
)

laws = settings(max_examples=25)
NAMED = [name for name in TOPOLOGIES if name != "edge-list"]


def twelve(name: str, **options: Any) -> Topology:
    """Build any named graph of 12 peers, which all of them fit."""
    return build_topology(name, 12, seed=5, **options)


@pytest.mark.parametrize("name", NAMED)
def test_edges_are_sorted_unique_in_range_and_without_loops(name: str) -> None:
    topology = twelve(name)
    for k in range(5):
        edges = topology.edges(k)
        codes = edges @ [12, 1]
        assert edges.dtype == np.int64
        assert edges.shape[1] == 2
        assert (np.diff(codes) > 0).all()
        assert edges.min() >= 0
        assert edges.max() < 12
        assert (edges[:, 0] != edges[:, 1]).all()
        assert set(codes) <= set(topology.support() @ [12, 1])


@pytest.mark.parametrize("name", NAMED)
def test_undirected_graphs_list_both_directions(name: str) -> None:
    topology = twelve(name)
    for k in range(3):
        edges = topology.edges(k)
        symmetric = np.array_equal(edge_array(edges[:, ::-1], 12), edges)
        assert symmetric or topology.directed
    assert topology.directed == name.startswith("directed")


@pytest.mark.parametrize("name", NAMED)
def test_edges_repeat_with_their_shortest_period(name: str) -> None:
    topology = twelve(name)
    if topology.period is None:
        assert not np.array_equal(topology.edges(0), topology.edges(1))
        return
    phases = [topology.edges(k).tobytes() for k in range(topology.period)]
    assert len(set(phases)) == topology.period
    assert all(topology.edges(k + topology.period).tobytes() == phase for k, phase in enumerate(phases))


@pytest.mark.parametrize("name", NAMED)
def test_a_seed_gives_the_same_graph_and_check_passes(name: str) -> None:
    topology = twelve(name)
    assert np.array_equal(topology.edges(3), twelve(name).edges(3))
    check_topology(topology)


@pytest.mark.parametrize("name", ["random-regular", "erdos-renyi", "small-world", "random-edges"])
def test_another_seed_gives_another_graph(name: str) -> None:
    one, other = (build_topology(name, 12, seed=seed) for seed in (5, 6))
    assert not np.array_equal(one.edges(0), other.edges(0))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("ring", {}, nx.cycle_graph(12)),
        ("complete", {}, nx.complete_graph(12)),
        ("server", {}, nx.complete_graph(12)),
        ("star", {}, nx.star_graph(11)),
        ("bipartite", {}, nx.complete_bipartite_graph(6, 6)),
        ("directed-ring", {}, nx.cycle_graph(12, create_using=nx.DiGraph)),
        (
            "directed-exponential-full",
            {},
            nx.DiGraph((i, (i + h) % 12) for i in range(12) for h in (1, 2, 4, 8)),
        ),
        ("torus", {}, nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 4, periodic=True))),
        ("torus", {"rows": 2}, nx.convert_node_labels_to_integers(nx.grid_2d_graph(2, 6, periodic=True))),
        ("torus", {"cols": 3}, nx.convert_node_labels_to_integers(nx.grid_2d_graph(4, 3, periodic=True))),
        ("small-world", {"rewire": 0}, nx.circulant_graph(12, [1, 2])),
        ("erdos-renyi", {"probability": 1}, nx.complete_graph(12)),
    ],
)
def test_graphs_are_the_ones_networkx_calls_so(name: str, options: dict[str, Any], expected: Any) -> None:
    topology = twelve(name, **options)
    assert topology.directed == expected.is_directed()
    assert set(nx.DiGraph(topology.edges(0).tolist()).edges) == set(nx.DiGraph(expected).edges)


@laws
@given(st.integers(2, 70), st.integers(0, 20))
def test_one_peer_exponential_sends_a_power_of_two_ahead(n: int, k: int) -> None:
    topology = build_topology("directed-exponential", n)
    ahead = 2 ** (k % (int(np.floor(np.log2(n - 1))) + 1))
    assert {tuple(edge) for edge in topology.edges(k).tolist()} == {(i, (i + ahead) % n) for i in range(n)}


@laws
@given(st.integers(2, 40))
def test_the_exponential_graph_joins_within_its_period(n: int) -> None:
    topology = build_topology("directed-exponential", n)
    offsets = [2**k for k in range(topology.period or 0)]
    windows = [[offsets[(s + k) % len(offsets)] for k in range(len(offsets) - 1)] for s in range(len(offsets))]
    shorter = len(offsets) > 1 and all(np.gcd.reduce([n, *window]) == 1 for window in windows)
    assert joint_connectivity(topology) == (1 if n % 2 else topology.period)
    assert shorter == (n % 2 == 1 and len(offsets) > 1)


def test_joint_connectivity_of_random_and_hopeless_graphs() -> None:
    often = build_topology("random-edges", 4, edges=2)
    smallest = joint_connectivity(often, horizon=40)
    assert smallest is not None
    assert smallest > 1
    rounds = [edge_array(np.concatenate([often.edges(s + k) for k in range(smallest)]), 4) for s in range(30)]
    assert all(nx.is_strongly_connected(nx.DiGraph(edges.tolist())) and edges.max() == 3 for edges in rounds)
    assert joint_connectivity(build_topology("random-edges", 12), horizon=5) is None
    assert joint_connectivity(build_topology("complete", 12)) == 1
    assert joint_connectivity(build_topology("star", 12)) == 1


@laws
@given(st.integers(3, 8), st.data())
def test_random_edges_are_that_many_of_the_supergraph(half: int, data: st.DataObject) -> None:
    ring = build_topology("ring", 2 * half)
    count = data.draw(st.integers(1, 2 * half))
    topology = build_topology("random-edges", 2 * half, edges=count, supergraph="ring", seed=half)
    drawn = topology.edges(data.draw(st.integers(0, 99)))
    assert len(drawn) == 2 * count
    assert {tuple(e) for e in drawn.tolist()} <= {tuple(e) for e in ring.edges(0).tolist()}


def test_random_edges_come_up_equally_often() -> None:
    topology = build_topology("random-edges", 4, seed=1)
    pairs = [tuple(topology.edges(k)[0].tolist()) for k in range(1200)]
    counts = np.array([pairs.count(pair) for pair in sorted(set(pairs))])
    assert len(counts) == 6
    assert ((counts - 200) ** 2 / 200).sum() < 20.5  # chi-squared, 5 degrees of freedom, 0.1 %


@pytest.mark.parametrize(("n", "degree"), [(12, 4), (9, 2), (7, 6), (2, 1)])
def test_random_regular_graphs_are_regular_and_connected(n: int, degree: int) -> None:
    graph = nx.Graph(build_topology("random-regular", n, degree=degree).support().tolist())
    assert {d for _, d in graph.degree} == {degree}
    assert nx.is_connected(graph)


def test_sparse_erdos_renyi_graphs_are_drawn_until_connected() -> None:
    assert all(
        nx.is_connected(nx.Graph(build_topology("erdos-renyi", 10, probability=0.15, seed=seed).support().tolist()))
        for seed in range(10)
    )


def test_an_edge_list_is_read_with_comments_and_repeats(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("# a triangle\n0 1\n1 2  # inline\n\n 2\t0\n0 1\n")
    directed = build_topology("edge-list", 3, file=str(file))
    assert directed.directed
    assert directed.edges(0).tolist() == [[0, 1], [1, 2], [2, 0]]
    both = build_topology("edge-list", 3, file=file, directed=False)
    assert not both.directed
    assert both.edges(7).tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0 1\n1 2 3\n", ["line 2", "'1 2 3'", "sender receiver"]),
        ("0\n", ["line 1", "'0'"]),
        ("# x\n0 -1\n", ["line 2", "'0 -1'"]),
        ("0 a\n", ["line 1", "'0 a'"]),
        ("0 1\n\n2 3\n", ["line 3", "peer 3", "n_peers=3"]),
        ("1 1\n", ["line 1", "sends to itself"]),
        ("# nothing\n", ["no edges"]),
    ],
)
def test_a_malformed_edge_list_is_refused_by_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        build_topology("edge-list", 3, file=file)
    assert all(word in str(refused.value) for word in [str(file), *words])


def test_an_edge_list_missing_or_not_text_is_refused(tmp_path: Path) -> None:
    with raises(ScenarioError, "topology.file"):
        build_topology("edge-list", 3, file=tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with raises(ScenarioError, "topology.file", "UTF-8"):
        build_topology("edge-list", 3, file=tmp_path / "binary")


@pytest.mark.parametrize(
    ("pairs", "refusal"),
    [
        ([[0, 1], [1, 2], [2, 1]], ("topology.disconnected", "0.*|peers 1, 2")),
        ([[1, 0], [2, 1]], ("topology.disconnected", "peers 1")),
        ([[0, 1], [1, 0]], ("topology.disconnected", "peer 2")),
        ([], ("topology.disconnected", "peers 1")),
    ],
)
def test_a_disconnected_graph_is_refused_naming_peers(pairs: list[list[int]], refusal: tuple[str, ...]) -> None:
    topology = StaticTopology("edge-list", 3, True, edge_array(pairs, 3))
    with raises(ScenarioError, *refusal) as refused:
        check_topology(topology)
    assert "strongly connected" in str(refused.value)


def test_many_peers_cut_off_are_counted_not_listed() -> None:
    with raises(ScenarioError, "topology.disconnected", "2, 3, 4, 5, 6, 7, 8, 9"):
        check_topology(StaticTopology("edge-list", 20, True, edge_array([[0, 1], [1, 0]], 20)))


@pytest.mark.parametrize(
    ("name", "n", "options", "refusal"),
    [
        ("ring", 1, {}, ("topology.one-peer", "n_peers=1")),
        ("server", 1, {}, ("topology.one-peer", "n_peers=1")),
        ("ring", 0, {}, ("topology.n-peers", "n_peers=0")),
        ("ring", 2.5, {}, ("topology.n-peers", r"n_peers=2\.5")),
        ("rign", 4, {}, ("catalogue.unknown", "topology.name='rign'")),
        ("xyz", 4, {}, ("catalogue.unknown", "topology.name='xyz'")),
        ("ring", 4, {"degree": 2}, ("topology.unknown-option", "topology.degree")),
        ("small-world", 9, {"rewired": 0.1}, ("topology.unknown-option", "topology.rewired")),
        ("torus", 7, {}, ("topology.torus", "n_peers=7")),
        ("torus", 12, {"rows": 5}, ("topology.torus", "n_peers=12")),
        ("torus", 12, {"rows": 2, "cols": 5}, ("topology.torus", "rows=2 cols=5")),
        ("torus", 12, {"rows": 1}, ("topology.too-small", "rows=1")),
        ("torus", 12, {"rows": 12}, ("topology.torus", "rows=12")),
        ("random-regular", 5, {"degree": 3}, ("topology.regular", "degree=3")),
        ("random-regular", 4, {"degree": 4}, ("topology.regular", "degree=4")),
        ("random-regular", 4, {"degree": 1}, ("topology.too-small", "degree=1")),
        ("random-regular", 4, {"degree": 2.0}, ("topology.whole-number", r"degree=2\.0")),
        ("erdos-renyi", 9, {"probability": 0}, ("topology.chance", "probability=0")),
        ("erdos-renyi", 9, {"probability": 1.5}, ("topology.chance", r"probability=1\.5")),
        ("erdos-renyi", 9, {"probability": float("nan")}, ("topology.chance", "probability=nan")),
        (
            "erdos-renyi",
            6,
            {"probability": 0.02},
            ("topology.never-connected", r"probability=0\.02"),
        ),
        (
            "erdos-renyi",
            50,
            {"probability": 0.001},
            ("topology.never-connected", r"probability=0\.001"),
        ),
        ("erdos-renyi", 20_000, {"probability": 0.5}, ("topology.too-many-edges", r"2e\+08")),
        ("bipartite", 100_000, {}, ("topology.too-many-edges", r"5e\+09")),
        ("random-edges", 100_000, {}, ("topology.too-many-edges", r"topology\.name=complete")),
        ("small-world", 10_000, {"degree": 1000}, ("topology.too-many-edges", r"1e\+07")),
        ("small-world", 9, {"degree": 3}, ("topology.small-world", "degree=3")),
        ("small-world", 4, {}, ("topology.small-world", "degree=4")),
        ("small-world", 9, {"rewire": -0.1}, ("topology.chance", r"rewire=-0\.1")),
        ("edge-list", 4, {}, ("topology.file", "topology.file")),
        ("edge-list", 4, {"file": "x", "directed": 1}, ("topology.option", "directed=1")),
        ("random-edges", 4, {"edges": 7}, ("topology.edge-count", "edges=7")),
        ("random-edges", 4, {"edges": 0}, ("topology.too-small", "edges=0")),
        (
            "random-edges",
            4,
            {"supergraph": "directed-ring"},
            ("topology.supergraph", "supergraph=directed-ring"),
        ),
        (
            "random-edges",
            4,
            {"supergraph": "random-edges"},
            ("topology.supergraph", "supergraph=random-edges"),
        ),
        ("random-edges", 4, {"degree": 2}, ("topology.unknown-option", "topology.degree")),
    ],
)
def test_bad_options_are_refused(name: str, n: Any, options: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with raises(ScenarioError, *refusal) as refused:
        build_topology(name, n, **options)
    assert "\n" not in str(refused.value)


def test_options_and_defaults_are_visible() -> None:
    assert TOPOLOGIES.keys_of("small-world") == {"degree": 4, "rewire": 0.1}
    assert TOPOLOGIES.keys_of("edge-list") == {"file": None, "directed": None}
    assert TOPOLOGIES.keys_of("random-edges") == {"edges": 1, "supergraph": "complete"}
    assert TOPOLOGIES.keys_of("ring") == {}
