"""The oracle of the gradient kernels: one module, one example, one backward pass at a time."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from flower_privdec.gradients import GradientKernel, LabelledInputs
from flower_privdec.gradients import build_kernel as build_product_kernel
from flower_privdec.gradients.protocol import Clipping, beyond, inputs_like, unknown_tokens, upper
from flower_privdec.models import fix_norms, flatten, trained, unflatten
from flower_privdec.tasks.losses import Loss, resolve_loss


def build_kernel(
    module: nn.Module, loss: str | Loss, *shape: Any, kind: str = "auto", **options: Any
) -> GradientKernel:
    """Build the product's kernel, or for kind `loop` the oracle."""
    if kind == "loop":
        return LoopKernel(module, resolve_loss(loss), options.get("n_tokens"))
    return build_product_kernel(module, loss, *shape, kind=kind, **options)


class LoopKernel(GradientKernel):
    """The oracle: one module, one example, one backward pass at a time; see GradientKernel."""

    def __init__(self, module: nn.Module, loss: Loss, n_tokens: int | None = None) -> None:
        super().__init__(module, loss, 1)
        self._module, self._n_tokens = module, n_tokens

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        (m, examples), clip_norm, divisor = batch.weight.shape, clipping.clip_norm, clipping.divisor
        norms = params.new_empty(m, examples)
        for i in range(m):
            model = self._model(params[i] if divisor is None else params[i] / divisor[i])
            total = torch.zeros_like(params[i])
            for b in range(examples):
                gradient = self._gradient(model, inputs_like(batch.x[i, b], params), batch.y[i, b])
                norms[i, b] = upper(gradient)
                bad = beyond(norms[i, b])
                if bad is not None:
                    gradient, norms[i, b] = gradient.masked_fill(bad, 0), norms[i, b].masked_fill(bad, 0)
                if clip_norm is not None and norms[i, b] > clip_norm[i]:
                    gradient *= clip_norm[i] / norms[i, b]
                total += batch.weight[i, b] * gradient
            out[i] += clipping.scale[i] * total
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs; see GradientKernel."""
        with torch.no_grad():
            return torch.stack([self._model(row)(inputs_like(x, params)) for row in params])

    def _gradient(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if unknown_tokens(x[None], self._n_tokens) is not None:
            return flatten(model).fill_(math.nan)
        with torch.enable_grad():
            return example_gradient(model, self._loss, x, y)

    def _model(self, row: Tensor) -> nn.Module:
        return unflatten(fix_norms(copy.deepcopy(self._module)).to(row), row)


def example_gradient(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [d] of one example's loss by one backward pass."""
    value = loss.value(model(x[None]), y[None]).sum()
    gradients = torch.autograd.grad(value, list(trained(model).values()), materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients])
