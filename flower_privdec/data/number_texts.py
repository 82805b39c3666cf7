"""Numbers as tables write them: one text is read by itself, by the marks that the scenario names.

What cannot be read is an error that says what the text looks like, and which key reads all of its column.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta
from functools import cached_property
from typing import Any

from flower_privdec.scenario.file_sections import TableSection

# Spaces of other widths and the apostrophe that some programs write between thousands, and their minus.
ALIKE = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2019": "'", "\u2212": "-"})

PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# A mark after which exactly three digits follow may be one of thousands; not after a zero.
AMBIGUOUS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
DATE = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?")
CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
WITH_UNIT = re.compile(r"[<>≤≥~]=?\s*[+-]?\d[\d.,]*.*|[+-]?\d[\d.,]*\s*[^\d\s.,].*")

PLAIN_CHARACTERS = frozenset("0123456789+-.eE")
# In no text of a finite number, whichever its marks are: letters but that of an exponent, and what dates are made of.
LETTERS_OF_WORDS = (frozenset(string.ascii_letters) - {"e", "E"}) | {"/", ":", "_", "%"}

# Texts that stand for a missing value somewhere, in small letters. They say nothing of an example but that.
KNOWN_MISSING = frozenset(
    (
        *("na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "#null!", "none", "nil", "nat", "?", "-", "--", "---"),
        *(".", "..", "*", "unknown", "unk", "missing", "not available", "not done", "n.d.", "nd", "k.a.", "k. a."),
        *("s/d", "#value!", "#div/0!", "#ref!", "#num!", "inf", "-inf", "infinity"),
    )
)

Marks = tuple[str, str | None]  # decimal and thousands, as the keys have them
# In the order in which they are suggested.
KNOWN_MARKS: tuple[Marks, ...] = (
    *((",", None), (".", ","), (".", " "), (".", "'"), (",", "."), (",", " "), (",", "'"), (".", None)),
    ("either", None),
)


def reader(decimal: str, thousands: str | None) -> Callable[[str], float | None]:
    """Return a function of a text that returns its number; None if it is not a number written with these marks."""
    if decimal == "." and thousands is None:
        return _plain
    if decimal == "either":
        return _either

    mark = re.escape(decimal)
    whole = r"\d+"
    if thousands is not None:
        whole = rf"(\d+|\d{{1,3}}({re.escape(thousands)}\d{{3}})+)"
    form = re.compile(rf"[+-]?({whole}({mark}\d*)?|{mark}\d+)([eE][+-]?\d+)?", re.ASCII)

    def read(text: str) -> float | None:
        text = text.translate(ALIKE)
        if form.fullmatch(text) is None:
            return None
        if thousands is not None:
            text = text.replace(thousands, "")
        return float(text.replace(decimal, "."))

    return read


class TextColumn:
    """The texts of a column, of which it is tried by which marks they are numbers.

    What `numbers` says is what `reader` says of each text. It is fast if no text has other marks than a point.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Look at which characters the texts have."""
        self._texts = texts
        self._characters = set("".join(texts))
        self._is_plain = self._characters <= PLAIN_CHARACTERS

    def numbers(self, decimal: str, thousands: str | None) -> list[float] | None:
        """Return the numbers of all texts; None if one of them is no finite number written with these marks."""
        if self._characters & LETTERS_OF_WORDS:
            return None

        has_points = "." in self._characters
        if self._is_plain and not (has_points and decimal != "."):
            return self._plain_numbers
        if self._is_plain and decimal == "either":
            if any(map(AMBIGUOUS.fullmatch, self._texts)):
                return None
            return self._plain_numbers

        read = reader(decimal, thousands)
        numbers = []
        for text in self._texts:
            number = read(text)
            if number is None or not math.isfinite(number):
                return None
            numbers.append(number)
        return numbers

    @cached_property
    def _plain_numbers(self) -> list[float] | None:
        # float() reads texts of these few characters as every reader does.
        try:
            numbers = list(map(float, self._texts))
        except ValueError:
            return None
        if not all(map(math.isfinite, numbers)):
            return None
        return numbers


def _plain(text: str) -> float | None:
    if not text.isascii():
        text = text.translate(ALIKE)
    # float() also takes digits of other scripts, and "1_000".
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _either(text: str) -> float | None:
    number = _plain(text.replace(",", ".", 1))
    if number is None or AMBIGUOUS.fullmatch(text):
        return None
    return number


def problem_of(value: Any, table: TableSection, others: Iterable[Any]) -> str:
    """Return what is wrong with a value that is no number, and the key that reads it, without the value.

    Args:
        others: the values that its file has in columns of numbers.
    """
    if isinstance(value, bytes):
        return "holds bytes that are no text: save the column as numbers"
    if isinstance(value, date | datetime | time | timedelta):
        return "holds a date or a time: save the column as numbers, such as years or days since a public date"
    if not isinstance(value, str):
        return "holds no finite number: save the column as finite numbers, one in each row"

    text = value.strip()
    if text.casefold() in KNOWN_MISSING:
        codes = [*table.missing_values, text]
        remedy = f"set data.table.missing_values={codes}"
        if table.missing == "refused":
            remedy += ", and data.table.missing=flag"
        return f"holds the code {text!r} of a missing value: {remedy}"
    number = reader(table.decimal, table.thousands)(text)
    if number is not None and (math.isfinite(number) or PLAIN.fullmatch(text)):
        return "holds a number that float32 cannot hold: mend it"
    if marks := _marks_of(text, table, others):
        return f"holds a number with other marks: set {marks}"
    if DATE.fullmatch(text) or CLOCK.fullmatch(text):
        return "holds a date or a time: save the column as numbers, such as years or days since a public date"
    if WITH_UNIT.fullmatch(text):
        return "holds a number with a unit or a sign beside it: save the number only, in one unit at all sites"
    return "holds no finite number: mend it, or list it in data.table.categories"


def _marks_of(text: str, table: TableSection, others: Iterable[Any]) -> str:
    """Return the keys by which a text becomes a number, with their values; empty if none do."""
    fitting = [marks for marks in KNOWN_MARKS if _reads(reader(*marks), text)]
    fitting = [marks for marks in fitting if marks != (table.decimal, table.thousands)]
    if not fitting:
        return ""

    # Those that read all numbers of the file come first, so that the next run does not fail on another column.
    texts = [other.strip() for other in others if isinstance(other, str) and other.strip()]
    whole = [marks for marks in fitting if all(_reads(reader(*marks), other) for other in texts)]
    meanings: dict[float | None, str] = {}  # by the number that a text becomes
    for marks in whole or fitting:
        meanings.setdefault(reader(*marks)(text), _keys(marks))
    keys = list(meanings.values())

    # What reads this file alone would fail at the next site, whose error would recommend what is set now.
    either = ("either", None)
    if either in (whole or fitting) and _keys(either) not in keys:
        keys.append(f"{_keys(either)} if sites differ")
    return ", or ".join(keys)


def _reads(read: Callable[[str], float | None], text: str) -> bool:
    number = read(text)
    return number is not None and math.isfinite(number)


def _keys(marks: Marks) -> str:
    decimal, thousands = marks
    if decimal == "." and thousands is not None:
        return f"data.table.thousands={thousands!r}"
    text = f"data.table.decimal={decimal!r}"
    if thousands is not None:
        text += f" with data.table.thousands={thousands!r}"
    return text
