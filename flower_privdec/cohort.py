"""A cohort: the peers one process hosts, and all that their steps need beside the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_privdec.data import Batch, PeerData
from flower_privdec.gradients import GradientKernel
from flower_privdec.mixing import Mixing
from flower_privdec.participation import Participation
from flower_privdec.privacy.ledger import CohortLedger
from flower_privdec.privacy.plan import PrivacyPlan
from flower_privdec.randomness import NoiseSource


@dataclass(frozen=True)
class LearningRate:
    """γ of each peer: constant, then falling linearly to 0 over the last `decay` share of the rounds.

    Attributes:
        base: float64 [n_peers].
        decay: share of the rounds, at the end, over which the rate falls.
        rounds: K.
    """

    base: np.ndarray
    decay: float
    rounds: int

    def at(self, round_index: int) -> np.ndarray:
        """Return γ of every peer in a round, [n_peers]."""
        falling = self.decay * self.rounds
        if falling <= 0 or self.rounds - round_index > falling:
            return self.base
        return np.asarray(self.base * (self.rounds - round_index) / falling)


@dataclass(frozen=True)
class PrivateStep:
    """What some rows need for one private step, before noise is added.

    Attributes:
        out, params: [m, d]; add the step to the first, at the second over `divisor`. May be the same tensor.
        divisor: [m] or None.
        batch: the round's examples of these rows.
        clip_norm: [m], or None for no clipping.
        scale: [m], -γ over the expected batch size.
        peers: int64 [m], global ids.
        rows: int64 [m], where these rows stand in the cohort.
        round_index: the round.
        draw: numbers the step over the whole run; it keys batch and noise.
        std: noise the cohort will add to out, [m], or None without privacy.
    """

    out: Tensor
    params: Tensor
    divisor: Tensor | None
    batch: Batch
    clip_norm: Tensor | None
    scale: Tensor
    peers: np.ndarray
    rows: np.ndarray
    round_index: int
    draw: int
    std: Tensor | None


Estimate = Callable[["Cohort", PrivateStep], None]


def stochastic_gradient(cohort: Cohort, step: PrivateStep) -> None:
    """Add scale Σ_b clip(∇f(params / divisor; b)): the plain estimate."""
    cohort.kernel.add_clipped_(step.out, step.params, step.batch, step.clip_norm, step.scale, step.divisor)


@dataclass
class Cohort:
    """The peers of one process.

    Attributes:
        peers: int64 [m], their global ids, ascending.
        n_peers: how many peers the whole network has.
        initial: [d], the parameters every peer starts from.
        plan, ledger: the privacy plan of the whole network and these peers' ledgers; None without privacy.
    """

    peers: np.ndarray
    n_peers: int
    initial: Tensor
    kernel: GradientKernel
    data: PeerData
    mixing: Mixing | None
    participation: Participation
    noise: NoiseSource
    learning_rate: LearningRate
    steps_per_round: int = 1
    plan: PrivacyPlan | None = None
    ledger: CohortLedger | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the parameters' number type."""
        return self.initial.dtype

    @property
    def device(self) -> torch.device:
        """Return where the parameters live."""
        return self.initial.device

    def tensor(self, values: np.ndarray) -> Tensor:
        """Return per-peer numbers as a tensor on the cohort's device."""
        return torch.as_tensor(values, dtype=self.dtype, device=self.device)

    def active(self, round_index: int) -> np.ndarray:
        """Return which rows take their steps in a round, bool [m]: participating, and within budget.

        The ledger is charged here for all steps of the round, before any example is read.
        """
        active = self.participation.active(round_index)[self.peers]
        if self.ledger is None:
            return np.asarray(active)
        last = (round_index + 1) * self.steps_per_round - 1
        self.ledger.reserve(last)
        return np.asarray(active & self.ledger.allowed(last))

    def add_step_(
        self,
        out: Tensor,
        params: Tensor,
        round_index: int,
        divisor: Tensor | None = None,
        estimate: Estimate = stochastic_gradient,
    ) -> None:
        """Add -γ g̃ to `out` for every active row, in place: the private stochastic step.

            g̃_i = (Σ_b clip(∇f_i(params_i / divisor_i; b), C) + N(0, (σ C)² I)) / E|batch|

        Args:
            out: [m, d]; may be `params` itself.
            params: [m, d].
            round_index: the round, which keys batch and noise.
            divisor: [m], push weights, or None for 1.
            estimate: adds the step without noise; the sum above unless an algorithm reduces its variance.

        Privacy: one release for each active peer (unit: example, adjacency: zero-out), charged to its
            ledger before an example is read.
        """
        active = self.active(round_index)
        if active.all():
            self.step_rows_(out, params, divisor, round_index, np.arange(len(self.peers)), estimate)
        elif active.any():
            chosen = np.flatnonzero(active)
            rows = torch.as_tensor(chosen, device=self.device)
            part = out[rows]
            point = part if out is params else params[rows]
            share = None if divisor is None else divisor[rows]
            self.step_rows_(part, point, share, round_index, chosen, estimate)
            out[rows] = part

    def step_rows_(
        self,
        out: Tensor,
        params: Tensor,
        divisor: Tensor | None,
        round_index: int,
        rows: np.ndarray,
        estimate: Estimate = stochastic_gradient,
        local_step: int = 0,
    ) -> None:
        """Add -γ g̃ to `out` for some rows, which `active` has said may step; see `add_step_`.

        Args:
            out, params, divisor: of these rows alone, [r, d] and [r].
            rows: int64 [r], where they stand in the cohort.
            local_step: which step of the round, for algorithms that take several.
        """
        peers, draw = self.peers[rows], round_index * self.steps_per_round + local_step
        rate = self.learning_rate.at(round_index)[peers] / self.data.sampler.normalizer[peers]
        scale, clip, std = self.tensor(-rate), None, None
        if self.plan is not None:
            norm = self.plan.clip_norm(draw)[peers]
            noise = rate * norm * self.plan.noise_multiplier(draw)[peers]
            scale, clip, std = self.tensor(np.array([-rate, norm, noise])).unbind(0)
        batch = self.data.batch(draw, peers)
        step = PrivateStep(out, params, divisor, batch, clip, scale, peers, rows, round_index, draw, std)
        estimate(self, step)
        if std is not None:
            self.noise.add_(out, std, draw, peers)
