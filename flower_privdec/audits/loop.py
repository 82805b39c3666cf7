"""An audit of a training loop of one's own under `private()`, in one run of it: examples in or out by coins.

The first examples of the dataset are the canaries. One that is out is in no batch, which adds nothing to a sum, as a
gradient of zero does. All of them stand behind each batch that the loop is given, so that the loop itself computes,
with its own model, criterion and collate function, the gradient that each would have had; these are not added to the
sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from flower_privdec.audits.one_run import GUESSED, OneRun, coefficients, guessed
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.gradients.protocol import upper
from flower_privdec.rows.keys import keyed_generator
from flower_privdec.training_loop.clipped_sum import ClippedSum, batched
from flower_privdec.training_loop.private_loop import Drawn, NoisedSteps, PrivacyBudget


@dataclass
class LoopAudit:
    """What an observer of a loop's steps computes of each canary.

    Attributes:
        inside: which canaries are in, bool [m].
        scores: float64 [m].
        confidence: of the result.
    """

    inside: np.ndarray
    scores: np.ndarray
    confidence: float
    _fresh: set[Path] = field(default_factory=set)
    _budget: PrivacyBudget | None = None
    _gradients: Tensor | None = None

    @property
    def result(self) -> OneRun:
        """Return what guessing the coins shows of ε, beside the ε of the loop's ledger.

        Raises:
            RunError: no step was taken.
        """
        budget = self._budget
        if budget is None or not self.scores.any():
            raise RunError(
                "no step of private() was taken inside auditing(): call private() and train inside the `with`",
                code="audit.no-step",
            )
        return guessed(self.scores, self.inside, budget.epsilon(budget.entries()), budget.delta, self.confidence)

    def admit(self, budget: PrivacyBudget) -> None:
        """Refuse a ledger that had lines before the audit, or fewer examples than canaries."""
        size, path = budget.release.dataset_size, budget.path.absolute()
        if path not in self._fresh and budget.entries():
            raise ScenarioError(
                f"ledger={path} has payments of real training, which an audit would add to: give a new file, and "
                "delete it afterwards",
                code="audit.real-ledger",
            )
        if not GUESSED <= len(self.inside) <= size:
            raise ScenarioError(
                f"canaries={len(self.inside)} must be from {GUESSED} to {size}, what the dataset has",
                code="audit.trials",
            )
        self._fresh.add(path)
        self._budget = budget

    def chosen(self, batch: np.ndarray) -> np.ndarray:
        """Return a batch without the canaries that are out, and all of them behind it."""
        count = len(self.inside)
        there = batch[(batch >= count) | self.inside[np.minimum(batch, count - 1)]]
        return np.concatenate([there, np.arange(count)])

    def compare(self, released: Tensor, noise: float) -> None:
        """Add to the scores what a step released, in clip norms, with the standard deviation of its noise."""
        assert self._budget is not None
        if self._gradients is not None:
            rate = self._budget.release.sampling_rate
            self.scores += coefficients(self._gradients, released, noise, rate).double().cpu().numpy()
        self._gradients = None


@contextmanager
def auditing(canaries: int, *, seed: int = 0, confidence: float = 0.95) -> Iterator[LoopAudit]:
    """Audit the `private()` loop that is trained inside, once; its `result` is there afterwards.

    Args:
        canaries: how many of the dataset's first examples are in or out by coins. Unusual ones show most: random
            features, wrong targets.
        seed: of the coins.
        confidence: the chance, at least, with which the result is a lower bound.

    Raises:
        ScenarioError: inside, from `private()`: its ledger has payments, or its dataset has too few examples.

    Privacy: the ledger is charged as ever, and the model is a release. Throw both away.

    Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), Algorithm 1.
    """
    inside = keyed_generator(seed, "audit coins of a loop").random(canaries) < 0.5
    audit = LoopAudit(inside, np.zeros(canaries), confidence)
    of, draw, add, release = PrivacyBudget.of, PrivacyBudget.draw, ClippedSum.__call__, NoisedSteps._release
    clip_norm = [1.0]

    def admitted(*given: Any, **options: Any) -> PrivacyBudget:
        budget = of(*given, **options)
        audit.admit(budget)
        return budget

    def drawn(budget: PrivacyBudget, steps: int, first: int, key: bytes | None) -> list[np.ndarray]:
        return [audit.chosen(batch) for batch in draw(budget, steps, first, key)]

    def added(
        total: ClippedSum, args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Any]
    ) -> tuple[Tensor, int]:
        tensors, rebuild = batched(args, kwargs, targets)
        count = len(tensors[0])
        result, _ = add(total, *rebuild([tensor[: count - canaries] for tensor in tensors]))
        gradients = total.gradients(rebuild, [tensor[count - canaries :] for tensor in tensors])
        clip_norm[0] = total.clip_norm
        audit._gradients = gradients / upper(gradients).clamp_min(total.clip_norm)[:, None]
        return result, count

    def released(steps: NoisedSteps, batch: Drawn) -> None:
        release(steps, batch)
        parts = [parameter.grad.flatten() for parameter in steps._parameters.values() if parameter.grad is not None]
        audit.compare(torch.cat(parts) * steps._divisor / clip_norm[0], steps._std / clip_norm[0])

    with (
        patch.object(PrivacyBudget, "of", admitted),
        patch.object(PrivacyBudget, "draw", drawn),
        patch.object(ClippedSum, "__call__", added),
        patch.object(NoisedSteps, "_release", released),
    ):
        yield audit
