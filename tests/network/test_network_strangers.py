"""Who is not let in, and how little a member can take: wrong uses, plain text, streams that trickle, many streams."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from command_line import privdec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

pytest.importorskip("grpc")

import grpc
from networked import LONG, wait_until
from paths import TESTS
from ports import own_addresses
from raising import raises

from flower_privdec.common.errors import RunError
from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.local.peer_processes import PRIVDEC
from flower_privdec.network.transport import grpc_transport
from flower_privdec.network.transport.grpc_transport import (
    CALLING,
    METHOD,
    GrpcConnection,
    GrpcServer,
    RefusedError,
    UnreachableError,
)
from flower_privdec.network.transport.tls import NO_USAGE, Authority, Credentials, certificate_problem, context_of

NOW = datetime.now(UTC)
MEMBERS = {f"peer-{peer}.tiny": peer for peer in range(4)}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


@contextmanager
def served(credentials: Credentials, cap: int = 1 << 22, **more: Any) -> Iterator[GrpcServer]:
    """Serve an echo that says who called."""
    server = GrpcServer("127.0.0.1:0", credentials, MEMBERS, lambda who, said: [b"%d:" % who, said], cap, **more)
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
def test_a_foreign_certificate_is_refused_with_its_cause(authority: Authority, case: str) -> None:
    *made, cause = WRONG_USES[case]
    shown = signed(authority, *made)
    assert cause in str(certificate_problem(shown.certificate, authority.pem, "peer-1.tiny"))
    with served(authority.issue("peer-0.tiny")) as server, linked(server, shown) as link:
        with pytest.raises((RefusedError, UnreachableError)) as refused:
            link.call([b"hello"], 2)
        said = str(refused.value) if isinstance(refused.value, RefusedError) else link.diagnosis(LONG)
        assert cause in said or "refuses this peer's certificate" in said


def test_a_refusal_is_answered_and_named_on_both_sides(
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
        for link, code, name in ((late, "certificate.expired", "peer 1"), (stranger, "call.stranger", "peer-9.tiny")):
            for _ in range(3):
                with raises(RefusedError, code, names=name):
                    link.call([b"hello"], LONG)
            assert len(refusals) == 3
            refusals.clear()
            assert sum(name in record.getMessage() for record in caplog.records) == 1  # said once, not at every call


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


def channel(server: GrpcServer, credentials: Credentials) -> Any:
    """Return a connection of one's own."""
    shown = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    options = [*CALLING, ("grpc.ssl_target_name_override", "peer-0.tiny"), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"127.0.0.1:{server.port}", shown, options=options)


def stream(server: GrpcServer, credentials: Credentials, parts: Iterator[bytes], stack: ExitStack) -> Any:
    """Begin a call and leave it open."""
    return stack.enter_context(channel(server, credentials)).stream_stream(METHOD)(parts, timeout=LONG)


def trickle(over: threading.Event, pause: float) -> Iterator[bytes]:
    """Yield a byte now and then, without end."""
    while not over.wait(pause):
        yield b"x"


def ended(call: Any) -> bool:
    """Return whether the server ended a call, and not its time or its connection."""
    return call.done() and call.code() == grpc.StatusCode.CANCELLED


def test_a_stream_that_trickles_is_ended(authority: Authority) -> None:
    with served(authority.issue("peer-0.tiny"), patience=0.5) as server, ExitStack() as stack:
        over = threading.Event()
        stack.callback(over.set)
        call = stream(server, authority.issue("peer-1.tiny"), trickle(over, 0.05), stack)
        with pytest.raises(grpc.RpcError):
            b"".join(call)
        assert ended(call)


def test_a_member_has_few_streams_and_others_get_answers(authority: Authority) -> None:
    """Peer 1 opens 60 streams over 3 connections and never ends them, again and again.

    Peer 2 is always answered, and so is peer 1 where it makes a call that comes at once, as the slowest stream ends.
    """
    with served(authority.issue("peer-0.tiny")) as server, ExitStack() as stack:
        over = threading.Event()
        stack.callback(over.set)
        hostile = authority.issue("peer-1.tiny")
        with linked(server, authority.issue("peer-2.tiny")) as link, linked(server, hostile) as own:
            for _ in range(3):
                with ExitStack() as flood:
                    channels = [flood.enter_context(channel(server, hostile)) for _ in range(3)]
                    calls = [
                        channels[number % 3].stream_stream(METHOD)(trickle(over, 0.2), timeout=LONG)
                        for number in range(60)
                    ]
                    wait_until(lambda: any(ended(call) for call in calls))  # noqa: B023
                    for _ in range(20):
                        assert link.call([b"hello"], LONG) == b"2:hello"
                        assert own.call([b"hello"], LONG) == b"1:hello"
                    assert len(server._admission._calls) <= grpc_transport.CALLS_EACH


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def test_oversize_streams_take_no_more_than_a_model(authority: Authority) -> None:
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


# --- strangers that take connections


def nothing(_: socket.socket) -> None:
    """Send nothing."""


def half_a_greeting(plain: socket.socket) -> None:
    """Begin a TLS handshake, and do not go on."""
    plain.sendall(bytes.fromhex("160301020001000200"))


def handshake_alone(authority: Authority) -> Callable[[socket.socket], object]:
    """Return what finishes a handshake with a member's certificate, and makes no call."""
    context = context_of(authority.issue("peer-1.tiny"))
    return lambda plain: context.wrap_socket(plain, server_hostname="peer-0.tiny")


def is_hung_up(connection: socket.socket) -> bool:
    """Return whether the other side has closed a connection."""
    try:
        connection.setblocking(False)
        while connection.recv(1 << 16):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("attack", ["nothing", "half a greeting", "a handshake alone"])
def test_idle_connections_are_few_and_soon_closed(authority: Authority, attack: str) -> None:
    """150 of them at a server that holds 60; peer 2 is answered over its connection, peer 3 over a new one."""
    attacks = {"nothing": nothing, "half a greeting": half_a_greeting, "a handshake alone": handshake_alone(authority)}
    own = authority.issue("peer-0.tiny")
    with served(own, connections=60, handshake=2.0) as server, linked(server, authority.issue("peer-2.tiny")) as old:
        assert old.call([b"hello"], LONG) == b"2:hello"
        with ExitStack() as stack:
            held: list[socket.socket] = []
            for _ in range(150):
                with suppress(OSError):  # closed at once
                    held.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port))))
                    held[-1] = stack.enter_context(attacks[attack](held[-1]) or held[-1])  # type: ignore[arg-type]
            assert old.call([b"hello"], LONG) == b"2:hello"
            with linked(server, authority.issue("peer-3.tiny")) as new:
                wait_until(lambda: answers(new, b"3:hello"))
                wait_until(lambda: all(map(is_hung_up, held)))
                for link, answer in ((old, b"2:hello"), (new, b"3:hello")):
                    assert link.call([b"hello"], LONG) == answer


def answers(link: GrpcConnection, answer: bytes) -> bool:
    try:
        return link.call([b"hello"], LONG) == answer
    except UnreachableError:
        return False


def test_a_flood_from_one_address_leaves_others_room(authority: Authority) -> None:
    """A stranger that connects all the time has PENDING_EACH connections; which are closed is known to the second."""
    with served(authority.issue("peer-0.tiny")) as server, ExitStack() as stack:
        watch = server._admission
        watch.close()  # looked at by this test alone
        for _ in range(grpc_transport.PENDING_EACH + 8):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0)))
        other = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: len(watch._handles()) == grpc_transport.PENDING_EACH + 9)
        watch.look(0.0)
        wait_until(lambda: len(watch._handles()) == grpc_transport.PENDING_EACH + 1)
        watch.look(grpc_transport.HANDSHAKE_SECONDS - 0.1)
        assert not is_hung_up(other)
        watch.look(grpc_transport.HANDSHAKE_SECONDS)
        wait_until(lambda: not watch._handles())


@pytest.mark.slow
def test_a_flood_at_few_open_files_ends_no_peer(
    tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More silent connections than peer 0 may have files open; peer 1 joins it during the flood, and both finish."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]))
    addresses, scenario = own_addresses(2), tmp_path / "tiny.yaml"
    scenario.write_text(tiny_text)
    settings = ["n_peers=2", "rounds=20", "network.deadline=300"]
    settings += [f"network.peers=[{', '.join(f'{{address: {address!r}}}' for address in addresses)}]"]
    options = [argument for setting in settings for argument in ("--set", setting)]
    assert privdec("certs", scenario, "--out", tmp_path / "certs", *options) == 0

    def started(peer: int) -> Process:
        command = [sys.executable, "-m", "few_files", "256", *PRIVDEC[2:], "peer", scenario, "--id", peer]
        command += ["--out", tmp_path / f"peer-{peer}", "--certs", tmp_path / "certs", *options]
        with (tmp_path / f"{peer}.log").open("wb") as log:
            return start_process("with few files", [*map(str, command)], log)

    host, _, port = addresses[0].partition(":")
    with ExitStack() as stack:
        peers = [started(0)]
        stack.callback(lambda: [os.kill(peer.pid, signal.SIGKILL) for peer in peers if peer.poll() is None])
        over, held = threading.Event(), list[socket.socket]()
        stack.callback(over.set)
        wait_until(lambda: can_connect(host, int(port)))

        def flood() -> None:
            """Hold 300 connections, in place of those that are closed new ones."""
            while not over.wait(0.01):
                for connection in [one for one in held if is_hung_up(one)]:
                    held.remove(connection)
                    connection.close()
                with suppress(OSError):
                    held.extend(
                        socket.create_connection((host, int(port)), timeout=LONG) for _ in range(300 - len(held))
                    )

        attack = threading.Thread(target=flood)
        attack.start()
        wait_until(lambda: len(held) > 100)
        peers.append(started(1))
        statuses = [peer.wait(3 * LONG) for peer in peers]
        over.set()
        attack.join()
        assert statuses == [0, 0], [(tmp_path / f"{peer}.log").read_text() for peer in range(2)]
    assert "connections were closed that made no call" in (tmp_path / "0.log").read_text()


SERVER = """
import logging, sys, time
from flower_privdec.network.transport.grpc_transport import GrpcServer
from flower_privdec.network.transport.tls import Authority

logging.basicConfig(level=logging.INFO)
own = Authority.create("tiny").issue("peer-0.tiny")
server = GrpcServer("127.0.0.1:0", own, {"peer-0.tiny": 0}, lambda peer, content: [content], 1 << 20)
print(server.port, flush=True)
sys.stdin.read()
server._admission.look(time.monotonic())
server.close()
"""


@pytest.mark.slow
def test_strangers_fill_no_log() -> None:
    """Neither by lines of gRPC, which says what it says from its import on, nor by the peer's: one a minute."""
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                wait_until(lambda: is_hung_up(plain))
        with socket.create_connection(("127.0.0.1", port)) as silent:
            wait_until(lambda: is_hung_up(silent))
        _, log = server.communicate(timeout=LONG)
    assert "connections were closed that made no call" in log
    assert len(log.splitlines()) == 1, log


def can_connect(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port)):
        return True
    return False


def test_too_low_a_file_limit_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport.resource, "getrlimit", lambda _: (64, 64))
    with raises(RunError, code="network.few-descriptors"):
        grpc_transport.most_connections(4)


def test_a_soft_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(grpc_transport.resource, "getrlimit", lambda _: (64, 100_000))
    monkeypatch.setattr(grpc_transport.resource, "setrlimit", lambda _, both: limits.append(both))
    assert grpc_transport.most_connections(4) == grpc_transport.MOST_CONNECTIONS
    assert limits == [(grpc_transport.MOST_DESCRIPTORS, 100_000)]
