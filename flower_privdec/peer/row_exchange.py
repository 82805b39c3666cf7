"""How an asynchronous peer gossips: rows, of which a neighbour uses the newest that it has, once.

Between peers a round is named by its count, see `AsynchronousPeer.count`.

A round's exchange: commit, hand the rows to the neighbours' queues, wait a moment for theirs, and mix with those that
came. Whoever was not heard counts as this peer itself (`PartlyHeard`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from flower_privdec.core import Exchange, Mix, Reply, State
from flower_privdec.peer.asynchronous_session import RowSession
from flower_privdec.peer.driving import Program
from flower_privdec.pushsum.frames import RowMessage
from flower_privdec.pushsum.lockstep import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.peer.asynchronous import AsynchronousPeer


class RowExchange:
    """Exchanges of one peer by rows.

    Args:
        peer: whose they are.
    """

    session_class: ClassVar[type[RowSession]] = RowSession
    per_round = 1  # see `AsynchronousPeer.count`

    def __init__(self, peer: AsynchronousPeer) -> None:
        self._peer = peer

    def usual_weight(self) -> float:
        """Return 0: rows have no weight that could be too small."""
        return 0.0

    def takes_part(self, round_index: int) -> bool:
        """Return whether the peer sends something in a round, or is sent something; its steps count all as heard."""
        self._peer.partly.use_senders(None)
        turns = [self._peer.turn(round_index, at) for at in self._peer.timetable.exchanges]
        return any(turn.senders or turn.receivers for turn in turns)

    # --- a peer that leaves for good ---

    def part(self, neighbor: int) -> None:
        """Let a neighbour go that leaves: it holds nothing that others miss, and its weight returns to this peer."""
        self._peer.session.parting.add(neighbor)
        self._peer.session.shut_out(neighbor, "it has left for good")

    def hand_over(self) -> Program[None]:
        """Hand over nothing: rows have no mass."""
        yield from ()

    # --- a round ---

    def perform(self, exchange: Exchange) -> Program[None]:
        """Send rows, and continue with those that have come."""
        peer = self._peer
        state = peer.state
        k = state.round_index
        count = peer.count(k)
        at = state.at
        peer.begin_exchange()
        sent = exchange.outgoing(state, peer.mixing)
        if peer.is_due(k):
            yield from peer.commit(count)
        self.post(at, count, {receiver: rows for (_, receiver), rows in sent.items()})

        wanted = peer.turn(k, at).senders
        peer.late = set()

        def is_past(j: int) -> bool:
            known = peer.neighbours[j]
            is_at_its_end = known.reached_round >= peer.count(peer.rounds)  # when it mixes, and no more
            is_further = known.place is not None and known.place > (count, at)
            return is_further or (is_at_its_end and not isinstance(exchange, Mix))

        def has_come(j: int) -> bool:
            """Return whether rows of this round have come, or new ones at all of a neighbour that is far behind."""
            known = peer.neighbours[j]
            is_far_behind = known.place is not None and known.place[0] < count - 1
            return j in peer.session.senders(at, 0 if is_far_behind else count)

        awaited = wanted
        if isinstance(exchange, Reply):
            # A neighbour whose request was not used in this round has probably not used this peer's, and then answers
            # nothing: two that passed over each other before they had met would wait for each other. If it does
            # answer in time, that counts.
            awaited = {j for j in wanted if peer.neighbours[j].request == count}
        yield from peer.await_senders(awaited, has_come, is_past)
        self._mix(exchange, state, wanted)

    def post(self, at: int, count: int, rows: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Send rows of an exchange to some neighbours, for a round; a reply is for that of the request.

        A neighbour whose request came before this process began repeats it.
        """
        peer = self._peer
        for j, values in rows.items():
            answers = peer.neighbours[j].request if at in peer.replies else count
            if answers is not None:
                peer.neighbours[j].queue.rows[at] = RowMessage(peer.device.peer, j, answers, at, values)

    def _mix(self, exchange: Exchange, state: State, wanted: Collection[int]) -> None:
        """Perform an exchange with the rows that have come."""
        peer = self._peer
        is_final = state.at == peer.timetable.final_at
        messages = peer.session.collect(state.at, wanted)
        if is_final:  # not what a neighbour sent while it waited
            messages = {j: message for j, message in messages.items() if message.round_index >= peer.count(peer.rounds)}
        elif isinstance(exchange, Reply):  # a reply belongs to the request of this round
            here = peer.count(state.round_index)
            messages = {j: message for j, message in messages.items() if message.round_index == here}
        else:
            for j, message in messages.items():
                peer.neighbours[j].request = message.round_index

        values = {j: peer._decoded(message.values) for j, message in messages.items()}
        partly = peer.partly
        if is_final:
            partly = peer.partly_final
            peer._measure(values)
        partly.use_senders(messages)
        received: Any = {(j, peer.device.peer): rows for j, rows in values.items()}
        exchange.incoming(state, partly, received).apply_(state)

    # --- final mixing ---

    def perform_finally(self, exchange: Exchange, turn: Turn) -> Program[None]:
        """Perform the exchange of a round of final mixing."""
        peer = self._peer
        count = peer.count(peer.state.round_index)
        at = peer.state.at
        sent = exchange.outgoing(peer.state, peer.timetable.final_mixing)
        yield from peer.commit(count, peer.neighbours)
        self.post(at, count, {receiver: values for (_, receiver), values in sent.items()})

        def has_come(j: int) -> bool:
            return j in peer.session.senders(at, count) or peer.neighbours[j].reached_round > count

        yield from peer.await_finally(turn.senders, has_come, count)
        self._mix(exchange, peer.state, turn.senders)

    # --- while the peer waits ---

    def _offered_at(self) -> Iterator[int]:
        """Yield the exchanges in which a neighbour's rows may be taken over as they are."""
        for at, exchange in self._peer.timetable.exchanges.items():
            if isinstance(exchange, Mix):
                yield at
        yield self._peer.timetable.final_at

    def adopt(self) -> None:
        """Take over the newest rows that neighbours offer, if this peer joins, before anything of it is sent."""
        peer = self._peer
        if not peer.is_joining:
            return
        for at in self._offered_at():
            messages = peer.session.collect(at, peer.session.senders(at))
            if messages:
                newest = max(messages.values(), key=lambda message: message.round_index)
                rows = peer._decoded(newest.values)
                peer.state.rows.update({name: value[None].clone() for name, value in rows.items()})
                peer.is_joining = False
                break

    def has_news(self, count: int) -> bool:
        """Return whether there is something to take over or to relay."""
        if self._peer.is_joining and any(self._peer.session.senders(at) for at in self._offered_at()):
            return True
        return any(behind for _, behind in self._to_relay(count))

    def _to_relay(self, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield exchanges, each with the neighbours that sent rows in it and are in earlier rounds than this peer."""
        peer = self._peer
        for at in self._offered_at():
            limit = min(count, peer.count(peer.rounds))
            if at == peer.timetable.final_at:
                if count < peer.count(peer.end):
                    continue
                limit = count
            yield at, peer.behind(peer.session.senders(at), limit)

    def mix_meanwhile(self, count: int) -> Program[None]:
        """Send rows to all neighbours, without a step."""
        peer = self._peer
        receivers = peer.timetable.receivers_ever(peer.device.peer)
        names = peer.timetable.final_exchange.names
        values = {name: peer.state.rows[name][0].clone() for name in names}
        yield from peer.commit(count)
        self.post(peer.timetable.final_at, max(0, count - 1), dict.fromkeys(receivers, values))

    def relay(self, count: int, saved: int) -> Program[bool]:
        """Mix with the rows of neighbours that are behind, and send them this peer's."""
        peer = self._peer
        timetable = peer.timetable
        has_relayed = False
        for at, behind in self._to_relay(count):
            if not behind:
                continue
            exchange = timetable.exchanges.get(at, timetable.final_exchange)
            earliest = peer.round_of(min(peer.neighbours[j].reached_round for j in behind))
            state = replace(peer.state, round_index=earliest, at=at)
            mixing = peer.mixing if earliest < peer.rounds else timetable.final_mixing
            sent = exchange.outgoing(state, mixing)
            self.post(at, max(0, count - 1), {j: rows for (_, j), rows in sent.items() if j in behind})
            self._mix(exchange, state, peer.session.senders(at))
            peer.state.rows = state.rows
            has_relayed = True
        yield from ()
        return has_relayed
