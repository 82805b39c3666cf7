"""Read svmlight (libsvm) files, plain or compressed by gzip or bzip2, line by line: they may hold anything."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy

from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.data.readers import Source, Split, require
from flower_privdec.data.sparse_rows import LARGEST_INDEX, SparseRows
from flower_privdec.data.targets import Wanted, binary_labels, class_labels
from flower_privdec.errors import ScenarioError

LONGEST_LINE = 1 << 26  # bytes; an example of a million features has a third of it
LOOK_EVERY = 1 << 25  # bytes of text after which free memory is looked at
TAKEN = 4  # times the bytes of text that reading them takes at most: "1:1 " is 4 bytes, and an index and a value 12
_OPENED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Lines:
    """The lines of a file as they are read, counted, so that an error can name the one it is about."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self.file, self.where, self.number, self.size = file, where, 0, 0

    def read(self, size: int = -1) -> bytes:
        """Return bytes, as a file does: scikit-learn asks whether it could."""
        return self.file.read(size)

    def __iter__(self) -> Iterator[bytes]:
        """Yield every line, of those that are not too long, while there is room for what they hold."""
        looked = 0
        while line := self.file.readline(LONGEST_LINE):
            self.number, self.size = self.number + 1, self.size + len(line)
            if len(line) == LONGEST_LINE:
                raise ScenarioError(f"{self.where}:{self.number}: has more than {LONGEST_LINE:,} bytes; mend the file")
            if self.size - looked > LOOK_EVERY:
                looked = self.size
                rest = f"{self.where}: what follows line {self.number:,}"
                check_room(TAKEN * LOOK_EVERY, rest, "give a smaller file")
            yield line


def read_svmlight(root: str | None, wanted: Wanted) -> Source:
    """Read one svmlight file: the training set at `data.root`, or the test set at `data.test`; indices count from 1."""
    if root is None or not Path(root).is_file():
        raise ScenarioError(f"{wanted.key}={root} is no file: dataset svmlight needs the path of one; give it")
    half = partial(_read, root, wanted)
    return Source(half, half, targets=wanted.targets)


def _read(root: str, wanted: Wanted) -> Split:
    where, features = f"{wanted.key}={root}", wanted.n_features
    if features is None:
        raise ScenarioError("data.n_features is missing: svmlight files do not say how many features there are; add it")
    if features > LARGEST_INDEX:
        raise ScenarioError(f"data.n_features={features} must be <= {LARGEST_INDEX:,}; hash the features to fewer")
    matrix, labels = _parsed(root, where, features)
    if wanted.targets != "classes":
        raise ScenarioError(f"{where}: svmlight files have one label each, and the task's loss takes {wanted.targets}")
    y = binary_labels(class_labels(labels, f"{where}: the labels", minimum=-1), where)
    rows = SparseRows(matrix)
    return Split(y, lambda chosen: rows[chosen])


def _parsed(root: str, where: str, features: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Return the examples [N, features] and their labels."""
    load = require("sklearn.datasets", "data.dataset=svmlight", "pip install scikit-learn").load_svmlight_file
    lines: Lines | None = None
    try:
        with _OPENED.get(Path(root).suffix, open)(root, "rb") as file:
            lines = Lines(file, where)
            matrix, labels = load(lines, dtype=np.float32, n_features=None, zero_based=True)
    except (ValueError, OverflowError, UnicodeError) as error:
        number = "" if lines is None else f":{lines.number}"
        raise ScenarioError(
            f"{where}{number}: is no example `label index:value ...` ({one_line(error)}); mend the line"
        ) from error
    except _DAMAGED as error:
        raise ScenarioError(f"{where} cannot be read ({one_line(error)}); give it whole") from error
    if not matrix.shape[0]:
        raise ScenarioError(f"{where} holds no example; give another file")
    return _checked(matrix, features, root, where), labels


def _checked(matrix: scipy.sparse.csr_matrix, features: int, root: str, where: str) -> scipy.sparse.csr_matrix:
    """Return the examples with indices from 0, after a look at each number."""
    wrong = (matrix.indices < 1) | (matrix.indices > features) | ~np.isfinite(matrix.data)
    if wrong.any():
        place = int(np.argmax(wrong))
        row = int(np.searchsorted(matrix.indptr, place, side="right")) - 1
        entry = f"{matrix.indices[place]}:{matrix.data[place]:g}"
        raise ScenarioError(
            f"{where}:{_line_of(root, row)}: has {entry}: indices are 1 to data.n_features={features:,} and values "
            "finite in float32; mend the line"
        )
    shape = (matrix.shape[0], features)
    return scipy.sparse.csr_matrix((matrix.data, matrix.indices - 1, matrix.indptr), shape=shape)


def _line_of(root: str, row: int) -> int:
    """Return the number of the line that holds an example, counting those without one."""
    with _OPENED.get(Path(root).suffix, open)(root, "rb") as file:
        for number, line in enumerate(file, start=1):
            row -= bool(line.split(b"#", 1)[0].strip())
            if row < 0:
                return number
    return 0
