"""Where `flwr run` was typed, and with which words, looked up among this machine's processes.

A user expects `runs/` and relative paths in the folder in which they typed `flwr run`. Flower (1.41 to 1.43) does not
say where that is: the ServerApp runs in a SuperLink that may be days old and started from another project, its working
folder is that SuperLink's, and neither the FAB nor the run names the caller. The caller is not an ancestor of the
ServerApp either, so no parent's process id leads to it. But `flwr run --stream` waits until the run ends, so its
process can be found while the ServerApp starts.

Neither flwr nor ray brings psutil (ray has a private copy), and Python's standard library lists no processes. So this
reads /proc, and says None on a system that has none; the results are then in the SuperLink's working folder.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
START_TIME = 19  # the field's index in /proc/PID/stat after the command's name


@dataclass(frozen=True)
class FlwrRun:
    """A `flwr run` that is waiting for its run.

    Attributes:
        started: in clock ticks since the machine's boot, and the process's number, for two within one tick.
        folder: its working folder.
        command: as it was typed; it has no secrets among its arguments.
        may_name: the folders that may hold its app: its working folder, and each of its arguments as a path.
    """

    started: tuple[int, int]
    folder: Path
    command: str
    may_name: list[Path]


def find_caller(app: Path) -> FlwrRun | None:
    """Return the latest `flwr run` of an app that still runs on this machine.

    None if no command waits for its run (it was submitted without --stream, or from another machine), or if there is
    no /proc.

    Args:
        app: a folder with the app's pyproject.toml. The ServerApp runs from a copy that Flower installed, so an app
            is recognised by that file's project section and not by its path.
    """
    project = _project(app)
    if not project:
        return None

    runs = [run for run in _flwr_runs() if any(_project(folder) == project for folder in run.may_name)]
    if not runs:
        return None
    return max(runs, key=lambda run: run.started)


def _project(app: Path) -> dict[str, Any] | None:
    """Return the project section of an app's pyproject.toml; None if file or section is missing."""
    with suppress(OSError, ValueError):
        return tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    return None


def _flwr_runs() -> Iterator[FlwrRun]:
    """Yield each `flwr run` of this user."""
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            if process.stat().st_uid != os.getuid():
                continue

            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "run" not in words:
                continue
            at = words.index("run")
            if Path(words[at - 1]).name != "flwr":
                continue

            folder = (process / "cwd").readlink()
            arguments = [folder / Path(word).expanduser() for word in words[at + 1 :] if word]

            # The command's name stands in parentheses and may itself hold blanks and parentheses.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            started = int(fields[START_TIME]), int(process.name)
            command = shlex.join(["flwr", *words[at:-1]])  # an argument ends with a null, so the last one is empty
            yield FlwrRun(started, folder, command, [*arguments, folder])
