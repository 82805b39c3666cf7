"""`privdec audit`: which audit the options ask for, and what else that audit takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_privdec.cli.network_commands import ON_PROCESSES, run_soak
from flower_privdec.cli.typer_parts import Json, Settings, starting
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.user_code import require

APP = "a Flower app"
PROCESSES = "an audit of processes"
ONE_RUN = "an audit in one run"
SCENARIO = "an audit of a scenario"

TAKES: dict[str, tuple[str, ...]] = {  # the options of each audit; all take --seed
    PROCESSES: ("--set", "--process", "--out"),
    ONE_RUN: ("--set", "--one-run", "--json"),
    SCENARIO: ("--set", "--trials", "--replica", "--plot", "--json"),
}
APP_OPTIONS = ("--supernodes", "--run-config", "--json")  # beside --trials or --one-run


def audit(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO", help="A scenario file (YAML), the name of a bundled one, or the folder of a Flower app."
        ),
    ],
    settings: Settings = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Number of canaries in the scenario's own steps; for an app, of peers that train.",
            show_default="2000; app: 64",
        ),
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(min=8, help="Number of trials of the declared releases, without a model.", show_default="100,000"),
    ] = None,
    one_run: Annotated[
        int | None,
        typer.Option("--one-run", metavar="N", help="Guess N examples of each peer in one run of real training."),
    ] = None,
    process: Annotated[
        float | None,
        typer.Option(
            "--process",
            metavar="MINUTES",
            help="Kill real peers, restore, copy and lose their folders, and count their releases from outside "
            "(source checkout).",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for --process.", show_default="runs/NAME-audit")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture: .svg (follows the reader's theme), .png or .pdf.")
    ] = None,
    supernodes: Annotated[
        int | None, typer.Option(min=1, help="Number of peers in a run of an app.", show_default="8")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Set a key of an app's run-config. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of coins, batches and noise.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack the ε that a run claims.

    Plants canaries in a scenario, or in a Flower app with PeerMod, and prints the ε that they show beside the claimed
    one. Exits with 1 if the claim is refuted, or if noise, clipping or ledger are not as planned.
    """
    with starting():
        from flower_privdec.audits import report as audits
        from flower_privdec.experiment import Experiment
        from flower_privdec.scenario import load_scenario

    if (scenario / "pyproject.toml").is_file():
        kind = APP
    elif process is not None:
        kind = PROCESSES
    elif one_run is not None:
        kind = ONE_RUN
    else:
        kind = SCENARIO

    given = {
        "--set": settings,
        "--trials": trials,
        "--replica": replica,
        "--one-run": one_run,
        "--process": process,
        "--out": out,
        "--plot": plot,
        "--supernodes": supernodes,
        "--run-config": run_config,
        "--json": as_json,
    }
    _check_options(scenario, kind, given)

    if kind == APP:
        flower = require("flower_privdec.flower.launch.local_grid", "privdec audit APP", "pip install flower-privdec")
        config = flower.read_config(scenario, run_config or ())
        n_nodes = supernodes or 8
        app = partial(flower.run_in_process, scenario.absolute(), n_nodes, config=config)
        name = scenario.absolute().name
        audits.print_app_audit(name, app, n_nodes, as_json, trials=trials or 64, one_run=one_run, seed=seed)
        return

    with starting():
        loaded = load_scenario(scenario, settings or ())
    if process is not None:
        if not 0 < process < math.inf:
            raise ScenarioError(f"--process {process:g} must be > 0 and finite minutes", code="audit.minutes")
        folder = out or Path("runs") / f"{loaded.name}-audit"
        run_soak("audit --process", loaded, folder, minutes=process, seed=seed, kinds=ON_PROCESSES)
        return

    experiment = Experiment.build(loaded)
    audits.print_audit(
        experiment, as_json, trials=trials or 2000, replica=replica or 100_000, seed=seed, one_run=one_run, plot=plot
    )


def _check_options(scenario: Path, kind: str, given: Mapping[str, Any]) -> None:
    """Refuse options that an audit would ignore."""
    if kind == APP:
        guesses = "--one-run" if given["--one-run"] is not None else "--trials"
        takes: tuple[str, ...] = (guesses, *APP_OPTIONS)
    else:
        takes = TAKES[kind]

    used = [option for option, value in given.items() if value is not None and value is not False]
    unused = [option for option in used if option not in takes]
    if unused:
        raise ScenarioError(
            f"{scenario}: {', '.join(unused)} must be left out of {kind}, which takes {', '.join((*takes, '--seed'))}",
            code="audit.unused-option",
        )
