"""What a rehearsal came to: the table at its end, and its picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the lines of a rehearsal's table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save_picture(folder: Path) -> None:
    pass


def summary_text(summary: dict[str, Any], folder: Path) -> str:
    import json

    s = {k: v for k, v in summary.items() if k not in ("privacy", "peers", "made")}
    return json.dumps(s, indent=1) + "\n"
