"""What is known of the releases of a run: from its summary and, if they are at hand, from its ledgers.

A ledger has every release, and so gives better bounds than ε and δ by themselves. Every figure here is an upper bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.experiment.origin import ORIGIN
from flower_privdec.privacy.accountant.accounting import LEAST_DELTA, Alternatives, epsilon_of_runs
from flower_privdec.privacy.accountant.readings import (
    DELTAS,
    FEW_DELTAS,
    Point,
    group_epsilon,
    log_group_factor,
    of_group,
    points_of,
    right_guesses,
    true_positive_rate,
)
from flower_privdec.privacy.ledger.segments import Entry, Totals, ledger_path, verified
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import EVERYBODY, ONE_NEIGHBOUR, Adversary
from flower_privdec.reporting.ledgers import ledgers_below
from flower_privdec.reporting.run_folder import Result

MANY_MECHANISMS = 64  # different noises in a ledger from which on the accountant is asked fewer times
SAME = 1e-3  # share by which a ledger's ε may be below the summary's: how closely the accountant computes
ADVERSARIES = {"epsilon_if_all_collude": EVERYBODY, "epsilon_of_replies_to_one": ONE_NEIGHBOUR}


@dataclass(frozen=True)
class Payments:
    """What one ledger holds.

    Attributes:
        lines: how many payments, all of them verified.
        head: the hash of the last line.
        entries: what was paid for, those of one run perhaps as one.
        adversary: the one that every figure here is against.
    """

    path: Path
    source: str
    lines: int
    head: str
    entries: list[Entry]
    adversary: Adversary

    @classmethod
    def read(cls, path: Path, adversary: Adversary) -> Payments:
        """Read and verify a whole ledger.

        Raises:
            BudgetError: it cannot be read, or fails verification.
        """
        totals = Totals()
        lines = 0
        source = ""
        head = ""
        for segment, entries in verified(path):
            totals.count(entries)
            lines += len(entries)
            source = segment.source
            head = segment.hashes[-1]
        return cls(path, source, lines, head, totals.entries, adversary)

    @property
    def run_ids(self) -> set[str]:
        """Return the names of the runs that paid."""
        return {entry.run.id for entry in self.entries}

    @cached_property
    def costs(self) -> list[Alternatives]:
        """Return the cost of all runs, see `costs_in`."""
        return costs_in(self.entries, self.adversary)

    def epsilon(self, delta: float, times: int = 1) -> float:
        """Return the ε of all that was paid for, `times` times, for an example at the peer that costs most."""
        return epsilon_of_runs(self.costs * times, delta)

    def of_group(self, examples: int) -> list[Alternatives] | None:
        """Return the cost of all runs for several examples of one peer together, or None if it is not known."""
        runs = []
        for alternatives in self.costs:
            groups = [of_group(releases, examples) for releases in alternatives]
            if any(releases is None for releases in groups):
                return None
            runs.append(tuple(releases for releases in groups if releases is not None))
        return runs

    @property
    def deltas(self) -> Sequence[float]:
        """Return the δ at which to ask the accountant for ε; fewer if a composition takes long."""
        mechanisms = {release.mechanism for run in self.costs for releases in run for release in releases}
        return FEW_DELTAS if len(mechanisms) > MANY_MECHANISMS else DELTAS


def ledgers_of(run: Result) -> list[Path]:
    """Return the ledgers that a run was charged in: one, or one for each peer that ran by itself.

    Raises:
        ScenarioError: there is none.
    """
    if (run.folder / ORIGIN).is_file():
        try:
            last = json.loads((run.folder / ORIGIN).read_bytes())["runs"][-1]
            if last["ledger"] is None:
                folders = []
            else:
                folders = [Path(last["ledger"]), run.folder / "ledger"]
            paths = [ledger_path(folder, str(last["source"])) for folder in folders]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ScenarioError(
                f"{run.folder / ORIGIN}: is damaged, so the run's ledger is not known; restore it",
                code="reporting.origin-damaged",
            ) from error
        for path in paths:
            if path.is_file():
                return [path]

    private = run.scenario.private
    if private is not None and private.ledger is not None:
        return ledgers_below(Path(private.ledger).expanduser())
    return ledgers_below(run.folder)


@dataclass(frozen=True)
class Evidence:
    """What is known of the releases of one run.

    Attributes:
        rows: the rows of the summary's peers, each with `epsilon` and `delta`.
        payments: the payments of its ledgers; empty if they are not at hand, or hold less than the summary says.
        problem: why there are none, as a sentence; None if there are some.
    """

    rows: list[dict[str, Any]]
    payments: list[Payments] = field(default_factory=list)
    problem: str | None = None

    @classmethod
    def of(cls, run: Result) -> Evidence:
        """Collect it; a ledger that is missing or damaged is a sentence on the page, and not an error."""
        rows = _rows(run)
        if not is_protected(rows):
            return cls(rows)
        try:
            adversary = Adversary(rows[0].get("colluding"))
            payments = [Payments.read(path, adversary) for path in ledgers_of(run)]
        except (BudgetError, ScenarioError) as error:
            return cls(rows, problem=f"The ledger could not be read: {error}.")

        for row in rows:
            charged = max(one.epsilon(row["delta"]) for one in payments)
            if charged < float(row["epsilon"]) * (1 - SAME):
                ledgers = ", ".join(str(one.path) for one in payments)
                return cls(
                    rows,
                    problem=f"{ledgers} holds less than this run has spent (ε = {epsilon_text(charged)} of "
                    f"{epsilon_text(row['epsilon'])}): it is an old copy, or of another run. Find out why before you "
                    "rely on any figure here.",
                )
        return cls(rows, payments)

    def towards(self, key: str) -> Evidence:
        """Return what is known against the adversary of another ε of the rows."""
        rows = [row | {"epsilon": row[key]} for row in self.rows if key in row]
        payments = [replace(one, adversary=ADVERSARIES[key]) for one in self.payments]
        return replace(self, rows=rows, payments=payments)

    @cached_property
    def epsilon(self) -> float:
        """Return the largest ε of a peer, with all that the ledgers hold today."""
        by_summary = max((float(row["epsilon"]) for row in self.rows), default=math.inf)
        by_ledgers = [one.epsilon(row["delta"]) for one in self.payments for row in self.rows]
        return max([by_summary, *by_ledgers])

    @cached_property
    def alternatives(self) -> list[tuple[Point, ...]]:
        """Return for each ledger, or else each peer, the pairs (ε, δ) that hold for its examples."""
        if not self.payments:
            return [((float(row["epsilon"]), float(row["delta"])),) for row in self.rows]

        own_deltas = {float(row["delta"]) for row in self.rows}
        return [points_of(one.epsilon, sorted(own_deltas.union(one.deltas))) for one in self.payments]

    def right_guesses(self) -> float:
        """Return a bound on how often a test for an example of any peer is right; see `readings`."""
        return max(map(right_guesses, self.alternatives), default=1.0)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return a bound on how often a test finds an example of any peer; see `readings`."""
        return max((true_positive_rate(one, false_positive_rate) for one in self.alternatives), default=1.0)

    def of_group(self, examples: int) -> tuple[float, float, float]:
        """Return what several examples of one person at one peer cost: ε, its δ, and a bound on right guesses."""
        if not self.payments:
            pairs = [_group_of_pair(row, examples) for row in self.rows]
            return (*max(pairs), max(right_guesses([pair]) for pair in pairs))

        delta = min(float(row["delta"]) for row in self.rows)
        costs = [_group_of_payments(one, examples, delta) for one in self.payments]
        return max(epsilon for epsilon, _ in costs), delta, max(chance for _, chance in costs)

    def again(self) -> tuple[float, float] | None:
        """Return ε and the bound on right guesses after as much again, or None if no ledger says what that was."""
        if not self.payments:
            return None

        epsilons = []
        chances = []
        for one in self.payments:
            twice = partial(one.epsilon, times=2)
            epsilons += [twice(row["delta"]) for row in self.rows]
            chances.append(right_guesses(points_of(twice, one.deltas)))
        return max(epsilons), max(chances)


def _rows(run: Result) -> list[dict[str, Any]]:
    """Return the summary's rows; of a run under way, one row with what the peer that spent most has spent so far."""
    if run.summary["privacy"] or run.summary["epsilon_so_far"] is None:
        return list(run.summary["privacy"])
    private = run.scenario.private
    delta = 0.0 if private is None else float(np.max(private.delta))
    return [{"peer": 0, "epsilon": run.summary["epsilon_so_far"], "delta": delta, "unit": "example"}]


def is_protected(rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether every peer has a finite ε: the page is about those who are protected least."""
    return bool(rows) and all(math.isfinite(float(row["epsilon"])) for row in rows)


def _group_of_pair(row: dict[str, Any], examples: int) -> Point:
    """Return the pair (ε, δ) of several examples that follows from the pair of one; ε is ∞ if no δ below 1 is left."""
    epsilon = float(row["epsilon"])
    delta = float(row["delta"])
    log_delta = math.log(max(delta, LEAST_DELTA)) + log_group_factor(epsilon, examples)
    if log_delta >= 0:
        return (math.inf, 0.0)
    return (examples * epsilon, math.exp(log_delta))


def _group_of_payments(one: Payments, examples: int, delta: float) -> tuple[float, float]:
    """Return ε at δ of several examples, and a bound on right guesses, from all that was paid for."""
    runs = one.of_group(examples)
    if runs is None:
        epsilon = group_epsilon(one.epsilon, delta, examples)
        return epsilon, right_guesses([(epsilon, delta)])

    def epsilon_at(at: float) -> float:
        return epsilon_of_runs(runs, at)

    epsilon = epsilon_at(delta)
    points = points_of(epsilon_at, one.deltas)
    return epsilon, right_guesses([*points, (epsilon, delta)])
