"""A peer that waits for its neighbours in every exchange: the numbers of a simulation, at the pace of the slowest.

`Lockstep` is the protocol: each exchange has a place, and what is sent at a place is sent until the receiver is at a
later one. `SynchronousSession` carries it, `SynchronousPeer` goes from place to place.

A neighbour that sends rows of models which no working device sends is quarantined: what it sends is received, so that
all go on, and the peer's own rows count in its place. All know the push-sum weight of everybody at every place, if rows
are sent as they are, so that nobody can lie about it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from flower_privdec.common.errors import ArgumentError, RunError
from flower_privdec.core import Exchange, Mix, State
from flower_privdec.core.exchange import Payload
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.graph.mixing import Link
from flower_privdec.peer.driving import CALL_FAILED, Program, UnreachableError, Wait
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.session import Messages, Session
from flower_privdec.peer.soundness import KNOWN, SURPLUS, stand_in, weight_of, what_is_wrong
from flower_privdec.pushsum.coded_mix import CodedMix, Models, Sending
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import SMALL, FrameCodec, Progress, RowFormats, RowMessage
from flower_privdec.pushsum.lockstep import UNDER_WAY, Lockstep, Timetable, Turn
from flower_privdec.pushsum.witness import LedgerWitness

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

ByLink = Mapping[Link, Payload]
Machine: TypeAlias = "Lockstep[RowMessage, Mapping[str, Tensor]]"
GONE = 6  # calls in a row that failed, after which a neighbour that is at the end has left


class SynchronousSession(Session):
    """The rows of exchanges, each sent again and again until it was used.

    A call holds this peer's progress and, if it brings some, the rows of one exchange; an answer holds the progress.

    Args:
        machine: the protocol.
        witness, frames: see Session.
        timetable: of the run.
        retry: seconds until what was not used is sent again.
    """

    def __init__(
        self, machine: Machine, witness: LedgerWitness, frames: FrameCodec, timetable: Timetable, retry: float
    ) -> None:
        super().__init__(witness, frames, 2, frames.cap + SMALL, timetable.end, retry)
        self.machine = machine
        self._timetable = timetable

    def is_over(self) -> bool:
        """Return whether all neighbours are known to be at the end, and know it of this peer or have left."""
        place = self.machine.place
        if self.machine.before(place, self.neighbours):
            return False
        return all(_knows(one.informed, place) or one.failures >= GONE for one in self.neighbours.values())

    # --- what comes ---

    def receive(self, caller: int, messages: Messages, now: float) -> Callable[[], Messages]:
        """See Session; the answer holds this peer's progress."""
        for message in messages:
            if isinstance(message, RowMessage):
                self._take(caller, message)
        self._learn(caller, messages)
        known = self.neighbours[caller]
        known.answering += 1

        def answer() -> Messages:
            known.answering -= 1
            if not self.machine.is_at_end:  # a caller without the answer calls again, but for its last message
                known.informed = self.machine.place
            return [Progress(self.peer, caller, self.machine.place + 1)]

        return answer

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """See Session: the answer to rows waits until they were used."""
        for message in messages:
            if isinstance(message, RowMessage):
                place = self._timetable.place(message.round_index, message.at)
                if place >= self.machine.place:
                    return False
        return True

    def _take(self, caller: int, message: RowMessage) -> None:
        is_final = message.round_index >= self._timetable.rounds
        if is_final != (message.at == self._timetable.final_at):
            raise RefusedError(
                f"round {message.round_index} has no exchange {message.at}; another version?",
                code="lockstep.exchange",
            )
        place = self._timetable.place(message.round_index, message.at)
        self.machine.take(caller, place, message.values)

    def _learn(self, neighbor: int, messages: Messages) -> None:
        """Take in a neighbour's progress; one that is behind the first exchange listens, and is nowhere yet."""
        known = self.neighbours[neighbor]
        for message in messages:
            if isinstance(message, Progress) and message.exchanges > 0:
                place = message.exchanges - 1
                try:
                    self.machine.learn(neighbor, place)
                except RunError as error:
                    self.fatal = error
                    raise
                if place > known.round_index:
                    known.round_index = place
                    known.pause = 0.0

    # --- what is sent ---

    def has_news(self, neighbor: int, now: float) -> bool:
        """See Session: rows not sent or not used for a while, progress that the neighbour waits for, the first call.

        Progress waits if an answer to the neighbour, which carries it, is about to leave. At the end a peer asks its
        neighbours where they are until all are there: a neighbour whose last calls were lost may have left.
        """
        if not self.witness.has_heard(neighbor):
            return super().has_news(neighbor, now)

        if self.has_to_pass_on(neighbor, now):
            return True
        machine = self.machine
        known = self.neighbours[neighbor]
        if known.informed is None:
            is_awaited = machine.place >= 0
        else:
            is_awaited = known.informed < machine.wanted(neighbor)
        if machine.is_at_end:
            is_behind = bool(machine.before(machine.place, [neighbor]))
            is_awaited = is_awaited or (is_behind and now >= known.ask_again)

        goes_with_an_answer = known.answering > 0 and not machine.is_at_end
        return (is_awaited and not goes_with_an_answer) or bool(self._due(neighbor, now))

    def _due(self, neighbor: int, now: float) -> list[RowMessage]:
        due = self.machine.due(neighbor)
        if not due:
            return []
        again = self.neighbours[neighbor].again
        return [rows for place, rows in due if now >= again.get(place, 0.0)]

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        progress = Progress(self.peer, neighbor, self.machine.place + 1)
        due = self._due(neighbor, now)
        calls: list[Messages] = [[progress]]
        if due:
            calls = [[progress, rows] for rows in due]
        return self.passing_on(calls, neighbor, now)

    def answered(self, neighbor: int, sent: Messages, answer: Messages, now: float) -> None:
        super().answered(neighbor, sent, answer, now)
        known = self.neighbours[neighbor]
        known.ask_again = now + self.retry
        for message in sent:
            if isinstance(message, Progress):
                place = message.exchanges - 1
                known.informed = place if known.informed is None else max(place, known.informed)
            elif isinstance(message, RowMessage):
                used_at = self._timetable.place(message.round_index, message.at)
                known.again = {at: when for at, when in known.again.items() if at > used_at - UNDER_WAY}
                known.again[used_at] = now + known.pause_again(self.retry, self.rest)
        self._learn(neighbor, answer)

    def failed(self, neighbor: int, error: RunError, now: float) -> float:
        """See Session: peers that wait for each other cannot continue with one that refuses their calls.

        One that has trouble of its own is awaited: it ends by it, and may be started again.
        """
        again = super().failed(neighbor, error, now)
        is_refusal = not isinstance(error, UnreachableError) and error.code != CALL_FAILED
        if self.fatal is None and is_refusal:
            self.fatal = RunError(f"peer {neighbor} refuses a call: {error}", code="network.refused")
        return again


def _knows(informed: int | None, place: int) -> bool:
    return informed is not None and informed >= place


class SynchronousPeer(RunningPeer):
    """One peer of a run whose exchanges all peers perform together; see RunningPeer.

    It keeps two checkpoints: what was sent in the exchange before may have to be sent again.

    Attributes:
        machine: its protocol.
        knows_weights: whether everybody's push-sum weights follow from the graph.
    """

    generations: ClassVar[int] = 2

    def _make_session(self, checkpoints: list[Checkpoint]) -> SynchronousSession:
        timetable = self.timetable
        peer = self.device.peer
        self.machine: Machine = Lockstep(peer, lambda place: timetable.turn(peer, place).receivers, timetable.places)
        self._restored = [checkpoint.state for checkpoint in checkpoints]
        self._met = False
        self._coded = CodedMix(self.arithmetic)
        self._sending: Sending | None = None  # of this exchange; None if rows are sent as they are

        exchanges = dict(timetable.exchanges)
        if self.final:
            exchanges[timetable.final_at] = timetable.final_exchange
        formats = {at: self._formats(exchange) for at, exchange in exchanges.items()}

        # `_sound` judges rows of models later: if their frame were refused here, this peer would wait for it for ever.
        only_mixes = all(isinstance(exchange, Mix) for exchange in exchanges.values())
        check = None if only_mixes else self._check_of_rows()
        frames = FrameCodec(self._run_id, exchanges=formats, check=check)

        by_examples = getattr(self.trainer.algorithm, "by_examples", False)
        self.knows_weights = self.arithmetic.is_exact and not by_examples
        self._most_weight = math.inf if by_examples else SURPLUS * self.trainer.scenario.n_peers
        retry = self.times.retry
        self.session: SynchronousSession = SynchronousSession(self.machine, self.witness, frames, timetable, retry)
        return self.session

    def _begin(self) -> Program[None]:
        for state in self._restored:
            self._arrive(state, self.timetable.place(state.round_index, state.at))
        yield from ()

    def _exchange(self, exchange: Exchange) -> Program[None]:
        place = self.timetable.place(self.state.round_index, self.state.at)
        machine = self.machine
        yield from self._saving(place, self.state)
        self._arrive(self.state, place)
        yield from self.await_neighbours(lambda: not machine.missing() and not machine.behind(place - 1))

        turn = self.timetable.turn(self.device.peer, place)
        received: ByLink = {(j, self.device.peer): rows for j, rows in machine.received().items()}
        heard: Models = {}
        if isinstance(exchange, Mix):
            received, heard = self._sound(turn, place, received)
        elif self._sending is None:
            received = {link: self._decoded(rows) for link, rows in received.items()}
        else:
            received, heard = self._coded.open(self.state, received)
        if self.state.round_index >= self.rounds:
            believed = {j: rows for (j, _), rows in received.items() if not self.neighbours[j].quarantined}
            self._measure(believed)

        if self._sending is None:
            exchange.incoming(self.state, turn.mixing, received).apply_(self.state)
        else:
            self._coded.apply_(exchange, self.state, turn.mixing, self._sending, received, heard)
        self._keep_weight(turn, place)

    # --- what neighbours may send ---

    def _formats(self, exchange: Exchange) -> RowFormats:
        formats = super()._formats(exchange)
        if not isinstance(exchange, Mix):
            return formats
        return {name: replace(row, judged=True) for name, row in formats.items()}

    def _sound(self, turn: Turn, place: int, received: ByLink) -> tuple[ByLink, Models]:
        """Return the rows that count, decoded; and the neighbours' models as the codec knows them then.

        A neighbour that sends what no working device sends is quarantined: the peer's own rows count in place of its.
        """
        opened, heard = self._opened(received)
        own = {name: self.state.rows[name][0] for name in turn.exchange.names}
        weights = self._weights_at(turn, place)

        counted: dict[Link, Payload] = {}
        for link in received:
            sender = link[0]
            part = 1.0
            if turn.mixing.sends_shares:
                part = turn.parts[sender] * self.arithmetic.damping
            weight = None if weights is None else float(weights[sender]) * part

            known = self.neighbours[sender]
            if not known.quarantined:
                self._quarantine(sender, what_is_wrong(opened[link], own, self._most_weight, weight))
            if known.quarantined:
                counted[link] = stand_in(own, part, weight)
            else:
                counted[link] = opened[link]
        return counted, heard

    def _opened(self, received: ByLink) -> tuple[ByLink, Models]:
        """Decode the rows of neighbours that are not quarantined; return also their models as the codec knows them."""
        for (sender, _), rows in received.items():
            try:
                for name, value in rows.items():
                    self.arithmetic.check(value, self.state.rows[name][0])
            except ArgumentError as error:
                self._quarantine(sender, str(error))

        believed = {link: rows for link, rows in received.items() if not self.neighbours[link[0]].quarantined}
        if self._sending is None:
            return {link: self._decoded(rows) for link, rows in believed.items()}, {}
        return self._coded.open(self.state, believed)

    def _quarantine(self, sender: int, why: str) -> None:
        """Quarantine a neighbour, with a warning, if there is a reason."""
        known = self.neighbours[sender]
        if not why or known.quarantined:
            return
        known.quarantined = why
        _log.warning(
            "peer %s is quarantined: %s; this peer's own rows count in place of what it sends, until it starts again",
            sender,
            why,
        )

    def _weights_at(self, turn: Turn, place: int) -> np.ndarray | None:
        """Return the push-sum weights that all have before the exchange of a place, [n_peers]; None if unknown."""
        if not (self.knows_weights and turn.mixing.sends_shares and "w" in turn.exchange.names):
            return None
        return self.timetable.push_weights(place)

    def _keep_weight(self, turn: Turn, place: int) -> None:
        """Set the peer's weight right if neighbours moved it by lies that are too small to be noticed one by one."""
        if self._weights_at(turn, place) is None:
            return

        weight = float(self.timetable.push_weights(place + 1)[self.device.peer])
        own = weight_of({"w": self.state.rows["w"][0]})
        if abs(own - weight) > KNOWN / 10 * weight:
            # All rows alike, so that the model, x / w, stays what it is.
            for name in turn.exchange.names:
                self.state.rows[name].mul_(weight / own)

    def _arrive(self, state: State, place: int) -> None:
        """Tell the protocol that a state is on disk, and what is to be sent from it."""
        peer = self.device.peer
        outgoing = dict[int, RowMessage]()
        awaited = set[int]()
        self._sending = None
        if place < self.timetable.places:
            turn = self.timetable.turn(peer, place)
            awaited = turn.senders
            messages: ByLink
            if self.arithmetic.is_exact:
                messages = turn.exchange.outgoing(state, turn.mixing)
            else:
                self._sending = self._coded.send(turn.exchange, state, turn.mixing)
                messages = self._sending.messages
            for (_, receiver), values in messages.items():
                outgoing[receiver] = RowMessage(peer, receiver, state.round_index, state.at, values)
        self.machine.arrive(place, outgoing, awaited)

    def await_neighbours(self, ready: Callable[[], bool]) -> Program[None]:
        """Wait for the neighbours for network.deadline seconds, the first time for at least `times.give_up`."""
        patience = self.times.deadline
        if not self._met:
            patience = max(patience, self.times.give_up)
            self.waits_for = "its neighbours"

        until = self.now + patience
        while not (yield Wait(ready, self.now + self.times.poll)):
            self._check_stopped()
            self.check_standstill()
            if self.now > until:
                silent = sorted(self.machine.missing() | self.machine.behind(self.machine.place - 1))
                why = "; ".join(map(self.why, silent))
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

    def _leave(self) -> Program[None]:
        """Come to the last place, and stay until all neighbours are there too: one that died may come back and need it.

        Those that are gone are waited for as long as in any round, and no longer.
        """
        last = self.timetable.places
        yield from self._saving(last, self.state)
        self._arrive(self.state, last)

        until = self.now + self.times.deadline
        while not self.is_stopping and self.now < until:
            if (yield Wait(self.session.is_over, min(until, self.now + self.times.poll))):
                return
