"""The transport that networks use unless a scenario names another: gRPC over TLS; see `grpc_transport`.

gRPC takes long to import, so it is imported with the first use: a process that only lists parts does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flower_privdec.network.transport.grpc_transport import GrpcConnection, GrpcServer
    from flower_privdec.network.transport.tls import Credentials
    from flower_privdec.network.transport.transport import Answer


class GrpcTransport:
    """Calls over gRPC and TLS; see Transport.

    Args:
        peer: its own number.
        addresses: HOST:PORT of every peer; port 0 as its own takes a free one.
        identities: the DNS name that each peer's certificate is for.
        credentials: its own.
    """

    name = "grpc"
    line = "gRPC over TLS, with a certificate on both sides"

    def __init__(
        self, peer: int, addresses: Sequence[str], identities: Sequence[str], credentials: Credentials
    ) -> None:
        self._peer = peer
        self._addresses = addresses
        self._identities = identities
        self._credentials = credentials
        self._server: GrpcServer | None = None

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        """See Transport; return the port that it listens on.

        Raises:
            RunError: the address cannot be listened on.
        """
        from flower_privdec.network.transport.grpc_transport import GrpcServer

        members = {identity: peer for peer, identity in enumerate(self._identities)}
        self._server = GrpcServer(self._addresses[self._peer], self._credentials, members, answer, cap)
        return self._server.port

    def connect(self, peer: int, cap: int) -> GrpcConnection:
        from flower_privdec.network.transport.grpc_transport import GrpcConnection

        return GrpcConnection(self._addresses[peer], self._identities[peer], self._credentials, cap)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
