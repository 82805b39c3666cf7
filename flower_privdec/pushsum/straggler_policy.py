"""Adaptive straggler timeout: which neighbours to wait for, and how long. Pure: timestamps are arguments.

Peers that are equally fast do better when they wait a moment for each other: a round in which no neighbour is heard
spends budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *on time*, PATIENCE
times a period: its own work, from the end of an exchange to the end of the next without such waits, the median of the
last ones, and the least that a message takes. A neighbour that has not come by then STRIKES times in a row is late, and
waited for no more, and so is one that does not keep up: for its last SEEN rounds that became known it needed more than
SLOWEST exchanges of this peer each. One that keeps up is waited for again. So a neighbour that is ten times slower, or
stopped, costs a few periods at the beginning and then nothing, and one that had a bad moment, or was cut off for a
while, is soon waited for again. A peer goes at its own pace, also where all its neighbours are slower.

Timestamps are seconds of any clock that never goes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

PATIENCE = 3.0
STRIKES = 2
SEEN, SLOWEST = 4, 2.0
REMEMBERED = 32  # periods


@dataclass
class NeighborRecord:
    """What a peer remembers of a neighbour.

    Attributes:
        on_time: whether it is waited for.
        strikes: in how many exchanges in a row it was waited for and had nothing.
        rounds: the last rounds of it that became known, each with this peer's number of exchanges by then.
    """

    on_time: bool = False
    strikes: int = 0
    rounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SEEN + 1))

    def see(self, exchange: int, round_index: int) -> None:
        """Record the round that a neighbour is in, as far as is known by an exchange."""
        if self.rounds and round_index < self.rounds[-1][1]:
            self.rounds.clear()  # it was put back
        if not self.rounds or round_index > self.rounds[-1][1]:
            self.rounds.append((exchange, round_index))

    def judge(self, exchange: int) -> None:
        """Decide whether it keeps up by an exchange; nothing changes while too little is known."""
        if len(self.rounds) > SEEN:
            (began, first), (_, last) = self.rounds[0], self.rounds[-1]
            self.on_time = exchange - began <= SLOWEST * (last - first)

    def came(self) -> None:
        """Record that it had come, or at least something new of it."""
        self.strikes = 0

    def missed(self) -> None:
        """Record that nothing had come."""
        self.strikes += self.on_time
        if self.strikes >= STRIKES:
            self.on_time, self.strikes = False, 0
            self.rounds.clear()


class StragglerPolicy:
    """Which of a peer's neighbours are on time.

    Args:
        neighbors: of the peer.
        first: seconds to wait as long as no period was measured.
    """

    def __init__(self, neighbors: Iterable[int], first: float) -> None:
        """Begin with no neighbour on time."""
        self._first, self._exchanges = first, 0
        self._records = {neighbor: NeighborRecord() for neighbor in neighbors}
        self._periods: deque[float] = deque(maxlen=REMEMBERED)
        self._ended: float | None = None

    def is_awaited(self, neighbor: int) -> bool:
        """Return whether to wait for a neighbour in the exchange under way."""
        return self._records[neighbor].on_time

    def start(self, now: float, neighbors: Iterable[int]) -> None:
        """Begin to work at a time, and to wait for some neighbours, which begin together."""
        self._ended = now
        for neighbor in neighbors:
            self._records[neighbor].on_time = True

    @property
    def patience(self) -> float:
        """Return how long to wait in an exchange, seconds."""
        return PATIENCE * median(self._periods) if self._periods else self._first

    def begin(self, rounds: Mapping[int, int]) -> None:
        """Record the beginning of an exchange.

        Args:
            rounds: in which round each neighbour is, as far as is known.
        """
        self._exchanges += 1
        for neighbor, round_index in rounds.items():
            record = self._records[neighbor]
            record.see(self._exchanges, round_index)
            record.judge(self._exchanges)

    def end(self, now: float, there: Collection[int], missing: Collection[int], waited: float, message: float) -> None:
        """Record the end of an exchange.

        Args:
            now: a timestamp.
            there: neighbours that had come.
            missing: those that had not; neighbours that had nothing to send are in neither.
            waited: seconds in it that were spent on waiting for others.
            message: seconds that a message takes to a neighbour, at least.
        """
        if self._ended is not None:
            self._periods.append(now - self._ended - waited + message)
        self._ended = now
        self.note(there, missing)

    def note(self, there: Collection[int], missing: Collection[int]) -> None:
        """Record which neighbours had come, and which had not."""
        for neighbor in missing:
            self._records[neighbor].missed()
        for neighbor in there:
            self._records[neighbor].came()
