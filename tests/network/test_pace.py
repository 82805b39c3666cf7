"""Lead and weight floor over random schedules without I/O: what never happens, and that no peer waits for a timer."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import pytest
from mutants import mutated

from flower_privdec.peer import pace

LEAD, FURTHER, SWEEPS = 3, 12, 200
POOR = 0.1  # of the mean weight of the peers that are up: a step with less would be far too long
MOST = 1.3  # of the weight that a peer begins with: the mean of all, however often peers lose their state
BACK = 0.3  # of that mean: what each has again soon after the last fault
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
    wants: dict[int, tuple[int, int]] = field(default_factory=dict)  # what the others lack, and their levels
    known: dict[int, tuple[int, int]] = field(default_factory=dict)  # round and boot of the others
    want: int = 0
    announced: int = 0
    sank: bool = False
    met: bool = True  # whether another one exchanged with it since its last step

    def __post_init__(self) -> None:
        self.pace, self.floor = self.code.Pace(self.lead), self.code.WeightFloor(1.0, float("inf"), 0.0)


class Schedule:
    """One run of random events: messages come late and in any order, and peers die, are lost, cut off, or join late.

    Some are twenty times as fast as others. In half of the runs a peer that lost everything has the weight of one that
    begins; in the others, what it lost is missing.
    """

    def __init__(self, draw: Random, code: Any = pace, calm: bool = False) -> None:
        self.draw, self.calm, n = draw, calm, draw.randint(2, 5)
        self.lead = draw.choice([LEAD, LEAD, None])
        self.walkers = [Walker(i, n, code, self.lead) for i in range(n)]
        self.messages: list[tuple[int, int, str, Any]] = []  # sender, receiver, kind, content
        self.speeds = [draw.choice([1.0, 1.0, 20.0]) for _ in self.walkers]
        self.refills = draw.random() < 0.5
        self.sides = [0] * n  # peers on different sides do not reach each other
        self.lost, self.brought = 0.0, 0.0  # weight that went with peers, and that those who lost theirs brought
        if not calm and draw.random() < 0.3:  # one is there from the beginning on, and has nothing
            self.lose(self.walkers[-1])
        for walker in self.walkers:
            self.greet(walker)

    def up(self, walker: Walker) -> list[Walker]:
        side = self.sides[walker.number]
        return [w for w in self.walkers if w is not walker and w.alive and self.sides[w.number] == side]

    def mean(self, walker: Walker) -> float:
        """Return the mean weight of a peer and all that it reaches, with what is under way between them."""
        side = {other.number: other for other in (walker, *self.up(walker))}
        held = sum(other.weight + sum(share for _, share in other.inbox) for other in side.values())
        return (held + sum(share for _, share in self.under_way(side))) / len(side)

    def under_way(self, among: Any) -> list[tuple[int, float]]:
        """Return receiver and weight of the shares that were sent and did not come yet."""
        return [
            (receiver, content[2])
            for sender, receiver, kind, content in self.messages
            if kind == "share" and sender in among and receiver in among
        ]

    # --- messages ---

    def post(self, walker: Walker, other: int, kind: str, content: Any) -> None:
        self.messages.append((walker.number, other, kind, content))

    def greet(self, walker: Walker) -> None:
        for other in self.up(walker):
            self.post(walker, other.number, "hello", (walker.rounds, walker.boot, (walker.want, walker.floor.level)))

    def deliver(self) -> None:
        """Deliver a message; those of one edge come in order."""
        sender, receiver, *_ = self.draw.choice(self.messages)
        if self.sides[sender] != self.sides[receiver]:
            return
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
        is_empty = walker.weight == 0
        for sender, share in walker.inbox:
            walker.weight += share
            self.post(walker, sender, "ack", None)
        if self.refills and is_empty and walker.inbox:
            self.brought += 1.0
            walker.weight += 1.0
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
        assert walker.sank or walker.weight >= least * 0.999, f"a step at {walker.weight}"
        usual = self.mean(walker)
        assert walker.weight >= POOR * usual, f"a step at {walker.weight}, where {usual} is usual"
        level = walker.floor.level
        assert not level or walker.weight < walker.floor.usual_at(level - 1), "the weight is back, and the floor is not"
        walker.sank &= level > 0
        walker.want, walker.announced, walker.met = 0, 0, False
        walker.rounds += 1
        others = [other.number for other in up if other.number not in walker.owed]
        before = walker.weight
        self.send(walker, walker.floor.parts(walker.weight, dict.fromkeys(others, 1 / walker.n)))
        assert walker.sank or walker.weight >= min(before, pace.LEAST * 0.999), "sent more than it may"
        self.greet(walker)

    def wait(self, walker: Walker, up: list[Walker]) -> None:
        wants = {j: want for j, (want, _) in walker.wants.items() if j not in walker.owed}
        poor = [other.number for other in up if wants.get(other.number) == 2]
        if poor and not walker.floor.want(walker.weight, False):
            self.send(walker, walker.floor.parts(walker.weight, dict.fromkeys(poor, 0.5 / len(poor))))
        under_way = any(other.number in walker.owed for other in up)
        want = walker.floor.want(walker.weight, under_way)
        if not (want or walker.met or under_way):
            self.send(walker, walker.floor.parts(walker.weight, {other.number: 0.5 / len(up) for other in up}))
        self.report(walker, 2 if want and not walker.met else want)
        others = [walker.wants.get(other.number, (0, 0)) for other in up]
        if walker.floor.is_stuck(walker.want, others):
            assert not self.calm, "a floor sank, and all the weight was there"
            assert walker.want > 0, "a floor sank, and its peer lacks nothing"
            assert min(want for want, _ in others) > 0, "a floor sank, and some peer has weight to spare"
            walker.floor.sink()
            walker.sank = True
            self.report(walker, 0)

    def report(self, walker: Walker, want: int) -> None:
        walker.want, walker.announced = want, min(want, walker.announced)
        if want > walker.announced and 2 in (want, *(theirs for theirs, _ in walker.wants.values())):
            walker.announced = want
            self.greet(walker)

    # --- what goes wrong ---

    def fault(self) -> None:
        walker = self.draw.choice(self.walkers)
        others = [other for other in self.up(walker) if other.weight > 0.1]  # with which not everything would be gone
        event = self.draw.random()
        if event < 0.2:
            self.sides = [self.draw.randint(0, 1) for _ in self.walkers]
        elif event < 0.4:
            self.sides = [0] * len(self.walkers)
        elif event < 0.6 and walker.alive:
            self.restart(walker)
        elif event < 0.75 and walker.alive and others and len(self.up(walker)) > 1:
            walker.alive = False  # for good
            self.forget(walker.number)
        elif walker.alive and others:
            self.lose(walker)

    def restart(self, walker: Walker) -> None:
        """End a peer's process; another one goes on from what is on disk."""
        walker.boot += 1
        walker.pace, walker.floor = walker.code.Pace(self.lead), walker.code.WeightFloor(1.0, float("inf"), 0.0)
        walker.want, walker.announced, walker.sank, walker.met = 0, 0, False, False
        walker.wants, walker.known = {}, {}
        for other in self.up(walker):
            self.post(other, walker.number, "hello", (other.rounds, other.boot, (other.want, other.floor.level)))
        self.greet(walker)

    def forget(self, number: int) -> None:
        """Take a peer's mass away, with what is on its edges."""
        walker, everybody = self.walkers[number], range(len(self.walkers))
        inbox = sum(share for _, share in walker.inbox)
        edges = sum(share for receiver, share in self.under_way(everybody) if receiver == number)
        self.lost += walker.weight + inbox + edges
        self.lost += sum(share for _, share in self.under_way(everybody)) - edges
        self.messages = [message for message in self.messages if number not in message[:2]]
        self.lost -= sum(share for _, share in self.under_way(everybody))
        for other in self.walkers:
            other.owed.pop(number, None)
            other.wants.pop(number, None)
            self.lost += sum(share for sender, share in other.inbox if sender == number and other.alive)
            other.inbox = [(sender, share) for sender, share in other.inbox if sender != number]

    def lose(self, walker: Walker) -> None:
        """Let a peer come back with nothing; what was on its edges is gone."""
        number = walker.number
        self.forget(number)
        self.walkers[number] = new = Walker(number, walker.n, walker.code, self.lead, 0.0, 0, walker.boot + 1)
        for other in self.up(new):
            self.post(other, number, "hello", (other.rounds, other.boot, (other.want, other.floor.level)))
        self.greet(new)

    def run(self) -> Schedule:
        for _ in range(self.draw.randint(50, 400)):
            event = self.draw.random()
            if event < 0.55 and self.messages:
                self.deliver()
            elif event > 0.99 and not self.calm:
                self.fault()
            else:
                (walker,) = self.draw.choices(self.walkers, self.speeds)
                if walker.alive:
                    self.turn(walker)
        self.sides = [0] * len(self.walkers)
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
        held = sum(walker.weight + sum(share for _, share in walker.inbox) for walker in alive)
        assert held == pytest.approx(len(self.walkers) - self.lost + self.brought), "weight was lost, or counted twice"
        for walker in alive:
            assert walker.weight >= BACK * held / len(alive), f"its weight did not come back: {walker.weight}"
        moved = {walker.number: walker.rounds - before[walker.number] for walker in alive}
        assert min(moved.values()) >= FURTHER, f"stuck: {moved}, weights {[walker.weight for walker in alive]}"
        for one in alive if self.lead is not None else ():
            for other in alive:
                behind = max(0, before[one.number] - before[other.number])
                assert one.rounds - other.rounds <= behind + LEAD, f"{one.number} is ahead of {other.number}"


def test_all_get_further_at_one_pace_whatever_was_lost() -> None:
    for seed in range(SCHEDULES):
        Schedule(Random(seed)).run()


def test_no_floor_sinks_without_lost_weight() -> None:
    for seed in range(SCHEDULES):
        Schedule(Random(seed), calm=True).run()


def lost_again_and_again(seed: int, weight: float) -> list[float]:
    """Return the mean weight of all peers after each of 40 losses of a peer's state, with messages between them."""
    schedule, means = Schedule(Random(seed)), list[float]()
    draw, walkers, schedule.refills = schedule.draw, schedule.walkers, True
    for walker in walkers:
        walker.weight = weight
    pause, victim = draw.choice([3, 10, 30]), draw.choice([None, draw.randrange(len(walkers))])
    for _ in range(40):
        for _ in range(pause):
            (walker,) = draw.choices(walkers, schedule.speeds)
            schedule.absorb(walker)
            ready = [other.number for other in schedule.up(walker) if other.number not in walker.owed]
            schedule.send(walker, walker.floor.parts(walker.weight, dict.fromkeys(ready, 1 / walker.n)))
            if schedule.messages:
                schedule.deliver()
        schedule.lose(walkers[draw.randrange(len(walkers)) if victim is None else victim])
        held = sum(walker.weight + sum(share for _, share in walker.inbox) for walker in walkers)
        means.append((held + sum(share for _, share in schedule.under_way(range(len(walkers))))) / len(walkers))
    return means


def test_weights_brought_by_restarted_peers_do_not_add_up() -> None:
    """It is more than they lost where they had handed some on; those that are lost later take that along."""
    for seed in range(SCHEDULES // 4):
        assert max(lost_again_and_again(seed, 1.0)) < MOST, seed
        assert lost_again_and_again(seed, 3.0)[-1] < MOST, seed


MUTANTS = {
    "rounds count from the beginning": ("reached - met[j][1] for j", "reached for j"),
    "a process that began again is the one before": ("if boot == boot_before:", "if True:"),
    "nobody is waited for": ("ahead[slowest] >= self._lead", "ahead[slowest] >= 1000 * self._lead"),
    "the floor never sinks": ("min(self.level + 1, LEVELS)", "0"),
    "a floor sinks before a higher one": ("level >= self.level", "level >= 0"),
    "a floor never rises": ("self.level -= 1", "break"),
    "the floor sinks below what there is": ("(1 - SLACK) * self.value", "3 * self.value"),
    "more is sent than is to spare": ("max(0.0, 1 - self.value / weight)", "1.0"),
    "what is under way is not waited for": ("if under_way or weight", "if weight"),
    "nothing is lacking": ("            return Want.WAITS", "            return Want.UNKNOWN"),
    "one that lacks nothing is stuck": ("if own == Want.UNKNOWN or not", "if not"),
    "one whose neighbours have some to spare is stuck": ("want > Want.UNKNOWN and level", "level"),
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


def test_a_neighbour_in_round_0_is_awaited_unless_restarted() -> None:
    honest = pace.Pace(4)
    assert [honest.slowest(k, {1: 0, 2: k}, {1: 7, 2: 8}) for k in range(6)] == [None] * 4 + [1, 1]
    assert honest.slowest(5, {2: 5}, {1: 7, 2: 8}) is None  # it exchanges no more
    assert all(pace.Pace(4).slowest(k, {1: 10**12}, {1: 7}) is None for k in range(99))
    again = pace.Pace(4)
    assert all(again.slowest(k, {1: 0}, {1: k}) is None for k in range(99))
    assert all(pace.Pace(None).slowest(k, {1: 0}, {1: 7}) is None for k in range(99))


def test_rounds_a_neighbour_caught_up_stay() -> None:
    honest, boots = pace.Pace(4), {1: 7}
    assert honest.slowest(1000, {1: 0}, boots) is None  # it joins late
    assert honest.slowest(1003, {1: 0}, boots) is None
    assert honest.slowest(1004, {1: 0}, boots) == 1
    assert honest.slowest(1004, {1: 904}, boots) is None
    assert honest.slowest(1008, {1: 904}, boots) == 1


def test_a_lie_about_weight_delays_within_the_patience() -> None:
    floor, waits, unknown = pace.WeightFloor(1.0, 30.0, 0.0), pace.Want.WAITS, pace.Want.UNKNOWN
    assert floor.lacks(0.1, 29.0)
    assert not floor.is_stuck(waits, [(waits, 0), (unknown, 0)])  # one has some, it reports
    assert not floor.lacks(0.1, 31.0)
    assert not floor.lacks(0.07, 31.0)
    assert not floor.is_stuck(waits, [])
    assert not floor.lacks(0.01, 62.0)
    assert floor.level == 0, "it takes steps with what it has, and gives nothing away"
    assert floor.parts(0.1, {1: 0.5}) == {}


def test_a_peer_losing_weight_keeps_some() -> None:
    """Its floor sank again and again, until a share of what it had left rounded to 0."""
    floor, weight = pace.WeightFloor(1.0, patience=5.0, now=0.0), 1.0
    for now in range(2_000):
        floor.sink()
        floor.lacks(weight, float(now))
        weight *= 1 - sum(floor.parts(weight, {1: 0.3, 2: 0.3}).values())
    assert weight > 1e-7
    assert floor.parts(weight, {1: 0.3}) == {}
    assert floor.lacks(weight / 2, 2_000.0), "it waits until it is given some"
    assert not floor.is_stuck(pace.Want.WAITS, [(pace.Want.WAITS, pace.LEVELS)])


@pytest.mark.parametrize("weight", [0.0, 1e-45, 1e-31])
def test_nothing_is_sent_of_a_possibly_zero_weight(weight: float) -> None:
    assert pace.WeightFloor(weight, patience=5.0, now=0.0).parts(weight, {1: 0.5}) == {}
