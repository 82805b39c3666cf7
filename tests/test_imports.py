"""The floors of the house: what may import what, and where Flower may be imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.rooms import FLOOR_OF, FLOORS, MODULES, PACKAGE, ROOT, imported, room_of, tree_of

FLOWER = {"flwr", "ray", "grpc"}
# What takes long to import, and what each start may do without.
HEAVY = {
    *("matplotlib", "pandas", "sklearn", "torchvision", "networkx", "dp_accounting", "jinja2", "PIL", "numba"),
    *("scipy.signal", "scipy.stats", "scipy.optimize", "torch._dynamo", "torch._inductor", *FLOWER),
}
COMMAND = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module('flower_privdec', run_name='__main__')"
NO_TORCH = {*HEAVY, "torch"}
NO_SERVER = NO_TORCH - FLOWER | {"ray", "sqlalchemy"}  # an app imports flwr, and nothing of a SuperLink
REPORTING = "flower_privdec.reporting"
# What a peer of an app computes for each message: how much its updates have cost.
PAID = """
from flower_privdec.peer.app_updates import PeerSpent, update_release
print(PeerSpent((update_release(1.0, 30),), 1e-5))
"""
# Each start with what it must not import. Those of a list follow one another in one process, for importing takes
# seconds: none may import less than the one before it.
STARTS: dict[str, list[tuple[str, set[str]]]] = {
    "commands": [
        ("import flower_privdec", {*NO_TORCH, "numpy", "scipy", "pydantic"}),
        (COMMAND.format(["--help"]), {*NO_TORCH, "numpy"}),
        (COMMAND.format(["certs", "digits", "--out", "{folder}"]), {*NO_TORCH, "numpy"}),
        (COMMAND.format(["--version"]), NO_TORCH),
        (COMMAND.format(["list"]), NO_TORCH),  # a part describes itself without torch (`common.deferred`)
        (COMMAND.format(["show", "digits"]), NO_TORCH),
        (f"import flower_privdec.engine.run, {REPORTING}.console, {REPORTING}.plots, tools.fuzz", HEAVY),
    ],
    "peers": [
        ("from flower_privdec.network.peer.status import status_of", NO_TORCH),
        ("import flower_privdec.network.peer.foreground, flower_privdec.network.local.up", HEAVY),
    ],
    "small peers": [
        (
            "from flower_privdec.common.deferred import use_small; use_small()\n"
            "import flower_privdec.network.peer.foreground, flower_privdec.gradients.words",
            {*NO_TORCH, "scipy", "numba", "mpmath"},
        ),
    ],
    "apps": [
        (f"from flower_privdec.flower import PeerMod\n{PAID}", {*NO_SERVER, "scipy.special"}),
        ("from flower_privdec.flower import Gossip, Mesh, PushSum", NO_SERVER),
    ],
}
IN_TURN = """
import sys
for start in {starts}:
    try:
        exec(start, {{}})
    except SystemExit as left:
        assert not left.code, start
    print("LOADED", *sys.modules, file=sys.stderr)
"""


def test_a_room_imports_only_from_floors_below() -> None:
    for path in MODULES:
        room, floor = room_of(path), FLOOR_OF[room_of(path)]
        for name in imported(path):
            first, *rest = name.split(".")
            if first == "flower_privdec" and rest[0] in FLOOR_OF:
                allowed = rest[0] == room or FLOOR_OF[rest[0]] < floor
                assert allowed, f"{path}: {room} imports {name}, which is not on a floor below"
            outside = first in FLOWER and room != "flower"
            assert not outside, f"{path}: {name} is imported outside flower"


WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}
# Certificates expire; a Flower peer that lost its state numbers the next one; what monitoring is told has dates.
READS_IT = {"network/transport/tls.py", "flower/mods/request_handler.py"}
READS_IT |= {f"network/peer/{name}.py" for name in ("exposition", "lifetime", "telemetry")}
READS_IT.add("watching/board.py")


def test_the_wall_clock_is_read_in_few_places() -> None:
    """A clock that is set back changes no payment, and no checkpoint: which is newer is told by rounds."""
    for path in MODULES:
        nodes = list(ast.walk(tree_of(path)))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        read = {f"{node.value.id}.{node.attr}" for node in attributes if isinstance(node.value, ast.Name)}
        assert str(path.relative_to(PACKAGE)) in READS_IT or not read & WALL_CLOCK, path


def test_every_room_is_on_a_floor() -> None:
    assert {room_of(path) for path in MODULES} == set(FLOOR_OF)
    assert len(FLOORS) == 11


@pytest.mark.slow
@pytest.mark.parametrize("process", STARTS)
def test_a_start_imports_nothing_heavy(process: str, tmp_path: Path) -> None:
    starts = STARTS[process]
    code = IN_TURN.format(starts=[start.replace("{folder}", str(tmp_path)) for start, _ in starts])
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [set(line.split()[1:]) for line in started.stderr.splitlines() if line.startswith("LOADED")]
    for (start, forbidden), modules in zip(starts, loaded, strict=True):
        assert "flower_privdec" in modules
        assert forbidden & modules == set(), start


def test_no_two_modules_share_a_name() -> None:
    names = [path.name for path in MODULES if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_module_assigns_each_of_its_constants_once() -> None:
    """Two modules that were joined may both have had a MOST; the second would replace the first unseen."""
    for path in MODULES:
        statements = [node for node in tree_of(path).body if isinstance(node, ast.Assign | ast.AnnAssign)]
        targets = [
            target for node in statements for target in getattr(node, "targets", [getattr(node, "target", None)])
        ]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        assert sorted(set(names)) == sorted(names), path


def test_no_two_public_classes_share_a_name() -> None:
    names = [
        node.name
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


TESTS = sorted((ROOT / "tests").rglob("*.py"))


IMPORT = re.compile(r"^ *(?:from|import) +([\w.]+)(?: +import +(\w+))?", re.MULTILINE)


def test_no_test_imports_from_another_test() -> None:
    tests = {test.stem for test in TESTS if test.parent.name != "support"}
    for path in TESTS:
        text = path.read_text(encoding="utf-8")  # in which lines are found in a tenth of the time of parsing it
        names = {part for module, name in IMPORT.findall(text) for part in (*module.split("."), name)}
        assert sorted(names & tests) == [], f"{path}: move what they share to tests/support"


def test_tests_import_only_from_support() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["pytest"]["ini_options"]["pythonpath"] == [".", "tests/support"]
