"""Who is not let in, and how little a member can take: wrong uses, plain text, streams that trickle, many streams."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

pytest.importorskip("grpc")

import grpc
from networked import LONG, wait_until

from flower_privdec.network.transport import grpc_transport
from flower_privdec.network.transport.grpc_transport import (
    CALLING,
    METHOD,
    GrpcConnection,
    GrpcServer,
    RefusedError,
    UnreachableError,
)
from flower_privdec.network.transport.tls import NO_USAGE, Authority, Credentials, certificate_problem

NOW = datetime.now(UTC)
MEMBERS = {f"peer-{peer}.tiny": peer for peer in range(4)}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


@contextmanager
def served(credentials: Credentials, cap: int = 1 << 22, threads: int = 4, **more: Any) -> Iterator[GrpcServer]:
    """Serve an echo that says who called."""
    server = GrpcServer(
        "127.0.0.1:0", credentials, MEMBERS, lambda who, said: b"%d:" % who + said, cap, threads, **more
    )
    try:
        yield server
    finally:
        server.close(0)


@contextmanager
def linked(server: GrpcServer, credentials: Credentials) -> Iterator[GrpcConnection]:
    link = GrpcConnection(f"127.0.0.1:{server.port}", "peer-0.tiny", credentials, 1 << 22)
    try:
        yield link
    finally:
        link.close()


def signed(authority: Authority, usage: dict[str, bool], ca: bool, extended: list[Any]) -> Credentials:
    """Return a certificate of peer 1 with key usages of one's own."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer-1.tiny")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**(NO_USAGE | usage)), critical=True)
        .add_extension(x509.ExtendedKeyUsage(extended), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("peer-1.tiny")]), critical=False)
        .sign(authority.key, hashes.SHA256())  # type: ignore[arg-type]
    )
    form = serialization.PrivateFormat.PKCS8
    return Credentials(
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()),
        authority.pem,
    )


BOTH = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
WRONG_USES: dict[str, tuple[dict[str, bool], bool, list[Any], str]] = {
    "a client's alone": ({"digital_signature": True}, False, BOTH[:1], "not for both clients and servers"),
    "a server's alone": ({"digital_signature": True}, False, BOTH[1:], "not for both clients and servers"),
    "a signer's of code": ({"digital_signature": True}, False, [ExtendedKeyUsageOID.CODE_SIGNING], "not for both"),
    "no signatures": ({"key_encipherment": True}, False, BOTH, "its key may not sign"),
    "an authority's": ({"key_cert_sign": True, "digital_signature": True}, True, BOTH, "it is an authority's"),
}


@pytest.mark.parametrize("case", WRONG_USES)
def test_a_certificate_for_something_else_is_refused_with_the_cause(authority: Authority, case: str) -> None:
    *made, cause = WRONG_USES[case]
    shown = signed(authority, *made)
    assert cause in str(certificate_problem(shown.certificate, authority.pem, "peer-1.tiny"))
    with served(authority.issue("peer-0.tiny")) as server, linked(server, shown) as link:
        with pytest.raises((RefusedError, UnreachableError)) as refused:
            link.call(b"hello", 2)
        said = str(refused.value) if isinstance(refused.value, RefusedError) else link.diagnosis(LONG)
        assert cause in said or "refuses this peer's certificate" in said


def test_a_refusal_is_the_answer_to_a_call_and_named_on_both_sides(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the end of its time, nor of several attempts."""
    refusals, note = list[str](), GrpcServer._note
    monkeypatch.setattr(GrpcServer, "_note", lambda server, said: (refusals.append(said), note(server, said))[1])
    expired = [NOW + timedelta(days=3 * 365)]
    with (
        caplog.at_level(logging.WARNING),
        served(authority.issue("peer-0.tiny"), clock=lambda: expired[0]) as server,
        linked(server, authority.issue("peer-1.tiny")) as late,
        linked(server, authority.issue("peer-9.tiny")) as stranger,
    ):
        for link, cause in ((late, "peer 1: the certificate expired"), (stranger, "peer-9.tiny, which is no peer")):
            for _ in range(3):
                with pytest.raises(RefusedError, match=cause):
                    link.call(b"hello", LONG)
            assert len(refusals) == 3
            refusals.clear()
            assert sum(cause in record.getMessage() for record in caplog.records) == 1  # said once, not at every call


def test_nothing_is_said_in_plain_text(authority: Authority) -> None:
    """Neither to a socket that speaks HTTP/2 without TLS, nor to gRPC's own insecure channel, nor without a key."""
    with served(authority.issue("peer-0.tiny")) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
            plain.settimeout(LONG)
            said = b""
            while part := plain.recv(1000):
                said += part
        assert said == b"" or said[0] == 0x15  # a TLS alert, or nothing
        credentials = [None, grpc.ssl_channel_credentials(authority.pem)]
        for shown in credentials:
            where, options = f"127.0.0.1:{server.port}", [*CALLING, ("grpc.ssl_target_name_override", "peer-0.tiny")]
            made = (
                grpc.insecure_channel(where, options=CALLING)
                if shown is None
                else grpc.secure_channel(where, shown, options=options)
            )
            with made, pytest.raises(grpc.RpcError) as failed:
                b"".join(made.stream_stream(METHOD)(iter([b"hello"]), timeout=2))
            assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


# --- a member that takes what it can get


def stream(server: GrpcServer, credentials: Credentials, parts: Iterator[bytes], stack: ExitStack) -> Any:
    """Begin a call and leave it open."""
    shown = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    options = [*CALLING, ("grpc.ssl_target_name_override", "peer-0.tiny")]
    made = stack.enter_context(grpc.secure_channel(f"127.0.0.1:{server.port}", shown, options=options))
    return made.stream_stream(METHOD)(parts, timeout=LONG)


def trickle(over: threading.Event, pause: float) -> Iterator[bytes]:
    """Yield a byte now and then, without end."""
    while not over.wait(pause):
        yield b"x"


def test_a_stream_that_trickles_is_ended(authority: Authority) -> None:
    with served(authority.issue("peer-0.tiny"), patience=0.5) as server, ExitStack() as stack:
        over = threading.Event()
        stack.callback(over.set)
        call = stream(server, authority.issue("peer-1.tiny"), trickle(over, 0.05), stack)
        with pytest.raises(grpc.RpcError) as ended:
            b"".join(call)
        assert ended.value.code() == grpc.StatusCode.CANCELLED  # there, and not here when its time is over


def test_a_member_has_few_streams_and_the_others_are_answered(authority: Authority) -> None:
    """Peer 1 opens many streams and never ends them; those beyond its share are refused, and peer 2 is answered."""
    with served(authority.issue("peer-0.tiny"), threads=2) as server, ExitStack() as stack:
        over = threading.Event()
        stack.callback(over.set)
        hostile = authority.issue("peer-1.tiny")
        calls = [stream(server, hostile, trickle(over, 0.2), stack) for _ in range(3 * grpc_transport.CALLS_EACH)]
        wait_until(lambda: sum(call.done() for call in calls) == 2 * grpc_transport.CALLS_EACH)
        said = {call.details() for call in calls if call.done()}
        assert said == {f"peer 1 has {grpc_transport.CALLS_EACH} calls under way, which is the most; end one"}
        with linked(server, authority.issue("peer-2.tiny")) as link:
            assert link.call(b"hello", LONG) == b"2:hello"


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def test_oversize_streams_take_no_more_memory_than_a_model_each(authority: Authority) -> None:
    """As many streams as a member may have, each of a hundred times the cap: refused at the cap."""
    cap, piece = 8 << 20, bytes(1 << 20)
    with served(authority.issue("peer-0.tiny"), cap=cap) as server, ExitStack() as stack:
        hostile, most, over = authority.issue("peer-1.tiny"), [0], threading.Event()
        before = resident()

        def watch() -> None:
            while not over.wait(0.005):
                most[0] = max(most[0], resident() - before)

        watching = threading.Thread(target=watch)
        watching.start()
        calls = [stream(server, hostile, (piece for _ in range(800)), stack) for _ in range(grpc_transport.CALLS_EACH)]
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                b"".join(call)
            assert "sent more than" in refused.value.details()
        over.set()
        watching.join()
    assert most[0] < grpc_transport.CALLS_EACH * (cap + (16 << 20)) * 2  # this process is both sides of each stream
