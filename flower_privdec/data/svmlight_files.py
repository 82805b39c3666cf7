"""Sparse examples as text, in svmlight's format: `label index:value ...`, an example a line, indices from 1."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from flower_privdec.common.deferred import scipy
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import require
from flower_privdec.data.arrays import binary_labels, class_labels
from flower_privdec.data.dataset import Request, Source, Split
from flower_privdec.rows.sparse_rows import LARGEST_INDEX, SparseRows

LONGEST_LINE = 1 << 26  # bytes; an example of a million features has a third of it
LOOK_EVERY = 1 << 25  # bytes of text between two checks of free memory
# How many times the bytes of text reading them takes, at most: "1:1 " is 4 bytes, and an index and a value 12.
MEMORY_FACTOR = 4

_OPENED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Lines:
    """The lines of a file as they are read, counted, so that an error can name its line.

    Attributes:
        number: of the line that was read last, from 1.
        size: the bytes read so far.
    """

    def __init__(self, file: IO[bytes], where: str) -> None:
        self.file = file
        self.where = where
        self.number = 0
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        """Return bytes, as a file does: scikit-learn takes only objects that have this method."""
        return self.file.read(size)

    def __iter__(self) -> Iterator[bytes]:
        """Yield every line.

        Raises:
            ScenarioError: a line is too long, or memory is too short for the next ones.
        """
        checked = 0
        while line := self.file.readline(LONGEST_LINE):
            self.number += 1
            self.size += len(line)
            if len(line) == LONGEST_LINE:
                raise ScenarioError(
                    f"{self.where}:{self.number}: has more than {LONGEST_LINE:,} bytes; mend the file",
                    code="data.long-line",
                )

            # The size of a compressed file says nothing about its text, so memory is checked on the way.
            if self.size - checked > LOOK_EVERY:
                checked = self.size
                rest = f"{self.where}: what follows line {self.number:,}"
                check_room(MEMORY_FACTOR * LOOK_EVERY, rest, "give a smaller file")
            yield line


def read_svmlight(request: Request) -> Source:
    """Return one svmlight file: the training set at `data.root`, or the test set at `data.test`."""
    path = request.path()
    where = request.where
    features = request.section.n_features or 0

    def half() -> Split:
        if features > LARGEST_INDEX:
            message = f"data.n_features={features} must be <= {LARGEST_INDEX:,}; hash the features to fewer"
            raise ScenarioError(message, code="data.n-features")

        matrix, labels = _parsed(path, where, features)
        if request.targets != "classes":
            message = f"{where}: svmlight files have one label each, and the task's loss takes {request.targets}"
            raise ScenarioError(message, code="data.targets")

        whole = class_labels(labels, f"{where}: the labels", minimum=-1)
        rows = SparseRows(matrix)
        return Split(binary_labels(whole, where), lambda chosen: rows[chosen])

    return Source(half, half, targets=request.targets)


def _parsed(root: str, where: str, features: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Return the examples [N, features], with indices from 0, and their labels."""
    load = require("sklearn.datasets", "data.dataset=svmlight", "pip install scikit-learn").load_svmlight_file
    lines: Lines | None = None
    try:
        with _opened(root) as file:
            lines = Lines(file, where)
            # Indices are left as they are: scikit-learn would shift them by 1, and wrong ones with them.
            matrix, labels = load(lines, dtype=np.float32, n_features=None, zero_based=True)
    except (ValueError, OverflowError, UnicodeError) as error:
        number = "" if lines is None else f":{lines.number}"
        raise ScenarioError(
            f"{where}{number}: is not an example `label index:value ...` ({one_line(error)}); mend the line",
            code="data.line",
        ) from error
    except _UNREADABLE as error:
        raise ScenarioError(
            f"{where} cannot be read ({one_line(error)}); give it whole", code="data.unreadable"
        ) from error
    if not matrix.shape[0]:
        raise ScenarioError(f"{where} holds no example; give another file", code="data.empty")

    wrong = (matrix.indices < 1) | (matrix.indices > features) | ~np.isfinite(matrix.data)  # [entries]
    if wrong.any():
        place = int(np.argmax(wrong))
        row = int(np.searchsorted(matrix.indptr, place, side="right")) - 1
        entry = f"{matrix.indices[place]}:{matrix.data[place]:g}"
        raise ScenarioError(
            f"{where}:{_line_of(root, row)}: has {entry}: indices are 1 to data.n_features={features:,} and values "
            "finite in float32; mend the line",
            code="data.entry",
        )

    shape = (matrix.shape[0], features)
    return scipy.sparse.csr_matrix((matrix.data, matrix.indices - 1, matrix.indptr), shape=shape), labels


def _opened(root: str) -> IO[bytes]:
    """Open a file, which may be compressed."""
    opener = _OPENED.get(Path(root).suffix, open)
    file: IO[bytes] = opener(root, "rb")
    return file


def _line_of(root: str, row: int) -> int:
    """Return the number of the line that holds an example; empty lines and comments hold none."""
    examples = 0
    with _opened(root) as file:
        for number, line in enumerate(file, start=1):
            text = line.split(b"#", 1)[0].strip()
            if not text:
                continue
            if examples == row:
                return number
            examples += 1
    return 0
