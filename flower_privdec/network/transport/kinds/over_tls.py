"""The transport that networks use unless a scenario names another: streams over TLS; see `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not imported by a process that only lists what there is
    from flower_privdec.network.transport.stream_server import StreamServer
    from flower_privdec.network.transport.streams import StreamConnection, StreamLoop
    from flower_privdec.network.transport.tls import Credentials
    from flower_privdec.network.transport.transport import Take


class TlsTransport:
    """Calls over streams of TLS, all in the thread that calls `turn`; see EventTransport.

    Args:
        peer: its own number.
        addresses: HOST:PORT of every peer; port 0 as its own takes a free one.
        identities: the DNS name that each peer's certificate is for.
        credentials: its own.
    """

    name = "tls"
    line = "streams over TLS that stay open, with a certificate on both sides"

    def __init__(
        self, peer: int, addresses: Sequence[str], identities: Sequence[str], credentials: Credentials
    ) -> None:
        from flower_privdec.network.transport.streams import StreamLoop

        self._peer = peer
        self._addresses = addresses
        self._identities = identities
        self._credentials = credentials
        self._server: StreamServer | None = None
        self._loop: StreamLoop = StreamLoop()

        # See EventTransport.
        self.turn = self._loop.turn
        self.wake = self._loop.wake

    def listen(self, take: Take, cap: int, callers: int) -> int:
        """See EventTransport; return the port that it listens on.

        Raises:
            RunError: the address cannot be listened on.
        """
        from flower_privdec.network.transport.stream_server import StreamServer

        members = {identity: peer for peer, identity in enumerate(self._identities)}
        own = self._addresses[self._peer]
        self._server = StreamServer(self._loop, own, self._credentials, members, take, cap)
        return self._server.port

    def connect(self, peer: int, cap: int) -> StreamConnection:
        from flower_privdec.network.transport.streams import StreamConnection

        return StreamConnection(self._addresses[peer], self._identities[peer], self._credentials, cap, self._loop)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._loop.close()
