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
        self._squares = 0.0  # Σ of the squares of all numbers
        self._count = 0
        self._draws: dict[bytes, str] = {}  # the release that had a draw, by the draw's first numbers

    def see(self, noise: np.ndarray, name: str) -> None:
        """Look at one draw.

        Args:
            noise: over the planned standard deviation, float64 [d].
            name: of the release that holds it.
        """
        self._squares += float((noise**2).sum())
        self._count += noise.size

        draw = np.round(noise[:COMPARED], 6).tobytes()
        first = self._draws.setdefault(draw, name)
        if first is not name and noise.size >= COMPARED:
            self.defects.setdefault("noise reused", f"two releases have the same noise: {first}; {name}")

    def result(self) -> dict[str, str]:
        """Return all defects, and whether noise is larger or smaller than planned by more than chance."""
        defects = self.defects | too_small(self._squares, self._count)
        if self._count and stats.chi2.sf(self._squares, self._count) < FALSE_ALARM:
            defects["not clipped"] = (
                "what is released is further from the clipped sum than the planned noise would leave it"
            )
        return defects


def too_small(squares: float, count: int) -> dict[str, str]:
    """Return by how much noise is too small, if that is no chance; else nothing.

    Args:
        squares: the sum of the squares of independent numbers that should be standard normal.
        count: how many there are.
    """
    if count and stats.chi2.cdf(squares, count) < FALSE_ALARM:
        return {"noise too small": f"noise is {math.sqrt(squares / count):.3f} times as large as planned"}
    return {}
