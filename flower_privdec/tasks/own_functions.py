"""A user's own loss and metrics: functions of one example, and of a test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import load_own
from flower_privdec.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.tasks.kinds import MetricKind, Targets
from flower_privdec.tasks.losses import Loss
from flower_privdec.tasks.metrics import Metric

TRIED = 2  # examples, of public random numbers


def own_loss(target: str, targets: Targets, outputs: int | None = None) -> Loss:
    """Return a loss that a user's function computes for one example.

    The function is given one example's outputs [k] and its target: a class, whole and without axes, or numbers or
    labels [w]. It returns the loss, a tensor without axes. It is called under torch.func.vmap, on copies, so that it
    can neither see another example nor change this one. What it keeps elsewhere, in globals or files, can carry numbers
    from one example to a later one: such a function is not private.

    Args:
        target: where it lies, `package.module:name`.
        targets: what it takes.
        outputs: how many the model must have, where that is not what the targets say.

    Raises:
        ScenarioError: the function cannot be had.
    """
    one = _of_one(target)
    value, derivative = (_withheld(target, _each(part)) for part in (one, grad(one)))
    return Loss(target, value, derivative, targets, outputs=outputs)


def _of_one(target: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a user's function of an example, which gets copies."""
    function = load_own(target, "task.loss.module", must_be="a function of an example's outputs and target")

    def one(outputs: Tensor, wanted: Tensor) -> Tensor:
        value: Tensor = function(outputs.clone(), wanted.clone())
        return value.to(outputs.dtype)

    return one


def _each(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Call a function of one example's outputs and target for every example [...] by itself."""

    def call(outputs: Tensor, targets: Tensor) -> Tensor:
        lead, wide = outputs.shape[:-1], targets.shape[outputs.ndim - 1 :]
        flat = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1, *wide)
        if len(flat[0]) == 0:
            return torch.zeros_like(outputs)
        values: Tensor = vmap(function)(*flat)
        return values.reshape(*lead, *values.shape[1:])

    return call


def _withheld(target: str, call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Withhold the messages of errors, which may reveal examples."""

    def guarded(outputs: Tensor, targets: Tensor) -> Tensor:
        value, failure = outputs, None
        try:
            value = call(outputs, targets)
        except RAISED_BY_USERS as error:  # a user's own function may raise anything
            failure = type(error).__name__
        if failure is not None:  # raised here, an error that does not carry the other one along
            raise RunError(
                f"task.loss.module={target!r} raised {failure}: its message is withheld, for it may reveal data"
            )
        return value

    return guarded


def try_loss(loss: Loss, outputs: int) -> None:
    """Try a user's own loss on random outputs, which reveal no example.

    Raises:
        ScenarioError: it fails, returns no number, or would see examples together.
    """
    one, x = _of_one(loss.name), torch.randn(TRIED, outputs, generator=torch.Generator().manual_seed(0))
    try:
        with torch.random.fork_rng(devices=[]), no_own_rules():
            shape = list(vmap(one)(x, loss.blank(x)).shape[1:])
            if not shape:
                vmap(grad(one))(x, loss.blank(x))
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise ScenarioError(
            f"task.loss.module={loss.name!r} cannot be differentiated example by example: {one_line(error)}; write it "
            "with torch operations alone (torch.where for a choice, no .item()), from outputs and a target to a number"
        ) from None
    if shape:
        raise ScenarioError(f"task.loss.module={loss.name!r} returns {shape} for an example: it must be one number")


def own_metric(target: str, name: str, kind: MetricKind) -> Metric:
    """Return a metric that a user's function computes of a model's outputs [N, k] and the targets [N] or [N, w].

    Raises:
        ScenarioError: the function cannot be had.
    """
    function = load_own(target, "task.metrics.module", must_be="a function of all outputs and all targets")

    def measure(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        models = outputs.reshape(-1, *outputs.shape[-2:])
        values = [_number(function, target, model, targets) for model in models]
        return torch.tensor(values, dtype=torch.float64).reshape(outputs.shape[:-2])

    return Metric(name, kind, measure)


def _number(function: Callable[..., Any], target: str, outputs: Tensor, targets: Tensor) -> float:
    try:
        return float(function(outputs.clone(), targets.clone()))
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise RunError(f"task.metrics.module={target!r} fails on the public test set: {one_line(error)}") from error


def try_metric(metric: Metric, loss: Loss, outputs: int, targets: Tensor) -> None:
    """Try a metric on random outputs for the public targets.

    Raises:
        ScenarioError: it fails, or returns no number.
    """
    x = torch.randn(1, len(targets), outputs, generator=torch.Generator().manual_seed(0))
    try:
        metric.measure(loss, x, targets)
    except RunError as error:
        raise ScenarioError(f"{error}; it must turn outputs [N, k] and targets into one number") from None


@contextmanager
def no_own_rules() -> Iterator[None]:
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
