"""What a peer has spent, its whole data set being the unit: a ledger file of its own, over all runs and restarts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.calibration import noise_multiplier
from flower_privdec.privacy.ledger.ledger_file import LedgerFile, ledger_path
from flower_privdec.privacy.ledger.ledger_format import Payment, RunName, Share, read_chain
from flower_privdec.privacy.mechanism.events import Release, canonical

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
    """A peer's own ledger, read and extended in one go.

    Each round draws its noise afresh, so each payment counts, that of a round begun twice as well.

    Args:
        folder: where the file lies.
        delta: δ at which ε is said.
        budget: the ε that no run may exceed, or ∞.

    Attributes:
        lines: how many payments the file held after the last one.
    """

    def __init__(self, folder: Path, delta: float, budget: float = math.inf) -> None:
        self.folder, self.delta, self.budget = folder, delta, budget
        self.lines = 0

    def spent(self) -> PeerSpent:
        """Return what the file says.

        Raises:
            BudgetError: it cannot be trusted.
        """
        path = ledger_path(self.folder, SOURCE)
        paid = read_chain(path)[1] if path.exists() and path.stat().st_size else []
        return PeerSpent(_releases(paid), self.delta)

    def spent_in(self, file: LedgerFile) -> PeerSpent:
        """Return what the ledger's file says, where it is open."""
        return PeerSpent(_releases(file.payments), self.delta)

    def pay(self, run: str, epoch: int, round_index: int, peer: int, noise: float, known: int = 0) -> PeerSpent | None:
        """Pay for one round's update, on disk, before it is made.

        Args:
            run: the run's name.
            epoch: of the peer in that run.
            round_index: from 1.
            noise: the noise multiplier.
            known: how many payments the peer's state knows of.

        Returns:
            What is spent then; None where the budget does not allow it, and nothing is paid.

        Raises:
            BudgetError: the ledger is in use, cannot be trusted, not be written, or is older than the state.
        """
        with LedgerFile(self.folder, SOURCE) as file:
            if len(file.payments) < known:
                raise BudgetError(
                    f"{file.path} holds {len(file.payments)} payments, and peer {peer} has made {known}: it was "
                    "deleted, or is an old copy; restore it"
                )
            return self.pay_into(file, run, epoch, round_index, peer, noise)

    def pay_into(
        self, file: LedgerFile, run: str, epoch: int, round_index: int, peer: int, noise: float
    ) -> PeerSpent | None:
        """Pay as `pay` does, into the ledger's file where it is open."""
        release = update_release(noise)
        after = PeerSpent(canonical([*_releases(file.payments), release]), self.delta)
        if math.isfinite(self.budget) and not after.epsilon <= self.budget:
            return None
        steps = (round_index - 1, round_index)
        share = Share((peer,), (((steps,), release),))
        file.append(Payment(RunName(f"{run}-{epoch}", run, "system entropy"), *steps, (share,)))
        self.lines = len(file.payments)
        return after


def _releases(paid: Sequence[Payment]) -> tuple[Release, ...]:
    return canonical(chain.from_iterable(share.releases for payment in paid for share in payment.shares))


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
