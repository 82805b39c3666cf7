"""The number of rounds that PrivSGP-VR's bound prefers (eq. 12), with constants estimated from public data.

An estimate from the training examples would be a release that no ledger counts. So every constant is measured at x0 on
a keyed sample of the test set, which is public here:

- L: the largest absolute eigenvalue of the Hessian of the mean loss, by power iteration on exact
  Hessian-vector products. It is the smoothness at x0, a lower bound of that along a run.
- F0: the mean loss, an upper bound of f(x0) - f* because no loss here is negative.
- b²: the spread of the peers' gradients, (1/n) Σ_i ‖∇f_i - ∇f‖², if they had parts of the test set, partitioned as the
  training set is. Each part is halved, and the product of the two halves' deviations is free of the bias that the
  noise of small parts would add; a negative result counts as 0.
- ‖x0‖², d and J need no data beyond the public number of examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.data import partition
from flower_privdec.data.sparse_rows import SparseRows
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory import outputs_per_example
from flower_privdec.gradients.protocol import inputs_like
from flower_privdec.planner.peers import noise_std
from flower_privdec.privacy.mechanism.paper import optimal_rounds
from flower_privdec.privacy.mechanism.schedules import build_schedule
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.scenario.schema import PlanSection
from flower_privdec.tasks.losses import Loss

ITERATIONS, SETTLED = 20, 5e-3  # of the power method: at most, and the relative change at which it stops
LEAST_SAMPLE, MOST_SAMPLE = 64, 2048  # examples
SAMPLE_NUMBERS = 1 << 22  # numbers that the layers may put out for a sample: larger models get smaller samples


@dataclass(frozen=True)
class Objective:
    """The mean loss at a module's own parameters, on given examples."""

    module: nn.Module
    loss: Loss
    x: Tensor
    y: Tensor

    def value(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the mean loss of some examples, a scalar that autograd can differentiate."""
        return self.loss.value(self.module(self.x[rows]), self.y[rows]).mean()

    def gradient(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return its gradient, [d]."""
        return _flat(torch.autograd.grad(self.value(rows), self._parameters))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def curvature(self, start: Tensor) -> float:
        """Return the largest absolute eigenvalue of the Hessian, by power iteration from a vector [d]."""
        parameters = self._parameters
        gradients = torch.autograd.grad(self.value(), parameters, create_graph=True)
        if not any(part.requires_grad for part in gradients):
            return 0.0
        gradient, direction, eigenvalue = _flat(gradients), start / start.norm(), 0.0
        for _ in range(ITERATIONS):
            product = _flat(
                torch.autograd.grad(
                    gradient @ direction, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            )
            before, eigenvalue = eigenvalue, float(product.norm())
            if eigenvalue == 0 or abs(eigenvalue - before) <= SETTLED * eigenvalue:
                break
            direction = product / eigenvalue
        return eigenvalue


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def public_sample(experiment: Experiment) -> Objective:
    """Return the loss at x0 on a keyed sample of the test set."""
    public, module = experiment.public, experiment.module
    size = SAMPLE_NUMBERS // outputs_per_example(module, public.x)
    size = min(len(public.y), max(LEAST_SAMPLE, min(MOST_SAMPLE, size)))
    rows = keyed_generator(experiment.scenario.seed_of("data"), "plan sample").permutation(len(public.y))[:size]
    chosen = public.x[rows]
    x = inputs_like(chosen.dense() if isinstance(chosen, SparseRows) else chosen, experiment.initial)
    return Objective(module, experiment.loss, x, public.y[rows].to(x.device))


def initial_gap(objective: Objective) -> float:
    """Estimate F0.

    Raises:
        ScenarioError: where the loss is not positive, as one of a user's own may be.
    """
    gap = objective.value().item()
    if not gap > 0:
        raise ScenarioError(f"plan.initial_gap is missing and the loss at x0 is {gap:.3g}, which bounds no gap: add it")
    return gap


def smoothness(experiment: Experiment, objective: Objective) -> float:
    """Estimate L.

    Raises:
        ScenarioError: where the Hessian vanishes at x0, as of a hinge loss.
    """
    start = keyed_generator(experiment.scenario.seed_of("model"), "plan direction").standard_normal(
        experiment.initial.numel()
    )
    curvature = objective.curvature(torch.as_tensor(start).to(experiment.initial))
    if not curvature > 0:
        raise ScenarioError("plan.smoothness is missing and the loss has no curvature at x0 to estimate it by: add it")
    return curvature


def heterogeneity(experiment: Experiment, objective: Objective) -> float:
    """Estimate b².

    Raises:
        ScenarioError: where the sample cannot be dealt out like the training set.
    """
    scenario = experiment.scenario
    section, sizes = scenario.data.partition, experiment.own.sampler.partition_sizes
    options = section.model_dump(exclude={"kind"}, exclude_none=True)
    if section.kind == "sizes":
        options["sizes"] = (sizes / sizes.sum()).tolist()
    if section.min_size is not None:
        options["min_size"] = max(1, min(section.min_size, len(objective.y) // scenario.n_peers))
    try:
        parts = partition(
            objective.y.cpu().numpy(), scenario.n_peers, section.kind, scenario.seed_of("data"), **options
        )
    except ScenarioError as error:
        raise ScenarioError(f"plan.heterogeneity is missing and cannot be estimated ({error}): add it") from error
    if min(map(len, parts)) < 2:
        raise ScenarioError(
            f"plan.heterogeneity is missing and {len(objective.y)} test examples are too few to estimate it for "
            f"{scenario.n_peers} peers: add it"
        )
    halves = [torch.stack([objective.gradient(part[half::2]) for part in parts]) for half in (0, 1)]
    first, second = (half - half.mean(0) for half in halves)
    return max(0.0, float((first * second).sum(1).mean()))


CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NOTHING: dict[str, Any] = {
    "optimal_rounds": None,
    "optimal_rounds_curve": [],
    "optimal_rounds_constants": {},
    "optimal_rounds_note": None,
    "accountant": None,
}


def optimum(experiment: Experiment) -> dict[str, Any]:
    """Return PrivSGP-VR's best number of rounds, for push-sum algorithms with a budget.

        K* = (13 F0 + 6 L ‖x0‖² + 18 L b²) J² n / (216 L d c_2² G² Σ_i log(1/δ_i) / ε_i²)

    For peers of unequal J_i the terms of the sum are over J_i², as eq. 11 makes their noise. The bound is that
    of PrivSGP-VR with batches of one; for other push-sum algorithms it is a guide.

    Returns:
        optimal_rounds: K*, rounded; None where there is no budget, no push-sum, or a constant is missing that
            cannot be estimated (optimal_rounds_note says which).
        optimal_rounds_curve: [ε, K*] for all peers at the same ε.
        optimal_rounds_constants: for each constant its value and where it is from: given, estimated, clip norm
            or scenario.
        accountant: under calibration rigorous c_2, which makes eq. 11 the noise that the accountant asks for,
            and K* with it; else None.

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    private = experiment.scenario.private
    if experiment.algorithm.weights != "column-stochastic" or private is None or private.epsilon is None:
        return dict(NOTHING)
    try:
        constants = find_constants(experiment) | {"c_2": (private.c_2, "scenario")}
    except ScenarioError as error:
        return NOTHING | {"optimal_rounds_note": str(error)}
    epsilons = np.broadcast_to(np.asarray(private.epsilon, dtype=np.float64), (experiment.scenario.n_peers,))
    curve = sorted({*CURVE, *([float(epsilons[0])] if np.ptp(epsilons) == 0 else [])})
    return {
        "optimal_rounds": max(1, round(best(experiment, constants, epsilons, private.c_2))),
        "optimal_rounds_curve": [
            [epsilon, max(1, round(best(experiment, constants, np.full_like(epsilons, epsilon), private.c_2)))]
            for epsilon in curve
        ],
        "optimal_rounds_constants": {name: {"value": v, "from": source} for name, (v, source) in constants.items()},
        "optimal_rounds_note": None,
        "accountant": _accountant(experiment, constants, epsilons),
    }


Constants = dict[str, tuple[float, str]]


def find_constants(experiment: Experiment) -> Constants:
    """Return every constant of eq. 12 but c_2 and the budgets, with where it is from.

    Raises:
        ScenarioError: where one is not given and cannot be estimated.
    """
    section, initial = experiment.scenario.plan or PlanSection(), experiment.initial
    sample: list[Objective] = []

    def objective() -> Objective:
        if not sample:
            sample.append(public_sample(experiment))
        return sample[0]

    ways: dict[str, tuple[str, Callable[[], float]]] = {
        "smoothness": ("estimated", lambda: smoothness(experiment, objective())),
        "gradient_bound": ("clip norm", lambda: _largest_clip(experiment)),
        "initial_gap": ("estimated", lambda: initial_gap(objective())),
        "heterogeneity": ("estimated", lambda: heterogeneity(experiment, objective())),
        "initial_norm_squared": ("scenario", lambda: float(initial.double().square().sum())),
        "dimension": ("scenario", initial.numel),
        "dataset_size": ("scenario", lambda: _dataset_size(experiment)),
    }
    return {
        name: (way(), source) if (value := getattr(section, name)) is None else (value, "given")
        for name, (source, way) in ways.items()
    }


def _largest_clip(experiment: Experiment) -> float:
    return float(build_schedule(experiment.scenario).clip_norm.max())


def _dataset_size(experiment: Experiment) -> float:
    """Return J with J^-2 the mean of J_i^-2, peers weighted as eq. 12 does, log(1/δ_i) / ε_i²."""
    private, sizes = experiment.scenario.private, experiment.own.sampler.partition_sizes
    if private is None or private.epsilon is None:
        return float(sizes.mean())
    share = np.log(1 / np.asarray(private.delta)) / np.asarray(private.epsilon) ** 2
    share = np.broadcast_to(share, sizes.shape)
    size = math.sqrt(float(share.sum() / (share / sizes.astype(np.float64) ** 2).sum()))
    return float(round(size)) if math.isclose(size, round(size), rel_tol=1e-9) else size


def best(experiment: Experiment, constants: Constants, epsilons: np.ndarray, c_2: float) -> float:
    """Return K* of eq. 12 for some budgets, not rounded."""
    private = experiment.scenario.private
    value = {name: number for name, (number, _) in constants.items()}
    return optimal_rounds(
        smoothness=value["smoothness"],
        gradient_bound_squared=value["gradient_bound"] ** 2,
        initial_gap=value["initial_gap"],
        heterogeneity=value["heterogeneity"],
        initial_norm_squared=value["initial_norm_squared"],
        dataset_size=value["dataset_size"],
        dimension=int(value["dimension"]),
        c_2=c_2,
        epsilons=epsilons,
        deltas=np.broadcast_to(np.asarray(private.delta if private else 0.5), epsilons.shape),
    )


def _accountant(experiment: Experiment, constants: Constants, epsilons: np.ndarray) -> dict[str, float] | None:
    """Return the c_2 with which eq. 11 gives the noise in the plan at its K, and K* with that c_2."""
    plan, private, rounds = experiment.own.protection, experiment.scenario.private, experiment.scenario.rounds
    if plan is None or private is None or private.calibration == "paper" or private.noise_multiplier is not None:
        return None
    bound, size = constants["gradient_bound"][0], experiment.own.sampler.partition_sizes
    per_unit = 3 * bound * np.sqrt(rounds * np.log(1 / np.asarray(private.delta))) / (size * epsilons)
    c_2 = float(np.median(noise_std(experiment, rounds // 2) / per_unit))
    if not c_2 > 0:
        return None
    return {"c_2": c_2, "optimal_rounds": max(1, round(best(experiment, constants, epsilons, c_2)))}
