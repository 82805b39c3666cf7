"""Tables in files: the columns that a scenario names are read from CSV or Parquet, then turned into numbers."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require
from flower_privdec.data.dataset import Request, Source, Split
from flower_privdec.data.table_columns import Columns, features_of, find_columns, targets_of, without_missing
from flower_privdec.scenario.file_sections import TableSection

ROOM = 20  # bytes of memory for each byte of a file of text, at most


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
        x = torch.from_numpy(features_of(table, columns))
        return Split(y, lambda rows: x[rows])

    n_classes = None
    if section.labels is not None and targets == "classes":
        n_classes = len(section.labels)
    return Source(half, half, n_classes, targets)


def _read_csv(root: str, where: str, table: TableSection) -> Columns:
    check_room(ROOM * Path(root).stat().st_size, f"{where}: its rows", "give a smaller file")
    begun = 1  # the line at which the row that is being read began: a row with quotes may have several
    try:
        with open(root, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=table.delimiter, strict=True)
            header = next(reader, [])
            if not header:
                raise ScenarioError(f"{where} is empty; give a file with a header and rows", code="data.empty")

            places = find_columns(header, where, table)
            values: dict[str, list[Any]] = {name: [] for name in places}
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
                    is_missing = text in table.missing_values
                    values[name].append(None if is_missing else text)
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
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            check_room(ROOM * size, f"{where}: its rows", "give a smaller file")

            names = find_columns(file.schema_arrow.names, where, table)
            content: dict[str, list[Any]] = file.read(columns=list(names)).to_pydict()
    # All of pyarrow's own errors are of these three kinds.
    except (OSError, ValueError, TypeError) as error:
        raise ScenarioError(
            f"{where} cannot be read as Parquet ({type(error).__name__}); save it again", code="data.unreadable"
        ) from error

    values = {name: without_missing(content[name], table) for name in names}
    count = len(next(iter(values.values())))
    return Columns(where, values, list(range(1, 1 + count)))
