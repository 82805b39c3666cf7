"""What a training loop may spend on its data, and how it pays.

A loop over private examples has one `PrivacyBudget`: the mechanism of a step, the (ε, δ) that may be spent, and the
ledger in which every step is counted. Each pass over the data is one `LoopPayments`, which pays block by block:

    with LoopPayments(budget, steps, reserve, report) as payments:
        for count, first in payments.blocks():     # as many blocks as the budget allows
            payments.pay()                          # on disk, before a batch of the block is drawn
            ...                                     # `count` steps, the first of which is number `first` of all runs

Each pass is a run of its own in the ledger, since it draws fresh noise. ε is that of all runs together, whichever
process wrote them.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.door import Door
from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.common.formatting import epsilon_text, setting
from flower_privdec.data.sampling import draw_poisson
from flower_privdec.privacy.accountant.accounting import epsilon, epsilon_of_runs
from flower_privdec.privacy.accountant.calibration import ACCEPTED, max_steps, noise_multiplier
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.privacy.ledger.segments import Charge, Entry, RunName, ledger_path, read_entries
from flower_privdec.privacy.ledger.spending import Account, Spending, costs_in, note_budget, releases_in
from flower_privdec.privacy.mechanism.events import Release, Spend
from flower_privdec.rows.keys import KEY_BYTES, keyed_generator

UNLIMITED = 10**9  # steps, if there is no limit
SEEDED = "INSECURE, from a seed"  # the environment of a run in the ledger whose batches and noise follow from one
LINES = 16  # about so many ledger entries a pass
PEER = np.zeros(1, dtype=np.int64)  # the only peer of this process, int64 [1]
SAMPLINGS = {"poisson": "Poisson sampling at rate {rate:.3g} of", "full": "taking all of"}  # in a statement


class LoopWatch(Protocol):
    """What an observer does with the steps of one loop.

    Attributes:
        behind: how many examples stand at the end of each batch, whose gradients are shown and not added to its sum.
    """

    behind: int

    def drawn(self, batch: np.ndarray) -> np.ndarray:
        """Return which examples are loaded for a batch that was drawn, int64, the last `behind` of them to be shown."""

    def show(self, gradients: Tensor) -> None:
        """See what each of those behind would add to the sum, as a share of the most that one may, [behind, d]."""

    def released(self, total: Tensor, noised: Tensor, noise: float) -> None:
        """See a step's sum without noise and with it, [d], in the same unit, and the planned noise multiplier."""


class LoopObserver(Protocol):
    """Who watches training loops with privacy of examples: an audit."""

    def admit(self, budget: PrivacyBudget) -> LoopWatch:
        """Return what watches a loop, before it reads an example; raise to refuse the loop."""


LOOPS: Door[LoopObserver] = Door("training loops")


def seed_of(insecure_seed: int | None) -> bytes | None:
    """Return the key of batches and noise that are drawn from a seed; None for the operating system's entropy."""
    if insecure_seed is None:
        return None
    return hashlib.sha256(f"INSECURE {int(insecure_seed)}".encode()).digest()


@dataclass(frozen=True)
class PrivacyBudget:
    """What a peer may still spend on its data: a ledger, the mechanism of a step, and a budget.

    Attributes:
        folder, source: the ledger is FOLDER/SOURCE.jsonl.
        release: one step.
        budget: ε, or None for no limit (every step is still recorded).
        delta: δ of ε.
        steps: how many of this mechanism there may be, over all runs; None if only the budget ends them.
        limit: an upper bound on the steps that remain.
        insecure: whether batches and noise come from a seed, so that there is no ε against those who know it.
        loss_shown: whether the loop is shown the losses of private batches, which ε does not cover.
        assumption: what ε assumes of the examples, in words; empty if their items are proved separate.
        also: what else a step releases beside its gradient, in words; it is in the step's cost.
        watch: an observer's watch on the loop, see `LOOPS`.
    """

    folder: Path
    source: str
    release: Release
    budget: float | None
    delta: float
    steps: int | None = None
    limit: int = UNLIMITED
    insecure: bool = False
    loss_shown: bool = False
    assumption: str = ""
    also: str = ""
    watch: LoopWatch | None = None

    @classmethod
    def of(
        cls,
        ledger: str | Path,
        size: int,
        batch_size: int,
        epsilon: float | None,
        delta: float,
        steps: int | None,
        noise_multiplier: float | None,
        insecure_seed: int | None,
        loss_shown: bool = False,
        assumption: str = "",
        also: str = "",
    ) -> PrivacyBudget:
        """Return the budget of Poisson batches, its noise given or solved, and note it for the peer around.

        Args:
            size: how many examples there are.
            batch_size: the expected batch.
            ledger, epsilon, delta, steps, noise_multiplier, insecure_seed, loss_shown: see `private`.
            assumption: what ε assumes of the examples, in words.
            also: what else a step releases, in words.

        Raises:
            ScenarioError: no noise can be solved for.
        """
        batch = min(batch_size, size)
        if batch < size:
            release = Release("poisson", batch / size, size, batch, noise_multiplier=noise_multiplier or 1.0)
        else:
            release = Release("full", 1.0, size, batch, noise_multiplier=noise_multiplier or 1.0)

        path = Path(ledger)
        budget = cls(
            folder=path.parent,
            source=path.name.removesuffix(".jsonl"),
            release=release,
            budget=epsilon,
            delta=delta,
            steps=steps,
            insecure=insecure_seed is not None,
            loss_shown=loss_shown,
            assumption=assumption,
            also=also,
        )
        if noise_multiplier is None:
            budget = budget.with_noise_solved()
        elif epsilon is not None and steps is None:
            budget = replace(budget, limit=max_steps(budget.release, epsilon, delta))

        observer = LOOPS.observer()
        if observer is not None:
            budget = replace(budget, watch=observer.admit(budget))

        caveat = ""
        if budget.insecure:
            caveat += "; batches and noise from a seed, INSECURE"
        if loss_shown:
            caveat += "; the loop was shown private losses"
        note_budget(budget.path.absolute(), delta, caveat, assumption)
        return budget

    def with_noise_solved(self) -> PrivacyBudget:
        """Return this budget with the least noise whose `steps` fit it: the noise already in the ledger if that does.

        Raises:
            ScenarioError: there is no ε or no number of steps, or no noise fits.
        """
        if self.budget is None or self.steps is None:
            raise ScenarioError(
                "give epsilon and rounds (with local_epochs) or steps, so that the noise can be solved for, or give "
                "noise_multiplier",
                code="training-loop.noise",
            )

        # An earlier round solved for this noise. Keeping it keeps all rounds one mechanism, of which steps are counted.
        for charged in releases_in(self.entries()):
            same = replace(charged, noise_multiplier=1.0, steps=1) == replace(self.release, noise_multiplier=1.0)
            if same and ACCEPTED * self.budget <= epsilon([charged.times(self.steps)], self.delta) <= self.budget:
                return replace(self, release=charged.times(1))

        one = self.release
        noise = noise_multiplier(
            self.budget,
            self.delta,
            sampling=one.sampling,
            sampling_rate=one.sampling_rate,
            dataset_size=one.dataset_size,
            batch_size=one.batch_size,
            steps=self.steps,
        )
        return replace(self, release=replace(one, noise_multiplier=noise))

    def paid(self, steps: int, reserve: int, report: Callable[[str], None]) -> Generator[tuple[int, int], None, None]:
        """Yield blocks of steps, once each is charged on disk: how many, and the number of the first of all runs.

        Args:
            steps: in all blocks.
            reserve: the most in a block.
            report: called with a line in the end.

        Raises:
            BudgetError: the budget allows no more.
        """
        with LoopPayments(self, steps, reserve, report) as payments:
            for block in payments.blocks():
                payments.pay()
                yield block

    def draw(self, steps: int, first: int, seed: bytes | None) -> list[np.ndarray]:
        """Return the examples of each of some steps' Poisson batches, ascending.

        Args:
            first: the number of the first step.
            seed: INSECURE: a key to draw by; None for the operating system's entropy.
        """
        key = os.urandom(2 * KEY_BYTES) if seed is None else seed
        generator = keyed_generator(key, "sampling", first)
        sizes, examples = draw_poisson(generator, steps, self.release.dataset_size, self.release.sampling_rate)

        ends = np.cumsum(sizes)
        batches = np.split(examples, ends[:-1])
        if self.watch is None:
            return batches
        return [self.watch.drawn(batch) for batch in batches]

    # --- what the ledger says ---

    @property
    def path(self) -> Path:
        """Return the ledger's file."""
        return ledger_path(self.folder, self.source)

    def entries(self) -> list[Entry]:
        """Return all entries of the ledger without locking it; raises BudgetError if it fails verification."""
        return read_entries(self.folder, self.source)

    def remaining_steps(self, entries: Sequence[Entry]) -> int:
        """Return how many more steps fit."""
        limit = self.limit
        if self.steps is not None:
            limit = self.steps - self.taken(entries)
        if limit <= 0:
            return 0

        spend = Spend(0, limit, self.release.times(limit))
        account = Account(0, (spend,), self.budget, self.delta)
        return int(Spending(entries, [account]).limits[0])

    def taken(self, entries: Sequence[Entry]) -> int:
        """Return how many steps of this mechanism were charged."""
        mechanism = self.release.mechanism
        return sum(release.steps for release in releases_in(entries) if release.mechanism == mechanism)

    def epsilon(self, entries: Sequence[Entry]) -> float:
        """Return the ε of everything charged: infinite if any of it was drawn from a seed, by which noise is undone."""
        if any(entry.run.environment.startswith(SEEDED) for entry in entries):
            return math.inf
        return self.charged(entries)

    def charged(self, entries: Sequence[Entry]) -> float:
        """Return the ε of everything charged, against those who know no seed. The budget bounds this one."""
        return epsilon_of_runs(costs_in(entries), self.delta)

    def statement(self, entries: Sequence[Entry]) -> str:
        """Return one line: ε with its unit, its adjacency, what was charged, and what remains."""
        warning = "INSECURE, drawn from a seed: " if self.insecure else ""
        spent = f"ε = {epsilon_text(self.epsilon(entries))} at δ = {setting(self.delta)}"
        if math.isinf(self.epsilon(entries)):
            unknown = epsilon_text(self.charged(entries))
            spent += f", for batches and noise were drawn from a seed ({unknown} for those who do not know it)"
        unit = f"unit: example; adjacency: zero-out; {self.assumption or 'items: proved separate'}"
        charged = "; ".join(_charged_text(release) for release in releases_in(entries)) or "nothing yet"
        charged += self.also

        rest = "no budget"
        if self.budget is not None:
            rest = f"budget ε = {setting(self.budget)}"
        if self.budget is not None or self.steps is not None:
            rest += f", {self.remaining_steps(entries):,} steps left"

        shown = ""
        if self.loss_shown:
            shown = "; not covered: the loop was shown private losses"
        return f"{warning}{spent} ({unit}; charged: {charged}; {rest}; ledger: {self.path}{shown})"


def _charged_text(release: Release) -> str:
    """Return in words what some equal steps were."""
    plural = "" if release.steps == 1 else "s"
    drawn = SAMPLINGS.get(release.sampling, f"{release.sampling} sampling of").format(rate=release.sampling_rate)
    return (
        f"{release.steps:,} step{plural} by {drawn} {release.dataset_size:,} examples, "
        f"noise multiplier {release.noise_multiplier:.3g}"
    )


class LoopPayments:
    """Pays for one pass over the data, block by block; a context manager.

    The first payment locks the ledger, and creates it if it is missing: a failure before that leaves no file behind.
    """

    def __init__(self, budget: PrivacyBudget, steps: int, reserve: int, report: Callable[[str], None]) -> None:
        """Pay for steps of a budget; see `PrivacyBudget.paid`."""
        self._budget = budget
        self._steps = steps
        self._reserve = reserve
        self._report = report
        environment = f"torch {torch.__version__}"
        if budget.insecure:
            environment = f"{SEEDED}, {environment}"
        self._run = RunName(secrets.token_hex(16), "example-level", environment)
        self._ledger: Ledger | None = None
        self._done = 0  # steps of blocks before
        self._due = 0  # steps of this block that are not paid
        self._has_paid = False
        self._is_over = False

    def __enter__(self) -> LoopPayments:
        if self._budget.path.exists():
            self._ledger = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._ledger is None:
            return
        try:
            if self._has_paid:
                self._report(self._budget.statement(self._ledger.entries))
        finally:
            self._close()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield blocks of steps that the budget allows: how many, and the number of the first of all runs.

        Raises:
            BudgetError: the budget allows no more.
        """
        entries = self._entries()
        taken = self._budget.taken(entries)
        remaining = self._budget.remaining_steps(entries)
        while self._done < self._steps:
            self._due = min(self._reserve, self._steps - self._done, remaining - self._done)
            if self._due < 1:
                raise self._spent()
            count = self._due  # `pay` sets what is due to 0
            yield count, taken + self._done
            self._done += count

    def pay(self) -> None:
        """Charge the block on disk, unless that was done.

        Raises:
            BudgetError: the ledger is in use, or another process has spent the budget meanwhile.
        """
        if self._due == 0:
            return
        if self._ledger is None:
            self._ledger = self._opened()
            # The ledger was not locked when `blocks` asked.
            if self._budget.remaining_steps(self._ledger.entries) < self._due:
                raise self._spent()

        stop = self._done + self._due
        charge = Charge((0,), ((((self._done, stop),), self._budget.release.times(self._due)),))
        self._ledger.append(self._run, self._done, stop, [charge])
        self._due = 0
        self._has_paid = True

        # The last batch of an iterator that the loop has left already.
        if self._is_over:
            self._close()

    def _entries(self) -> list[Entry]:
        if self._ledger is None:
            return self._budget.entries()
        return self._ledger.entries

    def _opened(self) -> Ledger:
        return Ledger(self._budget.folder, self._budget.source)

    def _close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _spent(self) -> BudgetError:
        return BudgetError(
            f"{self._budget.path}: the privacy budget is spent, and no batch was read: "
            f"{self._budget.statement(self._entries())}; check `allowed` before training",
            code="ledger.budget-spent",
        )
