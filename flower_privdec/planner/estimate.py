"""Constants of PrivSGP-VR's eq. 12 from public data: the test set, never a peer's examples.

An estimate from the training examples would be a release of its own, which no ledger counts. So everything is
measured at x0 on a keyed sample of the test set, which is public here:

- L: the largest absolute eigenvalue of the Hessian of the mean loss, by power iteration on exact
  Hessian-vector products. It is the smoothness at x0, a lower bound of that along a run.
- F0: the mean loss, an upper bound of f(x0) - f* because no loss here is negative.
- b²: the spread of the peers' gradients, (1/n) Σ_i ‖∇f_i - ∇f‖², had they shares of the test set made like
  those of the training set. Each share is halved, and the product of the two halves' deviations is free of the
  bias that the noise of small shares would add; what comes out below 0 counts as 0.
- ‖x0‖², d and J need no data beyond the public number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.data import partition
from flower_privdec.data.sparse_rows import SparseRows
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.memory import outputs_per_example
from flower_privdec.gradients.protocol import inputs_like
from flower_privdec.rows.keys import keyed_generator
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
        gradient, direction, found = _flat(gradients), start / start.norm(), 0.0
        for _ in range(ITERATIONS):
            product = _flat(
                torch.autograd.grad(
                    gradient @ direction, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            )
            before, found = found, float(product.norm())
            if found == 0 or abs(found - before) <= SETTLED * found:
                break
            direction = product / found
        return found


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
    found = objective.value().item()
    if not found > 0:
        raise ScenarioError(
            f"plan.initial_gap is missing and the loss at x0 is {found:.3g}, which bounds no gap: add it"
        )
    return found


def smoothness(experiment: Experiment, objective: Objective) -> float:
    """Estimate L.

    Raises:
        ScenarioError: where the Hessian vanishes at x0, as of a hinge loss.
    """
    start = keyed_generator(experiment.scenario.seed_of("model"), "plan direction").standard_normal(
        experiment.initial.numel()
    )
    found = objective.curvature(torch.as_tensor(start).to(experiment.initial))
    if not found > 0:
        raise ScenarioError("plan.smoothness is missing and the loss has no curvature at x0 to estimate it by: add it")
    return found


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
