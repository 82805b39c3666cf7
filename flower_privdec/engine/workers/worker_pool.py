"""The engine on several processes: forked workers, each of which computes some blocks of peers."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.core import Algorithm, Edges, Exchange, Gather, Mix, Reply, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Changed, InReach
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.workers.forked import SPIN, Barrier, EdgeBox, Forked, shared_copy
from flower_privdec.engine.workers.partitioning import Partitioning, partition_cohort
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import try_models
from flower_privdec.graph.mixing import Mixing, MixingMatrix
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger


class PaidLedger(CohortLedger):
    """A block's view of the run's ledger, which refuses a step that was not charged.

    The main process holds the ledger and charges a round before any block begins it.
    """

    def __init__(self, whole: CohortLedger, start: int, stop: int, paid: Tensor) -> None:
        """View the rows [start, stop) of a ledger.

        Args:
            paid: int64 [1] in shared memory, the step before which all steps are charged.
        """
        self._whole = whole
        self._start = start
        self._stop = stop
        self._until = paid

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]."""
        return self._whole.allowed(step)[self._start : self._stop]

    def charge(self, step: int, rows: np.ndarray) -> None:
        """Refuse a step that was not paid for.

        Raises:
            BudgetError: it was not, or is not within a peer's plan and budget.
        """
        if step >= int(self._until) or not self.allowed(step)[rows].all():
            raise BudgetError(
                f"step {step} was not paid for before it began: mend the algorithm that takes it",
                code="ledger.not-paid",
            )


@dataclass
class Block:
    """Some peers of a cohort.

    Attributes:
        start, stop: their rows in the whole.
        cohort: their part of it.
        state: theirs; its rows are views of the whole's where a step has not put others in their place.
    """

    start: int
    stop: int
    cohort: Cohort
    state: State

    @classmethod
    def of(cls, cohort: Cohort, start: int, stop: int, round_index: int, paid: Tensor) -> Block:
        """Return the block of some rows, without a state's rows."""
        part = replace(
            cohort,
            peers=cohort.peers[start:stop],
            data=cohort.data.part(start, stop),
            protection=None if cohort.protection is None else cohort.protection.part(start, stop),
            ledger=None if cohort.ledger is None else PaidLedger(cohort.ledger, start, stop, paid),
        )
        return cls(start, stop, part, State(part.peers, round_index))

    def see(self, name: str, whole: Tensor) -> None:
        """Make some rows of the state views of this block's part of all peers' rows."""
        self.state.rows[name] = whole[self.start : self.stop]

    def misplaced(self, whole: dict[str, Tensor], names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        """Return (destination, rows) of the rows that a step has replaced by new tensors; the state gets the former."""
        moves = []
        for name in names:
            home = whole[name][self.start : self.stop]
            now = self.state.rows[name]
            if now.data_ptr() != home.data_ptr() or now.stride() != home.stride():
                moves.append((home, now))
                self.state.rows[name] = home
        return moves


def bring_home(blocks: Iterable[Block], whole: dict[str, Tensor], names: Iterable[str]) -> None:
    """Copy rows that steps have replaced by new tensors back into the buffer of all peers' rows."""
    moves = [move for block in blocks for move in block.misplaced(whole, list(names))]
    copies = [(home, now.clone() if len(moves) > 1 else now) for home, now in moves]  # two may have changed places
    for home, now in copies:
        home.copy_(now)


Attempt = Callable[[Mapping[str, Tensor]], Any]  # at a block's rows
COLLECT, TRY = "collect", "try"  # orders, beside the number of rounds to run
StatePart = tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]


class WorkerPool:
    """Runs rounds of an algorithm on a cohort that hosts the whole network, in blocks, by one process or several.

    Attributes:
        state: of all peers: the round, and after `collected` all rows and edges.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        state: State,
        partitioning: Partitioning,
        attempt: Attempt | None = None,
        leave: Iterable[Callable[[], None]] = (),
    ) -> None:
        """Partition the peers; where there are several processes, move the rows to shared memory and fork.

        Args:
            state: its rows are taken over.
            attempt: evaluates the models of a block.
            leave: functions that close, in a forked process, what this one alone holds: locks.
        """
        self.algorithm = algorithm
        self.cohort = cohort
        self.state = state
        self._partitioning = partitioning
        self._attempt = attempt
        self._me = 0
        self._others, self._boxes, self._barrier = list[Forked](), list[EdgeBox](), Barrier(partitioning.workers)
        self._parts: WeakKeyDictionary[MixingMatrix, MixingMatrix] = WeakKeyDictionary()
        self._share(state)
        self._mine = self._blocks(state)
        if partitioning.workers > 1:
            try:
                self._fork(self._mine, list(leave))
            except BaseException:
                self.close()
                raise

    def _share(self, state: State) -> None:
        """Move the rows to shared memory, with a second buffer for those that are mixed."""
        self._paid = torch.zeros(1, dtype=torch.int64)
        self._whole = state.rows
        self._spare: dict[str, Tensor | None] = {}
        if self._partitioning.workers > 1:
            self._paid = shared_copy(self._paid)
            for name in list(state.rows):
                state.rows[name] = shared_copy(state.rows[name])
            mixed = {name for item in self.algorithm.program if isinstance(item, Mix) for name in item.names}
            self._spare = {name: shared_copy(state.rows[name], filled=False) for name in mixed}

    def _blocks(self, state: State) -> list[Block]:
        """Return all blocks, with views of the rows and copies of the edges."""
        blocks = [Block.of(self.cohort, *cut, state.round_index, self._paid) for cut in self._partitioning.blocks]
        for block in blocks:
            for name, rows in self._whole.items():
                block.see(name, rows)
            ends = block.state.peers[[0, -1]] + [0, 1]
            for name, edges in state.edges.items():
                some = slice(*np.searchsorted(edges.own, ends))
                block.state.edges[name] = Edges(edges.own[some], edges.other[some], edges.values[some].clone())
        return blocks

    def _fork(self, blocks: list[Block], leave: list[Callable[[], None]]) -> None:
        self._boxes = [EdgeBox() for _ in range(self._partitioning.workers)]
        for number in range(1, self._partitioning.workers):
            hosted = [blocks[block] for block in self._partitioning.of(number)]
            name = f"peers {peer_ranges(range(hosted[0].start, hosted[-1].stop))}"
            lines = [other.line.close for other in self._others]
            self._others.append(Forked(name, partial(self._serve, number, hosted), [*leave, *lines]))
        self._mine = [blocks[block] for block in self._partitioning.of(0)]
        workers = {other.line.fileno(): other for other in self._others}  # whose answer means that they failed or ended
        self._barrier.join(0, list(workers), select.POLLIN, lambda line: workers[line].fail())

    def _serve(self, number: int, hosted: list[Block], line: Connection) -> None:
        """Execute the main process's commands, in a worker, until the main process ends."""
        self._me = number
        self._mine = hosted
        self._others = []
        self._barrier.join(number, [line.fileno()], 0, _gone)
        answers: dict[object, Callable[[], Any]] = {COLLECT: self._state_parts, TRY: self._tried}
        calls = select.poll()
        calls.register(line.fileno(), select.POLLIN)
        while True:
            until = time.perf_counter() + SPIN
            while not calls.poll(0) and time.perf_counter() < until:
                pass
            order = line.recv()
            result = None
            if order in answers:
                result = answers[order]()
            else:  # rounds, which are not answered
                self._take_rounds(order)
            sys.stdout.flush()
            if result is not None:
                line.send((result, None))

    def rounds(self, count: int) -> None:
        """Run some whole rounds, every step and every exchange, each once it is paid."""
        while count:
            together = self._pay(count)
            self._order(together)
            self._take_rounds(together)
            count -= together

    def _order(self, order: int | str) -> None:
        for other in self._others:
            other.order(order)

    def _pay(self, count: int) -> int:
        """Pay the private steps of the next round; return how many rounds are paid then, at most `count`."""
        steps = self.cohort.steps_per_round
        k = self.state.round_index
        ledger = self.cohort.ledger
        stop = k + count
        if ledger is not None:
            active = np.flatnonzero(self.cohort.active(k))
            for step in range(k * steps, (k + 1) * steps if len(active) else k * steps):
                ledger.charge(step, active)
            stop = min(stop, max(k + 1, ledger.charged // steps))
        self._paid[0] = stop * steps
        return stop - k

    def _take_rounds(self, count: int) -> None:
        for _ in range(count):
            while (exchange := self._advance()) is not None:
                self._perform(exchange)
            self.state.round_index = self._mine[0].state.round_index

    def _advance(self) -> Exchange | None:
        exchange = None
        for block in self._mine:
            exchange = advance(self.algorithm, block.cohort, block.state)
        return exchange

    def _perform(self, exchange: Exchange) -> None:
        """Perform an exchange among all peers, for those hosted here."""
        mixing = self.cohort.mixing
        if mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")
        if isinstance(exchange, Mix):
            bring_home(self._mine, self._whole, exchange.names)
            self._mix(exchange, mixing.matrix(exchange.place(self._mine[0].state.round_index, mixing)))
            return
        if not isinstance(exchange, Reply):
            bring_home(self._mine, self._whole, exchange.names)
        self._heard(exchange, mixing)

    def _mix(self, exchange: Mix, matrix: MixingMatrix) -> None:
        if self._partitioning.workers == 1:
            for name in exchange.names:
                self._whole[name], self._spare[name] = matrix.replace(self._whole[name], self._spare.get(name))
        elif matrix.moved is None:
            self._mix_all(exchange, matrix)
        else:
            self._mix_some(exchange, matrix, matrix.moved)
        for block in self._mine:
            for name in exchange.names:
                block.see(name, self._whole[name])
            Changed({}, {}).apply_(block.state)

    def _mix_all(self, exchange: Mix, matrix: MixingMatrix) -> None:
        """Mix the rows of all receivers hosted here into the second buffer."""
        start = self._mine[0].start
        stop = self._mine[-1].stop
        if matrix not in self._parts:
            self._parts[matrix] = matrix.rows(self.cohort.peers[start:stop])
        self._barrier.wait()
        for name in exchange.names:
            spare = self._spare[name]
            if spare is None:
                raise TypeError(f"row {name!r} is mixed and has no second buffer")
            self._parts[matrix].apply(self._whole[name], out=spare[start:stop])
            self._whole[name], self._spare[name] = spare, self._whole[name]

    def _mix_some(self, exchange: Mix, matrix: MixingMatrix, moved: np.ndarray) -> None:
        """Mix the rows of the few receivers here that have in-neighbours, in place, once all have read theirs."""
        mine = moved[(moved >= self._mine[0].start) & (moved < self._mine[-1].stop)]
        self._barrier.wait()
        part = matrix.rows(mine) if len(mine) else None
        mixed = {name: part.apply(self._whole[name]) for name in exchange.names} if part is not None else {}
        self._barrier.wait()
        for name, rows in mixed.items():
            self._whole[name][torch.from_numpy(mine)] = rows

    def _heard(self, exchange: Exchange, mixing: Mixing) -> None:
        """Perform a Gather or a Reply: read what all blocks have, and continue once all have read it."""
        if self._partitioning.workers == 1:
            changes = self._changes(exchange, mixing, [block.state.edges for block in self._mine])
        else:
            if isinstance(exchange, Reply):
                self._boxes[self._me].put([{name: b.state.edges[name] for name in exchange.names} for b in self._mine])
            self._barrier.wait()
            replies = isinstance(exchange, Reply)
            edges = [box_edges for box in self._boxes for box_edges in box.look()] if replies else []
            changes = self._changes(exchange, mixing, edges)
            self._barrier.wait()
        for block, changed in zip(self._mine, changes, strict=True):
            changed.apply_(block.state)

    def _changes(self, exchange: Exchange, mixing: Mixing, edges: list[dict[str, Edges]]) -> list[Changed]:
        replies = exchange.names if isinstance(exchange, Reply) else ()
        reach = InReach(self._whole, {name: [box[name] for box in edges] for name in replies})
        return [exchange.among(block.state, mixing, reach) for block in self._mine]

    def collected(self) -> State:
        """Return the whole state between two rounds, collected from all workers."""
        self._order(COLLECT)
        answers = [self._state_parts(), *(other.answer() for other in self._others)]
        parts_of_blocks = [part for parts, _ in answers for part in parts]
        rows, edges = parts_of_blocks[0]
        state = self.state
        state.rows = {name: rows for name, rows in self._whole.items() if name in self._mine[0].state.rows}
        state.rows |= {
            name: torch.from_numpy(np.concatenate([part[0][name] for part in parts_of_blocks])) for name in rows
        }
        state.edges = {name: _joined([part[1][name] for part in parts_of_blocks]) for name in edges}
        self.cohort.game_seconds = max(seconds for _, seconds in answers)
        return state

    def _state_parts(self) -> tuple[list[StatePart], float]:
        """Copy rows back; return what is in no shared buffer, by block, and the seconds spent on coalitions here."""
        bring_home(self._mine, self._whole, [name for name in self._whole if name in self._mine[0].state.rows])
        parts = []
        for block in self._mine:
            rows = {name: part.numpy() for name, part in block.state.rows.items() if name not in self._whole}
            edges = {
                name: (edges_of.own, edges_of.other, edges_of.values.numpy())
                for name, edges_of in block.state.edges.items()
            }
            parts.append((rows, edges))
        return parts, sum(block.cohort.game_seconds for block in self._mine)

    def trial(self) -> list[Any]:
        """Return the evaluation of each block's models, in order."""
        self._order(TRY)
        answers = [self._tried(), *(other.answer() for other in self._others)]
        return [part_of for part in answers for part_of in part]

    def _tried(self) -> list[Any]:
        if self._attempt is None:
            raise TypeError("trial models need `attempt`, and none was given")
        return [self._attempt(block.state.rows) for block in self._mine]

    def close(self) -> None:
        """End the workers, and release what was shared with them."""
        for other in self._others:
            other.close()
        self._barrier.close()
        for box in self._boxes:
            box.close()
        self._others = []
        self._boxes = []


def _gone(line: int) -> None:
    raise EOFError("the run has ended")


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Edges:
    own, other, values = (np.concatenate(ends) for ends in zip(*parts, strict=True))
    return Edges(own, other, torch.from_numpy(values))


def start_engine(
    experiment: Experiment,
    cohort: Cohort,
    state: State,
    leave: Iterable[Callable[[], None]] = (),
    workers: int | None = None,
) -> Engine | WorkerPool:
    """Return the engine that goes on from a state.

    Args:
        cohort: of all peers.
        leave: functions that close, in a forked process, what this one alone holds: locks.
        workers: how many processes, in place of the scenario's `compute.workers`.

    Raises:
        ScenarioError: so many cannot be had here.
    """
    partitioning = partition_cohort(experiment, workers)
    crossing = {name for item in experiment.algorithm.program if isinstance(item, Mix | Gather) for name in item.names}
    if len(partitioning.blocks) == 1 or not crossing <= state.rows.keys():
        return Engine(experiment.algorithm, cohort, state)
    return WorkerPool(experiment.algorithm, cohort, state, partitioning, partial(try_models, experiment), leave)
