"""Losses and metrics of a user's own, for tests: scenarios name them as `user_tasks:name`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NOT_A_FUNCTION = 3


def cross_entropy(outputs: Tensor, label: Tensor) -> Tensor:
    """Return the softmax cross-entropy of one example."""
    return functional.cross_entropy(outputs, label)


def squares(outputs: Tensor, numbers: Tensor) -> Tensor:
    """Return the mean squared error of one example, after changing what it was given."""
    loss = (outputs - numbers).square().mean()
    outputs.mul_(0)
    numbers.mul_(0)
    return loss


def gaussian(outputs: Tensor, numbers: Tensor) -> Tensor:
    """Return the negative log-likelihood of a number by its mean and the logarithm of its variance: two outputs."""
    mean, log_variance = outputs
    return ((numbers[0] - mean).square() / log_variance.exp() + log_variance) / 2


def huge(outputs: Tensor, label: Tensor) -> Tensor:
    """Return a loss whose gradient is no number for some examples and beyond all bounds for others."""
    return torch.where(outputs[0] > 0, math.nan, 1e30 * outputs.sum()) + label * 0


def pair(outputs: Tensor, _label: Tensor) -> Tensor:
    """Return two numbers."""
    return outputs[:2]


def by_hand(outputs: Tensor, label: Tensor) -> Tensor:
    """Look at a number, which an example by itself has none of."""
    return outputs[0] if outputs[1].item() > 0 else outputs[2] + label


def number(_outputs: Tensor, _label: Tensor) -> float:
    """Return a float, of which there is no gradient."""
    return 1.0


class Together(torch.autograd.Function):
    """The sum over all the examples of a vmap, by a rule of its own."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:
        """Return the derivative."""
        return delta

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        """See all examples."""
        return Together.apply(x.sum(0, keepdim=True).expand_as(x)), 0


def together(outputs: Tensor, label: Tensor) -> Tensor:
    """Let the examples see one another."""
    return functional.cross_entropy(Together.apply(outputs), label)


def near(outputs: Tensor, numbers: Tensor) -> float:
    """Return the share of numbers that are missed by less than 1/2."""
    return float(((outputs - numbers).abs() < 0.5).double().mean())


def nothing(_outputs: Tensor, _targets: Tensor) -> float:
    """Return what is no number."""
    return math.nan


def failing(_outputs: Tensor, _targets: Tensor) -> float:
    """Fail."""
    raise ValueError("no such thing")


WEIGHTS = torch.tensor([1.0, 20.0, 0.0, 3.0, 1.0, 0.5, 1.0, 7.0, 1.0, 1.0])


def weighed(outputs: Tensor, label: Tensor) -> Tensor:
    """Return the cross-entropy of one example times the weight of its class."""
    return WEIGHTS.to(outputs).gather(0, label[None])[0] * functional.cross_entropy(outputs, label)


def summed(outputs: Tensor, label: Tensor) -> Tensor:
    """Return the same by torch's own weights, which a sum keeps."""
    return functional.cross_entropy(outputs, label, weight=WEIGHTS.to(outputs), reduction="sum")


def cancelling(outputs: Tensor, label: Tensor) -> Tensor:
    """Return a cross-entropy whose weights cancel, since a mean divides by them."""
    return functional.cross_entropy(outputs, label, weight=WEIGHTS.to(outputs) + 1)


def cancelling_by_hand(outputs: Tensor, label: Tensor) -> Tensor:
    """Return a weighted mean over whatever it is given."""
    weights = ((WEIGHTS.to(outputs) + 1) * (torch.arange(10) == label[..., None])).sum(-1)
    return (weights * functional.cross_entropy(outputs, label, reduction="none")).sum() / weights.sum()


def error(outputs: Tensor, label: Tensor) -> Tensor:
    """Return 1 if the class is missed, whose gradient is zero."""
    return (outputs.argmax() != label).to(outputs) + 0 * outputs.sum()


def norm(outputs: Tensor, label: Tensor) -> Tensor:
    """Return the distance of one example, which is no distance of a batch."""
    return (outputs - (torch.arange(10) == label[..., None]).to(outputs)).norm()


def of_chances(outputs: Tensor, label: Tensor) -> Tensor:
    """Return a loss of chances, which is no number for other outputs."""
    return -(outputs.log() * (torch.arange(len(outputs)) == label)).sum() + (1 - outputs).log().sum() * 0
