"""The mixing matrix of every round: a topology, its weights and who is active."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flower_privdec.errors import ScenarioError
from flower_privdec.graph.mixing.hosted import Hosted
from flower_privdec.graph.mixing.matrix import MixingMatrix
from flower_privdec.graph.mixing.weights import UNDIRECTED, average_matrix, check_weights, mixing_matrix
from flower_privdec.graph.participation import Everybody, Participation
from flower_privdec.graph.topology.connectivity import check_topology
from flower_privdec.graph.topology.graphs import CompleteTopology, EdgeArray, Peers, Topology


class Mixing:
    """Gives the matrix of a round; rounds in which everybody is active are kept for the period of the graph.

    Topology server has weights of its own, `server`, whatever weights are asked for: all it has to weigh is
    who is active.

    Args:
        topology: the graph.
        weights: what `mixing_matrix` takes.
        participation: who is active; everybody when not given.

    Raises:
        ScenarioError: a graph that can never agree, or that does not have these weights.
    """

    def __init__(self, topology: Topology, weights: str, participation: Participation | None = None) -> None:
        """Check the combination and start with nothing cached."""
        self.topology = topology
        self.n_peers = topology.n_peers
        self.participation = participation or Everybody(self.n_peers)
        self.weights = "server" if topology.name == "server" else weights
        self._by_phase: dict[int, MixingMatrix] = {}
        self._latest: tuple[int, MixingMatrix] | None = None
        self._check()

    def matrix(self, round_index: int) -> MixingMatrix:
        """Return W of a round, [n_peers, n_peers]; inactive rows are the identity's, except for server."""
        active = self.active(round_index)
        if active.all() and self.topology.period is not None:
            phase = round_index % self.topology.period
            if phase not in self._by_phase:
                self._by_phase[phase] = self._build(phase, active)
            return self._by_phase[phase]
        if self._latest is None or self._latest[0] != round_index:
            self._latest = (round_index, self._build(round_index, active))
        return self._latest[1]

    def active(self, round_index: int) -> npt.NDArray[np.bool_]:
        """Return the mask of the round's active peers, [n_peers]."""
        return self.participation.active(round_index)

    @property
    def sends_shares(self) -> bool:
        """Whether a message carries the sender's weighted share of its row, and not the row itself."""
        return self.weights == "column-stochastic"

    def links(self, round_index: int) -> EdgeArray:
        """Return the edges of a round, [m, 2] (sender, receiver): the off-diagonal terms of W."""
        senders, receivers, _ = self.matrix(round_index).links()
        links: EdgeArray = np.stack([senders, receivers], axis=1)[senders != receivers]
        return links

    def hosted(self, round_index: int, peers: Peers) -> Hosted:
        """Return what a round's matrix says of some peers."""
        return self.matrix(round_index).hosted(peers)

    def heard(self, rounds: int) -> npt.NDArray[np.int64]:
        """Return how many others each peer hears from in each of some rounds, [rounds or the graph's period, n_peers].

        It takes as long as making the matrices of these rounds; what is public decides it.
        """
        repeats = self.participation.kind == "all" and self.topology.period is not None
        round_indices = range(min(rounds, self.topology.period or rounds) if repeats else rounds)
        return np.stack([np.bincount(self.links(k)[:, 1], minlength=self.n_peers) for k in round_indices])

    def _build(self, round_index: int, active: npt.NDArray[np.bool_]) -> MixingMatrix:
        if isinstance(self.topology, CompleteTopology):  # without listing its n (n - 1) edges
            return average_matrix(active, everybody_receives=self.weights == "server")
        return mixing_matrix(self.topology.edges(round_index), self.n_peers, self.weights, active)

    def _check(self) -> None:
        topology, weights, kind = self.topology, self.weights, self.participation.kind
        check_weights(weights)
        check_topology(topology)
        if self.participation.n_peers != self.n_peers:
            raise ScenarioError(
                f"participation of {self.participation.n_peers} peers must be of n_peers={self.n_peers}, "
                f"as topology {topology.name} is; build both for the same peers"
            )
        if weights == "server" and topology.name != "server":
            raise ScenarioError(
                f"topology.weights=server on topology {topology.name} must be on topology server; set topology.name"
            )
        if weights in UNDIRECTED and topology.directed:
            raise ScenarioError(
                f"topology.weights={weights} on topology {topology.name} must have an undirected graph; "
                "use a push-sum algorithm (column-stochastic weights), or an undirected topology"
            )
        if weights == "doubly-stochastic" and topology.directed and kind != "all":
            raise ScenarioError(
                f"topology.weights=doubly-stochastic on topology {topology.name} must have participation all, "
                f"not {kind}: an absent peer unbalances what others send and receive; use push-sum"
            )
        for phase in range(topology.period or 1):
            self._build(phase, np.ones(self.n_peers, dtype=bool))
        if weights != "server" and max(int(self.active(k).sum()) for k in range(8)) < 2:
            raise ScenarioError(
                f"participation.kind={kind} leaves 1 peer of {self.n_peers} active, so no peer ever exchanges; "
                "raise fraction so that at least 2 are active"
            )
