"""The transport of networks: calls over gRPC, with TLS and a certificate on both sides.

Nothing is ever sent in plain text, and each side authenticates the other: the caller demands the identity that the
scenario gives to the address it calls, and the server looks the caller's certificate up among the scenario's, at every
call. What a call carries is for the layer above to check.

gRPC accepts connections itself, and holds no more of them than it is given (`most_connections`). `Admission` watches
them from outside: it reads the process's table of descriptors, and shuts down those connections that have no right to
stay. gRPC sees that the other side hung up. Nothing is added to the path of a message.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv6Address, IPv6Network, ip_address
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
from grpc.experimental import ChannelOptions

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.transport.failures import calling_error, listening_error, shown_certificate
from flower_privdec.network.transport.tls import Credentials, identities_of, time_problem, validity_of
from flower_privdec.network.transport.transport import Answer, Content, UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError

PIECE = 1 << 20
ROOM = 1 << 16  # of a message beside its piece
_log = logging.getLogger(__name__)

SPARE_THREADS, MOST_THREADS = 4, 1024  # of the server, created as calls come
METHOD = "/flower_privdec.Peer/Call"
CODE = "privdec-code"  # the metadata that carries the code of a refusal
CALLS_EACH = 4  # of one caller at a time; an honest peer has one, and one that it gave up
STREAMS_EACH = 8  # of one connection; the others wait at the caller
CALL_SECONDS = 120.0  # until all of a call must have come
HANDSHAKE_SECONDS = 5.0  # until a connection has made a member's call
CONNECTIONS_EACH = 8  # of one member; an honest one has one, one that it lost, and those of `privdec status`
PENDING_EACH = 32  # of one address that have made no member's call yet
MOST_CONNECTIONS = 512
LEAST_CONNECTIONS = 16
MOST_DESCRIPTORS = 4096  # to which a lower soft limit is raised where the hard limit allows it
RESERVED = 96  # descriptors for ledger, checkpoints, data and one's own calls
LOOK_SECONDS = 0.1
REPORT_SECONDS = 60.0  # between two lines on strangers
DESCRIPTORS = "/dev/fd"
UTC_NOW = partial(datetime.now, UTC)
REFUSALS = 100  # different ones that are logged
CONNECTION_SECONDS = 600  # after which a connection, with its handshake, is made again
ALIVE = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", PIECE + ROOM),
    ("grpc.max_send_message_length", PIECE + ROOM),
]
SERVING = [
    *ALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1_000),
    ("grpc.max_connection_age_grace_ms", 60_000),
    ("grpc.max_concurrent_streams", STREAMS_EACH),
    ("grpc.server_handshake_timeout_ms", int(1_000 * HANDSHAKE_SECONDS)),
]
CALLING = [
    *ALIVE,
    # A call is made again by who made it. The library's own retries lose a call whose connection is taken back as it is
    # made, so that it ends not even at its deadline; and a server that hangs up again and again ends the process.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # that an attempt may take: 20 s otherwise, long after a black hole ended
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),  # 30 s otherwise, in which a name's old address is called
    (ChannelOptions.SingleThreadedUnaryStream, 1),  # a call takes no thread that waits for its answer
]


def pieces(content: Content) -> Iterator[bytes]:
    """Yield what is sent, a MiB at a time; a piece at least."""
    piece = list[memoryview]()
    room = PIECE
    is_empty = True
    for buffer in content:
        left = memoryview(buffer).cast("B")
        while left:
            piece.append(left[:room])
            left = left[room:]
            room = room - len(piece[-1])
            is_empty = False
            if not room:
                yield b"".join(piece)
                piece = []
                room = PIECE
    if piece or is_empty:
        yield b"".join(piece)


def assembled(parts: Iterable[bytes], cap: int, who: str) -> memoryview:
    """Put pieces together.

    Args:
        parts: as they come.
        cap: bytes at most.
        who: sends them, for errors.

    Raises:
        RefusedError: there are more; what came is forgotten.
    """
    buffer = memoryview(bytearray())
    size = 0
    for part in parts:
        if size + len(part) > cap:
            raise RefusedError(
                f"{who} sent more than {cap:,} bytes, which no message of this run has", code="call.too-long"
            )
        if size + len(part) > len(buffer):  # room for one piece, or for all that may come: pages are taken as they fill
            room = np.empty(cap if size else len(part), np.uint8).data
            room[:size] = buffer[:size]
            buffer = room
        buffer[size : size + len(part)] = part
        size += len(part)
    return buffer[:size]


class GrpcServer:
    """Answers the calls of the scenario's peers alone.

    Args:
        address: HOST:PORT to listen on; port 0 takes a free one.
        credentials: its own.
        members: the number of every peer by its identity.
        answer: called in a thread of its own with the caller's number; the caller gets its `RefusedError`.
        cap: bytes of a call at most.
        clock: returns the time, by which certificates expire.
        patience: seconds until all of a call must have arrived; a slower stream is cancelled.
        connections: that it holds at most; by default as many as leave descriptors for files.
        handshake: seconds until a connection must have made a member's call.

    Raises:
        RunError: the address cannot be had.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        members: Mapping[str, int],
        answer: Answer,
        cap: int,
        clock: Callable[[], datetime] = UTC_NOW,
        patience: float = CALL_SECONDS,
        connections: int | None = None,
        handshake: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._members = members
        self._answer = answer
        self._cap = cap
        self._clock = clock
        self._guard, self._refusals = Lock(), set[str]()
        most = most_connections(len(members)) if connections is None else connections
        options = [*SERVING, ("grpc.max_allowed_incoming_connections", most)]
        # a thread for each call that may be under way: what one member takes of them is lost to no other
        pool = ThreadPoolExecutor(min(MOST_THREADS, CALLS_EACH * len(members) + SPARE_THREADS), "peer-call")
        self._server = grpc.server(pool, options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._call)
        service, _, method = METHOD.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        pair = ((credentials.key, credentials.certificate),)
        shown = grpc.ssl_server_credentials(pair, credentials.authority, require_client_auth=True)
        try:
            self.port = int(self._server.add_secure_port(address, shown))
        except RuntimeError as error:
            raise listening_error(address) from error
        self._admission = Admission(self.port, most, handshake, patience)
        self._server.start()

    def _call(self, parts: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            caller = self._caller(context)
            with self._admission.call(context.peer(), caller, context.cancel) as call:
                content = assembled(call.counted(parts), self._cap, f"peer {caller}")
                reply = self._answer(caller, content)
        except RefusedError as error:
            reason = " ".join(str(error).split())
            self._note(reason)
            context.set_trailing_metadata(((CODE, error.code),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        yield from pieces(reply)

    def _note(self, refusal: str) -> None:
        """Log a refusal once, and REFUSALS of them at most: a stranger decides how often it calls."""
        with self._guard:
            new = refusal not in self._refusals and len(self._refusals) < REFUSALS
            self._refusals |= {refusal} if new else set()
        if new:
            _log.warning("a call was refused: %s", refusal)

    def _caller(self, context: Any) -> int:
        """Return the caller, by the certificate of the connection, which must name one peer and be valid now."""
        (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
        names = identities_of(certificate)
        peers = [self._members[name] for name in names if name in self._members]
        if len(peers) != 1:
            raise RefusedError(
                f"the certificate is for {', '.join(names) or 'no DNS name'}, which is no peer of this scenario",
                code="call.stranger",
            )
        (begin, end, problem), now = validity_of(certificate), self._clock()
        if problem is not None or not begin <= now <= end:  # a connection outlives what was shown when it was made
            problem = time_problem(certificate, now) or problem
            assert problem is not None
            raise RefusedError(f"peer {peers[0]}: {problem}", code=problem.code)
        return peers[0]

    def close(self, grace: float = 0.2) -> None:
        """Accept no more calls; cancel those under way after `grace` seconds."""
        self._server.stop(grace).wait()
        self._admission.close()


class GrpcConnection:
    """A connection to one peer, made when it is first used and made again when it was lost.

    Args:
        address: HOST:PORT.
        identity: that the other side's certificate has to be for.
        credentials: one's own.
        cap: bytes of a reply at most.

    Attributes:
        sending: seconds that it took to hand over the last message of several pieces.
    """

    def __init__(self, address: str, identity: str, credentials: Credentials, cap: int) -> None:
        self.address = address
        self.identity = identity
        self._credentials = credentials
        self._cap = cap
        self.sending = 0.0
        shown = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
        options = [*CALLING, ("grpc.ssl_target_name_override", identity), ("grpc.default_authority", identity)]
        self._channel = grpc.secure_channel(address, shown, options=options)
        self._short, self._long = self._channel.unary_stream(METHOD), self._channel.stream_stream(METHOD)

    def call(self, content: Content, seconds: float) -> memoryview:
        """Return the peer's answer.

        Args:
            content: what to send.
            seconds: to wait at most.

        Raises:
            RefusedError: the peer refused the call.
            UnreachableError: it did not answer, or not in time.
        """
        try:
            if sum(map(len, content)) <= PIECE:  # takes no thread that sends it
                answer = self._short(b"".join(content), timeout=seconds)
            else:
                answer = self._long(self._timed(pieces(content)), timeout=seconds)
            return assembled(answer, self._cap, self.identity)
        except ValueError as error:  # gRPC's for a closed channel
            raise UnreachableError(
                f"{self.identity} at {self.address}: the connection was closed here", code="call.closed"
            ) from error
        except grpc.RpcError as error:
            code = error.code()
            reason = " ".join((error.details() or "").split())
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                named = dict(error.trailing_metadata() or ()).get(CODE, "")
                raise RefusedError(reason, code=str(named)) from error
            raise UnreachableError(
                f"{self.identity} at {self.address}: {code.name.lower().replace('_', ' ')}", code="call.unanswered"
            ) from error

    def _timed(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        began = time.monotonic()
        yield from parts
        self.sending = time.monotonic() - began

    def diagnosis(self, seconds: float = 1.0) -> str:
        """Return why a connection cannot be made, by trying a TLS handshake, whose errors are exact."""
        error = calling_error(self.address, self.identity, self._credentials, seconds)
        return f"{self.identity} at {self.address} can be reached" if error is None else str(error)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


Address = tuple[str, int]  # of the other side of a connection


def most_connections(members: int) -> int:
    """Return how many connections a server may hold, so that files can still be opened.

    A soft limit on descriptors is raised as far as the hard limit allows.

    Args:
        members: of the network.

    Raises:
        RunError: too few are left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    used = len(os.listdir(DESCRIPTORS))
    least = max(LEAST_CONNECTIONS, 2 * members)
    free = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - used - RESERVED
    if free < least:
        raise RunError(
            f"a limit of {soft} open files (ulimit -n) leaves {max(0, free)} for connections, beside {used} that are "
            f"open and {RESERVED} for files, and {least} are needed: raise it to {used + RESERVED + least} or more",
            code="network.few-descriptors",
        )
    return min(MOST_CONNECTIONS, free)


@dataclass(eq=False)
class _Call:
    """A call of a member, when it began, how to end it, and how many bytes of it have come."""

    member: int
    began: float
    end: Callable[[], object]
    size: int = 0
    has_arrived: bool = False

    def counted(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the pieces of the call as they come."""
        for part in parts:
            self.size += len(part)
            yield part
        self.has_arrived = True


class Admission:
    """Limits the calls of a server's members, and shuts down connections to its port that have no right to stay.

    A member has CALLS_EACH calls under way. One that has not come whole after `patience` is cancelled. Where the member
    makes one more, the one that comes most slowly is: streams that trickle keep no call out that comes at once.

    A connection is *pending* until a member's call has come over it. One is shut down that is pending for `seconds`, or
    is one too many: the oldest pending ones of an address (of a network of 64 bits, where it has IPv6) beyond
    PENDING_EACH, the oldest pending ones of all beyond half of what the server may hold, and the oldest ones of a
    member beyond CONNECTIONS_EACH. So a newcomer has the time of a handshake, whatever others do.

    Args:
        port: that is listened on.
        most: connections that the server holds at most.
        seconds, patience: see above.
    """

    def __init__(
        self, port: int, most: int, seconds: float = HANDSHAKE_SECONDS, patience: float = CALL_SECONDS
    ) -> None:
        """Start the watching thread."""
        self._port = port
        self._most = most
        self._seconds = seconds
        self._patience = patience
        self._guard, self._closed, self._calls = Lock(), Event(), set[_Call]()
        self._members: dict[Address, int] = {}
        self._since: dict[Address, float] = {}  # when each connection was first seen
        self._sockets: dict[tuple[int, int, int], Address | None] = {}  # by descriptor, device and inode
        self._strangers: Counter[str] = Counter()  # connections without a member's call, by host, since the last line
        self._reported = float("-inf")
        Thread(target=self._watch, name="admission", daemon=True).start()

    @contextmanager
    def call(self, address: str, member: int, end: Callable[[], object]) -> Iterator[_Call]:
        """Count a member's call while it is under way.

        Args:
            address: the connection's other side, as gRPC names it: `ipv4:10.0.0.7:50123`.
            end: called once if the call does not arrive in time.

        Raises:
            RefusedError: the member has as many as it may, all of which have come.
        """
        host, _, port = unquote(address).partition(":")[2].rpartition(":")
        call = _Call(member, now := time.monotonic(), end)
        slowest = None
        with self._guard:
            with suppress(ValueError):
                self._members[_plain(host.strip("[]")), int(port)] = member
            under_way = [other for other in self._calls if other.member == member]
            if len(under_way) >= CALLS_EACH:
                coming = (other for other in under_way if not other.has_arrived)
                slowest = min(coming, key=lambda c: (c.size + 1) / max(now - c.began, 1e-9), default=None)
                if slowest is None:
                    raise RefusedError(
                        f"peer {member} has {CALLS_EACH} calls under way, which is the most; end one",
                        code="call.too-many",
                    )
                self._calls.discard(slowest)
            self._calls.add(call)
        if slowest is not None:
            slowest.end()
        try:
            yield call
        finally:
            with self._guard:
                self._calls.discard(call)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with suppress(OSError):  # no descriptor is left to list them with: gRPC's own limits hold
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """End what takes too long, and shut down what must not stay, at a time."""
        with self._guard:
            late = [call for call in self._calls if now >= call.began + self._patience and not call.has_arrived]
            self._calls.difference_update(late)
        for call in late:
            call.end()
        handles = self._handles()
        with self._guard:
            gone = self._since.keys() - handles.keys()
            self._strangers.update(host for host, port in gone if (host, port) not in self._members)
            for address in gone:
                del self._since[address]
                self._members.pop(address, None)
            for address in handles:
                self._since.setdefault(address, now)
            excess = self._excess(now)
        for address in excess:  # but for a descriptor that means another file by now
            with suppress(OSError), socket.socket(fileno=os.dup(handles[address])) as connection:
                if self._address(connection) == address:
                    connection.shutdown(socket.SHUT_RDWR)
        if self._strangers and now - self._reported >= REPORT_SECONDS:
            hosts = ", ".join(f"{host} ({times})" for host, times in self._strangers.most_common(3))
            _log.warning(
                "%d connections were closed that made no call of a peer of this scenario, of %d addresses: %s",
                self._strangers.total(),
                len(self._strangers),
                hosts,
            )
            self._strangers.clear()
            self._reported = now

    def _excess(self, now: float) -> set[Address]:
        """Return which connections to shut down."""
        groups: defaultdict[int | str, list[Address]] = defaultdict(list)
        pending = []
        for address in sorted(self._since, key=self._since.__getitem__):
            member = self._members.get(address)
            host = address[0]
            if member is not None:
                groups[member].append(address)
                continue
            pending.append(address)
            groups[str(IPv6Network((host, 64), strict=False)) if ":" in host else host].append(address)
        excess = {address for address in pending if now - self._since[address] >= self._seconds}
        excess.update(pending[: max(0, len(pending) - self._most // 2)])
        for group, addresses in groups.items():
            most = PENDING_EACH if isinstance(group, str) else CONNECTIONS_EACH
            excess.update(addresses[: max(0, len(addresses) - most)])
        return excess

    def _handles(self) -> dict[Address, int]:
        """Return the descriptor of every connection to the port."""
        sockets = dict[tuple[int, int, int], Address | None]()
        for handle in map(int, os.listdir(DESCRIPTORS)):
            with suppress(OSError, ValueError):  # it was closed meanwhile, or is another kind of socket
                status = os.fstat(handle)
                key = handle, status.st_dev, status.st_ino
                if key in self._sockets:
                    sockets[key] = self._sockets[key]
                elif stat.S_ISSOCK(status.st_mode):
                    with socket.socket(fileno=os.dup(handle)) as connection:
                        sockets[key] = self._address(connection)
        self._sockets = sockets
        return {address: handle for (handle, *_), address in sockets.items() if address is not None}

    def _address(self, connection: socket.socket) -> Address | None:
        """Return the other side of a socket, if it is a connection to the port."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != self._port:
            return None
        host, port = connection.getpeername()[:2]
        return _plain(host), port

    def close(self) -> None:
        """Stop the watching thread."""
        self._closed.set()


def _plain(host: str) -> str:
    """Return an address in one form: without its zone, and IPv4 where it is IPv4 within IPv6."""
    ip = ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return str(mapped or ip)


def identity_at(address: str, credentials: Credentials, seconds: float = 5.0) -> str:
    """Return the identity of the peer at an address, verified by a trusted authority.

    Raises:
        RunError: no peer listens there, or one of another authority.
    """
    try:
        names = identities_of(shown_certificate(address, credentials, seconds))
    except OSError as error:  # a certificate that does not verify is a ValueError too
        raise calling_error(address, None, credentials, seconds) or RunError(
            f"{address}: {one_line(error)}; is a peer running there?", code="call.failed"
        ) from error
    except ValueError as error:
        raise RunError(f"{address}: must be HOST:PORT ({one_line(error)})", code="call.address") from error
    if not names:
        raise RunError(f"{address}: its certificate is for no DNS name, so it is no peer", code="certificate.no-name")
    return names[0]
