"""A dataset in one .npz file: arrays, or a stream of JPEG images. Nothing is unpickled.

    x_train, y_train, x_test, y_test          arrays
    {train,test}_{jpeg,offset,label}          the bytes of all images one after another, where each begins and where
                                              the last one ends, [N + 1], and their classes, [N]

Either half may stand without the other.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.data.arrays import binary_labels, class_labels, from_arrays
from flower_privdec.data.dataset import Request, Rows, Source, Split
from flower_privdec.data.intake import Intake, counted, listed
from flower_privdec.data.pixels import decode_images

if TYPE_CHECKING:
    from torch import Tensor


_ARRAYS = ("x", "y")
_JPEG = ("jpeg", "offset", "label")

# What zipfile and NumPy raise for a damaged file; an encrypted or oddly compressed member is a RuntimeError.
_DAMAGED = (
    *(OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, OverflowError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)


def read_npz(request: Request) -> Source:
    """Return the dataset in an .npz file, with targets and tokens as the request says, see `from_arrays`.

    JPEG images are a re-encoding: near their originals, not equal; report that with any result.
    """
    path = request.path("the path of an .npz with x_train, y_train, x_test and y_test")
    return Source(
        partial(_read_half, path, "train", request),
        partial(_read_half, path, "test", request),
        targets=request.targets,
        n_tokens=request.n_tokens,
    )


def _read_half(path: str, part: str, request: Request) -> Split:
    where = request.where
    jpeg = [f"{part}_{kind}" for kind in _JPEG]
    plain = [f"{kind}_{part}" for kind in _ARRAYS]
    arrays = read_members(path, [jpeg, plain], where)
    intake = Intake(files=1, left=_left(path))
    if f"{part}_jpeg" not in arrays:
        split = from_arrays(arrays[f"x_{part}"], arrays[f"y_{part}"], part, where, request)
        return replace(split, intake=intake)

    if request.n_tokens is not None or request.targets != "classes":
        raise ScenarioError(f"{where} holds JPEG images with classes: they are not tokens, and need a loss of classes")
    split = _jpeg_images(arrays[f"{part}_jpeg"], arrays[f"{part}_offset"], arrays[f"{part}_label"], part, where)
    return replace(split, intake=intake)


def _left(path: str) -> tuple[str, ...]:
    """Return the arrays of a file that are of no half, in a line."""
    known = {f"{kind}_{part}" for part in ("train", "test") for kind in _ARRAYS}
    known |= {f"{part}_{kind}" for part in ("train", "test") for kind in _JPEG}
    with zipfile.ZipFile(path) as archive:
        others = [name.removesuffix(".npy") for name in archive.namelist()]
    others = sorted(set(others) - known)
    if not others:
        return ()
    return (f"{counted(len(others), 'array')} ({listed(others)})",)


def _jpeg_images(stream: np.ndarray, offset: np.ndarray, labels: np.ndarray, part: str, where: str) -> Split:
    """Return a half whose images are decoded when their rows are asked for.

    Args:
        stream: the bytes of all images, uint8 [bytes].
        offset: where each image begins in them, and where the last one ends, integers [N + 1].
        labels: classes, [N].
        part: "train" or "test".
        where: what to call the file in an error.
    """
    labels = class_labels(labels, f"{where}: {part}_label", minimum=-1)
    right = stream.dtype == np.uint8 and stream.ndim == 1 and offset.dtype.kind in "ui" and offset.ndim == 1
    if not right or len(offset) != len(labels) + 1:
        raise ScenarioError(
            f"{where}: {part}_jpeg must be one row of bytes (uint8) with {len(labels) + 1} offsets for its "
            f"{len(labels)} labels: got {stream.dtype} {list(stream.shape)} and {len(offset)} offsets"
        )

    offset = offset.astype(np.int64)
    if offset[0] < 0 or offset[-1] > len(stream) or bool((np.diff(offset) <= 0).any()):
        raise ScenarioError(f"{where}: {part}_offset must increase from >= 0 to <= {len(stream)}: mend the file")

    def read(rows: Rows) -> Tensor:
        files = []
        names = []
        for row in np.arange(len(labels))[rows].tolist():
            files.append(io.BytesIO(stream[offset[row] : offset[row + 1]].tobytes()))
            names.append(f"{where}: {part}_jpeg: image {row}")
        return decode_images(files, names, formats=["JPEG"])

    return Split(binary_labels(labels, where), read)


def read_members(path: str, forms: Sequence[Sequence[str]], where: str) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, in the first of some forms whose first array it has.

    Args:
        path: the file.
        forms: the names of the arrays in each form; if none fits, the last one is required.
        where: what to call the file in an error.

    Raises:
        ScenarioError: it is not such a file, lacks an array, or an array in it is damaged or does not fit into memory.
    """
    arrays: dict[str, np.ndarray] = {}
    name = ""  # of the array that is being read
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = next((form for form in forms if form[0] in members), forms[-1])
            missing = [array for array in wanted if array not in members]
            if missing:
                raise ScenarioError(f"{where} lacks {', '.join(missing)}: it must hold {', '.join(wanted)}")

            # The sizes in the archive, before anything is unpacked: a few bytes may unpack to terabytes.
            size = sum(members[array].file_size for array in wanted)
            check_room(2 * size, f"{where}: what it unpacks to", "give a smaller file")

            for name in wanted:
                with archive.open(members[name]) as file:
                    arrays[name] = npy.read_array(file, allow_pickle=False)
            return arrays
    except ScenarioError:
        raise
    except _DAMAGED as error:
        reason = one_line(error)
        with open(path, "rb") as file:
            if file.read(6) == npy.MAGIC_PREFIX:
                reason = "a single array"
        if name:
            reason = f"{name}: {reason}"
        raise ScenarioError(
            f"{where} cannot be read as .npz ({reason}): save the arrays again with numpy.savez"
        ) from error
