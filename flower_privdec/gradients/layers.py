"""Gradients of one captured layer: its inputs cut into patches, its derivatives into positions.

Over the positions t of its output (one for a plain vector, one a pixel for an image, whose input is cut into patches
u), an example's gradient of a layer's weight is G = sum_t u_t delta_t^T. Its norm comes either from G, written out
for every example and then summed by one product with the clip coefficients, or from the Gram matrices,
|G|^2 = sum_ts (u_t . u_s)(delta_t . delta_s) (Li et al. 2022), where that is cheaper: in linear layers and late
convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.gradients.base import Parameter
from flower_privdec.gradients.rows import Piece, Stored

_WRITE_COST = 8  # writing an element of a gradient and reading it again costs about 8 multiplications
_WIDE = 8  # from so many channels on, patches are cut from channels-last images


@dataclass(frozen=True)
class Outer:
    """Gradients of one weight as factors: example b's is sum_t u[b, t] (outer) delta[b, t].

    Attributes:
        place: where the weight lies.
        u: inputs [b, T, K].
        delta: derivatives in the outputs [b, T, O].
        order: turns a gradient [K, O] into the weight's shape.
    """

    place: Parameter
    u: Tensor
    delta: Tensor
    order: Callable[[Tensor], Tensor]

    def squared(self) -> Tensor:
        """See Piece."""
        if self.u.shape[1] == 1:
            u, delta = self.u[:, 0], self.delta[:, 0]
            return torch.linalg.vecdot(u, u) * torch.linalg.vecdot(delta, delta)
        gram = torch.bmm(self.u, self.u.transpose(1, 2))
        gram *= torch.bmm(self.delta, self.delta.transpose(1, 2))
        return gram.sum((1, 2)).clamp_(min=0)

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """See Piece."""
        scaled = (self.delta * coefficient[:, None, None]).flatten(0, 1)
        self.place.view(total).add_(self.order(self.u.flatten(0, 1).t() @ scaled))

    def cheapest(self) -> Piece:
        """Return the gradients in the form, factors or written out, that costs less."""
        _, t, k = self.u.shape
        o = self.delta.shape[2]
        if t * t * (k + o) <= _WRITE_COST * k * o:
            return self
        return Stored(self.place, torch.bmm(self.u.transpose(1, 2), self.delta), self.order)


def is_supported(layer: nn.Module) -> bool:
    """Return whether a layer's gradients can be taken from its inputs and the derivatives in its outputs."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    return type(layer) in (nn.Linear, nn.GroupNorm)


def weight_piece(layer: nn.Module, place: Parameter, xs: list[Tensor], deltas: list[Tensor]) -> Piece:
    """Return the gradients of a layer's weight; one input and one derivative for each call of the layer."""
    if isinstance(layer, nn.GroupNorm):
        normal = [functional.group_norm(x, layer.num_groups, eps=layer.eps) for x in xs]
        sums = [_sum_positions(delta * x) for x, delta in zip(normal, deltas, strict=True)]
        return Stored(place, torch.stack(sums).sum(0))
    if isinstance(layer, nn.Conv2d):
        u, delta = [_patches(layer, x) for x in xs], [delta.permute(0, 2, 3, 1) for delta in deltas]
    else:
        u, delta = xs, deltas
    return Outer(place, _join(u), _join(delta), _order(layer)).cheapest()


def bias_piece(layer: nn.Module, place: Parameter, deltas: list[Tensor]) -> Piece:
    """Return the gradients of a layer's bias."""
    last = isinstance(layer, nn.Linear)
    sums = [
        delta.flatten(1, -2).sum(1) if last and delta.ndim > 2 else _sum_positions(delta) for delta in deltas
    ]
    return Stored(place, sums[0] if len(sums) == 1 else torch.stack(sums).sum(0))


def _join(parts: list[Tensor]) -> Tensor:
    """Join [b, ..., K] along their positions: [b, T, K]."""
    flat = [part.reshape(part.shape[0], -1, part.shape[-1]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _sum_positions(delta: Tensor) -> Tensor:
    """Sum [b, C, ...] over everything after the channels."""
    return delta if delta.ndim == 2 else delta.sum(tuple(range(2, delta.ndim)))


def _order(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """How a gradient [K, O] becomes the weight's shape; K runs as in _patches."""
    if not isinstance(layer, nn.Conv2d):
        return torch.t
    shape = layer.weight.shape
    if shape[1] >= _WIDE:
        return lambda g: g.view(*shape[2:], shape[1], shape[0]).permute(3, 2, 0, 1)
    return lambda g: g.t().reshape(shape)


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Cut images [b, C, H, W] into patches [b, T, K]: K runs over rows, columns, channels, or channels first."""
    x = functional.pad(x, _padding(layer)).contiguous(
        memory_format=torch.channels_last if x.shape[1] >= _WIDE else torch.contiguous_format
    )
    (b, c), (kh, kw), (dh, dw) = x.shape[:2], layer.kernel_size, layer.dilation
    sh, sw = layer.stride
    oh, ow = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
    s0, s1, s2, s3 = x.stride()
    if c >= _WIDE:
        sizes, strides = (b, oh, ow, kh, kw, c), (s0, sh * s2, sw * s3, dh * s2, dw * s3, s1)
        return x.as_strided(sizes, strides).reshape(b, oh * ow, kh * kw * c)
    sizes, strides = (b, c, kh, kw, oh, ow), (s0, s1, dh * s2, dw * s3, sh * s2, sw * s3)
    return x.as_strided(sizes, strides).reshape(b, c * kh * kw, oh * ow).transpose(1, 2)


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
