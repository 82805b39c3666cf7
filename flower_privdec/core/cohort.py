"""A cohort: the peers one process hosts, and all that their steps need; `Cohort.release_` is the one private door."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.door import Door
from flower_privdec.core.exchange import State
from flower_privdec.core.optimizers import LocalOptimizer
from flower_privdec.data import Batch, PeerData
from flower_privdec.gradients.protocol import GradientKernel, inputs_like, row_chunks
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import Participation
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.privacy.noise import INDEPENDENT, STATE_PREFIX, NoisedSum, NoiseMechanism, NoiseSource, PairSecrets

if TYPE_CHECKING:
    from flower_privdec.data import PublicSet
    from flower_privdec.rows.sparse_rows import Features
    from flower_privdec.tasks.losses import Loss


OUTPUT_BYTES = 2**26  # the outputs of so many coalitions as are tried at once


@dataclass(frozen=True, eq=False)
class Validation:
    """Public examples on which coalitions are tried, on the device.

    Attributes:
        x: inputs [N, *shape].
        y: classes, int64 [N].
        loss: maps outputs to predictions.
    """

    x: Features
    y: Tensor
    loss: Loss

    @staticmethod
    def of(public: PublicSet, loss: Loss, like: Tensor) -> Validation:
        """Place a public set where parameters are."""
        return Validation(inputs_like(public.x, like), public.y.to(like.device), loss)

    def __len__(self) -> int:
        """Return N."""
        return len(self.y)

    def some(self, chosen: np.ndarray) -> Validation:
        """Return some of the examples."""
        rows = torch.as_tensor(chosen, device=self.y.device)
        return Validation(self.x[rows], self.y[rows], self.loss)

    def worth(self, kernel: GradientKernel, models: Tensor, coalitions: np.ndarray) -> np.ndarray:
        """Return the accuracy of the mean model of each coalition, float64 [c] (PDSL, eq. 16 and 17).

        It is 0 where a member's parameters are not finite, and an example whose outputs are not counts as wrong.

        Args:
            models: of the members, [n, d].
            coalitions: bool [c, n], none empty.
        """
        sound = torch.isfinite(models).all(1)
        weights = torch.as_tensor(coalitions / coalitions.sum(1, keepdims=True)).to(models)
        sound_models = torch.where(sound[:, None], models, 0)
        right = torch.empty(len(weights), dtype=torch.float64)
        width = kernel.logits(sound_models[:1], self.x[:1]).shape[2]
        for rows in row_chunks(len(weights), len(self) * width * models.element_size(), OUTPUT_BYTES):
            outputs = kernel.blended_logits(sound_models, weights[rows], self.x)
            hits = (self.loss.predict(outputs) == self.y) & torch.isfinite(outputs).all(-1)
            right[rows] = hits.double().mean(1).cpu()
        right[(weights[:, ~sound] > 0).any(1).cpu()] = 0.0
        return right.numpy()


@dataclass(frozen=True)
class LearningRate:
    """What the steps of each peer are multiplied by: γ, constant, then falling linearly to 0 at the end.

    Attributes:
        base: float64 [n_peers].
        decay: share of the rounds, at the end, over which the rate falls.
        rounds: K.
        growing: whether round k counts k + 1 times as much instead, as in dual averaging, a_t = t.
        cosine: whether it falls as half a wave does, over all rounds but those of the warmup where decay is 0.
        warmup: share of the rounds, at the beginning, over which the rate rises linearly.
    """

    base: np.ndarray
    decay: float
    rounds: int
    growing: bool = False
    cosine: bool = False
    warmup: float = 0.0

    def at(self, round_index: int) -> np.ndarray:
        """Return γ of every peer in a round, [n_peers]."""
        if self.growing:
            return np.asarray(self.base * (round_index + 1))
        rising = self.warmup * self.rounds
        left = self.rounds - round_index
        falling = self.decay * self.rounds or (self.rounds - rising if self.cosine else 0.0)
        share = min(1.0, left / falling) if falling > 0 else 1.0
        share = (1 - math.cos(math.pi * share)) / 2 if self.cosine else share
        share *= min(1.0, (round_index + 1) / rising) if rising > 0 else 1.0
        return self.base if share == 1 else np.asarray(self.base * share)

    def of_rounds(self, rounds: int) -> np.ndarray:
        """Return γ of every peer in the first rounds, [rounds, n_peers], read-only."""
        if not (self.growing or self.decay or self.cosine or self.warmup):
            return np.broadcast_to(self.base, (rounds, len(self.base)))
        return np.stack([self.at(k) for k in range(rounds)])


@dataclass(frozen=True)
class PrivateStep:
    """What some rows need for one private step, before noise is added.

    Attributes:
        sums: the tensors [m, d] to which each sum that the algorithm declares is added, by name.
        params: [m, d]; the gradients are taken at params / divisor. May be one of the sums.
        divisor: [m] or None.
        batch: the step's examples of these rows; where a row stands here several times, for a receiver each, once.
        clip_norm: [m], or None for no clipping.
        scale: [m], what a sum is multiplied by: -γ, or the algorithm's factor, over the expected batch size.
        peers: int64 [m], global ids.
        rows: int64 [m], where these rows stand in the cohort.
        round_index: the round.
        step: its number in the run; it keys batch and noise.
        receivers: int64 [m], the only receiver of each row's sums, which then keys their noise too; None for all.
    """

    sums: Mapping[str, Tensor]
    params: Tensor
    divisor: Tensor | None
    batch: Batch
    clip_norm: Tensor | None
    scale: Tensor
    peers: np.ndarray
    rows: np.ndarray
    round_index: int
    step: int
    receivers: np.ndarray | None = None

    @property
    def batch_row(self) -> np.ndarray:
        """Return which row of the batch each of these rows uses, int64 [m], ascending."""
        if self.receivers is None:
            return np.arange(len(self.rows))
        values: np.ndarray = np.unique(self.rows, return_inverse=True)[1]
        return values

    @property
    def out(self) -> Tensor:
        """Return where a step with one sum adds it."""
        (only,) = self.sums.values()
        return only


Estimate = Callable[["Cohort", PrivateStep], None]


def stochastic_gradient(cohort: Cohort, step: PrivateStep) -> None:
    """Add scale Σ_b clip(∇f(params / divisor; b)): the plain estimate.

    Where a peer has several rows, for a receiver each, its one batch is seen by all of them, and never copied.
    """
    if step.receivers is None:
        cohort.kernel.add_clipped_(step.out, step.params, step.batch, step.clip_norm, step.scale, step.divisor)
        return
    ends = np.searchsorted(step.batch_row, np.arange(len(step.batch.weight) + 1)).tolist()
    for row, (start, stop) in enumerate(pairwise(ends)):
        batch = step.batch.repeated(row, stop - start)
        part = slice(start, stop)
        clip, share = (None if numbers is None else numbers[part] for numbers in (step.clip_norm, step.divisor))
        cohort.kernel.add_clipped_(step.out[part], step.params[part], batch, clip, step.scale[part], share)


def no_examples(cohort: Cohort, step: PrivateStep) -> None:
    """Add nothing: the step of a peer whose budget is spent, which shares its noise alone and costs nothing."""


class StepObserver(Protocol):
    """Who takes a cohort's private steps in its place, and sees them: an audit or a law."""

    def release_(self, cohort: Cohort, step: PrivateStep, estimate: Estimate, std: Mapping[str, Tensor]) -> None:
        """Take a step as `Cohort.take_` does, with which most observers take it; see there."""


STEPS: Door[StepObserver] = Door("cohorts' private steps")


@dataclass
class Cohort:
    """The peers of one process.

    Attributes:
        peers: int64 [m], their global ids, ascending.
        n_peers: how many peers the whole network has.
        initial: [d], the parameters every peer starts from.
        data, protection, ledger: these peers' examples, their clipping and noise, and their ledger, all by row; without
            privacy the last two are None.
        seed: of public draws.
        validation: public examples that no test figure is of; None where none were kept out.
        every: how many rounds lie between two lines of the metrics.
        game_seconds: how long coalitions have been tried on them, so far.
        apart: whether sums are made and noised by themselves before they are added anywhere, see `release_`.
        noise_inflation: by how much noise is larger than was solved for, to cover how sums are rounded.
        noise: where normal numbers come from.
        mechanism: how noise is made of them.
        secrets: of pairs of peers hosted here.
        optimizer: what the peers make of their noised gradients; None takes them as they are.
        state: the state of the step under way, of which a noise mechanism sees its own rows.
        rows: where all peers stand, 0 to m - 1.
        dtype, device: of the parameters.
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
    protection: Protection | None = None
    ledger: CohortLedger | None = None
    apart: bool = False
    noise_inflation: float = 0.0
    mechanism: NoiseMechanism = INDEPENDENT
    secrets: PairSecrets = field(default_factory=lambda: PairSecrets({}))
    optimizer: LocalOptimizer | None = None
    state: State | None = None
    seed: int = 0
    validation: Validation | None = None
    every: int = 1
    game_seconds: float = 0.0
    rows: np.ndarray = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.rows = np.arange(len(self.peers))
        self.dtype = self.initial.dtype
        self.device = self.initial.device

    def tensor(self, values: np.ndarray) -> Tensor:
        """Return per-peer numbers as a tensor on the cohort's device."""
        return torch.as_tensor(values, dtype=self.dtype, device=self.device)

    def active(self, round_index: int) -> np.ndarray:
        """Return which rows take their steps in a round, bool [m]: participating, and all steps within budget."""
        active = self.participation.active(round_index)[self.peers]
        if self.ledger is None:
            return np.asarray(active)
        return np.asarray(active & self.ledger.allowed((round_index + 1) * self.steps_per_round - 1))

    def add_step_(
        self,
        out: Tensor,
        params: Tensor,
        round_index: int,
        divisor: Tensor | None = None,
        estimate: Estimate = stochastic_gradient,
        local_step: int = 0,
        factor: float | None = None,
    ) -> None:
        """Add -γ g̃ to `out` for every active row, in place: the private stochastic step.

            g̃_i = (Σ_b clip(∇f_i(params_i / divisor_i; b), C) + N(0, (σ C)² I)) / E|batch|

        Args:
            out: [m, d]; may be `params` itself.
            params: [m, d].
            round_index: the round, which keys batch and noise.
            divisor: [m], push weights, or None for 1.
            estimate: adds the step without noise; the sum above unless an algorithm reduces its variance.
            local_step: which step of the round, for algorithms that take several.
            factor: what g̃ is multiplied by, in place of -γ: 1.0 adds the noised mean gradient itself.

        Privacy: what the algorithm declares for the step, see `release_rows_`. Where noise cancels between peers, one
            whose budget is spent adds its noise alone, which depends on no example: else the others' would not cancel.
        """
        active = self.active(round_index)
        if self.protection is not None and self.protection.pairs is not None:
            over = np.flatnonzero(self.participation.active(round_index)[self.peers] & ~active)
            if len(over):
                part = out[torch.as_tensor(over, device=self.device)]
                self.release_rows_(part, part, None, round_index, over, no_examples, local_step, factor=factor)
                out[torch.as_tensor(over, device=self.device)] = part
        if active.all():
            self.release_rows_(out, params, divisor, round_index, self.rows, estimate, local_step, factor=factor)
        elif active.any():
            chosen = np.flatnonzero(active)
            rows = torch.as_tensor(chosen, device=self.device)
            part = out[rows]
            point = part if out is params else params[rows]
            share = None if divisor is None else divisor[rows]
            self.release_rows_(part, point, share, round_index, chosen, estimate, local_step, factor=factor)
            out[rows] = part

    def release_rows_(
        self,
        sums: Tensor | Mapping[str, Tensor],
        params: Tensor,
        divisor: Tensor | None,
        round_index: int,
        rows: np.ndarray,
        estimate: Estimate = stochastic_gradient,
        local_step: int = 0,
        receivers: np.ndarray | None = None,
        factor: float | None = None,
    ) -> None:
        """Take one private step of some rows, of those that `active` allows: pay, estimate, add noise.

        Args:
            sums: where the step's sums are added, each [r, d], by the names the algorithm declares; a tensor alone
                is the sum `gradient`.
            params, divisor: of these rows alone, [r, d] and [r].
            rows: int64 [r], where they stand in the cohort; with receivers ascending, and one may occur several times,
                for a receiver each.
            estimate: adds the sums, without noise, from the step's batch.
            local_step: which step of the round, for algorithms that take several.
            receivers: int64 [r], global ids: the only receiver of each row's sums; None for all.
            factor: what the mean over a batch is multiplied by; -γ, and the optimizer's step, by default.

        Raises:
            TypeError: where the algorithm declares other sums, or fewer receivers.

        Privacy: unit example, adjacency zero-out; the release that the algorithm declares for the step, charged to
            each row's ledger before an example is read.
        """
        peers = self.peers[rows]
        index = round_index * self.steps_per_round + local_step
        if self.optimizer is not None and factor is None:
            if self.state is None or not isinstance(sums, Tensor):
                raise TypeError("a local optimizer takes steps of a running program with one sum")
            gradient = torch.zeros_like(sums)
            again = (estimate, local_step, receivers, 1.0)
            self.release_rows_(gradient, params, divisor, round_index, rows, *again)
            rate = self.tensor(self.learning_rate.at(round_index)[peers])
            whole = len(rows) == len(self.rows)
            chosen = slice(None) if whole else torch.as_tensor(rows, device=self.device)
            self.optimizer.add_step_(sums, gradient, rate, self.state.rows, chosen)
            return
        if self.ledger is not None and estimate is not no_examples:
            self.ledger.charge(index, rows if receivers is None else np.unique(rows))
        times = -self.learning_rate.at(round_index)[peers] if factor is None else np.full(len(rows), factor)
        rate = times / self.data.sampler.normalizer[rows]
        named = {"gradient": sums} if isinstance(sums, Tensor) else sums
        numbers = [rate]
        noises = {}
        if self.protection is not None:
            copies = None if receivers is None else np.bincount(rows, minlength=len(self.peers))
            clip = self.protection.clip_norm(index)[rows]
            noises = self.protection.noise(index, named, copies)
            numbers += [clip, *(np.abs(rate) * clip * noise[rows] for noise in noises.values())]
        scale, *rest = self.tensor(np.array(numbers)).unbind(0)
        step = PrivateStep(
            sums=named,
            params=params,
            divisor=divisor,
            batch=self.data.batch(index, rows if receivers is None else np.unique(rows)),
            clip_norm=rest[0] if rest else None,
            scale=scale,
            peers=peers,
            rows=rows,
            round_index=round_index,
            step=index,
            receivers=receivers,
        )
        self.release_(step, estimate, dict(zip(noises, rest[1:], strict=True)))

    def release_(self, step: PrivateStep, estimate: Estimate, std: Mapping[str, Tensor]) -> None:
        """Let the observer at the door take a step, or take it: the one way from examples to messages; see `take_`."""
        if (observer := STEPS.observer()) is None:
            self.take_(step, estimate, std)
        else:
            observer.release_(self, step, estimate, std)

    def take_(self, step: PrivateStep, estimate: Estimate, std: Mapping[str, Tensor]) -> None:
        """Add the estimate and then the noise to a step's sums.

        Args:
            std: the noise of every sum that is published, [r]; a sum that is not there stays on the peer.

        Privacy: a sum that is added to rows before it is noised is rounded as coarsely as the rows are large: where a
            neighbour decides how large, an example that moves the sum by C moves the rows by more. So deployed peers
            make their sums `apart`, which costs another pass over the rows.
        """
        sums = {name: torch.zeros_like(rows) for name, rows in step.sums.items()} if self.apart else step.sums
        estimate(self, replace(step, sums=sums) if self.apart else step)
        names = self.mechanism.state
        rows = {} if self.state is None else {part: self.state.rows[STATE_PREFIX + part] for part in names}
        for name, scale in std.items():
            what = NoisedSum(
                normals=self.noise,
                secrets=self.secrets,
                name=name,
                step=step.step,
                round_index=step.round_index,
                peers=step.peers,
                rows=step.rows,
                receivers=step.receivers,
                scale=step.scale,
                clip_norm=step.clip_norm,
                participation=self.participation,
                state=rows,
            )
            self.mechanism.add_(sums[name], scale * (1 + self.noise_inflation), what)
        if self.apart:
            for name, out in step.sums.items():
                out.add_(sums[name])
