"""Canaries: one example of each peer that moves a sum as far as clipping lets it, and what is released of it.

The peers run their whole scenario: algorithm, schedule, sampling, clipping, noise and exchanges are those of every
run. Only model and data are replaced. The model is one linear layer without a bias, and the loss a multiple of its
output, so large that each gradient is clipped: the gradient is that multiple of the features, whatever the
parameters. A peer's first example, its canary, has large features along e_0; the others have e_1, and the rest of the
coordinates hold only noise. Coordinate 0 of a release is then all that an observer needs to distinguish the two
neighbouring datasets.

Where an algorithm subtracts a remembered gradient, an example moves a sum most when its gradient is the opposite of
that one. A canary's gradient then changes its sign: it has one at a snapshot and the other elsewhere; with a table it
has at every step the opposite of what the table most likely holds. The sign is public. Whether the canary was drawn,
and so what the table holds of it, is not, and the observer weighs both.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Algorithm, State
from flower_privdec.data import Examples
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.gradients import build_kernel
from flower_privdec.models import flatten
from flower_privdec.privacy.mechanism.declared import Declaration, joint_release
from flower_privdec.privacy.mechanism.events import Release, epoch_steps
from flower_privdec.privacy.mechanism.protection import Protection
from flower_privdec.privacy.noise import INDEPENDENT, NoisedSum, NoiseMechanism
from flower_privdec.privacy.noise.pair_noise import CancellingNoise
from flower_privdec.rows.keys import digest, keyed_generator
from flower_privdec.tasks.losses import Loss

FEATURES = 6  # noise alone in four: two draws, hardened ones too, are then alike with a chance of 1e-27
STEEP = 1e12  # the loss's derivative in the output: any clip norm is below it
LONG = 1e6  # a canary's features beside the others', so that a batch that is clipped as a whole is its own
NOISE_ALONE = 2  # the first coordinate that no example has
NOISE_KEPT = 10_000  # calls of the mechanism whose noise is looked at
SLACK = 1e-6  # of a move, for rounding
MOST_SETS = 256  # of colluders that are tried for a row
LEAST = 1e-150  # a noise multiplier of 0, to divide by


class Signs:
    """The signs of the canaries' gradients, which all know: a loss's derivative, as the audit sets it for each round.

    Attributes:
        memory: what the algorithm remembers gradients by: "table", "snapshot", or "" for nothing.
        now: of each row at the model of now, float64 [m].
        anchor: coordinate 0 of what was released at each row's snapshot and is added to every step, float64 [m].
    """

    def __init__(self, algorithm: Algorithm, rows: int) -> None:
        self.memory = "" if algorithm.table is None else "snapshot" if algorithm.table == "snapshot" else "table"
        self._every = getattr(algorithm, "every", 0)
        self._rows = rows
        self.begin()

    def begin(self) -> None:
        """Set the signs before a run, by which a table is filled."""
        self.now = np.full(self._rows, -1.0 if self.memory else 1.0)
        self._snapshot: Tensor | None = None
        self.anchor = np.zeros(self._rows)

    def set_round(self, state: State, likely: np.ndarray) -> None:
        """Set the signs of a round.

        Args:
            state: before it.
            likely: the sign that a table most likely holds of each row's canary, float64 [m].
        """
        if self.memory == "table":
            self.now = -likely
        elif self.memory:
            takes = state.round_index % self._every == 0
            self.now[:] = -1.0 if takes else 1.0
            self._snapshot = None if takes else state.rows["snapshot"][:, 0] * LONG
            anchor = state.rows["anchor"][:, 0].double().cpu().numpy()
            self.anchor = np.zeros(self._rows) if takes else anchor.copy()

    def derivative(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return d loss / d outputs of examples [...]; y is 1 + the row of a canary, and 0 of the others."""
        signs = torch.from_numpy(np.append(1.0, self.now)).to(outputs)[y]
        if self._snapshot is not None:
            there = torch.cat([outputs.new_zeros(1), self._snapshot.to(outputs)])[y]
            at_snapshot = (y > 0) & ((outputs[..., 0] - there).abs() <= 1e-9 * there.abs())
            signs = torch.where(at_snapshot, -signs, signs)
        return (STEEP * signs).unsqueeze(-1).expand(outputs.shape).clone()


class Observer:
    """An observer of every published sum of a run with canaries, who knows the plan and the declarations.

    A step's sums at one row are normal around 0 without the canary; with it each is shifted by what is declared, as
    far as an example that is drawn moves it with chance q, and else as far as an idle one does. A row's score is the
    log of the likelihood ratio of the two, added over steps; its σ, q and shifts are the plan's and the
    declaration's, whatever the code under test did. With a table both signs that it may hold are followed.

    Attributes:
        scores: float64 [m].
        defects: what is not as planned and declared, a line each; the first of each kind.
        noise: what the coordinates without examples held, over the planned σ, independent numbers; of `NOISE_KEPT` sums
            at most.
        left: where noise cancels, likewise what colluders leave of one row, over what is planned.
        cost: for each row, the releases that it made, as they were declared and planned; empty unless `counts_cost`.
    """

    def __init__(
        self, experiment: Experiment, mechanism: NoiseMechanism, signs: Signs, *, counts_cost: bool = False
    ) -> None:
        own = experiment.own
        self._signs = signs
        self._plan = audited_plan(experiment)
        self._algorithm = experiment.algorithm
        self._mechanism = mechanism
        self._counts_cost = counts_cost
        drawings = drawings_of(experiment, own.peers, own.sampler)
        self._drawings = list(dict.fromkeys(drawings))
        self._drawing_of = np.array([self._drawings.index(drawing) for drawing in drawings])
        self._facts: dict[tuple[Declaration, ...], dict[str, np.ndarray]] = {}
        self._normalizer = np.asarray(own.sampler.normalizer, dtype=np.float64)
        self._rates = np.array([drawing.rate for drawing in drawings])
        self._step, self._sums = -1, np.zeros((4, len(own.peers)))
        self._chance, self._active = np.ones(len(own.peers)), np.zeros(len(own.peers), dtype=bool)
        self._draws: dict[bytes, str] = {}
        self._views: dict[bytes, tuple[list[View], np.ndarray]] = {}
        self.left: list[np.ndarray] = []
        self.scores = np.zeros(len(own.peers))
        self._held = np.array([np.zeros(len(own.peers)), np.full(len(own.peers), -np.inf)])  # see `_remembered`
        self._belief = -np.ones(len(own.peers))
        self.defects: dict[str, str] = {}
        self.noise: list[np.ndarray] = []
        self.cost: list[Counter[Release]] = [Counter() for _ in own.peers]
        self._epochs: list[set[int]] = [set() for _ in own.peers]

    def see(self, before: Tensor, after: Tensor, noised: NoisedSum) -> None:
        """Count one published sum of some rows.

        Args:
            before, after: the sum without its noise and with it, [r, d]; of a row's own only the second is used for its
                score.
        """
        if noised.step != self._step:
            self.close()
            self._step = noised.step
        idle, drawn, noise, everyone = self._declared(noised.step)[noised.name][:, noised.rows]
        sigma = self._plan.noise_multipliers[noised.step, noised.rows] * noise
        unit = noised.scale if noised.clip_norm is None else noised.scale * noised.clip_norm
        clean, seen = (rows.div(unit.unsqueeze(1)).double().cpu().numpy() for rows in (before, after))
        self._chance[noised.rows] = np.where(everyone, 1.0, self._rates[noised.rows])
        idle = np.where(everyone, drawn, idle)
        value = seen[:, 0]
        left = sigma
        whole = sigma
        independent = len(seen)
        if noised.clip_norm is not None and self._signs.anchor.any():
            own = self._normalizer[noised.rows] / noised.clip_norm.double().cpu().numpy()
            value = value - self._signs.anchor[noised.rows] * own
        if self._plan.pairs is not None:
            units = self._plan.pairs.weights[noised.peers] * unit.double().cpu().numpy()
            conserved = clean * units[:, None], seen * units[:, None], sigma * np.abs(units)
            rest, left, whole = self._uncovered(*conserved, noised)
            value = rest[:, 0] / units
            independent = 1
            self.left.append(rest[:1, NOISE_ALONE:] / left[0])
            left = left / np.abs(units)
            whole = whole / np.abs(units)
        variance = np.maximum(left, LEAST) ** 2
        moves = np.array([value * idle, idle**2, value * drawn, drawn**2]) / variance
        for total, move in zip(self._sums, moves, strict=True):
            np.add.at(total, noised.rows, move)
        self._check(clean, (seen - clean)[:, NOISE_ALONE:], whole, drawn, noised, independent)

    def _uncovered(
        self, before: np.ndarray, after: np.ndarray, own: np.ndarray, noised: NoisedSum
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what worst colluders leave of each row, less what the other rows' examples add, and noises.

        The observer of a row has the secrets of its colluders and weighs the sums of the honest peers H by the row of
        Σ_H^{-1}, which leaves the least noise (see `mechanism.cancelling`).

        Args:
            before, after: the sums without noise and with it, [r, d].
            own: standard deviation of each row's own noise, [r]; all three in what the network conserves.

        Returns:
            [r, d], with a row's own examples in it; the standard deviations of its noise, and of all of the row's, [r].
        """
        assert isinstance(self._mechanism, CancellingNoise)
        pairs = self._mechanism.plan
        count = len(own)
        weights = pairs.weights[noised.peers]
        place = np.full(len(pairs.weights), -1)
        place[noised.peers] = np.arange(count)
        shared = pairs.pair_std(noised.step, noised.peers, own / weights, noised.name)
        rows = place[pairs.edges]
        here = np.flatnonzero((rows >= 0).all(axis=1) & (shared > 0))
        key = np.round(np.concatenate([own, shared]) / own.max(), 9).tobytes() + noised.peers.tobytes()
        if key not in self._views:
            squares = np.zeros((count, count))
            squares[rows[here, 0], rows[here, 1]] = squares[rows[here, 1], rows[here, 0]] = (
                shared[here] ** 2 / own.max() ** 2
            )
            own_squares = (own / own.max()) ** 2
            views = [worst_view(row, own_squares, squares, pairs.colluding) for row in range(count)]
            self._views[key] = views, np.sqrt(own_squares + squares.sum(axis=1))
        views, whole = self._views[key]
        left = np.empty(after.shape)
        noise = np.empty(count)
        for row, (honest, combined, variance) in enumerate(views):
            drawn = torch.zeros(after.shape, dtype=torch.float64)
            colluding = here[~np.isin(rows[here], honest).all(axis=1)]
            self._mechanism.add_pairs_(drawn, noised, colluding, rows, shared)
            others = np.where(np.arange(count)[:, None] == row, 0.0, before)
            rest = after - weights[:, None] * drawn.numpy() - others
            left[row], noise[row] = combined @ rest[honest], math.sqrt(variance) * own.max()
        return left, noise, whole * own.max()

    def _declared(self, step: int) -> dict[str, np.ndarray]:
        """Return idle, drawn, noise and whether all examples enter it, of each published sum of a step, [4, m]."""
        declared = self._sums_of(step)
        if declared not in self._facts:
            facts: dict[str, np.ndarray] = {}
            for number, sums in enumerate(declared):
                for part in sums or ():
                    numbers = (part.idle, part.drawn, part.noise, part.over == "all")
                    facts.setdefault(part.name, np.zeros((4, len(self._drawings))))[:, number] = numbers
            self._facts[declared] = {name: numbers[:, self._drawing_of] for name, numbers in facts.items()}
        return self._facts[declared]

    def _sums_of(self, step: int) -> tuple[Declaration, ...]:
        """Return what a step publishes by each way of drawing examples; the plan knows what cancels costs."""
        noised = INDEPENDENT if self._plan.pairs is not None else self._mechanism
        return tuple(noised.released(self._algorithm.released(step, drawing)) for drawing in self._drawings)

    def _pay(self) -> None:
        """Count the cost of the step under way to the rows that took it; an epoch of `shuffle` costs once."""
        for declared, drawing in zip(self._sums_of(self._step), self._drawings, strict=True):
            release = joint_release(declared, drawing)
            for row in np.flatnonzero(self._active).tolist():
                if release is None or self._drawings[self._drawing_of[row]] != drawing:
                    continue
                if drawing.sampling == "shuffle":
                    epoch = self._step // epoch_steps(drawing.size, release.batch_size)
                    if epoch in self._epochs[row]:
                        continue
                    self._epochs[row].add(epoch)
                own = 1.0 if self._plan.pairs is None else float(self._plan.pairs.own[self._step, row])
                noise = float(self._plan.noise_multipliers[self._step, row]) / own * release.noise_multiplier
                self.cost[row][replace(release, noise_multiplier=noise)] += 1

    def _check(
        self,
        clean: np.ndarray,
        noise: np.ndarray,
        sigma: np.ndarray,
        drawn: np.ndarray,
        noised: NoisedSum,
        independent: int,
    ) -> None:
        """Note what is not as planned: how far the canary moved the sum, and whether a draw of noise was seen before.

        A sum that is made of earlier releases too, whose noise it holds before its own, moves by more than the canary.
        """
        where = f"step {noised.step}: sum {noised.name!r} of peer"
        fresh = (np.abs(clean[:, NOISE_ALONE:]) <= SLACK).all(1)
        for row in np.flatnonzero(fresh & (np.abs(clean[:, 0]) > drawn * (1 + SLACK)))[:1].tolist():
            moved = f"{abs(clean[row, 0]):.4g} clip norms by one example, declared {drawn[row]:.4g}"
            text = f"{where} {noised.peers[row]} is moved {moved}"
            self.defects.setdefault("clipping", text)
        self._active[noised.rows] = True
        if len(self.noise) < NOISE_KEPT:
            numbers = noise / np.maximum(sigma, LEAST)[:, None]
            self.noise.append(numbers[:independent])
            for row, draw in enumerate(np.round(numbers, 6)):
                peer = f"peer {noised.peers[row]}, step {noised.step}, {noised.name!r}"
                other = self._draws.setdefault(draw.tobytes(), peer)
                if other is not peer and draw.any():
                    self.defects.setdefault("noise reused", f"two releases have the same noise: {other}; {peer}")

    def close(self) -> None:
        """Finish the step under way."""
        if self._step < 0:
            return
        idle = self._sums[:2]
        drawn = self._sums[2:]
        signs = self._signs.now
        if self._signs.memory == "table" and idle[1].any():
            self._remembered(idle, drawn)
        else:
            self.scores += log_ratio(signs * idle[0] - idle[1] / 2, signs * drawn[0] - drawn[1] / 2, self._chance)
        if self._counts_cost:
            self._pay()
        self._sums[:] = 0
        self._active[:] = False
        self._step = -1

    @property
    def likely(self) -> np.ndarray:
        """Return the sign that a table most likely holds of each row's canary, before anything is seen, float64 [m]."""
        return np.where(self._belief > 0, 1.0, -1.0)

    def _remembered(self, idle: np.ndarray, drawn: np.ndarray) -> None:
        """Add a step with a table to the scores: `_held` is log Σ of the ratios of all that ends in -1, and in +1.

            not drawn: moved by idle t, t the sign in the table
            drawn: by drawn s where t = -s, by idle s where t = s

        Args:
            idle, drawn: the sums of value times move, and of the squares of moves, over the variance, [2, m].
        """
        sign = self._signs.now
        rows = np.arange(len(self.scores))
        with np.errstate(divide="ignore"):
            leave = np.log1p(-self._chance)
            draw = np.log(self._chance)
        opposite = self._held[(sign < 0).astype(int), rows]
        same = self._held[(sign > 0).astype(int), rows]
        stays = same + sign * idle[0] - idle[1] / 2
        flips = opposite + sign * drawn[0] - drawn[1] / 2
        seen = self._active
        held = {-1: leave + opposite - sign * idle[0] - idle[1] / 2, 1: np.logaddexp(stays, draw + flips)}
        for times, values in held.items():
            place = (times * sign > 0).astype(int)
            self._held[place[seen], rows[seen]] = values[seen]
        self.scores[seen] = np.logaddexp(*self._held)[seen]
        self._belief[seen] += (self._chance * (sign - self._belief))[seen]


def log_ratio(idle: np.ndarray, drawn: np.ndarray, chance: np.ndarray | float) -> np.ndarray:
    """Return log((1 - q) e^idle + q e^drawn), elementwise."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-np.asarray(chance)) + idle, np.log(chance) + drawn))


View = tuple[np.ndarray, np.ndarray, float]


def worst_view(row: int, own: np.ndarray, shared: np.ndarray, colluding: int) -> View:
    """Return the honest rows that leave one of them the least noise, how they are combined, and its variance.

    Args:
        own, shared: variances of own noise [m] and of each pair's [m, m].
        colluding: how many rows' draws are known; of more than MOST_SETS sets of them the first are tried.
    """
    best: View | None = None
    others = np.delete(np.arange(len(own)), row)
    for colluders in islice(combinations(others.tolist(), min(colluding, len(others))), MOST_SETS):
        honest = np.setdiff1d(np.arange(len(own)), colluders)
        part = shared[np.ix_(honest, honest)]
        inverse = np.linalg.inv(np.diag(own[honest] + part.sum(axis=1)) - part)[honest.tolist().index(row)]
        variance = 1 / float(inverse[honest == row][0])
        if best is None or variance < best[2]:
            best = honest, inverse * variance, variance
    assert best is not None
    return best


class Observed(NoiseMechanism):
    """The noise of a mechanism, before an observer's eyes."""

    def __init__(self, inner: NoiseMechanism, observer: Observer) -> None:
        self._inner = inner
        self._observer = observer
        self.state = inner.state  # type: ignore[misc]

    def add_(self, out: Tensor, std: Tensor, noised: NoisedSum) -> None:
        """See NoiseMechanism."""
        before = out.clone()
        self._inner.add_(out, std, noised)
        self._observer.see(before, out, noised)


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
        signs: of their gradients.
    """

    experiment: Experiment
    signs: Signs


def with_canaries(experiment: Experiment) -> Canaries:
    """Return a scenario with canaries.

    Raises:
        ScenarioError: see `audited_plan`.
    """
    scenario = experiment.scenario
    audited_plan(experiment)
    module = nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(module.weight)
    initial = flatten(module).to(experiment.device, torch.float64)
    signs = Signs(experiment.algorithm, len(experiment.own.peers))
    loss = Loss("steep", lambda outputs, _: STEEP * outputs.sum(-1), signs.derivative, single=True)
    memory = scenario.compute.memory_mib << 20
    kernel = build_kernel(module.to(initial), loss, (FEATURES,), memory_bytes=memory)
    test = replace(
        experiment.public,
        x=torch.zeros(2, FEATURES),
        y=torch.zeros(2, dtype=torch.int64),
        n_classes=2,
        n_tokens=None,
        validation=None,
    )
    public = test if experiment.public.validation is None else replace(test, validation=test)
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
    """Return the peers' examples, the first of each its canary; where it is not present its gradient is zero."""
    ends = np.cumsum(sizes)
    parts = tuple(np.arange(end - size, end) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True))
    x = torch.zeros(int(ends[-1]), FEATURES)
    x[:, 1] = 1
    firsts = torch.from_numpy(ends - sizes)
    x[firsts] = 0
    y = torch.zeros(len(x), dtype=torch.int64)
    if present is not None:
        rows = torch.from_numpy(np.flatnonzero(present))
        x[firsts[rows], 0] = LONG
        y[firsts[rows]] = rows + 1
    return Examples(x, y, parts)


def run_once(canaries: Canaries, seed: int, number: int, ledger_dir: Path | None = None) -> tuple[np.ndarray, Observer]:
    """Run a scenario with canaries once, each there by a fair coin.

    Args:
        canaries: from `with_canaries`.
        seed, number: of the audit and of the run in it: together they key coins, batches and noise, which no other run
            uses.
        ledger_dir: where the run's ledger lies; None keeps none.

    Returns:
        Which peers' canaries were there, bool [m], and who saw what all peers released.
    """
    experiment = canaries.experiment
    signs = canaries.signs
    own = experiment.own
    keys = {peer: digest(32, "audit", seed, number, peer) for peer in own.peers.tolist()}
    present = keyed_generator(seed, "audit coins", number).random(len(own.peers)) < 0.5
    examples = examples_with(own.examples.sizes, present)
    own = replace(own, examples=examples, keys=keys, sampler=own.sampler.like(keys=keys))
    cohort = replace(experiment, own=own).cohort(ledger_dir)
    signs.begin()
    observer = Observer(experiment, cohort.mechanism, signs, counts_cost=ledger_dir is not None)
    cohort.apart, cohort.mechanism = True, Observed(cohort.mechanism, observer)
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(experiment.scenario.rounds):
        signs.set_round(engine.state, observer.likely)
        engine.round()
        observer.close()
    if cohort.ledger is not None:
        cohort.ledger.close()
    return present, observer
