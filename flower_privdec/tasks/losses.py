"""Losses of one example: value, derivative in the outputs, and what the outputs predict.

Every built-in loss is a pair of functions of outputs [..., k] and targets; the second one is the derivative, written
out, so that no graph of autograd is made. A derivative is a new tensor, which its caller
may overwrite, so its own last steps work in place. A user's own loss is in `own_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from flower_privdec.common import catalogue
from flower_privdec.common.catalogue import LOSS_KINDS, Targets
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError

if TYPE_CHECKING:
    from torch import Tensor

OutputFunction: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"


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
        outputs: how many there must be; None if the targets determine it.
        width: the number of targets of an example, if it differs from the number of outputs.
        class_weights: the factor of `value` and `derivative` for the examples of each class; None for 1.
        plain: the loss without these weights; None if there are none.
    """

    name: str
    value: OutputFunction
    derivative: OutputFunction
    targets: Targets = "classes"
    single: bool = False
    outputs: int | None = None
    width: int | None = None
    class_weights: tuple[float, ...] | None = None
    plain: Loss | None = None

    def weighted(self, class_weights: Sequence[float]) -> Loss:
        """Return this loss, with each example's multiplied by the public weight of its class.

        Raises:
            ScenarioError: there is not one weight for each class.
        """
        if len(class_weights) != self.width:
            raise ScenarioError(
                f"task.class_weights has {len(class_weights)} numbers, and there are {self.width} classes: give one "
                "for each class, in their order",
                code="task.class-weights",
            )

        weights = tuple(class_weights)

        def value(outputs: Tensor, labels: Tensor) -> Tensor:
            return self.value(outputs, labels) * weights_of(weights, labels, outputs)

        def derivative(outputs: Tensor, labels: Tensor) -> Tensor:
            return self.derivative(outputs, labels).mul_(weights_of(weights, labels, outputs).unsqueeze(-1))

        return replace(self, value=value, derivative=derivative, class_weights=weights, plain=self)

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
        if self.single:
            return 1
        return self.outputs or width

    def predict(self, outputs: Tensor) -> Tensor:
        """Return what outputs [..., k] predict: classes [...], or for each label 0 or 1, or the numbers."""
        if self.targets == "numbers":
            return outputs
        if self.targets == "labels":
            return (outputs > 0).long()
        if self.single:
            return (outputs[..., 0] > 0).long()
        return outputs.argmax(-1)

    def blank(self, outputs: Tensor) -> Tensor:
        """Return all-zero targets of the shape that this loss expects for outputs [..., k]."""
        if self.targets == "classes":
            return torch.zeros(outputs.shape[:-1], dtype=torch.int64, device=outputs.device)
        return outputs.new_zeros(*outputs.shape[:-1], self.width or outputs.shape[-1])


def weights_of(class_weights: tuple[float, ...], labels: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each example's class, [...], in the type of other numbers."""
    return _table(class_weights, like.dtype, like.device)[labels]


@cache
def _table(class_weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights as a tensor, made once: each copy from the host would wait for the GPU."""
    return torch.tensor(class_weights, dtype=dtype, device=device)


def resolve_loss(loss: str | Loss) -> Loss:
    """Return a loss by its name in LOSSES.

    Raises:
        ScenarioError: an unknown name.
    """
    if isinstance(loss, Loss):
        return loss
    catalogue.LOSSES.check(loss, "task.loss")
    return LOSSES[loss]


# --- classes: labels int64 [...] ---


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    of_label = outputs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return outputs.logsumexp(-1) - of_label


def _cross_entropy_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    minus_one = torch.full((1,) * outputs.ndim, -1.0, dtype=outputs.dtype, device=outputs.device)
    index = labels.unsqueeze(-1)
    return outputs.softmax(-1).scatter_add_(-1, index, minus_one.expand(index.shape))


def _sign(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return labels 0 and 1 as -1 and +1, in the shape of the single output, [..., 1]."""
    return labels.unsqueeze(-1).to(outputs.dtype).mul_(2).sub_(1)


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how far each example is on the right side of 0, [...]."""
    return (_sign(outputs, labels) * outputs).squeeze(-1)


def _logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.softplus(-_margin(outputs, labels))


def _logistic_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(outputs) - labels.unsqueeze(-1).to(outputs.dtype)


def _hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.relu(1 - _margin(outputs, labels))


def _hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    negative_sign = torch.rsub(labels.unsqueeze(-1).to(outputs.dtype), 1, alpha=2)  # -1 for class 1, 1 for class 0
    is_short = (negative_sign * outputs).gt(-1)
    return negative_sign.mul_(is_short)


def _squared_hinge(outputs: Tensor, labels: Tensor) -> Tensor:
    return _hinge(outputs, labels).square()


def _squared_hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    sign = _sign(outputs, labels)
    return (1 - sign * outputs).clamp_(min=0).mul_(sign).mul_(-2)


# --- numbers and labels: float [..., k], means over k ---


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
    small = absolute_error.square() / 2
    large = absolute_error - 0.5
    return torch.where(absolute_error < 1, small, large).mean(-1)


def _huber_derivative(outputs: Tensor, numbers: Tensor) -> Tensor:
    return _error(outputs, numbers).clamp_(-1, 1).div_(outputs.shape[-1])


def _binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return (torch.nn.functional.softplus(outputs) - labels.to(outputs.dtype) * outputs).mean(-1)


def _binary_cross_entropy_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.sigmoid(outputs).sub_(labels.to(outputs.dtype)).div_(outputs.shape[-1])


_SINGLE = ("logistic", "hinge", "squared-hinge")
_FUNCTIONS: dict[str, tuple[OutputFunction, OutputFunction]] = {  # value, derivative
    "cross-entropy": (_cross_entropy, _cross_entropy_derivative),
    "logistic": (_logistic, _logistic_derivative),
    "hinge": (_hinge, _hinge_derivative),
    "squared-hinge": (_squared_hinge, _squared_hinge_derivative),
    "mse": (_mse, _mse_derivative),
    "mae": (_mae, _mae_derivative),
    "huber": (_huber, _huber_derivative),
    "binary-cross-entropy": (_binary_cross_entropy, _binary_cross_entropy_derivative),
}
LOSSES = {
    name: Loss(name, value, derivative, LOSS_KINDS[name].targets, single=name in _SINGLE)
    for name, (value, derivative) in _FUNCTIONS.items()
}
