"""Gradients of any module, example by example: torch.func over a few at once, and a plain loop (the oracle)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.gradients.bounds import beyond, upper
from flower_privdec.gradients.losses import Loss
from flower_privdec.gradients.protocol import LabelledInputs, reason, row_chunks
from flower_privdec.gradients.rows import Piece, RowKernel, Stored
from flower_privdec.models import flatten, unflatten

_WRITTEN_BYTES = 2**26  # gradients written out at once; a call of vmap costs about 2 ms whatever it does


class VmapKernel(RowKernel):
    """The kernel for any module: vmap of grad over a few examples of a row at a time; see GradientKernel.

    The module's forward sees one example, as a batch of one, and vmap lets no operation reach another. Each call
    works on a fresh copy of the module, so that what its forward keeps in the module's attributes is forgotten
    (buffers and parameters are shared; vmap refuses to write an example's numbers into them). What the forward keeps
    elsewhere, in globals, closures, classes or files, can carry numbers from one example to the gradient of a later
    one: **of a module that does so nothing is promised.**
    """

    def __init__(self, module: nn.Module, loss: Loss, input_shape: Sequence[int], memory_bytes: int) -> None:
        """Take any module and try it on public numbers.

        Raises:
            ScenarioError: vmap cannot differentiate the module.
        """
        super().__init__(module, module, loss, memory_bytes)
        self._try(module, input_shape)

    def _try(self, module: nn.Module, input_shape: Sequence[int]) -> None:
        """Differentiate zeros and random numbers of [0, 1), which are good indices too once they are integers."""
        like, generator = next(module.parameters()), torch.Generator().manual_seed(0)
        x = torch.stack([torch.zeros(*input_shape), torch.rand(*input_shape, generator=generator)]).to(like)
        row, y = flatten(module), torch.zeros(2, dtype=torch.int64, device=like.device)
        try:
            with torch.random.fork_rng(devices=[]):
                self._gradients(row, x, y)
        except Exception as error:  # the user's forward may raise anything
            raise ScenarioError(
                f"the model cannot be clipped example by example: {reason(error)}; write "
                "its forward with torch operations alone (torch.where for a choice, no .item(), no random numbers, no "
                "change of buffers), so that it takes one example [1, ...] to [1, outputs] under torch.func.vmap"
            ) from None

    def _gradients(self, point: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of examples, by the names of the parameters."""
        module = self._fresh()

        def value(views: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output: Tensor = functional_call(module, views, (x[None],))
            if output.ndim != 2 or len(output) != 1:
                raise ValueError(f"one example is turned into {list(output.shape)}: it must be [1, outputs]")
            return self._loss.value(output, y[None]).sum()

        gradients: dict[str, Tensor] = vmap(grad(value), in_dims=(None, 0, 0))(self._views(point), x, y)
        return gradients

    def _fresh(self) -> nn.Module:
        """Return a copy of the module that shares its parameters and buffers."""
        shared = {id(tensor): tensor for tensor in (*self._module.parameters(), *self._module.buffers())}
        return copy.deepcopy(self._module, shared)

    def _views(self, row: Tensor) -> dict[str, Tensor]:
        return {name: place.view(row) for name, place in self._layout.items()}

    def _outputs(self, row: Tensor, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._fresh(), self._views(row), (x,))
        return outputs

    def _pieces(self, point: Tensor, x: Tensor, y: Tensor) -> Sequence[Piece]:
        """See RowKernel.

        Raises:
            RunError: the module fails on these examples, without what it said, which may tell of them.
        """
        gradients, failure = {}, None
        try:
            gradients = self._gradients(point, x, y)
        except Exception as error:
            failure = type(error).__name__
        if failure is not None:  # raised here, an error that does not carry the other one along
            raise RunError(
                f"the model's forward raised {failure} on private examples (what it said is withheld, for it may tell "
                "of them); try it on inputs of every size"
            )
        return [Stored(self._layout[name], gradient) for name, gradient in gradients.items()]

    def _parts(self, examples: int, element_size: int) -> list[slice]:
        return row_chunks(examples, self.d * element_size, min(self._memory, _WRITTEN_BYTES))


class LoopKernel:
    """The oracle: one module, one example, one backward pass at a time; see GradientKernel."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._module, self._loss = module, loss
        self.d = sum(parameter.numel() for parameter in module.parameters())

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
        m, examples = batch.y.shape
        norms = params.new_empty(m, examples)
        for i in range(m):
            model = self._model(params[i] if divisor is None else params[i] / divisor[i])
            total = torch.zeros_like(params[i])
            for b in range(examples):
                gradient = example_gradient(model, self._loss, batch.x[i, b].to(params.dtype), batch.y[i, b])
                norms[i, b] = upper(gradient)
                bad = beyond(norms[i, b])
                if bad is not None:
                    gradient, norms[i, b] = gradient.masked_fill(bad, 0), norms[i, b].masked_fill(bad, 0)
                if clip_norm is not None and norms[i, b] > clip_norm[i]:
                    gradient *= clip_norm[i] / norms[i, b]
                total += batch.weight[i, b] * gradient
            out[i] += scale[i] * total
        return norms

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """Return the outputs [m, N, k] for shared inputs; see GradientKernel."""
        with torch.no_grad():
            return torch.stack([self._model(row)(x.to(params.dtype)) for row in params])

    def _model(self, row: Tensor) -> nn.Module:
        return unflatten(copy.deepcopy(self._module).to(row), row)


def example_gradient(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [d] of one example's loss by one backward pass."""
    value = loss.value(model(x[None]), y[None]).sum()
    gradients = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients])
