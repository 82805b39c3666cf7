"""A transport whose calls get lost and late, so that what peers do about it can be seen."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from flower_privdec.common.errors import ArgumentError, RunError
from flower_privdec.network.transport.in_threads import evented
from flower_privdec.network.transport.transport import (
    Content,
    Done,
    EventConnection,
    EventTransport,
    Take,
    Transport,
    UnreachableError,
)


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
    """Another transport whose calls get lost and late; see EventTransport.

    Args:
        transport: which carries the calls that arrive.
        seed: of all that is drawn.
        faults: of the calls to each peer.

    Attributes:
        lost: how many calls and answers were lost.
    """

    def __init__(self, transport: Transport | EventTransport, seed: int = 0, faults: Faults | None = None) -> None:
        self.lost = 0
        self._transport = evented(transport)
        self._seed = seed
        self._first = faults or Faults()
        self._faults: dict[int, Faults] = {}
        self._late: list[tuple[float, int, Callable[[], None]]] = []  # a heap: what happens when
        self._delays = 0

    def set(self, peer: int, faults: Faults) -> None:
        """Change what happens to the calls to a peer from now on; `Faults()` heals them."""
        self._faults[peer] = faults

    def faults(self, peer: int) -> Faults:
        """Return what happens to the calls to a peer."""
        return self._faults.get(peer, self._first)

    def listen(self, take: Take, cap: int, callers: int) -> int:
        return self._transport.listen(take, cap, callers)

    def connect(self, peer: int, cap: int) -> FaultyConnection:
        return FaultyConnection(self._transport.connect(peer, cap), self, peer, Random(f"{self._seed} {peer}"))

    def update(self, directory: Any, credentials: Any) -> None:
        """Let the transport beneath know of a change, if it wants to."""
        if hasattr(self._transport, "update"):
            self._transport.update(directory, credentials)

    def delay(self, seconds: float, callback: Callable[[], None]) -> None:
        """Have something called by `turn`, some seconds later."""
        if seconds <= 0:
            callback()
            return
        self._delays += 1
        heapq.heappush(self._late, (time.monotonic() + seconds, self._delays, callback))

    def turn(self, seconds: float) -> None:
        if self._late:
            seconds = min(seconds, self._late[0][0] - time.monotonic())
        self._transport.turn(max(0.0, seconds))
        while self._late and self._late[0][0] <= time.monotonic():
            heapq.heappop(self._late)[2]()

    def wake(self) -> None:
        self._transport.wake()

    def close(self) -> None:
        self._transport.close()


class FaultyConnection:
    """Calls to one peer that get lost and late; see EventConnection."""

    def __init__(self, connection: EventConnection, transport: FaultyTransport, peer: int, draw: Random) -> None:
        self._connection = connection
        self._transport = transport
        self._peer = peer
        self._draw = draw

    @property
    def sending(self) -> float:
        """Return how long the last call took to hand over; see EventConnection."""
        return self._connection.sending

    def post(self, content: Content, seconds: float, done: Done) -> None:
        def answered(answer: memoryview | RunError) -> None:
            self._pass(done, lambda: done(answer))

        self._pass(done, lambda: self._connection.post(content, seconds, answered))

    def _pass(self, done: Done, arrive: Callable[[], None]) -> None:
        """Let a call, or its answer, arrive; or be lost."""
        faults = self._transport.faults(self._peer)
        seconds = faults.delay + self._draw.random() * faults.jitter
        is_lost = faults.black_hole or self._draw.random() < faults.lose
        if not is_lost:
            self._transport.delay(seconds, arrive)
            return

        self._transport.lost += 1
        error = UnreachableError(f"a call to peer {self._peer}, or its answer, was lost", code="call.lost")
        self._transport.delay(seconds, lambda: done(error))

    def diagnosis(self) -> str:
        return self._connection.diagnosis()

    def close(self) -> None:
        self._connection.close()
