"""One salt for all runs and processes of a test, so that they can be compared."""

from __future__ import annotations

import pytest

ONE_SALT = "of all runs of a test"


def pin_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run with code of a user's own have one salt, as if it were one run."""
    monkeypatch.setattr("flower_privdec.experiment.run_name.new_salt", lambda: ONE_SALT)
