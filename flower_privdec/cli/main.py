"""The command line, `privdec`: its commands, their options, and exit codes."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from flower_privdec.cli.audit_command import audit
from flower_privdec.cli.device_commands import DEVICE_COMMANDS
from flower_privdec.cli.flower_commands import flower_run, guard
from flower_privdec.cli.network_commands import NETWORK_COMMANDS
from flower_privdec.cli.rehearse_command import rehearse
from flower_privdec.cli.typer_parts import (
    Command,
    CommandGroup,
    Json,
    ScenarioFile,
    Settings,
    checkout_tool,
    failure_of,
    finite,
    saying_when_interrupted,
    starting,
)
from flower_privdec.common.errors import ScenarioError, StoppedError
from flower_privdec.common.exit_codes import WRONG_INPUT
from flower_privdec.common.formatting import printable
from flower_privdec.common.user_code import require

HUGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch then takes large tensors in pages of 2 MiB: a third of the time

app = typer.Typer(
    help="Private decentralized learning: peers train together, each with its own differential-privacy guarantee.",
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does
    rich_markup_mode=None,
)
command = partial(app.command, cls=Command)


def _print_version(requested: bool) -> None:
    if requested:
        with starting():
            from flower_privdec.cli.versions import versions_text
        typer.echo(versions_text())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version, and those of what it runs on, and exit.",
            is_eager=True,
            callback=_print_version,
        ),
    ] = False,
) -> None:
    pass


@command()
def run(
    scenario: ScenarioFile,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    runtime: Annotated[
        Literal["engine", "flower"], typer.Option(help="Run in this process, or by `flwr run`.")
    ] = "engine",
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the folder's checkpoint.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Number of rounds in all. With --resume a finished run continues, within what is left of its budget.",
            show_default="the scenario's",
        ),
    ] = None,
    mode: Annotated[
        Literal["auto", "sharded", "relay"] | None,
        typer.Option(
            help="flower: all peers in one SuperNode; or, as a rehearsal of a deployment, a shard of them in each of "
            "several that exchange rows, or one in each, through a relay.",
            show_default="auto",
        ),
    ] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="flower: number of SuperNodes.", show_default="relay: n_peers; sharded: one for --cpus of them"
        ),
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="flower: CPUs for each ClientApp.", show_default="1")] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="flower: GPUs for each ClientApp.", show_default="0", callback=finite)
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write OUT/tensorboard.")] = False,
) -> None:
    """Run a scenario to its end.

    Writes metrics, models, ledgers and a summary.
    """
    with starting():
        from flower_privdec.experiment import Experiment
        from flower_privdec.experiment.data_read import data_read
        from flower_privdec.experiment.recorder import with_more_rounds
        from flower_privdec.reporting import console, progress
        from flower_privdec.reporting.plots import save_run_plots
        from flower_privdec.scenario import load_scenario

        options = {"mode": mode, "n_supernodes": supernodes, "cpus": cpus, "gpus": gpus}
        for_flower: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if for_flower and runtime == "engine":
            name, value = next(iter(for_flower.items()))
            flag = f"--{name.removeprefix('n_')}"
            message = f"{flag} {value} is for --runtime flower: add that, or leave {flag} out"
            raise ScenarioError(message, code="cli.flower-option")

        laid_over = list(settings or ())
        if rounds is not None:
            laid_over.append(f"rounds={rounds}")
        loaded = load_scenario(scenario, laid_over)
        folder = out or Path("runs") / loaded.name
        if resume:
            loaded = with_more_rounds(loaded, folder)
        experiment = Experiment.build(loaded)
        read = [f"{half}: {line}" for half, line in data_read(experiment, experiment.own.examples).items()]

    interruptible = saying_when_interrupted(
        "nothing was kept yet; run the same command again",
        f"the same command with --resume goes on from {folder}",
        chosen=(folder / "checkpoint").exists,
    )
    try:
        with interruptible, progress.progress(loaded, folder, tensorboard=tensorboard, first=read) as on_metrics:
            if runtime == "engine":
                from flower_privdec.engine.run import run as run_engine

                summary = run_engine(experiment, folder, resume=resume, on_metrics=on_metrics)
            else:
                install = "pip install 'flower-privdec[simulation]'"
                launcher = require("flower_privdec.flower.launch.launcher", "--runtime flower", install)
                summary = launcher.flower_run(experiment, folder, **for_flower, resume=resume, on_metrics=on_metrics)
    except StoppedError:
        if (folder / "summary.json").is_file():  # a run that was stopped between two rounds has a summary
            save_run_plots(folder)
        raise

    save_run_plots(folder)
    console.print_summary(summary, folder)


@command()
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Scenario to write.")] = Path("scenario.yaml"),
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take options, and else defaults.")] = False,
    data: Annotated[str | None, typer.Option(help="digits (bundled), csv or image-folder.")] = None,
    root: Annotated[str | None, typer.Option(help="Path of each peer's own data, with {peer} for its number.")] = None,
    test: Annotated[Path | None, typer.Option(help="Path of the public test set.")] = None,
    target: Annotated[str | None, typer.Option(help="Column of a table to learn.")] = None,
    peers: Annotated[int | None, typer.Option(help="Number of peers.")] = None,
    epsilon: Annotated[str | None, typer.Option(help="ε of each peer, or none.")] = None,
    colluding: Annotated[
        str | None, typer.Option(help="Number of peers that might collude, so that noise can cancel; or all.")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(help="Number of examples that every peer has at least, for noise that cancels.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
) -> None:
    """Ask a few questions and write a scenario.

    Beside it lies its JSON schema, by which editors complete keys and explain them.
    """
    with starting():
        from flower_privdec.cli import init_command

    init_command.check_free(path)
    given = {
        "data": data,
        "root": root,
        "test": test,
        "target": target,
        "peers": peers,
        "epsilon": epsilon,
        "colluding": colluding,
        "at_least": at_least,
        "rounds": rounds,
    }
    notes = init_command.write_scenario(path, init_command.ask(yes, given))
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"scenario: {path}\nnext: privdec plan {path}, then privdec run {path}")


@command()
def schema(
    kind: Annotated[
        Literal["scenario", "app", "study"], typer.Argument(help="scenario, app (a Flower app's) or study.")
    ] = "scenario",
) -> None:
    """Print the JSON schema of a kind of file, for editors."""
    with starting():
        from flower_privdec.cli import init_command

    typer.echo(init_command.schema_text(kind), nl=False)


@command()
def show(
    scenario: ScenarioFile,
    settings: Settings = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also read the data, and print what was read of them and what was left.")
    ] = False,
) -> None:
    """Print a scenario with all its defaults.

    A default is a value, or a comment if it follows from something else.
    """
    with starting():
        from flower_privdec.reporting.console import complete_yaml
        from flower_privdec.scenario import load_scenario
        from flower_privdec.scenario.unused_keys import unused_keys

    loaded = load_scenario(scenario, settings or ())
    for unused in unused_keys(loaded):
        typer.echo(f"warning: {unused}", err=True)
    typer.echo(complete_yaml(loaded), nl=False)
    if data:
        from flower_privdec.experiment.data_read import data_of

        for half, line in data_of(loaded).items():
            typer.echo(f"# {half}: {line}")


@command("list")
def list_parts(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="Only one kind, such as models.")] = None,
    as_json: Json = False,
) -> None:
    """List what a scenario can name.

    Algorithms, topologies, models, datasets and more.
    """
    with starting():
        from flower_privdec.reporting import console

    console.print_parts(as_json, kind)


@command()
def plan(
    scenario: ScenarioFile,
    settings: Settings = None,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also print each peer's noise and ε, graph, best rounds and gradients.")
    ] = False,
    privacy: Annotated[
        bool, typer.Option("--privacy", help="Print instead what is released, and the ε towards each observer.")
    ] = False,
) -> None:
    """Estimate ε, noise, memory and time of a run.

    Trains nothing, but times a few rounds.
    """
    with starting():
        from flower_privdec.experiment import Experiment
        from flower_privdec.planner.observers import print_statement
        from flower_privdec.planner.plan import make_plan
        from flower_privdec.reporting import console
        from flower_privdec.scenario import load_scenario

        experiment = Experiment.build(load_scenario(scenario, settings or ()))
    if privacy:
        print_statement(experiment, as_json)
    else:
        console.print_plan(make_plan(experiment), as_json, verbose)


@command()
def topology(
    scenario: ScenarioFile,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Write a picture of the graph (.png, .svg or .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Describe and draw the graph of the peers.

    Prints its edges, its spectral gap, and how many rounds it takes until all peers are connected.
    """
    with starting():
        from flower_privdec.reporting import console, plots
        from flower_privdec.scenario import load_scenario

    console.print_topology(plots.describe(load_scenario(scenario, settings or ()), out), as_json)


@command()
def ledger(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A ledger, SOURCE.jsonl, or a folder with ledgers.")],
    delta: Annotated[
        float | None,
        typer.Option(
            help="δ at which to compute ε. A ledger holds releases and no δ.", show_default="that of the run it lies in"
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget; prints what is left of it.")] = None,
    colluding: Annotated[
        int | None,
        typer.Option(min=0, help="Number of colluding peers that ε holds against.", show_default="all other peers"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also compose the same events with dp-accounting (extra accounting).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Verify a ledger and print what is spent.

    Prints what each run spent, the ε of all together, and what is left. If noise cancelled between peers in some run,
    ε depends on how many of them collude, and is printed for each number.
    """
    with starting():
        from flower_privdec.reporting import ledgers

    if delta is None:
        delta = ledgers.delta_near(path)
    ledgers.print_ledgers(path, delta, epsilon, as_json, colluding, check=check)


command()(audit)


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `privdec run` wrote.")],
    out: Annotated[
        Path,
        typer.Option(
            help="A page (.html), what ε means for a data protection officer (.md), a table (.csv, .tex) or curves "
            "(.pdf, .png, .svg)."
        ),
    ] = Path("report.html"),
) -> None:
    """Write a page about one run or several.

    It is self-contained HTML, or another format by the ending of --out.
    """
    with starting():
        from flower_privdec.reporting import console, page

    summaries = page.write_report(runs, out)
    console.print_comparison(summaries)
    typer.echo(f"report: {out}")


@command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `privdec run` wrote, or a device's.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Path of the model: .safetensors or .pt (state dict), .torchscript or .pt2 (with its code), or .onnx."
        ),
    ],
    peer: Annotated[
        int | None, typer.Option(min=0, help="The model of this peer.", show_default="mean model, or the device's own")
    ] = None,
) -> None:
    """Write a trained model for other programs.

    A card beside it, model.onnx-card.md for model.onnx, has what the model is, how it was trained and what its ε means.
    """
    with starting():
        from flower_privdec.reporting import exporting
        from flower_privdec.reporting.run_folder import read_result

    model, card = exporting.export(read_result(run), out, peer)
    typer.echo(f"model: {model}\ncard: {card}")


@command()
def study(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A bundled study, or the path of a study's file.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="One of the study's sizes.", show_default="its first")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to publish to.", show_default="results/NAME[-SIZE]")] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Number of processes, one thread each. 0 publishes what is finished.")
    ] = 2,
    only: Annotated[list[str] | None, typer.Option(metavar="PART", help="Run only this part. Repeatable.")] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the cells still to run, and run none.")] = False,
    list_studies: Annotated[bool, typer.Option("--list", help="List the studies and their parts.")] = False,
) -> None:
    """Run a grid of scenarios and publish it.

    The grid is a paper's or your own. Writes tables, plots and whether its claims are reproduced.
    """
    with starting():
        from flower_privdec.cli import study_command as studies

    if list_studies:
        studies.print_studies()
    elif name is None:
        raise typer.BadParameter("name a study; `privdec study --list` lists them", param_hint="NAME")
    elif dry_run:
        studies.print_cells(name, size, only or (), settings or ())
    else:
        studies.run_study(name, size=size, out=out, jobs=jobs, only=only or (), settings=settings or ())


@command()
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[W1 W2 ... FedDeper noise sharded]", help="Only these workloads, or with --algorithms only these."
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to time on.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=3, max=10_000, help="Number of timed rounds of each variant.")] = 15,
    peers: Annotated[
        int | None, typer.Option(min=2, max=100_000, help="Number of peers in W1 to W4.", show_default="each its own")
    ] = None,
    extras: Annotated[bool, typer.Option("--all", help="Also time Opacus, vmap, gloo, relay and scaling.")] = False,
    algorithms: Annotated[
        bool,
        typer.Option("--algorithms", help="Time every algorithm instead, beside its loop and its floor."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the engine against a plain loop.

    Both train the same peers, side by side in one process (source checkout).
    """
    checkout_tool("tools.bench", "bench").main(
        workloads or [],
        device=device,
        rounds=rounds,
        peers=peers,
        extras=extras,
        algorithms=algorithms,
        as_json=as_json,
    )


command()(rehearse)
command()(flower_run)
# What follows the policy is another command, with options of its own.
command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(guard)
for network_command in (*NETWORK_COMMANDS, *DEVICE_COMMANDS):
    command()(network_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and exit with a status of `exit_codes`."""
    os.environ.setdefault(*HUGE_PAGES)
    if sys.stdout is None:  # closed by the reader of a pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no ε

    if arguments is None:
        arguments = sys.argv[1:]
        atexit.register(_skip_last_collection)
    try:
        os.getcwd()
    except FileNotFoundError:
        _exit("error", "the folder this was started in is gone; cd to one that is there", WRONG_INPUT)
    if "" in arguments:
        _exit("error", "an argument is empty: give it a value, or leave it out", WRONG_INPUT)

    try:
        result: Any = app(arguments or ["--help"], prog_name="privdec", standalone_mode=False)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise  # a bug
        _exit(*failure)
    sys.exit(result if isinstance(result, int) else 0)


def _skip_last_collection() -> None:
    """Exempt all objects from the garbage collection at exit."""
    if "triton" not in sys.modules:  # with triton loaded, that would print each object
        gc.freeze()


def _exit(kind: str, message: str, status: int) -> NoReturn:
    typer.echo(f"{kind}: {printable(message)}", err=True)
    sys.exit(status)
