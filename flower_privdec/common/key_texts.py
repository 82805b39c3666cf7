"""The texts of docstrings on sections and their keys, for the reference, for editors and for `privdec show`."""

from __future__ import annotations

import inspect
import re

from pydantic import BaseModel

KEYS = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {8}.*)*)", re.MULTILINE)


def key_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the text on each key in the docstrings of a section and its base classes.

    If it ends in a colon, the names that the key takes follow, with the catalogue's line on each.
    """
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
        for match in KEYS.finditer(attributes):
            text = " ".join(match["text"].split())
            texts |= dict.fromkeys(match["names"].split(", "), text)

    for key, field in model.model_fields.items():
        choices = [part.lines for part in field.metadata if hasattr(part, "lines")]
        if choices and texts.get(key, "").endswith(":"):
            texts[key] += " " + "; ".join(f"`{name}`: {line}" for name, line in choices[0].items())
    return texts


def introduction(model: type[BaseModel]) -> str:
    """Return a section's docstring up to its attributes."""
    return inspect.cleandoc(model.__doc__ or "").partition("\nAttributes:")[0].strip()
