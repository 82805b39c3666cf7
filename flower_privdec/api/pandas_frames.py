"""Records as pandas frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flower_privdec.common.user_code import require


def as_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas DataFrame.

    Raises:
        ScenarioError: when pandas is not installed.
    """
    return require("pandas", "a frame", "pip install pandas, or take the records").DataFrame(list(records))


def flat(record: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a record with nested keys joined: `{"loss": {"mean_model": 1}}` is `{"loss.mean_model": 1}`."""
    columns: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            columns |= flat(value, f"{path}{name}.")
        else:
            columns[f"{path}{name}"] = value
    return columns
