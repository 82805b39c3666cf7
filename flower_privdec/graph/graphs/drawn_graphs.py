"""Graphs that are drawn at random: once, until connected; or some edges of another graph afresh in each round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from flower_privdec.common.catalogue import TOPOLOGIES, GraphSection
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.common.fields import Count, Fraction
from flower_privdec.common.registry import PartName, keys_declared_by
from flower_privdec.graph.topology import (
    Graph,
    Topology,
    build_topology,
    chance,
    networkx,
    sample_edges,
    undirected,
    whole_number,
)
from flower_privdec.rows.keys import keyed_generator

DRAWS = 200  # of a random graph, until one is connected
ALMOST_NEVER = 8.0  # expected peers without an edge at which one draw of 3,000 is connected


def draw_connected(name: str, seed: int, draw: Callable[[int], Any], blamed: str, remedy: str) -> Topology:
    """Draw graphs until one is connected.

    Args:
        draw: returns a networkx graph by the seed of a draw.
        blamed: the setting on which it depends, for the error.
        remedy: how to change it.

    Raises:
        ScenarioError: none of many draws was connected.
    """
    for attempt in range(DRAWS):
        key = int(keyed_generator(seed, f"topology-{name}", attempt).integers(2**31))
        graph = draw(key)
        if networkx().is_connected(graph):
            return undirected(name, graph)
    raise ScenarioError(
        f"{blamed} on topology {name}: {DRAWS} draws and none was connected; {remedy}", code="topology.never-connected"
    )


class RandomRegularGraph(Graph):
    """A random graph in which all peers have as many neighbours."""

    name = "random-regular"
    line = "drawn once, every peer with `degree` neighbours"

    class Section(GraphSection):
        """A random regular graph.

        Attributes:
            degree: neighbours of each peer.
        """

        degree: Count = 4

    section: Section

    def edge_count(self, n_peers: int) -> float:
        """Return n times the degree."""
        return n_peers * self.section.degree

    def build(self, n_peers: int, seed: int) -> Topology:
        """Draw the graph."""
        degree = whole_number("degree", self.section.degree, 1 if n_peers == 2 else 2)
        if degree >= n_peers:
            raise ScenarioError(
                f"topology.degree={degree} must be < n_peers={n_peers}: a peer has only that many others",
                code="topology.regular",
            )
        if degree * n_peers % 2:
            raise ScenarioError(
                f"topology.degree={degree} times n_peers={n_peers} must be even; change one of them by 1",
                code="topology.regular",
            )

        def draw(key: int) -> Any:
            return networkx().random_regular_graph(degree, n_peers, seed=key)

        return draw_connected(self.name, seed, draw, f"topology.degree={degree}", "raise it")


class ErdosRenyiGraph(Graph):
    """A random graph in which every pair is joined with one probability."""

    name = "erdos-renyi"
    line = "drawn once, each edge with `probability`, until connected"

    class Section(GraphSection):
        """An Erdős-Rényi graph.

        Attributes:
            probability: of each edge.
        """

        probability: Fraction = 0.5

    section: Section

    def edge_count(self, n_peers: int) -> float:
        """Return n² times the probability."""
        return n_peers * n_peers * self.section.probability

    def build(self, n_peers: int, seed: int) -> Topology:
        """Draw the graph."""
        probability = chance("probability", self.section.probability)
        threshold = math.log(n_peers) / n_peers
        remedy = f"raise it well above ln(n)/n = {threshold:.2g}"
        blamed = f"topology.probability={probability}"

        # With so many peers expected without an edge, about e to minus that number of draws has none of them.
        isolated = n_peers * (1 - probability) ** (n_peers - 1)
        if isolated > ALMOST_NEVER:
            raise ScenarioError(
                f"{blamed} leaves about {isolated:.3g} of n_peers={n_peers} without an edge, so that no draw is "
                f"connected; {remedy}",
                code="topology.never-connected",
            )

        def draw(key: int) -> Any:
            return networkx().fast_gnp_random_graph(n_peers, probability, seed=key)

        return draw_connected(self.name, seed, draw, blamed, remedy)


class SmallWorldGraph(Graph):
    """A ring of near neighbours with some edges moved."""

    name = "small-world"
    line = "Watts-Strogatz: a ring of `degree`, each edge moved with chance `rewire`"

    class Section(GraphSection):
        """A Watts-Strogatz graph.

        Attributes:
            degree: neighbours of each peer in the ring, half of them to each side.
            rewire: the chance that an edge is moved.
        """

        degree: Count = 4
        rewire: Annotated[float, Field(ge=0, le=1)] = 0.1

    section: Section

    def edge_count(self, n_peers: int) -> float:
        """Return n times the degree."""
        return n_peers * self.section.degree

    def build(self, n_peers: int, seed: int) -> Topology:
        """Draw the graph."""
        degree = whole_number("degree", self.section.degree, 2)
        rewire = chance("rewire", self.section.rewire, zero=True)
        if degree % 2 or degree >= n_peers:
            raise ScenarioError(
                f"topology.degree={degree} on topology small-world must be even and < n_peers={n_peers}: "
                "half of it to each side of the ring",
                code="topology.small-world",
            )

        def draw(key: int) -> Any:
            return networkx().watts_strogatz_graph(n_peers, degree, rewire, seed=key)

        return draw_connected(self.name, seed, draw, f"topology.rewire={rewire}", "lower it")


class RandomEdgesGraph(Graph):
    """Some edges of another graph, drawn again in each round."""

    name = "random-edges"
    line = "`edges` edges of a `supergraph`, drawn afresh each round"

    class Section(GraphSection):
        """Some edges of another graph. The other graph's keys are written beside these.

        Attributes:
            edges: how many in a round.
            supergraph: the graph from which they are drawn.
        """

        model_config = ConfigDict(extra="allow")

        edges: Count = 1
        supergraph: Annotated[str, PartName(TOPOLOGIES)] = "complete"

        def _check(self) -> None:
            keys = keys_declared_by(TOPOLOGIES[self.supergraph]).model_fields
            unknown = [key for key in self.model_extra or {} if key not in keys]
            if unknown:
                takes = f"it takes {', '.join(keys)}" if keys else "it takes none"
                raise ArgumentError(
                    f"{unknown[0]} is not a key of random-edges, nor of its supergraph {self.supergraph}: {takes}",
                    code="scenario.extra_forbidden",
                )
            TOPOLOGIES.section(self.supergraph, **self.model_extra or {})

    section: Section

    def build(self, n_peers: int, seed: int) -> Topology:
        """Return the graph whose draws are keyed by (seed, round)."""
        edges = whole_number("edges", self.section.edges, 1)
        supergraph = self.section.supergraph
        graph = build_topology(supergraph, n_peers, seed=seed, **self.section.model_extra or {})
        return sample_edges(graph, edges, seed, f"topology.supergraph={supergraph}", "topology.edges")
