"""Read tables (CSV, Parquet) and folders of images: columns and classes become numbers by public constants alone.

Means, deviations, categories and classes that are taken from private rows would be releases that no ledger counts. So
the scenario names them all, and each value depends on its own row and on the scenario. An error names file, row and
column, and never a value.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.pixels import decode_images
from flower_privdec.scenario.sections import TableSection

ROOM = 20  # bytes of memory for each byte of a file of text, at most
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")


@dataclass(frozen=True)
class Columns:
    """Some columns of a file, by name.

    Attributes:
        where: names the file in errors.
        values: of each column: texts, numbers, booleans, or None.
        rows: the number of each row in the file, as an editor counts its lines.
    """

    where: str
    values: dict[str, list[Any]]
    rows: list[int]


def read_table(request: Request) -> Source:
    """Read one table: the training set at `data.root`, or the test set at `data.test`.

    Raises:
        ScenarioError: there is no such file, or, where a half is read, a column, a row or a value is wrong.
    """
    section = request.section
    path = request.path()
    where = request.where
    targets = request.targets
    table = section.table
    assert table is not None  # which `DataSection` requires
    if targets == "labels" or request.n_tokens is not None:
        raise ScenarioError(
            f"data.dataset={section.dataset} has one target a row and numbers as features: take a loss of classes or "
            "of numbers, and leave data.vocabulary out",
            code="data.targets",
        )
    read: Callable[[str, str, TableSection], Columns] = _read_csv if section.dataset == "csv" else _read_parquet

    def half() -> Split:
        columns = read(path, where, table)
        if not columns.rows:
            raise ScenarioError(f"{where} holds no row; give another file", code="data.empty")
        y = _targets(section.labels, table, columns, targets)
        x = torch.from_numpy(_features(table, columns))
        return Split(y, lambda rows: x[rows])

    n_classes = None if section.labels is None or targets != "classes" else len(section.labels)
    return Source(half, half, n_classes, targets)


def from_frame(
    header: Sequence[str],
    column: Callable[[str], list[Any]],
    where: str,
    table: TableSection,
    labels: Sequence[str] | None,
    targets: Targets,
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of a table in memory, by the same public constants.

    Args:
        header: its columns.
        column: gives the values of one.
        where: names it in errors, before the row, which counts from 0.

    Raises:
        ScenarioError: a column, a row or a value is wrong.
    """
    content = {name: column(name) for name in _places(header, where, table)}
    values = {name: [None if _is_missing(value, table) else value for value in content[name]] for name in content}
    columns = Columns(where, values, list(range(len(next(iter(values.values()))))))
    if not columns.rows:
        raise ScenarioError(f"{where} holds no row", code="data.empty")
    return _features(table, columns), _targets(labels, table, columns, targets)


def _names(table: TableSection) -> list[str]:
    return [*table.numbers, *table.categories]


def _read_csv(root: str, where: str, table: TableSection) -> Columns:
    check_room(ROOM * Path(root).stat().st_size, f"{where}: its rows", "give a smaller file")
    begun = 1
    try:
        with open(root, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=table.delimiter, strict=True)
            if not (header := next(reader, [])):
                raise ScenarioError(f"{where} is empty; give a file with a header and rows", code="data.empty")
            places = _places(header, where, table)
            values = dict[str, list[Any]]()
            lists = {name: values.setdefault(name, []) for name in places}
            rows = []
            begun = reader.line_num + 1
            for line in reader:
                begun = reader.line_num + 1
                if not line:
                    continue
                if len(line) != len(header):
                    raise ScenarioError(
                        f"{where}:{reader.line_num}: has {len(line)} values for {len(header)} columns; mend the row",
                        code="data.line",
                    )
                rows.append(reader.line_num)
                for name, place in places.items():
                    text = line[place].strip()
                    lists[name].append(None if text in table.missing_values else text)
    except csv.Error as error:
        raise ScenarioError(
            f"{where}:{begun}: no row of CSV begins here ({error}): close its quotes, or mend data.table.delimiter="
            f"{table.delimiter!r}",
            code="data.line",
        ) from error
    except (UnicodeDecodeError, OSError) as error:
        raise ScenarioError(
            f"{where} cannot be read as CSV ({type(error).__name__}): save it as UTF-8 with data.table.delimiter="
            f"{table.delimiter!r}",
            code="data.unreadable",
        ) from error
    return Columns(where, values, rows)


def _read_parquet(root: str, where: str, table: TableSection) -> Columns:
    parquet = require("pyarrow.parquet", "data.dataset=parquet", "pip install 'flower-privdec[tables]'")
    try:
        with parquet.ParquetFile(root) as file:
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            check_room(ROOM * size, f"{where}: its rows", "give a smaller file")
            names = _places(file.schema_arrow.names, where, table)
            content: dict[str, list[Any]] = file.read(columns=list(names)).to_pydict()
    except (OSError, ValueError, TypeError) as error:  # of pyarrow all but files that are not there
        raise ScenarioError(
            f"{where} cannot be read as Parquet ({type(error).__name__}); save it again", code="data.unreadable"
        ) from error
    values = {name: [None if _is_missing(value, table) else value for value in content[name]] for name in names}
    return Columns(where, values, list(range(1, 1 + len(next(iter(values.values()))))))


def _is_missing(value: Any, table: TableSection) -> bool:
    return value in table.missing_values if isinstance(value, str) else value is None or value != value


def _places(header: Sequence[str], where: str, table: TableSection) -> dict[str, int]:
    """Return where the columns stand that are wanted; those that may be missing need not be there."""
    header = [name.strip() for name in header]
    places = {}
    for name in (table.target, *_names(table)):
        if header.count(name) > 1:
            raise ScenarioError(f"{where}: has {header.count(name)} columns {name!r}; rename them", code="data.column")
        if name in header:
            places[name] = header.index(name)
        elif name == table.target or table.missing == "refused":
            listed = ", ".join(header[:12]) + (", ..." if len(header) > 12 else "")
            other = next((mark for mark in ";\t|," if len(header) == 1 and mark in header[0]), None)
            if other is not None:
                remedy = f"set data.table.delimiter to {other!r}"
            elif name == table.target:
                remedy = "mend data.table"
            else:
                remedy = "mend it, or set data.table.missing to center or flag"
            raise ScenarioError(f"{where}: has no column {name!r} (it has {listed}): {remedy}", code="data.column")
    return places


def _wrong(columns: Columns, row: int, name: str, problem: str, code: str) -> ScenarioError:
    return ScenarioError(f"{columns.where}:{columns.rows[row]}: column {name!r} {problem}", code=code)


def _number(columns: Columns, row: int, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise _wrong(
            columns, row, name, "holds no finite number: mend it, or list it in data.table.categories", "data.no-number"
        )
    return number


def _features(table: TableSection, columns: Columns) -> np.ndarray:
    """Return float32 [N, features]: the scaled numbers, the categories one by one, and flags of what is missing."""
    count = len(columns.rows)
    parts = list[np.ndarray]()
    flags = list[np.ndarray]()
    for name in _names(table):
        values = columns.values.get(name, [None] * count)
        gone = np.array([value is None for value in values], dtype=np.float32)
        if table.missing == "refused" and gone.any():
            remedy = "holds a missing value: mend it, or set data.table.missing to center or flag"
            raise _wrong(columns, int(gone.argmax()), name, remedy, "data.missing")
        flags.append(gone)
        if name in table.categories:
            parts.append(_one_hot(table, columns, name, values))
            continue
        center, scale = table.numbers[name]
        numbers = [center if v is None else _number(columns, row, name, v) for row, v in enumerate(values)]
        parts.append((np.array(numbers) - center) / scale)
    wide = [part[:, None] if part.ndim == 1 else part for part in (*parts, *(flags if table.missing == "flag" else ()))]
    return np.concatenate(wide, axis=1, dtype=np.float32)


def _one_hot(table: TableSection, columns: Columns, name: str, values: list[Any]) -> np.ndarray:
    place = {text: at for at, text in enumerate(table.categories[name])}
    out = np.zeros((len(values), len(place)), dtype=np.float32)
    for row, value in enumerate(values):
        if value is None:
            continue
        if (at := place.get(_text(value))) is None:
            raise _wrong(
                columns, row, name, f"holds a category that data.table.categories.{name} does not list: add it",
                "data.category",
            )  # fmt: skip
        out[row, at] = 1
    return out


def _text(value: Any) -> str:
    """Return a category as scenarios write it: 1.0 is "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _targets(listed: Sequence[str] | None, table: TableSection, columns: Columns, targets: Targets) -> np.ndarray:
    name = table.target
    values = columns.values[table.target]
    gone = next((row for row, value in enumerate(values) if value is None), None)
    if gone is not None:
        raise _wrong(columns, gone, name, "holds no target: leave the row out", "data.missing")
    unused = ("data.labels", listed) if targets == "numbers" else ("data.table.target_scale", table.target_scale)
    if unused[1] is not None:
        kind = "a number" if targets == "numbers" else "a class; for a number set task: {loss: mse}"
        raise ScenarioError(f"{unused[0]} has no use where the target is {kind}: leave it out", code="data.targets")
    if targets == "numbers":
        center, scale = table.target_scale or (0.0, 1.0)
        numbers = np.array([_number(columns, row, name, value) for row, value in enumerate(values)])
        return ((numbers - center) / scale).astype(np.float32)[:, None]
    classes = {text: at for at, text in enumerate(listed or ())}
    labels = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        text = _text(value)
        if listed is None and isinstance(value, bool):
            labels[row] = value
        elif listed is None and text.isascii() and text.isdigit() and len(text) < 10:
            labels[row] = int(text)
        elif text in classes:
            labels[row] = classes[text]
        else:
            rule = (
                "holds no class 0, 1, 2, ...: name the classes by data.labels, or for regression set task: {loss: mse}"
            )
            unlisted = "holds a class that data.labels does not list: add it"
            raise _wrong(columns, row, name, unlisted if classes else rule, "data.labels")
    return labels


def read_image_folder(request: Request) -> Source:
    """Read a folder with a folder of images for each class, as RGB [3, height, width], scaled by PLAIN_PIXELS.

    Raises:
        ScenarioError: there is no such folder, or, where a half is read, a folder is no class or an image is wrong.
    """
    path = request.path("one with a folder for each class; give it", folder=True)
    labels = request.section.labels
    if request.targets != "classes" or labels is None:
        raise ScenarioError(
            "data.dataset=image-folder has classes: list the names of their folders in data.labels, and take a loss of "
            "classes",
            code="data.labels",
        )
    half = partial(_images, Path(path), request.where, labels)
    return Source(half, half, len(labels))


def _images(folder: Path, where: str, classes: Sequence[str]) -> Split:
    for part in sorted(folder.iterdir()):
        if part.is_dir() and part.name not in classes:
            raise ScenarioError(f"{where}: the folder {part.name!r} is not in data.labels: add it", code="data.labels")
    paths = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("*"))
        if path.suffix.lower() in IMAGE_ENDINGS
    ]
    if not paths:
        raise ScenarioError(
            f"{where} holds no image ({', '.join(IMAGE_ENDINGS)}) in {', '.join(classes)}", code="data.empty"
        )

    def read(rows: Rows) -> torch.Tensor:
        chosen = [paths[row][0] for row in np.arange(len(paths))[rows].tolist()]
        return decode_images(chosen, list(map(str, chosen)))

    return Split(np.array([label for _, label in paths], dtype=np.int64), read)
