"""Gradients of one captured layer: its inputs cut into patches, its derivatives into positions.

Over the positions t of its output (one for a plain vector, one a pixel for an image, whose input is cut into
patches u), an example's gradient of a layer's weight is G = sum_t u_t delta_t^T. Its norm comes either from G,
written out for every example and then summed by one product with the clip coefficients, or from the Gram matrices,
|G|^2 = sum_ts (u_t . u_s)(delta_t . delta_s) (Li et al. 2022), where that is cheaper: in linear layers and late
convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.gradients.base import Parameter, row_chunks
from flower_privdec.gradients.rows import Piece, Stored, squares

_WRITE_COST = 8  # writing an element of a gradient and reading it again costs about 8 multiplications
_CACHED_BYTES = 2**19  # patches cut at once
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

    def squared(self) -> Tensor:
        """See Piece."""
        if self.u.shape[1] == 1:
            return squares(self.u[:, 0]) * squares(self.delta[:, 0])
        gram = torch.bmm(self.u, self.u.transpose(1, 2))
        gram *= torch.bmm(self.delta, self.delta.transpose(1, 2))
        return gram.sum((1, 2)).clamp_(min=0)

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """See Piece."""
        scaled = (self.delta * coefficient[:, None, None]).flatten(0, 1)
        if self.order is None:
            self.place.view(total).addmm_(scaled.t(), self.u.flatten(0, 1))
        else:
            self.place.view(total).add_(self.order(scaled.t() @ self.u.flatten(0, 1)))


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
    deltas = [_flat(layer, delta) for delta in deltas]
    windows = [_windows(layer, x) if isinstance(layer, nn.Conv2d) else x for x in xs]
    t, o = sum(delta.shape[1] for delta in deltas), deltas[0].shape[2]
    k, order = math.prod(place.shape[1:]), _order(layer)
    if t * t * (k + o) <= _WRITE_COST * k * o:
        return Outer(place, _join([_patches(layer, x) for x in windows]), _join(deltas), order)
    written = _written(layer, windows[0], deltas[0], k)
    for x, delta in zip(windows[1:], deltas[1:], strict=True):
        written += _written(layer, x, delta, k)
    return Stored(place, written, lambda g: g.t() if order is None else order(g.t()))


def _written(layer: nn.Module, windows: Tensor, delta: Tensor, k: int) -> Tensor:
    """Write out gradients [b, K, O], cutting patches for as many examples at a time as stay in the cache."""
    b, t, o = delta.shape
    out = delta.new_empty(b, k, o)
    for part in row_chunks(b, t * k * delta.element_size(), _CACHED_BYTES):
        torch.bmm(_patches(layer, windows[part]).transpose(1, 2), delta[part], out=out[part])
    return out


def bias_piece(layer: nn.Module, place: Parameter, deltas: list[Tensor]) -> Piece:
    """Return the gradients of a layer's bias."""
    last = isinstance(layer, nn.Linear)
    sums = [delta.flatten(1, -2).sum(1) if last and delta.ndim > 2 else _sum_positions(delta) for delta in deltas]
    return Stored(place, sums[0] if len(sums) == 1 else torch.stack(sums).sum(0))


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


def _windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """View padded images [b, C, H, W] as overlapping windows: [b, T.., rows, columns, C], or channels first."""
    wide = x.shape[1] >= _WIDE
    x = functional.pad(x, _padding(layer))
    x = x.contiguous(memory_format=torch.channels_last if wide else torch.contiguous_format)
    (b, c), (kh, kw), (dh, dw), (sh, sw) = x.shape[:2], layer.kernel_size, layer.dilation, layer.stride
    oh, ow = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
    s0, s1, s2, s3 = x.stride()
    if wide:
        return x.as_strided((b, oh, ow, kh, kw, c), (s0, sh * s2, sw * s3, dh * s2, dw * s3, s1))
    return x.as_strided((b, c, kh, kw, oh, ow), (s0, s1, dh * s2, dw * s3, sh * s2, sw * s3))


def _patches(layer: nn.Module, windows: Tensor) -> Tensor:
    """Copy windows into patches [b, T, K]; the inputs of a linear layer are patches as they are."""
    b = windows.shape[0]
    if not isinstance(layer, nn.Conv2d):
        return windows.reshape(b, -1, windows.shape[-1])
    if layer.in_channels >= _WIDE:
        return windows.reshape(b, windows.shape[1] * windows.shape[2], -1)
    return windows.reshape(b, windows.shape[1] * windows.shape[2] * windows.shape[3], -1).transpose(1, 2)


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
