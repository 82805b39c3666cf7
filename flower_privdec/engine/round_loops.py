"""A round of push-sum in one loop, compiled by numba: step, noise and mixing of each row while it is in the cache.

Import this module only where the fast generator is asked for: it needs numba. It calls the loops that the parts of a
round call one by one, and gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flower_privdec.gradients.single_example_loops import lone_step
from flower_privdec.privacy.noise.philox import TILE, add_normals32, add_normals64
from flower_privdec.rows.compiling import compiled, inlined

_u8 = np.uint64


@inlined
def _mix(out, own, other):  # type: ignore[no-untyped-def]
    """Take half of each, rounded as torch.lerp does."""
    for t in range(len(out)):
        out[t] = other[t] - (other[t] - own[t]) * out.dtype.type(0.5)


def _round(add_normals: Any) -> Any:
    """Return the loop for the number type that a noise fill is for."""

    def loop(x, w, out, out_w, d, x_all, y_all, places, numbers, keys, receivers, step, shift, model, limits):  # type: ignore[no-untyped-def]
        scale, clip, std = numbers
        m, stride = x.shape
        flat, tiles, one = x.reshape(-1), (d + TILE - 1) // TILE, x.dtype.type(1)
        for i in range(m):
            place = places[i]
            lone_step(x[i], x[i], w[i], x_all[place], y_all[place], one, clip[i], scale[i], model, limits)
            add_normals(flat, (d, stride), std, keys, receivers, _u8(step), i * tiles, (i + 1) * tiles)
            if i >= shift:
                _mix(out[i, :d], x[i, :d], x[i - shift, :d])
        for i in range(shift):
            _mix(out[i, :d], x[i, :d], x[i - shift + m, :d])
        for i in range(m):
            other = w[(i - shift + m) % m]
            out_w[i] = other - (other - w[i]) * x.dtype.type(0.5)

    return compiled(loop)


round32, round64 = _round(add_normals32), _round(add_normals64)
