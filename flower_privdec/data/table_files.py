"""Tables in files: the columns that a scenario names are read from CSV or Parquet, then turned into numbers."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require
from flower_privdec.data.dataset import Request, Source, Split
from flower_privdec.data.table_columns import (
    MARKS,
    Columns,
    Missing,
    features_of,
    find_columns,
    intake_of,
    left_columns,
    targets_of,
)
from flower_privdec.scenario.file_sections import TableSection, composed

ROOM = 20  # bytes of memory for each byte of a file of text, at most
LONGEST_HEADER = 1 << 24  # characters
LOOK_EVERY = 1 << 17  # rows between two checks of free memory
BLOCK = 1 << 10  # rows that are put into their columns at once

# Compressed text by its first bytes, whatever the file is called.
COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
# Other formats by their first bytes: what they are, and what to do.
OTHER_FORMATS = {
    b"PAR1": ("Parquet", "set data.dataset=parquet"),
    b"PK\x03\x04": ("a workbook (.xlsx, .ods) or a zip archive", "save the sheet as CSV in UTF-8, or unpack it"),
    b"\xd0\xcf\x11\xe0": ("a workbook of Excel (.xls)", "save the sheet as CSV in UTF-8"),
    b"SQLite format 3": ("a database of SQLite", "export the table as CSV"),
    b"ARROW1": ("Arrow (Feather)", "save it as Parquet, and set data.dataset=parquet"),
    b"\x89HDF": ("HDF5", "save the table as CSV or Parquet"),
    b"$FL2": ("a file of SPSS", "save it as CSV or Parquet"),
    b"<stata_dta": ("a file of Stata", "save it as CSV or Parquet"),
    b"%PDF": ("PDF", "export the table as CSV"),
    b"<!": ("a web page", "export the table as CSV; a page is often what a server sends before a login"),
    b"<html": ("a web page", "export the table as CSV; a page is often what a server sends before a login"),
    b"<?xml": ("XML", "export the table as CSV"),
    b'{"': ("JSON", "save the table as CSV or Parquet"),
    b"[{": ("JSON", "save the table as CSV or Parquet"),
}
BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")  # of UTF-16

UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_table(request: Request) -> Source:
    """Return one table: the training set at `data.root`, or the test set at `data.test`.

    Raises:
        ScenarioError: there is no such file. When a half is read: a column, a row or a value is wrong.
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

    read: Callable[[str, str, TableSection], Columns] = _read_parquet
    if section.dataset == "csv":
        read = _read_csv

    def half() -> Split:
        columns = read(path, where, table)
        if not columns.rows:
            raise ScenarioError(f"{where} holds no row; give another file", code="data.empty")
        y = targets_of(section.labels, table, columns, targets)
        x = features_of(table, columns)
        intake = intake_of(table, columns, section.labels, x)
        features = torch.from_numpy(x)
        return Split(y, lambda rows: features[rows], intake)

    n_classes = None
    if section.labels is not None and targets == "classes":
        n_classes = len(section.labels)
    return Source(half, half, n_classes, targets)


# --- CSV


def _read_csv(root: str, where: str, table: TableSection) -> Columns:
    check_room(ROOM * Path(root).stat().st_size, f"{where}: its rows", "give a smaller file")
    begun = 1  # the line at which the row that is being read began: a row with quotes may have several
    delimiter = table.delimiter
    try:
        with _opened(root, where, table.encoding) as file:
            first = file.readline(LONGEST_HEADER)
            _check_first(first, where)
            delimiter = _delimiter(first, where, table)
            lines = chain([first], file)
            if not first:
                lines = chain([], file)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            header = next(reader, [])
            places = find_columns(header, where, table)
            values: dict[str, list[Any]] = {name: [] for name in places}
            missing = {name: Missing(table, name) for name in places}
            rows: list[int] = []
            pending: list[list[str]] = []  # rows whose values are not yet in their columns
            n_empty = 0  # rows of delimiters only, as spreadsheets write them at the end
            begun = reader.line_num + 1
            for line in reader:
                begun = reader.line_num + 1
                if not (line and line[0]) and not any(text.strip() for text in line):
                    n_empty += bool(line)
                    continue
                if len(line) != len(header):
                    remedy = f"mend the row (a value that holds {delimiter!r} needs quotes)"
                    if len(line) == len(header) + 1 and not rows:
                        remedy += (
                            "; if each row has one more, save it without names of rows (in R row.names=FALSE), or "
                            "without a delimiter at the end"
                        )
                    raise ScenarioError(
                        f"{where}:{reader.line_num}: has {len(line)} values for {len(header)} columns; {remedy}",
                        code="data.line",
                    )

                rows.append(reader.line_num)
                pending.append(line)
                if len(pending) == BLOCK:
                    _add_columns(values, missing, places, pending)
                    pending.clear()
                if len(rows) % LOOK_EVERY == 0:
                    # The size of a compressed file says nothing about its text.
                    rest = f"{where}: what follows line {reader.line_num:,}"
                    check_room(LOOK_EVERY * sum(map(len, line)) * ROOM, rest, "give a smaller file")
            _add_columns(values, missing, places, pending)
    except csv.Error as error:
        raise ScenarioError(
            f"{where}:{begun}: no row of CSV begins here ({error}): close its quotes, or mend data.table.delimiter="
            f"{delimiter!r}",
            code="data.line",
        ) from error
    except UnicodeError as error:
        remedy = "save it as UTF-8, or if a program of Windows wrote it, set data.table.encoding=cp1252"
        if _begins(root)[:2] in BYTE_ORDER_MARKS:
            remedy = "save it as UTF-8, or set data.table.encoding=utf-16"
        raise ScenarioError(
            f"{where} is not text in data.table.encoding={table.encoding}: {remedy}", code="data.unreadable"
        ) from error
    except UNREADABLE as error:
        raise ScenarioError(
            f"{where} cannot be read as CSV ({type(error).__name__}): give it whole, as UTF-8", code="data.unreadable"
        ) from error
    return Columns(where, values, rows, left_columns(header, places), n_empty)


def _add_columns(
    values: dict[str, list[Any]], missing: Mapping[str, Missing], places: Mapping[str, int], lines: Sequence[list[str]]
) -> None:
    """Add the values of some rows to their columns, a column at a time, which is much faster than a row at a time."""
    for name, place in places.items():
        values[name] += missing[name].taken_out([line[place] for line in lines])


def _check_first(first: str, where: str) -> None:
    """Refuse a first line that is no header.

    Raises:
        ScenarioError: see above.
    """
    if not first.strip("\r\n"):
        raise ScenarioError(f"{where} is empty; give a file with a header and rows", code="data.empty")
    if "\0" in first:
        raise ScenarioError(
            f"{where} holds bytes of zero, as UTF-16 without a mark of its byte order does: save it as UTF-8",
            code="data.unreadable",
        )
    if first.casefold().startswith("sep="):
        raise ScenarioError(
            f"{where}:1: is a line for Excel ({first.strip()[:5]}) and must be the header: take it out of the file",
            code="data.column",
        )


class Texts(NamedTuple):
    """A whole table of which nothing was known.

    Attributes:
        columns: the texts of each column that has a name; None if missing.
    """

    columns: dict[str, list[str | None]]
    n_rows: int
    delimiter: str
    encoding: str


def read_texts(root: str, where: str, target: str) -> Texts:
    """Read every column of a CSV file, by the rules by which a run reads it.

    Args:
        target: a column that it should have, by which its delimiter is found; missing from the columns if it is not.

    Raises:
        ScenarioError: it is no CSV, or holds no row.
    """
    encoding: Literal["utf-8", "utf-16"] = "utf-8"
    target = composed(target.strip())
    try:
        if _begins(root)[:2] in BYTE_ORDER_MARKS:
            encoding = "utf-16"
        with _opened(root, where, encoding) as file:
            first = file.readline(LONGEST_HEADER)
            _check_first(first, where)
            headers = {mark: _names(chain([first], file), mark) for mark in MARKS}
    except OSError as error:
        raise ScenarioError(
            f"{where}: cannot be read ({error.strerror or one_line(error)}); give the path of a CSV file",
            code="data.unreadable",
        ) from error
    except (*UNREADABLE, UnicodeError, csv.Error) as error:
        raise ScenarioError(
            f"{where}: cannot be read as CSV in UTF-8 ({one_line(error)}); save it as UTF-8",
            code="data.unreadable",
        ) from error

    fitting = [mark for mark in MARKS if target in headers[mark]]
    delimiter = max(fitting or MARKS, key=lambda mark: len(headers[mark]))
    names = headers[delimiter]
    if target not in names or len(set(names)) < 2:
        return Texts({name: [] for name in names}, 0, delimiter, encoding)

    others = {name: ["any"] for name in names if name != target}
    table = TableSection(target=target, categories=others, missing="center", delimiter=delimiter, encoding=encoding)
    columns = _read_csv(root, where, table)
    if not columns.rows:
        raise ScenarioError(f"{where} holds no row; give another file", code="data.empty")
    return Texts({name: columns.values[name] for name in names}, len(columns.rows), delimiter, encoding)


def _names(lines: Iterable[str], delimiter: str) -> list[str]:
    """Return the names in a header; a column without one has none to be called by."""
    header = next(csv.reader(lines, delimiter=delimiter), [])
    return [name for name in (composed(name.strip()) for name in header) if name]


@contextmanager
def _opened(root: str, where: str, encoding: str) -> Iterator[TextIO]:
    """Open a file of text, which may be compressed.

    Raises:
        ScenarioError: it is another format.
    """
    begins = _begins(root)
    for magic, (kind, remedy) in OTHER_FORMATS.items():
        if begins.startswith(magic):
            raise ScenarioError(f"{where} is {kind} and must be CSV: {remedy}", code="data.unreadable")

    if encoding == "utf-8":
        encoding = "utf-8-sig"  # a mark of the byte order may come first, and is no part of a name
    opener: Any = open
    for magic, decompressing in COMPRESSED.items():
        if begins.startswith(magic):
            opener = decompressing
    with opener(root, "rb") as file:
        yield io.TextIOWrapper(file, encoding=encoding, newline="")


def _begins(root: str) -> bytes:
    with open(root, "rb") as file:
        return file.read(16)


def _delimiter(first: str, where: str, table: TableSection) -> str:
    """Return the delimiter of a file: the scenario's, or the one that gives a header with its columns.

    The header is no example, so no row decides how others are read.
    """
    if table.delimiter != "auto":
        return table.delimiter

    for mark in MARKS:
        header = next(csv.reader([first], delimiter=mark), [])
        try:
            find_columns(header, where, table)
        except ScenarioError:
            continue
        return mark
    return max(MARKS, key=first.count)


# --- Parquet


def _read_parquet(root: str, where: str, table: TableSection) -> Columns:
    parquet = require("pyarrow.parquet", "data.dataset=parquet", "pip install 'flower-privdec[tables]'")
    try:
        with parquet.ParquetFile(root) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            check_room(ROOM * size, f"{where}: its rows", "give a smaller file")

            header = file.schema_arrow.names
            places = find_columns(header, where, table)
            content = file.read(columns=[header[place] for place in places.values()])
            values = {}
            for name, place in places.items():
                values[name] = Missing(table, name).taken_out(content.column(header[place]).to_pylist())
    # All of pyarrow's own errors are of the first three kinds; a date beyond Python's is the fourth.
    except (OSError, ValueError, TypeError, OverflowError) as error:
        remedy = "save it again"
        if not _begins(root).startswith(b"PAR1"):
            remedy = "save it as Parquet, or if it is text, set data.dataset=csv"
        raise ScenarioError(
            f"{where} cannot be read as Parquet ({type(error).__name__}); {remedy}", code="data.unreadable"
        ) from error

    return Columns(where, values, list(range(1, 1 + content.num_rows)), left_columns(header, places))
