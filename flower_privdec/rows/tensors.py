"""Rows in memory: aligned to 64 bytes, checked for finite values, and numba-compiled functions over them.

Long rows [m, d] are padded, so that each begins at a multiple of 64 bytes. Products of aligned rows are faster. And the
bits of a product depend on the alignment of its operands: rows that are laid out alike give the same bits in every
process, and after a checkpoint is read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


BOUNDARY = 64  # bytes; a cache line, and the widest vector register
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by the bytes of a number
SHORTEST = 2**10  # bytes of the shortest row that is padded; the padding is then at most 6 % of the row


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """Return uninitialised rows [..., d] of a tensor's dtype and device; long rows have a padded stride."""
    *rows, d = shape
    if not rows or d * like.element_size() < SHORTEST:
        return like.new_empty(shape)

    unit = BOUNDARY // like.element_size()
    stride = math.ceil(d / unit) * unit
    return like.new_empty((*rows, stride))[..., :d]


def aligned(rows: Tensor) -> Tensor:
    """Return a copy that begins at a multiple of 64 bytes; if it has several long rows, so does each of them."""
    if _many_and_long(rows):
        out = empty_rows(rows, *rows.shape)
    else:
        out = rows.new_empty(rows.shape)
    return out.copy_(rows)


def is_aligned(rows: Tensor) -> bool:
    """Return whether a tensor is aligned already."""
    if rows.data_ptr() % BOUNDARY != 0:
        return False
    if not _many_and_long(rows):
        return True
    stride = rows.stride(0) * rows.element_size()
    return stride % BOUNDARY == 0


def put_back(rows: Tensor, places: Tensor | slice, part: Tensor) -> None:
    """Write some rows that were taken as rows[places] back; nothing is left to do for a slice, which is a view."""
    if not isinstance(places, slice):
        rows[places] = part


def _many_and_long(rows: Tensor) -> bool:
    """Return whether rows are worth padding: a single row and short rows are not."""
    return rows.ndim == 2 and len(rows) > 1 and rows.shape[1] * rows.element_size() >= SHORTEST


def padded(rows: Tensor) -> Tensor | None:
    """View rows [m, d] with their padding, as contiguous [m, stride].

    Returns:
        The view; None if the rows are not laid out one after the other, or the storage ends before the last padding.
    """
    if rows.is_contiguous():
        return rows

    m, d = rows.shape
    stride = rows.stride(0)
    is_row_after_row = rows.stride(1) == 1 and stride >= d
    end = (rows.storage_offset() + m * stride) * rows.element_size()
    if not is_row_after_row or end > rows.untyped_storage().nbytes():
        return None
    return torch.as_strided(rows, (m, stride), (stride, 1))


def bits_of(values: Tensor) -> np.ndarray:
    """Return the bits of some numbers as whole numbers of the same size, [n], since NumPy has not every type.

    They lie where the values do, if those are in the memory of the CPU one after the other.
    """
    integer = getattr(torch, INTEGERS[values.element_size()])
    bits = values.view(integer).numpy(force=True)
    return np.ascontiguousarray(bits).reshape(-1)


def all_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN.

    A finite sum proves it quickly. Otherwise the minimum and the maximum decide, since finite numbers may have an
    infinite sum.
    """
    if values.numel() == 0 or math.isfinite(values.sum().item()):
        return True
    smallest, largest = torch.aminmax(values)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


def has_finite_square(values: Tensor) -> bool:
    """Return whether the squares of some values have a finite sum, which takes a fraction of adding two tensors.

    Then none is NaN, and each is at most the root of the largest number of its type.
    """
    flat = values.reshape(-1)
    return math.isfinite(torch.dot(flat, flat).item())


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function by numba, and cache it on disk if a cache folder can be written.

    Division by zero gives infinity, and the global interpreter lock is released.
    """
    import numba  # takes long to import

    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no cache folder can be written
        return numba.njit(function, **options)


def inlined(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function by numba so that it is inlined into its callers."""
    import numba

    return numba.njit(function, forceinline=True, error_model="numpy", **options)
