"""How a plan looks in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from flower_privdec.common.formatting import NOTHING, duration, epsilon_text, memory, number, setting
from flower_privdec.reporting.console.views import _console, _facts, _print_json, _table, as_text, graph_facts
from flower_privdec.reporting.wording import alike

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
