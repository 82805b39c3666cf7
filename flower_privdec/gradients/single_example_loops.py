"""Clipped gradients of linear models of one output at one example each, compiled by numba.

Import this module only where it is used: numba takes long to import. A row's numbers depend on that row alone,
for any caller: sums are compiled once, in an order that the machine decides.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from flower_privdec.rows.tensors import compiled, inlined

HINGE, LOGISTIC, SQUARED_HINGE = range(3)
_f8 = np.float64


@partial(compiled, fastmath={"reassoc"})  # each number goes through n additions at most, as `bounds` counts
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
    weights = params[start : start + n]
    product, square = _dots(a, weights)
    z = _f8(product) if bias < 0 else _f8(product) + _f8(params[bias])
    delta = _derivative(loss, z / _f8(divisor), _f8(label))
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
