"""Text of numbers, values and errors: one format in all output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

NOTHING = "–"


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal: 0.905 is `90.5 %`."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    """Return a measured number with three significant digits: `0.450`, `12.3`, `3,120`, `1.20e-5`."""
    if value is None:
        return NOTHING
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return _exponent(f"{value:#.3g}".removesuffix(".")) if value else "0"


def setting(value: float | None) -> str:
    """Return a setting's number as it was chosen: `0.001`, `1e-5`, `3`."""
    return NOTHING if value is None else _exponent(f"{value:g}")


def _exponent(text: str) -> str:
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def epsilon_text(epsilon: float | str | None) -> str:
    """Return ε with three significant digits, rounded up so that it is never too small.

    Examples:
        >>> epsilon_text(2.9912)
        '3.00'
    """
    if epsilon is None:
        return NOTHING
    value = float(epsilon)
    if math.isinf(value):
        return "∞"
    if value <= 0:
        return "0"
    decimals = 2 - math.floor(math.log10(value))
    rounded = math.ceil(value * 10.0**decimals - 1e-9) / 10.0**decimals
    return f"{rounded:.{max(decimals, 0)}f}"


def duration(seconds: float | None) -> str:
    """Return a time in readable units: `0.42 s`, `12.3 s`, `3 min 05 s`, `2 h 05 min`."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02d} min" if hours else f"{minutes} min {rest:02d} s"


def memory(count: float) -> str:
    """Return a number of bytes in the largest binary unit that leaves a whole part."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def peer_ranges(peers: Iterable[int]) -> str:
    """Return peer ids as ranges: `0-5, 9`."""
    ranges = []
    for _, run in groupby(enumerate(sorted(peers)), lambda pair: pair[1] - pair[0]):
        ids = [peer for _, peer in run]
        ranges.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]))
    return ", ".join(ranges)


def shown(value: object, longest: int = 80) -> str:
    """Return a value as an error names it: as Python writes it, on one line, its middle left out where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; what holds itself
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def printable(text: str) -> str:
    """Return text as one line that a terminal takes for nothing else, cut at 2,000 characters."""
    plain = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[:2000])
    return plain if len(text) <= 2000 else f"{plain} ..."


def one_line(error: BaseException) -> str:
    """Return an error's type and text on one line, cut at 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
