"""The benchmark's tables."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tools.bench.sharding import sharding_lines

PLAIN_WIDTH = 130  # where the output is no terminal
COLUMNS = ("", "ms a round", "least", "wall", "peer steps/s", "times the loop")


def print_results(results: dict[str, dict[str, Any]]) -> None:
    """Print a table for each workload, and below it what else was measured."""
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    for name, result in results.items():
        title = f"{name}: {result['description']}"
        console.print(_table(title, result["variants"]) if "variants" in result else title)
        for line in notes(result):
            console.print(f"  {line}")
        console.print()


def _table(title: str, variants: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, facts in variants.items():
        times = [f"{facts[key]:.2f}" for key in ("ms", "min_ms", "wall_ms")]
        table.add_row(name, *times, f"{facts['peer_steps_per_second']:,.0f}", f"{facts['ratio_to_loop']:.2f}")
    return table


def notes(result: dict[str, Any]) -> list[str]:
    """Return the lines below a table."""
    if "pace" in result:
        return sharding_lines(result)
    if "normals" in result:
        return [f"{name}: {rate / 1e6:.0f} million a second" for name, rate in result["normals"].items()]
    if "floor" in result:
        products = result["floor"]["ms"]
        times = result["times_the_floor"]
        share = result["fraction_of_floor"]
        return [
            f"floor: products {products:.2f} ms; a round takes {times:.2f} times that: {share:.0%} of what is possible"
        ]

    parts = result["limit"]
    lines = [
        f"limit: noise {parts['noise_ms']:.2f} + products {parts['gemm_ms']:.2f} + copy {parts['copy_ms']:.2f} ms",
        f"a round takes {result['times_the_limit']:.2f} times the limit: "
        f"{result['fraction_of_limit']:.0%} of what is possible "
        f"({result['fraction_of_limit_at_peak']:.0%} if products ran at the peak)",
        f"noise that cancels, secrets with all others: {result['cancelling']:.2f} times a round",
        f"compiled in {result['compile_seconds']:.1f} s, which is not counted",
    ]

    for key, say in _EXTRAS.items():
        if key in result:
            lines.append(say(result[key]))
    return [*lines, *result["left_out"]]


def _ledger(facts: dict[str, Any]) -> str:
    return f"privacy ledgers: {facts['share']:.2%} of a run of {facts['rounds']:,} rounds, {facts['seconds']:.1f} s"


def _workers(facts: dict[str, Any]) -> str:
    if facts["blocks"] == 1:
        return "workers: one takes it all, for a round is too short to be shared"
    alone = facts["alone"]
    busy = facts["busy"]
    return (
        f"two workers take {alone['times']:.2f} times as many rounds as one ({alone['two_ms']:.2f} and "
        f"{alone['one_ms']:.2f} ms wall), and beside two busy loops {busy['times']:.2f} times as many"
    )


def _scaling(facts: dict[str, Any]) -> str:
    cost = ", ".join(f"{float(ns):.3f} (n={n})" for n, ns in facts["ns_per_peer_and_parameter"].items())
    return f"ns for each peer and parameter: {cost}; largest over smallest {facts['spread']:.2f}"


def _memory(facts: dict[str, Any]) -> str:
    return (
        f"peak memory with {facts['peers']:,} peers: {facts['rows']:.2f} n d numbers and "
        f"{facts['batch_bytes'] / 2**20:.1f} MiB for a round's examples, beside the data"
    )


def _gloo(facts: dict[str, Any]) -> str:
    return (
        f"one process a peer over gloo, 8 peers: {facts['cpu_ms']:.1f} ms CPU a round "
        f"({facts['wall_ms']:.1f} ms wall), {facts['ratio_to_engine']:.1f} times the engine's {facts['engine_ms']:.2f}"
    )


def _relay(facts: dict[str, Any]) -> str:
    return f"Flower relay, messages in process, {facts['nodes']} nodes: {facts['ms']:.0f} ms a round"


def _flwr_run(facts: dict[str, Any]) -> str:
    return f"Flower relay by `flwr run`, {facts['nodes']} SuperNodes: {facts['ms']:.0f} ms a round"


_EXTRAS = {
    "workers": _workers,
    "ledger": _ledger,
    "scaling": _scaling,
    "memory": _memory,
    "gloo": _gloo,
    "relay": _relay,
    "flwr_run": _flwr_run,
}
