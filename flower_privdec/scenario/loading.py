"""Read a scenario file; say where, what and why when something in it is wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from flower_privdec.catalogue import Choice
from flower_privdec.errors import ScenarioError
from flower_privdec.scenario.algorithm_sections import OwnAlgorithmSection, own_section
from flower_privdec.scenario.fields import own_modules
from flower_privdec.scenario.plain_yaml import DEEPEST, LONGEST, Location, read_plain, write_yaml
from flower_privdec.scenario.schema import Scenario
from flower_privdec.scenario.shipped import find_scenario
from flower_privdec.user_code import find_given, is_given, load_own, without_tokens
from flower_privdec.words import did_you_mean, shown

Model = TypeVar("Model", bound=BaseModel)
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text (quote it)",
    "string_too_short": "text that is not empty",
    "too_short": "a list that is not empty",
    "bool_type": "true or false",
    "list_type": "a list, as [1, 2]",
    "dict_type": "a mapping, as {key: value}",
    "model_type": "a section, as {key: value}",
    "model_attributes_type": "a section, as {key: value}",
}
UNNAMEABLE = "# Parts named __python__ were given as Python objects: nobody can run this file again without them.\n"
SCENARIO = "a scenario is a mapping of sections (name, n_peers, data, ...)"


def read_yaml(text: str, where: str, form: str = SCENARIO) -> tuple[dict[str, Any], dict[Location, int]]:
    """Read YAML into plain data and the line on which every key stands.

    Args:
        where: what to call the text in an error.
        form: what to say to a text that is not a mapping.

    Raises:
        ScenarioError: see `read_plain`; or it is no mapping.
    """
    data, lines = read_plain(text, where)
    if not isinstance(data, dict):
        raise ScenarioError(f"{where}: {form}, not {shown(data)}")
    return data, lines


def _override(data: dict[str, Any], setting: str) -> Location:
    """Apply one `key.path=value` (the value is YAML) and return its location."""
    key, equals, text = setting.partition("=")
    path, where = tuple(key.strip().split(".")), f"--set {shown(setting)[1:-1]}"
    if not equals or not all(part.isprintable() and part for part in path):
        raise ScenarioError(f"{where}: must read key.path=value, as in --set privacy.epsilon=1")
    if len(path) > DEEPEST:
        raise ScenarioError(f"{where}: the key has {len(path)} parts; give a key of the scenario")
    put(data, path, read_plain(text, where, one_value=True)[0])
    return path


def put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value where the keys of a path lead, making the sections on the way."""
    for part in path[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[path[-1]] = value


def _place(loc: Location, lines: Mapping[Location, int], overrides: Mapping[Location, str], where: str) -> str:
    """Return `file:line: ` or `--set: ` for a location, by its nearest known parent."""
    for path, name in overrides.items():
        if loc and loc[: len(path)] == path[: len(loc)]:
            return f"{name}: "
    for end in range(len(loc), -1, -1):
        if loc[:end] in lines:
            return f"{where}:{lines[loc[:end]]}: "
    return f"{where}: "


def _clean(error: Any, data: Any) -> Location:
    """Return where a finding lies, without what pydantic adds: which form of a section was meant."""
    loc: Location = error["loc"]
    path: list[int | str] = []
    for i, part in enumerate(loc):
        known = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if known or (error["type"] == "missing" and i == len(loc) - 1):
            path.append(part)
        if known:
            data = data[part]
    return tuple(path)


def _model_at(loc: Location, root: type[BaseModel], data: Any) -> type[BaseModel]:
    """Return the section model in which pydantic's location lies."""
    models: list[type[BaseModel]] = [root]
    for part in loc:
        field = models[0].model_fields.get(str(part))
        data = data.get(part, data) if isinstance(data, dict) else data
        if field:
            found = _sections_of(field.annotation)
        elif part in ("own", "named"):
            found = [model for model in models if ("module" in model.model_fields) == (part == "own")]
        else:
            found = [model for model in models if part in _tags(model)]
        models = found or models
        if models[0] is OwnAlgorithmSection:
            models = [own_section(data["module"])]
    return models[0]


def _tags(model: type[BaseModel]) -> Sequence[Any]:
    """Return the names by which a form of a section is told from the others."""
    field = model.model_fields.get("name") or model.model_fields.get("kind")
    choices = [list(part) for part in field.metadata if isinstance(part, Choice)] if field else []
    return choices[0] if choices else get_args(field.annotation) if field else ()


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section models a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _sections_of(inner)]


def _elsewhere(key: str, root: type[BaseModel], path: str = "") -> str:
    """Return the end of an error about a key that stands in another section."""
    for name, field in root.model_fields.items():
        for section in _sections_of(field.annotation):
            if key in section.model_fields:
                return f"; did you mean '{path}{name}.{key}'?"
            if found := _elsewhere(key, section, f"{path}{name}."):
                return found
    return ""


def _sentence(error: Any, loc: Location, root: type[BaseModel], data: Any) -> str:
    """Say the value, the rule and the remedy of one of pydantic's findings."""
    name = ".".join(map(str, loc)) or root.__name__.lower()
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(_model_at(error["loc"][:-1], root, data).model_fields)
        hint = did_you_mean(loc[-1], known) or _elsewhere(str(loc[-1]), root)
        return f"unknown key '{name}'{hint} (valid keys: {', '.join(known)})"
    if kind == "union_tag_invalid":
        tags = re.findall(r"'([^']+)'", context["expected_tags"])
        key, tag = f"{name}.{_unquoted(context['discriminator'])}", context["tag"]
        return f"{key}='{tag}' must be one of {', '.join(tags)}{did_you_mean(tag, tags)}"
    if kind in ("missing", "union_tag_not_found"):
        name = name if kind == "missing" else f"{name}.{_unquoted(context['discriminator'])}"
        return f"'{name}' is missing; add it"
    if kind == "value_error":
        message = str(context.get("error"))
        if not loc or message.startswith(f"{name}."):
            return message
        return f"{name}={shown(error['input'])} {message}" if message.startswith("must") else f"{name}: {message}"
    return f"{name}={shown(error['input'])} must be {_rule(error, loc)}"


def _rule(error: Any, loc: Location) -> str:
    """Say what a value must be, and what to do where that does not."""
    kind, context = error["type"], error.get("ctx", {})
    if loc == ("privacy",):
        return "none, or a section with epsilon and delta"
    if error["input"] is None:
        return f"{TYPES.get(kind, 'given')}: leave the key out for its default"
    if kind == "literal_error":
        hint = did_you_mean(error["input"], re.findall(r"'([^']+)'", context["expected"]))
        return f"one of {context['expected']}{hint}"
    if kind in TYPES:
        return TYPES[kind]
    rule = error["msg"].removeprefix("Input should be ").replace("greater than or equal to", ">=")
    rule = rule.replace("less than or equal to", "<=").replace("greater than", ">").replace("less than", "<")
    return str(rule)


def _unquoted(text: str) -> str:
    return text.strip("'")


def _explain(
    error: ValidationError,
    root: type[BaseModel],
    data: Any,
    lines: Mapping[Location, int],
    overrides: Mapping[Location, str],
    where: str,
) -> ScenarioError:
    """Turn pydantic's findings into one line: the first, and how many more."""
    findings = error.errors()
    first = min(findings, key=lambda item: (item["type"] != "extra_forbidden", len(item["loc"]) == 0))
    loc = _clean(first, data)
    sentence = _sentence(first, loc, root, data)
    if not loc:  # a rule across sections: its message begins with the key it blames
        loc = tuple(re.split(r"[ =]", sentence)[0].split("."))
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return ScenarioError(_place(loc, lines, overrides, where) + sentence + more)


def parse_model(root: type[Model], text: str, *, form: str, where: str, overrides: Iterable[str] = ()) -> Model:
    """Read a strict model from YAML text; see `parse_scenario`.

    Args:
        root: what the text describes.
        form: what to say to a text that is not a mapping.
    """
    data, lines = read_yaml(text, where, form)
    return validated(root, data, where, lines, {_override(data, setting): "--set" for setting in overrides})


def validated(
    root: type[Model],
    data: dict[str, Any],
    where: str,
    lines: Mapping[Location, int] | None = None,
    overrides: Mapping[Location, str] | None = None,
) -> Model:
    """Return plain data as a strict model.

    Args:
        where: what to call the data in an error.
        lines: on which line of it each key stands, where it has lines.
        overrides: what was laid over the data, and what to call that.

    Raises:
        ScenarioError: with the place, the value, the rule and the remedy.
    """
    try:
        return root.model_validate(data)
    except ValidationError as error:
        raise _explain(error, root, data, lines or {}, overrides or {}, where) from error


def parse_scenario(text: str, *, where: str = "scenario", overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario from YAML text.

    Args:
        text: the YAML.
        where: what to call the text in an error (a path).
        overrides: `key.path=value` settings laid over it, each value YAML.

    Raises:
        ScenarioError: with the line, the value, the rule and, for an unknown key, the nearest valid one.

    Examples:
        >>> text = '''
        ... name: small
        ... n_peers: 4
        ... rounds: 10
        ... data: {dataset: digits, batch: {size: 12}}
        ... model: {name: softmax}
        ... algorithm: {name: privsgp, learning_rate: 0.5}
        ... privacy: {epsilon: 3, delta: 1e-3}
        ... '''
        >>> parse_scenario(text, overrides=["privacy.epsilon=1"]).privacy.epsilon
        1.0
        >>> parse_scenario(text, overrides=["n_peers=0"])
        Traceback (most recent call last):
        flower_privdec.errors.ScenarioError: --set: n_peers=0 must be >= 1
    """
    return parse_model(Scenario, text, form=SCENARIO, where=where, overrides=overrides)


def read_text(path: Path, what: str = "a scenario file") -> str:
    """Read a text file that a user named, as far as it is bounded.

    Raises:
        ScenarioError: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(4 * LONGEST + 1)
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cut = isinstance(error, UnicodeDecodeError) and len(content) > 4 * LONGEST  # in the middle of a character
        reason = "too long" if cut else getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"{path}: cannot be read as {what} ({reason}); give the path of a YAML file") from error


def load_scenario(path: Path | str, overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario file, or one that comes along by its name; see `parse_scenario`."""
    path = find_scenario(path)
    return parse_scenario(read_text(path), where=str(path), overrides=overrides)


def to_yaml(scenario: Scenario) -> str:
    """Return the scenario with every default visible, as YAML that reads back to the same scenario.

    Parts that were given as Python objects are there by names that hold in this process alone, and it says so.
    """
    data = json.loads(scenario.model_dump_json(exclude_none=True))
    given = any(is_given(module) for _, module in own_modules(scenario))
    return (UNNAMEABLE if given else "") + write_yaml(data)


def scenario_hash(scenario: Scenario) -> str:
    """Return a hash of everything that decides the run's results (not threads, memory, nor the planner's)."""
    return _hash_without(scenario, {"compute": {"threads", "memory_mib"}, "plan": True})


def seedless_hash(scenario: Scenario) -> str:
    """Return a hash of what runs have in common that repeat one experiment with other seeds, whatever their names."""
    return _hash_without(scenario, {"name": True, "seed": True, "plan": True, "compute": {"threads", "memory_mib"}})


def numbers_hash(scenario: Scenario) -> str:
    """Return a hash of what decides the numbers of a run's trajectory, beside data and machine.

    Names, paths and how often a run is looked at decide nothing, nor do generator and device, which `run_key` adds.
    """
    compute = {"threads", "memory_mib", "generator", "device"}
    nothing = {"name": True, "plan": True, "evaluation": True, "compute": compute, "data": {"root", "test", "source"}}
    nothing["task"] = {"metrics"}
    if scenario.private is not None:
        nothing["privacy"] = {"ledger"}
    return _hash_without(scenario, nothing)


def own_parts(scenario: Scenario) -> list[Any]:
    """Return the classes and functions of the user's own that a scenario names, for what their code decides.

    Those that were given as objects are `Given`, once it is sure that they have not changed.
    """
    loaded = [(load_own(module, key), find_given(module)) for key, module in own_modules(scenario)]
    return [part if given is None else given for part, given in loaded]


def _hash_without(scenario: Scenario, excluded: Any) -> str:
    data = json.loads(scenario.model_dump_json(exclude=excluded, exclude_none=True))
    return hashlib.sha256(without_tokens(json.dumps(data, sort_keys=True)).encode()).hexdigest()
