"""A running peer's status: requested over the TLS by which peers know each other, and in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import epsilon_text, number, printable, shown
from flower_privdec.network.transport.failures import identity_at
from flower_privdec.network.transport.streams import StreamConnection
from flower_privdec.network.transport.tls import Credentials, files_of, identities_of
from flower_privdec.peer.driving import Content
from flower_privdec.pushsum.membership import MOST_ENTRIES

STATUS_REQUEST = b"privdec status"  # a call that any peer of the scenario may make
MEMBERS_REQUEST = b"privdec members "  # another: the list of members after the entry whose number follows
REQUEST_SECONDS = 5.0
STATUS_CAP = 1 << 20  # bytes of a status
Status = Mapping[str, Any]
Call = Callable[[Content, float], memoryview]


def request_status(call: Call, seconds: float) -> dict[str, Any]:
    """Return the status of the peer that a call goes to.

    Args:
        call: makes a call; see Connection.
        seconds: to wait at most.

    Raises:
        RunError: it does not answer, or with something else.
    """
    answer = bytes(call([STATUS_REQUEST], seconds))
    try:
        status = json.loads(answer)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise RunError(
            f"the peer answers {shown(answer, 60)}, which is not a status; is it another version?",
            code="status.unreadable",
        )
    return status


def members_request(height: int) -> bytes:
    """Return the call for what follows the first entries of the list of members, so many as the caller has."""
    return MEMBERS_REQUEST + b"%d" % height


def requested_height(content: memoryview) -> int | None:
    """Return after which entry of the list of members a call asks to go on; None if it asks for something else."""
    longest = len(members_request(MOST_ENTRIES))
    if len(content) > longest:
        return None
    name, asks, height = bytes(content).partition(MEMBERS_REQUEST)
    if name or not asks or not height.isdigit():
        return None
    return int(height)


def status_line(status: Status) -> str:
    """Return a status in a line."""
    insecure = "  INSECURE seeds" if is_insecure(status) else ""
    traffic = f"sent {status['bytes_sent']:,} B  received {status['bytes_received']:,} B"
    progress = f"round {status['round']}/{status['rounds']}  loss {number(status['loss'])}  ε {spent_text(status)}"
    waits = f"  waits for {status['waits_for']}" if status["waits_for"] else ""
    small = "  small (NumPy)" if status.get("small") else ""
    return f"peer {status['peer']}  {progress}{waits}  {neighbours_text(status)}  {traffic}{small}{insecure}"


def is_insecure(status: Status) -> bool:
    """Return whether the peer's noise follows from the scenario's seed."""
    return str(status["noise"]).startswith("INSECURE")


def spent_text(status: Status) -> str:
    """Return ε spent, and of which budget."""
    if status["budget"] is None:
        budget = ""
    else:
        budget = f" of {epsilon_text(status['budget'])}"
    larger = status.get("epsilon_if_all_collude")
    others = ""
    if larger is not None:
        others = f" with {status['colluding']} colluding ({epsilon_text(larger)} if all others collude)"
    return f"{epsilon_text(status['epsilon'])}{budget}{others}"


def neighbours_text(status: Status) -> str:
    """Return how many neighbours are up, which are down, and which have not reported since the peer started."""
    neighbours = status["neighbours"]
    down = status["down"]
    unheard = status["unheard"]
    up = len([one for one in neighbours if one not in unheard and str(one) not in down])
    lists = {"down": down, "not yet heard": [str(one) for one in unheard if str(one) not in down]}
    return f"{up}/{len(neighbours)} neighbours up" + "".join(
        f"  {name}: {', '.join(peers)}" for name, peers in lists.items() if peers
    )


def status_of(address: str, certificates: Path, peer: int, as_json: bool) -> str:
    """Return the status of a running peer.

    Args:
        address: HOST:PORT where it listens.
        certificates: a folder with certificates.
        peer: whose certificate to show.

    Returns:
        In lines or as JSON.

    Raises:
        ScenarioError: the certificate cannot be read.
        RunError: nothing answers there, or something that is not a peer.
    """
    paths = files_of(certificates, peer)
    names = identities_of(paths[0].read_bytes()) if paths[0].is_file() else []
    credentials = Credentials.read(*paths, names[0] if names else f"peer-{peer}")
    connection = StreamConnection(address, identity_at(address, credentials), credentials, STATUS_CAP)
    try:
        status = request_status(connection.call, REQUEST_SECONDS)
        return json.dumps(status, indent=2) if as_json else _status_text(status)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"{address} answers {shown(status, 60)}, which is not a status; is it another version?",
            code="status.unreadable",
        ) from error
    finally:
        connection.close()


def _status_text(status: Mapping[str, Any]) -> str:
    down = [f"down: {why}" for why in status["down"].values()]
    down += [f"quarantined: peer {peer}: {why}" for peer, why in status["quarantined"].items()]
    members = status.get("members", {})
    if members.get("entries"):
        down.append(f"members: entry {members['entries']} is the last of the list")
    if members.get("problem"):
        down.append(members["problem"])
    down += members.get("not_followed", [])
    left_out = [f"shares no noise with peer {peer} since round {k}" for peer, k in status.get("left_out", {}).items()]
    charged = []
    if status.get("charged_for_lost"):
        charged = [f"charged in place of lost lines of its ledger: {status['charged_for_lost']}"]
    lines = [f"{status['name']}: {status_line(status)}", *down, *left_out, *charged, f"noise: {status['noise']}"]
    return "\n".join(map(printable, lines))  # of another process
