"""Forward and backward through a plain chain of layers without autograd, whose bookkeeping costs as much as a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_privdec.gradients.pooling import pooled, unpooled

_aten = torch.ops.aten


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: its input and the derivative in its output."""

    name: str
    layer: nn.Module
    x: Tensor
    delta: Tensor


class Chain:
    """Conv2d, Linear, ReLU, Tanh, MaxPool2d and Flatten, one after the other."""

    def __init__(self, steps: list[tuple[str, nn.Module]]) -> None:
        self._steps = _pool_first(steps)
        self._first = next(i for i, (_, layer) in enumerate(self._steps) if type(layer) in (nn.Conv2d, nn.Linear))

    def calls(self, x: Tensor, derivative: Callable[[Tensor], Tensor]) -> list[LayerCall]:
        """Return the calls of the layers with parameters, from the last to the first.

        Args:
            x: inputs [b, *shape].
            derivative: turns the outputs into the derivatives of the losses in them.
        """
        values = [x]
        indices: dict[int, Tensor] = {}
        for i, (_, layer) in enumerate(self._steps):
            values.append(self._forward(i, layer, values[-1], indices))
        delta, calls = derivative(values[-1]), []
        for i in range(len(self._steps) - 1, self._first - 1, -1):
            name, layer = self._steps[i]
            if type(layer) in (nn.Conv2d, nn.Linear):
                calls.append(LayerCall(name, layer, values[i], delta))
            if i > self._first:
                delta = _backward(layer, delta, values[i], values[i + 1], indices.get(i))
        return calls

    def outputs(self, x: Tensor) -> Tensor:
        """Return what the last layer puts out for inputs [b, *shape]."""
        for i, (_, layer) in enumerate(self._steps):
            x = layer(x) if isinstance(layer, nn.MaxPool2d) else self._forward(i, layer, x, {})
        return x

    def _forward(self, i: int, layer: nn.Module, x: Tensor, indices: dict[int, Tensor]) -> Tensor:
        y: Tensor
        if isinstance(layer, nn.MaxPool2d):
            y, indices[i] = pooled(layer, x)
        elif isinstance(layer, nn.Conv2d):
            y = functional.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation)
        elif isinstance(layer, nn.Linear):
            y = functional.linear(x, layer.weight, layer.bias)
        elif isinstance(layer, nn.Flatten):
            y = x.flatten(1)
        else:
            fresh = i > 0 and type(self._steps[i - 1][1]) in (nn.Conv2d, nn.Linear, nn.MaxPool2d)
            target = x if fresh else x.clone()
            y = target.relu_() if isinstance(layer, nn.ReLU) else target.tanh_()
        return y


def parse_chain(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]] | None:
    """Return the layers of (nested) Sequentials with their names, or None where one is of another kind."""
    if type(module) is not nn.Sequential:
        return [(prefix, module)] if _is_link(module) else None
    found: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():
        part = None if child is None else parse_chain(child, f"{prefix}.{name}" if prefix else name)
        if part is None:
            return None
        found += part
    return found


def _pool_first(steps: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Move max pooling before activations, which never fall: the same outputs from fewer activations."""
    found: list[tuple[str, nn.Module]] = []
    for step in steps:
        place = len(found)
        while type(step[1]) is nn.MaxPool2d and place and type(found[place - 1][1]) in (nn.ReLU, nn.Tanh):
            place -= 1
        if type(step[1]) is not nn.Identity:
            found.insert(place, step)
    return found


def _is_link(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        return not layer.return_indices
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in (nn.Linear, nn.ReLU, nn.Tanh, nn.Identity)


def _backward(layer: nn.Module, delta: Tensor, x: Tensor, y: Tensor, indices: Tensor | None) -> Tensor:
    """Return the derivative in a layer's input; activations change delta in place."""
    result: Tensor
    if isinstance(layer, nn.MaxPool2d) and indices is not None:
        result = unpooled(layer, delta, x, indices)
    elif isinstance(layer, nn.Conv2d):
        sizes = (list(layer.stride), list(layer.padding), list(layer.dilation), False, [0, 0], 1)
        result = _aten.convolution_backward(delta, x, layer.weight, None, *sizes, [True, False, False])[0]
    elif isinstance(layer, nn.Linear):
        result = delta @ layer.weight
    elif isinstance(layer, nn.Flatten):
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if last else torch.contiguous_format
        result = delta.reshape(x.shape).contiguous(memory_format=layout)
    elif isinstance(layer, nn.ReLU):
        result = _aten.threshold_backward.grad_input(delta, y, 0.0, grad_input=delta)
    else:
        result = _aten.tanh_backward.grad_input(delta, y, grad_input=delta)
    return result
