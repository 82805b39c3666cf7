"""Which peer a node is and where it keeps what is its own: from the node's configuration, not from a message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context

from flower_privdec.errors import RunError
from flower_privdec.flower.apps.own import in_simulation
from flower_privdec.flower.mods.orders import Asked

FOLDER = "PRIVDEC_FOLDER"  # the environment's word on where a simulation's peers keep what is theirs
NODE_CONFIG = "--node-config 'partition-id=I num-partitions=N folder=\"FOLDER\"'"


@dataclass(frozen=True)
class PeerPlace:
    """A node's own place.

    Attributes:
        peer, n_peers: which it is, of how many.
        folder: where its state, ledger and identity lie.
        simulated: whether the node is one of a simulation.
        epsilon, delta: the budget that its owner sets, whatever the app says; ∞ and None where there is none.
        known_peers: the file of pinned keys, or None.
        address: HOST:PORT at which other peers can reach it; empty where they cannot.
        certificates: the folder with its certificate, as `privdec certs` makes it; None where it has none.
    """

    peer: int
    n_peers: int
    folder: Path
    simulated: bool
    epsilon: float
    delta: float | None
    known_peers: Path | None
    address: str = ""
    certificates: Path | None = None

    @classmethod
    def of(cls, context: Context, asked: Asked, folder: Path | None) -> PeerPlace:
        """Read a node's configuration.

        Args:
            folder: what the app gives in place of the node-config's `folder`.

        Raises:
            RunError: it does not say which peer it is, or where its things are kept; or the message is for another.
        """
        config, simulated = context.node_config, in_simulation()
        peer, total = (_whole(config.get(key), key) for key in ("partition-id", "num-partitions"))
        if not 0 <= peer < total:
            raise RunError(f"partition-id={peer} must be 0 to {total - 1}; start the SuperNode with {NODE_CONFIG}")
        if asked.peer not in (-1, peer):
            raise RunError(f"the message is for peer {asked.peer}, and this SuperNode is peer {peer}")
        own = config.get("folder", folder) or (asked.folder if simulated else None)
        if not own:
            raise RunError(f"this SuperNode must say where its state and ledger are kept: start it with {NODE_CONFIG}")
        given, certificates = config.get("known-peers"), config.get("certificates")
        return cls(
            peer,
            total,
            Path(str(own)).expanduser() / f"peer-{peer}",
            simulated,
            _number(config.get("epsilon"), "epsilon") or math.inf,
            _number(config.get("delta"), "delta"),
            None if given is None else Path(str(given)).expanduser(),
            "" if certificates is None else str(config.get("address", "")),
            None if certificates is None else Path(str(certificates)).expanduser(),
        )


def _whole(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RunError(f"{key}={value!r} must be a whole number; start the SuperNode with {NODE_CONFIG}")
    return value


def _number(value: object, key: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise RunError(f"{key}={value!r} of the node-config must be a number") from None
    if not number > 0:
        raise RunError(f"{key}={value!r} of the node-config must be > 0")
    return number


def safe_name(name: str) -> str:
    """Return a folder's name for a run, whatever that is called."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80].lstrip(".") or "run"
