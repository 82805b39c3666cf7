"""One salt for all runs of a test, so that two of them can be compared."""

from __future__ import annotations

import pytest


def pin_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every run with code of a user's own have one salt, as if it were one run."""
    for module in ("view", "recorder"):
        monkeypatch.setattr(f"flower_privdec.experiment.{module}.new_salt", lambda: "of all runs of a test")
