"""Whom a peer that goes on without the others waits for none the less, and for how long; without a clock.

Peers that are equally fast do better when they wait a moment for each other: a round in which nobody is heard spends
budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *punctual*, PATIENCE times a
period: its own work from the last exchange to this one, and the wait for the first neighbour that comes, in the middle
of the last exchanges. Who has not come by then STRIKES times in a row is late, and waited for no more. One that
had a bad moment keeps up: something new of it is there in AGAIN exchanges in a row, be it of the round before, and it
is waited for again until both are in the same round. Everybody else is given another chance: after FIRST_CHANCE
exchanges, then twice as many each time. So a neighbour that is ten times slower, or stopped, costs a few periods at the
beginning and then hardly anything, and one that was cut off for a while is waited for again. A peer all of whose
neighbours are slow goes at their pace.

Moments are seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

PATIENCE = 3.0
STRIKES, AGAIN = 2, 3
FIRST_CHANCE, LAST_CHANCE = 4, 1024  # exchanges until a late neighbour is waited for once more
REMEMBERED = 32  # periods


@dataclass
class Record:
    """What a peer remembers of a neighbour.

    Attributes:
        punctual: whether it is waited for.
        streak: in how many exchanges in a row something new of it was there.
        strikes: in how many exchanges in a row it was waited for and had nothing.
        left: how many exchanges it is not waited for.
        pause: how many that were the last time.
    """

    punctual: bool = False
    streak: int = 0
    strikes: int = 0
    left: int = FIRST_CHANCE
    pause: int = FIRST_CHANCE

    def there(self) -> None:
        """Take note that it had come, or at least something new of it."""
        self.streak, self.strikes = self.streak + 1, 0
        if self.streak >= AGAIN or self.left == 0:
            self.punctual, self.pause, self.left = True, max(FIRST_CHANCE, self.pause // 2), FIRST_CHANCE

    def missing(self) -> None:
        """Take note that nothing had come."""
        self.streak = 0
        if self.punctual:
            self.strikes += 1
            if self.strikes >= STRIKES:
                self.punctual, self.strikes, self.left = False, 0, self.pause
        elif self.left == 0:
            self.pause = min(LAST_CHANCE, 2 * self.pause)
            self.left = self.pause
        else:
            self.left -= 1


class Punctuality:
    """Who of a peer's neighbours is punctual.

    Args:
        neighbors: of the peer.
        first: seconds to wait as long as no period was measured.
    """

    def __init__(self, neighbors: Iterable[int], first: float) -> None:
        """Begin with nobody punctual."""
        self._first = first
        self._records = {neighbor: Record() for neighbor in neighbors}
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._ended: float | None = None
        self._began: float | None = None
        self._came: float | None = None

    def is_awaited(self, neighbor: int) -> bool:
        """Return whether to wait for a neighbour in the exchange under way."""
        return self._records[neighbor].punctual or self._records[neighbor].left == 0

    def start(self, now: float, neighbors: Iterable[int]) -> None:
        """Begin to work at a moment, and to wait for some neighbours, which begin together."""
        self._ended = now
        for neighbor in neighbors:
            self._records[neighbor].punctual = True

    @property
    def patience(self) -> float:
        """Return how long to wait in an exchange, seconds."""
        return PATIENCE * median(self._periods) if self._periods else self._first

    def begin(self, now: float) -> None:
        """Take note of the beginning of an exchange, at a moment."""
        self._began, self._came = now, None

    def came(self, now: float) -> None:
        """Take note that some neighbour had come by a moment; the first in an exchange counts."""
        if self._came is None:
            self._came = now

    def end(self, now: float, there: Collection[int], missing: Collection[int]) -> None:
        """Take note of the end of an exchange.

        Args:
            now: a moment.
            there: neighbours that had come.
            missing: those that had not; neighbours that had nothing to send are in neither.
        """
        if self._ended is not None and self._began is not None:
            self._periods.append((self._came or self._began) - self._ended)
        self._ended = now
        self.note(there, missing)

    def note(self, there: Collection[int], missing: Collection[int]) -> None:
        """Take note of who had come, and who had not."""
        for neighbor in missing:
            self._records[neighbor].missing()
        for neighbor in there:
            self._records[neighbor].there()
