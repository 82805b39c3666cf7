"""Read a user's own data: an .npz file of arrays, or of JPEG images laid end to end."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.data.readers import (
    PLAIN_PIXELS,
    Rows,
    Source,
    Split,
    channels_first,
    require,
    scale_pixels,
)
from flower_privdec.data.targets import Wanted, binary_labels, class_labels, read_targets, read_tokens
from flower_privdec.errors import ScenarioError

_ARRAYS, _JPEG = ("x", "y"), ("jpeg", "offset", "label")


def read_npz(root: str | None, wanted: Wanted) -> Source:
    """Read an .npz file: x_train, y_train, x_test, y_test, or {train,test}_{jpeg,offset,label}; either half alone too.

    Targets and tokens are read as they are wanted. Otherwise 8-bit images ([N, H, W] or [N, H, W, C]) are scaled by
    PLAIN_PIXELS; every other array is taken as it is. Labels -1 and +1 become 0 and 1.
    JPEG images are a re-encoding: near the originals they were made from, not equal; say so of any result.
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
    return _binary(_jpeg_split(arrays, part, where), where)


def from_arrays(x: np.ndarray, y: np.ndarray, part: str, where: str, wanted: Wanted) -> Split:
    """Return one half of a dataset from arrays in memory, read like those of an .npz file."""
    split = _array_split({f"x_{part}": x, f"y_{part}": y}, part, where, wanted)
    return _binary(split, where) if wanted.targets == "classes" else split


def _array_split(arrays: dict[str, np.ndarray], part: str, where: str, wanted: Wanted) -> Split:
    x, name = arrays[f"x_{part}"], f"{where}: x_{part}"
    labels = read_targets(arrays[f"y_{part}"], wanted.targets, f"{where}: y_{part}")
    if x.dtype.kind not in "buif" or x.ndim < 2 or 0 in x.shape[1:]:
        raise ScenarioError(f"{name} is {x.dtype} {list(x.shape)}: it must be numbers, [examples, features...]")
    if len(x) != len(labels):
        raise ScenarioError(f"{name} has {len(x)} rows for {len(labels)} labels: there must be one for each")
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
    return Split(labels, lambda rows: _decode(stream, offset, rows, f"{where}: {part}_jpeg"))


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


def _binary(split: Split, where: str) -> Split:
    return Split(binary_labels(split.labels, where), split.read)


_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_DAMAGE = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, struct.error, zlib.error)
_DAMAGED = (*_DAMAGE, zipfile.BadZipFile)  # an encrypted or oddly compressed member is a RuntimeError


def read_members(path: str, forms: Sequence[Sequence[str]], where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, in the first of some forms that it begins to have; nothing is unpickled.

    Args:
        forms: the names of the arrays in each form; the last one is asked for where none fits.
        where: what to call the file in an error.

    Raises:
        ScenarioError: it is no such file, lacks an array, or an array in it is damaged or does not fit into memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            names = next((form for form in forms if form[0] in there), forms[-1])
            if missing := [name for name in names if name not in there]:
                raise ScenarioError(f"{where} lacks {', '.join(missing)}: it must hold {', '.join(names)}")
            size = sum(there[name].file_size for name in names)
            check_room(2 * size, f"{where}: what it unpacks to", "give a smaller file")
            return {name: _member(archive, there[name], f"{where}: {name}") for name in names}
    except ScenarioError:
        raise
    except _DAMAGED as error:
        reason = "a single array" if _is_array(path) else one_line(error)
        raise ScenarioError(
            f"{where} cannot be read as .npz ({reason}): save the arrays again with numpy.savez"
        ) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> np.ndarray:
    """Return one array, which takes as many bytes as the archive says its file has."""
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


def _is_array(path: str) -> bool:
    """Return whether a file holds one array by itself."""
    with open(path, "rb") as file:
        return file.read(6) == npy.MAGIC_PREFIX
