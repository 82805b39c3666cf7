"""The mixing matrix of every round: a topology, its weights and who is active."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from flower_privdec.errors import ScenarioError
from flower_privdec.graph.mixing.matrix import Hosted, MixingMatrix, SparseMatrix
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
        self._period = topology.period
        self._check()

    def matrix(self, round_index: int) -> MixingMatrix:
        """Return W of a round, [n_peers, n_peers]; inactive rows are the identity's, except for server."""
        active = self.active(round_index)
        if self._period is not None and active.all():
            phase = round_index % self._period
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


class PartlyHeard(Mixing):
    """A mixing in which who was not heard has no weight at one peer: it returns to the peer itself.

    Where everybody was heard it is the mixing itself, to the last bit. Rows of other peers are not to be asked for
    where a neighbor was not.

    Args:
        whole: the run's.
        peer: whose.
    """

    def __init__(self, whole: Mixing, peer: int) -> None:
        """Begin with everybody heard."""
        vars(self).update(vars(whole))
        self._peer = peer
        self._heard: frozenset[int] | None = None

    def hear(self, heard: Iterable[int] | None) -> None:
        """Set which others were heard; None for all."""
        self._heard = None if heard is None else frozenset(heard)

    def matrix(self, round_index: int) -> MixingMatrix:
        """Return W of a round; where a neighbor was not heard, the peer's row alone."""
        whole = super().matrix(round_index)
        if self._heard is None:
            return whole
        senders, _, weights = whole.rows([self._peer]).links()
        missed = [sender not in self._heard and sender != self._peer for sender in senders.tolist()]
        if not any(missed):
            return whole
        senders, weights = senders[~np.array(missed)], weights[~np.array(missed)]
        own = senders == self._peer
        weights = np.where(own, 1 - weights[~own].sum(), weights)
        ends = np.array([0, len(senders)])
        return SparseMatrix(self.n_peers, np.array([self._peer]), ends, senders, weights, halves=False)

    def links(self, round_index: int) -> EdgeArray:
        """Return the edges of a round, [m, 2] (sender, receiver), of the peer with the neighbors that were heard."""
        senders, receivers, _ = super().matrix(round_index).links()
        links: EdgeArray = np.stack([senders, receivers], axis=1)[senders != receivers]
        if self._heard is None:
            return links
        other = np.where(links[:, 0] == self._peer, links[:, 1], links[:, 0])
        mine = (links == self._peer).any(1)
        edges: EdgeArray = links[mine & np.isin(other, list(self._heard))]
        return edges

    def hosted(self, round_index: int, peers: Peers) -> Hosted:
        """Return what a round says of the peer, asked for alone: its messages with those heard."""
        whole = super().matrix(round_index).hosted(peers)
        heard = self._heard
        if heard is None:
            return whole
        return Hosted(
            peers,
            self.matrix(round_index).rows(peers),
            tuple(term for term in whole.sent if term[1] in heard),
            tuple(link for link in whole.heard if link[0] in heard),
            tuple(link for link in whole.answered if link[0] in heard),
        )


RANDOM_ROUNDS = 128
MOST_MEASURED = 1024  # peers: the eigenvalues of a matrix of as many rows


def spectral_gap(mixing: Mixing, horizon: int | None = None) -> float:
    """Measure how fast a graph agrees: 1 - |lambda_2(W_{K-1} ... W_0)|^(1/K), per round.

    K is the period when the graph has one and everybody is active, and the horizon otherwise. The consensus
    direction is taken out and the rest rescaled round by round, so that long products do not underflow.

    Args:
        mixing: the matrices.
        horizon: rounds of a random graph or participation to multiply; 128 when not given.

    Returns:
        The gap in [0, 1]: 1 when K rounds reach the exact mean, 0 when they leave some peers apart: a random
        graph of few edges a round needs a longer horizon than the default one.
    """
    n = mixing.n_peers
    period = mixing.topology.period if mixing.participation.kind == "all" else None
    rounds = period or horizon or RANDOM_ROUNDS
    product, log_scale = _centred(torch.eye(n, dtype=torch.float64)), 0.0
    for k in range(rounds):
        product = _centred(mixing.matrix(k).apply(product))
        scale = float(product.abs().max())
        if scale < 1e-13:
            return 1.0
        product, log_scale = product / scale, log_scale + np.log(scale)
    radius = float(np.abs(np.linalg.eigvals(product.numpy())).max())
    if radius < n * 1e-15:
        return 1.0
    return max(0.0, float(1 - np.exp((np.log(radius) + log_scale) / rounds)))


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Take the mean over rows off every column: the part that has not agreed yet."""
    return rows - rows.mean(dim=0)
