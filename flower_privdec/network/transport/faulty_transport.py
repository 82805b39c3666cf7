"""A transport whose calls get lost and late, so that what peers do about it can be seen."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from random import Random

from flower_privdec.common.errors import ArgumentError
from flower_privdec.network.transport.transport import Answer, Connection, Content, Transport, UnreachableError


@dataclass(frozen=True)
class Faults:
    """What happens to the calls to a peer.

    Attributes:
        lose: chance that a call is lost, and that its answer is.
        delay: seconds that each of the two takes longer.
        jitter: seconds more at most.
        black_hole: whether all are lost.

    Raises:
        ValueError: a number is none of these.
    """

    lose: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0
    black_hole: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.lose <= 1 and 0 <= self.delay < math.inf and 0 <= self.jitter < math.inf):
            raise ArgumentError(
                f"lose={self.lose} must be a chance, from 0 to 1, and delay={self.delay} and jitter={self.jitter} "
                "seconds, >= 0 and finite",
                code="faults.setting",
            )


class FaultyTransport:
    """Another transport whose calls get lost and late; see Transport.

    Args:
        transport: which carries the calls that arrive.
        seed: of all that is drawn.
        faults: of the calls to each peer.

    Attributes:
        lost: how many calls and answers were lost.
    """

    def __init__(self, transport: Transport, seed: int = 0, faults: Faults | None = None) -> None:
        self._transport = transport
        self._seed = seed
        self._first = faults or Faults()
        self.lost = 0
        self._faults: dict[int, Faults] = {}

    def set(self, peer: int, faults: Faults) -> None:
        """Change what happens to the calls to a peer from now on; `Faults()` heals them."""
        self._faults[peer] = faults

    def faults(self, peer: int) -> Faults:
        """Return what happens to the calls to a peer."""
        return self._faults.get(peer, self._first)

    def serve(self, answer: Answer, cap: int, callers: int) -> int:
        return self._transport.serve(answer, cap, callers)

    def connect(self, peer: int, cap: int) -> FaultyConnection:
        return FaultyConnection(self._transport.connect(peer, cap), self, peer, Random(f"{self._seed} {peer}"))

    def close(self) -> None:
        self._transport.close()


class FaultyConnection:
    """Calls to one peer that get lost and late; see Connection."""

    def __init__(self, connection: Connection, transport: FaultyTransport, peer: int, draw: Random) -> None:
        self._connection = connection
        self._transport = transport
        self._peer = peer
        self._draw = draw
        self.sending = 0.0

    def call(self, content: Content, seconds: float) -> memoryview:
        self._pass()
        answer = self._connection.call(content, seconds)
        self.sending = self._connection.sending
        self._pass()
        return answer

    def _pass(self) -> None:
        faults = self._transport.faults(self._peer)
        time.sleep(faults.delay + self._draw.random() * faults.jitter)
        if faults.black_hole or self._draw.random() < faults.lose:
            self._transport.lost += 1
            raise UnreachableError(f"a call to peer {self._peer}, or its answer, was lost", code="call.lost")

    def diagnosis(self) -> str:
        return self._connection.diagnosis()

    def close(self) -> None:
        self._connection.close()
