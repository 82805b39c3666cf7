"""The output of commands: scenarios, plans, graphs, results and catalogues, as text or JSON.

A plan and a graph are made by a generator of lines and rich tables (`_plan`, `_topology`), so that what is printed to a
terminal (`print_plan`) and what the Python API returns as text (`plan_text`) differ only in colour. The dicts that all
of this is made from are also what is printed as JSON.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from flower_privdec.common import catalogue
from flower_privdec.common.errors import ScenarioError, did_you_mean
from flower_privdec.common.fields import Section
from flower_privdec.common.formatting import NOTHING, duration, epsilon_text, memory, number, percent, setting, shown
from flower_privdec.reporting import wording
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.algorithm_sections import ALGORITHMS
from flower_privdec.scenario.loading import file_form

PLAIN_WIDTH = 130  # columns of text that does not go to a terminal
MOST_CLASSES = 30  # in the table of a run's classes
NARROW = 120  # on a narrower terminal, a comparison has only the ESSENTIAL columns
ESSENTIAL = ("run", "algorithm", "ε", "mean model", "peers' models", "time")
OWN = "your own algorithm, topology, model or dataset: module: package.module:name in place of its name"
MORE = (
    "--verbose adds each peer's noise and ε over the rounds, the graph, the best rounds, gradients and memory by part"
)

# Columns of a plan that a peer may lack: key in its row -> heading, and the format of a value.
OPTIONAL: dict[str, tuple[str, Callable[[Any], str]]] = {
    "active_rounds": ("active rounds", number),
    "expected_rounds": ("expected", number),
    "epsilon_of_replies_to_one": ("ε of the replies to one neighbour", epsilon_text),
    "epsilon_if_all_collude": ("ε if all other peers collude", epsilon_text),
    "noise_share": ("noise share", percent),
    "claimed_epsilon": ("claimed ε", setting),
    "claimed_after_quarters": ("claimed ε after each quarter", lambda values: ", ".join(map(epsilon_text, values))),
    "mu_total": ("μ_tot", number),
    "mu_0": ("μ_0", number),
}

# The constants of the best number of rounds: their symbols in the paper, and the words for where a value is from.
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

# Docstrings of scenario sections describe a default that follows from other keys as `KEY: ... left out, WHAT;`. This
# finds KEY and WHAT, which `privdec show` prints; the lookahead keeps a match inside the text of one key.
LEFT_OUT = re.compile(r"^    (\w+): (?:(?!^    \w).)*?left out,\s+(.*?)[;.](?:\s|$)", re.MULTILINE | re.DOTALL)


def complete_yaml(scenario: Scenario) -> str:
    """Return YAML that parses to the same scenario, and comments on the keys that are left out.

    A comment describes what the value of its key then follows from.
    """
    data = file_form(scenario)
    return "".join(f"{line}\n" for line in _yaml_lines(scenario, data, ""))


def _yaml_lines(section: Section, data: dict[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a section, whose values are `data`, and then its comments."""
    for key, value in data.items():
        # A default, because a key may be a Python keyword: the attribute of `from` has another name.
        inner = getattr(section, key, None)
        if isinstance(inner, Section):
            yield f"{indent}{key}:"
            yield from _yaml_lines(inner, value, f"{indent}  ")
        else:
            yield indent + _yaml_line(key, value)

    for key, text in _described_defaults(section).items():
        if getattr(section, key) is None:
            yield f"{indent}# {key}: left out, {text}"


def _yaml_line(key: str, value: Any) -> str:
    # The value as the only item of a list, [value]: a scalar by itself would end with YAML's document mark "...".
    sequence = yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return f"{key}: {sequence.strip()[1:-1]}"


def _described_defaults(section: Section) -> dict[str, str]:
    """Return the defaults that a section's docstrings describe, by key; see LEFT_OUT."""
    # Base classes first, so that a subclass can describe a key anew.
    defaults: dict[str, str] = {}
    for kind in reversed(type(section).__mro__):
        attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        defaults |= {key: " ".join(text.split()) for key, text in LEFT_OUT.findall(attributes)}
    return {key: text for key, text in defaults.items() if key in type(section).model_fields}


def plain_width() -> int:
    """Return the width in columns of text that does not go to a terminal: the variable COLUMNS if it is set."""
    columns = os.environ.get("COLUMNS", "")
    is_sensible = columns.isdecimal() and len(columns) < 5
    if not is_sensible:
        return PLAIN_WIDTH
    return max(40, int(columns))


class _Console(Console):
    """Prints to stdout: in the width of the terminal, or plain text without trailing blanks if it is not one."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else plain_width()
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def show(self, thing: RenderableType = "", style: str | None = None) -> None:
        """Print a line or a table."""
        if self.is_terminal:
            self.print(thing, style=style)
        else:
            print(as_text([thing]))


def as_text(things: Iterable[RenderableType]) -> str:
    """Return tables and lines as plain text, without trailing blanks."""
    # In a notebook rich would also display what it captures, as an empty output.
    console = Console(
        file=io.StringIO(),
        width=plain_width(),
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None,
        force_jupyter=False,
    )
    with console.capture() as captured:
        for thing in things:
            console.print(thing)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _facts(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Return a table with a row for each fact, its name on the left; facts that are None are left out."""
    table = _grid()
    for name, text in rows:
        if text is not None:
            table.add_row(name, text)
    return table


def _grid(width: int | None = None, style: str | None = "dim") -> Table:
    """Return an empty table of two columns without lines; width and style are the first column's."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=width, style=style, no_wrap=True)
    table.add_column()
    return table


def _strip(rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table with a row of right-aligned numbers after each name."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for name, numbers in rows.items():
        table.add_row(name, *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def _table(columns: Sequence[tuple[str, str]]) -> Table:
    """Return an empty table. A column is given by its heading and its alignment, `left` or `right`."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for heading, side in columns:
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    return table


def comparison_text(headings: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> str:
    """Return a table as plain text, its first column left-aligned and the others right-aligned, and a note below it."""
    table = _table([(heading, "right" if i else "left") for i, heading in enumerate(headings)])
    for row in rows:
        table.add_row(*row)
    return as_text([table, note])


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print a finished run's results, its privacy, and the folder of its files."""
    algorithm = summary["algorithm"]
    network = f"{summary['n_peers']} peers, {summary['rounds']:,} rounds, {summary['runtime']}"
    average = wording.named_value(summary, "peer_mean")
    speed: str | None = (
        f"{duration(summary['wall_seconds'])}, {number(summary['peer_steps_per_second'])} peer steps per second"
    )
    if "virtual_seconds" in summary:  # a rehearsal's clock says nothing of this machine
        speed = None

    # The headline has the first metric; these are for the others.
    metrics = []
    for name, kind in summary["metrics"].items():
        value = wording.main_value(algorithm, summary[name])
        metrics.append(f"{kind['title']} {wording.measured(value, kind)}")

    loss_text = None
    loss = wording.main_loss(algorithm, summary["loss"])
    if loss is not None:
        loss_text = f"{number(loss)} (mean model, test set)"

    training_text = None
    training_loss = wording.main_loss(algorithm, summary.get("training_loss"))
    if training_loss is not None:
        training_text = f"{number(training_loss)} (mean model, all peers' examples)"

    objective = None
    if summary.get("suboptimality") is not None and "optimum" in summary:
        least = summary["optimum"]["value"]
        gap = summary["optimum"]["gap"]
        objective = f"{number(summary['suboptimality'])} above the minimum, which is {least:.6g} (within {gap:.1e})"

    coalitions = None
    if "coalition_evaluations" in summary:
        share = percent(summary["coalition_share_of_wall_time"])
        coalitions = (
            f"{summary['coalition_evaluations']:,} evaluated for Shapley values, which took {share} of the time"
        )

    replies = None
    epsilons = [row["epsilon_of_replies_to_one"] for row in summary["privacy"] if "epsilon_of_replies_to_one" in row]
    if epsilons:
        largest = epsilon_text(max(map(float, epsilons)))
        replies = f"ε ≤ {largest} for the replies to one neighbour, which does not bound everything that it receives"

    facts = [
        ("attack", summary.get("attack")),
        ("algorithm", f"{algorithm}, {network}"),
        ("peers' models", f"{average} on average, {wording.peers_range(summary)} from worst to best"),
        ("of these", wording.sample_error(summary)),
        ("also", ", ".join(metrics[1:]) or None),
        ("own labels", wording.own_labels(summary)),
        ("loss", loss_text),
        ("training loss", training_text),
        ("consensus", f"{number(summary['consensus_distance'])} root mean square distance to the mean model"),
        ("objective", objective),
        ("coalitions", coalitions),
        ("privacy", wording.guarantee(summary)),
        ("", wording.meaning(summary)),
        ("", replies),
        ("not covered", summary.get("evaluation_private")),
        ("claimed", wording.claim(summary)),
        ("traffic", wording.sent(summary)),
        ("numbers", summary.get("numbers")),
        ("doubted", summary.get("doubted")),
        ("gone", summary.get("gone")),
        ("left out", summary.get("left_out")),
        ("not agreed", summary.get("not_agreed")),
        ("noise", summary.get("noise") if wording.is_private(summary) else None),
        ("speed", speed),
        ("files", str(folder)),
    ]
    console = _Console()
    console.show()
    console.show(f"{summary['name']}: {wording.headline(summary)}", style="bold")
    console.show(_facts(facts))

    of_classes = wording.by_class(summary, MOST_CLASSES)
    if of_classes:
        table = _table([(head, "right" if place else "left") for place, head in enumerate(wording.CLASS_HEADS)])
        for row in of_classes:
            table.add_row(*row)
        console.show()
        console.show(table)
        if len(of_classes) < len(summary["by_class"]):
            console.show(f"The {MOST_CLASSES} classes with the lowest F1; summary.json has all.")

    for note in ("budget_note", "balance_note"):
        if note in summary:
            console.show()
            console.show(f"warning: {summary[note]}", style="yellow")


def print_comparison(summaries: Sequence[dict[str, Any]]) -> None:
    """Print a table with a row for each run and a line between budgets; on a narrow terminal only ESSENTIAL columns."""
    console = _Console()
    rows = [comparison_row(summary) for summary in summaries]
    shown = [name for name in rows[0] if console.width >= NARROW or name in ESSENTIAL]
    table = _table([(name, "left" if name in ("run", "algorithm") else "right") for name in shown])
    table.columns[0].overflow = "fold"
    table.columns[0].no_wrap = False

    budgets = [summary.get("budget") for summary in summaries]
    next_budgets = [*budgets[1:], None]
    for row, budget, next_budget in zip(rows, budgets, next_budgets, strict=True):
        is_last_of_budget = next_budget not in (budget, None)
        table.add_row(*(row[name] for name in shown), end_section=is_last_of_budget)
    console.show(table)


def comparison_row(summary: dict[str, Any]) -> dict[str, str]:
    """Return a run's row in a comparison: the text of each cell by its heading."""
    done = f"{summary['rounds']:,}"
    if not summary.get("finished", True):
        done = f"{summary['rounds_done']:,}/{done}"

    # If models are never exchanged, no peer has the mean model, so its value would mislead.
    mean_model = NOTHING
    metric, *_ = wording.main_metric(summary)
    if summary[metric] and wording.shares_models(summary["algorithm"]):
        mean_model = wording.named_value(summary, "mean_model")
    return {
        "run": summary.get("label", summary["name"]),
        "algorithm": summary["algorithm"],
        "peers": str(summary["n_peers"]),
        "rounds": done,
        "ε": wording.epsilon_range(summary),
        "mean model": mean_model,
        "peers' models": wording.peers_values(summary),
        "loss": number(wording.main_loss(summary["algorithm"], summary["loss"])),
        "consensus": number(summary["consensus_distance"]),
        "time": duration(summary["wall_seconds"]),
    }


def graph_facts(graph: dict[str, Any]) -> str:
    """Return a graph's joint connectivity and spectral gap as text."""
    rounds = graph["joint_connectivity"]
    joined = "not jointly connected in the rounds checked"
    if rounds is not None:
        plural = "" if rounds == 1 else "s"
        joined = f"jointly connected in {rounds} round{plural}"
    if graph["spectral_gap"] is None:
        gap = "not measured: too many peers"
    else:
        gap = number(graph["spectral_gap"])
    return f"{joined}, spectral gap {gap}"


def print_topology(description: dict[str, Any], as_json: bool) -> None:
    """Print a graph's facts and, if it is small and no picture was written, its edges round by round."""
    if as_json:
        _print_json(description)
        return
    console = _Console()
    for i, thing in enumerate(_topology(description, console.width)):
        console.show(thing, style=None if i else "bold")


def topology_text(description: dict[str, Any]) -> str:
    """Return a graph as `print_topology` prints it, without colours."""
    return as_text(_topology(description, plain_width()))


def _topology(description: dict[str, Any], width: int) -> Iterator[RenderableType]:
    """Yield the lines and tables that describe a graph, the heading first."""
    # An algorithm without a graph.
    if description["name"] is None:
        yield description["note"]
        return

    kind = "directed" if description["directed"] else "undirected"
    period = description["period"]
    least = min(description["edges_per_round"])
    most = max(description["edges_per_round"])
    counts = f"{least:,}" if least == most else f"{least:,} to {most:,}"

    if period is None:
        repeating = "drawn again each round"
    elif period == 1:
        repeating = "the same every round"
    else:
        repeating = f"repeating after {period} rounds"

    yield f"{description['name']}: {description['n_peers']} peers, {kind}"
    facts = [
        ("edges", f"{counts} a round ({repeating})"),
        ("weights", description["weights"]),
        ("agreement", graph_facts(description)),
        ("picture", description["picture"]),
    ]
    yield _facts(facts)
    if description["picture"] is None and description["edges"] is not None:
        yield ""
        yield from adjacency_picture(description["n_peers"], description["edges"], width)


def adjacency_picture(n_peers: int, rounds: Sequence[Sequence[Sequence[int]]], width: int) -> list[str]:
    """Draw the adjacency matrix of each round, as many side by side as fit into the width.

    A row is a receiver, a column a sender, and ● an edge.

    Args:
        n_peers: at most `plots.LARGEST_LISTED`: more make the picture too wide for a terminal.
        rounds: the edges (sender, receiver) of each round.
        width: the terminal's, in columns.
    """
    digits = len(str(n_peers - 1))
    blocks = []  # one for each round: its lines
    for k, edges in enumerate(rounds):
        entries = {(receiver, sender) for sender, receiver in edges}
        marks = [
            " ".join("●" if (receiver, sender) in entries else "·" for sender in range(n_peers))
            for receiver in range(n_peers)
        ]
        title = f"{'':{digits}} round {k}" if len(rounds) > 1 else ""
        blocks.append([title, *(f"{receiver:{digits}d} {row}" for receiver, row in enumerate(marks))])

    gap = "   "
    block_width = max(map(len, blocks[0]))
    blocks_across = max(1, (width + len(gap)) // (block_width + len(gap)))
    lines = ["rows receive from columns (● an edge)"]
    for start in range(0, len(blocks), blocks_across):
        side_by_side = blocks[start : start + blocks_across]
        for row in zip(*side_by_side, strict=True):
            lines.append(gap.join(part.ljust(block_width) for part in row).rstrip())
    return lines


def parts() -> dict[str, dict[str, str]]:
    """Return everything a scenario can name: for each kind, a line by name that also lists the keys it takes."""
    # Imported late, because algorithms import torch.
    from flower_privdec.algorithms.dual_averaging import DUAL_SCHEDULES
    from flower_privdec.algorithms.proximal import REGULARIZERS
    from flower_privdec.algorithms.tables import GRADIENT_TABLES

    return {
        "algorithms": _lines(ALGORITHMS.lines, ALGORITHMS.keys_of),
        "tables": dict(GRADIENT_TABLES.lines),
        "regularizers": dict(REGULARIZERS.lines),
        "schedules": dict(DUAL_SCHEDULES.lines),
        "topologies": _lines(catalogue.TOPOLOGIES.lines, catalogue.TOPOLOGIES.keys_of),
        "weights": dict(catalogue.WEIGHTS.lines),
        "participations": dict(catalogue.PARTICIPATIONS.lines),
        "losses": dict(catalogue.LOSSES.lines),
        "metrics": dict(catalogue.METRICS.lines),
        "models": _lines(catalogue.MODELS.lines, catalogue.MODELS.keys_of),
        "activations": dict(catalogue.ACTIVATIONS.lines),
        "inits": dict(catalogue.INITS.lines),
        "datasets": catalogue.DATASETS.lines,
        "partitions": dict(catalogue.PARTITIONS.lines),
        "samplings": dict(catalogue.SAMPLINGS.lines),
        "features": dict(catalogue.FEATURES.lines),
        "noises": _lines(catalogue.NOISES.lines, catalogue.NOISES.keys_of),
        "robust": catalogue.ROBUST_RULES.lines,
        "attacks": _lines(catalogue.ATTACKS.lines, catalogue.ATTACKS.keys_of),
        "codecs": _lines(catalogue.CODECS.lines, catalogue.CODECS.keys_of),
        "transports": catalogue.TRANSPORTS.lines,
    }


def _lines(described: Mapping[str, str], options: Callable[[str], Mapping[str, Any]]) -> dict[str, str]:
    """Return each name's line with the keys that it takes and their defaults.

    Args:
        described: the line of each name.
        options: returns the keys of a name with their defaults; None is a default that follows from other keys.
    """
    lines = {}
    for name, line in described.items():
        keys = []
        for key, default in options(name).items():
            if default is None:
                keys.append(key)
                continue
            default_text = default if isinstance(default, str) else json.dumps(default)
            keys.append(f"{key}: {default_text}")
        lines[name] = f"{line} ({', '.join(keys)})" if keys else line
    return lines


def print_parts(as_json: bool, kind: str | None = None) -> None:
    """Print everything a scenario can name, or the names of one kind.

    Raises:
        ScenarioError: there is no such kind.
    """
    groups = parts()
    if kind is not None:
        chosen = kind if kind in groups else f"{kind}s"  # `model` for models
        if chosen not in groups:
            raise ScenarioError(
                f"KIND={shown(kind)} must be one of {', '.join(groups)}{did_you_mean(kind, groups)}", code="cli.kind"
            )
        groups = {chosen: groups[chosen]}

    if as_json:
        _print_json(groups)
        return

    console = _Console()
    width = max(len(name) for group in groups.values() for name in group)
    for heading, group in groups.items():
        console.show(heading, style="bold")
        table = _grid(width=width + 2, style=None)
        for name, line in group.items():
            table.add_row(f"  {name}", line)
        console.show(table)

    if kind is None:
        console.show(OWN)


def print_plan(plan: dict[str, Any], as_json: bool, verbose: bool = False) -> None:
    """Print a plan: ε, noise, memory, time and warnings; MORE says what `verbose` adds."""
    if as_json:
        _print_json(plan)
        return
    console = _Console()
    for thing, style in _plan(plan, verbose):
        console.show(thing, style=style)
    if not verbose:
        console.show()
        console.show(MORE, style="dim")


def plan_text(plan: dict[str, Any], verbose: bool = False) -> str:
    """Return a plan as `print_plan` prints it, without colours."""
    return as_text(thing for thing, _ in _plan(plan, verbose))


def _plan(plan: dict[str, Any], verbose: bool) -> Iterator[tuple[RenderableType, str | None]]:
    """Yield the parts of a plan, each with its style."""
    yield f"{plan['name']}: {plan['algorithm']}, {len(plan['peers'])} peers, {plan['rounds']:,} rounds", "bold"
    if verbose:
        yield _peers(plan), None
        yield _facts(_theory(plan)), None
    else:
        yield _facts([*_promise(plan), *_cost(plan, verbose), *_traffic(plan), *plan["data"].items()]), None
    if plan["warnings"]:
        yield "", None
        table = Table.grid(padding=(0, 1))
        for warning in plan["warnings"]:
            table.add_row("warning:", warning)
        yield table, "yellow"


def _range(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Return `LOW to HIGH` of some values as text, or one of them if both read the same."""
    ascending = sorted(map(float, values))
    low = text(ascending[0])
    high = text(ascending[-1])
    return low if low == high else f"{low} to {high}"


def _promise(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the ε that the run would cost each peer, and the noise that it adds."""
    rows = plan["peers"]
    if all(float(row["epsilon"]) == float("inf") for row in rows):
        yield "ε", "∞ (no privacy)"
        return

    deltas = [row["delta"] for row in rows if row["delta"]]
    at_delta = f" at δ = {_range(deltas, setting)}" if deltas else ""
    counted = "of this run only" if plan["ledger"] is None else "of this run"
    epsilons = _range((row["epsilon"] for row in rows), epsilon_text)
    yield "ε", f"{epsilons}{at_delta} at each peer in the end, {counted}"

    for key in ("epsilon_if_all_collude", "epsilon_of_replies_to_one", "claimed_epsilon"):
        heading, text = OPTIONAL[key]
        values = [row[key] for row in rows if row[key] is not None]
        if values:
            yield "", f"{heading}: {_range(values, text)}"

    if plan["ledger"] is not None:
        yield "ledger", _shared_ledger(plan["ledger"])
    yield "noise", f"{_range((row['noise_multiplier'] for row in rows), number)} clip norms in each private step"
    if plan["correlation"] is not None:
        yield "", _correlation(plan["correlation"])


def _shared_ledger(ledger: dict[str, Any]) -> str:
    before = epsilon_text(ledger["epsilon_before"])
    after = epsilon_text(ledger["epsilon_after"])
    return f"{ledger['folder']}: ε = {before} before this run, {after} after it"


def _theory(plan: dict[str, Any]) -> Iterator[tuple[str, RenderableType | None]]:
    """Yield all facts of a plan by name: graph, ledger, pairs, best rounds and cost."""
    graph = plan["topology"]
    ledger = "the run's own: ε counts only this run"
    if plan["ledger"] is not None:
        ledger = _shared_ledger(plan["ledger"])

    connected = None
    if graph is not None:
        connected = graph_facts(graph)
        if graph["final_mixing"] is not None:
            connected += f"; on a network {graph['final_mixing']} rounds of final mixing follow"

    yield from [
        ("graph", connected),
        ("ledger", ledger),
        *_pairs(plan),
        *_bands(plan),
        *_optimum(plan),
        *_traffic(plan),
        *_cost(plan, verbose=True),
        *plan["data"].items(),
    ]


def _peers(plan: dict[str, Any]) -> Table:
    """Return a table with a row for each group of equal peers; a column that is empty for all peers is left out."""
    rounds = plan["rounds"]
    peers = plan["peers"]
    numbers = ("noise multiplier", f"σ at rounds 0, {rounds // 2}, {rounds - 1}", "ε after each quarter", "δ")
    table = _table([("peers", "left"), *((heading, "right") for heading in numbers)])

    optional = [key for key in OPTIONAL if any(row[key] is not None for row in peers)]
    for key in optional:
        heading, _ = OPTIONAL[key]

        # Dyn-D2P writes μ̄ for μ_0 if μ is the same in all rounds.
        if key == "mu_0" and all(row["mu_bar"] is not None for row in peers):
            heading = "μ̄"
        table.add_column(heading, justify="right")

    def cells(row: dict[str, Any]) -> list[str]:
        """Return a peer's texts, by which peers are grouped; `alike` puts the peers' ids before them."""
        sigma = list(map(number, row["sigma"]))
        return [
            number(row["noise_multiplier"]),
            sigma[0] if len(set(sigma)) == 1 else ", ".join(sigma),
            ", ".join(map(epsilon_text, row["epsilon_after_quarters"])),
            setting(row["delta"]),
            *(OPTIONAL[key][1](row[key]) for key in optional),
        ]

    for texts in wording.alike(peers, cells):
        table.add_row(*texts)
    return table


def _correlation(facts: dict[str, Any]) -> str:
    """Return what correlation over steps does, and whether another number of bands would do better."""
    bands = facts["bands"]
    how = f"correlated over {bands} steps, with each example drawn in one of {bands} at most"
    if bands == 1:
        how = "of steps that are independent (1 band)"
    best = facts["best_bands"]
    if best is None:
        return how

    share = f"{percent(facts['in_models'])} of what it leaves in the models at the same ε if it is not correlated"
    advice = "other numbers of bands leave no less"
    if best == 1 and bands > 1:
        advice = "privacy.noise.bands=1 does better: batches are then drawn from all examples"
    elif best != bands:
        advice = f"privacy.noise.bands={best} does better or as well"
    return f"{how}: {share}; {advice}"


def _bands(plan: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    """Yield what other numbers of bands would do at the same budget."""
    correlation = plan["correlation"]
    if correlation is None or not correlation["choices"]:
        return
    choices = correlation["choices"]
    rows = {
        "bands": [f"{one['bands']}" for one in choices],
        "noise": [number(one["noise_multiplier"]) for one in choices],
        "in models": [percent(one["in_models"]) for one in choices],
        "at the end": [percent(one["at_end"]) for one in choices],
    }
    yield "bands", _strip(rows)


def _pairs(plan: dict[str, Any]) -> Iterator[tuple[str, RenderableType]]:
    """Yield the strength of the noise that cancels between peers, and what other strengths would give."""
    pairs = plan["pairs"]
    if pairs is None:
        return

    fewest, most = pairs["secrets_of_a_peer"]
    others = f"{fewest}" if fewest == most else f"{fewest} to {most}"

    strength = pairs["strength"]
    network = ""
    if pairs["network_strength"] != strength:
        network = f"; on a network strength {number(pairs['network_strength'])}, because peers may restart"

    least = ""
    if pairs["least_mean_noise"] is not None:
        least = f"these pairs allow no less than {percent(pairs['least_mean_noise'])}; "
    yield (
        "pairs",
        f"strength {number(strength)}, secrets with {others} peers each, {pairs['colluding']} of whom may "
        f"collude: {percent(pairs['mean_noise'])} of independent noise is left in the mean "
        f"({least}a trusted server: {percent(pairs['trusted_server'])}){network}",
    )
    yield "", f"counted {pairs['counted']}"
    if pairs["mode_advice"] is not None:
        yield "", pairs["mode_advice"]
    if pairs["trades"]:
        rows = {
            "strength": [number(one["strength"]) for one in pairs["trades"]],
            "in the mean": [percent(one["mean_noise"]) for one in pairs["trades"]],
            "in models": [percent(one["models_noise"]) for one in pairs["trades"]],
        }
        yield "", _strip(rows)

    absences = pairs["by_absent"]
    planned = f"; the plan allows for {pairs['absent']} away" if pairs["absent"] else ""
    yield (
        "absent",
        _strip(
            {
                "partners away": [str(one["absent"]) for one in absences],
                "own noise": [percent(one["own_noise"]) for one in absences],
                "in the mean": [percent(one["mean_noise"]) for one in absences],
            }
        ),
    )
    yield "", f"of what each peer needs by itself, counted by partners{planned}; ε stays"
    degrees = pairs["by_degree"]
    if degrees:
        yield (
            "degrees",
            _strip(
                {
                    "secrets with": [f"{one['degree']:,}" for one in degrees],
                    "draws a step": [f"{one['draws']:,}" for one in degrees],
                    "in the mean": [percent(one["mean_noise"]) for one in degrees],
                    "if 4 more collude": [percent(one["noise_against_more"]) for one in degrees],
                }
            ),
        )
        yield "", "of equal peers, counted by partners; a trusted server of 16, 64, 1,000 peers: 25 %, 12.5 %, 3.2 %"


def _optimum(plan: dict[str, Any]) -> Iterator[tuple[str, RenderableType | None]]:
    """Yield the best number of rounds, the constants that it follows from, and the best number at other ε."""
    best = plan["optimal_rounds"]
    note = plan["optimal_rounds_note"]
    accountant = plan["accountant"]
    if best is None:
        yield "best rounds", None if note is None else f"not known: {note}"
        return
    if plan["algorithm"] == "privsgp-vr":
        guide = ""
    else:
        guide = f", a guide for {plan['algorithm']}"
    yield "best rounds", f"K* = {best:,} by eq. 12 of PrivSGP-VR{guide}; here K = {plan['rounds']:,}"
    if accountant is not None:
        yield (
            "",
            f"K* = {accountant['optimal_rounds']:,} with c_2 = {number(accountant['c_2'])}, "
            f"which makes eq. 11 the accountant's noise at K = {plan['rounds']:,}",
        )

    by_source: dict[str, list[str]] = {source: [] for source in SOURCES}
    for key, constant in plan["optimal_rounds_constants"].items():
        value = constant["value"]
        if value == int(value) and value >= 1000:
            text = f"{value:,.0f}"
        else:
            text = f"{value:.4g}"
        by_source[constant["from"]].append(f"{SYMBOLS[key]} = {text}")
    for source, texts in by_source.items():
        if texts:
            yield "", f"{', '.join(texts)} ({SOURCES[source]})"

    curve = plan["optimal_rounds_curve"]  # pairs (ε, K*)
    rows = {"ε": [setting(epsilon) for epsilon, _ in curve], "K*": [f"{k:,}" for _, k in curve]}
    yield "by ε", _strip(rows)


def _traffic(plan: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield what a peer of a network sends in a round."""
    traffic = plan["traffic"]
    if traffic is None:
        return
    total = memory(traffic["bytes"] * traffic["receivers"])
    shares = f"{traffic['receivers']:.3g} × {memory(traffic['bytes'])}"
    yield "traffic", f"on a network {total} a round from each peer ({shares}), by network.codec {traffic['codec']}"


def _cost(plan: dict[str, Any], verbose: bool) -> Iterator[tuple[str, str | None]]:
    """Yield memory and time; if verbose, also memory by part and by kind of table, and how gradients are computed."""
    needed = f"about {memory(plan['memory_bytes'])}"
    if verbose:
        sizes = [f"{name} {memory(size)}" for name, size in plan["memory"].items() if size]
        if sizes:
            needed = f"{needed}: {', '.join(sizes)}"
    yield "memory", needed

    if verbose:
        yield "gradients", plan["gradients"]
    if verbose and plan["tables"] is not None:
        texts = []
        for name, size in plan["tables"].items():
            size_text = NOTHING if size is None else memory(size)
            chosen = " (chosen)" if name == plan["table"] else ""
            texts.append(f"{name} {size_text}{chosen}")
        yield "tables", ", ".join(texts)

    by = f", by {plan['workers']} processes" if plan["workers"] > 1 else ""
    if plan["seconds"] is None:
        yield "time", "not timed: it does not fit into memory"
    else:
        yield "time", f"about {duration(plan['seconds'])} here{by}, from a few timed rounds"
