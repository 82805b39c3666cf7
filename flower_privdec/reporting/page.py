"""A self-contained HTML page about one run, or comparing several."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from flower_privdec import __version__
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import check_file_place
from flower_privdec.common.formatting import duration, epsilon_text, number, setting
from flower_privdec.reporting import wording
from flower_privdec.reporting.console import comparison_row, complete_yaml, graph_facts
from flower_privdec.reporting.data_protection import as_markdown, notice, together
from flower_privdec.reporting.look import drawing, light_and_dark, look
from flower_privdec.reporting.plots import (
    NO_GRAPH,
    build_graph,
    connectivity,
    curves_of,
    draw_contributions,
    draw_curve,
    draw_peers,
    draw_topology,
    rounds_shown,
    themed,
    to_svg,
)
from flower_privdec.reporting.run_folder import RunGroup, budget_name, read_groups

PAGES = (".html", ".htm")
TABLES = (".csv", ".tex")
FIGURES = (".pdf", ".png", ".svg")
NOTICES = (".md",)  # for a data protection officer
LARGEST_GRAPH = 200  # peers; a larger circle shows nothing
MOST_EDGES = 2000  # in a round; more are a megabyte of lines


def write_report(runs: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Write a self-contained HTML page about runs, or, by the ending of `out`, only a part of it.

    On a page curves and graphs are inline SVG; .csv has the numbers and .tex the table in LaTeX; .pdf has a page for
    each curve, .png and .svg the first one; .md has what ε means for those in the data, for a data protection officer.

    Runs that differ only in their seeds are one group, with mean and spread; runs are ordered by budget.

    Args:
        runs: folders that `privdec run` wrote, finished or under way.

    Returns:
        A summary for each group, with its label on the page.

    Raises:
        ScenarioError: a folder is not a run, or the page cannot be written; nothing is written then.
    """
    ending = out.suffix.lower()
    known = (*PAGES, *NOTICES, *TABLES, *FIGURES)
    if ending not in known:
        endings = ", ".join(known)
        raise ScenarioError(f"{option('out', out)}: must end in one of {endings}; rename it", code="reporting.suffix")
    check_file_place("out", out)

    groups = read_groups(runs)
    text = ""
    if ending not in FIGURES:
        write = {".csv": _csv, ".tex": _latex, ".md": as_markdown}.get(ending, render)
        text = write(groups)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if ending in FIGURES:
            _save_figures(groups, out)
        else:
            out.write_text(text, encoding="utf-8", errors="backslashreplace")  # a folder's name may be no text
    except OSError as error:
        raise ScenarioError(
            f"{option('out', out)}: cannot be written ({error.strerror}); give another path",
            code="reporting.unwritable",
        ) from error
    return [group.summary for group in groups]


def _csv(groups: Sequence[RunGroup]) -> str:
    """Return a row of numbers for each group."""
    rows = []
    for group in groups:
        summary = group.summary
        epsilons = [float(row["epsilon"]) for row in summary["privacy"]]
        row = {key: summary[key] for key in ("label", "algorithm", "n_peers", "rounds")}
        row["seeds"] = group.seeds
        row["epsilon_min"] = min(epsilons, default="")
        row["epsilon_max"] = max(epsilons, default="")
        for name in (*summary["metrics"], "loss"):
            for which, value in (summary[name] or {}).items():
                row[f"{name}.{which}"] = value
        row["consensus_distance"] = summary["consensus_distance"]
        row["wall_seconds"] = summary["wall_seconds"]
        rows.append(row)

    # Runs may have different metrics: a column for each that some run has.
    columns = list(dict.fromkeys(key for row in rows for key in row))
    file = StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


LATEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"ε": r"$\varepsilon$", "∞": r"$\infty$", "–": "--", "²": r"$^2$", "±": r"$\pm$"},
}


def _latex(groups: Sequence[RunGroup]) -> str:
    """Return the table of runs for a LaTeX document with booktabs."""
    rows = [comparison_row(group.summary) for group in groups]
    lines = []
    for cells in [list(rows[0]), *(list(row.values()) for row in rows)]:
        escaped = ["".join(LATEX.get(sign, sign) for sign in cell) for cell in cells]
        lines.append(" & ".join(escaped) + r" \\")
    begin = r"\begin{tabular}{ll" + "r" * (len(rows[0]) - 2) + "}"
    return "\n".join([begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def _save_figures(groups: Sequence[RunGroup], out: Path) -> None:
    """Write each curve as a page of a PDF file, or the first as PNG or SVG."""
    with drawing():
        drawn = [draw_curve(curve, groups, legend=True) for curve in curves_of(groups)]
        figures = [figure for figure in drawn if figure is not None]
        if not figures:
            raise ScenarioError(f"{option('out', out)}: no run has been evaluated yet", code="reporting.no-curve")
        if out.suffix.lower() == ".png":
            figures[0].savefig(out, dpi=200, facecolor="white")
            return
        if out.suffix.lower() == ".svg":
            figures[0].savefig(out, facecolor="white")
            out.write_text(themed(out.read_text(encoding="utf-8")), encoding="utf-8")
            return

        from matplotlib.backends.backend_pdf import PdfPages

        with PdfPages(out, metadata={"CreationDate": None}) as pages:
            for figure in figures:
                pages.savefig(figure)


def render(groups: Sequence[RunGroup]) -> str:
    """Return the HTML of the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("flower_privdec.reporting"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    # If there are several budgets, each stands above the first of its runs.
    budgets = [group.budget for group in groups]
    headings: list[str | None] = [None] * len(groups)
    if len(set(budgets)) > 1:
        for i, budget in enumerate(budgets):
            if i == 0 or budgets[i - 1] != budget:
                headings[i] = budget_name(budget)

    single = len(groups) == 1
    n_runs = sum(len(group.runs) for group in groups)
    return environment.get_template("report.html.j2").render(
        title=groups[0].label if single else f"{n_runs} runs compared",
        subtitle=wording.headline(groups[0].summary) if single else _best(groups),
        cards=_cards(groups[0].summary) if single else [],
        curves=_curves(groups),
        keys=[look(index).key() for index in range(len(groups))],
        colours=light_and_dark(),
        comparison=[comparison_row(group.summary) for group in groups],
        budgets=headings,
        together=None if single else together(groups),
        runs=[_section(group, graph) for group, graph in zip(groups, _graphs(groups), strict=True)],
        version=__version__,
        wording=wording,
    )


def _best(groups: Sequence[RunGroup]) -> str:
    """Return the one-line result of a comparison: the best run at each budget, if all have one metric."""
    best: dict[float, tuple[float, RunGroup]] = {}
    metrics = set()
    for group in groups:
        name, kind = wording.main_metric(group.summary)
        value = wording.main_value(group.algorithm, group.summary[name])
        if value is None:
            continue
        metrics.add(name)
        score = value if kind["high"] else -value
        if group.budget not in best or score > best[group.budget][0]:
            best[group.budget] = (score, group)

    if not best:
        return "no run has been evaluated yet"
    if len(metrics) > 1:
        return "the runs have different metrics: see each"
    winners = [group for _, group in best.values()]
    if len(winners) == 1:
        return f"best: {winners[0].label}, {wording.headline(winners[0].summary)}"
    texts = [f"{budget_name(group.budget)}: {group.label} ({wording.named_value(group.summary)})" for group in winners]
    return f"best with {'; with '.join(texts)}"


def _cards(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the page: name, value, and what it is."""
    name, kind = wording.main_metric(summary)
    values = summary[name]
    cards = []
    if wording.shares_models(summary["algorithm"]):
        of_mean_model = wording.measured(wording.main_value(summary["algorithm"], values), kind)
        cards.append((kind["title"], of_mean_model, "mean model, test set"))

    of_peers = wording.measured(values["peer_mean"] if values else None, kind)
    sample = wording.sample_error(summary)
    of_sample = "" if sample is None else f" of {sample}"
    cards.append(("peers' models", of_peers, f"mean ({wording.peers_range(summary)}){of_sample}"))

    if wording.is_private(summary):
        note = wording.budget(summary).partition(" at ")[2] or "so far"
    else:
        note = "no privacy" if values else "not known yet"
    cards.append(("ε", wording.epsilon_range(summary), note))

    cards.append(("consensus distance", number(summary["consensus_distance"]), "root mean square"))
    pace = summary["peer_steps_per_second"]
    cards.append(("time", duration(summary["wall_seconds"]), f"{number(pace)} peer steps/s" if pace else "so far"))
    return cards


def _curves(groups: Sequence[RunGroup]) -> list[str]:
    """Return the curves of each quantity as SVG."""
    pictures = [(curve.name, curve.heading(groups), partial(draw_curve, curve, groups)) for curve in curves_of(groups)]
    if len(groups) == 1 and len(groups[0].runs) == 1:
        title = "what each peer's gradients add at its neighbours, over the rounds"
        pictures.append(("contributions", title, partial(draw_contributions, groups[0].runs[0].metrics)))
        pictures.append(("peers", "each peer: its model and its ε", partial(draw_peers, groups[0].runs[0].summary)))
    curves = []
    for name, title, draw in pictures:
        with drawing(salt=name):
            figure = draw()
            if figure is not None:
                curves.append(to_svg(figure, title))
    return curves


def _section(group: RunGroup, graph: dict[str, Any]) -> dict[str, Any]:
    """Return the page's section about a group."""
    summary = group.summary
    first, *others = group.runs

    def privacy_cells(row: dict[str, Any]) -> list[str]:
        numbers = [epsilon_text(row["epsilon"]), setting(row["claimed_epsilon"]), setting(row["delta"])]
        return [*numbers, *(str(row[key]) for key in ("unit", "adjacency", "calibration"))]

    facts = [
        ("algorithm", summary["algorithm"]),
        ("peers", str(summary["n_peers"])),
        ("rounds", f"{summary['rounds']:,}"),
        ("seeds" if others else "seed", group.seeds),
    ]
    if first.finished:
        facts.append(("runtime", summary["runtime"]))
        ended = datetime.fromtimestamp((first.folder / "summary.json").stat().st_mtime, UTC)
        facts.append(("date", f"{ended:%Y-%m-%d %H:%M} UTC"))
        facts += summary.get("made", {}).items()
    return {
        "label": group.label,
        "summary": summary,
        "finished": first.finished,
        "facts": facts,
        "privacy": wording.alike(summary["privacy"], privacy_cells),
        "by_class": wording.by_class(summary),
        "notice": notice(group),
        "graph": graph,
        "yaml": complete_yaml(first.scenario),
        "folders": [str(run.folder) for run in group.runs],
    }


def _graphs(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Return each run's graph: its facts, and its picture unless an earlier run shows the same one."""
    shown_with: dict[str, str] = {}  # by edges, the label of the group with the picture
    return [_graph(group, place, shown_with) for place, group in enumerate(groups, start=1)]


def _graph(group: RunGroup, place: int, shown_with: dict[str, str]) -> dict[str, Any]:
    """Return a run's graph; a picture is noted in `shown_with`."""
    scenario = group.runs[0].scenario
    graph: dict[str, Any] = {"facts": NO_GRAPH.format(scenario.algorithm.name), "svg": None, "panels": 0}
    try:
        mixing = build_graph(scenario)
    except ScenarioError as error:  # an edge list that has moved since
        graph["facts"] = f"cannot be built here: {error}"
        return graph
    if mixing is None:
        return graph

    topology = mixing.topology
    graph["facts"] = f"{topology.name}, {mixing.weights} weights, {graph_facts(connectivity(mixing))}"
    if topology.n_peers > LARGEST_GRAPH or len(topology.edges(0)) > MOST_EDGES:
        graph["facts"] += " (too large to draw)"
        return graph

    rounds = rounds_shown(topology)
    edges = repr([topology.edges(k).tolist() for k in range(rounds)])
    if edges in shown_with:
        graph["facts"] += f" (picture: {shown_with[edges]})"
        return graph

    shown_with[edges] = group.label
    with drawing(salt=f"graph-{place}"):
        graph["svg"] = to_svg(draw_topology(topology), f"the graph {topology.name}")
    graph["panels"] = rounds
    return graph
