"""The command of `privdec` for Flower apps of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_privdec.cli.typer_parts import saying_when_interrupted


def flower_run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of a Flower app, with its pyproject.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder in which the app runs and saves.", show_default="runs/APP")
    ] = None,
    supernodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes to simulate.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs for each ClientApp.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs for each ClientApp.")] = 0.0,
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Lay over the app's run-config.")
    ] = None,
) -> None:
    """Run any Flower app in Flower's simulation, with nothing left running; exit with 1 when it failed."""
    from flower_privdec.data.readers import require
    from flower_privdec.reporting import console

    install = "pip install 'flower-privdec[simulation]'"
    launcher = require("flower_privdec.flower.launch.launcher", "privdec flower-run", install)
    folder = out or Path("runs") / app.absolute().name
    again = saying_when_interrupted(f"the run was stopped; what it has saved is in {folder}")
    with again, console.rounds(app.absolute().name) as on_round:
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
