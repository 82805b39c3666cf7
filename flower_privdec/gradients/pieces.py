"""Gradients of several examples in factors, with bounds on their norms: what `factored` and `words` make sums of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flower_privdec.common.deferred import torch
from flower_privdec.gradients.protocol import ROUNDINGS, Parameter, floor, masked, upper

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """Gradients of one weight in factors: example b's is sum_t u[b, t] (outer) delta[b, t].

    Attributes:
        place: the place of the weight in a row.
        u: inputs [b, T, K].
        delta: derivatives in the outputs [b, T, O].
        order: gives a gradient [O, K] the weight's shape; None if it has that shape.
    """

    place: Parameter
    u: Tensor
    delta: Tensor
    order: Callable[[Tensor], Tensor] | None

    def bound(self) -> Tensor:
        """See Piece.

        With S = sum_t |u_t| |delta_t|, by which the terms can cancel, the bound is

            sqrt(max(Gram sum, 0) + g S^2) + h S + floor(K) sum_t |delta_t| + floor(O) sum_t |u_t|.

        The Gram matrices are float64, so T x T products of dot products of lengths K and O sum up to at most g S^2 too
        little, g = (K + O + T^2 + 16) 2^-53. What is added is rounded to the type of u and delta: the terms of
        one example err by at most h S, h = (b T + 2) u, in the product over all b T. The floors bound its underflows.
        """
        b, t, k = self.u.shape
        o = self.delta.shape[2]
        dtype = self.u.dtype
        if t == 1:
            return upper(self.u[:, 0]) * upper(self.delta[:, 0])

        us, u = _gram(self.u)
        deltas, delta = _gram(self.delta)
        size = (u * delta).sum(1)  # S, [b]
        double = torch.finfo(torch.float64).eps / 2
        own = torch.finfo(dtype).eps / 2
        exact = (us * deltas).sum((1, 2)).clamp_(min=0) + (k + o + t * t + 16) * double * size.square()
        hidden = floor(self.u, k) * delta.sum(1) + floor(self.u, o) * u.sum(1)
        return ((exact.sqrt_() + (b * t + 2) * own * size + hidden) * (1 + ROUNDINGS * own)).to(dtype)

    def without(self, bad: Tensor) -> Outer:
        return replace(self, u=masked(self.u, bad), delta=masked(self.delta, bad))

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        scaled = (self.delta * coefficient[:, None, None]).flatten(0, 1)
        if self.order is None:
            self.place.view(total).addmm_(scaled.t(), self.u.flatten(0, 1))
        else:
            self.place.view(total).add_(self.order(scaled.t() @ self.u.flatten(0, 1)))


def _gram(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products [b, T, T] of vectors [b, T, n] with each other and their norms [b, T], in float64."""
    double = vectors.double()
    gram = double @ double.transpose(1, 2)
    return gram, gram.diagonal(dim1=1, dim2=2).sqrt() + floor(vectors, vectors.shape[2])


@dataclass(frozen=True)
class LookedUp:
    """Gradients of a table: example b's is the sum over t of delta[b, t] in the row of token[b, t].

    Attributes:
        place: the place of the table in a row.
        tokens: int64 [b, T].
        delta: derivatives in the outputs [b, T, O].
    """

    place: Parameter
    tokens: Tensor
    delta: Tensor

    def bound(self) -> Tensor:
        """See Piece: as of `Outer`, with u_t a row of the identity, whose products are 0 or 1 and lose nothing."""
        b, t, o = self.delta.shape
        dtype = self.delta.dtype
        same = self.tokens.unsqueeze(2) == self.tokens.unsqueeze(1)  # the Gram matrix of u, bool [b, T, T]
        deltas, delta = _gram(self.delta)
        size = delta.sum(1)
        double = torch.finfo(torch.float64).eps / 2
        own = torch.finfo(dtype).eps / 2
        exact = (deltas * same).sum((1, 2)).clamp_(min=0) + (o + t * t + 16) * double * size.square()
        hidden = floor(self.delta, o) * t
        return ((exact.sqrt_() + (b * t + 2) * own * size + hidden) * (1 + ROUNDINGS * own)).to(dtype)

    def without(self, bad: Tensor) -> LookedUp:
        return replace(self, delta=masked(self.delta, bad))

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """See Piece; on a GPU rows are summed by a product, so that the order of the sum is always the same."""
        scaled = (self.delta * coefficient[:, None, None]).flatten(0, 1)
        tokens = self.tokens.flatten()
        rows = self.place.view(total)
        if rows.is_cuda:
            used, position = tokens.unique(return_inverse=True)
            chosen = torch.zeros(len(used), len(tokens), dtype=scaled.dtype, device=scaled.device)
            rows[used] += chosen.scatter_(0, position[None], 1) @ scaled
        else:
            rows.index_add_(0, tokens, scaled)
