"""The objective of convex learning, and its minimum: certified by duality, and beside scikit-learn's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, sparse
from tiny_scenario import Build

from flower_privdec.algorithms.proximal import Regularizer
from flower_privdec.engine.run import run
from flower_privdec.experiment.minimum import TOLERANCE, ConvexObjective, Minimum, find_minimum, solve
from flower_privdec.tasks.losses import LOSSES

CANCER = ["data={dataset: breast-cancer, batch: {sampling: poisson, size: 10}}", "model={name: linear}"]
DUAL = "algorithm={name: dp-dda, regularizer: {kind: l2, weight: 0.05}, gamma: 0}"
COMPLETE = "topology={name: complete}"
REGULARIZERS = {
    "l2": Regularizer(l2=0.01),
    "l1": Regularizer(l1=0.01),
    "elastic-net": Regularizer(l2=0.02, l1=0.01),
    "box": Regularizer(lower=-0.3, upper=0.5),
    "ball": Regularizer(radius=0.7),
    "wide ball": Regularizer(radius=5.0),
}


def drawn(loss: str, h: Regularizer, *, bias: bool = True, count: int = 60, classes: int = 3) -> ConvexObjective:
    """Return an objective over examples of two peers of unequal sizes, that no line separates."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((count, 4))
    outputs = classes if loss == "cross-entropy" else 1
    y = ((x[:, 0] - x[:, 1] + generator.standard_normal(count)) > 0).astype(np.int64)
    y = y if outputs == 1 else y + (x[:, 2] > 1)
    weights = np.concatenate([np.full(count // 3, 1 / 2 / (count // 3)), np.full(count - count // 3, 0.75 / count)])
    features = sparse.csr_matrix(np.hstack([x, np.ones((count, 1))]) if bias else x)
    return ConvexObjective(features, torch.from_numpy(y), weights, LOSSES[loss], h, outputs, bias)


@pytest.mark.parametrize("h", REGULARIZERS)
@pytest.mark.parametrize("loss", ["hinge", "logistic", "squared-hinge", "cross-entropy"])
def test_the_minimum_is_found_and_nothing_is_below_it(loss: str, h: str) -> None:
    objective = drawn(loss, REGULARIZERS[h])
    found = solve(objective)
    assert 0 <= found.gap <= (20 if h == "wide ball" else 2) * TOLERANCE  # where the gradient vanishes at the end
    generator = np.random.default_rng(1)
    inside = REGULARIZERS[h]
    for size in (1e-3, 0.1, 1.0):
        for _ in range(20):
            x = torch.from_numpy(size * generator.standard_normal((1, objective.dimension)))
            allowed = inside.minimizer(-x, 0.0, 1.0)[0]
            assert objective.value(allowed) >= found.value - found.gap
    simple = optimize.minimize(
        lambda x: objective.value(inside.minimizer(-torch.from_numpy(x[None]), 0.0, 1.0)[0]),
        np.zeros(objective.dimension),
        method="Powell",
        options={"maxiter": 30},
    )
    assert simple.fun >= found.value - found.gap


def test_the_value_is_the_mean_of_peers_means() -> None:
    objective, x = drawn("hinge", Regularizer(l2=0.5, l1=0.25)), np.array([0.3, -1.0, 0.2, 0.0, 0.1])
    features, sign = objective.features.toarray(), 2 * objective.targets.numpy() - 1
    losses = np.maximum(0, 1 - sign * (features @ x))
    expected = (losses[:20].mean() + losses[20:].mean()) / 2 + 0.25 * (x @ x) + 0.25 * np.abs(x).sum()
    assert objective.value(x) == pytest.approx(expected, rel=1e-12)
    assert objective.value(torch.from_numpy(x).float()) == pytest.approx(expected, rel=1e-6)
    boxed = drawn("hinge", Regularizer(lower=-1, upper=0.2))
    assert boxed.value(x) == math.inf


@pytest.mark.parametrize("bias", [True, False])
def test_a_model_is_laid_out_like_the_kernel(build: Build, bias: bool) -> None:
    experiment = build("algorithm={name: dp-dda}", "topology={name: ring}", f"model={{name: softmax, bias: {bias}}}")
    objective = ConvexObjective.of(experiment, experiment.own)
    x = torch.randn(len(experiment.initial), dtype=torch.float64)
    rows = np.concatenate(experiment.own.examples.parts)
    outputs = experiment.kernel.logits(x[None], experiment.own.examples.x[rows].double())[0]
    np.testing.assert_allclose(objective.features @ objective.matrix(x.numpy()), outputs.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(objective.vector(objective.matrix(x.numpy())), x.numpy())
    assert objective.weights.sum() == pytest.approx(1)


def cancer(build: Build, loss: str, h: str) -> ConvexObjective:
    settings = [*CANCER, f"task={{loss: {loss}}}", f"algorithm={{name: dp-dda, schedule: convex, regularizer: {h}}}"]
    experiment = build(*settings, "n_peers=7", COMPLETE)
    return ConvexObjective.of(experiment, experiment.own)


@pytest.mark.parametrize("loss", ["hinge", "squared-hinge", "logistic"])
def test_scikit_learn_finds_the_same_on_breast_cancer(build: Build, loss: str) -> None:
    """Its objective is C Σ_b w_b l_b + |x|² / 2 with the bias as a feature, C = 1 / μ."""
    objective = cancer(build, loss, "{kind: l2, weight: 0.01}")
    features, y = objective.features.toarray(), objective.targets.numpy()
    if loss == "logistic":
        from sklearn.linear_model import LogisticRegression

        theirs: Any = LogisticRegression(C=100, fit_intercept=False, tol=1e-10, max_iter=10_000)
    else:
        from sklearn.svm import LinearSVC

        name = loss.replace("-", "_")
        theirs = LinearSVC(C=100, loss=name, fit_intercept=False, tol=1e-10, max_iter=10**6, random_state=0)
    theirs.fit(features, y, sample_weight=objective.weights)
    found = solve(objective)
    assert found.gap <= TOLERANCE
    value = objective.value(theirs.coef_[0])
    assert found.value - found.gap <= value <= found.value + 2e-6


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_the_studys_objectives_have_a_certified_minimum(build: Build, kind: str) -> None:
    assert solve(cancer(build, "hinge", f"{{kind: {kind}, weight: 0.0005}}")).gap <= TOLERANCE


def test_unbounded_losses_have_no_minimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_minimum(drawn("hinge", Regularizer())) is None
    assert find_minimum(drawn("mae", Regularizer(l2=1.0))) is None
    assert not list(tmp_path.rglob("minimum-*"))


def test_a_minimum_is_cached_by_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = find_minimum(drawn("hinge", Regularizer(l2=0.1)))
    (path,) = tmp_path.rglob("minimum-*")
    path.write_text(json.dumps({"value": 7.0, "gap": 0.0}))
    assert find_minimum(drawn("hinge", Regularizer(l2=0.1))) == Minimum(7.0, 0.0)
    assert find_minimum(drawn("hinge", Regularizer(l2=0.2))) not in (first, Minimum(7.0, 0.0))
    assert find_minimum(drawn("hinge", Regularizer(l2=0.1), count=63)) not in (first, Minimum(7.0, 0.0))
    path.write_text("{")
    assert find_minimum(drawn("hinge", Regularizer(l2=0.1))) == first
    assert json.loads(path.read_text())["value"] == first.value  # type: ignore[union-attr]


# --- in a run ---


def test_suboptimality_falls_and_stands_in_metrics_and_summary(build: Build, tmp_path: Path) -> None:
    experiment = build(
        *CANCER, DUAL, COMPLETE, "task={loss: hinge}", "privacy=none", "rounds=300", "evaluation.every=50"
    )
    summary = run(experiment, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["suboptimality"] for line in lines]
    assert found[-1] == summary["suboptimality"] < 0.3 * found[0]
    assert all(value > -TOLERANCE for value in found)
    assert summary["optimum"]["gap"] <= TOLERANCE
    objective = ConvexObjective.of(experiment, experiment.own)
    assert summary["optimum"]["value"] == find_minimum(objective).value  # type: ignore[union-attr]


@pytest.mark.slow
def test_breast_cancer_without_strong_convexity_is_nearly_solved(build: Build, tmp_path: Path) -> None:
    """As the paper promises for convex objectives without noise."""
    schedule = "loss: logistic, schedule: convex, gamma: 0.04, regularizer: {kind: l1, weight: 0.01}"
    settings = [f"algorithm={{name: dp-dda, {schedule}}}", "data={dataset: breast-cancer, batch: {sampling: full}}"]
    experiment = build(*settings, CANCER[1], COMPLETE, "privacy=none", "rounds=4000", "evaluation.every=4000")
    assert 0 <= run(experiment, tmp_path / "run")["suboptimality"] < 1e-3


def test_figures_of_private_examples_are_withheld_by_default(build: Build, tmp_path: Path) -> None:
    settings = [*CANCER, DUAL, COMPLETE, "task={loss: hinge}"]
    kept = run(build(*settings), tmp_path / "kept")
    assert not {"suboptimality", "optimum"} & set(kept)
    assert "suboptimality" not in (tmp_path / "kept" / "metrics.jsonl").read_text()
    told = run(build(*settings, "evaluation.private=ignored"), tmp_path / "told")
    assert {"suboptimality", "optimum"} <= set(told)
    assert "are covered by no ε" in told["evaluation_private"]
    assert "suboptimality" not in run(build("privacy=none"), tmp_path / "other")
