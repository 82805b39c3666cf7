"""Read a user's own data: .npz files of arrays or JPEG images, svmlight files, and functions; any may be hostile."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy
import torch
from numpy.lib import format as npy
from torch import Tensor

from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.common.user_code import load_own
from flower_privdec.data.readers import (
    PLAIN_PIXELS,
    Rows,
    Source,
    Split,
    Wanted,
    binary_labels,
    channels_first,
    class_labels,
    read_targets,
    read_tokens,
    require,
    scale_pixels,
)
from flower_privdec.data.sparse_rows import LARGEST_INDEX, SparseRows
from flower_privdec.errors import RAISED_BY_USERS, PrivdecError, ScenarioError

_ARRAYS, _JPEG = ("x", "y"), ("jpeg", "offset", "label")


def read_npz(root: str | None, wanted: Wanted) -> Source:
    """Read an .npz file: x_train, y_train, x_test, y_test, or {train,test}_{jpeg,offset,label}; either half alone too.

    Targets and tokens are read as `wanted` describes. Otherwise 8-bit images ([N, H, W] or [N, H, W, C]) are scaled by
    PLAIN_PIXELS; every other array is taken as it is. Labels -1 and +1 become 0 and 1.
    JPEG images are a re-encoding: near their originals, not equal; report that with any result.
    """
    if root is None or not Path(root).is_file():
        raise ScenarioError(
            f"{wanted.key}={root} is no file: dataset npz needs the path of an .npz with x_train, y_train, x_test and "
            "y_test"
        )
    train, test = (partial(_read_half, root, part, wanted) for part in ("train", "test"))
    return Source(train, test, targets=wanted.targets, n_tokens=wanted.n_tokens)


def _read_half(root: str, part: str, wanted: Wanted) -> Split:
    where = f"{wanted.key}={root}"
    forms = [[f"{part}_{kind}" for kind in _JPEG], [f"{kind}_{part}" for kind in _ARRAYS]]
    arrays = read_members(root, forms, where)
    if f"{part}_jpeg" not in arrays:
        return from_arrays(arrays[f"x_{part}"], arrays[f"y_{part}"], part, where, wanted)
    if wanted.n_tokens is not None or wanted.targets != "classes":
        raise ScenarioError(f"{where} holds JPEG images with classes: they are no tokens, and need a loss of classes")
    return _jpeg_split(arrays, part, where)


def from_arrays(x: np.ndarray, y: np.ndarray, part: str, where: str, wanted: Wanted) -> Split:
    """Return one half of a dataset from arrays in memory, read like those of an .npz file."""
    name, labels = f"{where}: x_{part}", read_targets(y, wanted.targets, f"{where}: y_{part}")
    if x.dtype.kind not in "buif" or x.ndim < 2 or 0 in x.shape[1:]:
        raise ScenarioError(f"{name} is {x.dtype} {list(x.shape)}: it must be numbers, [examples, features...]")
    if len(x) != len(labels):
        raise ScenarioError(f"{name} has {len(x)} rows for {len(labels)} labels: there must be one for each")
    if wanted.targets == "classes":
        labels = binary_labels(labels, where)
    if wanted.n_tokens is not None:
        tokens = read_tokens(x, wanted.n_tokens, name)
        return Split(labels, lambda rows: tokens[rows])
    if x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3))):
        images = channels_first(torch.from_numpy(x))
        return Split(labels, lambda rows: scale_pixels(images[rows], PLAIN_PIXELS))
    return Split(labels, lambda rows: _finite(x[rows], name))


def _finite(x: np.ndarray, name: str) -> Tensor:
    with np.errstate(over="ignore"):
        tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ScenarioError(f"{name} holds NaN or infinity in float32: every feature must be finite; mend it")
    return tensor


def _jpeg_split(arrays: dict[str, np.ndarray], part: str, where: str) -> Split:
    stream, offset = arrays[f"{part}_jpeg"], arrays[f"{part}_offset"]
    labels = class_labels(arrays[f"{part}_label"], f"{where}: {part}_label", minimum=-1)
    right = stream.dtype == np.uint8 and stream.ndim == 1 and offset.dtype.kind in "ui" and offset.ndim == 1
    if not right or len(offset) != len(labels) + 1:
        raise ScenarioError(
            f"{where}: {part}_jpeg must be one row of bytes (uint8) with {len(labels) + 1} offsets for its "
            f"{len(labels)} labels: got {stream.dtype} {list(stream.shape)} and {len(offset)} offsets"
        )
    offset = offset.astype(np.int64)
    if offset[0] < 0 or offset[-1] > len(stream) or bool((np.diff(offset) <= 0).any()):
        raise ScenarioError(f"{where}: {part}_offset must increase from >= 0 to <= {len(stream)}: mend the file")
    return Split(binary_labels(labels, where), lambda rows: _decode(stream, offset, rows, f"{where}: {part}_jpeg"))


def _decode(stream: np.ndarray, offset: np.ndarray, rows: Rows, name: str) -> Tensor:
    """Decode some JPEG images to [N, 3, H, W]."""
    pillow = require("PIL.Image", "an .npz of JPEG images", "pip install pillow")
    chosen = np.arange(len(offset) - 1)[rows]
    images: np.ndarray | None = None
    for position, row in enumerate(chosen):
        try:
            with pillow.open(io.BytesIO(stream[offset[row] : offset[row + 1]].tobytes()), formats=["JPEG"]) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise ScenarioError(f"{name}: image {row} is no JPEG: {one_line(error)}; mend the file") from error
        if images is None:
            images = np.empty((len(chosen), *pixels.shape), np.uint8)
        if pixels.shape != images.shape[1:]:
            raise ScenarioError(f"{name}: image {row} is {pixels.shape}: all must be {images.shape[1:]}")
        images[position] = pixels
    return scale_pixels(channels_first(torch.from_numpy(images)), PLAIN_PIXELS)


_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_DAMAGE = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, struct.error, zlib.error)
_DAMAGED = (*_DAMAGE, zipfile.BadZipFile)  # an encrypted or oddly compressed member is a RuntimeError


def read_members(path: str, forms: Sequence[Sequence[str]], where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, in the first of some forms that it begins to have; nothing is unpickled.

    Args:
        forms: the names of the arrays in each form; the last one is required where none fits.
        where: names the file in an error.

    Raises:
        ScenarioError: it is no such file, lacks an array, or an array in it is damaged or does not fit into memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            names = next((form for form in forms if form[0] in members), forms[-1])
            if missing := [name for name in names if name not in members]:
                raise ScenarioError(f"{where} lacks {', '.join(missing)}: it must hold {', '.join(names)}")
            size = sum(members[name].file_size for name in names)
            check_room(2 * size, f"{where}: what it unpacks to", "give a smaller file")
            return {name: _member(archive, members[name], f"{where}: {name}") for name in names}
    except ScenarioError:
        raise
    except _DAMAGED as error:
        with open(path, "rb") as file:
            reason = "a single array" if file.read(6) == npy.MAGIC_PREFIX else one_line(error)
        raise ScenarioError(
            f"{where} cannot be read as .npz ({reason}): save the arrays again with numpy.savez"
        ) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> np.ndarray:
    """Return one array, of at most as many bytes as the archive declares for its file."""
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version not in _HEADERS:
            raise ScenarioError(f"{where} is of version {version} of .npy and must be 1.0 or 2.0: save it again")
        shape, fortran, dtype = _HEADERS[version](file)
        if any(size < 0 for size in shape):
            raise ScenarioError(f"{where} has the shape {list(shape)}: save it again with numpy.savez")
        promised = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or promised > info.file_size:
            kind = "holds Python objects" if dtype.hasobject else f"promises {list(shape)} {dtype} and has fewer bytes"
            raise ScenarioError(f"{where} {kind}: save plain numbers with numpy.savez")
        content = file.read(promised)
    if len(content) < promised:
        raise ScenarioError(f"{where} ends after {len(content)} of {promised} bytes: save it again with numpy.savez")
    array = np.frombuffer(bytearray(content), dtype=dtype)
    return array.reshape(shape, order="F" if fortran else "C")


def read_own(target: str, root: str | None, arguments: Mapping[str, Any], wanted: Wanted) -> Source:
    """Return a dataset of a user's own function.

    The function is called with a half, "train" or "test", and its arguments. It returns x and y, which are read like
    the arrays of an .npz file. A process that needs only the public test set requests that half alone.

    Args:
        target: where the function lies, `package.module:name`.
        root: passed by this name, where the scenario has one.
        arguments: by name.
        wanted: how the arrays are to be read.

    Raises:
        ScenarioError: the function cannot be imported. A half that is read: it fails, or returns something else.
    """
    load_own(target, "data.dataset.module")
    root_option = {} if root is None else {"root": root}
    half = partial(_call_for_half, target, {**root_option, **arguments}, wanted)
    return Source(partial(half, "train"), partial(half, "test"), targets=wanted.targets, n_tokens=wanted.n_tokens)


def _call_for_half(target: str, arguments: Mapping[str, Any], wanted: Wanted, part: str) -> Split:
    where = f"data.dataset.module={target!r}"
    try:
        arrays = load_own(target, "data.dataset.module")(part, **arguments)
    except PrivdecError:
        raise
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise ScenarioError(f"{where} fails on {part!r} with {dict(arguments)}: {one_line(error)}") from error
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise ScenarioError(f"{where} must return x and y for {part!r}, a pair of arrays")
    try:
        x, y = (np.asarray(half) for half in arrays)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors elsewhere
        raise ScenarioError(f"{where} returns for {part!r} what are no arrays: {one_line(error)}") from error
    return from_arrays(x, y, part, where, wanted)


LONGEST_LINE = 1 << 26  # bytes; an example of a million features has a third of it
LOOK_EVERY = 1 << 25  # bytes of text between two checks of free memory
MEMORY_FACTOR = (
    4  # times the bytes of text that reading them takes at most: "1:1 " is 4 bytes, and an index and a value 12
)
_OPENED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Lines:
    """The lines of a file as they are read, counted, so that an error can name its line."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self.file, self.where, self.number, self.size = file, where, 0, 0

    def read(self, size: int = -1) -> bytes:
        """Return bytes, as a file does: scikit-learn checks for this method."""
        return self.file.read(size)

    def __iter__(self) -> Iterator[bytes]:
        """Yield every line, of those that are not too long, while there is room for what they hold."""
        checked = 0
        while line := self.file.readline(LONGEST_LINE):
            self.number, self.size = self.number + 1, self.size + len(line)
            if len(line) == LONGEST_LINE:
                raise ScenarioError(f"{self.where}:{self.number}: has more than {LONGEST_LINE:,} bytes; mend the file")
            if self.size - checked > LOOK_EVERY:
                checked = self.size
                rest = f"{self.where}: what follows line {self.number:,}"
                check_room(MEMORY_FACTOR * LOOK_EVERY, rest, "give a smaller file")
            yield line


def read_svmlight(root: str | None, wanted: Wanted) -> Source:
    """Read one svmlight file: the training set at `data.root`, or the test set at `data.test`; indices count from 1."""
    if root is None or not Path(root).is_file():
        raise ScenarioError(f"{wanted.key}={root} is no file: dataset svmlight needs the path of one; give it")
    half = partial(_read_sparse, root, wanted)
    return Source(half, half, targets=wanted.targets)


def _read_sparse(root: str, wanted: Wanted) -> Split:
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
    except _UNREADABLE as error:
        raise ScenarioError(f"{where} cannot be read ({one_line(error)}); give it whole") from error
    if not matrix.shape[0]:
        raise ScenarioError(f"{where} holds no example; give another file")
    return _checked(matrix, features, root, where), labels


def _checked(matrix: scipy.sparse.csr_matrix, features: int, root: str, where: str) -> scipy.sparse.csr_matrix:
    """Return the examples with indices from 0; raise for an index or value out of range."""
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
