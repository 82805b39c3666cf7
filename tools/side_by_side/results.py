"""The rows that were measured: one file of them, and the tables made from it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "results" / "side-by-side" / "results.json"
GIB = 2**30
MADE_BY = """\
Made by `python -m tools.side_by_side --data FOLDER --work FOLDER`, which also wrote `results.json`; `docs/speed.md`
describes the task and the columns."""
SPEED = ["", "version", "seconds in all", "a round", "CPU seconds", "memory", "accuracy", "load"]
PRIVACY = ["", "protects", "ε it claims", "of", "ε by an exact accountant"]


@dataclass(frozen=True)
class Row:
    """One contestant's figures.

    Attributes:
        name, tool, version, says, privacy, protects: of the contestant.
        seconds: from the command's start to its end.
        seconds_a_round: from the start of the first to the end of the last, over their number.
        cpu_seconds, peak_bytes, load: as measured.
        accuracy: of the model at the end, on MNIST's test images.
        claimed_epsilon, claimed_for: the ε that the tool reports, and for what.
        exact_epsilon: of the whole run, by an exact accountant.
        failed: why there are no figures, or empty.
    """

    name: str
    tool: str
    version: str
    says: str
    privacy: str
    protects: str
    seconds: float
    seconds_a_round: float | None
    cpu_seconds: float
    peak_bytes: int
    load: float
    accuracy: float | None = None
    claimed_epsilon: float | None = None
    claimed_for: str = ""
    exact_epsilon: float | None = None
    failed: str = ""


@dataclass(frozen=True)
class Results:
    """The rows, and the machine they were measured on."""

    machine: str
    cores: int
    delta: float
    rows: tuple[Row, ...]

    def with_row(self, row: Row, order: list[str]) -> Results:
        """Return the results with a row added, or replaced where one has its name."""
        rows = [*(one for one in self.rows if one.name != row.name), row]
        rows.sort(key=lambda one: order.index(one.name))
        return Results(self.machine, self.cores, self.delta, tuple(rows))


def load(path: Path = FILE) -> Results:
    """Return the results of a file."""
    read = json.loads(path.read_text(encoding="utf-8"))
    rows = (
        Row(**row | {"exact_epsilon": row["exact_epsilon"] and float(row["exact_epsilon"])}) for row in read["rows"]
    )
    return Results(**read | {"rows": tuple(rows)})


def save(results: Results, path: Path = FILE) -> None:
    """Write the results, and beside them the page that shows them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path, _json(results)), (path.with_name("README.md"), page(results))):
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)


def _json(results: Results) -> str:
    """Return the results as JSON, which has no infinity: it is a word there."""
    record = asdict(results)
    for row in record["rows"]:
        row["exact_epsilon"] = "inf" if row["exact_epsilon"] == math.inf else row["exact_epsilon"]
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page(results: Results) -> str:
    """Return the page of the results."""
    return f"# Side by side\n\n{MADE_BY}\n\n{tables(results)}\n"


def tables(results: Results) -> str:
    """Return both tables and what they were measured on."""
    speed = [_speed(row) for row in results.rows]
    privacy = [_privacy(row) for row in results.rows if row.privacy != "none"]
    where = f"Measured on {results.cores} cores, {results.machine}; δ = 1e{round(math.log10(results.delta))}."
    return "\n\n".join([_table(SPEED, speed), where, _table(PRIVACY, privacy)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _speed(row: Row) -> list[str]:
    if row.failed:
        return [_label(row), row.version, row.failed, *["–"] * 4, f"{row.load:.1f}"]
    assert row.accuracy is not None
    assert row.seconds_a_round is not None
    memory = f"{row.peak_bytes / GIB:.2f} GiB"
    accuracy = f"{row.accuracy:.1%}".replace("%", " %")
    times = [_seconds(row.seconds), _seconds(row.seconds_a_round), _seconds(row.cpu_seconds)]
    return [_label(row), row.version, *times, memory, accuracy, f"{row.load:.1f}"]


def _privacy(row: Row) -> list[str]:
    return [
        _label(row),
        row.protects,
        _epsilon(row.claimed_epsilon),
        row.claimed_for or "–",
        _epsilon(row.exact_epsilon),
    ]


def _label(row: Row) -> str:
    return f"{row.tool} ({row.says})"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _epsilon(value: float | None) -> str:
    """Return an ε rounded up, as a bound has to be; a dash for none."""
    if value == math.inf:
        return "∞"
    if value is None:
        return "–"
    return f"{math.ceil(value * 100 - 1e-9) / 100:.2f}"
