"""Gradients of modules made of Linear, Conv2d and GroupNorm layers: row by row, one backward pass for a batch.

Each call of a layer is caught as its input and the derivative in its output (by `chain` where the module is a
plain chain of layers, else by hooks and autograd), from which `layers` makes every example's gradient or norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_privdec.errors import ScenarioError
from flower_privdec.gradients.base import row_chunks
from flower_privdec.gradients.chain import Call, Chain, parse_chain
from flower_privdec.gradients.layers import bias_piece, is_supported, weight_pieces
from flower_privdec.gradients.losses import Loss
from flower_privdec.gradients.rows import Piece, RowKernel

_CHECKED = 2  # examples whose gradients are compared with plain backward passes when a kernel is first used
_TOLERANCE = 1e-3
_GRAPH = 3  # a captured tensor stands for so many in the backward pass


@dataclass(frozen=True)
class _Hooked:
    """One call of a layer, as its forward hook sees it."""

    name: str
    layer: nn.Module
    x: Tensor
    output: Tensor


def can_factor(module: nn.Module) -> bool:
    """Return whether every parameter lies in a layer whose gradients can be factored."""
    covered = {
        id(parameter) for part in module.modules() if is_supported(part) for parameter in part.parameters(recurse=False)
    }
    named = list(module.named_parameters(remove_duplicate=False))
    shared = len(named) > len({id(parameter) for _, parameter in named})
    return not shared and all(id(parameter) in covered for _, parameter in named)


class FactoredKernel(RowKernel):
    """The kernel for modules whose parameters lie in Linear, Conv2d and GroupNorm layers; see GradientKernel.

    When first used it compares the gradients of two examples with plain backward passes, since a module may use
    a layer's weight outside the layer, or let the examples of a batch depend on each other.
    """

    def __init__(self, module: nn.Module, loss: Loss, memory_bytes: int) -> None:
        super().__init__(module, loss, memory_bytes)
        self._images = False
        self._example_bytes: int | None = None
        self._hooked: list[_Hooked] = []
        steps = parse_chain(self._module)
        self._chain = None if steps is None else Chain(steps)
        for name, part in self._module.named_modules():
            if getattr(part, "inplace", False):
                part.inplace = False
            self._images |= isinstance(part, nn.Conv2d)
            if is_supported(part):
                part.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                output = output if output.requires_grad else output.requires_grad_()
                self._hooked.append(_Hooked(name, layer, inputs[0].detach(), output))
            return output

        return record

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        calls = self._calls(point, x, y)
        pieces: list[Piece] = []
        for name in dict.fromkeys(call.name for call in calls):
            same = [call for call in calls if call.name == name]
            layer, prefix, deltas = same[0].layer, f"{name}." if name else "", [call.delta for call in same]
            weight, bias = self._layout.get(f"{prefix}weight"), self._layout.get(f"{prefix}bias")
            if weight is not None:
                pieces += weight_pieces(layer, weight, [call.x for call in same], deltas)
            if bias is not None:
                pieces.append(bias_piece(layer, bias, deltas))
        return pieces

    def _calls(self, point: Tensor, x: Tensor, y: Tensor) -> list[Call]:
        if self._images and x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        if self._chain is not None:
            self._load(point)
            return self._chain.calls(x, lambda outputs: self._loss.derivative(outputs, y))
        try:
            with torch.enable_grad():
                outputs = self._outputs(point, x)
            hooked, start = list(self._hooked), self._loss.derivative(outputs.detach(), y)
            sources = [call.output for call in hooked]
            deltas = torch.autograd.grad(outputs, sources, start, materialize_grads=True, allow_unused=True)
            return [Call(h.name, h.layer, h.x, delta) for h, delta in zip(hooked, deltas, strict=True)]
        finally:
            self._hooked.clear()

    def _parts(self, point: Tensor, x: Tensor, y: Tensor) -> list[slice]:
        if self._example_bytes is None:
            self._example_bytes = self._check(point, x[:_CHECKED], y[:_CHECKED])
        return row_chunks(x.shape[0], self._example_bytes, self._memory)

    def _check(self, point: Tensor, x: Tensor, y: Tensor) -> int:
        """Compare a first batch with plain backward passes near the point; return the bytes an example takes."""
        if x.shape[0] == 1:
            x, y = torch.cat([x, x / 2]), torch.cat([y, y])
        noise = torch.randn(point.shape, generator=torch.Generator().manual_seed(0), dtype=point.dtype)
        point = point + noise.to(point.device) / 32
        pieces = self._pieces(point, x, y)
        for index, one in enumerate(torch.eye(x.shape[0], dtype=point.dtype, device=point.device)):
            total, plain = torch.zeros_like(point), self._plain(point, x[index], y[index])
            for piece in pieces:
                piece.add_(total, one)
            if (total - plain).norm() > _TOLERANCE * torch.maximum(total.norm(), plain.norm()):
                raise ScenarioError(
                    "gradients='factored' does not fit this model: they differ from those of one example at a "
                    "time (a layer's weight used outside the layer, or examples that depend on each other); "
                    "set gradients to vmap"
                )
        captured = sum(call.x.nbytes + call.delta.nbytes for call in self._calls(point, x, y))
        written = sum(t.nbytes for piece in pieces for t in vars(piece).values() if isinstance(t, Tensor))
        return (_GRAPH * captured + written) // x.shape[0]

    def _plain(self, point: Tensor, x: Tensor, y: Tensor) -> Tensor:
        leaf = point.detach().clone().requires_grad_()
        try:
            with torch.enable_grad():
                views = {name: place.view(leaf) for name, place in self._layout.items()}
                value = self._loss.value(functional_call(self._module, views, (x[None],)), y[None]).sum()
            return torch.autograd.grad(value, [leaf], materialize_grads=True, allow_unused=True)[0]
        finally:
            self._hooked.clear()
