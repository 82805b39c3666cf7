"""Whether a graph can ever agree, and how soon."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import scipy

from flower_privdec.errors import ScenarioError
from flower_privdec.graph.topology.graphs import CompleteTopology, EdgeArray, Peers, Topology

MOST_NAMED = 8


def check_topology(topology: Topology) -> None:
    """Refuse a graph on which what one peer knows can never reach some other peer.

    Agreement needs the union of all rounds' edges to be strongly connected.

    Raises:
        ScenarioError: naming peers that are cut off, and the remedy.
    """
    if isinstance(topology, CompleteTopology):
        return
    forward = _adjacency([topology.support()], topology.n_peers)
    for graph, sense in ((forward, "can never hear from"), (forward.T.tocsr(), "can never be heard by")):
        reached = scipy.sparse.csgraph.breadth_first_order(graph, 0, directed=True, return_predecessors=False)
        cut_off = np.setdiff1d(np.arange(topology.n_peers), reached)
        if len(cut_off):
            raise ScenarioError(
                f"topology.name={topology.name} can never agree: {_named(cut_off)} {sense} peer 0; "
                "add edges until every peer reaches every other (the graph must be strongly connected)"
            )


def joint_connectivity(topology: Topology, horizon: int = 64) -> int | None:
    """Find the smallest B such that the union of any B consecutive rounds is strongly connected.

    Args:
        topology: the graph.
        horizon: how many rounds of a graph drawn at random are looked at; a periodic graph needs none.

    Returns:
        B in rounds, at most the period (or the horizon); None when even all those rounds do not suffice.
    """
    if isinstance(topology, CompleteTopology):
        return 1
    periodic = topology.period is not None
    length = topology.period or horizon
    rounds = [topology.edges(k) for k in range(length)]

    def every_window_connects(size: int) -> bool:
        starts = range(length if periodic else length - size + 1)
        windows = ([rounds[(start + k) % length] for k in range(size)] for start in starts)
        return all(_strongly_connected(window, topology.n_peers) for window in windows)

    smallest = bisect_left(range(1, length + 1), True, key=every_window_connects) + 1
    return smallest if smallest <= length else None


def _adjacency(rounds: Sequence[EdgeArray], n_peers: int) -> scipy.sparse.csr_array:
    edges = np.concatenate(rounds)
    ones = np.ones(len(edges))
    return scipy.sparse.csr_array((ones, (edges[:, 0], edges[:, 1])), shape=(n_peers, n_peers))


def _strongly_connected(rounds: Sequence[EdgeArray], n_peers: int) -> bool:
    graph = _adjacency(rounds, n_peers)
    return bool(scipy.sparse.csgraph.connected_components(graph, connection="strong", return_labels=False) == 1)


def _named(peers: Peers) -> str:
    if len(peers) == 1:
        return f"peer {peers[0]}"
    first = ", ".join(str(peer) for peer in peers[:MOST_NAMED])
    more = len(peers) - MOST_NAMED
    return f"peers {first}" + (f" and {more} more" if more > 0 else "")
