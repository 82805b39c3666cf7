"""Read arrays out of an .npz file that may be anything: what its headers promise is checked before it is believed."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.lib import format as npy

from flower_privdec.common.formatting import one_line
from flower_privdec.common.machine import check_room
from flower_privdec.errors import ScenarioError

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
