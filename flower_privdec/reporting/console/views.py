"""What commands print: scenarios, plans, graphs, results and catalogues."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from flower_privdec import catalogue
from flower_privdec.common.formatting import NOTHING, duration, epsilon_text, memory, number, setting
from flower_privdec.graph.topology import topology_options
from flower_privdec.models import model_options
from flower_privdec.reporting.wording import (
    above_minimum,
    alike,
    claim,
    coalitions,
    epsilon_range,
    guarantee,
    headline,
    is_private,
    main_loss,
    main_metric,
    meaning,
    named_value,
    other_metrics,
    own_labels,
    peers_range,
    peers_values,
    replies,
    sent,
    shares_models,
)
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.algorithm_sections import algorithm_options
from flower_privdec.scenario.fields import Section
from flower_privdec.scenario.model_section import ModelSection
from flower_privdec.scenario.topology_section import TopologySection

LEFT_OUT = re.compile(r"^    (\w+): (?:(?!^    \w).)*?left out,\s+(.*?)[;.](?:\s|$)", re.MULTILINE | re.DOTALL)


def complete_yaml(scenario: Scenario) -> str:
    """Return a scenario as YAML that reads back to the same scenario, with a comment for every key that is left out.

    A comment says the value that holds, or in words what it follows from; keys that do not apply have none.
    """
    data = json.loads(scenario.model_dump_json(exclude_none=True))
    return "".join(f"{line}\n" for line in _yaml_lines(scenario, data, ""))


def _yaml_lines(section: Section, data: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        inner = getattr(section, key)
        if isinstance(inner, Section):
            yield f"{indent}{key}:"
            yield from _yaml_lines(inner, value, f"{indent}  ")
        else:
            yield indent + _written(key, value)
    yield from (f"{indent}# {comment}" for comment in _left_out(section))


def _written(key: str, value: Any) -> str:
    """Return a key and its value on one line of YAML."""
    listed = yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return f"{key}: {listed.strip()[1:-1]}"


def _left_out(section: Section) -> list[str]:
    """Say for each key that applies and is left out what holds then."""
    values, described = _options(section), _described_defaults(section)
    if isinstance(section, ModelSection | TopologySection):  # whose keys are those of all models or graphs
        described = {key: comments for key, comments in described.items() if key in values}
    comments = {key: f"{key}: left out, {words}" for key, words in described.items()}
    comments |= {key: _written(key, value) for key, value in values.items() if value is not None}
    return [line for key, line in comments.items() if getattr(section, key) is None]


def _options(section: Section) -> dict[str, Any]:
    """Return the options of a named model or graph, with their defaults; None where these follow from others."""
    if isinstance(section, ModelSection) and section.name is not None:
        return model_options(section.name)
    if isinstance(section, TopologySection):
        options = topology_options(section.name)
        drawn_from = section.supergraph or options.get("supergraph")
        return options | (topology_options(drawn_from) if drawn_from else {})
    return {}


def _described_defaults(section: Section) -> dict[str, str]:
    """Return what the docstrings of a section say holds where a key is left out."""
    defaults: dict[str, str] = {}
    for kind in reversed(type(section).__mro__):
        attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        defaults |= {key: " ".join(text.split()) for key, text in LEFT_OUT.findall(attributes)}
    return {key: text for key, text in defaults.items() if key in type(section).model_fields}


PLAIN_WIDTH = 130
NARROW = 120
LARGEST_PICTURE = 32
OWN = "your own algorithm, topology, model or dataset: module: package.module:name in place of its name"
ESSENTIAL = ("run", "algorithm", "ε", "mean model", "peers' models", "time")


class _Console(Console):
    """Stdout as wide as the terminal, or plain text without trailing blanks where it is none."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)

    def show(self, thing: RenderableType = "", style: str | None = None) -> None:
        """Print something."""
        if self.is_terminal:
            self.print(thing, style=style)
            return
        with self.capture() as captured:
            self.print(thing)
        for line in captured.get().splitlines():
            print(line.rstrip())


def _console() -> _Console:
    return _Console()


def as_text(things: Iterable[RenderableType]) -> str:
    """Return tables and lines as plain text, without trailing blanks."""
    console = Console(
        file=io.StringIO(), width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False, color_system=None
    )
    with console.capture() as captured:
        for thing in things:
            console.print(thing)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _facts(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Return a two-column table of named facts, leaving out those that are None."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows:
        if text is not None:
            table.add_row(name, text)
    return table


def _table(columns: Sequence[tuple[str, str]]) -> Table:
    """Return an empty table; each column is a heading and `left` or `right`."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for heading, side in columns:
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    return table


def comparison_text(headings: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> str:
    """Return a table of plain text, its first column to the left and the others to the right, and a note below it."""
    table = _table([(heading, "right" if i else "left") for i, heading in enumerate(headings)])
    for row in rows:
        table.add_row(*row)
    return as_text([table, note])


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print what a finished run reached, at which ε, and where its files lie."""
    console = _console()
    loss = main_loss(summary["algorithm"], summary["loss"])
    average = named_value(summary, "peer_mean")
    pace = f"{number(summary['peer_steps_per_second'])} peer steps per second"
    network = f"{summary['n_peers']} peers, {summary['rounds']:,} rounds, {summary['runtime']}"
    console.show()
    console.show(f"{summary['name']}: {headline(summary)}", style="bold")
    console.show(
        _facts(
            [
                ("algorithm", f"{summary['algorithm']}, {network}"),
                ("peers' models", f"{average} on average, {peers_range(summary)} from worst to best"),
                ("also", other_metrics(summary)),
                ("own labels", own_labels(summary)),
                ("loss", None if loss is None else f"{number(loss)} (mean model, test set)"),
                (
                    "consensus",
                    f"{number(summary['consensus_distance'])} root mean square distance to the mean model",
                ),
                ("objective", above_minimum(summary)),
                ("coalitions", coalitions(summary)),
                ("privacy", guarantee(summary)),
                ("", meaning(summary)),
                ("of which", replies(summary)),
                ("not covered", summary.get("evaluation_private")),
                ("claimed", claim(summary)),
                ("traffic", sent(summary)),
                ("numbers", summary.get("numbers")),
                ("gone", summary.get("gone")),
                ("noise", summary.get("noise") if is_private(summary) else None),
                ("speed", f"{duration(summary['wall_seconds'])}, {pace}"),
                ("files", str(folder)),
            ]
        )
    )
    if "budget_note" in summary:
        console.show()
        console.show(f"warning: {summary['budget_note']}", style="yellow")


def print_comparison(summaries: Sequence[dict[str, Any]]) -> None:
    """Print one row a run, those of unlike budgets apart; on a narrow terminal only what matters most."""
    console = _console()
    rows = [comparison_row(summary) for summary in summaries]
    shown = [name for name in rows[0] if console.width >= NARROW or name in ESSENTIAL]
    table = _table([(name, "left" if name in ("run", "algorithm") else "right") for name in shown])
    table.columns[0].overflow, table.columns[0].no_wrap = "fold", False
    budgets = [summary.get("budget") for summary in summaries]
    for row, budget, following in zip(rows, budgets, [*budgets[1:], None], strict=True):
        table.add_row(*(row[name] for name in shown), end_section=following not in (budget, None))
    console.show(table)


def comparison_row(summary: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a run in a comparison, by heading."""
    finished, values = summary.get("finished", True), summary[main_metric(summary)[0]]
    done = f"{summary['rounds']:,}" if finished else f"{summary['rounds_done']:,}/{summary['rounds']:,}"
    return {
        "run": summary.get("label", summary["name"]),
        "algorithm": summary["algorithm"],
        "peers": str(summary["n_peers"]),
        "rounds": done,
        "ε": epsilon_range(summary),
        "mean model": named_value(summary, "mean_model") if values and shares_models(summary["algorithm"]) else NOTHING,
        "peers' models": peers_values(summary),
        "loss": number(main_loss(summary["algorithm"], summary["loss"])),
        "consensus": number(summary["consensus_distance"]),
        "time": duration(summary["wall_seconds"]),
    }


def graph_facts(graph: dict[str, Any]) -> str:
    """Say how well a graph spreads what a peer knows."""
    rounds = graph["joint_connectivity"]
    joined = "not jointly connected in the rounds looked at" if rounds is None else f"jointly connected in {rounds}"
    unit = "" if rounds is None else " round" if rounds == 1 else " rounds"
    gap = graph["spectral_gap"]
    return f"{joined}{unit}, spectral gap {'not measured: too many peers' if gap is None else number(gap)}"


def print_topology(description: dict[str, Any], as_json: bool) -> None:
    """Print a graph's facts and, where it is small and no picture was written, its edges round by round."""
    if as_json:
        _print_json(description)
        return
    console = _console()
    if description["name"] is None:
        console.show(description["note"])
        return
    kind = "directed" if description["directed"] else "undirected"
    console.show(f"{description['name']}: {description['n_peers']} peers, {kind}", style="bold")
    console.show(
        _facts(
            [
                (
                    "edges",
                    f"{_counts(description['edges_per_round'])} a round ({_period(description['period'])})",
                ),
                ("weights", description["weights"]),
                ("agreement", graph_facts(description)),
                ("picture", description["picture"]),
            ]
        )
    )
    if description["picture"] is None and description["edges"] is not None:
        console.show()
        for line in adjacency_picture(description["n_peers"], description["edges"], console.width):
            console.show(line)


def _counts(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _period(period: int | None) -> str:
    if period is None:
        return "drawn afresh each round"
    return "the same every round" if period == 1 else f"repeating after {period} rounds"


def adjacency_picture(n_peers: int, rounds: Sequence[Sequence[Sequence[int]]], width: int) -> list[str]:
    """Draw the adjacency matrix: a row is a receiver, a column a sender, ● an edge; rounds side by side.

    Args:
        n_peers: at most `LARGEST_PICTURE`, or the picture is too wide for a terminal.
        rounds: the edges (sender, receiver) of each round.
        width: of the terminal, in characters.
    """
    blocks = [_adjacency_block(n_peers, edges, k, many=len(rounds) > 1) for k, edges in enumerate(rounds)]
    wide = max(map(len, blocks[0]))
    across = max(1, (width + 3) // (wide + 3))
    lines = ["rows hear columns (● an edge)"]
    for start in range(0, len(blocks), across):
        for row in zip(*blocks[start : start + across], strict=True):
            lines.append("   ".join(part.ljust(wide) for part in row).rstrip())
    return lines


def _adjacency_block(n_peers: int, edges: Sequence[Sequence[int]], round_index: int, *, many: bool) -> list[str]:
    entries = {(receiver, sender) for sender, receiver in edges}
    label = len(str(n_peers - 1))
    lines = [f"{'':{label}} round {round_index}" if many else ""]
    for receiver in range(n_peers):
        marks = " ".join("●" if (receiver, sender) in entries else "·" for sender in range(n_peers))
        lines.append(f"{receiver:{label}d} {marks}")
    return lines


def parts() -> dict[str, dict[str, str]]:
    """Return everything a scenario can name, with one line each that says what keys it takes."""
    return {
        "algorithms": _lines(catalogue.ALGORITHMS, algorithm_options),
        "tables": dict(catalogue.GRADIENT_TABLES.lines),
        "regularizers": dict(catalogue.REGULARIZERS.lines),
        "schedules": dict(catalogue.DUAL_SCHEDULES.lines),
        "topologies": _lines(catalogue.TOPOLOGIES, topology_options),
        "weights": dict(catalogue.WEIGHTS.lines),
        "participations": dict(catalogue.PARTICIPATIONS.lines),
        "losses": dict(catalogue.LOSSES.lines),
        "metrics": dict(catalogue.METRICS.lines),
        "models": _lines(catalogue.MODELS, model_options),
        "activations": dict(catalogue.ACTIVATIONS.lines),
        "inits": dict(catalogue.INITS.lines),
        "datasets": dict(catalogue.DATASETS.lines),
        "partitions": dict(catalogue.PARTITIONS.lines),
        "samplings": dict(catalogue.SAMPLINGS.lines),
        "features": dict(catalogue.FEATURES.lines),
    }


def _lines(choice: catalogue.Choice, options: Callable[[str], Mapping[str, Any]]) -> dict[str, str]:
    """Return the line on each name, with the keys that it takes and their defaults, where these are known before."""
    lines = {}
    for name, line in choice.lines.items():
        options_text = [key if value is None else f"{key}: {_plain(value)}" for key, value in options(name).items()]
        lines[name] = f"{line} ({', '.join(options_text)})" if options_text else line
    return lines


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def print_parts(as_json: bool) -> None:
    """Print everything a scenario can name."""
    named = parts()
    if as_json:
        _print_json(named)
        return
    console = _console()
    width = max(len(name) for group in named.values() for name in group)
    for heading, group in named.items():
        console.show(heading, style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(width=width + 2, no_wrap=True)
        table.add_column()
        for name, line in group.items():
            table.add_row(f"  {name}", line)
        console.show(table)
    console.show(OWN)


OPTIONAL: dict[str, tuple[str, Callable[[Any], str]]] = {
    "active_rounds": ("active rounds", number),
    "expected_rounds": ("expected", number),
    "epsilon_of_replies_to_one": ("ε of the replies to one neighbour alone", epsilon_text),
    "claimed_epsilon": ("claimed ε", setting),
    "claimed_after_quarters": ("claimed ε after each quarter", lambda values: ", ".join(map(epsilon_text, values))),
    "mu_total": ("μ_tot", number),
    "mu_0": ("μ_0", number),
}
SYMBOLS = {
    "smoothness": "L",
    "gradient_bound": "G",
    "initial_gap": "F0",
    "heterogeneity": "b²",
    "initial_norm_squared": "‖x0‖²",
    "dimension": "d",
    "dataset_size": "J",
    "c_2": "c_2",
}
SOURCES = {
    "given": "given",
    "estimated": "estimated at x0 on the public test set",
    "clip norm": "the clip norm",
    "scenario": "of the scenario",
}


def print_plan(plan: dict[str, Any], as_json: bool) -> None:
    """Print a plan: noise and ε of each peer, the best K, cost, graph and warnings."""
    if as_json:
        _print_json(plan)
        return
    console = _console()
    for thing, style in _plan(plan):
        console.show(thing, style=style)


def plan_text(plan: dict[str, Any]) -> str:
    """Return a plan as it is printed, without colours."""
    return as_text(thing for thing, _ in _plan(plan))


def _plan(plan: dict[str, Any]) -> Iterator[tuple[RenderableType, str | None]]:
    """Yield what there is to show of a plan, and in which style."""
    yield f"{plan['name']}: {plan['algorithm']}, {len(plan['peers'])} peers, {plan['rounds']:,} rounds", "bold"
    yield _peers(plan), None
    graph = plan["topology"]
    connected = [("graph", None if graph is None else graph_facts(graph))]
    yield _facts([*connected, ("ledger", _ledger(plan["ledger"])), *_optimum(plan), *_cost(plan)]), None
    if plan["warnings"]:
        yield "", None
        yield _warnings(plan["warnings"]), "yellow"


def _warnings(warnings: list[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    for warning in warnings:
        table.add_row("warning:", warning)
    return table


def _ledger(ledger: dict[str, Any] | None) -> str:
    """Say what the ledger comes to with this run."""
    if ledger is None:
        return "the run's own: ε counts this run alone"
    before, after = (epsilon_text(ledger[key]) for key in ("epsilon_before", "epsilon_after"))
    return f"{ledger['folder']}: ε = {before} before this run, {after} after it"


def _peers(plan: dict[str, Any]) -> Table:
    """Return a row for each group of equal peers; what no peer has is left out."""
    rounds, peers = plan["rounds"], plan["peers"]
    table = _table(
        [
            ("peers", "left"),
            ("noise multiplier", "right"),
            (f"σ at rounds 0, {rounds // 2}, {rounds - 1}", "right"),
            ("ε after each quarter", "right"),
            ("δ", "right"),
        ]
    )
    shown = [key for key in OPTIONAL if any(row[key] is not None for row in peers)]
    for key in shown:
        constant = key == "mu_0" and all(row["mu_bar"] is not None for row in peers)
        table.add_column("μ̄" if constant else OPTIONAL[key][0], justify="right")
    for cells in alike(peers, lambda row: _cells(row, shown)):
        table.add_row(*cells)
    return table


def _cells(row: dict[str, Any], shown: Sequence[str]) -> list[str]:
    """Return what is said of a peer, with those optional columns that are shown."""
    sigma = [number(value) for value in row["sigma"]]
    return [
        number(row["noise_multiplier"]),
        sigma[0] if len(set(sigma)) == 1 else ", ".join(sigma),
        ", ".join(map(epsilon_text, row["epsilon_after_quarters"])),
        setting(row["delta"]),
        *(OPTIONAL[key][1](row[key]) for key in shown),
    ]


def _optimum(plan: dict[str, Any]) -> list[tuple[str, RenderableType | None]]:
    """Return the best number of rounds, what it was computed from, and how it grows with ε."""
    best, note = plan["optimal_rounds"], plan["optimal_rounds_note"]
    if best is None:
        return [("best rounds", None if note is None else f"not known: {note}")]
    guide = "" if plan["algorithm"] == "privsgp-vr" else f", a guide for {plan['algorithm']}"
    accountant, exact = plan["accountant"], None
    if accountant is not None:
        exact = (
            f"K* = {accountant['optimal_rounds']:,} with c_2 = {number(accountant['c_2'])}, "
            f"which makes eq. 11 the accountant's noise at K = {plan['rounds']:,}"
        )
    return [
        ("best rounds", f"K* = {best:,} by eq. 12 of PrivSGP-VR{guide}; here K = {plan['rounds']:,}"),
        ("", exact),
        *(("", line) for line in _constants(plan["optimal_rounds_constants"])),
        ("by ε", _curve(plan["optimal_rounds_curve"])),
    ]


def _constants(constants: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each source of constants."""
    lines = []
    for source, words in SOURCES.items():
        named = [
            f"{SYMBOLS[key]} = {_constant(constant['value'])}"
            for key, constant in constants.items()
            if constant["from"] == source
        ]
        if named:
            lines.append(f"{', '.join(named)} ({words})")
    return lines


def _constant(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value >= 1000 else f"{value:.4g}"


def _curve(curve: list[list[float]]) -> Table:
    """Return K* by ε, across."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in curve:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("ε", *(setting(epsilon) for epsilon, _ in curve))
    table.add_row("K*", *(f"{rounds:,}" for _, rounds in curve))
    return table


def _cost(plan: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return memory, by part and by kind of table, and time."""
    parts = [f"{name} {memory(size)}" for name, size in plan["memory"].items() if size]
    seconds, workers = plan["seconds"], plan["workers"]
    by = f", by {workers} processes" if workers > 1 else ""
    return [
        ("memory", f"about {memory(plan['memory_bytes'])}: {', '.join(parts)}"),
        ("gradients", plan["gradients"]),
        ("tables", _tables(plan)),
        (
            "time",
            "not timed: it does not fit into memory"
            if seconds is None
            else f"about {duration(seconds)} here{by}, from a few timed rounds",
        ),
    ]


def _tables(plan: dict[str, Any]) -> str | None:
    if plan["tables"] is None:
        return None
    sizes = {
        name: f"{name} {NOTHING if size is None else memory(size)}" + (" (chosen)" if name == plan["table"] else "")
        for name, size in plan["tables"].items()
    }
    return ", ".join(sizes.values())
