"""What was spent, on disk before the steps it pays for: one chained file for each source of data.

A payment names the run and the steps it pays for. A run's name is a hash of all that decides its numbers (scenario,
seed, data, generator, device and versions), so taking those steps again gives the same releases bit for bit and costs
nothing more; anything else over the same data adds up, and whoever draws noise afresh takes a new name with it.

The ledger is the source's, before subsets and dealing: another part of it, another order or number of peers, or a
changed pixel, is paid for here all the same. Each example is charged what any peer paid in a run (`runs_in`).

Privacy: a payment may reserve steps ahead. After a crash that nobody resumes, at most those are counted
without having been run; no step is run without having been counted.
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
from flower_privdec.privacy.accountant.alternatives import Alternatives, epsilon_of_runs
from flower_privdec.privacy.accountant.search import last_that_fits
from flower_privdec.privacy.ledger.ledger_file import LedgerFile, ledger_path, paid_by_peer, paid_until, runs_in
from flower_privdec.privacy.ledger.ledger_format import NOTHING, Head, Payment, RunName, Share, read_chain
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical

WRITING_SHARE = 0.005  # of the wall time that adaptive blocks aim to spend on writing
FIRST_BLOCK = 16  # adaptive blocks hold at least one step in so many of the plan


@dataclass(frozen=True)
class Account:
    """One peer's plan for a run, and its budget for the data over all runs.

    Attributes:
        peer: global id.
        spends: what its active steps cost, in order of steps, none overlapping.
        budget: ε, or None for no limit (everything is still recorded).
        delta: δ of the budget.
    """

    peer: int
    spends: tuple[Spend, ...]
    budget: float | None
    delta: float

    def releases(self, start: int, stop: int) -> tuple[Release, ...]:
        """Return what the steps [start, stop) cost, equal mechanisms together."""
        parts = (spend.between(start, stop) for spend in self.spends)
        return canonical(part.release for part in parts if part is not None)


class Spending:
    """What some peers' accounts come to beside all that other runs over the same data have paid.

    What the budgets allow is settled here: ε grows with every release, so where the whole plan fits beside what is
    recorded all of it is allowed, and elsewhere the longest beginning that fits.

    Attributes:
        accounts: of the peers hosted here.
        start: the step from which this run goes on.
        steps: how many its plan has.
        limits: int64 [m], the first step each account's peer may not take any more.
    """

    def __init__(
        self,
        past: Sequence[Alternatives],
        accounts: Sequence[Account],
        paid: Mapping[int, int] | None = None,
        start: int = 0,
    ) -> None:
        """Settle the limits.

        Args:
            past: what other runs over the data cost.
            accounts: of the peers hosted here.
            paid: up to which step each peer has paid for this run, whatever the budget says now.
            start: the step from which this run goes on.
        """
        self.start = start
        self._past, self.accounts = tuple(past), tuple(accounts)
        self.steps = max((account.spends[-1].to_step for account in accounts if account.spends), default=0)
        self._known: dict[tuple[object, ...], float] = {}
        settled: dict[tuple[object, ...], int] = {}
        limits = []
        for account in accounts:
            done = max(start, (paid or {}).get(account.peer, 0))
            key = (id(account.spends), account.budget, account.delta, done)
            if key not in settled:
                settled[key] = self._settle(account, done)
            limits.append(settled[key])
        self.limits = np.array(limits, dtype=np.int64)

    def _settle(self, account: Account, paid: int) -> int:
        def fits(stop: int) -> bool:
            return account.budget is None or self._epsilon(account, stop) <= account.budget

        paid = min(paid, self.steps)
        if fits(self.steps) or paid == self.steps:
            return self.steps
        return last_that_fits(fits, paid, self.steps)

    def _epsilon(self, account: Account, stop: int) -> float:
        """Return ε after so many steps of this run, over all runs."""
        key = (id(account.spends), stop, account.delta)
        if key not in self._known:
            own = account.releases(self.start, stop)
            runs: list[Alternatives] = [*self._past, (own,)] if own else list(self._past)
            self._known[key] = epsilon_of_runs(runs, account.delta)
        return self._known[key]

    def epsilons(self, steps: int) -> np.ndarray:
        """Return the ε of each peer after so many steps of this run, over all runs in the ledger, [m]."""
        pairs = zip(self.accounts, self.limits.tolist(), strict=True)
        return np.array([self._epsilon(account, min(steps, limit)) for account, limit in pairs])


class CohortLedger:
    """The ledger of the peers one process hosts, for one run whose plan is known; a context manager.

    A step costs a comparison, and a write only where a new block of steps begins.

    Attributes:
        spending: what the run comes to beside the others in the ledger.
    """

    def __init__(
        self, file: LedgerFile, run: RunName, accounts: Sequence[Account], block: int | None, fresh: bool, start: int
    ) -> None:
        """Take over an open file; see `open`."""
        self._file, self._run, self._block, self._fresh = file, run, block, fresh
        self._paid = max(paid_until(file.payments, run.id), start)
        _check_same_plan(file, run, {account.peer: account.spends for account in accounts})
        past = [cost for other, cost in runs_in(file.payments).items() if other != run.id]
        self.spending = Spending(past, accounts, paid_by_peer(file.payments, run.id), start)
        self._steps, self._limits = self.spending.steps, self.spending.limits
        self._allowed = _Allowed([account.spends for account in accounts], self._limits, self._steps)
        self._last_write: tuple[int, float, float] | None = None  # its step, when it ended, how long it took

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
        """Open the ledger of a source of data for some peers' accounts.

        Args:
            block: steps that a payment covers (1: none ahead), or None to let it grow until writing costs
                under 1 % of the wall time (for simulations, where a run that crashed can be resumed exactly).
            fresh: whether the run draws what nobody drew before, so that it pays for every step it takes.
            start: the first step that it may take.

        Raises:
            BudgetError: when the ledger is in use or cannot be trusted, or has this run with another plan.
        """
        file = LedgerFile(directory, source)
        try:
            return cls(file, run, accounts, block, fresh, start)
        except BaseException:
            file.close()
            raise

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]: in their plan, and within their budget."""
        return self._allowed.at(step)

    def pay(self, step: int, rows: np.ndarray) -> None:
        """Make sure that a step of some peers is paid, on disk, before it is taken.

        Args:
            rows: int64, where they stand among the accounts.

        Raises:
            BudgetError: when a peer may not take the step, or the disk fails; then nothing may be taken.
        """
        if not self._allowed.at(step)[rows].all():
            raise BudgetError(f"{self._file.path}: step {step} is not within the plan and the budget of every peer")
        if step < self._paid:
            return
        if self._fresh:
            self._paid = step  # what was before it was another run's
        started = time.perf_counter()
        stop = min(step + self._block_length(step, started), self._steps)
        self._file.append(Payment(self._run, self._paid, stop, tuple(self._shares(self._paid, stop))))
        self._paid, ended = stop, time.perf_counter()
        self._last_write = (step, ended, ended - started)

    def _shares(self, start: int, stop: int) -> Iterable[Share]:
        """Yield what each group of equal peers pays for the steps [start, stop)."""
        groups: dict[tuple[int, int], list[Account]] = {}
        for account, limit in zip(self.spending.accounts, self._limits.tolist(), strict=True):
            groups.setdefault((id(account.spends), min(stop, limit)), []).append(account)
        for (_, end), accounts in groups.items():
            due = (spend.between(start, end) for spend in accounts[0].spends)
            parts = [part for part in due if part and part.from_step >= start]  # an epoch begun is paid already
            if parts:
                yield Share.of([account.peer for account in accounts], parts)

    def _block_length(self, step: int, now: float) -> int:
        if self._block is not None:
            return self._block
        least = max(1, self._steps // FIRST_BLOCK)
        if self._last_write is None:
            return least
        written, ended, took = self._last_write
        a_step = (now - ended) / max(1, step - written)
        return max(least, math.ceil(min(took / WRITING_SHARE / max(a_step, 1e-9), self._steps)))

    @property
    def paid(self) -> int:
        """Return the step before which all is paid, or was taken before this run began."""
        return self._paid

    @property
    def head(self) -> Head:
        """Return the ledger's number of lines and last hash: what a checkpoint names."""
        return self._file.head

    def check_head(self, head: Sequence[int | str] | None) -> None:
        """Check that the ledger still holds all that a checkpoint saw.

        Raises:
            BudgetError: when it is shorter or different.
        """
        length, digest = head or (0, NOTHING)
        self._file.check_head(int(length), str(digest))

    def close(self) -> None:
        """Release the lock."""
        self._file.close()

    def leave(self) -> None:
        """Let go of the file in a process forked from its holder, which keeps the lock."""
        self._file.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def spending_of(directory: Path | str, source: str, run: RunName, accounts: Sequence[Account]) -> Spending:
    """Say what a run would come to beside what a ledger holds, without locking or changing it.

    Raises:
        BudgetError: when the ledger cannot be read or trusted.
    """
    path = ledger_path(directory, source)
    paid = read_chain(path)[1] if path.exists() else []
    past = [cost for other, cost in runs_in(paid).items() if other != run.id]
    return Spending(past, accounts, paid_by_peer(paid, run.id))


class _Allowed:
    """Which peers may take a step in which step, worked out for a stretch of steps at a time."""

    STRETCH = 256

    def __init__(self, plans: Sequence[tuple[Spend, ...]], limits: np.ndarray, steps: int) -> None:
        different = {id(plan): plan for plan in plans}
        numbers = {key: number for number, key in enumerate(different)}
        self._plan_of = np.array([numbers[id(plan)] for plan in plans], dtype=np.int64)
        self._planned = np.zeros((max(steps, 1), len(numbers)), dtype=bool)
        for number, plan in enumerate(different.values()):
            for spend in plan:
                self._planned[spend.from_step : spend.to_step, number] = True
        self._limits, self._start, self._stretch = limits, 0, np.zeros((0, len(plans)), dtype=bool)

    def at(self, step: int) -> np.ndarray:
        """Return who may take a step, bool [m]; nobody after the plan's end."""
        if not 0 <= step - self._start < len(self._stretch):
            steps = np.arange(step, step + self.STRETCH)
            planned = self._planned[np.minimum(steps, len(self._planned) - 1)][:, self._plan_of]
            inside = (steps[:, None] < self._limits) & (steps[:, None] < len(self._planned))
            self._start, self._stretch = step, planned & inside
        return np.asarray(self._stretch[step - self._start])


def _check_same_plan(file: LedgerFile, run: RunName, plans: Mapping[int, Sequence[Spend]]) -> None:
    """Refuse to go on with a run whose paid steps cost something else in this plan."""
    starts = {peer: [spend.from_step for spend in plan] for peer, plan in plans.items()}
    for payment in file.payments:
        for share in payment.shares if payment.run.id == run.id else ():
            for peer in share.peers:
                if peer in plans and not _same(share, plans[peer], starts[peer]):
                    raise BudgetError(
                        f"{file.path}: steps {payment.from_step} to {payment.to_step} of this run were paid with "
                        "another mechanism than its plan has; go on with the scenario they were paid for"
                    )


def _same(share: Share, plan: Sequence[Spend], starts: Sequence[int]) -> bool:
    for steps, release in share.parts:
        for a, b in steps:
            at = bisect_right(starts, a) - 1
            if at < 0 or b > plan[at].to_step or plan[at].release.mechanism != release.mechanism:
                return False
    return True
