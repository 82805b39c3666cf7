"""A block of a cohort: some peers that follow one another, their part of everything, and their state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.errors import BudgetError
from flower_privdec.privacy.ledger.cohort_ledger import CohortLedger


class PaidLedger(CohortLedger):
    """What a block sees of the run's ledger: who may step, and that each step was paid before it begins.

    The process that keeps the ledger pays for a round before any block begins with it.
    """

    def __init__(self, whole: CohortLedger, start: int, stop: int, paid: Tensor) -> None:
        """Look at some rows of a ledger.

        Args:
            paid: int64 [1], the step before which all is paid; every process sees it change.
        """
        self._whole, self._start, self._stop, self._until = whole, start, stop, paid

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]."""
        return self._whole.allowed(step)[self._start : self._stop]

    def charge(self, step: int, rows: np.ndarray) -> None:
        """Refuse a step that was not paid for.

        Raises:
            BudgetError: it was not, or is not within a peer's plan and budget.
        """
        if step >= int(self._until) or not self.allowed(step)[rows].all():
            raise BudgetError(f"step {step} was not paid for before it began: mend the algorithm that takes it")


@dataclass
class Block:
    """Some peers of a cohort.

    Attributes:
        start, stop: their rows in the whole.
        cohort: their part of it.
        state: theirs; its rows are views of the whole's where a step has not put others in their place.
    """

    start: int
    stop: int
    cohort: Cohort
    state: State

    @classmethod
    def of(cls, cohort: Cohort, start: int, stop: int, round_index: int, paid: Tensor) -> Block:
        """Return the block of some rows, without a state's rows."""
        part = replace(
            cohort,
            peers=cohort.peers[start:stop],
            data=cohort.data.part(start, stop),
            protection=None if cohort.protection is None else cohort.protection.part(start, stop),
            ledger=None if cohort.ledger is None else PaidLedger(cohort.ledger, start, stop, paid),
        )
        return cls(start, stop, part, State(part.peers, round_index))

    def see(self, name: str, whole: Tensor) -> None:
        """Make some rows of the state those of the whole's that are this block's."""
        self.state.rows[name] = whole[self.start : self.stop]

    def misplaced(self, whole: dict[str, Tensor], names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        """Return where rows belong that a step has put elsewhere, and what they are, and see them there."""
        found = []
        for name in names:
            home, now = whole[name][self.start : self.stop], self.state.rows[name]
            if now.data_ptr() != home.data_ptr() or now.stride() != home.stride():
                found.append((home, now))
                self.state.rows[name] = home
        return found


def bring_home(blocks: Iterable[Block], whole: dict[str, Tensor], names: Iterable[str]) -> None:
    """Put rows that steps have put elsewhere back to where everybody finds them."""
    moves = [move for block in blocks for move in block.misplaced(whole, list(names))]
    kept = [(home, now.clone() if len(moves) > 1 else now) for home, now in moves]  # two may have changed places
    for home, now in kept:
        home.copy_(now)
