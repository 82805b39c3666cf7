"""Losses of one example: the value, its derivative in the outputs, and what the outputs predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flower_privdec import catalogue
from flower_privdec.errors import ScenarioError
from flower_privdec.tasks.kinds import LOSS_KINDS, Targets

OutputFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss over the last axis of the outputs, one value for each example.

    Targets of the kind `classes` are whole numbers [...]; `numbers` and `labels` are floats [..., w].

    Attributes:
        name: its name in a scenario.
        value: (outputs [..., k], targets) -> losses [...]; autograd can differentiate it.
        derivative: (outputs, targets) -> d loss / d outputs [..., k], a new tensor.
        targets: the kind of target that it accepts.
        single: whether there is one output; its sign is the predicted class, 1 or 0.
        outputs: how many there must be; None where the targets determine it.
        width: the number of targets of an example, where it differs from the number of outputs.
    """

    name: str
    value: OutputFunction
    derivative: OutputFunction
    targets: Targets = "classes"
    single: bool = False
    outputs: int | None = None
    width: int | None = None

    def n_outputs(self, width: int) -> int:
        """Return how many outputs the model must have.

        Args:
            width: how many classes there are, or how many numbers or labels an example has.

        Raises:
            ScenarioError: a margin loss with other than two classes.
        """
        if self.single and width != 2:
            message = f"task.loss={self.name!r} needs two classes, not {width}: use cross-entropy"
            raise ScenarioError(message, code="loss.classes")
        return 1 if self.single else self.outputs or width

    def predict(self, outputs: Tensor) -> Tensor:
        """Return what outputs [..., k] predict: classes [...], or for each label 0 or 1, or the numbers."""
        if self.targets == "classes":
            return (outputs[..., 0] > 0).long() if self.single else outputs.argmax(-1)
        return (outputs > 0).long() if self.targets == "labels" else outputs

    def blank(self, outputs: Tensor) -> Tensor:
        """Return all-zero targets of the shape that this loss expects for outputs [..., k]."""
        if self.targets == "classes":
            return torch.zeros(outputs.shape[:-1], dtype=torch.int64, device=outputs.device)
        return outputs.new_zeros(*outputs.shape[:-1], self.width or outputs.shape[-1])


def resolve_loss(loss: str | Loss) -> Loss:
    """Return a loss by its name in LOSSES.

    Raises:
        ScenarioError: an unknown name.
    """
    if isinstance(loss, Loss):
        return loss
    catalogue.LOSSES.check(loss, "task.loss")
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
    negative_sign = torch.rsub(labels.unsqueeze(-1).to(outputs.dtype), 1, alpha=2)  # -1 for class 1, 1 for class 0
    return negative_sign.mul_((negative_sign * outputs).gt(-1))


def _squared_hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.relu(1 - _margin(outputs, labels)).square()


def _squared_hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    sign = _sign(outputs, labels)
    return (1 - sign * outputs).clamp_(min=0).mul_(sign).mul_(-2)


def _error(outputs: Tensor, numbers: Tensor) -> Tensor:
    return outputs - numbers.to(outputs.dtype)


def _mse(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).square().mean(-1)


def _mse_derivative(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).mul_(2 / outputs.shape[-1])


def _mae(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).abs().mean(-1)


def _mae_derivative(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).sign_().div_(outputs.shape[-1])


def _huber(outputs: Tensor, numbers: Tensor) -> Tensor:
    absolute_error = _error(outputs, numbers).abs()
    return torch.where(absolute_error < 1, absolute_error.square() / 2, absolute_error - 0.5).mean(-1)


def _huber_derivative(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).clamp_(-1, 1).div_(outputs.shape[-1])


def _binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return (functional.softplus(outputs) - labels.to(outputs.dtype) * outputs).mean(-1)


def _binary_cross_entropy_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(outputs).sub_(labels.to(outputs.dtype)).div_(outputs.shape[-1])


def _built_in(name: str, value: OutputFunction, derivative: OutputFunction, *, single: bool = False) -> Loss:
    return Loss(name, value, derivative, LOSS_KINDS[name].targets, single)


LOSSES = {
    loss.name: loss
    for loss in (
        _built_in("cross-entropy", _cross_entropy, _cross_entropy_derivative),
        _built_in("logistic", _logistic, _logistic_derivative, single=True),
        _built_in("hinge", _hinge, _hinge_derivative, single=True),
        _built_in("squared-hinge", _squared_hinge, _squared_hinge_derivative, single=True),
        _built_in("mse", _mse, _mse_derivative),
        _built_in("mae", _mae, _mae_derivative),
        _built_in("huber", _huber, _huber_derivative),
        _built_in("binary-cross-entropy", _binary_cross_entropy, _binary_cross_entropy_derivative),
    )
}
