"""Scenarios from Python: read from a file, or built from the same sections and checked by the same rules."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.api.objects import check_given, name_objects
from flower_privdec.common.formatting import shown
from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.loading import find_scenario, put, read_text, read_yaml, validated
from flower_privdec.scenario.plain_yaml import DEEPEST, Location

Settings = Mapping[str, Any]


def load_scenario(path: str | Path, settings: Settings | None = None, /, **sections: Any) -> Scenario:
    """Read a scenario file.

    Args:
        path: of the file, or the name of a bundled scenario such as `digits`.
        settings: values that override the file's, by dotted key, as `{"privacy.epsilon": 1}`: what `--set` does.
        sections: whole sections, or keys at the top, in place of the file's: `privacy="none"`, `rounds=10`.

    Raises:
        ScenarioError: naming the line, the value, the rule and the remedy.
    """
    path = find_scenario(as_path(path, "path"))
    data, lines = read_yaml(read_text(path), str(path))
    return _checked(data, str(path), settings, sections, lines)


def make_scenario(
    base: Scenario | Mapping[str, Any] | None = None, settings: Settings | None = None, /, **sections: Any
) -> Scenario:
    """Build a scenario from its sections, in the form that they have in a file, with objects where a file has names.

    - `algorithm`, as its `module`: a subclass of `Algorithm`.
    - `model`, or its `module`: a function that returns a `torch.nn.Module`.
    - `topology`, or its `module`: a networkx graph, one list of out-neighbours for each peer, or a function of n_peers.
    - `task`, as its `loss`: a function of one example's outputs and target; among its `metrics`: functions of a model's
      outputs and the targets of the test set.
    - `data`, as its `train` and `test` in place of a dataset: a pair (x, y) of arrays or tensors, or a torch dataset of
      such pairs. A list of these as `train` has one for each peer, and then nothing is partitioned. Data are copied.

    A class or function of an importable module is stored as its import path. A scenario with any other object runs in
    this process alone; the scenario.yaml of its run cannot be run again.

    Args:
        base: another scenario, or all sections as one mapping, to start from.
        settings: values that override it, by dotted key, as `{"privacy.epsilon": 1}`.
        sections: whole sections, or keys at the top, in place of the base's.

    Raises:
        ScenarioError: naming the value, the rule and the remedy.

    Privacy: a run's noise is keyed by a hash of the objects: the code of functions and classes, the globals and
        closures they use, and the data. An object that cannot be hashed is refused, and so is a run after one has
        changed. With `privacy.ledger`, data arrays need `data.source`, the name under which the ledger counts them.

    Examples:
        >>> sections = {"name": "small", "n_peers": 4, "rounds": 10, "model": {"name": "softmax"}, "privacy": "none"}
        >>> data = {"dataset": "digits", "batch": {"size": 12}}
        >>> base = make_scenario(sections, data=data, algorithm={"name": "sgp", "learning_rate": 0.5})
        >>> make_scenario(base, {"data.batch.size": 24}, seed=2).data.batch.size
        24
        >>> make_scenario(base, rounds=0)
        Traceback (most recent call last):
        flower_privdec.errors.ScenarioError: scenario: rounds=0 must be >= 1
    """
    if isinstance(base, Scenario):
        base = json.loads(base.model_dump_json(exclude_none=True))
    return _checked(dict(_mapping(base or {}, "base")), "scenario", settings, sections)


def as_scenario(scenario: Scenario | str | Path) -> Scenario:
    """Return a scenario, read from its file where it is the path of one.

    Raises:
        ScenarioError: see `load_scenario`.
    """
    if not isinstance(scenario, Scenario | str | os.PathLike):
        raise ScenarioError(
            f"a {type(scenario).__name__} is no scenario: give one (make_scenario makes one of a mapping), or the path "
            "of its file",
            code="api.argument",
        )
    return scenario if isinstance(scenario, Scenario) else load_scenario(scenario)


def as_path(path: str | Path, name: str) -> Path:
    """Return a caller's path.

    Args:
        path: of a file or a folder.
        name: of the argument, for an error.

    Raises:
        ScenarioError: it is not a path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise ScenarioError(
            f"{name}={shown(path)} must be a path: text that is not empty, or a pathlib.Path", code="api.path"
        )
    return Path(path)


def _checked(
    data: dict[str, Any],
    where: str,
    settings: Settings | None,
    sections: Mapping[str, Any],
    lines: Mapping[Location, int] | None = None,
) -> Scenario:
    """Lay settings and sections over plain data, and return them as a scenario."""
    data = _copied({**data, **sections})
    overrides: dict[Location, str] = {(name,): where for name in sections}
    for key, value in _mapping(settings or {}, "settings").items():
        path = tuple(key.split("."))
        put(data, path, _copied(value))
        overrides[path] = "settings"
    named = name_objects(data)
    scenario = validated(Scenario, plain(data), where, lines, overrides)
    check_given(scenario)
    del named  # it kept the registered objects alive until the scenario refers to them
    return scenario


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ScenarioError(f"{name}={shown(value)} must be a mapping whose keys are text", code="api.mapping")
    return value


def _copied(value: Any, depth: int = 0) -> Any:
    """Return a copy of nested sections, DEEPEST levels deep; `plain` refuses deeper ones."""
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return value
    return {key: _copied(item, depth + 1) for key, item in value.items()}


def plain(value: Any, key: str = "", depth: int = 0) -> Any:
    """Return a Python value as a file would have it: lists, plain numbers, text."""
    if depth > DEEPEST:
        raise ScenarioError(
            f"scenario: {shown(key)[1:-1]} is more than {DEEPEST} levels deep, or holds itself", code="api.mapping"
        )
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ScenarioError(f"{key or 'scenario'}: key {name!r} must be text", code="api.mapping")
        return {name: plain(item, f"{key}.{name}".lstrip("."), depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key, depth + 1) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value
