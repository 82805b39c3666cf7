"""A peer's step: its app trains from z = x / w, and what that moved is clipped, noised and added to x."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord

from flower_privdec.errors import RunError
from flower_privdec.runtime.routed.layout import numpy_arrays
from flower_privdec.runtime.routed.peer_state import PeerState
from flower_privdec.runtime.routed.update import clipped, noised, unsound

log = logging.getLogger("flwr.privdec")

LEAST_WEIGHT = 1e-6  # with less of the mass a peer waits for some before it trains again
Train = Callable[[ArrayRecord], ArrayRecord]


def take_step(state: PeerState, train: Train, clip_norm: float | None, noise: float, round_index: int) -> None:
    """Let an app train, and add w · (u · min(1, C / ‖u‖) + N(0, σ² C² I)) to x, with u what it moved z by.

    Args:
        state: which has some mass; its x, and the arrays that are not mixed, are put in place.
        clip_norm: C; None for no protection.
        noise: σ, over C.
        round_index: from 1, for the log.

    Raises:
        RunError: the app returned other arrays than it was given.

    Privacy: one Gaussian release of the whole update, which has to be paid for before.
    """
    given = state.layout.record(state.model(), state.kept)
    update = _update(state, given, train(given), clip_norm is not None, round_index)
    if clip_norm is not None:
        update = noised(clipped(update, clip_norm), noise * clip_norm)
    state.x = (state.x.astype(np.float64) + state.w * update).astype(state.x.dtype)


def _update(
    state: PeerState, given: ArrayRecord, returned: ArrayRecord, protected: bool, round_index: int
) -> np.ndarray:
    """Return what the arrays moved by; zeros, and a word in the log, where that is no number.

    Raises:
        RunError: the arrays are not those that were given.
    """
    arrays = numpy_arrays(returned)
    update: np.ndarray
    if difference := state.layout.misfit(arrays):
        raise RunError(f"the train function of peer {state.peer} returned other arrays than it was given: {difference}")
    with np.errstate(invalid="ignore", over="ignore"):
        update = state.layout.vector(arrays) - state.layout.vector(numpy_arrays(given))
        after = (state.x + state.w * update).astype(state.x.dtype)
    wrong = unsound(update) or ("" if protected else unsound(after))
    if wrong:
        log.warning(
            "peer %s, round %s: %s, so its update counts as zero; lower the learning rate, or look at its data",
            state.peer,
            round_index,
            wrong,
        )
        return np.zeros_like(update)
    state.kept = state.layout.kept(arrays)
    return update
