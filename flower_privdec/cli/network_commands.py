"""The commands of `privdec` for peers on a network: certificates, one peer, all peers, status, benchmark, soak."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flower_privdec import __version__
from flower_privdec.cli.members_command import members
from flower_privdec.cli.typer_parts import (
    Json,
    ScenarioFile,
    Settings,
    checkout_tool,
    failure_of,
    saying_when_interrupted,
    starting,
)
from flower_privdec.common.deferred import has_torch, use_small
from flower_privdec.common.exit_codes import FAILED, INTERRUPTED
from flower_privdec.common.logs import LogOptions, event, logging_to
from flower_privdec.common.user_code import require

if TYPE_CHECKING:
    from flower_privdec.network.peer.telemetry import Telemetry
    from flower_privdec.scenario import Scenario as LoadedScenario


_log = logging.getLogger(__name__)


def certs(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="Folder for the certificates and keys.")] = Path("certs"),
    settings: Settings = None,
    authority: Annotated[Path | None, typer.Option(help="Certificate of your own authority (PEM).")] = None,
    authority_key: Annotated[Path | None, typer.Option(help="Key of that authority (PEM, without a password).")] = None,
) -> None:
    """Make a TLS certificate for every peer."""
    from flower_privdec.network.transport.tls import make_certificates
    from flower_privdec.scenario.loading import load_membership

    loaded = load_membership(scenario, settings or ())
    for identity, done in make_certificates(loaded, out, authority, authority_key).items():
        typer.echo(f"{done}  {identity}")
    typer.echo(f"{out}: give each peer authority.pem and its own two files, and authority.key to none")


# A device's own settings may be set by its environment, as the kit of `privdec deploy` does.
DevicesScenario = Annotated[
    Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML).", envvar="PRIVDEC_SCENARIO")
]
PeerNumber = Annotated[
    int, typer.Option("--id", min=0, metavar="I", help="Number of this peer, from 0.", envvar="PRIVDEC_ID")
]
PeerFolder = Annotated[
    Path | None, typer.Option(help="Folder of this peer.", show_default="peers/NAME-I", envvar="PRIVDEC_OUT")
]
PeerCertificates = Annotated[
    Path, typer.Option("--certs", help="Folder that `privdec certs` wrote.", envvar="PRIVDEC_CERTS")
]
PeerData = Annotated[
    str | None,
    typer.Option(help="This peer's own data; all of it.", show_default="data.root", envvar="PRIVDEC_DATA"),
]
PeerListen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Listen there.", show_default="its listen or address", envvar="PRIVDEC_LISTEN"
    ),
]
InsecureSeeds = Annotated[
    bool,
    typer.Option("--insecure-seeds", help="INSECURE: draw noise and batches from the scenario's seed, for tests."),
]


def peer(
    scenario: DevicesScenario,
    number: PeerNumber,
    out: PeerFolder = None,
    certificates: PeerCertificates = Path("certs"),
    data: PeerData = None,
    listen: PeerListen = None,
    app: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A Flower app whose unmodified ClientApp trains.")
    ] = None,
    initial: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --app: initial.safetensors of another peer's folder.")
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="With --app: set a key of this device's node-config. Repeatable."),
    ] = None,
    settings: Settings = None,
    insecure_seeds: InsecureSeeds = False,
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            help="Run on NumPy, without torch: a linear or small model in a sixth of the memory.",
            show_default="without torch",
            envvar="PRIVDEC_SMALL",
        ),
    ] = False,
    charge_missing: Annotated[
        bool,
        typer.Option(
            "--charge-missing", help="Charge what neighbours have seen and this peer's ledger lost, and stop."
        ),
    ] = False,
    charge_witnessed: Annotated[
        bool,
        typer.Option(
            "--charge-witnessed",
            help="Charge it without asking whenever it is found, if enough neighbours confirm it, and go on.",
            envvar="PRIVDEC_CHARGE_WITNESSED",
        ),
    ] = False,
    max_epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="EPSILON",
            help="What this device may spend in all, if the list of members gives the run more rounds.",
            show_default="privacy.epsilon",
            envvar="PRIVDEC_MAX_EPSILON",
        ),
    ] = None,
    new_data: Annotated[
        bool,
        typer.Option(
            "--new-data",
            help="Go on although this peer's data changed; the ledger charges for both.",
            envvar="PRIVDEC_NEW_DATA",
        ),
    ] = False,
    back_off: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="With --out: wait longer before each start after one that ended soon, so long at most.",
            show_default="no wait",
            envvar="PRIVDEC_BACK_OFF",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Loopback address of metrics and health (watch extra).",
            show_default="network.metrics, else off",
        ),
    ] = None,
    expose_metrics: Annotated[
        bool, typer.Option("--expose-metrics", help="Allow --metrics an address that other devices reach.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Format of the log: text, or one JSON object a line.")
    ] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least level that is logged.")
    ] = "info",
    log_file: Annotated[Path | None, typer.Option(help="File of the log.", show_default="stderr")] = None,
    log_size: Annotated[float, typer.Option(help="With --log-file: MiB at which a new file is begun.")] = 10.0,
    log_count: Annotated[int, typer.Option(help="With --log-file: number of full files that are kept.")] = 5,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    loss: Annotated[float, typer.Option(hidden=True, min=0.0, max=1.0)] = 0.0,
) -> None:
    """Run one peer of a scenario on this device.

    It trains with the other peers, without a server. If its folder holds the run, it continues.
    """
    options = LogOptions(log_format, log_level, log_file, log_size, log_count)
    with logging_to(options), saying_how_it_ends(number):
        # Said before anything that takes long is imported.
        _log.info(
            "peer %d of %s starts: privdec %s, Python %s, process %d",
            number,
            scenario,
            __version__,
            platform.python_version(),
            os.getpid(),
            extra=event("start", peer=number, version=__version__, process=os.getpid()),
        )
        from flower_privdec.scenario.loading import load_membership

        member = load_membership(scenario, settings or ())
        address = metrics or member.network.metrics
        telemetry: Telemetry | None = None
        with ExitStack() as stack:
            # It listens before anything that takes long, so that a taken port ends the peer at once.
            if address is not None:
                from flower_privdec.network.peer.telemetry import Telemetry as Told
                from flower_privdec.network.peer.telemetry import TelemetryServer

                telemetry = Told(member.name, number, __version__)
                stack.enter_context(TelemetryServer(address, telemetry, expose_metrics))
            if back_off is not None and out is not None:
                from flower_privdec.devices.back_off import backing_off

                stack.enter_context(backing_off(out, back_off))
            _run_peer(
                scenario,
                number,
                out,
                certificates,
                data=data,
                listen=listen,
                app=app,
                initial=initial,
                node_config=node_config,
                settings=settings,
                insecure_seeds=insecure_seeds,
                small=small,
                charge_missing=charge_missing,
                charge_witnessed=charge_witnessed,
                max_epsilon=max_epsilon,
                new_data=new_data,
                with_parent=with_parent,
                loss=loss,
                telemetry=telemetry,
            )


@contextmanager
def saying_how_it_ends(number: int) -> Iterator[None]:
    """Log the error that ends a peer, and exit with its status.

    Raises:
        typer.Exit: an error ended it.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        failure = failure_of(error)
        code = getattr(error, "code", "")
        if failure is None:
            _log.critical("peer %d ends: a bug", number, exc_info=True, extra=event("end", peer=number, status=FAILED))
            raise typer.Exit(FAILED) from error
        if failure.status == INTERRUPTED:
            text = f"{failure.kind}: {failure.message}"
            _log.info("%s", text, extra=event("end", peer=number, status=failure.status, reason=code))
        else:
            _log.error("%s", failure.message, extra=event("end", peer=number, status=failure.status, reason=code))
        raise typer.Exit(failure.status) from error


def _run_peer(
    scenario: Path,
    number: int,
    out: Path | None,
    certificates: Path,
    *,
    data: str | None,
    listen: str | None,
    app: Path | None,
    initial: Path | None,
    node_config: list[str] | None,
    settings: list[str] | None,
    insecure_seeds: bool,
    small: bool,
    charge_missing: bool,
    charge_witnessed: bool,
    max_epsilon: float | None,
    new_data: bool,
    with_parent: bool,
    loss: float,
    telemetry: Telemetry | None = None,
) -> None:
    """Import what a peer needs, and run it; see `peer`."""
    from flower_privdec.scenario import Scenario, load_scenario
    from flower_privdec.scenario.loading import load_app_scenario
    from flower_privdec.scenario.sections import AppScenario

    if small and app is not None:
        raise typer.BadParameter("--small is for models of this package: leave it out with --app")
    if app is None and (small or not has_torch()):
        use_small()
        why = "--small" if small else "torch is not installed"
        _log.info("peer %d is small: on NumPy, without torch (%s)", number, why, extra=event("small", peer=number))

    if charge_missing and charge_witnessed:
        raise typer.BadParameter("--charge-missing and --charge-witnessed: give one")

    loaded: Scenario | AppScenario
    if app is not None:
        if charge_witnessed:
            raise typer.BadParameter("with --app, use --charge-missing in place of --charge-witnessed")
        if new_data or max_epsilon is not None:
            raise typer.BadParameter("with --app, leave out --new-data and --max-epsilon: data and budget are its own")
        if data is not None or insecure_seeds:
            raise typer.BadParameter(
                "with --app, data and batches are the app's: leave out --data and --insecure-seeds"
            )
        serverless = require(
            "flower_privdec.flower.serverless", "privdec peer --app", "pip install 'flower-privdec[flower]'"
        )
        loaded = load_app_scenario(scenario, settings or ())
        run = partial(serverless.run_app_peer, app, initial=initial, node_config=node_config or ())
    elif initial is not None or node_config:
        raise typer.BadParameter("--initial and --node-config are for --app: name the app's folder")
    else:
        with starting():
            from flower_privdec.network.peer.foreground import run_peer

            loaded = load_scenario(scenario, settings or ())
        run = partial(
            run_peer,
            data=data,
            insecure_seeds=insecure_seeds,
            loss=loss,
            charge_witnessed=charge_witnessed,
            max_epsilon=max_epsilon,
            new_data=new_data,
        )

    folder = out or Path("peers") / f"{loaded.name}-{number}"
    options: dict[str, Any] = {"listen": listen, "with_parent": with_parent, "charge_missing": charge_missing}
    if telemetry is not None:
        options["telemetry"] = telemetry
    with saying_when_interrupted(f"the same command continues from {folder}"):
        run(loaded, number, folder, certificates, **options)


def up(
    scenario: ScenarioFile,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.", show_default="runs/NAME")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's checkpoints.")] = False,
    insecure_seeds: InsecureSeeds = False,
    small: Annotated[
        list[int] | None,
        typer.Option(metavar="PEER", help="Run a peer without torch, as on a small device. Repeatable."),
    ] = None,
    loss: Annotated[float, typer.Option(help="Share of messages to lose, below 1.")] = 0.0,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER@ROUND",
            help="Kill a peer for good, at the first evaluation from a round on. Repeatable.",
        ),
    ] = None,
    restart: Annotated[
        list[str] | None,
        typer.Option(metavar="PEER@ROUND", help="Kill a peer like that, and restart it. Repeatable."),
    ] = None,
) -> None:
    """Run all peers of a scenario on this machine.

    Each is a process that talks to the others over TLS, as it would on a device.
    """
    from flower_privdec.cli.peers_table import network_progress
    from flower_privdec.pushsum.frames import TensorArithmetic, wire_codec
    from flower_privdec.reporting import console
    from flower_privdec.reporting.plots import save_run_plots
    from flower_privdec.scenario import load_scenario

    with starting():
        from flower_privdec.network.local.up import Up, injected_kills

        loaded = load_scenario(scenario, settings or ())
    folder = out or Path("runs") / loaded.name
    with (
        saying_when_interrupted(f"the same command with --resume continues from {folder}"),
        network_progress(loaded, folder) as (on_metrics, on_status),
    ):
        due = injected_kills(kill or (), restart or (), loaded.n_peers, loaded.rounds)
        peers = Up(
            loaded, folder, resume=resume, insecure_seeds=insecure_seeds, loss=loss, kills=due, small=small or ()
        )
        for caution in TensorArithmetic(wire_codec(loaded.network.codec)).cautions():
            typer.echo(f"warning: network.codec: {caution}", err=True)
        if on_status is None:
            typer.echo(f"{loaded.name}: each of {loaded.n_peers} peers starts and waits for its neighbours", err=True)
        summary = peers.run(on_metrics, on_status)
    save_run_plots(folder)
    console.print_summary(summary, folder)


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address that a peer listens on.")],
    certificates: Annotated[Path, typer.Option("--certs", help="Folder that `privdec certs` wrote.")] = Path("certs"),
    number: Annotated[
        int, typer.Option("--as", min=0, metavar="I", help="Number of the peer whose certificate to show.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show the status of a running peer."""
    from flower_privdec.network.peer.status import status_of

    typer.echo(status_of(address, certificates, number, as_json))


def watch(
    target: Annotated[
        Path, typer.Argument(metavar="DIR|SCENARIO", help="The folder of a `privdec up`, or deployed peers' scenario.")
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page, on 127.0.0.1.")] = 8700,
    certificates: Annotated[
        Path, typer.Option("--certs", help="With a scenario: folder that `privdec certs` wrote.")
    ] = Path("certs"),
    number: Annotated[
        int, typer.Option("--as", min=0, metavar="I", help="With a scenario: number of the peer to ask as.")
    ] = 0,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two questions to a peer.")] = 1.0,
    settings: Settings = None,
) -> None:
    """Show a network's peers on a live page.

    The page is on this device only, loads nothing from elsewhere, and changes nothing (watch extra).
    """
    install = "pip install 'flower-privdec[watch]'"
    page = require("flower_privdec.watching.page_server", "privdec watch", install)
    from flower_privdec.watching.asker import Asker, Target

    if target.is_dir():
        watched = Target.of_folder(target)
    else:
        watched = Target.of_scenario(target, settings or (), certificates, number)
    with (
        page.listening(port) as sock,
        Asker(watched, every) as asker,
        saying_when_interrupted("the page has ended; the peers go on"),
    ):
        typer.echo(f"http://{page.HOST}:{port}/ shows {watched.scenario.name}; Ctrl-C ends the page, not the peers")
        page.serve(asker.board, sock)


ModelSize = StrEnum("ModelSize", ["small", "large"])
NetworkMode = StrEnum("NetworkMode", ["asynchronous", "synchronous"])


def network_bench(
    out: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path(),
    size: Annotated[
        list[ModelSize] | None, typer.Option(help="Size of the model. Repeatable.", show_default="both")
    ] = None,
    mode: Annotated[
        list[NetworkMode] | None, typer.Option(help="network.mode. Repeatable.", show_default="both")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, max=10_000, help="Number of rounds to time.", show_default="by size")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure the speed of a network of peers.

    Prints the rounds a second of eight peers on this machine, beside those of plain gRPC (source checkout).
    """
    network = checkout_tool("tools.bench.network", "network-bench")
    report = partial(typer.echo, err=as_json)
    measurement = network.measure_network(
        size or list(ModelSize), mode or list(NetworkMode), settings or (), out, rounds, report
    )
    if as_json:
        typer.echo(network.as_json(measurement))


def soak(
    scenario: ScenarioFile,
    minutes: Annotated[float, typer.Option(help="Duration.")],
    seed: Annotated[int | None, typer.Option(help="Seed of the faults.", show_default="random")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the results.", show_default="runs/NAME-soak")] = None,
    settings: Settings = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only this kind of fault. Repeatable.", show_default="all")
    ] = None,
    every: Annotated[float, typer.Option(help="Average seconds between two faults.")] = 3.0,
    longest: Annotated[float, typer.Option(help="Longest duration of a fault, in seconds.")] = 2.0,
) -> None:
    """Inject faults into a network of peers.

    Runs all peers of a scenario on this machine. If an invariant fails, prints it and exits with 1 (source checkout).
    """
    from flower_privdec.scenario import load_scenario

    loaded = load_scenario(scenario, settings or ())
    folder = out or Path("runs") / f"{loaded.name}-soak"
    options = {"kinds": tuple(fault)} if fault else {}
    run_soak("soak", loaded, folder, minutes=minutes, seed=seed, every=every, longest=longest, **options)


def run_soak(command: str, scenario: LoadedScenario, folder: Path, **options: Any) -> None:
    """Soak the peers of a scenario in a new folder, and print what was counted; options are those of `Soak`.

    Raises:
        RunError: an invariant did not hold.
        ScenarioError: an option breaks a rule, or there is no source checkout.
    """
    soaked = checkout_tool("tools.soak", command).Soak(scenario, folder, **options)
    with saying_when_interrupted(f"the results are above, and the traces in {folder}"):
        try:
            soaked.run(typer.echo)
        finally:
            typer.echo("\n".join(soaked.summary()))
    typer.echo("all invariants held")


ON_PROCESSES = ("kill", "restore", "copy", "lose", "delete")  # faults that `privdec audit --process` makes
NETWORK_COMMANDS = (certs, members, peer, up, status, watch, network_bench, soak)
