"""The ledger of the peers that one process hosts, for one run whose plan is known.

A cohort asks it twice in each step: `allowed(step)`, which peers may take the step, and `charge(step, rows)`, which
returns once the step is charged on disk. Most steps cost a comparison, since an entry covers a block of steps:

- in simulation, blocks grow until writing them takes under 1 % of the wall time. A crash then leaves charges for steps
  that were not taken, but a resumed run takes them exactly as they were charged;
- a deployed peer draws fresh noise and cannot do that, so it charges one step at a time, or what its commit interval
  says. `reserve` hides the disk's latency: it charges the next step in another thread while this one is computed.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import current_thread

import numpy as np

from flower_privdec.common.errors import BudgetError
from flower_privdec.privacy.ledger.ledger import Ledger, WitnessedLedger
from flower_privdec.privacy.ledger.segments import Charge, RunName
from flower_privdec.privacy.ledger.spending import Account, charged_until, spending_beside
from flower_privdec.privacy.mechanism.events import Release, Spend

RESERVING = "ledger-reserving"  # names the thread that charges a step ahead
WRITE_FRACTION = 0.005  # of the wall time, the target for writing adaptive blocks
BRIEF = 0.0005  # seconds of a write: one that takes longer is waited for by another thread
# Lines that too few neighbours confirm and that are charged without asking, in the whole life of a ledger: so many, or
# this share of the plan's steps.
LEAST_UNCONFIRMED = 4
UNCONFIRMED = 0.05
CHARGED_CONFIRMED = "-witnessed-"  # in the names of runs that stand for lost lines
CHARGED_UNCONFIRMED = "-unconfirmed-"
FIRST_BLOCK = 16  # an adaptive block covers at least this fraction (one in FIRST_BLOCK) of the plan's steps


class PlannedLedger(WitnessedLedger):
    """The ledger of the peers that one process hosts, wherever its lines are kept.

    Attributes:
        spending: the cost of the run beside the others in the ledger.
        charged: the step before which all steps are charged, or were taken before this run began.
    """

    def _plan(
        self,
        run: RunName,
        accounts: Sequence[Account],
        *,
        block: int | None = None,
        fresh: bool = False,
        start: int = 0,
    ) -> None:
        """Put a run's plan beside the entries that are there; for the arguments see `CohortLedger`."""
        self._check_same_plan(run, {account.peer: account.spends for account in accounts})
        self.spending = spending_beside(self.entries, run, accounts, start)
        self._run = run
        self._block = block
        self._fresh = fresh
        self.charged = max(charged_until(self.entries, run.id), start)
        self._steps = self.spending.steps
        self._limits = self.spending.limits

        # Which steps each plan has, bool [steps, plans]; peers with one plan share its `spends` object.
        plans = {id(account.spends): account.spends for account in accounts}
        numbers = {key: number for number, key in enumerate(plans)}
        self._plan_of = np.array([numbers[id(account.spends)] for account in accounts], dtype=np.int64)
        self._planned = np.zeros((self._steps, len(plans)), dtype=bool)
        for number, plan in enumerate(plans.values()):
            for spend in plan:
                self._planned[spend.from_step : spend.to_step, number] = True

        self._allowed = (-1, np.zeros(len(accounts), dtype=bool))  # the last answer of `allowed`, with its step
        self._last_write: tuple[int, float, float] | None = None  # its step, its end, its duration in seconds
        self._reserved: tuple[int, Callable[[], object]] | None = None  # a step charged ahead, and how to await it
        self._reserve_seconds = math.inf  # that it took last to charge one ahead
        self._alike: tuple[int, int, tuple[Charge, ...]] = (0, 0, ())  # see `_charges_of`

    def allowed(self, step: int) -> np.ndarray:
        """Return which peers may take a step, bool [m]: in their plan, and within their budget."""
        answered, rows = self._allowed
        if answered == step:
            return rows

        rows = np.zeros(len(self._plan_of), dtype=bool)
        if step < self._steps:
            rows = self._planned[step][self._plan_of] & (step < self._limits)
        self._allowed = (step, rows)
        return rows

    def charge(self, step: int, rows: np.ndarray) -> None:
        """Ensure that a step of some peers is charged, on disk, before it is taken.

        Args:
            step: the step.
            rows: int64, the peers' positions among the accounts.

        Raises:
            BudgetError: a peer may not take the step, it comes before the first one that this run may take, or the
                disk fails; then no step may be taken.
        """
        if not self.allowed(step)[rows].all():
            message = f"{self.path}: step {step} is not within the plan and the budget of every peer"
            raise BudgetError(message, code="ledger.not-allowed")
        if step < self.spending.start:
            message = f"{self.path}: step {step} is before {self.spending.start}, with which this run begins"
            raise BudgetError(f"{message}; what came before was charged to others", code="ledger.before-start")
        if step < self.charged:
            return

        idle_from = self.charged
        if self._reserved is not None:
            reserved, done = self._reserved
            self._reserved = None
            done()  # waits for the disk, and raises what it raised
            if reserved == step:
                self.charged = step + 1
                return
            # What was charged ahead, for a step in which these peers were idle, may be an epoch that goes on.
            idle_from = reserved + 1

        if self._fresh:
            self.charged = step  # earlier steps that are not charged were idle, or taken by another run
        started = time.perf_counter()
        stop = min(step + self._block_length(step, started), self._steps)
        self.append(self._run, self.charged, stop, self._charges(self.charged, stop, idle_from))
        self.charged = stop
        ended = time.perf_counter()
        self._last_write = (step, ended, ended - started)

    def _block_length(self, step: int, now: float) -> int:
        """Return how many steps the next entry covers, from a step on.

        Adaptive blocks follow the pace since the last write: so many steps that the write which covers them takes
        WRITE_FRACTION of the time in which they are taken. They decide only when the disk is written to, never a number
        of the run.
        """
        if self._block is not None:
            return self._block

        length = max(1, self._steps // FIRST_BLOCK)
        if self._last_write is None:
            return length
        written, ended, duration = self._last_write
        seconds_per_step = max((now - ended) / max(1, step - written), 1e-9)
        steps_at_target = duration / WRITE_FRACTION / seconds_per_step
        return max(length, math.ceil(min(steps_at_target, self._steps)))

    def reserve(self) -> None:
        """Charge the step after the last charged one ahead; `charge` then raises what went wrong.

        A step that is then not taken stays charged: one at most for each process. So nothing is reserved before the
        process has charged a first step, nor if entries cover several steps or a step may not be taken.
        """
        step = self.charged
        has_begun = self._last_write is not None
        if self._reserved is None and self._block == 1 and has_begun and self.allowed(step).all():
            self._reserved = (step, self._append_ahead(step, self._charges_of(step)))

    def _append_ahead(self, step: int, charges: Sequence[Charge]) -> Callable[[], object]:
        """Append a step's charges; return what returns once they count, and raises what went wrong."""
        try:
            self._append_one(step, charges)
        except BaseException as error:
            return partial(_raise, error)
        return _done

    def _append_one(self, step: int, charges: Sequence[Charge]) -> None:
        began = time.perf_counter()
        self.append(self._run, step, step + 1, charges)
        self._reserve_seconds = time.perf_counter() - began

    def _charges(self, start: int, stop: int, idle_from: int) -> Iterator[Charge]:
        """Yield the charge to each group of equal peers for the steps [start, stop).

        An epoch that is under way is charged already, unless it began while its peers were idle; but not to a run that
        begins in it with an order of its own.

        Args:
            idle_from: the step from which on this process has charged none.
        """
        begins = self._fresh and self._last_write is None
        groups: dict[tuple[int, int], list[Account]] = {}
        for account, limit in zip(self.spending.accounts, self._limits.tolist(), strict=True):
            key = (id(account.spends), min(stop, limit))
            groups.setdefault(key, []).append(account)

        for (_, end), accounts in groups.items():
            parts = []
            spends = accounts[0].spends
            for place in range(_first_after(spends, start), len(spends)):
                spend = spends[place]
                if spend.from_step >= end:
                    break
                part = spend.between(start, end)
                if part is not None and (begins or part.from_step >= idle_from):
                    parts.append(([(part.from_step, part.to_step)], part.release))
            if parts:
                yield Charge.of([account.peer for account in accounts], parts)

    def _charges_of(self, step: int) -> tuple[Charge, ...]:
        """Return the charges of a step; those of many steps in a row differ only in the step, so one is computed."""
        first, until, charges = self._alike
        if first <= step < until:
            return tuple(charge.moved(step - first) for charge in charges)

        charges = tuple(self._charges(step, step + 1, step))
        ends = [limit for limit in self._limits.tolist() if limit > step]
        for account in self.spending.accounts:
            place = _first_after(account.spends, step)
            if place < len(account.spends):
                spend = account.spends[place]
                # An epoch is charged as a whole, in its first step.
                end = step + 1 if spend.whole else spend.to_step
                ends.append(end if spend.from_step <= step else spend.from_step)
        if len(charges) > 0:
            self._alike = (step, min(ends), charges)
        return charges

    def charge_witnessed(self, witnessed: Mapping[int, int], kind: str = CHARGED_CONFIRMED) -> int:
        """Charge the lines that a ledger lacks, each as a step of the plan, and return how many there are.

        If the plan's steps differ, the whole plan is charged for them: an upper bound.

        Args:
            witnessed: see `lacks`.
            kind: names the charge.
        """
        missing = self.lacks(witnessed)
        if not missing:
            return 0

        run = replace(self._run, id=f"{self._run.id}{kind}{self.n_entries}")
        charges = [_missing_charge(account, missing, self._steps) for account in self.spending.accounts]
        self.append(run, 0, missing, charges, witnessed=witnessed)
        return missing

    def charge_confirmed(self, confirmed: Mapping[int, int], reported: Mapping[int, int]) -> int:
        """Charge the lines that a ledger lacks as far as no lie can have made them many; return how many there are.

        All lines that are reported are charged, or none: to pay for some of them would be to go on with an ε that is
        too small. Lines that are confirmed may be any number. Of the others there are few in honest life: those that
        were written last, of which only one neighbour had heard.

        Args:
            confirmed: the lines of each boot that enough neighbours have counted.
            reported: those that any neighbour has counted.

        Raises:
            BudgetError: too many lines are not confirmed; nothing was charged.
        """
        unconfirmed = self.lacks(reported) - self.lacks(confirmed)
        most = max(LEAST_UNCONFIRMED, math.ceil(UNCONFIRMED * self._steps))
        before = self.charged_for_lost(CHARGED_UNCONFIRMED)
        if before + unconfirmed > most:
            beside = ""
            if before:
                beside = f", beside {before} such lines charged before"
            raise BudgetError(
                f"{self.path} lacks {unconfirmed} lines that too few neighbours confirm{beside}, and at most {most} "
                "are charged without asking: if its folder was lost or restored, charge them by --charge-missing; if "
                "not, a neighbour lies",
                code="ledger.not-confirmed",
            )
        charged = self.charge_witnessed(confirmed)
        return charged + self.charge_witnessed(reported, CHARGED_UNCONFIRMED)

    def charged_for_lost(self, *kinds: str) -> int:
        """Return how many lines were charged in place of lost ones; all of them, or only those of some kinds."""
        names = kinds or (CHARGED_CONFIRMED, CHARGED_UNCONFIRMED)
        return sum(
            entry.to_step - entry.from_step for entry in self.entries if any(name in entry.run.id for name in names)
        )

    def _check_same_plan(self, run: RunName, plans: Mapping[int, Sequence[Spend]]) -> None:
        """Raise BudgetError if charged steps of the run use another mechanism in this plan."""
        starts = {peer: [spend.from_step for spend in plan] for peer, plan in plans.items()}

        for entry in self.entries:
            if entry.run.id != run.id:
                continue
            for charge in entry.charges:
                steps = [(a, b, release) for intervals, release in charge.parts for a, b in intervals]
                for peer in charge.peers:
                    if peer not in plans:
                        continue
                    if not all(_same_mechanism(plans[peer], starts[peer], *part) for part in steps):
                        raise BudgetError(
                            f"{self.path}: steps {entry.from_step} to {entry.to_step} of this run were charged with "
                            "another mechanism than its plan has; continue with the scenario of those charges",
                            code="ledger.other-plan",
                        )


class CohortLedger(PlannedLedger, Ledger):
    """The ledger of the peers that one process hosts, on disk; a context manager."""

    _reserving: ThreadPoolExecutor | None = None  # on the class, for `close` is called before `__init__` ends, too

    def __init__(
        self,
        directory: Path | str,
        source: str,
        run: RunName,
        accounts: Sequence[Account],
        *,
        block: int | None = None,
        fresh: bool = False,
        start: int = 0,
    ) -> None:
        """Open the ledger of a data source for some peers' accounts.

        Args:
            block: steps that an entry covers (1: none ahead); None to let it grow until writing costs under 1 % of the
                wall time (for simulations, in which a crashed run can be resumed exactly).
            fresh: whether the run draws fresh noise, so that every step that it takes is charged.
            start: the first step that it may take; those before it were charged under other ids.

        Raises:
            BudgetError: the ledger is in use, fails verification, or has this run with another plan.
        """
        Ledger.__init__(self, directory, source)
        try:
            self._plan(run, accounts, block=block, fresh=fresh, start=start)
        except BaseException:
            self.close()
            raise

    def _append_ahead(self, step: int, charges: Sequence[Charge]) -> Callable[[], object]:
        """Append in another thread, which waits for the disk, if that took longer last time than a thread costs."""
        if self._reserve_seconds <= BRIEF:
            return super()._append_ahead(step, charges)
        if self._reserving is None:
            self._reserving = ThreadPoolExecutor(1, RESERVING)
        return self._reserving.submit(self._append_one, step, charges).result

    def close(self, *, unlock: bool = True) -> None:
        """See `Ledger.close`; what is being reserved is written first."""
        # A forked child (unlock=False) has no such thread to wait for, and the thread does not wait for itself.
        is_reserving_thread = current_thread().name.startswith(RESERVING)
        if self._reserving is not None and unlock and not is_reserving_thread:
            self._reserving.shutdown()
        super().close(unlock=unlock)


def _done() -> None:
    """Return at once: what was to be awaited is done."""


def _first_after(spends: Sequence[Spend], step: int) -> int:
    """Return the place of the first of some spends, in order of steps, that has a step at or after a given one.

    A peer that is active in random rounds has as many spends as rounds, and pays for one at a time.
    """
    return bisect_right(spends, step, key=lambda spend: spend.to_step)


def _raise(error: BaseException) -> None:
    raise error


def _missing_charge(account: Account, missing: int, plan_steps: int) -> Charge:
    """Return the charge to a peer for so many lost lines, whose steps are not known.

    Args:
        plan_steps: how many steps the plan has.
    """
    mechanisms = {spend.release.mechanism: spend.release for spend in account.spends}
    all_alike = len(mechanisms) == 1 and not any(spend.whole for spend in account.spends)
    if all_alike:
        (release,) = mechanisms.values()
        return Charge((account.peer,), ((((0, missing),), release.times(missing)),))

    # Any `missing` steps are among those of this many whole plans.
    times = math.ceil(missing / plan_steps)
    parts = []
    for spend in account.spends:
        release = spend.release.times(times * spend.release.steps)
        parts.append((((spend.from_step, spend.to_step),), release))
    return Charge((account.peer,), tuple(parts))


def _same_mechanism(plan: Sequence[Spend], starts: Sequence[int], a: int, b: int, release: Release) -> bool:
    """Return whether a plan has a mechanism in all steps [a, b).

    Args:
        starts: the first step of each of its spends, ascending.
    """
    at = bisect_right(starts, a) - 1
    if at < 0:
        return False
    # Equal epochs, one after the other, may have been charged as one interval.
    while a < b:
        if at >= len(plan):
            return False
        spend = plan[at]
        covers = spend.from_step <= a < spend.to_step
        if not covers or spend.release.mechanism != release.mechanism:
            return False
        a = spend.to_step
        at += 1
    return True
