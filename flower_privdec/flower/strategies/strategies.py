"""Flower strategies without a global model, for apps whose ClientApp is a peer (`PeerMod`)."""

from __future__ import annotations

from flower_privdec.errors import ScenarioError
from flower_privdec.flower.strategies.routing import Routed
from flower_privdec.graph.mixing.weights import UNDIRECTED
from flower_privdec.graph.topology.named import build_topology

__all__ = ["Gossip", "PushSum"]


class PushSum(Routed):
    """Let every peer train its own model and average them over a directed graph by push-sum.

        (x_i, w_i) ← Σ_j W_ij (x_j, w_j),  z_i = x_i / w_i,  W_ij = 1 / (out_j + 1) of the round's active peers

    It takes the place of one of Flower's: `PushSum(topology="directed-exponential").start(grid, arrays, ...)`. It
    carries what peers send to each other and combines none of it; see `Routed` for its arguments.

    Source: Kempe et al. 2003; Assran et al. 2019, Stochastic Gradient Push, Algorithm 1.
    """

    weights = "column-stochastic"


class Gossip(Routed):
    """Let every peer train its own model and average them over an undirected graph, with doubly stochastic weights.

        x_i ← Σ_j W_ij x_j,  W_ij = 1 / (1 + max(deg_i, deg_j)) of the round's active peers, the rest to itself

    The weight w of push-sum goes along: it is 1, and leaves it only where a message is late, whose part is then not
    missed. See `Routed` for the arguments.

    Raises:
        ScenarioError: the graph is directed.

    Source: Xiao and Boyd 2004 (Metropolis weights).
    """

    weights = "metropolis"

    def _check_graph(self) -> None:
        """Refuse a directed graph at once, where its name tells."""
        graph = self.topology
        if isinstance(graph, str) and self._is_named():
            graph = build_topology(graph, 8, **self.topology_options)
        if not isinstance(graph, str) and graph.directed and self.weights in UNDIRECTED:
            raise ScenarioError(
                f"topology {graph.name!r} of Gossip must be undirected, for its weights to be doubly stochastic; take "
                "PushSum, or an undirected graph such as ring"
            )
