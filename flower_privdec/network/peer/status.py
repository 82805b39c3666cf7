"""A running peer's status: requested over the TLS by which peers know each other, and in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flower_privdec.common.formatting import epsilon_text, number, shown
from flower_privdec.errors import RunError
from flower_privdec.network.peer.connections import STATUS_REQUEST
from flower_privdec.network.transport.grpc_transport import GrpcConnection
from flower_privdec.network.transport.tls import Credentials

CAP = 1 << 20  # bytes of a status
Status = Mapping[str, Any]


class StatusClient:
    """Requests the status of one peer, any number of times."""

    def __init__(self, address: str, identity: str, credentials: Credentials) -> None:
        """Open no connection yet.

        Args:
            address: HOST:PORT where the peer listens.
            identity: that its certificate has to be for.
            credentials: of the peer that requests it.
        """
        self._connection = GrpcConnection(address, identity, credentials, CAP)

    def request(self, seconds: float) -> dict[str, Any]:
        """Return the peer's status.

        Args:
            seconds: to wait at most.

        Raises:
            RunError: it does not answer, or with something else.
        """
        answer = bytes(self._connection.call(STATUS_REQUEST, seconds))
        try:
            status = json.loads(answer)
        except (ValueError, RecursionError):
            status = None
        if not isinstance(status, dict):
            raise RunError(f"{self._connection.address} answers {shown(answer, 60)}, which is no status")
        return status

    def close(self) -> None:
        """Release the connection."""
        self._connection.close()


def status_line(status: Status) -> str:
    """Return a status in a line."""
    insecure = "  INSECURE seeds" if is_insecure(status) else ""
    traffic = f"sent {status['bytes_sent']:,} B  received {status['bytes_received']:,} B"
    progress = f"round {status['round']}/{status['rounds']}  loss {number(status['loss'])}  ε {spent_text(status)}"
    return f"peer {status['peer']}  {progress}  {neighbours_text(status)}  {traffic}{insecure}"


def is_insecure(status: Status) -> bool:
    """Return whether the peer's noise follows from the scenario's seed."""
    return str(status["noise"]).startswith("INSECURE")


def spent_text(status: Status) -> str:
    """Return ε spent, and of which budget."""
    budget = "" if status["budget"] is None else f" of {epsilon_text(status['budget'])}"
    return f"{epsilon_text(status['epsilon'])}{budget}"


def neighbours_text(status: Status) -> str:
    """Return how many neighbours are up, and which are down."""
    down = f"  down: {', '.join(status['down'])}" if status["down"] else ""
    return f"{len(status['neighbours']) - len(status['down'])}/{len(status['neighbours'])} neighbours up{down}"
