"""Max pooling of two by two without overlap, compiled by numba: values, and what is passed back, as torch has them.

Import this module only where numba is known to be there. Images lie as [b, H, W, C], channels last.
"""

from __future__ import annotations

from flower_privdec.rows.compiling import compiled


@compiled
def pool(x, y, place):  # type: ignore[no-untyped-def]
    """Write the largest of four, and which it is: the first of equals, or the last that is not a number."""
    for b in range(y.shape[0]):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                first, second = x[b, 2 * i, 2 * j], x[b, 2 * i, 2 * j + 1]
                third, fourth = x[b, 2 * i + 1, 2 * j], x[b, 2 * i + 1, 2 * j + 1]
                out, at = y[b, i, j], place[b, i, j]
                for c in range(y.shape[3]):
                    best, k = first[c], 0
                    if second[c] > best or second[c] != second[c]:
                        best, k = second[c], 1
                    if third[c] > best or third[c] != third[c]:
                        best, k = third[c], 2
                    if fourth[c] > best or fourth[c] != fourth[c]:
                        best, k = fourth[c], 3
                    out[c], at[c] = best, k


@compiled
def unpool(delta, place, x):  # type: ignore[no-untyped-def]
    """Write what is passed back to each input: a derivative where it was the largest, else 0."""
    x[:, 2 * delta.shape[1] :] = 0
    x[:, :, 2 * delta.shape[2] :] = 0
    zero = delta.dtype.type(0)
    for b in range(delta.shape[0]):
        for i in range(delta.shape[1]):
            for j in range(delta.shape[2]):
                d, at = delta[b, i, j], place[b, i, j]
                for k in range(4):
                    out = x[b, 2 * i + k // 2, 2 * j + k % 2]
                    for c in range(len(d)):
                        out[c] = zero + (d[c] if at[c] == k else zero)
