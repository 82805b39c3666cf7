"""Laws and refusals of the communication graphs."""

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_privdec.common.catalogue import TOPOLOGIES
from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.topology import (
    StaticTopology,
    Topology,
    build_topology,
    check_topology,
    edge_array,
    in_neighbors,
    joint_connectivity,
    topology_options,
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
def test_undirected_graphs_list_both_directions_and_directed_ones_say_so(name: str) -> None:
    topology = twelve(name)
    for k in range(3):
        edges = topology.edges(k)
        symmetric = np.array_equal(edge_array(edges[:, ::-1], 12), edges)
        assert symmetric or topology.directed
    assert topology.directed == name.startswith("directed")


@pytest.mark.parametrize("name", NAMED)
def test_edges_repeat_with_the_period_and_with_no_shorter_one(name: str) -> None:
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
def test_joint_connectivity_of_the_exponential_graph_is_its_period_or_one(n: int) -> None:
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


def test_neighbors_are_the_ends_of_the_edges() -> None:
    edges = build_topology("directed-exponential-full", 8).edges(0)
    assert in_neighbors(edges, 3).tolist() == [1, 2, 7]


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
    with pytest.raises(ScenarioError) as refusal:
        build_topology("edge-list", 3, file=file)
    assert all(word in str(refusal.value) for word in [str(file), *words])


def test_an_edge_list_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"nowhere.*No such file"):
        build_topology("edge-list", 3, file=tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not UTF-8"):
        build_topology("edge-list", 3, file=tmp_path / "binary")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [1, 2], [2, 1]], r"peer 0.*|peers 1, 2 can never be heard by peer 0"),
        ([[1, 0], [2, 1]], "peers 1, 2 can never hear from peer 0"),
        ([[0, 1], [1, 0]], "peer 2 can never hear from peer 0"),
        ([], "peers 1, 2 can never hear from peer 0"),
    ],
)
def test_a_graph_that_can_never_agree_is_refused_with_the_peers_cut_off(pairs: list[list[int]], message: str) -> None:
    topology = StaticTopology("edge-list", 3, True, edge_array(pairs, 3))
    with pytest.raises(ScenarioError, match=message) as refusal:
        check_topology(topology)
    assert "strongly connected" in str(refusal.value)


def test_many_peers_cut_off_are_counted_not_listed() -> None:
    with pytest.raises(ScenarioError, match=r"peers 2, 3, 4, 5, 6, 7, 8, 9 and 10 more can never hear"):
        check_topology(StaticTopology("edge-list", 20, True, edge_array([[0, 1], [1, 0]], 20)))


@pytest.mark.parametrize(
    ("name", "n", "options", "message"),
    [
        ("ring", 1, {}, "n_peers=1 on topology ring: a graph needs at least 2 peers; use algorithm local"),
        ("server", 1, {}, "n_peers=1 on topology server"),
        ("ring", 0, {}, "n_peers=0 must be"),
        ("ring", 2.5, {}, r"n_peers=2\.5 must be a whole number"),
        ("rign", 4, {}, r"topology.name='rign' must be one of .*did you mean 'ring'\?"),
        ("xyz", 4, {}, "topology.name='xyz' must be one of directed-exponential, "),
        ("ring", 4, {"degree": 2}, "topology.degree is no option of ring: it takes none"),
        ("small-world", 9, {"rewired": 0.1}, r"topology.rewired .*did you mean 'rewire'\?"),
        ("torus", 7, {}, "n_peers=7 on topology torus must be rows x cols"),
        ("torus", 12, {"rows": 5}, "n_peers=12 on topology torus with rows=5 must be rows x cols"),
        ("torus", 12, {"rows": 2, "cols": 5}, "torus with rows=2 cols=5 must"),
        ("torus", 12, {"rows": 1}, "rows=1 must be >= 2"),
        ("torus", 12, {"rows": 12}, "rows=12 must be rows x cols"),
        ("random-regular", 5, {"degree": 3}, "degree=3 times n_peers=5 must be even"),
        ("random-regular", 4, {"degree": 4}, "degree=4 must be < n_peers=4"),
        ("random-regular", 4, {"degree": 1}, "degree=1 must be >= 2"),
        ("random-regular", 4, {"degree": 2.0}, r"degree=2\.0 must be a whole number"),
        ("erdos-renyi", 9, {"probability": 0}, "probability=0 must be > 0"),
        ("erdos-renyi", 9, {"probability": 1.5}, r"probability=1\.5 must be in \(0, 1\]"),
        ("erdos-renyi", 9, {"probability": float("nan")}, "probability=nan must be in"),
        (
            "erdos-renyi",
            6,
            {"probability": 0.02},
            r"probability=0\.02 on topology erdos-renyi: 200 draws and none was connected; raise it",
        ),
        (
            "erdos-renyi",
            50,
            {"probability": 0.001},
            r"probability=0\.001 leaves about 47\.6 of n_peers=50 without an edge",
        ),
        ("erdos-renyi", 20_000, {"probability": 0.5}, r"about 2e\+08 edges with n_peers=20000, and at most 4,000,000"),
        ("bipartite", 100_000, {}, r"about 5e\+09 edges"),
        ("random-edges", 100_000, {}, r"topology\.name=complete has about 1e\+10 edges"),
        ("small-world", 10_000, {"degree": 1000}, r"about 1e\+07 edges"),
        ("small-world", 9, {"degree": 3}, "degree=3 on topology small-world must be even"),
        ("small-world", 4, {}, "degree=4 on topology small-world must be even and < n_peers=4"),
        ("small-world", 9, {"rewire": -0.1}, r"rewire=-0\.1 must be in \[0, 1\]"),
        ("edge-list", 4, {}, "topology.file is missing"),
        ("edge-list", 4, {"file": "x", "directed": 1}, "directed=1 must be true or false"),
        ("random-edges", 4, {"edges": 7}, "edges=7 must be <= 6, the undirected edges of topology complete"),
        ("random-edges", 4, {"edges": 0}, "edges=0 must be >= 1"),
        (
            "random-edges",
            4,
            {"supergraph": "directed-ring"},
            "supergraph=directed-ring on topology directed-ring must draw",
        ),
        (
            "random-edges",
            4,
            {"supergraph": "random-edges"},
            "supergraph=random-edges on topology random-edges must draw from",
        ),
        ("random-edges", 4, {"degree": 2}, "topology.degree is no option of complete"),
    ],
)
def test_bad_options_are_refused(name: str, n: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message) as refusal:
        build_topology(name, n, **options)
    assert "\n" not in str(refusal.value)


def test_options_and_defaults_are_visible() -> None:
    assert topology_options("small-world") == {"degree": 4, "rewire": 0.1}
    assert topology_options("edge-list") == {"file": None, "directed": True}
    assert topology_options("random-edges") == {"edges": 1, "supergraph": "complete"}
    assert topology_options("ring") == {}
