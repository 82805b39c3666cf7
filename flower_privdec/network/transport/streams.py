"""Calls between peers over TLS streams that stay open, all of them in one thread.

One stream is enough for two neighbours, whichever of them opened it: each calls the other over it, and each call is
answered before the next one of the same direction. So an edge works if one of its two ends can be dialled. A stream
carries, after a handshake of TLS 1.3 in which both sides show a certificate:

    from who was dialled    8 bytes   GREETING: the other side's certificate was accepted
    from who dialled       16 bytes   an offer: calls may come this way. Who only asks, as `privdec status`, offers none
    from either            16 bytes   a call: kind, number, length; and its content
    from the other         16 bytes   an answer, a refusal or a farewell: kind, number of the call, length; and its
                                      content

A call goes over the stream that is open: the one that this peer opened itself, or else the one that the other offered
last. If there is none, the other is dialled, unless it has no address: it is then a device that only dials out, behind
NAT for one. Such a device keeps a stream open to each neighbour, and opens a lost one again without being asked. If
both sides dial at the same moment there are two streams, and each side calls over its own. An offer replaces the stream
that the same peer offered before, which ends: behind a NAT whose mapping vanished it may look alive for long.

Nothing is ever sent in plain text, and each side authenticates the other: who dials demands the identity that the
scenario gives to the address, and who is dialled looks the certificate up among the scenario's. Both look at its dates
again at every call in either direction, since a stream outlives what was shown when it was opened. What a call carries
is for the layer above to check.

No thread, no lock: whoever owns a `StreamLoop` calls `turn`, in which all that comes is read and all callbacks are
called. `soon` and `wake` are for other threads. Content is encrypted where it lies, and decrypted to where it stays.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Thread
from typing import Any, NamedTuple, Protocol

import numpy as np

from flower_privdec.common.errors import PrivdecError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.transport.failures import address_of, calling_error
from flower_privdec.network.transport.in_threads import call_and_wait
from flower_privdec.network.transport.tls import (
    NEVER,
    UTC_NOW,
    Credentials,
    identities_of,
    stream_context,
    validity_of,
    validity_problem,
)
from flower_privdec.network.transport.transport import (
    GREETING,
    Content,
    Done,
    UnreachableError,
    greeting_problem,
)
from flower_privdec.peer.driving import NO_STREAM
from flower_privdec.pushsum.exactly_once import RefusedError

HEADER = struct.Struct("<B3xIQ")  # kind, number of the call, bytes that follow
CALL = 1
ANSWER = 2
REFUSAL = 3  # its content is the code, a zero byte and the message
FAREWELL = 4  # a refusal after which the stream ends
OFFER = 5  # of who opened the stream: calls may come over it; it has no content and no answer
MOST_NUMBER = 2**32

AT_ONCE = 1 << 18  # bytes that are read, or encrypted, at once
READS = 4  # how often a stream is read before others have their turn
SMALL = 4096  # bytes: shorter parts of a message are joined into one
REFUSAL_BYTES = 1 << 14
LOOK_SECONDS = 0.25  # between two looks at what takes too long
CONNECT_SECONDS = 3.0  # for a connection and its handshake
REOPEN_SECONDS = 1.0  # until a stream that is kept open is opened again, if the last one did not last as long
SILENT_SECONDS = 8  # that a connection may leave what was sent unacknowledged, and that an idle one may be dead
CLOSING_SECONDS = 1.0  # for what was sent last to leave
LOOKING_UP_SECONDS = 30.0  # for an address's name, if no call waits for it
DIALS_OUT = "only dials out, and has no stream open to this peer: is it running, and does it reach this one?"
MEASURED = 1 << 16  # bytes: how long a larger message takes to leave is measured

# Of TCP, by the names that systems give them: a dead connection is noticed within some SILENT_SECONDS.
KEEPALIVE = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS,
}


class Header(NamedTuple):
    """What stands before each content."""

    kind: int
    number: int
    size: int


class Timed(Protocol):
    """What a loop closes if it takes too long.

    Attributes:
        until: the moment at which it is closed unless that is put off.
        is_sending: whether something has not left yet.
    """

    @property
    def until(self) -> float: ...

    @property
    def is_sending(self) -> bool: ...

    def close(self, why: str) -> None:
        """End it, for a reason."""


class StreamPause:
    """A moment, after which a loop goes on with something."""

    is_sending = False

    def __init__(self, loop: StreamLoop, seconds: float, go_on: Callable[[], None]) -> None:
        self.until = time.monotonic() + seconds
        self._loop = loop
        self._go_on = go_on
        loop.add(self)

    def close(self, why: str) -> None:
        """Go on, unless the loop itself ends."""
        if self._loop.discard(self) and not self._loop.is_closing:
            self._go_on()


class StreamLoop:
    """All streams of a process that are one peer's, and what is to be done about them.

    Attributes:
        scratch: where encrypted bytes are read to.
        is_closing: whether nothing new is to begin.
    """

    def __init__(self) -> None:
        self._selector = DefaultSelector()
        self._streams: set[Timed] = set()
        self._soon: deque[Callable[[], None]] = deque()
        self._look_at = 0.0
        self.is_closing = False
        self.scratch = memoryview(bytearray(AT_ONCE))
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, EVENT_READ, self._forget_waking)

    def turn(self, seconds: float) -> None:
        """Do what has come, after at most some seconds in which nothing does."""
        if self._soon:
            seconds = 0.0
        for key, _ in self._selector.select(max(0.0, seconds)):
            key.data()
        for _ in range(len(self._soon)):  # what is added meanwhile is for the next turn
            self._soon.popleft()()

        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for one in [one for one in self._streams if now >= one.until]:
                one.close("it took too long")

    def wake(self) -> None:
        """End a wait of `turn`, in any thread."""
        with suppress(OSError):  # it is full, so the wait ends, or closed
            self._waker.send(b"\0")

    def later(self, callback: Callable[[], None]) -> None:
        """Have something called by the next `turn`, for its own thread."""
        self._soon.append(callback)

    def soon(self, callback: Callable[[], None]) -> None:
        """Have something called by `turn`, from any thread."""
        self._soon.append(callback)
        self.wake()

    def _forget_waking(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def watch(self, sock: socket.socket, events: int, before: int, ready: Callable[[], None]) -> None:
        """Call `ready` if one of some events is there, in place of those that were watched before."""
        if not before:
            self._selector.register(sock, events, ready)
        elif not events:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, events, ready)

    def add(self, one: Timed) -> None:
        """Look at how long something takes."""
        self._streams.add(one)

    def discard(self, one: Timed) -> bool:
        """Forget it; return whether it was known."""
        is_known = one in self._streams
        self._streams.discard(one)
        return is_known

    def close(self) -> None:
        """Close all streams; what was sent has a moment to leave."""
        self.is_closing = True
        until = time.monotonic() + CLOSING_SECONDS
        while any(stream.is_sending for stream in self._streams) and time.monotonic() < until:
            self.turn(0.05)
        for stream in list(self._streams):
            stream.close("it was closed here")
        self._selector.close()
        self._woken.close()
        self._waker.close()


class Stream:
    """One end of a connection: TLS over a socket that never blocks, with messages in both directions.

    Args:
        loop: which calls it.
        sock: connected, or about to be.
        context: of TLS.
        identity: that the other side's certificate has to be for; None for who is dialled.
        until: the moment at which it must be open.

    Attributes:
        opening_until, calling_until, called_until: the moments at which it is closed unless they are put off: until
            it must be open, until one's own call must be answered, and until the other side's must have come whole and
            its answer must have left.
        certificate: the other side's, as PEM, once the handshake is done.
        sent_at: the moment at which the last message had left.
        is_held: whether nothing more is to be read for now.
    """

    def __init__(
        self, loop: StreamLoop, sock: socket.socket, context: ssl.SSLContext, identity: str | None, until: float
    ) -> None:
        self.opening_until = until
        self.calling_until = math.inf
        self.called_until = math.inf
        self.certificate = b""
        self.sent_at = 0.0
        self.is_held = False
        self.is_closed = False
        self._loop = loop
        self._socket = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._is_connecting = identity is not None
        self._is_shaken = False
        self._valid = NEVER  # from when to when the certificate may be used
        self._is_leaving = False  # what still comes is thrown away

        self._plain: deque[memoryview] = deque()  # that is to be encrypted
        self._cipher = memoryview(b"")  # that is to be sent
        self._header = bytearray(HEADER.size)
        self._head: Header | None = None  # of the message that comes
        self._content = memoryview(b"")
        self._rest = memoryview(self._header)  # where the next bytes belong
        self._watched = 0

        sock.setblocking(False)
        self._context = context
        self._identity = identity
        if not self._is_connecting:
            self._begin()
        loop.add(self)
        self._watch(EVENT_WRITE if self._is_connecting else EVENT_READ)

    def _begin(self) -> None:
        """Prepare TLS, once there is a connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._tls = self._context.wrap_bio(
            self._incoming, self._outgoing, server_side=self._identity is None, server_hostname=self._identity
        )

    # --- for those who use it ---

    @property
    def until(self) -> float:
        """Return the moment at which it is closed unless that is put off."""
        return min(self.opening_until, self.calling_until, self.called_until)

    def opened(self) -> None:
        """Be told that the handshake is done."""

    def announced(self, header: Header) -> memoryview | None:
        """Return the memory for a message that comes, as many bytes as its header says; None to throw it away.

        It is not asked while `is_early` says that the message comes too early.

        Raises:
            RefusedError: it is not to come, and the stream is to end.
        """
        raise NotImplementedError

    def is_early(self, header: Header) -> bool:
        """Return whether nothing more may be read before `release`."""
        return False

    def arrived(self, header: Header, content: memoryview) -> None:
        """Be given a message."""
        raise NotImplementedError

    def all_left(self) -> None:
        """Be told that everything has left that was to be sent."""

    def ended(self, why: str) -> None:
        """Be told that the stream is closed, and why."""

    def check_dates(self, now: datetime) -> None:
        """Check that the other side may use its certificate now: a stream outlives what was shown when it was opened.

        Raises:
            ScenarioError: it may not, or no longer.
        """
        begin, end = self._valid
        if not begin <= now <= end:
            problem = validity_problem(self.certificate, now)
            assert problem is not None
            raise problem

    # --- sending ---

    @property
    def is_sending(self) -> bool:
        """Return whether something has not left yet."""
        return bool(self._plain or self._cipher)

    def send(self, kind: int, number: int, content: Content) -> None:
        """Send a message. Its content must not change until it has left."""
        small = [HEADER.pack(kind, number, sum(map(len, content)))]
        for part in content:
            if len(part) < SMALL:
                small.append(bytes(part))
                continue
            self._plain.append(memoryview(b"".join(small)))
            self._plain.append(memoryview(part))
            small = []
        self._plain.append(memoryview(b"".join(small)))
        self._flush()

    def send_last(self, kind: int, number: int, content: Content) -> None:
        """Send a message, and throw away all that comes: else the other side might lose the message with the rest."""
        self._is_leaving = True
        self.opening_until = time.monotonic() + CLOSING_SECONDS
        self.send(kind, number, content)

    def send_plain(self, content: bytes) -> None:
        """Send bytes that are not message."""
        self._plain.append(memoryview(content))
        self._flush()

    def _flush(self) -> None:
        """Encrypt and send, as much as the socket takes."""
        while True:
            if not self._cipher:
                self._encrypt()
                if not self._outgoing.pending:
                    self.sent_at = time.monotonic()
                    self.all_left()
                    self._watch(self._watched & ~EVENT_WRITE)
                    return
                self._cipher = memoryview(self._outgoing.read())

            try:
                done = self._socket.send(self._cipher)
            except BlockingIOError:
                self._watch(self._watched | EVENT_WRITE)
                return
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            self._cipher = self._cipher[done:]

    def _encrypt(self) -> None:
        while self._plain and self._outgoing.pending < AT_ONCE:
            view = self._plain.popleft()
            if not view:
                continue
            done = self._tls.write(view[:AT_ONCE])
            if done < len(view):
                self._plain.appendleft(view[done:])

    # --- receiving ---

    def release(self) -> None:
        """Go on with a message that came too early, if one did."""
        if not self.is_held or self.is_closed:
            return
        self.is_held = False
        self._watch(self._watched | EVENT_READ)
        self._loop.later(self._decrypt)

    def _go_on(self) -> None:
        """Take in what was read already, after others had their turn."""
        if self._incoming.pending or self._tls.pending():
            self._loop.later(self._decrypt)

    def _ready(self) -> None:
        """Go on, as the socket is ready for something."""
        if self.is_closed:
            return
        if self._is_connecting:
            failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                self.close(os.strerror(failed))
                return
            self._is_connecting = False
            self._watch(EVENT_READ)
            try:
                self._begin()
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            self._shake_hands()
            return

        if self._watched & EVENT_WRITE:
            self._flush()

        if not (self.is_closed or self.is_held):
            self._read()

    def _read(self) -> None:
        scratch = self._loop.scratch
        for _ in range(READS):
            try:
                size = self._socket.recv_into(scratch)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            if size == 0:
                self.close("the other side hung up")
                return
            if self._is_leaving:
                continue
            self._incoming.write(scratch[:size])
            if self._is_shaken:
                self._decrypt()
            else:
                self._shake_hands()
            if self.is_closed or self.is_held or size < len(scratch):
                return

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            with suppress(OSError):  # the alert, which says to the other side what is wrong
                self._socket.send(self._outgoing.read())
            self.close(_reason(error))
            return

        self._is_shaken = True
        self.certificate = ssl.DER_cert_to_PEM_cert(self._tls.getpeercert(binary_form=True) or b"").encode()
        self._valid = validity_of(self.certificate)
        self._flush()
        if not self.is_closed:
            self.opened()
        if not self.is_closed:
            self._decrypt()

    def _decrypt(self) -> None:
        """Take in what was read, up to the end of a message."""
        while not (self.is_closed or self.is_held or self._is_leaving):
            if not self._rest:
                # A header that was held back, or the end of a header or content.
                try:
                    has_arrived = self._complete()
                except RefusedError as error:
                    self.close(str(error))
                    return
                if has_arrived:
                    self._go_on()
                    break
                continue
            try:
                # With a buffer it returns how many bytes it has written there.
                size: int = self._tls.read(len(self._rest), self._rest)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError as error:
                self.close(_reason(error))
                return
            if size == 0:
                self.close("the other side hung up")
                return
            self._rest = self._rest[size:]
        if self._outgoing.pending and not self.is_closed:
            self._flush()  # what TLS itself has to say

    def _complete(self) -> bool:
        """Take in a header or a content of which all bytes have come; return whether that makes a whole message."""
        if self._head is None:
            head = Header(*HEADER.unpack(self._header))
            if self.is_early(head):
                self.is_held = True
                self._watch(self._watched & ~EVENT_READ)
                return False
            self._head = head
            content = self.announced(head)
            if content is None:
                return False
            self._content = content
            self._rest = content
            if content:
                return False

        header = self._head
        content = self._content
        self._head = None
        self._content = memoryview(b"")
        self._rest = memoryview(self._header)
        self.arrived(header, content)
        return True

    # --- its end ---

    def _watch(self, events: int) -> None:
        if events != self._watched and not self.is_closed:
            self._loop.watch(self._socket, events, self._watched, self._ready)
            self._watched = events

    def close(self, why: str) -> None:
        """Close it, for a reason."""
        if self.is_closed:
            return
        self._watch(0)
        self.is_closed = True
        self._plain.clear()
        self._cipher = memoryview(b"")
        self._loop.discard(self)
        self._socket.close()
        self.ended(why)


def _reason(error: ssl.SSLError) -> str:
    return str(getattr(error, "verify_message", "") or error.reason or error).lower().replace("_", " ")


def memory_of(size: int) -> memoryview:
    """Return memory whose pages are taken as they are filled."""
    return np.empty(size, np.uint8).data


# --- calls ---


class StreamAnswers(Protocol):
    """Who answers the calls of others at this peer, over any stream; see `stream_server.StreamServer`.

    Attributes:
        cap: bytes of a call at most.
        patience: seconds in which a call must have come whole, and in which its answer must have left.
    """

    cap: int
    patience: float

    def caller(self, stream: PeerStream) -> int:
        """Return who is at the other end of a stream, by its certificate.

        Raises:
            RefusedError: it is no peer, or may not call now.
        """

    def take(self, caller: int, content: memoryview, reply: Callable[[Content | RefusedError], None]) -> None:
        """Be given a call, and how to answer it."""

    def note(self, refusal: RefusedError) -> None:
        """Be told about a refusal."""

    def offered(self, identity: str) -> PeerStream | None:
        """Return the open stream that a peer offered last, if it has one."""


class PeerStream(Stream):
    """One end of a stream between two peers, each of which may call the other over it, one call at a time.

    Attributes:
        connection: whose calls go over it.
        member: the number of the peer at the other end, once it has called, or offered the stream.
        called_at: the moment of its last call or offer.
        is_greeted: whether this side may call.
    """

    def __init__(
        self,
        loop: StreamLoop,
        sock: socket.socket,
        context: ssl.SSLContext,
        identity: str | None,
        until: float,
        answers: StreamAnswers | None,
    ) -> None:
        self.connection: StreamConnection | None = None
        self.member: int | None = None
        self.called_at = 0.0
        self.is_greeted = False
        self._answers = answers
        self._is_answering = False
        super().__init__(loop, sock, context, identity, until)

    def is_early(self, header: Header) -> bool:
        return header.kind == CALL and self._is_answering

    def announced(self, header: Header) -> memoryview | None:
        if header.kind == CALL:
            return self._called(header)
        if header.kind == OFFER:
            self.check_offer(header)
            return memory_of(0)
        if self.connection is None:
            raise RefusedError("it answers what was not asked", code="call.answer")
        self.connection.check_answer(header)
        return memory_of(header.size)

    def arrived(self, header: Header, content: memoryview) -> None:
        if header.kind == OFFER:
            self.offer_came()
        elif header.kind != CALL:
            if self.connection is not None:
                self.connection.answered(header, content)
        else:
            assert self._answers is not None
            assert self.member is not None
            self._is_answering = True
            self.called_until = math.inf
            self._answers.take(self.member, content, partial(self._reply, header.number))

    def ended(self, why: str) -> None:
        if self.connection is not None:
            self.connection.lost(self, why)

    def all_left(self) -> None:
        if not self._is_answering and self._head is None:
            self.called_until = math.inf

    def check_offer(self, header: Header) -> None:
        """Refuse an offer that is not to come.

        Raises:
            RefusedError: with the reason.
        """
        raise RefusedError("it offers a stream that it did not open", code="call.offer")

    def offer_came(self) -> None:
        """Be told that the other side takes calls over this stream."""

    def member_called(self, member: int) -> None:
        """Note who calls, before its call has come whole."""
        self.member = member

    @property
    def is_busy(self) -> bool:
        """Return whether a call is under way in either direction."""
        is_calling = self.calling_until < math.inf
        is_called = self._is_answering or self.called_until < math.inf
        return is_calling or is_called or self.is_sending

    # --- calls of the other side ---

    def _called(self, header: Header) -> memoryview | None:
        """Return the memory for a call; None if it is refused."""
        answers = self._answers
        if answers is None:
            raise RefusedError("it calls, and nobody answers here", code="call.kind")
        try:
            member = answers.caller(self)
            if header.size > answers.cap:
                raise RefusedError(
                    f"peer {member} sent more than {answers.cap:,} bytes, which no message of this run has",
                    code="call.too-long",
                )
        except RefusedError as error:
            self.send_last(FAREWELL, header.number, self._refusal(error))
            return None

        now = time.monotonic()
        self.called_at = now
        self.called_until = now + answers.patience
        self.member_called(member)
        return memory_of(header.size)

    def _reply(self, number: int, answer: Content | RefusedError) -> None:
        """Send the answer, or the refusal, and go on to the next call."""
        if self.is_closed:
            return
        assert self._answers is not None
        self._is_answering = False
        self.called_until = time.monotonic() + self._answers.patience
        if isinstance(answer, RefusedError):
            self.send(REFUSAL, number, self._refusal(answer))
        else:
            self.send(ANSWER, number, answer)
        self.release()

    def _refusal(self, error: RefusedError) -> Content:
        assert self._answers is not None
        self._answers.note(error)
        return [f"{error.code}\0{' '.join(str(error).split())}".encode()[:REFUSAL_BYTES]]


class _Call(NamedTuple):
    """A call under way: what is sent, when it is given up, when it began, and what to do with its answer."""

    content: Content
    until: float
    began: float
    done: Done


class StreamConnection:
    """Calls to one peer, one at a time, over whichever stream is open; see the module.

    Args:
        address: HOST:PORT; None if the peer only dials out.
        identity: that the other side's certificate has to be for.
        credentials: one's own.
        cap: bytes of an answer at most.
        loop: which calls it; None for one of its own, for `call`.
        answers: who answers the other side's calls over the same stream; None if it may not call.

    Attributes:
        sending: seconds that it took to hand over the last large message.
        problem: says why the other side's certificate does not count; "" if it does.
    """

    def __init__(
        self,
        address: str | None,
        identity: str,
        credentials: Credentials,
        cap: int,
        loop: StreamLoop | None = None,
        answers: StreamAnswers | None = None,
    ) -> None:
        self.address = address
        self.identity = identity
        self.cap = cap
        self.sending = 0.0
        self.problem: Callable[[bytes], str] = lambda certificate: ""
        self._is_outdated = False  # whether the stream is of before a change
        self._credentials = credentials
        self._context = stream_context(credentials, is_called=False)
        self._loop = loop or StreamLoop()
        self._owns_loop = loop is None
        self.answers = answers

        self._is_kept = False  # whether a stream is opened at once, and again when it was lost
        self._opened_at = math.inf  # when the last stream was opened; inf if it was opened again since
        self._reopen_pause = 0.0  # seconds, until a stream that is kept open was opened the last time

        self._stream: PeerStream | None = None
        self._is_looking_up = False
        self._call: _Call | None = None
        self._number = 0
        self._failed = 0  # streams that could not be opened; of a name's addresses the next one is tried
        self._untried = 0  # of the addresses that a name has, in this attempt
        self._is_closed = False

    # --- for callers ---

    def post(self, content: Content, seconds: float, done: Done) -> None:
        """Make a call; see EventConnection."""
        if self._call is not None:
            raise RuntimeError("a connection is for one call at a time")
        now = time.monotonic()
        self._call = _Call(content, now + seconds, now, done)
        if self._is_closed:
            self._fail("the connection was closed here", "call.closed")
            return
        if self._stream is None and self.answers is not None:
            self._stream = self.answers.offered(self.identity)
            if self._stream is not None:
                self._stream.connection = self
                self._is_outdated = False
        if self._stream is None:
            self._open()
        elif self._stream.is_greeted:
            self._send()

    def call(self, content: Content, seconds: float) -> memoryview:
        """Make a call and wait for its answer; see Connection. Nobody else may use the loop meanwhile."""
        return call_and_wait(self._loop.turn, self, content, seconds)

    def keep_open(self) -> None:
        """Open a stream without a call, and again whenever it was lost, so that the other side can call over it."""
        if not self._is_kept:
            self._is_kept = True
            self._loop.later(self._open_kept)

    def diagnosis(self, seconds: float = 1.0) -> str:
        """Return why a connection cannot be made, by trying a TLS handshake, whose errors are exact."""
        if self.address is None:
            return f"{self.identity} {DIALS_OUT}"
        error = calling_error(self.address, self.identity, self._credentials, seconds)
        if error is not None:
            return str(error)
        return f"{self.identity} at {self.address} can be reached"

    def close(self) -> None:
        """Make no more calls; a call under way fails. A stream over which the other side calls lasts as its loop."""
        if self._is_closed:
            return
        self._is_closed = True
        why = "the connection was closed here"
        stream = self._stream
        self._stream = None
        if stream is not None and self.answers is None:
            stream.close(why)
        elif stream is not None:
            stream.connection = None
            stream.calling_until = math.inf
        self._fail(why)
        if self._owns_loop:
            self._loop.close()

    def update(self, address: str | None, credentials: Credentials | None, problem: Callable[[bytes], str]) -> None:
        """Call at an address from now on, show a certificate if another one is given, and refuse what is refused.

        A stream that was opened before is closed once the call over it is answered; at once if its other side is
        refused, or at another address.
        """
        self.problem = problem
        is_elsewhere = address != self.address
        self.address = address
        if credentials is not None:
            self._credentials = credentials
            self._context = stream_context(credentials, is_called=False)

        stream = self._stream
        if stream is None:
            return
        refused = problem(stream.certificate) if stream.certificate else ""
        is_dialled = isinstance(stream, _Calling)
        if refused:
            stream.close(refused)
        elif is_elsewhere and is_dialled:
            stream.close("it is at another address now")
        elif credentials is not None and not stream.is_busy:
            stream.close("this peer's certificate was renewed")
        elif credentials is not None:
            self._is_outdated = True

    # --- opening a stream ---

    def _open(self) -> None:
        """Dial the peer, unless that is under way."""
        if self._is_looking_up:
            return
        if self.address is None:
            self._fail(DIALS_OUT, NO_STREAM)
            return
        try:
            host, port = address_of(self.address)
        except ValueError as error:
            self._fail(one_line(error))
            return
        self._untried = 0
        try:
            self._connect_to(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except socket.gaierror:
            # It is a name, and to look it up may take long.
            self._is_looking_up = True
            looking = _LookingUp(self, self._loop, self._opening_until(LOOKING_UP_SECONDS))
            Thread(target=looking.look_up, args=(host, port), daemon=True).start()

    def _opening_until(self, seconds: float) -> float:
        """Return the moment until which an attempt to open a stream may take."""
        if self._call is None:
            return time.monotonic() + seconds
        return min(self._call.until, time.monotonic() + seconds)

    def looked_up(self, found: list[Any], why: str) -> None:
        """Go on with what a name stands for; it is empty if that is unknown, with the reason."""
        self._is_looking_up = False
        if self._is_closed:
            return
        if found:
            self._connect_to(found)
        else:
            self._missed(why)

    def _connect_to(self, found: list[Any]) -> None:
        """Begin to connect to one of the addresses of a name: the one that was reached last, or the next one."""
        if not self._untried:
            self._untried = len(found)
            self._found = found

        family, kind, protocol, _, where = found[self._failed % len(found)]
        self._untried -= 1
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # a family that is not here, as IPv6 on some devices, or no descriptor is left
            self._missed(error.strerror or str(error))
            return

        sock.setblocking(False)
        try:
            with suppress(BlockingIOError):
                sock.connect(where)
        except OSError as error:
            sock.close()
            self._missed(error.strerror or str(error))
            return

        self._is_outdated = False
        self._stream = _Calling(self, self._loop, sock, self._context, self._opening_until(CONNECT_SECONDS))

    def _missed(self, why: str) -> None:
        """Try the next address, as this one was not reached; without one, the call under way fails."""
        self._failed += 1
        has_time = self._call is None or time.monotonic() < self._call.until
        if self._untried and has_time and not (self._is_closed or self._loop.is_closing):
            self._connect_to(self._found)
            return
        self._untried = 0
        self._fail(why)
        self._open_later()

    def _open_later(self) -> None:
        """Open a stream that is kept open again: at once if the last one lasted, else after a pause that grows."""
        if not self._is_kept or self._is_closed or self._loop.is_closing:
            return

        # The other side cannot dial, and takes this device for lost after a few calls.
        if time.monotonic() - self._opened_at >= REOPEN_SECONDS:
            self._opened_at = math.inf
            self._reopen_pause = 0.0
            self._loop.later(self._open_kept)
            return

        # It cannot be opened, or does not last, as if two processes run as this peer.
        self._reopen_pause = min(REOPEN_SECONDS, max(LOOK_SECONDS, 2 * self._reopen_pause))
        StreamPause(self._loop, self._reopen_pause, self._open_kept)

    def _open_kept(self) -> None:
        if self._stream is None and not self._is_closed and not self._loop.is_closing:
            self._open()

    def opened(self) -> None:
        """Offer the stream that this side opened, and send the call that waits for it."""
        stream = self._stream
        assert stream is not None
        self._opened_at = time.monotonic()
        if self.answers is not None:
            stream.send(OFFER, 0, [])
        if self._call is not None and not stream.is_closed:
            self._send()

    def _send(self) -> None:
        stream = self._stream
        call = self._call
        assert stream is not None
        assert call is not None
        try:
            stream.check_dates(UTC_NOW())
        except ScenarioError as problem:
            stream.close(f"its certificate is refused here: {problem}")
            return
        self._number = (self._number + 1) % MOST_NUMBER
        stream.calling_until = call.until
        stream.send(CALL, self._number, call.content)

    # --- what comes ---

    def check_answer(self, header: Header) -> None:
        """Refuse what is not an answer to the call under way, or too long.

        Raises:
            RefusedError: with the reason.
        """
        if self._call is None or header.number != self._number or header.kind not in (ANSWER, REFUSAL, FAREWELL):
            raise RefusedError(f"{self.identity} answers what was not asked", code="call.answer")
        if header.size > (self.cap if header.kind == ANSWER else REFUSAL_BYTES):
            error = RefusedError(
                f"{self.identity} sent more than {self.cap:,} bytes, which no message of this run has",
                code="call.too-long",
            )
            self._finish(error)
            raise error

    def answered(self, header: Header, content: memoryview) -> None:
        """Hand over the answer."""
        call = self._call
        stream = self._stream
        assert call is not None
        assert stream is not None
        stream.calling_until = math.inf
        if sum(map(len, call.content)) > MEASURED:
            self.sending = max(0.0, stream.sent_at - call.began)
        if self._is_outdated or header.kind == FAREWELL:
            self._stream = None
            stream.close("it said farewell")
            self._open_later()
        if header.kind == ANSWER:
            self._finish(content)
            return
        code, _, message = bytes(content).decode(errors="replace").partition("\0")
        self._finish(RefusedError(" ".join(message.split()), code=code))

    def lost(self, stream: Stream, why: str) -> None:
        """Forget a stream that ended; the call under way was not answered."""
        if self._stream is not stream:
            return
        self._stream = None
        if stream.is_greeted:
            self._fail(why)
            self._open_later()
        else:
            self._missed(why)

    def _fail(self, why: str, code: str = "call.unanswered") -> None:
        where = f" at {self.address}:" if self.address else ""
        self._finish(UnreachableError(f"{self.identity}{where} {why}", code=code))

    def _finish(self, answer: memoryview | PrivdecError) -> None:
        call = self._call
        if call is not None:
            self._call = None
            call.done(answer)  # type: ignore[arg-type]


class _LookingUp:
    """A name that is looked up in a thread of its own; see Stream for what it has in common with one."""

    is_sending = False

    def __init__(self, connection: StreamConnection, loop: StreamLoop, until: float) -> None:
        self.until = until
        self._connection = connection
        self._loop = loop
        loop.add(self)

    def look_up(self, host: str, port: int) -> None:
        """Look a name up."""
        found: list[Any] = []
        why = ""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            why = error.strerror or str(error)
        self._loop.soon(lambda: self._end(found, why))

    def close(self, why: str) -> None:
        """Give it up."""
        self._end([], why)

    def _end(self, found: list[Any], why: str) -> None:
        if self._loop.discard(self):
            self._connection.looked_up(found, why)


class _Calling(PeerStream):
    """The end of a stream of the peer that opened it."""

    def __init__(
        self, connection: StreamConnection, loop: StreamLoop, sock: socket.socket, context: ssl.SSLContext, until: float
    ) -> None:
        super().__init__(loop, sock, context, connection.identity, until, connection.answers)
        self.connection = connection
        self._identity_wanted = connection.identity
        self._rest = memoryview(bytearray(len(GREETING)))
        self._greeting = self._rest

    def opened(self) -> None:
        # A name with a star in it would do for TLS; here it must be the very name.
        if self._identity_wanted not in identities_of(self.certificate):
            self.close(f"its certificate is not for {self._identity_wanted}")
            return
        refused = self.connection.problem(self.certificate) if self.connection is not None else ""
        if refused:
            self.close(refused)

    def _complete(self) -> bool:
        if self.is_greeted:
            return super()._complete()
        if self._greeting != GREETING:
            raise RefusedError(greeting_problem(bytes(self._greeting)), code="call.greeting")
        self.is_greeted = True
        self.opening_until = math.inf
        self._rest = memoryview(self._header)
        if self.connection is not None:
            self.connection.opened()
        return False
