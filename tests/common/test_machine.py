"""What is recorded of the machine and the command that made a run."""

from __future__ import annotations

import sys

import pytest

from flower_privdec.common.machine import COMMAND, provenance


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/usr/bin/privdec", "run", "my file.yaml"], "privdec run 'my file.yaml'"),
        (["/lib/flower_privdec/__main__.py", "run", "s.yaml"], "privdec run s.yaml"),
        (["/usr/bin/flwr-serverapp", "--token", "SECRET"], "flwr-serverapp"),
        (["/home/me/train.py", "--api-key=SECRET"], "train.py"),
        (["/lib/ipykernel_launcher.py", "-f", "/run/kernel-SECRET.json"], "a notebook"),
        (["-c"], "python -c"),
        ([], "python"),
    ],
)
def test_only_names_of_other_programs_are_recorded(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's processes have tokens among their arguments, and a summary is shown to people."""
    monkeypatch.delenv(COMMAND, raising=False)
    monkeypatch.setattr(sys, "argv", arguments)
    made = provenance()
    assert made["command"] == command
    assert not any("SECRET" in text for text in made.values())


def test_a_started_process_records_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/default_worker.py", "--token=SECRET"])
    monkeypatch.setenv(COMMAND, "privdec run s.yaml --runtime flower")
    assert provenance()["command"] == "privdec run s.yaml --runtime flower"
    assert provenance("flwr run . --stream")["command"] == "flwr run . --stream"
