"""Ledgers as their owner reads them: verified, with what each run spent and what is left."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.formatting import epsilon_text, setting
from flower_privdec.experiment.recorder import NAME as METRICS
from flower_privdec.experiment.recorder import SCENARIO as RUN_SCENARIO
from flower_privdec.experiment.spent import json_number
from flower_privdec.privacy.accountant.accounting import (
    Alternatives,
    check_delta,
    dp_accounting_epsilon,
    epsilon_of_runs,
)
from flower_privdec.privacy.ledger.segments import FORMAT, Totals, verified
from flower_privdec.privacy.ledger.spending import costs_in, releases_in, runs_in
from flower_privdec.privacy.mechanism.events import Adversary
from flower_privdec.reporting.console import comparison_text
from flower_privdec.scenario import load_scenario

logger = logging.getLogger(__name__)

OTHER = "dp-accounting's ε"
PREFIX = FORMAT.rpartition("-")[0].encode()


def ledgers_below(path: Path) -> list[Path]:
    """Return the ledgers at a path: the file itself, or all below a folder.

    If the last file of a ledger is missing, its sealed files count. A file that is named like a ledger and does not
    begin as one is logged.

    Raises:
        ScenarioError: there is none.
    """
    if path.is_file():
        return [path]

    named = {file for file in path.rglob("*.jsonl") if file.is_file() and file.name != METRICS}
    sealed = set()
    for file in path.rglob("*.sealed"):
        source = file.name.rsplit(".", 2)[0]  # SOURCE.NUMBER.sealed
        sealed.add(file.with_name(f"{source}.jsonl"))
    ledgers = sealed | {file for file in named if _is_ledger(file)}
    for other in sorted(named - ledgers):
        logger.warning("%s does not begin as a ledger does, and is not counted", other)
    if not ledgers:
        raise ScenarioError(
            f"{path}: has no ledger; give one, SOURCE.jsonl, or a folder with some, such as runs/NAME or a peer's",
            code="ledger.none",
        )
    return sorted(ledgers)


def delta_near(path: Path) -> float:
    """Return the δ of the run in whose folder a ledger lies, or of the run at a path.

    Raises:
        ScenarioError: there is no run around it, or its peers have several δ.
    """
    path = path.absolute()
    for folder in (path, *path.parents[:2]):  # runs/NAME, or runs/NAME/ledger/SOURCE.jsonl
        if not (folder / RUN_SCENARIO).is_file():
            continue
        private = load_scenario(folder / RUN_SCENARIO).private
        if private is None:
            continue

        # Peers may have a δ each.
        of_peers = private.delta
        if not isinstance(of_peers, tuple):
            of_peers = (of_peers,)
        if len(set(of_peers)) == 1:
            return of_peers[0]

    raise ScenarioError(
        f"{option('delta')} is missing, and no run with one δ lies around {path}: give it, as {option('delta', 1e-5)}",
        code="ledger.no-delta",
    )


def _is_ledger(path: Path) -> bool:
    with path.open("rb") as file:
        return PREFIX in file.read(100)


def ledger_facts(
    path: Path, delta: float, budget: float | None = None, colluding: int | None = None, *, check: bool = False
) -> dict[str, Any]:
    """Verify a whole ledger and return what it says.

    Args:
        path: the path of SOURCE.jsonl; sealed segments lie beside it.
        delta: at which ε is computed, in (0, 1): a ledger holds releases, and each run states its own δ.
        budget: an ε of which to return what is left.
        colluding: the number of peers that collude with the adversary; None for all other peers together.
        check: whether dp-accounting composes the same events too, as `dp_accounting` of each run and of all together:
            an ε, or None if it has no event for one of the mechanisms.

    Returns:
        ledger, source, lines, delta, colluding; runs: of each its id, the step before which all are charged, the number
            of its peers, the ε of only that run, and the environment that drew its noise; epsilon: of all runs
            together, for an example that was at the costliest peer in each partition of the data; against: if noise
            cancelled between peers in some run, pairs of a number of colluding peers and the ε of all runs together
            against it, the last of all other peers (None); left: of the budget, None without one; unfinished: bytes of
            a last line that was never written whole, which pays for nothing. An infinite ε is the string "inf".

    Raises:
        BudgetError: the ledger cannot be read or fails verification, which names the line.
        ScenarioError: δ is not in (0, 1), or the budget not above 0 and finite.
    """
    check_delta(delta)
    if budget is not None and not 0 < budget < math.inf:
        raise ScenarioError(f"{option('epsilon', budget)} must be a budget, > 0 and finite", code="ledger.budget")

    totals = Totals()
    lines = 0
    source = ""
    size = 0
    for segment, entries in verified(path):
        totals.count(entries)
        lines += len(entries)
        source = segment.source
        size = segment.size

    # A line that was never written whole pays for nothing. Whole lines there were added by a run meanwhile.
    rest = path.read_bytes()[size:]
    unfinished = 0 if b"\n" in rest else len(rest)

    adversary = Adversary(colluding)
    costs = runs_in(totals.entries, adversary)
    together = _spent(costs_in(totals.entries, adversary), delta, check)
    return {
        "ledger": str(path),
        "source": source,
        "lines": lines,
        "delta": delta,
        "runs": [_run_facts(run, totals, alternatives, delta, check) for run, alternatives in costs.items()],
        "colluding": colluding,
        **together,
        "against": _by_colluders(totals, delta),
        "left": None if budget is None else max(0.0, budget - float(together["epsilon"])),
        "unfinished": unfinished,
    }


def _by_colluders(totals: Totals, delta: float) -> list[tuple[int | None, float | str]]:
    """Return the ε of all runs against each number of colluders that the ledger records, and last against all."""
    releases = releases_in(totals.entries)
    numbers = sorted({colluding for release in releases for colluding, _ in release.against})
    if not numbers:
        return []

    by_colluders = list[tuple[int | None, float | str]]()
    for colluding in (*numbers, None):
        costs = costs_in(totals.entries, Adversary(colluding))
        by_colluders.append((colluding, json_number(epsilon_of_runs(costs, delta))))
    return by_colluders


def _spent(runs: Sequence[Alternatives], delta: float, check: bool) -> dict[str, Any]:
    """Return the ε of runs together, and dp-accounting's if it is asked for."""
    facts: dict[str, Any] = {"epsilon": json_number(epsilon_of_runs(runs, delta))}
    if check:
        other = dp_accounting_epsilon(runs, delta)
        facts["dp_accounting"] = None if other is None else json_number(other)
    return facts


def _run_facts(run: str, totals: Totals, alternatives: Alternatives, delta: float, check: bool) -> dict[str, Any]:
    entries = [entry for entry in totals.entries if entry.run.id == run]
    return {
        "run": run,
        "steps": max(entry.to_step for entry in entries),
        "peers": len({peer for entry in entries for charge in entry.charges for peer in charge.peers}),
        **_spent([alternatives], delta, check),
        "environment": entries[-1].run.environment,
    }


def print_ledgers(
    path: Path,
    delta: float,
    budget: float | None,
    as_json: bool,
    colluding: int | None = None,
    *,
    check: bool = False,
) -> None:
    """Print what the ledgers at a path say; see `ledger_facts`."""
    facts = [ledger_facts(one, delta, budget, colluding, check=check) for one in ledgers_below(path)]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return

    heads = ["run", "drawn by", "steps", "peers", "ε"]
    if check:
        heads.append(OTHER)
    for one in facts:
        rows = []
        for run in one["runs"]:
            cells = [run["run"][:8], run["environment"], f"{run['steps']:,}", str(run["peers"])]
            rows.append(cells + _epsilons(run))
        note = _together_text(one, delta, budget, colluding, check)

        typer.echo(f"{one['ledger']}: {one['lines']:,} lines, verified")
        if one["unfinished"]:
            typer.echo(
                f"unfinished last line of {one['unfinished']:,} bytes: an interrupted write, or a file that was cut"
            )
        typer.echo(comparison_text(heads, rows, note))
        if one["against"]:
            by_colluders = [[str(Adversary(number)), epsilon_text(value)] for number, value in one["against"]]
            typer.echo(comparison_text(["adversary", "ε"], by_colluders, "of all runs together"))


def _together_text(
    facts: dict[str, Any], delta: float, budget: float | None, colluding: int | None, check: bool
) -> str:
    """Return the line on all runs of a ledger together."""
    ours, *theirs = _epsilons(facts)
    text = f"all together: ε = {ours}"
    if check:
        text += f" ({OTHER}: {theirs[0]})"
    text += f" at δ = {setting(delta)}"
    if facts["against"]:
        text += f", with {Adversary(colluding)}"
    if facts["left"] is not None:
        rounded_down = math.floor(1000 * facts["left"]) / 1000
        text += f"; {rounded_down:g} left of {epsilon_text(budget)}"
    if check and any(run["dp_accounting"] is None for run in facts["runs"]):
        text += "; –: dp-accounting has no event for uniform or block sampling under zero-out"
    return text


def _epsilons(facts: dict[str, Any]) -> list[str]:
    """Return ε and, if it was asked for, dp-accounting's."""
    others = [facts["dp_accounting"]] if "dp_accounting" in facts else []
    return [epsilon_text(facts["epsilon"]), *("–" if other is None else epsilon_text(other) for other in others)]
