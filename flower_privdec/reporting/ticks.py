"""Numbers and ticks of axes as plain text. Imports matplotlib, so only functions that draw import it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, Locator, LogLocator, MaxNLocator

from flower_privdec.reporting.look import LETTERS_AN_INCH, axis_texts, width_of

MOST_TICKS = 6
MOST_BELOW = 7


class PlainNumbers(Formatter):
    """Writes the numbers of an axis as a reader would: 0.1, 1, 1,000; see `axis_texts`.

    Args:
        unit: stands after each number.
    """

    def __init__(self, unit: str = "") -> None:
        self.unit = unit

    def __call__(self, value: float, pos: int | None = None) -> str:
        """Return one number as text."""
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the texts of all ticks of an axis."""
        own = isinstance(self.axis, Axis) and self.axis.get_scale() == "log"
        return [text + self.unit for text in axis_texts(values, each_its_own=own)]


class FittingTicks(MaxNLocator):
    """Places as many round numbers below an axis as stand there without touching one another."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the ticks between two numbers."""
        letters = math.inf
        if isinstance(self.axis, Axis):
            letters = LETTERS_AN_INCH * width_of(self.axis.axes)

        ticks: Sequence[float] = []
        for most in range(MOST_BELOW, 0, -1):
            self.set_params(nbins=most, steps=[1, 2, 2.5, 5, 10])
            ticks = super().tick_values(vmin, vmax)
            shown = [tick for tick in ticks if vmin <= tick <= vmax]
            needed = sum(len(text) + 2 for text in axis_texts(shown))
            if needed <= letters:
                break
        return ticks


class LogTicks(Locator):
    """Places a few round numbers on a logarithmic axis, also if it spans less than a power of ten."""

    def __call__(self) -> Sequence[float]:
        """Return the ticks of the axis as it is shown."""
        if self.axis is None:
            return []
        low, high = self.axis.get_view_interval()
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Return the ticks between two positive numbers."""
        low = min(vmin, vmax)
        high = max(vmin, vmax)
        if not 0 < low < high < math.inf:
            return []

        decades = math.log10(high / low)
        if decades < 0.7:
            return self._inside(MaxNLocator(MOST_TICKS).tick_values(low, high), low, high)
        if decades < 2.2:
            # Halves of a decade, or its thirds if it is the only one.
            digits = (1.0, 2.0, 5.0) if decades < 1.4 else (1.0, 3.0)
            return self._inside(LogLocator(subs=digits).tick_values(low, high), low, high)
        return self._inside(LogLocator(numticks=MOST_TICKS + 2).tick_values(low, high), low, high)

    @staticmethod
    def _inside(values: Sequence[float], low: float, high: float) -> Sequence[float]:
        ticks = np.asarray(values)
        return [float(value) for value in ticks[(ticks >= low * 0.999) & (ticks <= high * 1.001)]]
