"""Describe and draw the communication graph of a scenario."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_privdec.algorithms import build_algorithm
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.graph.mixing import MOST_MEASURED, Mixing, spectral_gap
from flower_privdec.graph.topology import CompleteTopology, Topology, joint_connectivity
from flower_privdec.reporting.plots import INK, MUTED, PAPER, SERIES, drawing, new_figure
from flower_privdec.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
ROUNDS_SHOWN = 6
LARGEST_LISTED = 32
MOST_ARROWS = 1200
MOST_PEERS_DRAWN, MOST_EDGES_DRAWN = 2_000, 100_000
NO_GRAPH = "algorithm {} exchanges nothing: there is no graph"


def build_graph(scenario: Scenario) -> Mixing | None:
    """Return the graph of a scenario with its weights, or None when its algorithm exchanges nothing."""
    return build_exchange(scenario, build_algorithm(scenario.algorithm))[0]


def connectivity(mixing: Mixing) -> dict[str, Any]:
    """Return how fast peers on a graph agree.

    Returns:
        joint_connectivity: the smallest B such that any B consecutive rounds together are strongly
            connected (all peers active), or None; spectral_gap: in [0, 1], per round; None for more peers than
            `MOST_MEASURED`.
    """
    return {
        "joint_connectivity": joint_connectivity(mixing.topology),
        "spectral_gap": spectral_gap(mixing) if mixing.n_peers <= MOST_MEASURED else None,
    }


def describe(scenario: Scenario, out: Path | None = None) -> dict[str, Any]:
    """Describe the graph of a scenario, and draw it where a file is given.

    Args:
        out: a .png, .svg or .pdf file to write.

    Returns:
        name (None when nothing is exchanged), n_peers, directed, period (None: fresh every round), weights,
        edges_per_round (of the first rounds), joint_connectivity, spectral_gap, edges (of the first rounds,
        (sender, receiver) pairs; None for a large graph), picture (the file, or None) and note.

    Raises:
        ScenarioError: a graph that can never agree, or a file that cannot be written.
    """
    if out is not None and out.suffix.lower() not in PICTURES:
        raise ScenarioError(f"--out {out}: must end in {', '.join(PICTURES)}; rename it", code="reporting.suffix")
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
            f"--out {out}: a picture of {scenario.n_peers:,} peers and {max(counts):,} edges would show nothing; draw "
            f"at most {MOST_PEERS_DRAWN:,} peers and {MOST_EDGES_DRAWN:,} edges, or leave --out out",
            code="reporting.graph-too-large",
        )
    small = scenario.n_peers <= LARGEST_LISTED
    description = {
        "name": topology.name,
        "n_peers": topology.n_peers,
        "directed": topology.directed,
        "period": topology.period,
        "weights": mixing.weights,
        "edges_per_round": counts,
        **connectivity(mixing),
        "edges": [topology.edges(k).tolist() for k in range(len(counts))] if small else None,
        "picture": None if out is None else str(out),
        "note": None,
    }
    if out is not None:
        with drawing():
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                draw_topology(topology).savefig(out, dpi=150, facecolor="white")
            except OSError as error:
                raise ScenarioError(
                    f"--out {out}: cannot be written ({error.strerror}); give another path", code="reporting.unwritable"
                ) from error
    return description


def rounds_shown(topology: Topology) -> int:
    """Return how many rounds of a graph are counted and drawn."""
    return min(topology.period or ROUNDS_SHOWN, ROUNDS_SHOWN)


def draw_topology(topology: Topology) -> Figure:
    """Draw a graph on a circle, one panel for each of its first rounds; call it within `drawing`."""
    import networkx as nx

    panels, n_peers = rounds_shown(topology), topology.n_peers
    across = panels if panels <= 4 else 3
    down = math.ceil(panels / across)
    side = 3.4 if panels == 1 else 2.5
    figure = new_figure(side * across, (side + 0.1) * down)
    grid = figure.subplots(down, across, squeeze=False)
    angles = [2 * math.pi * peer / n_peers for peer in range(n_peers)]
    positions = {peer: (math.sin(angle), math.cos(angle)) for peer, angle in enumerate(angles)}
    node_size = min(300.0, (side * 72 * 2 / n_peers) ** 2 / 3)
    style: dict[str, Any]
    for k, axes in enumerate(grid.flat):
        axes.set_axis_off()
        if k < panels:
            graph = nx.DiGraph() if topology.directed else nx.Graph()
            graph.add_nodes_from(range(n_peers))
            graph.add_edges_from(topology.edges(k).tolist())
            edges = graph.number_of_edges()
            style = {"edge_color": SERIES[0], "alpha": max(0.15, min(0.8, 60 / (edges + 1))), "arrows": False}
            if topology.directed and edges <= MOST_ARROWS:
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
