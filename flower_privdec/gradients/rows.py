"""The base of the kernels that compute one row after another."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from flower_privdec.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.gradients.protocol import (
    Clipping,
    GradientKernel,
    LabelledInputs,
    Parameter,
    beyond,
    inputs_like,
    layout,
    reason,
    row_chunks,
    upper,
)
from flower_privdec.tasks.losses import Loss

_LOGIT_TENSORS = 64  # activations alive in a forward pass, as a multiple of the input


class Piece(Protocol):
    """The gradients of b examples in a few parameters, in a form that is cheap to sum."""

    def bound(self) -> Tensor:
        """Return upper bounds [b] on the norms of the vectors that `add_` adds; see `protocol`."""
        ...

    def without(self, bad: Tensor) -> Piece:
        """Return the piece with the gradients of some examples, bool [b], replaced by 0."""
        ...

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """Add the sum of coefficient[b] times gradient b to total [d]."""
        ...


@dataclass(frozen=True)
class Stored:
    """Gradients of one parameter, written out for each example.

    Attributes:
        place: where the parameter lies.
        gradients: [b, ...], in the shape of the parameter or of a part of it.
        part: views that part of the parameter; None for the whole.
    """

    place: Parameter
    gradients: Tensor
    part: Callable[[Tensor], Tensor] | None = None

    def bound(self) -> Tensor:
        """See Piece: from the same numbers that are added."""
        return upper(self.gradients.reshape(self.gradients.shape[0], -1))

    def without(self, bad: Tensor) -> Stored:
        """See Piece."""
        return replace(self, gradients=masked(self.gradients, bad))

    def add_(self, total: Tensor, coefficient: Tensor) -> None:
        """See Piece."""
        flat = coefficient @ self.gradients.reshape(self.gradients.shape[0], -1)
        whole = self.place.view(total)
        (whole if self.part is None else self.part(whole)).add_(flat.view(self.gradients.shape[1:]))


def masked(values: Tensor, bad: Tensor, filling: float = 0) -> Tensor:
    """Return values [b, ...] with 0, or another filling, where bad [b]."""
    return values.masked_fill(bad.view(-1, *(1,) * (values.ndim - 1)), filling)


def _used(weight: Tensor) -> list[int]:
    """Count each row's examples up to the last whose weight is not 0; the rest is padding.

    A GPU counts all of them: reading a number back would cost it more than computing padding, which adds nothing.
    """
    if weight.shape[1] == 0 or not weight.is_cpu:
        return [weight.shape[1]] * weight.shape[0]
    place = torch.arange(1, weight.shape[1] + 1, device=weight.device)
    counts: list[int] = torch.where(weight != 0, place, 0).amax(1).tolist()
    return counts


class RowKernel(GradientKernel):
    """A kernel that computes row by row, and a row's examples in parts that fit into memory."""

    def __init__(self, module: nn.Module, run: nn.Module, loss: Loss, memory_bytes: int) -> None:
        """Copy `run`, which computes what the module does with parameters of the same names.

        Raises:
            ScenarioError: it cannot be copied.
        """
        super().__init__(module, loss, memory_bytes)
        try:
            self._module = copy.deepcopy(run).requires_grad_(False)
        except RAISED_BY_USERS as error:  # a user's module may hold anything
            raise ScenarioError(
                f"model: it cannot be copied: {reason(error)}; keep no tensors in it that were computed, nor locks or "
                "files (for weight norm use torch.nn.utils.parametrizations)",
                code="model.copy",
            ) from None
        self._layout = layout(module)
        self._parameters = dict(self._module.named_parameters())
        self._release()

    @abstractmethod
    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        """Return the gradients of examples x [b, *shape], y [b, ...] at a point [d]."""

    @abstractmethod
    def _parts(self, examples: int, element_size: int) -> Sequence[slice]:
        """Cut a row's examples into parts that fit into memory."""

    def _add_(self, out: Tensor, params: Tensor, batch: LabelledInputs, clipping: Clipping) -> Tensor:
        self._module.to(params)
        norms = params.new_zeros(batch.weight.shape)
        for i, used in enumerate(_used(batch.weight)):
            row, divisor = clipping.rows(slice(i, i + 1)), clipping.divisor
            point = params[i] if divisor is None else params[i] / divisor[i]
            x, y = inputs_like(batch.x[i, :used], params), batch.y[i, :used]
            parts = self._parts(used, params.element_size())
            direct = len(parts) <= 1 or divisor is not None  # nothing reads the row again, which may be out
            total = out[i] if direct else torch.zeros_like(point)
            for part in parts:
                pieces, norms[i, part] = _finite(self._pieces(point, x[part], y[part]))
                coefficient = row.coefficient(norms[i : i + 1, part], batch.weight[i : i + 1, part])[0]
                for piece in pieces:
                    piece.add_(total, coefficient)
            if not direct:
                out[i].add_(total)
        self._release()
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs; see GradientKernel."""
        params, x = params.detach(), inputs_like(x, params)
        self._module.to(params)
        parts = self._logit_parts(x.shape[0], x)
        try:
            with torch.no_grad():
                rows = [torch.cat([self._outputs(row, x[part]) for part in parts]) for row in params]
        except RAISED_BY_USERS as error:
            raise RunError(f"model: its forward fails on the public test set: {reason(error)}") from error
        self._release()
        return torch.stack(rows)

    def _logit_parts(self, examples: int, x: Tensor) -> list[slice]:
        """Cut shared inputs into parts that fit into memory."""
        return row_chunks(examples, _LOGIT_TENSORS * x[:1].numel() * x.element_size(), self._memory)

    def _load(self, row: Tensor) -> None:
        """Let the module's parameters share memory with a row."""
        for name, parameter in self._parameters.items():
            parameter.data = self._layout[name].view(row)

    def _outputs(self, row: Tensor, x: Tensor) -> Tensor:
        self._load(row)
        outputs: Tensor = self._module(x)
        return outputs

    def _release(self) -> None:
        """Drop the references to the rows."""
        for parameter in self._parameters.values():
            parameter.data = parameter.new_empty(0)


def _finite(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], Tensor]:
    """Return the pieces, with zeros for examples whose gradients are not finite, and bounds [b] on the norms."""
    norms = upper(torch.stack([piece.bound() for piece in pieces], 1))
    bad = beyond(norms, wait=norms.is_cpu)
    if bad is None:
        return pieces, norms
    return [piece.without(bad) for piece in pieces], norms.masked_fill(bad, 0)
