"""Peers of a ring of four that pass on session keys, presence and promises by hand."""

from __future__ import annotations

import hmac

from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.pushsum.promises import NoisePlan
from flower_privdec.pushsum.roster import KeyRecord, KeyRecords, Roster

ROUNDS = 100
RING = {0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (2, 0)}


class Named:
    """Signatures by a key that follows from the peer's number; a record of another peer fails."""

    def __init__(self, peer: int, size: int = 0) -> None:
        self.peer = peer
        self.size = size
        self.checked = 0
        self.expired = False

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        return hmac.digest(bytes([self.peer]), content, "sha256"), bytes(self.size)

    def problem(self, peer: int, content: bytes, signature: bytes, certificates: bytes) -> str | None:
        self.checked += 1
        return None if signature == hmac.digest(bytes([peer]), content, "sha256") else "its signature is wrong"

    def is_expired(self, certificates: bytes) -> bool:
        return self.expired


class Member:
    """One process of a peer of a ring of four, whose messages are carried by hand."""

    def __init__(
        self, peer: int, counter: int = 1, boot: int = 1, size: int = 0, plan: NoisePlan | None = None
    ) -> None:
        self.peer = peer
        self.boot = boot
        self.neighbours = RING[peer]
        self.signatures = Named(peer, size)
        others = set(RING) - {peer}
        self.secrets = AgreedSecrets([peer], b"run", [str(one) for one in RING], partners=others)
        keys = (b"run", self.secrets, self.signatures)
        self.roster = Roster(peer, len(RING), self.neighbours, *keys, ROUNDS, plan=plan)
        if counter > 1:
            self.roster._sign(counter)

    @property
    def record(self) -> KeyRecord:
        return self.roster.records[self.peer]

    def take(self, sender: int, *records: KeyRecord) -> None:
        self.roster.receive(KeyRecords(sender, self.peer, records))


def carry(members: dict[int, Member], one: int, other: int, now: float, *, is_lost: bool = False) -> None:
    """Let one member call a neighbour: records, how far all are, promises; a call may be lost on its way back."""
    caller = members[one].roster
    called = members[other].roster
    called.meet(one, members[one].boot)
    records = caller.records_for(other, now)
    presence = caller.presence_for(other)
    promises = caller.promises_for(other)
    for message in (records, presence, promises):
        if message is not None:
            called.receive(message)
    if records is not None and not is_lost:
        caller.arrived(records)


def spread(members: dict[int, Member], now: float = 0.0, times: int = 4) -> None:
    """Let all call all their neighbours, so often that what one has reaches all."""
    for turn in range(times):
        for one, member in members.items():
            for other in member.neighbours:
                if other in members:
                    carry(members, one, other, now + 10 * turn)


def ring(plan: NoisePlan | None = None) -> dict[int, Member]:
    return {peer: Member(peer, plan=plan) for peer in RING}


def begin(members: dict[int, Member], round_index: int) -> None:
    for member in members.values():
        member.roster.begin_round(round_index)
