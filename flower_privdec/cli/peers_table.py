"""Progress of a network in the terminal: a live table of its peers below the bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flower_privdec.common.formatting import memory, number
from flower_privdec.network.peer.status import is_insecure, neighbours_text, spent_text
from flower_privdec.reporting.progress import OnMetrics, error_console, progress
from flower_privdec.scenario import Scenario

OnStatus = Callable[[int, dict[str, Any] | None, str], None]
HEADINGS = ("peer", "round", "loss", "ε spent", "neighbours", "sent", "received", "")
TEXTS = ("neighbours", "")  # headings of columns that are not numbers


class PeersTable:
    """A table with each peer's last status, redrawn whenever it is shown."""

    def __init__(self, n_peers: int) -> None:
        """Begin with peers that have sent no status."""
        self._statuses: dict[int, dict[str, Any]] = {}
        self._notes = dict.fromkeys(range(n_peers), "starting")
        self._lock = Lock()

    def update(self, peer: int, status: dict[str, Any] | None, note: str) -> None:
        """Record a peer's status and a note beside it; None if it does not answer, and its last status stays."""
        with self._lock:
            self._notes[peer] = note
            if status is not None:
                self._statuses[peer] = status

    def __rich__(self) -> Table:
        """Return the current table."""
        with self._lock:
            statuses = dict(self._statuses)
            notes = dict(self._notes)

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        if any(is_insecure(status) for status in statuses.values()):
            table.caption = "INSECURE seeds: for tests"
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in TEXTS else "right", no_wrap=True)

        for peer, note in notes.items():
            if peer in statuses:
                cells = _cells(statuses[peer])
            else:
                cells = [""] * (len(HEADINGS) - 2)
            table.add_row(str(peer), *cells, note)
        return table


def _cells(status: dict[str, Any]) -> list[str]:
    """Return what stands between the peer and its note."""
    return [
        f"{status['round']}/{status['rounds']}",
        number(status["loss"]),
        spent_text(status),
        neighbours_text(status).replace(" neighbours", ""),  # which the heading says
        memory(status["bytes_sent"]),
        memory(status["bytes_received"]),
    ]


@contextmanager
def network_progress(
    scenario: Scenario, folder: Path, *, console: Console | None = None
) -> Iterator[tuple[OnMetrics, OnStatus | None]]:
    """Show a network's progress on stderr while the context lasts: on a terminal with a table of its peers.

    Yields:
        A function to call with each evaluation's metrics, and one to call with each peer's status; None in place of the
        latter if no table is shown.
    """
    console = console or error_console()
    if not console.is_terminal:
        with progress(scenario, folder, console=console, below=[]) as on_metrics:
            yield on_metrics, None
        return

    table = PeersTable(scenario.n_peers)
    with progress(scenario, folder, console=console, below=[table]) as on_metrics:
        yield on_metrics, table.update
