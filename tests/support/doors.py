"""Parts in one file each, put into the package's rooms and beside it: both doors take the same file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flower_privdec.common.registry import Registry


@contextmanager
def both_doors(registry: Registry[Any], folder: Path, name: str, text: str) -> Iterator[None]:
    """Put a file into a registry's room, by one more folder of that package, and where a user's modules are found."""
    room = importlib.import_module(registry.room)
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        for place in ("room", "users"):
            (folder / place).mkdir(exist_ok=True)
            (folder / place / f"{name}.py").write_text(text)
        patched.setattr(room, "__path__", [*room.__path__, str(folder / "room")])
        patched.syspath_prepend(str(folder / "users"))
        patched.setattr(registry, "_parts", {})
        patched.setattr(registry, "_is_complete", False)
        try:
            yield
        finally:
            for module in set(sys.modules) - before:
                if module.rpartition(".")[2] == name:
                    del sys.modules[module]
                    vars(room).pop(name, None)
