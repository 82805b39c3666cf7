"""Throw-away algorithms that gather and reply: scenarios name them as `exchanging:NAME`."""

from __future__ import annotations

import numpy as np
import torch

from flower_privdec.core import Algorithm, Edges, Gather, Reply, State
from flower_privdec.core.cohort import Cohort, StepRequest
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, ReleasedSum, one_sum


def remember(cohort: Cohort, state: State) -> None:
    """Take a step, so that peers differ."""
    cohort.add_step_(state.rows["x"], state.rows["x"], state.round_index)


def answer(cohort: Cohort, state: State) -> None:
    """Make something for each neighbour: how far its model is from one's own."""
    edges = state.edges["x"]
    at = np.searchsorted(state.peers, edges.own)
    state.edges["x"] = Edges(edges.own, edges.other, edges.values - state.rows["x"][at])


def move(cohort: Cohort, state: State) -> None:
    """Move by the mean of what the neighbours said, weighted by their ids."""
    for row, peer in enumerate(state.peers.tolist()):
        said = state.edges["x"].of(peer)
        weights = torch.from_numpy(1.0 + said.other).to(said.values)
        state.rows["x"][row] -= 0.3 * (weights @ said.values) / weights.sum()
    state.edges.clear()


class Courteous(Algorithm):
    """Peers who ask all their neighbours how far they are, and move by what they are told."""

    weights = "doubly-stochastic"
    program = (remember, Gather(("x",)), answer, Reply(("x",)), move)
    released = one_sum


def cross(cohort: Cohort, state: State) -> None:
    """Take a private step at every neighbour's model, for that neighbour alone."""
    heard = state.edges["x"]
    rows = np.searchsorted(state.peers, heard.own)
    steps = torch.zeros_like(heard.values)
    paid = np.flatnonzero(cohort.active(state.round_index)[rows])
    part = steps[paid]
    cohort.descend_rows_(
        StepRequest(
            sums={"gradient": part},
            params=heard.values[paid],
            round_index=state.round_index,
            rows=rows[paid],
            receivers=heard.other[paid].astype(np.int64),
        )
    )
    steps[paid] = part
    state.edges = {"step": Edges(heard.own, heard.other, steps)}


def follow(cohort: Cohort, state: State) -> None:
    """Move by the mean of the steps that one's neighbours took at one's model."""
    for row, peer in enumerate(state.peers.tolist()):
        state.rows["x"][row] += state.edges["step"].of(peer).values.mean(0)
    state.edges.clear()


class CrossGradient(Algorithm):
    """Peers who take each other's gradients; a throw-away."""

    weights = "doubly-stochastic"
    program = (Gather(("x",)), cross, Reply(("step",)), follow)
    untold = 0

    def released(self, step: int, drawing: Drawing) -> Declaration:
        """Declare one sum for each neighbour, but for some."""
        return (ReleasedSum(to="neighbour", receivers=max(0, drawing.neighbours(step) - self.untold)),)
