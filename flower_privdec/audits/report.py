"""What `privdec audit` prints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer

from flower_privdec.audits.app_audit import audit_app
from flower_privdec.audits.audit import CANARIES, REPLICA, Audit, audit
from flower_privdec.audits.one_run import OneRun, audit_in_one_run
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.formatting import epsilon_text, peer_ranges, setting
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.plots import DASHES, SERIES, new_figure, save_picture
from flower_privdec.reporting.progress import rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")
BINS, MOST_DRAWN = 60, 12  # of a histogram; groups of peers in a picture
HEADS = ["peers", "δ", "claimed ε", "printed ε", "canaries: ε ≥", "replica: ε ≥"]


def print_audit(
    experiment: Experiment,
    as_json: bool,
    *,
    trials: int,
    replica: int,
    seed: int,
    one_run: int | None = None,
    plot: Path | None = None,
) -> None:
    """Audit a scenario and print the result.

    Args:
        one_run: how many canaries of each peer to guess in one run of real training, instead of the other two attacks.
        plot: a picture to write of the other two, .svg, .png or .pdf.

    Raises:
        ScenarioError: the picture is of another kind, or cannot be written.
        RunError: the printed ε is refuted, or something is not as planned.
    """
    if plot is not None and plot.suffix.lower() not in PICTURES:
        kinds = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
        raise ScenarioError(f"--plot {plot} must be {kinds}", code="audit.plot")
    if one_run is not None:
        print_one_run(audit_in_one_run(experiment, canaries=one_run, seed=seed), as_json)
        return
    with rounds(experiment.scenario.name, "canary") as show:
        result = audit(experiment, trials=trials, replica=replica, seed=seed, on_trials=show)
    typer.echo(json.dumps(result.to_json(), indent=2) if as_json else audit_text(result))
    if plot is not None:
        save_picture(lambda: draw_audit(result), plot, "plot")
    if not result.holds:
        raise RunError(f"audit: {result.verdict}", code="audit.refuted")


def print_app_audit(
    name: str,
    run: Callable[..., object],
    n_nodes: int,
    as_json: bool,
    *,
    trials: int,
    one_run: int | None,
    seed: int,
) -> None:
    """Audit a Flower app and print the result.

    Args:
        name: of the app.
        run: runs it once, over nodes whose own folder is the argument `folder`.
        n_nodes, trials, one_run, seed: see `app_audit`.

    Raises:
        RunError: the printed ε is refuted, or something is not as planned.
    """
    with rounds(name, "peer" if one_run is None else "run") as show, redirect_stdout(sys.stderr):
        result = audit_app(
            lambda folder: run(folder=folder), n_nodes, trials=trials, one_run=one_run, seed=seed, on_trials=show
        )
    print_one_run(result, as_json)


def print_one_run(result: OneRun, as_json: bool) -> None:
    """Print an audit in one run, or of a Flower app.

    Raises:
        RunError: the printed ε is refuted, or something is not as planned.
    """
    typer.echo(
        json.dumps(result.to_json(), indent=2)
        if as_json
        else f"{result.method}: {result.right:,} of {result.guesses:,} guesses right, of {result.canaries:,} canaries\n"
        f"ε is at least {result.epsilon_lower_bound:.2f}, and printed as {epsilon_text(result.epsilon)}, at "
        f"δ = {setting(result.delta)}"
    )
    if not result.holds:
        raise RunError(f"audit: {result.verdict}", code="audit.refuted")


def draw_audit(result: Audit) -> Figure:
    """Draw ε as claimed, printed and shown, by group, and the likelihood ratios of the first; within `drawing`."""
    figure = new_figure(9.0, 3.2)
    bounds, ratios = figure.subplots(1, 2)
    shown = result.groups[:MOST_DRAWN]
    rows = range(len(shown))
    for series, (marker, label, values) in enumerate(
        [
            ("|", "printed", [group.epsilon for group in shown]),
            (">", "replica: at least", [group.replica_lower_bound for group in shown]),
            (">", "canaries: at least", [group.canary_lower_bound for group in shown]),
            ("x", "claimed", [math.nan if group.claimed_epsilon is None else group.claimed_epsilon for group in shown]),
        ]
    ):
        if not all(map(math.isnan, values)):
            size = 14 if marker == "|" else 6
            bounds.plot(values, rows, marker, color=SERIES[series], markersize=size, markeredgewidth=2, label=label)
    bounds.set_yticks(rows, [f"peers {peer_ranges(set(group.peers))}" for group in shown])
    bounds.set_ylim(len(shown) - 0.5, -0.5)
    bounds.set_xlim(left=0)
    bounds.set_title("ε", loc="left", fontsize=10.5)
    scores = [part[np.isfinite(part)] for part in shown[0].scores]
    edges = np.histogram_bin_edges(np.concatenate(scores), BINS)
    for series, (part, label) in enumerate(zip(scores, ("without the example", "with it"), strict=True)):
        ratios.hist(part, edges, histtype="step", color=SERIES[series], linestyle=tuple(DASHES)[series], label=label)
    ratios.set_yscale("log")
    ratios.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ratios.set_title("log likelihood ratio of the replica's trials", loc="left", fontsize=10.5)
    for axes in (bounds, ratios):
        axes.legend(frameon=False, fontsize=8.5, loc="best")
    return figure


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
