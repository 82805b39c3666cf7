"""Somebody who is called and hangs up, at any moment: the call comes back at once, and the next one can be made.

It speaks by hand, for no server can be told when to hang up.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socket import create_server, socket
from threading import Thread

import pytest
from networked import LONG
from raising import raises

from flower_privdec.network.transport.streams import ANSWER, CALL, HEADER, StreamConnection
from flower_privdec.network.transport.tls import Authority, Credentials
from flower_privdec.network.transport.transport import GREETING, UnreachableError

SAID = 100  # bytes that a call has at least
CALLS = 6


def message(kind: int, number: int, content: bytes = b"") -> bytes:
    return HEADER.pack(kind, number, len(content)) + content


# What is said before the call is heard, and after; None if nobody listens to it.
MANNERS = {
    "at once": (b"", None),
    "after a greeting": (GREETING, None),
    "within the greeting": (GREETING[:3], None),
    "with another greeting": (b"privdec9", b""),
    "no peer at all": (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""),
    "an answer that nobody asked for": (GREETING + message(ANSWER, 7, b"?"), b""),
    "after the call": (GREETING, b""),
    "within a header": (GREETING, message(ANSWER, 1)[:5]),
    "within an answer": (GREETING, message(ANSWER, 1, b"yes")[:-1]),
    "an answer to another call": (GREETING, message(ANSWER, 77, b"yes")),
    "a call in place of an answer": (GREETING, message(CALL, 1, b"?")),
    "no kind of message": (GREETING, message(99, 1)),
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
        closing(StreamConnection(address, "peer-0.tiny", authority.issue("peer-1.tiny"), 1000)) as link,
    ):
        for _ in range(CALLS):
            with raises(UnreachableError, "call.unanswered", names=r"peer-0\.tiny at 127\.0\.0\.1"):
                link.call([bytes(size)], LONG)
