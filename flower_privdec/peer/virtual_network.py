"""A whole network of peers in one thread, on a virtual clock: the second driver, beside threads and sockets.

It does what `network.peer.driver` does in real time, event by event: it lets a peer go on, carries its calls, holds
answers back that will say more soon, and gives each work its duration. The same peers with the same latencies go
through the same events, whatever the machine is doing, so what was seen once is seen again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.peer.driving import UnreachableError, Wait, Work
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.session import Messages
from flower_privdec.pushsum.exactly_once import RefusedError

Latency = Callable[[int, int], float | None]  # of a message from one peer to another, seconds; None if it is lost
INSTANT = 1e-3  # seconds until a call to a peer that is not there fails


class VirtualNetwork:
    """Peers that call each other's functions, one event after the other.

    Args:
        peers: by number; each is driven from its beginning to its end.
        latency: how long the next message from one peer to another takes; a draw of it belongs to the caller's seed.
        seconds: how long each kind of `Work` takes; 0 if it is not named.
        lost_after: how long it takes until a caller learns that its call, or the answer, is lost.

    Attributes:
        now: the virtual clock, in seconds.
        events: how many were performed.
        ends: of each peer whose program is over: None if it came to its end, else the error that ended it.
    """

    def __init__(
        self,
        peers: Mapping[int, RunningPeer],
        latency: Latency = lambda sender, receiver: 0.01,
        seconds: Mapping[str, float] | None = None,
        lost_after: float = 1.0,
    ) -> None:
        self.now = 0.0
        self.events = 0
        self.ends: dict[int, PrivdecError | None] = {}
        self.latency = latency
        self.seconds = dict(seconds or {})
        self.lost_after = lost_after
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()  # events of one moment are performed in the order in which they were put down
        self._has_begun = False
        self.hosts = {number: _Host(self, peer) for number, peer in peers.items()}

    def run(self, until: float = math.inf) -> None:
        """Perform events until all peers have ended, or the clock is at a moment.

        Raises:
            RunError: no event is left, and peers still wait: they would wait for ever.
        """
        if not self._has_begun:
            self._has_begun = True
            for host in self.hosts.values():
                self.at(self.now, host.begin)
        while len(self.ends) < len(self.hosts):
            if not self._due:
                waiting = [host.peer.waiting() for number, host in self.hosts.items() if number not in self.ends]
                raise RunError(f"nothing can happen any more: {'; '.join(waiting)}", code="virtual.stuck")
            moment, _, perform = heapq.heappop(self._due)
            if moment > until:
                self.at(moment, perform)
                self.now = until
                return
            self.now = moment
            self.events += 1
            perform()

    def restart(self, peer: RunningPeer) -> None:
        """Put another process of a peer in the place of the one that is there, which has been killed."""
        number = peer.device.peer
        self.hosts[number].kill()
        self.ends.pop(number, None)
        host = _Host(self, peer)
        self.hosts[number] = host
        self.at(self.now, host.begin)

    def at(self, moment: float, perform: Callable[[], None]) -> None:
        """Put an event down for a moment."""
        heapq.heappush(self._due, (moment, next(self._order), perform))


class _Host:
    """One peer, with the calls that it makes and the answers that it holds back."""

    def __init__(self, network: VirtualNetwork, peer: RunningPeer) -> None:
        self.network = network
        self.peer = peer
        self._patience = peer.times.deadline / 2  # seconds that a call may take
        self._holding = min(peer.times.retry, self._patience) / 2  # seconds that an answer may be held back
        self._is_listening = False
        self._is_killed = False
        self._is_working = False
        self._calling: set[int] = set()
        self._held: list[_HeldAnswer] = []
        self._looks_at = math.inf  # when it is looked at next, if nothing comes

    @property
    def is_there(self) -> bool:
        """Return whether the peer answers calls."""
        return self._is_listening and not self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether the peer has ended, or was killed."""
        return self._is_killed or self.peer.device.peer in self.network.ends

    def kill(self) -> None:
        """Stop here: nothing that this process was about to do happens any more."""
        self._is_killed = True

    def begin(self) -> None:
        """Start the peer; it listens once it waits for the first time."""
        self.peer.begin()
        self.look()

    def look(self) -> None:
        """Let the peer go on, answer what can be answered, and make the calls that are due."""
        if self.is_over:
            return
        self._go_on()
        if not self.is_there:
            return
        self._answer_held()
        session = self.peer.conversation
        for neighbor in self.peer.neighbours:
            if neighbor not in self._calling and session.has_news(neighbor, self.network.now):
                self._call_all(neighbor, session.calls(neighbor, self.network.now))

    def _look_at(self, moment: float) -> None:
        if moment >= self._looks_at:
            return
        self._looks_at = moment

        def look() -> None:
            self._looks_at = math.inf
            self.look()

        self.network.at(moment, look)

    def _go_on(self) -> None:
        network = self.network
        if self._is_working:
            return
        try:
            pause = self.peer.on_tick(network.now)
            if isinstance(pause, Work):
                self._work(pause, pause.do())
            elif isinstance(pause, Wait):
                self._is_listening = True
                self._look_at(min(pause.until, network.now + self.peer.times.retry))
            else:
                network.ends[self.peer.device.peer] = None
        except PrivdecError as error:
            network.ends[self.peer.device.peer] = error

    def _work(self, work: Work, result: object) -> None:
        self._is_working = True

        def done() -> None:
            self._is_working = False
            work.result = result
            work.is_done = True
            self.look()

        self.network.at(self.network.now + self.network.seconds.get(work.kind, 0.0), done)

    # --- calls to others ---

    def _call_all(self, neighbor: int, calls: Sequence[Messages]) -> None:
        """Make calls to a neighbour, one after the other, and none after one that failed."""
        if not calls:
            self._calling.discard(neighbor)
            return
        self._calling.add(neighbor)
        network = self.network
        whole, content = self.peer.conversation.write(neighbor, calls[0])
        call = bytearray().join(content)
        other = network.hosts.get(neighbor)
        took = network.latency(self.peer.device.peer, neighbor)
        if other is None or not other.is_there:
            network.at(network.now + INSTANT, lambda: self._fail(neighbor, _not_there(neighbor)))
            return

        began = network.now
        is_over = False  # the answer, or the end of the patience, whichever comes first

        def over(perform: Callable[[], None]) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                perform()

        def answered(answer: bytearray | RunError) -> None:
            over(lambda: self._finish(neighbor, whole, answer, began, calls[1:]))

        if took is None:
            self._lose(neighbor, answered)
        else:
            network.at(began + took, lambda: other.receive(self.peer.device.peer, call, answered))
        lost = UnreachableError(f"peer {neighbor} did not answer in time", code="call.unanswered")
        network.at(began + self._patience, lambda: over(lambda: self._fail(neighbor, lost)))

    def _finish(
        self, neighbor: int, sent: Messages, answer: bytearray | RunError, began: float, others: Sequence[Messages]
    ) -> None:
        if self.is_over:
            return
        session = self.peer.conversation
        now = self.network.now
        if isinstance(answer, RunError):
            self._fail(neighbor, answer)
            return
        try:
            messages = session.read(neighbor, memoryview(answer))
            session.took(neighbor, now - began, 0.0)
            session.answered(neighbor, sent, messages, now)
        except RunError as error:
            self._fail(neighbor, error)
            return
        self._call_all(neighbor, others)
        self.look()

    def _fail(self, neighbor: int, error: RunError) -> None:
        if self.is_over:
            return
        again = self.peer.conversation.failed(neighbor, error, self.network.now)

        def call_again() -> None:
            self._calling.discard(neighbor)
            self.look()

        self.network.at(again, call_again)
        self.look()

    # --- calls of others ---

    def receive(self, caller: int, call: bytearray, answered: Callable[[bytearray | RunError], None]) -> None:
        """Take a call; `answered` is to be called with the answer, or with why the call is refused."""
        if not self.is_there:
            self._send(caller, _not_there(self.peer.device.peer), answered)
            return
        session = self.peer.conversation
        known = session.neighbours.get(caller)
        try:
            messages = session.read(caller, memoryview(call))
            make_answer = session.receive(caller, messages, self.network.now)
        except RunError as error:
            if known is not None:
                known.refused = str(error)
            self._send(caller, RefusedError(str(error), code=error.code), answered)
        else:
            session.neighbours[caller].refused = ""
            until = self.network.now + self._holding
            self._held.append(_HeldAnswer(caller, messages, make_answer, answered, until))
            self._look_at(until)
        self.look()

    def _answer_held(self) -> None:
        session = self.peer.conversation
        for held in [*self._held]:
            if self.network.now >= held.until or session.is_answered(held.caller, held.messages):
                self._held.remove(held)
                _, content = session.write(held.caller, held.make_answer())
                self._send(held.caller, bytearray().join(content), held.answered)

    def _send(
        self, caller: int, answer: bytearray | RunError, answered: Callable[[bytearray | RunError], None]
    ) -> None:
        took = self.network.latency(self.peer.device.peer, caller)
        if took is None:
            self._lose(self.peer.device.peer, answered)
        else:
            self.network.at(self.network.now + took, lambda: answered(answer))

    def _lose(self, callee: int, answered: Callable[[bytearray | RunError], None]) -> None:
        """Let the caller learn that its call to a peer, or the answer, was lost."""
        lost = UnreachableError(f"a call to peer {callee}, or its answer, was lost", code="call.lost")
        self.network.at(self.network.now + self.network.lost_after, lambda: answered(lost))


class _HeldAnswer:
    """An answer that would say more if it waited a little."""

    def __init__(
        self,
        caller: int,
        messages: Messages,
        make_answer: Callable[[], Messages],
        answered: Callable[[bytearray | RunError], None],
        until: float,
    ) -> None:
        self.caller = caller
        self.messages = messages
        self.make_answer = make_answer
        self.answered = answered
        self.until = until


def _not_there(peer: int) -> UnreachableError:
    return UnreachableError(f"peer {peer} is not there", code="call.unanswered")
