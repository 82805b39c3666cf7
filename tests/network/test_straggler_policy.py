"""Whom a peer waits for that goes on without the others, in a world whose time is counted and not measured."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from flower_privdec.peer.pace import StragglerPolicy

ROUNDS, LATENCY, RETRY = 800, 0.05, 1.0
Graph = Callable[[int, int], tuple[set[int], set[int]]]  # of a peer and a round: to whom it sends, and whom it hears


@dataclass
class Walker:
    """A peer that takes `step(now)` seconds a round and waits for its neighbours as `StragglerPolicy` says, twice.

    First until they have acknowledged its last share, which they do at the end of their round, or have sent something;
    then for theirs. Everybody says now and again in which round it is.
    """

    number: int
    step: Callable[[float], float]
    graph: Graph
    neighbors: set[int]
    policy: StragglerPolicy = field(init=False)
    rounds: int = 0
    began: float = 0.0
    known: dict[int, int] = field(default_factory=dict)  # the round of each neighbour
    waiting: set[int] = field(default_factory=set)  # whose shares have come and were not added
    new: set[int] = field(default_factory=set)  # whose shares were added since the last exchange with them
    owing: set[int] = field(default_factory=set)  # who has not acknowledged a share
    late: set[int] = field(default_factory=set)
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = StragglerPolicy(10.0)
        self.policy.start(0.0, self.neighbors)

    @property
    def receivers(self) -> set[int]:
        return self.graph(self.number, self.rounds)[0]

    @property
    def senders(self) -> set[int]:
        return self.graph(self.number, self.rounds)[1]

    def there(self) -> set[int]:
        ahead = {j for j in self.senders if self.known.get(j, 0) > self.rounds}
        return self.senders & (self.waiting | self.new) | ahead

    def is_ready(self) -> bool:
        return not self.policy.on_time & (self.receivers & self.owing - self.waiting)

    def is_done(self) -> bool:
        return not self.policy.on_time & (self.senders - self.there() - self.late)


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

    def run(self, first: int | None = None) -> None:
        """Go on until the first so many have walked ROUNDS rounds."""
        for walker in self.walkers:
            self._step(walker)
            self._greet(walker)
        while any(walker.rounds < ROUNDS for walker in self.walkers[:first]):
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _greet(self, walker: Walker) -> None:
        for j in walker.neighbors:
            self.walkers[j].known[walker.number] = walker.rounds
        self.at(self.now + RETRY, lambda: self._greet(walker))

    def _step(self, walker: Walker) -> None:
        self.at(self.now + walker.step(self.now), lambda: self._prepare(walker))

    def _prepare(self, walker: Walker) -> None:
        now = walker.rounds
        walker.policy.begin(walker.known)
        walker.began = self.now
        self._preparing.add(walker.number)
        self.at(self.now + walker.policy.patience, lambda: self._send(walker, now))
        self._look(walker)

    def _send(self, walker: Walker, now: int) -> None:
        if walker.rounds != now or walker.number not in self._preparing:
            return
        self._preparing.discard(walker.number)
        self._waiting.add(walker.number)
        walker.late = walker.receivers & walker.owing
        unheard = walker.receivers - walker.senders
        walker.policy.note(unheard - walker.late, unheard & walker.late)
        for j in walker.receivers - walker.owing:
            self.at(self.now + LATENCY, lambda j=j: self._arrive(walker.number, j, now))  # type: ignore[misc]
        walker.owing |= walker.receivers
        self.at(self.now + walker.policy.patience, lambda: self._end(walker, now))
        self._look(walker)

    def _arrive(self, sender: int, receiver: int, sent: int) -> None:
        walker = self.walkers[receiver]
        walker.waiting.add(sender)
        walker.known[sender] = max(sent + 1, walker.known.get(sender, 0))
        self._look(walker)

    def _acknowledge(self, sender: int, receiver: int) -> None:
        self.walkers[receiver].owing.discard(sender)
        self._look(self.walkers[receiver])

    def _look(self, walker: Walker) -> None:
        if walker.number in self._preparing and walker.is_ready():
            self._send(walker, walker.rounds)
        if walker.number in self._waiting and walker.is_done():
            self._end(walker, walker.rounds)

    def _end(self, walker: Walker, now: int) -> None:
        if walker.rounds != now or walker.number not in self._waiting:
            return
        self._waiting.discard(walker.number)
        there = walker.there()
        walker.policy.end(self.now, there, walker.senders - there, self.now - walker.began, LATENCY)
        for j in walker.waiting:
            self.at(self.now + LATENCY, lambda j=j: self._acknowledge(walker.number, j))  # type: ignore[misc]
        walker.new = (walker.new | walker.waiting) - walker.senders
        walker.waiting = set()
        walker.rounds += 1
        walker.ends.append(self.now)
        self._step(walker)


def complete(*steps: Callable[[float], float]) -> World:
    return world_of("complete", *steps)


def world_of(name: str, *steps: Callable[[float], float]) -> World:
    n = len(steps)
    shifts = {
        "complete": [[*range(1, n)]],
        "ring": [[1, n - 1]],
        "directed-ring": [[1]],
        "directed-exponential": [[2**k] for k in range((n - 1).bit_length())],
    }[name]

    def graph(peer: int, round_index: int) -> tuple[set[int], set[int]]:
        now = shifts[round_index % len(shifts)]
        return {(peer + shift) % n for shift in now}, {(peer - shift) % n for shift in now}

    ever = {shift * sign for now in shifts for shift in now for sign in (1, -1)}
    return World([Walker(i, step, graph, {(i + shift) % n for shift in ever}) for i, step in enumerate(steps)])


def seconds(walker: Walker) -> float:
    return walker.ends[ROUNDS - 1]


def equal(now: float) -> float:
    return 1.0


def test_equal_peers_wait_for_each_other_in_every_round() -> None:
    world = complete(equal, equal, equal)
    world.run()
    for walker in world.walkers:
        assert walker.policy.on_time >= walker.neighbors
        assert seconds(walker) == pytest.approx(ROUNDS * (1 + LATENCY))


@pytest.mark.parametrize("slow", [lambda now: 10.0, lambda now: 1e9, lambda now: 1.0 if now < 50 else 1e9])
@pytest.mark.parametrize(
    ("graph", "n"), [("complete", 4), ("ring", 8), ("directed-ring", 4), ("directed-exponential", 8)]
)
def test_one_slow_peer_costs_others_5_percent_of_speed(graph: str, n: int, slow: Callable[[float], float]) -> None:
    world = world_of(graph, *[equal] * (n - 1), slow)
    world.run(first=n - 1)
    for walker in world.walkers[: n - 1]:
        assert walker.rounds >= ROUNDS
        assert walker.ends[60] <= 45 + 60 * (1 + LATENCY)  # it takes a moment to find out who is slow
        assert seconds(walker) - walker.ends[60] <= (ROUNDS - 61) * (1 + LATENCY) / 0.95
        assert walker.policy.on_time >= walker.neighbors - {n - 1}


def test_a_returning_neighbour_is_awaited_again() -> None:
    world = complete(equal, equal, lambda now: 100.0 if 100 < now < 150 else 1.0)
    world.run()
    assert 1 in world.walkers[0].policy.on_time
    late, others = world.walkers[2], world.walkers[:2]
    assert seconds(others[0]) < ROUNDS * (1 + LATENCY) / 0.95
    assert late.rounds > ROUNDS / 2


def test_a_bad_moment_of_equal_peers_is_forgiven() -> None:
    """Now and then a peer is held up for some rounds; the others do not go on without it for long."""

    def held_up(when: float) -> Callable[[float], float]:
        return lambda now: 8.0 if int(now) % 60 == when else 1.0

    world = complete(equal, held_up(10), held_up(40), equal)
    world.run()
    for walker in world.walkers:
        assert walker.policy.on_time >= walker.neighbors
    rounds = [walker.rounds for walker in world.walkers]
    assert max(rounds) - min(rounds) <= 8, rounds
