"""`PrivateClassifier` and `PrivateRegressor`: scikit-learn estimators of one party, trained by `fit_privately`.

They own no mechanism. `fit` hands the examples, clipped to public bounds, to `fit_privately`, and keeps the
coefficients and the ε that the ledger counted. Validation of arrays, cloning and scores are scikit-learn's.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from flower_privdec.common.errors import ArgumentError
from flower_privdec.training_loop.linear_models import fit_privately

CODE = "private-estimator"

_log = logging.getLogger(__name__)


def _tell(line: str) -> None:
    """Log a line of `fit_privately`; a warning, such as of a δ that is too large, reaches whoever called `fit`."""
    if line.startswith("warning: "):
        warnings.warn(line.removeprefix("warning: "), stacklevel=4)
    else:
        _log.info(line)


class _PrivateLinear(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the estimators share: public bounds, the penalty, and a fit that is paid for.

    Attributes: as each of them documents.
    """

    epsilon: float
    delta: float
    bounds: tuple[Any, Any] | None
    clip_norm: float
    epochs: int
    batch_size: int
    learning_rate: float
    alpha: float
    ledger: str | Path | None
    random_state: int | None

    def _fit_privately(self, model: Any, x: np.ndarray, targets: np.ndarray, classes: Sequence[int] | None) -> None:
        """Train a model of scikit-learn from zero, and keep the ε."""
        # The temporary ledger counts one fit, and goes when its ε is known.
        with tempfile.TemporaryDirectory() as folder:
            ledger = self.ledger
            if ledger is None:
                ledger = Path(folder) / "fit.jsonl"
            budget = fit_privately(
                model,
                x,
                targets,
                ledger=ledger,
                delta=self.delta,
                classes=classes,
                epsilon=self.epsilon,
                rounds=1,
                local_epochs=self.epochs,
                clip_norm=self.clip_norm,
                learning_rate=self.learning_rate,
                batch_size=self.batch_size,
                insecure_seed=self._seed(),
                report=_tell,
            )
            self.epsilon_ = budget.epsilon(budget.entries())

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        """Return features clipped to the bounds and mapped to [-1, 1]."""
        if self.bounds is None:
            return x
        low, high = _limits("bounds", self.bounds, x.shape[1], "features")
        return _mapped(x, low, high)

    def _checked_alpha(self) -> float:
        """Return the penalty's weight."""
        alpha = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < np.inf:
            raise ArgumentError(f"alpha={alpha!r} must be a finite number >= 0", code=CODE)
        return alpha

    def _seed(self) -> int | None:
        """Return the seed; None for the operating system's entropy."""
        if self.random_state is None or isinstance(self.random_state, (int, np.integer)):
            return self.random_state
        raise ArgumentError(f"random_state={self.random_state!r} must be a whole number or None", code=CODE)


def _limits(name: str, given: Any, count: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper bounds, each of `count` numbers.

    Args:
        name: of the argument.
        given: (low, high), each a number or one for each.
        what: what they bound, in the plural.
    """
    # A set has no order, so that its low might be its high.
    if isinstance(given, Set):
        raise ArgumentError(f"{name}={given!r} must be (low, high), in this order: give a tuple", code=CODE)
    try:
        low, high = (np.broadcast_to(np.asarray(bound, dtype=np.float64), (count,)) for bound in given)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{name}={given!r} must be (low, high), each a number or one for each of {count} {what}", code=CODE
        ) from None

    width = high - low
    if not ((width > 0) & np.isfinite(width)).all():
        raise ArgumentError(f"{name}={given!r}: each low must be finite and below its high", code=CODE)
    return low, high


def _check_unmasked(**arrays: Any) -> None:
    """Refuse masked arrays, whose masks scikit-learn leaves out without a word."""
    for name, array in arrays.items():
        if np.ma.is_masked(array):
            raise ArgumentError(
                f"{name} is an array with masked numbers, whose mask would be lost: give what stands for them, as "
                f"{name}.filled(0), or leave these examples out",
                code=CODE,
            )


def _mapped(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return values [n, k] clipped to bounds [k] and mapped to [-1, 1]."""
    mapped: np.ndarray = (np.clip(values, low, high) - low) / (high - low) * 2 - 1
    return mapped


class PrivateClassifier(ClassifierMixin, _PrivateLinear):  # type: ignore[misc]  # scikit-learn has no types
    """Logistic regression (of several classes a softmax) with privacy for each example.

        PrivateClassifier(epsilon=3, delta=1e-4, classes=[0, 1], bounds=(0, 255)).fit(x, y).predict(x_new)

    Each `fit` starts from zero, draws fresh noise, and is one more release of its examples: two of them cost the ε of
    both together. A clone is fitted anew, and GridSearchCV with k folds and m candidates fits k m + 1 times; its scores
    of held-out private examples, and `score` itself, are covered by no ε. Choose parameters on public data, or give a
    `ledger`: all fits that name it are counted together, and one that would go beyond ε is refused.

    Args:
        epsilon: ε of everything in the ledger; without a ledger of one fit.
        delta: δ; well below one over the examples.
        classes: all labels, as public constants. Left out, they are those in y. Which these are is private then: an
            example with a label of its own is given away whatever ε says, and a warning says so.
        bounds: (low, high), public constants, one number for all features or one for each: features are clipped to
            them and mapped to [-1, 1], in `fit` and `predict`. Left out, features are taken as they are. Bounds read
            off the private data are not covered.
        clip_norm: C, of an example's gradient.
        epochs: how many passes over the examples a fit takes; more of them need more noise.
        batch_size: the expected size of a Poisson batch.
        learning_rate: η.
        alpha: the weight of the L2 penalty on the coefficients, as in SGDClassifier.
        class_weight: a dict of public weights by label, see `fit_privately`.
        ledger: the file in which all fits of these examples are counted; None for none.
        random_state: INSECURE: batches and noise from a seed, so that no ε holds against those who know it. Only for
            tests.

    Attributes:
        classes_: all labels, sorted.
        coef_, intercept_: of the features in [-1, 1] if there are bounds.
        epsilon_: the ε spent, by everything in the ledger; infinite if a fit in it was drawn from a `random_state`.
        n_features_in_: the number of features.

    Privacy: as of `fit_privately`: unit one example, adjacency zero-out; the number of examples is public.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        classes: Sequence[Any] | None = None,
        bounds: tuple[Any, Any] | None = None,
        clip_norm: float = 1.0,
        epochs: int = 20,
        batch_size: int = 64,
        learning_rate: float = 0.5,
        alpha: float = 0.0,
        class_weight: dict[Any, float] | None = None,
        ledger: str | Path | None = None,
        random_state: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.bounds = bounds
        self.clip_norm = clip_norm
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.alpha = alpha
        self.class_weight = class_weight
        self.ledger = ledger
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> PrivateClassifier:  # scikit-learn's names
        """Train on examples [n, features] and labels [n], from zero.

        Raises:
            ValueError: scikit-learn or a rule here refuses the arrays.
            ScenarioError: an option cannot be private, with the remedy.
            BudgetError: the ledger's budget is spent.
        """
        _check_unmasked(X=X, y=y)
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, labels = self._labels(y)
        x = self._scaled(x)
        c = np.inf
        alpha = self._checked_alpha()
        if alpha > 0:
            c = 1 / (alpha * len(x))
        model = LogisticRegression(C=c, class_weight=self._weights(classes))
        self._fit_privately(model, x, labels, range(len(classes)))

        self.classes_ = classes
        self.coef_ = model.coef_
        self.intercept_ = model.intercept_
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Return each class's score, [n, classes]; of two classes the log-odds of the second, [n]."""
        check_is_fitted(self)
        x = self._scaled(validate_data(self, X, dtype=np.float64, reset=False))
        scores: np.ndarray = x @ self.coef_.T + self.intercept_
        if len(self.classes_) == 2:
            return scores[:, 0]
        return scores

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of each example, [n]."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            places = (scores > 0).astype(np.int64)
        else:
            places = scores.argmax(1)
        predicted: np.ndarray = self.classes_[places]
        return predicted

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [n, classes]."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        odds = np.exp(scores - scores.max(1, keepdims=True))
        probabilities: np.ndarray = odds / odds.sum(1, keepdims=True)
        return probabilities

    def _labels(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all classes, sorted, and the place of each label among them, int64 [n]."""
        if self.classes is None:
            classes = np.unique(y)
            warnings.warn(
                "classes were read off y, so that ε does not cover which labels there are: give classes, the public "
                "list of all labels",
                stacklevel=3,
            )
        else:
            if isinstance(self.classes, str | bytes | Set | Iterator) or not isinstance(self.classes, Iterable):
                raise ArgumentError(
                    f"classes={self.classes!r} must be a list of all labels, as [0, 1] or range(2)", code=CODE
                )
            classes = np.unique(np.asarray(self.classes))
            if not np.isin(y, classes).all():
                raise ArgumentError("y has a label that is none of classes: give all labels there may be", code=CODE)

        if len(classes) < 2:
            raise ArgumentError(f"there must be two classes at least, and there is {len(classes)} class", code=CODE)
        return classes, np.searchsorted(classes, y).astype(np.int64)

    def _weights(self, classes: np.ndarray) -> Any:
        """Return the weights by a class's place; what is wrong is left for `fit_privately` to refuse."""
        if not isinstance(self.class_weight, dict):
            return self.class_weight
        places = {label: place for place, label in enumerate(classes.tolist())}
        unknown = [label for label in self.class_weight if label not in places]
        if unknown:
            raise ArgumentError(f"class_weight names {unknown[0]!r}, which is none of classes: leave it out", code=CODE)
        return {places[label]: weight for label, weight in self.class_weight.items()}


class PrivateRegressor(RegressorMixin, _PrivateLinear):  # type: ignore[misc]  # scikit-learn has no types
    """Linear regression, of one number or several, with privacy for each example.

        PrivateRegressor(epsilon=3, delta=1e-4, target_bounds=(0, 120), bounds=(0, 255)).fit(x, y).predict(x_new)

    Targets are clipped to `target_bounds`, which are public: without them nothing would say how far one example may
    be from the others. What is said of fits, clones, grid searches and scores is as in `PrivateClassifier`.

    Args:
        epsilon: ε of everything in the ledger; without a ledger of one fit.
        delta: δ; well below one over the examples.
        target_bounds: (low, high), public constants, one number for all targets or one for each: targets are clipped to
            them and mapped to [-1, 1]. Those read off the private data are not covered. It must be given.
        bounds: the same for features, in `fit` and `predict`. Left out, features are taken as they are.
        clip_norm: C, of an example's gradient of the mean squared error of mapped targets.
        epochs: how many passes over the examples a fit takes; more of them need more noise.
        batch_size: the expected size of a Poisson batch.
        learning_rate: η.
        alpha: the weight of the L2 penalty on the coefficients of mapped targets, as in SGDRegressor.
        ledger: the file in which all fits of these examples are counted; None for none.
        random_state: INSECURE: batches and noise from a seed, so that no ε holds against those who know it. Only for
            tests.

    Attributes:
        coef_, intercept_: in units of y, of the features in [-1, 1] if there are bounds.
        epsilon_: the ε spent, by everything in the ledger; infinite if a fit in it was drawn from a `random_state`.
        n_features_in_: the number of features.

    Privacy: as of `fit_privately`: unit one example, adjacency zero-out; the number of examples is public.
    """

    def __init__(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        target_bounds: tuple[Any, Any] | None = None,
        bounds: tuple[Any, Any] | None = None,
        clip_norm: float = 1.0,
        epochs: int = 20,
        batch_size: int = 64,
        learning_rate: float = 0.1,
        alpha: float = 0.0,
        ledger: str | Path | None = None,
        random_state: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.target_bounds = target_bounds
        self.bounds = bounds
        self.clip_norm = clip_norm
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.alpha = alpha
        self.ledger = ledger
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def fit(self, X: Any, y: Any) -> PrivateRegressor:  # scikit-learn's names
        """Train on examples [n, features] and targets [n] or [n, targets], from zero.

        Raises:
            ValueError: scikit-learn or a rule here refuses the arrays.
            ScenarioError: an option cannot be private, with the remedy.
            BudgetError: the ledger's budget is spent.
        """
        _check_unmasked(X=X, y=y)
        x, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        if self.target_bounds is None:
            raise ArgumentError(
                "target_bounds=None must be (low, high), public constants within which targets lie: those of y itself "
                "would give away its extreme examples",
                code=CODE,
            )

        targets = np.asarray(y, dtype=np.float64).reshape(len(x), -1)
        low, high = _limits("target_bounds", self.target_bounds, targets.shape[1], "targets")
        mapped = _mapped(targets, low, high)
        x = self._scaled(x)

        # Ridge adds losses up.
        model = Ridge(alpha=self._checked_alpha() * len(x))
        self._fit_privately(model, x, mapped, None)

        # Back to units of y.
        half = (high - low) / 2
        coefficients = model.coef_.reshape(len(half), -1) * half[:, None]
        intercepts = np.reshape(model.intercept_, -1) * half + (low + high) / 2
        if y.ndim == 1:
            self.coef_ = coefficients[0]
            self.intercept_ = float(intercepts[0])
        else:
            self.coef_ = coefficients
            self.intercept_ = intercepts
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return each example's targets, [n] or [n, targets] as they were given."""
        check_is_fitted(self)
        x = self._scaled(validate_data(self, X, dtype=np.float64, reset=False))
        predicted: np.ndarray = x @ self.coef_.T + self.intercept_
        return predicted
