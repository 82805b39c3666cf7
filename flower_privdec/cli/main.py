"""The command line, `privdec`: its commands, their options, and exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from flower_privdec import __version__
from flower_privdec.cli.network_commands import NETWORK_COMMANDS, ON_PROCESSES, run_soak
from flower_privdec.cli.typer_parts import (
    Command,
    CommandGroup,
    Json,
    ScenarioFile,
    Settings,
    checkout_tool,
    finite,
    saying_when_interrupted,
    starting,
)
from flower_privdec.common.errors import PrivdecError, ScenarioError, StoppedError
from flower_privdec.common.files import disk_error
from flower_privdec.common.formatting import printable
from flower_privdec.common.user_code import require

APP_OPTIONS = ("--supernodes", "--run-config", "--json")  # of an audit of a Flower app, beside those of its kind


def flower_run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of a Flower app, with its pyproject.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder in which the app runs and saves.", show_default="runs/APP")
    ] = None,
    supernodes: Annotated[int, typer.Option(min=1, help="How many SuperNodes to simulate.")] = 8,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs for each ClientApp.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs for each ClientApp.", callback=finite)] = 0.0,
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Lay over the app's run-config.")
    ] = None,
) -> None:
    """Run any Flower app in Flower's simulation, with nothing left running; exit with 1 when it failed."""
    from flower_privdec.reporting import progress

    install = "pip install 'flower-privdec[simulation]'"
    launcher = require("flower_privdec.flower.launch.launcher", "privdec flower-run", install)
    folder = out or Path("runs") / app.absolute().name
    again = saying_when_interrupted(f"the run was stopped; what it has saved is in {folder}")
    with again, progress.rounds(app.absolute().name) as on_round:
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
    """Run a Flower SuperNode under its owner's privacy policy, whatever app a server sends.

    Each update is clipped, noised and charged to a ledger in the policy's folder before it leaves; metrics stay. Apps
    that are not listed, messages other than training, and updates beyond the budget are refused. A policy has

    folder (of the ledger), epsilon, delta, clip_norm, rounds (how many updates) or noise_multiplier, apps (any, or a
    list of the SHA-256 of FABs), and examples (what replies state; 1).
    """
    module = require("flower_privdec.flower.launch.guard", "privdec guard", "pip install 'flower-privdec[flower]'")
    loaded = module.load_policy(policy)
    words, variables = module.guarded_command(loaded, supernode)
    typer.echo(module.policy_line(loaded))
    sys.stdout.flush()
    os.execve(words[0], words, os.environ | variables)


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
        typer.echo(f"privdec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@command()
def run(
    scenario: ScenarioFile,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    runtime: Annotated[Literal["engine", "flower"], typer.Option(help="In this process, or by `flwr run`.")] = "engine",
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the folder's checkpoint.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="How many rounds in all. With --resume a finished run goes on, planned by what is left of its budget.",
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
        typer.Option(min=1, help="flower: how many.", show_default="relay: n_peers; sharded: one for --cpus of them"),
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="flower: CPUs for each ClientApp.", show_default="1")] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="flower: GPUs for each ClientApp.", show_default="0", callback=finite)
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write OUT/tensorboard as well.")] = False,
) -> None:
    """Train: run a scenario to its end and write metrics, models, ledgers and a summary."""
    with starting():
        from flower_privdec.experiment import Experiment
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
        loaded = load_scenario(scenario, [*(settings or ()), *([] if rounds is None else [f"rounds={rounds}"])])
        folder = out or Path("runs") / loaded.name
        loaded = with_more_rounds(loaded, folder) if resume else loaded
        experiment = Experiment.build(loaded)
    interruptible = saying_when_interrupted(
        "nothing was kept yet; run the same command again",
        f"the same command with --resume goes on from {folder}",
        chosen=(folder / "checkpoint").exists,
    )
    try:
        with interruptible, progress.progress(loaded, folder, tensorboard=tensorboard) as on_metrics:
            if runtime == "engine":
                from flower_privdec.engine.run import run as run_engine

                summary = run_engine(experiment, folder, resume=resume, on_metrics=on_metrics)
            else:
                install = "pip install 'flower-privdec[simulation]'"
                launcher = require("flower_privdec.flower.launch.launcher", "--runtime flower", install)
                summary = launcher.flower_run(experiment, folder, **for_flower, resume=resume, on_metrics=on_metrics)
    except StoppedError:
        if (folder / "summary.json").is_file():
            save_run_plots(folder)
        raise
    save_run_plots(folder)
    console.print_summary(summary, folder)


@command()
def show(scenario: ScenarioFile, settings: Settings = None) -> None:
    """Print a scenario with every default: as a value, or as a comment where it follows from something else."""
    with starting():
        from flower_privdec.reporting.console import complete_yaml
        from flower_privdec.scenario import load_scenario

    typer.echo(complete_yaml(load_scenario(scenario, settings or ())), nl=False)


@command("list")
def list_parts(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", help="Of these alone, such as models.")] = None,
    as_json: Json = False,
) -> None:
    """List everything a scenario can name: algorithms, topologies, models, datasets and more."""
    with starting():
        from flower_privdec.reporting import console

    console.print_parts(as_json, kind)


@command()
def plan(
    scenario: ScenarioFile,
    settings: Settings = None,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also each peer's noise and ε, graph, best rounds and gradients.")
    ] = False,
    privacy: Annotated[
        bool, typer.Option("--privacy", help="Print what is released instead, and the ε towards each observer.")
    ] = False,
) -> None:
    """Plan a run: its rounds, ε, noise, memory and time; run nothing."""
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
    out: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg or .pdf) of the graph.")] = None,
    as_json: Json = False,
) -> None:
    """Describe the graph: edges, spectral gap, rounds until jointly connected; draw it."""
    with starting():
        from flower_privdec.reporting import console, plots
        from flower_privdec.scenario import load_scenario

    console.print_topology(plots.describe(load_scenario(scenario, settings or ()), out), as_json)


@command()
def ledger(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A ledger, SOURCE.jsonl, or a folder with some.")],
    delta: Annotated[float, typer.Option(help="δ at which to compute ε: a ledger holds releases, and no δ.")],
    epsilon: Annotated[float | None, typer.Option(help="A budget of which to print what is left.")] = None,
    colluding: Annotated[
        int | None,
        typer.Option(min=0, help="Against how many colluding peers ε holds.", show_default="all other peers"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compose the same events with dp-accounting too (extra accounting).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Verify a ledger, and print what each run spent, the ε of all together, and what is left.

    If noise cancelled between peers in some run, ε depends on how many of them collude, and each number's is printed.
    """
    with starting():
        from flower_privdec.reporting import ledgers

    ledgers.print_ledgers(path, delta, epsilon, as_json, colluding, check=check)


@command()
def audit(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO", help="A scenario file (YAML), the name of a bundled one, or a Flower app's folder."
        ),
    ],
    settings: Settings = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Canaries to look for in the scenario's own steps; of an app, peers to train.",
            show_default="2000, an app: 64",
        ),
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(min=8, help="Trials of the declared releases without a model.", show_default="100,000"),
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
            help="Kill, restore, copy and lose the folders of real peers instead, and count releases from outside "
            "(source checkout).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for --process.", show_default="runs/NAME-audit")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A picture to write: .svg, which follows the reader's theme, .png or .pdf.")
    ] = None,
    supernodes: Annotated[
        int | None, typer.Option(min=1, help="How many peers a run of an app has.", show_default="8")
    ] = None,
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Lay over an app's run-config.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Keys coins, batches and noise.")] = 0,
    as_json: Json = False,
) -> None:
    """Attack the ε of a scenario, or of a Flower app with PeerMod: what canaries show, beside what is printed.

    Exits with 1 where the printed ε is refuted, or where noise, clipping or ledger are not as planned.
    """
    with starting():
        from flower_privdec.audits import report as audits
        from flower_privdec.experiment import Experiment
        from flower_privdec.scenario import load_scenario

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
    takes: tuple[str, ...]
    if is_app := (scenario / "pyproject.toml").is_file():
        what = "a Flower app"
        takes = ("--one-run" if one_run is not None else "--trials", *APP_OPTIONS)
    elif process is not None:
        what = "an audit of processes"
        takes = ("--set", "--process", "--out")
    elif one_run is not None:
        what = "an audit in one run"
        takes = ("--set", "--one-run", "--json")
    else:
        what = "an audit of a scenario"
        takes = ("--set", "--trials", "--replica", "--plot", "--json")
    if unused := [
        option for option, value in given.items() if value is not None and value is not False and option not in takes
    ]:
        raise ScenarioError(
            f"{scenario}: {', '.join(unused)} must be left out of {what}, which takes {', '.join((*takes, '--seed'))}",
            code="audit.unused-option",
        )
    if is_app:
        install = "pip install flower-privdec"
        flower = require("flower_privdec.flower.launch.local_grid", "privdec audit APP", install)
        config = flower.read_config(scenario, run_config or ())
        n_nodes = supernodes or 8
        app = partial(flower.run_in_process, scenario.absolute(), n_nodes, config=config)
        audits.print_app_audit(
            scenario.absolute().name, app, n_nodes, as_json, trials=trials or 64, one_run=one_run, seed=seed
        )
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


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that `privdec run` wrote.")],
    out: Annotated[
        Path,
        typer.Option(
            help="A page (.html), what ε means for a data protection officer (.md), a table (.csv, .tex) or curves "
            "(.pdf, .png)."
        ),
    ] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page about one run, or comparing several."""
    with starting():
        from flower_privdec.reporting import console, page

    summaries = page.write_report(runs, out)
    console.print_comparison(summaries)
    typer.echo(f"report: {out}")


@command()
def study(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A study, or the path of its file.")] = None,
    size: Annotated[str | None, typer.Option(help="One of the study's sizes.", show_default="its first")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to publish to.", show_default="results/NAME[-SIZE]")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes, one thread each; 0 publishes what is finished.")] = 2,
    only: Annotated[list[str] | None, typer.Option(metavar="PART", help="Run this part alone (repeatable).")] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the cells still to run; run none.")] = False,
    list_studies: Annotated[bool, typer.Option("--list", help="List the studies and their parts.")] = False,
) -> None:
    """Run a grid of scenarios, a paper's or your own, and write tables, plots and whether its claims are reproduced."""
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
        list[str] | None, typer.Argument(metavar="[W1 W2 ... FedDeper noise sharded]", help="Which.")
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to time it.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=3, max=10_000, help="Timed rounds of each variant.")] = 15,
    peers: Annotated[
        int | None, typer.Option(min=2, max=100_000, help="How many, in W1 to W4.", show_default="each its own")
    ] = None,
    extras: Annotated[bool, typer.Option("--all", help="Also Opacus, vmap, gloo, relay and scaling.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the engine against a plain loop over peers, side by side in one process."""
    checkout_tool("tools.bench", "bench").main(
        workloads or [], device=device, rounds=rounds, peers=peers, extras=extras, as_json=as_json
    )


command()(flower_run)
command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(guard)
for network_command in NETWORK_COMMANDS:
    command()(network_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Its exit status: 0 done, 1 the run failed, 2 the input is wrong (nothing was written), 3 a peer's model is not the
    one that its neighbours agreed on, 130 Ctrl-C.
    """
    if sys.stdout is None:  # closed by the reader of a pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    os.environ.setdefault(*HUGE_PAGES)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no ε
    if arguments is None:
        arguments = sys.argv[1:]
        atexit.register(_skip_last_collection)
    try:
        os.getcwd()
    except FileNotFoundError:
        _exit("error", "the folder this was started in is gone; cd to one that is there", 2)
    if "" in arguments:
        _exit("error", "an argument is empty: give it a value, or leave it out", 2)
    try:
        result: Any = app(arguments or ["--help"], prog_name="privdec", standalone_mode=False)
    except StoppedError as error:
        _exit("interrupted", str(error), 130)
    except PrivdecError as error:
        _exit("error", str(error), error.exit_status)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except OSError as error:
        _exit("error", str(disk_error(error)), 2 if error.errno == errno.ENAMETOOLONG else 1)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of a usage error of click's, typer's own copy of it included
        if usage is not None:
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "privdec"
            message = " ".join(usage().split()).rstrip(".")
            _exit("error", f"{message}; see `{path} --help`", getattr(error, "exit_code", 2))
        if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
            _exit("error", "memory ran out; use a smaller model or fewer peers (`privdec plan` estimates the need)", 1)
        raise  # a bug
    sys.exit(result if isinstance(result, int) else 0)


def _skip_last_collection() -> None:
    """Exempt all objects from the garbage collection at exit; but with triton loaded that would print each of them."""
    if "triton" not in sys.modules:
        gc.freeze()


def _exit(kind: str, message: str, status: int) -> NoReturn:
    typer.echo(f"{kind}: {printable(message)}", err=True)
    sys.exit(status)
