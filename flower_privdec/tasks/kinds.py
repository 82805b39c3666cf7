"""The losses and metrics that a scenario can name, and the targets each takes; importing it loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flower_privdec.catalogue import LOSSES, METRICS

Targets = Literal["classes", "numbers", "labels"]
TARGETS: dict[Targets, str] = {
    "classes": "each example is of one class, 0..C-1: y is whole numbers [N]",
    "numbers": "each example has one or more numbers (regression): y is finite numbers [N] or [N, k]",
    "labels": "each example has any of several labels: y is 0 or 1 in [N, k]",
}


@dataclass(frozen=True)
class LossKind:
    """Properties of a named loss.

    Attributes:
        targets: what it takes.
        log_odds: whether the outputs it trains are log-odds, from which a log loss can be computed.
    """

    targets: Targets
    log_odds: bool = False


LOSS_KINDS = LOSSES.bind(
    {
        "cross-entropy": LossKind("classes", log_odds=True),
        "logistic": LossKind("classes", log_odds=True),
        "hinge": LossKind("classes"),
        "squared-hinge": LossKind("classes"),
        "mse": LossKind("numbers"),
        "mae": LossKind("numbers"),
        "huber": LossKind("numbers"),
        "binary-cross-entropy": LossKind("labels", log_odds=True),
    }
)


def fitting(targets: Targets) -> str:
    """Return the names of the losses that take some targets."""
    return ", ".join(name for name, kind in LOSS_KINDS.items() if kind.targets == targets)


@dataclass(frozen=True)
class MetricKind:
    """Properties of a metric.

    Attributes:
        title: what it is, in a table or over a curve.
        targets: the kinds of task that it fits.
        high: whether more is better.
        share: whether it is a share of 1, shown in percent.
        log_odds: whether it needs outputs that are log-odds.
    """

    title: str
    targets: tuple[Targets, ...]
    high: bool = True
    share: bool = True
    log_odds: bool = False


def _error(title: str) -> MetricKind:
    return MetricKind(title, ("numbers",), high=False, share=False)


METRIC_KINDS = METRICS.bind(
    {
        "accuracy": MetricKind("accuracy", ("classes",)),
        "balanced-accuracy": MetricKind("balanced accuracy", ("classes",)),
        "macro-f1": MetricKind("macro F1", ("classes", "labels")),
        "log-loss": MetricKind("log loss", ("classes",), high=False, share=False, log_odds=True),
        "rmse": _error("RMSE"),
        "mse": _error("MSE"),
        "mae": _error("MAE"),
        "r2": MetricKind("R²", ("numbers",), share=False),
        "micro-f1": MetricKind("micro F1", ("labels",)),
        "subset-accuracy": MetricKind("subset accuracy", ("labels",)),
        "mean-average-precision": MetricKind("mean average precision", ("labels",)),
    }
)
USUAL_METRICS: dict[Targets, tuple[str, ...]] = {
    "classes": ("accuracy",),
    "numbers": ("rmse", "r2"),
    "labels": ("micro-f1", "mean-average-precision"),
}


def unfit(metric: str, loss: str, targets: Targets) -> str | None:
    """Return why a metric does not fit models trained by a loss for some targets, or None where it does."""
    kind = METRIC_KINDS[metric]
    if targets not in kind.targets:
        fit = ", ".join(name for name, other in METRIC_KINDS.items() if targets in other.targets)
        return f"is a metric of {' and '.join(kind.targets)}, and loss {loss} is for {targets}: use {fit}"
    if kind.log_odds and not (loss in LOSS_KINDS and LOSS_KINDS[loss].log_odds):
        return f"needs log-odds, which loss {loss} does not train: use cross-entropy or logistic, or leave it out"
    return None
