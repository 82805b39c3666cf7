"""Checks of a Python caller's arguments, by name: a ScenarioError names the argument and its value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from flower_privdec.common.errors import ScenarioError


def check_kinds(arguments: Mapping[str, Any], kinds: tuple[Any, ...], words: str) -> None:
    """Raise unless each argument is None or of one of some types, which `words` describe."""
    for name, value in arguments.items():
        if value is None:
            continue
        # To Python a bool is a whole number; given for a number it is a mistake.
        is_stray_bool = isinstance(value, bool) and bool not in kinds
        if is_stray_bool or not isinstance(value, kinds):
            raise ScenarioError(f"{name}={value!r} must be {words}", code="argument.kind")


def check_numbers(arguments: Mapping[str, Any]) -> None:
    """Raise unless all are numbers or None."""
    check_kinds(arguments, (Real,), "a number; give one such as 1.0")


def check_whole(arguments: Mapping[str, Any]) -> None:
    """Raise unless all are whole numbers or None."""
    check_kinds(arguments, (Integral,), "a whole number; give one such as 1")


def check_paths(arguments: Mapping[str, Any]) -> None:
    """Raise unless all are paths or None."""
    check_kinds(arguments, (str, os.PathLike), "a path")


def check_calls(arguments: Mapping[str, Any]) -> None:
    """Raise unless all are callable or None."""
    check_kinds(arguments, (Callable,), "a function")
