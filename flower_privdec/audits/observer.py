"""An observer of every published sum of a run with canaries, who knows the plan and the declarations.

A step's sums at one row are normal around 0 without the canary. With it, each is shifted by what is declared: as far as
an example that is drawn moves it, with chance q, and else as far as an idle one does. A row's score is the log of the
likelihood ratio of the two, added over steps. Its σ, q and shifts are the plan's and the declaration's, whatever the
code under test did: if the code releases more, the score tells the two datasets apart better than ε allows.

An algorithm with a table remembers a gradient of each example, so that what a step shows of the canary depends on
whether it was drawn before. `Remembered` follows both signs that the table may hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from flower_privdec.audits.canaries import FEATURES, NOISE_ALONE, Canaries, Signs, audited_plan, examples_with
from flower_privdec.audits.colluders import Colluders
from flower_privdec.engine.engine import Engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.drawings import drawings_of
from flower_privdec.privacy.mechanism.correlation import Correlation
from flower_privdec.privacy.mechanism.declared import Declaration, joint_release
from flower_privdec.privacy.mechanism.events import Release, epoch_steps
from flower_privdec.privacy.noise import INDEPENDENT, NoisedSum, NoiseMechanism
from flower_privdec.privacy.noise.kinds.correlated_noise import CorrelatedNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.rows.keys import digest, keyed_generator

NOISE_KEPT = 10_000  # calls of the mechanism whose noise is looked at
SLACK = 1e-6  # of a move, for rounding
LEAST = 1e-150  # a noise multiplier of 0, to divide by


def log_ratio(idle: np.ndarray, drawn: np.ndarray, chance: np.ndarray | float) -> np.ndarray:
    """Return log((1 - q) e^idle + q e^drawn), elementwise."""
    with np.errstate(divide="ignore"):
        log_idle = np.log1p(-np.asarray(chance))
        log_drawn = np.log(chance)
    return np.asarray(np.logaddexp(log_idle + idle, log_drawn + drawn))


class Shift:
    """The evidence of one step that its sums were shifted by known moves, of each row.

    A normal number `value` of variance v is e^(value move / v - move² / 2v) times as likely with the move as without.
    """

    def __init__(self, rows: int) -> None:
        self._aligned = np.zeros(rows)  # Σ value move / v
        self._energy = np.zeros(rows)  # Σ move² / v

    def add(self, rows: np.ndarray, value: np.ndarray, move: np.ndarray, variance: np.ndarray) -> None:
        """Add a sum of some rows, which may have several, one for each receiver."""
        np.add.at(self._aligned, rows, value * move / variance)
        np.add.at(self._energy, rows, move**2 / variance)

    def log_ratio(self, sign: np.ndarray) -> np.ndarray:
        """Return the log likelihood ratio of all moves, times a sign, to none, [m]."""
        return np.asarray(sign * self._aligned - self._energy / 2)

    @property
    def is_seen(self) -> bool:
        """Whether any sum was moved."""
        return bool(self._energy.any())


@dataclass(frozen=True)
class Step:
    """What has been seen of the current step.

    Attributes:
        number: the step.
        idle, drawn: the evidence that an example was, or was not, in the batch.
        chance: q, with which a drawn example's move is there, [m].
        active: which rows published something, bool [m].
    """

    number: int
    idle: Shift
    drawn: Shift
    chance: np.ndarray
    active: np.ndarray

    @classmethod
    def begin(cls, number: int, rows: int) -> Step:
        """Return a step of which nothing was seen."""
        return cls(number, Shift(rows), Shift(rows), np.ones(rows), np.zeros(rows, dtype=bool))


class Whitening:
    """Takes the correlation of noise over steps off again: C y, of released sums y in units of their noise's z.

    See `privacy.mechanism.correlation`: the row of step t + j of C y is moved by c_j times an example drawn in step t.

    Args:
        correlation: how steps are correlated.
        rows: m.
    """

    def __init__(self, correlation: Correlation, rows: int) -> None:
        self.correlation = correlation
        self._past = np.zeros((correlation.bands - 1, rows, 2, FEATURES))  # the last one first
        self._last = np.full(rows, -1)  # the last step that was seen of each row

    def whitened(self, step: int, rows: np.ndarray, clean: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Return C times the sums without noise and C times the noise, [r, 2, FEATURES]."""
        # A peer that was idle began without memory.
        has_gap = self._last[rows] != step - 1
        self._past[:, rows[has_gap]] = 0.0
        self._last[rows] = step

        now = np.stack([clean, noise], axis=1)
        coefficients = np.asarray(self.correlation.coefficients[1:])
        found = now + np.tensordot(coefficients, self._past[:, rows], axes=1)
        self._past[1:, rows] = self._past[:-1, rows]
        self._past[:1, rows] = now
        return np.asarray(found)


class Remembered:
    """Which sign a table holds of each row's canary: the likelihoods of both, and the likelier one beforehand."""

    def __init__(self, rows: int) -> None:
        self._negative = np.zeros(rows)  # log Σ of the ratios of all histories after which the table holds -1
        self._positive = np.full(rows, -np.inf)  # likewise +1
        self._belief = -np.ones(rows)  # the mean of the sign by the chances of being drawn, before anything is seen

    @property
    def likely(self) -> np.ndarray:
        """The sign that the table most likely holds of each row's canary, before anything is seen, float64 [m]."""
        return np.where(self._belief > 0, 1.0, -1.0)

    def score_after(self, step: Step, sign: np.ndarray) -> np.ndarray:
        """Add a step to both likelihoods, and return the score of the rows that took it.

            not drawn: moved by idle t, t the sign in the table
            drawn: by drawn s if t = -s, by idle s if t = s; the table then holds s

        Args:
            sign: s, of each row's gradient at the model of now, float64 [m].
        """
        seen = step.active
        with np.errstate(divide="ignore"):
            log_not_drawn = np.log1p(-step.chance)
            log_drawn = np.log(step.chance)

        is_positive = sign > 0
        held_same = np.where(is_positive, self._positive, self._negative)
        held_opposite = np.where(is_positive, self._negative, self._positive)

        same = np.logaddexp(
            held_same + step.idle.log_ratio(sign),  # drawn or not, t = s moves the sum alike
            log_drawn + held_opposite + step.drawn.log_ratio(sign),
        )
        opposite = log_not_drawn + held_opposite + step.idle.log_ratio(-sign)

        self._positive[seen] = np.where(is_positive, same, opposite)[seen]
        self._negative[seen] = np.where(is_positive, opposite, same)[seen]
        self._belief[seen] += (step.chance * (sign - self._belief))[seen]
        return np.asarray(np.logaddexp(self._negative, self._positive)[seen])


class Observer:
    """See the module.

    Attributes:
        scores: float64 [m].
        defects: what is not as planned and declared, a line each; the first of each kind.
        noise: what the coordinates without examples held, over the planned σ, independent numbers; of `NOISE_KEPT` sums
            at most.
        left: if noise cancels, likewise what colluders leave of one row, over what is planned.
        cost: for each row, the releases that it made, as they were declared and planned; empty unless `counts_cost`.
    """

    def __init__(
        self, experiment: Experiment, mechanism: NoiseMechanism, signs: Signs, *, counts_cost: bool = False
    ) -> None:
        own = experiment.own
        count = len(own.peers)
        self._signs = signs
        self._plan = audited_plan(experiment)
        self._algorithm = experiment.algorithm
        self._mechanism = mechanism
        self._counts_cost = counts_cost

        # Peers that draw examples in the same way share what is declared of a step.
        drawings = drawings_of(experiment, own.peers, own.sampler)
        self._drawings = list(dict.fromkeys(drawings))
        self._drawing_of = np.array([self._drawings.index(drawing) for drawing in drawings])
        self._facts: dict[tuple[Declaration, ...], dict[str, np.ndarray]] = {}
        self._rates = np.array([drawing.rate for drawing in drawings])
        self._normalizer = np.asarray(own.sampler.normalizer, dtype=np.float64)

        self._colluders: Colluders | None = None
        if self._plan.pairs is not None:
            of_one_step = mechanism
            if isinstance(mechanism, CorrelatedNoise):
                of_one_step = mechanism.single_step
            assert isinstance(of_one_step, CancellingNoise)
            self._colluders = Colluders(of_one_step)

        # Steps that are paid together are one step here: a canary is drawn in the first of them, if at all.
        self._together = 1
        self._whitening: Whitening | None = None
        if self._plan.correlation is not None:
            self._together = self._plan.correlation.bands
            self._whitening = Whitening(self._plan.correlation, count)

        self._step: Step | None = None
        self._remembered = Remembered(count)
        self._draws: dict[bytes, str] = {}  # which sum had a draw of noise
        self._epochs: list[set[int]] = [set() for _ in own.peers]  # of each row, those that it has paid for

        self.scores = np.zeros(count)
        self.defects: dict[str, str] = {}
        self.noise: list[np.ndarray] = []
        self.left: list[np.ndarray] = []
        self.cost: list[Counter[Release]] = [Counter() for _ in own.peers]

    @property
    def likely(self) -> np.ndarray:
        """The sign that a table most likely holds of each row's canary, before anything is seen, float64 [m]."""
        return self._remembered.likely

    def see(self, before: Tensor, after: Tensor, noised: NoisedSum) -> None:
        """Count one published sum of some rows.

        Args:
            before: the sum without its noise, [r, d]; of a row's own only `after` is used for its score.
            after: the sum with it, [r, d].
        """
        first = noised.step - noised.step % self._together
        if self._step is None or self._step.number != first:
            self.close()
            self._step = Step.begin(first, len(self.scores))
        step = self._step

        idle, drawn, noise, everyone = self._declared(noised.step)[noised.name][:, noised.rows]
        sigma = self._plan.noise_multipliers[noised.step, noised.rows] * noise
        step.chance[noised.rows] = np.where(everyone, 1.0, self._rates[noised.rows])
        idle = np.where(everyone, drawn, idle)  # all examples enter the sum: none is ever idle

        # What algorithms declare is in clip norms, so divide the sums by theirs.
        if noised.clip_norm is None:
            unit = noised.scale
        else:
            unit = noised.scale * noised.clip_norm
        clean = before.div(unit.unsqueeze(1)).double().cpu().numpy()
        seen = after.div(unit.unsqueeze(1)).double().cpu().numpy()

        moved = drawn
        noise_seen = seen - clean
        shown = clean
        if self._whitening is not None:
            # An example of the first group is drawn in the first step of a block, and moves the others' sums, too.
            correlation = self._whitening.correlation
            moved = drawn / correlation.norm
            drawn = moved * correlation.coefficients[noised.step - first]
            whitened = self._whitening.whitened(noised.step, noised.rows, clean, noise_seen)
            noise_seen = whitened[:, 1]
            seen = whitened.sum(axis=1)
            shown = whitened[:, 0]

        value = seen[:, 0]
        left = sigma
        whole = sigma
        independent = len(seen)
        if noised.clip_norm is not None and self._signs.anchor.any():
            # Every step adds what was released at the snapshot, which the observer knows.
            mean_to_sum = self._normalizer[noised.rows] / noised.clip_norm.double().cpu().numpy()
            value = value - self._signs.anchor[noised.rows] * mean_to_sum

        if self._colluders is not None:
            assert self._plan.pairs is not None
            conserved = self._plan.pairs.weights[noised.peers] * unit.double().cpu().numpy()
            uncovered = self._colluders.uncover(
                shown * conserved[:, None], seen * conserved[:, None], sigma * np.abs(conserved), noised
            )
            value = uncovered.sums[:, 0] / conserved
            left = uncovered.left / np.abs(conserved)
            whole = uncovered.whole / np.abs(conserved)
            # Rows share noise, so only one of them gives independent numbers.
            independent = 1
            self.left.append(uncovered.sums[:1, NOISE_ALONE:] / uncovered.left[0])

        variance = np.maximum(left, LEAST) ** 2
        step.idle.add(noised.rows, value, idle, variance)
        step.drawn.add(noised.rows, value, drawn, variance)
        step.active[noised.rows] = True

        self._check_moves(clean, moved, noised)
        self._check_noise(noise_seen[:, NOISE_ALONE:], whole, noised, independent)

    def end_round(self) -> None:
        """Finish the step under way, unless steps of later rounds belong to it."""
        if self._together == 1:
            self.close()

    def close(self) -> None:
        """Finish the step under way."""
        step = self._step
        if step is None:
            return

        sign = self._signs.now
        if self._signs.memory == "table" and step.idle.is_seen:
            self.scores[step.active] = self._remembered.score_after(step, sign)
        else:
            self.scores += log_ratio(step.idle.log_ratio(sign), step.drawn.log_ratio(sign), step.chance)
        if self._counts_cost:
            self._pay(step)
        self._step = None

    # --- what is planned and declared ---

    def _declared(self, step: int) -> dict[str, np.ndarray]:
        """Return idle, drawn, noise and whether all examples enter it, of each published sum of a step, [4, m]."""
        declared = self._sums_of(step)
        if declared not in self._facts:
            facts: dict[str, np.ndarray] = {}
            for number, sums in enumerate(declared):
                for part in sums or ():
                    of_drawings = facts.setdefault(part.name, np.zeros((4, len(self._drawings))))
                    of_drawings[:, number] = part.idle, part.drawn, part.noise, part.over == "all"
            self._facts[declared] = {name: numbers[:, self._drawing_of] for name, numbers in facts.items()}
        return self._facts[declared]

    def _sums_of(self, step: int) -> tuple[Declaration, ...]:
        """Return the sums that a step publishes, for each way of drawing examples."""
        # What noise that cancels costs is in the plan, not in the declaration.
        noised = self._mechanism
        if isinstance(noised, CancellingNoise):
            noised = INDEPENDENT
        return tuple(noised.released(self._algorithm.released(step, drawing)) for drawing in self._drawings)

    def _pay(self, step: Step) -> None:
        """Count the cost of a step to the rows that took it."""
        for declared, drawing in zip(self._sums_of(step.number), self._drawings, strict=True):
            release = joint_release(declared, drawing)
            if release is None:
                continue

            for row in np.flatnonzero(step.active).tolist():
                if self._drawings[self._drawing_of[row]] != drawing:
                    continue
                if drawing.sampling == "shuffle":  # an epoch costs once
                    epoch = step.number // epoch_steps(drawing.size, release.batch_size)
                    if epoch in self._epochs[row]:
                        continue
                    self._epochs[row].add(epoch)

                own = 1.0
                if self._plan.pairs is not None:
                    own = float(self._plan.pairs.own[step.number, row])
                planned = float(self._plan.noise_multipliers[step.number, row]) / own
                self.cost[row][replace(release, noise_multiplier=planned * release.noise_multiplier)] += 1

    # --- what is not as planned ---

    def _check_moves(self, clean: np.ndarray, drawn: np.ndarray, noised: NoisedSum) -> None:
        """Note a canary that moved a sum, in clip norms, by more than is declared."""
        # A sum that is made of earlier releases too holds their noise already, and moves by more than the canary.
        is_fresh = (np.abs(clean[:, NOISE_ALONE:]) <= SLACK).all(axis=1)
        moves = np.abs(clean[:, 0])
        too_far = np.flatnonzero(is_fresh & (moves > drawn * (1 + SLACK)))
        for row in too_far[:1].tolist():
            moved = f"{moves[row]:.4g} clip norms by one example, declared {drawn[row]:.4g}"
            text = f"step {noised.step}: sum {noised.name!r} of peer {noised.peers[row]} is moved {moved}"
            self.defects.setdefault("clipping", text)

    def _check_noise(self, noise: np.ndarray, sigma: np.ndarray, noised: NoisedSum, independent: int) -> None:
        """Keep noise to measure it later, and note a draw that was seen before.

        Args:
            noise: the noise of the coordinates without examples, [r, FEATURES - NOISE_ALONE].
            sigma: what is planned for it, [r].
            independent: how many rows' noise is independent.
        """
        if len(self.noise) >= NOISE_KEPT:
            return

        numbers = noise / np.maximum(sigma, LEAST)[:, None]
        self.noise.append(numbers[:independent])
        for row, draw in enumerate(np.round(numbers, 6)):
            release = f"peer {noised.peers[row]}, step {noised.step}, {noised.name!r}"
            first = self._draws.setdefault(draw.tobytes(), release)
            if first is not release and draw.any():
                self.defects.setdefault("noise reused", f"two releases have the same noise: {first}; {release}")


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


def run_once(canaries: Canaries, seed: int, number: int, ledger_dir: Path | None = None) -> tuple[np.ndarray, Observer]:
    """Run a scenario with canaries once, each there by a fair coin.

    Args:
        canaries: from `with_canaries`.
        seed, number: of the audit and of the run in it: together they key coins, batches and noise, which no other run
            uses.
        ledger_dir: the folder of the run's ledger; None keeps none.

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
    cohort.apart = True
    cohort.mechanism = Observed(cohort.mechanism, observer)

    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(experiment.scenario.rounds):
        signs.set_round(engine.state, observer.likely)
        engine.round()
        observer.end_round()
    observer.close()
    if cohort.ledger is not None:
        cohort.ledger.close()
    return present, observer
