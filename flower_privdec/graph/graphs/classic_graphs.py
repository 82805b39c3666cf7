"""Graphs that every textbook has: complete, bipartite, star, torus; and the server, which needs no edges."""

from __future__ import annotations

import math

import numpy as np

from flower_privdec.common.catalogue import GraphSection
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.fields import Count
from flower_privdec.graph.topology import CompleteTopology, Graph, Topology, both_ways, whole_number


class CompleteGraph(Graph):
    """All peers are neighbours; the edges are listed on request only."""

    name = "complete"
    line = "all"

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the graph without a list of its edges."""
        return CompleteTopology(self.name, n_peers)


class ServerGraph(Graph):
    """No graph: the active peers are averaged."""

    name = "server"
    line = "no graph: averaging over the active peers"

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the complete graph, under the name that lets mixing average."""
        return CompleteTopology(self.name, n_peers)


class BipartiteGraph(Graph):
    """Two halves, completely joined."""

    name = "bipartite"
    line = "the first half joined to the second, completely"

    def edge_count(self, n_peers: int) -> float:
        """Return about n² / 2."""
        return n_peers * n_peers / 2

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the complete bipartite graph of the two halves."""
        half = n_peers // 2
        pairs = [(peer, other) for peer in range(half) for other in range(half, n_peers)]
        return both_ways(self.name, n_peers, pairs)


class StarGraph(Graph):
    """A hub, and all others."""

    name = "star"
    line = "peer 0 joined to all others"

    def edge_count(self, n_peers: int) -> float:
        """Return about 2 n."""
        return 2 * n_peers

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the star around peer 0."""
        return both_ways(self.name, n_peers, [(0, peer) for peer in range(1, n_peers)])


class TorusGraph(Graph):
    """A grid whose sides are joined."""

    name = "torus"
    line = "a `rows` x `cols` grid that wraps around"

    class Section(GraphSection):
        """A grid that wraps around.

        Attributes:
            rows: how many; left out, as square as n_peers allows.
            cols: how many; left out, as square as n_peers allows.
        """

        rows: Count | None = None
        cols: Count | None = None

    section: Section

    def edge_count(self, n_peers: int) -> float:
        """Return 4 n."""
        return 4 * n_peers

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the grid; a side that is not given follows from the other, or is the nearest to the root of n."""
        given = {"rows": self.section.rows, "cols": self.section.cols}
        sides = {key: whole_number(key, value, 2) for key, value in given.items() if value is not None}
        rows = sides.get("rows")
        cols = sides.get("cols")
        if rows is None and cols is None:
            divisors = [side for side in range(2, math.isqrt(n_peers) + 1) if n_peers % side == 0]
            rows = max(divisors, default=0)
        if rows is None:
            rows = n_peers // cols if cols else 0
        if cols is None:
            cols = n_peers // rows if rows else 0

        if rows * cols != n_peers or min(rows, cols) < 2:
            options = "".join(f" {key}={value}" for key, value in sides.items())
            raise ScenarioError(
                f"n_peers={n_peers} on topology torus{options and ' with'}{options} must be rows x cols, both >= 2; "
                "take an n_peers that factors so, or topology ring",
                code="topology.torus",
            )

        # Peers are numbered row by row; each is joined to the next in its row, and in its column.
        grid = np.arange(n_peers).reshape(rows, cols)
        pairs = [np.stack([grid, np.roll(grid, -1, axis)], axis=-1).reshape(-1, 2) for axis in (0, 1)]
        return both_ways(self.name, n_peers, np.concatenate(pairs))
