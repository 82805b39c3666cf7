"""Compilation by numba, whose machine code is kept on disk where some cache folder can be written.

Import this module only where something is compiled: numba takes long to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function for whatever it is called with; division by zero is infinite, and threads may run."""
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # there is no folder to keep it in
        return numba.njit(function, **options)


def inlined(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function into those that call it."""
    return numba.njit(function, forceinline=True, error_model="numpy", **options)
