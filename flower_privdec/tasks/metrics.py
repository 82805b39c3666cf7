"""Metrics of many models at once: functions of outputs [..., N, k] and of targets [N] or [N, k], one value a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flower_privdec.common.catalogue import METRIC_KINDS, MetricKind
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RAISED_BY_USERS, RunError, ScenarioError
from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import last_line_of_users, load_own
from flower_privdec.tasks.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

Measure: TypeAlias = "Callable[[Loss, Tensor, Tensor], Tensor]"


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: its name in a scenario.
        kind: what is known of it, such as which targets it fits.
        measure: (loss, outputs [..., N, k], targets [N] or [N, k]) -> values [...]; the loss says what outputs predict.
    """

    name: str
    kind: MetricKind
    measure: Measure


def _counts(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count by class or label what is right, what is predicted and what is there, each float64 [..., C]."""
    predicted = loss.predict(outputs)
    if loss.targets == "labels":
        positive = predicted.double()  # [..., N, C]
        true = targets.double()  # [N, C]
        right = (positive * true).sum(-2)
        there = true.sum(-2).expand(*outputs.shape[:-2], -1)
        return right, positive.sum(-2), there

    n_classes = outputs.shape[-1]
    if loss.single:
        n_classes = 2
    zeros = torch.zeros(*predicted.shape[:-1], n_classes, dtype=torch.float64, device=outputs.device)
    ones = torch.ones_like(predicted, dtype=torch.float64)
    classes = targets.expand_as(predicted)  # [..., N]
    hits = (predicted == targets).double()
    return (
        zeros.scatter_add(-1, classes, hits),
        zeros.scatter_add(-1, predicted, ones),
        zeros.scatter_add(-1, classes, ones),
    )


def measure_by_class(loss: Loss, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return precision, recall and F1 of each class or label, each float64 [..., C].

    As in scikit-learn a ratio without a case to divide by is 0: the precision of a class that is never predicted, the
    recall of one that no example has.
    """
    right, predicted, there = _counts(loss, outputs, targets)
    return {
        "precision": right / predicted.clamp_min(1),
        "recall": right / there.clamp_min(1),
        "f1": 2 * right / (predicted + there).clamp_min(1),
    }


def count_by_class(loss: Loss, targets: Tensor, n_classes: int) -> list[int]:
    """Return how many examples there are of each class or label."""
    if loss.targets == "labels":
        counts: list[int] = targets.sum(0).to(torch.int64).tolist()
    else:
        counts = torch.bincount(targets, minlength=n_classes).tolist()
    return counts


def _mean_over(values: Tensor, present: Tensor) -> Tensor:
    """Return the mean of the values [..., C] that are present; 0 if none is."""
    # `where` takes NaN of 0 / 0 out before the sum.
    return torch.where(present, values, 0).sum(-1) / present.sum(-1).clamp_min(1)


def _accuracy(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    return (loss.predict(outputs) == targets).double().mean(-1)


def _subset_accuracy(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    is_right = (loss.predict(outputs) == targets).all(-1)
    return is_right.double().mean(-1)


def _balanced_accuracy(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    right, _, there = _counts(loss, outputs, targets)
    return _mean_over(right / there, there > 0)


def _macro_f1(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """A class that is neither there nor predicted does not count; a label counts as 0 then."""
    right, predicted, there = _counts(loss, outputs, targets)
    f1 = 2 * right / (predicted + there).clamp_min(1)
    present = predicted + there > 0
    if loss.targets == "labels":
        present = torch.ones_like(there, dtype=torch.bool)
    return _mean_over(f1, present)


def _micro_f1(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    right, predicted, there = _counts(loss, outputs, targets)
    both = predicted.sum(-1) + there.sum(-1)
    return 2 * right.sum(-1) / both.clamp_min(1)


def _log_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    if loss.single:
        signs = targets.double() * 2 - 1
        return torch.nn.functional.softplus(-signs * outputs[..., 0].double()).mean(-1)

    log_chances = outputs.double().log_softmax(-1)
    classes = targets.expand(outputs.shape[:-1]).unsqueeze(-1)
    return -log_chances.gather(-1, classes).squeeze(-1).mean(-1)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.double() - targets.double()


def _mse(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    return _errors(outputs, targets).square().mean((-2, -1))


def _rmse(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    return _mse(loss, outputs, targets).sqrt()


def _mae(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    return _errors(outputs, targets).abs().mean((-2, -1))


def _r2(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """1 - Σ (ŷ - y)² / Σ (y - ȳ)², mean over the numbers; for a number that never changes 1 if it is hit, else 0."""
    missed = _errors(outputs, targets).square().sum(-2)  # [..., k]
    true = targets.double()
    spread = (true - true.mean(-2)).square().sum(-2).expand_as(missed)

    of_constant = torch.where(missed > 0, 0.0, 1.0).to(missed)
    return torch.where(spread > 0, 1 - missed / spread, of_constant).mean(-1)


def _scores(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ranks the examples by class or label, and which of them are positive, float64 [..., C, N] and [C, N].

    Of two classes only the second one is ranked, as in scikit-learn.
    """
    outputs = outputs.double()
    if loss.targets == "labels":
        scores = outputs
        positive = targets.double()
    elif loss.single:
        scores = outputs
        positive = targets.double().unsqueeze(-1)
    elif outputs.shape[-1] == 2:
        scores = outputs[..., 1:] - outputs[..., :1]
        positive = targets.double().unsqueeze(-1)
    else:
        scores = _log_odds(outputs)
        positive = torch.nn.functional.one_hot(targets.long(), outputs.shape[-1]).double()
    return scores.transpose(-1, -2).contiguous(), positive.t()


def _log_odds(outputs: Tensor) -> Tensor:
    """Return log p - log(1 - p) of each class's softmax p, [..., k].

    It ranks examples as p does, and goes on doing so when p rounds to 1.
    """
    log_p = outputs.log_softmax(-1)

    # 1 - p is exact enough where p is at most 1/2; of the likeliest class it is the sum of the others.
    likeliest = log_p.argmax(-1, keepdim=True)
    others = log_p.scatter(-1, likeliest, -torch.inf).logsumexp(-1, keepdim=True)
    log_rest = torch.log1p(-log_p.exp()).scatter(-1, likeliest, others)
    return log_p - log_rest


def _over_ranked(values: Tensor, scores: Tensor, present: Tensor) -> Tensor:
    """Return the mean of classes' values [..., C] that are present; NaN if none is, or if a score is NaN."""
    mean = _mean_over(values, present)
    is_nan = scores.isnan().any(-1).any(-1) | ~present.any(-1)
    return mean.masked_fill(is_nan, torch.nan)


def _roc_auc(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """P(score of a positive example > that of a negative one) + P(equal) / 2 of each class or label, mean over them.

    One that no example has, or that all have, has no such pair and does not count.
    """
    scores, positive = _scores(loss, outputs, targets)
    ascending = scores.sort(-1)
    ordered = ascending.values
    hits = positive.expand(ordered.shape).gather(-1, ascending.indices)

    # Examples of equal scores share the middle of their ranks, 1 to N (Mann and Whitney's U).
    below = torch.searchsorted(ordered, ordered)
    up_to = torch.searchsorted(ordered, ordered, right=True)
    ranks = (below + up_to + 1).double() / 2

    positives = hits.sum(-1)
    negatives = hits.shape[-1] - positives
    pairs = positives * negatives
    area = ((ranks * hits).sum(-1) - positives * (positives + 1) / 2) / pairs
    return _over_ranked(area, scores, pairs > 0)


def _average_precision(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """AP = Σ_i P(score_i) over the positive examples i of a class or label, over how many there are; mean over them.

    P(s) is the precision among all examples scored at least s, so equal scores are one step. A class or label that no
    example has does not count.
    """
    scores, positive = _scores(loss, outputs, targets)
    descending = (-scores).sort(-1)
    ordered = descending.values  # negated, ascending
    hits = positive.expand(ordered.shape).gather(-1, descending.indices)

    # How many examples have at least the score of each; those of equal scores have the same precision.
    ends = torch.searchsorted(ordered, ordered, right=True)
    precision = hits.cumsum(-1).gather(-1, (ends - 1).clamp_min(0)) / ends

    positives = hits.sum(-1)
    average_precision = (precision * hits).sum(-1) / positives
    return _over_ranked(average_precision, scores, positives > 0)


_MEASURES: dict[str, Measure] = {
    "accuracy": _accuracy,
    "balanced-accuracy": _balanced_accuracy,
    "macro-f1": _macro_f1,
    "log-loss": _log_loss,
    "rmse": _rmse,
    "mse": _mse,
    "mae": _mae,
    "r2": _r2,
    "micro-f1": _micro_f1,
    "subset-accuracy": _subset_accuracy,
    "mean-average-precision": _average_precision,
    "roc-auc": _roc_auc,
    "average-precision": _average_precision,
}
RANKING = ("roc-auc", "average-precision", "mean-average-precision")  # they have no value if there is nothing to rank
METRICS = {name: Metric(name, METRIC_KINDS[name], measure) for name, measure in _MEASURES.items()}


def own_metric(target: str, name: str, kind: MetricKind) -> Metric:
    """Return a metric that a user's function computes of a model's outputs [N, k] and the targets [N] or [N, w].

    Raises:
        ScenarioError: the function cannot be had.
    """
    function = load_own(target, "task.metrics.module", must_be="a function of all outputs and all targets")

    def measure(_loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
        models = outputs.reshape(-1, *outputs.shape[-2:])  # [models, N, k]
        try:
            # Clones, for a function may change its arguments in place.
            values = [float(function(model.clone(), targets.clone())) for model in models]
        except RAISED_BY_USERS as error:
            # Test examples are public, so the message need not be withheld as that of a loss is.
            failure = f"{one_line(error)}{last_line_of_users(error)}"
            raise RunError(f"task.metrics.module={target!r} fails on the public test set: {failure}") from error
        return torch.tensor(values, dtype=torch.float64).reshape(outputs.shape[:-2])

    return Metric(name, kind, measure)


def try_metric(metric: Metric, loss: Loss, outputs: int, targets: Tensor) -> None:
    """Try a metric on random outputs for the public targets of the test set.

    Raises:
        ScenarioError: it fails, returns no number, or has no value on this test set.
    """
    x = torch.randn(1, len(targets), outputs, generator=torch.Generator().manual_seed(0))
    try:
        values = metric.measure(loss, x, targets)
    except RunError as error:
        raise ScenarioError(
            f"{error}; it must turn outputs [N, k] and targets into one number", code="metrics.fails"
        ) from None

    if metric.name in RANKING and bool(values.isnan().all()):
        raise ScenarioError(
            f"task.metrics: {metric.name} has no value on this public test set: no class in it has both examples and "
            "others to rank them with (of two classes the second one counts); give a test set with examples of all "
            "classes, or leave the metric out",
            code="metrics.one-class",
        )
