"""Ask a running peer how it does, over the TLS by which peers know each other."""

from __future__ import annotations

import json
from typing import Any

from flower_privdec.common.formatting import shown
from flower_privdec.errors import RunError
from flower_privdec.network.transport.channel import Link
from flower_privdec.network.transport.connection_manager import ASKING
from flower_privdec.network.transport.identity import Credentials

MOST_SAID = 1 << 20


class Asker:
    """Asks one peer, as often as one likes."""

    def __init__(self, address: str, identity: str, credentials: Credentials) -> None:
        """Connect to nobody yet.

        Args:
            address: HOST:PORT where the peer listens.
            identity: that its certificate has to be for.
            credentials: of who asks.
        """
        self._link = Link(address, identity, credentials, MOST_SAID)

    def ask(self, seconds: float) -> dict[str, Any]:
        """Return what the peer says of itself.

        Args:
            seconds: to wait at most.

        Raises:
            RunError: it does not answer, or with something else.
        """
        said = self._link.call(ASKING, seconds)
        try:
            status = json.loads(bytes(said))
        except (ValueError, RecursionError):
            status = None
        if not isinstance(status, dict):
            raise RunError(f"{self._link.address} answers {shown(bytes(said), 60)}, which is no status")
        return status

    def close(self) -> None:
        """Let go of the connection."""
        self._link.close()
