"""Whom a peer that goes on without the others waits for none the less, and for how long; without a clock.

Peers that are equally fast do better when they wait a moment for each other: a round in which nobody is heard spends
budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *punctual*, PATIENCE times a
period: its own work from the last exchange to this one, and the wait for the first neighbour that comes, in the
quickest quarter of the last exchanges. Who has not come by then is late, and waited for no more until it was there in
AGAIN exchanges in a row, or in one in which it is given another chance: after one exchange, then twice as many each
time that it misses one, and half as many when it does not. So a neighbour that is ten times slower, or stopped, costs a
few periods at the beginning and then hardly anything; one of which a message was lost is waited for again at once, and
one that was cut off for long after a while. A peer all of whose neighbours are slow goes at their pace.

Moments are seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PATIENCE = 2.0
AGAIN = 3
LONGEST = 1024  # exchanges until a late neighbour is waited for once more, at most
REMEMBERED = 32  # periods


@dataclass
class Record:
    """What a peer remembers of a neighbour.

    Attributes:
        left: how many exchanges it is not waited for.
        pause: how many that will be the next time.
        streak: in how many exchanges in a row it was there.
    """

    left: int = 0
    pause: int = 1
    streak: int = 0

    def there(self) -> None:
        """Take note that it had come."""
        self.streak += 1
        if self.left == 0 or self.streak >= AGAIN:
            self.left, self.pause = 0, max(1, self.pause // 2)
        else:
            self.left -= 1

    def missing(self) -> None:
        """Take note that it had not."""
        self.streak = 0
        if self.left:
            self.left -= 1
        else:
            self.left, self.pause = self.pause, min(LONGEST, 2 * self.pause)


class Punctuality:
    """Who of a peer's neighbours is punctual.

    Args:
        neighbors: of the peer.
        first: seconds to wait as long as no period was measured.
    """

    def __init__(self, neighbors: Iterable[int], first: float) -> None:
        """Begin to wait for everybody."""
        self._first = first
        self._records = {neighbor: Record() for neighbor in neighbors}
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._ended: float | None = None
        self._began: float | None = None
        self._came: float | None = None

    def is_awaited(self, neighbor: int) -> bool:
        """Return whether to wait for a neighbour in the exchange under way."""
        return self._records[neighbor].left == 0

    def start(self, now: float) -> None:
        """Begin to work at a moment."""
        self._ended = now

    @property
    def patience(self) -> float:
        """Return how long to wait in an exchange, seconds."""
        return PATIENCE * sorted(self._periods)[len(self._periods) // 4] if self._periods else self._first

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
