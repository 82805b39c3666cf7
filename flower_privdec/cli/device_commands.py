"""`privdec deploy` and `privdec doctor`: what an operator gives to devices, and what a device looks at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flower_privdec.cli.network_commands import (
    DevicesScenario,
    PeerCertificates,
    PeerData,
    PeerFolder,
    PeerListen,
)
from flower_privdec.cli.typer_parts import Json, ScenarioFile, Settings, starting
from flower_privdec.common.deferred import has_torch, use_small
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.exit_codes import FAILED, FINISHED


def deploy(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="Folder for the kits, on this machine.")],
    settings: Settings = None,
    folder: Annotated[
        str, typer.Option(help="Folder of kits on the devices; a device's is FOLDER/NAME-I.")
    ] = "/etc/privdec",
    state: Annotated[
        str, typer.Option(help="Folder of what peers write; a device's is STATE/NAME-I.")
    ] = "/var/lib/privdec",
    program: Annotated[str, typer.Option(help="Path of privdec on the devices.")] = "/opt/privdec/bin/privdec",
    authority: Annotated[Path | None, typer.Option(help="Certificate of your own authority (PEM).")] = None,
    authority_key: Annotated[Path | None, typer.Option(help="Key of that authority (PEM, without a password).")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over files that were changed by hand.")] = False,
    as_json: Json = False,
) -> None:
    """Make a kit for each device of a scenario.

    A kit is a folder with all that a device gets. Run it again after changes: what is there is kept, or brought up to
    date.
    """
    with starting():
        from flower_privdec.devices.kit import KitPlaces, deployed_root
        from flower_privdec.devices.kit import deploy as make_kits
        from flower_privdec.scenario import load_scenario

        loaded = load_scenario(scenario, settings or ())
    done = make_kits(
        loaded,
        out,
        KitPlaces(folder, state, program),
        root=deployed_root(scenario, settings or ()),
        authority=authority,
        authority_key=authority_key,
        replace_changed=replace,
    )
    if as_json:
        typer.echo(json.dumps(asdict(done), indent=2, default=str))
        return

    for kit in done.kits:
        changes = [f"{file} {what}" for file, what in kit.done.items() if what != "kept"]
        typer.echo(f"{kit.name}  {kit.address}  certificate until {kit.until}")
        typer.echo(f"  {kit.path}: {', '.join(changes) or 'nothing changed'}")
        for stray in kit.strays:
            typer.echo(f"  warning: {stray} is not of the kit, and would be copied with it", err=True)
    for note in done.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"copy each folder below {out}/devices to its own device; its README.md has the commands")
    if done.authority is not None:
        typer.echo(f"keep {done.authority}: who has its authority.key can make peers, so it is copied to no device")


def doctor(
    scenario: DevicesScenario,
    number: Annotated[
        int | None,
        typer.Option(
            "--id",
            min=0,
            metavar="I",
            help="Number of this peer, from 0.",
            show_default="that of the kit",
            envvar="PRIVDEC_ID",
        ),
    ] = None,
    out: PeerFolder = None,
    certificates: PeerCertificates = Path("certs"),
    data: PeerData = None,
    listen: PeerListen = None,
    environment: Annotated[
        Path | None,
        typer.Option("--env", help="The kit's environment file.", show_default="peer.env beside the scenario"),
    ] = None,
    small: Annotated[
        bool,
        typer.Option(
            "--small", help="As `privdec peer --small` runs.", show_default="without torch", envvar="PRIVDEC_SMALL"
        ),
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Look at everything that a peer needs on this device.

    Changes nothing and charges nothing. Exits with 1 if something is an error.
    """
    with starting():
        from flower_privdec.devices.doctor import ERROR, ExaminedDevice, examine, read_environment, report_lines
        from flower_privdec.devices.kit_texts import ENVIRONMENT
        from flower_privdec.devices.kit_texts import SCENARIO as KIT_SCENARIO
        from flower_privdec.scenario import load_scenario

        if scenario.is_dir():  # a kit
            scenario /= KIT_SCENARIO
        kit = read_environment(environment or scenario.parent / ENVIRONMENT)
        if small or kit.get("PRIVDEC_SMALL", "no").lower() in ("yes", "true", "1", "on") or not has_torch():
            use_small()
        if out is None and "PRIVDEC_OUT" in kit:
            out = Path(kit["PRIVDEC_OUT"])
        if listen is None:
            listen = kit.get("PRIVDEC_LISTEN") or None
        if data is None:
            data = kit.get("PRIVDEC_DATA") or None
        if certificates == Path("certs") and "PRIVDEC_CERTS" in kit:
            certificates = Path(kit["PRIVDEC_CERTS"])
        if number is None:
            number = _number_of(kit)
        loaded = load_scenario(scenario, settings or ())

    folder = out or Path("peers") / f"{loaded.name}-{number}"
    made_by = os.environ.get("PRIVDEC_KIT") or kit.get("PRIVDEC_KIT")
    findings = examine(ExaminedDevice(loaded, number, folder, certificates, data, made_by, listen))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in findings], indent=2, ensure_ascii=False))
    else:
        for line in report_lines(findings):
            typer.echo(line)
    status = FAILED if any(one.level == ERROR for one in findings) else FINISHED
    raise typer.Exit(status)


def _number_of(kit: Mapping[str, str]) -> int:
    """Return the number of a kit's peer.

    Raises:
        ScenarioError: its environment file does not say it.
    """
    text = kit.get("PRIVDEC_ID", "")
    if not text.isdecimal():
        raise ScenarioError(
            "--id is missing: give the number of this device's peer, as --id 0, or the folder of its kit, whose "
            "peer.env says it",
            code="doctor.no-id",
        )
    return int(text)


DEVICE_COMMANDS = (deploy, doctor)
