"""What a run's releases cost, from the noise that was drawn and from nothing that was planned.

Every draw of normals is watched, with the noise of pairs. Of each step and each set of colluders the covariance of what
is left gives the noise that hides a peer's sum; see `privacy.mechanism.cancelling` for why it is this one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Exchange, Mix
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.privacy.noise import NoisedSum
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.privacy.noise.philox import PhiloxNoise
from flower_privdec.testing import Released, recording
from tools.battery.independent import Step, bracket, counted
from tools.battery.whitened import bands_of, whitened

ALL = -1  # colluders: all other peers
Draw = tuple[int, int, str, int | None]  # step, peer, sum, receiver


@dataclass
class Draws:
    """What was drawn.

    Attributes:
        own: the standard deviation of each peer's own noise.
        pairs: of each step and sum, the noise of each pair: its two ends, and what each multiplies the normals by.
        normals: each peer's own noise itself, with what it shares with others, if it is kept.
    """

    own: dict[Draw, float] = field(default_factory=dict)
    pairs: dict[tuple[int, str], dict[tuple[int, int], tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    normals: dict[Draw, Tensor] = field(default_factory=dict)


@contextmanager
def watching_draws(*, keeps_normals: bool = False) -> Iterator[Draws]:
    """Record all noise that this process draws from keys inside.

    Args:
        keeps_normals: whether the numbers that are drawn are kept too.
    """
    draws = Draws()
    own, add_pairs, share = PhiloxNoise.add_, CancellingNoise.add_pairs_, PhiloxNoise.add_shared_
    under_way: list[tuple[NoisedSum, np.ndarray]] = []

    def add_(
        source: PhiloxNoise,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        before = out.clone() if keeps_normals else out
        own(source, out, std, step, peers, purpose, receivers)
        to = [None] * len(peers) if receivers is None else receivers.tolist()
        for peer, receiver, scale in zip(peers.tolist(), to, std.tolist(), strict=True):
            draws.own[step, peer, purpose, receiver] = float(scale)
        if keeps_normals:
            for peer, receiver, added in zip(peers.tolist(), to, out - before, strict=True):
                draws.normals[step, peer, purpose, receiver] = added.double()

    def add_pairs_(noise: CancellingNoise, out: Tensor, noised: NoisedSum, *rest: Any) -> None:
        under_way.append((noised, noise.plan.edges))
        add_pairs(noise, out, noised, *rest)
        under_way.pop()

    def add_shared_(
        source: PhiloxNoise,
        out: Tensor,
        ends: np.ndarray,
        scales: np.ndarray,
        step: int,
        pairs: np.ndarray,
        purpose: str,
    ) -> None:
        before = out.clone() if keeps_normals else out
        share(source, out, ends, scales, step, pairs, purpose)
        noised, edges = under_way[-1]
        of_step = draws.pairs[step, noised.name]
        if keeps_normals:
            for peer, added in zip(noised.peers.tolist(), out - before, strict=True):
                draws.normals[step, peer, noised.name, None] += added.double()
        for pair, rows, factors in zip(pairs.tolist(), ends.tolist(), scales.tolist(), strict=True):
            one, other = edges[pair].tolist()
            first, second = of_step.get((one, other), (0.0, 0.0))
            # An end that is not among these rows adds its share apart, or never.
            if rows[0] >= 0:
                first = factors[0]
            if rows[1] >= 0:
                second = factors[1]
            of_step[one, other] = (first, second)

    with (
        patch.object(PhiloxNoise, "add_", add_),
        patch.object(CancellingNoise, "draws_apart", True),
        patch.object(CancellingNoise, "add_pairs_", add_pairs_),
        patch.object(PhiloxNoise, "add_shared_", add_shared_),
    ):
        yield draws


@dataclass
class Measured:
    """The private steps of one run, as they were taken.

    Attributes:
        experiment: the run's.
        steps: in order.
        draws: all noise.
        active: by round, which peers were to take steps, within their budgets.
        lost: by the name of a row, the largest part of its sum over all peers that an exchange of shares lost or added.
    """

    experiment: Experiment
    steps: list[Released]
    draws: Draws
    active: dict[int, np.ndarray]
    lost: dict[str, float] = field(default_factory=dict)

    def costs(self, peer: int, colluding: int = ALL) -> list[Cost]:
        """Return what each step costs a peer, towards as many colluders as see all messages."""
        drawing = drawings_of(self.experiment, self.experiment.own.peers, self.experiment.own.sampler)[peer]
        costs = []
        for step in self.steps:
            rows = np.flatnonzero(step.peers == peer)
            declared = self.experiment.algorithm.released(step.step, drawing)
            if len(rows) == 0 or self.is_spent(step, peer, rows):
                continue
            if declared is None:
                costs.append(Cost(step.step, math.inf, math.inf, None, everything=False))
                continue
            for row in rows.tolist():
                receiver = None if step.receivers is None else int(step.receivers[row])
                for part in declared:
                    if part.name not in step.public:
                        continue
                    noise = self._left(step, peer, part.name, receiver, colluding)
                    unit = float(step.unit[row])
                    drawn = math.inf if noise == 0 else part.drawn * unit / noise
                    idle = math.inf if noise == 0 else part.idle * unit / noise
                    everything = part.over == "all"
                    costs.append(Cost(step.step, drawn, idle if part.idle else 0.0, receiver, everything))
        return costs

    def left_of_units(self, peer: int, colluding: int) -> dict[int, float]:
        """Return what is left of a peer's noise of correlated steps, in the units in which it is drawn, by step."""
        left = {}
        for step in self.steps:
            if (step.peers == peer).any():
                (name,) = step.public
                left[step.step] = self._left(step, peer, name, None, colluding)
        return left

    def is_spent(self, step: Released, peer: int, rows: np.ndarray) -> bool:
        """Return whether a peer whose budget is spent adds the noise that it shares, and nothing of an example."""
        active = self.active.get(step.step // self.experiment.algorithm.steps_per_round)
        is_active = active is None or bool(active[peer])
        return not is_active and not any(step.raw[name][rows].any() for name in step.public)

    def _left(self, step: Released, peer: int, name: str, receiver: int | None, colluding: int) -> float:
        """Return the noise that is left of a peer's sum, the least over all sets of colluders."""
        own = self.draws.own.get((step.step, peer, name, receiver), 0.0)
        pairs = self.draws.pairs.get((step.step, name), {})
        if colluding == ALL or not pairs:
            return own
        # Colluders may be any peers, those that release nothing included. Peers whose budgets are spent release their
        # noise in a record of their own.
        releasing = {one for record in self.steps if record.step == step.step for one in record.peers.tolist()}
        others = [other for other in self.experiment.own.peers.tolist() if other != peer]
        least = math.inf
        for colluders in combinations(others, min(colluding, len(others))):
            rows = [peer, *(other for other in others if other in releasing and other not in colluders)]
            place = {one: number for number, one in enumerate(rows)}
            stds = [self.draws.own.get((step.step, one, name, receiver), 0.0) for one in rows]
            covariance = np.diag(np.square(stds))
            for ends, shares in pairs.items():
                if set(ends) & set(colluders):
                    continue
                vector = np.zeros(len(rows))
                for one, share in zip(ends, shares, strict=True):
                    if one in place:
                        vector[place[one]] = share
                covariance += np.outer(vector, vector)
            if min(stds) == 0:
                return own
            unit = stds[0]
            least = min(least, unit * float(np.linalg.inv(covariance / unit**2)[0, 0]) ** -0.5)
        return least


@dataclass(frozen=True)
class Cost:
    """One sum of one step of a peer.

    Attributes:
        step: its number.
        drawn, idle: how far an example moves it, over the noise that is left.
        receiver: who alone gets it.
        everything: whether it is over all examples, whatever is drawn.
    """

    step: int
    drawn: float
    idle: float
    receiver: int | None
    everything: bool


@dataclass(frozen=True)
class Sampling:
    """How a peer draws, from the scenario and the number of its examples.

    Attributes:
        rate: an example's chance.
        epoch: of shuffle, how many steps an epoch has.
        is_exact: whether the truth is known; else a bound from below and one from above.
    """

    rate: float
    epoch: int = 1
    is_exact: bool = True

    @classmethod
    def of(cls, experiment: Experiment, peer: int) -> Sampling:
        """Return how a peer of an experiment draws."""
        batch, count = experiment.scenario.data.batch, len(experiment.own.examples.parts[peer])
        plan, least = experiment.own.protection, experiment.scenario.data.at_least
        if least is not None and plan is not None and plan.pairs is not None:
            count = least  # peers that share noise are charged as if they had no more
        size = batch.size or 0
        if batch.small_peers == "full" and size >= count:
            return cls(1.0)
        if batch.sampling == "poisson":
            return cls(batch.rate if batch.rate is not None else min(1.0, size / count))
        if batch.sampling == "shuffle":
            return cls(1.0, epoch=max(1, count // size))
        if batch.sampling == "full" or size >= count:
            return cls(1.0)
        if batch.sampling == "uniform":
            return cls(size / count, is_exact=False)
        return cls(1 / (count // size), is_exact=False)


def composed(measured: Measured, peer: int, colluding: int = ALL, receiver: int | None = None) -> list[list[Step]]:
    """Return a peer's steps as an accountant takes them: those that bound ε from below, and those from above.

    Args:
        receiver: whose messages alone are seen.
    """
    sampling = Sampling.of(measured.experiment, peer)
    if bands_of(measured) > 1:
        return _composed_blocks(measured, peer, sampling, colluding) if receiver is None else [[], []]

    squares: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    ratios: dict[int, float] = defaultdict(float)
    rates: dict[int, float] = {}
    for cost in measured.costs(peer, colluding):
        if receiver is None or cost.receiver == receiver:
            rates[cost.step] = 1.0 if cost.everything else sampling.rate
            squares[cost.step][0] += cost.drawn**2
            squares[cost.step][1] += cost.idle**2
            ratios[cost.step] = max(ratios[cost.step], cost.idle / cost.drawn if cost.idle else 0.0)
    if sampling.epoch > 1 or measured.experiment.scenario.data.batch.sampling == "shuffle":
        epochs: dict[int, float] = defaultdict(float)
        for step, (drawn, _) in squares.items():
            epochs[step // sampling.epoch] = max(epochs[step // sampling.epoch], drawn)
        steps: list[Step] = [(1.0, math.sqrt(drawn), 0.0) for drawn in epochs.values()]
        return [steps, steps]
    drawn_of = {step: math.sqrt(drawn) for step, (drawn, _) in squares.items()}
    below: list[Step] = [(rates[step], drawn_of[step], math.sqrt(idle)) for step, (_, idle) in squares.items()]
    if not sampling.is_exact:
        return [below, [(1.0, drawn, 0.0) for drawn in drawn_of.values()]]
    # Sums of which an idle example moves some more than others: all are charged as the one that it moves most.
    return [below, [(rates[step], drawn, ratios[step] * drawn) for step, drawn in drawn_of.items()]]


def _composed_blocks(measured: Measured, peer: int, sampling: Sampling, colluding: int) -> list[list[Step]]:
    """Return steps whose noise is correlated, see `composed`: those of the dearest group, and one for each block."""
    plan = measured.experiment.own.protection
    assert plan is not None
    assert plan.correlation is not None
    bands = plan.correlation.bands
    rate = min(1.0, bands * sampling.rate)
    found = whitened(measured, peer)
    left = measured.left_of_units(peer, colluding)
    in_steps = np.array([left[step] for step in found.steps.tolist()])
    moves_of = found.against(in_steps)

    groups: dict[int, list[float]] = defaultdict(list)
    blocks: dict[int, float] = defaultdict(float)
    for step, moves, alone in zip(found.steps.tolist(), moves_of.tolist(), found.alone.tolist(), strict=True):
        if step in found.without_examples:
            continue
        groups[step % bands].append(moves)
        least = min(noise for other, noise in left.items() if step <= other < step + bands)
        blocks[step // bands] = max(blocks[step // bands], alone * plan.correlation.norm / least)

    dearest = max(groups.values(), key=lambda moves: sum(one**2 for one in moves), default=[])
    return [[(rate, moves, 0.0) for moves in dearest], [(rate, moves, 0.0) for moves in blocks.values()]]


def bounds(parts: Sequence[list[list[Step]]], delta: float) -> tuple[float, float]:
    """Return a lower and an upper bound of the ε of several runs' steps together, see `composed`."""
    below, above = ([step for part in parts for step in part[which]] for which in (0, 1))
    return bracket(counted(below), delta)[0], bracket(counted(above), delta)[1]


@contextmanager
def measuring(experiment: Experiment) -> Iterator[Measured]:
    """Measure the private steps that are taken inside, in this thread."""
    active: dict[int, np.ndarray] = {}
    original = Cohort.active

    def is_active(cohort: Cohort, round_index: int) -> np.ndarray:
        active[round_index] = original(cohort, round_index)
        return active[round_index]

    lost: dict[str, float] = {}
    perform = Engine.perform

    def performed(engine: Engine, exchange: Exchange) -> None:
        mixing = engine.cohort.mixing
        before = {}
        if isinstance(exchange, Mix) and mixing is not None and mixing.sends_shares:
            before = {name: engine.state.rows[name].double().clone() for name in exchange.names}
        perform(engine, exchange)
        for name, rows in before.items():
            difference = (engine.state.rows[name].double().sum(0) - rows.sum(0)).abs().max()
            largest = rows.abs().sum(0).max()
            lost[name] = max(lost.get(name, 0.0), float(difference / largest.clamp(min=1e-3)))

    plan = experiment.own.protection
    is_correlated = plan is not None and plan.correlation is not None
    with (
        watching_draws(keeps_normals=is_correlated) as draws,
        recording() as tape,
        patch.object(Cohort, "active", is_active),
        patch.object(Engine, "perform", performed),
    ):
        yield Measured(experiment, tape.steps, draws, active, lost)
