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
LOWEST = 1e-6  # of the usual weight: with less a peer waits until it is given some
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
            boot, behind = boots.get(neighbor), max(0, round_index - reached)
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
    between them, they would wait for ever: each takes what it has for its usual weight, until it has that again. One
    that has next to nothing goes on waiting: the others then have some to spare, and a step at x / w would be far off.

    Args:
        patience: seconds after which it does so in any case, as neighbours may report what they like.
        now: a timestamp of any clock that never goes back.

    Attributes:
        usual: the weight that the peer would have if all were as fast and no weight were lost.
    """

    def __init__(self, usual: float, patience: float, now: float) -> None:
        self.usual, self._patience = usual, patience
        self._relief, self._above = 1.0, now  # the floor is lowered by this; when the weight was at it last

    @property
    def value(self) -> float:
        """Return the floor."""
        return LEAST * self._relief * self.usual

    def is_below(self, weight: float) -> bool:
        """Return whether a weight is below the floor."""
        return weight < (1 - SLACK) * self.value

    def lacks(self, weight: float, now: float) -> bool:
        """Return whether a peer has to wait for weight before it takes a step."""
        if weight >= self.usual:
            self._relief = 1.0
        if not self.is_below(weight):
            self._above = now
        elif now - self._above > self._patience:
            self.relieve(weight)
            self._above = now
        return self.is_below(weight)

    def is_relieved_by(self, weight: float) -> bool:
        """Return whether a weight is less than what counts as the usual one, and not next to nothing."""
        return max(0.0, LOWEST * self.usual) < weight < self._relief * self.usual

    def relieve(self, weight: float) -> None:
        """Take a weight for the usual one, see `is_relieved_by`."""
        if self.is_relieved_by(weight):
            self._relief = weight / self.usual

    def want(self, weight: float, under_way: bool) -> Want:
        """Return what a peer that waits lacks.

        Args:
            weight: the peer's.
            under_way: whether weight is on its way to neighbours that are up, or came from one and was not added.
        """
        if under_way or weight > (1 + SPARE) * self.value:
            return Want.UNKNOWN
        return Want.WAITS if weight <= 0 or self.is_below(weight) else Want.NOTHING_TO_SPARE

    @staticmethod
    def is_stuck(own: Want, others: Collection[int]) -> bool:
        """Return whether a peer that wants weight, and all neighbours that are up, have none to spare."""
        return own > Want.UNKNOWN and bool(others) and min(others) > Want.UNKNOWN

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
