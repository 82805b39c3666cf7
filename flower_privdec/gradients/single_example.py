"""The kernel for linear models of one output whose peers draw one example each: a compiled loop.

Import this module only where it is used: numba takes long to import. A row's numbers depend only on that row, whoever
calls: sums are compiled once, in an order that the machine decides.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.gradients.protocol import LARGEST, LONGEST, Clipping, LabelledInputs, floor, slack
from flower_privdec.gradients.stacked import Layer, StackedKernel
from flower_privdec.rows.tensors import compiled, inlined, padded
from flower_privdec.tasks.losses import LOSSES, Loss

HINGE = 0
LOGISTIC = 1
SQUARED_HINGE = 2
COMPILED_LOSSES = {
    LOSSES["hinge"].derivative: HINGE,
    LOSSES["logistic"].derivative: LOGISTIC,
    LOSSES["squared-hinge"].derivative: SQUARED_HINGE,
}
_f8 = np.float64


@partial(compiled, fastmath={"reassoc"})  # each number goes through n additions at most, as `protocol` counts
def _dots(a, b):  # type: ignore[no-untyped-def]
    """Return a · b and |a|²."""
    product = square = a[0] * 0
    for t in range(len(a)):
        product += a[t] * b[t]
        square += a[t] * a[t]
    return product, square


@inlined
def _derivative(loss, z, label):  # type: ignore[no-untyped-def]
    """Return the derivative of a loss in the output, as `tasks.losses` does."""
    sign = 2.0 * label - 1.0
    if loss == HINGE:
        return -sign if -sign * z > -1.0 else 0.0
    if loss == LOGISTIC:
        return 1.0 / (1.0 + math.exp(-z)) - label
    short = 1.0 - sign * z
    return -2.0 * sign * (0.0 if short < 0.0 else short)  # NaN stays


@compiled
def single_example_step(out, params, divisor, a, label, weight, clip, scale, model, limits):  # type: ignore[no-untyped-def]
    """Add scale weight times the clipped gradient of one example to one row; return the bound on its norm.

    Args:
        out, params: rows, which may be the same.
        clip: infinite for none.
        model: (the loss, features, where the weights begin, where the bias lies or -1).
        limits: (floor of a missing bias, floor of an output, 1 + slack, the largest norm).
    """
    loss, n, start, bias = model

    # Forward: the output z, and the loss's derivative in it.
    weights = params[start : start + n]
    product, square = _dots(a, weights)
    z = _f8(product)
    if bias >= 0:
        z += _f8(params[bias])
    delta = _derivative(loss, z / _f8(divisor), _f8(label))

    # The bound on the norm of (a, 1) delta; `not <=` for NaN, which no comparison holds for.
    norm = math.hypot(math.sqrt(_f8(square)), limits[0]) * (limits[1] + limits[2] * abs(delta))
    if not norm <= limits[3]:
        return 0.0

    step = out.dtype.type(delta * min(_f8(clip) / norm, 1.0) * _f8(weight) * _f8(scale))
    target = out[start : start + n]
    for t in range(n):
        target[t] += step * a[t]
    if bias >= 0:
        out[bias] += step
    return norm


@compiled
def single_example_steps(out, params, divisor, x, y, weight, clip, scale, norms, model, limits):  # type: ignore[no-untyped-def]
    """Take `single_example_step` of every row: out, params [m, >= d], x [m, n], y [m] and the rest [m]."""
    for i in range(len(out)):
        norms[i] = single_example_step(
            out[i], params[i], divisor[i], x[i], y[i], weight[i], clip[i], scale[i], model, limits
        )


def takes_single_examples(layers: list[Layer], loss: Loss) -> bool:
    """Return whether a model is one linear layer of one output, not too wide, with a loss that is compiled here."""
    if len(layers) != 1 or layers[0].activation is not nn.Identity:
        return False
    outputs, inputs = layers[0].weight.shape
    return outputs == 1 and inputs <= LONGEST and loss.derivative in COMPILED_LOSSES


class SingleExampleKernel(StackedKernel):
    """`StackedKernel` for models that `takes_single_examples` accepts: a compiled loop if each row has one example.

    Its sums are those of `StackedKernel` in another order; a row's numbers depend only on that row.
    """

    def __init__(self, module: nn.Module, layers: list[Layer], loss: Loss, memory_bytes: int) -> None:
        super().__init__(module, layers, loss, memory_bytes)
        weight = layers[0].weight
        bias = layers[0].bias
        number = COMPILED_LOSSES[loss.derivative]
        self._model = (number, weight.shape[1], weight.start, -1 if bias is None else bias.start)
        self._limits = {dtype: _limits(dtype, weight.shape[1], bias is not None) for dtype in LARGEST}

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        rows = padded(out)
        points = padded(params)
        if batch.weight.shape[1] != 1 or not params.is_cpu or rows is None or points is None:
            return super()._add_(out, params, batch, clipping)

        # One tensor for all numbers of the rows: numpy's views of it cost less than five conversions.
        m = len(params)
        numbers = params.new_empty(5, m)
        numbers[0] = batch.weight[:, 0]
        numbers[1] = clipping.scale
        numbers[2] = 1 if clipping.divisor is None else clipping.divisor
        numbers[3] = torch.inf if clipping.clip_norm is None else clipping.clip_norm
        weight, scale, divisor, clip, norms = numbers.numpy()

        x = batch.x.reshape(m, -1).to(params).contiguous().numpy()
        y = batch.y[:, 0].contiguous().numpy()
        arrays = (rows.numpy(), points.numpy(), divisor, x, y, weight, clip, scale, norms)
        single_example_steps(*arrays, self._model, self._limits[out.dtype])
        return numbers[4].unsqueeze(1)


def _limits(dtype: torch.dtype, inner: int, biased: bool) -> tuple[float, float, float, float]:
    """Return the numbers by which `single_example_step` bounds norms."""
    like = torch.empty(0, dtype=dtype)
    least = 1.0 if biased else floor(like, inner).item()
    return least, floor(like, 1).item(), 1 + slack(dtype, inner, 1, 1), LARGEST[dtype]
