"""Which rows shards send each other in an exchange: computed from the graph alone, by every shard alike.

A row that several peers of another shard mix is sent once, without a weight, which the receivers' shard applies, as the
engine does. Of a mean over all peers only sums are sent, and of any other exchange its messages.
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
        ends: int64 [shards + 1], 0 and the first id behind each shard's peers.
    """

    ends: np.ndarray

    @classmethod
    def split(cls, n_peers: int, count: int) -> Shards:
        """Split peers into `count` shards, of which there are no more than peers."""
        size, more = divmod(n_peers, count := min(count, n_peers))
        return cls(size * np.arange(count + 1) + np.minimum(np.arange(count + 1), more))

    def __len__(self) -> int:
        """Return how many shards there are."""
        return len(self.ends) - 1

    def peers(self, shard: int) -> np.ndarray:
        """Return the global ids of a shard's peers, int64 [m]."""
        return np.arange(self.ends[shard], self.ends[shard + 1])

    def of(self, peers: npt.ArrayLike) -> np.ndarray:
        """Return the shard of each of some peers."""
        return np.asarray(np.searchsorted(self.ends, peers, side="right") - 1)

    def name(self, shard: int) -> str:
        """Return what a message calls a shard."""
        return f"the shard of peers {peer_ranges(self.peers(shard).tolist())}"


@dataclass(frozen=True)
class Traffic:
    """Which rows go to and come from each other shard in one exchange; both sides work it out alike.

    Attributes:
        sends: by shard, which of the rows here, int64, in the order in which they go.
        receives: by shard, where among the rows from elsewhere its own stand, which are consecutive.
        leave, arrive: by shard, where runs of rows begin and end that lie one behind the other at their sender's: here,
            and among the rows from elsewhere.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, slice]
    leave: Mapping[int, list[tuple[int, int]]]
    arrive: Mapping[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, sends: Mapping[int, np.ndarray], coming: Mapping[int, np.ndarray]) -> Traffic:
        """Return the traffic of rows that go, and of rows that come, each by where they stand at their sender's."""
        receives = {}
        arrive = {}
        first = 0
        for shard, which in sorted(coming.items()):
            receives[shard] = slice(first, first + len(which))
            arrive[shard] = [(first + start, first + stop) for start, stop in _runs(which)]
            first += len(which)
        leave = {
            shard: [(int(which[start]), int(which[stop - 1]) + 1) for start, stop in _runs(which)]
            for shard, which in sends.items()
        }
        return cls({shard: torch.from_numpy(which) for shard, which in sends.items()}, receives, leave, arrive)

    @property
    def foreign(self) -> int:
        """Return how many rows come from elsewhere."""
        return max((part.stop for part in self.receives.values()), default=0)


def _runs(which: np.ndarray) -> list[tuple[int, int]]:
    """Return where runs of consecutive numbers begin and end."""
    ends = [0, *(np.flatnonzero(np.diff(which) != 1) + 1).tolist(), len(which)]
    return list(pairwise(ends))


Part = tuple[slice | Tensor, MixingMatrix]


@dataclass(frozen=True)
class MixPlan:
    """How a shard mixes with a sparse matrix.

    Attributes:
        traffic: the rows that cross.
        parts: which rows here have no in-neighbour elsewhere, and then which do, each with its weights over the rows
            here and, behind them, those from elsewhere; an empty part is left out.
    """

    traffic: Traffic
    inner: tuple[Part, ...]
    border: tuple[Part, ...]


def mix_plan(matrix: SparseMatrix, shards: Shards, shard: int) -> MixPlan:
    """Work out what a shard sends, receives and weighs with a matrix of all peers."""
    peers, (senders, receivers, _) = shards.peers(shard), matrix.links()
    there = shards.of(senders)
    here = shards.of(receivers)
    foreign = np.unique(senders[(here == shard) & (there != shard)])  # each row that comes, once, in the order of ids
    whose = shards.of(foreign)
    leaving = (there == shard) & (here != shard)
    coming = {int(other): foreign[whose == other] for other in np.unique(whose)}
    sends = {
        int(other): np.unique(senders[leaving & (here == other)]) - shards.ends[shard]
        for other in np.unique(here[leaving])
    }
    at = np.full(matrix.n_columns, -1)
    at[peers], at[foreign] = np.arange(len(peers)), len(peers) + np.arange(len(foreign))
    mine = matrix.rows(peers)
    rows = np.repeat(np.arange(len(peers)), np.diff(mine.indptr))
    hears = np.zeros(len(peers), dtype=bool)
    hears[rows[at[mine.columns] >= len(peers)]] = True
    inner, border = (_part(mine, np.flatnonzero(which), at, len(peers) + len(foreign)) for which in (~hears, hears))
    return MixPlan(Traffic.of(sends, coming), inner, border)


def _part(mine: SparseMatrix, rows: np.ndarray, at: np.ndarray, n_columns: int) -> tuple[Part, ...]:
    """Return some of a shard's rows and their weights over its table; nothing where there are no rows."""
    if not len(rows):
        return ()
    part = mine.rows(mine.receivers[rows])
    weights = replace(part, n_columns=n_columns, columns=at[part.columns])
    run = rows[-1] - rows[0] + 1 == len(rows)
    return ((slice(int(rows[0]), int(rows[-1]) + 1) if run else torch.from_numpy(rows), weights),)


def between(going: Sequence[Link], coming: Sequence[Link], shards: Shards) -> Traffic:
    """Return the traffic of messages to other shards' peers and from them.

    Args:
        going, coming: links of the messages, those of one shard following one another in the order of the links.
    """
    to = shards.of(np.array(going, dtype=np.int64).reshape(-1, 2)[:, 1])
    by = shards.of(np.array(coming, dtype=np.int64).reshape(-1, 2)[:, 0])
    sends = {int(shard): np.flatnonzero(to == shard) for shard in np.unique(to)}
    return Traffic.of(sends, {int(shard): np.arange((by == shard).sum()) for shard in np.unique(by)})


def collecting(shards: Shards, shard: int) -> Traffic:
    """Return what crosses where the first shard is sent every row of the others."""
    if shard:
        return Traffic.of({0: np.arange(len(shards.peers(shard)))}, {})
    return Traffic.of({}, {other: np.arange(len(shards.peers(other))) for other in range(1, len(shards))})
