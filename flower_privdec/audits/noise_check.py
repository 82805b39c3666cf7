"""Whether noise that an audit saw is as large as planned, and no draw of it was seen twice."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-9  # the chance with which noise that is as planned is called too small, or too large
COMPARED = 8  # numbers of a draw that have to be equal to those of another


class NoiseCheck:
    """What is wrong with some draws of noise.

    Attributes:
        defects: a line each, by kind; of draws that are alike.
    """

    def __init__(self) -> None:
        self.defects: dict[str, str] = {}
        self._squares, self._count, self._draws = 0.0, 0, dict[bytes, str]()

    def see(self, noise: np.ndarray, name: str) -> None:
        """Look at one draw.

        Args:
            noise: over the planned standard deviation, float64 [d].
            name: of the release that holds it.
        """
        self._squares += float((noise**2).sum())
        self._count += noise.size
        other = self._draws.setdefault(np.round(noise[:COMPARED], 6).tobytes(), name)
        if other is not name and noise.size >= COMPARED:
            self.defects.setdefault("noise reused", f"two releases have the same noise: {other}; {name}")

    def result(self) -> dict[str, str]:
        """Return all defects: also noise that is not as large as planned, where that is no chance."""
        most = "what is released is further from the clipped sum than the planned noise would leave it"
        far = self._count > 0 and stats.chi2.sf(self._squares, self._count) < FALSE_ALARM
        return self.defects | too_small(self._squares, self._count) | ({"not clipped": most} if far else {})


def too_small(squares: float, count: int) -> dict[str, str]:
    """Return by how much noise is too small, where that is no chance.

    Args:
        squares: the sum of the squares of independent numbers that should be standard normal.
        count: how many there are.
    """
    if count and stats.chi2.cdf(squares, count) < FALSE_ALARM:
        return {"noise too small": f"noise is {math.sqrt(squares / count):.3f} times as large as planned"}
    return {}
