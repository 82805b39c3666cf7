"""What `privdec audit` prints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer

from flower_privdec.audits.app_audit import audit_app
from flower_privdec.audits.audit import CANARIES, REPLICA, Audit, AuditedPeers, audit
from flower_privdec.audits.one_run import OneRun, audit_in_one_run
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.common.files import check_file_place
from flower_privdec.common.formatting import epsilon_text, peer_ranges, setting
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.look import (
    SERIES,
    categories_down,
    log_scale,
    look,
    new_axes,
    new_figure,
    title_with_legend,
)
from flower_privdec.reporting.plots import save_picture
from flower_privdec.reporting.progress import rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")
BINS = 60  # of a histogram
MOST_DRAWN = 12  # groups of peers in a picture
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
    if plot is not None:
        check_file_place("plot", plot)
    if one_run is not None:
        print_one_run(audit_in_one_run(experiment, canaries=one_run, seed=seed), as_json)
        return

    with rounds(experiment.scenario.name, "canary") as show:
        result = audit(experiment, trials=trials, replica=replica, seed=seed, on_trials=show)

    if as_json:
        text = json.dumps(result.to_json(), indent=2)
    else:
        text = audit_text(result)
    typer.echo(text)
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
        name: the name of the app.
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
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        guesses = f"{result.right:,} of {result.guesses:,} guesses right, of {result.canaries:,} canaries"
        printed = f"printed as {epsilon_text(result.epsilon)}, at δ = {setting(result.delta)}"
        typer.echo(f"{result.method}: {guesses}\nε is at least {result.epsilon_lower_bound:.2f}, and {printed}")
    if not result.holds:
        raise RunError(f"audit: {result.verdict}", code="audit.refuted")


def draw_audit(result: Audit) -> Figure:
    """Draw ε as claimed, printed and shown, by group, and the likelihood ratios of the first; within `drawing`."""
    figure = new_figure(9.0, 3.2)
    bounds, ratios = new_axes(figure, 1, 2)[0]
    _draw_bounds(bounds, result.groups[:MOST_DRAWN])
    _draw_ratios(ratios, result.groups[0].scores)
    return figure


def _draw_bounds(axes: Axes, groups: Sequence[AuditedPeers]) -> None:
    """Draw a line for each group, from the top, with its ε as claimed, as printed and as shown."""
    claimed = [math.nan if group.claimed_epsilon is None else group.claimed_epsilon for group in groups]
    marked = [
        ("|", "printed", [group.epsilon for group in groups]),
        (">", "replica: at least", [group.replica_lower_bound for group in groups]),
        ("D", "canaries: at least", [group.canary_lower_bound for group in groups]),
        ("x", "claimed", claimed),
    ]
    for (marker, label, values), color in zip(marked, SERIES, strict=False):
        if all(map(math.isnan, values)):
            continue
        size = 14 if marker == "|" else 5
        axes.plot(values, range(len(groups)), marker, color=color, markersize=size, markeredgewidth=2, label=label)

    categories_down(axes, [f"peers {peer_ranges(set(group.peers))}" for group in groups])
    axes.set_xlim(left=0)
    axes.set_xlabel("ε")
    title_with_legend(axes, "ε as printed, and the least that attacks show", 2)


def _draw_ratios(axes: Axes, scores: tuple[np.ndarray, np.ndarray]) -> None:
    """Draw the histograms of scores without and with the example."""
    finite = [part[np.isfinite(part)] for part in scores]
    edges = np.histogram_bin_edges(np.concatenate(finite), BINS).tolist()
    labels = ("without the example", "with it")
    for index, (part, label) in enumerate(zip(finite, labels, strict=True)):
        its = look(index)
        axes.hist(part, edges, histtype="step", color=its.colour, linestyle=its.line, linewidth=1.4, label=label)

    log_scale(axes)
    axes.set_xlabel("log likelihood ratio")
    axes.set_ylabel("trials")
    title_with_legend(axes, "Likelihood ratios of the replica's trials", 2)


def audit_text(result: Audit) -> str:
    """Return an audit as a table, with what its figures are."""
    rows = []
    for group in result.groups:
        claimed = "–"
        if group.claimed_epsilon is not None:
            claimed = epsilon_text(group.claimed_epsilon)
        peers = peer_ranges(set(group.peers))
        shown = [f"{bound:.2f}" for bound in (group.canary_lower_bound, group.replica_lower_bound)]
        rows.append([peers, setting(group.delta), claimed, epsilon_text(group.epsilon), *shown])

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
