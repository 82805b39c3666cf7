"""A user's own loss: a function of one example, called under vmap, and tried on random numbers before a run.

The function gets copies of one example's outputs and target, so it can neither see another example nor change this one.
What it keeps elsewhere, in globals or files, can carry numbers from one example to a later one: such a function is not
private. An error that it raises on private examples may reveal them, so its message is withheld. On the made-up
examples of `try_loss` nothing is withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import load_own
from flower_privdec.tasks.additivity import Trial, refuse, weights_cancel
from flower_privdec.tasks.losses import Loss, OutputFunction

TRIAL_EXAMPLES = 2  # of public random numbers


def own_loss(target: str, targets: Targets, outputs: int | None = None) -> Loss:
    """Return a loss that a user's function computes for one example.

    The function is given one example's outputs [k] and its target: a class, whole and without axes, or numbers or
    labels [w]. It returns the loss, a tensor without axes.

    Args:
        target: where the function lies, `package.module:name`.
        targets: the kind of target that it takes.
        outputs: how many the model must have, if the targets do not say so.

    Raises:
        ScenarioError: the function cannot be had.
    """
    one = _on_copies(target)
    value = _example_by_example(target, one)
    derivative = _example_by_example(target, grad(one))
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
        flat_outputs = outputs.reshape(-1, outputs.shape[-1])
        flat_targets = targets.reshape(-1, *wide)
        if len(flat_outputs) == 0:
            return torch.zeros_like(outputs)

        values = outputs
        failure = None
        try:
            values = vmap(function)(flat_outputs, flat_targets)
        except RAISED_BY_USERS as error:
            failure = type(error).__name__

        # Raised outside the handler, so that the error does not carry the other one along as its context.
        if failure is not None:
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
    _check_differentiable(loss, one, outputs)

    trial = Trial()
    for targets in _random_targets(loss, outputs):
        for x in _random_outputs(len(targets), outputs):
            # A loss may refuse outputs or targets of some kinds. It must have a gradient for one of them.
            with suppress(*RAISED_BY_USERS), torch.random.fork_rng(devices=[]):
                gradients = vmap(grad(one))(x, targets)
                finite = torch.isfinite(gradients).all(1)
                trial.ran = True
                trial.nan |= not bool(finite.all())
                trial.alive |= bool((finite & gradients.any(1)).any())

    if loss.targets == "classes":
        trial.weighs = weights_cancel(one, outputs, loss.width or outputs)
    remedy = "give task.class_weights in the place of its own, or reduction='sum'"
    refuse(trial, f"task.loss.module={loss.name!r}", remedy=remedy)


def _check_differentiable(loss: Loss, one: OutputFunction, outputs: int) -> None:
    """Raise ScenarioError unless a function gives one number for an example, and vmap can differentiate it."""
    x = torch.randn(TRIAL_EXAMPLES, outputs, generator=torch.Generator().manual_seed(0))
    try:
        with torch.random.fork_rng(devices=[]), no_custom_vmap_rules():
            shape = list(vmap(one)(x, loss.blank(x)).shape[1:])
            if not shape:
                vmap(grad(one))(x, loss.blank(x))
    except RAISED_BY_USERS as error:
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

    What is called under vmap cannot depend on an example's numbers, so trying it once finds all that is called.
    """
    apply = vars(torch.autograd.Function)["apply"]  # the classmethod itself, not bound

    def checked(function: type[torch.autograd.Function], *args: Any, **options: Any) -> Any:
        if function.vmap is not torch.autograd.Function.vmap:
            raise ValueError(f"{function.__name__} has a vmap rule of its own, which sees the examples together")
        return apply.__get__(None, function)(*args, **options)

    torch.autograd.Function.apply = classmethod(checked)
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply
