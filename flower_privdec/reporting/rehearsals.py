"""What a rehearsal came to: the tables at its end, and its picture, both read from its folder."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import duration, epsilon_text, memory, percent
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.look import (
    GRID,
    INK,
    MUTED,
    SERIES,
    drawing,
    in_percent,
    new_axes,
    new_figure,
    plot_curve,
    plot_spread,
    set_title,
    title_with_legend,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMELINE = "timeline.csv"
PEERS = "peers.csv"
WAITS = "waits.csv"
PICTURE = "plots/rehearsal.png"
HOUR = 3600.0
HELD_UP = 5  # peers that others waited for, in the table
FINISHED = "finished"
CELLS = 400  # peers, above which nobody finds one in a picture, and distributions are drawn
BINS = 40

Line = dict[str, str]


def read_table(path: Path) -> list[Line]:
    """Return the lines of one of a rehearsal's tables.

    Raises:
        ScenarioError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(
            f"{path}: cannot be read ({error}); give a folder that `privdec rehearse` wrote", code="rehearse.table"
        ) from error


# --- text ---


def rehearsal_text(summary: dict[str, Any], folder: Path) -> str:
    """Return what became of the peers, what they waited for, and what they sent, as text."""
    peers = read_table(folder / PEERS)
    ends = [_end_row(end, lines) for end, lines in _by_end(peers).items()]
    table = comparison_text(
        ("end", "peers", "first", "last", "rounds", "ε", "waited", "sent by a peer"), ends, _clock(summary)
    )
    notes = [table, *_held_up(read_table(folder / WAITS), peers)]

    if "lied" in summary:
        notes.append(f"lied: {summary['lied']}")
    if "quarantined" in summary:
        notes.append(f"quarantined: {summary['quarantined']}")
    failed = [line for line in peers if line["end"] != FINISHED]
    for line in failed[:HELD_UP]:
        notes.append(f"peer {line['peer']}: {line['why']}")
    if len(failed) > HELD_UP:
        notes.append(f"and {len(failed) - HELD_UP} more, see {folder / PEERS}")

    if "ledgers_short" in summary:
        notes.append(
            f"warning: the ledgers of peers {summary['ledgers_short']} lack releases, so their ε is too small: "
            "epsilon_released in peers.csv has all"
        )
    for name, words in (("stuck", "nothing happened any more"), ("diverged", "the models diverged")):
        if name in summary:
            notes.append(f"warning: {words}: {summary[name]}")
    return "\n".join(notes)


def _by_end(peers: Iterable[Line]) -> dict[str, list[Line]]:
    """Return the peers by how they ended, those that finished first."""
    groups: dict[str, list[Line]] = {FINISHED: []}
    for line in peers:
        groups.setdefault(line["end"], []).append(line)
    return {end: lines for end, lines in groups.items() if lines}


def _end_row(end: str, lines: Sequence[Line]) -> tuple[str, ...]:
    moments = [float(line["ended_at"]) for line in lines if line["ended_at"]]
    rounds = [int(line["round"]) for line in lines]
    epsilons = [float(line["epsilon"]) for line in lines]
    sent = sum(int(line["bytes_sent"]) for line in lines) / len(lines)

    # Peers that neither worked nor waited have no share of waiting.
    waited = sum(float(line["waited"]) for line in lines)
    seconds = waited + sum(float(line["worked"]) for line in lines)
    waiting = ""
    if seconds:
        waiting = percent(waited / seconds)

    return (
        end.rpartition(".")[2],  # killed, for virtual.killed
        f"{len(lines):,}",
        duration(min(moments, default=None)),
        duration(max(moments, default=None)),
        _span(min(rounds), max(rounds)),
        epsilon_text(max(epsilons)),
        waiting,
        memory(sent),
    )


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _clock(summary: dict[str, Any]) -> str:
    seconds = summary["virtual_seconds"]
    faults = ", ".join(f"{count:,} {kind}" for kind, count in summary["faults"].items()) or "none"
    return f"simulated {duration(seconds)}; {summary['calls']:,} calls, {memory(summary['bytes'])}; faults: {faults}"


def _held_up(waits: Iterable[Line], peers: Sequence[Line]) -> list[str]:
    """Return who kept others waiting longest, as lines of text."""
    seconds: dict[int, float] = {}
    for line in waits:
        if line["waited_for"]:
            other = int(line["waited_for"])
            seconds[other] = seconds.get(other, 0.0) + float(line["seconds"])
    longest = sorted(seconds, key=lambda peer: (-seconds[peer], peer))[:HELD_UP]
    if not longest:
        return []
    named = ", ".join(f"peer {peer} ({duration(seconds[peer])})" for peer in longest)
    return [f"waited for most, by all its neighbours together: {named}"]


# --- the picture ---


def save_picture(folder: Path) -> Path | None:
    """Draw a rehearsal into its folder, and return the path; None, with a warning, if matplotlib is not installed."""
    try:
        with drawing():
            figure = draw_rehearsal(read_table(folder / TIMELINE), read_table(folder / PEERS))
            path = folder / PICTURE
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path, dpi=130, facecolor="white")
            return path
    except ScenarioError as error:
        logging.getLogger(__name__).warning("no picture in %s: %s", folder, error)
        return None


def _unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit in which a time is drawn, in seconds, and its name."""
    if seconds >= HOUR:
        return HOUR, "hours"
    if seconds >= 300:
        return 60.0, "minutes"
    return 1.0, "s"


def draw_rehearsal(timeline: Sequence[Line], peers: Sequence[Line]) -> Figure:
    """Draw rounds, models, ends and waits over simulated time, and every peer as a cell, or how many there are of each.

    Call it within `drawing`.
    """
    figure = new_figure(11.0, 7.4)
    axes = new_axes(figure, 2, 3)
    seconds = _numbers(timeline, "seconds")
    unit, name = _unit_of(seconds[-1])
    clock = seconds / unit

    _draw_rounds(axes[0, 0], clock, timeline)
    _draw_models(axes[0, 1], clock, timeline)
    _draw_ends(axes[0, 2], peers, unit, clock[-1])
    for panel in axes[0]:
        panel.set_xlabel(f"simulated {name}")
        panel.set_xlim(0, clock[-1] * 1.01 or 1.0)

    worked = _numbers(peers, "worked")
    waited = _numbers(peers, "waited")
    together = worked + waited
    share = 100 * np.divide(waited, together, out=np.zeros_like(waited), where=together > 0)
    failed = np.array([line["end"] != FINISHED for line in peers])
    _draw_waits(axes[1, 0], worked / unit, waited / unit, name)
    if len(peers) > CELLS:
        sent, sent_in = _bytes(_numbers(peers, "bytes_sent"))
        _draw_shares(axes[1, 1], share, failed, "Peers by share of their time spent waiting", "%")
        _draw_shares(axes[1, 2], sent, failed, "Peers by what they sent", sent_in)
        return figure

    ended = np.array([float(line["ended_at"]) / unit if line["ended_at"] else math.nan for line in peers])
    _draw_cells(axes[1, 1], share, failed, "Each peer: share of its time spent waiting, %")
    _draw_cells(axes[1, 2], ended, failed, f"Each peer: end, simulated {name}")
    return figure


def _numbers(lines: Sequence[Line], key: str) -> np.ndarray:
    """Return a column as numbers; NaN if a cell is empty."""
    return np.array([float(line[key]) if line[key] else math.nan for line in lines])


def _draw_rounds(axes: Axes, clock: np.ndarray, timeline: Sequence[Line]) -> None:
    plot_curve(axes, clock, _numbers(timeline, "round_median"), 0, of=1, label="median")
    plot_spread(axes, clock, _numbers(timeline, "round_min"), _numbers(timeline, "round_max"), 0, of=1)
    axes.collections[-1].set_label("slowest to quickest")
    axes.set_ylabel("round")
    whole_numbers(axes, "y")
    title_with_legend(axes, "Round of the peers that run", 2)


def _draw_models(axes: Axes, clock: np.ndarray, timeline: Sequence[Line]) -> None:
    curves = {
        "accuracy_mean_model": "mean model",
        "accuracy_peer_mean": "peers, mean",
        "accuracy_peer_min": "worst",
    }
    for index, (key, label) in enumerate(curves.items()):
        plot_curve(axes, clock, 100 * _numbers(timeline, key), index, of=len(curves), label=label)
    axes.set_ylabel("test accuracy")
    in_percent(axes)
    title_with_legend(axes, "Quality of the models", 3)


def _draw_ends(axes: Axes, peers: Sequence[Line], unit: float, last: float) -> None:
    ends = _by_end(peers)
    for index, (end, lines) in enumerate(ends.items()):
        moments = np.sort([float(line["ended_at"]) / unit for line in lines if line["ended_at"]])
        steps = np.concatenate([[0.0], moments, [last]])
        counts = np.concatenate([np.arange(len(moments) + 1), [len(moments)]])
        name = end.rpartition(".")[2]
        plot_curve(axes, steps, counts, index, of=len(ends), label=f"{name} ({len(lines):,})", drawstyle="steps-post")
    axes.set_ylabel("peers")
    whole_numbers(axes, "y")
    title_with_legend(axes, "Peers that have ended", 2)


def _draw_waits(axes: Axes, worked: np.ndarray, waited: np.ndarray, name: str) -> None:
    """Draw each peer's time, those that waited least on the left."""
    order = np.argsort(waited, kind="stable")
    places = np.arange(len(order))
    axes.stackplot(places, worked[order], waited[order], colors=[SERIES[0], GRID], labels=["work", "waiting"])
    axes.set_xlabel("peers, by how long they waited")
    whole_numbers(axes)
    axes.set_ylabel(f"simulated {name}")
    title_with_legend(axes, "Where the time of each peer went", 2)


def _bytes(sent: np.ndarray) -> tuple[np.ndarray, str]:
    """Return bytes in a unit in which their numbers are short, and the unit's name."""
    most = sent.max(initial=0.0)
    for size, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if most >= size:
            return sent / size, name
    return sent, "bytes"


def _draw_shares(axes: Axes, values: np.ndarray, failed: np.ndarray, title: str, unit: str) -> None:
    """Draw how many peers have which value; those that failed are hatched, on top."""
    groups = [values[~failed]]
    labels = ["finished"]
    colours = [SERIES[0]]
    if failed.any():
        groups.append(values[failed])
        labels.append("not finished")
        colours.append(SERIES[1])
    axes.hist(groups, bins=BINS, stacked=True, color=colours, label=labels, edgecolor="white", linewidth=0.3)
    if failed.any():
        for bar in axes.patches[-BINS:]:
            bar.set_hatch("////")

    middle = float(np.median(values))
    axes.axvline(middle, color=INK, linewidth=1.0, linestyle="dashed", label=f"median {middle:.3g} {unit}")
    axes.set_xlabel(unit)
    axes.set_ylabel("peers")
    title_with_legend(axes, title, 2)


def _draw_cells(axes: Axes, values: np.ndarray, failed: np.ndarray, title: str) -> None:
    """Draw a value of each peer as a cell, row by row; a peer that failed has a dot."""
    width = math.ceil(math.sqrt(len(values)))
    height = math.ceil(len(values) / width)
    cells = np.full(width * height, math.nan)
    cells[: len(values)] = values
    image = axes.imshow(cells.reshape(height, width), cmap="viridis", interpolation="nearest", aspect="auto")
    colours = axes.figure.colorbar(image, ax=axes, fraction=0.05, format=axes.yaxis.get_major_formatter())
    colours.outline.set_visible(False)

    places = np.flatnonzero(failed)
    if len(places):
        size = max(1.0, 300 / width)
        axes.scatter(places % width, places // width, s=size, color=SERIES[1], edgecolors=INK, linewidths=0.3)
        axes.set_xlabel("dots: ended with an error, or not at all", color=MUTED, fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    set_title(axes, title, size=9.5)
