"""The mass of push-sum peers that wait for nobody: every change of every disk is explained, to the last share.

    own      a peer's mass changes by its steps, by the shares that it froze, which it no longer has, and by those that
             it added, each of which its sender has, or had, on its disk, and each of which comes once
    all      Σ over the disks and the shares in flight between them changes by steps only, and by what is named here

A folder that is put back or lost breaks neither. What it costs is named when it happens, and is exactly that:

    put back, lost, began    the folder changes, with the shares that are in flight from it and to it
    reset                    the peer learns of it: it gives up its mass, its shares, and what was on its way to it
    joined late              a peer that had nothing of the run gives up the model with which all began
    took over                the first shares of a new life bring the weight with which the peer began, at their model
    arrived after all        a share was on its way when its sender's folder was put back, lost, or reset
    given up after all       a share was added and acknowledged, and then its receiver's folder was put back
    to a former life         a share was frozen for a life of its receiver that is over, before its sender heard of it

So a peer that was put back loses what it did since and no more, and what it sends before it learns of that is part of
what it was put back with. None is reset but a peer whose folder was put back or lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.mass_law import BrokenLawError, MassLaw, Moved, OnDisk, changed_disks, total
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.pushsum.exactly_once import Durable, Edge, FrozenShare
from flower_privdec.pushsum.frames import unpack

if TYPE_CHECKING:
    from torch import Tensor


class _Name(NamedTuple):
    """What tells a share from all others; see FrozenShare."""

    sender: int
    incarnation: int
    receiver: int
    addressed: int
    number: int
    boot: int

    @classmethod
    def of(cls, share: FrozenShare[Tensor]) -> _Name:
        return cls(share.sender, share.incarnation, share.receiver, share.addressed, share.number, share.boot)


@dataclass
class _Share:
    """A share that is, or was, on its sender's disk.

    Attributes:
        disk: the folder that held it last.
        was_added: whether its receiver had it on its disk.
    """

    weight: float
    x: float
    disk: object
    was_added: bool = False


class _Books(OnDisk):
    """What a peer's disk holds of push-sum.

    Attributes:
        durable: counters and shares.
        frozen: the names of the shares that it holds for others.
    """

    def __init__(self, number: int, checkpoint: Checkpoint, disk: object, moved: Moved | None) -> None:
        super().__init__(checkpoint, disk, moved)
        mass = {name: row[0] for name, row in checkpoint.state.rows.items() if name in ("x", "w")}
        self.durable: Durable[Tensor] = unpack(number, checkpoint.transport["shares"], checkpoint.carried, mass)
        self.frozen = [_Name.of(share) for share in self.shares()]

    @property
    def has_exchanged(self) -> bool:
        """Return whether it ever sent or added a share in this life."""
        return any(edge.sent or edge.received for edge in self.durable.edges.values())

    def shares(self) -> Iterable[FrozenShare[Tensor]]:
        """Yield the shares that it holds for others."""
        for edge in self.durable.edges.values():
            yield from edge.frozen


class MassOfShares(MassLaw):
    """See the module; all wire codecs but the exact one change what arrives, and are not for it."""

    def __init__(self, moved: Moved | None) -> None:
        super().__init__(moved)
        self._held: dict[int, _Books] = {}
        self._shares: dict[_Name, _Share] = {}
        self._replaced: set[int] = set()  # peers whose folder was ever put back or lost
        self._expected_weight = 0.0
        self._expected_x = 0.0

    def check(self, network: VirtualNetwork) -> None:
        changes = list(changed_disks(network, self._held))
        for number, machine, before, newest in changes:
            now = None
            if newest is not None:
                if "w" not in newest.state.rows:
                    return  # gossip: rows are sent as they are, and nothing is in flight
                now = _Books(number, newest, machine.disk, self.moved)

            # In one event one process goes on, or one folder is put back: the changes are looked at one by one.
            self._change(network, number, before, now)
        if changes:
            self._check_all([number for number, *_ in changes])

    def _change(self, network: VirtualNetwork, number: int, before: _Books | None, now: _Books | None) -> None:
        """Explain what became of one peer's disk."""
        self._held.pop(number, None)
        if now is not None:
            self._held[number] = now
            for share in now.shares():
                known = self._shares.setdefault(
                    _Name.of(share), _Share(float(share.values["w"]), total(share.values["x"]), now.disk)
                )
                known.disk = now.disk

        if now is None:
            self._replaced.add(number)
            self._accept("lost")
        elif before is None:
            self._accept("began")
        elif before.disk is not now.disk:
            self._replaced.add(number)
            self._accept("put back")
        elif now.durable.incarnation != before.durable.incarnation:
            self._accept(self._checked_reset(number, before, now))
        else:
            self._check_own(network, number, before, now)

    def _accept(self, name: str) -> None:
        """Record a change of one folder as a whole, by its name, and expect what is there now."""
        self.named[name] += 1
        self._expected_weight, self._expected_x = self._sums()

    # --- one peer ---

    def _checked_reset(self, number: int, before: _Books, now: _Books) -> str:
        """Check that a new life begins with nothing, and has a cause; return its name."""
        if now.weight or now.x or now.frozen:
            raise BrokenLawError(
                f"peer {number} began a new life with weight {now.weight:g}, x of sum {now.x:g} and {len(now.frozen)} "
                "shares for others, and not with nothing",
                code="law.mass",
            )
        if number in self._replaced:
            return "reset"
        if before.moved or before.has_exchanged:
            raise BrokenLawError(
                f"peer {number} gave up its mass, and its folder was never put back or lost", code="law.mass"
            )
        return "joined late"

    def _check_own(self, network: VirtualNetwork, number: int, before: _Books, now: _Books) -> None:
        """Check that a peer's own mass changed by its steps and by shares, and expect what that does to all of it."""
        gone = [name for name in before.frozen if name not in now.frozen]
        new = [name for name in now.frozen if name not in before.frozen]
        added = self._added(number, before, now)

        weight = before.weight
        x = before.x + now.moved - before.moved
        for name in added:
            weight += self._shares[name].weight
            x += self._shares[name].x
        for name in new:
            weight -= self._shares[name].weight
            x -= self._shares[name].x
        if before.weight == 0 and added:
            first_weight, first_x = self._taken_over(network, number, now, x, added)
            weight += first_weight
            x += first_x
        self._compare(f"peer {number}'s w", now.weight, weight)
        if self.moved is not None:
            self._compare(f"peer {number}'s x", now.x, x)

        self._expected_x += now.moved - before.moved
        for name in added:
            self._arrive(name)
        for name in gone:
            self._forget(name)
        for name in new:
            self._freeze(name)

    def _added(self, number: int, before: _Books, now: _Books) -> list[_Name]:
        """Return the shares that a peer's disk has since its last commit, and mark them as added."""
        added = []
        for sender, edge in now.durable.edges.items():
            known = before.durable.edges.get(sender)
            received = 0
            if known is not None and known.incarnation == edge.incarnation:
                received = known.received
            if edge.received == received:
                continue

            # The sender froze no second share before the first was acknowledged, so one comes in each commit.
            name = _Name(sender, edge.incarnation, number, now.durable.incarnation, edge.received, edge.received_boot)
            if edge.received != received + 1 or name not in self._shares:
                raise BrokenLawError(
                    f"peer {number} had {received} shares of peer {sender}, and now has share {edge.received}, which "
                    "was on no disk, or is not the next",
                    code="law.mass",
                )
            added.append(name)
        return added

    def _taken_over(
        self, network: VirtualNetwork, number: int, now: _Books, x: float, added: list[_Name]
    ) -> tuple[float, float]:
        """Return the weight and x with which a peer without any begins: the weight of its beginning, at their model.

        Which shares came first is not on disk: the model is between theirs.
        """
        peer: Any = network.peers[number]
        weight = peer.first_weight
        models = [self._shares[name].x / self._shares[name].weight for name in added]
        first_x = now.x - x
        if len(added) == 1:
            first_x = weight * models[0]
        elif not weight * min(models) <= first_x <= weight * max(models):
            self._compare(f"peer {number}'s first x", first_x, weight * models[0])

        self.named["took over"] += 1
        self._expected_weight += weight
        self._expected_x += first_x
        return weight, first_x

    # --- what it does to all ---

    def _arrive(self, name: _Name) -> None:
        """Account for a share that was added: it was in flight, unless its sender no longer has it."""
        share = self._shares[name]
        share.was_added = True
        sender = self._held.get(name.sender)
        if sender is not None and name in sender.frozen:
            return

        is_another = sender is None or sender.disk is not share.disk
        if not (is_another or sender is None or sender.durable.incarnation != name.incarnation):
            raise BrokenLawError(
                f"peer {name.receiver} added share {name.number} of peer {name.sender}, which no longer had it on its "
                "disk",
                code="law.mass",
            )
        self._expect("arrived after all", share, 1)

    def _forget(self, name: _Name) -> None:
        """Account for a share that its sender no longer has: its receiver has it, or had it."""
        share = self._shares[name]
        if not self._can_arrive(name):
            return
        if not share.was_added or name.receiver not in self._replaced:
            raise BrokenLawError(
                f"peer {name.sender} gave up share {name.number} for peer {name.receiver}, which has not added it",
                code="law.mass",
            )
        self._expect("given up after all", share, -1)

    def _freeze(self, name: _Name) -> None:
        """Account for a share that is new: it is in flight, unless it is for a life of its receiver that is over."""
        if self._can_arrive(name):
            return
        theirs = self._held.get(name.receiver)
        if theirs is not None and theirs.durable.incarnation == name.addressed:
            raise BrokenLawError(
                f"peer {name.sender} froze share {name.number} for peer {name.receiver}, which has had one of that "
                "number",
                code="law.mass",
            )
        self._expect("to a former life", self._shares[name], -1)

    def _expect(self, name: str, share: _Share, sign: int) -> None:
        """Expect a share more in all, or a share less, by a name."""
        self.named[name] += 1
        self._expected_weight += sign * share.weight
        self._expected_x += sign * share.x

    def _can_arrive(self, name: _Name) -> bool:
        """Return whether a share can still be added by its receiver, which has not, as far as disks say."""
        theirs = self._held.get(name.receiver)
        if theirs is None or theirs.durable.incarnation != name.addressed:
            return False
        edge = theirs.durable.edges.get(name.sender, Edge())  # a peer that joined may not be on its disk yet
        received = edge.received if edge.incarnation == name.incarnation else 0
        return edge.incarnation <= name.incarnation and name.number > received

    def _sums(self) -> tuple[float, float]:
        """Return Σ w and Σ x over the peers' disks, and what is in flight between them."""
        weight = 0.0
        x = 0.0
        for held in self._held.values():
            weight += held.weight
            x += held.x
            for name in held.frozen:
                if self._can_arrive(name):
                    weight += self._shares[name].weight
                    x += self._shares[name].x
        return weight, x

    def _check_all(self, changed: list[int]) -> None:
        weight, x = self._sums()
        self._compare(f"Σ w, after a change of the disks of peers {changed},", weight, self._expected_weight)
        if self.moved is not None:
            self._compare(f"Σ x, after a change of the disks of peers {changed},", x, self._expected_x)

    def _compare(self, what: str, found: float, expected: float) -> None:
        if self.is_off(found, expected):
            raise BrokenLawError(
                f"{what} is {found:.12g}, and {expected:.12g} was begun with, moved, sent and not lost by name",
                code="law.mass",
            )
