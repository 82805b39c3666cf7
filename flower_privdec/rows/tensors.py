"""Rows in memory: aligned to 64 bytes, checked for finite values, and numba-compiled functions over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BOUNDARY = 64  # bytes; a cache line, and the widest vector register
SHORTEST = 2**10  # bytes of the shortest row that is padded: the padding is then at most 6 % of it


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """Return uninitialised rows [..., d] of a tensor's dtype and device; long ones have a padded stride."""
    *rows, d = shape
    if not rows or d * like.element_size() < SHORTEST:
        return like.new_empty(shape)
    unit = BOUNDARY // like.element_size()
    return like.new_empty((*rows, -(-d // unit) * unit))[..., :d]


def aligned(rows: Tensor) -> Tensor:
    """Return a copy that begins at a multiple of 64 bytes, as does each of its rows where they are several and long."""
    out = empty_rows(rows, *rows.shape) if _many_and_long(rows) else rows.new_empty(rows.shape)
    return out.copy_(rows)


def is_aligned(rows: Tensor) -> bool:
    """Return whether a tensor is aligned already."""
    begins = rows.data_ptr() % BOUNDARY == 0
    return begins and (not _many_and_long(rows) or rows.stride(0) * rows.element_size() % BOUNDARY == 0)


def _many_and_long(rows: Tensor) -> bool:
    return rows.ndim == 2 and len(rows) > 1 and rows.shape[1] * rows.element_size() >= SHORTEST


def padded(rows: Tensor) -> Tensor | None:
    """View rows [m, d] with padding, [m, stride], contiguous; None where the storage ends before the last padding."""
    m = rows.shape[0]
    stride = rows.stride(0)
    if rows.is_contiguous():
        return rows
    whole = rows.storage_offset() + m * stride
    if rows.stride(1) != 1 or stride < rows.shape[1] or whole * rows.element_size() > rows.untyped_storage().nbytes():
        return None
    return torch.as_strided(rows, (m, stride), (stride, 1))


def all_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN.

    A finite sum proves it quickly. Otherwise the minimum and the maximum decide, since finite numbers may have an
    infinite sum.
    """
    if not values.numel() or math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(values))


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function by numba, on disk where some cache folder can be written.

    Division by zero gives infinity, and the global interpreter lock is released.
    """
    import numba  # takes long to import

    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no cache folder can be written
        return numba.njit(function, **options)


def inlined(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function by numba into those that call it."""
    import numba

    return numba.njit(function, forceinline=True, error_model="numpy", **options)
