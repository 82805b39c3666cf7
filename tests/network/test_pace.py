"""Lead and weight floor over random schedules without I/O: what never happens, and that no peer waits for a timer."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import pytest
from mutants import mutated

from flower_privdec.network.peer import pace

LEAD, FURTHER, SWEEPS = 3, 12, 200
UNDER_WAY = 1000  # the round of those that nothing happened to: one that comes back needs as many to catch up
SCHEDULES = 200


@dataclass
class Walker:
    """A peer of a complete graph: what it knows of the others came in messages."""

    number: int
    n: int
    code: Any
    lead: int | None
    weight: float = 1.0
    rounds: int = UNDER_WAY
    boot: int = 1
    alive: bool = True
    inbox: list[tuple[int, float]] = field(default_factory=list)  # the sender and the weight of each share
    owed: dict[int, float] = field(default_factory=dict)  # shares that were not acknowledged, by receiver
    wants: dict[int, int] = field(default_factory=dict)
    known: dict[int, tuple[int, int]] = field(default_factory=dict)  # round and boot of the others
    want: int = 0
    announced: int = 0
    relieved: bool = False
    met: bool = True  # whether another one exchanged with it since its last step

    def __post_init__(self) -> None:
        self.pace, self.floor = self.code.Pace(self.lead), self.code.WeightFloor(1.0, float("inf"), 0.0)


class Schedule:
    """One run of random events: messages come late and in any order, and peers die, are lost, or join late."""

    def __init__(self, draw: Random, code: Any = pace, calm: bool = False) -> None:
        self.draw, self.calm, n = draw, calm, draw.randint(2, 5)
        self.lead = draw.choice([LEAD, LEAD, None])
        self.walkers = [Walker(i, n, code, self.lead) for i in range(n)]
        self.messages: list[tuple[int, int, str, Any]] = []  # sender, receiver, kind, content
        self.lost = 0.0  # weight that went with peers
        if not calm and draw.random() < 0.3:  # one is there from the beginning on, and has nothing
            self.lose(self.walkers[-1])
        for walker in self.walkers:
            self.greet(walker)

    def up(self, walker: Walker) -> list[Walker]:
        return [other for other in self.walkers if other is not walker and other.alive]

    # --- messages ---

    def post(self, walker: Walker, other: int, kind: str, content: Any) -> None:
        self.messages.append((walker.number, other, kind, content))

    def greet(self, walker: Walker) -> None:
        for other in self.up(walker):
            self.post(walker, other.number, "hello", (walker.rounds, walker.boot, walker.want))

    def deliver(self) -> None:
        """Deliver a message; those of one edge come in order."""
        sender, receiver, *_ = self.draw.choice(self.messages)
        at = next(i for i, message in enumerate(self.messages) if message[:2] == (sender, receiver))
        _, _, kind, content = self.messages.pop(at)
        walker, other = self.walkers[receiver], self.walkers[sender]
        if not (walker.alive and other.alive):
            return
        if kind == "ack":
            walker.owed.pop(sender, None)
            walker.met = True
            return
        rounds, boot, rest = content
        walker.known[sender] = rounds, boot
        if kind == "share":
            walker.inbox.append((sender, rest))
            walker.met = True
            walker.wants.pop(sender, None)
        else:
            walker.wants[sender] = rest

    def send(self, walker: Walker, parts: dict[int, float]) -> None:
        shares = {other: walker.weight * part for other, part in parts.items()}
        for other, share in shares.items():
            walker.owed[other] = share
            walker.weight -= share
            self.post(walker, other, "share", (walker.rounds, walker.boot, share))

    # --- what a peer does ---

    def absorb(self, walker: Walker) -> None:
        for sender, share in walker.inbox:
            walker.weight += share
            self.post(walker, sender, "ack", None)
        walker.inbox.clear()

    def turn(self, walker: Walker) -> None:
        """Take a step where that may be, and else do what a peer does that waits."""
        self.absorb(walker)
        up = self.up(walker)
        known = {other.number: walker.known[other.number] for other in up if other.number in walker.known}
        rounds, boots = {j: word[0] for j, word in known.items()}, {j: word[1] for j, word in known.items()}
        slowest = walker.pace.slowest(walker.rounds, rounds, boots)
        lacks = walker.floor.lacks(walker.weight, 0.0)
        if slowest is None and not lacks and walker.weight > 0 and walker.met:
            self.step(walker, up)
        else:
            self.wait(walker, up)

    def step(self, walker: Walker, up: list[Walker]) -> None:
        least = (1 - pace.SLACK) * pace.LEAST
        assert walker.relieved or walker.weight >= least * 0.999, f"a step at {walker.weight}"
        walker.relieved &= walker.weight < 1.0
        walker.want, walker.announced, walker.met = 0, 0, False
        walker.rounds += 1
        others = [other.number for other in up if other.number not in walker.owed]
        before = walker.weight
        self.send(walker, walker.floor.parts(walker.weight, dict.fromkeys(others, 1 / walker.n)))
        assert walker.relieved or walker.weight >= min(before, pace.LEAST * 0.999), "sent more than it may"
        self.greet(walker)

    def wait(self, walker: Walker, up: list[Walker]) -> None:
        poor = [other.number for other in up if walker.wants.get(other.number) == 2 and other.number not in walker.owed]
        if poor and not walker.floor.want(walker.weight, False):
            self.send(walker, walker.floor.parts(walker.weight, dict.fromkeys(poor, 0.5 / len(poor))))
        under_way = any(other.number in walker.owed for other in up)
        want = walker.floor.want(walker.weight, under_way)
        if not (want or walker.met or under_way):
            self.send(walker, walker.floor.parts(walker.weight, {other.number: 0.5 / len(up) for other in up}))
        self.report(walker, 2 if want and not walker.met else want)
        others = [walker.wants.get(other.number, 0) for other in up]
        if walker.floor.is_relieved_by(walker.weight) and walker.floor.is_stuck(walker.want, others):
            assert not self.calm, "took little weight for its usual one, and all the weight was there"
            assert walker.want > 0, "took little weight for its usual one, and lacks none"
            assert min(others) > 0, "took little weight for its usual one, and some peer has weight to spare"
            walker.floor.relieve(walker.weight)
            walker.relieved = True
            self.report(walker, 0)

    def report(self, walker: Walker, want: int) -> None:
        walker.want, walker.announced = want, min(want, walker.announced)
        if want > walker.announced and 2 in (want, *walker.wants.values()):
            walker.announced = want
            self.greet(walker)

    # --- what goes wrong ---

    def fault(self) -> None:
        walker = self.draw.choice(self.walkers)
        others = [other for other in self.up(walker) if other.weight > 0.1]  # with which not everything would be gone
        if walker.alive and others and self.draw.random() < 0.4 and len(self.up(walker)) > 1:
            walker.alive = False  # for good
        elif walker.alive and others:
            self.lose(walker)

    def lose(self, walker: Walker) -> None:
        """Let a peer come back with nothing; what was on its edges is gone."""
        number = walker.number
        self.messages = [message for message in self.messages if number not in message[:2]]
        self.walkers[number] = new = Walker(number, walker.n, walker.code, self.lead, 0.0, 0, walker.boot + 1)
        for other in self.up(new):
            other.owed.pop(number, None)
            other.wants.pop(number, None)
            other.inbox = [(sender, share) for sender, share in other.inbox if sender != number]
            self.post(other, number, "hello", (other.rounds, other.boot, other.want))
        self.greet(new)

    def run(self) -> Schedule:
        for _ in range(self.draw.randint(50, 400)):
            event = self.draw.random()
            if event < 0.55 and self.messages:
                self.deliver()
            elif event > 0.99 and not self.calm:
                self.fault()
            else:
                walker = self.draw.choice(self.walkers)
                if walker.alive:
                    self.turn(walker)
        self.settle()
        return self

    def settle(self) -> None:
        """Let all peers that are alive go on without faults: each gets further, at one pace, and waits for no timer."""
        alive = [walker for walker in self.walkers if walker.alive]
        before = {walker.number: walker.rounds for walker in alive}
        for _ in range(SWEEPS):
            for walker in self.draw.sample(alive, len(alive)):
                self.turn(walker)
            while self.messages:
                self.deliver()
            if all(walker.rounds >= before[walker.number] + FURTHER for walker in alive):
                break
        moved = {walker.number: walker.rounds - before[walker.number] for walker in alive}
        assert min(moved.values()) >= FURTHER, f"stuck: {moved}, weights {[walker.weight for walker in alive]}"
        for one in alive if self.lead is not None else ():
            for other in alive:
                behind = max(0, before[one.number] - before[other.number])
                assert one.rounds - other.rounds <= behind + LEAD, f"{one.number} is ahead of {other.number}"


def test_all_get_further_at_one_pace_whatever_was_lost() -> None:
    for seed in range(SCHEDULES):
        Schedule(Random(seed)).run()


def test_no_floor_sinks_where_no_weight_was_lost() -> None:
    for seed in range(SCHEDULES):
        Schedule(Random(seed), calm=True).run()


MUTANTS = {
    "rounds count from the beginning": ("reached - met[j][1] for j", "reached for j"),
    "a process that began again is the one before": ("if boot == before else behind", "if True else behind"),
    "nobody is waited for": ("ahead[slowest] >= self._lead", "ahead[slowest] >= 1000 * self._lead"),
    "the floor never sinks": ("self._relief = weight / self.usual", "pass"),
    "the floor sinks below what there is": ("(1 - SLACK) * self.value", "3 * self.value"),
    "more is sent than is to spare": ("max(0.0, 1 - self.value / weight)", "1.0"),
    "what is under way is not waited for": ("if under_way or weight", "if weight"),
    "nothing is lacking": ("return Want.WAITS if", "return Want.UNKNOWN if"),
    "one that lacks nothing is stuck": (
        "own > Want.UNKNOWN and bool(others) and min(others)",
        "bool(others) and max(others)",
    ),
}


def run_all(code: ModuleType) -> None:
    for seed in range(SCHEDULES):
        Schedule(Random(seed), code).run()
        Schedule(Random(seed), code, calm=True).run()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    code = mutated(pace, *MUTANTS[name])
    with pytest.raises(AssertionError):
        run_all(code)


# --- what a neighbour that lies can do ---


def test_a_neighbour_that_stays_in_round_0_is_waited_for_and_one_that_begins_again_or_is_far_ahead_is_not() -> None:
    honest = pace.Pace(4)
    assert [honest.slowest(k, {1: 0, 2: k}, {1: 7, 2: 8}) for k in range(6)] == [None] * 4 + [1, 1]
    assert honest.slowest(5, {2: 5}, {1: 7, 2: 8}) is None  # it exchanges no more
    assert all(pace.Pace(4).slowest(k, {1: 10**12}, {1: 7}) is None for k in range(99))
    again = pace.Pace(4)
    assert all(again.slowest(k, {1: 0}, {1: k}) is None for k in range(99))
    assert all(pace.Pace(None).slowest(k, {1: 0}, {1: 7}) is None for k in range(99))


def test_what_a_neighbour_catches_up_it_does_not_lose_again() -> None:
    honest, boots = pace.Pace(4), {1: 7}
    assert honest.slowest(1000, {1: 0}, boots) is None  # it joins late
    assert honest.slowest(1003, {1: 0}, boots) is None
    assert honest.slowest(1004, {1: 0}, boots) == 1
    assert honest.slowest(1004, {1: 904}, boots) is None
    assert honest.slowest(1008, {1: 904}, boots) == 1


def test_a_neighbour_that_lies_about_weight_delays_a_step_by_the_patience_at_most() -> None:
    floor = pace.WeightFloor(1.0, 30.0, 0.0)
    assert floor.lacks(0.1, 29.0)
    assert not floor.is_stuck(pace.Want.WAITS, [pace.Want.WAITS, pace.Want.UNKNOWN])  # one has some, it reports
    assert not floor.lacks(0.1, 31.0)
    assert not floor.lacks(0.05, 31.0)
    assert not floor.is_stuck(pace.Want.WAITS, [])


def test_a_peer_whose_weight_does_not_come_back_never_sends_it_all_away() -> None:
    """It took what it had for its usual weight again and again, until a share of it had rounded to 0."""
    floor, weight = pace.WeightFloor(1.0, patience=5.0, now=0.0), 1.0
    for now in range(2_000):
        floor.relieve(weight)
        floor.lacks(weight, float(now))
        weight *= 1 - sum(floor.parts(weight, {1: 0.3, 2: 0.3}).values())
    assert weight > 1e-7
    assert floor.parts(weight, {1: 0.3}) == {}
    assert floor.lacks(weight / 2, 2_000.0), "it waits until it is given some"


@pytest.mark.parametrize("weight", [0.0, 1e-45, 1e-31])
def test_nothing_is_sent_of_a_weight_of_which_a_part_may_be_zero(weight: float) -> None:
    assert pace.WeightFloor(weight, patience=5.0, now=0.0).parts(weight, {1: 0.5}) == {}
