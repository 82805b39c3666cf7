"""The mixing of a run as one peer can do it, which did not hear some of its neighbours in time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flower_privdec.graph.mixing.hosted import Hosted
from flower_privdec.graph.mixing.matrix import MixingMatrix, SparseMatrix
from flower_privdec.graph.mixing.schedule import Mixing
from flower_privdec.graph.topology.graphs import EdgeArray, Peers


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
