"""What every section of a scenario shares: strictness, and the kinds of numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, WithJsonSchema


class Section(BaseModel):
    """One mapping of the scenario file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def own_modules(section: Section, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, module) of every part of a section that is a user's own."""
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{path}{name}"
        if name == "module" and value is not None:
            yield key, value
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, Section):
                yield from own_modules(number, f"{key}.")


class OwnSection(Section):
    """What a scenario says of a part of a user's own.

    Attributes:
        module: where it lies, `package.module:name`.
        arguments: what it is called with, by name.
    """

    module: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return what the part is called: where it lies."""
        return self.module


def _tag(value: Any) -> str:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    return "own" if "module" in keys else "named"


OWN_OR_NAMED = Discriminator(_tag)  # distinguishes a user's part, which names its module, from those of the catalogue


def _per_peer(value: Any) -> Any:
    """Accept one number for every peer or a list with one number a peer."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers):
        raise ValueError("must be a number, or a list with one number for each peer")
    if any(not 0 < x < float("inf") for x in numbers) or max(numbers) > LARGEST:
        raise ValueError("must be > 0 and finite (for every peer)")
    return tuple(float(x) for x in numbers) if isinstance(value, list | tuple) else float(value)


LARGEST = sys.float_info.max  # a whole number of Python's may be larger
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
PerPeer = Annotated[
    float | tuple[float, ...],
    BeforeValidator(_per_peer),
    WithJsonSchema({"anyOf": [_POSITIVE, {"type": "array", "items": _POSITIVE}]}),
]


def _plain_name(value: str) -> str:
    """Refuse what would not do for a folder of its own."""
    plain = value.isprintable() and not set(value) & set("/\\") and value == value.strip()
    if not plain or value[:1] in ("", ".", "-") or len(value.encode()) > LONGEST_NAME:
        raise ValueError(
            f"must be a name, not a path: at most {LONGEST_NAME} bytes on one line, without / and \\, not beginning "
            "with '.' or '-'; where results go, --out says"
        )
    return value


def _one_line(value: str) -> str:
    """Refuse what no file is called."""
    if not value.isprintable():
        raise ValueError("must be a path on one line, without control characters")
    if len(value.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST_PART for part in value.split("/")):
        raise ValueError(f"must be a path of at most {LONGEST_PATH} bytes, {LONGEST_PART} between two slashes")
    return value


LONGEST_NAME = 100
LONGEST_PATH, LONGEST_PART = 4000, 255  # what Linux takes, and what its file systems do
Name = Annotated[str, AfterValidator(_plain_name)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
