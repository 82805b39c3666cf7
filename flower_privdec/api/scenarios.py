"""Scenarios from Python: read from a file, or built from the same sections, checked in the same words."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.loading import put, read_text, read_yaml, validated
from flower_privdec.scenario.plain_yaml import Location

Settings = Mapping[str, Any]


def load_scenario(path: str | Path, settings: Settings | None = None, /, **sections: Any) -> Scenario:
    """Read a scenario file.

    Args:
        path: of the file.
        settings: values to lay over it by their keys, as `{"privacy.epsilon": 1}`: what `--set` does.
        sections: whole sections, or keys at the top, in place of the file's: `privacy="none"`, `rounds=10`.

    Raises:
        ScenarioError: naming the line, the value, the rule and the remedy.
    """
    data, lines = read_yaml(read_text(Path(path)), str(path))
    return _checked(data, str(path), settings, sections, lines)


def make_scenario(
    base: Scenario | Mapping[str, Any] | None = None, settings: Settings | None = None, /, **sections: Any
) -> Scenario:
    """Build a scenario from its sections, in the form that they have in a file.

    Args:
        base: another scenario, or all sections as one mapping, to start from.
        settings: values to lay over it by their keys, as `{"privacy.epsilon": 1}`.
        sections: whole sections, or keys at the top, in place of the base's.

    Raises:
        ScenarioError: naming the value, the rule and the remedy.

    Examples:
        >>> sections = {"name": "small", "n_peers": 4, "rounds": 10, "model": {"name": "softmax"}, "privacy": "none"}
        >>> data = {"dataset": "digits", "batch": {"size": 12}}
        >>> base = make_scenario(sections, data=data, algorithm={"name": "sgp", "learning_rate": 0.5})
        >>> make_scenario(base, {"data.batch.size": 24}, seed=2).data.batch.size
        24
        >>> make_scenario(base, rounds=0)
        Traceback (most recent call last):
        flower_privdec.errors.ScenarioError: rounds: rounds=0 must be >= 1
    """
    if isinstance(base, Scenario):
        base = json.loads(base.model_dump_json(exclude_none=True))
    return _checked(dict(base or {}), "scenario", settings, sections)


def as_scenario(scenario: Scenario | str | Path) -> Scenario:
    """Return a scenario, read from its file where it is the path of one.

    Raises:
        ScenarioError: see `load_scenario`.
    """
    return scenario if isinstance(scenario, Scenario) else load_scenario(scenario)


def _checked(
    data: dict[str, Any],
    where: str,
    settings: Settings | None,
    sections: Mapping[str, Any],
    lines: Mapping[Location, int] | None = None,
) -> Scenario:
    """Lay settings and sections over plain data, and return them as a scenario."""
    data = {**data, **sections}
    overrides: dict[Location, str] = {(name,): where for name in sections}
    data = plain(data)
    for key, value in (settings or {}).items():
        path = tuple(key.split("."))
        put(data, path, plain(value))
        overrides[path] = "settings"
    return validated(Scenario, data, where, lines, overrides)


def plain(value: Any, key: str = "") -> Any:
    """Return a value of Python as a file would have it: lists, plain numbers, text."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ScenarioError(f"{key or 'scenario'}: key {name!r} must be text")
        return {name: plain(each, f"{key}.{name}".lstrip(".")) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, key) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value
