"""`privdec rehearse`: its options, and what it prints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flower_privdec.cli.typer_parts import ScenarioFile, Settings, saying_when_interrupted, starting
from flower_privdec.common.errors import ScenarioError


def rehearse(
    scenario: ScenarioFile,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What links and devices are like, and what goes wrong (YAML).")
    ] = None,
    random_faults: Annotated[
        float | None, typer.Option(metavar="RATE", help="Draw faults at random, so many for each peer on average.")
    ] = None,
    slow: Annotated[
        str | None, typer.Option(metavar="SHARE:FACTOR", help="Slow devices: 20%:5 for a fifth, five times slower.")
    ] = None,
    step_seconds: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Duration of a private step on a device; or measure, for that on this machine.",
            show_default="0.1",
        ),
    ] = None,
    peers: Annotated[
        int | None, typer.Option(min=2, help="Number of peers.", show_default="the scenario's n_peers")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the faults.", show_default="that of the file, or of the scenario"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="runs/NAME-rehearsal")
    ] = None,
    settings: Settings = None,
) -> None:
    """Rehearse a deployment on a virtual clock.

    Runs all peers of a scenario in this process, up to some 10,000, with slow links, slow devices and faults, and
    shows what the models, the waits, the traffic and each peer's ε come to. It trains on the scenario's seed and is no
    private release.
    """
    with starting():
        from flower_privdec.rehearsal.rehearsal import Rehearsal
        from flower_privdec.rehearsal.weather import weather
        from flower_privdec.reporting import console, progress, rehearsals
        from flower_privdec.scenario import load_scenario

        laid_over = list(settings or ())
        if peers is not None:
            laid_over.append(f"n_peers={peers}")
        loaded = load_scenario(scenario, laid_over)
        measure = step_seconds == "measure"
        schedule = weather(
            loaded,
            faults,
            random_faults=random_faults,
            slow=slow,
            step_seconds=_seconds(step_seconds),
            seed=seed,
        )
        folder = out or Path("runs") / f"{loaded.name}-rehearsal"
        rehearsal = Rehearsal(loaded, folder, schedule, measure=measure)

    interruptible = saying_when_interrupted("a rehearsal does not resume; run the same command again")
    began = time.monotonic()
    with interruptible, progress.progress(loaded, folder) as on_metrics:

        def show(metrics: dict[str, Any]) -> None:
            # The time that is left is the user's, and a rehearsal's metrics have the seconds of its own clock.
            on_metrics(metrics | {"seconds": time.monotonic() - began})

        summary = rehearsal.run(show)
    rehearsals.save_picture(folder)
    console.print_summary(summary, folder)
    typer.echo(rehearsals.rehearsal_text(summary, folder))


def _seconds(text: str | None) -> float | None:
    """Return the seconds that --step-seconds gives; None if it gives none, or asks for a measurement."""
    if text is None or text == "measure":
        return None
    try:
        return float(text)
    except ValueError:
        raise ScenarioError(
            f"--step-seconds {text} must be seconds, such as 0.1, or measure", code="rehearse.step-seconds"
        ) from None
