"""What a peer knows of its neighbours, and the handshake by which two find out whether either has forgotten something.

The handshake swaps the scenario's hash, the protocol's version, incarnations, lives and counters. A hello counts only
when it answers the challenge of the process that hears it, which is new whenever either side has started anew: what it
says is no older. Sockets, clocks and files are the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Generic

from flower_privdec.errors import RunError
from flower_privdec.pushsum.share_protocol import (
    FARTHEST,
    FIRST,
    LAST,
    VERSION,
    Durable,
    Hello,
    PeerLink,
    RefusedError,
    RolledBackError,
    V,
    behind,
)


class Neighbors(Generic[V]):
    """One peer's links to all its neighbours.

    Args:
        peer: its id.
        neighbors: all whom it ever sends to or hears from.
        scenario: the hash of the scenario, 32 bytes.
        life: a random number from 1 to 2^64 - 1, drawn at this start of the process.

    Attributes:
        incarnation: which one this is.
        stranded: how many shares were given up, by neighbour, because their receiver began anew.
    """

    def __init__(self, peer: int, neighbors: Iterable[int], scenario: bytes, life: int) -> None:
        """Begin in the first incarnation, without having met anybody."""
        self.peer, self.life, self.incarnation = peer, life, FIRST
        self.stranded: Counter[int] = Counter()
        self._scenario = scenario
        self._links: dict[int, PeerLink[V]] = {j: PeerLink() for j in sorted({*neighbors} - {peer})}
        self._durable: Durable[V] | None = None
        self._heard: dict[int, Hello] = {}  # the last word of each neighbour
        self._challenges: dict[int, int] = dict.fromkeys(self._links, life)
        self._agreed: dict[int, Hello] = {}  # the word on which the edge was opened
        self._said: dict[int, Hello] = {}  # the last word to each neighbour that did not agree
        self._open: set[int] = set()
        self._greeted: set[int] = set()  # since this start, and so not to be believed any more
        self._beyond: int | None = None  # once rolled back: which incarnation the next one has to exceed

    def close(self, neighbor: int) -> None:
        """Take note that a neighbour is not to be reached: nothing is frozen for it until it greets again."""
        self._open.discard(neighbor)

    def is_open(self, neighbor: int) -> bool:
        """Return whether a neighbour and this process have shaken hands."""
        return neighbor in self._open

    @property
    def can_greet(self) -> bool:
        """Whether this incarnation is on disk, before which nobody may hear of it."""
        return self._durable is not None and self._durable.incarnation == self.incarnation

    @property
    def has_met(self) -> bool:
        """Whether this peer knows any neighbour."""
        return any(link.incarnation for link in self._links.values())

    def hello(self, neighbor: int) -> Hello:
        """Return the next word of a handshake, which says what is on disk.

        Raises:
            RunError: this incarnation is not on disk yet.
        """
        heard = self._heard.get(neighbor)
        if self._durable is None or not self.can_greet:
            raise RunError(f"peer {self.peer} must commit incarnation {self.incarnation:#x} before it greets anybody")
        link, now = self._on_disk(neighbor), self._links[neighbor]
        seen, seen_life = self._seen(neighbor)
        return Hello(
            sender=self.peer,
            receiver=neighbor,
            scenario=self._scenario,
            version=VERSION,
            incarnation=self.incarnation,
            life=self.life,
            challenge=self._challenges[neighbor],
            answers=0 if heard is None else heard.challenge,
            opened=neighbor in self._open,
            round_index=self._durable.round_index,
            knows=link.incarnation,
            sent=link.sent,
            sent_life=link.sent_life,
            acknowledged=min(now.acknowledged, link.sent),
            received=link.received,
            seen=seen,
            seen_life=seen_life,
        )

    def _seen(self, neighbor: int) -> tuple[int, int]:
        """Return number and life of the last share that came from a neighbour."""
        return self._links[neighbor].received, self._links[neighbor].received_life

    def receive_hello(self, theirs: Hello) -> Hello | None:
        """Hear a neighbour's word; the edge is open once it answers this life and neither side is behind.

        Words may be lost, so whoever is not open with a neighbour greets it again from time to time.

        Returns:
            The word to say back, or None where nothing is left to say.

        Raises:
            RefusedError: another scenario, version or peer, or counters that cannot be.
            RolledBackError: this peer has to begin anew, commit and greet again.
        """
        self.check_hello(theirs)
        neighbor = theirs.sender
        self._listen(theirs)
        if theirs.answers != self._challenges[neighbor]:
            return self.hello(neighbor)
        if theirs.incarnation > self._links[neighbor].incarnation:
            self._meet(neighbor, theirs.incarnation)
        if self._agrees(theirs):
            self._open.add(neighbor)
            self._greeted.add(neighbor)
            self._agreed[neighbor] = theirs
            self._forget(neighbor, self._links[neighbor], theirs.received)
            return None if theirs.opened else self.hello(neighbor)
        self.close(neighbor)
        return self._objection(neighbor)

    def _listen(self, theirs: Hello) -> None:
        """Begin the handshake anew where a neighbour speaks from another life than before."""
        before = self._heard.get(theirs.sender)
        self._heard[theirs.sender] = theirs
        if before is not None and before.life != theirs.life:
            self._challenges[theirs.sender] = self._challenges[theirs.sender] % LAST + 1
            self._said.pop(theirs.sender, None)
            self.close(theirs.sender)

    def _objection(self, neighbor: int) -> Hello | None:
        """Return the word from which a neighbour that is behind learns it; None where it was said already."""
        before, mine = self._said.get(neighbor), self.hello(neighbor)
        self._said[neighbor] = mine
        return None if mine == before else mine

    def _agrees(self, theirs: Hello) -> bool:
        """Return whether both sides remember what the other saw; the one that does not learns it from the other."""
        mine = self.hello(theirs.sender)
        if theirs.knows > self.incarnation:
            self._believe(theirs, f"peer {theirs.sender} knows incarnation {theirs.knows:#x} of peer {self.peer}")
        if theirs.knows < self.incarnation or theirs.incarnation < mine.knows:
            return False
        if (why := behind(mine, theirs)) is not None:
            self._believe(theirs, why)
        return behind(theirs, mine) is None

    def _believe(self, theirs: Hello, why: str) -> None:
        """Act on a neighbour's word that this peer has forgotten something, where that can be.

        Raises:
            RefusedError: it cannot.
            RolledBackError: it can.
        """
        far = (theirs.knows >> 32) - (self.incarnation >> 32) > FARTHEST
        if theirs.sender in self._greeted or far:
            raise self._closing(theirs.sender, f"lies, or was rolled back itself ({why})")
        self._beyond = max(theirs.knows, self._beyond or 0)
        raise RolledBackError(f"{why}; peer {self.peer} was rolled back and begins anew, with a neighbour's model")

    def _meet(self, neighbor: int, incarnation: int) -> None:
        """Begin with a neighbour's new incarnation; what was frozen for the one before is stranded."""
        self.stranded[neighbor] += self._links[neighbor].frozen is not None
        self._links[neighbor] = PeerLink(incarnation)
        self._open.discard(neighbor)

    def check_hello(self, theirs: Hello) -> None:
        """Look at a word without hearing it.

        Raises:
            RefusedError: another scenario, version or peer, or counters that cannot be.
            RunError: this peer has to begin anew first.
        """
        self._check_not_behind()
        if theirs.version != VERSION:
            raise RefusedError(f"peer {theirs.sender} speaks version {theirs.version} of the protocol, not {VERSION}")
        if theirs.scenario != self._scenario:
            raise RefusedError(
                f"peer {theirs.sender} runs the scenario {theirs.scenario.hex()[:12]}, and peer {self.peer} "
                f"{self._scenario.hex()[:12]}; give both the same file"
            )
        if theirs.sender not in self._links or theirs.receiver != self.peer:
            raise RefusedError(f"peer {theirs.sender} greeted peer {theirs.receiver}, who are no neighbours here")
        if not 0 <= theirs.sent - theirs.acknowledged <= 1 or theirs.received > theirs.seen or not theirs.challenge:
            raise RefusedError(
                f"peer {theirs.sender} says that {theirs.acknowledged} of {theirs.sent} shares are acknowledged, and "
                f"{theirs.received} of {theirs.seen} taken, which cannot be"
            )

    def _on_disk(self, neighbor: int) -> PeerLink[V]:
        """Return the link that is on disk, or an empty one where that is about another incarnation of either."""
        now = self._links[neighbor]
        if self._durable is None or not self.can_greet:
            return PeerLink(now.incarnation)
        link = self._durable.links[neighbor]
        return link if link.incarnation == now.incarnation else PeerLink(now.incarnation)

    def _known(self, sender: int, receiver: int, incarnation: int, addressed: int) -> PeerLink[V]:
        """Return the link to a sender with whom a handshake is open between these two incarnations."""
        self._check_not_behind()
        if sender not in self._links or receiver != self.peer:
            raise RefusedError(f"peer {sender} sent something for peer {receiver}, who are no neighbours here")
        if sender not in self._open:
            raise RefusedError(f"peer {sender} must greet peer {self.peer} first, which has started since, or lost it")
        link = self._links[sender]
        if (incarnation, addressed) != (link.incarnation, self.incarnation):
            raise RefusedError(
                f"peer {sender} sent something from incarnation {incarnation:#x} to {addressed:#x}, and the two are "
                f"{link.incarnation:#x} and {self.incarnation:#x}"
            )
        return link

    def _closing(self, neighbor: int, why: str) -> RefusedError:
        self.close(neighbor)
        return RefusedError(f"peer {neighbor} {why}; it has to greet peer {self.peer} anew")

    def _check_not_behind(self) -> None:
        if self._beyond is not None:
            raise RunError(f"peer {self.peer} was rolled back and has to begin anew first")

    def _forget(self, neighbor: int, link: PeerLink[V], number: int) -> bool:
        if link.frozen is None or number < link.frozen.number:
            return False
        self._links[neighbor] = replace(link, frozen=None)
        return True
