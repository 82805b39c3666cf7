"""An audit of training loops with privacy of examples, in one run of them: examples in or out by coins.

It is for loops of one's own, under `private()` or `fit_privately()`, in a script or in the train function of a Flower
app. The first examples of each dataset are the canaries. One that is out is in no batch, which adds nothing to a sum,
as a gradient of zero does. All of them stand behind each batch that the loop is given, so that the loop itself
computes, with its own model, criterion and collate function, the gradient that each would have had; these are not
added to the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from flower_privdec.audits.noise_check import NoiseCheck
from flower_privdec.audits.one_run import GUESSED, OneRun, coefficients, guessed
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.training_loop.loop_budget import LOOPS, PrivacyBudget


class WatchedLoop:
    """What an observer of one ledger's steps computes of each of its canaries; a `LoopWatch`.

    Attributes:
        inside: which canaries are in, bool [m].
        scores: float64 [m].
        budget: of the loop, as it was given last.
    """

    def __init__(self, budget: PrivacyBudget, inside: np.ndarray, noise: NoiseCheck) -> None:
        self.behind = len(inside)
        self.inside = inside
        self.scores = np.zeros(len(inside))
        self.budget = budget
        self._noise = noise
        self._gradients: Tensor | None = None
        self._steps = 0

    def drawn(self, batch: np.ndarray) -> np.ndarray:
        """See LoopWatch: without the canaries that are out, and all of them behind."""
        is_canary = batch < self.behind
        is_out = is_canary.copy()
        is_out[is_canary] = ~self.inside[batch[is_canary]]
        return np.concatenate([batch[~is_out], np.arange(self.behind)])

    def show(self, gradients: Tensor) -> None:
        """See LoopWatch."""
        self._gradients = gradients

    def released(self, total: Tensor, noised: Tensor, noise: float) -> None:
        """See LoopWatch: add to the scores."""
        self._steps += 1
        drawn = (noised - total).double().cpu().numpy()
        self._noise.see(drawn / noise, f"step {self._steps} of {self.budget.path.name}")
        if self._gradients is not None:
            rate = self.budget.release.sampling_rate
            self.scores += coefficients(self._gradients, noised, noise, rate).double().cpu().numpy()
        self._gradients = None


class LoopAudit:
    """An observer of all loops inside `auditing`.

    Attributes:
        loops: by the path of their ledger.
    """

    def __init__(self, canaries: int, seed: int, confidence: float) -> None:
        self._canaries = canaries
        self._seed = seed
        self._confidence = confidence
        self._noise = NoiseCheck()
        self.refusal: ScenarioError | None = None
        self.loops: dict[Path, WatchedLoop] = {}

    def coins(self, number: int) -> np.ndarray:
        """Return which canaries of a ledger are in, bool [m].

        Args:
            number: how many ledgers came before.
        """
        return keyed_generator(self._seed, "audit coins of a loop", number).random(self._canaries) < 0.5

    def admit(self, budget: PrivacyBudget) -> WatchedLoop:
        """Refuse a ledger that had lines before the audit, or fewer examples than canaries; see LoopObserver."""
        size = budget.release.dataset_size
        path = budget.path.absolute()
        if path in self.loops:
            self.loops[path].budget = budget
            return self.loops[path]

        # A refusal is kept too: the code around the loop may swallow it, and the audit's result would then be of less.
        if budget.entries():
            self.refusal = ScenarioError(
                f"ledger={path} has payments of real training, which an audit would add to: give a new file, and "
                "delete it afterwards",
                code="audit.real-ledger",
            )
        elif not GUESSED <= self._canaries <= size:
            self.refusal = ScenarioError(
                f"canaries={self._canaries} must be from {GUESSED} to {size}, what the dataset has",
                code="audit.trials",
            )
        if self.refusal is not None:
            raise self.refusal

        self.loops[path] = WatchedLoop(budget, self.coins(len(self.loops)), self._noise)
        return self.loops[path]

    @property
    def result(self) -> OneRun:
        """Return what guessing the coins shows of ε, beside the largest ε of the loops' ledgers.

        Raises:
            ScenarioError: a loop was refused, and its error did not come through the code around it.
            RunError: no step was taken.
        """
        if self.refusal is not None:
            raise self.refusal
        loops = list(self.loops.values())
        if not any(loop.scores.any() for loop in loops):
            raise RunError(
                "no step of private() or fit_privately() was taken inside auditing(): call it and train inside the "
                "`with`, in the same thread",
                code="audit.no-step",
            )

        spent = max(loop.budget.epsilon(loop.budget.entries()) for loop in loops)
        delta = max(loop.budget.delta for loop in loops)
        scores = np.concatenate([loop.scores for loop in loops])
        inside = np.concatenate([loop.inside for loop in loops])
        return replace(guessed(scores, inside, spent, delta, self._confidence), defects=self._noise.result())


@contextmanager
def auditing(canaries: int, *, seed: int = 0, confidence: float = 0.95) -> Iterator[LoopAudit]:
    """Audit the loops with privacy of examples that are trained inside, in this thread; the `result` is there then.

    Args:
        canaries: how many of each dataset's first examples are in or out by coins. Unusual ones show most: random
            features, wrong targets.
        seed: of the coins.
        confidence: the chance, at least, with which the result is a lower bound.

    Raises:
        ScenarioError: inside, from `private()` or `fit_privately()`: its ledger has payments, or its dataset has too
            few examples.

    Privacy: the ledgers are charged as ever, and the models are releases. Throw both away.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Algorithm 1.
    """
    audit = LoopAudit(canaries, seed, confidence)
    with LOOPS.open_to(audit):
        yield audit
