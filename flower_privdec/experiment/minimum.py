"""The minimum of a convex objective, with a certified error bound: the reference for suboptimality.

Strong duality bounds the distance of any solution from the minimum. With outputs o = A x, losses φ_b >= 0 whose
infimum is 0, weights c_b and any g_b = φ_b'(o_b), a lower bound on F is

    Σ_b c_b (φ_b(o_b) - <o_b, g_b>) - h*(-Aᵀ c g),   h*(v) = max_x <v, x> - h(x)

(Fenchel; -φ_b*(g_b) = φ_b(o_b) - <o_b, g_b>). A hinge is smoothed around its kink: φ_ν <= φ <= φ_ν + ν / 2. A bound
on the smoothed objective is one on F too, and ν falls until the gap is small enough.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.algorithms.proximal import Regularizer
from flower_privdec.common.deferred import scipy, torch
from flower_privdec.common.files import cache_folder, read_cached, write_cached
from flower_privdec.experiment.agreement import Agreement
from flower_privdec.experiment.own_parts import OwnParts
from flower_privdec.rows.sparse_rows import SparseRows
from flower_privdec.tasks.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6
SMOOTHINGS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # ν, each started from the solution of the one before
EVALUATIONS = 5000  # of a smoothed objective at most
SMOOTH = ("logistic", "squared-hinge", "cross-entropy", "mse", "huber", "binary-cross-entropy")
STEPS = 60  # of the bisection for the multiplier of an l2 ball

Array = np.ndarray
Losses = Callable[[Array], tuple[Array, Array]]  # of outputs [N, k]: the losses [N] and their derivatives [N, k]


@dataclass(frozen=True)
class Minimum:
    """The smallest value that the solver reached.

    Attributes:
        value: F at the best model.
        gap: by how much the true minimum may be below it, by duality.
    """

    value: float
    gap: float


def find_minimum(objective: ConvexObjective) -> Minimum | None:
    """Find the minimum of an objective; the result is cached on disk.

    Returns:
        The minimum; None if no bound is known: without a regularizer (it may not even be reached), and for a loss that
        has kinks and is not the hinge, or is a user's own.

    Privacy: of raw examples (`ConvexObjective`). The cache holds the two numbers, under a hash of the objective.
    """
    if objective.regularizer == Regularizer() or objective.loss.name not in ("hinge", *SMOOTH):
        return None

    key = (objective.regularizer, objective.loss.name, objective.outputs, objective.bias)
    digest = hashlib.sha256(repr(key).encode())
    for part in (objective.features.indptr, objective.features.indices, objective.features.data, objective.weights):
        digest.update(np.ascontiguousarray(part).data)
    digest.update(objective.targets.contiguous().numpy().data)

    path = cache_folder() / f"minimum-{digest.hexdigest()}.json"
    solution = read_cached(path, lambda cached: Minimum(float(cached["value"]), float(cached["gap"])))
    if solution is None:
        solution = solve(objective)
        write_cached(path, asdict(solution))
    return solution


def solve(objective: ConvexObjective) -> Minimum:
    """Minimise until the gap is at most TOLERANCE."""
    h = objective.regularizer
    is_hinge = objective.loss.name == "hinge"
    if is_hinge and h.l1 and not h.l2:
        return _linear_program(objective)

    x = np.zeros(objective.dimension)
    least = math.inf
    bound = -math.inf
    minimise = _minimise_in_ball if math.isfinite(h.radius) else _minimise
    for smoothing in SMOOTHINGS if is_hinge else (0.0,):
        losses = _losses(objective, smoothing)
        x = minimise(objective, losses, x)
        least = min(least, objective.value(x))
        bound = max(bound, lower_bound(objective, losses, x))
        if least - bound <= TOLERANCE:
            break
    return Minimum(least, max(0.0, least - bound))


def _losses(objective: ConvexObjective, smoothing: float) -> Losses:
    """Return a function that gives the losses of outputs and their derivatives; for the hinge smoothed ones."""
    if not smoothing:
        loss = objective.loss
        targets = objective.targets

        def plain(outputs: Array) -> tuple[Array, Array]:
            tensor = torch.from_numpy(outputs)
            return loss.value(tensor, targets).numpy(), loss.derivative(tensor, targets).numpy()

        return plain

    sign = 2.0 * objective.targets.numpy()[:, None] - 1

    def smoothed(outputs: Array) -> tuple[Array, Array]:
        shortfall = 1 - sign * outputs
        slope = np.clip(shortfall / smoothing, 0, 1)
        return (slope * (shortfall - smoothing * slope / 2))[:, 0], -sign * slope

    return smoothed


def lower_bound(objective: ConvexObjective, losses: Losses, x: Array) -> float:
    """Return a lower bound of the objective, by the dual point that belongs to a model."""
    outputs = objective.features @ objective.matrix(x)  # [N, k]
    values, slopes = losses(outputs)
    weighted = objective.weights[:, None] * slopes
    v = -objective.vector(objective.features.T @ weighted)  # [d]
    dual_value = float(objective.weights @ values - (weighted * outputs).sum())

    # Each case subtracts h*(v).
    h = objective.regularizer
    if math.isfinite(h.radius):
        return dual_value - h.radius * float(np.linalg.norm(v))
    if math.isfinite(h.lower):
        return dual_value - float(np.maximum(v * h.lower, v * h.upper).sum())
    if h.l2:
        return dual_value - float((np.maximum(np.abs(v) - h.l1, 0) ** 2).sum()) / (2 * h.l2)
    # Only an l1 norm: at the nearest dual point s v, s <= 1, for which h* is finite.
    return dual_value * min(1.0, h.l1 / max(float(np.abs(v).max()), 1e-300))


def _minimise(objective: ConvexObjective, losses: Losses, start: Array) -> Array:
    """Minimise a smooth loss with a regularizer that is not a ball, by L-BFGS-B; l1 is of x = p - n, p and n >= 0."""
    h = objective.regularizer
    d = len(start)

    def value(x: Array) -> tuple[float, Array]:
        values, slopes = losses(objective.features @ objective.matrix(x))
        gradient = objective.vector(objective.features.T @ (objective.weights[:, None] * slopes)) + h.l2 * x
        return float(objective.weights @ values) + h.l2 * float(x @ x) / 2, gradient

    if not h.l1:
        bounds = [(h.lower, h.upper)] * d if math.isfinite(h.lower) else None
        begin = np.clip(start, h.lower, h.upper)
        return _lbfgsb(value, begin, bounds)

    def split(parts: Array) -> tuple[float, Array]:
        objective_value, gradient = value(parts[:d] - parts[d:])
        return objective_value + h.l1 * float(parts.sum()), np.concatenate([gradient + h.l1, h.l1 - gradient])

    begin = np.concatenate([np.maximum(start, 0), np.maximum(-start, 0)])
    parts = _lbfgsb(split, begin, [(0, None)] * (2 * d))
    return np.asarray(parts[:d] - parts[d:])


def _lbfgsb(value: Callable[[Array], tuple[float, Array]], start: Array, bounds: Any) -> Array:
    options = {"maxiter": EVALUATIONS, "maxfun": EVALUATIONS, "ftol": 0.0, "gtol": 1e-12, "maxcor": 50}
    return np.asarray(
        scipy.optimize.minimize(value, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    )


def _minimise_in_ball(objective: ConvexObjective, losses: Losses, start: Array) -> Array:
    """Minimise over a ball, by the l2 weight whose minimum has the radius as its norm, or by hardly any weight."""
    radius = objective.regularizer.radius
    low = -30.0  # of the weight's logarithm
    high = 30.0
    x = start
    for _ in range(STEPS):
        middle = (low + high) / 2
        weighted = replace(objective, regularizer=Regularizer(l2=math.exp(middle)))
        x = _minimise(weighted, losses, x)
        if np.linalg.norm(x) > radius:
            low = middle
        else:
            high = middle
        if abs(np.linalg.norm(x) / radius - 1) < 1e-12:
            break

    return np.asarray(x * min(1.0, radius / max(float(np.linalg.norm(x)), 1e-300)))


def _linear_program(objective: ConvexObjective) -> Minimum:
    """Solve the hinge with an l1 norm by its dual, exactly:

    max Σ_b c_b α_b,  0 <= α <= 1,  |Σ_b c_b α_b y_b a_b| <= φ in each coordinate,

    whose multipliers are the model.
    """
    phi = objective.regularizer.l1
    sign = 2.0 * objective.targets.numpy() - 1
    columns = (scipy.sparse.diags(objective.weights * sign) @ objective.features).T.tocsc()
    d = columns.shape[0]
    result = scipy.optimize.linprog(
        -objective.weights,
        A_ub=scipy.sparse.vstack([columns, -columns]),
        b_ub=np.full(2 * d, phi),
        bounds=(0, 1),
        method="highs",
    )

    if result.status != 0:
        return Minimum(objective.value(np.zeros(d)), objective.value(np.zeros(d)))

    least = objective.value(result.ineqlin.marginals[d:] - result.ineqlin.marginals[:d])
    return Minimum(least, max(0.0, least + float(result.fun)))


@dataclass(frozen=True, eq=False)
class ConvexObjective:
    """F(x) = (1/n) Σ_i (1/q_i) Σ_j l(x; example j of peer i) + h(x), of one linear layer, in float64.

    A model is a vector [d]: the weights [k, D], then the biases [k] if there are some.

    Attributes:
        features: [N, D], of all peers' examples, with a last column of ones if there is a bias.
        targets: [N, ...].
        weights: [N], 1 / (n q_i) of each example, times the weight of its class; without class weights they sum to 1.
    """

    features: scipy.sparse.csr_matrix
    targets: Tensor
    weights: Array
    loss: Loss
    regularizer: Regularizer
    outputs: int
    bias: bool

    @staticmethod
    def of(agreement: Agreement, own: OwnParts) -> ConvexObjective:
        """Return what the peers of a run, whose own parts are all here, minimise together."""
        layer = agreement.kernel.layers[0]  # type: ignore[attr-defined]
        parts = own.examples.parts
        rows = np.concatenate(parts)
        weights = np.concatenate([np.full(len(part), 1 / (len(parts) * len(part))) for part in parts])
        loss = agreement.loss
        targets = own.examples.y[torch.from_numpy(rows)]
        if loss.class_weights is not None and loss.plain is not None:
            # The solvers know the losses without weights; a class's weight is one more factor of its examples.
            weights = weights * np.array(loss.class_weights)[targets.numpy()]
            loss = loss.plain

        chosen = own.examples.x[torch.from_numpy(rows)]
        if isinstance(chosen, SparseRows):
            matrix = chosen.matrix
        else:
            matrix = chosen.flatten(1).numpy()
        features = scipy.sparse.csr_matrix(matrix, dtype=np.float64)
        if layer.bias is not None:
            features = scipy.sparse.hstack([features, np.ones((len(rows), 1))], format="csr")
        return ConvexObjective(
            features=features,
            targets=targets,
            weights=weights,
            loss=loss,
            regularizer=agreement.algorithm.regularizer,  # type: ignore[attr-defined]
            outputs=layer.weight.shape[0],
            bias=layer.bias is not None,
        )

    @property
    def dimension(self) -> int:
        """Return d."""
        return int(self.features.shape[1]) * self.outputs

    def value(self, x: Tensor | Array) -> float:
        """Return F(x)."""
        model = torch.as_tensor(x).detach().cpu().double()
        outputs = torch.from_numpy(self.features @ self.matrix(model.numpy()))
        losses = self.loss.value(outputs, self.targets).numpy()
        return float(self.weights @ losses) + self.regularizer.value(model)

    def matrix(self, x: Array) -> Array:
        """Return a model as [D, k], so that outputs are features @ matrix."""
        inner = self.features.shape[1] - self.bias
        n_weights = self.outputs * inner
        weight = x[:n_weights].reshape(self.outputs, inner).T
        if not self.bias:
            return weight
        return np.vstack([weight, x[n_weights:][None]])

    def vector(self, matrix: Array) -> Array:
        """Return the model [d] of a `matrix`."""
        inner = self.features.shape[1] - self.bias
        return np.concatenate([matrix[:inner].T.ravel(), matrix[inner:].ravel()])
