"""Random schedules of faults over peers that a relay introduces, each turn of which is a process of its own.

The relay loses messages, repeats them and delivers them in any order. A turn restores the peer from its disk, absorbs,
moves, splits and commits; it may be killed before the commit, or after it and before anything leaves. All numbers are
small multiples of 1/FINE, of which floats hold each exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

from share_schedules import FINE, Exact, Mass, frozen, minus, plus, zero

from flower_privdec.pushsum import exactly_once


class RelaySchedule:
    """One run of random events.

    Args:
        draw: where all of them come from.
        code: the module under test.
        window: how many shares to one neighbour may be unacknowledged.
    """

    def __init__(self, draw: Random, code: Any = exactly_once, window: int = 3) -> None:
        self.draw, self.code, self.window = draw, code, window
        self.peers = range(draw.randint(2, 4))
        self.latest = 0  # incarnation
        self.directory = {i: self.next_incarnation() for i in self.peers}
        self.disks: dict[int, list[Any]] = {i: [] for i in self.peers}
        self.network: list[Any] = []
        self.most = 0  # shares that one edge had under way
        self.expected = zero()
        for i in self.peers:
            self.begin(i, {"x": float(draw.randint(-9, 9)), "w": 1.0})

    def next_incarnation(self) -> int:
        self.latest += self.draw.randint(1, 9)
        return self.latest

    def process(self, i: int, mass: Mass, neighbors: Iterable[int] = ()) -> Any:
        boot, common = self.draw.getrandbits(64) or 1, {"window": self.window, "incarnation": self.directory[i]}
        return self.code.PushSumProtocol(i, neighbors, boot, mass, Exact(), **common)

    def begin(self, i: int, mass: Mass) -> None:
        machine = self.process(i, mass)
        self.disks[i].append(machine.snapshot(0))
        self.expected = plus(self.expected, mass)

    def restored(self, i: int, durable: Any = None) -> Any:
        durable = self.disks[i][-1] if durable is None else durable
        machine = self.process(i, zero(), durable.edges)
        machine.restore(durable)
        for j in self.peers:
            if j != i:
                machine.introduce(j, self.directory[j])
        return machine

    # Events.

    def event(self) -> None:
        i, kind = self.draw.choice(self.peers), self.draw.random()
        if kind < 0.9:
            self.turn(i)
        elif kind < 0.94:
            self.lose(i)
        elif kind < 0.97:
            self.restore_old_copy(i)
        else:
            self.introduce_old(i)
        assert self.total() == self.expected, f"Σ is {self.total()}, not {self.expected}"

    def turn(self, i: int, reliable: bool = False) -> None:
        machine, moved = self.restored(i), zero()
        self.deliver(machine, reliable)
        if machine.mass["w"] > 0 and not reliable:
            moved["x"] = self.draw.randint(-FINE, FINE) / FINE
            machine.mass["x"] += moved["x"]
            self.split(machine)
        if not reliable and self.draw.random() < 0.1:
            for word in machine.acknowledgements():
                assert word.number == self.disks[i][-1].edges[word.receiver].received, "acknowledged before the commit"
            return  # killed before it
        before, snapshot = self.total(), machine.snapshot(len(self.disks[i]))
        assert not machine.shares_to_send() or all(s in frozen(self.disks[i][-1]) for s in machine.shares_to_send())
        self.disks[i].append(snapshot)
        assert minus(self.total(), before) == moved, f"a commit of {i} changed the mass by more than its own update"
        self.expected = plus(self.expected, moved)
        if reliable or self.draw.random() < 0.9:
            machine.committed(snapshot)
            self.send(machine)

    def split(self, machine: Any) -> None:
        near = [j for j in self.peers if j != machine.peer and self.draw.random() < 0.8]
        edges = machine.edges
        ready = [j for j in near if len(edges[j].frozen) < self.window]
        assert machine.split(0, dict.fromkeys(near, 1 / (len(near) + 1))) == ready
        self.most = max(self.most, *(len(edge.frozen) for edge in machine.edges.values()))

    def send(self, machine: Any) -> None:
        acknowledgements = machine.acknowledgements()
        edges = self.disks[machine.peer][-1].edges
        absorbed = {j for j, edge in edges.items() if edge.received and edge.incarnation == self.directory[j]}
        assert {word.receiver for word in acknowledgements} == absorbed, "each turn acknowledges all that is on disk"
        self.network += [
            message for message in (*machine.shares_to_send(), *acknowledgements) if message not in self.network
        ]

    def deliver(self, machine: Any, reliable: bool) -> None:
        mine = [message for message in self.network if message.receiver == machine.peer]
        self.draw.shuffle(mine)
        if reliable:
            mine.sort(key=lambda message: message.number)
        for message in mine:
            if not reliable and self.draw.random() < 0.3:
                continue
            if reliable or self.draw.random() < 0.7:
                self.network.remove(message)  # else it comes again
            if reliable or self.draw.random() < 0.8:
                self.hear(machine, message)

    def hear(self, machine: Any, message: Any) -> None:
        try:
            if not hasattr(message, "values"):
                machine.acknowledge(message)
            elif machine.receive(message):
                assert machine.absorb() == [message]
        except self.code.RefusedError:
            edge = machine.edges[message.sender]
            past = (message.incarnation, message.addressed) != (edge.incarnation, machine.incarnation)
            gap = hasattr(message, "values") and message.number > edge.received + 1
            assert past or gap, f"{message} must not be refused"
            assert machine.is_open(message.sender), "nobody would open the edge again"

    def lose(self, i: int) -> None:
        """Delete a peer's disk: its mass and the shares in flight from it and to it are gone, and nothing else."""
        lost = dict(self.disks[i][-1].mass)
        for share in self.in_flight():
            if i in (share.sender, share.receiver):
                lost = plus(lost, share.values)
        self.expected = minus(self.expected, lost)
        self.disks[i], self.directory[i] = [], self.next_incarnation()
        self.begin(i, zero())

    def restore_old_copy(self, i: int) -> None:
        """Start a peer from an older copy: it is noticed where a neighbour absorbed what the copy does not know."""
        old = self.draw.choice(self.disks[i])
        seen = {j: self.disks[j][-1].edges[i] for j in self.peers if j != i and i in self.disks[j][-1].edges}
        seen = {j: edge for j, edge in seen.items() if edge.incarnation == self.directory[i]}
        known = {j: edge for j, edge in old.edges.items() if edge.incarnation == self.directory[j]}
        sent = {j: known[j].sent if j in known else 0 for j in seen}
        machine = self.restored(i, old)
        words = [word for j in seen for word in self.restored(j).acknowledgements() if word.receiver == i]
        try:
            for word in words:
                machine.acknowledge(word)
        except self.code.StaleStateError:
            assert any(edge.received > sent[j] for j, edge in seen.items()), f"{i} was no old copy"
        else:
            assert not any(edge.received > sent[j] for j, edge in seen.items()), f"{i} is an old copy"

    def introduce_old(self, i: int) -> None:
        """Introduce a neighbour as what it was before, which would let its dead shares count again."""
        machine, j = self.restored(i), self.draw.choice([j for j in self.peers if j != i])
        try:
            machine.introduce(j, self.directory[j] - 1)
        except self.code.RefusedError:
            assert not machine.is_open(j)
        else:
            raise AssertionError("a dead incarnation was introduced")

    # What is on disk.

    def in_flight(self) -> list[Any]:
        """Return the shares that are on their sender's disk, and not yet on their receiver's."""
        return [share for disk in self.disks.values() for share in frozen(disk[-1]) if self.will_be_absorbed(share)]

    def will_be_absorbed(self, share: Any) -> bool:
        receiver = self.disks[share.receiver][-1]
        edge = receiver.edges.get(share.sender, self.code.Edge())
        if (share.incarnation, share.addressed) != (self.directory[share.sender], receiver.incarnation):
            return False
        return bool(edge.incarnation < share.incarnation or edge.received < share.number)

    def total(self) -> Mass:
        total = zero()
        for mass in [disk[-1].mass for disk in self.disks.values()] + [share.values for share in self.in_flight()]:
            total = plus(total, mass)
        return total

    def settle(self) -> None:
        """Let every message arrive: nothing is left under way, and no share is kept that nobody will absorb."""
        for _ in range(4):
            for i in self.peers:
                self.turn(i, reliable=True)
        counts = Counter(share.receiver for disk in self.disks.values() for share in frozen(disk[-1]))
        assert not counts, f"shares for {counts} are left"
        assert self.total() == self.expected


def run_relay_schedule(draw: Random, code: Any = exactly_once, events: int = 40, window: int = 3) -> RelaySchedule:
    """Run one schedule to its end and check it throughout."""
    schedule = RelaySchedule(draw, code, window)
    for _ in range(events):
        schedule.event()
    schedule.settle()
    return schedule
