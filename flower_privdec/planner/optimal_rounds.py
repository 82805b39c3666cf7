"""PrivSGP-VR's best number of rounds, with its constants as given or measured on public data.

The best number of rounds minimises PrivSGP-VR's error bound (eq. 12). An estimate of its constants from the training
examples would be a release that no ledger counts. So every constant is measured at x0 on a keyed sample of the test
set, which is public here:

- L: the largest absolute eigenvalue of the Hessian of the mean loss, by power iteration on exact
  Hessian-vector products. It is the smoothness at x0, a lower bound of that along a run.
- F0: the mean loss, an upper bound of f(x0) - f* because no loss here is negative.
- b²: the spread of the peers' gradients, (1/n) Σ_i ‖∇f_i - ∇f‖², if they had parts of the test set, partitioned as the
  training set is. Each part is halved, and the product of the two halves' deviations is free of the bias that the
  noise of small parts would add; a negative result counts as 0.
- ‖x0‖², d and J, the mean number of examples of a peer, need no data but the public numbers of examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.errors import RAISED_BY_USERS, PrivdecError, ScenarioError
from flower_privdec.data import partition
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory_estimate import outputs_per_example
from flower_privdec.gradients.protocol import batchable, inputs_like, reason
from flower_privdec.models import trained
from flower_privdec.planner.peers import noise_std
from flower_privdec.privacy.mechanism import paper
from flower_privdec.privacy.mechanism.peer_mechanism import build_schedule
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.rows.sparse_rows import SparseRows
from flower_privdec.scenario.sections import PlanSection
from flower_privdec.tasks.losses import Loss

ITERATIONS = 20  # of the power method, at most
SETTLED = 5e-3  # the relative change of its eigenvalue at which it stops
LEAST_SAMPLE = 64  # examples
MOST_SAMPLE = 2048
MISSING = "planner.constant-missing"
SAMPLE_NUMBERS = 1 << 22  # numbers that the layers may put out for a sample: larger models get smaller samples


@dataclass(frozen=True)
class Objective:
    """The mean loss at a module's own parameters, on public examples x and y.

    Attention and recurrent layers are computed by operations that have second derivatives.
    """

    module: nn.Module
    loss: Loss
    x: Tensor
    y: Tensor

    def value(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the mean loss of some examples, a scalar that autograd can differentiate."""
        with batchable(self.module):
            return self.loss.value(self.module(self.x[rows]), self.y[rows]).mean()

    def gradient(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return its gradient, [d]."""
        return _flat(torch.autograd.grad(self.value(rows), list(trained(self.module).values())))

    def curvature(self, start: Tensor) -> float:
        """Return the largest absolute eigenvalue of the Hessian, by power iteration from a vector [d]."""
        parameters = list(trained(self.module).values())
        gradients = torch.autograd.grad(self.value(), parameters, create_graph=True)
        if not any(part.requires_grad for part in gradients):
            return 0.0

        gradient = _flat(gradients)
        direction = start / start.norm()
        eigenvalue = 0.0

        # A parameter that the gradient does not depend on has a second derivative of zero, and autograd no path to it.
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        for _ in range(ITERATIONS):
            product = _flat(torch.autograd.grad(gradient @ direction, parameters, **options))
            previous = eigenvalue
            eigenvalue = float(product.norm())
            if eigenvalue == 0 or abs(eigenvalue - previous) <= SETTLED * eigenvalue:
                break
            direction = product / eigenvalue
        return eigenvalue


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def public_sample(experiment: Experiment) -> Objective:
    """Return the loss at x0 on a keyed sample of the test set."""
    public = experiment.public
    module = experiment.module
    affordable = SAMPLE_NUMBERS // outputs_per_example(module, public.x)
    size = min(len(public.y), max(LEAST_SAMPLE, min(MOST_SAMPLE, affordable)))
    draws = keyed_generator(experiment.scenario.seed_of("data"), "plan sample")
    rows = draws.permutation(len(public.y))[:size]

    x = public.x[rows]
    if isinstance(x, SparseRows):
        x = x.dense()
    x = inputs_like(x, experiment.initial)
    return Objective(module, experiment.loss, x, public.y[rows].to(x.device))


def initial_gap(objective: Objective) -> float:
    """Estimate F0; refuse a loss that is not positive, as a user's own may be."""
    gap = objective.value().item()
    if not gap > 0:
        raise ScenarioError(
            f"plan.initial_gap is missing and the loss at x0 is {gap:.3g}, no upper bound on f(x0) - f*: set it",
            code=MISSING,
        )
    return gap


def smoothness(experiment: Experiment, objective: Objective) -> float:
    """Estimate L; refuse a Hessian that vanishes at x0, as of a hinge loss."""
    generator = keyed_generator(experiment.scenario.seed_of("model"), "plan direction")
    start = torch.as_tensor(generator.standard_normal(experiment.initial.numel())).to(experiment.initial)
    curvature = objective.curvature(start)
    if not curvature > 0:
        raise ScenarioError(
            "plan.smoothness is missing and the loss has no curvature at x0 to estimate it by: add it", code=MISSING
        )
    return curvature


def heterogeneity(experiment: Experiment, objective: Objective) -> float:
    """Estimate b²; refuse a sample that cannot be partitioned as the training set is."""
    scenario = experiment.scenario
    section = scenario.data.partition
    sizes = experiment.own.sampler.partition_sizes
    if section.kind == "sizes":
        section = section.model_copy(update={"sizes": (sizes / sizes.sum()).tolist()})
    if section.min_size is not None:
        least = max(1, min(section.min_size, len(objective.y) // scenario.n_peers))
        section = section.model_copy(update={"min_size": least})
    y = objective.y.cpu().numpy()
    try:
        parts = partition(y, scenario.n_peers, section, scenario.seed_of("data"))
    except ScenarioError as error:
        raise ScenarioError(
            f"plan.heterogeneity is missing and cannot be estimated ({error}): add it", code=MISSING
        ) from error
    if min(map(len, parts)) < 2:
        raise ScenarioError(
            f"plan.heterogeneity is missing and {len(y)} test examples are too few to estimate it for "
            f"{scenario.n_peers} peers: add it",
            code=MISSING,
        )

    first = torch.stack([objective.gradient(part[0::2]) for part in parts])  # [n_peers, d]
    second = torch.stack([objective.gradient(part[1::2]) for part in parts])
    spread = (first - first.mean(0)) * (second - second.mean(0))
    return max(0.0, float(spread.sum(1).mean()))


CURVE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def optimum(experiment: Experiment) -> dict[str, Any]:
    """Return PrivSGP-VR's best number of rounds, for push-sum algorithms with a budget.

        K* = (13 F0 + 6 L ‖x0‖² + 18 L b²) J² n / (216 L d c_2² G² Σ_i log(1/δ_i) / ε_i²)

    For peers of unequal J_i the terms of the sum are over J_i², as eq. 11 makes their noise. The bound is that
    of PrivSGP-VR with batches of one; for other push-sum algorithms it is a guide.

    Returns:
        optimal_rounds: K*, rounded; None if there is no budget, no push-sum, or a constant is missing that
            cannot be estimated (optimal_rounds_note says which).
        optimal_rounds_curve: [ε, K*] for all peers at the same ε.
        optimal_rounds_constants: for each constant its value and where it is from: given, estimated, clip norm
            or scenario.
        accountant: under calibration rigorous the c_2 with which eq. 11 gives the plan's noise at its K, and K* with
            that c_2; else None.

    Source: PrivSGP-VR (Zhu et al.), Corollary 1, eq. 12.
    """
    nothing: dict[str, Any] = {
        "optimal_rounds": None,
        "optimal_rounds_note": None,
        "optimal_rounds_curve": [],
        "optimal_rounds_constants": {},
        "accountant": None,
    }
    private = experiment.scenario.private
    if experiment.algorithm.weights != "column-stochastic" or private is None or private.epsilon is None:
        return nothing
    try:
        constants = find_constants(experiment)
    except ScenarioError as error:
        return nothing | {"optimal_rounds_note": str(error)}

    n_peers = experiment.scenario.n_peers
    epsilons = np.broadcast_to(np.asarray(private.epsilon, dtype=np.float64), (n_peers,))
    deltas = np.broadcast_to(np.asarray(private.delta), (n_peers,))
    value = {name: number for name, (number, _) in constants.items()}

    def best(epsilons: np.ndarray, c_2: float) -> int:
        rounds = paper.optimal_rounds(**value, c_2=c_2, epsilons=epsilons, deltas=deltas)
        return max(1, round(rounds))

    accountant = None
    if private.calibration != "paper" and private.noise_multiplier is None:
        c_2 = _exact_c_2(experiment, value["gradient_bound"], epsilons)
        if c_2 > 0:
            accountant = {"c_2": c_2, "optimal_rounds": best(epsilons, c_2)}

    on_curve = set(CURVE)
    if np.ptp(epsilons) == 0:
        on_curve.add(float(epsilons[0]))
    curve = [[epsilon, best(np.full_like(epsilons, epsilon), private.paper.c_2)] for epsilon in sorted(on_curve)]

    sources = constants | {"c_2": (private.paper.c_2, "scenario")}
    return {
        "optimal_rounds": best(epsilons, private.paper.c_2),
        "optimal_rounds_curve": curve,
        "optimal_rounds_constants": {name: {"value": v, "from": source} for name, (v, source) in sources.items()},
        "optimal_rounds_note": None,
        "accountant": accountant,
    }


def _exact_c_2(experiment: Experiment, gradient_bound: float, epsilons: np.ndarray) -> float:
    """Return the c_2 with which eq. 11 gives the noise of the plan in its middle round, at the median peer."""
    private = experiment.scenario.private
    assert private is not None
    rounds = experiment.scenario.rounds
    size = experiment.own.sampler.partition_sizes
    noise_of_c_2_1 = 3 * gradient_bound * np.sqrt(rounds * np.log(1 / np.asarray(private.delta))) / (size * epsilons)
    return float(np.median(noise_std(experiment, rounds // 2) / noise_of_c_2_1))


Constants = dict[str, tuple[float, str]]


def find_constants(experiment: Experiment) -> Constants:
    """Return every constant of eq. 12 but c_2 and the budgets, each with its source.

    Raises:
        ScenarioError: one is missing and cannot be estimated: the model may have no second derivatives.
    """
    section = experiment.scenario.plan or PlanSection()
    initial = experiment.initial
    objective = cache(partial(public_sample, experiment))
    estimates: dict[str, tuple[str, Callable[[], float]]] = {
        "smoothness": ("estimated", lambda: smoothness(experiment, objective())),
        "gradient_bound": ("clip norm", lambda: float(build_schedule(experiment.scenario).clip_norm.max())),
        "initial_gap": ("estimated", lambda: initial_gap(objective())),
        "heterogeneity": ("estimated", lambda: heterogeneity(experiment, objective())),
        "initial_norm_squared": ("scenario", lambda: float(initial.double().square().sum())),
        "dimension": ("scenario", initial.numel),
        "dataset_size": ("scenario", lambda: _dataset_size(experiment)),
    }

    constants: Constants = {}
    for name, (source, estimate) in estimates.items():
        given = getattr(section, name)
        try:
            constants[name] = (estimate(), source) if given is None else (given, "given")
        except PrivdecError:
            raise
        except RAISED_BY_USERS as error:  # of the user's forward, differentiated twice
            why = f"plan.{name} is missing and cannot be estimated ({reason(error)}): set it, or do without K*"
            raise ScenarioError(why, code=MISSING) from None
    return constants


def _dataset_size(experiment: Experiment) -> float:
    """Return J with J^-2 the mean of J_i^-2, peers weighted as eq. 12 does, log(1/δ_i) / ε_i²."""
    private = experiment.scenario.private
    sizes = experiment.own.sampler.partition_sizes
    if private is None or private.epsilon is None:
        return float(sizes.mean())

    weight = np.log(1 / np.asarray(private.delta)) / np.asarray(private.epsilon) ** 2
    weight = np.broadcast_to(weight, sizes.shape)
    size = math.sqrt(float(weight.sum() / (weight / sizes.astype(np.float64) ** 2).sum()))

    # Peers of one size have exactly that: the root of a quotient rounds.
    if math.isclose(size, round(size), rel_tol=1e-9):
        return float(round(size))
    return size
