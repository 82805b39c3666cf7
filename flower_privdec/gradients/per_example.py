"""Gradients of any module, example by example: torch.func over a few at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.gradients.protocol import (
    Piece,
    RowKernel,
    Stored,
    batchable,
    layer_outputs,
    masked,
    reason,
    row_chunks,
    unknown_tokens,
)
from flower_privdec.models import flatten
from flower_privdec.tasks.losses import Loss
from flower_privdec.tasks.own_losses import no_custom_vmap_rules

_KEPT = 4  # tensors for each output of a layer, while gradients are computed
_LARGEST_ELEMENT = 8  # bytes of a number
_WRITTEN_BYTES = 2**26  # gradients written out at once; a call of vmap costs about 2 ms whatever it does


class VmapKernel(RowKernel):
    """The kernel for any module: vmap of grad over a few examples of a row at a time; see GradientKernel.

    The module's forward sees one example, as a batch of one, and vmap lets no operation reach another. Each call
    works on a new copy of the module, its buffers and its parameters, so that what its forward writes to them is
    dropped: how often it was called before, which depends on how many examples were drawn, changes nothing. What the
    forward writes elsewhere, in globals, closures, classes or files, can carry numbers from one example to the gradient
    of a later one, and operators registered with a vmap rule, or functorch's internals, can see examples together:
    **for such a module nothing is promised.** An autograd.Function with a vmap rule is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        input_shape: Sequence[int],
        memory_bytes: int,
        n_tokens: int | None = None,
        because: str = "",
    ) -> None:
        """Take any module, for a reason, and try it on public numbers, or on tokens 0..n_tokens-1.

        Zeros and random numbers of [0, 1) are differentiated, which are good indices too once they are integers.

        Raises:
            ScenarioError: vmap cannot differentiate the module.
        """
        super().__init__(module, module, loss, memory_bytes)
        self._n_tokens = n_tokens
        self.because = because
        like = next(module.parameters())
        generator = torch.Generator().manual_seed(0)
        x = torch.stack([torch.zeros(*input_shape), torch.rand(*input_shape, generator=generator)]).to(like)
        if self._n_tokens is not None:
            x = (x * self._n_tokens).long().clamp_(max=self._n_tokens - 1)

        row = flatten(module)
        try:
            with torch.random.fork_rng(devices=[]), no_custom_vmap_rules():
                module = self._copied()
                counts = layer_outputs(module, lambda: functional_call(module, self._views(row), (x[:1],)))
                self._activations = sum(count for _, count in counts)
                y = self._loss.blank(self._outputs(row, x[:1]))
                self._gradients(row, x, y.expand(2, *y.shape[1:]))
        except RAISED_BY_USERS as error:  # the user's forward may raise anything
            raise ScenarioError(
                f"model: it cannot be clipped example by example: {reason(error)}; write "
                "its forward with only torch operations (torch.where for a choice, no .item(), no change of buffers, "
                "no random numbers: eval() ends dropout), so that it takes one example [1, ...] to [1, outputs] under "
                "torch.func.vmap",
                code="model.per-example",
            ) from None

    def _gradients(self, point: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of examples, by the names of the parameters."""
        module = self._copied()

        def value(views: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output: Tensor = functional_call(module, views, (x[None],))
            if output.ndim != 2 or len(output) != 1:
                raise ValueError(f"its output for one example is {list(output.shape)}: it must be [1, outputs]")
            return self._loss.value(output, y[None]).sum()

        with batchable(module):
            gradients: dict[str, Tensor] = vmap(grad(value), in_dims=(None, 0, 0))(self._views(point.clone()), x, y)
        return gradients

    def _copied(self) -> nn.Module:
        """Return a copy of the module that shares its trained parameters, for functional_call to replace."""
        return copy.deepcopy(self._module, {id(tensor): tensor for tensor in self._parameters.values()})

    def _views(self, row: Tensor) -> dict[str, Tensor]:
        return {name: place.view(row) for name, place in self._layout.items()}

    def _outputs(self, row: Tensor, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._copied(), self._views(row), (x,))
        return outputs

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        """See RowKernel; if the module fails on these examples, its message is withheld because it may reveal them."""
        # A token that the table does not have would raise: the example is computed with another, and counts as zero.
        unknown = unknown_tokens(x, self._n_tokens)
        if unknown is not None:
            x = masked(x, unknown)

        gradients = {}
        failure = None
        try:
            gradients = self._gradients(point, x, y)
        except RAISED_BY_USERS as error:
            failure = type(error).__name__
        # Outside of `except`: an error raised in it would carry the other one, with its message, along.
        if failure is not None:
            raise RunError(
                f"the model's forward raised {failure} on private examples (its message is withheld because it may "
                "reveal them); try it on inputs of every size",
                code="code.withheld",
            )

        if unknown is not None:
            gradients = {name: masked(gradient, unknown, math.nan) for name, gradient in gradients.items()}
        return [Stored(self._layout[name], gradient) for name, gradient in gradients.items()]

    def _parts(self, examples: int, element_size: int) -> list[slice]:
        numbers = max(self.d, _KEPT * self._activations)
        return row_chunks(examples, numbers * element_size, min(self._memory, _WRITTEN_BYTES))

    def _logit_parts(self, examples: int, x: Tensor) -> list[slice]:
        # Few tokens may become many numbers: a model's width for each, and a matrix of attention.
        return row_chunks(examples, self._activations * _LARGEST_ELEMENT, self._memory)
