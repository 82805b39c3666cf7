"""Pictures: curves of runs over their rounds as PNG files or as SVG that follows the page's colours, and graphs."""

from __future__ import annotations

import html
import importlib.util
import io
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.algorithms import build_algorithm
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import MOST_MEASURED, spectral_gap
from flower_privdec.graph.topology import CompleteTopology, Topology, joint_connectivity
from flower_privdec.reporting.run_folder import RunGroup, read_result
from flower_privdec.reporting.wording import main_loss, main_metric, main_value
from flower_privdec.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS = "mean of the seeds; band: their standard deviation"
INK = "#1f2328"
MUTED = "#59636e"
GRID = "#d8dee4"
PAPER = "#fefefe"
SERIES = ("#2563c9", "#c2410c", "#15803d", "#8b3fc4", "#c2307a", "#8a6100", "#0d9488", "#57606b")
DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}  # matplotlib's name: the name in CSS
PAGE_COLOURS = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    colour: f"series-{i}" for i, colour in enumerate(SERIES)
}
DARK = {
    **{"ink": "#e6edf3", "muted": "#9aa5b1", "grid": "#30363d", "paper": "#161b22"},
    **{"series-0": "#6ea8fe", "series-1": "#ff9a5c", "series-2": "#5fd68a", "series-3": "#c99bff"},
    **{"series-4": "#ff86b8", "series-5": "#e8c04a", "series-6": "#4fd0c3", "series-7": "#aab4be"},
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
        value: reads it from a line of metrics.jsonl, given the run's algorithm; None if it is not there.
        band: reads the least and the greatest over the peers, if they are known.
        spread: what the band of a single run shows; "" if it has none.
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
        if any(len(group.runs) > 1 for group in groups):
            spread = SEEDS
        else:
            spread = self.spread
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
    """Return the curve of a metric; `kind` has its title and whether it is a share."""
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
            "pictures need matplotlib, which is not installed: pip install 'flower-privdec[plots]'",
            code="reporting.no-matplotlib",
        ) from error
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches; it belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_curve(curve: Curve, groups: Sequence[RunGroup], *, legend: bool = False) -> Figure | None:
    """Draw one quantity of some runs over their rounds; None if no run has it.

    Runs that differ only in their seeds are one line, their mean, in a band of one standard deviation to either side.
    Call it within `drawing`.
    """
    figure, axes = _panel(curve.heading(groups), "round", share=curve.share)
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

    if legend:
        lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        figure.legend(handles=lines, frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return figure


def draw_peers(summary: Mapping[str, Any]) -> Figure | None:
    """Draw the first metric and the ε of each peer; None if neither is known. Call it within `drawing`."""
    name, kind = main_metric(dict(summary))
    panels = list[tuple[str, list[float], bool]]()  # of each: title, values by peer, and whether they are percentages
    of_peers = summary.get("peers", {}).get(name)
    if of_peers and None not in of_peers:
        factor = 100 if kind["share"] else 1
        panels.append((f"Test {kind['title']} of each peer's model", [factor * v for v in of_peers], kind["share"]))
    epsilons = [float(row["epsilon"]) for row in summary["privacy"]]
    if epsilons and max(epsilons) < math.inf:
        panels.append(("ε of each peer", epsilons, False))
    if not panels or summary["n_peers"] == 1:
        return None

    figure = new_figure(6.0, 1.9 * len(panels) + 0.3)
    places = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, values, share) in zip(places, panels, strict=True):
        axes.plot(range(len(values)), values, "o", color=SERIES[0], markersize=4)
        axes.margins(y=0.25)
        _title(axes, title, share=share)
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("peer")
    return figure


def _panel(title: str, xlabel: str, *, share: bool = False) -> tuple[Figure, Axes]:
    figure = new_figure(6.0, 3.2)
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    _title(axes, title, share=share)
    return figure, axes


def _title(axes: Axes, title: str, *, share: bool) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    if share:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")


def line_style(index: int) -> tuple[int, str]:
    """Return how the curve of a run is drawn: the number of its colour in `SERIES`, and matplotlib's dashes."""
    return index % len(SERIES), tuple(DASHES)[index % len(DASHES)]


def _draw_group(axes: Axes, curve: Curve, group: RunGroup, index: int, *, seeds: bool) -> None:
    """Draw the rounds at which every run of a group has a finite value; bands are over `seeds`, or over the peers."""
    rounds, values = group.curve(curve.value)
    if not rounds:
        return

    series, dash = line_style(index)
    mean = values.mean(axis=0)
    marker = "o" if len(rounds) == 1 else ""  # a line through one point would not be seen
    axes.plot(rounds, mean, dash, color=SERIES[series], marker=marker, label=group.label)

    if seeds and len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        low = mean - deviation
        high = mean + deviation
    elif not seeds and curve.band is not None:
        lines = [curve.band(line) for line in group.runs[0].metrics if line["round"] in set(rounds)]
        low, high = np.array(lines, dtype=float).T  # None is NaN
    else:
        return
    axes.fill_between(rounds, low, high, color=SERIES[series], alpha=0.16, linewidth=0)


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
    return f'{head} role="img" aria-label="{label}">{rest}'


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
    light = ";".join(f"--{name}:{colour}" for colour, name in PAGE_COLOURS.items())
    dark = ";".join(f"--{name}:{colour}" for name, colour in DARK.items())
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
        return [to_svg(draw(), html.escape(label))]


def draw_budget(rounds: int, after_quarters: Sequence[Sequence[float]]) -> Figure:
    """Draw each peer's ε after each quarter of the rounds; equal peers are one line. Call it within `drawing`."""
    figure, axes = _panel("ε of the peers over the rounds, as planned", "round")
    ticks = [rounds * quarter / 4 for quarter in range(5)]
    for index, values in enumerate(dict.fromkeys(tuple(map(float, row)) for row in after_quarters)):
        series, dash = line_style(index)
        axes.plot(ticks, [0.0, *values], dash, color=SERIES[series], marker="o", markersize=4)
    axes.set_ylim(bottom=0)
    return figure


def draw_bars(rows: Mapping[str, Mapping[str, Any]], title: str, *, share: bool) -> Figure:
    """Draw means with their deviations over the seeds, by label; call it within `drawing`.

    Args:
        rows: mean and std (None for one seed), by label.
        share: whether they are fractions, shown in percent.
    """
    figure, axes = _panel(title[:1].upper() + title[1:], "", share=share)
    factor = 100 if share else 1
    for index, row in enumerate(rows.values()):
        deviation = None if row["std"] is None else factor * row["std"]
        axes.errorbar(index, factor * row["mean"], deviation, fmt="o", color=SERIES[line_style(index)[0]], capsize=4)
    axes.set_xticks(range(len(rows)), list(rows))
    axes.margins(x=0.2)
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
    figure, axes = _panel(title, "extra label classes", share=True)
    for i, (name, label) in enumerate({"personal_models": "personalized models", "global_model": "mean model"}.items()):
        series, dash = line_style(i)
        extra = map(int, accuracies[name])
        percentages = [100 * value for value in accuracies[name].values()]
        axes.plot(list(extra), percentages, dash, marker="o", markersize=4, color=SERIES[series], label=label)
    axes.legend(frameon=False)
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
    figure, axes = _panel(title, "round")
    peers = sorted({int(j) for values in by_round.values() for shapley in values.values() for j in shapley})
    for index, peer in enumerate(map(str, peers)):
        means = {}
        for k in sorted(by_round):
            at_others = [shapley[peer] for i, shapley in by_round[k].items() if i != peer and peer in shapley]
            if at_others:
                means[k] = sum(at_others) / len(at_others)
        series, dash = line_style(index)
        style: dict[str, Any] = {"marker": "o" if len(means) == 1 else "", "linewidth": 1.2, "label": f"peer {peer}"}
        axes.plot(list(means), list(means.values()), dash, color=SERIES[series], **style)

    axes.axhline(0, color=MUTED, linewidth=0.8)
    if len(peers) <= len(SERIES) * len(DASHES):
        axes.legend(frameon=False, ncols=2, fontsize=7.5, loc="upper left", bbox_to_anchor=(1, 1))
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
    grid = figure.subplots(down, across, squeeze=False)

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
