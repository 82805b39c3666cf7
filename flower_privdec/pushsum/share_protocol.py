"""What two peers tell each other about their edges, and what each remembers of the other.

An incarnation is a peer's mass from its beginning to its loss: a peer that lost what it knew comes back as a later one.
A life is a random number that each start of a process draws: it tells what was said before a start from what is said
after it, and two shares of one number from each other, where a peer froze that number twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from flower_privdec.errors import RunError

VERSION = 1  # of the protocol: peers talk to their own version alone
LAST = 2**64 - 1  # the largest number that a frame can carry
FIRST = 2**32  # the incarnation that every peer begins with: the upper half counts, the lower tells namesakes apart
FARTHEST = 2**16  # incarnations that a peer can be behind: who claims more lies, and would use the numbers up

V = TypeVar("V")


class RefusedError(RunError):
    """A message breaks the protocol; it changed nothing but, where the text says so, that a new handshake is due."""


class RolledBackError(RunError):
    """A neighbour has seen more of this peer than it remembers: its mass is not its own, and it has to begin anew."""


class Arithmetic(Protocol[V]):
    """What the protocol does with values; what is subtracted from, or added to, is not used again."""

    def part(self, value: V, weight: float) -> V:
        """Return weight times a value, as it is after it was cast for the wire."""

    def subtract(self, value: V, part: V) -> V:
        """Return value - part."""

    def add(self, value: V, part: V) -> V:
        """Return value + part."""

    def nothing(self, value: V) -> V:
        """Return a zero like a value."""

    def copy(self, value: V) -> V:
        """Return a copy that later changes of the value leave alone."""

    def same(self, value: V, part: V) -> bool:
        """Return whether two values are the same, bit for bit."""

    def fits(self, value: V, part: V) -> bool:
        """Return whether value + part is finite."""


@dataclass(frozen=True, eq=False)
class FrozenShare(Generic[V]):
    """A part of a sender's mass on its way over one edge: made once, and the same whenever it is sent.

    Attributes:
        sender, receiver: peers.
        incarnation: the sender's.
        addressed: the receiver's; no other incarnation may take it.
        number: its place among the shares of this edge and these two incarnations, from 1.
        life: of the process that froze it.
        round_index: the sender's round.
        values: one of each name.
    """

    sender: int
    receiver: int
    incarnation: int
    addressed: int
    number: int
    life: int
    round_index: int
    values: Mapping[str, V]


@dataclass(frozen=True)
class Acknowledgement:
    """A peer's word that a share and all before it are in its mass, on disk.

    Attributes:
        sender, receiver: who took the share, and who sent it.
        incarnation: of the one who took it.
        addressed: of the one who sent it.
        life: of the process that says so.
        number, share_life: of the share.
    """

    sender: int
    receiver: int
    incarnation: int
    addressed: int
    life: int
    number: int
    share_life: int


@dataclass(frozen=True)
class Hello:
    """One side of a handshake: all that its sender has on disk about both directions of an edge.

    Attributes:
        sender, receiver: peers.
        scenario: the hash of the scenario, 32 bytes.
        version: of the protocol.
        incarnation, life: the sender's.
        challenge: what a reply to this has to name.
        answers: the receiver's challenge that this replies to; 0 for the first word.
        opened: whether the sender has heard a reply already, and agreed.
        round_index: the sender's round.
        knows: the receiver's incarnation that the counters are about; 0 for none.
        sent, sent_life: the number of the last share sent, and the life that froze it.
        acknowledged: the number of the last share that the receiver acknowledged.
        received: the number of the last share taken from the receiver.
        seen, seen_life: number and life of the last share that came from the receiver, whether it is on disk or not.
    """

    sender: int
    receiver: int
    scenario: bytes
    version: int
    incarnation: int
    life: int
    challenge: int
    answers: int
    opened: bool
    round_index: int
    knows: int
    sent: int
    sent_life: int
    acknowledged: int
    received: int
    seen: int
    seen_life: int


@dataclass(frozen=True, eq=False)
class PeerLink(Generic[V]):
    """What a peer remembers of a neighbour: the counters of the edges to it and from it.

    Attributes:
        incarnation: the neighbour's that they are about; 0 before the first handshake.
        sent, sent_life: the number of the last share frozen for it, and the life that froze it.
        frozen: that share, until it is acknowledged.
        received, received_life: number and life of the last share taken from it.
    """

    incarnation: int = 0
    sent: int = 0
    sent_life: int = 0
    frozen: FrozenShare[V] | None = None
    received: int = 0
    received_life: int = 0

    @property
    def acknowledged(self) -> int:
        """Return the number of the last share that the neighbour acknowledged."""
        return self.sent - (self.frozen is not None)


@dataclass(frozen=True, eq=False)
class Durable(Generic[V]):
    """All that has to be on disk together before anything that follows from it may leave.

    Attributes:
        incarnation: the peer's.
        round_index: the round that comes next.
        mass: the values of the peer itself.
        links: of each neighbour.
        number: of the commit within a life, from 1; what was read from disk has 0.
    """

    incarnation: int
    round_index: int
    mass: Mapping[str, V]
    links: Mapping[int, PeerLink[V]]
    number: int = field(default=0)


def behind(mine: Hello, theirs: Hello) -> str | None:
    """Return why the first of two sides has forgotten something that the second saw, or None.

    Args:
        mine, theirs: two sides of one edge pair, about the same two incarnations.
    """
    if theirs.seen > mine.sent:
        return f"peer {theirs.sender} has share {theirs.seen} of peer {mine.sender}, which remembers {mine.sent}"
    if theirs.seen == mine.sent and theirs.seen_life != mine.sent_life:
        return f"peer {theirs.sender} has a share {mine.sent} of peer {mine.sender} which that did not freeze"
    if theirs.acknowledged > mine.received:
        return (
            f"peer {mine.sender} acknowledged share {theirs.acknowledged} of peer {theirs.sender} and remembers "
            f"{mine.received}"
        )
    return None


def next_incarnation(after: int, life: int) -> int:
    """Return an incarnation that is later than another, and nobody else's.

    Raises:
        RunError: there is none left.
    """
    count = (after >> 32) + 1
    if count >= 2**32:
        raise RunError(f"incarnation {after:#x} is the last there is; give this peer another id")
    return count << 32 | life % 2**32
