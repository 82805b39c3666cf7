"""Losses of one example: the value, its derivative in the outputs, and the class the outputs predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flower_privdec.errors import ScenarioError
from flower_privdec.words import did_you_mean

OutputFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss over the last axis of the outputs, one value for each example.

    Attributes:
        name: its name in a scenario.
        value: (outputs [..., k], labels [...]) -> losses [...]; autograd can differentiate it.
        derivative: (outputs, labels) -> d loss / d outputs [..., k], a new tensor.
        single: whether there is one output, whose sign separates label 1 from label 0.
    """

    name: str
    value: OutputFunction
    derivative: OutputFunction
    single: bool = False

    def n_outputs(self, n_classes: int) -> int:
        """Return how many outputs the model must have.

        Raises:
            ScenarioError: a margin loss with other than two classes.
        """
        if self.single and n_classes != 2:
            raise ScenarioError(f"loss={self.name!r} needs two classes, not {n_classes}: use cross-entropy")
        return 1 if self.single else n_classes

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predicted labels [...] of outputs [..., k]."""
        return (outputs[..., 0] > 0).long() if self.single else outputs.argmax(-1)


def resolve_loss(loss: str | Loss) -> Loss:
    """Return a loss by its name in LOSSES.

    Raises:
        ScenarioError: an unknown name.
    """
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise ScenarioError(f"loss={loss!r} must be one of {', '.join(LOSSES)}{did_you_mean(loss, LOSSES)}")
    return LOSSES[loss]


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.logsumexp(-1) - outputs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _cross_entropy_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    minus_one = torch.full((1,) * outputs.ndim, -1.0, dtype=outputs.dtype, device=outputs.device)
    index = labels.unsqueeze(-1)
    return outputs.softmax(-1).scatter_add_(-1, index, minus_one.expand(index.shape))


def _sign(outputs: Tensor, labels: Tensor) -> Tensor:
    """Labels 0 and 1 as -1 and +1, in the shape of the single output."""
    return labels.unsqueeze(-1).to(outputs.dtype).mul_(2).sub_(1)


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    return (_sign(outputs, labels) * outputs).squeeze(-1)


def _logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.softplus(-_margin(outputs, labels))


def _logistic_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(outputs) - labels.unsqueeze(-1).to(outputs.dtype)


def _hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.relu(1 - _margin(outputs, labels))


def _hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    down = torch.rsub(labels.unsqueeze(-1).to(outputs.dtype), 1, alpha=2)  # minus the sign
    return down.mul_((down * outputs).gt(-1))


def _squared_hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.relu(1 - _margin(outputs, labels)).square()


def _squared_hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    sign = _sign(outputs, labels)
    return (1 - sign * outputs).clamp_(min=0).mul_(sign).mul_(-2)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross-entropy", _cross_entropy, _cross_entropy_derivative),
        Loss("logistic", _logistic, _logistic_derivative, single=True),
        Loss("hinge", _hinge, _hinge_derivative, single=True),
        Loss("squared-hinge", _squared_hinge, _squared_hinge_derivative, single=True),
    )
}
