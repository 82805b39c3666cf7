"""Audit a user's own private training loop in a single run: include each canary by a coin, then guess the coins.

It works for loops under `private()` or `fit_privately()`, in a script or in the train function of a Flower app:

    with auditing(canaries=1000) as audit:
        train()                                    # calls private() or fit_privately()
    print(audit.result)                            # a lower bound on ε, to compare with the ledger's

The first examples of each dataset are the canaries. One whose coin says "out" is left out of every batch, so it adds
nothing to a sum.

To guess a coin, the audit needs the gradient that the canary has or would have had. Only the loop can compute it, with
its own model, criterion and collate function. So all canaries, in or out, are appended to every batch once more; the
loop shows their gradients to the audit and does not add them to the sum.

`LoopAudit` is the observer that each loop asks for a watch on itself (`admit`); `WatchedLoop` is that watch, one for
each ledger. Both implement protocols of `training_loop.loop_budget`, which say what is called when.
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
    """The watch on the loop of one ledger: scores each canary, step by step; see `LoopWatch`.

    Attributes:
        behind: m, the number of canaries. They are the dataset's examples 0 to m - 1, and all of them stand behind each
            batch.
        inside: which canaries are in, bool [m].
        scores: the sum of each canary's coefficients over the steps, float64 [m]; higher means more likely in.
        budget: the loop's budget, from its most recent pass.
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
        """Remove the canaries that are out from a batch, and append all canaries; see LoopWatch."""
        is_canary = batch < self.behind
        is_out = is_canary.copy()
        is_out[is_canary] = ~self.inside[batch[is_canary]]
        return np.concatenate([batch[~is_out], np.arange(self.behind)])

    def show(self, gradients: Tensor) -> None:
        """Keep the canaries' gradients until the step is released; see LoopWatch."""
        self._gradients = gradients

    def released(self, total: Tensor, noised: Tensor, noise: float) -> None:
        """Check the noise of a step and update the scores; see LoopWatch."""
        self._steps += 1
        drawn_noise = (noised - total).double().cpu().numpy()
        self._noise.see(drawn_noise / noise, f"step {self._steps} of {self.budget.path.name}")

        if self._gradients is not None:
            rate = self.budget.release.sampling_rate
            self.scores += coefficients(self._gradients, noised, noise, rate).double().cpu().numpy()

        # A step may show no gradients, and must not be scored with those of an earlier one.
        self._gradients = None


class LoopAudit:
    """The observer of all loops inside `auditing`.

    Attributes:
        loops: the watched loops by the absolute path of their ledger, in the order in which they began.
        refusal: why a loop was refused; None if none was.
    """

    def __init__(self, canaries: int, seed: int, confidence: float) -> None:
        self._canaries = canaries
        self._seed = seed
        self._confidence = confidence
        self._noise = NoiseCheck()
        self.refusal: ScenarioError | None = None
        self.loops: dict[Path, WatchedLoop] = {}

    def coins(self, number: int) -> np.ndarray:
        """Toss the coins of a ledger: return which of its canaries are in, bool [m].

        Args:
            number: the number of ledgers before this one, so that no two get the same coins.
        """
        return keyed_generator(self._seed, "audit coins of a loop", number).random(self._canaries) < 0.5

    def admit(self, budget: PrivacyBudget) -> WatchedLoop:
        """Return the watch on a loop; see LoopObserver.

        Raises:
            ScenarioError: its ledger had entries before the audit, or its dataset has fewer examples than canaries.
        """
        size = budget.release.dataset_size
        path = budget.path.absolute()

        # A later pass of a loop that is watched already: by now its ledger has entries.
        if path in self.loops:
            self.loops[path].budget = budget
            return self.loops[path]

        # Keep the refusal: the code around the loop may swallow the error, and `result` would then silently cover only
        # the other loops.
        if budget.entries():
            self.refusal = ScenarioError(
                f"ledger={path} has entries from real training, and the audit would add its own: give a new file, and "
                "delete it afterwards",
                code="audit.real-ledger",
            )
        elif not GUESSED <= self._canaries <= size:
            self.refusal = ScenarioError(
                f"canaries={self._canaries} must be from {GUESSED} to {size}, the size of the dataset",
                code="audit.trials",
            )
        if self.refusal is not None:
            raise self.refusal

        self.loops[path] = WatchedLoop(budget, self.coins(len(self.loops)), self._noise)
        return self.loops[path]

    @property
    def result(self) -> OneRun:
        """Guess the coins; return the lower bound on ε that this proves, with the largest ε of the loops' ledgers.

        Raises:
            ScenarioError: a loop was refused, even if the code around it swallowed the error.
            RunError: no step was taken.
        """
        if self.refusal is not None:
            raise self.refusal

        loops = list(self.loops.values())
        if not any(loop.scores.any() for loop in loops):
            raise RunError(
                "private() or fit_privately() took no step inside auditing(): call it and train inside the `with`, "
                "in the same thread",
                code="audit.no-step",
            )

        spent = max(loop.budget.charged(loop.budget.entries()) for loop in loops)
        delta = max(loop.budget.delta for loop in loops)
        scores = np.concatenate([loop.scores for loop in loops])
        inside = np.concatenate([loop.inside for loop in loops])
        outcome = guessed(scores, inside, spent, delta, self._confidence)
        return replace(outcome, defects=self._noise.result())


@contextmanager
def auditing(canaries: int, *, seed: int = 0, confidence: float = 0.95) -> Iterator[LoopAudit]:
    """Audit all private training loops inside the `with` block and in this thread; read `result` afterwards.

    Args:
        canaries: how many of each dataset's first examples to include by coin. Unusual examples, with random features
            or wrong targets, are the easiest to detect and so give the strongest audit.
        seed: the seed of the coins.
        confidence: the least probability with which the result is a lower bound.

    Raises:
        ScenarioError: raised by `private()` or `fit_privately()` inside the block if its ledger has entries already, or
            if its dataset has too few examples.

    Privacy: the ledgers are charged as usual, and the trained models are releases. Delete both.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Algorithm 1.
    """
    audit = LoopAudit(canaries, seed, confidence)
    with LOOPS.open_to(audit):
        yield audit
