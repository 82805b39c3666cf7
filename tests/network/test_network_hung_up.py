"""Somebody who is called and hangs up, at any moment: the call comes back at once, and the next one can be made.

It speaks HTTP/2 by hand, for no server can be told when to hang up: one that is stopped while a neighbour connects
takes the connection back as soon as it has it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socket import create_server, socket
from threading import Thread

import pytest

pytest.importorskip("grpc")

from networked import LONG
from raising import raises

from flower_privdec.network.transport.grpc_transport import GrpcConnection, UnreachableError
from flower_privdec.network.transport.tls import Authority, Credentials

DATA, RESET, SETTINGS, GOAWAY = 0, 3, 4, 7  # RFC 9113, section 6
INTERNAL, REFUSED_STREAM = 2, 7
SAID = 200  # bytes that a call has at least, with what comes before it
CALLS = 6


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 without flags."""
    return len(payload).to_bytes(3) + bytes([kind, 0]) + stream.to_bytes(4) + payload


def goaway(last: int, code: int = INTERNAL) -> bytes:
    return frame(GOAWAY, 0, last.to_bytes(4) + code.to_bytes(4) + b"GrpcServer shutdown")


HELD = frame(SETTINGS, 0)
REFUSED = frame(RESET, 1, REFUSED_STREAM.to_bytes(4))
# What is said before the call is heard, and after; None where nobody listens to it.
MANNERS = {
    "at once": (b"", None),
    "after a greeting": (HELD, None),
    "taken back, at once": (HELD + goaway(0), None),
    "taken back, then silent": (HELD + goaway(0), b""),
    "taken back without a greeting": (goaway(0), b""),
    "taken back for no reason": (HELD + goaway(0, 0), b""),
    "after the call": (HELD, b""),
    "taken back after the call": (HELD, goaway(0)),
    "the call is the last one": (HELD, goaway(1)),
    "the call is refused": (HELD, REFUSED),
    "the call is refused and taken back": (HELD, REFUSED + goaway(0)),
    "no HTTP at all": (b"privdec" * 100, b""),
    "data of nobody": (HELD + frame(DATA, 1, b"?"), b""),
}


def hang_up(connection: socket, before: bytes, after: bytes | None) -> None:
    """Say something, hear what may be a call, say something else, and hang up."""
    connection.sendall(before)
    heard = 0
    while after is not None and heard < SAID and (part := connection.recv(1 << 16)):
        heard += len(part)
    connection.sendall(after or b"")


@contextmanager
def rude(credentials: Credentials, folder: Path, before: bytes, after: bytes | None) -> Iterator[str]:
    """Listen, and hang up on everybody; yield the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (folder / "certificate").write_bytes(credentials.certificate)
    (folder / "key").write_bytes(credentials.key)
    context.load_cert_chain(folder / "certificate", folder / "key")
    context.set_alpn_protocols(["h2"])

    def serve() -> None:
        while True:
            try:
                plain, _ = server.accept()
            except OSError:
                return  # the test is over
            Thread(target=talk, args=(plain,), daemon=True).start()

    def talk(plain: socket) -> None:
        with plain, suppress(OSError):
            plain.settimeout(LONG)
            with context.wrap_socket(plain, server_side=True) as connection:
                hang_up(connection, before, after)

    with closing(create_server(("127.0.0.1", 0))) as server:
        Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["one piece", "several"])
@pytest.mark.parametrize("manner", MANNERS)
def test_a_call_returns_however_the_other_side_hangs_up(manner: str, size: int, tmp_path: Path) -> None:
    authority = Authority.create("tiny")
    with (
        rude(authority.issue("peer-0.tiny"), tmp_path, *MANNERS[manner]) as address,
        closing(GrpcConnection(address, "peer-0.tiny", authority.issue("peer-1.tiny"), 1000)) as link,
    ):
        for _ in range(CALLS):
            with raises(UnreachableError, "call.unanswered", names="unavailable|internal|unknown|cancelled"):
                link.call([bytes(size)], LONG)
