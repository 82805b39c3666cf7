"""What was spent, on disk before the steps it pays for: one chained file for each data set and peer.

A payment names the run and the rounds it pays for. Running those rounds again in the same run after a crash
gives the same releases bit for bit (batches and noise are keyed by seed and round) and costs nothing more;
anything else over the same data set adds up. So a run id stands for one scenario, seed and code, and whoever
draws noise afresh after a restart (a deployed peer) takes a new run id with it.

Privacy: a payment may reserve rounds ahead. After a crash that nobody resumes, at most those are counted
without having been run; no round is run without having been counted.
"""

from __future__ import annotations

import math
import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from flower_privdec.errors import BudgetError
from flower_privdec.privacy.chain import NOTHING, Head, Payment
from flower_privdec.privacy.events import Release, Spend
from flower_privdec.privacy.peer_ledger import Ledger, ledger_path, make_folder, sync_folder

__all__ = ["Account", "CohortLedger", "Ledger"]

WRITING_SHARE = 0.005  # of the wall time that adaptive blocks aim to spend on writing
FIRST_BLOCK = 16  # adaptive blocks hold at least one round in so many of the plan


@dataclass(frozen=True)
class Account:
    """One peer's plan for a run, and its budget for the data set over all runs.

    Attributes:
        peer: global id.
        spends: what its active rounds cost, in order of rounds, none overlapping.
        budget: ε, or None for no limit (everything is still recorded).
        delta: δ of the budget.
    """

    peer: int
    spends: tuple[Spend, ...]
    budget: float | None
    delta: float


class CohortLedger:
    """The ledgers of the peers one process hosts, for one run whose plan is known; a context manager.

    What the budgets allow is settled at open: ε grows with every release, so where the whole plan fits beside
    what is recorded all of it is allowed, and elsewhere the longest beginning that fits. A round then costs a
    comparison, and a write only where a new block of rounds begins.

    Attributes:
        peers: int64 [m], as the accounts.
        limits: int64 [m], the first round each peer may not run any more.
    """

    def __init__(
        self, ledgers: Sequence[Ledger], run: str, accounts: Sequence[Account], block: int | None = None
    ) -> None:
        """Take over open ledgers; see `open`."""
        self._ledgers, self._run, self._block = list(ledgers), run, block
        self._plans = [tuple(account.spends) for account in accounts]
        self.peers = np.array([account.peer for account in accounts], dtype=np.int64)
        self._rounds = max((plan[-1].to_round for plan in self._plans if plan), default=0)
        for ledger, plan in zip(self._ledgers, self._plans, strict=True):
            _check_same_plan(ledger, run, plan)
        self._paid = [ledger.paid_until(run) for ledger in self._ledgers]
        self.limits = np.array(self._settle(), dtype=np.int64)
        self._allowed = _Allowed(self._plans, self.limits, self._rounds)
        self._reserved = min((due[0].from_round for due in self._due(self._rounds).values()), default=self._rounds)
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="ledger")
        self._last_write: tuple[int, float, float] | None = None  # its round, when it ended, how long it took

    @classmethod
    def open(
        cls,
        directory: Path | str,
        dataset_fingerprint: str,
        run: str,
        accounts: Sequence[Account],
        *,
        block: int | None = None,
    ) -> Self:
        """Open the ledgers of all accounts' peers.

        Args:
            run: names the run; the same for a run and its resumption.
            block: rounds that a payment covers (1: none ahead), or None to let it grow until writing costs
                under 1 % of the wall time (for simulations, where a run that crashed can be resumed exactly).

        Raises:
            BudgetError: when a ledger is in use or cannot be trusted, or has this run with another plan.
        """
        _allow_open_files(len(accounts))
        folder = ledger_path(directory, dataset_fingerprint, 0).parent
        make_folder(folder)
        ledgers: list[Ledger] = []
        try:
            for account in accounts:
                path = ledger_path(directory, dataset_fingerprint, account.peer)
                ledgers.append(Ledger(path, dataset_fingerprint, account.peer, account.budget, account.delta))
            sync_folder(folder)
            return cls(ledgers, run, accounts, block)
        except BaseException:
            for ledger in ledgers:
                ledger.close()
            raise

    def allowed(self, round_index: int) -> np.ndarray:
        """Return which peers may take a step in a round, bool [m]: in their plan, and within their budget.

        Call `reserve` first.
        """
        return self._allowed.at(round_index)

    def reserve(self, round_index: int) -> None:
        """Make sure that a round is paid, on disk, by every peer that may take a step in it.

        Raises:
            BudgetError: when the disk fails; then no step may be taken.
        """
        if round_index < self._reserved or round_index >= self._rounds:
            return
        started = time.perf_counter()
        stop = min(round_index + self._block_length(round_index, started), self._rounds)
        due = self._due(stop)
        payments = {id(spends): Payment.of(self._run, spends) for spends in due.values()}
        for i, spends in due.items():
            self._ledgers[i].append(payments[id(spends)])
        list(self._pool.map(lambda i: self._ledgers[i].sync(), due))
        for i, spends in due.items():
            self._paid[i] = spends[-1].to_round
        self._reserved, ended = stop, time.perf_counter()
        self._last_write = (round_index, ended, ended - started)

    def _due(self, stop: int) -> dict[int, tuple[Spend, ...]]:
        """Return what each peer has still to pay for rounds before `stop`, by row, where it is anything."""
        due: dict[int, tuple[Spend, ...]] = {}
        same: dict[tuple[int, int, int], tuple[Spend, ...]] = {}
        for i, plan in enumerate(self._plans):
            start, end = self._paid[i], min(stop, int(self.limits[i]))
            key = (id(plan), start, end)
            if key not in same:
                parts = (s.between(start, end) for s in plan)
                same[key] = tuple(part for part in parts if part is not None)
            if same[key]:
                due[i] = same[key]
        return due

    def _block_length(self, round_index: int, now: float) -> int:
        if self._block is not None:
            return self._block
        least = max(1, self._rounds // FIRST_BLOCK)
        if self._last_write is None:
            return least
        written, ended, took = self._last_write
        a_round = (now - ended) / max(1, round_index - written)
        return max(least, math.ceil(min(took / WRITING_SHARE / max(a_round, 1e-9), self._rounds)))

    def _settle(self) -> list[int]:
        """Return each peer's limit; peers of the same past, plan and budget are settled once."""
        settled: dict[tuple[object, ...], int] = {}
        limits = []
        for ledger, plan, paid in zip(self._ledgers, self._plans, self._paid, strict=True):
            due = tuple(part for s in plan if (part := s.between(paid, s.to_round)) is not None)
            key = (ledger.releases, due, ledger.budget, ledger.delta)
            if key not in settled:
                settled[key] = _first_refused(due, ledger.fits, self._rounds)
            limits.append(settled[key])
        return limits

    def spent(self, peer: int) -> float:
        """Return the ε recorded for a peer over all runs, rounds reserved ahead included."""
        return self._ledgers[int(np.flatnonzero(self.peers == peer)[0])].spent()

    def spent_all(self) -> np.ndarray:
        """Return the ε recorded for each peer over all runs, [m]."""
        return np.array([ledger.spent() for ledger in self._ledgers])

    def heads(self) -> dict[str, Head]:
        """Return each ledger's number of lines and last hash, by peer id: what a checkpoint names."""
        return {str(peer): ledger.head for peer, ledger in zip(self.peers, self._ledgers, strict=True)}

    def check_heads(self, heads: Mapping[str, Sequence[int | str]]) -> None:
        """Check that every ledger still holds all that a checkpoint saw.

        Raises:
            BudgetError: when one is shorter or different.
        """
        for peer, ledger in zip(self.peers, self._ledgers, strict=True):
            length, digest = heads.get(str(peer), (0, NOTHING))
            ledger.check_head(int(length), str(digest))

    def close(self) -> None:
        """Release all locks."""
        self._pool.shutdown()
        for ledger in self._ledgers:
            ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_refused(spends: Sequence[Spend], fits: Callable[[Iterable[Release]], bool], rounds: int) -> int:
    """Return the first round whose payment, after all before it, does not fit; `rounds` when all do."""
    if not spends or fits(s.release for s in spends):
        return rounds
    ends = np.cumsum([s.release.steps for s in spends])

    def cut(steps: int) -> tuple[int, int]:
        spend = int(np.searchsorted(ends, steps, side="right"))
        return spend, steps - int(ends[spend] - spends[spend].release.steps)

    def beginning(steps: int) -> list[Release]:
        spend, rest = cut(steps)
        return [*(s.release for s in spends[:spend]), spends[spend].release.times(rest)]

    low, high = 0, int(ends[-1])  # low steps fit, or there is nothing to try; high do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(beginning(middle)) else (low, middle)
    spend, rest = cut(low)
    return spends[spend].from_round + rest


class _Allowed:
    """Which peers may take a step in which round, worked out for a stretch of rounds at a time."""

    STRETCH = 256

    def __init__(self, plans: Sequence[tuple[Spend, ...]], limits: np.ndarray, rounds: int) -> None:
        numbers: dict[tuple[Spend, ...], int] = {}
        self._plan_of = np.array([numbers.setdefault(plan, len(numbers)) for plan in plans], dtype=np.int64)
        self._planned = np.zeros((max(rounds, 1), len(numbers)), dtype=bool)
        for plan, number in numbers.items():
            for spend in plan:
                self._planned[spend.from_round : spend.to_round, number] = True
        self._limits, self._start, self._stretch = limits, 0, np.zeros((0, len(plans)), dtype=bool)

    def at(self, round_index: int) -> np.ndarray:
        """Return who may take a step, bool [m]; nobody after the plan's end."""
        if not 0 <= round_index - self._start < len(self._stretch):
            rounds = np.arange(round_index, round_index + self.STRETCH)
            planned = self._planned[np.minimum(rounds, len(self._planned) - 1)][:, self._plan_of]
            inside = (rounds[:, None] < self._limits) & (rounds[:, None] < len(self._planned))
            self._start, self._stretch = round_index, planned & inside
        return np.asarray(self._stretch[round_index - self._start])


def _check_same_plan(ledger: Ledger, run: str, plan: Sequence[Spend]) -> None:
    """Refuse to go on with a run whose paid rounds cost something else in this plan."""
    starts = [spend.from_round for spend in plan]
    for payment in ledger.payments:
        for rounds, release in payment.parts if payment.run == run else ():
            for a, b in rounds:
                at = bisect_right(starts, a) - 1
                spend = plan[at] if at >= 0 else None
                if spend is None or b > spend.to_round or spend.release.mechanism != release.mechanism:
                    raise BudgetError(
                        f"{ledger.path}: rounds {a} to {b} of this run were paid with another mechanism than "
                        "its plan has; go on with the scenario they were paid for, or start a new run"
                    )


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files where so many ledgers need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BudgetError(f"{count} ledgers need {needed} open files and {hard} are allowed; raise `ulimit -n`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
