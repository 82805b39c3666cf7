"""Short rows of several names for one shard in one flat buffer, with a stamp that says which message it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_privdec.rows.finite import all_finite

STAMP = 8  # bytes
UNIT = 64  # bytes between the beginnings of parts whose types differ
Layout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # type and shape of each part


@dataclass(frozen=True)
class Parcel:
    """Views of a buffer.

    Attributes:
        whole: what is sent, uint8.
        parts: of each name, its rows, [k, ...].
        numbers: all of them in one row, where they are of one type, which is quicker to check; else the parts.
        stamp: int64, one number.
    """

    whole: Tensor
    parts: tuple[Tensor, ...]
    numbers: tuple[Tensor, ...]
    stamp: Tensor

    @classmethod
    def within(cls, buffer: Tensor, layout: Layout) -> Parcel:
        """Return the views for a layout, which `size_of` says has room in a buffer."""
        begins, end = _places(layout)
        parts = tuple(
            buffer[begin : begin + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for begin, (dtype, shape) in zip(begins, layout, strict=True)
        )
        numbers = parts
        if len({dtype for dtype, _ in layout}) == 1:
            numbers = (buffer[: sum(part.nbytes for part in parts)].view(layout[0][0]),)
        return cls(buffer[: end + STAMP], parts, numbers, buffer[end : end + STAMP].view(torch.int64))

    def finite(self) -> bool:
        """Return whether all numbers are finite."""
        return all(all_finite(part) for part in self.numbers)


def size_of(layout: Layout) -> int:
    """Return how many bytes a parcel has."""
    return _places(layout)[1] + STAMP


def layout_of(likes: Sequence[Tensor], count: int) -> Layout:
    """Return the layout of so many rows of each name."""
    return tuple((each.dtype, (count, *each.shape[1:])) for each in likes)


def _places(layout: Layout) -> tuple[list[int], int]:
    """Return where each part begins, without a gap where all are of one type, and where the stamp does."""
    unit = 1 if len({dtype for dtype, _ in layout}) == 1 else UNIT
    begins, end = [], 0
    for dtype, shape in layout:
        begins.append(end)
        end += -(-torch.Size(shape).numel() * dtype.itemsize // unit) * unit
    return begins, -(-end // STAMP) * STAMP
