"""Tables and pictures for the terminal; with `as_json`, the same facts as JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from flower_privdec import catalogue
from flower_privdec.common.formatting import NOTHING, duration, number
from flower_privdec.graph.topology import topology_options
from flower_privdec.models import model_options
from flower_privdec.reporting.wording import (
    above_minimum,
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
from flower_privdec.scenario.algorithm_sections import algorithm_options

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
    """Draw who hears whom: a row a receiver, a column a sender, ● an edge; rounds side by side.

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
    heard = {(receiver, sender) for sender, receiver in edges}
    label = len(str(n_peers - 1))
    lines = [f"{'':{label}} round {round_index}" if many else ""]
    for receiver in range(n_peers):
        marks = " ".join("●" if (receiver, sender) in heard else "·" for sender in range(n_peers))
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
        said = [key if value is None else f"{key}: {_plain(value)}" for key, value in options(name).items()]
        lines[name] = f"{line} ({', '.join(said)})" if said else line
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
