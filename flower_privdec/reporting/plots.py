"""Pictures: curves of runs over their rounds as PNG files or as SVG that follows the page's colours, and graphs."""

from __future__ import annotations

import html
import importlib.util
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.algorithms import build_algorithm
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.formatting import peer_ranges
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import MOST_MEASURED, spectral_gap
from flower_privdec.graph.topology import CompleteTopology, Topology, joint_connectivity
from flower_privdec.reporting.look import (
    DARK,
    INK,
    MOST_BANDS,
    MUTED,
    PAGE_COLOURS,
    PAPER,
    SERIES,
    add_legend,
    categories_down,
    described,
    drawing,
    fits_below,
    in_percent,
    light_and_dark,
    log_scale,
    new_axes,
    new_figure,
    plot_curve,
    plot_spread,
    set_title,
    whole_numbers,
)
from flower_privdec.reporting.run_folder import RunGroup, read_result
from flower_privdec.reporting.wording import main_loss, main_metric, main_value
from flower_privdec.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_NAME = 20  # letters of a peers' range in a legend
PEERS_LISTED = 12  # lines of peers in a picture; of more, their middle and their range


@dataclass(frozen=True)
class Curve:
    """One quantity over the rounds.

    Attributes:
        axis: its name on the y axis.
        value: reads it from a line of metrics.jsonl, given the run's algorithm; None if it is not there.
        band: reads the least and the greatest over the peers, if they are known.
        of: whose least and greatest these are; "" if it has no band.
        log: whether the axis is logarithmic.
        share: whether it is a fraction, shown in percent.
    """

    name: str
    title: str
    axis: str
    value: Callable[[dict[str, Any], str], float | None]
    band: Callable[[dict[str, Any]], tuple[float | None, float | None]] | None = None
    of: str = ""
    log: bool = False
    share: bool = False

    def note(self, groups: Sequence[RunGroup]) -> str:
        """Return what the bands, or bars, of a picture of some runs are; "" if it has none."""
        drawn = "bands" if len(groups) <= MOST_BANDS else "bars"
        if any(len(group.runs) > 1 for group in groups):
            return f"mean of the seeds; {drawn}: their standard deviation"
        return f"{drawn}: {self.of}, lowest to highest" if self.of else ""

    def heading(self, groups: Sequence[RunGroup]) -> str:
        """Return the title of a picture of some runs, with the meaning of its bands."""
        note = self.note(groups)
        return f"{self.title} ({note})" if note else self.title


def _own_label_curve(name: str, title: str, models: str) -> Curve:
    def read(metrics: dict[str, Any], which: str) -> float | None:
        accuracies = metrics.get("personalized", {}).get(models)
        return None if accuracies is None else 100 * float(accuracies[which])

    return Curve(
        name,
        f"Accuracy on the peers' own labels, {title}",
        "accuracy",
        lambda m, _: read(m, "mean"),
        lambda m: (read(m, "min") or 0.0, read(m, "max") or 0.0),
        "the peers",
        share=True,
    )


def metric_curve(name: str, kind: dict[str, Any], of: str = "the peers' models") -> Curve:
    """Return the curve of a metric.

    Args:
        kind: has its title and whether it is a share.
        of: whose values the band has.
    """
    factor = 100 if kind["share"] else 1

    def scaled(value: float | None) -> float | None:
        return None if value is None else factor * value

    return Curve(
        name,
        f"Test {kind['title']} of the mean model",
        str(kind["title"]),
        lambda m, algorithm: scaled(main_value(algorithm, m.get(name))),
        lambda m: (scaled(m[name]["peer_min"]), scaled(m[name]["peer_max"])),
        of,
        share=kind["share"],
    )


def curves_of(groups: Sequence[RunGroup]) -> list[Curve]:
    """Return the curves that some runs may have: their metrics, then `CURVES`."""
    kinds = {name: kind for group in groups for name, kind in group.summary["metrics"].items()}
    of = "the peers' models"
    if any(group.summary.get("peers_tried") for group in groups):
        of = "a sample of the peers' models"
    return [*(metric_curve(name, kind, of) for name, kind in kinds.items()), *CURVES]


CURVES = (
    Curve("loss", "Test loss of the mean model", "loss", lambda m, algorithm: main_loss(algorithm, m["loss"])),
    Curve(
        "consensus",
        "Consensus distance: how far the peers' models are apart",
        "distance",
        lambda m, _: m["consensus_distance"],
        log=True,
    ),
    Curve("epsilon", "ε spent (largest of the peers)", "ε", lambda m, _: float(m["epsilon"])),
    _own_label_curve("personalized", "personalized models", "personal_models"),
    _own_label_curve("own-labels", "mean model", "global_model"),
)


def draw_curve(curve: Curve, groups: Sequence[RunGroup], *, legend: bool = False) -> Figure | None:
    """Draw one quantity of some runs over their rounds; None if no run has it.

    Runs that differ only in their seeds are one line, their mean, with one standard deviation to either side.
    Call it within `drawing`.
    """
    figure, axes = _panel(curve.title, "round", curve.axis, share=curve.share, note=curve.note(groups))
    seeds = any(len(group.runs) > 1 for group in groups)
    for index in range(len(groups)):
        _draw_group(axes, curve, groups, index, seeds=seeds)
    if not axes.get_lines():
        return None

    axes.margins(x=0.01)
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    positive = values[values > 0]
    if curve.log and len(positive) and positive.max() > 10 * positive.min():
        log_scale(axes)
    elif curve.name == "epsilon" or curve.log:
        axes.set_ylim(0, 1.1 * values.max() or 1.0)

    if legend:
        add_legend(figure, below=True)
    return figure


def draw_peers(summary: Mapping[str, Any]) -> Figure | None:
    """Draw the first metric and the ε of each peer; None if neither is known. Call it within `drawing`."""
    name, kind = main_metric(dict(summary))
    panels = list[tuple[str, str, list[float], bool]]()  # of each: title, axis, values by peer, whether in percent
    of_peers = summary.get("peers", {}).get(name)
    if of_peers and None not in of_peers:
        factor = 100 if kind["share"] else 1
        values = [factor * value for value in of_peers]
        panels.append((f"Test {kind['title']} of each peer's model", str(kind["title"]), values, kind["share"]))
    epsilons = [float(row["epsilon"]) for row in summary["privacy"]]
    if epsilons and max(epsilons) < math.inf:
        panels.append(("ε of each peer", "ε", epsilons, False))
    if not panels or summary["n_peers"] == 1:
        return None

    figure = new_figure(6.0, 1.9 * len(panels) + 0.3)
    places = new_axes(figure, len(panels))[:, 0]
    for axes, (title, axis, values, share) in zip(places, panels, strict=True):
        axes.plot(range(len(values)), values, "o", color=SERIES[0], markersize=4)
        axes.margins(y=0.25)
        axes.set_ylabel(axis)
        set_title(axes, title)
        if share:
            in_percent(axes)
        whole_numbers(axes)
        if axis == "ε":
            axes.set_ylim(0, 1.1 * max(values) or 1.0)
    axes.set_xlabel("peer")
    return figure


def _panel(title: str, xlabel: str, ylabel: str, *, share: bool = False, note: str = "") -> tuple[Figure, Axes]:
    figure = new_figure(6.0, 3.2)
    axes = new_axes(figure)[0, 0]
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    set_title(axes, title, note)
    whole_numbers(axes)
    if share:
        in_percent(axes)
    return figure, axes


def _draw_group(axes: Axes, curve: Curve, groups: Sequence[RunGroup], index: int, *, seeds: bool) -> None:
    """Draw the rounds at which every run of a group has a finite value; bands are over `seeds`, or over the peers."""
    group = groups[index]
    rounds, values = group.curve(curve.value)
    if not rounds:
        return

    mean = values.mean(axis=0)
    plot_curve(axes, rounds, mean, index, of=len(groups), label=group.label)

    if seeds and len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        low = mean - deviation
        high = mean + deviation
    elif not seeds and curve.band is not None:
        lines = [curve.band(line) for line in group.runs[0].metrics if line["round"] in set(rounds)]
        low, high = np.array(lines, dtype=float).T  # None is NaN
    else:
        return
    plot_spread(axes, rounds, low, high, index, of=len(groups))


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as inline SVG with a text alternative: without a size, its colours variables of the page."""
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
    alternative = html.escape(described(figure, label))
    return f'{head} role="img" aria-label="{alternative}">{rest}'


def themed(svg: str) -> str:
    """Return an SVG file whose colours follow the reader's theme, light or dark."""
    dark = {colour: DARK[name] for colour, name in PAGE_COLOURS.items()}
    dark["#ffffff"] = DARK["paper"]
    rules = ""
    for colour, shade in dark.items():
        for what in ("fill", "stroke"):
            rules += f'[style*="{what}: {colour}"]{{{what}:{shade}!important}}'
    rules += f"text{{fill:{DARK['ink']}}}"

    start = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:start]}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>{svg[start:]}"


def save_picture(draw: Callable[[], Figure], out: Path, name: str) -> None:
    """Draw a figure into a file; an SVG follows the reader's theme.

    Raises:
        ScenarioError: matplotlib is not installed, or the file cannot be written; `name` is the option that named it.
    """
    with drawing():
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            draw().savefig(out, dpi=150, facecolor="white")
            if out.suffix.lower() == ".svg":
                out.write_text(themed(out.read_text(encoding="utf-8")), encoding="utf-8")
        except OSError as error:
            raise ScenarioError(
                f"{option(name, out)}: cannot be written ({error.strerror}); give another path",
                code="reporting.unwritable",
            ) from error


def html_of(text: str, pictures: Iterable[str] = ()) -> str:
    """Return text, and pictures as SVG below it, as HTML for a notebook, in colours of its light or dark theme."""
    light, dark = light_and_dark()
    style = (
        f".privdec{{{light};--font:sans-serif}}[data-jp-theme-light=false] .privdec{{{dark}}}"
        ".privdec svg{max-width:36em}"
    )
    return f'<style>{style}</style><div class="privdec"><pre>{html.escape(text)}</pre>{"".join(pictures)}</div>'


def picture(label: str, draw: Callable[[], Figure]) -> list[str]:
    """Return a figure as SVG in a list, which is empty if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    with drawing(salt=label):
        return [to_svg(draw(), label)]


def draw_budget(rounds: int, after_quarters: Sequence[Sequence[float]]) -> Figure:
    """Draw each peer's ε after each quarter of the rounds; equal peers are one line. Call it within `drawing`."""
    figure, axes = _panel("ε of the peers over the rounds, as planned", "round", "ε")
    peers_with: dict[tuple[float, ...], list[int]] = {}
    for peer, values in enumerate(after_quarters):
        peers_with.setdefault(tuple(map(float, values)), []).append(peer)

    lines = {_peers_label(peers): np.array([0.0, *values]) for values, peers in peers_with.items()}
    _draw_peers_lines(axes, [rounds * quarter / 4 for quarter in range(5)], lines)
    axes.set_ylim(bottom=0)
    if len(lines) > 1:
        add_legend(figure)
    return figure


def _peers_label(peers: Sequence[int]) -> str:
    """Return the name of some peers in a legend."""
    if len(peers) == 1:
        return f"peer {peers[0]}"
    text = peer_ranges(peers)
    if len(text) > LONGEST_NAME:
        text = f"{text[:LONGEST_NAME].rpartition(',')[0]}, ... ({len(peers):,})"
    return f"peers {text}"


def _draw_peers_lines(axes: Axes, x: Sequence[float], lines: Mapping[str, np.ndarray]) -> None:
    """Draw a line for each of some peers, by label; of many, whom nobody could tell apart, their middle and range."""
    places = np.asarray(x, dtype=float)
    if len(lines) <= PEERS_LISTED:
        for index, (label, values) in enumerate(lines.items()):
            known = np.isfinite(values)
            plot_curve(axes, places[known], values[known], index, of=len(lines), label=label)
        return

    table = np.array(list(lines.values()))
    known = np.isfinite(table).any(axis=0)
    table = table[:, known]
    plot_curve(axes, places[known], np.nanmedian(table, axis=0), 0, of=1, label=f"median of {len(table):,} peers")
    plot_spread(axes, places[known], np.nanmin(table, axis=0), np.nanmax(table, axis=0), 0, of=1)
    axes.collections[-1].set_label("lowest to highest")


def draw_bars(rows: Mapping[str, Mapping[str, Any]], title: str, *, share: bool) -> Figure:
    """Draw means with their deviations over the seeds, by label; call it within `drawing`.

    Args:
        rows: mean and std (None for one seed), by label.
        share: whether they are fractions, shown in percent.
    """
    note = "bars: standard deviation over the seeds" if any(row["std"] is not None for row in rows.values()) else ""
    name = title[:1].upper() + title[1:]
    factor = 100 if share else 1
    means = [factor * row["mean"] for row in rows.values()]
    deviations = [factor * (row["std"] or 0.0) for row in rows.values()]

    # Names that do not fit side by side stand one below the other.
    upright = fits_below(list(rows), 5.0)
    figure = new_figure(6.0, 3.2 if upright else 1.2 + 0.3 * len(rows))
    axes = new_axes(figure)[0, 0]
    set_title(axes, name, note)
    style: dict[str, Any] = {"fmt": "o", "color": SERIES[0], "capsize": 4}
    places = list(range(len(rows)))
    if upright:
        axes.errorbar(places, means, deviations, **style)
        axes.set_xticks(places, list(rows))
        axes.margins(x=0.2)
        axes.set_ylabel(title)
        if share:
            in_percent(axes)
    else:
        axes.errorbar(means, places, xerr=deviations, **style)
        categories_down(axes, list(rows))
        axes.set_xlabel(title)
        if share:
            in_percent(axes, along="x")
    return figure


def draw_generalization(metrics: dict[str, Any]) -> Figure | None:
    """Draw accuracy against the extra label classes added to each peer's own (FedDeper, Fig. 5b) at a run's end.

    Returns:
        None if the run has no personalized models. Call it within `drawing`.
    """
    accuracies = metrics.get("personalized", {}).get("generalization")
    if accuracies is None:
        return None
    title = "Accuracy with extra label classes, mean over the peers"
    figure, axes = _panel(title, "extra label classes", "accuracy", share=True)
    names = {"personal_models": "personalized models", "global_model": "mean model"}
    for index, (name, label) in enumerate(names.items()):
        extra = list(map(int, accuracies[name]))
        percentages = [100 * value for value in accuracies[name].values()]
        plot_curve(axes, extra, percentages, index, of=len(names), markevery=1, label=label)
    add_legend(figure, below=True)
    return figure


def draw_contributions(metrics: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw the mean Shapley value φ_ij of each peer j's gradients over the peers i that receive them, in every round.

    Returns:
        None if the run has no Shapley values. Call it within `drawing`.
    """
    by_round = {}
    for line in metrics:
        for round_index, values in line.get("shapley", {}).items():
            by_round[int(round_index)] = values
    if not by_round:
        return None

    title = "Shapley value of each peer's gradients, mean over its neighbours"
    figure, axes = _panel(title, "round", "Shapley value")
    peers = sorted({int(j) for values in by_round.values() for shapley in values.values() for j in shapley})
    rounds = sorted(by_round)
    lines = {}
    for peer in map(str, peers):
        means = np.full(len(rounds), math.nan)
        for place, k in enumerate(rounds):
            at_others = [shapley[peer] for i, shapley in by_round[k].items() if i != peer and peer in shapley]
            if at_others:
                means[place] = sum(at_others) / len(at_others)
        lines[f"peer {peer}"] = means

    _draw_peers_lines(axes, rounds, lines)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    add_legend(figure)
    return figure


def save_run_plots(out: Path) -> list[Path]:
    """Write a run's curves to its folder plots: accuracy.png, loss.png and so on, and those that some algorithms have.

    Returns:
        The files written: none for a quantity that the run does not have (ε without privacy); none at all, with a
        warning in the log, if matplotlib is not installed.
    """
    result = read_result(out)
    groups = [RunGroup(result.scenario.name, (result,))]
    written = []
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


PICTURES = (".png", ".svg", ".pdf")
ROUNDS_SHOWN = 6
LARGEST_LISTED = 32
MOST_ARROWS = 1200
MOST_PEERS_DRAWN = 2_000
MOST_EDGES_DRAWN = 100_000
NO_GRAPH = "algorithm {} exchanges nothing: there is no graph"


def build_graph(scenario: Scenario) -> Mixing | None:
    """Return the graph of a scenario with its weights; None if its algorithm exchanges nothing."""
    return build_exchange(scenario, build_algorithm(scenario.algorithm))[0]


def connectivity(mixing: Mixing) -> dict[str, Any]:
    """Return how fast peers on a graph agree.

    Returns:
        joint_connectivity: the smallest B such that any B consecutive rounds together are strongly connected (all
            peers active), or None. spectral_gap: in [0, 1], per round; None for more peers than `MOST_MEASURED`.
    """
    return {
        "joint_connectivity": joint_connectivity(mixing.topology),
        "spectral_gap": spectral_gap(mixing) if mixing.n_peers <= MOST_MEASURED else None,
    }


def describe(scenario: Scenario, out: Path | None = None) -> dict[str, Any]:
    """Describe the graph of a scenario, and draw it if a file is given.

    Args:
        out: a .png, .svg or .pdf file to write.

    Returns:
        name (None if nothing is exchanged), n_peers, directed, period (None: new every round), weights,
        edges_per_round (of the first rounds), joint_connectivity, spectral_gap, edges (of the first rounds,
        (sender, receiver) pairs; None for a large graph), picture (the file, or None) and note.

    Raises:
        ScenarioError: the graph can never agree, or the file cannot be written.
    """
    if out is not None and out.suffix.lower() not in PICTURES:
        raise ScenarioError(
            f"{option('out', out)}: must end in {', '.join(PICTURES)}; rename it", code="reporting.suffix"
        )
    mixing = build_graph(scenario)
    if mixing is None:
        absent = ("name", "directed", "period", "weights", "joint_connectivity", "spectral_gap", "edges", "picture")
        note = NO_GRAPH.format(scenario.algorithm.name)
        return {**dict.fromkeys(absent), "n_peers": scenario.n_peers, "edges_per_round": [0], "note": note}

    topology = mixing.topology
    if isinstance(topology, CompleteTopology):  # without listing them
        counts = [topology.n_peers * (topology.n_peers - 1)]
    else:
        counts = [len(topology.edges(k)) for k in range(rounds_shown(topology))]
    if out is not None and (scenario.n_peers > MOST_PEERS_DRAWN or max(counts) > MOST_EDGES_DRAWN):
        raise ScenarioError(
            f"{option('out', out)}: a picture of {scenario.n_peers:,} peers and {max(counts):,} edges shows nothing; "
            f"draw at most {MOST_PEERS_DRAWN:,} peers and {MOST_EDGES_DRAWN:,} edges, or leave {option('out')} out",
            code="reporting.graph-too-large",
        )

    edges = None
    if scenario.n_peers <= LARGEST_LISTED:
        edges = [topology.edges(k).tolist() for k in range(len(counts))]
    description = {
        "name": topology.name,
        "n_peers": topology.n_peers,
        "directed": topology.directed,
        "period": topology.period,
        "weights": mixing.weights,
        "edges_per_round": counts,
        **connectivity(mixing),
        "edges": edges,
        "picture": None if out is None else str(out),
        "note": None,
    }
    if out is not None:
        save_picture(lambda: draw_topology(topology), out, "out")
    return description


def rounds_shown(topology: Topology) -> int:
    """Return how many rounds of a graph are counted and drawn."""
    return min(topology.period or ROUNDS_SHOWN, ROUNDS_SHOWN)


def draw_topology(topology: Topology) -> Figure:
    """Draw a graph on a circle, one panel for each of its first rounds; call it within `drawing`."""
    import networkx as nx

    panels = rounds_shown(topology)
    n_peers = topology.n_peers
    across = panels if panels <= 4 else 3
    down = math.ceil(panels / across)
    side = 3.4 if panels == 1 else 2.5  # of a panel, in inches
    figure = new_figure(side * across, (side + 0.1) * down)
    grid = new_axes(figure, down, across)

    angles = [2 * math.pi * peer / n_peers for peer in range(n_peers)]
    positions = {peer: (math.sin(angle), math.cos(angle)) for peer, angle in enumerate(angles)}
    # In square points: so that neighbours on the circle do not touch.
    node_size = min(300.0, (side * 72 * 2 / n_peers) ** 2 / 3)

    for k, axes in enumerate(grid.flat):
        axes.set_axis_off()
        if k >= panels:  # a place of the grid that is left over
            continue

        graph = nx.DiGraph() if topology.directed else nx.Graph()
        graph.add_nodes_from(range(n_peers))
        graph.add_edges_from(topology.edges(k).tolist())

        n_edges = graph.number_of_edges()
        alpha = max(0.15, min(0.8, 60 / (n_edges + 1)))
        style: dict[str, Any] = {"edge_color": SERIES[0], "alpha": alpha, "arrows": False}
        if topology.directed and n_edges <= MOST_ARROWS:
            style |= {"arrows": True, "arrowsize": 9, "connectionstyle": "arc3,rad=0.08"}
        nx.draw_networkx_edges(graph, positions, node_size=node_size, ax=axes, **style)

        outline = {"node_color": PAPER, "edgecolors": INK, "linewidths": 0.9}
        nx.draw_networkx_nodes(graph, positions, node_size=node_size, ax=axes, **outline)
        if n_peers <= LARGEST_LISTED:
            font_size = 8 if n_peers <= 16 else 6
            nx.draw_networkx_labels(graph, positions, font_size=font_size, font_color=INK, ax=axes)
        axes.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.set_title(f"round {k}" if panels > 1 else "every round", fontsize=9, color=MUTED)
    return figure
