"""What of an exchange crosses from shard to shard: worked out from the graph alone, by every shard alike.

A row that several peers of another shard need goes there once, unweighed; the receivers' shard weighs it, as the engine
does. Of a mean over peers everywhere only sums cross.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flower_privdec.engine.shards.shard_assignment import Shards
from flower_privdec.engine.shards.traffic import Traffic
from flower_privdec.graph.mixing.matrix import MixingMatrix, SparseMatrix

Part = tuple[slice | Tensor, MixingMatrix]
Plan = TypeVar("Plan")
KEPT = 64  # plans: a graph that repeats has some log2(n) phases


@dataclass(frozen=True)
class MixPlan:
    """How a shard mixes with a sparse matrix.

    Attributes:
        traffic: the rows that cross.
        parts: which rows here hear nobody elsewhere, and then which do, each with its weights over the rows here and,
            behind them, those from elsewhere; a part that is nobody is left out.
    """

    traffic: Traffic
    inner: tuple[Part, ...]
    border: tuple[Part, ...]


@dataclass(frozen=True)
class GatherPlan:
    """How a shard gathers its peers' in-neighbours.

    Attributes:
        own, other: int64 [E], who hears whom: edges as `Gather` makes them.
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
    """Work out what a shard sends and receives where each edge (own, other) goes back to whom it was heard from.

    Args:
        links: of all peers, [m, 2]: who sent, and who heard, which now answers.
    """
    asked, answers = links[np.lexsort((links[:, 0], links[:, 1]))].T  # the order of edges: by own, who answers
    to, by = shards.of(asked), shards.of(answers)
    at, coming = np.flatnonzero(by == shard), np.flatnonzero(to == shard)
    others = [other for other in range(len(shards)) if other != shard]
    sends = {other: np.flatnonzero(to[at] == other) for other in others}
    theirs = {other: np.flatnonzero(to[by == other] == shard) for other in others}
    sends, theirs = ({other: which for other, which in each.items() if len(which)} for each in (sends, theirs))
    traffic, place = Traffic.of(sends, theirs), np.zeros(len(links), dtype=np.int64)
    place[at] = np.arange(len(at))
    for other, part in traffic.receives.items():
        place[coming[by[coming] == other]] = len(at) + np.arange(part.start, part.stop)
    order = coming[np.lexsort((answers[coming], asked[coming]))]
    return GatherPlan(traffic, asked[order], answers[order], torch.from_numpy(place[order]))


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
