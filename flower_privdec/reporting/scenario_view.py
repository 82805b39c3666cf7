"""A scenario as `privdec show` prints it: what it says, and in comments what holds where it says nothing."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from flower_privdec.graph.topology import topology_options
from flower_privdec.models import model_options
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.fields import Section
from flower_privdec.scenario.model_section import ModelSection
from flower_privdec.scenario.topology_section import TopologySection

LEFT_OUT = re.compile(r"^    (\w+): (?:(?!^    \w).)*?left out,\s+(.*?)[;.](?:\s|$)", re.MULTILINE | re.DOTALL)


def complete_yaml(scenario: Scenario) -> str:
    """Return a scenario as YAML that reads back to the same scenario, with a comment for every key that is left out.

    A comment says the value that holds, or in words what it follows from; keys that do not apply have none.
    """
    data = json.loads(scenario.model_dump_json(exclude_none=True))
    return "".join(f"{line}\n" for line in _lines(scenario, data, ""))


def _lines(section: Section, data: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in data.items():
        inner = getattr(section, key)
        if isinstance(inner, Section):
            yield f"{indent}{key}:"
            yield from _lines(inner, value, f"{indent}  ")
        else:
            yield indent + _written(key, value)
    yield from (f"{indent}# {said}" for said in _left_out(section))


def _written(key: str, value: Any) -> str:
    """Return a key and its value on one line of YAML."""
    listed = yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True)
    return f"{key}: {listed.strip()[1:-1]}"


def _left_out(section: Section) -> list[str]:
    """Say for each key that applies and is left out what holds then."""
    values, told = _options(section), _told(section)
    if isinstance(section, ModelSection | TopologySection):  # whose keys are those of all models or graphs
        told = {key: said for key, said in told.items() if key in values}
    said = {key: f"{key}: left out, {words}" for key, words in told.items()}
    said |= {key: _written(key, value) for key, value in values.items() if value is not None}
    return [line for key, line in said.items() if getattr(section, key) is None]


def _options(section: Section) -> dict[str, Any]:
    """Return the options of a named model or graph, with their defaults; None where these follow from others."""
    if isinstance(section, ModelSection) and section.name is not None:
        return model_options(section.name)
    if isinstance(section, TopologySection):
        options = topology_options(section.name)
        drawn_from = section.supergraph or options.get("supergraph")
        return options | (topology_options(drawn_from) if drawn_from else {})
    return {}


def _told(section: Section) -> dict[str, str]:
    """Return what the docstrings of a section say holds where a key is left out."""
    found: dict[str, str] = {}
    for kind in reversed(type(section).__mro__):
        attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        found |= {key: " ".join(said.split()) for key, said in LEFT_OUT.findall(attributes)}
    return {key: said for key, said in found.items() if key in type(section).model_fields}
