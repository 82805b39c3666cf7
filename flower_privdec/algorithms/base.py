"""What an algorithm is: a program of steps over rows, with an exchange between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flower_privdec.aligned import aligned, is_aligned
from flower_privdec.mixing import Mixing
from flower_privdec.participation import Participation
from flower_privdec.scenario.algorithms import GradientSection, steps_per_round
from flower_privdec.topology import Topology

if TYPE_CHECKING:
    from flower_privdec.cohort import Cohort
    from flower_privdec.gradients import GradientKernel


@dataclass
class State:
    """Everything a cohort remembers between two steps; complete at every exchange.

    Attributes:
        peers: int64 [m], the global id of each row.
        round_index: the round under way, from 0.
        at: the place in the algorithm's program that comes next.
        rows: named tensors whose first axis is the peer, each [m, ...], the rest of whose shape is the same whoever
            hosts the peers; they are aligned, long rows [m, d] for speed, and all because the bits of a product depend
            on how its operands lie: a state read back has to lie as the first did.
    """

    peers: np.ndarray
    round_index: int = 0
    at: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Align the rows."""
        self.rows = {name: part if is_aligned(part) else aligned(part) for name, part in self.rows.items()}


@dataclass(frozen=True)
class Mix:
    """Exchange: each named row i becomes Σ_j W[i, j] row_j, with the round's mixing matrix W."""

    names: tuple[str, ...]


Step = Callable[["Cohort", State], None]


class Algorithm:
    """A decentralized algorithm, written once over rows.

    Only an exchange crosses rows. The row law holds for every step: step(state)[i] == step(state[i:i+1]).

    Attributes:
        name: what a scenario calls it.
        weights: the mixing weights its theory needs, or None when it exchanges nothing.
        program: steps and exchanges of one round, in order.
        slots: how many [m, d] buffers its state holds (for memory estimates).
        steps_per_round: private steps of an active peer in a round; each is a release.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    weights: ClassVar[Literal["column-stochastic", "doubly-stochastic"] | None]
    program: tuple[Step | Mix, ...]
    slots: ClassVar[int] = 1

    def __init__(self, section: GradientSection) -> None:
        self.section = section
        self.steps_per_round = steps_per_round(section)

    def exchange(
        self, topology: Topology, weights: str, participation: Participation, seed: int
    ) -> tuple[Mixing, Participation]:
        """Return the mixing over a graph and who is active, as the scenario says unless an algorithm differs."""
        return Mixing(topology, weights, participation), participation

    def check_model(self, kernel: GradientKernel) -> None:
        """Refuse a model that the algorithm cannot train (none, unless an algorithm says so).

        Raises:
            ScenarioError: naming what can.
        """

    def initial(self, cohort: Cohort) -> dict[str, Tensor]:
        """Return the rows before round 0: every peer starts at the same parameters."""
        return {"x": cohort.initial.expand(len(cohort.peers), -1).clone()}

    def debiased(self, rows: dict[str, Tensor]) -> Tensor:
        """Return each peer's model, [m, d]."""
        return rows["x"]

    def personal(self, rows: dict[str, Tensor]) -> Tensor | None:
        """Return each peer's personalized model, [m, d], or None where the algorithm has none."""
        return None

    def network_mean(self, rows: dict[str, Tensor]) -> Tensor:
        """Return the mean of the network's models, [d]: Σ_i x_i / Σ_i w_i, which mixing conserves."""
        total = rows["x"].sum(0)
        return total / (rows["w"].sum() if "w" in rows else len(rows["x"]))


def advance(algorithm: Algorithm, cohort: Cohort, state: State) -> Mix | None:
    """Run steps up to the next exchange, or to the end of the round.

    Returns:
        The exchange the caller has to perform (it then adds one to `state.at`), or None when the
        round ended; `state.round_index` then names the next round.
    """
    program = algorithm.program
    while state.at < len(program):
        item = program[state.at]
        if isinstance(item, Mix):
            return item
        item(cohort, state)
        state.at += 1
    state.at = 0
    state.round_index += 1
    return None


def push_weights(cohort: Cohort) -> Tensor:
    """Return the push-sum weights before round 0: one for every peer, [m]."""
    return torch.ones(len(cohort.peers), dtype=cohort.dtype, device=cohort.device)
