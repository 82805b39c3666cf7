"""Gradients of one captured layer: its inputs cut into patches, its derivatives into positions.

Over the positions t of its output (one for a plain vector, one a pixel for an image, whose input is cut into
patches u), an example's gradient of a layer's weight is G = sum_t u_t delta_t^T. Its norm comes either from G,
written out for every example and then summed by one product with the clip coefficients, or from the Gram matrices,
|G|^2 = sum_ts (u_t . u_s)(delta_t . delta_s) (Li et al. 2022), where that is cheaper: in linear layers and late
convolutions. The terms of that sum may cancel: see `Outer.bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.gradients.protocol import ROUNDINGS, Parameter, floor, row_chunks, upper
from flower_privdec.gradients.rows import Piece, Stored, masked

_WRITE_COST = 8  # writing an element of a gradient and reading it again costs about 8 multiplications
_PATCH_BYTES = 2**21  # patches cut at once
_WIDE = 8  # from so many channels on, patches are cut from channels-last images


@dataclass(frozen=True)
class Outer:
    """Gradients of one weight as factors: example b's is sum_t u[b, t] (outer) delta[b, t].

    Attributes:
        place: where the weight lies.
        u: inputs [b, T, K].
        delta: derivatives in the outputs [b, T, O].
        order: turns a gradient [O, K] into the weight's shape; None where it has it.
    """

    place: Parameter
    u: Tensor
    delta: Tensor
    order: Callable[[Tensor], Tensor] | None

    def bound(self) -> Tensor:
        """See Piece.

        With S = sum_t |u_t| |delta_t|, by which the terms can cancel, the bound is

            sqrt(max(Gram sum, 0) + g S^2) + h S + floor(K) sum_t |delta_t| + floor(O) sum_t |u_t|.

        The Gram matrices are float64, where T x T products of dot products of lengths K and O sum up to at most g S^2
        too little, g = (K + O + T^2 + 16) 2^-53. What is added is rounded to the number type of u and delta: h S,
        h = (b T + 2) u, is what the terms of one example can err in the product over all b T. The floors stand for
        what underflows there.
        """
        (b, t), dtype = self.u.shape[:2], self.u.dtype
        if t == 1:
            return upper(self.u[:, 0]) * upper(self.delta[:, 0])
        (us, u), (deltas, delta) = _gram(self.u), _gram(self.delta)
        size = (u * delta).sum(1)
        double, own = torch.finfo(torch.float64).eps / 2, torch.finfo(dtype).eps / 2
        k, o = self.u.shape[2], self.delta.shape[2]
        exact = (us * deltas).sum((1, 2)).clamp_(min=0) + (k + o + t * t + 16) * double * size.square()
        hidden = floor(self.u, k) * delta.sum(1) + floor(self.u, o) * u.sum(1)
        return ((exact.sqrt_() + (b * t + 2) * own * size + hidden) * (1 + ROUNDINGS * own)).to(dtype)

    def without(self, bad: Tensor) -> Outer:
        """See Piece."""
        return replace(self, u=masked(self.u, bad), delta=masked(self.delta, bad))

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """See Piece."""
        scaled = (self.delta * coefficient[:, None, None]).flatten(0, 1)
        if self.order is None:
            self.place.view(total).addmm_(scaled.t(), self.u.flatten(0, 1))
        else:
            self.place.view(total).add_(self.order(scaled.t() @ self.u.flatten(0, 1)))


def _gram(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products [b, T, T] of vectors [b, T, n] with each other and their norms [b, T], in float64."""
    double = vectors.double()
    gram = double @ double.transpose(1, 2)
    return gram, gram.diagonal(dim1=1, dim2=2).sqrt() + floor(vectors, vectors.shape[2])


def is_supported(layer: nn.Module) -> bool:
    """Return whether a layer's gradients can be taken from its inputs and the derivatives in its outputs."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return type(layer) in (nn.Linear, nn.GroupNorm)


def weight_pieces(layer: nn.Module, place: Parameter, xs: list[Tensor], deltas: list[Tensor]) -> list[Piece]:
    """Return the gradients of a layer's weight; one input and one derivative for each call of the layer."""
    if isinstance(layer, nn.GroupNorm):
        normal = [functional.group_norm(x, layer.num_groups, eps=layer.eps) for x in xs]
        sums = [_sum_positions(delta * x) for x, delta in zip(normal, deltas, strict=True)]
        return [Stored(place, _sum(sums))]
    deltas = [_flat(layer, delta) for delta in deltas]
    t, o = sum(delta.shape[1] for delta in deltas), deltas[0].shape[2]
    k = math.prod(place.shape[1:])
    if t * t * (k + o) <= _WRITE_COST * k * o:
        return [Outer(place, _join([_patches(layer, x) for x in xs]), _join(deltas), _order(layer))]
    if isinstance(layer, nn.Conv2d) and layer.in_channels >= _WIDE:
        lines = [_line_gradients(layer, x, delta) for x, delta in zip(xs, deltas, strict=True)]
        return [Stored(place, _sum(same), _line_of(line)) for line, same in enumerate(zip(*lines, strict=True))]
    written = [_gradients(layer, k, x, delta) for x, delta in zip(xs, deltas, strict=True)]
    return [Stored(place, _sum(written), lambda weight: weight.flatten(1).t())]


def _gradients(layer: nn.Module, k: int, x: Tensor, delta: Tensor) -> Tensor:
    """Write out gradients [b, K, O], cutting patches for some examples at a time."""
    b, t, o = delta.shape
    out = delta.new_empty(b, k, o)
    for part in row_chunks(b, t * k * delta.element_size(), _PATCH_BYTES):
        torch.bmm(_patches(layer, x[part]).transpose(1, 2), delta[part], out=out[part])
    return out


def _line_gradients(layer: nn.Conv2d, x: Tensor, delta: Tensor) -> list[Tensor]:
    """Write out gradients [b, columns, C, O] for each line of the kernel, cutting patches as _gradients does."""
    (b, t, o), c, (lines, columns) = delta.shape, layer.in_channels, layer.kernel_size
    out = [delta.new_empty(b, columns * c, o) for _ in range(lines)]
    for part in row_chunks(b, t * columns * c * delta.element_size(), _PATCH_BYTES):
        for line, patches in zip(out, _line_patches(layer, x[part]), strict=True):
            torch.bmm(patches.transpose(1, 2), delta[part], out=line[part])
    return [line.view(b, columns, c, o) for line in out]


def _line_of(line: int) -> Callable[[Tensor], Tensor]:
    """View a line of a kernel's weight as [columns, C, O]."""
    return lambda weight: weight[:, :, line].permute(2, 1, 0)


def bias_piece(layer: nn.Module, place: Parameter, deltas: list[Tensor]) -> Piece:
    """Return the gradients of a layer's bias."""
    last = isinstance(layer, nn.Linear)
    sums = [delta.flatten(1, -2).sum(1) if last and delta.ndim > 2 else _sum_positions(delta) for delta in deltas]
    return Stored(place, _sum(sums))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _flat(layer: nn.Module, delta: Tensor) -> Tensor:
    """Lay out derivatives as [b, T, O]."""
    if isinstance(layer, nn.Conv2d):
        delta = delta.permute(0, 2, 3, 1)
    return delta.reshape(delta.shape[0], -1, delta.shape[-1])


def _sum_positions(delta: Tensor) -> Tensor:
    """Sum [b, C, ...] over everything after the channels."""
    return delta if delta.ndim == 2 else delta.sum(tuple(range(2, delta.ndim)))


def _order(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a gradient [O, K] becomes the weight's shape; K runs as in _patches."""
    if not isinstance(layer, nn.Conv2d):
        return None
    o, c, *kernel = layer.weight.shape
    if c >= _WIDE:
        return lambda g: g.reshape(o, *kernel, c).permute(0, 3, 1, 2)
    return lambda g: g.reshape(o, c, *kernel)


def _patches(layer: nn.Module, x: Tensor) -> Tensor:
    """Cut images into patches [b, T, K]; the inputs of a linear layer are patches as they are."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(x.shape[0], -1, x.shape[-1])
    if layer.in_channels >= _WIDE:
        return torch.cat(_line_patches(layer, x), 2)
    x = functional.pad(x, _padding(layer)).contiguous()
    (b, c), (kh, kw), (dh, dw), (sh, sw) = x.shape[:2], layer.kernel_size, layer.dilation, layer.stride
    (oh, ow), (s0, s1, s2, s3) = _positions(layer, x), x.stride()
    windows = x.as_strided((b, c, kh, kw, oh, ow), (s0, s1, dh * s2, dw * s3, sh * s2, sw * s3))
    return windows.reshape(b, c * kh * kw, oh * ow).transpose(1, 2)


def _line_patches(layer: nn.Conv2d, x: Tensor) -> list[Tensor]:
    """Cut images into patches of one line of the kernel, [b, T, columns * C], for each of its lines.

    Patches of a line lie in those of the whole image as they are where the stride is 1, so they are copied once.
    """
    x = functional.pad(x, _padding(layer)).contiguous(memory_format=torch.channels_last)
    (b, c, h, _), (kh, kw), (dh, dw), (sh, sw) = x.shape, layer.kernel_size, layer.dilation, layer.stride
    (oh, ow), (s0, s1, s2, s3) = _positions(layer, x), x.stride()
    rows = x.as_strided((b, h, ow, kw, c), (s0, s2, sw * s3, dw * s3, s1)).flatten(3).contiguous()
    return [rows[:, line * dh :: sh][:, :oh].reshape(b, oh * ow, kw * c) for line in range(kh)]


def _positions(layer: nn.Conv2d, x: Tensor) -> list[int]:
    """Return the height and width of a layer's output for padded images."""
    sizes = zip(x.shape[2:], layer.dilation, layer.kernel_size, layer.stride, strict=True)
    return [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, dilation, kernel, stride in sizes]


def _padding(layer: nn.Conv2d) -> list[int]:
    """The layer's padding as functional.pad takes it: left, right, top, bottom."""
    pads: list[int] = []
    for axis in (1, 0):
        if isinstance(layer.padding, str):
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1) if layer.padding == "same" else 0
            pads += [total // 2, total - total // 2]
        else:
            pads += [layer.padding[axis]] * 2
    return pads
