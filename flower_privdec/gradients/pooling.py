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
    _compiled()[0](*(_last(part) for part in (x.detach(), y, places)))
    return y, places


def unpooled(layer: nn.MaxPool2d, delta: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """Return the derivative in a layer's input."""
    if places.dtype != torch.uint8:
        result: Tensor = _aten.max_pool2d_with_indices_backward(delta, x, *_sizes(layer), places)
        return result
    derivative = torch.empty_like(x)
    _compiled()[1](*(_last(part) for part in (delta.contiguous(memory_format=torch.channels_last), places, derivative)))
    return derivative


def _is_compiled(layer: nn.MaxPool2d, x: Tensor) -> bool:
    """Return whether the loops fit (squares of two, channels last, on a CPU) and pay."""
    plain = _sizes(layer) == ([2, 2], [2, 2], [0, 0], [1, 1], False)
    fits = plain and x.is_cpu and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return fits and x.dtype in (torch.float32, torch.float64) and x.numel() >= COMPILED_FROM


@cache
def _compiled() -> tuple[Any, Any]:
    """Compile the loops when they are first needed: numba takes long to import."""
    from flower_privdec.rows.tensors import compiled

    return compiled(_pool), compiled(_unpool)


def _pool(x, y, place):  # type: ignore[no-untyped-def]
    """Write the largest of four, and which it is: the first of equals, or the last that is not a number."""
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                first, second = x[b, 2 * i, 2 * j], x[b, 2 * i, 2 * j + 1]
                third, fourth = x[b, 2 * i + 1, 2 * j], x[b, 2 * i + 1, 2 * j + 1]
                out, at = y[b, i, j], place[b, i, j]
                for c in range(y.shape[3]):
                    best, k = first[c], 0
                    if second[c] > best or second[c] != second[c]:
                        best, k = second[c], 1
                    if third[c] > best or third[c] != third[c]:
                        best, k = third[c], 2
                    if fourth[c] > best or fourth[c] != fourth[c]:
                        best, k = fourth[c], 3
                    out[c], at[c] = best, k


def _unpool(delta, place, x):  # type: ignore[no-untyped-def]
    """Write what is passed back to each input: a derivative where it was the largest, else 0."""
    x[:, 2 * delta.shape[1] :] = 0
    x[:, :, 2 * delta.shape[2] :] = 0
    zero = delta.dtype.type(0)
    for b in range(delta.shape[0]):
        for i in range(delta.shape[1]):
            for j in range(delta.shape[2]):
                d, at = delta[b, i, j], place[b, i, j]
                for k in range(4):
                    out = x[b, 2 * i + k // 2, 2 * j + k % 2]
                    for c in range(len(d)):
                        out[c] = zero + (d[c] if at[c] == k else zero)


def _last(images: Tensor) -> Any:
    """View images as an array [b, H, W, C]."""
    return images.permute(0, 2, 3, 1).numpy()


def _sizes(layer: nn.MaxPool2d) -> tuple[list[int], list[int], list[int], list[int], bool]:
    def pair(value: int | tuple[int, ...]) -> list[int]:
        return [value, value] if isinstance(value, int) else list(value)

    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    kernel, stride, padding, dilation = (pair(size) for size in sizes)
    return kernel, stride, padding, dilation, layer.ceil_mode
