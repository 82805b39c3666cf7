"""`privdec members`: changes of a federation that runs, which its authority signs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flower_privdec.cli.typer_parts import Command, CommandGroup, Json, ScenarioFile, Settings

if TYPE_CHECKING:
    from flower_privdec.network.members import Operator
    from flower_privdec.pushsum.membership import MemberEntry

members_app = typer.Typer(
    help="Change who the peers of a running federation are, by a list that its authority signs.",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)
command = partial(members_app.command, cls=Command)

Certificates = Annotated[Path, typer.Option("--certs", help="Folder that `privdec certs` wrote, with the list.")]
Number = Annotated[int, typer.Option("--id", min=0, metavar="I", help="Number of the peer.")]
Key = Annotated[
    Path | None, typer.Option("--authority-key", help="Key of the authority (PEM).", show_default="CERTS/authority.key")
]
AddressOption = Annotated[str, typer.Option("--address", metavar="HOST:PORT", help="Where the others reach it.")]


def _operator(scenario: Path, settings: list[str] | None, certificates: Path, key: Path | None) -> Operator:
    from flower_privdec.network.members import Operator
    from flower_privdec.scenario.loading import load_membership

    return Operator(load_membership(scenario, settings or ()), certificates, key)


def _say(entry: MemberEntry, certificates: Path) -> None:
    typer.echo(f"entry {entry.number}: {entry.says()}")
    made = certificates / "members"
    typer.echo(f"{made}: copy it into the folder of certificates of one peer that runs; the peers pass it on")


@command()
def revoke(
    scenario: ScenarioFile,
    number: Number,
    certificates: Certificates = Path("certs"),
    settings: Settings = None,
    authority_key: Key = None,
) -> None:
    """Shut a peer out: its certificates count no more."""
    _say(_operator(scenario, settings, certificates, authority_key).change("revoke", number), certificates)


@command()
def address(
    scenario: ScenarioFile,
    number: Number,
    host_and_port: AddressOption,
    certificates: Certificates = Path("certs"),
    settings: Settings = None,
    authority_key: Key = None,
) -> None:
    """Give a peer another address."""
    operator = _operator(scenario, settings, certificates, authority_key)
    entry = operator.change("address", number, address=host_and_port)
    _say(entry, certificates)


@command()
def renew(
    scenario: ScenarioFile,
    number: Number,
    only: Annotated[
        bool, typer.Option("--only", help="Certificates of before count no more: their key may be known to others.")
    ] = False,
    certificates: Certificates = Path("certs"),
    settings: Settings = None,
    authority_key: Key = None,
) -> None:
    """Make a peer a new certificate, which it takes up while it runs."""
    from flower_privdec.network.transport.tls import files_of

    entry = _operator(scenario, settings, certificates, authority_key).renew(number, only)
    made, key, _ = files_of(certificates, number)
    typer.echo(f"made {made} and {key}: put both in place of the old ones on the device, which takes them up by itself")
    if entry is not None:
        _say(entry, certificates)


@command(name="list")
def list_members(
    scenario: ScenarioFile,
    certificates: Certificates = Path("certs"),
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Verify the list, and show who the peers are."""
    import json

    from flower_privdec.network.members import read_members
    from flower_privdec.scenario.loading import load_membership

    loaded = load_membership(scenario, settings or ())
    found = read_members(loaded, certificates)
    if as_json:
        typer.echo(b"[%s]" % b",".join(entry.line.strip() for entry in found.entries))
        return
    addresses = [one.address for one in loaded.network.peers or ()]
    for member in found.members.all:
        state = "takes part"
        if member.left:
            state = f"left by entry {member.left}"
        elif member.revoked:
            state = f"shut out by entry {member.revoked}"
        scenarios = addresses[member.number] if member.number < len(addresses) else "this machine"
        typer.echo(f"{member.number:>4}  {member.identity}  {member.address or scenarios}  {state}")
    for entry in found.entries:
        typer.echo(f"entry {entry.number}: {entry.says()}")
    typer.echo(f"{len(found.entries)} entries, all signed by the authority; the last is {json.dumps(found.head[:16])}")
