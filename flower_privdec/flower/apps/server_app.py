"""The ServerApp: reads the run-config, picks the strategy, and holds no model.

A local SuperLink serves every folder of its user, for days; its own is that of the command that started it. While
`flwr run --stream` waits for a run, it is a process beside this one, and its folder can be read.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_privdec.catalogue import FLOWER_MODES as MODE_NAMES
from flower_privdec.common.formatting import did_you_mean
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.apps.hosting import CohortRun, Relay, Serverless, Sharded
from flower_privdec.flower.launch.error_formatting import one_line_failure
from flower_privdec.scenario import Scenario, load_scenario

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


MODES: dict[str, type[Serverless]] = MODE_NAMES.bind({"cohort": CohortRun, "sharded": Sharded, "relay": Relay})


@dataclass(frozen=True)
class Settings:
    """What `flwr run -c 'key=value ...'` may say.

    Attributes:
        scenario: the scenario, loaded; `scenario` is a path, absolute or from the app's folder or the
            current one, and `set` holds key=value settings laid over it, with semicolons between them.
        mode: how SuperNodes host the peers: "cohort", "sharded" or "relay", see `catalogue.FLOWER_MODES`.
        out: the run's folder; by default runs/NAME-RUN_ID.
        base: the folder from which relative paths in the scenario, and `out`, start; by default the one in which
            `flwr run --stream` was typed, and where that is not known the one in which the SuperLink was started.
        resume: go on from the checkpoint in `out`.
    """

    scenario: Scenario
    mode: str
    out: Path
    base: Path
    resume: bool

    @classmethod
    def read(cls, context: Context, folder: Path) -> Settings:
        """Read the run-config.

        Args:
            context: the ServerApp's context.
            folder: the app's folder.

        Raises:
            ScenarioError: when a value is wrong.
        """
        given = {"mode": "cohort", "out": "", "base": "", "resume": False, "set": ""} | context.run_config
        base = (typed_in(folder) or Path.cwd()) / str(given["base"])
        _check(given, base)
        overrides = [part for part in str(given["set"]).split(";") if part.strip()]
        file = _find(str(given.get("scenario", "")), folder, base).absolute()
        with chdir(base):  # from where a user's own modules are imported
            scenario = load_scenario(file, overrides)
        return cls(
            scenario=scenario,
            mode=str(given["mode"]),
            out=base / (str(given["out"]) or f"runs/{scenario.name}-{context.run_id}"),
            base=base,
            resume=given["resume"] is True,
        )

    def strategy(self) -> Serverless:
        """Return the strategy of the mode."""
        return MODES[self.mode](self.scenario, self.out, base=self.base, resume=self.resume)


def _check(given: Mapping[str, object], base: Path) -> None:
    """Refuse a run-config that no run can go by."""
    mode, resume = given["mode"], given["resume"]
    if mode not in MODES:
        raise ScenarioError(f"mode={mode!r} must be one of {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    if not isinstance(resume, bool):
        raise ScenarioError(f"resume={resume!r} must be true or false, without quotes")
    if not base.is_dir():
        raise ScenarioError(f"base={given['base']!r} must be a folder; make {base}, or leave base out")


def _find(path: str, folder: Path, base: Path) -> Path:
    """Return where a scenario file is: in the app's folder or where relative paths start."""
    for place in (folder, base):
        if path and (place / path).is_file():
            return place / path
    raise ScenarioError(
        f"scenario={path!r} is no file in {folder} or {base}; give an absolute path, -c 'scenario=\"PATH\"'"
    )


def server_app(folder: Path, on_finished: Callable[[Path], object] | None = None) -> ServerApp:
    """Return the ServerApp of an app whose scenario files lie in a folder.

    Args:
        on_finished: called with the run's folder at the end, as to draw what is in it.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        with one_line_failure():
            settings = Settings.read(context, folder)
            settings.strategy().start(grid)
            if on_finished is not None:
                on_finished(settings.out)

    return server
