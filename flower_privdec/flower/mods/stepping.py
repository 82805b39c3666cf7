"""A peer's step: its app trains from z = x / w, and what that moved is protected and added to x."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord

from flower_privdec.errors import BudgetError
from flower_privdec.flower.mods.layout import numpy_arrays
from flower_privdec.flower.mods.peer_state import PeerState
from flower_privdec.flower.mods.update import unsound

log = logging.getLogger("flwr.privdec")

LEAST_WEIGHT = 1e-6  # with less of the mass a peer waits for some before it trains again
APP_SPENT = "its app's own budget allows no more training; it goes on relaying"
Train = Callable[[ArrayRecord], ArrayRecord]
Protect = Callable[[np.ndarray], np.ndarray]


def take_step(state: PeerState, train: Train, protect: Protect | None, round_index: int) -> bool:
    """Let an app train, and add w · protect(u) to x, with u what it moved z by.

    Args:
        state: which has some mass; its x, and the arrays that are not mixed, are put in place.
        train: returns arrays of the state's layout, as `returned_arrays` has them.
        protect: returns u · min(1, C / ‖u‖) + N(0, σ² C² I) of a finite u, float64 [d]; None for no protection.
        round_index: from 1, for the log.

    Returns:
        Whether the app trained; False where its own ledger, as `private` has one, allows no more: the state is as it
        was, and the words of that ledger stay in the app's log.

    Privacy: one Gaussian release of the whole update, which has to be paid for before. Without protection the state
    counts the update in `bare`.
    """
    given = state.layout.record(state.model(), state.kept)
    try:
        returned = train(given)
    except BudgetError:
        return False
    update = _update(state, given, returned, round_index)
    _move(state, update if protect is None else protect(update), protect is None, round_index)
    return True


def _update(state: PeerState, given: ArrayRecord, returned: ArrayRecord, round_index: int) -> np.ndarray:
    """Return what the arrays moved by; zeros, and a word in the log, where that is no number."""
    arrays = numpy_arrays(returned)
    update: np.ndarray
    with np.errstate(invalid="ignore", over="ignore"):
        update = state.layout.vector(arrays) - state.layout.vector(numpy_arrays(given))
    if wrong := unsound(update):
        _count_as_zero(state, wrong, round_index)
        return np.zeros_like(update)
    state.kept = state.layout.kept(arrays)
    return update


def _move(state: PeerState, update: np.ndarray, bare: bool, round_index: int) -> None:
    """Add w times an update to x, unless that would make the model infinite for ever."""
    with np.errstate(over="ignore"):
        after = (state.x.astype(np.float64) + state.w * update).astype(state.x.dtype)
    if wrong := unsound(after):
        _count_as_zero(state, wrong, round_index)
    else:
        state.x = after
        state.bare += bare


def _count_as_zero(state: PeerState, wrong: str, round_index: int) -> None:
    log.warning(
        "peer %s, round %s: %s, so its update counts as zero; lower the learning rate, or look at its data",
        state.peer,
        round_index,
        wrong,
    )
