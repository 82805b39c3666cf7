"""A page about one run, or comparing several: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_privdec import __version__
from flower_privdec.errors import ScenarioError
from flower_privdec.reporting.console.views import comparison_row, graph_facts
from flower_privdec.reporting.graph_view import NO_GRAPH, build_graph, connectivity, draw_topology, rounds_shown
from flower_privdec.reporting.plots import DASHES, curves_of, draw_curve, drawing, line_style, to_svg
from flower_privdec.reporting.run_folder import Result, read_results
from flower_privdec.reporting.wording import (
    alike,
    budget,
    claim,
    epsilon_range,
    guarantee,
    headline,
    is_private,
    main_metric,
    main_value,
    meaning,
    measured,
    peers_range,
    shares_models,
)
from flower_privdec.scenario import to_yaml
from flower_privdec.topology import Topology
from flower_privdec.words import duration, epsilon_text, number, peer_ranges, setting

LARGEST_GRAPH = 200  # peers; a larger circle shows nothing
MOST_EDGES = 2000  # in a round; more are a megabyte of lines
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
        loader=PackageLoader("flower_privdec.reporting"),
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
        keys=[_key(i) for i in range(len(results))],
        comparison=[comparison_row(result.summary) for result in results],
        runs=[_section(result, graph) for result, graph in zip(results, _graphs(results), strict=True)],
        version=__version__,
    )


def _best(results: Sequence[Result]) -> str:
    """Return the one-line result of a comparison: the best mean model, where one metric tells."""
    known = [(score, result) for result in results if (score := _score(result)) is not None]
    if not known:
        return "no run has been evaluated yet"
    if len({main_metric(result.summary)[0] for _, result in known}) > 1:
        return "the runs have different metrics: see each"
    best = _highest(known)
    said = f"best: {best.label}, {headline(best.summary)}"
    private = [(score, result) for score, result in known if is_private(result.summary)]
    if not private or is_private(best.summary):
        return said
    best = _highest(private)
    return f"{said}; best with privacy: {best.label}, {headline(best.summary)}"


def _highest(scored: Sequence[tuple[float, Result]]) -> Result:
    return max(scored, key=lambda pair: pair[0])[1]


def _score(result: Result) -> float | None:
    """Return the value of the first metric, of which more is better, its negative where less is; None without any."""
    name, kind = main_metric(result.summary)
    value = main_value(result.scenario.algorithm.name, result.summary[name])
    return value if value is None or kind["high"] else -value


def _key(index: int) -> tuple[int, str]:
    """Return the legend's key of a run: the number of its colour, and its line in CSS."""
    series, dash = line_style(index)
    return series, DASHES[dash]


def _cards(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the page: name, value, and what it is."""
    (name, kind), pace = main_metric(summary), summary["peer_steps_per_second"]
    values = summary[name]
    cards = [
        (kind["title"], measured(main_value(summary["algorithm"], values), kind), "mean model, test set"),
        ("peers' models", measured(values and values["peer_mean"], kind), f"mean ({peers_range(summary)})"),
        ("ε", epsilon_range(summary), _epsilon_note(summary)),
        ("consensus distance", number(summary["consensus_distance"]), "root mean square"),
        ("time", duration(summary["wall_seconds"]), f"{number(pace)} peer steps/s" if pace else "so far"),
    ]
    return cards if shares_models(summary["algorithm"]) else cards[1:]


def _epsilon_note(summary: dict[str, Any]) -> str:
    if not is_private(summary):
        return "no privacy" if summary[main_metric(summary)[0]] else "not known yet"
    return budget(summary).partition(" at ")[2] or "so far"


def _curves(results: Sequence[Result]) -> list[str]:
    """Return each quantity's curves as SVG."""
    pictures = []
    for curve in curves_of(results):
        with drawing(salt=curve.name):
            figure = draw_curve(curve, results)
            if figure is not None:
                pictures.append(to_svg(figure, curve.title))
    return pictures


def _section(result: Result, graph: dict[str, Any]) -> dict[str, Any]:
    """Return what the page says about one run."""
    summary = result.summary
    facts = [
        ("algorithm", summary["algorithm"]),
        ("peers", str(summary["n_peers"])),
        ("rounds", f"{summary['rounds']:,}"),
        ("seed", str(summary["seed"])),
    ]
    if result.finished:
        facts.append(("runtime", summary["runtime"]))
    return {
        "label": result.label,
        "headline": headline(summary),
        "finished": result.finished,
        "facts": facts,
        "guarantee": guarantee(summary),
        "meaning": meaning(summary),
        "claim": claim(summary),
        "noise": summary.get("noise") if is_private(summary) else None,
        "privacy": _privacy_table(summary),
        "graph": graph,
        "yaml": to_yaml(result.scenario),
        "folder": str(result.folder),
    }


def _privacy_table(summary: dict[str, Any]) -> list[list[str]]:
    """Return a row for each group of peers with the same guarantee."""
    return [
        [
            peer_ranges(peers),
            epsilon_text(row["epsilon"]),
            setting(row["claimed_epsilon"]),
            setting(row["delta"]),
            *(str(row[key]) for key in ("unit", "adjacency", "calibration")),
        ]
        for peers, row in alike(summary["privacy"], PRIVACY_COLUMNS)
    ]


def _graphs(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return each run's graph: its facts and its picture, where an earlier run does not show the same one."""
    shown_with: dict[str, str] = {}
    graphs = []
    for result in results:
        facts, topology = _graph_facts(result)
        graph: dict[str, Any] = {"facts": facts, "svg": None, "panels": 0}
        graphs.append(graph)
        if topology is None:
            continue
        rounds = rounds_shown(topology)
        key = repr([topology.edges(k).tolist() for k in range(rounds)])
        if key in shown_with:
            graph["facts"] += f" (picture: {shown_with[key]})"
            continue
        shown_with[key] = result.label
        with drawing(salt=f"graph-{len(graphs)}"):
            svg = to_svg(draw_topology(topology), f"the graph {topology.name}")
        graph.update(svg=svg, panels=rounds)
    return graphs


def _graph_facts(result: Result) -> tuple[str, Topology | None]:
    """Say what a run's graph is, and return it where there is one to draw."""
    try:
        mixing = build_graph(result.scenario)
    except ScenarioError as error:  # an edge list that has moved since
        return f"cannot be built here: {error}", None
    if mixing is None:
        return NO_GRAPH.format(result.scenario.algorithm.name), None
    topology = mixing.topology
    facts = f"{topology.name}, {mixing.weights} weights, {graph_facts(connectivity(mixing))}"
    if topology.n_peers > LARGEST_GRAPH or len(topology.edges(0)) > MOST_EDGES:
        return f"{facts} (too large to draw)", None
    return facts, topology
