"""What a peer has spent, its whole data set being the unit: a ledger file of its own, over all runs and restarts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import noise_multiplier
from flower_privdec.privacy.ledger.ledger import Charge, Head, Ledger, RunName, read_entries, releases_in
from flower_privdec.privacy.mechanism.events import Release

SOURCE = "peer-updates"  # what the ledger is of; the file is FOLDER/peer-updates.jsonl
UNIT = "one peer with all its data"
ADJACENCY = "its update of every round replaced by zero"
UNPROTECTED = f"epsilon = inf (unit: {UNIT}); what an app's own training protects is not counted here"


def bare_words(updates: int) -> str:
    """Return what is to be said of ε where some updates of a run were made without protection."""
    return f"epsilon = inf (unit: {UNIT}; {updates} update{'s' * (updates > 1)} of this run had no protection)"


def update_release(noise: float, steps: int = 1) -> Release:
    """Return what a round releases: one Gaussian sum that the peer's whole update enters, as its only example."""
    return Release("full", 1.0, 1, 1, noise_multiplier=noise, steps=steps)


@lru_cache(maxsize=64)
def solved_noise(budget: float, delta: float, rounds: int) -> float:
    """Return the least noise multiplier with which so many rounds keep a budget."""
    common = {"sampling": "full", "sampling_rate": 1.0, "dataset_size": 1, "batch_size": 1}
    return noise_multiplier(budget, delta, steps=rounds, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PeerSpent:
    """What a peer has spent by now.

    Attributes:
        releases: all of them, equal ones together.
        delta: δ.
    """

    releases: tuple[Release, ...]
    delta: float

    @property
    def epsilon(self) -> float:
        """Return ε, an upper bound."""
        return epsilon(self.releases, self.delta)

    def __str__(self) -> str:
        charged = " and ".join(
            f"{release.steps} Gaussian update{'s' * (release.steps > 1)} of noise multiplier "
            f"{release.noise_multiplier:.4g}"
            for release in self.releases
        )
        return (
            f"epsilon = {self.epsilon:.4g} at delta = {self.delta:g} (unit: {UNIT}; adjacency: {ADJACENCY}; "
            f"charged: {charged or 'nothing'})"
        )


class PeerLedger:
    """The open ledger of one peer's updates; a context manager.

    Each round draws fresh noise, so each charge counts, that of a round begun twice as well.

    Args:
        folder: of the ledger's file.
        run: the run's name.
        incarnation: of the peer in that run.
        peer: its id.
        delta: δ at which ε is reported.
        budget: the ε that all runs together may not exceed, or ∞.

    Attributes:
        spent: the total over all runs.

    Raises:
        BudgetError: the ledger is in use or fails verification.
    """

    charged = 0  # no entry of this run covers steps ahead

    def __init__(
        self, folder: Path, run: str, incarnation: int, peer: int, delta: float, budget: float = math.inf
    ) -> None:
        self.peer, self.delta, self.budget = peer, delta, budget
        self._run = RunName(f"{run}-{incarnation}", run, "system entropy")
        self._ledger = Ledger(folder, SOURCE)

    @property
    def spent(self) -> PeerSpent:
        """Return the total of all charges."""
        return PeerSpent(releases_in(self._ledger.entries), self.delta)

    @property
    def n_entries(self) -> int:
        """Return how many charges the ledger holds."""
        return len(self._ledger.entries)

    @property
    def head(self) -> Head:
        """Return what a checkpoint names."""
        return self._ledger.head

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds everything that a checkpoint saw; raises BudgetError."""
        self._ledger.check_head(head)

    def check_entries(self, n_entries: int) -> None:
        """Check that the ledger holds at least the charges that the peer's state knows of.

        Raises:
            BudgetError: it was deleted, or is an older copy.
        """
        if self.n_entries < n_entries:
            raise BudgetError(
                f"{self._ledger.path} holds {self.n_entries} charges, and peer {self.peer} has made {n_entries}: it "
                "was deleted, or is an old copy; restore it",
                code="ledger.stale",
            )

    def allows(self, noise: float) -> bool:
        """Return whether the budget allows one more update of a noise multiplier."""
        return self._ledger.fits(Charge((self.peer,), (((), update_release(noise)),)), self.budget, self.delta)

    def charge(self, round_index: int, noise: float) -> bool:
        """Charge one round's update, on disk before it is computed, and return True; False where the budget is spent.

        Args:
            round_index: from 1.
            noise: the noise multiplier.

        Raises:
            BudgetError: the disk fails.
        """
        if not self.allows(noise):
            return False
        steps = (round_index - 1, round_index)
        self._ledger.charge(self._run, *steps, [Charge((self.peer,), (((steps,), update_release(noise)),))])
        return True

    def check_budget(self, noise: float) -> None:
        """Refuse a run of which no update fits the budget.

        Raises:
            BudgetError: with what is spent.
        """
        if not self.allows(noise):
            raise BudgetError(
                f"{self._ledger.path}: epsilon = {self.spent.epsilon:.4g} is spent, and privacy.epsilon="
                f"{self.budget:g} allows this run no update of noise multiplier {noise:.4g}; raise the budget or the "
                "noise",
                code="ledger.budget-spent",
            )

    def close(self) -> None:
        """Release the lock."""
        self._ledger.close()

    def __enter__(self) -> PeerLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spent_so_far(folder: Path, delta: float) -> PeerSpent:
    """Return the total of a peer's ledger without locking it.

    Raises:
        BudgetError: it fails verification.
    """
    return PeerSpent(releases_in(read_entries(folder, SOURCE)), delta)


def check_budget(budget: float, delta: float, noise: float | None, where: str) -> None:
    """Refuse a budget that is none, or that no noise keeps.

    Raises:
        BudgetError: naming it.
    """
    if not budget > 0 or not 0 < delta < 1:
        raise BudgetError(f"epsilon={budget} must be > 0 and delta={delta} in (0, 1); set {where}")
    if math.isfinite(budget) and noise is None:
        raise BudgetError(
            f"epsilon={budget} of {where} needs clip_norm and noise: say PeerMod(clip_norm=..., epsilon=...)"
        )
