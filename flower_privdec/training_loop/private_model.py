"""The user's model and criterion, through which nothing but a clipped sum comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.training_loop.clipped_sum import ClippedSum, Criterion
from flower_privdec.training_loop.noised_steps import Drawn, NoisedSteps

CALL = "_flower_privdec_call"  # an attribute of outputs: what the model was called with


@dataclass(frozen=True)
class _Call:
    """What a model was called with, the version of what it returned, and the batch that awaited its step then."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    version: int
    of: Drawn | None


class PrivateModel(nn.Module):
    """The user's model; its state_dict, its parameters and whatever else it has are those of the model itself.

    Where gradients are on, what it returns has none of its own: only the private criterion makes a loss of it.
    """

    def __init__(self, module: nn.Module, clipped_sum: ClippedSum, steps: NoisedSteps) -> None:
        """Wrap a model whose clipped sums are known."""
        super().__init__()
        self.module = module
        self._clipped_sum, self._steps = clipped_sum, steps
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs for a batch; buffers stay as they were, for they would leave with the model.

        Raises:
            ScenarioError: where gradients are on and these are not one tensor.
        """
        if not torch.is_grad_enabled():
            kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            return functional_call(self.module, kept, args, kwargs)  # what they became of these examples is forgotten
        output = self._clipped_sum.outputs(args, kwargs)
        if not isinstance(output, Tensor):
            raise ScenarioError(
                f"the model returns a {type(output).__name__}: it must return one tensor [examples, ...]"
            )
        sealed: Tensor = _Sealed.apply(output.requires_grad_() if output.is_floating_point() else output)
        setattr(sealed, CALL, _Call(args, kwargs, sealed._version, self._steps.drawn))
        return sealed

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the model's own; `assign` would put other parameters in the place of those that are watched.

        Raises:
            ScenarioError: assign.
        """
        if assign:
            raise ScenarioError(
                "assign=True must be left out: the optimizer and the noise hold the parameters as they are"
            )
        return self.module.load_state_dict(state_dict, strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the model's own, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the model's own, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class PrivateCriterion(nn.Module):
    """The user's criterion; what backward() brings of its loss is the clipped sum of the batch."""

    def __init__(self, criterion: Criterion, clipped_sum: ClippedSum, steps: NoisedSteps) -> None:
        """Wrap a criterion, called as criterion(outputs, targets, ...).

        Raises:
            ScenarioError: class weights that a mean over one example would cancel.
        """
        super().__init__()
        by_class = isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.weight is not None
        if by_class and getattr(criterion, "reduction", None) == "mean":
            raise ScenarioError(
                f"{type(criterion).__name__}(weight=...) divides by the weights of a batch, which cancels them where "
                "each example is alone: give it reduction='sum'"
            )
        self.criterion = criterion
        self._clipped_sum, self._steps = clipped_sum, steps

    def forward(self, outputs: Tensor, *targets: Any) -> Tensor:
        """Return the loss of a batch.

        Raises:
            RunError: the outputs are no longer what the model returned.
        """
        call: _Call | None = getattr(outputs, CALL, None)
        if not torch.is_grad_enabled():
            return self.criterion(outputs, *targets)
        if call is None or call.version != outputs._version:
            raise RunError(
                "the criterion must be given what the model returned, as it is, for what is done between could mix "
                "examples: move that into the model or into the criterion"
            )
        shown = self._clipped_sum.loss(outputs, targets)
        total, examples = (None, 0) if call.of is None else self._clipped_sum(call.args, call.kwargs, targets)
        arrive = partial(self._steps.arrive, total, examples, call.of)
        loss: Tensor = _Loss.apply(torch.zeros((), requires_grad=True), shown, arrive)
        return loss


class _Sealed(torch.autograd.Function):
    """Outputs through which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor) -> Tensor:
        return outputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RunError(
            "a loss was computed from the model's outputs without the criterion that private() returned, so that its "
            "gradient is not clipped: use that criterion alone"
        )


class _Loss(torch.autograd.Function):
    """A loss whose backward pass hands on the sum that was clipped when the loss was computed."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, shown: Tensor, arrive: Callable[[], None]) -> Tensor:
        ctx.arrive = arrive
        return shown.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0].numel() != 1 or float(gradients[0]) != 1.0:
            raise RunError(
                "the loss was changed before backward() (divided, scaled by a GradScaler, averaged, squared?), which "
                "the clipping would not see: call backward() on what the criterion returned; a scale belongs into the "
                "learning rate, mixed precision into torch.autocast with bfloat16, which needs no scaler"
            )
        ctx.arrive()
        return None, None, None
