"""When a peer that does not wait for late neighbours may take a step: how far ahead of them, and with which push-sum
weight. Pure: neither has a clock, a lock or a socket.

What neighbours report decides how fast a peer goes and how long its steps are, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum

LEAST = 0.4  # of the weight that it would have without delays: a peer keeps so much, for steps at x / w grow
SLACK = 0.02  # of the floor: a weight that is less below it is at it, as rounding leaves it
SPARE = 0.1  # of the floor: a peer that has not as much more has none to spare
LITTLE = 1e-3  # of a share: less is not sent
LEVELS = 15  # to which a floor sinks, each LEAST times the one before: a millionth of the usual weight at last
TINY = 1e-30  # of which a part may round to 0: a peer with less sends nothing


class Want(IntEnum):
    """What a peer lacks of weight, as its hellos report."""

    UNKNOWN = 0  # some is under way from it, or to it, or it has some to spare
    NOTHING_TO_SPARE = 1
    WAITS = 2


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
        """Return the neighbour that a peer has to wait for; None where it may take a step.

        Args:
            round_index: the peer's.
            rounds: of the neighbours that are up; one that is missing meets the peer again when it is back.
            boots: of their processes.
        """
        met = dict[int, tuple[int | None, int]]()
        for neighbor, reached in rounds.items():
            boot = boots.get(neighbor)
            behind = max(0, round_index - reached)
            before, least = self._met.get(neighbor, (boot, behind))
            met[neighbor] = boot, min(behind, least) if boot == before else behind
        self._met = met
        ahead = {j: round_index - reached - met[j][1] for j, reached in rounds.items()}
        slowest = max(ahead, key=ahead.__getitem__, default=None)
        return slowest if slowest is not None and self._lead is not None and ahead[slowest] >= self._lead else None


class WeightFloor:
    """The push-sum weight below which a peer takes no private step, and sends nothing.

    A step at x / w is 1 / w times as long, so a peer has to have LEAST of its usual weight. What a lost peer took with
    it is missing at all others. Once a peer and all neighbours that are up have none to spare, and none is under way
    between them, they would wait for ever: those of them whose floors are highest sink by a level, until they have the
    weight of the level above again. So floors sink together. If one sank before the others, it would give them what it
    has, have none to spare again, and sink again, while they wait for more than there is.

    Args:
        patience: seconds after which it sinks in any case, as neighbours may report what they like.
        now: a timestamp of any clock that never goes back.

    Attributes:
        usual: the weight that the peer would have if all were as fast and no weight were lost.
        level: how many times the floor sank.
    """

    def __init__(self, usual: float, patience: float, now: float) -> None:
        self.usual = usual
        self.level = 0
        self._patience = patience
        self._above = now  # when the weight was at the floor last

    @property
    def value(self) -> float:
        """Return the floor."""
        return LEAST * self.usual_at(self.level)

    def usual_at(self, level: int) -> float:
        """Return what counts as the usual weight at a level."""
        return self.usual * LEAST**level

    def is_below(self, weight: float) -> bool:
        """Return whether a weight is below the floor."""
        return weight < (1 - SLACK) * self.value

    def lacks(self, weight: float, now: float) -> bool:
        """Return whether a peer has to wait for weight before it takes a step."""
        while self.level > 0 and weight >= self.usual_at(self.level - 1):
            self.level -= 1
        if not self.is_below(weight):
            self._above = now
        elif now - self._above > self._patience:
            while self.is_below(weight) and self.level < LEVELS:
                self.sink()
            self._above = now
        return self.is_below(weight)

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
        return Want.WAITS if weight <= 0 or self.is_below(weight) else Want.NOTHING_TO_SPARE

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
        """Return which parts of its mass a peer may send, so that the floor is left; none where they are too small.

        Args:
            weight: the peer's.
            weights: the parts that it would send, by receiver.
        """
        sent = sum(weights.values())
        spare = max(0.0, 1 - self.value / weight) if weight > TINY else 0.0
        scale = min(1.0, spare / sent) if sent > 0 else 0.0
        return {receiver: part * scale for receiver, part in weights.items()} if scale > LITTLE else {}
