"""What an engine writes and does not mean to publish is its owner's only, whatever the umask."""

from __future__ import annotations

from pathlib import Path

from private_files import closed_files, umask_of_none
from tiny_scenario import Build

from flower_privdec.engine.run import run


def test_only_what_a_run_states_of_itself_is_open(build: Build, tmp_path: Path) -> None:
    with umask_of_none():
        run(build("rounds=2"), tmp_path / "run", workers=2)
    closed = closed_files(tmp_path)
    assert {"checkpoint", "model.safetensors", "origin.json", ".lock"} <= closed
    assert any(name.endswith(".jsonl") for name in closed)  # the ledger
    assert (tmp_path / "run" / "ledger").stat().st_mode & 0o777 == 0o700
