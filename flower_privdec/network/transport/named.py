"""The transport that a scenario names, built-in or a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flower_privdec.common.catalogue import TRANSPORTS
from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.user_code import load_own, users_code
from flower_privdec.network.transport.tls import Credentials, identities
from flower_privdec.network.transport.transport import EventTransport, Transport
from flower_privdec.scenario.sections import HasPeers

METHODS = ("serve", "connect", "close")
EVENT_METHODS = ("listen", "connect", "turn", "wake", "close")


def transport_of(
    scenario: HasPeers,
    peer: int,
    addresses: Sequence[str | None],
    credentials: Credentials,
    names: Sequence[str] | None = None,
    listen: str | None = None,
) -> Transport | EventTransport:
    """Return the transport of a peer that its scenario names; it listens to nothing yet.

    Args:
        addresses: HOST:PORT of every peer, None for one that only dials out.
        credentials: the peer's own.
        names: the identities of all peers; by default the scenario's.
        listen: HOST:PORT that the peer listens on; left out, its address. Only then is a transport given it.

    Raises:
        ScenarioError: there is no such transport, or a user's own cannot be built.
    """
    name = scenario.network.transport
    part = transport_class(name)
    with users_code(f"network.transport={name!r} could not be built", code="code.fails"):
        apart = {} if listen is None else {"listen": listen}
        transport: Transport | EventTransport = part(
            peer, addresses, names or identities(scenario), credentials, **apart
        )
    return transport


def transport_class(name: str) -> Any:
    """Return the class of a transport, by its name or as `package.module:Name`.

    Raises:
        ScenarioError: there is none, or it lacks a method.
    """
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if ":" not in name:  # of a scenario that was changed in Python, which nothing validates
        raise ScenarioError(
            f"network.transport={name!r} must be one of {', '.join(TRANSPORTS)}, or your own, as package.module:Name",
            code="network.transport",
        )

    def accepts(part: Any) -> bool:
        kinds = (METHODS, EVENT_METHODS)
        return callable(part) and any(all(hasattr(part, method) for method in methods) for methods in kinds)

    return load_own(
        name, "network.transport", accepts=accepts, must_be="a class with the methods serve, connect and close"
    )
