"""The live table of a network's peers."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from run_folders import metrics_line, small_scenario

from flower_privdec.cli.peers_table import network_progress

STATUS = {
    "peer": 1,
    "round": 4,
    "rounds": 10,
    "loss": 0.5,
    "epsilon": 1.2,
    "budget": 3.0,
    "neighbours": [0, 2],
    "down": {"2": "connection refused"},
    "unheard": [],
    "bytes_sent": 2048,
    "bytes_received": 0,
    "noise": "of the operating system's generator",
}


def test_a_terminal_shows_a_row_for_each_peer(tmp_path: Path) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=110)
    with network_progress(small_scenario("n_peers=5"), tmp_path, console=terminal) as (on_metrics, on_status):
        on_metrics(metrics_line(2))
        assert on_status is not None
        on_status(0, STATUS | {"peer": 0, "neighbours": [1, 2, 3], "unheard": [1, 2]}, "")
        on_status(1, STATUS, "")
        on_status(2, STATUS | {"loss": None, "budget": None, "epsilon": "inf"}, "")
        on_status(2, None, "no answer")
        on_status(3, STATUS | {"noise": "INSECURE: for tests"}, "done")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).rpartition(" peer ")[2]
    found = [line.split() for line in last.splitlines()]
    row = ["1", "4/10", "0.500", "1.20", "of", "3.00", "1/2", "up", "down:", "2", "2", "KiB", "0", "B"]
    assert found[2] == ["0", *row[1:6], "1/3", *row[7:10], "not", "yet", "heard:", "1", *row[10:]]
    assert found[3] == row
    assert found[4] == ["2", "4/10", "–", "∞", *row[6:], "no", "answer"]
    assert found[5] == ["3", *row[1:], "done"]
    assert found[6] == ["4", "starting"]
    assert "INSECURE seeds" in last


def test_without_a_terminal_lines_are_plain_and_peers_unasked(tmp_path: Path) -> None:
    shown_on = Console(file=io.StringIO(), width=110)
    with network_progress(small_scenario(), tmp_path, console=shown_on) as (_, on_status):
        assert on_status is None
