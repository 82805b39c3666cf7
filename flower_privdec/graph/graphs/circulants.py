"""Graphs in which every peer sends as many places ahead as the others: rings, and exponential offsets."""

from __future__ import annotations

import math

import numpy as np

from flower_privdec.graph.topology import DirectedExponential, Graph, StaticTopology, Topology, shift_edges


class DirectedExponentialGraph(Graph):
    """One offset a round: push-sum on 2^m peers reaches the exact mean in m rounds."""

    name = "directed-exponential"
    line = "one peer, 2^(k mod p) ahead, in round k"

    def edge_count(self, n_peers: int) -> float:
        """Return n log n, over all rounds."""
        return n_peers * math.log2(n_peers)

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the graph, whose offset changes in each round."""
        return DirectedExponential(n_peers)


class FullExponentialGraph(Graph):
    """All offsets in every round."""

    name = "directed-exponential-full"
    line = "all the peers 2^0, 2^1, ... ahead"

    def edge_count(self, n_peers: int) -> float:
        """Return n log n."""
        return n_peers * math.log2(n_peers)

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the edges to the peers 1, 2, 4, ... ahead."""
        offsets = 2 ** np.arange((n_peers - 1).bit_length())
        return StaticTopology(self.name, n_peers, True, shift_edges(n_peers, offsets))


class DirectedRingGraph(Graph):
    """A ring in one direction."""

    name = "directed-ring"
    line = "the next peer"

    def edge_count(self, n_peers: int) -> float:
        """Return n."""
        return n_peers

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the edges to the next peer."""
        return StaticTopology(self.name, n_peers, True, shift_edges(n_peers, [1]))


class RingGraph(Graph):
    """A ring in both directions."""

    name = "ring"
    line = "the next and the previous peer"

    def edge_count(self, n_peers: int) -> float:
        """Return 2 n."""
        return 2 * n_peers

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the edges to the next and the previous peer."""
        return StaticTopology(self.name, n_peers, False, shift_edges(n_peers, [1, n_peers - 1]))
