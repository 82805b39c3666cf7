"""The floors of the house: what may import what, and where Flower may be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flower_privdec"
# Rooms of one floor do not import from each other; each imports from the floors below alone.
FLOORS = [
    ("errors",),
    ("common", "rows"),
    ("catalogue",),
    ("tasks",),
    ("scenario",),
    ("graph", "data", "models"),
    ("gradients", "privacy"),
    ("training_loop", "core"),
    ("algorithms",),
    ("experiment",),
    ("engine", "pushsum"),
    ("network",),
    ("reporting",),
    ("planner", "flower"),
    ("study",),
    ("api", "bench", "testing"),
    ("cli",),
    ("__main__",),
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FLOWER = {"flwr", "ray", "grpc"}
# What takes long to import, and what each start may do without.
HEAVY = {
    *("matplotlib", "pandas", "sklearn", "torchvision", "networkx", "dp_accounting", "jinja2", "PIL", "numba"),
    *("scipy.signal", "scipy.stats", "scipy.optimize", "torch._dynamo", "torch._inductor", *FLOWER),
}
STARTS = {
    "import flower_privdec": {*HEAVY, "torch", "numpy", "scipy", "pydantic"},
    "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('flower_privdec')": {*HEAVY, "torch", "numpy"},
    "import flower_privdec.engine.run, flower_privdec.reporting.console, flower_privdec.reporting.plots": HEAVY,
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, wherever in it, with the names that it takes from the package itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_its_own_floor_and_those_below(path: Path) -> None:
    room, floor = room_of(path), FLOOR_OF[room_of(path)]
    for name in imported(path):
        first, *rest = name.split(".")
        if first == "flower_privdec" and rest[0] in FLOOR_OF:
            allowed = rest[0] == room or FLOOR_OF[rest[0]] < floor
            assert allowed, f"{room} imports {name}, which is not on a floor below"
        assert first not in FLOWER or room in ("network", "flower"), f"{name} is imported outside network and flower"


def test_every_room_is_on_a_floor() -> None:
    assert {room_of(path) for path in MODULES} <= set(FLOOR_OF)


@pytest.mark.parametrize("start", STARTS)
def test_a_start_imports_nothing_heavy_that_it_can_do_without(start: str) -> None:
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    begun = subprocess.run([sys.executable, "-c", told + start], capture_output=True, text=True, check=True)
    assert STARTS[start] & set(begun.stderr.split()) == set()


def test_no_two_modules_share_a_name() -> None:
    names = [path.name for path in MODULES if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_two_public_classes_share_a_name() -> None:
    names = [
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []
