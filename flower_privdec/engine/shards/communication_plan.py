"""What of an exchange crosses from shard to shard: worked out from the graph alone, by every shard alike.

A row that several peers of another shard need goes there once, unweighed; the receivers' shard weighs it, as the engine
does. Of a mean over peers everywhere only sums cross.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.formatting import peer_ranges
from flower_privdec.graph.mixing import MixingMatrix, SparseMatrix


@dataclass(frozen=True)
class Shards:
    """Peers dealt out in runs of consecutive ids, whose lengths differ by one at most.

    Attributes:
        ends: int64 [shards + 1], 0 and the first id behind each shard's peers.
    """

    ends: np.ndarray

    @classmethod
    def deal(cls, n_peers: int, count: int) -> Shards:
        """Deal peers out to `count` shards, of which there are no more than peers."""
        size, more = divmod(n_peers, count := min(count, n_peers))
        return cls(size * np.arange(count + 1) + np.minimum(np.arange(count + 1), more))

    def __len__(self) -> int:
        """Return how many shards there are."""
        return len(self.ends) - 1

    def peers(self, shard: int) -> np.ndarray:
        """Return the global ids of a shard's peers, int64 [m]."""
        return np.arange(self.ends[shard], self.ends[shard + 1])

    def of(self, peers: np.ndarray) -> np.ndarray:
        """Return the shard of each of some peers."""
        return np.searchsorted(self.ends, peers, side="right") - 1

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
        receives, arrive, first = {}, {}, 0
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
Plan = TypeVar("Plan")
KEPT = 64  # plans: a graph that repeats has some log2(n) phases


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


@dataclass(frozen=True)
class GatherPlan:
    """How a shard gathers its peers' in-neighbours.

    Attributes:
        own, other: int64 [E], receiver and sender: edges as `Gather` makes them.
        place: int64 [E], where each edge's row stands among the rows here and, behind them, those from elsewhere.
    """

    traffic: Traffic
    own: np.ndarray
    other: np.ndarray
    place: Tensor


def mix_plan(matrix: SparseMatrix, shards: Shards, shard: int) -> MixPlan:
    """Work out what a shard sends, receives and weighs with a matrix of all peers."""
    peers, (senders, receivers, _) = shards.peers(shard), matrix.links()
    traffic, foreign = _rows_that_cross(senders, receivers, shards, shard)
    at = np.full(matrix.n_columns, -1)
    at[peers], at[foreign] = np.arange(len(peers)), len(peers) + np.arange(len(foreign))
    mine = matrix.rows(peers)
    rows = np.repeat(np.arange(len(peers)), np.diff(mine.indptr))
    hears = np.zeros(len(peers), dtype=bool)
    hears[rows[at[mine.columns] >= len(peers)]] = True
    inner, border = (_part(mine, np.flatnonzero(which), at, len(peers) + len(foreign)) for which in (~hears, hears))
    return MixPlan(traffic, inner, border)


def _part(mine: SparseMatrix, rows: np.ndarray, at: np.ndarray, n_columns: int) -> tuple[Part, ...]:
    """Return some of a shard's rows and their weights over its table; nothing where there are no rows."""
    if not len(rows):
        return ()
    part = mine.rows(mine.receivers[rows])
    weights = replace(part, n_columns=n_columns, columns=at[part.columns])
    run = rows[-1] - rows[0] + 1 == len(rows)
    return ((slice(int(rows[0]), int(rows[-1]) + 1) if run else torch.from_numpy(rows), weights),)


def gather_plan(links: np.ndarray, shards: Shards, shard: int) -> GatherPlan:
    """Work out what a shard sends and receives where peers get their in-neighbours' rows.

    Args:
        links: of all peers, [m, 2] (sender, receiver).
    """
    peers = shards.peers(shard)
    traffic, foreign = _rows_that_cross(links[:, 0], links[:, 1], shards, shard)
    mine = links[shards.of(links[:, 1]) == shard]
    other, own = mine[np.lexsort((mine[:, 0], mine[:, 1]))].T
    at = np.where(np.isin(other, peers), other - peers[0], len(peers) + np.searchsorted(foreign, other))
    return GatherPlan(traffic, own, other, torch.from_numpy(at))


def reply_plan(links: np.ndarray, shards: Shards, shard: int) -> GatherPlan:
    """Work out what a shard sends and receives where each edge (own, other) goes back to the peer it was heard from.

    Args:
        links: of all peers, [m, 2]: who sent, and who heard, which now answers.
    """
    askers, answers = links[np.lexsort((links[:, 0], links[:, 1]))].T  # the order of edges: by own, who answers
    to, by = shards.of(askers), shards.of(answers)
    at, coming = np.flatnonzero(by == shard), np.flatnonzero(to == shard)
    others = [other for other in range(len(shards)) if other != shard]
    sends = {other: np.flatnonzero(to[at] == other) for other in others}
    theirs = {other: np.flatnonzero(to[by == other] == shard) for other in others}
    sends, theirs = ({other: which for other, which in plan.items() if len(which)} for plan in (sends, theirs))
    traffic, place = Traffic.of(sends, theirs), np.zeros(len(links), dtype=np.int64)
    place[at] = np.arange(len(at))
    for other, part in traffic.receives.items():
        place[coming[by[coming] == other]] = len(at) + np.arange(part.start, part.stop)
    order = coming[np.lexsort((answers[coming], askers[coming]))]
    return GatherPlan(traffic, askers[order], answers[order], torch.from_numpy(place[order]))


def collecting(shards: Shards, shard: int) -> Traffic:
    """Return what crosses where the first shard is sent every row of the others."""
    if shard:
        return Traffic.of({0: np.arange(len(shards.peers(shard)))}, {})
    return Traffic.of({}, {other: np.arange(len(shards.peers(other))) for other in range(1, len(shards))})


def _rows_that_cross(
    senders: np.ndarray, receivers: np.ndarray, shards: Shards, shard: int
) -> tuple[Traffic, np.ndarray]:
    """Return which rows cross, each once, in the order of ids, and the ids of those that come."""
    there, here = shards.of(senders), shards.of(receivers)
    foreign = np.unique(senders[(here == shard) & (there != shard)])
    whose, leaving = shards.of(foreign), (there == shard) & (here != shard)
    coming = {int(other): foreign[whose == other] for other in np.unique(whose)}
    sends = {
        int(other): np.unique(senders[leaving & (here == other)]) - shards.ends[shard]
        for other in np.unique(here[leaving])
    }
    return Traffic.of(sends, coming), foreign


class Plans:
    """Plans that are worked out once for each matrix, as long as it comes again soon."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], tuple[MixingMatrix, object]] = OrderedDict()

    def of(self, matrix: MixingMatrix, kind: str, make: Callable[[], Plan]) -> Plan:
        """Return a plan of a kind for a matrix; the matrix is kept with it, so that no other is taken for it."""
        key = (id(matrix), kind)
        if key not in self._known:
            self._known[key] = (matrix, make())
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        plan: Plan = self._known[key][1]  # type: ignore[assignment]
        return plan
