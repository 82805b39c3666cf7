"""The section `network` of a scenario: where each peer is, by what certificate it is known, and how long to wait."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from flower_privdec.scenario.fields import Positive, Section

ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
CODEC_NAMES = ("exact", "float32", "bfloat16")  # see `pushsum.codec`
IDENTITY = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def _address(value: str) -> str:
    match = ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError("must be HOST:PORT, as 10.0.0.7:7100 or [::1]:7100")
    return value


def _identity(value: str) -> str:
    if not IDENTITY.fullmatch(value):
        raise ValueError("must be a DNS name in lower case, as peer-3.hospitals")
    return value


def _codec(value: str) -> str:
    if value not in CODEC_NAMES and ":" not in value:
        raise ValueError(f"must be one of {', '.join(CODEC_NAMES)}, or a class of your own, as package.module:Name")
    return value


Address = Annotated[str, AfterValidator(_address)]
Identity = Annotated[str, AfterValidator(_identity)]
CodecName = Annotated[str, AfterValidator(_codec)]


def is_loopback(address: str) -> bool:
    """Return whether an address HOST:PORT is one that only this machine reaches."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NetworkPeer(Section):
    """One peer of a network.

    Attributes:
        address: HOST:PORT at which the others reach it.
        identity: the DNS name that its certificate is for; left out, peer-I.NAME with the scenario's name.
    """

    address: Address
    identity: Identity | None = None


class NetworkSection(Section):
    """Where the peers of a network are, and how long they wait for each other.

    Attributes:
        mode: asynchronous, where a peer goes on without those who do not come in time; or synchronous, where everybody
            waits for its neighbours in every exchange, which gives the numbers of a simulation.
        peers: one for each peer, in the order of their numbers; left out, all are on this machine.
        codec: how rows look on the wire: exact, as they are; float32 or bfloat16, where push-sum shares are sent, whose
            rounding stays in the sender's mass; or a class of your own, `package.module:Name`. All peers use one.
        start: seconds that a peer waits for its first neighbours, which may have to be started yet.
        deadline: seconds that it waits for them later where it has to (synchronous: in each exchange; asynchronous:
            after its last round); what takes half as long to send is given up and sent again.
        retry: seconds until what was not answered is sent again.
        commit_every: in asynchronous mode, every how many rounds a peer puts its state on disk. Shares of push-sum
            leave at commits alone, so that peers exchange as often as they commit.
        hand_in: whether each peer leaves its model in its folder at every evaluation, for others to read, as `privdec
            up` does; left out, only where peers is left out too: all peers are on one machine then.
    """

    mode: Literal["asynchronous", "synchronous"] = "asynchronous"
    codec: CodecName = "exact"
    peers: list[NetworkPeer] | None = None
    start: Positive = 60.0
    deadline: Positive = 10.0
    retry: Positive = 1.0
    commit_every: Annotated[int, Field(ge=1)] = 1
    hand_in: bool | None = None

    @property
    def hands_in(self) -> bool:
        """Return whether peers leave their models for others to read."""
        return self.peers is None if self.hand_in is None else self.hand_in

    @model_validator(mode="after")
    def _one_each(self) -> NetworkSection:
        peers = self.peers or []
        for what, values in {
            "address": [peer.address for peer in peers],
            "identity": [peer.identity for peer in peers if peer.identity is not None],
        }.items():
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is that of two peers: give each its own")
        return self

    def identities(self, name: str, n_peers: int) -> list[str]:
        """Return the identity of every peer of a scenario.

        Args:
            name: of the scenario.
            n_peers: how many there are.
        """
        identities = [None] * n_peers if self.peers is None else [peer.identity for peer in self.peers]
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "scenario"
        return [identity or f"peer-{peer}.{plain}" for peer, identity in enumerate(identities)]
