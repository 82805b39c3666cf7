"""A peer that waits for its neighbours in every exchange: the numbers of a simulation, and the pace of the slowest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from flower_privdec.core import Exchange, State
from flower_privdec.core.exchange import Payload
from flower_privdec.engine.checkpoint import Checkpoint
from flower_privdec.errors import RunError
from flower_privdec.network.peer.peer import POLL, RunningPeer
from flower_privdec.network.peer.synchronous_session import SynchronousMail
from flower_privdec.pushsum.letters import HEADER, packed, unpacked
from flower_privdec.pushsum.lockstep import Lockstep
from flower_privdec.pushsum.parts import Buffer, Parts
from flower_privdec.scenario import numbers_hash


class SynchronousPeer(RunningPeer):
    """One peer of a run whose exchanges everybody performs together; see RunningPeer.

    It keeps two checkpoints: what was sent at the place before may have to be sent again.
    """

    generations: ClassVar[int] = 2

    def _mail(self, kept: list[Checkpoint]) -> SynchronousMail:
        timetable, peer, scenario = self.timetable, self.device.peer, self.experiment.scenario
        machine = Lockstep[Parts, Payload](peer, lambda place: timetable.receivers(peer, place), timetable.places)
        self._like = {at: self._rows_of(exchange) for at, exchange in timetable.exchanges.items()}
        self._restored, self._met = [each.state for each in kept], False
        run, neighbors = bytes.fromhex(numbers_hash(scenario)), timetable.neighbours(peer)
        self.mail = SynchronousMail(machine, run, self._unpack, neighbors, scenario.network.retry)
        return self.mail

    def _unpack(self, sender: int, place: int, content: Buffer) -> Payload:
        """Return rows of a place; refuse such as its exchange does not have."""
        return unpacked(content, self._like[self.timetable.at(place)], f"what peer {sender} sent")

    def _cap(self) -> int:
        return HEADER.size + max(sum(row.nbytes for row in like.values()) for like in self._like.values())

    def _begin(self) -> None:
        for state in self._restored:
            self._arrive(state, self._place_of(state))

    def _meet(self) -> None:
        """The first exchange waits for them."""

    def _before(self, round_index: int) -> None:
        """They always can."""

    def _place_of(self, state: State) -> int:
        if state.round_index >= self.experiment.scenario.rounds:
            return self.timetable.places
        return self.timetable.place(state.round_index, state.at)

    def _exchange(self, exchange: Exchange) -> None:
        place = self._place_of(self.state)
        self._save(place, self.state, {})
        self._arrive(self.state, place)
        machine = self.mail.machine
        self._await(lambda: not machine.missing() and not machine.behind(place - 1))
        mixing = self.experiment.mixing
        assert mixing is not None
        messages = {(sender, self.device.peer): rows for sender, rows in machine.received().items()}
        exchange.incoming(self.state, mixing, messages).apply_(self.state)

    def _arrive(self, state: State, place: int) -> None:
        """Let the courier know that a state is on disk, and what is to be sent from it."""
        peer, outgoing = self.device.peer, {}
        if place < self.timetable.places:
            mixing = self.experiment.mixing
            assert mixing is not None
            sent = self.timetable.exchange(place).outgoing(state, mixing)
            known: dict[int, Parts] = {}
            for (_, receiver), payload in sent.items():
                outgoing[receiver] = known.setdefault(id(payload), packed(payload))
        with self.courier.changed:
            self.mail.machine.arrive(place, outgoing, self.timetable.senders(peer, place))
            self.courier.tell()

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait for the neighbours; for the first of them as long as it takes them to start."""
        network = self.experiment.scenario.network
        patience = network.deadline if self._met else max(network.deadline, network.start)
        until = time.monotonic() + patience
        while not self._stopped.is_set() and not self.courier.wait(ready, POLL):
            if time.monotonic() > until:
                raise RunError(self._silence(patience))
        self._check_stopped()
        self._met = True

    def _silence(self, seconds: float) -> str:
        machine = self.mail.machine
        silent = sorted(machine.missing() | machine.behind(machine.place - 1))
        why = "; ".join(self.courier.why(peer) for peer in silent)
        return (
            f"round {self.state.round_index}: nothing was heard of peers {silent} for {seconds:g} s ({why}); all is on "
            f"disk: mend that, then run the same command with --resume, or raise network.deadline"
        )

    def _is_over(self, neighbor: int) -> bool:
        return not self.mail.machine.before(self.timetable.places, [neighbor])

    def _leave(self) -> None:
        """Come to the last place, and stay until all neighbours are there too: one that died may come back and need it.

        Those that are gone are waited for as long as in any round, and no longer.
        """
        last, deadline = self.timetable.places, self.experiment.scenario.network.deadline
        self._save(last, self.state, {})
        self._arrive(self.state, last)
        until = time.monotonic() + deadline
        while not self._stopped.is_set() and time.monotonic() < until:
            if self.courier.wait(self.mail.over, POLL):
                return
