"""Max pooling forward and backward: torch's, or compiled loops with the same bits in a fraction of the time."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

COMPILED_FROM = 2**17  # numbers from which the loops pay for their compilation
_aten = torch.ops.aten


def pooled(layer: nn.MaxPool2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a layer makes of images, and the places of the largest, in the form that `unpooled` takes."""
    if not _is_compiled(layer, x):
        y, places = _aten.max_pool2d_with_indices(x, *_sizes(layer))
        return y, places
    b, c, h, w = x.shape
    y = torch.empty((b, c, h // 2, w // 2), dtype=x.dtype, memory_format=torch.channels_last)
    places = torch.empty(y.shape, dtype=torch.uint8, memory_format=torch.channels_last)
    _loops().pool(*(_last(part) for part in (x.detach(), y, places)))
    return y, places


def unpooled(layer: nn.MaxPool2d, delta: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """Return the derivative in a layer's input."""
    if places.dtype != torch.uint8:
        result: Tensor = _aten.max_pool2d_with_indices_backward(delta, x, *_sizes(layer), places)
        return result
    found = torch.empty_like(x)
    _loops().unpool(*(_last(part) for part in (delta.contiguous(memory_format=torch.channels_last), places, found)))
    return found


def _is_compiled(layer: nn.MaxPool2d, x: Tensor) -> bool:
    """Return whether the loops fit (squares of two, channels last, on a CPU), pay, and can be compiled."""
    plain = _sizes(layer) == ([2, 2], [2, 2], [0, 0], [1, 1], False)
    fits = plain and x.is_cpu and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return fits and x.dtype in (torch.float32, torch.float64) and x.numel() >= COMPILED_FROM and _loops() is not None


@cache
def _loops() -> Any:
    """Return the compiled loops, or None where numba is not installed."""
    try:
        from flower_privdec.gradients import pool_loops
    except ImportError:
        return None
    return pool_loops


def _last(images: Tensor) -> Any:
    """View images as an array [b, H, W, C]."""
    return images.permute(0, 2, 3, 1).numpy()


def _sizes(layer: nn.MaxPool2d) -> tuple[list[int], list[int], list[int], list[int], bool]:
    def pair(value: int | tuple[int, ...]) -> list[int]:
        return [value, value] if isinstance(value, int) else list(value)

    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    kernel, stride, padding, dilation = (pair(size) for size in sizes)
    return kernel, stride, padding, dilation, layer.ceil_mode
