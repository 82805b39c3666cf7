"""An audit in one run of real training: many examples of each peer, each in or out by a coin of its own.

Model, algorithm, noise and all other data are the scenario's. The canaries, a peer's first examples, have random
features and random targets, so that their gradients differ from each other's. One that is out has features that are
no numbers, and counts as zero, as every such example does: the adjacency of every ε that is printed. An observer who
sees a peer's releases, as each neighbour on the graph does, compares them with the gradient that each canary would
have had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.audits.bounds import epsilon_from_guesses
from flower_privdec.audits.canaries import audited_plan
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core.cohort import STEPS, Cohort, PrivateStep
from flower_privdec.data import Batch, Examples
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.rows.keys import digest, keyed_generator
from flower_privdec.rows.sparse_rows import SparseRows

GUESSED = 3  # one guess for so many canaries, on those whose scores are the clearest
ONE_RUN = "one run with many examples in or out"


@dataclass(frozen=True)
class OneRun:
    """The result of an audit in one run.

    Attributes:
        epsilon: the largest of the peers', at the largest δ.
        delta: δ.
        epsilon_lower_bound: what the guesses show.
        canaries: m, how many examples, or peers' updates, were in or out by a coin.
        guesses, right: on how many of them a guess was made, and how many were right.
        method: how it was done.
        defects: what was not as planned, a line each, by kind.
    """

    epsilon: float
    delta: float
    epsilon_lower_bound: float
    canaries: int
    guesses: int
    right: int
    method: str = ONE_RUN
    defects: dict[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the printed ε is not refuted, and nothing is other than planned."""
        return not self.defects and self.epsilon_lower_bound <= self.epsilon

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.holds:
            return "no attack refutes the printed ε"

        faults = list(self.defects.values())
        if self.epsilon_lower_bound > self.epsilon:
            faults.insert(0, f"ε = {self.epsilon:.4g} is refuted: at least {self.epsilon_lower_bound:.4g}")
        return "; ".join(faults)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "claimed_epsilon": None,
            "epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "method": self.method,
            "trials": self.canaries,
            "delta": self.delta,
            "guesses": self.guesses,
            "right": self.right,
            "holds": self.holds,
            "defects": self.defects,
        }


@dataclass
class _Watcher:
    """What an observer computes of each canary as the steps come in: row i has the peer's canaries.

    A canary's score is the sum over steps of its coefficient in what was released.
    """

    experiment: Experiment
    cohort: Cohort
    canaries: Batch
    scores: np.ndarray

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        """Take a private step as the cohort does, and compare its first published sum with the canaries' gradients."""
        step.estimate(cohort, step)
        cohort.add_noise_(step)

        name = next(iter(step.noise_std), None)
        if name is None or step.clip_norm is None:
            return

        # The cohort makes its sums apart: they hold this release only, and the parameters have not moved yet.
        released = step.sums[name]
        unit = step.scale * step.clip_norm
        noise = step.noise_std[name] / unit.abs()
        for row, place in enumerate(step.rows.tolist()):
            gradients = self._gradients(step, row, place)
            seen = released[row] / unit[row]
            rate = float(self.experiment.own.sampler.sampling_rate[place])
            self.scores[place] += coefficients(gradients, seen, noise[row], rate).double().cpu().numpy()

    def _gradients(self, step: PrivateStep, row: int, place: int) -> Tensor:
        """Return the clipped gradients of a peer's canaries at its model in the step, in clip norms, [c, d]."""
        count = self.canaries.weight.shape[1]
        norm = torch.ones(count, dtype=self.cohort.dtype, device=self.cohort.device)
        if step.clip_norm is not None:
            norm = norm * step.clip_norm[row]

        # As if each canary were a peer with a batch of one example, all at this peer's model.
        points = step.params[row].expand(count, -1)
        divisor = None if step.divisor is None else step.divisor[row].expand(count)
        batch = Batch(
            self.canaries.x[place].unsqueeze(1),
            self.canaries.y[place].unsqueeze(1),
            self.canaries.weight[place].unsqueeze(1),
            self.canaries.index[place].unsqueeze(1),
        )
        out = torch.zeros_like(points)
        self.cohort.kernel.add_clipped_(out, points, batch, norm, 1 / norm, divisor)
        return out


def _randomized(experiment: Experiment, canaries: int, seed: int) -> tuple[Examples, Tensor]:
    """Return the examples with the first ones of each peer replaced, and their features: random, as the targets are."""
    examples = experiment.own.examples
    public = experiment.public
    if isinstance(examples.x, SparseRows) or isinstance(public.x, SparseRows):
        raise ScenarioError("an audit in one run needs dense data; leave --one-run out", code="audit.sparse")

    x = examples.x.clone()
    y = examples.y.clone()
    draws = keyed_generator(seed, "audit canaries in one run")
    for part in examples.parts:
        first = torch.from_numpy(part[:canaries])
        shape = (canaries, *x.shape[1:])
        if public.n_tokens is not None:
            x[first] = torch.from_numpy(draws.integers(public.n_tokens, size=shape))
        else:
            # As large as features get, so that clipping leaves a canary as much of its gradient as of any example's.
            signs = torch.from_numpy(draws.choice([-1.0, 1.0], size=shape)).to(x)
            x[first] = signs * float(public.x.abs().max())

        targets = torch.from_numpy(draws.integers(len(public.y), size=canaries))
        y[first] = public.y[targets].to(y)
    return replace(examples, x=x, y=y), x


def audit_in_one_run(experiment: Experiment, *, canaries: int = 100, seed: int = 0, confidence: float = 0.95) -> OneRun:
    """Train once with examples of each peer in or out by coins, and return what guessing them shows of ε.

    Args:
        experiment: with privacy; its ledger is not touched.
        canaries: how many examples of each peer, its first ones; at most all.
        seed: keys coins, batches and noise.
        confidence: the chance, at least, with which the result is a lower bound.

    Raises:
        ScenarioError: there is no privacy, the data are sparse, or a peer has too few examples.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Algorithm 1.
    """
    own = experiment.own
    plan = audited_plan(experiment)
    least = int(own.examples.sizes.min())
    if not GUESSED <= canaries <= least:
        raise ScenarioError(
            f"--one-run {canaries} must be from {GUESSED} to {least}, what the smallest peer holds", code="audit.trials"
        )

    rows = len(own.peers)
    inside = keyed_generator(seed, "audit coins in one run").random((rows, canaries)) < 0.5
    keys = {peer: digest(32, "audit in one run", seed, peer) for peer in own.peers.tolist()}
    examples, x = _randomized(experiment, canaries, seed)

    # The observer knows all canaries; the cohort that trains has only those that are in.
    everything = replace(own, examples=examples, keys=keys, sampler=own.sampler.like(keys=keys))
    known = replace(experiment, own=everything).cohort().data.examples(np.arange(rows), 0, canaries)

    not_a_number = torch.nan if x.is_floating_point() else -1
    trained_on = x.clone()
    for part, coins in zip(examples.parts, inside, strict=True):
        out = torch.from_numpy(part[:canaries][~coins])
        trained_on[out] = not_a_number
    cohort = replace(experiment, own=replace(everything, examples=replace(examples, x=trained_on))).cohort()
    cohort.apart = True

    watcher = _Watcher(experiment, cohort, known, np.zeros(inside.shape))
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    with STEPS.open_to(watcher):
        engine.rounds(experiment.scenario.rounds)

    epsilon = max(plan.epsilons(experiment.scenario.rounds))
    delta = max(account.delta for account in plan.accounts)
    return guessed(watcher.scores, inside, epsilon, delta, confidence)


def guessed(scores: np.ndarray, inside: np.ndarray, epsilon: float, delta: float, confidence: float) -> OneRun:
    """Guess that the smallest scores are out and the largest in; return what the guesses prove.

    Args:
        scores, inside: of all canaries, of one shape.
        epsilon, delta: what the run claims.
    """
    order = np.argsort(scores.ravel())
    coins = inside.ravel()[order]
    half = inside.size // GUESSED // 2
    guessed_out = coins[:half]
    guessed_in = coins[len(coins) - half :]

    guesses = 2 * half
    right = int((~guessed_out).sum() + guessed_in.sum())
    return OneRun(
        epsilon=epsilon,
        delta=delta,
        epsilon_lower_bound=epsilon_from_guesses(inside.size, guesses, right, delta, confidence),
        canaries=inside.size,
        guesses=guesses,
        right=right,
    )


def coefficients(gradients: Tensor, released: Tensor, noise: float | Tensor, rate: float) -> Tensor:
    """Return each canary's coefficient in what a step released, [c].

    They are those of ridge regression: what was released is explained by the gradients of all canaries and by noise. A
    canary's prior variance is that of a coin that shows with half the sampling rate.

    Args:
        gradients: the canaries' clipped gradients, in clip norms, [c, d].
        released: in clip norms, [d].
        noise: its standard deviation, in clip norms.
        rate: the sampling rate.
    """
    chance = rate / 2  # that a canary is in by its coin, and drawn
    inner = gradients @ gradients.T
    inner.diagonal().add_(noise**2 / (chance * (1 - chance)))
    solution: Tensor = torch.linalg.solve(inner, gradients @ released)
    return solution
