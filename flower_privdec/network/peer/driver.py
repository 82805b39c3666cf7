"""Runs one peer in real time: its program in the caller's thread, a server for calls that come, a thread a neighbour.

The peer itself has no thread and no clock (`flower_privdec.peer`). One lock guards it: the driver holds it whenever it
calls into the peer, and lets it go while the peer waits and while it performs the peer's work, so that neighbours are
answered during a gradient step and during a write to the disk.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from threading import Condition, RLock, Thread
from typing import Any

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.peer.status import STATUS_REQUEST
from flower_privdec.network.transport.faulty_transport import Faults, FaultyTransport
from flower_privdec.network.transport.named import transport_of
from flower_privdec.network.transport.tls import Credentials
from flower_privdec.network.transport.transport import Connection, Content, Transport
from flower_privdec.peer.driving import Pause, Wait, Work
from flower_privdec.peer.peer import POLL, OnRound, PeerPlace, RunningPeer
from flower_privdec.peer.session import Messages
from flower_privdec.pushsum.exactly_once import RefusedError

JOIN_SECONDS = 2.0  # for a neighbour's thread to end; it is a daemon and holds nothing


@dataclass(frozen=True)
class PeerDevice(PeerPlace):
    """The device that a peer runs on.

    Attributes:
        credentials: by which others know it.
        addresses: HOST:PORT of every peer.
        transport: in place of the one that the scenario names, which is given credentials and addresses.
        loss: chance that a call to another peer, or its answer, is lost on purpose.
    """

    credentials: Credentials | None = None
    addresses: tuple[str, ...] = ()
    transport: Transport | None = None
    loss: float = 0.0


class Driver:
    """A peer's clock, threads and connections.

    Args:
        peer: on a `PeerDevice`.

    Attributes:
        changed: holds the peer's lock; notified when something came.
    """

    def __init__(self, peer: RunningPeer) -> None:
        self.peer = peer
        self._lock = RLock()
        self.changed = Condition(self._lock)
        self._retry = peer.times.retry  # seconds until it is asked again for news that only time brings
        self._patience = peer.times.deadline / 2  # seconds that a call may take
        self._holding = min(self._retry, self._patience) / 2  # seconds that an answer may be held back
        self._wake: dict[int, Condition] = {}  # of the same lock: a neighbour's thread wakes up only for its own news
        self._connections: dict[int, Connection] = {}
        self._threads: list[Thread] = []
        # Built before the peer begins: a transport that cannot be built costs no privacy.
        self._transport = _transport_of(peer)
        self._pause: Pause | None = None
        self._stopping = False

    # --- a peer's life ---

    def open(self, begin: bool = True) -> int:
        """Listen and begin to call; return the port that is listened on.

        Args:
            begin: whether to take part; else the peer only reports and charges, see `charge_witnessed`.
        """
        peer = self.peer
        if begin:
            peer.begin()
        else:
            peer.begin_charging()
        with self.changed:
            self._go_on()  # up to the first wait: what neighbours are greeted with is in the store then

        transport = self._transport
        cap = peer.conversation.cap
        neighbors = list(peer.neighbours)
        port = transport.serve(self._answer, cap, len(neighbors))
        self._connections = {j: transport.connect(j, cap) for j in neighbors}
        self._wake = {j: Condition(self._lock) for j in neighbors}
        peer.diagnose = lambda j: self._connections[j].diagnosis()
        self._threads = [Thread(target=self._call_neighbor, args=(j,), daemon=True) for j in neighbors]
        for thread in self._threads:
            thread.start()
        return port

    def run(self, on_round: OnRound | None = None) -> None:
        """Let the peer take part until the rounds are done and the neighbours have what they need.

        Args:
            on_round: see RunningPeer.

        Raises:
            RunError: the run cannot continue, as the neighbours are.
            StoppedError: the peer was stopped; its state is in the store.
        """
        self.peer.on_round = on_round
        self._to_the_end()

    def charge_witnessed(self) -> int:
        """Charge the lines that the ledger lacks and neighbours have seen, in place of `run`; return how many.

        Raises:
            RunError: no neighbour reports within `times.give_up`.
            StoppedError: the peer was stopped.
        """
        self._to_the_end()
        charged: int = self.peer.result
        return charged

    def _to_the_end(self) -> None:
        with self.changed:
            while True:
                wait = self._go_on()
                if wait is None:
                    return
                self.changed.wait(max(0.0, min(POLL, wait.until - time.monotonic())))

    def _go_on(self) -> Wait | None:
        """Let the peer go on, and perform its work, until it waits; return the wait, or None at its end."""
        while True:
            pause = self.peer.on_tick(time.monotonic())
            is_saving = isinstance(pause, Work) and pause.kind == "save"
            if pause is not self._pause and not is_saving:  # it went on; what it saves leaves after that
                self.notify()
            self._pause = pause
            if not isinstance(pause, Work):
                return pause
            self._lock.release()
            try:
                result = pause.do()
            finally:
                self._lock.acquire()
            pause.result = result
            pause.is_done = True

    def close(self) -> None:
        """Stop calling and listening, and release the peer."""
        with self.changed:
            self._stopping = True
            self.notify()
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        self._transport.close()
        self.peer.close()

    def notify(self) -> None:
        """Wake all threads that a change of the peer concerns; to be called with the lock held."""
        now = time.monotonic()
        self.changed.notify_all()
        for neighbor, wake in self._wake.items():
            if self._stopping or self.peer.conversation.has_news(neighbor, now):
                wake.notify()

    # --- calls of others ---

    def _answer(self, caller: int, content: memoryview) -> Content:
        session = self.peer.conversation
        if content == STATUS_REQUEST:
            with self.changed:
                return [json.dumps(self.peer.status()).encode()]

        try:
            messages = session.read(caller, content)
            with self.changed:
                session.bytes_received += len(content)
                make_answer = session.receive(caller, messages, time.monotonic())
                session.neighbours[caller].refused = ""
                self.notify()
                self.changed.wait_for(lambda: self._stopping or session.is_answered(caller, messages), self._holding)
                answer = make_answer()
            return session.write(caller, answer)[1]
        except RunError as error:
            with self.changed:
                if caller in session.neighbours:
                    session.neighbours[caller].refused = str(error)
            raise RefusedError(str(error), code=error.code) from error

    # --- calls to others ---

    def _call_neighbor(self, neighbor: int) -> None:
        """Make the calls to a neighbour until the end; an unexpected error ends the run, which would wait otherwise."""
        session = self.peer.conversation

        def has_news() -> bool:
            return self._stopping or session.has_news(neighbor, time.monotonic())

        try:
            while True:
                with self.changed:
                    self._wake[neighbor].wait_for(has_news, self._retry)
                    if self._stopping:
                        return
                    now = time.monotonic()
                    calls = session.calls(neighbor, now) if session.has_news(neighbor, now) else []
                for messages in calls:
                    if not self._call(neighbor, messages):
                        break
        except Exception as error:
            with self.changed:
                session.fatal = RunError(
                    f"nothing can be sent to peer {neighbor} any more ({one_line(error)})", code="network.failed"
                )
                session.fatal.__cause__ = error
                self.notify()

    def _call(self, neighbor: int, messages: Messages) -> bool:
        """Call a neighbour; return whether it answered."""
        session = self.peer.conversation
        whole, content = session.write(neighbor, messages)
        connection = self._connections[neighbor]
        began = time.monotonic()
        try:
            answer = session.read(neighbor, connection.call(content, self._patience))
            with self.changed:
                now = time.monotonic()
                session.bytes_sent += sum(map(len, content))
                session.took(neighbor, now - began, connection.sending)
                session.answered(neighbor, whole, answer, now)
                self.notify()
        except RunError as error:
            with self.changed:
                now = time.monotonic()
                again = session.failed(neighbor, error, now)
                self.notify()
                self._wake[neighbor].wait_for(lambda: self._stopping, again - now)
            return False
        return True


def _transport_of(peer: RunningPeer) -> Transport:
    """Return the transport of a peer's device."""
    device: Any = peer.device
    assert isinstance(device, PeerDevice), "a driver needs the device's credentials and addresses"
    transport = device.transport
    if transport is None:
        assert device.credentials is not None
        transport = transport_of(peer.trainer.scenario, device.peer, device.addresses, device.credentials)
    if device.loss:
        transport = FaultyTransport(transport, device.peer, Faults(lose=device.loss))
    return transport
