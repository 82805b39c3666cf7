"""Read, hash and write scenario files: YAML of plain data (text, numbers, lists, mappings) of bounded size.

A file becomes a scenario in three steps:

    read_plain   YAML to plain data, with the line of every key. A file may come from a stranger: its size, its depth
                 and the size of what its aliases stand for are limited before anything is built.
    anchor       Relative paths of the plain data begin in the file's folder; those of `--set`, where the command runs.
    validated    Plain data to a strict model (`sections`). Errors name the line of the key they blame (`findings`).

`to_yaml` is the way back: what it writes reads back to an equal scenario.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import category

import yaml
from pydantic import BaseModel, ValidationError
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from flower_privdec.common.errors import ScenarioError, nearest
from flower_privdec.common.fields import Section, own_modules
from flower_privdec.common.files import tried
from flower_privdec.common.formatting import shown
from flower_privdec.common.user_code import find_given, is_given, load_own, without_tokens
from flower_privdec.scenario.findings import Location, Places, explain
from flower_privdec.scenario.sections import PEER, AppScenario, LocatedFile, Membership, Scenario

LONGEST = 1 << 20  # characters of a file
LARGEST = 1_000_000  # values of a file, where each alias counts as a copy of what it stands for
DEEPEST = 32  # levels
LARGEST_WHOLE = 2**63
MOST_NAMED = 6  # files in an error

_CONTROL = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of control characters, surrogates and line separators
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """YAML whose 1e-5 is a number (YAML 1.2), whose dates are text, and whose aliases cannot grow without end."""

    def __init__(self, text: str, where: str, *, one_value: bool) -> None:
        super().__init__(text)
        self._where = where
        self._one_value = one_value
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # values and levels of every complete node
        self.lines: dict[Location, int] = {}

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node and count its values; an alias counts as a copy of what it stands for."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias = isinstance(event, yaml.AliasEvent)
        count_before = self._count

        # Refuse before the recursion: Python's own limit would end it with another error.
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refused(f"more than {DEEPEST} levels deep", event)
        node = super().compose_node(parent, index)

        if is_alias:
            # A node gets its size when it is complete, so an alias without one stands inside the node that it names.
            if id(node) not in self._sizes:
                raise _refused(f"the alias *{event.anchor} stands in what it names", event)
            values, levels = self._sizes[id(node)]
        else:
            values = 1 + self._count - count_before
            levels = self._levels(node)
        self._count = count_before + values
        self._sizes[id(node)] = values, levels

        if self._count > LARGEST or self._depth + levels - 1 > DEEPEST:
            raise _refused(f"with its aliases more than {LARGEST:,} values, or {DEEPEST} levels deep", event)
        self._depth -= 1
        return node

    def _levels(self, node: Node | None) -> int:
        """Return the depth of a node, whose parts are complete."""
        parts: list[Node] = []
        if isinstance(node, MappingNode):
            parts = [value for _, value in node.value]
        elif isinstance(node, SequenceNode):
            parts = node.value
        return 1 + max((self._sizes[id(part)][1] for part in parts), default=0)

    def plain(self, node: Node, path: Location) -> Any:
        """Return the plain data of a node, and record the lines of its keys."""
        self.lines.setdefault(path, node.start_mark.line + 1)

        if node.tag not in [f"tag:yaml.org,2002:{kind}" for kind in _PLAIN]:
            problem = f"the tag {shown(node.tag)} is not taken: write text, numbers, lists and mappings"
            raise self._error(node, problem, "yaml.tag")

        if isinstance(node, MappingNode):
            return {key: self.plain(part, (*path, key)) for key, part in self._keys(node, path)}
        if isinstance(node, SequenceNode):
            return [self.plain(part, (*path, index)) for index, part in enumerate(node.value)]
        return self._scalar(node)

    def _keys(self, node: MappingNode, path: Location) -> Iterator[tuple[str, Node]]:
        """Yield each key of a mapping with its value, and record the key's line."""
        last = ""  # value, for a number that was cut in two
        for key, part in node.value:
            if not isinstance(key, ScalarNode):
                raise self._error(key, "a list or mapping as key must be a word; quote it", "yaml.key")
            if key.tag == "tag:yaml.org,2002:merge":
                raise self._error(key, "merge keys (<<) are not read: write the keys out", "yaml.key")
            is_digits = key.value.isdecimal() and last.removeprefix("-").isdecimal()
            if is_digits and getattr(part, "value", None) == "":
                problem = (
                    f"'{last},{key.value}' has a comma, which ends a value: write {last}.{key.value}, with a point"
                )
                raise self._error(key, problem, "yaml.comma")
            if key.tag != "tag:yaml.org,2002:str":
                raise self._error(key, f"the key {shown(key.value)} must be a word; quote it", "yaml.key")

            here = (*path, self._text(key))
            if here in self.lines:
                raise self._error(key, f"key {shown(key.value)} stands twice; keep one", "yaml.repeated-key")
            self.lines[here] = key.start_mark.line + 1
            last = part.value if isinstance(part, ScalarNode) else ""
            yield key.value, part

    def _scalar(self, node: Node) -> Any:
        """Return the value of a scalar, which is exactly what is written: no number changes when it is read."""
        is_number = node.tag.endswith((":int", ":float"))
        if node.tag.endswith(":str") or (is_number and ":" in node.value):
            return self._text(node)  # 1:30 is text, too: YAML 1.1 takes it for 90

        text = shown(node.value)
        if node.tag.endswith(":int") and _OCTAL.fullmatch(node.value):
            problem = f"{text} may be octal; write it without leading zeros, or quote it"
            raise self._error(node, problem, "yaml.octal")
        try:
            value = self.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError) as error:  # for example `!!int word`
            problem = f"{text} cannot be read as what it looks like; quote it"
            raise self._error(node, problem, "yaml.scalar") from error

        if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            problem = f"{text} must be less than 2^63; write a number so large as 1e30"
            raise self._error(node, problem, "yaml.number")

        # Python reads 1e999 as infinity and 1e-999 as 0, without an error.
        written = node.value.lower()
        if isinstance(value, float) and math.isinf(value) and "inf" not in written:
            problem = f"{text} is beyond the largest number there is, 1.8e308; lower it"
            raise self._error(node, problem, "yaml.number")
        mantissa = written.partition("e")[0]
        if isinstance(value, float) and value == 0 and set(mantissa) & set("123456789"):
            problem = f"{text} is below the smallest number there is, 5e-324; raise it"
            raise self._error(node, problem, "yaml.number")
        return value

    def _text(self, node: Node) -> str:
        """Return the text of a node; refuse control characters, which a terminal would obey."""
        text: str = node.value
        for character in text:
            if character not in "\n\t" and category(character) in _CONTROL:
                problem = f"{shown(text)} holds the control character {character!r}; take it out"
                raise self._error(node, problem, "yaml.control")
        return text

    def _error(self, node: Node, problem: str, code: str) -> ScenarioError:
        line = f":{node.start_mark.line + 1}"
        if self._one_value:
            line = ""
        return ScenarioError(f"{self._where}{line}: {problem}", code=code)


def _refused(problem: str, event: Any) -> ComposerError:
    return ComposerError(None, None, problem, event.start_mark)


# Dates stay text: only plain data have the same meaning in YAML, JSON and Python.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would not read as text."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def write_yaml(data: Any, *, allow_unicode: bool = False) -> str:
    """Return plain data as YAML that reads back to the same.

    Args:
        allow_unicode: write letters beyond ASCII as they are, for people; by default escaped.
    """
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode, default_flow_style=None, width=100
    )


def read_plain(text: str, where: str, *, one_value: bool = False) -> tuple[Any, dict[Location, int]]:
    """Parse YAML into plain data and the line on which every key stands.

    Args:
        text: the YAML.
        where: names the text in an error: a path, or the setting.
        one_value: the text is one value: errors name no line.

    Returns:
        The data, no two parts of it one object; and the line of every key and every item of a list.

    Raises:
        ScenarioError: it is not YAML, too large or too deep, or holds more than plain data; with the line.
    """
    data, lines = _read_plain(text, where, one_value)
    return copy.deepcopy(data), dict(lines)


@lru_cache(maxsize=32)  # a study reads one text for each of its cells
def _read_plain(text: str, where: str, one_value: bool) -> tuple[Any, dict[Location, int]]:
    if len(text) > LONGEST:
        raise ScenarioError(f"{where}: has more than {LONGEST:,} characters; give a shorter one", code="yaml.long")

    try:
        loader = _Loader(text, where, one_value=one_value)
        node = loader.get_single_node()
        if node is None:
            return None, loader.lines
        return loader.plain(node, ()), loader.lines
    except yaml.YAMLError as error:
        raise _not_yaml(error, text, where, one_value) from error


def _not_yaml(error: yaml.YAMLError, text: str, where: str, one_value: bool) -> ScenarioError:
    """Return the error for a text that is not YAML. It names the line, unless the text is a single value."""
    # PyYAML's parser has a problem and its mark; its reader, which meets bad characters, a reason and a position.
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)

    place = ""
    if one_value:
        remedy = "quote the value"
    else:
        remedy = "mend the line"
        for sign, better in YAML_REMEDIES.items():
            if sign in str(problem):
                remedy = better
        if mark:
            place = f":{mark.line + 1}"
        elif position is not None:
            place = f":{text.count(chr(10), 0, position) + 1}"
    return ScenarioError(f"{where}{place}: not valid YAML ({problem}); {remedy}", code="scenario.yaml")


Model = TypeVar("Model", bound=BaseModel)
YAML_REMEDIES = {  # by what PyYAML says
    r"'\t'": "indent with spaces, not tabs",
    "could not find expected ':'": "write each key as `key: value`, with a space after the colon",
    "another document": "keep one scenario in a file, without ---",
    "expected ',' or": "close each { and [ in its line, and separate what is in it by commas",
    "expected <block end>": "indent the keys of one section alike",
}
UNNAMEABLE = "# Parts named __python__ were given as Python objects: this file cannot be run again without them.\n"
SCENARIO = "a scenario is a mapping of sections (name, n_peers, data, ...)"
APP_SCENARIO = "a scenario for an app is a mapping of sections (name, n_peers, rounds, privacy, network, ...)"


def read_yaml(text: str, where: str, form: str = SCENARIO) -> tuple[dict[str, Any], dict[Location, int]]:
    """Read a YAML mapping into plain data and the line of every key.

    Args:
        where: names the text in an error.
        form: what the mapping must be, in words.

    Raises:
        ScenarioError: see `read_plain`; or it is not a mapping.
    """
    data, lines = read_plain(text, where)
    if data is None:
        raise ScenarioError(f"{where}: is empty; {form}", code="scenario.no-mapping")
    if not isinstance(data, dict):
        raise ScenarioError(f"{where}: {form}, not {shown(data)}", code="scenario.no-mapping")
    return data, lines


def _override(data: dict[str, Any], setting: str) -> Location:
    """Apply one `key.path=value` (the value is YAML) and return its location."""
    key, equals, text = setting.partition("=")
    path = tuple(key.strip().split("."))
    where = f"--set {shown(setting)[1:-1]}"

    if not equals or not all(part.isprintable() and part for part in path):
        raise ScenarioError(f"{where}: must read key.path=value, as in --set privacy.epsilon=1")
    if len(path) > DEEPEST:
        raise ScenarioError(f"{where}: the key has {len(path)} parts; give a key of the scenario")

    value, _ = read_plain(text, where, one_value=True)
    put(data, path, value)
    return path


def put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at a path of keys; make the sections on the way."""
    *sections, key = path
    for name in sections:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    data[key] = value


PATHS = (  # keys of a scenario that name a file or a folder
    *(("data", "root"), ("data", "test"), ("model", "from"), ("topology", "file"), ("privacy", "ledger")),
    ("privacy", "noise", "secrets", "file"),
)


def anchored(settings: Iterable[str], folder: Path) -> list[str]:
    """Return `key.path=value` settings of a scenario whose relative paths begin in a folder."""
    lines = []
    for setting in settings:
        data: dict[Any, Any] = {}
        if re.split(r"[.=]", setting, maxsplit=1)[0].strip() in {path[0] for path in PATHS}:
            key = _override(data, setting)
            anchor(data, folder)
            for part in key:
                data = data[part]
            setting = f"{setting.partition('=')[0]}={json.dumps(data, ensure_ascii=False)}"
        lines.append(setting)
    return lines


def anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a scenario's plain data absolute, from a folder; `{peer}` by itself is not a path."""
    for section, key in _paths_in(data):
        if section[key] not in ("", PEER):
            # A home that nobody has stays as it is, and is then no file; Path.expanduser would raise.
            section[key] = os.path.abspath(folder / Path(os.path.expanduser(section[key])))


def _paths_in(data: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each section of a scenario's plain data that names a path, and the key."""
    for *names, key in PATHS:
        section = data
        for name in names:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and isinstance(section.get(key), str):
            yield section, key


def parse_model(
    root: type[Model], text: str, *, form: str, where: str, overrides: Iterable[str] = (), folder: Path | None = None
) -> Model:
    """Read a strict model from YAML text; see `parse_scenario`, and `read_yaml` for `form`."""
    data, lines = read_yaml(text, where, form)
    if folder is not None:
        anchor(data, folder)

    # After the file's own paths are anchored: those of a setting begin where the command runs.
    overridden = {_override(data, setting): "--set" for setting in overrides}
    return validated(root, data, where, lines, overridden)


def validated(
    root: type[Model],
    data: dict[str, Any],
    where: str,
    lines: Mapping[Location, int] | None = None,
    overrides: Mapping[Location, str] | None = None,
) -> Model:
    """Return plain data as a strict model; relative paths that no file gave begin where the command runs.

    Args:
        where: what to call the data in an error.
        lines: the line of each key, if the data are of a text.
        overrides: what was laid over the data, and what to call that.

    Raises:
        ScenarioError: with the place, the value, the rule and the remedy.
    """
    places = Places(where, lines or {}, overrides or {})
    if issubclass(root, LocatedFile):
        anchor(data, Path())
    try:
        model = root.model_validate(data)
    except ValidationError as error:
        raise explain(error, root, data, places) from error
    if isinstance(model, LocatedFile):
        model._places = places
    return model


def parse_scenario(
    text: str, *, where: str = "scenario", overrides: Iterable[str] = (), folder: Path | None = None
) -> Scenario:
    """Read a scenario from YAML text.

    Args:
        text: the YAML.
        where: what to call the text in an error (a path).
        overrides: `key.path=value` settings laid over it, each value YAML; their relative paths begin where the command
            runs.
        folder: in which the text's relative paths begin; where the command runs, by default.

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
        flower_privdec.common.errors.ScenarioError: --set: n_peers=0 must be >= 1
    """
    return parse_model(Scenario, text, form=SCENARIO, where=where, overrides=overrides, folder=folder)


def read_text(path: Path, what: str = "a scenario file") -> str:
    """Read a text file that a user named; of a longer one, a little more than a scenario may have.

    Args:
        what: it should be, in an error.

    Raises:
        ScenarioError: it cannot be read; the message has the name that was probably meant.
    """
    most = 4 * LONGEST  # bytes: a character of UTF-8 has four at most
    name = str(path)
    remedy = "give the path of a YAML file"
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        # A file that is too long may have been cut in the middle of a character.
        reason = "too long" if len(content) > most else "not UTF-8 text"
        cause: Exception = error
    except OSError as error:
        reason = error.strerror or "not readable"
        cause = error
        if isinstance(error, FileNotFoundError):
            name = tried(path)
            remedy = _another_file(path, path.parent, what)
        elif isinstance(error, IsADirectoryError):
            remedy = _another_file(path, path, what)
    raise ScenarioError(
        f"{shown(name)[1:-1]}: cannot be read as {what} ({reason}); {remedy}",
        code="scenario.unreadable",
    ) from cause


NAMED_WITHOUT_A_PATH = {"a scenario file": ".", "a study": "studies"}  # and the kind of `shipped`


def _another_file(path: Path, folder: Path, what: str) -> str:
    """Return what to name in place of a path at which there is no file, by the files in a folder and those shipped."""
    files: list[Path] = []
    with suppress(OSError):  # whoever may not list the folder can still name a file in it
        files = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())

    # A file of the folder comes before a shipped one of the same name, as it does for `find_scenario`.
    known: dict[str, str] = {}
    if what in NAMED_WITHOUT_A_PATH:
        known |= {name: name for name in shipped(NAMED_WITHOUT_A_PATH[what])}
    known |= {file.stem: str(file) for file in files}
    near = path.stem if path.stem in known else nearest(path.stem, list(known))
    if near is not None:
        return f"did you mean {shown(known[near])}?"

    remedy = "give the path of a YAML file"
    if files:
        some = ", ".join(shown(str(file))[1:-1] for file in files[:MOST_NAMED])
        remedy += f", such as {some}"
    return remedy


def load_scenario(path: Path | str, overrides: Iterable[str] = ()) -> Scenario:
    """Read a scenario file, or a bundled one by its name; its relative paths begin in its folder.

    See `parse_scenario`.
    """
    path = find_scenario(path)
    return parse_scenario(read_text(path), where=str(path), overrides=overrides, folder=path.parent)


def parse_app_scenario(
    text: str, *, where: str = "scenario", overrides: Iterable[str] = (), folder: Path | None = None
) -> AppScenario:
    """Read an app's scenario from YAML text; see `parse_scenario`."""
    return parse_model(AppScenario, text, form=APP_SCENARIO, where=where, overrides=overrides, folder=folder)


def load_app_scenario(path: Path, overrides: Iterable[str] = ()) -> AppScenario:
    """Read an app's scenario from a file; see `load_scenario`."""
    path = find_scenario(path)
    return parse_app_scenario(read_text(path), where=str(path), overrides=overrides, folder=path.parent)


def load_for_network(path: Path, overrides: Iterable[str] = ()) -> Scenario | AppScenario:
    """Read the scenario of a network's peers; it is an app's if the file has no section data, model or algorithm."""
    file = find_scenario(path)
    sections, _ = read_yaml(read_text(file), str(file))
    if {"data", "model", "algorithm"} & sections.keys():
        return load_scenario(file, overrides)
    return load_app_scenario(file, overrides)


def load_membership(path: Path, overrides: Iterable[str] = ()) -> Membership:
    """Read only who the peers of a scenario's file are: no part of the scenario is imported."""
    file = find_scenario(path)
    return parse_model(
        Membership, read_text(file), form=SCENARIO, where=str(file), overrides=overrides, folder=file.parent
    )


def file_form(scenario: Scenario | AppScenario) -> dict[str, Any]:
    """Return a scenario as plain data of a file; keys that are None are left out unless None is a choice.

    `network.lead: null` is one: it lifts the limit that stands by default.
    """
    data: dict[str, Any] = _without_unset(scenario, json.loads(scenario.model_dump_json(by_alias=True)))
    return data


def _without_unset(value: Any, data: Any) -> Any:
    """Return the plain data of a value without the keys that were not set."""
    if isinstance(value, Section) and isinstance(data, dict):
        # The data have a field's alias as its key, and the section its name: `from` and `origin`.
        names = {field.alias or name: name for name, field in type(value).model_fields.items()}
        kept: dict[str, Any] = {}
        for key, part in data.items():
            name = names.get(key) or str(key)
            if part is not None or _is_off(type(value), name):
                kept[key] = _without_unset(getattr(value, name), part)
        return kept

    if isinstance(value, list | tuple) and isinstance(data, list):
        return [_without_unset(inner, part) for inner, part in zip(value, data, strict=True)]
    if isinstance(value, Mapping) and isinstance(data, dict):
        return {key: _without_unset(inner, data[str(key)]) for key, inner in value.items()}
    return data


def _is_off(section: type[Section], name: str) -> bool:
    """Return whether None is a choice for a key: it has a default, which is not None."""
    field = section.model_fields.get(name)
    return field is not None and field.default is not None and not field.is_required()


def to_yaml(scenario: Scenario | AppScenario) -> str:
    """Return the scenario with every default visible, as YAML that reads back to the same scenario.

    Parts that were given as Python objects have names that hold only in this process; a comment says so.
    """
    text = write_yaml(file_form(scenario))
    if any(is_given(module) for _, module in own_modules(scenario)):
        text = UNNAMEABLE + text
    return text


def without_folders(scenario: Scenario) -> Scenario:
    """Return a scenario whose paths are only names, for another machine, which has paths of its own.

    Its `scenario_hash` is the same. A `data.root` with `{peer}` keeps everything from the name with `{peer}` on.
    """
    data = json.loads(scenario.model_dump_json(by_alias=True))
    for section, key in _paths_in(data):
        path = section[key]
        if PEER in path:
            begin = path.rfind(os.sep, 0, path.index(PEER)) + 1
            section[key] = path[begin:]
        else:
            section[key] = os.path.basename(path)
    return Scenario.model_validate(data)


def scenario_hash(scenario: Scenario | AppScenario, *, movable: bool = True) -> str:
    """Return a hash of everything that decides the run's results: not threads, memory, addresses or the plan.

    Args:
        movable: whether paths count only by their names, so that a run's files may move, and differ among machines.
    """
    excluded = {"compute": {"threads", "workers", "memory_mib"}, "plan": True, "network": True}
    return _hash_without(scenario, excluded, movable=movable)


def seedless_hash(scenario: Scenario) -> str:
    """Return a hash that is the same for runs that repeat one experiment with other seeds, whatever their names."""
    nothing = {"name": True, "plan": True, "network": True, "compute": {"threads", "workers", "memory_mib"}}
    return _hash_without(scenario.model_copy(update={"seed": 0, "seeds": None}), nothing)


def numbers_hash(scenario: Scenario | AppScenario) -> str:
    """Return a hash of everything but data and machine that decides the numbers of a run's trajectory.

    Names, paths and how often a run is looked at decide nothing, nor does the device, which `run_key` adds.
    """
    compute = {"threads", "workers", "memory_mib", "device"}
    nothing = {"name": True, "plan": True, "evaluation": True, "compute": compute, "data": {"root", "test", "source"}}
    nothing |= {"task": {"metrics"}, "network": True}
    if scenario.private is not None:
        nothing["privacy"] = {"ledger"}
    return _hash_without(scenario, nothing, movable=True)


def own_parts(scenario: Scenario, *, metrics: bool = False) -> list[Any]:
    """Return the user's own classes and functions that a scenario names; `Given` for those that are Python objects.

    Args:
        metrics: whether to include metrics, which decide nothing but figures.

    Raises:
        ScenarioError: one is missing, or was given as an object and has changed since.
    """
    parts: list[Any] = []
    for key, module in own_modules(scenario):
        if key.startswith("task.metrics.") and not metrics:
            continue
        part = load_own(module, key)  # for an object, too: it raises if that has changed
        given = find_given(module)
        parts.append(part if given is None else given)
    return parts


def _hash_without(scenario: Scenario | AppScenario, excluded: Any, *, movable: bool = False) -> str:
    data = json.loads(scenario.model_dump_json(exclude=excluded, exclude_none=True, by_alias=True))
    if movable:
        for section, key in _paths_in(data):
            section[key] = os.path.basename(section[key])
    data |= {"seed": None, "seeds": scenario.all_seeds()}  # regardless of their source

    # Of the network two keys decide numbers: the codec by what it rounds, and what limits members that lie.
    robust = scenario.network.robust
    if robust is not None:
        data["robust"] = json.loads(robust.model_dump_json(exclude_none=True))
    codec = scenario.network.codec
    if codec.name != "exact":
        data["codec"] = json.loads(codec.model_dump_json(exclude_none=True))
    if isinstance(scenario, Scenario):
        _lay_out_for_keys(data, scenario)
    return hashlib.sha256(without_tokens(json.dumps(data, sort_keys=True)).encode()).hexdigest()


def _lay_out_for_keys(data: dict[str, Any], scenario: Scenario) -> None:
    """Bring a scenario's data into the layout of which keys are made, in place.

    Published tables can be run again to the last digit only as long as this layout stays. So a key that moves in the
    file, or gets another name, keeps its place here; and what a model or a graph does by default is left out, so that
    a further option with a default moves no draw.
    """
    compute = data.get("compute", {})
    if compute.get("generator") == "portable":
        compute["generator"] = "comparable"

    privacy = data.get("privacy")
    if isinstance(privacy, dict):
        privacy |= privacy.pop("paper", {})
        noise = privacy.get("noise")
        if isinstance(noise, dict) and noise.get("absent") == 0:
            del noise["absent"]

    for name, section, shared in (
        ("model", scenario.model, ("name", "init")),
        ("topology", scenario.topology, ("name", "weights", "mixing_steps")),
    ):
        for key, field in type(section).model_fields.items():
            if key not in shared and key in data[name] and getattr(section, key) == field.default:
                del data[name][key]
    data["model"].setdefault("arguments", {})


FOLDER = "scenarios"


def shipped(kind: str = ".") -> dict[str, Path]:
    """Return the files that can be named without a path: `scenarios/KIND/NAME.yaml` by NAME.

    A file below the current folder comes before the package's own of that name. The package's lie inside it if it is
    installed, and beside it in a checkout.

    Args:
        kind: `.` for scenarios, `studies` for studies.
    """
    package = Path(__file__).resolve().parents[1]
    paths: dict[str, Path] = {}
    for root in (Path(), package, package.parent):
        for path in sorted((root / FOLDER / kind).glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return paths


def find_scenario(path: Path | str) -> Path:
    """Return the path of a scenario's file, or that of a bundled scenario by its name, such as `digits`.

    Raises:
        ScenarioError: it is neither a file nor the name of a bundled scenario.
    """
    path = Path(path).expanduser()
    with suppress(OSError):  # the name is too long: whoever reads the file reports it
        if path.exists():
            return path

    # What looks like a path is one, and whoever reads it reports that it is missing.
    if path.suffix or path.parent != Path():
        return path

    paths = shipped()
    if path.name not in paths:
        here = {file.stem: file.name for file in sorted(Path().glob("*.y*ml"))}
        near = nearest(path.name, [*here, *paths])
        remedy = "give a path"
        if near is not None:
            remedy = f"did you mean {shown(here.get(near, near))}?"
        raise ScenarioError(
            f"{shown(str(path))[1:-1]}: is not a file, nor a bundled scenario ({', '.join(paths)}); {remedy}",
            code="scenario.unknown-name",
        )
    return paths[path.name]
