"""The engine on several processes: forked workers, each of which computes some blocks of peers.

The main process is worker 0. It pays, sends orders over a pipe, and computes its own blocks like every other worker:

    a number of rounds   Each worker takes them at once. Rows lie in shared memory, so a mixing is a product of
                         everybody's rows, written to the worker's rows of a second buffer. A barrier before it
                         makes sure that all rows are there.
    COLLECT              Workers answer with what lies in no shared memory: edges, and rows that steps have made.
    TRY                  Workers answer with evaluations of their blocks' models.

Blocks decide the bits and depend only on the scenario (`partitioning`), so the number of workers changes no result.
A worker that fails writes its error to its pipe, which wakes all that wait at the barrier.
"""

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
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger, PlannedLedger


class PaidLedger(CohortLedger):
    """A block's view of the run's ledger, which refuses a step that was not charged.

    Only the main process writes the ledger. It charges a round before any block begins it.
    """

    def __init__(self, whole: PlannedLedger, start: int, stop: int, paid: Tensor) -> None:
        """View the rows [start, stop) of a ledger.

        Args:
            paid: the step before which all steps are charged, int64 [1] in shared memory.
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
        is_paid = step < int(self._until)
        if not is_paid or not self.allowed(step)[rows].all():
            raise BudgetError(
                f"step {step} was not paid for before it began: mend the algorithm that takes it",
                code="ledger.not-paid",
            )


@dataclass
class Block:
    """Some peers of a cohort.

    Attributes:
        start, stop: their rows among those of all peers.
        cohort: their part of the cohort.
        state: their state. Its rows are views of the rows of all peers, until a step puts new tensors in their place.
    """

    start: int
    stop: int
    cohort: Cohort
    state: State

    @classmethod
    def of(cls, cohort: Cohort, start: int, stop: int, round_index: int, paid: Tensor) -> Block:
        """Return the block of some rows, with a state that has no rows yet."""
        part = replace(cohort, peers=cohort.peers[start:stop], data=cohort.data.part(start, stop))
        if cohort.protection is not None:
            part.protection = cohort.protection.part(start, stop)
        if cohort.ledger is not None:
            part.ledger = PaidLedger(cohort.ledger, start, stop, paid)
        return cls(start, stop, part, State(part.peers, round_index))

    def see(self, name: str, whole: Tensor) -> None:
        """Make the rows of a name a view of this block's part of all peers' rows."""
        self.state.rows[name] = whole[self.start : self.stop]

    def misplaced(self, whole: dict[str, Tensor], names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        """Return (destination, rows) of the rows that a step has replaced by new tensors; the state gets the former."""
        moves = []
        for name in names:
            home = whole[name][self.start : self.stop]
            now = self.state.rows[name]
            is_at_home = now.data_ptr() == home.data_ptr() and now.stride() == home.stride()
            if not is_at_home:
                moves.append((home, now))
                self.state.rows[name] = home
        return moves


def bring_home(blocks: Iterable[Block], whole: dict[str, Tensor], names: Iterable[str]) -> None:
    """Copy rows that steps have replaced by new tensors back into the buffer of all peers' rows."""
    names = list(names)
    moves = [move for block in blocks for move in block.misplaced(whole, names)]

    # Two rows may have swapped places, so that one's destination is the other's source.
    if len(moves) > 1:
        moves = [(home, now.clone()) for home, now in moves]
    for home, now in moves:
        home.copy_(now)


Attempt = Callable[[Mapping[str, Tensor]], Any]  # evaluates models, given a block's rows
COLLECT = "collect"
TRY = "try"
# Of a block, what is in no shared memory: rows, and the ends and values of edges, by name.
StatePart = tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]


class WorkerPool:
    """Runs rounds of an algorithm on a cohort that hosts the whole network, in blocks, by one process or several.

    Attributes:
        state: the state of all peers. Between two calls it knows the round; after `collected` all rows and edges too.
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
        """Partition the peers. If there are several processes, move the rows to shared memory and fork.

        Args:
            state: the state to begin with; the pool takes over its rows.
            attempt: evaluates the models of a block.
            leave: functions that a forked process calls to close what only this process may hold, such as locks.
        """
        self.algorithm = algorithm
        self.cohort = cohort
        self.state = state
        self._partitioning = partitioning
        self._attempt = attempt

        self._me = 0
        self._others = list[Forked]()
        self._boxes = list[EdgeBox]()
        self._barrier = Barrier(partitioning.workers)
        # The rows of each mixing matrix that this worker computes, for as long as the matrix is in use.
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
        if self._partitioning.workers == 1:
            return

        self._paid = shared_copy(self._paid)
        for name in list(state.rows):
            state.rows[name] = shared_copy(state.rows[name])

        mixes = [item for item in self.algorithm.program if isinstance(item, Mix)]
        mixed = {name for mix in mixes for name in mix.names}
        self._spare = {name: shared_copy(state.rows[name], filled=False) for name in mixed}

    def _blocks(self, state: State) -> list[Block]:
        """Return all blocks, with views of the rows and copies of the edges."""
        blocks = []
        for start, stop in self._partitioning.blocks:
            block = Block.of(self.cohort, start, stop, state.round_index, self._paid)
            blocks.append(block)

            for name, rows in self._whole.items():
                block.see(name, rows)

            first_peer = block.state.peers[0]
            last_peer = block.state.peers[-1]
            for name, edges in state.edges.items():
                some = slice(*np.searchsorted(edges.own, [first_peer, last_peer + 1]))
                block.state.edges[name] = Edges(edges.own[some], edges.other[some], edges.values[some].clone())
        return blocks

    def _fork(self, blocks: list[Block], leave: list[Callable[[], None]]) -> None:
        """Fork the other workers, and join the barrier as worker 0."""
        self._boxes = [EdgeBox() for _ in range(self._partitioning.workers)]
        for number in range(1, self._partitioning.workers):
            hosted = [blocks[block] for block in self._partitioning.of(number)]
            name = f"peers {peer_ranges(range(hosted[0].start, hosted[-1].stop))}"
            serve = partial(self._serve, number, hosted)
            # A worker inherits the pipes of those before it. If it kept them, these would never see the end of the run.
            lines = [other.line.close for other in self._others]
            self._others.append(Forked(name, serve, [*leave, *lines]))
        self._mine = [blocks[block] for block in self._partitioning.of(0)]

        # No worker answers while it takes rounds, so a pipe that can be read then has an error, or its end.
        workers = {other.line.fileno(): other for other in self._others}
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
            # The next order usually comes at once: spinning for a moment is faster than to sleep and be woken.
            until = time.perf_counter() + SPIN
            while not calls.poll(0) and time.perf_counter() < until:
                pass

            order = line.recv()
            if order in answers:
                result = answers[order]()
                sys.stdout.flush()
                line.send((result, None))
            else:
                # Rounds are not answered: the main process takes its own meanwhile, and meets the others at barriers.
                self._take_rounds(order)
                sys.stdout.flush()

    def rounds(self, count: int) -> None:
        """Run some whole rounds: every step and every exchange, each after it is paid."""
        while count:
            paid = self._pay(count)
            self._order(paid)
            self._take_rounds(paid)
            count -= paid

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
            if len(active) > 0:
                for step in range(k * steps, (k + 1) * steps):
                    ledger.charge(step, active)
            # An entry of the ledger pays for a block of steps, often for more than this round.
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

        # A reply is of edges; the others are of rows, which all workers read where they belong.
        if not isinstance(exchange, Reply):
            bring_home(self._mine, self._whole, exchange.names)

        if isinstance(exchange, Mix) and exchange.by_matrix:
            place = exchange.place(self._mine[0].state.round_index, mixing)
            self._mix(exchange, mixing.matrix(place))
        else:
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

        # One barrier is enough. What is read now becomes the second buffer, which is written after the next barrier.
        self._barrier.wait()
        for name in exchange.names:
            spare = self._spare[name]
            if spare is None:
                raise TypeError(f"row {name!r} is mixed and has no second buffer")
            self._parts[matrix].apply(self._whole[name], out=spare[start:stop])
            self._whole[name], self._spare[name] = spare, self._whole[name]

    def _mix_some(self, exchange: Mix, matrix: MixingMatrix, moved: np.ndarray) -> None:
        """Mix the rows of the few receivers here that have in-neighbours, in place, once all have read theirs."""
        is_here = (moved >= self._mine[0].start) & (moved < self._mine[-1].stop)
        mine = moved[is_here]

        self._barrier.wait()
        mixed = {}
        if len(mine) > 0:
            part = matrix.rows(mine)
            mixed = {name: part.apply(self._whole[name]) for name in exchange.names}

        # Rows change in place, so no worker may change one that another still reads.
        self._barrier.wait()
        for name, rows in mixed.items():
            self._whole[name][torch.from_numpy(mine)] = rows

    def _heard(self, exchange: Exchange, mixing: Mixing) -> None:
        """Perform a Gather or a Reply: read what all blocks have, and continue once all have read it."""
        if self._partitioning.workers == 1:
            changes = self._changes(exchange, mixing, [block.state.edges for block in self._mine])
        else:
            is_reply = isinstance(exchange, Reply)
            if is_reply:
                published = [{name: block.state.edges[name] for name in exchange.names} for block in self._mine]
                self._boxes[self._me].put(published)

            self._barrier.wait()
            edges = list[dict[str, Edges]]()
            if is_reply:
                for box in self._boxes:
                    edges += box.look()
            changes = self._changes(exchange, mixing, edges)

            # The views into other workers' boxes are valid until these publish again.
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
        answers = [self._state_parts()]
        answers += [other.answer() for other in self._others]
        self.cohort.game_seconds = max(seconds for _, seconds in answers)

        row_parts = [rows for parts, _ in answers for rows, _ in parts]
        edge_parts = [edges for parts, _ in answers for _, edges in parts]

        state = self.state
        state.rows = {name: rows for name, rows in self._whole.items() if name in self._mine[0].state.rows}
        for name in row_parts[0]:
            state.rows[name] = torch.from_numpy(np.concatenate([part[name] for part in row_parts]))
        state.edges = {name: _joined([part[name] for part in edge_parts]) for name in edge_parts[0]}
        return state

    def _state_parts(self) -> tuple[list[StatePart], float]:
        """Copy rows back; return what is in no shared memory, by block, and the seconds spent on coalitions here."""
        shared = [name for name in self._whole if name in self._mine[0].state.rows]
        bring_home(self._mine, self._whole, shared)

        parts = []
        for block in self._mine:
            rows = {name: row.numpy() for name, row in block.state.rows.items() if name not in self._whole}
            edges = {}
            for name, edge in block.state.edges.items():
                edges[name] = (edge.own, edge.other, edge.values.numpy())
            parts.append((rows, edges))
        seconds = sum(block.cohort.game_seconds for block in self._mine)
        return parts, seconds

    def trial(self) -> list[Any]:
        """Return the evaluation of each block's models, in order."""
        self._order(TRY)
        results = self._tried()
        for other in self._others:
            results += other.answer()
        return results

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
    """End a worker whose pipe to the main process has closed."""
    raise EOFError("the run has ended")


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Edges:
    """Return the edges of all blocks, from (own, other, values) of each."""
    own = np.concatenate([part[0] for part in parts])
    other = np.concatenate([part[1] for part in parts])
    values = np.concatenate([part[2] for part in parts])
    return Edges(own, other, torch.from_numpy(values))


def start_engine(
    experiment: Experiment,
    cohort: Cohort,
    state: State,
    leave: Iterable[Callable[[], None]] = (),
    workers: int | None = None,
) -> Engine | WorkerPool:
    """Return the engine that continues from a state.

    Args:
        cohort: all peers.
        leave: functions that a forked process calls to close what only this process may hold, such as locks.
        workers: the number of processes, in place of the scenario's `compute.workers`.

    Raises:
        ScenarioError: this system cannot run so many.
    """
    arithmetic = experiment.arithmetic
    if not arithmetic.is_exact:
        return Engine(experiment.algorithm, cohort, state, arithmetic)

    partitioning = partition_cohort(experiment, workers)

    # Rows that steps make later are in no shared memory, so only rows that the state begins with can cross blocks.
    exchanges = [item for item in experiment.algorithm.program if isinstance(item, Mix | Gather)]
    crossing = {name for exchange in exchanges for name in exchange.names}
    if len(partitioning.blocks) == 1 or not crossing <= state.rows.keys():
        return Engine(experiment.algorithm, cohort, state)
    return WorkerPool(experiment.algorithm, cohort, state, partitioning, partial(try_models, experiment), leave)
