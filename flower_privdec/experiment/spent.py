"""How much the peers of a run have spent so far, and in how many rounds, according to their ledger."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.formatting import epsilon_text, peers_named
from flower_privdec.core.cohort import Cohort
from flower_privdec.graph.participation import Participation, activity, expected_rounds
from flower_privdec.privacy.ledger.spending import Spending
from flower_privdec.privacy.mechanism.events import Adversary
from flower_privdec.privacy.mechanism.protection import UNLIMITED, breaches
from flower_privdec.scenario import Scenario

ALONE = "this run alone"

_log = logging.getLogger(__name__)


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: infinity becomes the string "inf"."""
    return UNLIMITED if math.isinf(value) else value


@dataclass(frozen=True)
class Spent:
    """What some peers have spent, each list in their order.

    Attributes:
        epsilons: ε of each peer over all runs in its ledger; ∞ without privacy.
        deltas: the δ of each; 0 without privacy.
        claimed: the ε that a paper's formula claims, if the formula made the noise; else None.
        rounds_run: in how many rounds each took its private steps.
        note: says if the budget ended a peer's steps before the plan did; else None.
        replies: ε of the replies that one neighbour of each receives, over all runs in its ledger, which is not a bound
            on all that it hears; empty if all of a peer's messages go to everybody.
        if_all_collude: ε of each if all other peers collude, over all runs in its ledger; empty if that is `epsilons`.
        colluding: with how many peers an adversary may collude for `epsilons` to hold; None for all.
        breaches: which conditions of a paper's formula do not hold, so that `claimed` does not apply, see `breaches`.
        counted: how noise that cancels is counted, and why; None if none does.
    """

    epsilons: list[float]
    deltas: list[float]
    claimed: list[float | None]
    rounds_run: list[int]
    note: str | None = None
    replies: list[float] = field(default_factory=list)
    if_all_collude: list[float] = field(default_factory=list)
    colluding: int | None = None
    breaches: dict[str, str] = field(default_factory=dict)
    counted: str | None = None

    @classmethod
    def of(cls, cohort: Cohort, rounds: int) -> Spent:
        """Return what a cohort's peers have spent after so many rounds."""
        ran = rounds_run(cohort, rounds)
        protection = cohort.protection
        if protection is None:
            n_rows = len(cohort.peers)
            return cls([math.inf] * n_rows, [0.0] * n_rows, [None] * n_rows, ran)

        accounts = protection.accounts
        note = None
        if cohort.ledger is not None:
            accounts = cohort.ledger.spending.accounts
            note = budget_note(cohort.ledger.spending, cohort.steps_per_round)
        others = {name: epsilons(cohort, rounds, adversary) for name, adversary in protection.others.items()}
        return cls(
            epsilons=epsilons(cohort, rounds),
            deltas=[account.delta for account in accounts],
            claimed=[claim.epsilon if claim else None for claim in protection.claims],
            rounds_run=ran,
            note=note,
            colluding=None if protection.pairs is None else protection.pairs.colluding,
            breaches=breaches(protection),
            counted=None if protection.pairs is None else protection.pairs.counted,
            **others,
        )


def epsilons(cohort: Cohort, rounds: int, adversary: Adversary | None = None) -> list[float]:
    """Return the ε of each peer of a cohort after so many rounds, over all runs in its ledger; ∞ without privacy.

    Args:
        adversary: who looks; by default the adversary of the peer's budget.
    """
    if cohort.protection is None:
        return [math.inf] * len(cohort.peers)
    if cohort.ledger is None:
        return cohort.protection.epsilons(rounds, adversary)
    values: list[float] = cohort.ledger.spending.epsilons(rounds * cohort.steps_per_round, adversary).tolist()
    return values


def rounds_run(cohort: Cohort, rounds: int) -> list[int]:
    """Return in how many of the first rounds each peer of a cohort took its private steps."""
    ran = np.zeros(len(cohort.peers), dtype=np.int64)
    for round_index in range(rounds):
        ran += cohort.active(round_index)
    counts: list[int] = ran.tolist()
    return counts


def ledger_folder(scenario: Scenario, out: Path, inherited: Path | None = None) -> Path:
    """Return where the ledger of a run lies; `inherited` is that of the run it starts from."""
    private = scenario.private
    if private is not None and private.ledger:
        return Path(private.ledger).expanduser()
    return inherited or out / "ledger"


def privacy_rows(
    scenario: Scenario, spent: Spent, participation: Participation, rounds: int, inherited: Path | None = None
) -> list[dict[str, Any]]:
    """Return each peer's guarantee as the summary has it; ε is "inf" without one.

    `epsilon` bounds what colluding peers learn from all that a peer sends: all others, or, if noise cancels between
    peers, `colluding` of them; `epsilon_if_all_collude` then bounds what all others learn. `epsilon_of_replies_to_one`,
    if there is one, bounds what one of them learns only from the replies to it: it hears more than those.

    Args:
        spent: what all peers have spent, in order.
        participation: who is active, by which the rounds to be expected are counted.
        rounds: that the run has done.
        inherited: the folder of the ledger of the run that it starts from, in which it is charged.
    """
    expected = expected_rounds(participation, rounds).tolist()
    private = scenario.private
    rows = []
    facts = zip(spent.epsilons, spent.deltas, spent.claimed, spent.rounds_run, strict=True)
    for peer, (total, delta, claimed, ran) in enumerate(facts):
        row: dict[str, Any] = {
            "peer": peer,
            "epsilon": json_number(total),
            "delta": delta,
            "unit": "example",
            "adjacency": "zero-out",
            "calibration": "none" if private is None else private.calibration,
            "claimed_epsilon": claimed,
            "rounds_run": ran,
            "expected_rounds": round(expected[peer], 6),
        }
        if spent.replies:
            row["epsilon_of_replies_to_one"] = json_number(spent.replies[peer])
        if spent.if_all_collude:
            row["colluding"] = spent.colluding
            row["epsilon_if_all_collude"] = json_number(spent.if_all_collude[peer])
        if private is not None:
            shared = private.ledger or inherited
            row["scope"] = f"all runs in {shared}" if shared else ALONE
        rows.append(row)

    return rows


def check_budget(cohort: Cohort, ledger: Path) -> None:
    """Refuse a run that its ledger allows no step at all; warn if it allows only some of them.

    Raises:
        BudgetError: the message names what is spent, and the remedy.
    """
    if cohort.ledger is None:
        return
    spending = cohort.ledger.spending
    short = shortages(spending)
    if len(short) == len(spending.accounts) and not any(short.values()):
        raise BudgetError(
            f"{ledger}: other runs over the same data have spent ε = {_already(spending)}, and privacy.epsilon="
            f"{spending.accounts[0].budget:g} allows this run no step; raise the budget, or, if these are other data, "
            "give another privacy.ledger",
            code="ledger.spent-elsewhere",
        )
    if short:
        _log.warning("%s: %s", ledger, budget_note(spending, cohort.steps_per_round))


def budget_note(spending: Spending, steps_per_round: int) -> str | None:
    """Say where a run's steps end because of what other runs have spent; None if its plan ends first."""
    short = shortages(spending)
    if not short:
        return None
    rounds = _span(steps // steps_per_round for steps in short.values())
    return (
        f"after the ε = {_already(spending)} that other runs over the same data, or starts of this one before, have "
        f"spent, the budget of {peers_named(short)} allows steps in the first {rounds} of "
        f"{spending.steps // steps_per_round} rounds only; after them they stop training and only exchange"
    )


def shortfall(participation: Participation, ran: Sequence[int], rounds: int) -> str | None:
    """Say which peers' budgets end before the last round that they take part in; None if all budgets last.

    Args:
        ran: in how many of these rounds each peer, of all in order, takes its private steps.
    """
    planned = activity(participation, rounds).sum(axis=0)
    short = [peer for peer, (count, wanted) in enumerate(zip(ran, planned, strict=True)) if count < wanted]
    if not short:
        return None

    taken = _span(ran[peer] for peer in short)
    wanted = _span(planned[peer] for peer in short)
    return (
        f"the budget of {peers_named(short)} ends after {taken} of their {wanted} rounds, and they stop "
        "training: raise privacy.epsilon or the noise, or plan fewer rounds"
    )


def last_step(participation: Participation, ran: Sequence[int], rounds: int) -> int | None:
    """Return the round after which no peer trains; None if some budget lasts for all rounds of its peer.

    Args:
        ran: see `shortfall`.
    """
    active = activity(participation, rounds)
    counts = np.asarray(ran)
    if not (counts < active.sum(0)).all():
        return None
    trained = np.flatnonzero((active & (active.cumsum(0) <= counts)).any(axis=1))
    return int(trained[-1]) + 1 if len(trained) else 0


def _span(counts: Iterable[int]) -> str:
    ascending = sorted(counts)
    least = ascending[0]
    most = ascending[-1]
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _already(spending: Spending) -> str:
    """Return the ε that other runs have spent at the costliest peer, with the adversary if that makes a difference."""
    spent = epsilon_text(json_number(float(spending.epsilons(spending.start).max())))
    if not spending.others_cancelled:
        return spent
    return f"{spent} (with {spending.accounts[0].adversary}, from whom noise that cancelled hides less)"


def shortages(spending: Spending) -> dict[int, int]:
    """Return the first step that is not allowed, for each peer whose budget ends before its plan does."""
    first_refused = {}
    for account, limit in zip(spending.accounts, spending.limits.tolist(), strict=True):
        end = account.spends[-1].to_step if account.spends else 0
        if limit < end:
            first_refused[account.peer] = limit
    return first_refused
