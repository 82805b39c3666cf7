"""Canaries: one example of each peer that moves a sum as far as clipping lets it, in a scenario of its own.

The peers run their whole scenario: algorithm, schedule, sampling, clipping, noise and exchanges are those of every
run. Only model and data are replaced. The model is one linear layer without a bias, and the loss a multiple of its
output, so large that each gradient is clipped: the gradient is that multiple of the features, whatever the
parameters. A peer's first example, its canary, has large features along e_0; the others have e_1, and the rest of the
coordinates hold only noise. Coordinate 0 of a release is then all that an observer needs to distinguish the two
neighbouring datasets.

If an algorithm subtracts a remembered gradient, an example moves a sum most when its gradient is the opposite of
that one. A canary's gradient then changes its sign: it has one at a snapshot and the other elsewhere; with a table it
has at every step the opposite of what the table most likely holds. The sign is public. Whether the canary was drawn,
and so what the table holds of it, is not, and the observer weighs both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Algorithm, State
from flower_privdec.data import Examples
from flower_privdec.experiment import Experiment
from flower_privdec.gradients import build_kernel
from flower_privdec.models import flatten
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.tasks.losses import Loss

FEATURES = 6  # noise alone in four: two draws, hardened ones too, are then alike with a chance of 1e-27
STEEP = 1e12  # the loss's derivative in the output: any clip norm is below it
LONG = 1e6  # a canary's features beside the others', so that a batch that is clipped as a whole is its own
NOISE_ALONE = 2  # the first coordinate that no example has


class Signs:
    """The signs of the canaries' gradients, which all know: a loss's derivative, as the audit sets it for each round.

    Attributes:
        memory: what the algorithm remembers gradients by: "table", "snapshot", or "" for nothing.
        now: of each row at the model of now, float64 [m].
        anchor: coordinate 0 of what was released at each row's snapshot and is added to every step, float64 [m].
    """

    def __init__(self, algorithm: Algorithm, rows: int) -> None:
        self.memory = ""
        if algorithm.table is not None:
            self.memory = "snapshot" if algorithm.table == "snapshot" else "table"
        self._every = getattr(algorithm, "every", 0)
        self._rows = rows
        self.begin()

    def begin(self) -> None:
        """Set the signs before a run, by which a table is filled."""
        first = -1.0 if self.memory else 1.0
        self.now = np.full(self._rows, first)
        self.anchor = np.zeros(self._rows)
        self._snapshot: Tensor | None = None  # the outputs of the canaries at their rows' snapshots, [m]

    def set_round(self, state: State, likely: np.ndarray) -> None:
        """Set the signs of a round.

        Args:
            state: before it.
            likely: the sign that a table most likely holds of each row's canary, float64 [m].
        """
        if self.memory == "table":
            self.now = -likely
            return
        if self.memory != "snapshot":
            return

        takes_snapshot = state.round_index % self._every == 0
        if takes_snapshot:
            self.now[:] = -1.0
            self.anchor = np.zeros(self._rows)
            self._snapshot = None
        else:
            self.now[:] = 1.0
            self.anchor = state.rows["anchor"][:, 0].double().cpu().numpy().copy()
            self._snapshot = state.rows["snapshot"][:, 0] * LONG

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return d loss / d outputs of examples [...]; y is 1 + the row of a canary, and 0 of the others."""
        signs = torch.from_numpy(np.append(1.0, self.now)).to(outputs)[y]

        if self._snapshot is not None:
            # The loss is not told at which model it is taken: an output that equals the snapshot's is one there.
            there = torch.cat([outputs.new_zeros(1), self._snapshot.to(outputs)])[y]
            at_snapshot = (y > 0) & ((outputs[..., 0] - there).abs() <= 1e-9 * there.abs())
            signs = torch.where(at_snapshot, -signs, signs)
        return (STEEP * signs).unsqueeze(-1).expand(outputs.shape).clone()


def audited_plan(experiment: Experiment) -> Protection:
    """Return the plan of a scenario that an audit can take from its first round on.

    Raises:
        ScenarioError: it has no privacy, or goes on from rounds of another plan.
    """
    plan = experiment.own.protection
    scenario = experiment.scenario
    if plan is None:
        raise ScenarioError(
            "privacy: none promises no ε that could be audited; give the scenario a privacy section",
            code="audit.no-privacy",
        )
    if scenario.earlier:
        raise ScenarioError(
            f"the scenario goes on from round {scenario.first_round} of a run (earlier), and an audit takes all rounds "
            "of one plan: remove earlier",
            code="audit.earlier",
        )
    return plan


@dataclass(frozen=True)
class Canaries:
    """A scenario with canaries.

    Attributes:
        experiment: with the model and the data of canaries, and all else as it was.
        signs: the signs of their gradients.
    """

    experiment: Experiment
    signs: Signs


def with_canaries(experiment: Experiment) -> Canaries:
    """Return a scenario with canaries.

    Raises:
        ScenarioError: see `audited_plan`.
    """
    audited_plan(experiment)
    scenario = experiment.scenario
    module = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(module.weight)
    initial = flatten(module).to(experiment.device, torch.float64)
    signs = Signs(experiment.algorithm, len(experiment.own.peers))
    loss = Loss("steep", lambda outputs, _: STEEP * outputs.sum(-1), signs.derivative, single=True)
    memory = scenario.compute.memory_mib << 20
    kernel = build_kernel(module.to(initial), loss, (FEATURES,), memory_bytes=memory)

    public = replace(
        experiment.public,
        x=torch.zeros(2, FEATURES),
        y=torch.zeros(2, dtype=torch.int64),
        n_classes=2,
        n_tokens=None,
        validation=None,
    )
    if experiment.public.validation is not None:
        public = replace(public, validation=public)

    built = replace(
        experiment,
        module=module,
        initial=initial,
        loss=loss,
        metrics=(),
        kernel=kernel,
        public=public,
        own=replace(experiment.own, examples=examples_with(experiment.own.examples.sizes, None)),
    )
    return Canaries(built, signs)


def examples_with(sizes: np.ndarray, present: np.ndarray | None) -> Examples:
    """Return the peers' examples. The first one of each peer is its canary; an absent canary has a gradient of zero."""
    ends = np.cumsum(sizes)
    parts = tuple(np.arange(end - size, end) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True))
    firsts = torch.from_numpy(ends - sizes)

    x = torch.zeros(int(ends[-1]), FEATURES)
    x[:, 1] = 1
    x[firsts] = 0
    y = torch.zeros(len(x), dtype=torch.int64)
    if present is not None:
        rows = torch.from_numpy(np.flatnonzero(present))
        x[firsts[rows], 0] = LONG
        y[firsts[rows]] = rows + 1
    return Examples(x, y, parts)
