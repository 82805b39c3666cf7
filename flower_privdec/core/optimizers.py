"""Local optimizers: they turn a peer's noised gradient into its step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flower_privdec.common.deferred import torch
from flower_privdec.scenario.algorithm_sections import OptimizerSection

if TYPE_CHECKING:
    from torch import Tensor


Rows: TypeAlias = "Tensor | slice"
PREFIX = "optimizer."  # begins the names of an optimizer's rows in a state
MOMENTS = {"sgd": (), "momentum": ("first",), "adam": ("first", "second")}


@dataclass(frozen=True)
class LocalOptimizer:
    """SGD, momentum or Adam on noised gradients, for each peer by itself.

    In a peer's step t = 1, 2, ... with gradient g:

        sgd        u = g
        momentum   v ← β v + g,  u = v
        adam       m ← β₁ m + (1 - β₁) g,  v ← β₂ v + (1 - β₂) g²,  u = m / (1 - β₁ᵗ) / (sqrt(v / (1 - β₂ᵗ)) + eps)

    and the step is -γ u. The moments stay with their peer. They are rows of the state, so checkpoints have them.

    Privacy: post-processing of releases, so it costs no ε.

    Source: Polyak 1964; Kingma and Ba 2015, Algorithm 1.
    """

    section: OptimizerSection

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the rows [m, d] that it keeps."""
        return MOMENTS[self.section.name]

    def initial(self, peers: int, like: Tensor) -> dict[str, Tensor]:
        """Return its rows before round 0: moments of zero for every peer and, for Adam, the number of steps taken.

        Args:
            like: parameters [d].
        """
        rows = {PREFIX + name: torch.zeros(peers, *like.shape).to(like) for name in self.moments}
        if self.section.name == "adam":
            rows[PREFIX + "steps"] = torch.zeros(peers).to(like)
        return rows

    def add_step_(self, out: Tensor, gradient: Tensor, rate: Tensor, state: dict[str, Tensor], rows: Rows) -> None:
        """Add -γ u to some rows, in place, and renew their moments.

        Args:
            out: these rows, [r, d].
            gradient: their noised gradients, [r, d].
            rate: γ of each, [r].
            state: the rows of the whole cohort, in which the moments are.
            rows: the places of these rows in it, int64 [r], or a slice for all.
        """
        section = self.section
        direction = gradient  # u

        if section.name == "momentum":
            direction = state[PREFIX + "first"][rows] * section.momentum + gradient
            state[PREFIX + "first"][rows] = direction

        elif section.name == "adam":
            first = torch.lerp(state[PREFIX + "first"][rows], gradient, 1 - section.beta1)
            second = state[PREFIX + "second"][rows] * section.beta2
            second = torch.addcmul(second, gradient, gradient, value=1 - section.beta2)
            # A peer counts its own steps: it takes none in rounds in which it is not active.
            steps = state[PREFIX + "steps"][rows] + 1

            state[PREFIX + "first"][rows] = first
            state[PREFIX + "second"][rows] = second
            state[PREFIX + "steps"][rows] = steps

            # Both moments begin at zero; dividing by 1 - βᵗ takes that bias out.
            first_bias = (1 - section.beta1**steps)[:, None]
            second_bias = (1 - section.beta2**steps)[:, None]
            deviation = (second / second_bias).sqrt_().add_(section.eps)
            direction = first / first_bias / deviation

        out.sub_(rate[:, None] * direction)
