"""Whom a peer waits for that goes on without the others, in a world whose time is counted and not measured."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from flower_privdec.runtime.network.punctuality import Punctuality

ROUNDS, LATENCY = 800, 0.05


@dataclass
class Walker:
    """A peer that takes `step(now)` seconds a round and waits for its neighbours as `Punctuality` says, twice.

    First until they have acknowledged its last share, which they do at the end of their round, or have sent something;
    then for theirs.
    """

    number: int
    step: Callable[[float], float]
    neighbors: tuple[int, ...]
    punctual: Punctuality = field(init=False)
    rounds: int = 0
    heard: dict[int, int] = field(default_factory=dict)  # the last round of each
    used: dict[int, int] = field(default_factory=dict)
    owing: set[int] = field(default_factory=set)  # who has not acknowledged a share
    late: set[int] = field(default_factory=set)
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.punctual = Punctuality(self.neighbors, 10.0)
        self.punctual.start(0.0, self.neighbors)

    def new(self) -> set[int]:
        return {j for j in self.neighbors if self.heard.get(j, -1) > self.used.get(j, -1)}

    def there(self) -> set[int]:
        return {j for j in self.neighbors if self.heard.get(j, -1) >= self.rounds} | self.new()

    def is_ready(self) -> bool:
        return not any(self.punctual.is_awaited(j) for j in self.owing - self.new())

    def is_done(self) -> bool:
        return not any(self.punctual.is_awaited(j) for j in set(self.neighbors) - self.there() - self.late)


class World:
    """Events in the order of their time."""

    def __init__(self, walkers: list[Walker]) -> None:
        self.walkers, self.now, self._count = walkers, 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._preparing: set[int] = set()
        self._waiting: set[int] = set()

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def run(self, rounds: int = ROUNDS) -> None:
        for walker in self.walkers:
            self._step(walker, rounds)
        while self._events and any(walker.rounds < rounds for walker in self.walkers if walker.step(0.0) <= 1.0):
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _step(self, walker: Walker, rounds: int) -> None:
        self.at(self.now + walker.step(self.now), lambda: self._prepare(walker, rounds))

    def _prepare(self, walker: Walker, rounds: int) -> None:
        now = walker.rounds
        walker.punctual.begin(self.now, {j: sent + 1 for j, sent in walker.heard.items()})
        self._preparing.add(walker.number)
        self.at(self.now + walker.punctual.patience, lambda: self._send(walker, now, rounds))
        self._look(walker, rounds)

    def _send(self, walker: Walker, now: int, rounds: int) -> None:
        if walker.rounds != now or walker.number not in self._preparing:
            return
        self._preparing.discard(walker.number)
        self._waiting.add(walker.number)
        walker.late = set(walker.owing)
        for j in set(walker.neighbors) - walker.owing:
            self.at(self.now + LATENCY, lambda j=j: self._arrive(walker.number, j, now, rounds))  # type: ignore[misc]
        walker.owing = set(walker.neighbors)
        self.at(self.now + walker.punctual.patience, lambda: self._end(walker, now, rounds))
        self._look(walker, rounds)

    def _arrive(self, sender: int, receiver: int, sent: int, rounds: int) -> None:
        walker = self.walkers[receiver]
        walker.heard[sender] = max(sent, walker.heard.get(sender, -1))
        self._look(walker, rounds)

    def _acknowledge(self, sender: int, receiver: int, rounds: int) -> None:
        self.walkers[receiver].owing.discard(sender)
        self._look(self.walkers[receiver], rounds)

    def _look(self, walker: Walker, rounds: int) -> None:
        if walker.number in self._preparing and walker.is_ready():
            self._send(walker, walker.rounds, rounds)
        if walker.number in self._waiting and walker.there():
            walker.punctual.came(self.now)
        if walker.number in self._waiting and walker.is_done():
            self._end(walker, walker.rounds, rounds)

    def _end(self, walker: Walker, now: int, rounds: int) -> None:
        if walker.rounds != now or walker.number not in self._waiting:
            return
        self._waiting.discard(walker.number)
        there = walker.there()
        walker.punctual.end(self.now, there, set(walker.neighbors) - there)
        for j in walker.new():
            self.at(self.now + LATENCY, lambda j=j: self._acknowledge(walker.number, j, rounds))  # type: ignore[misc]
        walker.used = dict(walker.heard)
        walker.rounds += 1
        walker.ends.append(self.now)
        if walker.rounds < rounds:
            self._step(walker, rounds)


def complete(*steps: Callable[[float], float]) -> World:
    everybody = range(len(steps))
    return World([Walker(i, step, tuple(j for j in everybody if j != i)) for i, step in enumerate(steps)])


def seconds(walker: Walker) -> float:
    return walker.ends[-1]


def equal(now: float) -> float:
    return 1.0


def test_equal_peers_wait_for_each_other_in_every_round() -> None:
    world = complete(equal, equal, equal)
    world.run()
    for walker in world.walkers:
        assert all(walker.punctual.is_awaited(j) for j in walker.neighbors)
        assert seconds(walker) == pytest.approx(ROUNDS * (1 + LATENCY))


@pytest.mark.parametrize("slow", [lambda now: 10.0, lambda now: 1e9, lambda now: 1.0 if now < 50 else 1e9])
def test_a_peer_that_is_ten_times_slower_or_stops_leaves_the_others_95_percent_of_their_speed(
    slow: Callable[[float], float],
) -> None:
    world = complete(equal, equal, equal, slow)
    world.run()
    for walker in world.walkers[:3]:
        assert walker.rounds == ROUNDS
        assert walker.ends[60] <= 45 + 60 * (1 + LATENCY)  # it takes a moment to find out who is slow
        assert walker.ends[-1] - walker.ends[60] <= (ROUNDS - 61) * (1 + LATENCY) / 0.95
        assert all(walker.punctual.is_awaited(j) for j in walker.neighbors if j != 3)


def test_who_comes_back_is_waited_for_again() -> None:
    world = complete(equal, equal, lambda now: 100.0 if 100 < now < 150 else 1.0)
    world.run()
    assert world.walkers[0].punctual.is_awaited(1)
    late, others = world.walkers[2], world.walkers[:2]
    assert seconds(others[0]) < ROUNDS * (1 + LATENCY) / 0.95
    assert late.rounds > ROUNDS / 2


def test_a_bad_moment_of_one_of_equal_peers_is_forgiven() -> None:
    """Now and then a peer is held up for some rounds; the others do not go on without it for long."""

    def held_up(when: float) -> Callable[[float], float]:
        return lambda now: 8.0 if int(now) % 60 == when else 1.0

    world = complete(equal, held_up(10), held_up(40), equal)
    world.run()
    for walker in world.walkers:
        assert all(walker.punctual.is_awaited(j) for j in walker.neighbors if walker.rounds < ROUNDS)
    rounds = [walker.rounds for walker in world.walkers]
    assert max(rounds) - min(rounds) <= 8, rounds
