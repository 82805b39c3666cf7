"""What `privdec audit` prints."""

from __future__ import annotations

import json
import math

import typer

from flower_privdec.audits.audit import CANARIES, REPLICA, Audit, audit
from flower_privdec.audits.one_run import ONE_RUN, OneRun, audit_in_one_run
from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import epsilon_text, peer_ranges, setting
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.progress import rounds

HEADS = ["peers", "δ", "claimed ε", "printed ε", "canaries: ε ≥", "replica: ε ≥"]


def print_audit(
    experiment: Experiment, as_json: bool, *, trials: int, replica: int, seed: int, one_run: int | None = None
) -> None:
    """Audit a scenario and print the result.

    Args:
        one_run: how many canaries of each peer to guess in one run of real training, instead of the other two attacks.

    Raises:
        RunError: the printed ε is refuted, or something is not as planned.
    """
    if one_run is not None:
        _print_one_run(audit_in_one_run(experiment, canaries=one_run, seed=seed), as_json)
        return
    with rounds(experiment.scenario.name, "canary") as show:
        result = audit(experiment, trials=trials, replica=replica, seed=seed, on_trials=show)
    typer.echo(json.dumps(result.to_json(), indent=2) if as_json else audit_text(result))
    if not result.holds:
        raise RunError(f"audit: {result.verdict}", code="audit.refuted")


def _print_one_run(result: OneRun, as_json: bool) -> None:
    facts = {
        "claimed_epsilon": None,
        "epsilon": "inf" if math.isinf(result.epsilon) else result.epsilon,
        "epsilon_lower_bound": result.epsilon_lower_bound,
        "method": ONE_RUN,
        "trials": result.canaries,
        "delta": result.delta,
        "guesses": result.guesses,
        "right": result.right,
    }
    typer.echo(
        json.dumps(facts, indent=2)
        if as_json
        else f"{ONE_RUN}: {result.right} of {result.guesses} guesses right, of {result.canaries} canaries\n"
        f"ε is at least {result.epsilon_lower_bound:.2f}, and printed as {epsilon_text(result.epsilon)}, at "
        f"δ = {setting(result.delta)}"
    )
    if result.epsilon_lower_bound > result.epsilon:
        raise RunError(
            f"audit: ε = {result.epsilon:.4g} is refuted: at least {result.epsilon_lower_bound:.4g}",
            code="audit.refuted",
        )


def audit_text(result: Audit) -> str:
    """Return an audit as a table, with what its figures are."""
    rows = [
        [
            peer_ranges(set(group.peers)),
            setting(group.delta),
            "–" if group.claimed_epsilon is None else epsilon_text(group.claimed_epsilon),
            epsilon_text(group.epsilon),
            f"{group.canary_lower_bound:.2f}",
            f"{group.replica_lower_bound:.2f}",
        ]
        for group in result.groups
    ]
    first = result.groups[0]
    notes = [
        f"{CANARIES}: {first.trials:,} trials of {result.rounds:,} rounds; {REPLICA}: {first.replica_trials:,} trials",
        f"all lower bounds hold together with a chance of at least {result.confidence:.0%}; few trials show little",
    ]
    if any(group.claim_refuted for group in result.groups):
        notes.append("the claimed ε of the paper's formula is refuted; the printed one is the accountant's")
    if result.holds:
        notes.append(result.verdict)
    return comparison_text(HEADS, rows, "\n".join(notes))
