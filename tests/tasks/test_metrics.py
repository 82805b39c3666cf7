"""Metrics against scikit-learn's, for several models at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor

from flower_privdec.common.catalogue import LOSS_KINDS, METRIC_KINDS, USUAL_METRICS, unfit
from flower_privdec.tasks.losses import LOSSES
from flower_privdec.tasks.metrics import METRICS

Reference = Callable[[Any, Any, Any], float]


def odds(outputs: np.ndarray) -> np.ndarray:
    """Probabilities of the classes."""
    tensor = torch.from_numpy(outputs)
    if outputs.shape[-1] == 1:
        tensor = torch.cat([torch.zeros_like(tensor), tensor], -1)
    return tensor.softmax(-1).numpy()


def known_labels(y: np.ndarray, outputs: np.ndarray) -> float:
    """Average precision over the labels that some example has."""
    with_any = y.any(0)
    return float(reference.average_precision_score(y[:, with_any], outputs[:, with_any])) if with_any.any() else 0.0


CLASSES: dict[str, Reference] = {
    "accuracy": lambda y, said, _: reference.accuracy_score(y, said),
    "balanced-accuracy": lambda y, said, _: reference.balanced_accuracy_score(y, said),
    "macro-f1": lambda y, said, _: reference.f1_score(y, said, average="macro"),
    "log-loss": lambda y, _, out: reference.log_loss(y, odds(out), labels=range(max(2, out.shape[-1]))),
}
NUMBERS: dict[str, Reference] = {
    "mse": lambda y, said, _: reference.mean_squared_error(y, said),
    "rmse": lambda y, said, _: reference.mean_squared_error(y, said) ** 0.5,
    "mae": lambda y, said, _: reference.mean_absolute_error(y, said),
    "r2": lambda y, said, _: reference.r2_score(y, said),
}
LABELS: dict[str, Reference] = {
    "macro-f1": lambda y, said, _: reference.f1_score(y, said, average="macro", zero_division=0),
    "micro-f1": lambda y, said, _: reference.f1_score(y, said, average="micro", zero_division=0),
    "subset-accuracy": lambda y, said, _: reference.accuracy_score(y, said),
    "mean-average-precision": lambda y, _, out: known_labels(y, out),
}
CASES = [
    *((name, loss, CLASSES[name]) for loss in ("cross-entropy", "logistic") for name in CLASSES),
    *((name, "hinge", CLASSES[name]) for name in CLASSES if name != "log-loss"),
    *((name, "mse", NUMBERS[name]) for name in NUMBERS),
    *((name, "binary-cross-entropy", LABELS[name]) for name in LABELS),
]


def problem(loss: str, n: int, k: int, models: int, seed: int) -> tuple[Tensor, Tensor]:
    """Outputs of some models, among them equal ones, and targets; some classes and labels may be missing."""
    rng, kind = np.random.default_rng(seed), LOSSES[loss]
    outputs = rng.standard_normal((models, n, 1 if kind.single else k)).round(1)
    if kind.targets == "classes":
        targets = rng.integers(0, 2 if kind.single else k, n)
    elif kind.targets == "labels":
        targets = (rng.random((n, k)) < rng.random(k) * 0.6).astype(np.float32)
    else:
        targets = rng.standard_normal((n, k)).round(1)
    return torch.from_numpy(outputs), torch.from_numpy(targets)


@pytest.mark.parametrize(("name", "loss", "wanted"), CASES, ids=lambda value: value if isinstance(value, str) else "")
@settings(max_examples=25)
@given(n=st.integers(2, 30), k=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_metrics_are_scikit_learn_s(name: str, loss: str, wanted: Reference, n: int, k: int, seed: int) -> None:
    outputs, targets = problem(loss, n, k, 3, seed)
    found = METRICS[name].measure(LOSSES[loss], outputs, targets)
    assert (found.shape, found.dtype) == ((3,), torch.float64)
    for value, one in zip(found.tolist(), outputs, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that are not there
            expected = wanted(targets.numpy(), LOSSES[loss].predict(one).numpy(), one.numpy())
        assert value == pytest.approx(expected, abs=1e-9)


def test_every_metric_of_a_scenario_is_tried() -> None:
    assert set(METRICS) == set(METRIC_KINDS)
    assert {name for name, *_ in CASES} == set(METRICS)


def test_usual_metrics_fit_every_loss_of_their_kind() -> None:
    for loss, kind in LOSS_KINDS.items():
        assert [unfit(name, loss, kind.targets) for name in USUAL_METRICS[kind.targets]] == [None] * len(
            USUAL_METRICS[kind.targets]
        )


def test_a_number_that_never_changes_has_an_r2() -> None:
    targets, outputs = torch.ones(4, 1), torch.tensor([[[1.0]] * 4, [[2.0]] * 4])
    assert METRICS["r2"].measure(LOSSES["mse"], outputs, targets).tolist() == [1.0, 0.0]


def test_labels_without_examples_leave_nothing_to_rank() -> None:
    outputs, targets = torch.zeros(2, 3, 2), torch.zeros(3, 2)
    assert METRICS["mean-average-precision"].measure(LOSSES["binary-cross-entropy"], outputs, targets).tolist() == [
        0,
        0,
    ]
