"""The optimizer's step on the noised mean: one batch, one backward pass, one step, in that order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.privacy.noise import NoiseSource

MARK = "_flower_privdec_steps"  # an attribute of an optimizer whose steps are noised
GUARD = "_flower_privdec_guard"  # of a parameter that no other gradient may reach
NOBODY = np.zeros(1, dtype=np.int64)  # the peer of a process that hosts one


@dataclass(eq=False)
class Drawn:
    """A batch that was drawn and paid for, and for which no step was taken yet.

    Attributes:
        size: how many examples it has.
        number: of its step.
        total: the sum of their clipped gradients, once it has arrived.
    """

    size: int
    number: int
    total: Tensor | None = None


class NoisedSteps:
    """Gives an optimizer, before each of its steps, the noised mean of a batch as its gradient.

        grad = (sum_b g_b min(1, C / |g_b|) + σ C N(0, I)) / expected batch

    (Abadi et al. 2016, Alg. 1.) Everything else is the optimizer's own. What is not one backward pass over one drawn
    batch between two steps is refused, for its cost was not counted.

    Attributes:
        drawn: the batch that awaits its step, or None.

    Privacy: one release of the step's mechanism, paid by whoever calls `draw`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: dict[str, Tensor],
        noise: NoiseSource,
        *,
        clip_norm: float,
        noise_multiplier: float,
        expected_batch: float,
    ) -> None:
        """Hook into an optimizer and watch its parameters.

        Raises:
            ScenarioError: the optimizer is in use by another call of this.
        """
        if hasattr(optimizer, MARK):
            raise ScenarioError("this optimizer is private already: keep what private() returned, or close() it first")
        self._optimizer, self._parameters, self._noise = optimizer, parameters, noise
        self._std, self._divisor = noise_multiplier * clip_norm, expected_batch
        self.drawn: Drawn | None = None
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        setattr(optimizer, MARK, self)
        for name, parameter in parameters.items():
            parameter.grad = None  # one from before is not noised, and anybody's step would take it
            _guard(name, parameter, self)

    def draw(self, size: int, number: int) -> None:
        """Take note of a batch that was drawn and paid for; see `check_taken`."""
        self.check_taken()
        self.drawn = Drawn(size, number)

    def check_taken(self) -> None:
        """Check that a step was taken for the last batch.

        Raises:
            RunError: none was.
        """
        if self.drawn is not None:
            self.drawn = None
            raise RunError(
                "a batch was drawn and no step taken for it, which tells something of its examples that was not "
                "counted: take optimizer.step() for each batch, whatever it holds"
            )

    def arrive(self, total: Tensor | None, examples: int, of: Drawn | None) -> None:
        """Take the clipped sum of the drawn batch, from its backward pass.

        Args:
            of: the batch that awaited its step when the model was called.

        Raises:
            RunError: no batch awaits it, it is of another batch, or is the second one.
        """
        if self.drawn is None or of is not self.drawn:
            raise RunError(
                "loss.backward() without a batch of the private loader, or of one before: iterate over what private() "
                "returned, and call the model and backward() once for each batch"
            )
        if self.drawn.total is not None:
            raise RunError(
                "loss.backward() came twice for one batch, which would count its examples twice (gradient "
                "accumulation, two losses?): call it once before each step, and make batch_size larger instead"
            )
        if examples != self.drawn.size:
            raise RunError(
                "loss.backward() is over another number of examples than the loader drew: give the model every batch "
                "whole, as it was drawn"
            )
        self.drawn.total = total

    def step_on_noise(self, number: int) -> None:
        """Take the step of a batch into which nobody was drawn: noise alone."""
        self.draw(0, number)
        self._optimizer.step()

    def close(self) -> None:
        """Leave the optimizer and its parameters to whoever uses them next, without privacy."""
        self._handle.remove()
        if getattr(self._optimizer, MARK, None) is self:
            delattr(self._optimizer, MARK)
        for parameter in self._parameters.values():
            handle, owner = getattr(parameter, GUARD, (None, None))
            if handle is not None and owner is self:
                handle.remove()
                delattr(parameter, GUARD)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RunError(
                "optimizer.step(closure) evaluates a batch more than once, and one release was paid: call "
                "loss.backward() and step() without a closure (LBFGS cannot be private)"
            )
        known = {id(parameter) for parameter in self._parameters.values()}
        if not all(
            id(each) in known for group in optimizer.param_groups for each in group["params"] if each.requires_grad
        ):
            raise RunError(
                "the optimizer was given more parameters after private(), whose gradients are not clipped: give it all "
                "before"
            )
        drawn, self.drawn = self.drawn, None
        if drawn is None:
            raise RunError("optimizer.step() without a batch of the private loader: take one step for each batch")
        if drawn.total is None and drawn.size:
            raise RunError(
                "optimizer.step() without loss.backward() through the model and the criterion that private() returned"
            )
        self._release(drawn)

    @torch.no_grad()
    def _release(self, drawn: Drawn) -> None:
        """Noise a batch's sum and lay its mean over the parameters as their gradients."""
        like = next(iter(self._parameters.values()))
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        row = like.new_zeros(sum(sizes)) if drawn.total is None else drawn.total.clone()
        self._noise.add_(row[None], row.new_tensor([self._std]), drawn.number, NOBODY)
        row /= self._divisor
        for parameter, part in zip(self._parameters.values(), row.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _guard(name: str, parameter: Tensor, owner: NoisedSteps) -> None:
    """Refuse whatever gradient reaches a parameter past the clipping, until its last owner is closed."""
    if hasattr(parameter, GUARD):
        setattr(parameter, GUARD, (getattr(parameter, GUARD)[0], owner))
        return

    def refuse(gradient: Tensor) -> None:
        raise RunError(
            f"a gradient reached {name} past the model and the criterion that private() returned, neither clipped nor "
            "counted: use these alone in the loss (weight decay: the optimizer's weight_decay)"
        )

    setattr(parameter, GUARD, (parameter.register_hook(refuse), owner))
