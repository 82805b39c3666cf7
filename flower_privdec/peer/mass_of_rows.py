"""The mass of peers that wait for each other: what all have at a place follows from what all had at the one before.

    weights   a peer's push-sum weight at a place is the one that the graph gives it (`Timetable.push_weights`), always,
              whatever was killed, put back or lost
    rows      a peer's x at a place is the mixing of its senders' x at the place before, and its own steps since; so
              what a sender has at a place counts once at each receiver, whole, however often it was sent
    all       once all peers have come to a place, Σ w is the number of peers, and Σ x is what all began with and all
              steps since: nothing is on its way to an earlier place
    once      a peer writes a place once, and comes to the next one from there; a process that starts again writes the
              same rows

At an event in between, rows of two places are on disks. A sender at a later place has parted with what its receiver has
not added yet, and one at an earlier place still has what its receiver has added; with these, Σ is the same at each
event. A peer whose folder was put back or lost takes steps again, from an earlier place, and may have other rows there
than those that it sent before. Its neighbours count one or the other, whole: each version is remembered.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

from flower_privdec.core import Mix
from flower_privdec.core.robust_mix import RobustMix
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.mass_law import BrokenLawError, MassLaw, Moved, OnDisk, changed_disks
from flower_privdec.peer.virtual_network import VirtualNetwork

KEPT = 4  # places before the earliest peer's whose rows are remembered: a peer that is put back farther is refused
OTHER_ROWS = "came again with other rows"


class _AtPlace(OnDisk):
    """What a peer's disk holds at a place."""

    def __init__(self, checkpoint: Checkpoint, disk: object, moved: Moved | None) -> None:
        super().__init__(checkpoint, disk, moved)
        self.place: int = checkpoint.transport["place"]


class MassOfRows(MassLaw):
    """See the module; it watches exchanges that mix rows as they are, and believe everybody."""

    def __init__(self, moved: Moved | None) -> None:
        super().__init__(moved)
        self._held: dict[int, _AtPlace] = {}
        self._versions: dict[int, dict[int, list[_AtPlace]]] = defaultdict(dict)  # by place and peer

    def check(self, network: VirtualNetwork) -> None:
        for number, machine, before, newest in list(changed_disks(network, self._held)):
            if newest is None:
                del self._held[number]
                self.named["lost"] += 1
                continue

            now = _AtPlace(newest, machine.disk, self.moved)
            self._held[number] = now
            self._change(network.peers[number], number, before, now)
            self._check_weight(network.peers[number], number, now)
            self._remember(number, now)
            self._check_all(network, now.place)

    def _change(self, peer: Any, number: int, before: _AtPlace | None, now: _AtPlace) -> None:
        """Explain what became of one peer's disk."""
        if before is None:
            self.named["began"] += 1
            return
        if before.disk is not now.disk:
            self.named["put back"] += 1
            return
        if now.place == before.place:
            if self.is_off(now.weight, before.weight) or self.is_off(now.x, before.x):
                raise BrokenLawError(
                    f"peer {number} wrote place {now.place} twice, with x of sum {before.x:.12g} and then "
                    f"{now.x:.12g}: its neighbours may have had the first",
                    code="law.mass",
                )
            return
        if now.place != before.place + 1:
            raise BrokenLawError(f"peer {number} came from place {before.place} to {now.place}", code="law.mass")
        if self.moved is not None:
            self._check_mixing(peer, number, before, now)

    def _check_mixing(self, peer: Any, number: int, before: _AtPlace, now: _AtPlace) -> None:
        """Check that a peer has what its senders had at the place before, each of them whole and once."""
        turn = peer.timetable.turn(number, before.place)
        if not peer.arithmetic.is_exact or not isinstance(turn.exchange, Mix) or isinstance(turn.exchange, RobustMix):
            return

        own = 0.0
        parts = []  # for each sender, what each version of its rows adds
        for sender, weight in turn.parts.items():
            if sender == number:
                own = before.x * weight
                continue
            versions = self._versions[before.place].get(sender, [])
            if not versions:
                raise BrokenLawError(
                    f"peer {number} left place {before.place}, to which peer {sender}, of which it waits for rows "
                    "there, never came",
                    code="law.mass",
                )
            parts.append([version.x * weight for version in versions])

        steps = now.moved - before.moved
        mixed = [own + sum(choice) + steps for choice in product(*parts)]
        if all(self.is_off(now.x, one) for one in mixed):
            raise BrokenLawError(
                f"peer {number} has x of sum {now.x:.12g} at place {now.place}, and what it was sent at the place "
                f"before, and its steps, make it {mixed[0]:.12g}",
                code="law.mass",
            )

    def _check_weight(self, peer: Any, number: int, now: _AtPlace) -> None:
        """Check a peer's weight against the one that follows from the graph."""
        if "w" not in now.checkpoint.state.rows or not peer.knows_weights:
            return
        weight = float(peer.timetable.push_weights(now.place)[number])
        if self.is_off(now.weight, weight):
            raise BrokenLawError(
                f"peer {number} has weight {now.weight:.12g} at place {now.place}, where the graph makes it "
                f"{weight:.12g}",
                code="law.mass",
            )

    def _remember(self, number: int, now: _AtPlace) -> None:
        """Keep a peer's rows at a place, if they are others than it had there before."""
        versions = self._versions[now.place].setdefault(number, [])
        if all(self.is_off(now.x, known.x) for known in versions):
            versions.append(now)
            if len(versions) > 1:
                self.named[OTHER_ROWS] += 1

        earliest = min(held.place for held in self._held.values())
        for place in [place for place in self._versions if 0 < place < earliest - KEPT]:
            del self._versions[place]

    def _check_all(self, network: VirtualNetwork, place: int) -> None:
        """Check the sums at a place to which all peers have come, unless some came there with other rows again."""
        there = self._versions[place]
        begun = self._versions[0]
        everybody = network.machines.keys()
        if self.moved is None or not (there.keys() == begun.keys() == everybody):
            return
        if self.named[OTHER_ROWS]:
            return
        peer: Any = network.peers[min(everybody)]
        if not peer.arithmetic.is_exact or peer.robust is not None:
            return

        x = sum(versions[0].x - versions[0].moved for versions in there.values())
        began_with = sum(versions[0].x - versions[0].moved for versions in begun.values())
        weight = sum(versions[0].weight for versions in there.values())
        if self.is_off(x, began_with) or (peer.knows_weights and self.is_off(weight, len(there))):
            raise BrokenLawError(
                f"at place {place}, Σ w over all peers is {weight:.12g} and Σ x without their steps {x:.12g}, and they "
                f"began with {len(there)} and {began_with:.12g}",
                code="law.mass",
            )
