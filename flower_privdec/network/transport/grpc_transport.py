"""The transport of networks: calls over gRPC, with TLS and a certificate on both sides.

Nothing is ever sent in plain text, and each side authenticates the other: the caller demands the identity that the
scenario gives to the address it calls, and the server looks the caller's certificate up among the scenario's, at every
call. What a call carries is for the layer above to check.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from threading import Event, Lock, Thread
from typing import Any

import grpc
import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.transport.admission import HANDSHAKE_SECONDS, Admission, most_connections
from flower_privdec.network.transport.failures import address_of, calling_error, listening_error
from flower_privdec.network.transport.tls import Credentials, context_of, identities_of, time_problem, validity_of
from flower_privdec.network.transport.transport import Answer, Content, UnreachableError
from flower_privdec.pushsum.buffers import BufferList
from flower_privdec.pushsum.exactly_once import RefusedError

PIECE = 1 << 20
ROOM = 1 << 16  # of a message beside its piece
_log = logging.getLogger(__name__)

SPARE_THREADS, MOST_THREADS = 4, 1024  # of the server, created as calls come
METHOD = "/flower_privdec.Peer/Call"
CALLS_EACH = 4  # of one caller at a time; an honest peer has one, and one that it gave up
STREAMS_EACH = 8  # of one connection; the others wait at the caller
CALL_SECONDS = 120.0  # until all of a call must have come
LOOKS = 8  # checks of the clock while a limit lasts
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
]


def pieces(content: Content) -> Iterator[bytes]:
    """Yield what is sent, a MiB at a time; a piece at least."""
    yield from (content if isinstance(content, BufferList) else BufferList((content,))).pieces(PIECE)


def assembled(parts: Iterable[bytes], cap: int, who: str) -> memoryview:
    """Put pieces together.

    Args:
        parts: as they come.
        cap: bytes at most.
        who: sends them, for errors.

    Raises:
        RefusedError: there are more; what came is forgotten.
    """
    buffer, size = memoryview(bytearray()), 0
    for part in parts:
        if size + len(part) > cap:
            raise RefusedError(f"{who} sent more than {cap:,} bytes, which no message of this run has")
        if size + len(part) > len(buffer):  # room for one piece, or for all that may come: pages are taken as they fill
            room = np.empty(cap if size else len(part), np.uint8).data
            room[:size] = buffer[:size]
            buffer = room
        buffer[size : size + len(part)] = part
        size += len(part)
    return buffer[:size]


class GrpcTransport:
    """Calls over gRPC and TLS; see Transport.

    Args:
        peer: its own number.
        addresses: HOST:PORT of every peer; port 0 as its own takes a free one.
        identities: the DNS name that each peer's certificate is for.
        credentials: its own.
    """

    def __init__(
        self, peer: int, addresses: Sequence[str], identities: Sequence[str], credentials: Credentials
    ) -> None:
        self._peer, self._addresses, self._identities, self._credentials = peer, addresses, identities, credentials
        self._server: GrpcServer | None = None

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        """See Transport; return the port that it listens on.

        Raises:
            RunError: the address cannot be listened on.
        """
        members = {identity: peer for peer, identity in enumerate(self._identities)}
        self._server = GrpcServer(self._addresses[self._peer], self._credentials, members, answer, cap)
        return self._server.port

    def connect(self, peer: int, cap: int) -> GrpcConnection:
        """See Transport."""
        return GrpcConnection(self._addresses[peer], self._identities[peer], self._credentials, cap)

    def close(self) -> None:
        """See Transport."""
        if self._server is not None:
            self._server.close()


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
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        patience: float = CALL_SECONDS,
        connections: int | None = None,
        handshake: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._members, self._answer, self._cap, self._clock = members, answer, cap, clock
        self._limit, self._guard = TimeLimit(patience), Lock()
        self._under_way: Counter[int] = Counter()
        self._refusals: set[str] = set()
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
            self._limit.close()
            raise listening_error(address) from error
        self._admission = Admission(self.port, most, handshake)
        self._server.start()

    def _call(self, parts: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            caller = self._caller(context)
            self._admission.admit(context.peer(), caller)
            with self._counted(caller):
                reply = self._answer(caller, self._received(parts, caller, context))
        except RefusedError as error:
            reason = " ".join(str(error).split())
            self._note(reason)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        yield from pieces(reply)

    def _received(self, parts: Iterator[bytes], caller: int, context: Any) -> memoryview:
        """Return a call's content, once all of it has arrived."""
        with self._limit.ending(context.cancel):
            return assembled(parts, self._cap, f"peer {caller}")

    @contextmanager
    def _counted(self, caller: int) -> Iterator[None]:
        """Count a call while it is under way.

        Raises:
            RefusedError: the caller has as many as it may.
        """
        with self._guard:
            if self._under_way[caller] >= CALLS_EACH:
                raise RefusedError(f"peer {caller} has {CALLS_EACH} calls under way, which is the most; end one")
            self._under_way[caller] += 1
        try:
            yield
        finally:
            with self._guard:
                self._under_way[caller] -= 1

    def _note(self, refusal: str) -> None:
        """Log a refusal once, and REFUSALS of them at most: a stranger decides how often it calls."""
        with self._guard:
            new = refusal not in self._refusals and len(self._refusals) < REFUSALS
            self._refusals |= {refusal} if new else set()
        if new:
            _log.warning("a call was refused: %s", refusal)

    def _caller(self, context: Any) -> int:
        """Return the caller, by the certificate of the connection.

        Raises:
            RefusedError: the certificate names no peer of the scenario, or is not valid now.
        """
        (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
        names = identities_of(certificate)
        peers = [self._members[name] for name in names if name in self._members]
        if len(peers) != 1:
            raise RefusedError(
                f"the certificate is for {', '.join(names) or 'no DNS name'}, which is no peer of this scenario"
            )
        (begin, end, problem), now = validity_of(certificate), self._clock()
        if problem is not None or not begin <= now <= end:  # a connection outlives what was shown when it was made
            raise RefusedError(f"peer {peers[0]}: {time_problem(certificate, now) or problem}")
        return peers[0]

    def close(self, grace: float = 0.2) -> None:
        """Accept no more calls; cancel those under way after `grace` seconds."""
        self._server.stop(grace).wait()
        self._admission.close()
        self._limit.close()


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
        self.address, self.identity, self._credentials, self._cap = address, identity, credentials, cap
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
            return assembled(self._begin(content, seconds), self._cap, self.identity)
        except ValueError as error:  # gRPC's for a closed channel
            raise UnreachableError(f"{self.identity} at {self.address}: the connection was closed here") from error
        except grpc.RpcError as error:
            code, reason = error.code(), " ".join((error.details() or "").split())
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                raise RefusedError(reason) from error
            raise UnreachableError(
                f"{self.identity} at {self.address}: {code.name.lower().replace('_', ' ')}"
            ) from error

    def _begin(self, content: Content, seconds: float) -> Any:
        """Begin a call; what is one piece takes no thread that sends it."""
        if len(content) <= PIECE:
            return self._short(next(pieces(content)), timeout=seconds)
        return self._long(self._timed(pieces(content)), timeout=seconds)

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


class TimeLimit:
    """Limits how long something may take.

    Args:
        seconds: that it may; it is ended up to an eighth later.
    """

    def __init__(self, seconds: float) -> None:
        """Start the watching thread."""
        self._seconds, self._guard, self._closed = seconds, Lock(), Event()
        self._numbers = count()
        self._under_way: dict[int, tuple[float, Callable[[], object]]] = {}
        Thread(target=self._watch, name="time-limit", daemon=True).start()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` once if the block takes too long."""
        with self._guard:
            number = next(self._numbers)
            self._under_way[number] = time.monotonic() + self._seconds, end
        try:
            yield
        finally:
            with self._guard:
                self._under_way.pop(number, None)

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / LOOKS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """End what takes too long at time `now`."""
        with self._guard:
            late = [number for number, (until, _) in self._under_way.items() if now >= until]
            ends = [self._under_way.pop(number)[1] for number in late]
        for end in ends:
            end()

    def close(self) -> None:
        """Stop the watching thread."""
        self._closed.set()


def identity_at(address: str, credentials: Credentials, seconds: float = 5.0) -> str:
    """Return the identity of the peer at an address, verified by a trusted authority.

    Raises:
        RunError: no peer listens there, or one of another authority.
    """
    context = context_of(credentials)
    context.check_hostname = False
    try:
        with (
            socket.create_connection(address_of(address), timeout=seconds) as plain,
            context.wrap_socket(plain) as secured,
        ):
            shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
    except ValueError as error:
        raise RunError(f"{address}: must be HOST:PORT ({one_line(error)})", code="call.address") from error
    except OSError as error:
        raise calling_error(address, None, credentials, seconds) or RunError(
            f"{address}: {one_line(error)}; is a peer running there?", code="call.failed"
        ) from error
    names = identities_of(shown.encode())
    if not names:
        raise RunError(f"{address}: its certificate is for no DNS name, so it is no peer")
    return names[0]
