"""Curves of runs over their rounds: PNG files in a run's folder, and SVG that follows the page's colours."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.reporting.run_folder import RunGroup, read_result
from flower_privdec.reporting.wording import main_loss, main_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS = "mean of the seeds; band: their standard deviation"
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#fefefe"
SERIES = ("#2563c9", "#c2410c", "#15803d", "#8b3fc4", "#c2307a", "#8a6100", "#0d9488", "#57606b")
DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}  # matplotlib's name: the name in CSS
PAGE_COLOURS = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"series-{i}" for i, colour in enumerate(SERIES)
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is one
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Curve:
    """One quantity over the rounds.

    Attributes:
        name: of its file.
        title: of the picture.
        value: reads it from a line of metrics.jsonl of a run of an algorithm, or None.
        band: reads the least and the most over the peers, where they are known.
        spread: what the band of a single run shows; "" where it has none.
        log: whether the axis is logarithmic.
        share: whether it is a fraction, shown in percent.
    """

    name: str
    title: str
    value: Callable[[dict[str, Any], str], float | None]
    band: Callable[[dict[str, Any]], tuple[float | None, float | None]] | None = None
    spread: str = ""
    log: bool = False
    share: bool = False

    def heading(self, groups: Sequence[RunGroup]) -> str:
        """Return the title of a picture of some runs, with the meaning of its bands."""
        spread = SEEDS if any(len(group.runs) > 1 for group in groups) else self.spread
        return f"{self.title} ({spread})" if spread else self.title


def _own_label_curve(name: str, title: str, models: str) -> Curve:
    def read(metrics: dict[str, Any], which: str) -> float | None:
        accuracies = metrics.get("personalized", {}).get(models)
        return None if accuracies is None else 100 * float(accuracies[which])

    return Curve(
        name,
        f"Accuracy on the peers' own labels, {title}",
        lambda m, _: read(m, "mean"),
        lambda m: (read(m, "min") or 0.0, read(m, "max") or 0.0),
        "band: the peers",
        share=True,
    )


def metric_curve(name: str, kind: dict[str, Any]) -> Curve:
    """Return the curve of a metric, of which `kind` has title and share."""
    factor = 100 if kind["share"] else 1

    def scaled(value: float | None) -> float | None:
        return None if value is None else factor * value

    return Curve(
        name,
        f"Test {kind['title']} of the mean model",
        lambda m, algorithm: scaled(main_value(algorithm, m.get(name))),
        lambda m: (scaled(m[name]["peer_min"]), scaled(m[name]["peer_max"])),
        "band: the peers' models",
        share=kind["share"],
    )


def curves_of(groups: Sequence[RunGroup]) -> list[Curve]:
    """Return the curves that some runs may have: their metrics, then `CURVES`."""
    kinds = {name: kind for group in groups for name, kind in group.summary["metrics"].items()}
    return [*(metric_curve(name, kind) for name, kind in kinds.items()), *CURVES]


CURVES = (
    Curve("loss", "Test loss of the mean model", lambda m, algorithm: main_loss(algorithm, m["loss"])),
    Curve("consensus", "Consensus distance", lambda m, _: m["consensus_distance"], log=True),
    Curve("epsilon", "ε spent (largest of the peers)", lambda m, _: float(m["epsilon"])),
    _own_label_curve("personalized", "personalized models", "personal_models"),
    _own_label_curve("own-labels", "mean model", "global_model"),
)


@contextmanager
def drawing(salt: str = "privdec") -> Iterator[None]:
    """Draw with this package's style; the salt makes the identifiers in an SVG unique to it.

    Raises:
        ScenarioError: when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ScenarioError(
            "pictures need matplotlib, which is not installed; pip install matplotlib", code="reporting.no-matplotlib"
        ) from error
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches; it belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(curve: Curve, groups: Sequence[RunGroup]) -> Figure | None:
    """Draw one quantity of some runs over their rounds; None when no run has it.

    Runs that differ only in their seeds are one line, their mean, in a band of one standard deviation to either side.
    Call it within `drawing`.
    """
    figure, axes = _panel(curve.heading(groups), "round")
    seeds = any(len(group.runs) > 1 for group in groups)
    for i, group in enumerate(groups):
        _draw_group(axes, curve, group, i, seeds=seeds)
    if not axes.get_lines():
        return None
    axes.margins(x=0.01)
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    positive = values[values > 0]
    if curve.log and len(positive) and positive.max() > 10 * positive.min():
        axes.set_yscale("log")
    elif curve.name == "epsilon" or curve.log:
        axes.set_ylim(0, 1.1 * values.max() or 1.0)
    if curve.share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    return figure


def _panel(title: str, xlabel: str) -> tuple[Figure, Axes]:
    figure = new_figure(6.0, 3.2)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(xlabel)
    return figure, axes


def line_style(index: int) -> tuple[int, str]:
    """Return how the curve of a run is drawn: which of the series' colours, and matplotlib's dashes."""
    return index % len(SERIES), tuple(DASHES)[index // len(SERIES) % len(DASHES)]


def _draw_group(axes: Axes, curve: Curve, group: RunGroup, index: int, *, seeds: bool) -> None:
    """Draw the rounds at which every run of a group has a finite value, if there are any.

    Args:
        seeds: whether the picture's bands are over seeds, not over the peers.
    """
    rounds, values = group.curve(curve.value)
    if not rounds:
        return
    series, dash = line_style(index)
    mean = values.mean(axis=0)
    axes.plot(rounds, mean, dash, color=SERIES[series], marker="o" if len(rounds) == 1 else "")
    if seeds and len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        low, high = mean - deviation, mean + deviation
    elif not seeds and curve.band is not None:
        lines = [curve.band(line) for line in group.runs[0].metrics if line["round"] in set(rounds)]
        low, high = np.array(lines, dtype=float).T  # None is NaN
    else:
        return
    axes.fill_between(rounds, low, high, color=SERIES[series], alpha=0.16, linewidth=0)


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as inline SVG: without a size, its colours variables of the page.

    Args:
        figure: drawn within `drawing`.
        label: its text alternative, for screen readers.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # identifiers that every picture would repeat
    text = re.sub(r"font: ([\d.]+)px 'DejaVu Sans'[^;\"]*", r"font: \1px var(--font)", text)
    for colour, name in PAGE_COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'


def draw_generalization(metrics: dict[str, Any]) -> Figure | None:
    """Draw accuracy against the extra label classes added to each peer's own (FedDeper, Fig. 5b) at a run's end.

    Returns:
        None when the run has no personalized models. Call it within `drawing`.
    """
    accuracies = metrics.get("personalized", {}).get("generalization")
    if accuracies is None:
        return None
    title = "Accuracy with extra label classes, mean over the peers"
    figure, axes = _panel(title, "extra label classes")
    for i, (name, label) in enumerate({"personal_models": "personalized models", "global_model": "mean model"}.items()):
        series, dash = line_style(i)
        extra, percentages = map(int, accuracies[name]), [100 * value for value in accuracies[name].values()]
        axes.plot(list(extra), percentages, dash, marker="o", markersize=4, color=SERIES[series], label=label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.legend(frameon=False)
    return figure


def draw_contributions(metrics: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw the mean Shapley value φ_ij of each peer j's gradients over the peers i that receive them, in every round.

    Returns:
        None when the run has no Shapley values. Call it within `drawing`.
    """
    by_round = {int(k): values for line in metrics for k, values in line.get("shapley", {}).items()}
    if not by_round:
        return None
    title = "Shapley value of each peer's gradients, mean over its neighbours"
    figure, axes = _panel(title, "round")
    peers = sorted({int(j) for values in by_round.values() for shapley in values.values() for j in shapley})
    for index, peer in enumerate(map(str, peers)):
        at_others = {
            k: [shapley[peer] for i, shapley in by_round[k].items() if i != peer and peer in shapley]
            for k in sorted(by_round)
        }
        means = {k: sum(values) / len(values) for k, values in at_others.items() if values}
        series, dash = line_style(index)
        style: dict[str, Any] = {"marker": "o" if len(means) == 1 else "", "linewidth": 1.2, "label": f"peer {peer}"}
        axes.plot(list(means), list(means.values()), dash, color=SERIES[series], **style)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    if len(peers) <= len(SERIES) * len(DASHES):
        axes.legend(frameon=False, ncols=2, fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def save_run_plots(out: Path) -> list[Path]:
    """Write a run's curves to its folder plots: accuracy.png, loss.png and so on, and those of some algorithms alone.

    Returns:
        The files written: none for a quantity the run does not have (ε without privacy); none, with a
        warning in the log, where matplotlib is not installed.
    """
    result = read_result(out)
    groups, written = [RunGroup(result.scenario.name, (result,))], []
    try:
        with drawing():
            figures = {curve.name: draw_curve(curve, groups) for curve in curves_of(groups)}
            if result.metrics:
                figures["generalization"] = draw_generalization(result.metrics[-1])
            figures["contributions"] = draw_contributions(result.metrics)
            for name, figure in figures.items():
                if figure is not None:
                    (out / "plots").mkdir(exist_ok=True)
                    path = out / "plots" / f"{name}.png"
                    figure.savefig(path, dpi=130, facecolor="white")
                    written.append(path)
    except ScenarioError as error:
        logging.getLogger(__name__).warning("no plots in %s: %s", out, error)
    return written
