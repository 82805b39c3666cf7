"""A peer's status in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_privdec.common.formatting import epsilon_text, number

Status = Mapping[str, Any]


def status_line(status: Status) -> str:
    """Return a status in a line."""
    insecure = "  INSECURE seeds" if is_insecure(status) else ""
    traffic = f"sent {status['bytes_sent']:,} B  heard {status['bytes_heard']:,} B"
    progress = f"round {status['round']}/{status['rounds']}  loss {number(status['loss'])}  ε {spent_text(status)}"
    return f"peer {status['peer']}  {progress}  {neighbours_text(status)}  {traffic}{insecure}"


def is_insecure(status: Status) -> bool:
    """Return whether the peer's noise follows from the scenario's seed."""
    found: bool = status["noise"].startswith("INSECURE")
    return found


def spent_text(status: Status) -> str:
    """Return ε spent, and of which budget."""
    budget = "" if status["budget"] is None else f" of {epsilon_text(status['budget'])}"
    return f"{epsilon_text(status['epsilon'])}{budget}"


def neighbours_text(status: Status) -> str:
    """Return how many neighbours are up, and which are down."""
    down = f"  down: {', '.join(status['down'])}" if status["down"] else ""
    return f"{len(status['neighbours']) - len(status['down'])}/{len(status['neighbours'])} neighbours up{down}"
