"""Files of a user's own, read as a scenario reads them, and remedies that are followed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.datasets import check_fit, read_examples, read_public
from flower_privdec.data.intake import told
from flower_privdec.scenario import Scenario, load_scenario

SCENARIO = "name: own\nrounds: 1\nmodel: {name: linear}\nalgorithm: {name: local, learning_rate: 0.1}\nprivacy: none\n"
MOST_REMEDIES = 4
# `data.table.decimal=','`: a key of the scenario, and a value as YAML writes it.
REMEDY = re.compile(r"(data(?:\.\w+)+)=(\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"|[^\s,;:)]+)")


@dataclass(frozen=True)
class Read:
    """What became of some files: the first peer's features and targets, and the line about all that was read."""

    x: torch.Tensor
    y: torch.Tensor
    line: str
    sizes: list[int]


def scenario_of(data: dict[str, Any], n_peers: int = 1, loss: str = "cross-entropy") -> Scenario:
    """Return a scenario over data, by way of its file, so that errors are those that users see."""
    path = Path("own.yaml")
    rest = {"n_peers": n_peers, "task": {"loss": loss}, "data": data}
    path.write_text(SCENARIO + yaml.safe_dump(rest, allow_unicode=True), encoding="utf-8")
    return load_scenario(path)


def read(data: dict[str, Any], n_peers: int = 1, loss: str = "cross-entropy") -> Read:
    """Read the training examples of all peers, and the test set.

    Raises:
        ScenarioError: as a user sees it.
    """
    scenario = scenario_of(data, n_peers, loss)
    section = scenario.data
    targets = scenario.task.targets
    public = read_public(section, 1, targets)
    examples = read_examples(section, 1, n_peers, list(range(n_peers)), targets=targets)
    check_fit(examples, public, section.root)
    line = told(examples.intakes, "data.root", public.n_classes, counts=True)
    x = examples.x
    assert isinstance(x, torch.Tensor)
    return Read(x, examples.y, line, examples.sizes.tolist())


def followed(data: dict[str, Any], n_peers: int = 1) -> list[str]:
    """Follow the remedies `key=value` of errors until the data are read, and return them in their order.

    Raises:
        ScenarioError: an error names none, or the data cannot be read after some of them.
    """
    done: list[str] = []
    while True:
        try:
            read(data, n_peers)
            return done
        except ScenarioError as error:
            found = REMEDY.findall(str(error).partition(": ")[2])
            found = [(key, value) for key, value in found if key not in ("data.root", "data.test") or "/" in value]
            # The place with which an error begins is no remedy.
            found = [(key, value) for key, value in found if f"{key}={value}" not in done]
            if not found or len(done) >= MOST_REMEDIES:
                raise
            key, value = found[0]
            done.append(f"{key}={value}")
            _put(data, key.split(".")[1:], yaml.safe_load(value))


def _put(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        data = data.setdefault(name, {})
    data[path[-1]] = value
