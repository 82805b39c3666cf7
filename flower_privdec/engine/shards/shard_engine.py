"""The engine of one shard: its rows, and the rows from other shards that its peers hear.

A mixing overlaps with its communication: rows are sent, the rows without an in-neighbour elsewhere are mixed meanwhile,
and the others when the foreign rows have come.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.core import Algorithm, Exchange, Mix, State
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Changed
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.shards.communication_plan import MixPlan, Part, between, collecting, mix_plan
from flower_privdec.engine.shards.process_group import ProcessGroup, clean_rows
from flower_privdec.graph.mixing import AverageMatrix, Mixing, SparseMatrix, sum_rows
from flower_privdec.rows.tensors import all_finite, empty_rows

MOST_PLANS = 64  # plans that are kept; a graph that repeats has some log2(n) of them


class ShardEngine(Engine):
    """Runs rounds of an algorithm on the peers of one shard, while the other shards run theirs.

    Privacy: rows leave the shard only in exchanges, as what its peers send to others, and when rows are collected, as
        those that the algorithm declares open.
    """

    def __init__(self, algorithm: Algorithm, cohort: Cohort, state: State, process_group: ProcessGroup) -> None:
        super().__init__(algorithm, cohort, state)
        self.process_group = process_group
        self._plans: OrderedDict[int, tuple[SparseMatrix, MixPlan]] = OrderedDict()
        self._tables = Tables()

    def perform(self, exchange: Exchange) -> None:
        """Perform this shard's part of an exchange among all peers.

        Raises:
            LostShardError: another shard is gone.
            RunError: rows of another shard are not finite.
        """
        mixing = self.cohort.mixing
        if mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")

        if isinstance(exchange, Mix) and exchange.by_matrix:
            changed = self._mix(exchange, mixing)
        else:
            changed = self._deliver(exchange, mixing)
        changed.apply_(self.state)

    def collect(self) -> dict[str, Tensor] | None:
        """Collect the open rows of all peers on the first shard. All shards call this together.

        Returns:
            The rows on the first shard; None on the others.

        Raises:
            LostShardError: another shard is gone.
        """
        names = self.algorithm.open_rows
        count = len(self.state.peers)
        traffic = collecting(self.process_group.shards, self.process_group.shard)

        # The first shard hosts the first peers, so its own rows come first in each table.
        tables = []
        for name in names:
            rows = self.state.rows[name]
            table = clean_rows(rows, count + traffic.foreign)
            table[:count] = rows
            tables.append(table)

        here = [table[:count] for table in tables]
        foreign = [table[count:] for table in tables]
        self.process_group.begin(here, traffic, foreign, self._here).wait()

        if self.process_group.shard > 0:
            return None
        return dict(zip(names, tables, strict=True))

    @property
    def _here(self) -> str:
        return f"round {self.state.round_index}"

    def _mix(self, exchange: Mix, mixing: Mixing) -> Changed:
        matrix = mixing.matrix(exchange.place(self.state.round_index, mixing))
        if isinstance(matrix, AverageMatrix):
            return Changed({name: self._average(matrix, name) for name in exchange.names}, {})
        if not isinstance(matrix, SparseMatrix):
            raise RunError(
                f"{type(matrix).__name__} is not a mixing matrix that shards know: run it in the engine",
                code="shards.matrix",
            )

        plan = self._plan(matrix)
        count = len(self.state.peers)
        tables = [self._tables.of(name, self.state.rows[name], plan.traffic.foreign) for name in exchange.names]
        here = [table[:count] for table, _ in tables]
        foreign = [table[count:] for table, _ in tables]

        pending = self.process_group.begin(here, plan.traffic, foreign, self._here)
        for part in plan.inner:
            _apply(part, tables)
        pending.wait()
        for part in plan.border:
            _apply(part, tables)

        mixed = {name: out for name, (_, out) in zip(exchange.names, tables, strict=True)}
        return Changed(mixed, {})

    def _average(self, matrix: AverageMatrix, name: str) -> Tensor:
        """Return rows after averaging over members everywhere: only the sum of each shard crosses, and no row."""
        rows = self.state.rows[name]
        flat = rows.reshape(len(rows), -1)
        mine = matrix.rows(self.state.peers)
        is_member = np.isin(self.state.peers, matrix.members)
        members = torch.from_numpy(np.flatnonzero(is_member)).to(rows.device)

        total = torch.zeros_like(flat[0])
        if len(members) > 0:
            total = sum_rows(flat, members)
        if not all_finite(total):
            raise RunError(
                f"{self._here}: rows of peers hosted here are not finite; a peer diverged", code="shards.not-finite"
            )
        total = self.process_group.total(total, self._here)
        mean = (total / len(matrix.members)).view(rows.shape[1:])

        # Rows and a spare buffer change places, as in the engine.
        out = self._spares.get(name)
        self._spares[name] = rows
        if out is None:
            out = empty_rows(rows, *rows.shape)

        if mine.averaged.all():
            return out.copy_(mean.expand_as(out))
        averaged = torch.from_numpy(np.flatnonzero(mine.averaged)).to(rows.device)
        out.copy_(rows)[averaged] = mean
        return out

    def _plan(self, matrix: SparseMatrix) -> MixPlan:
        """Return the plan of a matrix; the last ones are kept.

        Why not lru_cache: it would hash all entries of a matrix in each round. An id is enough while the matrix is kept
        beside its plan, since no other object can have that id then.
        """
        key = id(matrix)
        if key not in self._plans:
            plan = mix_plan(matrix, self.process_group.shards, self.process_group.shard)
            self._plans[key] = (matrix, plan)
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key][1]

    def _deliver(self, exchange: Exchange, mixing: Mixing) -> Changed:
        """Perform an exchange by its messages, of which those to and from peers of other shards cross."""
        state = self.state
        shards = self.process_group.shards
        here = set(state.peers.tolist())
        messages = exchange.outgoing(state, mixing)

        # Both ends sort links alike: by the other shard, then by sender and receiver. (The peers of a shard have
        # consecutive ids, so links sorted by their senders are sorted by the senders' shards.)
        outside = [link for link in messages if link[1] not in here]
        going = sorted(outside, key=lambda link: (int(shards.of(link[1])), link))
        coming = sorted(link for link in exchange.awaited(state, mixing) if link[0] not in here)

        likes = [state.rows[exchange.shaped(name)] for name in exchange.names]
        rows = [clean_rows(like, len(going)) for like in likes]
        foreign = [clean_rows(like, len(coming)) for like in likes]
        for place, link in enumerate(going):
            for table, name in zip(rows, exchange.names, strict=True):
                table[place] = messages[link][name]

        traffic = between(going, coming, shards)
        self.process_group.begin(rows, traffic, foreign, self._here).wait()

        for place, link in enumerate(coming):
            messages[link] = {name: table[place] for name, table in zip(exchange.names, foreign, strict=True)}
        return exchange.incoming(state, mixing, messages)


class Tables:
    """Two buffers for each name, between which mixing alternates: the rows here, and behind them the foreign ones.

    So rows that no step has replaced since need not be copied before they are mixed.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, name: str, rows: Tensor, foreign: int) -> tuple[Tensor, Tensor]:
        """Return a table that begins with some rows, [m + foreign, ...], and a buffer to mix them into, [m, ...].

        Args:
            rows: [m, ...]; not changed.
            foreign: the number of foreign rows for which the table has room.
        """
        count = rows.shape[0]
        one, other = self._pairs.get(name, (rows[:0], rows[:0]))

        is_alike = one.dtype == rows.dtype and one.shape[1:] == rows.shape[1:]
        if one.shape[0] < count + foreign or not is_alike:
            one = clean_rows(rows, count + foreign)
            other = clean_rows(rows, count + foreign)
            self._pairs[name] = (one, other)

        # Rows that were mixed here last time lie in one of the two buffers already.
        if rows.data_ptr() == other.data_ptr():
            one, other = other, one
        elif rows.data_ptr() != one.data_ptr():
            one[:count] = rows
        return one[: count + foreign], other[:count]


def _apply(part: Part, tables: list[tuple[Tensor, Tensor]]) -> None:
    """Mix some of the rows of each table into its buffer."""
    rows, weights = part
    for table, out in tables:
        if isinstance(rows, slice):
            weights.apply(table, out=out[rows])
        else:
            out[rows.to(out.device)] = weights.apply(table)
