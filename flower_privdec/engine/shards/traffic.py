"""Which rows cross from shard to shard in one exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """Which rows go to and come from each other shard in one exchange; both sides work it out alike.

    Attributes:
        sends: by shard, which of the rows here, int64, in the order in which they go.
        receives: by shard, where among the rows from elsewhere its own stand, which are consecutive.
        leave, arrive: by shard, where runs of rows begin and end that lie one behind the other at their sender's: here,
            and among the rows from elsewhere.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, slice]
    leave: Mapping[int, list[tuple[int, int]]]
    arrive: Mapping[int, list[tuple[int, int]]]

    @classmethod
    def of(cls, sends: Mapping[int, np.ndarray], coming: Mapping[int, np.ndarray]) -> Traffic:
        """Return the traffic of rows that go, and of rows that come, each by where they stand at their sender's."""
        receives, arrive, first = {}, {}, 0
        for shard, which in sorted(coming.items()):
            receives[shard] = slice(first, first + len(which))
            arrive[shard] = [(first + start, first + stop) for start, stop in _runs(which)]
            first += len(which)
        leave = {
            shard: [(int(which[start]), int(which[stop - 1]) + 1) for start, stop in _runs(which)]
            for shard, which in sends.items()
        }
        return cls({shard: torch.from_numpy(which) for shard, which in sends.items()}, receives, leave, arrive)

    @property
    def foreign(self) -> int:
        """Return how many rows come from elsewhere."""
        return max((part.stop for part in self.receives.values()), default=0)


def _runs(which: np.ndarray) -> list[tuple[int, int]]:
    """Return where runs of consecutive numbers begin and end."""
    ends = [0, *(np.flatnonzero(np.diff(which) != 1) + 1).tolist(), len(which)]
    return list(pairwise(ends))
