"""What noise that is correlated over steps costs, from what was drawn and what was added.

What a step added is solved for what was drawn for it and before it, with what pairs drew: n = L z, whatever the
mechanism says of its coefficients. So L^-1 times what a peer released is G' + z, and an example that is drawn in step t
moves it by column t of L^-1. See `privacy.mechanism.correlation` for why draws of one example, `bands` steps apart,
then compose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tools.battery.measured import Measured


@dataclass(frozen=True)
class Whitened:
    """The steps of a peer whose noise is correlated.

    Attributes:
        steps: their numbers, ascending.
        own: what multiplies each step's own normals, [T].
        moves: how far an example that is drawn in a step moves all that is released, over its noise, [T].
        alone: how far it would if only that step counted, [T].
        beyond: the largest part of a column of L^-1 that lies `bands` steps or more below its diagonal.
        missed: the largest part of a step's noise that no normals explain.
        wandered: how many examples were drawn in steps of another group than theirs.
        inverse: L^-1, [T, T].
        units: how far an example moves the sum of each step, [T].
        without_examples: steps in which the peer only added noise.
    """

    steps: np.ndarray
    own: np.ndarray
    moves: np.ndarray
    alone: np.ndarray
    beyond: float
    missed: float
    wandered: int
    inverse: np.ndarray
    units: np.ndarray
    without_examples: frozenset[int]

    def against(self, left: np.ndarray) -> np.ndarray:
        """Return `moves` over what is left of the normals of each step, [T]."""
        return np.asarray(np.linalg.norm(self.inverse / left[:, None], axis=0) * self.units)


def bands_of(measured: Measured) -> int:
    """Return over how many steps a run's noise is correlated; 1 if it is not."""
    plan = measured.experiment.own.protection
    if plan is None or plan.correlation is None:
        return 1
    return plan.correlation.bands


def whitened(measured: Measured, peer: int) -> Whitened:
    """Return the steps of a peer, see the module."""
    bands = bands_of(measured)
    drawn = {draw[0]: values for draw, values in measured.draws.normals.items() if draw[1] == peer}
    steps: list[int] = []
    lines: list[dict[int, float]] = []
    units: list[float] = []
    missed = 0.0
    wandered = 0
    without_examples: set[int] = set()

    for record in measured.steps:
        for row in np.flatnonzero(record.peers == peer).tolist():
            (name,) = record.public
            noise = (record.after[name][row] - record.before[name][row] - record.raw[name][row]).double()
            before = [step for step in sorted(drawn) if step <= record.step]
            normals = torch.stack([drawn[step] for step in before], 1)
            factors = torch.linalg.lstsq(normals, noise[:, None]).solution[:, 0]
            rest = float((noise - normals @ factors).norm() / noise.norm())

            missed = max(missed, rest)
            wandered += sum(position % bands != record.step % bands for position in record.positions[row])
            steps.append(record.step)
            lines.append(dict(zip(before, factors.tolist(), strict=True)))
            units.append(float(record.unit[row]))
            if measured.is_spent(record, peer, np.array([row])):
                without_examples.add(record.step)

    numbers = np.asarray(steps, dtype=np.int64)
    factors = np.array([[line.get(step, 0.0) for step in steps] for line in lines]).reshape(len(steps), len(steps))
    inverse = np.linalg.inv(factors)
    is_beyond = numbers[:, None] - numbers >= bands
    lengths = np.linalg.norm(inverse, axis=0)
    own = np.diag(factors)
    return Whitened(
        steps=numbers,
        own=own,
        moves=lengths * np.asarray(units),
        alone=np.asarray(units) / own,
        beyond=float((np.abs(inverse) * is_beyond / lengths).max(initial=0.0)),
        missed=missed,
        wandered=wandered,
        inverse=inverse,
        units=np.asarray(units),
        without_examples=frozenset(without_examples),
    )
