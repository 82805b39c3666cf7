"""The lines of metrics.jsonl, one an evaluation: written one by one, and read back whatever ended the writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.errors import ScenarioError

NAME = "metrics.jsonl"
SINGLE = ("round", "consensus_distance", "epsilon", "seconds", "coalition_evaluations")
SINGLE_OR_NONE = ("suboptimality",)


def append_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Write one line at the end."""
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines, without a last one that is not whole: its writing is under way, or was broken off.

    Raises:
        ScenarioError: a line before the last is no record of an evaluation; with its number.
    """
    path = folder / NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_record(line, found[-1]["round"] if found else -1))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ScenarioError(
                f"{path}:{number}: is no record of an evaluation ({one_line(error)}); the file is damaged: delete the "
                "line, whose numbers are lost"
            ) from error
    return found


def keep_metrics_until(folder: Path, round_index: int) -> None:
    """Forget the evaluations after so many rounds, and a line that was broken off.

    Raises:
        ScenarioError: see `read_metrics`.
    """
    if (folder / NAME).is_file():
        kept = [record for record in read_metrics(folder) if record["round"] <= round_index]
        write_atomically(folder / NAME, "".join(json.dumps(record) + "\n" for record in kept).encode())


def _record(line: bytes, last: int) -> dict[str, Any]:
    """Return a line as a record whose round comes after the last one's.

    Raises:
        ValueError: it is none.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise ValueError("it has no round")
    if record["round"] <= last:
        raise ValueError(f"its round does not come after {last}")
    if odd := [name for name, value in record.items() if not _readable(name, value)]:
        raise ValueError(f"its {odd[0]} is {shown(record[odd[0]], 40)}")
    return record


def _readable(name: str, value: Any) -> bool:
    """Return whether a value is what a run writes under a name: a number, or of metrics a mapping to numbers."""
    if name in SINGLE or (name in SINGLE_OR_NONE and value is not None):
        return value == "inf" or (isinstance(value, int | float) and not isinstance(value, bool))
    return value is None or isinstance(value, dict)
