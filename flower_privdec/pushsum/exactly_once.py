"""Exactly-once push-sum: a state machine without sockets, clocks or files. Messages in, messages out.

A lost message would take its part of (x, w) with it, and push-sum would converge to something else or nowhere. Here
none is lost: over all peers, Σ mass on disk + Σ shares in flight = Σ initial mass + Σ updates on disk, exactly, for any
schedule of messages dropped, delayed, repeated or out of order and of peers killed and restarted. A share is in flight
while its sender has it on disk and its receiver has not. (In floating point each addition rounds, as in any mixing; the
number subtracted here is the one added there.)

A round of a peer, whose own numbers the caller holds (`mass`) and moves by its gradients:

1. An edge opens by a handshake (`hello`, `receive_hello`) or by the word of a directory that both sides trust
   (`introduce`). A neighbour is ready while its edge is open and fewer than `window` shares to it are unacknowledged.
2. `split` freezes a share p_j (x, w) for each ready out-neighbour j, with its next number, and subtracts exactly the
   values that will be sent. p_j = W_j / (1 - Σ W of those that are not ready): the round's own column of weights where
   all are ready, 1 / (ready + 1) where weights are uniform, and never everything.
3. `snapshot` returns all that has to be on disk together; the caller writes it and then calls `committed`. Only then do
   `shares_to_send` and `acknowledgements` yield what follows from it. A caller may commit every few rounds.
4. The same objects are sent until they are acknowledged, so a retry is the same share. One that may have left is never
   taken back or replaced, for it may have arrived.
5. `receive` holds a neighbour's next share in memory; `absorb` adds it, and the next commit acknowledges it. A share
   that was absorbed before is acknowledged and not added. After a gap the edge closes.
6. `acknowledge` forgets frozen shares. An acknowledgement of what was not sent is refused.

Two numbers tell the past from the present. An *incarnation* is a peer's mass from its beginning to its loss: a peer
that lost its state comes back as another one, with x = 0 and w = 0 (`reset`), and takes no step at x / w before its
first share has come. To that share `absorb` adds the weight with which the peer began, at the share's model x / w:
without it each lost state would take its weight from all others for good. Others forget the shares that they froze for
the dead incarnation: those are *orphaned*, x with w, which moves no ratio; a share that was not committed cannot have
left and returns to its sender's mass. A *boot* is a random number that each start of a process draws: it tells what was
sent before a restart from what is sent after it, and two shares of one number from each other where a peer froze that
number twice.

The handshake exchanges incarnations, boots and counters. A hello counts only when it answers the challenge of the
process that receives it, so none is old. A neighbour that has seen more of a peer than the peer remembers shows that
the peer's state is stale, an old copy: `receive_hello` raises StaleStateError, and the peer must `reset`. With the new
incarnation the peer's own mass and the shares in flight on its own edges are gone, and nothing else. What it sent
between its restart and the first neighbour that was ahead of it, at most what it was restored with, counts twice: greet
every neighbour before the first split.

Where a directory introduces the peers, each one acknowledges at every introduction what it has of the other. An
acknowledgement of a share that this peer does not remember, or of a later incarnation of it, then shows that its state
is stale: `acknowledge` raises StaleStateError.

A neighbour that lies about another's lost state is believed at its first handshake after that one's start alone, so it
can make one that has just started give up its own mass; a running peer refuses it. A share that would make the mass
infinite is rejected.

For a synchronous run, `absorb` takes shares up to a round, and `uncommitted` names the senders that wait for a commit
here: a graph that uses an edge in each round needs a commit after each mixing too. A machine is for one thread at a
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from flower_privdec.common.errors import RunError

LAST = 2**64 - 1  # the largest number that a frame can carry
FIRST = 2**32  # the first incarnation of a peer: the upper half counts, the lower half distinguishes equal counts
FARTHEST = 2**16  # incarnations that a peer can be behind: a larger claim is a lie, and would use the numbers up

V = TypeVar("V")


class RefusedError(RunError):
    """A message breaks the protocol; it changed nothing, but that its edge may be closed."""


class StaleStateError(RunError):
    """A neighbour has seen more of this peer than its state on disk: the state is an old copy, and must be reset."""


class Arithmetic(Protocol[V]):
    """Operations on values; what is subtracted from, or added to, is not used again."""

    def part(self, value: V, weight: float) -> V:
        """Return weight times a value, as encoded for the wire."""

    def subtract(self, value: V, part: V) -> V:
        """Return value - part, for a part as encoded for the wire."""

    def add(self, value: V, part: V) -> V:
        """Return value + part, for a part as encoded for the wire."""

    def nothing(self, value: V) -> V:
        """Return a zero like a value."""

    def copy(self, value: V) -> V:
        """Return a copy that later changes of the value do not affect."""

    def same(self, value: V, part: V) -> bool:
        """Return whether two values are the same, bit for bit."""

    def fits(self, value: V, part: V) -> bool:
        """Return whether value + part is finite."""


@dataclass(frozen=True, eq=False)
class FrozenShare(Generic[V]):
    """A part of a sender's mass in flight over one edge: made once, and the same whenever it is sent.

    Attributes:
        sender, receiver: peers.
        incarnation: the sender's.
        addressed: the receiver's; no other incarnation may absorb it.
        number: counts the shares of this edge between these two incarnations, from 1.
        boot: of the process that froze it.
        round_index: the sender's round.
        values: one of each name, as encoded for the wire.
    """

    sender: int
    receiver: int
    incarnation: int
    addressed: int
    number: int
    boot: int
    round_index: int
    values: Mapping[str, V]


@dataclass(frozen=True)
class Acknowledgement:
    """A share, and all before it, are in the receiver's mass on disk.

    Attributes:
        sender, receiver: of the acknowledgement: the peer that absorbed the share, and the one that sent it.
        incarnation, addressed: theirs.
        boot: of the process that acknowledges.
        number, share_boot: of the share.
    """

    sender: int
    receiver: int
    incarnation: int
    addressed: int
    boot: int
    number: int
    share_boot: int


@dataclass(frozen=True)
class Hello:
    """One message of a handshake: all that its sender has on disk about both directions of an edge.

    Attributes:
        sender, receiver: peers.
        incarnation, boot: the sender's.
        challenge: what a reply to this has to name.
        answers: the receiver's challenge that this replies to; 0 in the first message.
        opened: whether the edge is open at the sender.
        round_index: the sender's round.
        knows: the receiver's incarnation that the counters are about; 0 for none.
        sent, sent_boot: the number of the last share sent, and the boot that froze it.
        acknowledged: the number of the last share that the receiver acknowledged.
        received: the number of the last share absorbed from the receiver.
        seen, seen_boot: number and boot of the last share that came from the receiver, on disk or not.
        want: what the sender lacks of weight, for the driver alone: 0 where that is not known, 1 where it has none to
            spare, 2 where it waits for some.
        level: how often the sender's weight floor sank, 0 to 15, for the driver alone.
    """

    sender: int
    receiver: int
    incarnation: int
    boot: int
    challenge: int
    answers: int
    opened: bool
    round_index: int
    knows: int
    sent: int
    sent_boot: int
    acknowledged: int
    received: int
    seen: int
    seen_boot: int
    want: int = 0
    level: int = 0


@dataclass(frozen=True, eq=False)
class Edge(Generic[V]):
    """What a peer remembers of a neighbour: the counters of both directions.

    Attributes:
        incarnation: the neighbour's that they are about; 0 before the edge first opened.
        sent, sent_boot: the number of the last share frozen for it, and the boot that froze it.
        frozen: the shares that it has not acknowledged, in order.
        received, received_boot: number and boot of the last share absorbed from it.
    """

    incarnation: int = 0
    sent: int = 0
    sent_boot: int = 0
    frozen: tuple[FrozenShare[V], ...] = ()
    received: int = 0
    received_boot: int = 0


@dataclass(frozen=True, eq=False)
class Durable(Generic[V]):
    """All that has to be on disk together before anything that follows from it may leave.

    Attributes:
        incarnation: the peer's.
        round_index: the next round.
        mass: the values of the peer itself.
        edges: by neighbour.
        number: of the commit within a boot, from 1; what was read from disk has 0.
    """

    incarnation: int
    round_index: int
    mass: Mapping[str, V]
    edges: Mapping[int, Edge[V]]
    number: int = 0


class PushSumProtocol(Generic[V]):
    """One peer's side of all its edges.

    Args:
        peer: its id.
        neighbors: all peers that it may ever send to or hear from, but for those that `introduce` adds.
        boot: a random number from 1 to 2^64 - 1, drawn at this start of the process.
        mass: the peer's own values by name, which the caller changes too, between two calls.
        arithmetic: operations on them.
        window: how many shares to one neighbour may be unacknowledged; more than 1 only where edges open by
            `introduce`, for a hello carries the boot of one share.
        incarnation: of a new state; a driver without handshakes gives one that is later than any earlier state's.

    Attributes:
        orphaned: how many shares were given up, by neighbour, because their receiver lost its state.
        rejected: how many shares were not absorbed, by neighbour, because they would have made the mass infinite.
        edges: the counters by neighbour, as they are in memory.
    """

    def __init__(
        self,
        peer: int,
        neighbors: Iterable[int],
        boot: int,
        mass: MutableMapping[str, V],
        arithmetic: Arithmetic[V],
        *,
        window: int = 1,
        incarnation: int = FIRST,
    ) -> None:
        """Start with the given mass and all edges closed; nothing leaves before the first commit."""
        self.peer = peer
        self.boot = boot
        self.incarnation = incarnation
        self.mass = mass
        self.orphaned: Counter[int] = Counter()
        self.rejected: Counter[int] = Counter()
        self.edges: dict[int, Edge[V]] = {j: Edge() for j in sorted({*neighbors} - {peer})}
        self._arithmetic = arithmetic
        self._window = window
        self._durable: Durable[V] | None = None
        self._commits = 0
        self._inbox: dict[int, list[FrozenShare[V]]] = {}  # received and not absorbed, in order
        self._unacknowledged: set[int] = set()  # senders to acknowledge
        self._open: set[int] = set()
        self._hellos: dict[int, Hello] = {}  # the last of each neighbour
        self._challenges: dict[int, int] = dict.fromkeys(self.edges, boot)
        self._agreed: dict[int, Hello] = {}  # the hello on which the edge opened
        self._objections: dict[int, Hello] = {}  # the last hello to each neighbour that did not agree
        self._greeted: set[int] = set()  # since this start, and so not to be believed any more
        self._stale_since: int | None = None  # once stale: the incarnation that the next one has to exceed

    # --- state ---

    def restore(self, durable: Durable[V]) -> None:
        """Continue from what was read from disk, bit for bit; to be called before anything else.

        Raises:
            RunError: it is about other neighbours.
        """
        if durable.edges.keys() != self.edges.keys():
            raise RunError(
                f"the state of peer {self.peer} on disk has neighbours {sorted(durable.edges)}, and the scenario "
                f"{sorted(self.edges)}; restore it from a copy, or delete it, and the peer joins as a new one",
                code="share.other-neighbors",
            )
        self.incarnation, self._durable = durable.incarnation, replace(durable, number=0)
        self.edges.update(durable.edges)
        for name, value in durable.mass.items():
            self.mass[name] = self._arithmetic.copy(value)

    def reset(self) -> None:
        """Become a new incarnation without mass: x = 0, w = 0, and no share in flight."""
        self.incarnation = next_incarnation(max(self.incarnation, self._stale_since or 0), self.boot)
        self._stale_since = None
        for name in self.mass:
            self.mass[name] = self._arithmetic.nothing(self.mass[name])
        self.edges = {j: Edge(edge.incarnation) for j, edge in self.edges.items()}
        for collection in (self._inbox, self._open, self._unacknowledged):
            collection.clear()

    @property
    def round_index(self) -> int:
        """Return the round that is on disk."""
        return 0 if self._durable is None else self._durable.round_index

    def snapshot(self, round_index: int) -> Durable[V]:
        """Return all that has to be on disk together; it does not change while the machine goes on."""
        self._check_not_stale()
        self._commits += 1
        frozen = [share.values for edge in self.edges.values() for share in edge.frozen]
        mass = dict[str, V]()
        for name, value in self.mass.items():  # a frozen share of the same numbers never changes, as a copy would not
            same = next((parts[name] for parts in frozen if self._arithmetic.same(value, parts[name])), None)
            mass[name] = self._arithmetic.copy(value) if same is None else same
        return Durable(self.incarnation, round_index, mass, dict(self.edges), self._commits)

    def committed(self, durable: Durable[V]) -> None:
        """Record that a snapshot is on disk, fsynced, in place of the one before.

        Raises:
            RunError: a later one is there already.
        """
        before = self._durable
        if before is not None and durable.number <= before.number:
            raise RunError(
                f"commit {durable.number} of peer {self.peer} must come before commit {before.number}",
                code="share.commit-order",
            )
        for neighbor, edge in durable.edges.items():
            if before is None or edge.received != before.edges.get(neighbor, Edge()).received:
                self._unacknowledged.add(neighbor)
        self._durable = durable

    def uncommitted(self) -> set[int]:
        """Return whose shares were absorbed and not committed: they are not ready to send until then."""
        received = {j: edge.received for j, edge in self.edges.items() if edge.received}
        return {j for j, number in received.items() if self._on_disk(j).received != number}

    def _on_disk(self, neighbor: int) -> Edge[V]:
        """Return the edge that is on disk, or an empty one where that is about another incarnation of either."""
        now = self.edges[neighbor]
        if self._durable is None or not self.can_greet:
            return Edge(now.incarnation)
        edge = self._durable.edges.get(neighbor, Edge())
        return edge if edge.incarnation == now.incarnation else Edge(now.incarnation)

    # --- shares ---

    def is_ready(self, neighbor: int) -> bool:
        """Return whether a share for a neighbour may be frozen."""
        edge = self.edges[neighbor]
        return neighbor in self._open and len(edge.frozen) < self._window and edge.sent < LAST

    def split(self, round_index: int, weights: Mapping[int, float]) -> list[int]:
        """Freeze a share for each ready out-neighbour and subtract it.

        Args:
            round_index: the peer's round.
            weights: W[j, peer] of each out-neighbour j in this round; with the peer's own they sum to 1.

        Returns:
            The neighbours for which a share was frozen.

        Raises:
            RunError: the weights would leave the peer nothing, or it must be reset first.
        """
        self._check_not_stale()
        if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
            raise RunError(
                f"the weights of peer {self.peer}, {dict(weights)}, must be > 0 with a sum < 1", code="share.weights"
            )
        ready = [neighbor for neighbor in sorted(weights) if self.is_ready(neighbor)]
        rest = 1 - sum(weight for neighbor, weight in weights.items() if neighbor not in ready)
        parts = {weight: self._parts(weight / rest) for weight in {weights[neighbor] for neighbor in ready}}
        for neighbor in ready:
            edge = self.edges[neighbor]
            values = parts[weights[neighbor]]
            number = edge.sent + 1
            ends = (self.peer, neighbor, self.incarnation, edge.incarnation)
            share = FrozenShare(*ends, number, self.boot, round_index, values)
            self.edges[neighbor] = replace(edge, sent=number, sent_boot=self.boot, frozen=(*edge.frozen, share))
            for name, part in values.items():
                self.mass[name] = self._arithmetic.subtract(self.mass[name], part)
        return ready

    def _parts(self, weight: float) -> dict[str, V]:
        return {name: self._arithmetic.part(value, weight) for name, value in self.mass.items()}

    def shares_to_send(self) -> list[FrozenShare[V]]:
        """Return every share on disk that is not acknowledged, of open edges: to be sent until it is."""
        edges = {} if self._durable is None else self._durable.edges
        frozen = [
            (share, self.edges[j].frozen) for j, edge in edges.items() if j in self._open for share in edge.frozen
        ]
        return [share for share, now in frozen if share in now]

    def owes(self, neighbor: int) -> bool:
        """Return whether a share for a neighbour has not been acknowledged."""
        return bool(self.edges[neighbor].frozen)

    def receive(self, share: FrozenShare[V]) -> bool:
        """Hold a share until it is absorbed.

        Returns:
            Whether it is held; False for one that was absorbed before, which is acknowledged again.

        Raises:
            RefusedError: it is not the next of an open edge between these two incarnations.
        """
        edge = self._open_edge(share.sender, share.receiver, share.incarnation, share.addressed)
        number = share.number
        agreed = self._agreed.get(share.sender)
        held = self._inbox.setdefault(share.sender, [])
        following = held[-1].number + 1 if held else edge.received + 1
        if number > following:
            raise self._closing(share.sender, f"sent share {number}, and {following} has to come first", "share.gap")
        if agreed and number >= agreed.sent:
            boot = agreed.sent_boot if number == agreed.sent else agreed.boot
            if share.boot != boot:
                raise RefusedError(
                    f"peer {share.sender} sent share {number} of a boot that its hello does not name", code="share.boot"
                )
        if number <= edge.received:
            self._unacknowledged.add(share.sender)
            return False
        if share.values.keys() != self.mass.keys():
            raise RefusedError(
                f"peer {share.sender} sent {sorted(share.values)}, and not {sorted(self.mass)}", code="share.names"
            )
        if number >= following:
            held.append(share)
        return True

    def has_passed(self, neighbor: int, round_index: int) -> bool:
        """Return whether a neighbour has committed a round, and all that it sent up to then has come in."""
        last = self._hellos.get(neighbor)
        held = self._inbox.get(neighbor)
        if last is None or last.round_index <= round_index:
            return False
        return last.sent <= (held[-1].number if held else self.edges[neighbor].received)

    def waiting_rounds(self) -> dict[int, int]:
        """Return the round of the last share that is held and not absorbed, by sender."""
        return {sender: held[-1].round_index for sender, held in self._inbox.items() if held}

    def absorb(self, up_to: int | None = None, first_weight: float = 0.0) -> list[FrozenShare[V]]:
        """Add the shares that are held to the mass, by sender.

        One that would make the mass infinite is dropped with all after it, and an edge that a handshake opened closes.

        Args:
            up_to: the last round whose shares to add; all when not given.
            first_weight: what a peer without any weight adds to that of its first shares, at their model.

        Returns:
            Those added.
        """
        self._check_not_stale()
        absorbed = []
        is_empty = first_weight > 0 and self._weight == 0
        for sender, held in sorted(self._inbox.items()):
            while held and (up_to is None or held[0].round_index <= up_to):
                share = held.pop(0)
                if not self._fits(share.values):
                    self.rejected[sender] += 1
                    held.clear()
                    if sender in self._agreed:
                        self.close(sender)
                    break
                self._add(share.values)
                self.edges[sender] = replace(self.edges[sender], received=share.number, received_boot=share.boot)
                absorbed.append(share)
        if is_empty and self._weight > 0:
            parts = self._parts(first_weight / self._weight)
            if self._fits(parts):
                self._add(parts)
        return absorbed

    @property
    def _weight(self) -> float:
        return float(self.mass["w"]) if "w" in self.mass else 0.0  # type: ignore[arg-type]

    def _fits(self, parts: Mapping[str, V]) -> bool:
        return all(self._arithmetic.fits(self.mass[name], part) for name, part in parts.items())

    def _add(self, parts: Mapping[str, V]) -> None:
        for name, part in parts.items():
            self.mass[name] = self._arithmetic.add(self.mass[name], part)

    def acknowledgements(self) -> list[Acknowledgement]:
        """Return what to acknowledge by now, once: new on disk, or requested by a repeated share."""
        due = sorted(self._unacknowledged & self._open)
        self._unacknowledged = set()
        edges = {j: self._on_disk(j) for j in due}
        return [
            Acknowledgement(
                self.peer, j, self.incarnation, edge.incarnation, self.boot, edge.received, edge.received_boot
            )
            for j, edge in edges.items()
            if edge.received
        ]

    def acknowledge(self, ack: Acknowledgement) -> bool:
        """Forget the shares that were acknowledged.

        Returns:
            Whether there was one; False for a repeated acknowledgement.

        Raises:
            RefusedError: it is about a share that was never sent, or the edge is not open between these incarnations.
            StaleStateError: the same, of an edge that `introduce` opened; the peer must be reset.
        """
        introduced = ack.sender in self._open and ack.sender not in self._agreed
        if introduced and ack.receiver == self.peer and ack.addressed > self.incarnation:
            raise self._stale(
                ack.addressed, f"peer {ack.sender} knows incarnation {ack.addressed:#x} of peer {self.peer}"
            )
        self._open_edge(ack.sender, ack.receiver, ack.incarnation, ack.addressed)
        disk = self._on_disk(ack.sender)
        agreed = self._agreed.get(ack.sender)
        if agreed and ack.boot != agreed.boot:
            raise RefusedError(
                f"peer {ack.sender} acknowledged something before its last start", code="share.acknowledgement"
            )
        boots = {share.number: share.boot for share in disk.frozen} | {disk.sent: disk.sent_boot}
        if ack.number > disk.sent or boots.get(ack.number, ack.share_boot) != ack.share_boot:
            why = (
                f"peer {ack.sender} acknowledged share {ack.number} of boot {ack.share_boot:#x}, and the last sent of "
                f"peer {self.peer} is {disk.sent} of {disk.sent_boot:#x}"
            )
            raise self._stale(self.incarnation, why) if introduced else RefusedError(why, code="share.acknowledgement")
        return self._forget(ack.sender, ack.number)

    def _forget(self, neighbor: int, number: int) -> bool:
        edge = self.edges[neighbor]
        frozen = tuple(share for share in edge.frozen if share.number > number)
        is_fewer = len(frozen) < len(edge.frozen)
        if is_fewer:
            self.edges[neighbor] = replace(edge, frozen=frozen)
        return is_fewer

    # --- edges ---

    def introduce(self, neighbor: int, incarnation: int) -> None:
        """Open an edge by the word of a directory that both sides trust, in place of a handshake.

        What was absorbed from the neighbour is acknowledged again, unless the edge is open already.

        Args:
            neighbor: another peer, also one that was not known before.
            incarnation: of the neighbour's state; a later one than before means that the state was lost.

        Raises:
            RefusedError: it is earlier than one that was introduced before; the edge closes.
        """
        edge = self.edges.setdefault(neighbor, Edge())
        if incarnation == edge.incarnation and neighbor in self._open:
            return
        if incarnation < edge.incarnation:
            self.close(neighbor)
            raise RefusedError(
                f"peer {neighbor} is introduced with incarnation {incarnation:#x}, which must not be before "
                f"{edge.incarnation:#x}: its state is an old copy, or its clock was set back",
                code="share.introduction",
            )
        if incarnation > edge.incarnation:
            self._meet(neighbor, incarnation)
        self._open.add(neighbor)
        self._unacknowledged.add(neighbor)

    def close(self, neighbor: int) -> None:
        """Record that a neighbour cannot be reached: nothing is frozen for it until its edge opens again."""
        self._open.discard(neighbor)

    def is_open(self, neighbor: int) -> bool:
        """Return whether the edge to a neighbour is open."""
        return neighbor in self._open

    @property
    def can_greet(self) -> bool:
        """Whether this incarnation is on disk, before which no neighbour may learn of it."""
        return self._durable is not None and self._durable.incarnation == self.incarnation

    @property
    def has_met(self) -> bool:
        """Whether this peer knows any neighbour."""
        return any(edge.incarnation for edge in self.edges.values())

    def hello(self, neighbor: int) -> Hello:
        """Return the next message of a handshake, which reports what is on disk.

        Raises:
            RunError: this incarnation is not on disk yet.
        """
        last = self._hellos.get(neighbor)
        if self._durable is None or not self.can_greet:
            raise RunError(
                f"peer {self.peer} must commit incarnation {self.incarnation:#x} before it greets a neighbour",
                code="share.uncommitted",
            )
        edge = self._on_disk(neighbor)
        now = self.edges[neighbor]
        held = self._inbox.get(neighbor)
        seen, seen_boot = (held[-1].number, held[-1].boot) if held else (now.received, now.received_boot)
        return Hello(
            sender=self.peer,
            receiver=neighbor,
            incarnation=self.incarnation,
            boot=self.boot,
            challenge=self._challenges[neighbor],
            answers=0 if last is None else last.challenge,
            opened=neighbor in self._open,
            round_index=self._durable.round_index,
            knows=edge.incarnation,
            sent=edge.sent,
            sent_boot=edge.sent_boot,
            acknowledged=min(now.sent - len(now.frozen), edge.sent),
            received=edge.received,
            seen=seen,
            seen_boot=seen_boot,
        )

    def receive_hello(self, theirs: Hello) -> Hello | None:
        """Take a neighbour's hello; the edge opens once it answers this boot and neither side is behind.

        Hellos may be lost, so a peer greets each neighbour whose edge is closed again from time to time.

        Returns:
            The hello to reply with, or None where nothing is left to say.

        Raises:
            RefusedError: another peer, or counters that cannot be.
            StaleStateError: this peer must be reset, commit and greet again.
        """
        self.check_hello(theirs)
        neighbor = theirs.sender
        before = self._hellos.get(neighbor)
        self._hellos[neighbor] = theirs
        if before is not None and before.boot != theirs.boot:  # it restarted, and so does the handshake
            self._challenges[neighbor] = self._challenges[neighbor] % LAST + 1
            self._objections.pop(neighbor, None)
            self.close(neighbor)
        if theirs.answers != self._challenges[neighbor]:
            return self.hello(neighbor)
        if theirs.incarnation > self.edges[neighbor].incarnation:
            self._meet(neighbor, theirs.incarnation)
        if self._agrees(theirs):
            self._open.add(neighbor)
            self._greeted.add(neighbor)
            self._agreed[neighbor] = theirs
            self._forget(neighbor, theirs.received)
            return None if theirs.opened else self.hello(neighbor)
        self.close(neighbor)
        objection = self.hello(neighbor)  # from which a neighbour that is behind learns it, unless it has it already
        before = self._objections.get(neighbor)
        self._objections[neighbor] = objection
        return None if objection == before else objection

    def check_hello(self, theirs: Hello) -> None:
        """Check a hello without acting on it.

        Raises:
            RefusedError: another peer, or counters that cannot be.
            RunError: this peer must be reset first.
        """
        self._check_not_stale()
        if theirs.sender not in self.edges or theirs.receiver != self.peer:
            raise RefusedError(
                f"peer {theirs.sender} greeted peer {theirs.receiver}, who are no neighbours here", code="edge.neighbor"
            )
        in_flight = theirs.sent - theirs.acknowledged
        if not 0 <= in_flight <= 1 or theirs.received > theirs.seen or not theirs.challenge:
            raise RefusedError(
                f"peer {theirs.sender} reports that {theirs.acknowledged} of {theirs.sent} shares are acknowledged, "
                f"and {theirs.received} of {theirs.seen} absorbed, which cannot be",
                code="edge.counters",
            )

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
        """Raise StaleStateError where this peer can have forgotten what a neighbour claims, else RefusedError."""
        far = (theirs.knows >> 32) - (self.incarnation >> 32) > FARTHEST
        if theirs.sender in self._greeted or far:
            raise self._closing(theirs.sender, f"lies, or has a stale state itself ({why})", "edge.lie")
        raise self._stale(theirs.knows, why, ", so it is reset and takes a neighbour's model")

    def _stale(self, since: int, why: str, consequence: str = "") -> StaleStateError:
        self._stale_since = max(since, self._stale_since or 0)
        return StaleStateError(f"{why}; the state of peer {self.peer} is an old copy{consequence}", code="share.stale")

    def _meet(self, neighbor: int, incarnation: int) -> None:
        """Start with a neighbour's new incarnation; what was sent to the one before is orphaned."""
        on_disk = () if self._durable is None else self._durable.edges.get(neighbor, Edge()).frozen
        for share in self.edges[neighbor].frozen:
            if share in on_disk:
                self.orphaned[neighbor] += 1
            else:  # it cannot have left
                self._add(share.values)
        self.edges[neighbor] = Edge(incarnation)
        self._open.discard(neighbor)
        self._agreed.pop(neighbor, None)
        self._inbox.pop(neighbor, None)
        self._unacknowledged.discard(neighbor)

    def _open_edge(self, sender: int, receiver: int, incarnation: int, addressed: int) -> Edge[V]:
        """Return the edge to a sender, which is open between these two incarnations."""
        self._check_not_stale()
        if sender not in self.edges or receiver != self.peer:
            raise RefusedError(
                f"peer {sender} sent something for peer {receiver}, who are no neighbours here", code="edge.neighbor"
            )
        if sender not in self._open:
            raise RefusedError(
                f"peer {sender} must greet peer {self.peer} first, which has started since, or lost it",
                code="edge.closed",
            )
        edge = self.edges[sender]
        if (incarnation, addressed) != (edge.incarnation, self.incarnation):
            raise RefusedError(
                f"peer {sender} sent something from incarnation {incarnation:#x} to {addressed:#x}, and the two are "
                f"{edge.incarnation:#x} and {self.incarnation:#x}",
                code="edge.incarnation",
            )
        return edge

    def _closing(self, neighbor: int, why: str, code: str) -> RefusedError:
        if neighbor not in self._agreed:
            return RefusedError(f"peer {neighbor} {why}", code=code)
        self.close(neighbor)
        return RefusedError(f"peer {neighbor} {why}; it has to greet peer {self.peer} again", code=code)

    def _check_not_stale(self) -> None:
        if self._stale_since is not None:
            raise RunError(f"the state of peer {self.peer} is an old copy and must be reset first", code="share.stale")


def behind(mine: Hello, theirs: Hello) -> str | None:
    """Return why the first of two sides has forgotten something that the second saw, or None.

    Args:
        mine, theirs: two sides of one edge, about the same two incarnations.
    """
    if theirs.seen > mine.sent:
        return f"peer {theirs.sender} has share {theirs.seen} of peer {mine.sender}, which remembers {mine.sent}"
    if theirs.seen == mine.sent and theirs.seen_boot != mine.sent_boot:
        return f"peer {theirs.sender} has a share {mine.sent} of peer {mine.sender} which that did not freeze"
    if theirs.acknowledged > mine.received:
        return (
            f"peer {mine.sender} acknowledged share {theirs.acknowledged} of peer {theirs.sender} and remembers "
            f"{mine.received}"
        )
    return None


def next_incarnation(after: int, boot: int) -> int:
    """Return an incarnation that is later than another, and no other peer's.

    Raises:
        RunError: there is none left.
    """
    count = (after >> 32) + 1
    if count >= 2**32:
        raise RunError(
            f"incarnation {after:#x} is the last there is; give this peer another id", code="share.last-incarnation"
        )
    return count << 32 | boot % 2**32
