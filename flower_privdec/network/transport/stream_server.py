"""Who is called: a socket that listens, and the streams of those who call.

A connection is *pending* until a member's call has come over it: it has made no handshake, or shows the certificate of
somebody else. One is closed that is pending for `handshake` seconds, or is one too many: the oldest of an address (of
a network of 64 bits, in IPv6) beyond PENDING_EACH, and the oldest of all beyond half of what the server may hold. So a
newcomer has the time of a handshake, whatever others do. A member has STREAMS_EACH; of one more, the one over which
no call has come for longest is closed.

A stream carries one call at a time: while it is answered, nothing more is read. A call that has not come whole, or
whose answer has not been taken, within `patience` ends its stream. What is longer than a call may be is refused before
it is in memory, and so is all that comes from others than members.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address
from selectors import EVENT_READ
from typing import Any

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.logs import event
from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.failures import address_of, listening_error
from flower_privdec.network.transport.streams import (
    Header,
    PeerStream,
    StreamLoop,
    StreamPause,
)
from flower_privdec.network.transport.tls import UTC_NOW, Credentials, identities_of, stream_context
from flower_privdec.network.transport.transport import GREETING, Take
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.membership import MORE_ROUNDS, SHUT_OUT

_log = logging.getLogger(__name__)

CALL_SECONDS = 120.0  # until all of a call must have come, and its answer must have been taken
HANDSHAKE_SECONDS = 5.0  # until a connection has made a member's call
STREAMS_EACH = 8  # of one member; an honest one has one, one that it lost, and those of `privdec status`
PENDING_EACH = 32  # of one address that have made no member's call yet
MOST_CONNECTIONS = 512
LEAST_CONNECTIONS = 16
MOST_DESCRIPTORS = 4096  # to which a lower soft limit is raised if the hard limit allows it
RESERVED = 96  # descriptors for ledger, checkpoints, data and one's own calls
BACKLOG = 128
PAUSE_SECONDS = 0.5  # in which nobody is accepted, if no descriptor is left
ACCEPTED = 16  # connections in a turn, so that members' streams are served between them
REPORT_SECONDS = 60.0  # between the first two lines on strangers; twice as long each time
MOST_REPORT_SECONDS = 86_400.0
MOST_HOSTS = 1000  # whose connections are counted between two lines
REFUSALS = 100  # different ones that are logged
DESCRIPTORS = "/dev/fd"
STRANGER = "call.stranger"  # the code of a refusal of somebody whose certificate is not a peer's


class StreamServer:
    """StreamAnswers the calls of the scenario's peers, and nobody else's.

    Args:
        loop: which calls it.
        address: HOST:PORT to listen on; port 0 takes a free one; None if this peer only dials out.
        credentials: its own.
        directory: the peers, of whom those that it refuses are not answered.
        take: called with the caller's number, its call, and how to answer it.
        cap: bytes of a call at most.
        clock: returns the time, by which certificates expire.
        patience, handshake: seconds, see the module.
        connections: that it holds at most; by default as many as leave descriptors for files.

    Attributes:
        port: that it listens on; 0 if it does not.

    Raises:
        RunError: the address cannot be had.
    """

    def __init__(
        self,
        loop: StreamLoop,
        address: str | None,
        credentials: Credentials,
        directory: Directory,
        take: Take,
        cap: int,
        clock: Callable[[], datetime] = UTC_NOW,
        patience: float = CALL_SECONDS,
        connections: int | None = None,
        handshake: float = HANDSHAKE_SECONDS,
    ) -> None:
        self.loop = loop
        self.take = take
        self.cap = cap
        self.clock = clock
        self.patience = patience
        self._directory = directory
        self._members = directory.numbers()
        self._handshake = handshake
        self._most = most_connections(len(directory.identities)) if connections is None else connections
        self._context = stream_context(credentials, is_called=True)

        # In the order in which they came, which a dictionary keeps.
        self._pending: dict[CalledStream, None] = {}
        self._pending_of: defaultdict[str, dict[CalledStream, None]] = defaultdict(dict)
        self._streams_of: defaultdict[int, set[CalledStream]] = defaultdict(set)
        self._offered: dict[int, CalledStream] = {}  # by member, over which it is called back

        self._refusals = set[str]()
        self._strangers = Counter[str]()  # connections without a member's call, by host, since the last line
        self._report_at = -math.inf
        self._report_pause = REPORT_SECONDS
        self._sockets: list[socket.socket] = []
        self.port = 0
        if address is not None:
            self._sockets = _listening(address)
            self.port = int(self._sockets[0].getsockname()[1])
        self._listening = False
        self._listen()

    # --- connections ---

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED):
            try:
                sock, where = listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # No descriptor is left: who waits longest gives one.
                self._close_oldest(self._pending)
                self._pause()
                return
            self._admit(sock, _plain(where[0]))

    def _pause(self) -> None:
        """Accept nobody for a moment, in which files may be closed."""
        for sock in self._sockets:
            self.loop.watch(sock, 0, EVENT_READ, lambda: None)
        self._listening = False
        StreamPause(self.loop, PAUSE_SECONDS, self._listen)

    def _listen(self) -> None:
        """Accept whoever comes."""
        for sock in self._sockets:
            self.loop.watch(sock, EVENT_READ, 0, partial(self._accept, sock))
        self._listening = True

    def _admit(self, sock: socket.socket, host: str) -> None:
        """Begin a handshake, and close the pending connections that are too many with it."""
        group = _group(host)
        if len(self._pending_of[group]) >= PENDING_EACH:
            self._close_oldest(self._pending_of[group])
        in_all = len(self._pending) + sum(map(len, self._streams_of.values()))
        if len(self._pending) >= self._most // 2 or in_all >= self._most:
            self._close_oldest(self._pending)
        try:
            stream = CalledStream(self, sock, self._context, host, time.monotonic() + self._handshake)
        except OSError:  # it hung up
            sock.close()
            return
        self._pending[stream] = None
        self._pending_of[group][stream] = None

    @staticmethod
    def _close_oldest(pending: Mapping[CalledStream, None]) -> None:
        oldest = next(iter(pending), None)
        if oldest is not None:
            oldest.close("others came")

    def forget(self, stream: CalledStream) -> None:
        """Forget a stream that ended."""
        if stream.member is not None:
            self._streams_of[stream.member].discard(stream)
            if self._offered.get(stream.member) is stream:
                del self._offered[stream.member]
            return
        self._forget_pending(stream)
        # A member that hung up before it called looked only whether this peer is there, or was stopped.
        if stream.certificate and not self._members.keys().isdisjoint(identities_of(stream.certificate)):
            return
        host = stream.host
        if host not in self._strangers and len(self._strangers) >= MOST_HOSTS:
            host = "others"
        self._strangers[host] += 1
        self._report()

    def _forget_pending(self, stream: CalledStream) -> None:
        group = _group(stream.host)
        self._pending.pop(stream, None)
        self._pending_of[group].pop(stream, None)
        if not self._pending_of[group]:
            del self._pending_of[group]

    def _report(self) -> None:
        """Log who came without a member's certificate: at once, and then ever more seldom.

        It is no warning: whoever scans ports or has a peer of another run comes, and is refused as is meant.
        """
        now = time.monotonic()
        if now < self._report_at:
            return
        hosts = ", ".join(f"{host} ({times})" for host, times in self._strangers.most_common(3))
        _log.info(
            "%d connections were closed that made no call of a peer of this scenario, of %d addresses: %s",
            self._strangers.total(),
            len(self._strangers),
            hosts,
            extra=event("strangers", connections=self._strangers.total()),
        )
        self._strangers.clear()
        self._report_at = now + self._report_pause
        self._report_pause = min(2 * self._report_pause, MOST_REPORT_SECONDS)

    # --- what changes meanwhile ---

    def update(self, directory: Directory, credentials: Credentials | None) -> None:
        """Go on with another directory, and show another certificate if one is given.

        Streams of peers that are refused now are closed at once. If the certificate changed, so are those over which no
        call is under way: who calls next sees the new one.
        """
        self._directory = directory
        self._members = directory.numbers()
        if credentials is not None:
            self._context = stream_context(credentials, is_called=True)

        for member, streams in self._streams_of.items():
            for stream in [*streams]:
                refused = directory.problem(member, stream.certificate)
                if refused:
                    stream.close(refused)
                elif credentials is not None and not stream.is_busy:
                    stream.close("this peer's certificate was renewed")

    def listen_at(self, address: str) -> None:
        """Accept callers at another address too.

        Raises:
            RunError: it cannot be had.
        """
        new = _listening(address)
        self._sockets += new
        if self._listening:
            for sock in new:
                self.loop.watch(sock, EVENT_READ, 0, partial(self._accept, sock))

    # --- calls ---

    def caller(self, stream: PeerStream) -> int:
        """Return who calls, by the certificate of a stream, which must name one peer and be valid now.

        Raises:
            RefusedError: it is not a peer's.
        """
        member = stream.member
        if member is None:
            names = identities_of(stream.certificate)
            peers = [self._members[name] for name in names if name in self._members]
            if len(peers) != 1:
                raise RefusedError(
                    f"the certificate is for {', '.join(names) or 'no DNS name'}, which is not a peer of this scenario",
                    code=STRANGER,
                )
            (member,) = peers

        refused = self._directory.problem(member, stream.certificate)
        if refused:
            # One whose certificate was replaced may be about to take up the new one.
            code = SHUT_OUT if member in self._directory.refused else "call.replaced"
            raise RefusedError(f"peer {member}: {refused}", code=code)

        # A stream may outlast its certificate.
        try:
            stream.check_dates(self.clock())
        except ScenarioError as problem:
            raise RefusedError(f"peer {member}: {problem}", code=problem.code) from problem
        return member

    def offered(self, identity: str) -> PeerStream | None:
        """Return the open stream that a peer offered last, if it has one."""
        return self._offered.get(self._members.get(identity, -1))

    def take_offer(self, stream: CalledStream, member: int) -> None:
        """Note that a member takes calls over a stream; the one that it offered before is dead, or ends."""
        before = self._offered.get(member)
        self._offered[member] = stream
        if before is not None and before is not stream:
            before.close("it opened another stream")

    def admit_member(self, stream: CalledStream, member: int) -> None:
        """Count a stream as a member's, whose first call or offer has come over it."""
        self._forget_pending(stream)
        own = self._streams_of[member]
        own.add(stream)
        if len(own) > STREAMS_EACH:
            min(own - {stream}, key=lambda one: one.called_at).close("the caller opened others")

    def note(self, refusal: RefusedError) -> None:
        """Log a refusal once, and REFUSALS of them at most: a stranger decides how often it calls."""
        reason = " ".join(str(refusal).split())
        if reason not in self._refusals and len(self._refusals) < REFUSALS:
            self._refusals.add(reason)
            level = logging.WARNING
            if refusal.code in (STRANGER, MORE_ROUNDS):
                level = logging.INFO  # it is refused as is meant
            _log.log(level, "a call was refused: %s", reason, extra=event("refused", reason=refusal.code))

    def close(self) -> None:
        """Accept nobody any more."""
        for sock in self._sockets:
            if self._listening:
                self.loop.watch(sock, 0, EVENT_READ, lambda: None)
            sock.close()
        self._sockets = []


class CalledStream(PeerStream):
    """The end of a stream of the peer that was dialled.

    Attributes:
        host: of the other side.
    """

    def __init__(self, server: StreamServer, sock: socket.socket, context: Any, host: str, until: float) -> None:
        self.host = host
        self._server = server
        super().__init__(server.loop, sock, context, None, until, server)

    def opened(self) -> None:
        self.send_plain(GREETING)

    def check_offer(self, header: Header) -> None:
        if header.size:
            raise RefusedError("an offer has no content", code="call.offer")

    def offer_came(self) -> None:
        # A stranger's offer is passed over: its call, if one comes, is refused with the reason.
        with suppress(RefusedError):
            member = self._server.caller(self)
            self.called_at = time.monotonic()
            self.member_called(member)
            self.is_greeted = True
            self._server.take_offer(self, member)

    def member_called(self, member: int) -> None:
        if self.member is None:
            super().member_called(member)
            self.opening_until = math.inf
            self._server.admit_member(self, member)

    def ended(self, why: str) -> None:
        self._server.forget(self)
        super().ended(why)


def _listening(address: str) -> list[socket.socket]:
    """Return sockets that listen on an address: several, with one port, if it is a name with several.

    Raises:
        RunError: it cannot be listened on.
    """
    sockets: list[socket.socket] = []
    try:
        host, port = address_of(address)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found:
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:
                    raise
                continue  # a name that also stands for an address of a family that is not here
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and hasattr(socket, "IPV6_V6ONLY"):
                # With [::] those of IPv4 are meant too.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            if port == 0 and len(sockets) > 1:
                where = (where[0], sockets[0].getsockname()[1], *where[2:])
            try:
                sock.bind(where)
            except OSError as error:
                if family != socket.AF_INET6 or error.errno != errno.EADDRNOTAVAIL:
                    raise
                sockets.pop().close()  # a name that also stands for an address of IPv6, which is not here
                continue
            sock.listen(BACKLOG)
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except (OSError, OverflowError, ValueError) as error:
        for sock in sockets:
            sock.close()
        raise listening_error(address) from error
    return sockets


def most_connections(members: int) -> int:
    """Return how many connections a server may hold, so that files can still be opened.

    A soft limit on descriptors is raised as far as the hard limit allows.

    Args:
        members: of the network.

    Raises:
        RunError: too few are left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted

    used = len(os.listdir(DESCRIPTORS))
    least = max(LEAST_CONNECTIONS, 2 * members)
    free = MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY:
        free = soft - used - RESERVED
    if free < least:
        raise RunError(
            f"a limit of {soft} open files (ulimit -n) leaves {max(0, free)} for connections, beside {used} that are "
            f"open and {RESERVED} for files, and {least} are needed: raise it to {used + RESERVED + least} or more",
            code="network.few-descriptors",
        )
    return min(MOST_CONNECTIONS, free)


def _plain(host: str) -> str:
    """Return an address in one form: without its zone, and as IPv4 if it is IPv4 within IPv6."""
    ip = ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return str(mapped or ip)


def _group(host: str) -> str:
    """Return what counts as one address: a network of 64 bits, in IPv6."""
    return str(IPv6Network((host, 64), strict=False)) if ":" in host else host
