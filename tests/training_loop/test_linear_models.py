"""scikit-learn's linear models with privacy for each example: noise, clipping and ledger are those of `private`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from raising import raises
from sklearn.base import clone
from sklearn.linear_model import (
    Lasso,
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum, fit_privately, peer_folder, private
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.training_loop.linear_models import FIXED, HONOURED, WITHOUT_EFFECT

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(60, 5)) * GENERATOR.exponential(size=(60, 1))
SCORES = X @ GENERATOR.normal(size=(5, 3)) + GENERATOR.normal(size=(60, 3)) / 10
QUIET: dict[str, Any] = {"report": lambda line: None, "delta": 1e-3}


def in_torch(model: Any, criterion: Any, targets: Any, outputs: int, decay: float, ledger: Path) -> nn.Linear:
    """Return the same two rounds by `private`, with plain SGD on a torch model."""
    module = nn.Linear(5, outputs).to(torch.float64)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    optimizer = torch.optim.SGD([{"params": module.weight, "weight_decay": decay}, {"params": module.bias}], lr=0.5)
    data = DataLoader(TensorDataset(torch.from_numpy(X), torch.as_tensor(targets)), batch_size=16)
    for _ in range(2):
        options = {"noise_multiplier": 1.5, "clip_norm": 0.7, "insecure_seed": 3, "ledger": ledger, "reserve": 1}
        parts = private(module, optimizer, data, criterion, **options, **QUIET)
        net, step, loader, loss = parts
        for x, y in loader:
            step.zero_grad()
            loss(net(x), y).backward()
            step.step()
        parts.close()
    return module


BINARY, CLASSES = (SCORES[:, 0] > 0).astype(int), SCORES.argmax(1)
HOT = nn.functional.one_hot(torch.from_numpy(CLASSES), 3).double()


def bce(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs[..., 0], y.double())


def weighted_bce(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.binary_cross_entropy_with_logits(outputs[..., 0], y.double(), reduction="none")
    return ((1 + 6 * y) * losses).mean()


def hinge(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(1 - (2 * y - 1) * outputs[..., 0]).mean()


MODELS = {
    "logistic": (LogisticRegression(C=2.0), BINARY, bce, BINARY, 1, 1 / 120),
    "softmax": (LogisticRegression(C=np.inf), CLASSES, nn.CrossEntropyLoss(), CLASSES, 3, 0.0),
    "sgd-hinge": (SGDClassifier(alpha=0.02), BINARY, hinge, BINARY, 1, 0.02),
    "sgd-log-loss": (
        SGDClassifier(loss="log_loss", alpha=0.03),
        CLASSES,
        nn.BCEWithLogitsLoss(),
        HOT,
        3,
        0.01,
    ),
    "linear": (LinearRegression(), SCORES[:, 0], nn.MSELoss(), SCORES[:, :1], 1, 0.0),
    "weighted": (LogisticRegression(C=np.inf, class_weight={1: 7.0}), BINARY, weighted_bce, BINARY, 1, 0.0),
    "weighted softmax": (
        LogisticRegression(C=np.inf, class_weight={0: 0.5, 2: 9.0}),
        CLASSES,
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 9.0], dtype=torch.float64), reduction="sum"),
        CLASSES,
        3,
        0.0,
    ),
    "weighted sgd": (
        SGDClassifier(loss="log_loss", alpha=0.03, class_weight={0: 0.5, 2: 9.0}),
        CLASSES,
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 1.0, 9.0], dtype=torch.float64)),
        HOT,
        3,
        0.01,
    ),
    "ridge": (Ridge(alpha=3.0), SCORES, nn.MSELoss(), SCORES, 3, 2 * 3.0 / 60 / 3),
    "sgd-regressor": (SGDRegressor(alpha=0.01), SCORES[:, 0], nn.MSELoss(), SCORES[:, :1], 1, 0.02),
}


@pytest.mark.parametrize("name", MODELS)
def test_noise_clipping_and_ledger_match_the_torch_loop(name: str, tmp_path: Path) -> None:
    model, y, criterion, targets, outputs, decay = MODELS[name]
    module = in_torch(model, criterion, targets, outputs, decay, tmp_path / "torch.jsonl")
    classes = None if y.dtype.kind == "f" else range(y.max() + 1)
    for _ in range(2):
        options = {"noise_multiplier": 1.5, "clip_norm": 0.7, "insecure_seed": 3, "batch_size": 16}
        fit_privately(
            model, X, y, classes=classes, ledger=tmp_path / "ours.jsonl", learning_rate=0.5, **options, **QUIET
        )
    np.testing.assert_allclose(np.reshape(model.coef_, (outputs, 5)), module.weight.detach(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.reshape(model.intercept_, outputs), module.bias.detach(), rtol=1e-6, atol=1e-9)
    charged = [
        [(entry.from_step, entry.to_step, entry.charges) for entry in read_chain(tmp_path / f"{ledger}.jsonl")[1]]
        for ledger in ("ours", "torch")
    ]
    assert charged[0] == charged[1]
    assert len(charged[0]) == 8


HOSTILE = [1e200, -1e300]
TRIED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "logistic": (LogisticRegression, BINARY, {"classes": (0, 1)}),
    "softmax": (LogisticRegression, CLASSES, {"classes": (0, 1, 2)}),
    "hinge": (SGDClassifier, BINARY, {"classes": (0, 1)}),
    "least squares": (LinearRegression, SCORES[:, 0], {}),
    "ridge of three": (Ridge, SCORES, {}),
}


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("where", ["x", "y"])
@pytest.mark.parametrize("name", TRIED)
def test_one_hostile_number_moves_the_model_boundedly(name: str, where: str, value: float, tmp_path: Path) -> None:
    kind, y, more = TRIED[name]
    if where == "y" and more:
        with raises(ScenarioError, "linear.data"):  # a label that is none of the classes
            fit_privately(kind(), X, [value, *y[1:]], noise_multiplier=1.0, ledger=tmp_path / "l", **more, **QUIET)
        return
    options = {"noise_multiplier": 1e-9, "clip_norm": 0.5, "insecure_seed": 1, "batch_size": 60, "learning_rate": 1.0}
    moved = []
    for number, first in enumerate((0.0, value)):
        inputs, targets, model = X.copy(), y.copy(), kind()
        (inputs if where == "x" else targets)[0] = first
        fit_privately(model, inputs, targets, ledger=tmp_path / f"{number}.jsonl", **options, **more, **QUIET)
        moved.append(np.append(model.coef_, model.intercept_))
    assert np.isfinite(moved[1]).all()
    assert np.linalg.norm(moved[1] - moved[0]) <= 2 * 0.5 / 60 + 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "y"])
def test_nan_is_refused_before_a_ledger(where: str, value: float, tmp_path: Path) -> None:
    inputs, targets = X.copy(), SCORES[:, 0].copy()
    (inputs if where == "x" else targets)[3] = value
    with raises(ScenarioError, "linear.data", names=f"{where} holds") as caught:
        fit_privately(LinearRegression(), inputs, targets, noise_multiplier=1.0, ledger=tmp_path / "l.jsonl", **QUIET)
    assert "3" not in str(caught.value)  # neither where nor how many
    assert not (tmp_path / "l.jsonl").exists()


def test_scikit_learn_predicts_with_what_was_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"noise_multiplier": 1e-4, "clip_norm": 50.0, "batch_size": 20}
    options |= {"local_epochs": 60, "learning_rate": 0.1}
    names = np.array(["a", "b", "c"])[CLASSES]
    for model in (LogisticRegression(), SGDClassifier(loss="log_loss")):
        ledger = tmp_path / f"{type(model).__name__}.jsonl"
        fit_privately(model, X, names, classes=list("abc"), ledger=ledger, **options, **QUIET)
        assert model.score(X, names) > 0.6  # one in three by chance
        assert model.predict_proba(X).shape == (60, 3)
    model = Ridge()
    fit_privately(model, X, SCORES, ledger=tmp_path / "ridge.jsonl", **options, **QUIET)
    assert model.predict(X).shape == SCORES.shape
    model = SGDRegressor()
    fit_privately(model, X, SCORES[:, 0], ledger=tmp_path / "sgd.jsonl", **options, **QUIET)
    assert model.predict(X).shape == (60,)


def test_a_spent_budget_reads_nothing_and_names_a_remedy(tmp_path: Path) -> None:
    class Unread:
        def __len__(self) -> int:
            return 60

        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            raise AssertionError("an example was read")

    options = {"ledger": tmp_path / "ours.jsonl", "epsilon": 5.0, "rounds": 1, "batch_size": 16, **QUIET}
    budget = fit_privately(LinearRegression(), X, SCORES[:, 0], **options)
    assert 4.5 < budget.epsilon(budget.entries()) <= 5.0
    with raises(BudgetError, "ledger.budget-spent"):
        fit_privately(LinearRegression(), Unread(), Unread(), **options)

    charged = (tmp_path / "ours.jsonl").read_bytes()
    with raises(BudgetError, "ledger.budget-spent", names="allows [0-9]+ more steps, and this call takes 40"):
        fit_privately(LinearRegression(), Unread(), Unread(), **options | {"epsilon": 6.0, "local_epochs": 10})
    assert (tmp_path / "ours.jsonl").read_bytes() == charged


def test_a_ledger_with_a_seeded_fit_has_no_epsilon(tmp_path: Path) -> None:
    """Whoever knows the seed undoes that fit's noise, however the later ones are drawn."""
    options: Any = {"ledger": tmp_path / "ours.jsonl", "delta": 1e-2, "noise_multiplier": 5.0, **QUIET}
    for seed in (None, 3, None):
        budget = fit_privately(LinearRegression(), X, SCORES[:, 0], insecure_seed=seed, **options)
    first, *_ = entries = budget.entries()
    assert (budget.epsilon(entries), budget.epsilon([])) == (np.inf, 0)
    assert 0 < budget.epsilon([first]) < budget.charged(entries) < 10
    assert "∞" in budget.statement(entries)


@pytest.mark.parametrize(
    ("model", "options", "code"),
    [
        (Lasso(), {}, "linear.model"),
        (LogisticRegressionCV(), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(l1_ratio=0.5, solver="saga"), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight="balanced"), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight={7: 1.0}), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight={0: -1.0}), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight={0: np.nan}), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight={0: 1e25}), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(class_weight={0: 0, 1: 0}), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(class_weight="balanced"), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(C=0), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(C=np.nan), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(C=1e-25), {"classes": (0, 1)}, "linear.model"),
        (LogisticRegression(solver="liblinear"), {"classes": (0, 1, 2)}, "linear.model"),
        (LogisticRegression(solver="liblinear", intercept_scaling=0), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(average=True), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(early_stopping=True), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(learning_rate="pa1"), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(loss="modified_huber"), {"classes": (0, 1)}, "linear.model"),
        (SGDRegressor(loss="epsilon_insensitive"), {}, "linear.model"),
        (LinearRegression(positive=True), {}, "linear.model"),
        (Ridge(positive=True), {}, "linear.model"),
        (Ridge(alpha=np.ones(3)), {}, "linear.model"),
        (Ridge(alpha=-1.0), {}, "linear.model"),
        (SGDClassifier(penalty="l1"), {"classes": (0, 1)}, "linear.model"),
        (SGDClassifier(), {"classes": (0, 1, 2)}, "linear.model"),
        (LogisticRegression(), {}, "linear.model"),
        (SGDRegressor(loss="huber"), {}, "linear.model"),
        (LogisticRegression(), {"classes": (5, 6)}, "linear.data"),
        (LinearRegression(), {"y": BINARY[:7]}, "linear.data"),
        (LinearRegression(), {"x": np.array([["a"] * 5] * 60)}, "linear.data"),
        (LinearRegression(), {"x": X.astype(object)}, "linear.data"),
        (LinearRegression(), {"x": X[:, 0]}, "linear.data"),
        (LinearRegression(), {"x": X[:, :0]}, "linear.data"),
        (LinearRegression(), {"x": X[:0], "y": BINARY[:0]}, "linear.data"),
        (LinearRegression(), {"x": None}, "linear.data"),
        (LinearRegression(), {"x": [[1.0], [1.0, 2.0]] * 30}, "linear.data"),
        (LinearRegression(), {"y": None}, "linear.data"),
        (LinearRegression(), {"y": ["a"] * 60}, "linear.data"),
        (LinearRegression(), {"y": X.astype(complex)}, "linear.data"),
        (LinearRegression(), {"y": np.zeros((60, 0))}, "linear.data"),
        (LinearRegression(), {"y": [[1], [1, 2]] * 30}, "linear.data"),
        (LogisticRegression(), {"y": BINARY[:, None], "classes": (0, 1)}, "linear.data"),
        (LogisticRegression(), {"y": BINARY.astype(str), "classes": (0, 1)}, "linear.data"),
        (LogisticRegression(), {"y": np.zeros(60), "classes": (0,)}, "linear.model"),
        (LinearRegression(), {"batch_size": 0}, "training-loop.argument"),
        (LinearRegression(), {"learning_rate": -1.0}, "training-loop.argument"),
    ],
)
def test_unsupported_settings_are_refused_by_name(model: Any, options: Any, code: str, tmp_path: Path) -> None:
    given = {"x": X, "y": BINARY, "noise_multiplier": 1.0, "ledger": tmp_path / "ours.jsonl", **QUIET, **options}
    with raises(ScenarioError, code):
        fit_privately(model, given.pop("x"), given.pop("y"), **given)
    assert not (tmp_path / "ours.jsonl").exists()


@pytest.mark.parametrize("kind", [LogisticRegression, SGDClassifier, LinearRegression, Ridge, SGDRegressor])
def test_each_setting_of_the_installed_scikit_learn_is_known(kind: Any) -> None:
    """A setting of a later version fails here: it has to be honoured, refused, or known to have no effect."""
    assert kind().get_params().keys() <= HONOURED | WITHOUT_EFFECT | FIXED.keys()
    assert not HONOURED & WITHOUT_EFFECT
    assert not FIXED.keys() & (HONOURED | WITHOUT_EFFECT)


def test_an_unknown_setting_must_be_at_its_default(tmp_path: Path) -> None:
    class Later(LinearRegression):
        def __init__(self, *, robust: bool = False) -> None:
            super().__init__()
            self.robust = robust

        def get_params(self, deep: bool = True) -> dict[str, Any]:
            return {"fit_intercept": True, "robust": self.robust}

    options: dict[str, Any] = {"noise_multiplier": 1.0, "ledger": tmp_path / "ours.jsonl", **QUIET}
    with raises(ScenarioError, "linear.model", names="robust=True"):
        fit_privately(Later(robust=True), X, SCORES[:, 0], **options)
    assert not (tmp_path / "ours.jsonl").exists()
    fit_privately(Later(), X, SCORES[:, 0], **options)


@pytest.mark.parametrize(
    "model",
    [
        LogisticRegression(C=0.5, class_weight={0: 1.0, 1: 6.0}, tol=1e-10),
        LogisticRegression(C=0.5, fit_intercept=False, tol=1e-10),
        LogisticRegression(C=0.1, solver="liblinear", intercept_scaling=0.5, tol=1e-10),
        Ridge(alpha=20.0),
    ],
    ids=["class weights", "no intercept", "a penalised intercept", "ridge"],
)
def test_without_noise_the_minimum_is_scikit_learns(model: Any, tmp_path: Path) -> None:
    """No noise to speak of and no clipping: what is minimised is what the model's settings say."""
    is_regression = isinstance(model, Ridge)
    y, classes = (SCORES[:, 0], None) if is_regression else (BINARY, (0, 1))
    x = np.clip(X, -2, 2) / 2
    expected = clone(model).fit(x, y)
    options: dict[str, Any] = {"noise_multiplier": 1e-9, "clip_norm": 1e3, "batch_size": 60, "local_epochs": 1500}
    fit_privately(model, x, y, classes=classes, ledger=tmp_path / "l", learning_rate=0.5, **options, **QUIET)
    np.testing.assert_allclose(np.ravel(model.coef_), np.ravel(expected.coef_), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(np.ravel(model.intercept_), np.ravel(expected.intercept_), rtol=2e-3, atol=2e-3)


def test_a_peer_with_one_class_trains_too(tmp_path: Path) -> None:
    model = LogisticRegression()
    options: dict[str, Any] = {"noise_multiplier": 1e-3, "local_epochs": 40, "classes": (0, 1)}
    fit_privately(model, X, np.zeros(60, int), ledger=tmp_path / "ours.jsonl", **options, **QUIET)
    assert (model.predict(X) == 0).mean() > 0.9
    assert model.classes_.tolist() == [0, 1]


def test_a_scikit_learn_peer_reports_the_examples_epsilon(tmp_path: Path) -> None:
    app = ClientApp(mods=[PeerMod(share_metrics=False)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = LogisticRegression()
        model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
        ledger = peer_folder() / "examples.jsonl"
        fit_privately(model, X, CLASSES, classes=range(3), ledger=ledger, epsilon=6.0, rounds=2, batch_size=16, **QUIET)
        arrays = ArrayRecord([model.coef_, model.intercept_])
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 60})}), reply_to=message)

    strategy = PushSum(fraction_evaluate=0.0)
    grid = LocalGrid(app, 2, folder=tmp_path)
    result = strategy.start(grid, ArrayRecord([np.zeros((3, 5)), np.zeros(3)]), 2)
    assert all(5.5 < report.epsilon <= 6.0 for report in strategy.reports.values())
    assert all("unit: one example" in report.app_spent for report in strategy.reports.values())
    assert np.abs(result.arrays.to_numpy_ndarrays()[0]).max() > 0


def test_a_dangerous_delta_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    for number, delta in enumerate((1 / 60, 0.016)):
        options: dict[str, Any] = {"delta": delta, "noise_multiplier": 2.0, "report": said.append}
        fit_privately(Ridge(), X, SCORES[:, 0], ledger=tmp_path / f"{number}", rounds=1, **options)
    warned = [">= 1/60: revealing one example outright" in line for line in said]
    assert warned == [True, False, False]
