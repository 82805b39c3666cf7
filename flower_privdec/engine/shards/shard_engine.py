"""The engine of one shard: its rows, and those from elsewhere that its peers hear."""

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

MOST_PLANS = 64  # a graph that repeats has some log2(n) phases


class ShardEngine(Engine):
    """Runs rounds of an algorithm on the peers of one shard, while the other shards run theirs.

    Privacy: what leaves the shard is what its peers send to others in an exchange, and the rows that the algorithm
    declares open where they are collected.
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
            RunError: another shard sends what is not finite.
        """
        mixing = self.cohort.mixing
        if mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")
        changed = self._mix(exchange, mixing) if isinstance(exchange, Mix) else self._deliver(exchange, mixing)
        changed.apply_(self.state)

    def collect(self) -> dict[str, Tensor] | None:
        """Return the open rows of all peers, on the first shard; all shards call this.

        Raises:
            LostShardError: another shard is gone.
        """
        names = self.algorithm.open_rows
        peers = len(self.state.peers)
        rows = [self.state.rows[name] for name in names]
        traffic = collecting(self.process_group.shards, self.process_group.shard)
        whole = [clean_rows(block, peers + traffic.foreign) for block in rows]
        for block, mine in zip(whole, rows, strict=True):
            block[:peers] = mine
        here = [block[:peers] for block in whole]
        foreign = [block[peers:] for block in whole]
        self.process_group.begin(here, traffic, foreign, self._here).wait()
        return None if self.process_group.shard else dict(zip(names, whole, strict=True))

    @property
    def _here(self) -> str:
        return f"round {self.state.round_index}"

    def _mix(self, exchange: Mix, mixing: Mixing) -> Changed:
        matrix = mixing.matrix(exchange.place(self.state.round_index, mixing))
        if isinstance(matrix, AverageMatrix):
            return Changed({name: self._average(matrix, name) for name in exchange.names}, {})
        if not isinstance(matrix, SparseMatrix):
            raise RunError(
                f"{type(matrix).__name__} is no mixing matrix that shards know: run it in the engine",
                code="shards.matrix",
            )
        process_group = self.process_group
        rows = [self.state.rows[name] for name in exchange.names]
        plan = self._plan(matrix)
        tables = [self._tables.of(name, self.state.rows[name], plan.traffic.foreign) for name in exchange.names]
        here = [table[: len(block)] for (table, _), block in zip(tables, rows, strict=True)]
        foreign = [table[len(block) :] for (table, _), block in zip(tables, rows, strict=True)]
        pending = process_group.begin(here, plan.traffic, foreign, self._here)
        for part in plan.inner:
            _apply(part, tables)
        pending.wait()
        for part in plan.border:
            _apply(part, tables)
        return Changed({name: out for name, (_, out) in zip(exchange.names, tables, strict=True)}, {})

    def _average(self, matrix: AverageMatrix, name: str) -> Tensor:
        """Return rows after averaging over members everywhere: each shard's sum crosses, and no row."""
        rows = self.state.rows[name]
        mine = matrix.rows(self.state.peers)
        members = torch.from_numpy(np.flatnonzero(np.isin(self.state.peers, matrix.members))).to(rows.device)
        flat = rows.reshape(len(rows), -1)
        total = sum_rows(flat, members) if len(members) else torch.zeros_like(flat[0])
        if not all_finite(total):
            raise RunError(
                f"{self._here}: rows of peers hosted here are not finite; a peer diverged", code="shards.not-finite"
            )
        mean = (self.process_group.total(total, self._here) / len(matrix.members)).view(rows.shape[1:])
        spare = self._spares.get(name)
        self._spares[name] = rows
        out = empty_rows(rows, *rows.shape) if spare is None else spare
        if mine.averaged.all():
            return out.copy_(mean.expand_as(out))
        averaged = torch.from_numpy(np.flatnonzero(mine.averaged)).to(rows.device)
        out.copy_(rows)[averaged] = mean
        return out

    def _plan(self, matrix: SparseMatrix) -> MixPlan:
        """Return the plan of a matrix, worked out once as long as the matrix comes again soon."""
        key = id(matrix)
        if key not in self._plans:
            self._plans[key] = (
                matrix,
                mix_plan(matrix, self.process_group.shards, self.process_group.shard),
            )  # no id is used again
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[key][1]

    def _deliver(self, exchange: Exchange, mixing: Mixing) -> Changed:
        """Return what an exchange makes of the state, by its messages, of which those of other shards' peers cross."""
        state = self.state
        shards = self.process_group.shards
        here = set(self.state.peers.tolist())
        messages = exchange.outgoing(state, mixing)
        outside = (link for link in messages if link[1] not in here)
        going = sorted(outside, key=lambda link: (int(shards.of(link[1])), link))
        coming = sorted(link for link in exchange.awaited(state, mixing) if link[0] not in here)  # so by shard, too
        likes = [state.rows[exchange.shaped(name)] for name in exchange.names]
        rows, foreign = ([clean_rows(like, len(links)) for like in likes] for links in (going, coming))
        for place, link in enumerate(going):
            for table, name in zip(rows, exchange.names, strict=True):
                table[place] = messages[link][name]
        self.process_group.begin(rows, between(going, coming, shards), foreign, self._here).wait()
        for place, link in enumerate(coming):
            messages[link] = {name: table[place] for name, table in zip(exchange.names, foreign, strict=True)}
        return exchange.incoming(state, mixing, messages)


class Tables:
    """Two buffers for each name, the rows here and behind them those from elsewhere, between which mixing alternates.

    So rows that were not moved since are not copied to be mixed.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, name: str, rows: Tensor, foreign: int) -> tuple[Tensor, Tensor]:
        """Return a table that begins with some rows, [m + foreign, ...], and where they go when mixed, [m, ...].

        Args:
            rows: [m, ...]; left alone.
            foreign: how many rows from elsewhere the table has room for.
        """
        count = rows.shape[0]
        one, other = self._pairs.get(name, (rows[:0], rows[:0]))
        if one.shape[0] < count + foreign or one.dtype != rows.dtype or one.shape[1:] != rows.shape[1:]:
            one, other = (clean_rows(rows, count + foreign) for _ in range(2))
            self._pairs[name] = one, other
        if rows.data_ptr() == other.data_ptr():
            one, other = other, one
        elif rows.data_ptr() != one.data_ptr():
            one[:count] = rows
        return one[: count + foreign], other[:count]


def _apply(part: Part, tables: list[tuple[Tensor, Tensor]]) -> None:
    """Mix some of the rows of each table into where they go."""
    rows, weights = part
    for table, out in tables:
        if isinstance(rows, slice):
            weights.apply(table, out=out[rows])
        else:
            out[rows.to(out.device)] = weights.apply(table)
