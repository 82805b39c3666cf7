"""The interface of transports: request and response, as bytes, between authenticated peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Condition
from typing import Protocol

from flower_privdec.common.errors import RunError
from flower_privdec.peer.driving import Content, UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError

__all__ = ["GREETING", "Answer", "Connection", "Content", "MemoryNetwork", "Transport", "UnreachableError"]

NAME = b"privdec"  # begins a greeting of streams between peers; their version follows
STREAMS = 2
GREETING = b"%s%d" % (NAME, STREAMS)

Answer = Callable[[int, memoryview], Content]  # called with the caller's number and what it sent
Reply = Callable[[Content | RefusedError], None]  # called once with the answer to a call
Take = Callable[[int, memoryview, Reply], None]  # called with the caller's number, what it sent, and how to answer
Done = Callable[[memoryview | RunError], None]  # called once with an answer, or why there is none


def greeting_problem(greeting: bytes) -> str:
    """Return what is wrong with the greeting of whoever listens, in words: another version, or no peer."""
    version = greeting.removeprefix(NAME)
    if greeting.startswith(NAME) and version.isdigit():
        return (
            f"it speaks version {int(version)} of the streams between peers, and this peer version {STREAMS}: update "
            "the older of the two"
        )
    return "what listens there is no peer"


class Connection(Protocol):
    """Calls to one peer.

    Attributes:
        sending: seconds that it took to hand the last call to the network, if the transport measures it; else 0.
    """

    sending: float

    def call(self, content: Content, seconds: float) -> memoryview:
        """Return the peer's answer, in memory that may be written to.

        Args:
            content: what to send.
            seconds: to wait at most.

        Raises:
            RefusedError: the peer refused the call; with its message.
            UnreachableError: it did not answer, or not in time. It may have received the call.
        """

    def diagnosis(self) -> str:
        """Return in words why the peer cannot be reached."""

    def close(self) -> None:
        """Release the connection; calls under way end."""


class Transport(Protocol):
    """Carries the calls of one peer, and those of others to it.

    A transport may also have `update(directory, credentials)`, which is called when the list of members changed
    (`Directory`), or the peer's certificate. One without goes on as it began, until its peer is started again.

    A call may be lost before or after it was received, arrive late, or be repeated: `pushsum` tolerates that.
    What a transport has to guarantee is who calls, and that a call or an answer comes whole.
    """

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        """Answer calls from now on.

        Args:
            answer: called in any thread with the caller's number, as authenticated by the transport, and the call, in
                memory that may be written to; a RefusedError is to be raised again in the caller's `call`.
            cap: maximum size of a call in bytes; larger ones are refused before they are in memory.
            callers: how many peers may call at once.

        Returns:
            The port that it listens on; 0 if there is none.
        """

    def connect(self, peer: int, cap: int) -> Connection:
        """Return a connection to a peer, which need not be there yet.

        Args:
            peer: its number.
            cap: maximum size of an answer in bytes.
        """

    def close(self) -> None:
        """Answer no more calls."""


class EventConnection(Protocol):
    """Calls to one peer that nobody waits for.

    Attributes:
        sending: see Connection.
    """

    @property
    def sending(self) -> float: ...

    def post(self, content: Content, seconds: float, done: Done) -> None:
        """Make a call; there is one at a time.

        Args:
            content: what to send; it must not change until the answer is there.
            seconds: to wait at most.
            done: called by the transport's `turn`, or at once, with what `Connection.call` returns or raises.
        """

    def diagnosis(self) -> str:
        """Return in words why the peer cannot be reached, in any thread."""

    def close(self) -> None:
        """Release the connection; a call under way fails."""


class EventTransport(Protocol):
    """A transport for one thread: what comes is told in `turn`. Peers use it; `in_threads` makes one of a Transport."""

    def listen(self, take: Take, cap: int, callers: int) -> int:
        """Answer calls from now on, see `Transport.serve`; `take` is called by `turn`, and answers when it likes."""

    def connect(self, peer: int, cap: int) -> EventConnection:
        """Return a connection to a peer; see `Transport.connect`."""

    def turn(self, seconds: float) -> None:
        """Do what has come, after at most some seconds in which nothing does."""

    def wake(self) -> None:
        """End a wait of `turn`, in any thread."""

    def close(self) -> None:
        """Answer no more calls; answers that were given have a moment to leave."""


class MemoryNetwork:
    """Peers of one process, where a call is a function call."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Answer, int]] = {}
        self.running = Counter[int]()  # calls that a peer answers now
        self.changed = Condition()

    def transport(self, peer: int) -> MemoryTransport:
        """Return the transport of a peer."""
        return MemoryTransport(self, peer)


class MemoryTransport:
    """Calls within a process; see Transport."""

    def __init__(self, network: MemoryNetwork, peer: int) -> None:
        self.network = network
        self.peer = peer

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        self.network.answers[self.peer] = answer, cap
        return 0

    def connect(self, peer: int, cap: int) -> MemoryConnection:
        return MemoryConnection(self, peer, cap)

    def close(self) -> None:
        """See Transport; returns when none is being answered."""
        network = self.network
        with network.changed:
            network.answers.pop(self.peer, None)
            network.changed.wait_for(lambda: not network.running[self.peer])


class MemoryConnection:
    """Calls to a peer of the same process, in the caller's thread; see Connection."""

    def __init__(self, transport: MemoryTransport, peer: int, cap: int) -> None:
        self._transport = transport
        self._peer = peer
        self._cap = cap
        self.sending = 0.0

    def call(self, content: Content, seconds: float) -> memoryview:
        """See Connection; the call runs in the caller's thread, and `seconds` is ignored."""
        caller = self._transport.peer
        network = self._transport.network
        with network.changed:
            answer, cap = network.answers.get(self._peer, (None, 0))
            if answer is None:
                raise UnreachableError(self.diagnosis(), code="call.unanswered")
            network.running[self._peer] += 1
        try:
            return _checked_copy(answer(caller, _checked_copy(content, cap, caller)), self._cap, self._peer)
        finally:
            with network.changed:
                network.running[self._peer] -= 1
                network.changed.notify_all()

    def diagnosis(self) -> str:
        return f"peer {self._peer} is not serving"

    def close(self) -> None:
        """See Connection."""


def _checked_copy(content: Content, cap: int, peer: int) -> memoryview:
    """Return a copy of what a peer sent; raises RefusedError where it is larger than `cap` bytes."""
    whole = bytearray().join(content)
    if len(whole) > cap:
        raise RefusedError(
            f"peer {peer} sent more than {cap:,} bytes, which no message of this run has", code="call.too-long"
        )
    return memoryview(whole)
