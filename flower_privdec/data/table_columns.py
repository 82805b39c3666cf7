"""Columns of a table as numbers, by public constants only.

Means, deviations, categories and classes that are taken from private rows would be releases that no ledger counts. So
the scenario names them all, and each number depends on its own row and on the scenario: how a file writes its numbers
is never found out from its rows. An error names file, row and column, and never a value.

    numbers       (value - center) / scale
    categories    one number for each, 1 for the row's own
    missing       refused; or the center, or no category, with or without a flag beside
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.intake import Intake, counted, listed, quoted
from flower_privdec.data.number_texts import TextColumn, problem_of, reader
from flower_privdec.scenario.file_sections import TableSection, composed

LARGEST = float(np.finfo(np.float32).max)
MOST_LISTED = 12  # columns in an error
NEAR = 0.75  # how alike two names are, of 1, that may be one column's
FAR = 10.0  # scales from the center: further values are told to their owner
MARKS = ";\t|,"  # delimiters of CSV


@dataclass(frozen=True)
class Columns:
    """Some columns of a table, by name.

    Attributes:
        where: what to call the table in an error.
        values: the values of each column: texts, numbers or booleans; None if missing.
        rows: the number of each row, as an editor counts the lines of a file.
        left: the columns of the file that are not read.
        n_empty: how many rows without any value are not read.
    """

    where: str
    values: dict[str, list[Any]]
    rows: list[int]
    left: tuple[str, ...] = ()
    n_empty: int = 0

    def error(self, row: int, name: str, problem: str, code: str) -> ScenarioError:
        """Return an error about the value of a column in a row, by its place."""
        return ScenarioError(f"{self.where}:{self.rows[row]}: column {name!r} {problem}", code=code)


def from_frame(
    header: Sequence[str],
    column: Callable[[str], list[Any]],
    where: str,
    table: TableSection,
    labels: Sequence[Any] | None,
    targets: Targets,
) -> tuple[np.ndarray, np.ndarray, Intake]:
    """Return x and y of a table in memory, and what was read of it.

    Args:
        header: its columns.
        column: gives the values of one.
        where: what to call it in an error, before the row, which counts from 0.
        table: the public constants.
        labels: the classes, in the order of their numbers; None if the target holds numbers.
        targets: the kind of target that the task takes.

    Raises:
        ScenarioError: a column, a row or a value is wrong.
    """
    places = find_columns(header, where, table)
    values = {name: Missing(table, name).taken_out(column(header[place])) for name, place in places.items()}
    count = len(next(iter(values.values())))
    columns = Columns(where, values, list(range(count)), left_columns(header, places))
    if not columns.rows:
        raise ScenarioError(f"{where} holds no row", code="data.empty")
    if labels is not None:
        labels = [_text(label) for label in labels]
    y = targets_of(labels, table, columns, targets)
    x = features_of(table, columns)
    return x, y, intake_of(table, columns, labels, x)


# --- the header


def find_columns(header: Sequence[str], where: str, table: TableSection) -> dict[str, int]:
    """Return the place of each column that the scenario names; a column that may be missing need not be there.

    Raises:
        ScenarioError: a column is not there, or twice, or one that may be missing is there under a similar name.
    """
    names = [_renamed(name, table) for name in header]
    places = {}
    for wanted in (table.target, *feature_names(table)):
        name = composed(wanted)
        if names.count(name) > 1:
            same = listed(repr(header[place]) for place, other in enumerate(names) if other == name)
            raise ScenarioError(
                f"{where}: has {names.count(name)} columns {name!r} ({same}); rename them", code="data.column"
            )
        if name in names:
            places[wanted] = names.index(name)

    for name in (table.target, *feature_names(table)):
        if name in places:
            continue
        others = [other for place, other in enumerate(names) if place not in places.values()]
        similar = _similar(name, others)
        may_be_missing = name != table.target and table.missing != "refused"
        if may_be_missing and similar is None and places:
            continue
        raise _no_column(name, similar, names, where, table, found=bool(places))
    return places


def left_columns(header: Sequence[str], places: dict[str, int]) -> tuple[str, ...]:
    """Return the names of the columns that are not read, of which a scenario names none."""
    taken = set(places.values())
    return tuple(name.strip() for place, name in enumerate(header) if place not in taken)


def _renamed(name: str, table: TableSection) -> str:
    """Return what the scenario calls a column of a file."""
    stripped = composed(name.strip())
    for column, renamed in table.rename.items():
        if stripped == composed(column.strip()):
            return renamed
    return stripped


def _similar(name: str, others: Sequence[str]) -> str | None:
    """Return the column that may be meant by a name: in other capitals or spaces, with a unit, or misspelt."""
    plain = {other: _plain(other) for other in others if _plain(other)}
    wanted = _plain(name)
    for other, text in plain.items():
        if text == wanted:
            return other
    for other, text in plain.items():
        # weight_kg and "age (years)": the name, and then another word.
        words = re.split(r"[\W_]+", other.casefold())
        if len(wanted) > 1 and len(words) > 1 and _plain(words[0]) == wanted:
            return other
        if len(wanted) > 3 and difflib.SequenceMatcher(None, wanted, text).ratio() >= NEAR:
            return other
    return None


def _plain(name: str) -> str:
    """Return a name in small letters, without spaces and other marks."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _no_column(
    name: str, similar: str | None, names: Sequence[str], where: str, table: TableSection, *, found: bool
) -> ScenarioError:
    has = ""
    if name == table.target:
        remedy = "mend data.table"
    elif table.missing == "refused":
        remedy = "mend it, or set data.table.missing to center or flag"
    else:
        remedy = "mend it"

    # A first line that is no header is an example, and is not quoted.
    if found:
        has = f" (it has {listed(names, MOST_LISTED)})"
        remedy = f"if one of these is it, in the same unit, name it in data.table.rename; if not, {remedy}"
    elif similar is None:
        remedy = "its first line must be a header with these names: add one, or mend data.table"
    if similar is not None:
        has = f" and has {quoted(similar)}"
        remedy = f"if it is that, in the same unit, set data.table.rename={{{quoted(similar)}: {quoted(name)}}}"
        if name != table.target and table.missing != "refused":
            remedy += "; if not, take it out of the file"

    # A file with another delimiter looks like a file with one column, whose name contains it.
    if len(names) == 1:
        marks = [mark for mark in MARKS if mark in names[0] and mark != table.delimiter]
        if marks:
            has = ""
            remedy = f"set data.table.delimiter={marks[0]!r}, or auto if sites differ"
    return ScenarioError(f"{where}: has no column {name!r}{has}: {remedy}", code="data.column")


def feature_names(table: TableSection) -> list[str]:
    """Return the columns that become features."""
    return [*table.numbers, *table.categories]


# --- missing values


class Missing:
    """Which values of a column count as missing: the texts that the scenario lists, and the numbers that they are."""

    def __init__(self, table: TableSection, name: str) -> None:
        listed = [*table.missing_values, *table.missing_codes.get(name, ())]
        self._table = table
        self._ignores_case = table.ignore_case
        self._texts = {"", *(table.folded(text) for text in listed)}
        self._read = reader(table.decimal, table.thousands)
        numbers = [read(text) for text in listed for read in (self._read, reader(".", None))]
        self._numbers = {number for number in numbers if number is not None and math.isfinite(number)}

    def taken_out(self, values: Sequence[Any]) -> list[Any]:
        """Return a column's values with None in place of those that count as missing; texts lose their outer spaces."""
        is_slow = self._numbers or self._ignores_case
        if is_slow or set(map(type, values)) != {str}:
            return [self.cleaned(value) for value in values]

        # By far most columns: texts, of which some words are missing values. This is what `cleaned` says of each.
        missing = self._texts
        texts = list(map(str.strip, values))
        if missing.isdisjoint(texts):
            return texts
        return [None if text in missing else text for text in texts]

    def cleaned(self, value: Any) -> Any:
        """Return a value, or None if it counts as missing."""
        if isinstance(value, bytes):
            value = _decoded(value)
        if isinstance(value, str):
            value = value.strip()
            text = self._table.folded(value) if self._ignores_case else value
            if text in self._texts:
                return None
            if not self._numbers:
                return value
        elif value is None or value != value:
            return None

        if self._numbers and not isinstance(value, bool) and _as_number(value, self._read) in self._numbers:
            return None
        return value


def _decoded(value: bytes) -> Any:
    """Return text that a Parquet file keeps as bytes; the bytes themselves if they are none."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def _finite(value: Any) -> float | None:
    """Return a value as a number; None if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


# --- features


def features_of(table: TableSection, columns: Columns) -> np.ndarray:
    """Return float32 [N, features]: the scaled numbers, the categories one by one, and flags of what is missing.

    Raises:
        ScenarioError: a value is missing, no number, out of its bounds, or an unlisted category.
    """
    count = len(columns.rows)
    parts = list[np.ndarray]()  # [N] or [N, k] each
    flags = list[np.ndarray]()  # [N] each
    for name in feature_names(table):
        values = columns.values.get(name, [None] * count)
        gone = np.array([value is None for value in values], dtype=np.float32)
        if table.missing == "refused" and gone.any():
            problem = "holds a missing value: mend it, or set data.table.missing=flag (or center)"
            if gone.all():
                problem = (
                    f"holds no value in any of its {counted(count, 'row')}: mend it, or set data.table.missing=flag"
                )
            raise columns.error(int(gone.argmax()), name, problem, "data.missing")
        flags.append(gone)

        if name in table.categories:
            parts.append(_one_hot(table, columns, name, values))
        else:
            parts.append(_scaled(table, columns, name, values))

    if table.missing == "flag":
        parts.extend(flags)
    wide = [part[:, None] if part.ndim == 1 else part for part in parts]
    return np.concatenate(wide, axis=1, dtype=np.float32)


def intake_of(table: TableSection, columns: Columns, labels: Sequence[str] | None, x: np.ndarray) -> Intake:
    """Return what was read of a table, and what was left.

    Args:
        x: its features, [N, features], those of numbers first.

    Privacy: what its owner should look at is counted on private rows; see `intake`.
    """
    left = []
    if columns.left:
        left.append(f"{counted(len(columns.left), 'column')} ({listed(columns.left)})")
    if columns.n_empty:
        left.append(f"{counted(columns.n_empty, 'row')} without a value")

    empty = []
    doubts = []
    for place, name in enumerate(feature_names(table)):
        values = columns.values.get(name)
        if values is None or all(value is None for value in values):
            empty.append(name)
        elif name in table.numbers and name not in table.bounds:
            far = int((np.abs(x[:, place]) > FAR).sum())
            if far:
                doubts.append(
                    f"{counted(far, 'value')} of {name!r} beyond {FAR:g} scales from the center: another unit, or a "
                    "code of missing_values? data.table.bounds refuses them"
                )
    return Intake(
        files=1,
        columns=sum(name not in empty for name in feature_names(table)),
        names=tuple(labels or ()),
        left=tuple(left),
        empty=tuple(empty),
        doubts=tuple(doubts),
    )


def _scaled(table: TableSection, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    """Return a column of numbers, float64 [N]; what is missing becomes 0, as the center does."""
    center, scale = table.numbers[name]
    numbers = _numbers(table, columns, name, values, center)
    return (numbers - center) / scale


def _numbers(table: TableSection, columns: Columns, name: str, values: list[Any], center: float) -> np.ndarray:
    """Return a column as float64 [N], with the center in the place of what is missing.

    Raises:
        ScenarioError: a value is no finite number, or out of its bounds.
    """
    whole = _of_plain_texts(table, values, center)
    if whole is None:
        whole = _one_by_one(table, columns, name, values, center)

    least, most = table.bounds.get(name, (-math.inf, math.inf))
    outside = (whole < least) | (whole > most)
    outside &= np.array([value is not None for value in values])
    if outside.any():
        problem = (
            f"holds a value outside of data.table.bounds.{name}=[{least:g}, {most:g}] "
            f"({counted(int(outside.sum()), 'row')} in all): mend it if it has another unit, add it to "
            "data.table.missing_values if it is a code, or widen the bounds"
        )
        raise columns.error(int(outside.argmax()), name, problem, "data.bounds")
    return whole


def _of_plain_texts(table: TableSection, values: list[Any], center: float) -> np.ndarray | None:
    """Return a column of texts that are all numbers, as float64 [N]; None if one is something else."""
    given = [value for value in values if value is not None]
    if set(map(type, given)) != {str}:
        return None
    numbers = TextColumn(given).numbers(table.decimal, table.thousands)
    if numbers is None:
        return None

    whole = np.full(len(values), center, dtype=np.float64)
    whole[np.array([value is not None for value in values], dtype=bool)] = numbers
    if (np.abs(whole) > LARGEST).any():
        return None
    return whole


def _one_by_one(table: TableSection, columns: Columns, name: str, values: list[Any], center: float) -> np.ndarray:
    """Return a column of values of any kind as float64 [N].

    Raises:
        ScenarioError: a value is no finite number.
    """
    read = reader(table.decimal, table.thousands)
    numbers = []
    for row, value in enumerate(values):
        number = center
        if value is not None:
            number = _as_number(value, read)

        # Written so that NaN fails, too.
        if not abs(number) <= LARGEST:
            others = [other for column in table.numbers for other in columns.values.get(column, ())]
            problem = problem_of(value, table, [*values, *others])
            raise columns.error(row, name, problem, "data.no-number")
        numbers.append(number)

    return np.array(numbers, dtype=np.float64)


def _as_number(value: Any, read: Callable[[str], float | None]) -> float:
    """Return a value as a number, NaN if it is none."""
    number = read(value) if isinstance(value, str) else _finite_of_any(value)
    if number is None:
        return math.nan
    return number


def _finite_of_any(value: Any) -> float | None:
    # float() reads bytes as text, by other rules than those of texts.
    if isinstance(value, bytes):
        return None
    return _finite(value)


class _Listed:
    """Finds the place of a value among texts that the scenario lists."""

    def __init__(self, table: TableSection, name: str, listed: Sequence[str]) -> None:
        self._folded = table.folded
        self._found: dict[str, int | None] = {}  # by texts, of which a column has the same again and again
        self._places = {table.folded(text): place for place, text in enumerate(listed)}
        for spelling, text in table.spellings.get(name, {}).items():
            self._places[table.folded(spelling)] = self._places[table.folded(text)]

    def place(self, value: Any) -> int | None:
        """Return the place of a value; None if the list has none like it."""
        if isinstance(value, str) and value in self._found:
            return self._found[value]

        place = None
        for text in _texts(value):
            place = self._places.get(self._folded(text))
            if place is not None:
                break
        if isinstance(value, str):
            self._found[value] = place
        return place

    def problem(self, value: Any, key: str, name: str) -> str:
        """Return what is wrong with a value that is not listed, without the value."""
        plain = {_plain(text) for text in self._places}
        if any(_plain(text) in plain and _plain(text) for text in _texts(value)):
            return (
                f"holds one that {key} lists in other capitals or spaces: set data.table.ignore_case=true, or give its "
                f"spelling in data.table.spellings.{name}"
            )
        return f"holds one that {key} does not list: add it, or give its spelling in data.table.spellings.{name}"


def _texts(value: Any) -> list[str]:
    """Return the texts that a value is written as, of which a scenario may list any.

    Sites write the same code as text, whole number, number with a point, or truth value.
    """
    if isinstance(value, bool | np.bool_):
        return [str(value), str(value).lower(), str(int(value))]
    text = _text(value)
    number = None
    if not text.isalpha():
        number = reader(".", None)(text)
    if number is not None and number.is_integer() and abs(number) < 2**53 and "." in text:
        return [text, str(int(number))]
    return [text]


def _text(value: Any) -> str:
    """Return a category as scenarios write it: 1.0 is "1"."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value).strip()


def _one_hot(table: TableSection, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    """Return a column of categories, float32 [N, categories]; a row whose value is missing is 0."""
    listed = table.categories[name]
    places = _Listed(table, name, listed)
    out = np.zeros((len(values), len(listed)), dtype=np.float32)
    for row, value in enumerate(values):
        if value is None:
            continue
        place = places.place(value)
        if place is None:
            problem = places.problem(value, f"data.table.categories.{name}", name)
            raise columns.error(row, name, problem, "data.category")
        out[row, place] = 1
    return out


# --- the target


def targets_of(labels: Sequence[str] | None, table: TableSection, columns: Columns, targets: Targets) -> np.ndarray:
    """Return the target column: scaled numbers, float32 [N, 1], or classes, int64 [N].

    Args:
        labels: the classes, in the order of their numbers; None if the column holds these numbers.

    Raises:
        ScenarioError: a target is missing or wrong, or the scenario has a key for the other kind of targets.
    """
    name = table.target
    values = columns.values[name]
    for row, value in enumerate(values):
        if value is None:
            raise columns.error(row, name, "holds no target: leave the row out", "data.missing")

    if targets == "numbers":
        if labels is not None:
            raise ScenarioError("data.labels has no use if the target is a number: leave it out", code="data.targets")
        center, scale = table.target_scale or (0.0, 1.0)
        numbers = _numbers(table, columns, name, values, center)
        return ((numbers - center) / scale).astype(np.float32)[:, None]

    if table.target_scale is not None or name in table.bounds:
        key = "target_scale" if table.target_scale is not None else f"bounds.{name}"
        raise ScenarioError(
            f"data.table.{key} has no use if the target is a class; for a number set task: {{loss: mse}}: leave it out",
            code="data.targets",
        )
    return _classes(labels, table, columns, values)


def _classes(labels: Sequence[str] | None, table: TableSection, columns: Columns, values: list[Any]) -> np.ndarray:
    """Return classes, int64 [N]: by their place among the labels, or as they are if there are none."""
    name = table.target
    places = None
    if labels is not None:
        places = _Listed(table, name, labels)

    out = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        label = _own_number(value) if places is None else places.place(value)
        if label is None:
            problem = (
                "holds no class 0, 1, 2, ...: name the classes by data.labels, or for regression set task: {loss: mse}"
            )
            if places is not None:
                problem = places.problem(value, "data.labels", name)
            raise columns.error(row, name, problem, "data.labels")
        out[row] = label
    return out


def _own_number(value: Any) -> int | None:
    """Return the class that a value is the number of; None if it is not such a number."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    for text in _texts(value):
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None
