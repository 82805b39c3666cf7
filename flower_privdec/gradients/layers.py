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
    """Gradients of one weight in factors: example b's is sum_t u[b, t] (outer) delta[b, t].

    Attributes:
        place: of the weight in a row.
        u: inputs [b, T, K].
        delta: derivatives in the outputs [b, T, O].
        order: gives a gradient [O, K] the weight's shape; None where it has that shape.
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
        too little, g = (K + O + T^2 + 16) 2^-53. What is added is rounded to the type of u and delta: the terms of
        one example err by at most h S, h = (b T + 2) u, in the product over all b T. The floors bound its underflows.
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
    """Return whether a layer's gradients follow from its inputs and the derivatives in its outputs."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return type(layer) in (nn.Linear, nn.GroupNorm)


def weight_pieces(layer: nn.Module, place: Parameter, xs: list[Tensor], deltas: list[Tensor]) -> list[Piece]:
    """Return the gradients of a layer's weight, from an input and a derivative for each call of the layer."""
    if isinstance(layer, nn.GroupNorm):
        normal = [functional.group_norm(x, layer.num_groups, eps=layer.eps) for x in xs]
        sums = [_sum_positions(delta * x) for x, delta in zip(normal, deltas, strict=True)]
        return [Stored(place, _sum(sums))]
    deltas = [_flat(layer, delta) for delta in deltas]
    t, o = sum(delta.shape[1] for delta in deltas), deltas[0].shape[2]
    k = math.prod(place.shape[1:])
    if t * t * (k + o) <= _WRITE_COST * k * o:
        patches = [_joined(_patches(layer, x), 2) for x in xs]
        return [Outer(place, _joined(patches, 1), _joined(deltas, 1), _order(layer))]
    calls = [_gradients(layer, k, x, delta) for x, delta in zip(xs, deltas, strict=True)]
    lines = [_sum(same) for same in zip(*calls, strict=True)]
    if not _is_wide(layer):
        return [Stored(place, lines[0], lambda weight: weight.flatten(1).t())]
    c = place.shape[1]  # a line of the kernel's weight is [columns, C, O]
    return [
        Stored(place, line.unflatten(1, (-1, c)), lambda weight, i=i: weight[:, :, i].permute(2, 1, 0))  # type: ignore[misc]
        for i, line in enumerate(lines)
    ]


def _is_wide(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.in_channels >= _WIDE


def _gradients(layer: nn.Module, k: int, x: Tensor, delta: Tensor) -> list[Tensor]:
    """Compute gradients [b, K, O], of wide images for each line of the kernel, some examples at a time."""
    lines = int(layer.kernel_size[0]) if isinstance(layer, nn.Conv2d) and _is_wide(layer) else 1
    (b, t, o), k = delta.shape, k // lines
    out = [delta.new_empty(b, k, o) for _ in range(lines)]
    for part in row_chunks(b, t * k * delta.element_size(), _PATCH_BYTES):
        for line, patches in zip(out, _patches(layer, x[part]), strict=True):
            torch.bmm(patches.transpose(1, 2), delta[part], out=line[part])
    return out


def bias_piece(layer: nn.Module, place: Parameter, deltas: list[Tensor]) -> Piece:
    """Return the gradients of a layer's bias."""
    last = isinstance(layer, nn.Linear)
    sums = [delta.flatten(1, -2).sum(1) if last and delta.ndim > 2 else _sum_positions(delta) for delta in deltas]
    return Stored(place, _sum(sums))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _flat(layer: nn.Module, delta: Tensor) -> Tensor:
    """Lay out derivatives as [b, T, O]."""
    if isinstance(layer, nn.Conv2d):
        delta = delta.permute(0, 2, 3, 1)
    return delta.reshape(delta.shape[0], -1, delta.shape[-1])


def _sum_positions(delta: Tensor) -> Tensor:
    """Sum [b, C, ...] over everything after the channels."""
    return delta if delta.ndim == 2 else delta.sum(tuple(range(2, delta.ndim)))


def _order(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the function that gives a gradient [O, K], K ordered as in _patches, the weight's shape."""
    if not isinstance(layer, nn.Conv2d):
        return None
    o, c, *kernel = layer.weight.shape
    if _is_wide(layer):
        return lambda g: g.reshape(o, *kernel, c).permute(0, 3, 1, 2)
    return lambda g: g.reshape(o, c, *kernel)


def _patches(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Cut images into patches [b, T, K], wide ones into those of each line of the kernel, [b, T, columns * C].

    The inputs of a linear layer are its patches. Where the stride is 1 the patches of a line are parts of those of the
    whole image, so they are copied once.
    """
    if not isinstance(layer, nn.Conv2d):
        return [x.reshape(x.shape[0], -1, x.shape[-1])]
    wide = _is_wide(layer)
    x = functional.pad(x, _padding(layer)).contiguous(
        memory_format=torch.channels_last if wide else torch.contiguous_format
    )
    (b, c, h, _), (kh, kw), (dh, dw), (sh, sw) = x.shape, layer.kernel_size, layer.dilation, layer.stride
    sizes = zip(x.shape[2:], layer.dilation, layer.kernel_size, layer.stride, strict=True)
    oh, ow = ((size - dilation * (kernel - 1) - 1) // stride + 1 for size, dilation, kernel, stride in sizes)
    s0, s1, s2, s3 = x.stride()
    if wide:
        rows = x.as_strided((b, h, ow, kw, c), (s0, s2, sw * s3, dw * s3, s1)).flatten(3).contiguous()
        return [rows[:, line * dh :: sh][:, :oh].reshape(b, oh * ow, kw * c) for line in range(kh)]
    windows = x.as_strided((b, c, kh, kw, oh, ow), (s0, s1, dh * s2, dw * s3, sh * s2, sw * s3))
    return [windows.reshape(b, c * kh * kw, oh * ow).transpose(1, 2)]


def _padding(layer: nn.Conv2d) -> list[int]:
    """Return the layer's padding as functional.pad takes it: left, right, top, bottom."""
    pads: list[int] = []
    for axis in (1, 0):
        if isinstance(layer.padding, str):
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1) if layer.padding == "same" else 0
            pads += [total // 2, total - total // 2]
        else:
            pads += [layer.padding[axis]] * 2
    return pads
