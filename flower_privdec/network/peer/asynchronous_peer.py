"""A peer that goes on without those who do not come: a slow or lost neighbour costs its own edges alone.

Push-sum algorithms send shares that are added exactly once (`shares`), whatever is lost, repeated or killed. All others
send rows, of which a neighbour uses the newest it has, once; the weight of who was not heard in time returns to the
peer itself for that round (`PartlyHeard`). Whom to wait for, and how long, is `Punctuality`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from flower_privdec.core import Exchange, Mix, Reply, State
from flower_privdec.network.peer.membership import Membership
from flower_privdec.network.peer.peer import POLL

LEAST = 0.4  # of its weight: with less a peer sends nothing before it is sent something, for steps at x / w grow


class AsynchronousPeer(Membership):
    """One peer of a run in which nobody waits for those who do not come; see RunningPeer."""

    # --- exchanges ---

    def _await(self, wanted: Collection[int], has_come: Callable[[int], bool], until: float) -> None:
        """Wait for those of some neighbours who are punctual, up to a moment."""

        def all_came() -> bool:
            missing = {j for j in wanted if not has_come(j)}
            return not any(map(self._is_awaited, missing))

        began = time.monotonic()
        self._wait(all_came, until - began)
        self._waited += time.monotonic() - began

    def _is_awaited(self, neighbor: int) -> bool:
        return self.machine.is_open(neighbor) and self._pace.is_awaited(neighbor)

    def _patient(self) -> float:
        return time.monotonic() + self._pace.patience

    def _begin_exchange(self) -> None:
        self._waited = 0.0
        with self.courier.changed:
            self._pace.begin(self.mail.rounds)

    def _hear(
        self,
        wanted: Collection[int],
        has_come: Callable[[int], bool],
        is_past: Callable[[int], bool],
        late: Collection[int] = (),
    ) -> None:
        """Wait for what some neighbours send, as long as that pays, and remember who of them had come.

        Args:
            is_past: whether a neighbour is beyond this exchange, so that nothing of it will come.
            late: who was waited for in this exchange already.
        """

        def is_done(neighbor: int) -> bool:
            return has_come(neighbor) or is_past(neighbor)

        self._await(set(wanted) - set(late), is_done, self._patient())
        new = self.mail.senders(self.state.at)  # of rounds before this, where somebody lags behind
        there = {neighbor for neighbor in wanted if has_come(neighbor) or neighbor in new}
        with self.courier.changed:
            message = self.courier.message_seconds()
        self._pace.end(time.monotonic(), there, set(wanted) - there, self._waited, message)

    def _exchange(self, exchange: Exchange) -> None:
        if self._whole.sends_shares:
            sent, self._sent = self._sent, False
            self._push(self.state.round_index, sent)
            self.state.at, self.state.waiting = self.state.at + 1, False
            self._settle()
        else:
            self._gossip(exchange, self.state)

    def _push(self, round_index: int, sent: bool) -> None:
        """Send shares, commit, and add those that come.

        Args:
            sent: whether this was done before a crash, up to the commit.
        """
        if not self._due(round_index):
            self._absorb()
            return
        self._begin_exchange()
        outgoing = self.timetable.column(self.device.peer, round_index)
        incoming = self.timetable.senders(self.device.peer, self.timetable.place(round_index, self.state.at))
        late: set[int] = set()
        if not sent:
            late = self._make_ready(outgoing, set(outgoing) - incoming)
            self._split(round_index, outgoing)
            self._commit(round_index + 1, outgoing)
        self._hear(
            incoming,
            lambda j: j in self._new or j in self.machine.waiting_rounds() or self.mail.rounds.get(j, 0) > round_index,
            lambda j: False,
            late,
        )
        self._absorb()
        self._new -= incoming

    def _make_ready(self, receivers: Collection[int], unheard: Collection[int]) -> set[int]:
        """Wait until shares can be sent, and acknowledge meanwhile what others wait for the same way.

        Args:
            unheard: those of them who send nothing in this exchange: who of them is punctual shows here alone.

        Returns:
            Those for whom there is none.
        """
        until = self._patient()
        while True:
            self._await(receivers, lambda j: self.machine.is_ready(j) or j in self.machine.waiting_rounds(), until)
            late = {j for j in receivers if not self.machine.is_ready(j)}
            worth_it = any(map(self._is_awaited, late)) and time.monotonic() < until
            if not (worth_it and self.machine.waiting_rounds()):
                break
            self._absorb()
            self._commit(self.state.round_index)
        self._pace.note(set(unheard) - late, late & set(unheard))
        return late

    def _split(self, round_index: int, weights: dict[int, float]) -> None:
        with self.courier.changed:
            self.machine.split(round_index, weights if self._weight() > LEAST * self._full else {})

    def _settle(self) -> None:
        """Commit once more where an edge is used again in the next round, which has to be acknowledged before."""
        following = self.state.round_index + 1
        if following < self.experiment.scenario.rounds and self._due(following):
            senders = self.timetable.senders(self.device.peer, self.timetable.place(following, self.state.at - 1))
            if self.machine.uncommitted() & senders:
                self._commit(following)

    def _gossip(self, exchange: Exchange, state: State) -> None:
        """Send rows, and go on with those that have come."""
        k, at = state.round_index, state.at
        self._begin_exchange()
        sent = exchange.outgoing(state, self._whole)
        if self._due(k):
            self._commit(k)
        self._post(at, k, {receiver: rows for (_, receiver), rows in sent.items()})
        wanted = self.timetable.senders(self.device.peer, self.timetable.place(k, at))

        def is_past(j: int) -> bool:
            at_its_end = self.mail.rounds.get(j, 0) >= self.experiment.scenario.rounds  # where it mixes, and no more
            return self.mail.places.get(j, (0, 0)) > (k, at) or (at_its_end and not isinstance(exchange, Mix))

        self._hear(wanted, lambda j: self._has_rows(at, j, k), is_past)
        self._mix(exchange, state, wanted)

    def _has_rows(self, at: int, neighbor: int, round_index: int) -> bool:
        """Return whether rows of a round have come, or new ones at all of a neighbour that is far behind."""
        far = self.mail.places.get(neighbor, (round_index, 0))[0] < round_index - 1
        return self.mail.has_rows(at, neighbor, round_index) or (far and neighbor in self.mail.senders(at))

    def _post(self, at: int, round_index: int, rows: dict[int, Any]) -> None:
        replies = self._answers(at)
        with self.courier.changed:
            for neighbor, values in rows.items():
                if not replies or neighbor in self._asked:  # else it asked before this process began, and asks again
                    self.mail.post(at, self._asked[neighbor] if replies else round_index, {neighbor: values})
            self.courier.tell()

    def _mix(self, exchange: Exchange, state: State, wanted: Collection[int]) -> None:
        """Perform an exchange with the rows that have come."""
        with self.courier.changed:
            found = self.mail.collect(state.at, wanted)
        if isinstance(exchange, Reply):  # an answer is to what was asked in this round
            found = {j: message for j, message in found.items() if message.round_index == state.round_index}
        else:
            self._asked.update({j: message.round_index for j, message in found.items()})
        self._partly.hear(found)
        peer = self.device.peer
        messages = {(j, peer): self._on_device(message.values) for j, message in found.items()}
        exchange.incoming(state, self._partly, messages).apply_(state)

    # --- the end ---

    def _leave(self) -> None:
        """Relay for those who are not done, and stay until everybody who can be reached knows all that it needs.

        Who cannot be reached, or is done and cannot be told, is waited for as long as a deadline, and no longer.
        """
        rounds, network = self.experiment.scenario.rounds, self.experiment.scenario.network
        self._commit(rounds, self._neighbors)
        lost = time.monotonic()
        while not self._stopped.is_set():
            waiting = [j for j in self._neighbors if not self._is_over(j)]
            if any(map(self.machine.is_open, self._behind(waiting))):
                lost = time.monotonic()
            if not waiting or time.monotonic() - lost > network.deadline:
                break
            if self._relay(rounds):
                continue
            with self.courier.changed:
                self.courier.changed.wait(POLL)

    def _is_over(self, neighbor: int) -> bool:
        """Return whether a neighbour is done, and has all that this peer owes it or has left."""
        rounds = self.experiment.scenario.rounds
        if self.mail.rounds.get(neighbor, -1) < rounds:
            return False
        told = self.mail.is_told(neighbor, rounds) and not self.machine.owes(neighbor)
        return told or self.mail.is_gone(neighbor)

    def _relay(self, rounds: int) -> bool:
        """Take part in the mixing of those who are not done, without a step; return whether there was something."""
        if self.mail.rolled_back is not None:
            self._begin_anew()
        if self._whole.sends_shares:
            return self._relay_shares(rounds)
        done = False
        for at, exchange in self.timetable.exchanges.items():
            behind = self._behind(self.mail.senders(at))
            if behind and isinstance(exchange, Mix):
                state = replace(self.state, round_index=min(self.mail.rounds[j] for j in behind), at=at)
                sent = exchange.outgoing(state, self._whole)
                self._post(at, rounds, {j: rows for (_, j), rows in sent.items() if j in behind})
                self._mix(exchange, state, self.mail.senders(at))
                self.state.rows = state.rows
                done = True
        return done

    def _behind(self, neighbors: Iterable[int]) -> list[int]:
        """Return which of some neighbours are not done."""
        return [j for j in neighbors if self.mail.rounds.get(j, 0) < self.experiment.scenario.rounds]

    def _relay_shares(self, rounds: int) -> bool:
        waiting = self.machine.waiting_rounds()
        if not waiting:
            return False
        behind = self._behind(waiting)
        self._absorb()
        if behind:
            column = self.timetable.column(self.device.peer, min(waiting[j] for j in behind))
            self._split(rounds, {j: column[j] for j in self._behind(column)})
        self._commit(rounds, self._neighbors)
        return True
