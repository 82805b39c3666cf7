"""An environment of its own for each tool: `python -m venv` and pip, from a file of pinned versions."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OWN = "flower_privdec"  # the tool that is this checkout
MADE = "requirements.sha256"


def requirements(tool: str) -> Path:
    """Return the file of a tool's pinned versions."""
    return HERE / "requirements" / f"{tool}.txt"


def make(tool: str, folder: Path) -> Path:
    """Make a tool's environment where it is missing or out of date, and return its folder of commands.

    This checkout is installed again each time, for it may have changed.
    """
    environment = folder / tool
    binaries = environment / "bin"
    stamp = environment / MADE
    wanted = _digest(tool)
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        _pip(binaries, "install", "-r", str(requirements(tool)))
        stamp.write_text(wanted)
    elif tool == OWN:
        _pip(binaries, "install", "--force-reinstall", "--no-deps", str(ROOT))
    return binaries


def version(binaries: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([binaries / "python", "-c", program], text=True).strip()


def _pip(binaries: Path, *words: str) -> None:
    command: list[str | Path] = [binaries / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    subprocess.run(command, check=True, cwd=ROOT)


def _digest(tool: str) -> str:
    """Return the hash of an environment's requirements, with the checkout's own for this checkout."""
    files = [requirements(tool)]
    if tool == OWN:
        files += [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
