"""Exactly-once push-sum: a state machine without sockets, clocks or files. Messages in, messages out.

Push-sum moves mass, the pair (x, w), and peers read their model off as x / w. A lost message would take its part of the
mass with it, and push-sum would converge to something else or nowhere. Here none is lost:

    Σ mass on disk + Σ shares in flight = Σ initial mass + Σ updates on disk        (over all peers, exactly)

for any schedule of messages dropped, delayed, repeated or out of order, and of peers killed and restarted. A share is
in flight while its sender has it on disk and its receiver has not. (In floating point each addition rounds, as in any
mixing, but the number that is subtracted here is the number that is added there.)

A share passes through these states:

    state         who has it                    what happens next
    ------------  ----------------------------  -------------------------------------------------------------------
    frozen        the sender, in memory         `split` has subtracted it; `committed` puts it on disk
    in flight     the sender, on disk           `shares_to_send` yields it, the same each time, until it is acknowledged
    held          the receiver, in memory too   `receive` took it; `absorb` adds it to the mass
    absorbed      the receiver, in memory too   the receiver's next `committed` puts that on disk
    acknowledged  the receiver, on disk         `acknowledgements` yields it; at the sender `acknowledge` forgets it

A round of a peer, whose own numbers the caller holds (`mass`) and moves by its gradients:

1. An edge opens by a handshake (`hello`, `receive_hello`), or by a directory that both sides trust (`introduce`). A
   neighbour is ready while its edge is open and fewer than `window` shares to it are unacknowledged.
2. `split` freezes a share p_j (x, w) for each ready out-neighbour j, with its next number, and subtracts exactly the
   values that will be sent. p_j = W_j / (1 - Σ W of those that are not ready). That is the round's own column of
   weights if all are ready, 1 / (ready + 1) if weights are uniform, and never everything.
3. `snapshot` returns all that has to be on disk together. The caller writes it and then calls `committed`. Only then do
   `shares_to_send` and `acknowledgements` yield what follows from it. A caller may commit every few rounds.
4. A share that may have left is never taken back or replaced, since it may have arrived.
5. A share that was absorbed before is acknowledged again and not added again. After a gap in the numbers the edge
   closes.
6. An acknowledgement of a share that was not sent is refused.

Two numbers tell the past from the present:

- An *incarnation* is a peer's mass from its beginning to its loss. A peer that lost its state comes back as another
  incarnation with x = 0 and w = 0 (`reset`), and takes no step at x / w before its first share has come. To that share
  `absorb` adds the weight with which the peer began, at the share's model x / w: without it each lost state would take
  its weight from all others for good. The others forget the shares that they froze for the old incarnation. These are
  *orphaned*: x is lost together with its w, which moves no ratio. A share that was not committed cannot have left, and
  returns to its sender's mass.
- A *boot* is a random number that each start of a process draws. It tells messages of before a restart from those of
  after it, and two shares of one number from each other, if a peer froze that number twice.

The handshake exchanges incarnations, boots and counters. A hello counts only if it answers the challenge of the process
that receives it, so none is old. If a neighbour has seen more of a peer than the peer remembers, the peer's state is
stale, an old copy: `receive_hello` raises StaleStateError, and the peer must `reset`. The peer's own mass and the
shares in flight on its own edges are then lost, and nothing else. Shares that it sent between its restart and its first
contact with a neighbour that was ahead of it count twice, up to what it was restored with: so greet every neighbour
before the first split.

If a directory introduces the peers, each one acknowledges at every introduction the last share that it has of the
other. If that is a share which this peer does not remember, or is for a later incarnation of it, its state is stale:
`acknowledge` raises StaleStateError.

A neighbour may lie and claim that another has lost its state. It is believed only at its first handshake after the
other's start, so it can make a peer that has just started give up its own mass; a running peer refuses it. A share that
would make the mass infinite is rejected.

For a synchronous run, `absorb` takes shares up to a round, and `uncommitted` names the senders that wait for a commit
here: a graph that uses an edge in each round needs a commit after each mixing too. A machine is for one thread at a
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from flower_privdec.common.errors import RunError

LAST = 2**64 - 1  # the largest number that a frame can carry
FIRST = 2**32  # the first incarnation of a peer: the upper 32 bits count, the lower ones tell equal counts apart
FARTHEST = 2**16  # the most incarnations that a peer can be behind: a larger claim is a lie, and would use them up

V = TypeVar("V")


class RefusedError(RunError):
    """A message breaks the protocol; it changed nothing, except that its edge may now be closed."""


class StaleStateError(RunError):
    """A neighbour has seen more of this peer than its state on disk: the state is an old copy, and must be reset."""


@dataclass(frozen=True, eq=False)
class Shared(Generic[V]):
    """A part of a sender's mass, as it is sent and as both ends count it.

    Attributes:
        values: as encoded for the wire.
        parts: what the sender subtracts, and the receiver adds.
        told: what the receiver knows then of the sender's model, if the next share is encoded by that; else empty.
    """

    values: Mapping[str, V]
    parts: Mapping[str, V]
    told: Mapping[str, V]


class Arithmetic(Protocol[V]):
    """Operations on values. The first operand of `subtract` and `add` is not used again, so it may be changed."""

    @property
    def shares_parts(self) -> bool:
        """Return whether shares of equal weights are the same for all receivers; False if they depend on the edge."""

    def freeze(self, mass: Mapping[str, V], weight: float, told: Mapping[str, V], number: int) -> Shared[V]:
        """Return about weight times a mass: what of it can be encoded for the wire.

        Args:
            told: what the last share over this edge left in `Shared.told`; empty for the first.
            number: how many shares came before over this edge.
        """

    def open(
        self, values: Mapping[str, V], mass: Mapping[str, V], told: Mapping[str, V]
    ) -> tuple[Mapping[str, V], Mapping[str, V]]:
        """Return `Shared.parts` and `Shared.told` of values that came; the mass has the forms of the parts."""

    def times(self, value: V, factor: float) -> V:
        """Return a multiple of a value."""

    def subtract(self, value: V, part: V) -> V:
        """Return value - part."""

    def add(self, value: V, part: V) -> V:
        """Return value + part."""

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
        addressed: the receiver's incarnation; no other one may absorb the share.
        number: counts the shares of this edge between these two incarnations, from 1.
        boot: the boot of the process that froze it.
        round_index: the sender's round.
        values: one value for each name, as encoded for the wire.
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
        sender: the peer that sends this acknowledgement, so the one that absorbed the share.
        receiver: the peer that sent the share.
        incarnation, addressed: their incarnations.
        boot: the boot of the process that acknowledges.
        number, share_boot: number and boot of the share.
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
    """One message of a handshake: what its sender has on disk about both directions of an edge.

    Attributes:
        sender, receiver: peers.
        incarnation, boot: the sender's.
        challenge: the number that a reply to this has to name.
        answers: the receiver's challenge to which this replies; 0 in the first message.
        opened: whether the edge is open at the sender.
        round_index: the sender's round.
        knows: the receiver's incarnation that the counters are about; 0 for none.
        sent, sent_boot: the number of the last share sent, and the boot that froze it.
        acknowledged: the number of the last share that the receiver acknowledged.
        received: the number of the last share absorbed from the receiver.
        seen, seen_boot: number and boot of the last share that came from the receiver, on disk or not.
        want: whether the sender lacks weight, only for the driver: 0 if that is not known, 1 if it has none to spare,
            2 if it waits for some.
        level: how often the sender's weight floor sank, 0 to 15, only for the driver.
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
        incarnation: the neighbour's incarnation that the counters are about; 0 before the edge first opened.
        sent, sent_boot: the number of the last share frozen for it, and the boot that froze it.
        frozen: the shares that it has not acknowledged, in order.
        received, received_boot: number and boot of the last share absorbed from it.
        told, heard: what it knows of this peer's model by the share `sent`, and this peer of its by `received`; empty
            unless shares are encoded by it.
    """

    incarnation: int = 0
    sent: int = 0
    sent_boot: int = 0
    frozen: tuple[FrozenShare[V], ...] = ()
    received: int = 0
    received_boot: int = 0
    told: Mapping[str, V] = field(default_factory=dict)
    heard: Mapping[str, V] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Durable(Generic[V]):
    """All that has to be on disk together before anything that follows from it may leave.

    Attributes:
        incarnation: the peer's.
        round_index: the next round.
        mass: the values of the peer itself.
        edges: the counters by neighbour.
        number: counts the commits of a process, from 1; a state that was read from disk has 0.
    """

    incarnation: int
    round_index: int
    mass: Mapping[str, V]
    edges: Mapping[int, Edge[V]]
    number: int = 0


OnAdded = Callable[[FrozenShare[V], Mapping[str, V]], None]
Judged = Callable[[FrozenShare[V], Mapping[str, V]], Mapping[str, V]]


class PushSumProtocol(Generic[V]):
    """One peer's side of all its edges.

    Args:
        peer: its id.
        neighbors: all peers that it may ever send to or hear from, except those that `introduce` adds.
        boot: a random number from 1 to 2^64 - 1, drawn at this start of the process.
        mass: the peer's own values by name, which the caller changes too, between two calls.
        arithmetic: operations on these values.
        window: how many shares to one neighbour may be unacknowledged. More than 1 is only possible if edges open by
            `introduce`, since a hello carries the boot of one share.
        incarnation: the incarnation of a new state; a driver without handshakes gives one that is later than that of
            any earlier state.

    Attributes:
        orphaned: how many shares to each neighbour were given up because it lost its state.
        rejected: how many shares of each neighbour were not absorbed because they would have made the mass infinite.
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

        # State on disk, and shares on their way from memory to disk.
        self._durable: Durable[V] | None = None
        self._commits = 0
        self._inbox: dict[int, list[FrozenShare[V]]] = {}  # received and not absorbed, in order
        self._unacknowledged: set[int] = set()  # senders to acknowledge
        self._told_before: dict[int, Mapping[str, V]] = {}  # `Edge.told` before the last share
        self._split_off: list[Mapping[str, V]] = []  # the values of the last split's shares, until something is added

        # Edges and their handshakes.
        self._open: set[int] = set()
        self._hellos: dict[int, Hello] = {}  # the last hello of each neighbour
        self._challenges: dict[int, int] = dict.fromkeys(self.edges, boot)
        self._agreed: dict[int, Hello] = {}  # the hello on which the edge opened; none if a directory opened it
        self._objections: dict[int, Hello] = {}  # the last hello to each neighbour that did not agree
        self._greeted: set[int] = set()  # neighbours met since this start, whose claims are not believed any more
        self._stale_since: int | None = None  # set when stale: the incarnation that the next one has to exceed

    # --- state ---

    def restore(self, durable: Durable[V], with_new: bool = False) -> None:
        """Continue from a state read from disk, bit for bit; to be called before anything else.

        Args:
            with_new: whether there may be neighbours now of which the state knows nothing.

        Raises:
            RunError: the state is about other neighbours.
        """
        are_known = durable.edges.keys() <= self.edges.keys()
        if not are_known or (not with_new and len(durable.edges) < len(self.edges)):
            raise RunError(
                f"the state of peer {self.peer} on disk has neighbours {sorted(durable.edges)}, and the scenario "
                f"{sorted(self.edges)}; restore it from a copy, or delete it, and the peer joins as a new one",
                code="share.other-neighbors",
            )
        self.incarnation = durable.incarnation
        self._durable = replace(durable, number=0)
        self.edges.update(durable.edges)
        for name, value in durable.mass.items():
            self.mass[name] = self._arithmetic.copy(value)

    def reset(self) -> None:
        """Become a new incarnation without mass: x = 0, w = 0, and no share in flight."""
        last = max(self.incarnation, self._stale_since or 0)
        self.incarnation = next_incarnation(last, self.boot)
        self._stale_since = None

        for name in self.mass:
            self.mass[name] = self._arithmetic.nothing(self.mass[name])
        self.edges = {j: Edge(edge.incarnation) for j, edge in self.edges.items()}
        self._inbox.clear()
        self._open.clear()
        self._unacknowledged.clear()

    @property
    def round_index(self) -> int:
        """The round that is on disk."""
        if self._durable is None:
            return 0
        return self._durable.round_index

    def snapshot(self, round_index: int) -> Durable[V]:
        """Return all that has to be on disk together; it does not change while the machine continues."""
        self._check_not_stale()
        self._commits += 1

        # With weights 1/2 the peer's mass after a split equals its share. A share never changes, so it spares a copy.
        mass = dict[str, V]()
        for name, value in self.mass.items():
            equal_parts = (parts[name] for parts in self._split_off if self._arithmetic.same(value, parts[name]))
            part = next(equal_parts, None)
            mass[name] = self._arithmetic.copy(value) if part is None else part
        return Durable(self.incarnation, round_index, mass, dict(self.edges), self._commits)

    def committed(self, durable: Durable[V]) -> None:
        """Record that a snapshot is on disk, fsynced, in place of the one before.

        Raises:
            RunError: a later snapshot is on disk already.
        """
        before = self._durable
        if before is not None and durable.number <= before.number:
            raise RunError(
                f"commit {durable.number} of peer {self.peer} must come before commit {before.number}",
                code="share.commit-order",
            )

        # What is new on disk may be acknowledged now. After a restart that is all, for an acknowledgement may be lost.
        for neighbor, edge in durable.edges.items():
            if before is not None and edge is before.edges.get(neighbor):
                continue
            if before is None or edge.received != before.edges.get(neighbor, Edge()).received:
                self._unacknowledged.add(neighbor)
        self._durable = durable

    def uncommitted(self) -> set[int]:
        """Return the senders of shares that are absorbed and not committed; they cannot send more until then."""
        if self._durable is None or not self.can_greet:
            return {j for j, edge in self.edges.items() if edge.received}
        on_disk = self._durable.edges
        changed = [(j, edge) for j, edge in self.edges.items() if edge is not on_disk.get(j) and edge.received]
        return {j for j, edge in changed if self._on_disk(j).received != edge.received}

    def is_held(self, sender: int) -> bool:
        """Return whether a share of a sender is held, or absorbed and not committed."""
        if self._inbox.get(sender):
            return True
        received = self.edges[sender].received
        return received > 0 and self._on_disk(sender).received != received

    def _on_disk(self, neighbor: int) -> Edge[V]:
        """Return the edge that is on disk, or an empty one if that is about another incarnation of either peer."""
        now = self.edges[neighbor]
        if self._durable is None or not self.can_greet:
            return Edge(now.incarnation)

        edge = self._durable.edges.get(neighbor, Edge())
        if edge.incarnation != now.incarnation:
            return Edge(now.incarnation)
        return edge

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
        are_positive = all(weight > 0 for weight in weights.values())
        if not are_positive or not sum(weights.values()) < 1:
            raise RunError(
                f"the weights of peer {self.peer}, {dict(weights)}, must be > 0 with a sum < 1", code="share.weights"
            )

        # Neighbours that are not ready get nothing, so that the others' weights, and the peer's own, sum to `rest`.
        ready = [neighbor for neighbor in sorted(weights) if self.is_ready(neighbor)]
        rest = 1 - sum(weight for neighbor, weight in weights.items() if neighbor not in ready)

        # All of the mass before the split. Equal weights share one part, unless it depends on the edge.
        by_weight: dict[float, Shared[V]] = {}
        frozen_for: dict[int, Shared[V]] = {}
        for neighbor in ready:
            weight = weights[neighbor]
            edge = self.edges[neighbor]
            if weight not in by_weight or not self._arithmetic.shares_parts:
                by_weight[weight] = self._frozen(weight / rest, edge)
            frozen_for[neighbor] = by_weight[weight]

        for neighbor, shared in frozen_for.items():
            self._send_off(neighbor, shared, round_index)
        self._split_off = [shared.values for shared in by_weight.values()]
        return ready

    def _send_off(self, neighbor: int, shared: Shared[V], round_index: int) -> None:
        """Freeze a share for a neighbour, and subtract what it holds."""
        edge = self.edges[neighbor]
        self._told_before[neighbor] = edge.told
        share = FrozenShare(
            sender=self.peer,
            receiver=neighbor,
            incarnation=self.incarnation,
            addressed=edge.incarnation,
            number=edge.sent + 1,
            boot=self.boot,
            round_index=round_index,
            values=shared.values,
        )
        frozen = (*edge.frozen, share)
        self.edges[neighbor] = replace(edge, sent=share.number, sent_boot=self.boot, frozen=frozen, told=shared.told)
        for name, part in shared.parts.items():
            self.mass[name] = self._arithmetic.subtract(self.mass[name], part)

    def hand_over(self, round_index: int, receivers: Iterable[int]) -> list[int]:
        """Freeze shares that together are all of the mass, to the last bit, for a peer that leaves for good.

        The values on the wire must be the rows as they are, without a codec. What comes later can be handed over too.

        Args:
            round_index: the peer's round.
            receivers: who may get a part; those that are not ready get none.

        Returns:
            The neighbours for which a share was frozen; none if nobody is ready, and then the mass stays.
        """
        self._check_not_stale()
        ready = [neighbor for neighbor in sorted(receivers) if self.is_ready(neighbor)]
        for place, neighbor in enumerate(ready):
            # Of what is left each gets an equal part, and so the last one all of it.
            shared = self._frozen(1 / (len(ready) - place), self.edges[neighbor])
            self._send_off(neighbor, shared, round_index)
        self._split_off = []
        return ready

    def _frozen(self, weight: float, edge: Edge[V]) -> Shared[V]:
        """Return a weight times the mass, as encoded for the wire, for the next share over an edge."""
        return self._arithmetic.freeze(self.mass, weight, edge.told, edge.sent)

    def shares_to_send(self) -> list[FrozenShare[V]]:
        """Return the shares on disk that are not acknowledged, of open edges; send each until it is."""
        return [share for neighbor, edge in self.edges.items() if edge.frozen for share in self.shares_for(neighbor)]

    def shares_for(self, neighbor: int) -> list[FrozenShare[V]]:
        """Return those of them that are for a neighbour."""
        if self._durable is None or neighbor not in self._open:
            return []

        # What was acknowledged since the commit is not frozen in memory any more.
        on_disk = self._durable.edges.get(neighbor, Edge()).frozen
        return [share for share in on_disk if share in self.edges[neighbor].frozen]

    def owes(self, neighbor: int) -> bool:
        """Return whether a share for a neighbour has not been acknowledged."""
        return bool(self.edges[neighbor].frozen)

    def receive(self, share: FrozenShare[V]) -> bool:
        """Hold a share until it is absorbed.

        Returns:
            Whether it is held; False if it was absorbed before, in which case it is acknowledged again.

        Raises:
            RefusedError: it is not the next share of an open edge between these two incarnations.
        """
        edge = self._open_edge(share.sender, share.receiver, share.incarnation, share.addressed)
        number = share.number
        held = self._inbox.setdefault(share.sender, [])
        expected = edge.received + 1
        if held:
            expected = held[-1].number + 1
        if number > expected:
            raise self._closing(share.sender, f"sent share {number}, and {expected} has to come first", "share.gap")

        # The hello on which the edge opened named the boot of the last share before it. Later ones are of its own boot.
        agreed = self._agreed.get(share.sender)
        if agreed is not None and number >= agreed.sent:
            boot = agreed.boot
            if number == agreed.sent:
                boot = agreed.sent_boot
            if share.boot != boot:
                raise RefusedError(
                    f"peer {share.sender} sent share {number} of another start of its process than its hello names",
                    code="share.boot",
                )

        if number <= edge.received:
            self._unacknowledged.add(share.sender)
            return False
        if share.values.keys() != self.mass.keys():
            raise RefusedError(
                f"peer {share.sender} sent {sorted(share.values)}, and not {sorted(self.mass)}", code="share.names"
            )
        if number == expected:  # a lower number is held already
            held.append(share)
        return True

    def opened(self, share: FrozenShare[V]) -> Mapping[str, V] | None:
        """Return the parts of a share that came, and perhaps was not received yet; None if it was absorbed before."""
        edge = self.edges.get(share.sender, Edge())
        if share.number <= edge.received:
            return None
        parts, _ = self._arithmetic.open(share.values, self.mass, edge.heard)
        return parts

    def has_passed(self, neighbor: int, round_index: int) -> bool:
        """Return whether a neighbour has committed a round, and every share that it sent up to then is here."""
        last = self._hellos.get(neighbor)
        if last is None or last.round_index <= round_index:
            return False
        return last.sent <= self._last_seen(neighbor)[0]

    def _last_seen(self, neighbor: int) -> tuple[int, int]:
        """Return number and boot of the last share that came from a neighbour, absorbed or not."""
        held = self._inbox.get(neighbor)
        if held:
            return held[-1].number, held[-1].boot
        edge = self.edges[neighbor]
        return edge.received, edge.received_boot

    def waiting_rounds(self) -> dict[int, int]:
        """Return the round of the last share that is held and not absorbed, by sender."""
        return {sender: held[-1].round_index for sender, held in self._inbox.items() if held}

    def absorb(
        self,
        up_to: int | None = None,
        first_weight: float = 0.0,
        on_added: OnAdded[V] | None = None,
        judged: Judged[V] | None = None,
    ) -> list[FrozenShare[V]]:
        """Add the shares that are held to the mass, in the order of their senders.

        A share that would make the mass infinite is dropped with all after it. If a handshake opened its edge, the edge
        closes.

        Args:
            up_to: the last round whose shares to add; by default all are added.
            first_weight: the weight that a peer without any adds to its first shares, at their model.
            on_added: called with each share that was added, and the parts that came.
            judged: returns what to add of a share in place of what came, with the same weight.

        Returns:
            The shares that were added.
        """
        self._check_not_stale()
        if not any(self._inbox.values()):
            return []
        absorbed = []
        is_empty = first_weight > 0 and self._weight == 0

        for sender, held in sorted(self._inbox.items()):
            while held and (up_to is None or held[0].round_index <= up_to):
                share = held.pop(0)
                edge = self.edges[sender]
                parts, heard = self._arithmetic.open(share.values, self.mass, edge.heard)
                if not self._fits(parts):
                    self.rejected[sender] += 1
                    held.clear()
                    if sender in self._agreed:
                        self.close(sender)
                    break
                self._add(parts if judged is None else judged(share, parts))
                self.edges[sender] = replace(edge, received=share.number, received_boot=share.boot, heard=heard)
                absorbed.append(share)
                if on_added is not None:
                    on_added(share, parts)

        if is_empty and self._weight > 0:
            factor = first_weight / self._weight
            first = {name: self._arithmetic.times(value, factor) for name, value in self.mass.items()}
            if self._fits(first):
                self._add(first)
        return absorbed

    @property
    def _weight(self) -> float:
        """The peer's push-sum weight w."""
        return float(self.mass["w"]) if "w" in self.mass else 0.0  # type: ignore[arg-type]

    def _fits(self, parts: Mapping[str, V]) -> bool:
        """Return whether the mass stays finite when some values are added."""
        return all(self._arithmetic.fits(self.mass[name], part) for name, part in parts.items())

    def _add(self, parts: Mapping[str, V]) -> None:
        self._split_off = []
        for name, part in parts.items():
            self.mass[name] = self._arithmetic.add(self.mass[name], part)

    def acknowledgements(self) -> list[Acknowledgement]:
        """Return the acknowledgements that are due, each once: of what is new on disk, or came repeatedly."""
        due = sorted(self._unacknowledged & self._open)
        self._unacknowledged = set()

        acknowledgements = []
        for neighbor in due:
            edge = self._on_disk(neighbor)
            if edge.received == 0:
                continue
            acknowledgements.append(
                Acknowledgement(
                    sender=self.peer,
                    receiver=neighbor,
                    incarnation=self.incarnation,
                    addressed=edge.incarnation,
                    boot=self.boot,
                    number=edge.received,
                    share_boot=edge.received_boot,
                )
            )
        return acknowledgements

    def acknowledge(self, ack: Acknowledgement) -> bool:
        """Forget the shares that were acknowledged.

        Returns:
            Whether there were any; False for a repeated acknowledgement.

        Raises:
            RefusedError: it is about a share that was never sent, or the edge is not open between these incarnations.
            StaleStateError: the same, of an edge that `introduce` opened; the peer must be reset.
        """
        introduced = ack.sender in self._open and ack.sender not in self._agreed
        if introduced and ack.receiver == self.peer and ack.addressed > self.incarnation:
            raise self._stale(ack.addressed, f"peer {ack.sender} knows state {ack.addressed:#x} of peer {self.peer}")
        self._open_edge(ack.sender, ack.receiver, ack.incarnation, ack.addressed)
        disk = self._on_disk(ack.sender)
        agreed = self._agreed.get(ack.sender)
        if agreed is not None and ack.boot != agreed.boot:
            raise RefusedError(
                f"an acknowledgement of peer {ack.sender} is from before its last start", code="share.acknowledgement"
            )

        # A number that is not remembered any more was acknowledged before.
        boots = {share.number: share.boot for share in disk.frozen}
        boots[disk.sent] = disk.sent_boot
        is_another = boots.get(ack.number, ack.share_boot) != ack.share_boot
        if ack.number > disk.sent or is_another:
            why = (
                f"peer {ack.sender} acknowledged share {ack.number}, and the last that peer {self.peer} sent is "
                f"{disk.sent}"
            )
            if is_another:
                why = f"{why}; share {ack.number} was of another start of this peer"
            if introduced:
                raise self._stale(self.incarnation, why)
            raise RefusedError(why, code="share.acknowledgement")
        return self._forget(ack.sender, ack.number)

    def _forget(self, neighbor: int, number: int) -> bool:
        """Forget the shares to a neighbour up to a number; return whether there were any."""
        edge = self.edges[neighbor]
        frozen = tuple(share for share in edge.frozen if share.number > number)
        is_fewer = len(frozen) < len(edge.frozen)
        if is_fewer:
            self.edges[neighbor] = replace(edge, frozen=frozen)
        return is_fewer

    # --- edges ---

    def introduce(self, neighbor: int, incarnation: int) -> None:
        """Open an edge on the word of a directory that both sides trust, in place of a handshake.

        Unless the edge is open already, the last share absorbed from the neighbour is acknowledged again.

        Args:
            neighbor: another peer, which may be new here.
            incarnation: the incarnation of the neighbour's state; if it is later than before, the state was lost.

        Raises:
            RefusedError: it is earlier than one that was introduced before; the edge closes.
        """
        if self.has_introduced(neighbor, incarnation):
            return

        edge = self.edges.setdefault(neighbor, Edge())
        if incarnation < edge.incarnation:
            self.close(neighbor)
            raise RefusedError(
                f"peer {neighbor} is introduced with state {incarnation:#x}, older than {edge.incarnation:#x}: "
                "it is an old copy, or the peer's clock was set back",
                code="share.introduction",
            )
        if incarnation > edge.incarnation:
            self._meet(neighbor, incarnation)

        self._open.add(neighbor)
        self._unacknowledged.add(neighbor)

    def has_introduced(self, neighbor: int, incarnation: int) -> bool:
        """Return whether `introduce` would change nothing: the edge is open, between these incarnations."""
        return neighbor in self._open and self.edges[neighbor].incarnation == incarnation

    def close(self, neighbor: int) -> None:
        """Record that a neighbour cannot be reached: nothing is frozen for it until its edge opens again."""
        self._open.discard(neighbor)

    def is_open(self, neighbor: int) -> bool:
        """Return whether the edge to a neighbour is open."""
        return neighbor in self._open

    def open_of(self, neighbors: Iterable[int]) -> set[int]:
        """Return those of some neighbours whose edges are open."""
        return self._open.intersection(neighbors)

    @property
    def can_greet(self) -> bool:
        """Whether this incarnation is on disk; until then no neighbour may learn of it."""
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
        if self._durable is None or not self.can_greet:
            raise RunError(
                f"peer {self.peer} must put its state {self.incarnation:#x} on disk before it greets a neighbour",
                code="share.uncommitted",
            )

        last = self._hellos.get(neighbor)
        edge = self._on_disk(neighbor)
        now = self.edges[neighbor]
        seen, seen_boot = self._last_seen(neighbor)
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
            acknowledged=min(now.sent - len(now.frozen), edge.sent),  # never more than is said to be sent
            received=edge.received,
            seen=seen,
            seen_boot=seen_boot,
        )

    def receive_hello(self, theirs: Hello) -> Hello | None:
        """Take a neighbour's hello; the edge opens once it answers this process and neither side is behind.

        Hellos may be lost, so a peer greets each neighbour whose edge is closed again from time to time.

        Returns:
            The hello to reply with; None if nothing is left to say.

        Raises:
            RefusedError: it is of another peer, or its counters contradict each other.
            StaleStateError: this peer must be reset, commit and greet again.
        """
        self.check_hello(theirs)
        neighbor = theirs.sender
        before = self._hellos.get(neighbor)
        self._hellos[neighbor] = theirs

        # If the neighbour restarted, so does the handshake, with another challenge: old answers no longer count.
        if before is not None and before.boot != theirs.boot:
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
            # An acknowledgement may have been lost. The hello says what has arrived.
            self._forget(neighbor, theirs.received)
            if theirs.opened:
                return None
            return self.hello(neighbor)

        # A neighbour that is behind learns that from this hello. Sent twice, it could go to and fro for ever.
        self.close(neighbor)
        objection = self.hello(neighbor)
        last_objection = self._objections.get(neighbor)
        self._objections[neighbor] = objection
        if objection == last_objection:
            return None
        return objection

    def check_hello(self, theirs: Hello) -> None:
        """Check a hello without acting on it.

        Raises:
            RefusedError: it is of another peer, or its counters contradict each other.
            RunError: this peer must be reset first.
        """
        self._check_not_stale()
        if theirs.sender not in self.edges or theirs.receiver != self.peer:
            raise RefusedError(
                f"peer {theirs.sender} greeted peer {theirs.receiver}, who are not neighbours here",
                code="edge.neighbor",
            )
        in_flight = theirs.sent - theirs.acknowledged
        if not 0 <= in_flight <= 1 or theirs.received > theirs.seen or not theirs.challenge:
            raise RefusedError(
                f"peer {theirs.sender} reports that {theirs.acknowledged} of {theirs.sent} shares are acknowledged, "
                f"and {theirs.received} of {theirs.seen} absorbed, which cannot be",
                code="edge.counters",
            )

    def _agrees(self, theirs: Hello) -> bool:
        """Return whether each side remembers everything of its own that the other saw."""
        mine = self.hello(theirs.sender)
        if theirs.knows > self.incarnation:
            self._believe(theirs, f"peer {theirs.sender} knows state {theirs.knows:#x} of peer {self.peer}")
        if theirs.knows < self.incarnation or theirs.incarnation < mine.knows:
            return False
        if (why := behind(mine, theirs)) is not None:
            self._believe(theirs, why)
        return behind(theirs, mine) is None

    def _believe(self, theirs: Hello, why: str) -> None:
        """Raise StaleStateError if this peer can have forgotten what a neighbour claims, else RefusedError."""
        is_far = (theirs.knows >> 32) - (self.incarnation >> 32) > FARTHEST
        if theirs.sender in self._greeted or is_far:
            raise self._closing(theirs.sender, f"lies, or has a stale state itself ({why})", "edge.lie")
        raise self._stale(theirs.knows, why, ", so it is reset and takes a neighbour's model")

    def _stale(self, since: int, why: str, consequence: str = "") -> StaleStateError:
        """Stop this peer until it is reset to an incarnation after `since`, and return the error that says so."""
        self._stale_since = max(since, self._stale_since or 0)
        return StaleStateError(f"{why}; the state of peer {self.peer} is an old copy{consequence}", code="share.stale")

    def _meet(self, neighbor: int, incarnation: int) -> None:
        """Begin with a neighbour's new incarnation; shares that were sent to the previous one are orphaned."""
        on_disk: tuple[FrozenShare[V], ...] = ()
        if self._durable is not None:
            on_disk = self._durable.edges.get(neighbor, Edge()).frozen

        for share in self.edges[neighbor].frozen:
            if share in on_disk:
                self.orphaned[neighbor] += 1
            else:
                # It cannot have left. Codecs that send differences have one share under way, the last.
                told = self._told_before.get(neighbor, {})
                parts, _ = self._arithmetic.open(share.values, self.mass, told)
                self._add(parts)

        self.edges[neighbor] = Edge(incarnation)
        self._open.discard(neighbor)
        self._agreed.pop(neighbor, None)
        self._inbox.pop(neighbor, None)
        self._unacknowledged.discard(neighbor)

    def _open_edge(self, sender: int, receiver: int, incarnation: int, addressed: int) -> Edge[V]:
        """Return the edge to a sender, which is open between these two incarnations."""
        self._check_not_stale()

        # Both are neighbours, have greeted each other since the last start, and are in the same life as then.
        if sender not in self.edges or receiver != self.peer:
            raise RefusedError(
                f"peer {sender} sent something for peer {receiver}, who are not neighbours here", code="edge.neighbor"
            )
        if sender not in self._open:
            raise RefusedError(
                f"peer {sender} must greet peer {self.peer} first, which has started since, or lost it",
                code="edge.closed",
            )
        edge = self.edges[sender]
        if (incarnation, addressed) != (edge.incarnation, self.incarnation):
            raise RefusedError(
                f"peer {sender} sent something of its state {incarnation:#x} for state {addressed:#x} of peer "
                f"{self.peer}, and now these are {edge.incarnation:#x} and {self.incarnation:#x}: one was lost since",
                code="edge.incarnation",
            )
        return edge

    def _closing(self, neighbor: int, why: str, code: str) -> RefusedError:
        """Return an error about a neighbour, and close the edge if a handshake can open it again."""
        if neighbor not in self._agreed:
            return RefusedError(f"peer {neighbor} {why}", code=code)
        self.close(neighbor)
        return RefusedError(f"peer {neighbor} {why}; it has to greet peer {self.peer} again", code=code)

    def _check_not_stale(self) -> None:
        if self._stale_since is not None:
            raise RunError(f"the state of peer {self.peer} is an old copy and must be reset first", code="share.stale")


def behind(mine: Hello, theirs: Hello) -> str | None:
    """Return the reason why one side has forgotten something that the other side saw; None if it has not.

    Args:
        mine: the side that may have forgotten something.
        theirs: the other side of the edge, about the same two incarnations.
    """
    if theirs.seen > mine.sent:
        return f"peer {theirs.sender} has share {theirs.seen} of peer {mine.sender}, which remembers {mine.sent}"
    if theirs.seen == mine.sent and theirs.seen_boot != mine.sent_boot:
        return f"peer {theirs.sender} has another share {mine.sent} of peer {mine.sender} than the one remembered there"
    if theirs.acknowledged > mine.received:
        return (
            f"peer {mine.sender} acknowledged share {theirs.acknowledged} of peer {theirs.sender} and remembers "
            f"{mine.received}"
        )
    return None


def next_incarnation(after: int, boot: int) -> int:
    """Return an incarnation that is later than another. Its lower bits are random, so no two are equal.

    Raises:
        RunError: there is none left.
    """
    count = (after >> 32) + 1
    if count >= 2**32:
        raise RunError(
            f"state {after:#x} is the last that can be numbered; give this peer another id",
            code="share.last-incarnation",
        )
    return count << 32 | boot % 2**32
