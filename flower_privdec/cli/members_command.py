"""`privdec members`: changes of a federation that runs, which its authority signs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flower_privdec.cli.typer_parts import Json, ScenarioFile, Settings

if TYPE_CHECKING:
    from flower_privdec.network.members import Operator
    from flower_privdec.pushsum.membership import Members
    from flower_privdec.scenario.sections import Membership


class Change(StrEnum):
    """What `privdec members` does."""

    LIST = "list"
    ADD = "add"
    LEAVE = "leave"
    RENEW = "renew"
    REVOKE = "revoke"
    ADDRESS = "address"
    EXTEND = "extend"
    MERGE = "merge"


# The options that a change needs, and those that it may have.
NEEDS: dict[Change, tuple[set[str], set[str]]] = {
    Change.LIST: (set(), {"--json"}),
    Change.ADD: ({"--address"}, {"--identity", "--offline"}),
    Change.LEAVE: ({"--id"}, {"--offline"}),
    Change.RENEW: ({"--id"}, {"--only", "--offline"}),
    Change.REVOKE: ({"--id"}, {"--offline"}),
    Change.ADDRESS: ({"--id", "--address"}, {"--offline"}),
    Change.EXTEND: ({"--rounds"}, {"--offline"}),
    Change.MERGE: (set(), {"--from"}),
}


def members(
    scenario: ScenarioFile,
    change: Annotated[
        Change, typer.Argument(metavar="CHANGE", help=f"One of {', '.join(Change)}.", show_default=False)
    ] = Change.LIST,
    number: Annotated[int | None, typer.Option("--id", min=0, metavar="I", help="Number of the peer.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="add, address: where the others reach it.")
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="add: the DNS name of its certificate.", show_default="peer-I.NAME"),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="renew: certificates of before count no more; somebody may have their key.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help="extend: how many rounds the run has from now on, in all.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="merge: the list in a peer's folder.", show_default="that of the peers that run"),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no peer which list it has, before a change is signed.")
    ] = False,
    certificates: Annotated[
        Path, typer.Option("--certs", help="Folder that `privdec certs` wrote, with the list.")
    ] = Path("certs"),
    authority_key: Annotated[
        Path | None,
        typer.Option(help="Key of the authority (PEM, without a password).", show_default="CERTS/authority.key"),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Change who the peers of a running federation are.

    The changes are one list, which the authority signs and the peers pass on. Peers that run are asked which list they
    have: one that is signed on an older copy is refused by all.
    """
    from flower_privdec.scenario.loading import load_membership

    given = {
        "--id": number is not None,
        "--address": address is not None,
        "--identity": identity is not None,
        "--only": only,
        "--rounds": rounds is not None,
        "--from": source is not None,
        "--offline": offline,
        "--json": as_json,
    }
    needed, allowed = NEEDS[change]
    missing = sorted(name for name in needed if not given[name])
    stray = sorted(name for name, is_given in given.items() if is_given and name not in needed | allowed)
    if missing or stray:
        wrong = f"needs {' and '.join(missing)}" if missing else f"has no {' or '.join(stray)}: leave it out"
        raise typer.BadParameter(f"{change} {wrong}")

    loaded = load_membership(scenario, settings or ())
    if change == Change.LIST:
        _show(loaded, certificates, as_json)
        return

    from flower_privdec.network.members import Operator

    operator = Operator(loaded, certificates, authority_key)
    if change == Change.MERGE:
        _merge(operator, certificates, source)
        return

    if not offline:
        shut_out = None
        if change == Change.REVOKE:
            shut_out = number
        _catch_up(operator, certificates, shut_out)
    if change == Change.ADD:
        assert address is not None
        _add(operator, scenario, settings or [], certificates, address, identity)
        return

    if change == Change.EXTEND:
        assert rounds is not None
        _extend(operator, scenario, settings or [], certificates, rounds)
        return

    assert number is not None
    if change == Change.RENEW:
        _renew(operator, certificates, number, only)
    elif change == Change.REVOKE:
        entry, problem = operator.revoke(number, _leaving_check(scenario, settings or []))
        _say(entry.says(), certificates)
        if problem:
            typer.echo(f"warning: of those who are left: {problem}", err=True)
    elif change == Change.LEAVE:
        _say(operator.leave(number, _leaving_check(scenario, settings or [])).says(), certificates)
    else:
        assert address is not None
        _say(operator.change("address", number, address=address).says(), certificates)


def _catch_up(operator: Operator, certificates: Path, without: int | None) -> None:
    """Take what is new in the peers' lists, and say if none of them could be asked."""
    asked = operator.catch_up(without)
    if asked.taken:
        typer.echo(f"took {asked.taken} entries that the peers have and {certificates / 'members'} lacked")
    for difference in asked.other:
        typer.echo(f"warning: {difference}; it takes no entry that is signed here", err=True)
    if asked.silent and not asked.answered:
        why = "; ".join(asked.silent.values())
        typer.echo(
            f"warning: no peer said which list it has ({why}). If {certificates / 'members'} is older than theirs, "
            "they refuse this entry: once a peer runs, see `members` in its `privdec status`, and take their list by "
            "`privdec members SCENARIO merge` if it does",
            err=True,
        )


def _merge(operator: Operator, certificates: Path, source: Path | None) -> None:
    """Take the peers' list in place of the own one, and say what has to be signed again."""
    made = certificates / "members"
    asked = operator.merge(source)
    for one in asked.dropped:
        typer.echo(f"not in the peers' list, so no peer goes by it; sign it again if it is to be: {one}")
    if asked.dropped:
        typer.echo(f"the list of before is kept beside {made}")
    if not (asked.taken or asked.dropped):
        typer.echo(f"{made}: has all that the peers have")
        return
    typer.echo(f"{made}: is the peers' list now, with {asked.taken} entries that it lacked")


def _graph_check(scenario: Path, settings: list[str]) -> Callable[[Members], None]:
    """Return what refuses members with whom a scenario's run could not go on."""

    def check(members: Members) -> None:
        from flower_privdec.network.joining import check_graph
        from flower_privdec.scenario import load_scenario

        check_graph(load_scenario(scenario, settings), members)

    return check


def _leaving_check(scenario: Path, settings: list[str]) -> Callable[[Members], None]:
    """Return what refuses members who could not go on without one that leaves."""

    def check(members: Members) -> None:
        from flower_privdec.network.joining import check_who_is_left
        from flower_privdec.scenario.loading import load_for_network
        from flower_privdec.scenario.sections import Scenario

        loaded = load_for_network(scenario, settings)
        # The peers of an app keep their graph, in which who left is passed over.
        if isinstance(loaded, Scenario):
            check_who_is_left(loaded, members)

    return check


def _add(
    operator: Operator,
    scenario: Path,
    settings: list[str],
    certificates: Path,
    address: str,
    identity: str | None,
) -> None:
    from flower_privdec.network.transport.tls import files_of

    entry = operator.add(address, identity, _graph_check(scenario, settings))
    number = entry.change["peer"]
    made, key, authority = files_of(certificates, number)
    typer.echo(
        f"made {made} and {key}: the new device gets these, {authority}, the list and the scenario, and runs "
        f"`privdec peer {scenario} --id {number} --data FILE`"
    )
    _say(entry.says(), certificates)


def _extend(operator: Operator, scenario: Path, settings: list[str], certificates: Path, rounds: int) -> None:
    from flower_privdec.network.joining import check_rounds
    from flower_privdec.scenario import load_scenario

    loaded = load_scenario(scenario, settings)
    check_rounds(loaded)
    _say(operator.extend(rounds).says(), certificates)
    if loaded.private is not None:
        typer.echo(
            "their noise stays, so ε grows: each peer takes those of the further rounds that its owner's bound covers "
            "(`privdec peer --max-epsilon`; without it privacy.epsilon), and in the others only mixes"
        )
    typer.echo("a peer that is done and has ended is started again by the same command, once it has the list")


def _renew(operator: Operator, certificates: Path, peer: int, only: bool) -> None:
    from flower_privdec.network.transport.tls import files_of

    entry = operator.renew(peer, only)
    made, key, _ = files_of(certificates, peer)
    typer.echo(f"made {made} and {key}: put both in place of the old ones on the device, which takes them up by itself")
    if entry is not None:
        _say(entry.says(), certificates)


def _say(done: str, certificates: Path) -> None:
    made = certificates / "members"
    typer.echo(done)
    typer.echo(f"{made}: copy it into the folder of certificates of one peer that runs; the peers pass it on")


def _show(scenario: Membership, certificates: Path, as_json: bool) -> None:
    """Show the list, once it is verified."""
    from flower_privdec.network.members import read_members

    found = read_members(scenario, certificates)
    if as_json:
        typer.echo(b"[%s]" % b",".join(entry.line.strip() for entry in found.entries))
        return

    addresses = [one.address for one in scenario.network.peers or ()]
    for member in found.members.all:
        state = "takes part"
        if member.left:
            state = f"left by entry {member.left}"
        elif member.revoked:
            state = f"shut out by entry {member.revoked}"
        where = member.address
        if where is None:
            where = addresses[member.number] or "dials out" if addresses else "this machine"
        typer.echo(f"{member.number:>4}  {member.identity}  {where}  {state}")
    for entry in found.entries:
        typer.echo(f"entry {entry.number}: {entry.says()}")
    typer.echo(f"{len(found.entries)} entries, signed by the authority; hash {found.head[:16]}")
