"""Who is not let in, and how little a member can take: wrong uses, plain text, streams that trickle, many streams."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import warnings
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
from networked import LONG, wait_until
from paths import TESTS
from ports import own_addresses
from raising import raises
from streaming import linked, served

from flower_privdec.common.errors import RunError
from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.local.peer_processes import PRIVDEC
from flower_privdec.network.transport import stream_server
from flower_privdec.network.transport.stream_server import PENDING_EACH, STREAMS_EACH, StreamServer
from flower_privdec.network.transport.streams import ANSWER, CALL, GREETING, HEADER, StreamConnection
from flower_privdec.network.transport.tls import NO_USAGE, Authority, Credentials, certificate_problem, context_of
from flower_privdec.network.transport.transport import Reply, UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError

NOW = datetime.now(UTC)
MEMBERS = {f"peer-{peer}.tiny": peer for peer in range(4)}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("tiny")


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
    with served(authority.issue("peer-0.tiny"), MEMBERS) as server, linked(server, shown) as link:
        with pytest.raises((RefusedError, UnreachableError)) as refused:
            link.call([b"hello"], 2)
        said = str(refused.value) if isinstance(refused.value, RefusedError) else link.diagnosis(LONG)
        assert cause in said or "refuses this peer's certificate" in said


def test_a_refusal_is_answered_and_named_on_both_sides(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the end of its time, nor of several attempts."""
    refusals, note = list[str](), StreamServer.note
    monkeypatch.setattr(StreamServer, "note", lambda server, said: (refusals.append(str(said)), note(server, said))[1])
    expired = [NOW + timedelta(days=3 * 365)]
    with (
        caplog.at_level(logging.INFO),
        served(authority.issue("peer-0.tiny"), MEMBERS, clock=lambda: expired[0]) as server,
        linked(server, authority.issue("peer-1.tiny")) as late,
        linked(server, authority.issue("peer-9.tiny")) as stranger,
    ):
        for link, code, name in ((late, "certificate.expired", "peer 1"), (stranger, "call.stranger", "peer-9.tiny")):
            for _ in range(3):
                with raises(RefusedError, code, names=name):
                    link.call([b"hello"], LONG)
            assert len(refusals) == 3
            refusals.clear()
            (said,) = [record for record in caplog.records if name in record.getMessage()]  # not at every call
            is_alarm = said.levelno >= logging.WARNING
            assert is_alarm == (code != "call.stranger")


PLAIN = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: peer-0.tiny\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    "a call": HEADER.pack(CALL, 1, 5) + b"hello",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("said", PLAIN)
def test_nothing_is_said_in_plain_text(authority: Authority, said: str) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as plain,
    ):
        plain.sendall(PLAIN[said])
        heard = all_of(plain)
    assert heard == b"" or heard[0] == 0x15  # a TLS alert, or nothing


def all_of(connection: socket.socket) -> bytes:
    """Return all that comes until the other side hangs up."""
    heard = b""
    with suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(1 << 16):
            heard += part
    return heard


def test_without_a_certificate_nothing_is_said(authority: Authority) -> None:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as plain,
        context.wrap_socket(plain, server_hostname="peer-0.tiny") as secured,
        suppress(ConnectionError, ssl.SSLError),
    ):
        secured.sendall(HEADER.pack(CALL, 1, 5) + b"hello")
        assert all_of(secured) == b""


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1", "TLSv1_2"])
def test_an_older_tls_is_refused(authority: Authority, version: str) -> None:
    context = context_of(authority.issue("peer-1.tiny"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion[version]
        context.maximum_version = ssl.TLSVersion[version]
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain, server_hostname="peer-0.tiny")


# --- a member that takes what it can get


@contextmanager
def opened(server: StreamServer, credentials: Credentials) -> Iterator[ssl.SSLSocket]:
    """Return a stream by hand, after the greeting."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as plain,
        context_of(credentials).wrap_socket(plain, server_hostname="peer-0.tiny") as secured,
    ):
        assert secured.recv(len(GREETING)) == GREETING
        yield secured


BROKEN = {
    "no kind of message": HEADER.pack(9, 1, 5) + b"hello",
    "an answer": HEADER.pack(2, 1, 5) + b"hello",
    "more than memory has": HEADER.pack(CALL, 1, 2**63),
    "an endless number": b"\xff" * HEADER.size,
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_member_that_speaks_otherwise_is_hung_up_on(authority: Authority, said: str) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        opened(server, authority.issue("peer-1.tiny")) as secured,
        linked(server, authority.issue("peer-2.tiny")) as link,
    ):
        secured.sendall(BROKEN[said])
        all_of(secured)
        assert link.call([b"hello"], LONG) == b"2:hello"


def test_a_call_that_trickles_is_ended(authority: Authority) -> None:
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS, patience=0.5) as server,
        opened(server, authority.issue("peer-1.tiny")) as secured,
        linked(server, authority.issue("peer-2.tiny")) as link,
    ):
        secured.sendall(HEADER.pack(CALL, 1, 1 << 20))
        with suppress(OSError):
            while True:
                secured.sendall(b"x")
                assert link.call([b"hello"], LONG) == b"2:hello"
        assert all_of(secured) == b""


def test_an_answer_that_nobody_takes_is_given_up(authority: Authority) -> None:
    """Peer 1 asks for 64 MiB and reads none of it; the server holds it once, and forgets it."""
    large = bytes(64 << 20)
    with (
        served(
            authority.issue("peer-0.tiny"), MEMBERS, patience=0.5, take=lambda _, __, reply: reply([large])
        ) as server,
        opened(server, authority.issue("peer-1.tiny")) as secured,
    ):
        secured.sendall(HEADER.pack(CALL, 1, 0))
        wait_until(lambda: any(stream.is_sending for stream in list(server._streams_of[1])))
        wait_until(lambda: not server._streams_of[1])


def test_calls_that_come_at_once_are_answered_in_turn(authority: Authority) -> None:
    """A stream full of calls keeps nobody waiting: one of them is answered, then one of others."""
    calls = 5000
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        opened(server, authority.issue("peer-1.tiny")) as secured,
        linked(server, authority.issue("peer-2.tiny")) as link,
    ):
        sending = threading.Thread(target=secured.sendall, args=((HEADER.pack(CALL, 1, 1) + b"?") * calls,))
        sending.start()
        assert link.call([b"hello"], LONG) == b"2:hello"
        heard = 0
        while heard < calls * (HEADER.size + 3):
            heard += len(secured.recv(1 << 16))
        sending.join()


def test_what_comes_before_an_answer_ends_one_wait(authority: Authority) -> None:
    """A stream is watched while its call is answered, until something comes, which is read once the answer has left."""
    replies: list[Reply] = []
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS, take=lambda _, __, reply: replies.append(reply)) as server,
        opened(server, authority.issue("peer-1.tiny")) as secured,
    ):
        secured.sendall(HEADER.pack(CALL, 1, 0))
        wait_until(lambda: len(replies) == 1)
        (stream,) = server._streams_of[1]
        assert stream._watched
        secured.sendall(HEADER.pack(CALL, 2, 0))
        wait_until(lambda: not stream._watched)
        assert len(replies) == 1

        server.loop.soon(lambda: replies[0]([b"first"]))
        wait_until(lambda: len(replies) == 2)
        server.loop.soon(lambda: replies[1]([b"second"]))
        expected = HEADER.pack(ANSWER, 1, 5) + b"first" + HEADER.pack(ANSWER, 2, 6) + b"second"
        heard = b""
        while len(heard) < len(expected):
            heard += secured.recv(len(expected))
        assert heard == expected


def test_a_member_has_few_streams_and_others_get_answers(authority: Authority) -> None:
    """Peer 1 opens 30 streams and begins a call on each; peer 2 is always answered, and so is a new call of peer 1."""
    hostile = authority.issue("peer-1.tiny")
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-2.tiny")) as link,
        linked(server, hostile) as own,
        ExitStack() as stack,
    ):
        assert own.call([b"hello"], LONG) == b"1:hello"
        held = []
        for _ in range(30):
            held.append(stack.enter_context(opened(server, hostile)))
            held[-1].sendall(HEADER.pack(CALL, 1, 1000) + b"x")
            assert link.call([b"hello"], LONG) == b"2:hello"
            assert own.call([b"hello"], LONG) == b"1:hello"
        wait_until(lambda: len(server._streams_of[1]) <= STREAMS_EACH)
        wait_until(lambda: sum(map(is_hung_up, held)) == 30 - (STREAMS_EACH - 1))


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def test_oversize_calls_take_no_memory(authority: Authority) -> None:
    """Calls of a hundred times the cap are refused by their headers."""
    cap = 8 << 20
    hostile = authority.issue("peer-1.tiny")
    with served(authority.issue("peer-0.tiny"), MEMBERS, cap) as server, ExitStack() as stack:
        before = resident()
        for _ in range(2):
            secured = stack.enter_context(opened(server, hostile))
            secured.sendall(HEADER.pack(CALL, 1, 100 * cap))
            with suppress(OSError):
                for _ in range(cap >> 20):
                    secured.sendall(bytes(1 << 20))
            assert b"sent more than" in all_of(secured) or not server._streams_of[1]
        assert resident() - before < cap


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
    with (
        served(own, MEMBERS, connections=60, handshake=2.0) as server,
        linked(server, authority.issue("peer-2.tiny")) as old,
    ):
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


def answers(link: StreamConnection, answer: bytes) -> bool:
    try:
        return link.call([b"hello"], LONG) == answer
    except UnreachableError:
        return False


def test_a_flood_from_one_address_leaves_others_room(authority: Authority) -> None:
    """A stranger that connects all the time has PENDING_EACH connections; who came from elsewhere is left alone."""
    with served(authority.issue("peer-0.tiny"), MEMBERS, handshake=LONG) as server, ExitStack() as stack:
        other = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_until(lambda: len(server._pending) == 1)
        flood = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0)))
            for _ in range(PENDING_EACH + 8)
        ]
        wait_until(lambda: sum(map(is_hung_up, flood)) == 8)
        assert all(map(is_hung_up, flood[:8]))
        assert not is_hung_up(other)
        assert len(server._pending) == PENDING_EACH + 1


def test_a_server_without_descriptors_goes_on_later(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask again and again meanwhile."""
    accepts = [0]

    class Full(socket.socket):
        def accept(self) -> Any:
            accepts[0] += 1
            if accepts[0] == 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    monkeypatch.setattr(stream_server.socket, "socket", Full)
    with (
        served(authority.issue("peer-0.tiny"), MEMBERS) as server,
        linked(server, authority.issue("peer-2.tiny")) as link,
    ):
        assert link.call([b"hello"], LONG) == b"2:hello"
    assert accepts[0] < 10


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
import logging, sys, threading
from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.stream_server import StreamServer
from flower_privdec.network.transport.streams import StreamLoop
from flower_privdec.network.transport.tls import Authority

logging.basicConfig(level=logging.INFO)
own = Authority.create("tiny").issue("peer-0.tiny")
loop = StreamLoop()
server = StreamServer(loop, "127.0.0.1:0", own, Directory(("",), ("peer-0.tiny",)), None, 1 << 20)
print(server.port, flush=True)
over = []
threading.Thread(target=lambda: (sys.stdin.read(), over.append(1))).start()
while not over:
    loop.turn(0.05)
"""


@pytest.mark.slow
def test_strangers_fill_no_log() -> None:
    """One line a minute, however many come."""
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
    monkeypatch.setattr(stream_server.resource, "getrlimit", lambda _: (64, 64))
    with raises(RunError, code="network.few-descriptors"):
        stream_server.most_connections(4)


def test_a_soft_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(stream_server.resource, "getrlimit", lambda _: (64, 100_000))
    monkeypatch.setattr(stream_server.resource, "setrlimit", lambda _, both: limits.append(both))
    assert stream_server.most_connections(4) == stream_server.MOST_CONNECTIONS
    assert limits == [(stream_server.MOST_DESCRIPTORS, 100_000)]
