"""The floors of the package, and what its modules import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flower_privdec"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
# Rooms of one floor do not import from each other; each imports from the floors below alone.
FLOORS = [
    ("common",),
    ("rows", "small"),
    ("graph", "models", "scenario", "tasks"),
    ("data", "gradients", "privacy"),
    ("core", "training_loop"),
    ("algorithms", "pushsum"),
    ("experiment",),
    ("peer",),
    ("engine", "network", "rehearsal", "reporting"),
    ("audits", "devices", "flower", "planner", "studies", "testing", "watching"),
    ("api", "cli"),
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which nothing may change."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, wherever in it, with the names that it takes from the package itself."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    """Return the room of a module; `python -m flower_privdec` is the command line's."""
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if room == "__main__" else room
