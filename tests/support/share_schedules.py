"""Random schedules of faults over peers that exchange shares, with every change of what is on disk accounted for.

The network keeps every message until it is delivered, twice if need be, or dropped; a disk keeps every commit, so that
an older one can be put back. All numbers are small multiples of 1/FINE, of which floats hold each exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import floor
from random import Random
from typing import Any

from flower_privdec.common.errors import RunError
from flower_privdec.pushsum import exactly_once

WIRE = 1024  # a share is a multiple of 1/WIRE; a mass is finer
FINE = 4096
Mass = dict[str, float]


class Exact:
    """Numbers that are cast to multiples of 1/WIRE where they leave."""

    shares_parts = True

    def freeze(self, mass: Mass, weight: float, told: Mass, number: int) -> Any:
        values = {name: floor(value * weight * WIRE) / WIRE for name, value in mass.items()}
        return exactly_once.Shared(values, values, told)

    def open(self, values: Mass, mass: Mass, told: Mass) -> tuple[Mass, Mass]:
        return values, told

    def counted(self, share: Any) -> Mass:
        """Return what a share takes away from its sender."""
        return dict(share.values)

    def times(self, value: float, factor: float) -> float:
        return value * factor

    def subtract(self, value: float, part: float) -> float:
        return value - part

    def add(self, value: float, part: float) -> float:
        return value + part

    def nothing(self, value: float) -> float:
        return 0.0

    def copy(self, value: float) -> float:
        return value

    def same(self, value: float, part: float) -> bool:
        return value == part

    def fits(self, value: float, part: float) -> bool:
        return True


class Differences(Exact):
    """Parts that are sent as the difference to the part before, over the same edge."""

    shares_parts = False

    def __init__(self) -> None:
        self._parts: list[tuple[Mass, Mass]] = []  # what was sent, and for which part

    def freeze(self, mass: Mass, weight: float, told: Mass, number: int) -> Any:
        parts = super().freeze(mass, weight, told, number).parts
        values = {name: part - told.get(name, 0.0) for name, part in parts.items()}
        self._parts.append((values, parts))
        return exactly_once.Shared(values, parts, parts)

    def open(self, values: Mass, mass: Mass, told: Mass) -> tuple[Mass, Mass]:
        parts = {name: value + told.get(name, 0.0) for name, value in values.items()}
        return parts, parts

    def counted(self, share: Any) -> Mass:
        return next(parts for values, parts in self._parts if values is share.values)


def plus(a: Mass, b: Mass) -> Mass:
    return {name: a[name] + b[name] for name in a}


def minus(a: Mass, b: Mass) -> Mass:
    return {name: a[name] - b[name] for name in a}


def frozen(durable: Any) -> list[Any]:
    return [share for edge in durable.edges.values() for share in edge.frozen]


def zero() -> Mass:
    return {"x": 0.0, "w": 0.0}


@dataclass
class Host:
    """A device: its process, which may be down, and its disk."""

    machine: Any = None
    disk: list[Any] = field(default_factory=list)
    writing: Any = None  # a snapshot, what was added to the mass since the one before, and which shares
    told: int = 0  # the incarnation of the last commit that the process knows to be on disk
    updates: Mass = field(default_factory=zero)
    absorbed: list[Any] = field(default_factory=list)
    rounds: int = 0
    alive: bool = True


class Schedule:
    """One run of random events.

    Args:
        draw: where all of them come from.
        code: the module under test.
        lost_disks: whether old checkpoints come back; in a quarter of the schedules when not given.
        arithmetic: of the shares.
    """

    def __init__(
        self,
        draw: Random,
        code: Any = exactly_once,
        lost_disks: bool | None = None,
        arithmetic: Exact | None = None,
    ) -> None:
        self.draw, self.code = draw, code
        self.arithmetic = arithmetic or Exact()
        n = draw.randint(2, 4)
        self.graph = {
            i: [j for j in range(n) if j != i and (j == (i + 1) % n or draw.random() < 0.4)] for i in range(n)
        }
        self.near = {i: {*self.graph[i], *(j for j in range(n) if i in self.graph[j])} for i in range(n)}
        self.network: list[Any] = []
        self.sent: list[Any] = []  # shares that ever left
        self.lost_disks = draw.random() < 0.25 if lost_disks is None else lost_disks
        self.liars = draw.random() < 0.3
        self.joins_late = draw.randrange(n) if draw.random() < 0.2 else None
        self.rollbacks: Counter[int] = Counter()
        self.ghosts: Counter[tuple[int, int]] = Counter()
        self.expected = zero()
        self.hosts = {i: Host() for i in range(n)}
        for i in self.hosts:
            if i != self.joins_late:
                self.begin(i, {"x": float(draw.randint(-9, 9)), "w": 1.0})
        if draw.random() < 0.8:
            for i in self.hosts:
                if i != self.joins_late:
                    self.talk(i)
            self.deliver_all()

    # What a device does.

    def process(self, i: int, mass: Mass) -> Any:
        boot = self.draw.getrandbits(64) or 1
        return self.code.PushSumProtocol(i, self.near[i], boot, mass, self.arithmetic)

    def begin(self, i: int, mass: Mass) -> None:
        host = self.hosts[i]
        host.machine, host.updates, host.told = self.process(i, mass), mass, 0
        self.snapshot(i)
        self.write(i)
        self.tell(i)
        host.rounds = 1

    def restart(self, i: int) -> None:
        host = self.hosts[i]
        host.updates, host.absorbed, host.writing = zero(), [], None
        if not host.disk:
            return self.begin(i, zero())
        host.machine = self.process(i, zero())
        host.machine.restore(host.disk[-1])
        host.told = host.disk[-1].incarnation
        return None

    def step(self, i: int) -> None:
        """Take a gradient step and hand on shares, to some of the neighbours in some rounds."""
        host, draw = self.hosts[i], self.draw
        if host.machine.mass["w"] > 0:
            moved = draw.randint(-FINE, FINE) / FINE
            host.machine.mass["x"] += moved
            host.updates["x"] += moved
        near = [j for j in self.graph[i] if draw.random() < 0.8]
        share = draw.choice([1 / (len(near) + 1), 1 / (len(near) + 2)])
        host.machine.split(host.rounds, dict.fromkeys(near, share))
        host.rounds += 1

    def absorb(self, i: int) -> None:
        self.hosts[i].absorbed += self.hosts[i].machine.absorb()

    def snapshot(self, i: int) -> None:
        host = self.hosts[i]
        host.writing = [host.machine.snapshot(host.rounds), host.updates, host.absorbed, False]
        host.updates, host.absorbed = zero(), []

    def write(self, i: int) -> None:
        """Put a snapshot on disk, and account for what that changes."""
        host = self.hosts[i]
        durable, updates, absorbed, _ = host.writing
        host.writing[3] = True
        before, old = self.around(i), host.disk[-1] if host.disk else None
        ghosts = [share for share in absorbed if not self.in_flight(share)]
        forgotten = [] if old is None else self.forgotten(old, durable)
        coming = self.coming(i)
        host.disk.append(durable)
        dead = [share for share in coming if share not in absorbed and not self.in_flight(share)]
        change = minus(self.around(i), before)
        if old is not None and old.incarnation != durable.incarnation:
            assert self.rollbacks[i], f"peer {i} began anew without a rollback"
            assert all(change[name] == -before[name] for name in change), f"the end of {i} cost others mass"
            updates = change
        elif old is None and self.rollbacks[i]:
            updates = change  # a share for the one who lost its disk is in flight again
        elif ghosts or (lost := forgotten + dead + self.stillborn(old, durable)):
            self.account(i, ghosts)
            ends = [(share.sender, share.receiver) for share in ([] if ghosts else lost)]
            assert all(self.rollbacks[a] or self.rollbacks[b] for a, b in ends), "a share is lost"
            updates = change
        assert change == updates, f"mass of {i}: {change}, updates {updates}"
        assert durable.mass["w"] > 0 or old is None or old.mass["w"] <= 0 or updates is change, f"{i} gave all away"
        self.expected = plus(self.expected, updates)
        for share in absorbed:
            assert share.addressed == durable.incarnation, "taken by another incarnation than it was for"
            assert share.incarnation >= (0 if old is None else old.edges[share.sender].incarnation), "of a dead one"

    def account(self, i: int, ghosts: list[Any]) -> None:
        """Count shares that their sender no longer has under way; only one that was rolled back has such."""
        for share in ghosts:
            self.ghosts[share.sender, i] += 1
            assert self.ghosts[share.sender, i] <= self.rollbacks[share.sender], f"share {share} counts twice"

    def forgotten(self, old: Any, durable: Any) -> list[Any]:
        """Return the shares that a peer no longer keeps though their receiver's disk lacks them.

        One that was never sent may be back in the peer's mass, where its receiver's incarnation is over.
        """
        kept = frozen(durable)
        shares = [share for share in frozen(old) if share not in kept]
        return [share for share in shares if self.in_flight(share) or share not in self.sent]

    def stillborn(self, old: Any, durable: Any) -> list[Any]:
        """Return the new shares that their receiver will not take, for either disk is not what it was."""
        before = [] if old is None else frozen(old)
        return [share for share in frozen(durable) if share not in before and not self.in_flight(share)]

    def tell(self, i: int) -> None:
        host = self.hosts[i]
        host.machine.committed(host.writing[0])
        host.told, host.writing = host.writing[0].incarnation, None

    def greet(self, i: int, j: int) -> None:
        if self.can_talk(i):
            self.post(self.hosts[i].machine.hello(j))

    def send(self, i: int) -> None:
        host = self.hosts[i]
        for share in host.machine.shares_to_send():
            assert share in host.disk[-1].edges[share.receiver].frozen, "leaves before it is on disk"
            self.post(share)
        for word in host.machine.acknowledgements():
            self.post(word)

    def post(self, message: Any) -> None:
        on_disk = self.hosts[message.sender].disk[-1]
        if not hasattr(message, "values"):
            taken = message.received if hasattr(message, "received") else message.number
            link = on_disk.edges[message.receiver]
            assert taken <= link.received or on_disk.incarnation != message.incarnation, "acknowledged too early"
        else:
            self.sent.append(message)
        self.network.append(message)

    def can_talk(self, i: int) -> bool:
        host = self.hosts[i]
        return host.alive and host.machine is not None and host.told == host.machine.incarnation

    def hear(self, message: Any) -> None:
        """Deliver a message to a process, which answers, refuses it, or finds that it has forgotten something."""
        i, host = message.receiver, self.hosts[message.receiver]
        if not self.can_talk(i):
            return
        try:
            reply = self.take(host.machine, message)
        except RunError as error:
            self.refused(i, message.sender, error)
        else:
            if reply is not None:
                self.post(reply)

    def take(self, machine: Any, message: Any) -> Any:
        if hasattr(message, "values"):
            machine.receive(message)
        elif hasattr(message, "number"):
            machine.acknowledge(message)
        else:
            return machine.receive_hello(message)
        return None

    def refused(self, i: int, sender: int, error: RunError) -> None:
        host = self.hosts[i]
        if type(error).__name__ == "RefusedError":
            return self.greet(i, sender)
        assert type(error).__name__ == "StaleStateError", error
        assert self.rollbacks[i], f"{i} was told that it forgot something: {error}"
        host.machine.reset()
        host.updates, host.absorbed = zero(), []
        if host.writing is not None and not host.writing[3]:
            host.writing = None
        return None

    # What is on disk.

    def durable(self, i: int) -> Any:
        return self.hosts[i].disk[-1] if self.hosts[i].disk else None

    def in_flight(self, share: Any) -> bool:
        """Return whether a share is on its sender's disk, and its receiver's has yet to take it."""
        sender, receiver = self.durable(share.sender), self.durable(share.receiver)
        if sender is None or share not in sender.edges[share.receiver].frozen:
            return False
        return receiver is not None and self.will_be_taken(share, receiver)

    def will_be_taken(self, share: Any, receiver: Any) -> bool:
        known = receiver.edges[share.sender]
        if receiver.incarnation != share.addressed or known.incarnation > share.incarnation:
            return False
        return known.incarnation < share.incarnation or known.received < share.number

    def around(self, i: int) -> Mass:
        """Return a peer's mass on disk with all shares in flight from it and to it."""
        durable = self.durable(i)
        if durable is None:
            return zero()
        total = {name: durable.mass[name] for name in ("x", "w")}
        own = [share for share in frozen(durable) if self.in_flight(share)]
        for share in own + self.coming(i):
            total = plus(total, self.arithmetic.counted(share))
        return total

    def coming(self, i: int) -> list[Any]:
        """Return the shares in flight to a peer."""
        others = [other for j in self.near[i] if (other := self.durable(j)) is not None]
        return [share for other in others for share in other.edges[i].frozen if self.in_flight(share)]

    # What goes wrong.

    def event(self) -> None:
        draw = self.draw
        i = draw.randrange(len(self.hosts))
        host = self.hosts[i]
        if host.machine is None:
            if draw.random() < 0.2:
                self.begin(i, zero())
            return
        kind = draw.random()
        if kind < 0.4:
            self.deliver()
        elif kind < 0.5:
            self.step(i)
        elif kind < 0.6:
            self.absorb(i)
        elif kind < 0.7:
            self.commit(i)
        elif kind < 0.77:
            self.talk(i)
        elif kind < 0.92:
            self.turn(i)
        elif kind < 0.97:
            self.crash(i)
        elif self.liars:
            self.lie(i, draw.choice(sorted(self.near[i])))

    def turn(self, i: int) -> None:
        """Do all that belongs to a round, one after the other."""
        for part in (self.absorb, self.step, self.commit, self.talk):
            part(i)

    def deliver(self) -> None:
        for _ in range(min(len(self.network), 4)):
            at = self.draw.randrange(len(self.network))
            message = self.network[at]
            fate = self.draw.random()
            if fate < 0.85:
                self.network[at] = self.network[-1]
                self.network.pop()
            if fate > 0.1:
                self.hear(message)

    def commit(self, i: int) -> None:
        """Begin to write a snapshot, or get it on disk, or hear that it is there; kills fall between all of them."""
        host = self.hosts[i]
        if host.writing is None:
            self.snapshot(i)
        if self.draw.random() < 0.8 and not host.writing[3]:
            self.write(i)
        if self.draw.random() < 0.8 and host.writing[3]:
            self.tell(i)

    def talk(self, i: int) -> None:
        self.send(i)
        for j in self.near[i]:
            if not self.hosts[i].machine.is_open(j) or self.draw.random() < 0.1:
                self.greet(i, j)

    def crash(self, i: int) -> None:
        """Kill a process and start it again, from its disk, or from what its disk was once."""
        host = self.hosts[i]
        if self.lost_disks and self.draw.random() < 0.3:
            before = self.around(i)
            host.disk = host.disk[: self.draw.randrange(len(host.disk))]
            self.rollbacks[i] += 1
            self.expected = plus(self.expected, minus(self.around(i), before))
        self.restart(i)

    def lie(self, i: int, liar: int) -> None:
        """Tell a running peer of shares that it never sent: it must refuse, and change nothing of its own."""
        host = self.hosts[i]
        if not self.can_talk(i) or not host.machine.is_open(liar):
            return
        durable, them = host.disk[-1], self.hosts[liar].disk[-1]
        link = durable.edges[liar]
        if them.incarnation == link.incarnation and self.draw.random() < 0.5:
            boot = self.hosts[liar].machine.boot
            word = exactly_once.Acknowledgement(liar, i, them.incarnation, durable.incarnation, boot, link.sent, 0)
            self.hear(replace(word, number=link.sent + self.draw.randint(1, 3)) if self.draw.random() < 0.5 else word)
            for share in them.edges[i].frozen:
                self.hear(replace(share, number=link.received + 9, boot=boot))
        elif host.machine.is_open(liar):
            hello = replace(host.machine.hello(liar), sender=liar, receiver=i, incarnation=link.incarnation)
            hello = replace(
                hello, boot=self.hosts[liar].machine.boot, answers=hello.challenge, knows=durable.incarnation
            )
            lie = replace(hello, received=link.sent + 1, seen=link.sent + 1)
            before, rolled = host.machine.incarnation, self.rollbacks[i]
            self.rollbacks[i] = 0
            self.hear(lie)
            self.rollbacks[i] = rolled
            assert host.machine.incarnation == before

    # The end.

    def settle(self) -> None:
        """Let everything be delivered without faults, until nothing is left to say."""
        for _ in range(8):
            for i, host in self.hosts.items():
                if host.machine is None:
                    self.begin(i, zero())
                if host.writing is None:
                    self.snapshot(i)
                if not host.writing[3]:
                    self.write(i)
                self.tell(i)
            for i in self.hosts:
                self.send(i)
                for j in self.near[i]:
                    if not self.hosts[i].machine.is_open(j):
                        self.greet(i, j)
            self.deliver_all()
            for i in self.hosts:
                self.absorb(i)
            if all(self.remembers(i, j) for i in self.hosts for j in self.near[i]):
                break

    def deliver_all(self) -> None:
        while self.network:
            self.hear(self.network.pop(0))

    def check_end(self) -> None:
        """Check that mass is as expected, that no share is left, and that whoever has forgotten something knows it."""
        total = zero()
        for i, host in self.hosts.items():
            total = plus(total, host.disk[-1].mass)
            for share in frozen(host.disk[-1]):
                if self.in_flight(share):
                    total = plus(total, self.arithmetic.counted(share))
            if sum(self.rollbacks.values()) <= 1:
                assert all(self.remembers(i, j) for j in self.near[i]), (
                    f"{i} has not settled with all of {self.near[i]}"
                )
        assert total == self.expected, f"Σ is {total}, not {self.expected}"

    def remembers(self, i: int, j: int) -> bool:
        """Return whether a peer's disk has of a neighbour what that one has of it, with no share between them left."""
        mine, theirs = self.durable(i), self.durable(j)
        link, other = mine.edges[j], theirs.edges[i]
        met = (link.incarnation, other.incarnation) == (theirs.incarnation, mine.incarnation)
        return met and not link.frozen and other.received == link.sent


def run_schedule(
    draw: Random,
    code: Any = exactly_once,
    events: int = 60,
    lost_disks: bool | None = None,
    arithmetic: Exact | None = None,
) -> Schedule:
    """Run one schedule to its end and check it throughout."""
    schedule = Schedule(draw, code, lost_disks, arithmetic)
    for _ in range(events):
        schedule.event()
    schedule.settle()
    schedule.check_end()
    return schedule
