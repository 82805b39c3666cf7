"""Gradients of modules made of linear layers, convolutions, norms and embeddings: one backward pass for a batch.

Each call of a layer is captured as its input and the derivative in its output (by `Chain` if the module is a plain
chain of layers, else by hooks and autograd), from which every example's gradient or norm follows. Only for modules that
are proved to keep examples apart (`proof`).

Over the positions t of a layer's output (one for a plain vector, one a pixel for an image, whose input is cut into
patches u), an example's gradient of the layer's weight is G = sum_t u_t delta_t^T. Its norm comes either from G,
computed for every example and then summed by one product with the clip coefficients, or from the Gram matrices,
|G|^2 = sum_ts (u_t . u_s)(delta_t . delta_s) (Li et al. 2022), if that is cheaper: in linear layers and late
convolutions. The terms of that sum may cancel: see `Outer.bound`.

From a batch to a sum: `FactoredKernel._calls` captures the calls, `weight_pieces` turns those of one layer into pieces
(`Outer`, `LookedUp`, `Stored`), and `RowKernel._add_` asks each piece for its bound and adds it, clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from flower_privdec.gradients.chain import parse_chain
from flower_privdec.gradients.pieces import LookedUp, Outer
from flower_privdec.gradients.pooling import Listed, PooledConvolution, Pooling, is_square, pooled, unpooled
from flower_privdec.gradients.protocol import (
    Parameter,
    Piece,
    RowKernel,
    Stored,
    masked,
    row_chunks,
    unknown_tokens,
)
from flower_privdec.tasks.losses import Loss

_aten = torch.ops.aten
_CACHED_BYTES = 2**24  # of inputs and activations that are computed at once, so that they stay in the cache
_GRAPH = 3  # tensors that the backward pass holds for each captured one


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its input and the derivative in its output."""

    name: str
    layer: nn.Module
    x: Tensor
    delta: Tensor


@dataclass(frozen=True)
class PooledCall:
    """The call of a convolution before a pooling: its input and the derivatives in its output that are not zero."""

    name: str
    layer: PooledConvolution
    x: Tensor
    delta: Listed


Call = LayerCall | PooledCall
Link = nn.Module | PooledConvolution


class Chain:
    """Conv2d, Linear, ReLU, Tanh, MaxPool2d and Flatten, one after the other."""

    def __init__(self, steps: list[tuple[str, nn.Module]], trained_layers: Collection[str]) -> None:
        """Take the layers, with the names of those that are trained."""
        self._steps = _linked(_pool_first(steps))
        self._first = next(i for i, (name, _) in enumerate(self._steps) if name in trained_layers)
        self._trained = trained_layers

    def calls(self, x: Tensor, derivative: Callable[[Tensor], Tensor]) -> list[Call]:
        """Return the calls of the layers that are trained, from the last to the first.

        Args:
            x: inputs [b, *shape].
            derivative: turns the outputs into the derivatives of the losses in them.
        """
        values = [x]  # values[i] is the input of layer i
        poolings: dict[int, Pooling] = {}
        for i, (_, layer) in enumerate(self._steps):
            values.append(self._forward(i, layer, values[-1], poolings))

        # Back to the first layer that is trained: no derivative is needed below it.
        delta = derivative(values[-1])
        calls: list[Call] = []
        for i in range(len(self._steps) - 1, self._first - 1, -1):
            name, layer = self._steps[i]
            if isinstance(layer, PooledConvolution):
                if layer.is_listed(poolings[i]):
                    listed = layer.listed(values[i], delta, poolings[i])
                    if name in self._trained:
                        calls.append(PooledCall(name, layer, values[i], listed))
                    if i > self._first:
                        delta = layer.derivative(values[i], listed)
                    continue
                delta = layer.dense(delta, values[i + 1], poolings[i])
                layer = layer.conv

            if name in self._trained:
                calls.append(LayerCall(name, layer, values[i], delta))
            if i > self._first:
                delta = _backward(layer, delta, values[i], values[i + 1], poolings.get(i))
        return calls

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of the last layer for inputs [b, *shape]."""
        for i, (_, layer) in enumerate(self._steps):
            if isinstance(layer, nn.MaxPool2d):
                x = layer(x)  # without the places of the largest inputs, which only a backward pass reads
            elif isinstance(layer, PooledConvolution):
                x = layer.outputs(x)
            else:
                x = self._forward(i, layer, x, {})
        return x

    def _forward(self, i: int, layer: Link, x: Tensor, poolings: dict[int, Pooling]) -> Tensor:
        y: Tensor

        # Layers that are pooled, whose places the backward pass needs.
        if isinstance(layer, PooledConvolution):
            y, poolings[i] = layer.forward(x)
        elif isinstance(layer, nn.MaxPool2d):
            y, poolings[i] = pooled(layer, x)

        # Layers with weights, and those that move numbers.
        elif isinstance(layer, nn.Conv2d):
            y = functional.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation)
        elif isinstance(layer, nn.Linear):
            y = functional.linear(x, layer.weight, layer.bias)
        elif isinstance(layer, nn.Flatten):
            y = x.flatten(1)

        # An activation is computed in place of an output that no backward pass reads.
        else:
            target = x if self._is_free(i) else x.clone()
            if isinstance(layer, nn.ReLU):
                y = target.relu_()
            else:
                y = target.tanh_()
        return y

    def _is_free(self, i: int) -> bool:
        """Return whether no backward pass reads the input of step i, so that it may be overwritten."""
        if i == 0:
            return False
        before = self._steps[i - 1][1]
        if isinstance(before, PooledConvolution):
            return not before.rectified
        return type(before) in (nn.Conv2d, nn.Linear, nn.MaxPool2d)


def _linked(steps: list[tuple[str, nn.Module]]) -> list[tuple[str, Link]]:
    """Join convolutions with the poolings of two by two behind them, and with a ReLU behind these."""
    links: list[tuple[str, Link]] = []
    for name, layer in steps:
        last_name, last = links[-1] if links else ("", None)
        if isinstance(last, nn.Conv2d) and isinstance(layer, nn.MaxPool2d) and is_square(layer):
            links[-1] = (last_name, PooledConvolution(last, layer, rectified=False))
        elif isinstance(last, PooledConvolution) and isinstance(layer, nn.ReLU) and not last.rectified:
            links[-1] = (last_name, replace(last, rectified=True))
        else:
            links.append((name, layer))
    return links


def _pool_first(steps: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Move max pooling before activations, which never fall: the same outputs from fewer activations."""
    ordered: list[tuple[str, nn.Module]] = []
    for step in steps:
        place = len(ordered)
        while type(step[1]) is nn.MaxPool2d and place and type(ordered[place - 1][1]) in (nn.ReLU, nn.Tanh):
            place -= 1
        if type(step[1]) is not nn.Identity:
            ordered.insert(place, step)
    return ordered


def _backward(layer: nn.Module, delta: Tensor, x: Tensor, y: Tensor, pooling: Pooling | None) -> Tensor:
    """Return the derivative in a layer's input; activations change delta in place."""
    result: Tensor

    # Layers with weights, and those that move numbers.
    if isinstance(layer, nn.MaxPool2d) and pooling is not None:
        result = unpooled(layer, delta, pooling)
    elif isinstance(layer, nn.Conv2d):
        sizes = (list(layer.stride), list(layer.padding), list(layer.dilation), False, [0, 0], 1)
        result = _aten.convolution_backward(delta, x, layer.weight, None, *sizes, [True, False, False])[0]
    elif isinstance(layer, nn.Linear):
        result = delta @ layer.weight
    elif isinstance(layer, nn.Flatten):
        is_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if is_last else torch.contiguous_format
        result = delta.reshape(x.shape).contiguous(memory_format=layout)

    # Activations: from their output, which is what was kept.
    elif isinstance(layer, nn.ReLU):
        result = _aten.threshold_backward.grad_input(delta, y, 0.0, grad_input=delta)
    else:
        result = _aten.tanh_backward.grad_input(delta, y, grad_input=delta)
    return result


class FactoredKernel(RowKernel):
    """The kernel for modules that are proved to keep examples apart; see GradientKernel.

    It runs the graph of the proof, or the chain of layers, never the user's forward.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: fx.GraphModule,
        loss: Loss,
        input_shape: Sequence[int],
        memory_bytes: int,
        n_tokens: int | None = None,
    ) -> None:
        """Take a module and its graph as `proof.prove` returns it; see there."""
        chained = parse_chain(module) is not None
        run = module if chained else graph
        super().__init__(module, run, loss, memory_bytes)
        self._input_shape = torch.Size(input_shape)
        self._n_tokens = n_tokens
        self._hooked: list[tuple[str, nn.Module, Tensor, Tensor]] = []  # name, layer, input and output
        self._images = any(isinstance(part, nn.Conv2d) for part in self._module.modules())

        steps = parse_chain(self._module)
        layers = {name.rpartition(".")[0] for name in self._layout}
        self._chain = None if steps is None else Chain(steps, layers)
        for name, part in self._module.named_modules():
            # What a layer has captured must not change afterwards.
            if getattr(part, "inplace", False):
                part.inplace = False
            if self._chain is None and name in layers:
                part.register_forward_hook(self._hook(name))
        self._example_numbers = self._count_numbers(next(module.parameters()))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                # The first layer has neither trained inputs nor parameters that ask for a gradient.
                if not output.requires_grad:
                    output = output.requires_grad_()
                self._hooked.append((name, layer, inputs[0].detach(), output))
            return output

        return record

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        calls = self._calls(point, x, y)

        # A layer may be called several times, and its gradient is the sum over its calls.
        pieces: list[Piece] = []
        for name in dict.fromkeys(call.name for call in calls):
            prefix = f"{name}." if name else ""
            weight = self._layout.get(f"{prefix}weight")
            bias = self._layout.get(f"{prefix}bias")
            same: list[LayerCall] = []
            for call in calls:
                if call.name != name:
                    continue
                if isinstance(call, PooledCall):
                    pieces += pooled_pieces(call, weight, bias)
                else:
                    same.append(call)
            if not same:
                continue

            layer = same[0].layer
            deltas = [call.delta for call in same]
            if weight is not None:
                pieces += weight_pieces(layer, weight, [call.x for call in same], deltas)
            if bias is not None:
                pieces.append(Stored(bias, _sum([_sum_positions(layer, delta) for delta in deltas])))
        return pieces

    def _calls(self, point: Tensor, x: Tensor, y: Tensor) -> list[Call]:
        if x.shape[1:] != self._input_shape:
            raise ValueError(f"examples of shape {list(x.shape[1:])} must be {list(self._input_shape)}")
        unknown = unknown_tokens(x, self._n_tokens)
        if unknown is not None:
            x = masked(x, unknown)

        def derivative(outputs: Tensor) -> Tensor:
            start = self._loss.derivative(outputs, y)
            if unknown is not None:
                start = masked(start, unknown, math.nan)  # such an example counts as zero
            return start

        if self._images and x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        if self._chain is not None:
            self._load(point)
            return self._chain.calls(x, derivative)

        try:
            with torch.enable_grad():
                outputs = self._outputs(point, x)
            hooked = list(self._hooked)
            start = derivative(outputs.detach())
            sources = [output for *_, output in hooked]
            deltas = torch.autograd.grad(outputs, sources, start, materialize_grads=True, allow_unused=True)
            calls: list[Call] = []
            for (name, layer, inputs, _), delta in zip(hooked, deltas, strict=True):
                calls.append(LayerCall(name, layer, inputs, delta))
            return calls
        finally:
            self._hooked.clear()

    def _outputs(self, row: Tensor, x: Tensor) -> Tensor:
        """Return the outputs at a row, with images in the layout that convolutions are fastest on."""
        if self._images and x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        if self._chain is None:
            return super()._outputs(row, x)
        self._load(row)
        return self._chain.outputs(x)

    def _logit_parts(self, examples: int, x: Tensor) -> list[slice]:
        return row_chunks(examples, self._example_numbers * x.element_size(), min(self._memory, _CACHED_BYTES))

    def _parts(self, examples: int, element_size: int) -> list[slice]:
        return row_chunks(examples, self._example_numbers * element_size, self._memory)

    @torch.no_grad()
    def _count_numbers(self, like: Tensor) -> int:
        """Return how many temporary numbers an example takes, measured with a pair of zeros."""
        self._module.to(like)
        point = like.new_zeros(self.d)
        x = like.new_zeros(2, *self._input_shape)
        if self._n_tokens is not None:
            x = x.long()
        y = self._loss.blank(self._outputs(point, x))
        pieces = self._pieces(point, x, y)
        calls = self._calls(point, x, y)
        self._release()

        captured = 0
        for call in calls:
            captured += call.x.numel()
            if isinstance(call, PooledCall):
                captured += call.delta.values.size
            else:
                captured += call.delta.numel()
        written = 0
        for piece in pieces:
            written += sum(part.numel() for part in vars(piece).values() if isinstance(part, Tensor))
        return (_GRAPH * captured + written) // 2


_WRITE_COST = 8  # writing an element of a gradient and reading it again costs about 8 multiplications
_PATCH_BYTES = 2**21  # patches cut at once
_WIDE = 8  # from so many channels on, patches are cut from channels-last images


NORMS = (nn.LayerNorm, nn.RMSNorm)


def is_supported(layer: nn.Module) -> bool:
    """Return whether a layer's gradients follow from its inputs and the derivatives in its outputs."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if type(layer) is nn.Embedding:
        return layer.max_norm is None and not layer.scale_grad_by_freq
    return type(layer) in (nn.Linear, nn.GroupNorm, *NORMS)


def weight_pieces(layer: nn.Module, place: Parameter, xs: list[Tensor], deltas: list[Tensor]) -> list[Piece]:
    """Return the gradients of a layer's weight, from an input and a derivative for each call of the layer."""
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm | nn.RMSNorm):
        if isinstance(layer, nn.GroupNorm):
            normal = [functional.group_norm(x, layer.num_groups, eps=layer.eps) for x in xs]
        else:
            norm: Any = functional.rms_norm
            if isinstance(layer, nn.LayerNorm):
                norm = functional.layer_norm
            normal = [norm(x, layer.normalized_shape, eps=layer.eps) for x in xs]
        products = [_sum_positions(layer, delta * x) for x, delta in zip(normal, deltas, strict=True)]
        return [Stored(place, _sum(products))]

    if isinstance(layer, nn.Embedding):
        tokens = _joined([x.flatten(1) for x in xs], 1)
        by_token = [delta.reshape(*x.flatten(1).shape, -1) for x, delta in zip(xs, deltas, strict=True)]
        delta = _joined(by_token, 1)
        padding = layer.padding_idx
        if padding is not None:  # which has no gradient
            delta = delta.masked_fill((tokens == padding).unsqueeze(2), 0)
        return [LookedUp(place, tokens, delta)]

    # Linear or Conv2d: keep the factors if Gram matrices are cheaper than writing out every gradient.
    deltas = [_flat(layer, delta) for delta in deltas]
    t = sum(delta.shape[1] for delta in deltas)
    o = deltas[0].shape[2]
    k = math.prod(place.shape[1:])
    if t * t * (k + o) <= _WRITE_COST * k * o:
        patches = [_joined(_patches(layer, x), 2) for x in xs]
        return [Outer(place, _joined(patches, 1), _joined(deltas, 1), _order(layer))]

    calls = [_gradients(layer, k, x, delta) for x, delta in zip(xs, deltas, strict=True)]
    lines = [_sum(same) for same in zip(*calls, strict=True)]
    if not _is_wide(layer):
        return [Stored(place, lines[0], lambda weight: weight.flatten(1).t())]

    # A line of the kernel's weight is [columns, C, O].
    c = place.shape[1]
    pieces: list[Piece] = []
    for i, line in enumerate(lines):
        part = partial(_line_of, i)
        pieces.append(Stored(place, line.unflatten(1, (-1, c)), part))
    return pieces


def pooled_pieces(call: PooledCall, weight: Parameter | None, bias: Parameter | None) -> list[Piece]:
    """Return the gradients of those of a convolution's parameters that are trained."""
    gradients, sums = call.layer.gradients(call.x, call.delta)
    pieces: list[Piece] = []
    if weight is not None:
        pieces.append(Stored(weight, gradients, _channels_last))
    if bias is not None:
        pieces.append(Stored(bias, sums))
    return pieces


def _channels_last(weight: Tensor) -> Tensor:
    """View a kernel's weight [O, C, lines, columns] as [O, lines, columns, C]."""
    return weight.permute(0, 2, 3, 1)


def _line_of(i: int, weight: Tensor) -> Tensor:
    """View line i of a kernel's weight [O, C, lines, columns] as [columns, C, O]."""
    return weight[:, :, i].permute(2, 1, 0)


def _is_wide(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.in_channels >= _WIDE


def _gradients(layer: nn.Module, k: int, x: Tensor, delta: Tensor) -> list[Tensor]:
    """Compute gradients [b, K, O], of wide images for each line of the kernel, some examples at a time."""
    lines = 1
    if isinstance(layer, nn.Conv2d) and _is_wide(layer):
        lines = int(layer.kernel_size[0])
    b, t, o = delta.shape
    k = k // lines
    out = [delta.new_empty(b, k, o) for _ in range(lines)]
    for part in row_chunks(b, t * k * delta.element_size(), _PATCH_BYTES):
        for line, patches in zip(out, _patches(layer, x[part]), strict=True):
            torch.bmm(patches.transpose(1, 2), delta[part], out=line[part])
    return out


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape; the tensor itself if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(list(parts)).sum(0)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Return tensors as one along an axis; the tensor itself if there is only one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis)


def _flat(layer: nn.Module, delta: Tensor) -> Tensor:
    """Lay out derivatives as [b, T, O]."""
    if isinstance(layer, nn.Conv2d):
        delta = delta.permute(0, 2, 3, 1)
    return delta.reshape(delta.shape[0], -1, delta.shape[-1])


def _sum_positions(layer: nn.Module, delta: Tensor) -> Tensor:
    """Sum [b, ...] over all axes but those of the layer's bias: the last ones, or of images the channels."""
    if isinstance(layer, (nn.Linear, *NORMS)):
        axes = 1 if isinstance(layer, nn.Linear) else len(layer.normalized_shape)
        if delta.ndim == axes + 1:
            return delta
        return delta.flatten(1, -axes - 1).sum(1)

    if delta.ndim == 2:
        return delta
    return delta.sum(tuple(range(2, delta.ndim)))


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

    The inputs of a linear layer are its patches. With a stride of 1 the patches of a line are parts of those of the
    whole image, so they are copied once.
    """
    if not isinstance(layer, nn.Conv2d):
        return [x.reshape(x.shape[0], -1, x.shape[-1])]

    wide = _is_wide(layer)
    memory_format = torch.channels_last if wide else torch.contiguous_format
    x = functional.pad(x, _padding(layer)).contiguous(memory_format=memory_format)
    b, c, h, w = x.shape
    kh, kw = layer.kernel_size
    dh, dw = layer.dilation
    sh, sw = layer.stride
    oh = (h - dh * (kh - 1) - 1) // sh + 1  # the height and width of the output
    ow = (w - dw * (kw - 1) - 1) // sw + 1

    # Patches overlap: views with strides of their own, which are then copied.
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
        if layer.padding == "same":
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            pads += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            pads += [0, 0]
        else:
            pads += [int(layer.padding[axis])] * 2
    return pads
