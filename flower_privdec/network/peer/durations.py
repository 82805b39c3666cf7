"""How long something took, over weeks, in a few numbers."""

from __future__ import annotations

import time
from bisect import bisect_left


class Durations:
    """Counts how long something took, in buckets, as a histogram has them."""

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        self.total = 0.0
        self.last = -1.0  # when the last one ended, by the monotonic clock; below 0 for never

    def add(self, seconds: float) -> None:
        """Count one that ends now."""
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.total += seconds
        self.last = time.monotonic()
