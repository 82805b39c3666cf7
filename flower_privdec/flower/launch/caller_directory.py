"""In which folder somebody typed `flwr run`, for neither a run's messages nor its app say so.

A local SuperLink serves every folder of its user, for days; its own is that of the command that started it. While
`flwr run --stream` waits for a run, it is a process beside this one, and its folder can be read.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")
PYPROJECT = "pyproject.toml"


def typed_in(app: Path) -> Path | None:
    """Return the folder of the latest `flwr run` of an app that is under way on this machine, or None.

    None where nobody waits for the run (it was submitted without --stream, or from elsewhere), and where there is no
    /proc to look in.

    Args:
        app: a folder with the app's pyproject.toml.
    """
    wanted = _project(app)
    found = [(age, folder) for age, folder, named in _commands() if any(_project(place) == wanted for place in named)]
    return max(found)[1] if wanted and found else None


def _project(app: Path) -> dict[str, Any] | None:
    """Return what an app's pyproject.toml says of its project, by which it is known."""
    with suppress(OSError, ValueError):
        return tomllib.loads((app / PYPROJECT).read_text(encoding="utf-8")).get("project")
    return None


def _commands() -> Iterator[tuple[int, Path, list[Path]]]:
    """Yield each `flwr run` under way: when it began (in clock ticks), in which folder, and which it may name."""
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid != os.getuid():
                continue
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "run" in words and Path(words[words.index("run") - 1]).name == "flwr":
                folder = (process / "cwd").readlink()
                given = [folder / Path(word).expanduser() for word in words[words.index("run") + 1 :] if word]
                yield _began(process), folder, [*given, folder]


def _began(process: Path) -> int:
    """Return when a process began, in clock ticks since the machine did."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])
