"""Checks of arguments that the functions of the API share."""

from __future__ import annotations

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import shown


def argument_error(message: str) -> ScenarioError:
    """Return the error of an argument that breaks a rule."""
    return ScenarioError(message, code="api.argument")


def check_callbacks(**callbacks: object) -> None:
    """Raise if a callback cannot be called.

    Raises:
        ScenarioError: the message names it.
    """
    for name, callback in callbacks.items():
        if callback is not None and not callable(callback):
            raise argument_error(f"{name}={shown(callback)} must be a function")
