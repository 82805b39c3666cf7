"""Another transport whose calls get lost and late: the door for transports, as a user's own would take it."""

from __future__ import annotations

import time
from random import Random

from flower_privdec.network.local.fault_proxy import Faults
from flower_privdec.network.transport.transport import Answer, Connection, Content, Transport, UnreachableError


class FaultyTransport:
    """Another transport whose calls get lost and late, for peers of one process; see Transport.

    Args:
        transport: which carries the calls that arrive.
        seed: of all that is drawn.
        faults: of each call to others: `lose`, of the call or of its answer, `delay` with `jitter`, and `black_hole`.
    """

    def __init__(self, transport: Transport, seed: int = 0, faults: Faults | None = None) -> None:
        self._transport, self._seed, self._first = transport, seed, faults or Faults()
        self._faults: dict[int, Faults] = {}

    def set(self, peer: int, faults: Faults) -> None:
        """Change what happens to the calls to a peer from now on; `Faults()` heals them."""
        self._faults[peer] = faults

    def faults(self, peer: int) -> Faults:
        """Return what happens to the calls to a peer."""
        return self._faults.get(peer, self._first)

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        """See Transport."""
        return self._transport.serve(answer, cap, callers)

    def connect(self, peer: int, cap: int) -> FaultyConnection:
        """See Transport."""
        return FaultyConnection(self._transport.connect(peer, cap), self, peer, Random(f"{self._seed} {peer}"))

    def close(self) -> None:
        """See Transport."""
        self._transport.close()


class FaultyConnection:
    """Calls to one peer that get lost and late; see Connection."""

    def __init__(self, connection: Connection, transport: FaultyTransport, peer: int, draw: Random) -> None:
        self._connection, self._transport, self._peer, self._draw = connection, transport, peer, draw
        self.sending = 0.0

    def call(self, content: Content, seconds: float) -> memoryview:
        """See Connection."""
        self._lose()
        answer = self._connection.call(content, seconds)
        self._lose()
        return answer

    def _lose(self) -> None:
        faults = self._transport.faults(self._peer)
        time.sleep(faults.delay + self._draw.random() * faults.jitter)
        if faults.black_hole or self._draw.random() < faults.lose:
            raise UnreachableError(f"a call to peer {self._peer}, or its answer, was lost", code="call.lost")

    def diagnosis(self) -> str:
        """See Connection."""
        return self._connection.diagnosis()

    def close(self) -> None:
        """See Connection."""
        self._connection.close()
