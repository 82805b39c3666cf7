"""The section of the graph, by name or of a user's own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, Tag

from flower_privdec import catalogue
from flower_privdec.scenario.fields import (
    OWN_OR_NAMED,
    Count,
    Fraction,
    OwnSection,
    PathText,
    Section,
)

Weights = Annotated[str, catalogue.WEIGHTS]


class TopologySection(Section):
    """The communication graph and its mixing weights.

    Attributes:
        name: of the graph; `privdec list` describes each, `server` is an average over the active peers.
        weights: auto is what the algorithm's theory needs: column-stochastic for push-sum; for gossip metropolis on an
            undirected graph, doubly-stochastic on a directed one.
        degree: neighbours of each peer, of random-regular and small-world.
        probability: of each edge, of erdos-renyi.
        rewire: the chance that an edge is moved, of small-world.
        edges: how many a round, of random-edges.
        file: of edge-list, a line `sender receiver` for each edge.
        directed: whether the file's edges go one way.
        rows: of torus; left out, as square as n_peers allows.
        cols: of torus.
        supergraph: the graph from which random-edges draws.
    """

    name: Annotated[str, catalogue.TOPOLOGIES] = "directed-exponential"
    weights: Weights = "auto"
    degree: Count | None = None
    probability: Fraction | None = None
    rewire: Annotated[float, Field(ge=0, le=1)] | None = None
    edges: Count | None = None
    file: PathText | None = None
    directed: bool | None = None
    rows: Count | None = None
    cols: Count | None = None
    supergraph: Annotated[str, catalogue.TOPOLOGIES] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options given for the graph itself."""
        return self.model_dump(exclude={"name", "weights"}, exclude_none=True)


class OwnTopologySection(OwnSection):
    """A graph of a user's own, and with which weights it is mixed.

    The function is called with n_peers and its arguments, and with the scenario's seed where it has a parameter of
    this name that the arguments leave out. It returns a networkx graph on the nodes 0 to n_peers - 1, for each peer a
    list of those it sends to, or a `flower_privdec.graph.topology.Topology`.

    Attributes:
        weights: as for a named graph.
    """

    weights: Weights = "auto"

    def options(self) -> dict[str, Any]:
        """Return what the graph is built with."""
        return {"arguments": self.arguments}


TopologyChoice = Annotated[
    Annotated[TopologySection, Tag("named")] | Annotated[OwnTopologySection, Tag("own")], OWN_OR_NAMED
]
