"""What a cohort remembers between two steps: rows, one a peer, and edges, one a pair of peers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from flower_privdec.rows.aligned import aligned, is_aligned


@dataclass(frozen=True)
class Edges:
    """A tensor with a row for each of some pairs of peers: as many as there are, whoever has how many neighbours.

    Attributes:
        own: int64 [E], the peer of each pair that is hosted here, ascending.
        other: int64 [E], whom it heard from or answers, ascending for each own.
        values: [E, ...].
    """

    own: np.ndarray
    other: np.ndarray
    values: Tensor

    def of(self, peer: int) -> Edges:
        """Return the pairs of one hosted peer, as views."""
        start, stop = np.searchsorted(self.own, [peer, peer + 1])
        return Edges(self.own[start:stop], self.other[start:stop], self.values[start:stop])


@dataclass
class State:
    """Everything a cohort remembers between two steps; complete at every exchange.

    Attributes:
        peers: int64 [m], the global id of each row.
        round_index: the round under way, from 0.
        at: the place in the algorithm's program that comes next.
        rows: named tensors whose first axis is the peer, each [m, ...]; they are aligned, long rows [m, d] for speed,
            and all because the bits of a product depend on how its operands lie: a state read back has to lie as the
            first did.
        edges: named tensors with a row for each of some pairs of peers, one of them hosted here.
        waiting: whether what comes next is an exchange whose messages are on their way.
    """

    peers: np.ndarray
    round_index: int = 0
    at: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Edges] = field(default_factory=dict)
    waiting: bool = False

    def __post_init__(self) -> None:
        """Align the rows."""
        self.rows = {name: part if is_aligned(part) else aligned(part) for name, part in self.rows.items()}
