"""A server of streams that echoes, in a thread of its own, and connections to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from flower_privdec.network.transport.directory import Directory
from flower_privdec.network.transport.stream_server import StreamServer
from flower_privdec.network.transport.streams import StreamConnection, StreamLoop
from flower_privdec.network.transport.tls import Credentials
from flower_privdec.network.transport.transport import Reply

CAP = 1 << 22


def echo(caller: int, content: memoryview, reply: Reply) -> None:
    """Answer with who called and what it said."""
    reply([b"%d:" % caller, content])


def directory_of(members: Mapping[str, int]) -> Directory:
    """Return the directory of peers that have no addresses."""
    names = sorted(members, key=lambda name: members[name])
    return Directory(("",) * len(names), tuple(names))


@contextmanager
def served(
    credentials: Credentials, members: Mapping[str, int], cap: int = CAP, address: str = "127.0.0.1:0", **more: Any
) -> Iterator[StreamServer]:
    """Serve members, by default with an echo."""
    loop = StreamLoop()
    directory = directory_of(members)
    server = StreamServer(loop, address, credentials, directory, more.pop("take", echo), cap, **more)
    over = Event()

    def serve() -> None:
        while not over.is_set():
            loop.turn(0.05)

    thread = Thread(target=serve)
    thread.start()
    try:
        yield server
    finally:
        over.set()
        loop.wake()
        thread.join()
        server.close()
        loop.close()


@contextmanager
def linked(server: StreamServer, credentials: Credentials, identity: str = "peer-0.tiny") -> Iterator[StreamConnection]:
    """Connect to a server."""
    link = StreamConnection(f"127.0.0.1:{server.port}", identity, credentials, CAP)
    try:
        yield link
    finally:
        link.close()
