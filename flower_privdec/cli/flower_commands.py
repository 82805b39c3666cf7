"""The commands of `privdec` for Flower apps: run one in a simulation, and guard a SuperNode."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flower_privdec.cli.typer_parts import finite, saying_when_interrupted
from flower_privdec.common.user_code import require


def flower_run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="Folder of a Flower app, with its pyproject.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder in which the app runs and saves.", show_default="runs/APP")
    ] = None,
    supernodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes to simulate.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs for each ClientApp.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs for each ClientApp.", callback=finite)] = 0.0,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Set a key of the app's run-config. Repeatable."),
    ] = None,
) -> None:
    """Run a Flower app in Flower's simulation.

    Any app will do, with peers of this package or without. No process is left running. Exits with 1 if the app failed.
    """
    from flower_privdec.reporting import progress

    install = "pip install 'flower-privdec[simulation]'"
    launcher = require("flower_privdec.flower.launch.launcher", "privdec flower-run", install)
    name = app.absolute().name
    folder = out or Path("runs") / name

    stoppable = saying_when_interrupted(f"the run was stopped; what it has saved is in {folder}")
    with stoppable, progress.rounds(name) as on_round:
        last = launcher.run_flower_app(
            app,
            folder,
            n_supernodes=supernodes,
            cpus=cpus,
            gpus=gpus,
            run_config=run_config or (),
            on_round=on_round,
        )
    typer.echo(f"{last}\n{folder}: what the app has saved, and its log")


def guard(
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="The owner's policy, a YAML file.")],
    supernode: Annotated[
        list[str], typer.Argument(metavar="flower-supernode ARGS...", help="The command to run under it.")
    ],
) -> None:
    """Run a SuperNode under its owner's privacy policy.

    The policy holds whatever app a server sends. Each update is clipped, noised and charged to a ledger in the policy's
    folder before it leaves; metrics stay. Apps that are not listed, messages other than training, and updates beyond
    the budget are refused. A policy has

    folder (of the ledger), epsilon, delta, clip_norm, rounds (number of updates) or noise_multiplier, apps (any, or a
    list of the SHA-256 of FABs), and examples (what replies state; 1).
    """
    module = require("flower_privdec.flower.launch.guard", "privdec guard", "pip install 'flower-privdec[flower]'")
    loaded = module.load_policy(policy)
    words, variables = module.guarded_command(loaded, supernode)
    typer.echo(module.policy_line(loaded))

    # The SuperNode replaces this process, with its output: nothing may be left in a buffer.
    sys.stdout.flush()
    os.execve(words[0], words, os.environ | variables)


FLOWER_COMMANDS = (flower_run, guard)
