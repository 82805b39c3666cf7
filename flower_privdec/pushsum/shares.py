"""Push-sum shares that are added exactly once, as a state machine without sockets, clocks or files.

A lost message would take its part of (x, w) with it, and push-sum would converge to something else or nowhere. Here
none is lost: over all peers, Σ mass on disk + Σ shares in flight = Σ initial mass + Σ updates on disk, exactly, for any
schedule of messages dropped, delayed, repeated or out of order and of peers killed and started again. A share is in
flight while its sender has it on disk and its receiver has not. (In floating point each addition rounds, as in any
mixing; the number subtracted here is the one added there.)

A round of a peer, whose own numbers the caller keeps (`mass`) and moves by its gradients:

1. A neighbour is ready when a handshake with it is open and no share to it is unacknowledged.
2. `split` freezes a share p_j (x, w) for each ready out-neighbour j, with its next number, and subtracts exactly the
   values that will be sent. p_j = W_j / (1 - Σ W of those that are not ready): the round's own column of weights where
   all are ready, 1 / (ready + 1) where weights are uniform, and never everything.
3. `snapshot` returns all that belongs together; the caller writes it and says so by `committed`. Only then do
   `shares_to_send` and `acknowledgements` yield what follows from it. A caller may commit every few rounds.
4. The same objects are sent until they are acknowledged, so a retry is the same bytes. A share that may have left is
   never taken back or made anew, for it may have arrived.
5. `receive` keeps a neighbour's next share, one per edge and in memory alone; `absorb` adds it, and the next commit
   acknowledges it. One that was taken already is acknowledged and not added. After a gap the handshake is due again.
6. `acknowledge` forgets a frozen share. An acknowledgement of what was not sent is refused.

The handshake swaps the scenario's hash, the protocol's version, incarnations, lives and counters. A hello counts only
when it answers the challenge of the process that hears it, so none is old. A neighbour that has seen more of a peer
than the peer remembers shows that the peer was rolled back. `receive_hello` then raises RolledBackError, and the peer
has to `begin_anew`: a new incarnation, x = 0, w = 0, and a model copied from a neighbour until its first share comes,
before which it must take no step at x / w. Who joins late or has lost its disk does the same. Others forget the share
that they froze for the dead incarnation: its mass is stranded, one share per edge at most, unless it was not committed
and so cannot have left. What the dead one still had under way counts only where its end is not yet known.

What a rollback costs: with the new incarnation the peer's own mass and the shares in flight on its own edges are gone,
and nothing else. What it handed on between its restart and the first neighbour that was ahead of it, at most what it
was restored with, counts twice: greet every neighbour before the first split.

What a neighbour that lies can do: its word about another's lost memory is believed at its first handshake after that
one's start alone, so it can make one that has just started give up its own mass; whoever runs on refuses it. A share
that would make the mass infinite is not taken.

For a synchronous run, `absorb` takes shares up to a round, and `uncommitted` names those who wait for a commit here: a
graph that uses an edge in each round needs a commit after each mixing too, and one that does not needs none.

A machine is for one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace

from flower_privdec.errors import RunError
from flower_privdec.pushsum.neighbors import Neighbors
from flower_privdec.pushsum.share_protocol import (
    LAST,
    Acknowledgement,
    Arithmetic,
    Durable,
    FrozenShare,
    PeerLink,
    RefusedError,
    V,
    next_incarnation,
)


class Shares(Neighbors[V]):
    """One peer's side of all its edges.

    Args:
        peer, neighbors, scenario, life: see Neighbors.
        mass: the peer's own values by name, which the caller moves too, between two calls.
        arithmetic: what to do with them.

    Attributes:
        spoiled: how many shares were not taken, by neighbour, because they would have made the mass infinite.
    """

    def __init__(
        self,
        peer: int,
        neighbors: Iterable[int],
        scenario: bytes,
        life: int,
        mass: MutableMapping[str, V],
        arithmetic: Arithmetic[V],
    ) -> None:
        """Begin with the mass given; nothing leaves before the first commit."""
        super().__init__(peer, neighbors, scenario, life)
        self.mass = mass
        self.spoiled: Counter[int] = Counter()
        self._arithmetic = arithmetic
        self._held: dict[int, FrozenShare[V]] = {}
        self._owed: set[int] = set()
        self._commits = 0

    def restore(self, durable: Durable[V]) -> None:
        """Go on from what was read from disk, bit for bit; to be called before anything else.

        Raises:
            RunError: it is about other neighbours.
        """
        if durable.links.keys() != self._links.keys():
            raise RunError(
                f"the state of peer {self.peer} on disk has neighbours {sorted(durable.links)}, and the scenario "
                f"{sorted(self._links)}; restore it from a copy, or let the peer join anew"
            )
        self.incarnation, self._durable = durable.incarnation, replace(durable, number=0)
        self._links.update(durable.links)
        for name, value in durable.mass.items():
            self.mass[name] = self._arithmetic.copy(value)

    def begin_anew(self) -> None:
        """Become a new incarnation with nothing of its own: x = 0, w = 0, and no share under way."""
        self.incarnation = next_incarnation(max(self.incarnation, self._beyond or 0), self.life)
        self._beyond = None
        for name in self.mass:
            self.mass[name] = self._arithmetic.nothing(self.mass[name])
        self._links = {j: PeerLink(link.incarnation) for j, link in self._links.items()}
        for forgotten in (self._held, self._open, self._owed):
            forgotten.clear()

    @property
    def round_index(self) -> int:
        """Return the round that is on disk."""
        return 0 if self._durable is None else self._durable.round_index

    # What leaves, and when.

    def is_ready(self, neighbor: int) -> bool:
        """Return whether a share for a neighbour may be frozen."""
        link = self._links[neighbor]
        return neighbor in self._open and link.frozen is None and link.sent < LAST

    def split(self, round_index: int, weights: Mapping[int, float]) -> list[int]:
        """Freeze a share for each ready out-neighbour and subtract it.

        Args:
            round_index: the peer's round.
            weights: W[j, peer] of each out-neighbour j in this round; with the peer's own they sum to 1.

        Returns:
            For whom.

        Raises:
            RunError: the weights would leave the peer nothing, or it has to begin anew first.
        """
        self._check_not_behind()
        if not all(weight > 0 for weight in weights.values()) or not sum(weights.values()) < 1:
            raise RunError(f"the weights of peer {self.peer}, {dict(weights)}, must be > 0 with a sum < 1")
        ready = [neighbor for neighbor in sorted(weights) if self.is_ready(neighbor)]
        kept = 1 - sum(weight for neighbor, weight in weights.items() if neighbor not in ready)
        parts = {weight: self._parts(weight / kept) for weight in {weights[neighbor] for neighbor in ready}}
        for neighbor in ready:
            self._freeze(neighbor, round_index, parts[weights[neighbor]])
        return ready

    def _parts(self, weight: float) -> dict[str, V]:
        return {name: self._arithmetic.part(value, weight) for name, value in self.mass.items()}

    def _freeze(self, neighbor: int, round_index: int, values: Mapping[str, V]) -> None:
        link = self._links[neighbor]
        number = link.sent + 1
        share = FrozenShare(
            self.peer, neighbor, self.incarnation, link.incarnation, number, self.life, round_index, values
        )
        self._links[neighbor] = replace(link, sent=number, sent_life=self.life, frozen=share)
        for name, part in values.items():
            self.mass[name] = self._arithmetic.subtract(self.mass[name], part)

    def snapshot(self, round_index: int) -> Durable[V]:
        """Return all that has to be on disk together; it stays as it is while the machine goes on."""
        self._check_not_behind()
        self._commits += 1
        mass = {name: self._still(name, value) for name, value in self.mass.items()}
        return Durable(self.incarnation, round_index, mass, dict(self._links), self._commits)

    def _still(self, name: str, value: V) -> V:
        """Return a value as it is now: one's own share where that is the same, which never changes, else a copy."""
        frozen = (link.frozen.values[name] for link in self._links.values() if link.frozen is not None)
        same = next((part for part in frozen if self._arithmetic.same(value, part)), None)
        return self._arithmetic.copy(value) if same is None else same

    def committed(self, durable: Durable[V]) -> None:
        """Take note that a snapshot is on disk, fsynced, in the place of the one before.

        Raises:
            RunError: a later one is there already.
        """
        before = self._durable
        if before is not None and durable.number <= before.number:
            raise RunError(f"commit {durable.number} of peer {self.peer} must come before commit {before.number}")
        for neighbor, link in durable.links.items():
            if before is None or link.received != before.links[neighbor].received:
                self._owed.add(neighbor)
        self._durable = durable

    def uncommitted(self) -> set[int]:
        """Return whose shares were absorbed and not committed: they are not ready to send until then."""
        now = {j: link.received for j, link in self._links.items() if link.received}
        return {j for j, received in now.items() if self._on_disk(j).received != received}

    def shares_to_send(self) -> list[FrozenShare[V]]:
        """Return every share that is on disk and not acknowledged, of open neighbours: to be sent until it is."""
        links = {} if self._durable is None else self._durable.links
        frozen = [(link.frozen, self._links[j].frozen) for j, link in links.items() if j in self._open]
        return [share for share, now in frozen if share is not None and share is now]

    def owes(self, neighbor: int) -> bool:
        """Return whether a share for a neighbour has not been acknowledged."""
        return self._links[neighbor].frozen is not None

    def acknowledgements(self) -> list[Acknowledgement]:
        """Return what to acknowledge by now, once: new on disk, or asked for by a repeated share."""
        due, self._owed = sorted(self._owed & self._open), set()
        links = {j: self._on_disk(j) for j in due}
        taken = {j: (link.incarnation, self.life, link.received, link.received_life) for j, link in links.items()}
        return [
            Acknowledgement(self.peer, j, self.incarnation, *what) for j, what in taken.items() if links[j].received
        ]

    # What comes in.

    def receive(self, share: FrozenShare[V]) -> bool:
        """Keep a share until it is absorbed.

        Returns:
            Whether it is kept; False for one that was taken before, which is acknowledged again.

        Raises:
            RefusedError: it is not the next of an open edge between these two incarnations.
        """
        link = self._known(share.sender, share.receiver, share.incarnation, share.addressed)
        number, agreed = share.number, self._agreed[share.sender]
        if number > link.received + 1:
            raise self._closing(share.sender, f"sent share {number}, and {link.received + 1} has to come first")
        if number >= agreed.sent and share.life != (agreed.sent_life if number == agreed.sent else agreed.life):
            raise RefusedError(f"peer {share.sender} sent share {number} of a life of which it does not know any more")
        if number <= link.received:
            self._owed.add(share.sender)
            return False
        if share.values.keys() != self.mass.keys():
            raise RefusedError(f"peer {share.sender} sent {sorted(share.values)}, and not {sorted(self.mass)}")
        self._held.setdefault(share.sender, share)
        return True

    def waiting_rounds(self) -> dict[int, int]:
        """Return the round of each share that is kept and not absorbed, by sender."""
        return {sender: share.round_index for sender, share in self._held.items()}

    def absorb(self, up_to: int | None = None) -> list[FrozenShare[V]]:
        """Add the shares that are kept to the mass, by sender.

        Args:
            up_to: the last round whose shares to add; all when not given.

        Returns:
            Those added.
        """
        self._check_not_behind()
        due = [s for _, s in sorted(self._held.items()) if up_to is None or s.round_index <= up_to]
        return [share for share in due if self._add(share)]

    def _add(self, share: FrozenShare[V]) -> bool:
        """Add a share, unless it would make the mass infinite: then it is dropped and its sender has to greet anew."""
        del self._held[share.sender]
        if not all(self._arithmetic.fits(self.mass[name], part) for name, part in share.values.items()):
            self.spoiled[share.sender] += 1
            self.close(share.sender)
            return False
        self._put_in(share.values)
        link = self._links[share.sender]
        self._links[share.sender] = replace(link, received=share.number, received_life=share.life)
        return True

    def _put_in(self, values: Mapping[str, V]) -> None:
        for name, part in values.items():
            self.mass[name] = self._arithmetic.add(self.mass[name], part)

    def acknowledge(self, word: Acknowledgement) -> bool:
        """Forget the share that was acknowledged.

        Returns:
            Whether there was one; False for a repeated word.

        Raises:
            RefusedError: it is about a share that was never sent, or the edge is not open between these incarnations.
        """
        link = self._known(word.sender, word.receiver, word.incarnation, word.addressed)
        disk = self._on_disk(word.sender)
        if word.life != self._agreed[word.sender].life:
            raise RefusedError(f"peer {word.sender} acknowledged something before its last start")
        if word.number > disk.sent or (word.number == disk.sent and word.share_life != disk.sent_life):
            raise RefusedError(f"peer {word.sender} acknowledged share {word.number}, and the last sent is {disk.sent}")
        return self._forget(word.sender, link, word.number)

    def _meet(self, neighbor: int, incarnation: int) -> None:
        share = self._links[neighbor].frozen
        on_disk = None if self._durable is None else self._durable.links[neighbor].frozen
        super()._meet(neighbor, incarnation)
        if share is not None and share is not on_disk:  # it cannot have left
            self.stranded[neighbor] -= 1
            self._put_in(share.values)
        self._held.pop(neighbor, None)
        self._owed.discard(neighbor)

    def _seen(self, neighbor: int) -> tuple[int, int]:
        kept = self._held.get(neighbor)
        return super()._seen(neighbor) if kept is None else (kept.number, kept.life)
