"""Which rows shards send each other in an exchange. Each shard computes this from the graph, so that all agree.

If several peers of another shard mix a row, it is sent once and without a weight; the receiving shard applies the
weights, as the engine does. For a mean over all peers only sums are sent, and for any other exchange its messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flower_privdec.common.formatting import peer_ranges
from flower_privdec.graph.mixing import Link, MixingMatrix, SparseMatrix


@dataclass(frozen=True)
class Shards:
    """Peers split into runs of consecutive ids, whose lengths differ by one at most.

    Attributes:
        ends: 0, and then the first id behind each shard's peers, int64 [shards + 1].
    """

    ends: np.ndarray

    @classmethod
    def split(cls, n_peers: int, count: int) -> Shards:
        """Split peers into `count` shards, or into one for each peer if that is less."""
        count = min(count, n_peers)
        size, longer_shards = divmod(n_peers, count)
        numbers = np.arange(count + 1)
        return cls(size * numbers + np.minimum(numbers, longer_shards))  # the first shards have a peer more

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.ends) - 1

    def peers(self, shard: int) -> np.ndarray:
        """Return the global ids of a shard's peers, int64 [m]."""
        return np.arange(self.ends[shard], self.ends[shard + 1])

    def of(self, peers: npt.ArrayLike) -> np.ndarray:
        """Return the shard of each of some peers."""
        return np.asarray(np.searchsorted(self.ends, peers, side="right") - 1)

    def name(self, shard: int) -> str:
        """Return the name of a shard in messages."""
        return f"the shard of peers {peer_ranges(self.peers(shard).tolist())}"


@dataclass(frozen=True)
class Traffic:
    """The rows that go to and come from each other shard in one exchange; both sides compute it alike.

    "Foreign" rows are those from all other shards, one behind the other, by shard.

    Attributes:
        sends: for each shard, the places here of the rows that go to it, int64, in the order in which they go.
        receives: for each shard, the slice of the foreign rows that come from it.
        leave: the rows of `sends` again, as runs [begin, end) of consecutive places here.
        arrive: for each shard, the runs in which it sends its rows, as places [begin, end) among the foreign rows.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, slice]
    leave: Mapping[int, list[tuple[int, int]]]
    arrive: Mapping[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, sends: Mapping[int, np.ndarray], coming: Mapping[int, np.ndarray]) -> Traffic:
        """Return the traffic of an exchange.

        Args:
            sends: for each shard, the rows that go to it, by their places here.
            coming: for each shard, the rows that come from it, by their places there: so both ends find the same runs.
        """
        receives = {}
        arrive = {}
        first = 0
        for shard, places in sorted(coming.items()):
            receives[shard] = slice(first, first + len(places))
            arrive[shard] = [(first + start, first + stop) for start, stop in _runs(places)]
            first += len(places)

        leave = {}
        for shard, places in sends.items():
            leave[shard] = [(int(places[start]), int(places[stop - 1]) + 1) for start, stop in _runs(places)]

        going = {shard: torch.from_numpy(places) for shard, places in sends.items()}
        return cls(going, receives, leave, arrive)

    @property
    def foreign(self) -> int:
        """Return the number of foreign rows."""
        return max((part.stop for part in self.receives.values()), default=0)


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Return where runs of consecutive numbers begin and end."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return list(pairwise([0, *breaks.tolist(), len(places)]))


Part = tuple[slice | Tensor, MixingMatrix]  # rows here, and their weights over all rows here and then the foreign ones


@dataclass(frozen=True)
class MixPlan:
    """How a shard mixes with a sparse matrix.

    Attributes:
        traffic: the rows that cross.
        inner: the rows here without an in-neighbour elsewhere, which are mixed while others are on their way; empty if
            there are none.
        border: the rows here with an in-neighbour elsewhere; empty if there are none.
    """

    traffic: Traffic
    inner: tuple[Part, ...]
    border: tuple[Part, ...]


def mix_plan(matrix: SparseMatrix, shards: Shards, shard: int) -> MixPlan:
    """Compute what a shard sends, receives and weighs with a matrix of all peers."""
    peers = shards.peers(shard)
    senders, receivers, _ = matrix.links()
    from_shard = shards.of(senders)
    to_shard = shards.of(receivers)

    # A row that several peers here mix comes once. The rows are in the order of ids, so also by shard.
    is_coming = (to_shard == shard) & (from_shard != shard)
    foreign = np.unique(senders[is_coming])
    origin = shards.of(foreign)
    coming = {int(other): foreign[origin == other] for other in np.unique(origin)}

    is_leaving = (from_shard == shard) & (to_shard != shard)
    sends = {}
    for other in np.unique(to_shard[is_leaving]):
        going = np.unique(senders[is_leaving & (to_shard == other)])
        sends[int(other)] = going - shards.ends[shard]

    # Where each peer's row is in this shard's table: first the rows here, and behind them the foreign ones.
    column_of = np.full(matrix.n_columns, -1)
    column_of[peers] = np.arange(len(peers))
    column_of[foreign] = len(peers) + np.arange(len(foreign))

    mine = matrix.rows(peers)
    row_of_entry = np.repeat(np.arange(len(peers)), np.diff(mine.indptr))
    is_foreign_entry = column_of[mine.columns] >= len(peers)
    is_border = np.zeros(len(peers), dtype=bool)
    is_border[row_of_entry[is_foreign_entry]] = True

    n_columns = len(peers) + len(foreign)
    inner = _part(mine, np.flatnonzero(~is_border), column_of, n_columns)
    border = _part(mine, np.flatnonzero(is_border), column_of, n_columns)
    return MixPlan(Traffic.of(sends, coming), inner, border)


def _part(mine: SparseMatrix, rows: np.ndarray, column_of: np.ndarray, n_columns: int) -> tuple[Part, ...]:
    """Return some of a shard's rows, with their weights over its table, as one part; no part if there are none."""
    if len(rows) == 0:
        return ()

    part = mine.rows(mine.receivers[rows])
    weights = replace(part, n_columns=n_columns, columns=column_of[part.columns])

    # Rows in a run are given as a slice, which can be mixed in place; other rows need a copy.
    first = int(rows[0])
    end = int(rows[-1]) + 1
    if end - first == len(rows):
        return ((slice(first, end), weights),)
    return ((torch.from_numpy(rows), weights),)


def between(going: Sequence[Link], coming: Sequence[Link], shards: Shards) -> Traffic:
    """Return the traffic of messages to and from peers of other shards.

    Args:
        going, coming: links (sender, receiver) of the messages, sorted by the other shard and then by link.
    """
    receivers = np.array(going, dtype=np.int64).reshape(-1, 2)[:, 1]
    senders = np.array(coming, dtype=np.int64).reshape(-1, 2)[:, 0]
    to_shard = shards.of(receivers)
    from_shard = shards.of(senders)

    sends = {int(shard): np.flatnonzero(to_shard == shard) for shard in np.unique(to_shard)}
    receives = {int(shard): np.arange((from_shard == shard).sum()) for shard in np.unique(from_shard)}
    return Traffic.of(sends, receives)


def collecting(shards: Shards, shard: int) -> Traffic:
    """Return the traffic of every row to the first shard."""
    if shard > 0:
        return Traffic.of({0: np.arange(len(shards.peers(shard)))}, {})

    coming = {other: np.arange(len(shards.peers(other))) for other in range(1, len(shards))}
    return Traffic.of({}, coming)
