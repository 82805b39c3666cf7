"""Metrics of many models at once: functions of outputs [..., N, k] and of targets [N] or [N, k], one value a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flower_privdec.common.catalogue import METRIC_KINDS, MetricKind
from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import last_line_of_users, load_own
from flower_privdec.tasks.losses import Loss

Measure = Callable[[Loss, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        measure: (loss, outputs [..., N, k], targets [N] or [N, k]) -> values [...]; the loss says what outputs predict.
    """

    name: str
    kind: MetricKind
    measure: Measure


def _counts(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count by class or label what is right, what is predicted and what is there, each [..., C]."""
    if loss.targets == "labels":
        there = targets.double()
        predicted = loss.predict(outputs).double()
        return (predicted * there).sum(-2), predicted.sum(-2), there.sum(-2).expand(*outputs.shape[:-2], -1)
    n_classes = 2 if loss.single else outputs.shape[-1]
    predicted = loss.predict(outputs)
    empty = torch.zeros(*predicted.shape[:-1], n_classes, dtype=torch.float64, device=outputs.device)
    right = (predicted == targets).double()
    ones = torch.ones_like(predicted, dtype=torch.float64)
    place = targets.expand_as(predicted)
    return (
        empty.scatter_add(-1, place, right),
        empty.scatter_add(-1, predicted, ones),
        empty.scatter_add(-1, place, ones),
    )


def _mean_over(values: Tensor, present: Tensor) -> Tensor:
    """Return the mean of values [..., C] where they are known; 0 where none is."""
    return torch.where(present, values, 0).sum(-1) / present.sum(-1).clamp_min(1)


def _balanced_accuracy(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    right, _, there = _counts(loss, outputs, targets)
    return _mean_over(right / there, there > 0)


def _macro_f1(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes that are neither there nor predicted do not count; labels count as 0 then."""
    right, predicted, there = _counts(loss, outputs, targets)
    present = torch.ones_like(there, dtype=torch.bool) if loss.targets == "labels" else predicted + there > 0
    return _mean_over(2 * right / (predicted + there).clamp_min(1), present)


def _micro_f1(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    right, predicted, there = (count.sum(-1) for count in _counts(loss, outputs, targets))
    return 2 * right / (predicted + there).clamp_min(1)


def _log_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    if loss.single:
        signs = targets.double() * 2 - 1
        return functional.softplus(-signs * outputs[..., 0].double()).mean(-1)
    chances = outputs.double().log_softmax(-1)
    place = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
    return -chances.gather(-1, place).squeeze(-1).mean(-1)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.double() - targets.double()


def _r2(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """1 - Σ (ŷ - y)² / Σ (y - ȳ)², mean over the numbers; of a number that never changes 1 if it is hit, else 0."""
    missed = _errors(outputs, targets).square().sum(-2)
    spread = (targets.double() - targets.double().mean(-2)).square().sum(-2).expand_as(missed)
    constant = torch.where(missed > 0, 0.0, 1.0).to(missed)
    return torch.where(spread > 0, 1 - missed / spread, constant).mean(-1)


def _mean_average_precision(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """AP = Σ_i P(score_i) over the positive examples i of a label, over how many there are; mean over the labels.

    P(s) is the precision among all examples scored at least s, so equal scores are one step. A label that no example
    has does not count.
    """
    order = (-outputs.double()).transpose(-1, -2).sort(-1)  # [..., C, N], best first
    scores = order.values.contiguous()
    hits = targets.double().t().expand(order.values.shape).gather(-1, order.indices)
    ends = torch.searchsorted(scores, scores, right=True)  # how many examples have at least this score
    precision = hits.cumsum(-1).gather(-1, ends - 1) / ends
    positives = hits.sum(-1)
    return _mean_over((precision * hits).sum(-1) / positives, positives > 0)


_MEASURES: dict[str, Measure] = {
    "accuracy": lambda loss, o, y: (loss.predict(o) == y).double().mean(-1),
    "balanced-accuracy": _balanced_accuracy,
    "macro-f1": _macro_f1,
    "log-loss": _log_loss,
    "rmse": lambda _, o, y: _errors(o, y).square().mean((-2, -1)).sqrt(),
    "mse": lambda _, o, y: _errors(o, y).square().mean((-2, -1)),
    "mae": lambda _, o, y: _errors(o, y).abs().mean((-2, -1)),
    "r2": _r2,
    "micro-f1": _micro_f1,
    "subset-accuracy": lambda loss, o, y: (loss.predict(o) == y).all(-1).double().mean(-1),
    "mean-average-precision": _mean_average_precision,
}
METRICS = {name: Metric(name, METRIC_KINDS[name], measure) for name, measure in _MEASURES.items()}


def own_metric(target: str, name: str, kind: MetricKind) -> Metric:
    """Return a metric that a user's function computes of a model's outputs [N, k] and the targets [N] or [N, w].

    Raises:
        ScenarioError: the function cannot be had.
    """
    function = load_own(target, "task.metrics.module", must_be="a function of all outputs and all targets")

    def measure(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        models = outputs.reshape(-1, *outputs.shape[-2:])
        try:
            values = [float(function(model.clone(), targets.clone())) for model in models]
        except RAISED_BY_USERS as error:  # a user's own function may raise anything
            failure = f"{one_line(error)}{last_line_of_users(error)}"
            raise RunError(f"task.metrics.module={target!r} fails on the public test set: {failure}") from error
        return torch.tensor(values, dtype=torch.float64).reshape(outputs.shape[:-2])

    return Metric(name, kind, measure)


def try_metric(metric: Metric, loss: Loss, outputs: int, targets: Tensor) -> None:
    """Try a metric on random outputs for the public targets.

    Raises:
        ScenarioError: it fails, or returns no number.
    """
    x = torch.randn(1, len(targets), outputs, generator=torch.Generator().manual_seed(0))
    try:
        metric.measure(loss, x, targets)
    except RunError as error:
        raise ScenarioError(
            f"{error}; it must turn outputs [N, k] and targets into one number", code="metrics.fails"
        ) from None
