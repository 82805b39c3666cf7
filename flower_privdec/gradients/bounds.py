"""Norms that are never below those of what is added, in floating-point arithmetic.

A clipped sum is private only if the norm an example is scaled by is at least that of the vector really added for it.
Every norm of this package is therefore an upper bound. With u half the distance from 1 to the next number (6e-8 in
float32), and t the smallest normal number:

1. **Sums.** Squares summed in any order lose at most a factor (1 - u)^n and, by underflow (whether or not the machine
   keeps subnormal numbers), 2 n t: so |v| <= (computed + sqrt(2 n t)) (1 + (n / 2 + 2) u). Vectors longer than LONGEST
   are summed in blocks of BLOCK, whose norms are summed likewise: that keeps (n / 2) u below 1.3e-4 in float32, and the
   floor below sqrt(8 n t), 3e-19 sqrt(n).
2. **Products.** A gradient that is added as a product u delta^T has norm |u| |delta|, and each factor its own floor:
   an underflow in one must not be multiplied by the other, which may be huge.
3. **Coefficients.** clip / norm, its product with weight and scale, with delta, and with u round five times; the few
   operations that put a norm together some twenty. ROUNDINGS u covers them all.

The bound is `floor(n) + (1 + slack(n)) computed`. It exceeds the norm by 3e-5 of it or so in the usual sizes.

An example whose bound is beyond LARGEST, infinite or not a number counts as zero: the same for overflow anywhere in
the model as for features, parameters or divisors that are not numbers. Below LARGEST nothing that is computed from
clip / norm underflows, as long as the clip norm and its product with |scale|, which are public, are above 1e-15.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

LONGEST, BLOCK = 4096, 1024  # numbers summed at once, and in each block of a longer vector
ROUNDINGS = 32
LARGEST = {torch.float32: 2.0**64, torch.float64: 2.0**512}


def length(vectors: Tensor) -> Tensor:
    """Return the norms [...] of vectors [..., n] as computed, of long ones in blocks."""
    n = vectors.shape[-1]
    if n <= LONGEST:
        computed: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return computed
    whole = n - n % BLOCK
    blocks = length(vectors[..., :whole].unflatten(-1, (-1, BLOCK)))
    rest = length(vectors[..., whole:]).unsqueeze(-1)
    return length(torch.cat([blocks, rest], -1))


@cache
def slack(dtype: torch.dtype, *sizes: int) -> float:
    """Return by what share the product of norms of vectors of these sizes may exceed what is computed."""
    return (sum(_summed(n) for n in sizes) / 2 + ROUNDINGS) * torch.finfo(dtype).eps / 2


def _summed(n: int) -> int:
    """Count the additions that a number goes through on its way into a norm, at most."""
    return n if n <= LONGEST else BLOCK + _summed(n // BLOCK + 1)


def floor(like: Tensor, n: int) -> Tensor:
    """Return the largest norm of a vector of n numbers that underflow may hide, without axes; of `like`'s type."""
    return constant(math.sqrt(8 * n * torch.finfo(like.dtype).tiny), like.dtype, like.device)


@cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor without axes, made once."""
    return torch.tensor(value, dtype=dtype, device=device)


def upper(vectors: Tensor) -> Tensor:
    """Return upper bounds [...] on the norms of vectors [..., n]."""
    n = vectors.shape[-1]
    return torch.add(floor(vectors, n), length(vectors), alpha=1 + slack(vectors.dtype, n))


def beyond(norms: Tensor, *, ask: bool = True) -> Tensor | None:
    """Return which norms are infinite, not numbers or beyond LARGEST; None where none is.

    Asking a GPU makes it wait for the answer: without, the mask is returned whatever it holds.
    """
    largest = LARGEST[norms.dtype]
    if norms.numel() == 0 or (ask and norms.max().item() <= largest):
        return None
    return ~(norms <= largest)
