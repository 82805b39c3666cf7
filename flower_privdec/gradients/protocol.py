"""What every gradient kernel shares: the protocol, the layout of a row, the clip coefficient, and norms that bound.

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
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from flower_privdec.data.sparse_rows import Features, SparseRows

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


class Inputs(Protocol):
    """Examples for each row: x [m, B, *shape], numbers or whole-numbered tokens, and targets y [m, B, ...]."""

    @property
    def x(self) -> Tensor:
        """The inputs."""
        ...

    @property
    def y(self) -> Tensor:
        """The targets, as the loss takes them."""
        ...


class LabelledInputs(Inputs, Protocol):
    """A batch for each row: inputs with a weight [m, B], 0 for padding."""

    @property
    def weight(self) -> Tensor:
        """The weight of each example in its row's sum."""
        ...


class GradientKernel(Protocol):
    """Clipped gradients of a cohort: row i of every tensor is one peer's, and no row looks at another."""

    @property
    def d(self) -> int:
        """The number of parameters."""
        ...

    def add_clipped_(
        self,
        out: Tensor,
        params: Tensor,
        batch: LabelledInputs,
        clip_norm: Tensor | None,
        scale: Tensor,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Add clipped gradient sums in place.

            out[i] += scale[i] * sum_b weight[i, b] * g_ib * min(1, clip_norm[i] / |g_ib|)

        where g_ib is the gradient of the loss of example b at params[i] / divisor[i] (Abadi et al. 2016, Alg. 1),
        and |g_ib| its norm or a little more (`bounds`). An example whose gradient is not finite, or longer than
        `bounds.LARGEST`, counts as zero, clipped or not: with features, parameters or a divisor that are no finite
        numbers, and where anything overflows on the way. Nor does one with a token outside the vocabulary count. No
        value raises an error.

        Args:
            out: rows [m, d]; may be params itself, for descent in place.
            params: rows [m, d].
            batch: one batch for each row; what padding holds never matters.
            clip_norm: largest L2 norm of one example's gradient, [m], > 0; None does not clip.
            scale: factor of each row's sum, [m], such as minus the learning rate over the batch size.
            divisor: push-sum weights [m] that de-bias the parameters; None divides by nothing.

        Returns:
            Upper bounds [m, B] on the norms before clipping, by which the gradients were clipped; 0 for examples
            that count as zero. Those of padding mean nothing.

        Privacy: one example changes a row's sum by at most |scale[i]| * clip_norm[i] (zero-out adjacency), whatever
            the example, the others, the parameters and the module (`VmapKernel` lists the modules of which that is not
            promised). It holds for the numbers as they are computed, float32 included: the vector that is added for
            an example is no longer than that, and no bit of another example's vector depends on it. What it does
            not cover is how the *sum* of these vectors and of `out` is rounded, some 1e-7 of the numbers summed,
            nor a machine set to multiply with less than the full precision of the parameters' type.
            The norms returned are private and must stay on the peer.
        """
        ...

    def logits(self, params: Tensor, x: Any) -> Tensor:
        """Return the outputs [m, N, k] of every row's model for shared inputs x [N, *shape]."""
        ...

    def blended_logits(self, params: Tensor, weights: Tensor, x: Any) -> Tensor:
        """Return the outputs [c, N, k] of the models weights @ params for shared inputs x [N, *shape].

        Where a model begins with a linear layer the outputs of that one are blended, which are a few numbers for each
        example, and not its parameters, which are as many for each input; else it is `logits(weights @ params, x)`.

        Args:
            params: rows [n, d], finite.
            weights: [c, n], of which each row sums to 1.
        """
        ...


@dataclass(frozen=True)
class Parameter:
    """Where one parameter lies in a row."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + math.prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """View it in rows [..., d] as [..., *shape], without a copy."""
        return rows.narrow(-1, self.start, self.stop - self.start).view((*rows.shape[:-1], *self.shape))


def layout(module: nn.Module) -> dict[str, Parameter]:
    """Return where each of the module's parameters lies in a row, in the order of named_parameters."""
    found, start = {}, 0
    for name, parameter in module.named_parameters():
        found[name] = Parameter(name, start, parameter.shape)
        start = found[name].stop
    return found


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(module: nn.Module) -> bool:
    """Return whether a module does what its class defines: no hooks, and no method replaced in this very object."""
    replaced = any(callable(getattr(type(module), name, None)) for name in vars(module))
    return not replaced and not any(getattr(module, hooks) for hooks in _HOOKS)


def reason(error: BaseException) -> str:
    """Return an error's kind and the first line of its message, cut at 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@overload
def inputs_like(x: Tensor, params: Tensor) -> Tensor: ...
@overload
def inputs_like(x: SparseRows, params: Tensor) -> SparseRows: ...
def inputs_like(x: Features, params: Tensor) -> Features:
    """Return inputs where parameters are and in their number type; tokens stay whole numbers, compressed rows there."""
    if isinstance(x, SparseRows):
        return x
    return x.to(params) if x.is_floating_point() else x.to(params.device)


def unknown_tokens(x: Tensor, n_tokens: int | None) -> Tensor | None:
    """Return which examples x [b, ...] hold a token outside 0..n_tokens-1, bool [b]; None where none does."""
    if n_tokens is None:
        return None
    unknown = ((x < 0) | (x >= n_tokens)).flatten(1).any(1)
    return unknown if bool(unknown.any()) else None


def coefficient(norms: Tensor, weight: Tensor, clip_norm: Tensor | None, scale: Tensor) -> Tensor:
    """Return scale * weight * min(1, clip_norm / norm) for each example, [m, B]."""
    factor = weight * scale.unsqueeze(1)
    if clip_norm is None:
        return factor.to(norms.dtype)
    return (clip_norm.unsqueeze(1) / norms).clamp_max_(1).mul_(factor)


def row_chunks(m: int, bytes_per_row: int, memory_bytes: int) -> list[slice]:
    """Cut m rows into slices whose temporaries fit into memory_bytes, one row at least."""
    size = max(1, memory_bytes // max(1, bytes_per_row))
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]
