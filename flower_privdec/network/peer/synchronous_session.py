"""What peers that wait for each other say: letters of a place, again and again until they have been used."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from flower_privdec.core.exchange import Payload
from flower_privdec.errors import RunError
from flower_privdec.network.transport.channel import UnreachableError
from flower_privdec.pushsum.letters import CARRYING, EMPTY, PLACE, Letter, sealed
from flower_privdec.pushsum.lockstep import UNDER_WAY, Lockstep
from flower_privdec.pushsum.parts import Buffer, Parts

Due = tuple[int, int, int, Parts]  # a letter's kind, its place, the sender's place and the content


GONE = 3  # calls in a row that failed, after which somebody who is at the end has left


class SynchronousMail:
    """The mail of a lockstep.

    Attributes:
        machine: the lockstep.
        fatal: see Mail.
    """

    def __init__(
        self,
        machine: Lockstep[Parts, Payload],
        run: bytes,
        unpack: Callable[[int, int, Buffer], Payload],
        neighbors: Collection[int],
        retry: float,
    ) -> None:
        """Begin without a word.

        Args:
            run: what tells this run from others, in every letter.
            unpack: returns the rows that a letter of some sender holds for a place; raises RunError.
            neighbors: of the peer.
            retry: seconds until what was not used is sent again.
        """
        self.machine, self._run, self._unpack, self._neighbors, self._retry = machine, run, unpack, neighbors, retry
        self._said: dict[int, int] = {}  # the place that each neighbour knows this peer to be at
        self._again: dict[tuple[int, int], float] = {}  # when to send what a neighbour has not used again, by place
        self._failures: Counter[int] = Counter()  # since the last call that was answered
        self._held: Counter[int] = Counter()  # calls of each neighbour whose answers wait to say more
        self.fatal: RunError | None = None

    def over(self) -> bool:
        """Return whether all neighbours are known to be at the end, and know it of this peer or have left."""
        place = self.machine.place
        return not self.machine.before(place, self._neighbors) and all(
            self._said.get(peer, -1) >= place or self._failures[peer] >= GONE for peer in self._neighbors
        )

    def read(self, caller: int, content: memoryview) -> Letter:
        """See Mail."""
        return Letter.opened(content, self._run, caller)

    def take(self, caller: int, said: Letter) -> Callable[[], Due]:
        """See Mail; the answer says where this peer is."""
        machine = self.machine
        if said.kind == CARRYING and said.place >= machine.place:
            machine.take(caller, said.place, self._unpack(caller, said.place, said.content))
        self._told(caller, said.sender_place)
        self._held[caller] += 1
        return lambda: self._answer(caller)

    def _answer(self, caller: int) -> Due:
        machine = self.machine
        self._held[caller] -= 1
        if not machine.is_at_end:  # a caller that did not hear the answer calls again, but for its last word
            self._said[caller] = machine.place
        return PLACE, machine.place, machine.place, EMPTY

    def is_answered(self, caller: int, said: Letter) -> bool:
        """See Mail: who brought rows hears, once they were used, that they were."""
        return said.kind != CARRYING or said.place < self.machine.place

    def _told(self, other: int, place: int) -> None:
        if place < 0:
            return  # it has begun to listen, and is nowhere yet
        try:
            self.machine.told(other, place)
        except RunError as error:
            self.fatal = error
            raise

    def has_news(self, neighbor: int, now: float) -> bool:
        """See Mail: it waits to hear where this peer is, was not sent something, or did not use it for a while."""
        return self._waits(neighbor) or bool(self._due(neighbor, now))

    def _waits(self, neighbor: int) -> bool:
        """Return whether a neighbour has to hear where this peer is, and no answer to it is about to say that."""
        said = self._said.get(neighbor)
        unheard = self.machine.place >= 0 if said is None else said < self.machine.wanted(neighbor)
        return unheard and (self.machine.is_at_end or not self._held[neighbor])

    def _due(self, neighbor: int, now: float) -> list[tuple[int, Parts]]:
        return [(at, what) for at, what in self.machine.due(neighbor) if now >= self._again.get((neighbor, at), 0.0)]

    def news(self, neighbor: int, now: float) -> list[Due]:
        """See Mail."""
        place = self.machine.place
        return [(CARRYING, at, place, what) for at, what in self._due(neighbor, now)] or [(PLACE, place, place, EMPTY)]

    def written(self, neighbor: int, words: Due) -> Parts:
        """See Mail."""
        kind, at, place, content = words
        return sealed(kind, self.machine.peer, self._run, at, place, content)

    def answered(self, neighbor: int, words: Due, said: Letter) -> None:
        """See Mail."""
        kind, at, place, _ = words
        self._said[neighbor], self._failures[neighbor] = max(place, self._said.get(neighbor, -1)), 0
        if kind == CARRYING:
            self._again = {which: when for which, when in self._again.items() if which[1] > place - UNDER_WAY}
            self._again[neighbor, at] = time.monotonic() + self._retry
        self._told(neighbor, said.sender_place)

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """See Mail: peers that wait for each other cannot go on with one that refuses them."""
        self._failures[neighbor] += 1
        if not isinstance(error, UnreachableError):
            self.fatal = self.fatal or RunError(f"peer {neighbor} says: {error}")
