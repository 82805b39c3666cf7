"""Graphs as edge sets per round: int64 arrays [m, 2] of (sender, receiver), sorted, unique, no self loops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from flower_privdec.rows.keys import keyed_generator

EdgeArray: TypeAlias = npt.NDArray[np.int64]
Peers: TypeAlias = npt.NDArray[np.int64]


@runtime_checkable
class Topology(Protocol):
    """The graph of every round; an undirected one lists each edge in both directions."""

    @property
    def name(self) -> str:
        """The name it has in a scenario."""

    @property
    def n_peers(self) -> int:
        """How many peers it joins, numbered from 0."""

    @property
    def directed(self) -> bool:
        """Whether some edge may lack its reverse."""

    @property
    def period(self) -> int | None:
        """After how many rounds the edges repeat; 1 is static, None is fresh at random every round."""

    def edges(self, round_index: int) -> EdgeArray:
        """Return the edges of a round, [m, 2] (sender, receiver)."""

    def support(self) -> EdgeArray:
        """Return every edge that some round may use."""


def edge_array(pairs: npt.ArrayLike, n_peers: int, *, symmetric: bool = False) -> EdgeArray:
    """Sort pairs (sender, receiver) into an edge array, without repeats, read-only.

    Args:
        pairs: [m, 2] peer ids.
        n_peers: the ids run from 0 to n_peers - 1.
        symmetric: add the reverse of every pair.

    Returns:
        int64 [m', 2], sorted by sender and then receiver.
    """
    array = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    if symmetric:
        array = np.concatenate([array, array[:, ::-1]])
    codes = np.unique(array[:, 0] * n_peers + array[:, 1])
    edges = np.stack(np.divmod(codes, n_peers), axis=1)
    edges.flags.writeable = False
    return edges


def shift_edges(n_peers: int, offsets: npt.ArrayLike) -> EdgeArray:
    """Return the edges of the circulant graph in which every peer sends to the peers `offsets` ahead."""
    senders, ahead = np.meshgrid(np.arange(n_peers), np.asarray(offsets, dtype=np.int64), indexing="ij")
    return edge_array(np.stack([senders, (senders + ahead) % n_peers], axis=-1), n_peers)


def in_neighbors(edges: EdgeArray, peer: int) -> Peers:
    """Return the peers that send to `peer`, ascending."""
    senders: Peers = edges[edges[:, 1] == peer, 0]
    return senders


def networkx() -> Any:
    """Import networkx, which takes a while and which most runs have no need of."""
    import networkx

    return networkx


def as_networkx(topology: Topology, round_index: int | None = None) -> Any:
    """Return the graph of one round, or of all rounds together, as a networkx graph or digraph."""
    graph = networkx().DiGraph() if topology.directed else networkx().Graph()
    graph.add_nodes_from(range(topology.n_peers))
    edges = topology.support() if round_index is None else topology.edges(round_index)
    graph.add_edges_from(edges.tolist())
    return graph


@dataclass(frozen=True, eq=False)
class StaticTopology:
    """The same edges every round."""

    name: str
    n_peers: int
    directed: bool
    all_edges: EdgeArray
    period: int | None = 1

    def edges(self, round_index: int) -> EdgeArray:
        """Return the edges, whatever the round."""
        return self.all_edges

    def support(self) -> EdgeArray:
        """Return the edges."""
        return self.all_edges


@dataclass(frozen=True)
class CompleteTopology:
    """Everybody sends to everybody; the edges are listed only when asked for, since there are n (n - 1)."""

    name: str
    n_peers: int
    directed: bool = False
    period: int | None = 1

    def edges(self, round_index: int) -> EdgeArray:
        """Return all n (n - 1) ordered pairs."""
        return self.support()

    def support(self) -> EdgeArray:
        """Return all n (n - 1) ordered pairs."""
        return np.argwhere(~np.eye(self.n_peers, dtype=bool))


@dataclass(frozen=True)
class DirectedExponential:
    """The one-peer directed exponential graph: in round k all send to the peer 2^(k mod p) ahead.

    p = floor(log2(n - 1)) + 1 (Assran et al. 2019, Stochastic Gradient Push, appendix A). On n = 2^m peers
    push-sum over it reaches the exact mean in m rounds.
    """

    n_peers: int
    name: str = "directed-exponential"
    directed: bool = True

    @property
    def period(self) -> int | None:
        """Return p, the number of offsets it goes through."""
        return (self.n_peers - 1).bit_length()

    def edges(self, round_index: int) -> EdgeArray:
        """Return the n edges of a round."""
        return shift_edges(self.n_peers, [2 ** (round_index % (self.n_peers - 1).bit_length())])

    def support(self) -> EdgeArray:
        """Return the edges of all offsets together."""
        return shift_edges(self.n_peers, 2 ** np.arange((self.n_peers - 1).bit_length()))


@dataclass(frozen=True, eq=False)
class RandomEdges:
    """Some undirected edges of a supergraph, drawn afresh each round without replacement.

    Each round's draw is keyed by (seed, round), so any process can draw any round.
    """

    supergraph: Topology
    count: int
    seed: int
    name: str = "random-edges"
    directed: bool = False
    period: int | None = None

    @property
    def n_peers(self) -> int:
        """How many peers it joins."""
        return self.supergraph.n_peers

    def edges(self, round_index: int) -> EdgeArray:
        """Return the round's edges, each in both directions."""
        generator = keyed_generator(self.seed, "random-edges", round_index)
        chosen = generator.choice(len(self.candidates), size=self.count, replace=False, shuffle=False)
        return edge_array(self.candidates[chosen], self.n_peers, symmetric=True)

    def support(self) -> EdgeArray:
        """Return the supergraph's edges."""
        return self.supergraph.support()

    @cached_property
    def candidates(self) -> EdgeArray:
        """Return one (smaller, larger) pair for every edge of the supergraph."""
        edges = self.supergraph.support()
        return edges[edges[:, 0] < edges[:, 1]]
