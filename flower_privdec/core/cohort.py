"""The peers that one process hosts, and the one way from their examples to numbers that others may see.

A private step goes through three functions:

    Cohort.add_step_       An algorithm asks for a step of all active peers. Peers whose budget is spent are left out;
                           if noise cancels between peers, they still add theirs.
    Cohort.descend_rows_   Some rows go down their gradients, by -γ or by a local optimizer. An algorithm that chooses
                           its rows itself, such as FedAvg within its local steps, begins here.
    Cohort.release_rows_   The private step itself: pay, clip and sum, add noise. Nothing else reads examples. To
                           check the privacy of this package, read this function.

A request (`StepRequest`) says which rows take a step, at which parameters, and where its sums are added. The cohort
adds what it knows of these peers, such as their batch, clip norm and noise: that is a `PrivateStep`. An *estimate* is a
function that adds the clipped sums of a `PrivateStep`; algorithms with reduced variance bring their own.

An observer at the door `STEPS` takes the steps itself, to audit them or to test a law of privacy on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.door import Door
from flower_privdec.core.exchange import State
from flower_privdec.core.optimizers import LocalOptimizer
from flower_privdec.core.validation import Validation
from flower_privdec.data import Batch, PeerData
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Participation
from flower_privdec.privacy.ledger.cohort_ledger import PlannedLedger
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.privacy.noise import INDEPENDENT, STATE_PREFIX, NoisedSum, NoiseMechanism, NoiseSource, PairSecrets
from flower_privdec.rows.tensors import put_back

if TYPE_CHECKING:
    from torch import Tensor

    from flower_privdec.gradients.protocol import GradientKernel


NOBODY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LearningRate:
    """The learning rate γ of each peer: constant unless a schedule changes it.

    Attributes:
        base: γ before any schedule, float64 [n_peers].
        decay: the share of the rounds, at the end, in which the rate falls to 0.
        rounds: the number of rounds K.
        growing: multiply by k + 1 in round k instead, as dual averaging does (a_t = t).
        cosine: let the rate fall as half a cosine wave; in all rounds after the warmup if decay is 0.
        warmup: the share of the rounds, at the beginning, in which the rate rises linearly.
    """

    base: np.ndarray
    decay: float
    rounds: int
    growing: bool = False
    cosine: bool = False
    warmup: float = 0.0

    def at(self, round_index: int) -> np.ndarray:
        """Return every peer's learning rate in a round, float64 [n_peers]."""
        if self.growing:
            return np.asarray(self.base * (round_index + 1))

        warmup_rounds = self.warmup * self.rounds
        decay_rounds = self.decay * self.rounds
        if self.cosine and not self.decay:
            decay_rounds = self.rounds - warmup_rounds

        share = 1.0
        rounds_left = self.rounds - round_index
        if decay_rounds > 0 and rounds_left < decay_rounds:
            share = rounds_left / decay_rounds
            if self.cosine:
                share = (1 - math.cos(math.pi * share)) / 2

        # Warmup multiplies: a decay that begins within it would otherwise be lost.
        if round_index + 1 < warmup_rounds:
            share *= (round_index + 1) / warmup_rounds

        if share == 1:
            return self.base  # spares a copy in each step of most runs
        return np.asarray(self.base * share)

    def of_rounds(self, rounds: int) -> np.ndarray:
        """Return every peer's learning rate in the first rounds, [rounds, n_peers], read-only."""
        is_constant = not (self.growing or self.decay or self.cosine or self.warmup)
        if is_constant:
            return np.broadcast_to(self.base, (rounds, len(self.base)))
        return np.stack([self.at(k) for k in range(rounds)])


@dataclass(frozen=True, kw_only=True)
class PrivateStep:
    """A private step that is paid for, with all that it takes to make its sums and their noise.

    Attributes:
        sums: the tensors [r, d] to which each sum is added, by name.
        params: [r, d]; gradients are taken at params / divisor. May be one of the sums.
        divisor: [r]; None for 1.
        batch: the examples of these rows. A peer has one batch, also if its row occurs several times, for several
            receivers; see `batch_row`.
        clip_norm: C, the norm to which each example's gradient is clipped, [r]; None does not clip.
        scale: what a sum of clipped gradients is multiplied by: the factor of the mean, such as -γ, over the expected
            batch size, [r].
        noise_std: the standard deviation of the noise of each sum that is published, [r], by name. A sum without an
            entry stays on its peer.
        estimate: adds the sums, without noise.
        peers: global ids, int64 [r].
        rows: the places of these rows in the cohort, int64 [r].
        round_index: the round.
        step: its number in the run, which keys batch and noise.
        receivers: int64 [r], the only receiver of each row's sums, which then keys their noise too; None for all.
    """

    sums: Mapping[str, Tensor]
    params: Tensor
    divisor: Tensor | None
    batch: Batch
    clip_norm: Tensor | None
    scale: Tensor
    noise_std: Mapping[str, Tensor]
    estimate: Estimate
    peers: np.ndarray
    rows: np.ndarray
    round_index: int
    step: int
    receivers: np.ndarray | None

    @property
    def batch_row(self) -> np.ndarray:
        """The row of the batch that each of these rows uses, int64 [r], ascending."""
        if self.receivers is None:
            return np.arange(len(self.rows))
        values: np.ndarray = np.unique(self.rows, return_inverse=True)[1]
        return values

    @property
    def out(self) -> Tensor:
        """The only sum of a step that has one."""
        (only,) = self.sums.values()
        return only


Estimate = Callable[["Cohort", PrivateStep], None]


def stochastic_gradient(cohort: Cohort, step: PrivateStep) -> None:
    """Add scale Σ_b clip(∇f(params / divisor; b)), the plain estimate of DP-SGD."""
    if step.receivers is None:
        cohort.kernel.add_clipped_(step.out, step.params, step.batch, step.clip_norm, step.scale, step.divisor)
        return

    # A peer has a row for each receiver. They all see its one batch, which is expanded, never copied: with all its
    # neighbours as receivers, copies would take as many times the memory.
    rows_of_batch = np.arange(len(step.batch.weight) + 1)
    ends = np.searchsorted(step.batch_row, rows_of_batch).tolist()
    for batch_row, (start, stop) in enumerate(pairwise(ends)):
        part = slice(start, stop)
        cohort.kernel.add_clipped_(
            step.out[part],
            step.params[part],
            step.batch.repeated(batch_row, stop - start),
            None if step.clip_norm is None else step.clip_norm[part],
            step.scale[part],
            None if step.divisor is None else step.divisor[part],
        )


def no_examples(cohort: Cohort, step: PrivateStep) -> None:
    """Add nothing. A step with this estimate is noise only: it gets no example, and no peer pays for it."""


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A private step that an algorithm asks for.

    Attributes:
        sums: the tensors [r, d] to which the step's sums are added, by the names that the algorithm declares.
        params: the parameters of these rows, [r, d]; gradients are taken at params / divisor. May be one of the sums.
        divisor: push weights [r]; None for 1.
        round_index: the round.
        local_step: which step of the round, if the algorithm takes several.
        rows: the places of these rows in the cohort, int64 [r]. With receivers they ascend, and a row occurs once for
            each receiver.
        receivers: global ids, int64 [r]: the only peer that gets the sums of each row; None if all may see them.
        factor: what the mean over a batch is multiplied by, one number or float64 [r].
        estimate: adds the sums, without noise, from the step's batch.
    """

    sums: Mapping[str, Tensor]
    params: Tensor
    divisor: Tensor | None = None
    round_index: int
    local_step: int = 0
    rows: np.ndarray
    receivers: np.ndarray | None = None
    factor: float | np.ndarray = 1.0
    estimate: Estimate = stochastic_gradient

    @property
    def readers(self) -> np.ndarray:
        """The rows whose peers read examples, and therefore pay for the step: each once, int64."""
        if self.estimate is no_examples:
            return NOBODY
        if self.receivers is None:
            return self.rows
        return np.unique(self.rows)


class StepObserver(Protocol):
    """Takes the private steps of a cohort in its place, so that it sees them: an audit or a law."""

    def take_(self, cohort: Cohort, step: PrivateStep) -> None:
        """Take a step that is paid for.

        A cohort without an observer calls `step.estimate(cohort, step)`, then `cohort.add_noise_(step)`.
        """


STEPS: Door[StepObserver] = Door("cohorts' private steps")


@dataclass
class Cohort:
    """The peers of one process.

    Attributes:
        peers: their global ids, int64 [m], ascending.
        n_peers: how many peers the whole network has.
        initial: the parameters with which every peer starts, [d].
        data, protection, ledger: the examples of these peers, their clipping and noise, and their ledger, all by row;
            the last two are None without privacy.
        seed: keys public draws.
        validation: public examples kept out of the test set; None if there are none.
        every: the number of rounds between two lines of metrics.
        game_seconds: how long coalitions have been tried on the validation examples, so far.
        apart: make and noise sums apart from the rows that they are added to, see `release_rows_`.
        noise_inflation: the relative excess of the noise over what was solved for, which covers how sums are rounded.
        noise: the source of normal numbers.
        mechanism: makes noise of them.
        secrets: secrets of pairs of peers hosted here.
        optimizer: turns noised gradients into steps; None takes them as they are.
        state: the state of the program under way; the rows of the optimizer and the noise mechanism are in it.
        steps_taken: how many private steps some of its rows took.
        rows: the place of every peer, 0 to m - 1.
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
    ledger: PlannedLedger | None = None
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
    steps_taken: int = field(init=False, default=0)
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

    def places(self, rows: np.ndarray) -> Tensor | slice:
        """Return rows as an index into a tensor of all rows: a slice if they follow one another, which copies nothing.

        Args:
            rows: places in the cohort, int64 [r], ascending.
        """
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return torch.as_tensor(rows, device=self.device)

    def active(self, round_index: int) -> np.ndarray:
        """Return which rows take their steps in a round, bool [m]: those that take part and can pay all its steps."""
        takes_part = self.participation.active(round_index)[self.peers]
        if self.ledger is None:
            return np.asarray(takes_part)

        last_step = (round_index + 1) * self.steps_per_round - 1
        return np.asarray(takes_part & self.ledger.allowed(last_step))

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
        """Add the private stochastic step -γ g̃ to `out` for every active row, in place.

            g̃_i = (Σ_b clip(∇f_i(params_i / divisor_i; b), C) + N(0, (σ C)² I)) / E|batch|

        Args:
            out: [m, d]; may be `params` itself.
            params: [m, d].
            round_index: the round, which keys batch and noise.
            divisor: push weights [m]; None for 1.
            estimate: adds the step without noise; the sum above unless an algorithm reduces its variance.
            local_step: which step of the round, if the algorithm takes several.
            factor: multiplies g̃ in place of -γ: 1.0 adds the noised mean gradient itself.

        Privacy: what the algorithm declares for the step, see `release_rows_`.
        """
        take: Callable[[StepRequest], None]
        request = StepRequest(
            sums={"gradient": out},
            params=params,
            divisor=divisor,
            round_index=round_index,
            local_step=local_step,
            rows=self.rows,
            estimate=estimate,
        )
        if factor is None:
            take = self.descend_rows_
        else:
            take = self.release_rows_
            request = replace(request, factor=factor)

        active = self.active(round_index)
        if self.protection is not None and self.protection.pairs is not None:
            # A pair's noise cancels only if both add it. So a peer whose budget is spent goes on adding its noise,
            # which depends on no example.
            spent = self.participation.active(round_index)[self.peers] & ~active
            self._take_some_(take, replace(request, estimate=no_examples), spent)

        if active.all():
            take(request)
        else:
            self._take_some_(take, request, active)

    def _take_some_(self, take: Callable[[StepRequest], None], request: StepRequest, chosen: np.ndarray) -> None:
        """Take a step of the chosen rows only, bool [m], of a request for all rows with one sum."""
        if not chosen.any():
            return

        rows = np.flatnonzero(chosen)
        places = self.places(rows)

        ((name, out),) = request.sums.items()
        part = out[places]
        params = part if request.params is out else request.params[places]
        divisor = None if request.divisor is None else request.divisor[places]

        take(replace(request, sums={name: part}, params=params, divisor=divisor, rows=rows))
        put_back(out, places, part)

    def descend_rows_(self, request: StepRequest) -> None:
        """Let some rows go down their noised gradients: by -γ, or as the local optimizer makes of them.

        Args:
            request: its factor is replaced.

        Raises:
            TypeError: there is an optimizer, and the step has several sums or belongs to no running program.

        Privacy: see `release_rows_`. What an optimizer does is post-processing and costs nothing.
        """
        rate = self.learning_rate.at(request.round_index)[self.peers[request.rows]]  # γ, [r]
        if self.optimizer is None:
            self.release_rows_(replace(request, factor=-rate))
            return

        if self.state is None or len(request.sums) != 1:
            raise TypeError("a local optimizer takes steps of a running program with one sum")
        ((name, out),) = request.sums.items()
        gradient = torch.zeros_like(out)
        self.release_rows_(replace(request, sums={name: gradient}, factor=1.0))

        self.optimizer.add_step_(out, gradient, self.tensor(rate), self.state.rows, self.places(request.rows))

    def release_rows_(self, request: StepRequest) -> None:
        """Take one private step of some rows: pay, clip and sum the gradients, add noise.

            sums_i += scale_i Σ_{b in batch_i} clip(∇f_i(b), C_i) + N(0, noise_std_i² I)

        with scale_i = factor_i / E|batch_i| and noise_std_i = |scale_i| C_i σ_i. The columns of an embedding's row for
        padding stay. This is the step of DP-SGD for each row, and the only way from examples to rows: every algorithm,
        optimizer and runtime ends here.

        Raises:
            TypeError: the algorithm declares other sums, or fewer receivers.
            BudgetError: a peer may not take the step, or its ledger cannot be written.

        Privacy: unit example, adjacency zero-out; the release that the algorithm declares for the step.
        """
        number = request.round_index * self.steps_per_round + request.local_step
        readers = request.readers

        # Pay first, and durably: a crash may then count a step too many, never one too few. The rows that pay are the
        # rows that read, so no example can be read for nothing.
        if self.ledger is not None and len(readers) > 0:
            self.ledger.charge(number, readers)
        if len(readers) > 0:
            self.steps_taken += 1
        batch = self.data.batch(number, readers)

        # These are float64 [r], and rounded to the parameters' type only in the step below. The noise is solved in clip
        # norms of a sum, so it is scaled as its sum is.
        scale = request.factor / self.data.sampler.normalizer[request.rows]
        clip_norm = None
        noise_std = {}
        if self.protection is not None:
            clip_norm = self.protection.clip_norm(number)[request.rows]
            if request.receivers is None:
                copies = None
            else:
                copies = np.bincount(request.rows, minlength=len(self.peers))
            for name, multiplier in self.protection.noise(number, request.sums, copies).items():
                noise_std[name] = np.abs(scale) * clip_norm * multiplier[request.rows]

        # Deployed peers make their sums apart from their rows, by another pass over these. A neighbour can make rows
        # large, and large rows round coarsely: an example that moves its sum by C could move such rows by more.
        sums = request.sums
        if self.apart:
            sums = {name: torch.zeros_like(rows) for name, rows in request.sums.items()}

        # What the columns of rows for padding hold, to be put back.
        kept = []
        for rows in sums.values():
            for columns in self.kernel.padding:
                kept.append((rows[:, columns], rows[:, columns].clone()))

        # A GPU waits for every transfer, so all numbers of the rows go to it in one.
        numbers = {"scale": scale}
        if clip_norm is not None:
            numbers["clip norm"] = clip_norm
        for name, std in noise_std.items():
            numbers[f"noise of {name}"] = std
        together = self.tensor(np.array(list(numbers.values())))
        on_device = dict(zip(numbers, together.unbind(), strict=True))

        step = PrivateStep(
            sums=sums,
            params=request.params,
            divisor=request.divisor,
            batch=batch,
            clip_norm=on_device.get("clip norm"),
            scale=on_device["scale"],
            noise_std={name: on_device[f"noise of {name}"] for name in noise_std},
            estimate=request.estimate,
            peers=self.peers[request.rows],
            rows=request.rows,
            round_index=request.round_index,
            step=number,
            receivers=request.receivers,
        )

        observer = STEPS.observer()
        if observer is None:
            step.estimate(self, step)  # clips and sums
            self.add_noise_(step)
        else:
            observer.take_(self, step)

        # An embedding's row for padding stays as it was. It has no gradient, whatever the examples: so it held nothing
        # but noise here, and to put back what it was before depends on no example. What is released is that of all
        # columns, of which this is post-processing; every peer knows which row it is, from the model.
        for part, before in kept:
            part.copy_(before)

        if self.apart:
            for name, rows in request.sums.items():
                rows.add_(sums[name])

    def add_noise_(self, step: PrivateStep) -> None:
        """Add its noise to each sum of a step that is published."""
        state_rows = {}
        if self.state is not None:
            state_rows = {name: self.state.rows[STATE_PREFIX + name] for name in self.mechanism.state}

        for name, noise_std in step.noise_std.items():
            noised = NoisedSum(
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
                state=state_rows,
            )
            self.mechanism.add_(step.sums[name], noise_std * (1 + self.noise_inflation), noised)
