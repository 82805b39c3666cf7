"""A mixing in which a peer did not hear everybody: what its row is, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Gather, Mix, Reply, State
from flower_privdec.graph.mixing import Mixing, PartlyHeard
from flower_privdec.graph.participation import build_participation
from flower_privdec.graph.topology import build_topology

N = 8
GRAPHS = ["ring", "complete", "star", "bipartite", "directed-exponential", "directed-exponential-full", "directed-ring"]
WEIGHTS = ["column-stochastic", "metropolis", "doubly-stochastic", "max-degree"]


def whole(graph: str, weights: str, fraction: float) -> Mixing | None:
    kind = {"kind": "all"} if fraction == 1 else {"kind": "uniform", "fraction": fraction}
    name = kind.pop("kind")
    try:
        return Mixing(build_topology(graph, N), weights, build_participation(str(name), N, 5, *kind.values()))  # type: ignore[arg-type]
    except ScenarioError:
        return None


MIXINGS = {
    (graph, weights, fraction): found
    for graph in GRAPHS
    for weights in WEIGHTS
    for fraction in (1.0, 0.5)
    if (found := whole(graph, weights, fraction)) is not None
}


def test_the_mixings_are_of_all_kinds() -> None:
    assert {graph for graph, _, _ in MIXINGS} == set(GRAPHS)
    assert {weights for _, weights, _ in MIXINGS} == set(WEIGHTS)


OF_ROWS = [which for which in MIXINGS if which[1] != "column-stochastic"]  # shares are added, and never weighed again


@given(st.sampled_from(OF_ROWS), st.integers(0, N - 1), st.sets(st.integers(0, N - 1)), st.integers(0, 20))
@settings(max_examples=400)
def test_weight_of_unheard_neighbours_stays_with_the_peer(
    which: tuple[str, str, float], peer: int, heard: set[int], k: int
) -> None:
    mixing = MIXINGS[which]
    partly = PartlyHeard(mixing, peer)
    partly.use_senders(heard - {peer})
    found = partly.matrix(k).rows([peer])
    wanted = mixing.matrix(k).dense()[peer].copy()
    missed = [j for j in range(N) if j not in heard and j != peer]
    if wanted[missed].any():
        wanted[missed] = 0
        wanted[peer] = 1 - np.delete(wanted, peer).sum()
    np.testing.assert_array_equal(found.dense()[0], wanted)
    assert found.dense()[0].min() >= 0
    assert found.dense()[0].sum() == pytest.approx(1, abs=1e-15)


@given(st.sampled_from(list(MIXINGS)), st.integers(0, N - 1), st.sets(st.integers(0, N - 1)), st.integers(0, 20))
@settings(max_examples=200)
def test_its_links_are_those_with_whom_it_heard(
    which: tuple[str, str, float], peer: int, heard: set[int], k: int
) -> None:
    mixing = MIXINGS[which]
    partly = PartlyHeard(mixing, peer)
    partly.use_senders(heard)
    links = {(int(a), int(b)) for a, b in partly.links(k)}
    all_links = {(int(a), int(b)) for a, b in mixing.links(k)}
    assert links == {(a, b) for a, b in all_links if peer in (a, b) and ({a, b} - {peer}) <= heard}
    hosted = partly.hosted(k, np.array([peer]))
    assert set(hosted.heard) == {(a, b) for a, b in links if b == peer}
    assert {(a, b) for a, b, _ in hosted.sent} == {(a, b) for a, b in links if a == peer}
    assert set(hosted.answered) == {(b, a) for a, b in links if a == peer}
    np.testing.assert_array_equal(hosted.rows.dense(), partly.matrix(k).rows([peer]).dense())


@given(st.sampled_from(list(MIXINGS)), st.integers(0, N - 1), st.sets(st.integers(0, N - 1)), st.integers(0, 20))
@settings(max_examples=200)
def test_rows_and_answers_are_awaited_of_those_heard(
    which: tuple[str, str, float], peer: int, heard: set[int], k: int
) -> None:
    """A neighbour that was not heard is not asked for its answer, and those of all others are used."""
    mixing = MIXINGS[which]
    partly = PartlyHeard(mixing, peer)
    partly.use_senders(heard)
    state, links = State(np.array([peer]), k, 0, {}, {}), mixing.links(k).tolist()
    rows = {(a, b) for a, b in links if b == peer and a in heard}
    assert set(Mix(("x",)).awaited(state, partly)) == set(Gather(("x",)).awaited(state, partly)) == rows
    assert set(Reply(("x",)).awaited(state, partly)) == {(b, a) for a, b in links if a == peer and b in heard}


@given(st.sampled_from(list(MIXINGS)), st.integers(0, N - 1), st.integers(0, 20))
@settings(max_examples=100)
def test_mixing_is_unchanged_if_all_were_heard(which: tuple[str, str, float], peer: int, k: int) -> None:
    mixing = MIXINGS[which]
    partly = PartlyHeard(mixing, peer)
    for heard in (None, range(N)):
        partly.use_senders(heard)
        np.testing.assert_array_equal(partly.matrix(k).dense(), mixing.matrix(k).dense())
    partly.use_senders(None)
    np.testing.assert_array_equal(partly.links(k), mixing.links(k))
