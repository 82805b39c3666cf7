"""Whom a peer that goes on without the others waits for none the less, and for how long; without a clock.

Peers that are equally fast do better when they wait a moment for each other: a round in which nobody is heard spends
budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *punctual*, PATIENCE times as
long as it takes for a round of its own, waiting included. Who has not come by then is late: nobody waits for it any
more until it was there in AGAIN exchanges in a row without being waited for. A neighbour that is ten times slower, or
stopped, costs PATIENCE rounds once, and then nothing.

Moments are seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

PATIENCE = 3.0
AGAIN = 3
SMOOTHING = 0.2  # the part of a new round in the mean


class Punctuality:
    """Who of a peer's neighbours is punctual.

    Args:
        neighbors: of the peer.
        first: seconds to wait as long as no round was measured.

    Attributes:
        period: how long a round takes, seconds; None before the first.
    """

    def __init__(self, neighbors: Iterable[int], first: float) -> None:
        """Begin with nobody known: they are late until they have come AGAIN times, or are called punctual."""
        self.period: float | None = None
        self._first = first
        self._streak = dict.fromkeys(neighbors, 0)
        self._punctual: set[int] = set()
        self._last: float | None = None

    def is_punctual(self, neighbor: int) -> bool:
        """Return whether to wait for a neighbour."""
        return neighbor in self._punctual

    def call_punctual(self, neighbors: Iterable[int]) -> None:
        """Wait for some neighbours from now on, as at the beginning of a run, when all begin together."""
        self._punctual.update(neighbors)

    def lost(self, neighbor: int) -> None:
        """Take note that a neighbour cannot be reached: it has to prove itself anew."""
        self._punctual.discard(neighbor)
        self._streak[neighbor] = 0

    @property
    def patience(self) -> float:
        """Return how long to wait in an exchange, seconds."""
        return self._first if self.period is None else PATIENCE * self.period

    def exchanged(self, now: float, there: Collection[int], missing: Collection[int]) -> None:
        """Take note of the end of an exchange.

        Args:
            now: a moment.
            there: neighbours that had come.
            missing: those that had not; neighbours that had nothing to send are in neither.
        """
        if self._last is not None:
            took = now - self._last
            self.period = took if self.period is None else self.period + SMOOTHING * (took - self.period)
        self._last = now
        for neighbor in missing:
            self.lost(neighbor)
        for neighbor in there:
            self._streak[neighbor] += 1
            if self._streak[neighbor] >= AGAIN:
                self._punctual.add(neighbor)
