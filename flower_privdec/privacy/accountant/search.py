"""Where a quantity that falls crosses a bound: shared by all that solve for noise, δ or a number of steps."""

from __future__ import annotations

from collections.abc import Callable

Point = tuple[float, float]


def bracket(function: Callable[[float], float], start: float, step: float, limit: float) -> tuple[Point, Point] | None:
    """Return (x, f(x)) of a falling function where f > 0 and, further up, where f <= 0.

    Args:
        step: the first one from `start`, up or down; each is half as long again as the one before.
        limit: |x| beyond which there is no looking; None is returned.
    """
    x, value = start, function(start)
    step = abs(step) if value > 0 else -abs(step)
    while abs(x + step) <= limit:
        before = (x, value)
        x += step
        value = function(x)
        if (value > 0) != (before[1] > 0):
            return (before, (x, value)) if before[1] > 0 else ((x, value), before)
        step *= 1.5
    return None


def narrow(
    function: Callable[[float], float], low: Point, high: Point, accept: Callable[[float], bool], width: float
) -> tuple[Point, Point]:
    """Return a bracket that is narrower than a width, or one of whose ends has an accepted value.

    By regula falsi, kept a tenth of the way off both ends, or halves where values are far from 0.
    """
    while high[0] - low[0] > width and not (accept(low[1]) or accept(high[1])):
        share = low[1] / (low[1] - high[1]) if max(low[1], -high[1]) < 3 else 0.5
        x = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
        point = (x, function(x))
        low, high = (point, high) if point[1] > 0 else (low, point)
    return low, high


def last_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest n with low <= n < high that fits, where all below one that fits do too.

    Neither end is asked: `low` is taken to fit and `high` not to.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
