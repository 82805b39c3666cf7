"""Metrics against scikit-learn's, for several models at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from sklearn import metrics as reference
from torch import Tensor

from flower_privdec.common.catalogue import BY_CLASS, LOSS_KINDS, METRIC_KINDS, USUAL_METRICS, unfit
from flower_privdec.common.errors import ScenarioError
from flower_privdec.tasks.losses import LOSSES
from flower_privdec.tasks.metrics import METRICS, RANKING, count_by_class, measure_by_class, try_metric

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
    return float(reference.average_precision_score(y[:, with_any], outputs[:, with_any])) if with_any.any() else np.nan


def against_the_rest(score: Callable[[Any, Any], float]) -> Reference:
    """A score of the second of two classes, or of each of several that is there against the rest, averaged."""

    def mean(y: np.ndarray, _: Any, outputs: np.ndarray) -> float:
        if outputs.shape[-1] == 1:
            return score(y == 1, outputs[:, 0]) if y.sum() > 0 else np.nan
        if outputs.shape[-1] == 2:
            return score(y == 1, outputs[:, 1] - outputs[:, 0]) if y.sum() > 0 else np.nan
        return float(np.mean([score(y == one, odds(outputs)[:, one]) for one in np.unique(y)]))

    return mean


def area(y: np.ndarray, scores: np.ndarray) -> float:
    return float(reference.roc_auc_score(y, scores)) if 0 < y.sum() < len(y) else np.nan


def areas_of_labels(y: np.ndarray, _: Any, outputs: np.ndarray) -> float:
    mixed = y.any(0) & ~y.all(0)
    return float(reference.roc_auc_score(y[:, mixed], outputs[:, mixed])) if mixed.any() else np.nan


CLASSES: dict[str, Reference] = {
    "roc-auc": against_the_rest(area),
    "average-precision": against_the_rest(reference.average_precision_score),
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
    "roc-auc": areas_of_labels,
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
    if loss == "cross-entropy":
        # Rounded outputs can have the same softmax but for its last bits; these are equal as a whole, or not at all.
        outputs = rng.standard_normal(outputs.shape)
        outputs[:, n // 2 :] = outputs[:, rng.integers(0, n, n - n // 2)]
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
        assert value == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("loss", ["cross-entropy", "logistic", "hinge", "binary-cross-entropy"])
@settings(max_examples=40)
@given(n=st.integers(1, 30), k=st.integers(2, 5), seed=st.integers(0, 2**16))
def test_figures_of_each_class_are_scikit_learn_s(loss: str, n: int, k: int, seed: int) -> None:
    """Of classes that are absent or never predicted too: there are as many as declared, whatever the examples have."""
    outputs, targets = problem(loss, n, k, 3, seed)
    declared = 2 if LOSSES[loss].single else k
    found = measure_by_class(LOSSES[loss], outputs, targets)
    for place, one in enumerate(outputs):
        predicted = LOSSES[loss].predict(one).numpy()
        *expected, support = reference.precision_recall_fscore_support(
            targets.numpy(), predicted, labels=range(declared), zero_division=0
        )
        for name, values in zip(BY_CLASS, expected, strict=True):
            np.testing.assert_allclose(found[name][place], values, rtol=0, atol=1e-12)
        assert count_by_class(LOSSES[loss], targets, declared) == support.tolist()


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


@pytest.mark.parametrize("name", RANKING)
def test_nothing_to_rank_has_no_value(name: str) -> None:
    loss = "binary-cross-entropy" if name == "mean-average-precision" else "logistic"
    outputs, targets = torch.zeros(2, 3, 1), torch.zeros(3, dtype=torch.int64)
    if loss == "binary-cross-entropy":
        targets = torch.zeros(3, 1)
    assert METRICS[name].measure(LOSSES[loss], outputs, targets).isnan().all()


@pytest.mark.parametrize("name", RANKING)
def test_a_score_that_is_nan_ranks_nothing(name: str) -> None:
    """Another model beside it keeps its value, and constant scores are as good as chance."""
    loss = "binary-cross-entropy" if name == "mean-average-precision" else "logistic"
    outputs, targets = torch.zeros(2, 4, 1), torch.tensor([1, 0, 1, 0])
    if loss == "binary-cross-entropy":
        targets = targets[:, None].float()
    outputs[1, 2] = torch.nan
    values = METRICS[name].measure(LOSSES[loss], outputs, targets).tolist()
    assert (values[0], np.isnan(values[1])) == (0.5, True)


@pytest.mark.parametrize("name", ["roc-auc", "average-precision"])
@pytest.mark.parametrize("large", [1e3, 1e6, 1e25])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_probabilities_that_round_to_one_still_rank(name: str, large: float, classes: int) -> None:
    """One example of each class is surely right; one more of class 1 is taken for class 0, less surely."""
    targets = torch.cat([torch.arange(classes), torch.tensor([1])])
    outputs = torch.zeros(1, classes + 1, classes, dtype=torch.float64)
    outputs[0, torch.arange(classes), torch.arange(classes)] = 4 * large
    outputs[0, classes, 0] = 2 * large
    found = METRICS[name].measure(LOSSES["cross-entropy"], outputs, targets)
    assert found.tolist() == [1.0]


@pytest.mark.parametrize("metric", ["roc-auc", "average-precision"])
def test_a_test_set_of_one_class_is_refused(metric: str) -> None:
    loss = replace(LOSSES["cross-entropy"], width=2)
    with raises(ScenarioError, "metrics.one-class", metric):
        try_metric(METRICS[metric], loss, 2, torch.zeros(5, dtype=torch.int64))
    try_metric(METRICS[metric], loss, 2, torch.tensor([0, 1]))
