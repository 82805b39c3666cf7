"""The kernel for linear models of one output whose peers take one example each, where calls cost more than numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flower_privdec.gradients.protocol import LARGEST, LONGEST, LabelledInputs, floor, slack
from flower_privdec.gradients.stacked import Layer, StackedKernel
from flower_privdec.rows.tensors import padded
from flower_privdec.tasks.losses import LOSSES, Loss

COMPILED_LOSSES = ("hinge", "logistic", "squared-hinge")  # numbered as in `single_example_loops`


def takes_single_examples(layers: list[Layer], loss: Loss) -> bool:
    """Return whether a model is one linear layer of one output, not too wide, with a loss that is compiled here."""
    known = any(loss.derivative is LOSSES[name].derivative for name in COMPILED_LOSSES)
    plain = len(layers) == 1 and layers[0].activation is nn.Identity and layers[0].weight.shape[0] == 1
    return plain and known and layers[0].weight.shape[1] <= LONGEST


class SingleExampleKernel(StackedKernel):
    """`StackedKernel` for models that `takes_single_examples` accepts: one compiled loop where a row has one example.

    Its sums are those of `StackedKernel` in another order; a row's numbers depend on that row alone.
    """

    def __init__(self, module: nn.Module, layers: list[Layer], loss: Loss, memory_bytes: int) -> None:
        """Take what `StackedKernel` does."""
        from flower_privdec.gradients import single_example_loops

        super().__init__(module, layers, loss, memory_bytes)
        self._loop: Any = single_example_loops.single_example_steps
        weight, bias = layers[0].weight, layers[0].bias
        names = {LOSSES[name].derivative: number for number, name in enumerate(COMPILED_LOSSES)}
        self.model = (names[loss.derivative], weight.shape[1], weight.start, -1 if bias is None else bias.start)

        self.limits = {dtype: _limits(dtype, weight.shape[1], bias is not None) for dtype in LARGEST}

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
        rows, points = padded(out.detach()), padded(params.detach())
        if batch.weight.shape[1] != 1 or not params.is_cpu or rows is None or points is None:
            return super().add_clipped_(out, params, batch, clip_norm, scale, divisor)
        m = len(params)
        numbers = params.new_empty(5, m)
        numbers[0], numbers[1], numbers[2] = batch.weight[:, 0], scale, 1 if divisor is None else divisor
        numbers[3] = torch.inf if clip_norm is None else clip_norm
        weight, factor, share, clip, norms = numbers.numpy()
        x, y = batch.x.reshape(m, -1).to(params).contiguous().numpy(), batch.y[:, 0].contiguous().numpy()
        self._loop(
            rows.numpy(), points.numpy(), share, x, y, weight, clip, factor, norms, self.model, self.limits[out.dtype]
        )
        return numbers[4].unsqueeze(1)


def _limits(dtype: torch.dtype, inner: int, biased: bool) -> tuple[float, float, float, float]:
    """Return what `single_example_loops.single_example_step` bounds norms by."""
    like = torch.empty(0, dtype=dtype)
    least = 1.0 if biased else floor(like, inner).item()
    return least, floor(like, 1).item(), 1 + slack(dtype, inner, 1, 1), LARGEST[dtype]
