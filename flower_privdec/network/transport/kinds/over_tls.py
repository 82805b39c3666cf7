"""The transport that networks use unless a scenario names another: streams over TLS; see `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not imported by a process that only lists what there is
    from flower_privdec.network.transport.directory import Directory
    from flower_privdec.network.transport.stream_server import StreamServer
    from flower_privdec.network.transport.streams import StreamConnection, StreamLoop
    from flower_privdec.network.transport.tls import Credentials
    from flower_privdec.network.transport.transport import Take


class TlsTransport:
    """Calls over streams of TLS, all in the thread that calls `turn`; see EventTransport.

    Args:
        peer: its own number.
        addresses: HOST:PORT at which every peer is reached; None for one that only dials out.
        identities: the DNS name that each peer's certificate is for.
        credentials: its own.
        listen: HOST:PORT that it listens on, of which port 0 takes a free one; left out, its address.
    """

    name = "tls"
    line = "streams over TLS that stay open, with a certificate on both sides"

    def __init__(
        self,
        peer: int,
        addresses: Sequence[str | None],
        identities: Sequence[str],
        credentials: Credentials,
        listen: str | None = None,
    ) -> None:
        from flower_privdec.network.transport.directory import Directory
        from flower_privdec.network.transport.streams import StreamLoop

        self._peer = peer
        self._listen = listen
        self._directory = Directory(tuple(addresses), tuple(identities))
        self._credentials = credentials
        self._connections: dict[int, StreamConnection] = {}
        self._server: StreamServer | None = None
        self._listens_at: str | None = None
        self._loop: StreamLoop = StreamLoop()

        # See EventTransport.
        self.turn = self._loop.turn
        self.wake = self._loop.wake

    def listen(self, take: Take, cap: int, callers: int) -> int:
        """See EventTransport; return the port that it listens on, 0 if it only dials out.

        Raises:
            RunError: the address cannot be listened on.
        """
        from flower_privdec.network.transport.stream_server import StreamServer

        self._listens_at = self._place()
        self._server = StreamServer(self._loop, self._listens_at, self._credentials, self._directory, take, cap)
        return self._server.port

    def connect(self, peer: int, cap: int) -> StreamConnection:
        from flower_privdec.network.transport.streams import StreamConnection

        directory = self._directory
        connection = StreamConnection(
            directory.addresses[peer],
            directory.identities[peer],
            self._credentials,
            cap,
            self._loop,
            answers=self._server,
        )
        connection.problem = partial(directory.problem, peer)
        self._connections[peer] = connection
        self._keep_streams()
        return connection

    def _place(self) -> str | None:
        """Return where this peer listens."""
        return self._listen or self._directory.addresses[self._peer]

    def _keep_streams(self) -> None:
        """Keep streams open if this peer only dials out: it is called over them."""
        if self._server is not None and self._directory.addresses[self._peer] is None:
            for connection in self._connections.values():
                connection.keep_open()

    def update(self, directory: Directory, credentials: Credentials) -> None:
        """Go on with another directory, and show the certificate that is given, see `transport.Transport`.

        Raises:
            RunError: this peer is to be reached elsewhere, and cannot listen there; all else is done.
        """
        shown = credentials if credentials != self._credentials else None
        self._directory = directory
        self._credentials = credentials
        for peer, connection in self._connections.items():
            connection.update(directory.addresses[peer], shown, partial(directory.problem, peer))
        if self._server is None:
            return

        self._server.update(directory, shown)
        self._keep_streams()
        own = self._place()
        if own is not None and own != self._listens_at:
            self._server.listen_at(own)
            self._listens_at = own

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._loop.close()
