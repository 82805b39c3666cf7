"""A peer that waits for its neighbours in every exchange: the numbers of a simulation, at the pace of the slowest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.core import Exchange, State
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.network.peer.connections import Messages, Session
from flower_privdec.network.peer.peer import POLL, RunningPeer
from flower_privdec.network.transport.transport import UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import SMALL, FrameCodec, Progress, RowMessage
from flower_privdec.pushsum.lockstep import UNDER_WAY, Lockstep, Timetable
from flower_privdec.pushsum.witness import LedgerWitness

Machine = Lockstep[RowMessage, Mapping[str, Tensor]]
GONE = 6  # calls in a row that failed, after which a neighbour that is at the end has left


class SynchronousSession(Session):
    """The rows of exchanges, each sent again and again until it was used.

    A call holds this peer's progress and, where it brings some, the rows of one exchange; an answer holds the progress.

    Args:
        machine: the protocol.
        witness, frames: see Session.
        timetable: of the run.
        retry: seconds until what was not used is sent again.
    """

    def __init__(
        self, machine: Machine, witness: LedgerWitness, frames: FrameCodec, timetable: Timetable, retry: float
    ) -> None:
        super().__init__(witness, frames, 2, frames.cap + SMALL, timetable.end)
        self.machine = machine
        self._timetable = timetable
        self._neighbors = witness.neighbors
        self._retry = retry
        self._informed: dict[int, int] = {}  # the place at which each neighbour knows this peer to be
        self._again: dict[tuple[int, int], float] = {}  # when to send what a neighbour has not used again, by place
        self._ask_again: dict[int, float] = {}  # when to ask each neighbour again whether it is at the end
        self._failures: Counter[int] = Counter()  # since the last call that was answered
        self._answering: Counter[int] = Counter()  # calls of each neighbour whose answers are held back

    def is_over(self) -> bool:
        """Return whether all neighbours are known to be at the end, and know it of this peer or have left."""
        place = self.machine.place
        return not self.machine.before(place, self._neighbors) and all(
            self._informed.get(peer, -1) >= place or self._failures[peer] >= GONE for peer in self._neighbors
        )

    def receive(self, caller: int, messages: Messages) -> Callable[[], Messages]:
        """See Session; the answer holds this peer's progress."""
        for message in messages:
            if isinstance(message, RowMessage):
                if (message.round_index >= self._timetable.rounds) != (message.at == self._timetable.final_at):
                    raise RefusedError(
                        f"round {message.round_index} has no exchange {message.at}; another version?",
                        code="lockstep.exchange",
                    )
                place = self._timetable.place(message.round_index, message.at)
                self.machine.take(caller, place, message.values)
        self._learn(caller, messages)
        self._answering[caller] += 1

        def answer() -> Messages:
            self._answering[caller] -= 1
            if not self.machine.is_at_end:  # a caller without the answer calls again, but for its last message
                self._informed[caller] = self.machine.place
            return [Progress(self.peer, caller, self.machine.place + 1)]

        return answer

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """See Session: the answer to rows waits until they were used."""
        rows = [message for message in messages if isinstance(message, RowMessage)]
        return all(self._timetable.place(row.round_index, row.at) < self.machine.place for row in rows)

    def _learn(self, neighbor: int, messages: Messages) -> None:
        """Take in a neighbour's progress; one that is behind the first exchange listens, and is nowhere yet."""
        for message in messages:
            if isinstance(message, Progress) and message.exchanges > 0:
                try:
                    self.machine.learn(neighbor, message.exchanges - 1)
                except RunError as error:
                    self.fatal = error
                    raise

    def has_news(self, neighbor: int, now: float) -> bool:
        """See Session: rows not sent or not used for a while, progress that the neighbour waits for, the first call.

        Progress waits where an answer to the neighbour, which carries it, is about to leave. At the end a peer asks
        its neighbours where they are until all are there: a neighbour whose last calls were lost may have left.
        """
        machine = self.machine
        informed = self._informed.get(neighbor)
        awaits = machine.place >= 0 if informed is None else informed < machine.wanted(neighbor)
        if not self.witness.has_heard(neighbor):
            return True
        if machine.is_at_end:
            is_behind = bool(machine.before(machine.place, [neighbor]))
            awaits = awaits or (is_behind and now >= self._ask_again.get(neighbor, 0.0))
        return (awaits and (machine.is_at_end or not self._answering[neighbor])) or bool(self._due(neighbor, now))

    def _due(self, neighbor: int, now: float) -> list[RowMessage]:
        due = self.machine.due(neighbor)
        return [rows for place, rows in due if now >= self._again.get((neighbor, place), 0.0)]

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        progress = Progress(self.peer, neighbor, self.machine.place + 1)
        return [[progress, rows] for rows in self._due(neighbor, now)] or [[progress]]

    def answered(self, neighbor: int, sent: Messages, answer: Messages) -> None:
        self._failures[neighbor] = 0
        self._ask_again[neighbor] = time.monotonic() + self._retry
        for message in sent:
            if isinstance(message, Progress):
                place = message.exchanges - 1
                self._informed[neighbor] = max(place, self._informed.get(neighbor, -1))
            elif isinstance(message, RowMessage):
                self._again = {key: when for key, when in self._again.items() if key[1] > place - UNDER_WAY}
                used_at = self._timetable.place(message.round_index, message.at)
                self._again[neighbor, used_at] = time.monotonic() + self._retry
        self._learn(neighbor, answer)

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """See Session: peers that wait for each other cannot continue with one that refuses their calls."""
        self._failures[neighbor] += 1
        if not isinstance(error, UnreachableError):
            self.fatal = self.fatal or RunError(f"peer {neighbor} refuses a call: {error}", code="network.refused")


class SynchronousPeer(RunningPeer):
    """One peer of a run whose exchanges all peers perform together; see RunningPeer.

    It keeps two checkpoints: what was sent in the exchange before may have to be sent again.
    """

    generations: ClassVar[int] = 2

    def _make_session(self, checkpoints: list[Checkpoint]) -> SynchronousSession:
        timetable = self.timetable
        peer = self.device.peer
        self.machine = Machine(peer, lambda place: timetable.turn(peer, place).receivers, timetable.places)
        exchanges = timetable.exchanges | ({timetable.final_at: timetable.final_exchange} if self.final else {})
        formats = {at: self._formats(exchange) for at, exchange in exchanges.items()}
        self._restored = [checkpoint.state for checkpoint in checkpoints]
        self._met = False
        self._rounding: dict[str, Tensor] = {}  # what the wire codec took away from the shares of this exchange
        frames = FrameCodec(self._run_id, exchanges=formats)
        self.session = SynchronousSession(self.machine, self.witness, frames, timetable, self.network.retry)
        return self.session

    def _begin(self) -> None:
        for state in self._restored:
            self._arrive(state, self.timetable.place(state.round_index, state.at))

    def _exchange(self, exchange: Exchange) -> None:
        place = self.timetable.place(self.state.round_index, self.state.at)
        machine = self.machine
        self._save(place, self.state, {})
        self._arrive(self.state, place)
        self._await(lambda: not machine.missing() and not machine.behind(place - 1))
        received = {(j, self.device.peer): self._decoded(rows) for j, rows in machine.received().items()}
        if self.state.round_index >= self.rounds:
            self._measure({sender: rows for (sender, _), rows in received.items()})
        turn = self.timetable.turn(self.device.peer, place)
        exchange.incoming(self.state, turn.mixing, self._clipped(received)).apply_(self.state)
        for name, lost in self._rounding.items():
            self.state.rows[name][0] += lost

    def _arrive(self, state: State, place: int) -> None:
        """Tell the protocol that a state is on disk, and what is to be sent from it."""
        peer = self.device.peer
        outgoing = dict[int, RowMessage]()
        awaited = set[int]()
        self._rounding = {}
        if place < self.timetable.places:
            turn = self.timetable.turn(peer, place)
            awaited = turn.senders
            for (_, receiver), payload in turn.exchange.outgoing(state, turn.mixing).items():
                values = {name: self.arithmetic.encode(row) for name, row in payload.items()}
                outgoing[receiver] = RowMessage(peer, receiver, turn.round_index, turn.at, values)
                if self.mixing.sends_shares and not self.arithmetic.is_exact:
                    for name, row in payload.items():
                        lost = row - self.arithmetic.decode(values[name], row)
                        self._rounding[name] = self._rounding.get(name, 0) + lost
        with self.connections.changed:
            self.machine.arrive(place, outgoing, awaited)
            self.connections.notify()

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait for the neighbours for network.deadline seconds, the first time for network.give_up."""
        patience = self.network.deadline if self._met else max(self.network.deadline, self.network.give_up_seconds)
        until = time.monotonic() + patience
        self.waits_for = "" if self._met else "its neighbours"
        while not self._stopped.is_set() and not self.connections.wait(ready, POLL):
            if time.monotonic() > until:
                silent = sorted(self.machine.missing() | self.machine.behind(self.machine.place - 1))
                why = "; ".join(map(self.connections.why, silent))
                raise RunError(
                    f"round {self.state.round_index}: nothing came from peers {silent} for {patience:g} s ({why}); all "
                    "is on disk: mend that, then run the same command again, or raise network.deadline",
                    code="network.silent",
                )
        self._check_stopped()
        self.waits_for = ""
        self._met = True

    def _is_over(self, neighbor: int) -> bool:
        return not self.machine.before(self.timetable.places, [neighbor])

    def _leave(self) -> None:
        """Come to the last place, and stay until all neighbours are there too: one that died may come back and need it.

        Those that are gone are waited for as long as in any round, and no longer.
        """
        last = self.timetable.places
        self._save(last, self.state, {})
        self._arrive(self.state, last)
        until = time.monotonic() + self.network.deadline
        while not self._stopped.is_set() and time.monotonic() < until:
            if self.connections.wait(self.session.is_over, POLL):
                return
