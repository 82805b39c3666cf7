"""What peers that wait for each other say: letters of a place, again and again until they have been used."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from flower_privdec.errors import RunError
from flower_privdec.runtime.network.channel import UnreachableError
from flower_privdec.runtime.network.letters import CARRYING, PLACE, Letter, sealed
from flower_privdec.runtime.network.lockstep import Lockstep

Due = tuple[int, int, int, bytes | bytearray]  # a letter's kind, its place, the sender's place and the content


class SynchronousMail:
    """The mail of a lockstep.

    Attributes:
        machine: the lockstep.
        fatal: see Mail.
    """

    def __init__(
        self,
        machine: Lockstep[bytes],
        run: bytes,
        unpack: Callable[[int, bytes], None],
        neighbors: Collection[int],
        retry: float,
    ) -> None:
        """Begin without a word.

        Args:
            run: what tells this run from others, in every letter.
            unpack: checks what a letter holds for a place; raises RunError.
            neighbors: of the peer.
            retry: seconds until what was not used is sent again.
        """
        self.machine, self._run, self._unpack, self._neighbors, self._retry = machine, run, unpack, neighbors, retry
        self._said: dict[int, int] = {}  # the place that each neighbour knows this peer to be at
        self._again: dict[int, float] = {}  # when to send again what a neighbour has not used
        self.fatal: RunError | None = None

    def over(self) -> bool:
        """Return whether this peer and its neighbours know each other to be at the end."""
        place = self.machine.place
        return not self.machine.before(place, self._neighbors) and all(
            self._said.get(peer, -1) >= place for peer in self._neighbors
        )

    def read(self, caller: int, content: bytearray) -> Letter:
        """See Mail."""
        return Letter.opened(bytes(content), self._run, caller)

    def take(self, caller: int, said: Letter) -> Due:
        """See Mail; the answer says where this peer is."""
        machine = self.machine
        if said.kind == CARRYING and said.place >= machine.place:
            self._unpack(said.place, said.content)
            machine.take(caller, said.place, said.content)
        self._told(caller, said.sender_place)
        self._said[caller] = machine.place
        return PLACE, machine.place, machine.place, b""

    def _told(self, other: int, place: int) -> None:
        if place < 0:
            return  # it has begun to listen, and is nowhere yet
        try:
            self.machine.told(other, place)
        except RunError as error:
            self.fatal = error
            raise

    def has_news(self, neighbor: int, now: float) -> bool:
        """See Mail: it does not know where this peer is, or has not used what it was sent a while ago."""
        new = self.machine.place > self._said.get(neighbor, -1)
        return new or (bool(self.machine.due(neighbor)) and now >= self._again.get(neighbor, 0.0))

    def news(self, neighbor: int, now: float) -> list[Due]:
        """See Mail."""
        place = self.machine.place
        return [(CARRYING, at, place, content) for at, content in self.machine.due(neighbor)] or [
            (PLACE, place, place, b"")
        ]

    def written(self, neighbor: int, words: Due) -> bytes:
        """See Mail."""
        kind, at, place, content = words
        return sealed(kind, self.machine.peer, self._run, at, place, bytes(content))

    def answered(self, neighbor: int, words: Due, said: Letter) -> None:
        """See Mail."""
        self._said[neighbor] = max(words[2], self._said.get(neighbor, -1))
        self._again[neighbor] = time.monotonic() + self._retry
        self._told(neighbor, said.sender_place)

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """See Mail: peers that wait for each other cannot go on with one that refuses them."""
        if not isinstance(error, UnreachableError):
            self.fatal = self.fatal or RunError(f"peer {neighbor} says: {error}")
