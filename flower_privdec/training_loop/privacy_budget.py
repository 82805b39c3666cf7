"""The privacy budget of one peer's data set in a torch training loop: its ledger, and the steps that remain."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flower_privdec.common.formatting import epsilon_text, setting
from flower_privdec.errors import BudgetError, ScenarioError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.alternatives import epsilon_of_runs
from flower_privdec.privacy.accountant.calibration import ACCEPTED, noise_multiplier
from flower_privdec.privacy.ledger.cohort_ledger import Account, Spending
from flower_privdec.privacy.ledger.ledger import (
    Charge,
    Entry,
    Ledger,
    RunName,
    ledger_path,
    read_entries,
    releases_in,
    runs_in,
)
from flower_privdec.privacy.mechanism.events import Release, Spend

UNLIMITED = 10**9  # steps, where there is no limit


@dataclass(frozen=True)
class PrivacyBudget:
    """What a peer may still spend on its data: a ledger, the mechanism of a step, and a budget.

    Each pass over the loader is a run of its own in the ledger, since it draws fresh noise; ε is that of all runs
    together, whichever process wrote them.

    Attributes:
        folder, source: the ledger is FOLDER/SOURCE.jsonl.
        release: one step.
        budget: ε, or None for no limit (every step is still recorded).
        delta: δ of ε.
        steps: of this mechanism, over all runs, or None where the budget alone ends them.
        limit: an upper bound on the steps that remain.
        insecure: whether batches and noise come from a seed, so that there is no ε against those who know it.
        loss_shown: whether the loop is shown the losses of private batches, which ε does not cover.
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

    @property
    def path(self) -> Path:
        """Return the ledger's file."""
        return ledger_path(self.folder, self.source)

    def entries(self) -> list[Entry]:
        """Return all entries of the ledger without locking it; raises BudgetError if it fails verification."""
        return read_entries(self.folder, self.source)

    def with_noise_solved(self) -> PrivacyBudget:
        """Return this budget with the least noise whose `steps` fit it: the noise already in the ledger if that does.

        Raises:
            ScenarioError: there is no ε or no number of steps, or no noise fits.
        """
        if self.budget is None or self.steps is None:
            raise ScenarioError(
                "give epsilon and rounds (with local_epochs) or steps, so that the noise can be solved for, or give "
                "noise_multiplier"
            )
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

    def remaining_steps(self, entries: Sequence[Entry]) -> int:
        """Return how many more steps fit."""
        limit = self.limit if self.steps is None else self.steps - self.taken(entries)
        if limit <= 0:
            return 0
        account = Account(0, (Spend(0, limit, self.release.times(limit)),), self.budget, self.delta)
        return int(Spending(list(runs_in(entries).values()), [account]).limits[0])

    def taken(self, entries: Sequence[Entry]) -> int:
        """Return how many steps of this mechanism were charged."""
        return sum(r.steps for r in releases_in(entries) if r.mechanism == self.release.mechanism)

    def epsilon(self, entries: Sequence[Entry]) -> float:
        """Return the ε of everything charged."""
        return epsilon_of_runs(list(runs_in(entries).values()), self.delta)

    def statement(self, entries: Sequence[Entry]) -> str:
        """Return one line: ε with its unit, its adjacency, what was charged, and what remains."""
        charged = "; ".join(map(_charge_text, releases_in(entries))) or "nothing yet"
        rest = "no budget" if self.budget is None else f"budget ε = {setting(self.budget)}"
        rest += "" if self.budget is None and self.steps is None else f", {self.remaining_steps(entries):,} steps left"
        warning = "INSECURE, drawn from a seed: " if self.insecure else ""
        spent = f"ε = {epsilon_text(self.epsilon(entries))} at δ = {setting(self.delta)}"
        unit = "unit: example; adjacency: zero-out"
        shown = "; not covered: the loop was shown private losses" if self.loss_shown else ""
        return f"{warning}{spent} ({unit}; charged: {charged}; {rest}; ledger: {self.path}{shown})"


class OpenBudget:
    """A privacy budget whose ledger is locked for a run of steps; a context manager.

    Attributes:
        first: how many steps of this mechanism were charged before.

    Raises:
        BudgetError: the ledger is in use or fails verification.
    """

    def __init__(self, budget: PrivacyBudget) -> None:
        self._ledger = ledger = Ledger(budget.folder, budget.source)
        self._budget, self._charged = budget, 0
        self.first, self._remaining = budget.taken(ledger.entries), budget.remaining_steps(ledger.entries)
        self._run = RunName(secrets.token_hex(16), "example-level", f"torch {torch.__version__}")

    def __enter__(self) -> OpenBudget:
        return self

    def __exit__(self, *_: object) -> None:
        self._ledger.close()

    def charge(self, most: int) -> int:
        """Charge some steps, on disk before this returns, and return how many: all that remain, up to `most`.

        Raises:
            BudgetError: none remain, or the disk fails; then no batch may be drawn.
        """
        count = min(most, self._remaining - self._charged)
        if count < 1:
            raise BudgetError(
                f"{self._budget.path}: the privacy budget is spent, and no batch was read: "
                f"{self}; check `allowed` before training",
                code="ledger.budget-spent",
            )
        start, stop = self._charged, self._charged + count
        spend = Spend(start, stop, self._budget.release.times(count))
        self._ledger.charge(self._run, start, stop, [Charge.of([0], [spend])])
        self._charged = stop
        return count

    def __str__(self) -> str:
        return self._budget.statement(self._ledger.entries)


def _charge_text(release: Release) -> str:
    sampling = {"poisson": f"Poisson sampling at rate {release.sampling_rate:.3g} of", "full": "taking all of"}
    return (
        f"{release.steps:,} step{'' if release.steps == 1 else 's'} by "
        f"{sampling.get(release.sampling, f'{release.sampling} sampling of')} {release.dataset_size:,} examples, "
        f"noise multiplier {release.noise_multiplier:.3g}"
    )
