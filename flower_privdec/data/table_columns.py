"""Columns of a table as numbers, by public constants only.

Means, deviations, categories and classes that are taken from private rows would be releases that no ledger counts. So
the scenario names them all, and each number depends on its own row and on the scenario. An error names file, row and
column, and never a value.

    numbers       (value - center) / scale
    categories    one number for each, 1 for the row's own
    missing       refused; or the center, or no category, with or without a flag beside
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.scenario.file_sections import TableSection

LARGEST = float(np.finfo(np.float32).max)
MOST_LISTED = 12  # columns in an error


@dataclass(frozen=True)
class Columns:
    """Some columns of a table, by name.

    Attributes:
        where: what to call the table in an error.
        values: the values of each column: texts, numbers or booleans; None if missing.
        rows: the number of each row, as an editor counts the lines of a file.
    """

    where: str
    values: dict[str, list[Any]]
    rows: list[int]

    def error(self, row: int, name: str, problem: str, code: str) -> ScenarioError:
        """Return an error about the value of a column in a row, by its place."""
        return ScenarioError(f"{self.where}:{self.rows[row]}: column {name!r} {problem}", code=code)


def from_frame(
    header: Sequence[str],
    column: Callable[[str], list[Any]],
    where: str,
    table: TableSection,
    labels: Sequence[str] | None,
    targets: Targets,
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a table in memory.

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
    values = {name: without_missing(column(name), table) for name in find_columns(header, where, table)}
    count = len(next(iter(values.values())))
    columns = Columns(where, values, list(range(count)))
    if not columns.rows:
        raise ScenarioError(f"{where} holds no row", code="data.empty")
    return features_of(table, columns), targets_of(labels, table, columns, targets)


def find_columns(header: Sequence[str], where: str, table: TableSection) -> dict[str, int]:
    """Return the place of each column that the scenario names; a column that may be missing need not be there.

    Raises:
        ScenarioError: a column is not there, or twice.
    """
    header = [name.strip() for name in header]
    places = {}
    for name in (table.target, *_feature_names(table)):
        if header.count(name) > 1:
            raise ScenarioError(f"{where}: has {header.count(name)} columns {name!r}; rename them", code="data.column")
        if name in header:
            places[name] = header.index(name)
        elif name == table.target or table.missing == "refused":
            raise _no_column(name, header, where, table)
    return places


def _no_column(name: str, header: list[str], where: str, table: TableSection) -> ScenarioError:
    listed = ", ".join(header[:MOST_LISTED])
    if len(header) > MOST_LISTED:
        listed += ", ..."

    if name == table.target:
        remedy = "mend data.table"
    else:
        remedy = "mend it, or set data.table.missing to center or flag"

    # A file with another delimiter looks like a file with one column, whose name contains it.
    if len(header) == 1:
        for mark in ";\t|,":
            if mark in header[0]:
                remedy = f"set data.table.delimiter to {mark!r}"
                break
    return ScenarioError(f"{where}: has no column {name!r} (it has {listed}): {remedy}", code="data.column")


def _feature_names(table: TableSection) -> list[str]:
    return [*table.numbers, *table.categories]


def without_missing(values: list[Any], table: TableSection) -> list[Any]:
    """Return a column's values with None in place of those that count as missing."""
    return [None if _is_missing(value, table) else value for value in values]


def _is_missing(value: Any, table: TableSection) -> bool:
    if isinstance(value, str):
        return value in table.missing_values
    is_nan = value != value
    return value is None or is_nan


def features_of(table: TableSection, columns: Columns) -> np.ndarray:
    """Return float32 [N, features]: the scaled numbers, the categories one by one, and flags of what is missing.

    Raises:
        ScenarioError: a value is missing, no number, or an unlisted category.
    """
    count = len(columns.rows)
    parts = list[np.ndarray]()  # [N] or [N, k] each
    flags = list[np.ndarray]()  # [N] each
    for name in _feature_names(table):
        values = columns.values.get(name, [None] * count)
        gone = np.array([value is None for value in values], dtype=np.float32)
        if table.missing == "refused" and gone.any():
            remedy = "holds a missing value: mend it, or set data.table.missing to center or flag"
            raise columns.error(int(gone.argmax()), name, remedy, "data.missing")
        flags.append(gone)

        if name in table.categories:
            parts.append(_one_hot(table, columns, name, values))
        else:
            parts.append(_scaled(table, columns, name, values))

    if table.missing == "flag":
        parts.extend(flags)
    wide = [part[:, None] if part.ndim == 1 else part for part in parts]
    return np.concatenate(wide, axis=1, dtype=np.float32)


def _scaled(table: TableSection, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    """Return a column of numbers, float64 [N]; what is missing becomes 0, as the center does."""
    center, scale = table.numbers[name]
    numbers = []
    for row, value in enumerate(values):
        if value is None:
            numbers.append(center)
        else:
            numbers.append(_number(columns, row, name, value))
    return (np.array(numbers) - center) / scale


def _number(columns: Columns, row: int, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan

    # Written so that NaN fails, too.
    if not abs(number) <= LARGEST:
        problem = "holds no finite number: mend it, or list it in data.table.categories"
        raise columns.error(row, name, problem, "data.no-number")
    return number


def _one_hot(table: TableSection, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    """Return a column of categories, float32 [N, categories]; a row whose value is missing is 0."""
    places = {text: place for place, text in enumerate(table.categories[name])}
    out = np.zeros((len(values), len(places)), dtype=np.float32)
    for row, value in enumerate(values):
        if value is None:
            continue
        place = places.get(_text(value))
        if place is None:
            problem = f"holds a category that data.table.categories.{name} does not list: add it"
            raise columns.error(row, name, problem, "data.category")
        out[row, place] = 1
    return out


def _text(value: Any) -> str:
    """Return a category as scenarios write it: 1.0 is "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


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
        numbers = np.array([_number(columns, row, name, value) for row, value in enumerate(values)])
        return ((numbers - center) / scale).astype(np.float32)[:, None]

    if table.target_scale is not None:
        raise ScenarioError(
            "data.table.target_scale has no use if the target is a class; for a number set task: {loss: mse}: leave "
            "it out",
            code="data.targets",
        )
    return _classes(labels, columns, name, values)


def _classes(labels: Sequence[str] | None, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    """Return classes, int64 [N]: by their place among the labels, or as they are if there are none."""
    if labels is not None:
        places = {text: place for place, text in enumerate(labels)}
        classes = [places.get(_text(value)) for value in values]
        problem = "holds a class that data.labels does not list: add it"
    else:
        classes = [_own_number(value) for value in values]
        problem = (
            "holds no class 0, 1, 2, ...: name the classes by data.labels, or for regression set task: {loss: mse}"
        )

    out = np.empty(len(values), dtype=np.int64)
    for row, label in enumerate(classes):
        if label is None:
            raise columns.error(row, name, problem, "data.labels")
        out[row] = label
    return out


def _own_number(value: Any) -> int | None:
    """Return the class that a value is the number of; None if it is not such a number."""
    if isinstance(value, bool):
        return int(value)
    text = _text(value)
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return None
