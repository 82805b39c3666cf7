"""Modules with a mistake in them, which a law has to find."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def mutated(module: ModuleType, *changes: str) -> ModuleType:
    """Return a module with some texts replaced, given in turn with what replaces them; each must be there once."""
    text, mutant = Path(str(module.__file__)).read_text(encoding="utf-8"), ModuleType("mutated")
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, f"{old!r} must be in the code once"
        text = text.replace(old, new)
    sys.modules["mutated"] = mutant  # where dataclasses look their annotations up
    try:
        exec(compile(text, "mutated", "exec"), mutant.__dict__)
    finally:
        del sys.modules["mutated"]
    return mutant
