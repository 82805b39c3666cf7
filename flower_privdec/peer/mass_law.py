"""What the laws of mass have in common: nothing is made, lost or doubled but what is named.

`MassOfShares` is for peers that wait for nobody, whose shares are in flight between disks. `MassOfRows` is for peers
that wait for each other, whose rows at a place follow from everybody's rows at the place before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from flower_privdec.common.errors import CodedError
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.virtual_network import Machine, VirtualNetwork

if TYPE_CHECKING:
    from torch import Tensor

EXACT = 1e-9  # of the mass: what additions of floats may round
Moved = Callable[[Checkpoint], float]
Now = TypeVar("Now", bound="OnDisk")


class BrokenLawError(CodedError):
    """A law does not hold; the code names which. It is not an error of a peer, so no peer ends by it."""


class OnDisk:
    """What a peer's disk holds of mass.

    Attributes:
        checkpoint: of which it was read.
        disk: which folder it is.
        weight, x: the sums of its rows w and x; the weight is 1 if there is none.
        moved: the sum of what its steps have added to x so far; 0 if nobody counts it.
    """

    def __init__(self, checkpoint: Checkpoint, disk: object, moved: Moved | None) -> None:
        rows = checkpoint.state.rows
        self.checkpoint = checkpoint
        self.disk = disk
        self.weight = float(rows["w"][0]) if "w" in rows else 1.0
        self.x = total(rows["x"])
        self.moved = 0.0 if moved is None else moved(checkpoint)


class MassLaw(ABC):
    """A law of mass, checked after each event of a network.

    Args:
        moved: returns the sum of the numbers that a peer's steps have added to x up to a checkpoint, if its trainer
            counts them in its rows; without it only weights are watched.

    Attributes:
        named: how often mass was begun, put back, lost, or changed in another way that a folder put back or lost
            explains, by name.
    """

    def __init__(self, moved: Moved | None) -> None:
        self.moved = moved
        self.named: Counter[str] = Counter()
        self._size = 1.0  # of the mass so far, which rounding is relative to

    @abstractmethod
    def check(self, network: VirtualNetwork) -> None:
        """Check what the last event changed on disks.

        Raises:
            BrokenLawError: mass was made, lost or doubled.
        """

    def is_off(self, found: float, expected: float) -> bool:
        """Return whether a number is another than expected, by more than rounding."""
        self._size = max(self._size, abs(found) if math.isfinite(found) else 1.0)
        return not abs(found - expected) <= EXACT * self._size


def total(values: Tensor) -> float:
    """Return the sum of all numbers."""
    return float(values.double().sum())


def changed_disks(
    network: VirtualNetwork, held: dict[int, Now]
) -> Iterator[tuple[int, Machine, Now | None, Checkpoint | None]]:
    """Yield the peers whose disks hold another checkpoint than was seen last, with what was seen and what is there."""
    for number, machine in network.machines.items():
        newest = machine.disk.store.checkpoints.newest
        before = held.get(number)
        seen = None if before is None else before.checkpoint
        if newest is not seen:
            yield number, machine, before, newest
