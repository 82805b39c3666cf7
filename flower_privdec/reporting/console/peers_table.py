"""All peers of a network in one live table, below the bar of a run."""

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
from flower_privdec.reporting.console.progress import Metrics, error_console, progress
from flower_privdec.scenario import Scenario

OnMetrics = Callable[[Metrics], None]
OnStatus = Callable[[int, dict[str, Any] | None, str], None]
HEADINGS = ("peer", "round", "loss", "ε spent", "neighbours", "sent", "heard", "")


class PeersTable:
    """What each peer said last, as a table that is drawn anew whenever it is shown."""

    def __init__(self, n_peers: int) -> None:
        """Begin with peers that have said nothing.

        Args:
            n_peers: how many there are.
        """
        self._known: dict[int, dict[str, Any]] = {}
        self._words = dict.fromkeys(range(n_peers), "starting")
        self._lock = Lock()

    def tell(self, peer: int, status: dict[str, Any] | None, word: str) -> None:
        """Take in what a peer says.

        Args:
            peer: which.
            status: what it says; None where it does not answer, and what it said before stays.
            word: what is to be said of it.
        """
        with self._lock:
            self._words[peer] = word
            if status is not None:
                self._known[peer] = status

    def __rich__(self) -> Table:
        """Return the table as it is now."""
        with self._lock:
            known, words = dict(self._known), dict(self._words)
        insecure = any(is_insecure(status) for status in known.values())
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="INSECURE seeds: for tests" if insecure else None)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in ("neighbours", "") else "right", no_wrap=True)
        for peer, word in words.items():
            table.add_row(str(peer), *(_cells(known[peer]) if peer in known else [""] * 6), word)
        return table


def _cells(status: dict[str, Any]) -> list[str]:
    return [
        f"{status['round']}/{status['rounds']}",
        number(status["loss"]),
        spent_text(status),
        neighbours_text(status).replace(" neighbours", ""),
        memory(status["bytes_sent"]),
        memory(status["bytes_received"]),
    ]


@contextmanager
def network_progress(
    scenario: Scenario, folder: Path, *, console: Console | None = None
) -> Iterator[tuple[OnMetrics, OnStatus | None]]:
    """Show how a network does on stderr while the context lasts: on a terminal with a table of its peers.

    Args:
        scenario: the run's.
        folder: the run's.
        console: where to print; stderr by default.

    Yields:
        What to call with each evaluation's metrics, and with what each peer says of itself; None where that is not
        shown.
    """
    console = console or error_console()
    table = PeersTable(scenario.n_peers) if console.is_terminal else None
    with progress(scenario, folder, console=console, below=[] if table is None else [table]) as on_metrics:
        yield on_metrics, None if table is None else table.tell
