"""Rows on the wire: a line that describes each, then their numbers, little-endian, as they lie in memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.pushsum.parts import Buffer
from flower_privdec.pushsum.share_protocol import RefusedError

BEGIN = 72  # bytes of the header before the first line
LINE = struct.Struct("<BB6x4Q")  # type, number of axes, their lengths
AXES = 4
DATA_AT, ROW_AT = 64, 8  # the rows begin at a multiple of the first, each at one of the second
CHUNK = 2**18  # numbers checked at a time
WIRE_TYPES = {1: torch.float16, 2: torch.float32, 3: torch.float64}
CODES = {dtype: code for code, dtype in WIRE_TYPES.items()}


@dataclass(frozen=True)
class WireRow:
    """How a row has to look.

    Attributes:
        shape: of up to four axes.
        dtype: float16, float32 or float64.
        nonnegative: whether each of its numbers is at least 0, as a push-sum weight is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nonnegative: bool = False

    @property
    def nbytes(self) -> int:
        """Return how many bytes its numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def little(self) -> np.dtype[np.floating]:
        """Return its type as it is sent."""
        return np.dtype(_name(self.dtype)).newbyteorder("<")

    @property
    def line(self) -> bytes:
        """Return what describes it in a frame."""
        return LINE.pack(CODES[self.dtype], len(self.shape), *self.shape, *(0,) * (AXES - len(self.shape)))


Layout = Mapping[str, WireRow]  # in the order in which they are sent


def layout_of(values: Mapping[str, Tensor], wire: torch.dtype, weights: Container[str] = ("w",)) -> Layout:
    """Return how rows like some have to look on the wire.

    Args:
        values: one row of each name, in the order in which they are sent.
        wire: the type that is sent.
        weights: the names of rows that must not be negative.
    """
    return {name: WireRow(tuple(value.shape), wire, name in weights) for name, value in values.items()}


def frame_size(layout: Layout) -> int:
    """Return the bytes of a frame with rows."""
    return _places(layout)[-1]


def _places(layout: Layout) -> list[int]:
    """Return where each row begins in its frame, and where the last one ends."""
    at = BEGIN + len(layout) * LINE.size
    places = [_up(at, DATA_AT) if layout else at]
    for row in layout.values():
        places.append(_up(places[-1] + row.nbytes, ROW_AT))
    return places


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def row_parts(values: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """Yield what follows the header of a frame: the lines that describe rows, and the rows as they lie in memory."""
    layout = {name: WireRow(tuple(value.shape), value.dtype) for name, value in values.items()}
    end = BEGIN + len(layout) * LINE.size
    yield b"".join(row.line for row in layout.values())
    for place, row, value in zip(_places(layout), layout.values(), values.values(), strict=False):
        yield bytes(place - end)
        yield value.detach().cpu().contiguous().numpy().reshape(-1).astype(row.little, copy=False).view(np.uint8).data
        end = place + row.nbytes
    yield bytes(frame_size(layout) - end)


def read_rows(view: memoryview, count: int, layout: Layout, who: str) -> dict[str, Tensor]:
    """Return the rows of a frame as views of it, once each of their numbers may be one.

    Args:
        view: the whole frame.
        count: how many rows its header says that it has.
        layout: how they have to look.
        who: what to call the frame in an error.

    Raises:
        RefusedError: naming the row, what is wrong and what would be right.
    """
    if count != len(layout):
        raise RefusedError(f"{who} has {count} rows, not {len(layout)}; all peers must run one scenario")
    if len(view) != frame_size(layout):
        raise RefusedError(f"{who} has {len(view)} bytes, which must be {frame_size(layout)}")
    for number, (name, row) in enumerate(layout.items()):
        _check_line(view[BEGIN + number * LINE.size :][: LINE.size], row, f"{who}: {name!r}")
    _check_gaps(view, layout, who)
    rows = zip(layout.items(), _places(layout), strict=False)
    return {name: _row(view, row, at, f"{who}: {name!r}") for (name, row), at in rows}


def _check_line(line: memoryview, row: WireRow, what: str) -> None:
    if line == row.line:
        return
    code, axes, *lengths = LINE.unpack(line)
    dtype = _name(WIRE_TYPES[code]) if code in WIRE_TYPES else f"type {code}"
    raise RefusedError(
        f"{what} is described as {axes} axes of {lengths} {dtype}, which must be {len(row.shape)} of "
        f"{list(row.shape)} {_name(row.dtype)}; all peers must run one scenario"
    )


def _check_gaps(view: memoryview, layout: Layout, who: str) -> None:
    places = _places(layout)
    ends = [BEGIN + len(layout) * LINE.size]
    ends += [at + row.nbytes for at, row in zip(places, layout.values(), strict=False)]
    if any(any(view[end:begin]) for end, begin in zip(ends, places, strict=True)):
        raise RefusedError(f"{who} must have zeros between its rows")


def _row(view: memoryview, row: WireRow, at: int, what: str) -> Tensor:
    flat = np.frombuffer(view, row.little, math.prod(row.shape), at)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        _check(part, np.isfinite(part), "finite", start, what)
        if row.nonnegative:
            _check(part, part >= 0, ">= 0", start, what)
    native = flat.astype(flat.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native if native.flags.writeable else native.copy()).reshape(row.shape)


def _check(part: np.ndarray, right: np.ndarray, rule: str, start: int, what: str) -> None:
    if not right.all():
        at = int(np.argmin(right))
        raise RefusedError(f"{what}[{start + at}] is {part[at]}, which must be {rule}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
