"""The door at which an observer sees the updates that peers of a Flower app release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from flower_privdec.common.door import Door
from flower_privdec.privacy.ledger.ledger import Ledger


class UpdateObserver(Protocol):
    """An audit, which releases peers' updates in their place and sees them."""

    def admit(self, ledger: Ledger, delta: float) -> None:
        """Look at a peer's ledger, whose ε is at δ, before an update is charged to it; raise to refuse the step."""

    def released(
        self, ledger: Ledger, update: np.ndarray, clip_norm: float, noise: float, release: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """Return what leaves of a peer's update.

        Args:
            ledger: which was charged for it.
            update: finite, not clipped, [d].
            clip_norm, noise: C, and σ over C, as planned.
            release: `release(clip_norm, noise, update)` clips and noises.
        """


UPDATES: Door[UpdateObserver] = Door("peers' updates")
