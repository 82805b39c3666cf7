"""Max pooling of two by two on a CPU, and the gradients of the convolution before it, by compiled loops.

Of the four outputs of a convolution that a pooling looks at, one has a derivative and three have none; behind a ReLU
perhaps all four have none. So at least three quarters of the products by which a convolution's gradients are computed
are products with zero. The loops here leave these out, and never write the derivatives in all outputs.

    PooledConvolution   a Conv2d, the MaxPool2d behind it, and a ReLU if there is one: one link of a chain of layers
    pooled, unpooled    max pooling with torch's bits

A *place* says which of its four inputs an output of a pooling is: 0 to 3, line by line, or NOWHERE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

_aten = torch.ops.aten
COMPILED_FROM = 2**15  # numbers that are pooled, from which the loops pay for their compilation
SHORTEST = 16  # numbers beside each other in a patch, from which the loops are faster than products with zeros
MOST_THREADS = 2  # of torch, up to which loops in one thread are faster than products with zeros in all of them
SPARE = 4  # zeros behind a list of derivatives, so that they can be read four at a time
NOWHERE = 4  # a place: the output does not depend on any input, because a ReLU made it 0


@dataclass(frozen=True)
class Pooling:
    """What a backward pass needs of a forward pass through a pooling.

    Attributes:
        x: what was pooled [b, C, H, W].
        places: uint8 [b, C, H/2, W/2], or torch's own int64 indices.
    """

    x: Tensor
    places: Tensor

    @property
    def is_compiled(self) -> bool:
        """Return whether the loops of this module computed it."""
        return self.places.dtype == torch.uint8


def pooled(layer: nn.MaxPool2d, x: Tensor, *, rectified: bool = False) -> tuple[Tensor, Pooling]:
    """Return a layer's outputs for images, behind a ReLU if `rectified`, and what `unpooled` needs."""
    if not _is_compiled(layer, x):
        y, indices = _aten.max_pool2d_with_indices(x, *_sizes(layer))
        if rectified:
            y.relu_()
        return y, Pooling(x, indices)

    b, c, h, w = x.shape
    y = torch.empty((b, c, h // 2, w // 2), dtype=x.dtype, memory_format=torch.channels_last)
    places = torch.empty(y.shape, dtype=torch.uint8, memory_format=torch.channels_last)
    _loops().pool(_last(x.detach()), _last(y), _last(places), rectified)
    return y, Pooling(x, places)


def unpooled(layer: nn.MaxPool2d, delta: Tensor, pooling: Pooling) -> Tensor:
    """Return the derivative in a layer's input."""
    if not pooling.is_compiled:
        result: Tensor = _aten.max_pool2d_with_indices_backward(delta, pooling.x, *_sizes(layer), pooling.places)
        return result

    derivative = torch.empty_like(pooling.x)
    _loops().unpool(_last(delta), _last(pooling.places), _last(derivative))
    return derivative


def is_square(layer: nn.Module) -> bool:
    """Return whether a layer is max pooling of two by two that do not overlap."""
    plain = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    return isinstance(layer, nn.MaxPool2d) and _sizes(layer) == plain


def _is_compiled(layer: nn.MaxPool2d, x: Tensor) -> bool:
    """Return whether the loops fit (squares of two, channels last, on a CPU) and pay."""
    fits = is_square(layer) and x.is_cpu and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return fits and x.dtype in (torch.float32, torch.float64) and x.numel() >= COMPILED_FROM


def _sizes(layer: nn.MaxPool2d) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Return kernel, stride, padding and dilation, each in both axes, and whether sizes are rounded up."""

    def both(size: int | tuple[int, ...]) -> list[int]:
        return [size] * 2 if isinstance(size, int) else list(size)

    return both(layer.kernel_size), both(layer.stride), both(layer.padding), both(layer.dilation), layer.ceil_mode


@dataclass(frozen=True)
class PooledConvolution:
    """A convolution and the max pooling of two by two behind it.

    Attributes:
        rectified: whether a ReLU follows.
    """

    conv: nn.Conv2d
    pool: nn.MaxPool2d
    rectified: bool

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for images, without what a backward pass needs."""
        y = functional.max_pool2d(self._convolved(x), 2)
        if self.rectified:
            y.relu_()
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, Pooling]:
        """Return the outputs for images, and what a backward pass needs."""
        return pooled(self.pool, self._convolved(x), rectified=self.rectified)

    def _convolved(self, x: Tensor) -> Tensor:
        conv = self.conv
        return functional.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation)

    def is_listed(self, pooling: Pooling) -> bool:
        """Return whether `listed` derivatives are to be used: they fit, and are faster than dense ones."""
        if not pooling.is_compiled or torch.get_num_threads() > MOST_THREADS:
            return False
        return self._patch()[1] >= SHORTEST

    def dense(self, delta: Tensor, y: Tensor, pooling: Pooling) -> Tensor:
        """Return the derivative in the convolution's output, zeros and all.

        Args:
            delta: the derivative in the outputs; it may be changed.
            y: the outputs.
        """
        # Places of the loops are NOWHERE if a ReLU made an output 0; torch's are not.
        if self.rectified and not pooling.is_compiled:
            _aten.threshold_backward.grad_input(delta, y, 0.0, grad_input=delta)
        return unpooled(self.pool, delta, pooling)

    def listed(self, x: Tensor, delta: Tensor, pooling: Pooling) -> Listed:
        """Return the derivatives in the convolution's output that are not zero; `pooling` must be compiled."""
        b, o, height, width = delta.shape
        shape = (b, o, height * width + SPARE)
        starts = delta.new_empty(shape, dtype=torch.int32).numpy()
        values = delta.new_empty(shape).numpy()
        counts = np.empty((b, o), np.int64)

        # The steps from an output to the next, below it and beside it, in an image with its padding.
        stride: Any = self.conv.stride
        padding: Any = self.conv.padding
        column = stride[1] * x.shape[1]
        row = stride[0] * x.shape[1] * (x.shape[3] + 2 * padding[1])
        _loops().list(_last(delta), _last(pooling.places), row, column, starts, values, counts)
        return Listed(self, starts, values, counts)

    def gradients(self, x: Tensor, listed: Listed) -> tuple[Tensor, Tensor]:
        """Return every example's gradient of the weight, [b, O, H, W, C], and of the bias, [b, O].

        An example with a number that is not finite has a gradient that is not, as products with zero would have it.
        """
        o, c, *kernel = self.conv.weight.shape
        gradients = x.new_empty(len(x), o, *kernel, c)
        sums = x.new_empty(len(x), o)
        segments, n = self._segments(x)
        out = gradients.view(len(x), o, -1)
        _loops().gradient(_last(x), *listed.arrays, self.conv.padding, segments, n, out.numpy(), sums.numpy())
        return gradients, sums

    def derivative(self, x: Tensor, listed: Listed) -> Tensor:
        """Return the derivative in the input x."""
        weight = self.conv.weight.permute(0, 2, 3, 1).flatten(1).contiguous()
        result = torch.empty_like(x, memory_format=torch.channels_last)
        segments, n = self._segments(x)
        _loops().derivative(weight.numpy(), *listed.arrays, self.conv.padding, segments, n, _last(result))
        return result

    def _patch(self) -> tuple[int, int]:
        """Return into how many segments each line of a patch falls, and how many numbers lie together in each."""
        width = self.conv.kernel_size[1]
        channels = self.conv.in_channels
        if self.conv.dilation[1] == 1:
            return 1, width * channels
        return width, channels

    def _segments(self, x: Tensor) -> tuple[np.ndarray, int]:
        """Return where in an image with its padding a patch's segments lie, from its first, and their length."""
        channels = x.shape[1]
        padding: Any = self.conv.padding
        down: Any = self.conv.dilation
        count, n = self._patch()
        row = down[0] * channels * (x.shape[3] + 2 * padding[1])
        lines = np.arange(self.conv.kernel_size[0]) * row
        columns = np.arange(count) * down[1] * channels
        return (lines[:, None] + columns).ravel(), n


@dataclass(frozen=True)
class Listed:
    """The derivatives in a convolution's output that are not zero, of b examples, channel by channel.

    Attributes:
        link: the convolution.
        starts: int32 [b, O, n], where in an example's padded image their patches begin.
        values: [b, O, n]; behind the last are SPARE zeros.
        counts: int64 [b, O], how many there are.
    """

    link: PooledConvolution
    starts: np.ndarray
    values: np.ndarray
    counts: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what the loops read."""
        return self.starts, self.values, self.counts


def _last(images: Tensor) -> Any:
    """View images as an array [b, H, W, C]; a copy if they lie otherwise in memory."""
    return images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).numpy()


@dataclass(frozen=True)
class _Loops:
    pool: Any
    unpool: Any
    list: Any
    gradient: Any
    derivative: Any


@cache
def _loops() -> _Loops:
    """Compile the loops when they are first needed: numba takes long to import."""
    from flower_privdec.rows.tensors import compiled

    # A product and a sum may become one instruction, as in a matrix product.
    fused = partial(compiled, fastmath={"contract"})
    return _Loops(compiled(_pool), compiled(_unpool), compiled(_list), fused(_gradient), fused(_derivative))


def _pool(x, y, place, rectified):  # type: ignore[no-untyped-def]
    """Write the largest of four and its number: the first of equals, or the last that is NaN."""
    zero = x.dtype.type(0)
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                # The four inputs of an output, all channels of each: [C].
                first = x[b, 2 * i, 2 * j]
                second = x[b, 2 * i, 2 * j + 1]
                third = x[b, 2 * i + 1, 2 * j]
                fourth = x[b, 2 * i + 1, 2 * j + 1]
                out = y[b, i, j]
                at = place[b, i, j]

                for c in range(y.shape[3]):
                    best = first[c]
                    k = 0
                    if second[c] > best or second[c] != second[c]:
                        best = second[c]
                        k = 1
                    if third[c] > best or third[c] != third[c]:
                        best = third[c]
                        k = 2
                    if fourth[c] > best or fourth[c] != fourth[c]:
                        best = fourth[c]
                        k = 3
                    if rectified and best <= 0:
                        best = zero
                        k = NOWHERE
                    out[c] = best
                    at[c] = k


def _unpool(delta, place, x):  # type: ignore[no-untyped-def]
    """Write the derivative in each input: the output's if it was the largest, else 0."""
    # A last row or column that no square covers.
    x[:, 2 * delta.shape[1] :] = 0
    x[:, :, 2 * delta.shape[2] :] = 0

    zero = delta.dtype.type(0)
    for b in range(delta.shape[0]):
        for i in range(delta.shape[1]):
            for j in range(delta.shape[2]):
                d = delta[b, i, j]
                at = place[b, i, j]
                for k in range(4):
                    out = x[b, 2 * i + k // 2, 2 * j + k % 2]
                    for c in range(len(d)):
                        out[c] = zero + (d[c] if at[c] == k else zero)


def _list(delta, place, row, column, start, value, count):  # type: ignore[no-untyped-def]
    """List the derivatives of each example and channel, see Listed."""
    for b in range(delta.shape[0]):
        count[b] = 0
        for i in range(delta.shape[1]):
            for j in range(delta.shape[2]):
                for o in range(delta.shape[3]):
                    # What is nowhere is overwritten by the next one.
                    at = place[b, i, j, o]
                    m = count[b, o]
                    start[b, o, m] = (2 * i + (at >> 1)) * row + (2 * j + (at & 1)) * column
                    value[b, o, m] = delta[b, i, j, o]
                    count[b, o] = m + (at < NOWHERE)

        for o in range(delta.shape[3]):
            m = count[b, o]
            start[b, o, m : m + SPARE] = 0
            value[b, o, m : m + SPARE] = 0


def _gradient(x, start, value, count, padding, segments, n, gradient, bias):  # type: ignore[no-untyped-def]
    """Write the gradients of a convolution's weight [b, O, K] and bias [b, O] for images x [b, H, W, C].

    For each output channel, the patches of the outputs that have a derivative are summed, four at a time: then a
    gradient is read and written once for four patches.
    """
    height = x.shape[1]
    line = x.shape[2] * x.shape[3]
    margin = padding[1] * x.shape[3]
    wide = line + 2 * margin  # a line of the padded image
    image = np.zeros((height + 2 * padding[0]) * wide, x.dtype)
    flaws = np.empty(line, x.dtype)

    for b in range(x.shape[0]):
        # Pad the image. What is not finite makes `flaw` NaN.
        flaws[:] = 0
        for h in range(height):
            source = x[b, h].reshape(line)
            target = image[(h + padding[0]) * wide + margin :][:line]
            for q in range(line):
                target[q] = source[q]
                flaws[q] += source[q] * 0
        flaw = x.dtype.type(0)
        for q in range(line):
            flaw += flaws[q]

        for o in range(start.shape[1]):
            first = start[b, o]
            d = value[b, o]
            total = flaw
            for t in range(count[b, o]):
                total += d[t]
            bias[b, o] = total

            out = gradient[b, o]
            out[:] = flaw
            for t in range(0, count[b, o], 4):
                d0 = d[t]
                d1 = d[t + 1]
                d2 = d[t + 2]
                d3 = d[t + 3]
                for s in range(len(segments)):
                    x0 = image[first[t] + segments[s] :][:n]
                    x1 = image[first[t + 1] + segments[s] :][:n]
                    x2 = image[first[t + 2] + segments[s] :][:n]
                    x3 = image[first[t + 3] + segments[s] :][:n]
                    part = out[s * n :][:n]
                    for q in range(n):
                        part[q] += (d0 * x0[q] + d1 * x1[q]) + (d2 * x2[q] + d3 * x3[q])


def _derivative(weight, start, value, count, padding, segments, n, x):  # type: ignore[no-untyped-def]
    """Write the derivative in images x [b, H, W, C]: the sum of the weights [O, K] of the outputs that have one."""
    height = x.shape[1]
    line = x.shape[2] * x.shape[3]
    margin = padding[1] * x.shape[3]
    wide = line + 2 * margin
    image = np.empty((height + 2 * padding[0]) * wide, x.dtype)

    # A weight that is not finite makes every derivative NaN.
    flaw = x.dtype.type(0)
    for o in range(weight.shape[0]):
        for q in range(weight.shape[1]):
            flaw += weight[o, q] * 0

    for b in range(x.shape[0]):
        # Two patches at a time, of the upper and the lower half: they hardly ever overlap, so that numbers of both
        # can be added to at once.
        image[:] = flaw
        for o in range(weight.shape[0]):
            first = start[b, o]
            d = value[b, o]
            half = (count[b, o] + 1) // 2
            for t in range(half):
                d0 = d[t]
                d1 = d[t + half]
                for s in range(len(segments)):
                    x0 = image[first[t] + segments[s] :][:n]
                    x1 = image[first[t + half] + segments[s] :][:n]
                    part = weight[o, s * n :][:n]
                    for q in range(n):
                        x0[q] += d0 * part[q]
                        x1[q] += d1 * part[q]

        for h in range(height):
            x[b, h].reshape(line)[:] = image[(h + padding[0]) * wide + margin :][:line]
