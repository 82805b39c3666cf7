"""Clipped gradients of one linear layer of examples that are mostly 0: what they do not name is not touched."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flower_privdec.data.sparse_rows import SparseRows
from flower_privdec.gradients.protocol import (
    LabelledInputs,
    beyond,
    coefficient,
    constant,
    floor,
    length,
    row_chunks,
    slack,
)
from flower_privdec.gradients.stacked import Layer
from flower_privdec.tasks.losses import Loss


class SparseLinearKernel:
    """The kernel for a single linear layer of sparse examples; see GradientKernel.

    A batch holds examples packed, [m, B, 2, L]: the indices of their features and the values, padded with zeros
    (`SparseRows.packed`). An example's gradient is delta (outer) (a, 1), of which only the columns of its own
    features are added to. On a GPU the additions come in any order, so the last bits of a sum may differ.
    """

    def __init__(self, module: nn.Module, layer: Layer, loss: Loss, memory_bytes: int) -> None:
        self.layers = [layer]
        self.d = sum(parameter.numel() for parameter in module.parameters())
        self._loss, self._memory = loss, memory_bytes

    def add_clipped_(
        self,
        out: Tensor,
        params: Tensor,
        batch: LabelledInputs,
        clip_norm: Tensor | None,
        scale: Tensor,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Add clipped gradient sums in place; see GradientKernel."""
        (m, examples), (outputs, _) = batch.weight.shape, self.layers[0].weight.shape
        norms = params.new_empty(m, examples)
        per_row = 4 * examples * batch.x.shape[-1] * (outputs + 2) * params.element_size()
        with torch.no_grad():
            for rows in row_chunks(m, per_row, self._memory):
                clip, share = (None if part is None else part[rows] for part in (clip_norm, divisor))
                index, values = batch.x[rows, :, 0].long(), batch.x[rows, :, 1].to(params)
                delta, norms[rows] = self._deltas(params[rows], index, values, batch.y[rows], share)
                delta *= coefficient(norms[rows], batch.weight[rows], clip, scale[rows]).unsqueeze(-1)
                self._push_(out[rows], delta, index, values)
        return norms

    def _deltas(
        self, params: Tensor, index: Tensor, values: Tensor, y: Tensor, divisor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the derivatives in the outputs [m, B, k], and upper bounds on the norms of the gradients [m, B]."""
        layer = self.layers[0]
        k, features = layer.weight.shape
        z = (self._named(params, index, k) * values.unsqueeze(1)).sum(-1).transpose(1, 2)
        if layer.bias is not None:
            z = z + layer.bias.view(params).unsqueeze(1)
        delta = self._loss.derivative(z if divisor is None else z / divisor[:, None, None], y)
        least = floor(values, features) if layer.bias is None else constant(1.0, values.dtype, values.device)
        size = torch.hypot(length(values), least)
        norms = size.mul_(torch.add(floor(values, k), length(delta), alpha=1 + slack(values.dtype, features, k, 1)))
        bad = beyond(norms, ask=norms.is_cpu)
        return (delta, norms) if bad is None else (delta.masked_fill(bad.unsqueeze(-1), 0), norms.masked_fill(bad, 0))

    def _named(self, params: Tensor, index: Tensor, k: int) -> Tensor:
        """Return the weights of each example's features, [m, k, B, L]."""
        m, examples, longest = index.shape
        flat = index.view(m, 1, -1).expand(m, k, -1)
        return self.layers[0].weight.view(params).gather(2, flat).view(m, k, examples, longest)

    def _push_(self, out: Tensor, delta: Tensor, index: Tensor, values: Tensor) -> None:
        layer, (m, _, k) = self.layers[0], delta.shape
        added = delta.transpose(1, 2).unsqueeze(-1) * values.unsqueeze(1)
        layer.weight.view(out).scatter_add_(2, index.view(m, 1, -1).expand(m, k, -1), added.reshape(m, k, -1))
        if layer.bias is not None:
            layer.bias.view(out).add_(delta.sum(1))

    def logits(self, params: Tensor, x: SparseRows) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs, [N, D]; see GradientKernel."""
        layer = self.layers[0]
        weight = layer.weight.view(params)
        found = torch.stack([torch.from_numpy(x.matrix @ each.detach().cpu().numpy().T) for each in weight])
        found = found.to(params)
        return found if layer.bias is None else found + layer.bias.view(params).unsqueeze(1)

    def blended_logits(self, params: Tensor, weights: Tensor, x: SparseRows) -> Tensor:
        """Return the outputs [c, N, k] of blended models for shared inputs; see GradientKernel."""
        return torch.einsum("cn,nek->cek", weights, self.logits(params, x))
