"""A page about one run, or comparing several: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_privdec import __version__
from flower_privdec.console.views import comparison_row, graph_facts, peers_accuracy
from flower_privdec.errors import ScenarioError
from flower_privdec.graphs import build_graph, connectivity, draw_topology, rounds_shown
from flower_privdec.plots import CURVES, SERIES, drawing, draw_curve, to_svg
from flower_privdec.results import Result, read_results
from flower_privdec.scenario import to_yaml
from flower_privdec.wording import (
    alike,
    claim,
    duration,
    epsilon_range,
    epsilon_text,
    guarantee,
    headline,
    meaning,
    number,
    peer_ranges,
    percent,
)

LARGEST_GRAPH = 200  # peers; a larger circle shows nothing
PRIVACY_COLUMNS = ("epsilon", "claimed_epsilon", "delta", "unit", "adjacency", "calibration")


def write_report(runs: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Write an HTML page about some runs, self-contained: curves and graphs are inline SVG.

    Args:
        runs: folders that `privdec run` left, finished or under way.
        out: the page to write.

    Returns:
        The runs' summaries, each with its label on the page.

    Raises:
        ScenarioError: a folder that is not a run, or a page that cannot be written; nothing is written then.
    """
    results = read_results(runs)
    page = render(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"--out {out}: cannot be written ({error}); give another path") from error
    return [result.summary for result in results]


def render(results: Sequence[Result]) -> str:
    """Return the page about some runs."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("flower_privdec"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    single = len(results) == 1
    return environment.get_template("report.html.j2").render(
        title=results[0].label if single else f"{len(results)} runs compared",
        subtitle=headline(results[0].summary) if single else _best(results),
        cards=_cards(results[0].summary) if single else [],
        curves=_curves(results),
        n_series=len(SERIES),
        comparison=[comparison_row(result.summary) for result in results],
        runs=[_section(result, i) for i, result in enumerate(results)],
        version=__version__,
    )


def _best(results: Sequence[Result]) -> str:
    """Return the one-line result of a comparison: the best mean model."""
    known = [result for result in results if result.summary["accuracy"]]
    if not known:
        return "no run has been evaluated yet"
    best = max(known, key=lambda result: float(result.summary["accuracy"]["mean_model"]))
    return f"best: {best.label}, {headline(best.summary)}"


def _cards(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the page: name, value, and what it is."""
    accuracy, rows = summary["accuracy"], summary["privacy"]
    deltas = sorted({row["delta"] for row in rows if row["delta"] is not None})
    return [
        ("accuracy", percent(accuracy["mean_model"] if accuracy else None), "mean model, test set"),
        ("peers' models", percent(accuracy["peer_mean"] if accuracy else None), peers_accuracy(summary)),
        ("ε", epsilon_range(summary), f"δ = {number(deltas[-1])}" if deltas else "no δ"),
        ("consensus distance", number(summary["consensus_distance"]), "root mean square"),
        ("time", duration(summary["wall_seconds"]), f"{number(summary['peer_steps_per_second'])} peer steps/s"),
    ]


def _curves(results: Sequence[Result]) -> list[str]:
    """Return each quantity's curves as SVG."""
    pictures = []
    for curve in CURVES:
        with drawing(salt=curve.name):
            figure = draw_curve(curve, results)
            if figure is not None:
                pictures.append(to_svg(figure, curve.title))
    return pictures


def _section(result: Result, index: int) -> dict[str, Any]:
    """Return what the page says about one run."""
    summary = result.summary
    facts = [
        ("algorithm", summary["algorithm"]),
        ("peers", str(summary["n_peers"])),
        ("rounds", f"{summary['rounds']:,}"),
        ("runtime", summary["runtime"] or "unfinished"),
        ("seed", str(summary["seed"])),
    ]
    return {
        "label": result.label,
        "headline": headline(summary),
        "finished": result.finished,
        "facts": facts,
        "guarantee": guarantee(summary),
        "meaning": meaning(summary),
        "claim": claim(summary),
        "noise": summary.get("noise"),
        "privacy": _privacy_table(summary),
        "graph": _graph(result, index),
        "yaml": to_yaml(result.scenario),
        "folder": str(result.folder),
    }


def _privacy_table(summary: dict[str, Any]) -> list[list[str]]:
    """Return a row for each group of peers with the same guarantee."""
    return [
        [
            peer_ranges(peers),
            epsilon_text(row["epsilon"]),
            number(row["claimed_epsilon"]),
            number(row["delta"]),
            *(str(row[key]) for key in ("unit", "adjacency", "calibration")),
        ]
        for peers, row in alike(summary["privacy"], PRIVACY_COLUMNS)
    ]


def _graph(result: Result, index: int) -> dict[str, Any]:
    """Return a run's graph: its facts and, where it is not too large, its picture."""
    try:
        mixing = build_graph(result.scenario)
    except ScenarioError as error:  # an edge list that has moved since
        return {"facts": f"cannot be drawn: {error}", "svg": None, "panels": 0}
    if mixing is None:
        return {"facts": f"{result.scenario.algorithm.name} exchanges nothing: no graph", "svg": None, "panels": 0}
    topology = mixing.topology
    facts = f"{topology.name}, {mixing.weights} weights, {graph_facts(connectivity(mixing))}"
    if topology.n_peers > LARGEST_GRAPH:
        return {"facts": f"{facts} (too large to draw)", "svg": None, "panels": 0}
    with drawing(salt=f"graph-{index}"):
        svg = to_svg(draw_topology(topology), f"the graph {topology.name}")
    return {"facts": facts, "svg": svg, "panels": rounds_shown(topology)}
