"""One peer's budget for one data set: what its ledger file holds, and the steps that are left."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flower_privdec.common.formatting import epsilon_text, setting
from flower_privdec.errors import BudgetError, ScenarioError
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.accountant.alternatives import epsilon_of_runs
from flower_privdec.privacy.accountant.calibration import ACCEPTED, noise_multiplier
from flower_privdec.privacy.ledger.cohort_ledger import Account, Spending
from flower_privdec.privacy.ledger.ledger_file import LedgerFile, ledger_path, runs_in
from flower_privdec.privacy.ledger.ledger_format import Payment, RunName, Share, read_chain
from flower_privdec.privacy.mechanism.events import Release, Spend, canonical

UNLIMITED = 10**9  # steps, where nothing limits them


@dataclass(frozen=True)
class Purse:
    """What a peer may still spend on its data: a ledger file, the mechanism of a step, and a budget.

    Every opening is a run of its own in the ledger, for its noise is drawn afresh; ε is that of all runs together,
    whoever wrote them there.

    Attributes:
        folder, source: the ledger file is FOLDER/SOURCE.jsonl.
        release: one step.
        budget: ε, or None for no limit; everything is recorded all the same.
        delta: δ at which ε is meant.
        steps: of this mechanism, over all runs, or None where the budget alone ends them.
        limit: no more steps than these can be left.
        insecure: whether batches and noise come from a seed, so that ε is none towards who knows it.
    """

    folder: Path
    source: str
    release: Release
    budget: float | None
    delta: float
    steps: int | None = None
    limit: int = UNLIMITED
    insecure: bool = False

    @property
    def path(self) -> Path:
        """Return the ledger's file."""
        return ledger_path(self.folder, self.source)

    def paid(self) -> list[Payment]:
        """Return all payments of the ledger, without locking it.

        Raises:
            BudgetError: it cannot be trusted.
        """
        empty = not self.path.exists() or self.path.stat().st_size == 0
        return [] if empty else read_chain(self.path)[1]

    def with_noise_solved(self) -> Purse:
        """Return the same purse with the least noise whose `steps` keep the budget: the ledger's own where that does.

        Raises:
            ScenarioError: no budget or no steps are given, or no noise keeps it.
        """
        if self.budget is None or self.steps is None:
            raise ScenarioError(
                "give epsilon and rounds (with local_epochs) or steps, so that the noise can be solved for, or give "
                "noise_multiplier"
            )
        for known in _releases(self.paid()):
            same = replace(known, noise_multiplier=1.0, steps=1) == replace(self.release, noise_multiplier=1.0)
            if same and ACCEPTED * self.budget <= epsilon([known.times(self.steps)], self.delta) <= self.budget:
                return replace(self, release=known.times(1))
        at = self.release
        noise = noise_multiplier(
            self.budget,
            self.delta,
            sampling=at.sampling,
            sampling_rate=at.sampling_rate,
            dataset_size=at.dataset_size,
            batch_size=at.batch_size,
            steps=self.steps,
        )
        return replace(self, release=replace(at, noise_multiplier=noise))

    def left(self, paid: Sequence[Payment]) -> int:
        """Return how many steps more may be taken."""
        limit = self.limit if self.steps is None else self.steps - self.taken(paid)
        if limit <= 0:
            return 0
        account = Account(0, (Spend(0, limit, self.release.times(limit)),), self.budget, self.delta)
        return int(Spending(list(runs_in(paid).values()), [account]).limits[0])

    def taken(self, paid: Sequence[Payment]) -> int:
        """Return how many steps of this mechanism were paid."""
        return sum(each.steps for each in _releases(paid) if each.mechanism == self.release.mechanism)

    def epsilon(self, paid: Sequence[Payment]) -> float:
        """Return the ε of everything that was paid."""
        return epsilon_of_runs(list(runs_in(paid).values()), self.delta)

    @contextmanager
    def opened(self) -> Iterator[OpenPurse]:
        """Lock the ledger for a run of steps.

        Raises:
            BudgetError: it is in use, or cannot be trusted.
        """
        with LedgerFile(self.folder, self.source) as file:
            yield OpenPurse(self, file)

    def statement(self, paid: Sequence[Payment]) -> str:
        """Say in one line what was spent, with its unit, its adjacency and what was charged."""
        charged = "; ".join(map(_charged, _releases(paid))) or "nothing yet"
        left = self.left(paid)
        rest = "no budget" if self.budget is None else f"budget ε = {setting(self.budget)}"
        rest += "" if self.budget is None and self.steps is None else f", {left:,} steps left"
        warning = "INSECURE, drawn from a seed: " if self.insecure else ""
        spent = f"ε = {epsilon_text(self.epsilon(paid))} at δ = {setting(self.delta)}"
        unit = "unit: example; adjacency: zero-out"
        return f"{warning}{spent} ({unit}; charged: {charged}; {rest}; ledger: {self.path})"


class OpenPurse:
    """A purse whose ledger is locked.

    Attributes:
        first: how many steps of this mechanism were paid before.
    """

    def __init__(self, purse: Purse, file: LedgerFile) -> None:
        self._purse, self._file, self._paid = purse, file, 0
        self.first, self._left = purse.taken(file.payments), purse.left(file.payments)
        self._run = RunName(secrets.token_hex(16), "example-level", f"torch {torch.__version__}")

    def pay(self, most: int) -> int:
        """Pay for some steps, on disk before this returns, and return how many: all that is left, up to `most`.

        Raises:
            BudgetError: nothing is left, or the disk fails; then no batch may be drawn.
        """
        count = min(most, self._left - self._paid)
        if count < 1:
            raise BudgetError(
                f"{self._purse.path}: the privacy budget is spent, and no batch was read: "
                f"{self}; ask `allowed` before training"
            )
        start, stop = self._paid, self._paid + count
        spend = Spend(start, stop, self._purse.release.times(count))
        self._file.append(Payment(self._run, start, stop, (Share.of([0], [spend]),)))
        self._paid = stop
        return count

    def __str__(self) -> str:
        return self._purse.statement(self._file.payments)


def _releases(paid: Sequence[Payment]) -> tuple[Release, ...]:
    """Return all that was paid, equal mechanisms together."""
    return canonical(each for payment in paid for share in payment.shares for each in share.releases)


def _charged(release: Release) -> str:
    how = {"poisson": f"Poisson sampling at rate {release.sampling_rate:.3g} of", "full": "taking all of"}
    return (
        f"{release.steps:,} step{'' if release.steps == 1 else 's'} by "
        f"{how.get(release.sampling, f'{release.sampling} sampling of')} {release.dataset_size:,} examples, "
        f"noise multiplier {release.noise_multiplier:.3g}"
    )
