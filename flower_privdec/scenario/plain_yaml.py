"""Read YAML as plain data (text, numbers, lists, mappings), of bounded size and depth, with the line of every key."""

from __future__ import annotations

import math
import re
from typing import Any
from unicodedata import category

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from flower_privdec.common.formatting import shown
from flower_privdec.errors import ScenarioError

Location = tuple[int | str, ...]
LONGEST, LARGEST, DEEPEST = 1 << 20, 1_000_000, 32  # characters; values once aliases stand for copies; levels
LARGEST_WHOLE = 2**63

_CONTROL = ("Cc", "Cs", "Zl", "Zp")
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """YAML whose 1e-5 is a number (YAML 1.2), whose dates are text, and whose aliases cannot grow without end."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._count = 0, 0
        self._sizes: dict[int, tuple[int, int]] = {}  # values and levels of every complete node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node and count it, an alias as what it stands for."""
        event, before = self.peek_event(), self._count  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refused(f"more than {DEEPEST} levels deep", event)
        node = super().compose_node(parent, index)
        if alias and id(node) not in self._sizes:
            raise _refused(f"the alias *{event.anchor} stands in what it names", event)
        values, levels = self._sizes[id(node)] if alias else (1 + self._count - before, self._levels(node))
        self._count = before + values
        self._sizes[id(node)] = values, levels
        if self._count > LARGEST or self._depth + levels - 1 > DEEPEST:
            raise _refused(f"with its aliases more than {LARGEST:,} values, or {DEEPEST} levels deep", event)
        self._depth -= 1
        return node

    def _levels(self, node: Node | None) -> int:
        """Return the depth of a node, from that of its parts."""
        pairs = node.value if isinstance(node, MappingNode) else ()
        parts = [value for _, value in pairs] if pairs else node.value if isinstance(node, SequenceNode) else ()
        return 1 + max((self._sizes[id(part)][1] for part in parts), default=0)


def _refused(problem: str, event: Any) -> ComposerError:
    return ComposerError(None, None, problem, event.start_mark)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would not read as text."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def write_yaml(data: Any) -> str:
    """Return plain data as YAML that reads back to the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


def read_plain(text: str, where: str, *, one_value: bool = False) -> tuple[Any, dict[Location, int]]:
    """Parse YAML into plain data and the line on which every key stands.

    Args:
        text: the YAML.
        where: names the text in an error: a path, or the setting.
        one_value: the text is one value: errors name no line.

    Returns:
        The data, no two parts of it one object; and the line of every key and every item of a list.

    Raises:
        ScenarioError: it is no YAML, too large or too deep, or holds something else than plain data; with the line.
    """
    if len(text) > LONGEST:
        raise ScenarioError(f"{where}: has more than {LONGEST:,} characters; give a shorter one")
    try:
        loader = _Loader(text)
        node, lines = loader.get_single_node(), dict[Location, int]()
        return (None if node is None else _Reading(loader, lines, where, one_value).value(node, ())), lines
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
        line = "" if position is None else f":{text.count(chr(10), 0, position) + 1}"
        place, remedy = f":{mark.line + 1}" if mark else line, "mend the line"
        if one_value:
            place, remedy = "", "quote the value"
        raise ScenarioError(f"{where}{place}: not valid YAML ({problem}); {remedy}", code="scenario.yaml") from error


class _Reading:
    """Plain data from nodes that are bounded already."""

    def __init__(self, loader: _Loader, lines: dict[Location, int], where: str, one_value: bool) -> None:
        self._loader, self._lines, self._where, self._one_value = loader, lines, where, one_value

    def value(self, node: Node, path: Location) -> Any:
        """Return what a node holds, and note the lines of its keys."""
        self._lines.setdefault(path, node.start_mark.line + 1)
        if node.tag not in [f"tag:yaml.org,2002:{kind}" for kind in _PLAIN]:
            raise self._error(node, f"the tag {shown(node.tag)} is not taken: write text, numbers, lists and mappings")
        if isinstance(node, MappingNode):
            return {key: self.value(part, (*path, key)) for key, part in self._keys(node, path)}
        if isinstance(node, SequenceNode):
            return [self.value(part, (*path, index)) for index, part in enumerate(node.value)]
        return self._scalar(node)

    def _keys(self, node: MappingNode, path: Location) -> Any:
        for key, part in node.value:
            if not isinstance(key, ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                description = (
                    f"the key {shown(key.value)}" if isinstance(key, ScalarNode) else "a list or mapping as key"
                )
                raise self._error(key, f"{description} must be a word; quote it")
            here = (*path, self._text(key))
            if here in self._lines:
                raise self._error(key, f"key {shown(key.value)} stands twice; keep one")
            self._lines[here] = key.start_mark.line + 1
            yield key.value, part

    def _scalar(self, node: Node) -> Any:
        if node.tag.endswith(":str") or (":" in node.value and node.tag.endswith((":int", ":float"))):
            return self._text(node)  # 1:30 too, which YAML 1.1 takes for 90
        if node.tag.endswith(":int") and _OCTAL.fullmatch(node.value):
            raise self._error(node, f"{shown(node.value)} may be octal; write it without leading zeros, or quote it")
        try:
            value = self._loader.construct_object(node)
        except (ValueError, KeyError, IndexError, OverflowError) as error:  # as !!int of what is none
            raise self._error(node, f"{shown(node.value)} cannot be read as what it looks like; quote it") from error
        if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
            raise self._error(node, f"{shown(node.value)} must be less than 2^63; write a number so large as 1e30")
        if isinstance(value, float) and math.isinf(value) and "inf" not in node.value.lower():
            raise self._error(node, f"{shown(node.value)} is beyond the largest number there is, 1.8e308; lower it")
        if value == 0 and isinstance(value, float) and set(node.value.lower().partition("e")[0]) & set("123456789"):
            raise self._error(node, f"{shown(node.value)} is below the smallest number there is, 5e-324; raise it")
        return value

    def _text(self, node: Node) -> str:
        text: str = node.value
        odd = next((sign for sign in text if category(sign) in _CONTROL and sign not in "\n\t"), None)
        if odd is not None:
            raise self._error(node, f"{shown(text)} holds the control character {odd!r}; take it out")
        return text

    def _error(self, node: Node, problem: str) -> ScenarioError:
        line = "" if self._one_value else f":{node.start_mark.line + 1}"
        return ScenarioError(f"{self._where}{line}: {problem}")
