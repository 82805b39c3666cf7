"""Peers that wait for each other use every message once, in order, whatever the network does and whoever crashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from raising import raises

from flower_privdec.common.errors import RunError
from flower_privdec.pushsum.lockstep import Lockstep

Links = list[set[tuple[int, int]]]  # by place, repeated
PLACES = 6


@dataclass
class Device:
    """A peer: what is on its disk, and the machine that a crash takes away.

    Attributes:
        disk: the value at each of the last two places.
        machine: what it remembers of messages.
    """

    peer: int
    links: Links
    disk: dict[int, int]
    machine: Lockstep[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with what is on disk."""
        self.machine = Lockstep(self.peer, self._receivers, PLACES)
        for place in sorted(self.disk):
            self._arrive(place)

    def _receivers(self, place: int) -> set[int]:
        return {b for a, b in self.links[place % len(self.links)] if a == self.peer}

    def _arrive(self, place: int) -> None:
        value, links = self.disk[place], self.links[place % len(self.links)]
        outgoing = {b: hash((value, self.peer, b)) for b in self._receivers(place)} if place < PLACES else {}
        awaited = {a for a, b in links if b == self.peer} if place < PLACES else set()
        self.machine.arrive(place, outgoing, awaited)

    def step(self) -> None:
        """Go on to the next place, where everything is there."""
        place = self.machine.place
        if place == PLACES or self.machine.missing() or self.machine.behind(place - 1):
            return
        value = hash((self.disk[place], tuple(sorted(self.machine.received().items()))))
        self.disk = {place: self.disk[place], place + 1: value}
        self._arrive(place + 1)


def reference(links: Links, peers: int, places: int) -> list[int]:
    """Return every peer's value after some places, nothing having gone wrong."""
    values = [hash(("begin", peer)) for peer in range(peers)]
    for place in range(places):
        now = links[place % len(links)]
        heard = [tuple(sorted((a, hash((values[a], a, b))) for a, b in now if b == peer)) for peer in range(peers)]
        values = [hash((value, got)) for value, got in zip(values, heard, strict=True)]
    return values


def graphs(draw: random.Random, peers: int) -> Links:
    """Return a graph for each of a few places, which then come again."""
    pairs = [(a, b) for a in range(peers) for b in range(peers) if a != b]
    return [set(draw.sample(pairs, draw.randint(0, len(pairs)))) for _ in range(draw.randint(1, 3))]


def simulate(seed: int) -> None:
    """Run some peers over a network that drops, repeats, delays and reorders, with crashes, and compare."""
    draw = random.Random(seed)
    peers = draw.randint(2, 5)
    links = graphs(draw, peers)
    devices = [Device(peer, links, {0: hash(("begin", peer))}) for peer in range(peers)]
    under_way: list[tuple[int, int, int, int | None]] = []  # sender, receiver, place, item or None for the place alone
    sent: dict[tuple[int, int, int], int] = {}
    faults = draw.choice([0.0, 0.2, 0.6])
    for turn in range(4_000):
        if turn == 400:
            faults = 0.0
        device = devices[draw.randrange(peers)]
        if draw.random() < faults / 10:
            device.start()
        other = draw.randrange(peers)
        for place, item in device.machine.due(other):
            assert sent.setdefault((device.peer, other, place), item) == item, "sent something else"
            under_way.append((device.peer, other, place, item))
        under_way.append((device.peer, other, device.machine.place, None))
        for _ in range(draw.randint(0, 4)):
            if under_way:
                deliver(devices, under_way, draw, faults)
        device.step()
        if all(PLACES in device.disk for device in devices):
            break
    assert [device.disk.get(PLACES) for device in devices] == reference(links, peers, PLACES)


def simulate_many(schedules: int) -> None:
    for seed in range(schedules):
        simulate(seed)


def deliver(
    devices: list[Device], under_way: list[tuple[int, int, int, int | None]], draw: random.Random, faults: float
) -> None:
    """Deliver one message, or drop it, or leave it for another time too."""
    at = draw.randrange(len(under_way))
    sender, receiver, place, item = under_way[at] if draw.random() < faults else under_way.pop(at)
    if draw.random() < faults:
        return
    machine = devices[receiver].machine
    if item is None:
        machine.learn(sender, place)
    else:
        machine.take(sender, place, item)


def test_every_message_is_used_once_whatever_happens() -> None:
    simulate_many(1_500)


def forget_what_was_used(self: Lockstep[int, int], place: int, outgoing: dict[int, int], awaited: set[int]) -> None:
    self.place, self._awaited, self._sent = place, frozenset(awaited), {place: dict(outgoing)}
    self._heard = {at: items for at, items in self._heard.items() if at >= place}


def use_old_messages(self: Lockstep[int, int], sender: int, place: int, item: int) -> None:
    self._heard.setdefault(max(place, self.place), {}).setdefault(sender, item)


def take_the_last(self: Lockstep[int, int], sender: int, place: int, item: int) -> None:
    if place >= self.place:
        self._heard.setdefault(self.place, {})[sender] = item


MUTANTS: dict[str, Callable[..., object]] = {
    "arrive": forget_what_was_used,
    "take": use_old_messages,
    "take ": take_the_last,
    "behind": lambda self, place: set(),
    "missing": lambda self: set(),
    "due": lambda self, receiver: [(p, i[receiver]) for p, i in self._sent.items() if receiver in i and p > self.place],
    "learn": lambda self, other, place: self._places.update({other: place + 1}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_found(mutant: str) -> None:
    with (
        patch.object(Lockstep, mutant.strip(), MUTANTS[mutant]),
        pytest.raises((AssertionError, RunError)),
    ):
        simulate_many(300)


def test_rows_of_other_places_or_senders_are_refused() -> None:
    machine: Lockstep[int, int] = Lockstep(0, lambda place: (), 9)
    machine.arrive(0, {}, {1})
    machine.take(1, 0, 7)
    machine.take(1, 0, 8)
    assert machine.received() == {1: 7}
    with raises(RunError, "lockstep.sender", names="peer 2 at place 0"):
        machine.take(2, 0, 7)
    machine.take(1, 5, 7)
    with raises(RunError, "lockstep.too-many", names=r"place 7 before \[0, 5\]"):
        machine.take(1, 7, 7)
    for place in (9, -1, 1 << 63):
        with raises(RunError, "lockstep.place", names=f"place {place},"):
            machine.take(1, place, 7) if place >= 0 else machine.learn(1, place)


def test_a_peer_that_went_back_is_found_out() -> None:
    machine: Lockstep[int, int] = Lockstep(0, lambda place: {1} if place % 2 else {2}, 100)
    machine.arrive(4, {2: 1}, {1})
    machine.learn(1, 5)
    with raises(RunError, "lockstep.stale", names="peer 0"):
        machine.learn(1, 6)
