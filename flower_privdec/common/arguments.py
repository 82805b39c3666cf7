"""What a caller gives in Python, looked at before it is used: a text in place of a number is named, not raised on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from flower_privdec.errors import ScenarioError


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse what is neither a number nor None.

    Raises:
        ScenarioError: naming it.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ScenarioError(f"{name}={value!r} must be a number; give one such as 1.0")


def check_whole(given: Mapping[str, Any]) -> None:
    """Refuse what is neither a whole number nor None.

    Raises:
        ScenarioError: naming it.
    """
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ScenarioError(f"{name}={value!r} must be a whole number; give one such as 1")


def check_kinds(given: Mapping[str, Any], kinds: tuple[type, ...], words: str) -> None:
    """Refuse what is neither None nor of one of some types.

    Args:
        words: what it must be.

    Raises:
        ScenarioError: naming it.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, kinds):
            raise ScenarioError(f"{name}={value!r} must be {words}")


def check_paths(given: Mapping[str, Any]) -> None:
    """Refuse what is neither a path nor None.

    Raises:
        ScenarioError: naming it.
    """
    check_kinds(given, (str, os.PathLike), "a path")


def check_calls(given: Mapping[str, Any]) -> None:
    """Refuse what is neither None nor can be called.

    Raises:
        ScenarioError: naming it.
    """
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ScenarioError(f"{name}={value!r} must be a function")
