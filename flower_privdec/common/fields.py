"""What every section of a scenario, a study or a part is made of: the strict base model, and types of its fields.

A section is one mapping of a file. Its class declares the keys as typed fields, describes each under `Attributes` in
its docstring (the scenario reference is made from that), and checks in `_check` what no single field can check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from flower_privdec.common.errors import ArgumentError, ScenarioError, did_you_mean
from flower_privdec.common.key_texts import introduction, key_texts

LARGEST_FLOAT = sys.float_info.max  # a whole number of Python may be larger
LONGEST_NAME = 100
LONGEST_PATH = 4000  # bytes that Linux takes
LONGEST_PART = 255  # bytes between two slashes that its file systems take


class Section(BaseModel):
    """One mapping of the scenario file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """Raise ValueError if the values of a section do not fit each other."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema of the section, with the docstring's text on each key, which editors show."""
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        schema["description"] = introduction(cls)
        texts = key_texts(cls)
        for name, field in cls.model_fields.items():
            key = field.alias or name
            text = texts.get(key) or texts.get(name)
            if key in schema.get("properties", {}) and text:
                schema["properties"][key]["description"] = text
        return reference


T = TypeVar("T", bound=Section)


class OwnSection(Section):
    """A part of a user's own.

    Attributes:
        module: where it is defined, `package.module:name`.
        arguments: what it is called with, by name.
    """

    module: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the part's name: its module."""
        return self.module


def own_modules(section: Section, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, module) of every part of a section that is a user's own."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        key = f"{path}{name}"
        if name == "module" and value is not None:
            yield key, value

        inner = value if isinstance(value, list) else [value]
        for part in inner:
            if isinstance(part, Section):
                yield from own_modules(part, f"{key}.")


def section_from(section: type[T], arguments: Mapping[str, Any], where: str) -> T:
    """Return the section of a user's own part, whose keys a scenario gives as arguments.

    Args:
        section: the class `Section` of the part.
        where: the part, in errors, such as `topology.module='my_graphs:Ring'`.

    Raises:
        ScenarioError: a key is unknown, missing or wrong; one line with the key, the rule and the valid keys.
    """
    try:
        return section.model_validate(dict(arguments))
    except ValidationError as error:
        first = error.errors()[0]

    key = ".".join(map(str, first["loc"]))
    known = list(section.model_fields)
    if first["type"] == "extra_forbidden":
        valid = ", ".join(known) or "none"
        reason = f"unknown key 'arguments.{key}'{did_you_mean(key, known)} (valid keys: {valid})"
    elif first["type"] == "missing":
        reason = f"'arguments.{key}' is missing; add it"
    else:
        # An error of the part's own validator says what must be; one of pydantic says what the input should be.
        rule = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        given = "" if not key else f"arguments.{key}={first['input']!r} "
        reason = f"{given}{rule}"
    raise ScenarioError(f"{where}: {' '.join(reason.split())}", code="code.arguments")


def check_keys(
    section: Section, keys_of: Mapping[str, Sequence[str]], optional: Sequence[str] = (), choice: str = "kind"
) -> None:
    """Raise unless a section has the keys that its kind, or what another key chooses, needs, and none of others'."""
    chosen = getattr(section, choice)
    all_keys = dict.fromkeys(key for keys in keys_of.values() for key in keys)
    for key in all_keys:
        takers = [name for name, keys in keys_of.items() if key in keys]
        is_set = getattr(section, key) is not None
        if is_set and chosen not in takers:
            raise ArgumentError(
                f"{key} belongs to {choice} {' or '.join(takers)}, not to {chosen}: remove it",
                code="scenario.other-choice",
            )

        is_needed = chosen in takers and key not in optional
        if is_needed and not is_set:
            raise ArgumentError(f"{choice} {chosen} needs {key}: add it", code="scenario.incomplete")


def _with_module(value: Any) -> str:
    """Return the tag of a value of a union: plain data when it is read, a section when it is written."""
    if isinstance(value, dict):
        keys: Any = value
    else:
        keys = getattr(type(value), "model_fields", ())
    return "own" if "module" in keys else "named"


# Unions of a named part and a user's own, which is a section with the key `module`; and of a section and the word none.
OWN_OR_NAMED = Discriminator(_with_module)
SECTION_OR_NAME = Discriminator(lambda value: "named" if isinstance(value, str) else "own")
SECTION_OR_NONE = Discriminator(lambda value: "none" if isinstance(value, str) else "section")


def _per_peer(value: Any) -> Any:
    """Accept one number for every peer or a list with one number a peer."""
    is_list = isinstance(value, list | tuple)
    numbers = value if is_list else [value]

    # A bool is an int in Python, and `true` is not a number of a scenario.
    if not numbers or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers):
        rule = "must be a number, or a list with one number for each peer"
        if hasattr(value, "tolist"):
            rule += "; of an array give its .tolist()"
        raise ArgumentError(rule, code="scenario.per-peer")
    if any(not 0 < x < float("inf") for x in numbers) or max(numbers) > LARGEST_FLOAT:
        raise ArgumentError("must be > 0 and finite (for every peer)", code="scenario.not-positive")

    if is_list:
        return tuple(float(x) for x in value)
    return float(value)


_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
PerPeer = Annotated[
    float | tuple[float, ...],
    BeforeValidator(_per_peer),
    WithJsonSchema({"anyOf": [_POSITIVE, {"type": "array", "items": _POSITIVE}]}),
]


def per_peer_lists(section: Section) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield each key of a section that takes one number for each peer, and has a list of them, with the list."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, tuple) and _is_per_peer(field.annotation, field.metadata):
            yield key, value


def _is_per_peer(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Return whether an annotation is PerPeer, or PerPeer with more rules, or optional."""
    extras = [*metadata, *getattr(annotation, "__metadata__", ())]
    if any(isinstance(extra, BeforeValidator) and extra.func is _per_peer for extra in extras):
        return True
    return any(_is_per_peer(inner, ()) for inner in get_args(annotation))


def _plain_name(value: str) -> str:
    """Raise unless a value can name a folder."""
    is_plain = value.isprintable() and not set(value) & set("/\\") and value == value.strip()
    begins_badly = value[:1] in ("", ".", "-")  # nothing at all, a hidden file, an option of a command
    if not is_plain or begins_badly or len(value.encode()) > LONGEST_NAME:
        raise ArgumentError(
            f"must be a name, not a path: at most {LONGEST_NAME} bytes on one line, without / and \\, not beginning "
            "with '.' or '-'; --out sets where results go",
            code="scenario.name",
        )
    return value


def _path_text(value: str) -> str:
    """Raise unless a value can be a path."""
    if not value.isprintable():
        raise ArgumentError("must be a path on one line, without control characters", code="scenario.path")
    if len(value.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST_PART for part in value.split("/")):
        raise ArgumentError(
            f"must be a path of at most {LONGEST_PATH} bytes, {LONGEST_PART} between two slashes", code="scenario.path"
        )
    return value


Name = Annotated[str, AfterValidator(_plain_name)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_path_text)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Growth = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
