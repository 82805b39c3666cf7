"""`PrivateClassifier` beside scikit-learn's rules for estimators and the rules of a ledger."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator

from flower_privdec import PrivateClassifier
from flower_privdec.common.errors import ArgumentError, BudgetError, ScenarioError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(200, 3))
Y = np.where(X[:, 0] > 0, "up", "down")
# Of the checks' few examples only a large ε leaves anything to learn; `random_state`, which the checks set, makes two
# fits equal. Without a seed they must differ.
LOOSE: dict[str, Any] = {"epsilon": 500.0, "batch_size": 10**6, "epochs": 60, "learning_rate": 1.0, "clip_norm": 2.0}
FAIL = {"check_class_weight_classifiers": "a weight of 1000 lifts gradients over the clip norm, where it adds nothing"}


@pytest.mark.slow
def test_checks_of_scikit_learn_pass() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(PrivateClassifier(**LOOSE), on_fail=None, on_skip=None, expected_failed_checks=FAIL)
    not_passed = {result["check_name"]: result["status"] for result in results if result["status"] != "passed"}
    assert not_passed.pop("check_array_api_input", "skipped") == "skipped"  # needs SCIPY_ARRAY_API
    assert not_passed == dict.fromkeys(FAIL, "xfail")
    assert len(results) > 40


def test_a_ledger_counts_fits_and_clones_together(tmp_path: Path) -> None:
    model = PrivateClassifier(**LOOSE | {"epsilon": 5.0}, classes=["down", "up"], ledger=tmp_path / "fits.jsonl")
    model.fit(X, Y)
    assert 4 < model.epsilon_ <= 5
    for other in (model, clone(model)):
        with raises(BudgetError, "ledger.budget-spent"):
            other.fit(X, Y)
    clone(model).set_params(ledger=None).fit(X, Y)


def test_two_fits_draw_fresh_noise() -> None:
    model = PrivateClassifier(**LOOSE, classes=["down", "up"])
    first = model.fit(X, Y).coef_
    assert not np.allclose(first, model.fit(X, Y).coef_, rtol=1e-12)
    assert model.score(X, Y) > 0.9


def test_labels_read_off_y_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="give classes"):
        inferred = PrivateClassifier(**LOOSE).fit(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = PrivateClassifier(**LOOSE, classes=["up", "sideways", "down"]).fit(X, Y)
    assert (inferred.classes_.tolist(), named.classes_.tolist()) == (["down", "up"], ["down", "sideways", "up"])
    assert named.predict_proba(X).sum(1) == pytest.approx(np.ones(200))


def test_a_dangerous_delta_warns_the_caller_of_fit() -> None:
    with pytest.warns(UserWarning, match="0.3"):
        PrivateClassifier(**LOOSE, classes=["down", "up"], delta=0.3).fit(X, Y)


def test_bounds_clip_what_is_outside_of_them() -> None:
    """An example far outside moves a model no more than one at the bound, when fitted and when predicted."""
    far = X.copy()
    far[0] = 1e25
    near = X.copy()
    near[0] = 4.0
    models = [
        PrivateClassifier(**LOOSE, classes=["down", "up"], bounds=(-4.0, [4.0, 4.0, 4.0]), random_state=1).fit(x, Y)
        for x in (far, near)
    ]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)
    np.testing.assert_array_equal(models[0].decision_function(far), models[0].decision_function(near))


WRONG: dict[str, tuple[dict[str, Any], type[Any], str]] = {
    "bounds the wrong way": ({"bounds": (1, 0)}, ArgumentError, "private-estimator"),
    "bounds of other features": ({"bounds": ([0, 0], 1)}, ArgumentError, "private-estimator"),
    "infinite bounds": ({"bounds": (0, np.inf)}, ArgumentError, "private-estimator"),
    "no bounds": ({"bounds": 3}, ArgumentError, "private-estimator"),
    "a label of no class": ({"classes": ["up", "left"]}, ArgumentError, "private-estimator"),
    "a weight of no class": ({"class_weight": {0: 2.0}}, ArgumentError, "private-estimator"),
    "balanced weights": ({"class_weight": "balanced"}, ScenarioError, "linear.model"),
    "alpha": ({"alpha": -1}, ArgumentError, "private-estimator"),
    "a generator": ({"random_state": np.random.RandomState(0)}, ArgumentError, "private-estimator"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused_before_a_ledger(case: str, tmp_path: Path) -> None:
    settings, error, code = WRONG[case]
    ledger = tmp_path / "fits.jsonl"
    with raises(error, code):
        PrivateClassifier(**{"classes": ["down", "up"], **LOOSE, "ledger": ledger, **settings}).fit(X, Y)
    assert not ledger.exists()
