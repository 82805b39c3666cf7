"""The ledger of a run whose plan is known: each peer's charges, within its budget, in blocks of steps.

An entry names the run and the steps it covers. A run's name is a hash of everything that determines its numbers
(scenario, seed, data, generator, device and versions), so taking those steps again gives the same releases bit for bit
and costs nothing more. Anything else over the same data adds up; a run that draws fresh noise has a new name.

The ledger belongs to the data source, before subsets and partition: another part of it, another order or number of
peers, or a changed pixel is charged to it too. Each example is charged what any peer was charged in a run (`runs_in`).

Privacy: an entry may cover steps ahead. After a crash that is never resumed, at most those are counted without having
been run; no step is run without having been counted.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.accountant.accounting import Alternatives, epsilon_of_runs, last_that_fits
from flower_privdec.privacy.ledger.ledger import (
    Charge,
    Entry,
    Head,
    Ledger,
    RunName,
    charged_by_peer,
    charged_until,
    read_entries,
    runs_in,
)
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical

WRITE_FRACTION = 0.005  # of the wall time, the target for writing adaptive blocks
FIRST_BLOCK = 16  # an adaptive block covers at least this fraction (one in FIRST_BLOCK) of the plan's steps


@dataclass(frozen=True)
class Account:
    """One peer's plan for a run, and its budget for the data over all runs.

    Attributes:
        peer: global id.
        spends: the cost of its active steps, in order of steps, none overlapping.
        budget: ε, or None for no limit (everything is still recorded).
        delta: δ of the budget.
    """

    peer: int
    spends: tuple[Spend, ...]
    budget: float | None
    delta: float

    def releases(self, start: int, stop: int) -> tuple[Release, ...]:
        """Return the releases of steps [start, stop), equal mechanisms together."""
        parts = (spend.between(start, stop) for spend in self.spends)
        return canonical(part.release for part in parts if part is not None)


class Spending:
    """The cost of some peers' accounts beside the charges of all other runs over the same data.

    ε grows with every release. Where a whole plan fits its budget beside the recorded charges, all of it is allowed;
    elsewhere the longest prefix that fits.

    Attributes:
        accounts: of the peers hosted here.
        start: the step from which this run continues.
        steps: the number of steps in its plan.
        limits: int64 [m], the first step that each account's peer may not take.
    """

    def __init__(
        self,
        past: Sequence[Alternatives],
        accounts: Sequence[Account],
        charged: Mapping[int, int] | None = None,
        start: int = 0,
    ) -> None:
        """Compute the limits.

        Args:
            past: the cost of other runs over the data.
            accounts: of the peers hosted here.
            charged: the step up to which each peer was charged for this run, whatever the budget is now.
            start: the step from which this run continues.
        """
        self.start = start
        self._past, self.accounts = tuple(past), tuple(accounts)
        self.steps = max((account.spends[-1].to_step for account in accounts if account.spends), default=0)
        self._epsilons: dict[tuple[object, ...], float] = {}
        limit_of: dict[tuple[object, ...], int] = {}
        limits = []
        for account in accounts:
            covered = max(start, (charged or {}).get(account.peer, 0))
            key = (id(account.spends), account.budget, account.delta, covered)
            if key not in limit_of:
                limit_of[key] = self._limit(account, min(covered, self.steps))
            limits.append(limit_of[key])
        self.limits = np.array(limits, dtype=np.int64)

    def _limit(self, account: Account, covered: int) -> int:
        def fits(stop: int) -> bool:
            return account.budget is None or self._epsilon(account, stop) <= account.budget

        if covered == self.steps or fits(self.steps):
            return self.steps
        return last_that_fits(fits, covered, self.steps)

    def _epsilon(self, account: Account, stop: int) -> float:
        """Return ε after `stop` steps of this run, over all runs."""
        key = (id(account.spends), stop, account.delta)
        if key not in self._epsilons:
            own = account.releases(self.start, stop)
            runs: list[Alternatives] = [*self._past, (own,)] if own else list(self._past)
            self._epsilons[key] = epsilon_of_runs(runs, account.delta)
        return self._epsilons[key]

    def epsilons(self, steps: int) -> np.ndarray:
        """Return the ε of each peer after `steps` steps of this run, over all runs in the ledger, [m]."""
        pairs = zip(self.accounts, self.limits.tolist(), strict=True)
        return np.array([self._epsilon(account, min(steps, limit)) for account, limit in pairs])


class CohortLedger:
    """The ledger of the peers that one process hosts, for one run whose plan is known; a context manager.

    A step costs a comparison, and a write only where a new block of steps begins.

    Attributes:
        spending: the cost of the run beside the others in the ledger.
        charged: the step before which everything is charged, or was taken before this run began.
    """

    def __init__(
        self, ledger: Ledger, run: RunName, accounts: Sequence[Account], block: int | None, fresh: bool, start: int
    ) -> None:
        """Take over an open ledger; see `open`."""
        self._ledger, self._run, self._block, self._fresh = ledger, run, block, fresh
        self.charged = max(charged_until(ledger.entries, run.id), start)
        _check_same_plan(ledger, run, {account.peer: account.spends for account in accounts})
        past = [cost for other, cost in runs_in(ledger.entries).items() if other != run.id]
        self.spending = Spending(past, accounts, charged_by_peer(ledger.entries, run.id), start)
        self._steps, self._limits = self.spending.steps, self.spending.limits
        self._allowed = _AllowedSteps([account.spends for account in accounts], self._limits, self._steps)
        self._last_write: tuple[int, float, float] | None = None  # its step, its end, its duration in seconds

    @classmethod
    def open(
        cls,
        directory: Path | str,
        source: str,
        run: RunName,
        accounts: Sequence[Account],
        *,
        block: int | None = None,
        fresh: bool = False,
        start: int = 0,
    ) -> Self:
        """Open the ledger of a data source for some peers' accounts.

        Args:
            block: steps that an entry covers (1: none ahead), or None to let it grow until writing costs under 1 % of
                the wall time (for simulations, where a crashed run can be resumed exactly).
            fresh: whether the run draws fresh noise, so that every step it takes is charged.
            start: the first step that it may take.

        Raises:
            BudgetError: the ledger is in use, fails verification, or has this run with another plan.
        """
        ledger = Ledger(directory, source)
        try:
            return cls(ledger, run, accounts, block, fresh, start)
        except BaseException:
            ledger.close()
            raise

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]: in their plan, and within their budget."""
        return self._allowed.at(step)

    def charge(self, step: int, rows: np.ndarray) -> None:
        """Ensure that a step of some peers is charged, on disk, before it is taken.

        Args:
            step: the step.
            rows: int64, the peers' positions among the accounts.

        Raises:
            BudgetError: a peer may not take the step, or the disk fails; then no step may be taken.
        """
        if not self._allowed.at(step)[rows].all():
            message = f"{self._ledger.path}: step {step} is not within the plan and the budget of every peer"
            raise BudgetError(message, code="ledger.not-allowed")
        if step < self.charged:
            return
        if self._fresh:
            self.charged = step  # earlier steps belong to another run
        started = time.perf_counter()
        stop = min(step + self._block_length(step, started), self._steps)
        self._ledger.charge(self._run, self.charged, stop, self._charges(self.charged, stop))
        self.charged, ended = stop, time.perf_counter()
        self._last_write = (step, ended, ended - started)

    def _charges(self, start: int, stop: int) -> Iterable[Charge]:
        """Yield the charge to each group of equal peers for the steps [start, stop)."""
        groups: dict[tuple[int, int], list[Account]] = {}
        for account, limit in zip(self.spending.accounts, self._limits.tolist(), strict=True):
            groups.setdefault((id(account.spends), min(stop, limit)), []).append(account)
        for (_, end), accounts in groups.items():
            due = (spend.between(start, end) for spend in accounts[0].spends)
            parts = [part for part in due if part and part.from_step >= start]  # an epoch under way is charged already
            if parts:
                yield Charge.of([account.peer for account in accounts], parts)

    def _block_length(self, step: int, now: float) -> int:
        if self._block is not None:
            return self._block
        least = max(1, self._steps // FIRST_BLOCK)
        if self._last_write is None:
            return least
        written, ended, duration = self._last_write
        seconds_per_step = (now - ended) / max(1, step - written)
        return max(least, math.ceil(min(duration / WRITE_FRACTION / max(seconds_per_step, 1e-9), self._steps)))

    @property
    def head(self) -> Head:
        """Return the ledger's number of lines and last hash: what a checkpoint names."""
        return self._ledger.head

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds everything that a checkpoint saw; raises BudgetError."""
        self._ledger.check_head(head)

    def close(self) -> None:
        """Release the lock."""
        self._ledger.close()

    def leave(self) -> None:
        """Close the file in a process forked from its holder, which keeps the lock."""
        self._ledger.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spending_of(directory: Path | str, source: str, run: RunName, accounts: Sequence[Account]) -> Spending:
    """Return the cost of a run beside a ledger's other runs, without locking or changing it.

    Raises:
        BudgetError: the ledger cannot be read or fails verification.
    """
    entries: list[Entry] = read_entries(directory, source)
    past = [cost for other, cost in runs_in(entries).items() if other != run.id]
    return Spending(past, accounts, charged_by_peer(entries, run.id))


class _AllowedSteps:
    """Which peers may take each step, computed for a stretch of steps at a time."""

    STRETCH = 256

    def __init__(self, plans: Sequence[tuple[Spend, ...]], limits: np.ndarray, steps: int) -> None:
        distinct = {id(plan): plan for plan in plans}
        numbers = {key: number for number, key in enumerate(distinct)}
        self._plan_of = np.array([numbers[id(plan)] for plan in plans], dtype=np.int64)
        self._planned = np.zeros((max(steps, 1), len(numbers)), dtype=bool)
        for number, plan in enumerate(distinct.values()):
            for spend in plan:
                self._planned[spend.from_step : spend.to_step, number] = True
        self._limits, self._start, self._stretch = limits, 0, np.zeros((0, len(plans)), dtype=bool)

    def at(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]; none after the plan's end."""
        if not 0 <= step - self._start < len(self._stretch):
            steps = np.arange(step, step + self.STRETCH)
            planned = self._planned[np.minimum(steps, len(self._planned) - 1)][:, self._plan_of]
            inside = (steps[:, None] < self._limits) & (steps[:, None] < len(self._planned))
            self._start, self._stretch = step, planned & inside
        return np.asarray(self._stretch[step - self._start])


def _check_same_plan(ledger: Ledger, run: RunName, plans: Mapping[int, Sequence[Spend]]) -> None:
    """Refuse to continue a run whose charged steps use another mechanism in this plan."""
    starts = {peer: [spend.from_step for spend in plan] for peer, plan in plans.items()}
    for entry in ledger.entries:
        for charge in entry.charges if entry.run.id == run.id else ():
            for peer in charge.peers:
                if peer in plans and not _same(charge, plans[peer], starts[peer]):
                    raise BudgetError(
                        f"{ledger.path}: steps {entry.from_step} to {entry.to_step} of this run were charged with "
                        "another mechanism than its plan has; continue with the scenario that they were charged for",
                        code="ledger.other-plan",
                    )


def _same(charge: Charge, plan: Sequence[Spend], starts: Sequence[int]) -> bool:
    for steps, release in charge.parts:
        for a, b in steps:
            at = bisect_right(starts, a) - 1
            if at < 0 or b > plan[at].to_step or plan[at].release.mechanism != release.mechanism:
                return False
    return True
