"""Text of numbers, values and errors: one format in all output."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import groupby

NOTHING = "–"


def percent(share: float | None) -> str:
    """Return a share as a percentage with one decimal: 0.905 is `90.5 %`."""
    if share is None:
        return NOTHING
    return f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    """Return a measured number with three significant digits: `0.450`, `12.3`, `3,120`, `1.20e-5`."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    # `#` keeps trailing zeros, and the point of a number without decimals.
    return _exponent(f"{value:#.3g}".removesuffix("."))


def setting(value: float | None) -> str:
    """Return a setting's number as it was chosen: `0.001`, `1e-5`, `3`."""
    if value is None:
        return NOTHING
    return _exponent(f"{value:g}")


def _exponent(text: str) -> str:
    """Return a number whose exponent has no leading zero or plus: `1e-05` is `1e-5`."""
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return f"{mantissa}e{int(exponent)}"


def epsilon_text(epsilon: float | str | None) -> str:
    """Return ε with three significant digits, rounded up so that it is never too small.

    Examples:
        >>> epsilon_text(2.9912), epsilon_text(0.9991)
        ('3.00', '1.00')
    """
    if epsilon is None:
        return NOTHING
    value = float(epsilon)
    if math.isinf(value):
        return "∞"
    if value <= 0:
        return "0"

    # Rounded up after the third digit. A value that is one of these but for a rounding error stays as it is.
    decimals = 2 - math.floor(math.log10(value))
    rounded = math.ceil(value * 10.0**decimals - 1e-9) / 10.0**decimals

    # 0.9995 becomes 1, whose third digit is one place further to the left.
    decimals = 2 - math.floor(math.log10(rounded) + 1e-12)
    return f"{rounded:.{max(decimals, 0)}f}"


def duration(seconds: float | None) -> str:
    """Return a time in readable units: `0.42 s`, `12.3 s`, `3 min 05 s`, `2 h 05 min`."""
    if seconds is None:
        return NOTHING
    if seconds < 9.995:  # what rounds to 10.0 has one decimal
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"

    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours > 0:
        return f"{hours} h {minutes_left:02d} min"
    return f"{minutes} min {seconds_left:02d} s"


def memory(count: float) -> str:
    """Return a number of bytes in a unit in which it is below 1,000: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def peer_ranges(peers: Iterable[int]) -> str:
    """Return peer ids as ranges: `0-5, 9`."""
    ranges = []
    # In a run of consecutive ids, id minus place is constant.
    for _, run in groupby(enumerate(sorted(peers)), lambda pair: pair[1] - pair[0]):
        ids = [peer for _, peer in run]
        if len(ids) == 1:
            ranges.append(str(ids[0]))
        else:
            ranges.append(f"{ids[0]}-{ids[-1]}")
    return ", ".join(ranges)


def peers_named(peers: Collection[int]) -> str:
    """Return peers as a sentence names them: `peer 3`, or `peers 0-5, 9`."""
    return f"{'peer' if len(peers) == 1 else 'peers'} {peer_ranges(peers)}"


def shown(value: object, longest: int = 80) -> str:
    """Return a value as an error names it: as Python writes it, on one line, without its middle if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; an object that contains itself
        return f"a {type(value).__name__} too long to show"

    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def printable(text: str) -> str:
    """Return text as one line without control characters, which a terminal would obey, cut at 2,000 characters."""
    plain = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[:2000])
    if len(text) > 2000:
        plain += " ..."
    return plain


def one_line(error: BaseException) -> str:
    """Return an error's type and text on one line, cut at 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
