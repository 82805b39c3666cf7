"""Check that the noise an audit saw is as large as planned and that no draw was used twice."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-9  # the probability of calling noise too small (or too large) that is as planned
COMPARED = 8  # two draws are the same if this many first numbers are equal


class NoiseCheck:
    """Collects draws of noise and tells what is wrong with them.

    Attributes:
        defects: a line for each kind of defect found so far. `result` adds those that only all draws together show.
    """

    def __init__(self) -> None:
        self.defects: dict[str, str] = {}
        self._squares = 0.0  # Σ of the squares of all numbers
        self._count = 0
        self._draws: dict[bytes, str] = {}  # the release that had a draw, by the draw's first numbers

    def see(self, noise: np.ndarray, name: str) -> None:
        """Record one draw.

        Args:
            noise: the draw divided by its planned standard deviation, float64 [d].
            name: the name of the release that contains it.
        """
        self._squares += float((noise**2).sum())
        self._count += noise.size

        draw = np.round(noise[:COMPARED], 6).tobytes()
        first = self._draws.setdefault(draw, name)
        if first is not name and noise.size >= COMPARED:
            self.defects.setdefault("noise reused", f"two releases have the same noise: {first}; {name}")

    def result(self) -> dict[str, str]:
        """Return all defects, including noise that is larger or smaller than planned by more than chance."""
        defects = self.defects | too_small(self._squares, self._count)
        if self._count and stats.chi2.sf(self._squares, self._count) < FALSE_ALARM:
            defects["not clipped"] = "releases are further from the clipped sum than the planned noise explains"
        return defects


def too_small(squares: float, count: int) -> dict[str, str]:
    """Return a defect if noise is too small by more than chance; else an empty dict.

    Args:
        squares: the sum of the squares of independent numbers that should be standard normal.
        count: how many there are.
    """
    if count and stats.chi2.cdf(squares, count) < FALSE_ALARM:
        return {"noise too small": f"noise is {math.sqrt(squares / count):.3f} times as large as planned"}
    return {}
