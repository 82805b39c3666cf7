"""What a mixing matrix says of the peers that one process hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.graph.topology.graphs import Peers

if TYPE_CHECKING:
    from flower_privdec.graph.mixing.matrix import MixingMatrix

Link = tuple[int, int]  # sender, receiver
Term = tuple[int, int, float]  # sender, receiver, weight


@dataclass(frozen=True)
class Hosted:
    """Rows of W for some peers, and what passes between them and others or each other.

    Attributes:
        peers: who is hosted, in their order.
        rows: of W for them.
        sent: the terms that stand for messages from them, in the order of `MixingMatrix.links`.
        heard: the messages to them, by receiver and sender.
        answered: the answers to what they sent, (who answers, who sent), by who sent and who answers.
    """

    peers: Peers
    rows: MixingMatrix
    sent: tuple[Term, ...]
    heard: tuple[Link, ...]
    answered: tuple[Link, ...]

    @classmethod
    def of(cls, matrix: MixingMatrix, peers: Peers) -> Hosted:
        """Look at a matrix once, for peers among its receivers."""
        senders, receivers, weights = matrix.links()
        between = senders != receivers
        here, there = between & np.isin(senders, peers), between & np.isin(receivers, peers)
        sent = zip(senders[here].tolist(), receivers[here].tolist(), weights[here].tolist(), strict=True)
        heard, answered = _by_second(senders[there], receivers[there]), _by_second(receivers[here], senders[here])
        return cls(peers, matrix.rows(peers), tuple(sent), heard, answered)

    @cached_property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """Return the terms of each hosted peer's own row: itself first, then by distance."""
        return tuple(tuple(self.rows.rows([peer]).terms()) for peer in self.peers.tolist())


def _by_second(first: Peers, second: Peers) -> tuple[Link, ...]:
    order = np.lexsort((first, second))
    return tuple(zip(first[order].tolist(), second[order].tolist(), strict=True))
