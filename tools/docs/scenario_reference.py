"""Every key of a scenario, read from the schema: its type, its default, its bounds and its meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from flower_privdec.common.fields import Section
from flower_privdec.common.key_texts import introduction, key_texts
from flower_privdec.scenario import Scenario

Json = dict[str, Any]
KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
    "null": "nothing",
}
FIRST = ("name", "kind")  # they decide what the other keys mean
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def by_name() -> dict[str, type[BaseModel]]:
    """Return every section of the schema by the name of its class."""
    sections: dict[str, type[BaseModel]] = {"Scenario": Scenario}
    waiting: list[type[BaseModel]] = [Section]
    while waiting:
        subclasses = waiting.pop().__subclasses__()
        sections |= {cls.__name__: cls for cls in subclasses}
        waiting += subclasses
    return sections


def forms(schema: Json) -> list[str]:
    """Return the names of the sections that a value may be."""
    if "$ref" in schema:
        return [schema["$ref"].rpartition("/")[2]]
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *([schema["items"]] if "items" in schema else [])]
    return [name for one in inner for name in forms(one)]


def typed(schema: Json) -> str:
    """Return the type of a value, as text."""
    choices = [one for one in schema.get("anyOf") or schema.get("oneOf") or () if one.get("type") != "null"]
    if choices:
        return " or ".join(dict.fromkeys(typed(one) for one in choices))
    if "$ref" in schema:
        return "section"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        inner = schema.get("items", {})
        if inner.get("type") in ("integer", "number"):
            return f"list of {typed(inner)}s"
        return "list"
    return KINDS.get(schema.get("type", ""), "anything")


def ruled(schema: Json) -> str:
    """Return the bounds of a value, as text."""
    own = [f"{sign} {bound(schema[name])}" for name, sign in BOUNDS.items() if name in schema]
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *([schema["items"]] if "items" in schema else [])]
    rules = [", ".join(own), *map(ruled, inner)]
    return "; ".join(dict.fromkeys(text for text in rules if text))


def bound(value: float) -> str:
    """Return a bound as a power of 2 where it is one, else as a number."""
    power = math.log2(value) if value > 2**20 else 0.5
    return f"2^{power:.0f}" if power.is_integer() else f"{value:g}"


def defaulted(key: str, schema: Json, required: list[str]) -> str:
    """Return a key's default, as text."""
    if key in required:
        return "**required**"
    value = schema.get("default")
    if value is None:
        return "–"
    if isinstance(value, dict):
        return "its own defaults"
    return f"`{json.dumps(value).strip(chr(34))}`"


def rows(model: type[BaseModel], path: str, heading: int) -> Iterator[str]:
    """Yield the table of a section's keys, then the sections inside it."""
    yield from table(model, path)
    for key, part in ordered(model):
        for name in forms(part):
            section = by_name()[name]
            yield f"{'#' * heading} {titled(f'{path}{key}', section)}\n"
            yield from rows(section, f"{path}{key}.", heading + 1)


def ordered(model: type[BaseModel]) -> list[tuple[str, Json]]:
    """Return a section's keys with their schemas; first those that decide what the others mean."""
    properties = model.model_json_schema().get("properties", {})
    # A section may also take keys for another one, which the reference gives there.
    own = {field.alias or name for name, field in model.model_fields.items()}
    kept = [(key, part) for key, part in properties.items() if key in own]
    return sorted(kept, key=lambda pair: pair[0] not in FIRST)


def table(model: type[BaseModel], path: str) -> Iterator[str]:
    """Yield a section's introduction and the table of its keys."""
    required = model.model_json_schema().get("required", [])
    texts = key_texts(model)
    yield f"{introduction(model)}\n\n| key | type | default | rule | meaning |\n|---|---|---|---|---|"
    for key, part in ordered(model):
        cells = [typed(part), defaulted(key, part, required), ruled(part), texts.get(key, "")]
        yield f"| `{path}{key}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def titled(place: str, section: type[BaseModel]) -> str:
    """Return a section's heading: its path, and the names that select it."""
    properties = section.model_json_schema()["properties"]
    if place in ("algorithm", "topology", "model", "task.loss", "task.metrics") and "module" in properties:
        return f"{place}: your own"
    named = properties.get("name", {})
    names = named.get("enum", [named["const"]] if "const" in named else [])
    chosen = place in ("algorithm", "topology", "privacy.noise.secrets", "model") and bool(names)
    return f"{place}: {', '.join(names)}" if chosen else place


def scenario_reference() -> str:
    """Return the reference as Markdown."""
    return "\n".join(rows(Scenario, "", 2))
