"""Rows of the battery by the names of their levels."""

from __future__ import annotations

from tools.battery.covering import Row
from tools.battery.levels import LEVELS, NAMES


def row_of(**levels: str) -> Row:
    """Return a plain row but for some levels, by the names of their factors (`_` for a space)."""
    chosen = {name.replace("_", " "): level for name, level in levels.items()}
    return tuple(LEVELS[name].index(chosen.get(name, LEVELS[name][0])) for name in NAMES)
