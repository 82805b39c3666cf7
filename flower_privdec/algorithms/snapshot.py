"""Variance reduction from a snapshot of the model (SVRG) instead of a table."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.core.cohort import Cohort, PrivateStep
from flower_privdec.core.exchange import State
from flower_privdec.privacy.mechanism.declared import Declaration, Drawing, ReleasedSum

if TYPE_CHECKING:
    from torch import Tensor


CHUNK = 1024  # examples of a peer at a time in a full gradient


def initial(x: Tensor) -> dict[str, Tensor]:
    """Return the rows a snapshot needs: the model it was taken at, its noised gradient, and whether there is one."""
    return {"snapshot": x.clone(), "anchor": torch.zeros_like(x), "anchored": x.new_zeros(len(x))}


def floats(n_peers: int, d: int) -> int:
    """Return how many numbers the rows take: a model, its step, and whether there is one."""
    return n_peers * (2 * d + 1)


def released(step: int, every: int, drawing: Drawing) -> Declaration:
    """Declare SVRG's two kinds of step, g(z) - g(s) + μ with a full gradient μ every m steps.

    In a snapshot step all J examples are summed, with weight b / J each. In the others an example that is drawn
    enters with g_z(z) - g_z(s), of norm at most 2 C, and μ is already released. μ's noise stays in the next m steps,
    so it is made to weigh as much in their sum as their own: 1 / sqrt(m) of theirs.
    """
    if step % every == 0:
        return (ReleasedSum(over="all", drawn=drawing.batch / drawing.size, noise=1 / math.sqrt(every)),)
    return (ReleasedSum(drawn=2.0),)


def full_gradient(cohort: Cohort, step: PrivateStep) -> None:
    """Add scale b (1/J) Σ_j clip(∇f(z; j)): the gradient of all local examples."""
    sizes = cohort.data.sampler.partition_sizes[step.rows]
    scale = step.scale * cohort.tensor(cohort.data.sampler.normalizer[step.rows] / sizes)
    for start in range(0, int(sizes.max()), CHUNK):
        batch = cohort.data.examples(step.rows, start, min(start + CHUNK, int(sizes.max())))
        cohort.kernel.add_clipped_(step.out, step.params, batch, step.clip_norm, scale, step.divisor)


def corrected_gradient(state: State, cohort: Cohort, step: PrivateStep) -> None:
    """Add scale Σ_b [clip(∇f(z; b)) - clip(∇f(snapshot; b))] and -γ times the anchor, the noised full gradient."""
    rows = cohort.places(step.rows)
    cohort.kernel.add_clipped_(step.out, step.params, step.batch, step.clip_norm, step.scale, step.divisor)
    back = -step.scale * state.rows["anchored"][rows]
    cohort.kernel.add_clipped_(step.out, state.rows["snapshot"][rows], step.batch, step.clip_norm, back)
    step.out.addcmul_(-_rate(cohort, step.round_index, step.peers), state.rows["anchor"][rows])


def _rate(cohort: Cohort, round_index: int, peers: np.ndarray) -> Tensor:
    return cohort.tensor(cohort.learning_rate.at(round_index)[peers]).unsqueeze(1)


def descend(cohort: Cohort, state: State, every: int) -> None:
    """Take a step of SVRG at z = x / w: a snapshot every so many rounds, a corrected gradient between them.

        every m rounds: s ← z, μ ← (1/J) Σ_j clip(∇f(s; j)) + noise, x ← x - γ μ
        otherwise:      x ← x - γ [(1/b) Σ_{j in S} (clip(∇f(z; j)) - clip(∇f(s; j))) + μ + noise]

    Source: Johnson and Zhang 2013, with clipping and noise; what it releases is declared by `released`.
    """
    x = state.rows["x"]
    w = state.rows["w"]
    k = state.round_index
    if k % every:
        cohort.add_step_(x, x, k, divisor=w, estimate=partial(corrected_gradient, state))
        return

    # Who sees the step -γ μ knows μ, so keeping μ as the anchor releases nothing more.
    rows = np.flatnonzero(cohort.active(k))
    active = cohort.places(rows)
    step = torch.zeros_like(x)
    cohort.add_step_(step, x, k, divisor=w, estimate=full_gradient)

    state.rows["snapshot"][active] = x[active] / w[active].unsqueeze(1)
    state.rows["anchor"][active] = step[active] / -_rate(cohort, k, cohort.peers[rows])
    state.rows["anchored"][active] = 1.0
    x.add_(step)
