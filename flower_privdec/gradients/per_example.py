"""Gradients of any module, example by example: torch.func over a few at once, and a plain loop (the oracle)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flower_privdec.gradients.base import Examples, row_chunks
from flower_privdec.gradients.losses import Loss
from flower_privdec.gradients.rows import Piece, RowKernel, Stored
from flower_privdec.models import unflatten

_WRITTEN_BYTES = 2**26  # gradients written out at once; a call of vmap costs about 2 ms whatever it does


class VmapKernel(RowKernel):
    """The kernel for any module: vmap of grad over a few examples of a row at a time; see GradientKernel."""

    def __init__(self, module: nn.Module, loss: Loss, memory_bytes: int) -> None:
        super().__init__(module, loss, memory_bytes)
        self._gradients = vmap(grad(self._one), in_dims=(None, 0, 0))

    def _one(self, views: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = functional_call(self._module, views, (x[None],))
        return self._loss.value(output, y[None]).sum()

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        views = {name: place.view(point) for name, place in self._layout.items()}
        gradients = self._gradients(views, x, y)
        return [Stored(self._layout[name], gradient) for name, gradient in gradients.items()]

    def _parts(self, point: Tensor, x: Tensor, y: Tensor) -> list[slice]:
        return row_chunks(x.shape[0], self.d * point.element_size(), min(self._memory, _WRITTEN_BYTES))


class LoopKernel:
    """The oracle: one module, one example, one backward pass at a time; see GradientKernel."""

    def __init__(self, module: nn.Module, loss: Loss, memory_bytes: int) -> None:
        self._module, self._loss = module, loss
        self.d = sum(parameter.numel() for parameter in module.parameters())

    def add_clipped_(
        self,
        out: Tensor,
        params: Tensor,
        batch: Examples,
        clip_norm: Tensor | None,
        scale: Tensor,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Add clipped gradient sums in place; see GradientKernel."""
        m, examples = batch.y.shape
        norms = params.new_empty(m, examples)
        for i in range(m):
            model = self._model(params[i] if divisor is None else params[i] / divisor[i])
            total = torch.zeros_like(params[i])
            for b in range(examples):
                gradient = example_gradient(model, self._loss, batch.x[i, b].to(params.dtype), batch.y[i, b])
                norms[i, b] = gradient.norm()
                if clip_norm is not None and norms[i, b] > clip_norm[i]:
                    gradient *= clip_norm[i] / norms[i, b]
                total += batch.weight[i, b] * gradient
            out[i] += scale[i] * total
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs; see GradientKernel."""
        with torch.no_grad():
            return torch.stack([self._model(row)(x.to(params.dtype)) for row in params])

    def _model(self, row: Tensor) -> nn.Module:
        return unflatten(copy.deepcopy(self._module).to(row), row)


def example_gradient(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [d] of one example's loss by one backward pass."""
    value = loss.value(model(x[None]), y[None]).sum()
    gradients = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients])
