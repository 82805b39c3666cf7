"""The pace of a peer that does not wait for late neighbours: whom it waits for, how long, and when it may take a step.

`StragglerPolicy` says which neighbours to wait for in an exchange. `Pace` keeps a peer from running far ahead of the
others, and `WeightFloor` from taking steps with so little push-sum weight that they would be too long. None of them has
a clock: moments are arguments, in seconds of any clock that never goes back.

What neighbours report decides how fast a peer goes and how long its steps are, and nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from statistics import median

LEAST = 0.4  # of the weight that it would have without delays: a peer keeps so much, for steps at x / w grow
SLACK = 0.02  # of the floor: a weight that is less below it is at it, as rounding leaves it
SPARE = 0.1  # of the floor: a peer that has not as much more has none to spare
TOKEN = 1e-3  # of its weight: what a peer sends that has none to spare, so that there is an exchange
LITTLE = 1e-3  # of a share: less is not sent
LEVELS = 15  # to which a floor sinks, each LEAST times the one before: a millionth of the usual weight at last
TINY = 1e-30  # of which a part may round to 0: a peer with less sends nothing

PATIENCE = 3.0  # periods that a peer waits for the neighbours that are on time
STRIKES = 2  # exchanges in a row that a neighbour may miss, until it is late
SEEN = 4  # rounds of a neighbour by which it is judged
SLOWEST = 2.0  # exchanges of this peer that a neighbour's round may take
REMEMBERED = 32  # periods


class Want(IntEnum):
    """What a peer lacks of weight, as its hellos report."""

    UNKNOWN = 0  # some is under way from it, or to it, or it has some to spare
    NOTHING_TO_SPARE = 1
    WAITS = 2
    PARTED = 3  # nothing comes from it any more, and it waits for nothing: it, or who it says so to, leaves for good


class Pace:
    """How many rounds a peer is ahead of its neighbours, counted since they met.

    A neighbour that was behind when it came up, or when its process began, as one that joins late or lost its state, is
    not waited for until it has caught up: both go at the same pace from there. What it catches up counts.

    Args:
        lead: so many rounds ahead a peer waits; None for never.
    """

    def __init__(self, lead: int | None) -> None:
        self._lead = lead
        self._met: dict[int, tuple[int | None, int]] = {}  # the boot of each that is up, and how far it was behind

    def slowest(self, round_index: int, rounds: Mapping[int, int], boots: Mapping[int, int]) -> int | None:
        """Return the neighbour that a peer has to wait for; None if it may take a step.

        Args:
            round_index: the peer's.
            rounds: of the neighbours that are up; one that is missing meets the peer again when it is back.
            boots: of their processes.
        """
        met = dict[int, tuple[int | None, int]]()
        for neighbor, reached in rounds.items():
            boot = boots.get(neighbor)
            behind = max(0, round_index - reached)
            boot_before, least = self._met.get(neighbor, (boot, behind))
            if boot == boot_before:
                behind = min(behind, least)
            met[neighbor] = boot, behind
        self._met = met

        if self._lead is None or not rounds:
            return None
        ahead = {j: round_index - reached - met[j][1] for j, reached in rounds.items()}
        slowest = max(ahead, key=ahead.__getitem__)
        return slowest if ahead[slowest] >= self._lead else None


class WeightFloor:
    """The push-sum weight below which a peer takes no private step, and sends nothing.

    A step at x / w is 1 / w times as long, so a peer has to have LEAST of its usual weight. What a lost peer took with
    it is missing at all others. Once a peer and all neighbours that are up have none to spare, and none is under way
    between them, they would wait for ever: those of them whose floors are highest sink by a level, until they have the
    weight of the level above again. So floors sink together. If one sank before the others, it would give them what it
    has, have none to spare again, and sink again, while they wait for more than there is.

    Beside that a peer waits for weight only so long. Neighbours may report what they like, and those that have some may
    have no edge to this peer, or be done and gone. Then it takes its steps with what it has, and keeps that: the floor
    below which it sends nothing stays.

    Args:
        patience: seconds that it waits for weight.
        now: a timestamp of any clock that never goes back.

    Attributes:
        usual: the weight that the peer would have if all were as fast and no weight were lost.
        level: how many times the floor sank.
    """

    def __init__(self, usual: float, patience: float, now: float) -> None:
        self.usual = usual
        self.level = 0
        self._patience = patience
        self._above = now  # when the weight was at the floor last, or its steps were last allowed with less
        self._lower = 0  # levels below the floor at which it takes steps all the same

    def start(self, now: float) -> None:
        """Begin to measure how long the weight is below the floor."""
        self._above = now

    @property
    def value(self) -> float:
        """Return the floor."""
        return LEAST * self.usual_at(self.level)

    def usual_at(self, level: int) -> float:
        """Return what counts as the usual weight at a level."""
        return self.usual * LEAST**level

    def is_below(self, weight: float, lower: int = 0) -> bool:
        """Return whether a weight is below the floor, or below one that is some levels lower."""
        return weight < (1 - SLACK) * self.value * LEAST**lower

    def lacks(self, weight: float, now: float) -> bool:
        """Return whether a peer has to wait for weight before it takes a step."""
        while self.level > 0 and weight >= self.usual_at(self.level - 1):
            self.level -= 1

        if not self.is_below(weight):
            self._above = now
            self._lower = 0
            return False
        if now - self._above > self._patience:
            while self.is_below(weight, self._lower) and self.level + self._lower < LEVELS:
                self._lower += 1
            self._above = now
        return self.is_below(weight, self._lower)

    def sink(self) -> None:
        """Sink by a level, see `is_stuck`."""
        self.level = min(self.level + 1, LEVELS)

    def want(self, weight: float, under_way: bool) -> Want:
        """Return what a peer that waits lacks.

        Args:
            weight: the peer's.
            under_way: whether weight is on its way to neighbours that are up, or came from one and was not added.
        """
        if under_way or weight > (1 + SPARE) * self.value:
            return Want.UNKNOWN
        if weight <= 0 or self.is_below(weight):
            return Want.WAITS
        return Want.NOTHING_TO_SPARE

    def is_stuck(self, own: Want, others: Collection[tuple[int, int]]) -> bool:
        """Return whether the floor has to sink: no peer has weight to spare, and no higher floor has to sink before.

        Args:
            own: what the peer lacks.
            others: what each neighbour that is up lacks, and the level of its floor.
        """
        if own == Want.UNKNOWN or not others or self.level == LEVELS:
            return False
        return all(want > Want.UNKNOWN and level >= self.level for want, level in others)

    def parts(self, weight: float, weights: Mapping[int, float]) -> dict[int, float]:
        """Return which parts of its mass a peer may send, so that the floor is left; none if they are too small.

        Args:
            weight: the peer's.
            weights: the parts that it would send, by receiver.
        """
        sent = sum(weights.values())
        if weight <= TINY or sent <= 0:
            return {}
        spare = max(0.0, 1 - self.value / weight)
        scale = min(1.0, spare / sent)
        if scale <= LITTLE:
            return {}
        return {receiver: part * scale for receiver, part in weights.items()}


class StragglerPolicy:
    """Which neighbours to wait for in an exchange, and how long.

    Peers that are equally fast do better when they wait a moment for each other: a round in which no neighbour is heard
    spends budget and mixes nothing. So a peer waits in each exchange for those neighbours that are *on time*, PATIENCE
    times a period. A period is its own work in a round, from the end of the last exchange to that of the next round's
    without such waits, the median of the last ones, and the least that a message takes, for each exchange.

    A neighbour that has not come by then STRIKES times in a row is late, and is not waited for any more, and so is one
    that does not keep up: for its last SEEN rounds that became known it needed more than SLOWEST exchanges of this peer
    each. One that keeps up is waited for again. So a neighbour that is ten times slower, or stopped, costs a few
    periods at the beginning and then nothing, and one that was cut off for a while is soon waited for again. A peer
    goes at its own pace, also when all its neighbours are slower.

    Args:
        first: seconds to wait as long as no period was measured.
        exchanges: how many exchanges a period has: those of a round, of which only the first waits for private steps.

    Attributes:
        on_time: the neighbours to wait for in the exchange under way.
        patience: how long to wait in an exchange, seconds.
    """

    def __init__(self, first: float, exchanges: int = 1) -> None:
        """Begin with no neighbour on time."""
        self._a_period = exchanges
        self._parts: list[float] = []  # of the period under way
        self.on_time: set[int] = set()
        self._exchanges = 0
        self._strikes = Counter[int]()  # exchanges in a row in which a neighbour was waited for and had nothing
        self._rounds: dict[int, deque[tuple[int, int]]] = {}  # (exchange, round) of the last that became known
        self._periods = deque[float](maxlen=REMEMBERED)
        self._ended: float | None = None
        self.patience = first

    def start(self, now: float, neighbors: Iterable[int]) -> None:
        """Begin to work at a time, and to wait for some neighbours, which begin together."""
        self._ended = now
        self.on_time |= {*neighbors}

    def begin(self, rounds: Mapping[int, int]) -> None:
        """Record the beginning of an exchange, and which neighbours keep up.

        Args:
            rounds: in which round each neighbour is, as far as is known.
        """
        self._exchanges += 1
        for neighbor, round_index in rounds.items():
            known = self._rounds.setdefault(neighbor, deque(maxlen=SEEN + 1))
            if known and round_index < known[-1][1]:
                known.clear()  # it was put back
            if not known or round_index > known[-1][1]:
                known.append((self._exchanges, round_index))
            if len(known) <= SEEN:
                continue

            began, first = known[0]
            last = known[-1][1]
            if self._exchanges - began <= SLOWEST * (last - first):
                self.on_time = self.on_time | {neighbor}
            else:
                self.on_time = self.on_time - {neighbor}

    def end(self, now: float, there: Collection[int], missing: Collection[int], waited: float, message: float) -> None:
        """Record the end of an exchange.

        Args:
            now: a timestamp.
            there: neighbours that had come.
            missing: those that had not; neighbours that had nothing to send are in neither.
            waited: seconds in it that were spent on waiting for others.
            message: seconds that a message takes to a neighbour, at least.
        """
        if self._ended is not None:
            self._parts.append(now - self._ended - waited + message)
        if len(self._parts) == self._a_period:
            self._periods.append(sum(self._parts))
            self._parts.clear()
            self.patience = PATIENCE * median(self._periods)
        self._ended = now
        self.note(there, missing)

    def note(self, there: Collection[int], missing: Collection[int]) -> None:
        """Record which neighbours had come, and which had not."""
        self._strikes.update(self.on_time & {*missing})
        for neighbor in [j for j in missing if self._strikes[j] >= STRIKES]:
            self.on_time.discard(neighbor)
            self._rounds.pop(neighbor, None)
            self._strikes[neighbor] = 0
        for neighbor in there:
            self._strikes[neighbor] = 0
