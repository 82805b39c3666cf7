"""`PrivateClassifier` and `PrivateRegressor` beside scikit-learn's rules for estimators and the rules of a ledger."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import flower_privdec as fp
from flower_privdec import PrivateClassifier
from flower_privdec.common.errors import ArgumentError, BudgetError, ScenarioError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(200, 3))
Y = np.where(X[:, 0] > 0, "up", "down")
# Of the checks' few examples only a large ε leaves anything to learn; `random_state`, which the checks set, makes two
# fits equal. Without a seed they must differ.
LOOSE: dict[str, Any] = {"epsilon": 500.0, "batch_size": 10**6, "epochs": 60, "learning_rate": 1.0, "clip_norm": 2.0}
BY_NAME: dict[str, dict[str, Any]] = {
    "PrivateClassifier": {"classes": ["down", "up"]},
    "PrivateRegressor": {"target_bounds": (-3, 3), "learning_rate": 0.1, "clip_norm": 20.0},
}
SCORES = X @ [0.5, 0.2, -0.1]
FAIL = {"check_class_weight_classifiers": "a weight of 1000 lifts gradients over the clip norm, where it adds nothing"}


def targets_of(name: str) -> np.ndarray:
    return Y if name == "PrivateClassifier" else SCORES


def estimator(name: str, **settings: Any) -> Any:
    return getattr(fp, name)(**LOOSE | BY_NAME[name] | settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_checks_of_scikit_learn_pass(name: str) -> None:
    """Those of classifiers fit labels of their own, so that classes must be read off y here."""
    checked = estimator(name)
    failing = {}
    if name == "PrivateClassifier":
        checked.set_params(classes=None)
        failing = FAIL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(checked, on_fail=None, on_skip=None, expected_failed_checks=failing)
    not_passed = {result["check_name"]: result["status"] for result in results if result["status"] != "passed"}
    assert not_passed.pop("check_array_api_input", "skipped") == "skipped"  # needs SCIPY_ARRAY_API
    assert not_passed == dict.fromkeys(failing, "xfail")
    assert len(results) > 40


@pytest.mark.parametrize("name", BY_NAME)
def test_pipelines_searches_and_pickles_take_them(name: str) -> None:
    y = targets_of(name)
    steps = make_pipeline(FunctionTransformer(), estimator(name, epochs=20))
    search = GridSearchCV(steps, {f"{name.lower()}__alpha": [0.0, 1e-3]}, cv=2).fit(X, y)
    restored = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(restored.predict(X), search.predict(X))
    assert search.score(X, y) > 0.8
    assert restored[-1].epsilon_ == search.best_estimator_[-1].epsilon_


@pytest.mark.parametrize("name", BY_NAME)
def test_noise_from_a_seed_has_no_epsilon(name: str) -> None:
    seeded = estimator(name, random_state=3).fit(X, targets_of(name))
    assert seeded.epsilon_ == np.inf
    assert 450 < clone(seeded).set_params(random_state=None).fit(X, targets_of(name)).epsilon_ <= 500


def test_a_regression_needs_public_bounds_of_its_targets(tmp_path: Path) -> None:
    ledger = tmp_path / "fits.jsonl"
    with raises(ArgumentError, "private-estimator", names="target_bounds=None must be"):
        estimator("PrivateRegressor", target_bounds=None, ledger=ledger).fit(X, SCORES)
    with raises(ArgumentError, "private-estimator", names="for each of 2 targets"):
        estimator("PrivateRegressor", target_bounds=([0, 0, 0], 1), ledger=ledger).fit(X, np.stack([SCORES] * 2, 1))
    assert not ledger.exists()


def test_a_target_outside_of_bounds_is_clipped() -> None:
    far = SCORES.copy()
    far[0] = 1e25
    near = SCORES.copy()
    near[0] = 3.0
    fits = [estimator("PrivateRegressor", random_state=1).fit(X, y) for y in (far, near)]
    np.testing.assert_array_equal(fits[0].coef_, fits[1].coef_)


def test_a_regression_is_in_units_of_its_targets() -> None:
    """As scikit-learn's own, of one target or several, with bounds of features or without."""
    several = np.stack([100 * SCORES + 40, -SCORES], axis=1)
    limits = ([-260.0, -3.0], [340.0, 3.0])
    loose = {"epsilon": 5000.0, "epochs": 200, "random_state": 1, "clip_norm": 4.0}
    plain = estimator("PrivateRegressor", target_bounds=limits, **loose).fit(X, several)
    exact = LinearRegression().fit(X, several)
    np.testing.assert_allclose(plain.coef_, exact.coef_, atol=2.0)
    np.testing.assert_allclose(plain.intercept_, exact.intercept_, atol=2.0)
    assert (plain.predict(X).shape, plain.score(X, several) > 0.99) == ((200, 2), True)

    scaled = estimator("PrivateRegressor", bounds=(-4, 4), **loose).fit(X, SCORES)
    assert (scaled.coef_.shape, scaled.predict(X).shape, type(scaled.intercept_)) == ((3,), (200,), float)
    assert scaled.score(X, SCORES) > 0.9


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
    "bounds in a set": ({"bounds": {-3, 3}}, ArgumentError, "private-estimator"),
    "a number of classes": ({"classes": 2}, ArgumentError, "private-estimator"),
    "classes in a set": ({"classes": {"down", "up"}}, ArgumentError, "private-estimator"),
    "classes used up": ({"classes": iter(["down", "up"])}, ArgumentError, "private-estimator"),
    "classes as one word": ({"classes": "down"}, ArgumentError, "private-estimator"),
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


@pytest.mark.parametrize("name", BY_NAME)
def test_masked_numbers_are_refused_not_unmasked(name: str, tmp_path: Path) -> None:
    ledger = tmp_path / "fits.jsonl"
    estimator = getattr(fp, name)(**{**LOOSE, **BY_NAME[name], "ledger": ledger})
    with raises(ArgumentError, "private-estimator", r"X\.filled"):
        estimator.fit(np.ma.masked_greater(X, 1), targets_of(name))
    assert not ledger.exists()
