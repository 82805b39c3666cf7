"""What the peers of a run have spent so far and for how many rounds, as their ledger has it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.algorithms.cohort import Cohort
from flower_privdec.errors import BudgetError
from flower_privdec.privacy.ledger import Spending
from flower_privdec.privacy.protection import UNLIMITED, Protection
from flower_privdec.scenario import Scenario
from flower_privdec.words import epsilon_text, peer_ranges

ALONE = "this run alone"

_log = logging.getLogger(__name__)


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: infinity becomes the string "inf"."""
    return UNLIMITED if math.isinf(value) else value


@dataclass(frozen=True)
class Spent:
    """What some peers have spent.

    Attributes:
        epsilons: ε of each peer over all runs in its ledger; ∞ without privacy.
        rounds_run: in how many rounds each took its private steps.
        note: where the budget ended a peer's steps before the plan did; None where it did not.
    """

    epsilons: list[float]
    rounds_run: list[int]
    note: str | None = None


def epsilons(cohort: Cohort, rounds: int) -> list[float]:
    """Return the ε of each peer of a cohort after so many rounds, over all runs in its ledger; ∞ without privacy."""
    if cohort.plan is None:
        return [math.inf] * len(cohort.peers)
    if cohort.ledger is None:
        spent = cohort.plan.epsilons(rounds)
        return [spent[peer] for peer in cohort.peers]
    found: list[float] = cohort.ledger.spending.epsilons(rounds * cohort.steps_per_round).tolist()
    return found


def rounds_run(cohort: Cohort, rounds: int) -> list[int]:
    """Return in how many of the first rounds each peer of a cohort took its private steps."""
    total = np.zeros(len(cohort.peers), dtype=np.int64)
    for round_index in range(rounds):
        total += cohort.active(round_index)
    ran: list[int] = total.tolist()
    return ran


def ledger_folder(scenario: Scenario, out: Path) -> Path:
    """Return where the ledger of a run lies."""
    private = scenario.private
    return Path(private.ledger) if private and private.ledger else out / "ledger"


def ledger_scope(scenario: Scenario) -> str:
    """Say which runs a run's ε counts: all in the ledger that the scenario names, or this one alone."""
    private = scenario.private
    return f"all runs in {private.ledger}" if private and private.ledger else ALONE


def privacy_rows(plan: Protection | None, spent: Spent, scope: str) -> list[dict[str, Any]]:
    """Return each peer's guarantee as the summary says it; ε is "inf" where there is none.

    Args:
        spent: of all peers.
        scope: which runs ε counts.
    """
    unit = {"unit": "example", "adjacency": "zero-out"}
    if plan is None:
        nothing = {"epsilon": UNLIMITED, "delta": 0.0, **unit, "calibration": "none", "claimed_epsilon": None}
        return [{"peer": peer, **nothing, "rounds_run": ran} for peer, ran in enumerate(spent.rounds_run)]
    return [
        {
            "peer": account.peer,
            "epsilon": json_number(total),
            "delta": account.delta,
            **unit,
            "calibration": plan.calibration,
            "claimed_epsilon": claim.epsilon if claim else None,
            "rounds_run": ran,
            "scope": scope,
        }
        for account, total, ran, claim in zip(plan.accounts, spent.epsilons, spent.rounds_run, plan.claims, strict=True)
    ]


def check_budget(cohort: Cohort, ledger: Path) -> None:
    """Refuse a run that its ledger allows no step at all, and warn of one that it allows only some.

    Raises:
        BudgetError: naming what is spent, and the remedy.
    """
    if cohort.ledger is None:
        return
    spending = cohort.ledger.spending
    short = shortages(spending)
    if len(short) == len(spending.accounts) and not any(short.values()):
        raise BudgetError(
            f"{ledger}: other runs over the same data have spent ε = {_already(spending)}, and privacy.epsilon="
            f"{spending.accounts[0].budget:g} allows this run no step; raise the budget, or, if these are other data, "
            "give another privacy.ledger"
        )
    if short:
        _log.warning("%s: %s", ledger, budget_note(spending, cohort.steps_per_round))


def budget_note(spending: Spending, steps_per_round: int) -> str | None:
    """Say where a run's steps end before its plan does because of what other runs have spent, or return None."""
    short = shortages(spending)
    if not short:
        return None
    rounds = sorted({steps // steps_per_round for steps in short.values()})
    some = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return (
        f"after the ε = {_already(spending)} that other runs over the same data have spent, the budget of peers "
        f"{peer_ranges(short)} allows steps in the first {some} of {spending.steps // steps_per_round} rounds only; "
        "after them they train no more and go on exchanging"
    )


def _already(spending: Spending) -> str:
    return epsilon_text(json_number(float(spending.epsilons(spending.start).max())))


def shortages(spending: Spending) -> dict[int, int]:
    """Return the first step that is not allowed, of each peer whose budget does not reach to the end of its plan."""
    pairs = list(zip(spending.accounts, spending.limits.tolist(), strict=True))
    ends = [account.spends[-1].to_round if account.spends else 0 for account, _ in pairs]
    return {account.peer: limit for (account, limit), end in zip(pairs, ends, strict=True) if limit < end}
