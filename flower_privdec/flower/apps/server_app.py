"""The ServerApp: reads the run-config, picks the strategy, and holds no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_privdec.catalogue import FLOWER_MODES as MODE_NAMES
from flower_privdec.common.formatting import did_you_mean
from flower_privdec.errors import ScenarioError
from flower_privdec.flower.apps.cohort_run import CohortRun
from flower_privdec.flower.apps.relay import Relay
from flower_privdec.flower.apps.sharded import Sharded
from flower_privdec.flower.apps.strategy import Serverless
from flower_privdec.flower.launch.caller_directory import typed_in
from flower_privdec.flower.launch.error_formatting import failing_plainly
from flower_privdec.scenario import Scenario, load_scenario

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
        with failing_plainly():
            settings = Settings.read(context, folder)
            settings.strategy().start(grid)
            if on_finished is not None:
                on_finished(settings.out)

    return server
