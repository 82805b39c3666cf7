"""Build `flower-privdec-peer`: the same package, installed without torch, for small devices.

    python -m tools.peer_wheel [FOLDER]

A wheel's dependencies cannot be left out by an extra, and `flower-privdec` alone has to be the whole library. So there
is a second distribution of the same files with fewer dependencies, those of `tool.privdec.peer` in pyproject.toml. Its
pyproject.toml is made of that one, so nothing is written twice. Both install the package flower_privdec: an environment
has one of the two.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
NAME = "flower-privdec-peer"
COPIED = ("flower_privdec", "scenarios", "README.md", "LICENSE")


def peer_dependencies() -> list[str]:
    """Return the requirements of a small peer."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dependencies: list[str] = settings["tool"]["privdec"]["peer"]["dependencies"]
    return dependencies


def peer_project() -> str:
    """Return the text of pyproject.toml with the name and the dependencies of the small peer, and without extras."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = "".join(f'    "{one}",\n' for one in peer_dependencies())
    text = text.replace('name = "flower-privdec"', f'name = "{NAME}"', 1)
    text = re.sub(r"^dependencies = \[\n.*?^\]\n", f"dependencies = [\n{listed}]\n", text, count=1, flags=re.M | re.S)
    return re.sub(r"^\[project\.optional-dependencies\]\n.*?^(?=\[)", "", text, count=1, flags=re.M | re.S)


def build_peer_wheel(folder: Path) -> Path:
    """Build the small peer's wheel from this checkout into a folder."""
    with TemporaryDirectory() as temporary:
        tree = Path(temporary)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        (tree / "pyproject.toml").write_text(peer_project(), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree)]
        subprocess.run(command, check=True)
    (wheel,) = folder.glob("flower_privdec_peer-*.whl")
    return wheel


if __name__ == "__main__":
    print(build_peer_wheel(Path(*sys.argv[1:] or ["dist"])))
