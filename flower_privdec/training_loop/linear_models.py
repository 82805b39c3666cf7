"""`fit_privately`: example-level privacy for scikit-learn's linear models, by DP-SGD on the engine's closed forms.

`_objective` reads from the model's settings what it minimises, and refuses settings that it cannot honour. A step then
adds the clipped gradients of a Poisson batch (`gradients.StackedKernel`), noise and the model's L2 penalty. Batches,
payments and the budget are those of the torch loop (`loop_budget`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.catalogue import LEAST_WEIGHT, MOST_WEIGHT
from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.gradients import GradientKernel, build_kernel
from flower_privdec.gradients.protocol import RowsOfBatch
from flower_privdec.privacy.accountant.accounting import loose_delta
from flower_privdec.privacy.noise import NoiseSource, build_deployed_noise, build_noise
from flower_privdec.tasks.losses import LOSSES, Loss
from flower_privdec.training_loop.loop_budget import LINES, PEER, PrivacyBudget, seed_of
from flower_privdec.training_loop.loop_checks import check_options

MODEL = "linear.model"  # codes of errors
DATA = "linear.data"
MARGINS = {"log_loss": "logistic", "hinge": "hinge", "squared_hinge": "squared-hinge"}  # of SGDClassifier
KINDS = ("LogisticRegression", "SGDClassifier", "LinearRegression", "Ridge", "SGDRegressor")

# Each parameter of these models is in one of the next three; a test goes through those of the installed scikit-learn.
HONOURED = frozenset(  # what is minimised follows them, or they are refused by `_objective`
    (
        *("penalty", "l1_ratio", "C", "alpha", "fit_intercept", "intercept_scaling", "class_weight"),
        *("loss", "solver", "multi_class", "learning_rate"),
    )
)
WITHOUT_EFFECT = frozenset(  # on what is minimised, by the losses that are taken: they say how `fit` searches for it
    (
        *("dual", "tol", "max_iter", "random_state", "shuffle", "verbose", "warm_start", "n_jobs", "copy_X", "eta0"),
        *("power_t", "n_iter_no_change", "validation_fraction", "epsilon"),
    )
)
FIXED = {  # to what they must be, and why
    "positive": (False, "noise makes coefficients negative"),
    "average": (False, "the coefficients are those after the last step; average them over calls yourself"),
    "early_stopping": (False, "it would follow a score on private examples, which no ε covers"),
}


def fit_privately(
    model: Any,
    x: Any,
    y: Any,
    *,
    ledger: str | Path,
    delta: float,
    classes: Sequence[Any] | np.ndarray | None = None,
    epsilon: float | None = None,
    rounds: int | None = None,
    local_epochs: int = 1,
    noise_multiplier: float | None = None,
    clip_norm: float = 1.0,
    learning_rate: float = 0.1,
    batch_size: int = 32,
    insecure_seed: int | None = None,
    report: Callable[[str], None] = print,
) -> PrivacyBudget:
    """Train a linear model of scikit-learn, starting at its coefficients, with privacy for each example.

        w ← w - η ((Σ_b g_b min(1, C / |g_b|) + σ C N(0, I)) / expected batch + the model's L2 penalty)

    (Abadi et al. 2016, Alg. 1.) Call it instead of `fit`, whose solver would see the examples without clipping. If you
    call it again in each round with the same ledger, it continues the count.

    Args:
        model: LogisticRegression, LinearRegression, Ridge, SGDClassifier or SGDRegressor, with the penalty L2 or none.
            Its `coef_` and `intercept_` are where it starts (zeros if it has none), and hold the result. The loss
            is the model's: log loss (of several classes softmax for LogisticRegression, one against all for
            SGDClassifier, averaged), for two classes hinge and squared hinge too, or (ŷ - y)². `class_weight` is a
            dict of public weights, by which losses are multiplied before gradients are clipped. Settings that say
            what is minimised are honoured or refused; those of the search for it (`max_iter`, `tol`, `eta0`) have no
            effect.
        x: [examples, features], finite.
        y: [examples]; of a regression also [examples, outputs], finite.
        ledger: the file in which all steps over these examples are counted; see `private`.
        delta: δ; well below one over the examples.
        classes: all labels of a classifier, public and the same at all peers.
        epsilon: the budget over all rounds; None for no limit.
        rounds, local_epochs: how often this is called, and how many passes over the examples each call takes.
        noise_multiplier: noise std over clip norm, in place of rounds.
        clip_norm: C, of an example's gradient in coefficients and intercepts together.
        learning_rate: η.
        batch_size: the expected size of a Poisson batch.
        insecure_seed: INSECURE: batches and noise from a seed. Only for tests.
        report: called with a line on ε, its unit and what was charged; and before, with a warning if δ is too large.

    Returns:
        The budget, whose `epsilon(entries())` is what is spent.

    Raises:
        ScenarioError: a model, data or option that cannot be private, with the remedy.
        BudgetError: before an example is read, if the budget does not allow all steps of this call.

    Privacy: unit one example, adjacency zero-out, against an adversary who sees the coefficients after every step; each
        step is charged before its batch is drawn. The number of examples is public. Not covered: what was computed of
        the examples before, such as a scaler that was fitted to them.

    Deviations: the divisor is the expected batch, not the drawn one.
    """
    check_options(
        {
            "ledger": ledger,
            "delta": delta,
            "epsilon": epsilon,
            "rounds": rounds,
            "local_epochs": local_epochs,
            "noise_multiplier": noise_multiplier,
            "clip_norm": clip_norm,
            "learning_rate": learning_rate,
            "batch_size": batch_size,
            "insecure_seed": insecure_seed,
            "report": report,
        }
    )
    size = _count_of(x)
    objective = _objective(model, classes, size)

    # The budget, with the noise that it asks for.
    count = local_epochs * math.ceil(size / min(batch_size, size))  # steps of this call
    steps = None if rounds is None else rounds * count
    budget = PrivacyBudget.of(ledger, size, batch_size, epsilon, delta, steps, noise_multiplier, insecure_seed)
    # All steps of this call or none: coefficients half-way would be paid for and lost.
    entries = budget.entries()
    remaining = budget.remaining_steps(entries)
    if remaining < count:
        problem = "the privacy budget is spent"
        if remaining > 0:
            problem = f"the privacy budget allows {remaining:,} more steps, and this call takes {count:,}"
        raise BudgetError(
            f"{budget.path}: {problem}, and no example was read: {budget.statement(entries)}",
            code="ledger.budget-spent",
        )

    features = _features(x)
    targets = objective.targets(y, size)
    row, kernel = objective.row(model, features.shape[1], targets)
    penalty = objective.penalty(row, features.shape[1])
    shrinks = learning_rate * float(penalty.max())
    if not shrinks < 2:
        raise ScenarioError(
            f"learning_rate={learning_rate} times the L2 penalty's weight is {shrinks:.3g}, by which the coefficients "
            "would grow without end: it must be < 2; lower the learning rate or alpha, or raise C",
            code=MODEL,
        )
    warning = loose_delta(delta, size)
    if warning:
        report(f"warning: {warning}")

    seed = seed_of(insecure_seed)
    noise: NoiseSource
    if seed is None:
        noise = build_deployed_noise(hardened=False)
    else:
        noise = build_noise({0: seed}, row.device)
    clip = row.new_tensor([clip_norm])
    one = row.new_ones(1)
    std = budget.release.noise_multiplier * clip
    watch = budget.watch
    behind = 0 if watch is None else watch.behind

    for block, first in budget.paid(count, max(1, count // LINES), report):
        for number, drawn in enumerate(budget.draw(block, first, seed), start=first):
            added = torch.from_numpy(drawn[: len(drawn) - behind])
            total = torch.zeros_like(row)
            if len(added):
                batch = RowsOfBatch(features[added][None], targets[added][None], row.new_ones(1, len(added)))
                kernel.add_clipped_(total, row, batch, clip, one)
            clean = total.clone()
            noise.add_(total, std, number, PEER)

            if watch is not None:
                shown = torch.from_numpy(drawn[len(drawn) - behind :])
                gradients = _gradients(kernel, row, features[shown], targets[shown], clip)
                watch.show(gradients / clip)
                watch.released(clean[0] / clip, total[0] / clip, budget.release.noise_multiplier)

            row -= learning_rate * (total / budget.release.batch_size + penalty * row)

    objective.put(model, row, features.shape[1])
    return budget


def _gradients(kernel: GradientKernel, row: Tensor, features: Tensor, targets: Tensor, clip: Tensor) -> Tensor:
    """Return the clipped gradient of each of some examples, [b, d]: as if each were a peer's whole batch."""
    b = len(features)
    ones = row.new_ones(b)
    points = row.expand(b, -1).clone()
    gradients = row.new_zeros(b, row.shape[1])
    batch = RowsOfBatch(features[:, None], targets[:, None], ones[:, None])
    kernel.add_clipped_(gradients, points, batch, clip * ones, ones)
    return gradients


@dataclass
class _Objective:
    """What a model minimises.

    Attributes:
        loss: its name in `tasks.losses`.
        l2: half of it times the squared norm of the coefficients is added to the mean loss.
        classes: sorted; None for a regression.
        has_intercept: whether there are intercepts.
        outputs: how many there are; for a regression known with its targets.
        class_weights: by which the losses of each class's examples are multiplied, in the order of `classes`.
        l2_intercept: the same as `l2`, for the intercepts.
    """

    loss: str
    l2: float
    classes: np.ndarray | None
    has_intercept: bool
    outputs: int = 1
    class_weights: tuple[float, ...] | None = None
    l2_intercept: float = 0.0

    def weighted_loss(self) -> Loss:
        """Return the loss of an example, with the weight of its class."""
        plain = LOSSES[self.loss]
        weights = self.class_weights
        if weights is None or self.classes is None:
            return plain
        if plain.targets == "classes":
            return replace(plain, width=len(self.classes)).weighted(weights)

        # One against all: as in scikit-learn, a class's weight is that of its own examples in its own problem.
        def factors(outputs: Tensor, labels: Tensor) -> Tensor:
            return 1 + labels.to(outputs.dtype) * (torch.tensor(weights).to(outputs) - 1)

        def value(outputs: Tensor, labels: Tensor) -> Tensor:
            losses = nn.functional.softplus(outputs) - labels.to(outputs.dtype) * outputs
            return (losses * factors(outputs, labels)).mean(-1)

        def derivative(outputs: Tensor, labels: Tensor) -> Tensor:
            return plain.derivative(outputs, labels) * factors(outputs, labels)

        return replace(plain, value=value, derivative=derivative)

    def targets(self, y: Any, examples: int) -> Tensor:
        """Return the loss's targets [examples, ...].

        Raises:
            ScenarioError: there are not as many as examples, or a label is none of the classes.
        """
        values = _array("y", y)
        is_flat = values.ndim == 1 or (values.ndim == 2 and self.classes is None and values.size > 0)
        if not is_flat or len(values) != examples:
            raise ScenarioError(
                f"y has the shape {values.shape}, and x {examples} rows: give one target each", code=DATA
            )

        if self.classes is None:
            if values.dtype.kind not in "fiub":
                raise ScenarioError(f"y is of type {values.dtype}: a regression's targets must be numbers", code=DATA)
            numbers = torch.as_tensor(values, dtype=torch.float64).reshape(examples, -1)
            _check_finite("y", numbers)
            self.outputs = numbers.shape[1]
            self.l2 /= self.outputs  # over which the loss is averaged
            return numbers

        if not np.isin(values, self.classes).all():
            raise ScenarioError("y has a label that is none of classes: name all that any peer may have", code=DATA)
        labels = torch.from_numpy(np.searchsorted(self.classes, values).astype(np.int64))
        if self.loss == "binary-cross-entropy":
            return nn.functional.one_hot(labels, self.outputs).to(torch.float64)
        return labels

    def row(self, model: Any, width: int, targets: Tensor) -> tuple[Tensor, GradientKernel]:
        """Return the coefficients and intercepts as one row [1, d], float64, and the kernel of their gradients.

        Raises:
            ScenarioError: the model has coefficients of another shape.
        """
        module = nn.Linear(width, self.outputs, bias=self.has_intercept).to(torch.float64)
        parts = {"coef_": (self.outputs, width), "intercept_": (self.outputs,)}
        values = []
        for name, shape in list(parts.items())[: 1 + self.has_intercept]:
            given = np.asarray(getattr(model, name, np.zeros(shape)), dtype=np.float64)
            if given.size != math.prod(shape) or not np.isfinite(given).all():
                raise ScenarioError(
                    f"{name} of the model has shape {given.shape} and must be finite and of {shape}, by x and classes",
                    code=MODEL,
                )
            values.append(torch.from_numpy(given.reshape(-1).copy()))
        return torch.cat(values)[None], build_kernel(module, self.weighted_loss(), [width], kind="stacked")

    def penalty(self, row: Tensor, width: int) -> Tensor:
        """Return the weight of the L2 penalty of each number of a row, [1, d]."""
        coefficients = self.outputs * width
        penalty = torch.zeros_like(row)
        penalty[:, :coefficients] = self.l2
        penalty[:, coefficients:] = self.l2_intercept
        return penalty

    def put(self, model: Any, row: Tensor, width: int) -> None:
        """Let the model have a row's coefficients and intercepts, in scikit-learn's shapes."""
        values = row[0].numpy()
        split = self.outputs * width
        coefficients = values[:split].reshape(self.outputs, width)
        intercepts = values[split:].copy()

        # A regression of one output has coefficients [features]; SGDRegressor keeps an array of intercepts even so.
        is_flat = self.classes is None and self.outputs == 1
        by_sgd = _is(model, "SGDRegressor")
        if is_flat or by_sgd:
            model.coef_ = coefficients.reshape(-1).copy()
        else:
            model.coef_ = coefficients.copy()

        if not self.has_intercept:
            model.intercept_ = 0.0 if self.classes is None else np.zeros(self.outputs)
        elif is_flat and not by_sgd:
            model.intercept_ = float(intercepts[0])
        else:
            model.intercept_ = intercepts

        model.n_features_in_ = width
        if self.classes is not None:
            model.classes_ = self.classes


def _is(model: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(model).__mro__)


def _count_of(x: Any) -> int:
    """Return how many examples there are, which is public; raises ScenarioError if there are none."""
    count = 0
    if getattr(x, "shape", ()):
        count = x.shape[0]
    elif hasattr(x, "__len__"):
        count = len(x)
    if count == 0:
        raise ScenarioError("x has no examples: it must be [examples, features], of numbers", code=DATA)
    return int(count)


def _array(name: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given)
    except (ValueError, TypeError):
        raise ScenarioError(f"{name} has rows of several lengths, or cannot be an array", code=DATA) from None


def _features(x: Any) -> Tensor:
    if hasattr(x, "toarray"):  # a sparse matrix
        values = x.toarray()
    else:
        values = _array("x", x)
    if values.ndim != 2 or values.shape[1] == 0 or values.dtype.kind not in "fiub":
        raise ScenarioError(
            f"x is of shape {values.shape} and type {values.dtype}: it must be [examples, features], of numbers",
            code=DATA,
        )
    features = torch.from_numpy(values.astype(np.float64))
    _check_finite("x", features)
    return features


def _check_finite(name: str, values: Tensor) -> None:
    """Raise ScenarioError if a value is not finite, without saying which ones or how many."""
    if not bool(torch.isfinite(values).all()):
        raise ScenarioError(
            f"{name} holds NaN or infinity: every number must be finite, for such an example would be paid for and add "
            "nothing; mend it, or leave these examples out",
            code=DATA,
        )


def _objective(model: Any, classes: Any, examples: int) -> _Objective:
    """Return what a model minimises.

    Raises:
        ScenarioError: it is not such a model, a setting cannot be honoured, or its classes are missing.
    """
    kind = next((kind for kind in KINDS if _is(model, kind)), "")
    if not kind or _is(model, "LogisticRegressionCV"):
        raise ScenarioError(f"model is a {type(model).__name__}: it must be one of {', '.join(KINDS)}", code=MODEL)

    settings = model.get_params()
    _check_settings(model, settings)
    alpha = _l2_of(kind, settings, examples)
    has_intercept = bool(settings["fit_intercept"])
    if kind in ("LinearRegression", "Ridge", "SGDRegressor"):
        loss = settings.get("loss", "squared_error")
        if loss != "squared_error" or classes is not None:
            raise ScenarioError(f"a regression needs loss='squared_error' (not {loss!r}) and no classes", code=MODEL)
        divisor = examples if kind == "Ridge" else 1  # Ridge adds losses up, the others average them
        return _Objective("mse", 2 * alpha / divisor, None, has_intercept)

    labels = np.unique(np.asarray([] if classes is None else classes))
    loss = settings.get("loss", "log_loss")
    count = len(labels)
    if count < 2:
        raise ScenarioError("classes must name all labels, two at least: which a peer has is private", code=MODEL)
    if loss not in MARGINS or (count > 2 and loss != "log_loss"):
        raise ScenarioError(
            f"loss={loss!r} of {count} classes must be 'log_loss', or for two classes one of {', '.join(MARGINS)}",
            code=MODEL,
        )

    weights = _class_weights(settings.get("class_weight"), labels)
    if count == 2:
        objective = _Objective(MARGINS[loss], alpha, labels, has_intercept, class_weights=weights)
    elif kind == "LogisticRegression":
        objective = _Objective("cross-entropy", alpha, labels, has_intercept, count, weights)
    else:
        objective = _Objective("binary-cross-entropy", alpha / count, labels, has_intercept, count, weights)
    if kind == "LogisticRegression":
        objective.l2_intercept = _l2_of_intercept(settings, alpha, count)
    return objective


def _check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be honoured whatever the others are, and those of other versions of scikit-learn.

    Raises:
        ScenarioError: the message names the setting and the remedy.
    """
    for name, (value, why) in FIXED.items():
        if settings.get(name, value) != value:
            raise ScenarioError(f"{name}={settings[name]!r} must be {value!r}: {why}", code=MODEL)
    if settings.get("learning_rate") in ("pa1", "pa2"):
        raise ScenarioError(
            f"learning_rate={settings['learning_rate']!r} makes steps that are not gradients of the loss: take another "
            "rate; it is that of fit_privately(learning_rate=...)",
            code=MODEL,
        )

    defaults = inspect.signature(type(model).__init__).parameters
    for name, value in settings.items():
        if name in HONOURED or name in WITHOUT_EFFECT or name in FIXED:
            continue
        default = inspect.Parameter.empty
        if name in defaults:
            default = defaults[name].default
        if value is not default and value != default:
            raise ScenarioError(
                f"{name}={value!r} of {type(model).__name__} is a setting that fit_privately does not know, so that it "
                "cannot honour it: leave it at its default",
                code=MODEL,
            )


def _l2_of(kind: str, settings: Mapping[str, Any], examples: int) -> float:
    """Return the weight of the penalty in the terms of the model; 0 if it has no penalty.

    Raises:
        ScenarioError: it is another penalty, or its weight is not a number.
    """
    penalty = settings.get("penalty", "l2")
    share = settings.get("l1_ratio")
    unnamed = penalty == "deprecated" or (kind == "LogisticRegression" and "penalty" not in settings)
    if penalty not in ("l2", None, "deprecated") or (unnamed and share):
        wrong = f"l1_ratio={share!r}" if unnamed else f"penalty={penalty!r}"
        raise ScenarioError(
            f"{wrong} has no gradient that is clipped apart: take penalty='l2' (l1_ratio=0), or none",
            code=MODEL,
        )

    name = "C" if kind == "LogisticRegression" else "alpha"
    if penalty is None or name not in settings:
        return 0.0
    value = settings[name]
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if name == "C":
        if not (is_number and value > 0):
            raise ScenarioError(f"C={value!r} must be one number > 0, or infinite for no penalty", code=MODEL)
        return 1 / (float(value) * examples)
    if not (is_number and 0 <= value < math.inf):
        raise ScenarioError(f"alpha={value!r} must be one finite number >= 0", code=MODEL)
    return float(value)


def _l2_of_intercept(settings: Mapping[str, Any], l2: float, classes: int) -> float:
    """Return the weight of the penalty on a LogisticRegression's intercepts: liblinear sees them as coefficients.

    Raises:
        ScenarioError: several classes are not minimised as a softmax, or two are.
    """
    several = settings.get("multi_class", "auto")
    liblinear = settings.get("solver") == "liblinear"
    if classes > 2 and (several == "ovr" or liblinear):
        wrong = "solver='liblinear'" if liblinear else f"multi_class={several!r}"
        raise ScenarioError(
            f"{wrong} of {classes} classes is one against all: take the default, which is a softmax, or "
            "SGDClassifier(loss='log_loss')",
            code=MODEL,
        )
    if classes == 2 and several == "multinomial":
        raise ScenarioError("multi_class='multinomial' of two classes has two rows: leave it out", code=MODEL)

    if not liblinear:
        return 0.0
    scaling = settings.get("intercept_scaling", 1)
    if not (isinstance(scaling, Real) and 0 < float(scaling) < math.inf):
        raise ScenarioError(f"intercept_scaling={scaling!r} must be finite and > 0", code=MODEL)
    return l2 / float(scaling) ** 2


def _class_weights(given: Any, labels: np.ndarray) -> tuple[float, ...] | None:
    """Return the weight of each class, 1 if it has none of its own.

    Raises:
        ScenarioError: they follow private counts, or are not weights of these classes.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ScenarioError(
            f"class_weight={given!r} must be a dict of public weights, such as {{{labels[0].item()!r}: 1.0, "
            f"{labels[-1].item()!r}: 5.0}}: 'balanced' follows how many examples of each class there are, which is "
            "private",
            code=MODEL,
        )

    weights = dict.fromkeys(labels.tolist(), 1.0)
    for label, weight in given.items():
        if label not in weights:
            raise ScenarioError(f"class_weight names {label!r}, which is none of classes: leave it out", code=MODEL)
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not (weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT):
            raise ScenarioError(
                f"class_weight has {weight!r} for {label!r}: it must be 0, or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}",
                code=MODEL,
            )
        weights[label] = float(weight)

    if not any(weights.values()):
        raise ScenarioError("class_weight is 0 for each class, so that nothing would be learned", code=MODEL)
    return tuple(weights.values())
