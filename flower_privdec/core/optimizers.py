"""Local optimizers: what a peer makes of its noised gradient before it takes a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flower_privdec.scenario.algorithm_sections import OptimizerSection

Rows = Tensor | slice
PREFIX = "optimizer."  # of the names of its rows in a state
MOMENTS = {"sgd": (), "momentum": ("first",), "adam": ("first", "second")}


@dataclass(frozen=True)
class LocalOptimizer:
    """SGD, momentum or Adam on noised gradients, each peer for itself. For a peer's step t = 1, 2, ... with gradient g:

        sgd        u = g
        momentum   v ← β v + g,  u = v
        adam       m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²,  u = m / (1 - β₁ᵗ) / (sqrt(v / (1 - β₂ᵗ)) + eps)

    and the step is -γ u. Its rows stay with their peer and are part of the state, so of checkpoints.

    Privacy: post-processing of releases, so it costs no ε.

    Source: Polyak 1964; Kingma and Ba 2015, Algorithm 1.
    """

    section: OptimizerSection

    @property
    def moments(self) -> tuple[str, ...]:
        """Return which rows [m, d] it keeps."""
        return MOMENTS[self.section.name]

    def initial(self, peers: int, like: Tensor) -> dict[str, Tensor]:
        """Return its rows before round 0: zeros for every peer, and how many steps it took.

        Args:
            like: parameters [d].
        """
        rows = {PREFIX + name: torch.zeros(peers, *like.shape).to(like) for name in self.moments}
        return rows | ({PREFIX + "steps": torch.zeros(peers).to(like)} if len(rows) == len(MOMENTS["adam"]) else {})

    def add_step_(self, out: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor], rows: Rows) -> None:
        """Add -γ u to some rows, in place, and renew their moments.

        Args:
            out, gradient: of these rows, [r, d].
            rate: γ of each, [r].
            state: the rows of the whole cohort.
            rows: where they stand in it, int64 [r], or all.
        """
        section = self.section
        direction = gradient
        if section.name == "momentum":
            direction = state[PREFIX + "first"][rows] * section.momentum + gradient
            state[PREFIX + "first"][rows] = direction
        elif section.name == "adam":
            first, second = (state[PREFIX + name][rows] for name in self.moments)
            first = torch.lerp(first, gradient, 1 - section.beta1)
            second = torch.addcmul(second * section.beta2, gradient, gradient, value=1 - section.beta2)
            steps = state[PREFIX + "steps"][rows] + 1
            for name, values in (("first", first), ("second", second), ("steps", steps)):
                state[PREFIX + name][rows] = values
            corrected = (second / (1 - section.beta2**steps)[:, None]).sqrt_().add_(section.eps)
            direction = first / (1 - section.beta1**steps)[:, None] / corrected
        out.sub_(rate[:, None] * direction)
