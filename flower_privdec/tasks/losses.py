"""Losses of one example, built in or a user's own: value, derivative in the outputs, and what the outputs predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from flower_privdec.common import catalogue
from flower_privdec.common.catalogue import LOSS_KINDS, Targets
from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import load_own
from flower_privdec.tasks.additivity import Trial, refuse, weights_cancel

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
        class_weights: by which `value` and `derivative` of an example of each class were multiplied; None for 1.
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
        """Return this loss, of which each example's is multiplied by a public weight of its class.

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


def weights_of(class_weights: tuple[float, ...], labels: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each example's class, [...], in the type of other numbers."""
    return _table(class_weights, like.dtype, like.device)[labels]


@cache
def _table(class_weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights as a tensor, made once: a copy to a GPU would wait for it."""
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


def _hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    negative_sign = torch.rsub(labels.unsqueeze(-1).to(outputs.dtype), 1, alpha=2)  # -1 for class 1, 1 for class 0
    return negative_sign.mul_((negative_sign * outputs).gt(-1))


def _squared_hinge_derivative(outputs: Tensor, labels: Tensor) -> Tensor:
    sign = _sign(outputs, labels)
    return (1 - sign * outputs).clamp_(min=0).mul_(sign).mul_(-2)


def _error(outputs: Tensor, numbers: Tensor) -> Tensor:
    return outputs - numbers.to(outputs.dtype)


def _huber(outputs: Tensor, numbers: Tensor) -> Tensor:
    absolute_error = _error(outputs, numbers).abs()
    return torch.where(absolute_error < 1, absolute_error.square() / 2, absolute_error - 0.5).mean(-1)


_FUNCTIONS: dict[str, tuple[OutputFunction, OutputFunction]] = {  # of outputs o and targets y: value, derivative
    "cross-entropy": (_cross_entropy, _cross_entropy_derivative),
    "logistic": (
        lambda o, y: functional.softplus(-_margin(o, y)),
        lambda o, y: torch.sigmoid(o) - y.unsqueeze(-1).to(o.dtype),
    ),
    "hinge": (lambda o, y: torch.relu(1 - _margin(o, y)), _hinge_derivative),
    "squared-hinge": (lambda o, y: torch.relu(1 - _margin(o, y)).square(), _squared_hinge_derivative),
    "mse": (lambda o, y: _error(o, y).square().mean(-1), lambda o, y: _error(o, y).mul_(2 / o.shape[-1])),
    "mae": (lambda o, y: _error(o, y).abs().mean(-1), lambda o, y: _error(o, y).sign_().div_(o.shape[-1])),
    "huber": (_huber, lambda o, y: _error(o, y).clamp_(-1, 1).div_(o.shape[-1])),
    "binary-cross-entropy": (
        lambda o, y: (functional.softplus(o) - y.to(o.dtype) * o).mean(-1),
        lambda o, y: torch.sigmoid(o).sub_(y.to(o.dtype)).div_(o.shape[-1]),
    ),
}
LOSSES = {
    name: Loss(name, *functions, LOSS_KINDS[name].targets, single=name in ("logistic", "hinge", "squared-hinge"))
    for name, functions in _FUNCTIONS.items()
}


TRIAL_EXAMPLES = 2  # examples, of public random numbers


def own_loss(target: str, targets: Targets, outputs: int | None = None) -> Loss:
    """Return a loss that a user's function computes for one example.

    The function is given one example's outputs [k] and its target: a class, whole and without axes, or numbers or
    labels [w]. It returns the loss, a tensor without axes. It is called under torch.func.vmap, on copies, so that it
    can neither see another example nor change this one. What it keeps elsewhere, in globals or files, can carry numbers
    from one example to a later one: such a function is not private.

    Args:
        outputs: how many the model must have, where that is not what the targets say.

    Raises:
        ScenarioError: the function cannot be had.
    """
    one = _on_copies(target)
    value, derivative = (_example_by_example(target, part) for part in (one, grad(one)))
    return Loss(target, value, derivative, targets, outputs=outputs)


def _on_copies(target: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a user's function of an example, which gets copies."""
    function = load_own(target, "task.loss.module", must_be="a function of an example's outputs and target")

    def one(outputs: Tensor, wanted: Tensor) -> Tensor:
        value: Tensor = function(outputs.clone(), wanted.clone())
        return value.to(outputs.dtype)

    return one


def _example_by_example(target: str, function: OutputFunction) -> OutputFunction:
    """Call a function of one example for every example [...] by itself.

    The messages of its errors, which may reveal examples, are withheld.
    """

    def call(outputs: Tensor, targets: Tensor) -> Tensor:
        lead = outputs.shape[:-1]
        wide = targets.shape[outputs.ndim - 1 :]
        flat = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1, *wide)
        if len(flat[0]) == 0:
            return torch.zeros_like(outputs)
        values = outputs
        failure = None
        try:
            values = vmap(function)(*flat)
        except RAISED_BY_USERS as error:  # a user's own function may raise anything
            failure = type(error).__name__
        if failure is not None:  # raised here, an error that does not carry the other one along
            raise RunError(
                f"task.loss.module={target!r} raised {failure}: its message is withheld, for it may reveal data",
                code="code.withheld",
            )
        return values.reshape(*lead, *values.shape[1:])

    return call


def try_loss(loss: Loss, outputs: int) -> None:
    """Try a user's own loss on random outputs, which reveal no example.

    Raises:
        ScenarioError: it fails, returns no number, would see examples together, has no gradient for an example, or has
            weights of classes that cancel.
    """
    one = _on_copies(loss.name)
    x = torch.randn(TRIAL_EXAMPLES, outputs, generator=torch.Generator().manual_seed(0))
    try:
        with torch.random.fork_rng(devices=[]), no_custom_vmap_rules():
            shape = list(vmap(one)(x, loss.blank(x)).shape[1:])
            if not shape:
                vmap(grad(one))(x, loss.blank(x))
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise ScenarioError(
            f"task.loss.module={loss.name!r} cannot be differentiated example by example: {one_line(error)}; write it "
            "with torch operations alone (torch.where for a choice, gather for an index, no .item()), from outputs and "
            "a target to a number",
            code="loss.not-per-example",
        ) from None
    if shape:
        raise ScenarioError(
            f"task.loss.module={loss.name!r} returns {shape} for an example: it must be one number",
            code="loss.not-a-number",
        )
    trial = Trial()
    for targets in _random_targets(loss, outputs):
        for x in _random_outputs(len(targets), outputs):
            with suppress(*RAISED_BY_USERS), torch.random.fork_rng(devices=[]):
                gradients = vmap(grad(one))(x, targets)
                finite = torch.isfinite(gradients).all(1)
                trial.ran = True
                trial.nan |= not bool(finite.all())
                trial.alive |= bool((finite & gradients.any(1)).any())
    trial.weighs = loss.targets == "classes" and weights_cancel(one, outputs, loss.width or outputs)
    remedy = "give task.class_weights in the place of its own, or reduction='sum'"
    refuse(trial, f"task.loss.module={loss.name!r}", remedy=remedy)


def _random_outputs(count: int, outputs: int) -> Iterator[Tensor]:
    """Yield outputs of some examples, of the kinds that models have: any numbers, chances, shares, and their logs."""
    x = torch.randn(count, outputs, generator=torch.Generator().manual_seed(1))
    yield x
    yield x.sigmoid()
    yield x.softmax(-1)
    yield x.log_softmax(-1)


def _random_targets(loss: Loss, outputs: int) -> Iterator[Tensor]:
    """Yield targets of some examples, of the kinds that a loss could take."""
    generator = torch.Generator().manual_seed(0)
    width = loss.width or outputs
    if loss.targets == "classes":
        yield torch.arange(max(width, TRIAL_EXAMPLES)) % width
        return
    shape = (8, width)
    yield torch.randint(2, shape, generator=generator).float()
    if loss.targets == "numbers":
        yield torch.randn(shape, generator=generator)
        yield torch.rand(shape, generator=generator)


@contextmanager
def no_custom_vmap_rules() -> Iterator[None]:
    """Raise for every autograd.Function whose own vmap rule would see all examples at once.

    What is called under vmap cannot depend on an example's numbers, so that trying it once finds all that is called.
    """
    apply = vars(torch.autograd.Function)["apply"]

    def checked(function: type[torch.autograd.Function], *args: Any, **options: Any) -> Any:
        if function.vmap is not torch.autograd.Function.vmap:
            raise ValueError(f"{function.__name__} has a vmap rule of its own, which sees the examples together")
        return apply.__get__(None, function)(*args, **options)

    torch.autograd.Function.apply = classmethod(checked)
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
