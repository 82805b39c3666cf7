"""What is recorded of the machine and the command that made a run."""

from __future__ import annotations

import sys

import pytest

from flower_privdec.common.machine import provenance


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/usr/bin/privdec", "run", "my file.yaml"], "privdec run 'my file.yaml'"),
        (["/lib/flower_privdec/__main__.py", "run", "s.yaml"], "privdec run s.yaml"),
        (["/usr/bin/flwr-serverapp", "--token", "SECRET"], "flwr-serverapp"),
        (["/home/me/train.py", "--api-key=SECRET"], "train.py"),
        ([], ""),
    ],
)
def test_only_names_of_other_programs_are_recorded(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's processes have tokens among their arguments, and a summary is shown to people."""
    monkeypatch.setattr(sys, "argv", arguments)
    made = provenance()
    assert made["command"] == command
    assert not any("SECRET" in text for text in made.values())
