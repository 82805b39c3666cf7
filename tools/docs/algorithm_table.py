"""The algorithms in a table, read from their declarations."""

from __future__ import annotations

import inspect
import re

from flower_privdec.algorithms import ALGORITHMS
from flower_privdec.core.algorithm import Algorithm
from flower_privdec.reporting.console import parts

SOURCE = re.compile(r"Source: (.*?)\.?$", re.DOTALL)


def source(algorithm: type[Algorithm]) -> str:
    """Return the source of an algorithm's equations, the last line of its docstring."""
    match = SOURCE.search(inspect.cleandoc(algorithm.__doc__ or ""))
    return " ".join(match[1].split()) if match else ""


def sends(algorithm: type[Algorithm]) -> str:
    """Return the weights of an algorithm's exchanges."""
    return algorithm.weights or "nothing is exchanged"


def algorithm_table() -> str:
    """Return the table as Markdown."""
    lines = parts()["algorithms"]
    rows = [f"| `{name}` | {lines[name]} | {sends(cls)} | {source(cls)} |" for name, cls in ALGORITHMS.items()]
    return "\n".join(["| name | what it is | weights | source |", "|---|---|---|---|", *rows])
