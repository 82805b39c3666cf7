"""Session keys of all peers and how far each peer is, passed on from neighbour to neighbour.

Two peers that share noise need each other's public key, not a link. So each process of a peer makes a *key record*: its
public key and a counter, signed by the identity that its neighbours know it by. They check it, keep it and pass it on,
and so do theirs. From then on any two peers of a connected network have a secret, whoever carried their keys:

    record     peer, counter, public key, signature, certificates
    signed     PURPOSE, the run, and all of these but the last two

A peer keeps one record of each other peer, the one with the highest counter. A process begins with counter 1. If
neighbours bring a record of this very peer with another key and no lower counter, which an earlier process has left, it
signs its key again with a higher counter. So the last process of a peer counts, with nothing on disk and no clock.

Beside the records travels *presence*: for each peer its heartbeat, its counter plus its round, which grows with both.
It is not signed. From how far each partner is follows with whom noise is shared, near or far (`attendance`):
`begin_round` decides that, for a whole round. If somebody is gone, it also decides what own noise this peer promises to
add, and on which promises of others it counts (`promises`).

The attacker is a member: a neighbour, or one farther away. It may

- *forge* a record, or bring one of a stranger, of another run, or with an expired or foreign certificate. Such a record
  is dropped, and named in the log and the status. The call that brought it counts: an honest neighbour may trust an
  authority that this peer does not.
- *replay* an old record. A newer one replaces it, and is never replaced by it. If only the old one is known, the two
  peers draw different noise, which costs accuracy.
- *withhold* records or presence, or call a gone peer present. Noise then stays in the sum: that costs accuracy. A peer
  accounts only for its own noise and that of its partners, so no ε depends on what others believe.
- *flood*. One record of each peer is kept, each neighbour is sent one of a peer every `again` seconds, and a neighbour
  is not listened to about a peer once it brought MOST_REFUSED wrong records of it.
- *copy* another peer's public key into its own record. The secret is derived from both names too, and only the owner of
  the key and the peer that meets it can derive it.

Each side uses a draw once, whatever is replayed: the key of a draw follows from this process's own private key, and
within a process a step that is taken again shares no draw (`privacy.noise.kinds.pair_noise`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flower_privdec.pushsum.attendance import Attendance
from flower_privdec.pushsum.promises import (
    LASTS,
    UNITS,
    NoisePlan,
    OwnPromise,
    Promise,
    PromiseBook,
    Promises,
    signed_promise,
)

if TYPE_CHECKING:
    from flower_privdec.privacy.noise.agreed import SessionSecrets

_log = logging.getLogger(__name__)

PURPOSE = b"flower_privdec session key 1"
MOST_COUNTER = 2**62  # of a record: there is room for rounds above it
MOST_REFUSED = 4  # records of one peer that one neighbour may bring in vain
RECORDS_AT_ONCE = 2**16  # bytes of records in a call; one that is larger is sent by itself
HEARTBEAT = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The public key of a peer's process, signed by the peer's identity.

    Attributes:
        peer: whose.
        counter: higher than those of the peer's earlier processes.
        public: the key, 32 bytes.
        signature: of the peer's identity, see `signed_content`.
        certificates: by which others check the signature; see `Signatures`.
    """

    peer: int
    counter: int
    public: bytes
    signature: bytes = b""
    certificates: bytes = b""


@dataclass(frozen=True)
class KeyRecords:
    """Key records that one neighbour passes on to another.

    Attributes:
        sender, receiver: peers.
        records: by ascending peer, at most one of each.
    """

    sender: int
    receiver: int
    records: tuple[KeyRecord, ...]


@dataclass(frozen=True)
class Presence:
    """How far all peers are, as far as the sender knows.

    Attributes:
        sender, receiver: peers.
        heartbeats: of each peer its counter plus its round, as HEARTBEAT; 0 if it is not known.
    """

    sender: int
    receiver: int
    heartbeats: bytes


class Signatures(Protocol):
    """Signs a peer's key records, and checks those of others."""

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        """Return this peer's signature of some bytes, and the certificates by which others check it."""

    def problem(self, peer: int, content: bytes, signature: bytes, certificates: bytes) -> str | None:
        """Return why a signature is not that of a peer of this run now; None if it is."""

    def is_expired(self, certificates: bytes) -> bool:
        """Return whether certificates that were good once are not valid any more."""


class Unsigned:
    """No signatures, for peers of one process, which believe each other; see Signatures."""

    def sign(self, content: bytes) -> tuple[bytes, bytes]:
        return b"", b""

    def problem(self, peer: int, content: bytes, signature: bytes, certificates: bytes) -> str | None:
        return None

    def is_expired(self, certificates: bytes) -> bool:
        return False


def signed_content(run: bytes, record: KeyRecord) -> bytes:
    """Return what the signature of a record is of.

    It begins with a purpose, so that no signature of a handshake, which has another, can be taken for one of a record.
    """
    parts = (PURPOSE, run, record.peer.to_bytes(4, "little"), record.counter.to_bytes(8, "little"), record.public)
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class Roster:
    """The key records and the presence of all peers, as one process knows them; any thread may call it.

    Args:
        peer: its number.
        n_peers: of the run.
        neighbours: whom it passes them on to.
        run: bytes that all peers of the run have in common, and no other run has.
        secrets: the secrets that the keys are for; its own public key is the record's.
        signatures: sign and check records.
        last_round: of the run.
        round_index: the round in which this process begins.
        again: seconds after which another record of one peer is sent to a neighbour, at the least.
        news: see Attendance.
        plan: says what own noise is worth promising; None if nothing is ever promised.
        steps_per_round: of the run.

    Attributes:
        records: the newest of each peer, its own among them.
        attendance: with which partners noise is shared.
        refused: by peer, why the last record of it that was brought in vain was refused, and who brought it.
    """

    def __init__(
        self,
        peer: int,
        n_peers: int,
        neighbours: Iterable[int],
        run: bytes,
        secrets: SessionSecrets,
        signatures: Signatures,
        last_round: int,
        round_index: int = 0,
        again: float = 1.0,
        news: int = 0,
        plan: NoisePlan | None = None,
        steps_per_round: int = 1,
    ) -> None:
        self.peer = peer
        self.attendance = Attendance(peer, secrets.partners, news)
        self.refused: dict[int, str] = {}
        self._run = run
        self._secrets = secrets
        self._signatures = signatures
        self._last_round = last_round
        self._round = round_index
        self._again = again
        self._lock = Lock()

        self._plan = plan
        self._steps_per_round = steps_per_round
        self._own_promise = OwnPromise((LASTS + 2 * news) * steps_per_round)
        self._promised = 0  # how often

        # By peer: the counter of its record, and its heartbeat.
        self.records: dict[int, KeyRecord] = {}
        self._learned: dict[int, KeyRecord] = {}  # records whose keys the secrets have
        self._counters = np.zeros(n_peers, np.int64)
        self._heartbeats = np.zeros(n_peers, np.int64)
        self._version = 0  # of the heartbeats

        self._told = {j: Told(n_peers) for j in neighbours if j != peer}
        self._book = PromiseBook(self._told.keys())
        self._failures: dict[tuple[int, int], int] = {}  # records in vain, by who brought them and whose they were
        self._sign(1)

    def _sign(self, counter: int) -> None:
        """Make this process's record, in place of one of its own with a lower counter."""
        record = KeyRecord(self.peer, counter, self._secrets.public)
        signature, certificates = self._signatures.sign(signed_content(self._run, record))
        self._keep(replace(record, signature=signature, certificates=certificates))
        self._heartbeats[self.peer] = counter + self._round
        for told in self._told.values():
            told.sent_at.pop(self.peer, None)

    def sign_again(self, signatures: Signatures) -> None:
        """Sign the key again, by a certificate that was renewed: the key stays, and all that is drawn by it."""
        with self._lock:
            self._signatures = signatures
            self._sign(min(self.records[self.peer].counter + 1, MOST_COUNTER))

    def _keep(self, record: KeyRecord) -> None:
        """Keep a record, which goes to every neighbour that does not have it."""
        peer = record.peer
        known = self.records.get(peer)
        if known is not None and known.public != record.public:
            self._book.forget(peer)
        self.records[peer] = record
        self._counters[peer] = record.counter
        self._heartbeats[peer] = max(record.counter, int(self._heartbeats[peer]))
        self._version += 1

    # --- what comes ---

    def meet(self, neighbour: int, boot: int) -> None:
        """Record which process of a neighbour sent a message: a new one has none of what the one before was sent."""
        with self._lock:
            if self._told[neighbour].boot != boot:
                self._told[neighbour] = Told(len(self._counters), boot)
                self._book.meet(neighbour)

    def receive(self, message: KeyRecords | Presence | Promises) -> None:
        """Take in what a neighbour passes on; what is wrong with a record is in `refused`."""
        with self._lock:
            if isinstance(message, Presence):
                self._receive_presence(message)
                return
            if isinstance(message, Promises):
                for promise in message.promises:
                    self._receive_promise(message.sender, promise)
                return
            for record in message.records:
                self._receive_record(message.sender, record)

    def _receive_record(self, neighbour: int, record: KeyRecord) -> None:
        peer = record.peer
        known = self.records.get(peer)
        is_own = peer == self.peer
        if known is not None:
            is_same = record.public == known.public
            is_new = not is_same if is_own else record.counter > known.counter
            if not is_new:
                # Of two with one counter, a neighbour that has the other is still to learn of this one.
                if is_same or record.counter < known.counter:
                    self._told[neighbour].note(record)
                return

        why = self._problem(neighbour, record)
        if why is not None:
            self._refuse(neighbour, peer, why)
            return

        if not is_own:
            self._told[neighbour].note(record)
            self._keep(record)
            return

        # It is of a process before this one, whose heartbeats may have come up to its last round.
        assert known is not None
        most = record.counter + self._last_round
        if most >= known.counter:
            self._sign(min(most + 1, MOST_COUNTER))

    def _problem(self, neighbour: int, record: KeyRecord) -> str | None:
        """Return why a record does not count; None if it does."""
        if self._failures.get((neighbour, record.peer), 0) >= MOST_REFUSED:
            return "others that it brought were wrong"
        content = signed_content(self._run, record)
        return self._signatures.problem(record.peer, content, record.signature, record.certificates)

    def _refuse(self, neighbour: int, peer: int, why: str) -> None:
        failures = self._failures.get((neighbour, peer), 0) + 1
        self._failures[neighbour, peer] = failures
        if failures <= MOST_REFUSED:
            self.refused[peer] = f"the session key of peer {peer} that peer {neighbour} brought does not count: {why}"
            _log.warning("%s", self.refused[peer])

    def _receive_promise(self, neighbour: int, promise: Promise) -> None:
        record = self.records.get(promise.peer)
        if record is None or promise.peer == self.peer:
            return

        def problem(promise: Promise) -> str | None:
            content = signed_promise(self._run, promise)
            return self._signatures.problem(promise.peer, content, promise.signature, record.certificates)

        why = self._book.take(neighbour, promise, record.public, problem)
        if why:
            _log.warning(
                "what peer %d is said to have promised by peer %d does not count: %s", promise.peer, neighbour, why
            )

    def _receive_presence(self, message: Presence) -> None:
        """Merge heartbeats; those of processes whose records are not here, or are of the past, do not count."""
        heard = np.frombuffer(message.heartbeats, HEARTBEAT)
        rounds = heard - self._counters
        grows = (heard > self._heartbeats) & (self._counters > 0) & (rounds <= self._last_round)
        grows[self.peer] = False
        if grows.any():
            self._heartbeats[grows] = heard[grows]
            self._version += 1

    # --- what is sent ---

    def _due(self, neighbour: int, now: float) -> list[int]:
        """Return whose records are to be sent to a neighbour by now."""
        told = self._told[neighbour]
        lacking = np.flatnonzero(self._counters > told.counters).tolist()
        return [peer for peer in lacking if now >= told.sent_at.get(peer, -math.inf) + self._again]

    def has_records(self, neighbour: int, now: float) -> bool:
        """Return whether a neighbour is to be sent records by now."""
        with self._lock:
            return bool(self._due(neighbour, now))

    def records_for(self, neighbour: int, now: float) -> KeyRecords | None:
        """Return the records to send to a neighbour now, and later those that are left; None if there are none."""
        with self._lock:
            told = self._told[neighbour]
            told.sent_at = {peer: at for peer, at in told.sent_at.items() if now < at + self._again}
            records: list[KeyRecord] = []
            size = 0
            for peer in self._due(neighbour, now):
                record = self.records[peer]
                size += len(record.signature) + len(record.certificates) + len(record.public)
                if records and size > RECORDS_AT_ONCE:
                    break
                records.append(record)
                told.sent_at[peer] = now
        return KeyRecords(self.peer, neighbour, tuple(records)) if records else None

    def arrived(self, message: KeyRecords) -> None:
        """Record that a neighbour has the records that it was sent."""
        with self._lock:
            for record in message.records:
                self._told[message.receiver].note(record)

    def presence_for(self, neighbour: int) -> Presence | None:
        """Return what to say of all peers' heartbeats; None if the neighbour was told."""
        with self._lock:
            told = self._told[neighbour]
            if told.version == self._version:
                return None
            told.version = self._version
            return Presence(self.peer, neighbour, self._heartbeats.astype(HEARTBEAT).tobytes())

    def promises_for(self, neighbour: int) -> Promises | None:
        """Return which promises to pass on to a neighbour with the next message; None if there are none."""
        with self._lock:
            due = self._book.due(neighbour, self._round * self._steps_per_round)
        return Promises(self.peer, neighbour, due) if due else None

    # --- for the rounds ---

    @property
    def is_settled(self) -> bool:
        """Whether the keys of all partners have come, and every neighbour has this process's own."""
        own = self.records[self.peer].counter
        is_known = all(told.counters[self.peer] == own for told in self._told.values())
        return is_known and self._secrets.partners <= self.records.keys()

    def end_rounds(self, rounds: int) -> None:
        """Let the others know that this peer has taken the steps of all rounds: one that is late still shares them."""
        with self._lock:
            self._heartbeats[self.peer] = self._counters[self.peer] + rounds
            self._version += 1

    def begin_round(self, round_index: int, unreachable: Collection[int] = ()) -> None:
        """Settle which secrets are used in a round, whose steps are about to be taken.

        `unreachable` are neighbours that cannot be reached now.
        """
        with self._lock:
            self._round = round_index
            self._heartbeats[self.peer] = self._counters[self.peer] + round_index
            self._version += 1
            absent = self.attendance.begin_round(round_index, self._heard(), unreachable)
            new = [self.records[j] for j in sorted(self._secrets.partners & self.records.keys())]
            new = [record for record in new if self._learned.get(record.peer) is not record]

        for record in new:
            self._learned[record.peer] = record
            try:
                self._secrets.learn(record.peer, record.public)
            except ValueError as error:
                self._refuse(record.peer, record.peer, f"no secret can be made of it ({error})")
        expired = {j for j, one in self._learned.items() if self._signatures.is_expired(one.certificates)}
        self._secrets.absent = absent | expired
        self._secrets.left_out = dict(self.attendance.since)
        self._promise(self.attendance.gone | expired)
        self._count_promises()

    def _promise(self, gone: frozenset[int]) -> None:
        """Promise own noise for this round and some more, if that is worth it and is not promised yet."""
        if self._plan is None or not gone:
            return

        own = self._own_promise
        step = self._round * self._steps_per_round
        last = self._last_round * self._steps_per_round
        wanted = self._plan.worth_promising(self.peer, gone, step, step + own.lasts)
        if not own.renewed(step, wanted, last):
            return

        # Bound first, and told then: whatever happens between, it is kept.
        first, end = self._secrets.promise(own.first, own.end, own.level / UNITS)
        if first >= end:
            return
        self._promised += 1
        promise = Promise(self.peer, self._promised, self._secrets.public, first, end, own.level)
        signature, _ = self._signatures.sign(signed_promise(self._run, promise))
        with self._lock:
            self._book.keep(replace(promise, signature=signature))
        text = "peer %d promises %.3f of the noise that it would need by itself, for steps %d to %d, without peers %s"
        _log.info(text, self.peer, own.level / UNITS, first, end - 1, sorted(gone))

    def _count_promises(self) -> None:
        """Let the secrets know what partners have promised; it holds for keys that are learned."""
        with self._lock:
            newest = [one for one in self._book.newest.values() if one.peer in self._secrets.partners]
        for one in newest:
            self._secrets.hear(one.peer, one.public, one.first, one.end, one.level / UNITS)

    def _heard(self) -> dict[int, tuple[bytes, int]]:
        """Return the present key of each partner whose record has come, and how far it is."""
        rounds = (self._heartbeats - self._counters).tolist()
        return {j: (self.records[j].public, rounds[j]) for j in self._secrets.partners if j in self.records}

    def status(self) -> dict[str, Any]:
        """Return with how many partners noise is shared, who is left out since when, and which keys were refused."""
        secrets = self._secrets
        shared = [j for j in secrets.partners if secrets.knows(self.peer, j)]
        return {
            "partners": len(secrets.partners),
            "shares_noise_with": len(shared),
            "left_out": {str(peer): since for peer, since in sorted(secrets.left_out.items())},
            "refused_keys": {str(peer): why for peer, why in sorted(self.refused.items())},
        }


class Told:
    """What one process of a neighbour has been told.

    Attributes:
        boot: the process; 0 before the first message.
        counters: by peer, that of the newest record that it has; 0 for none.
        sent_at: by peer, when a record was sent to it lately.
        version: of the heartbeats that it was told; -1 for none.
    """

    def __init__(self, n_peers: int, boot: int = 0) -> None:
        self.boot = boot
        self.counters = np.zeros(n_peers, np.int64)
        self.sent_at: dict[int, float] = {}
        self.version = -1

    def note(self, record: KeyRecord) -> None:
        """Record that it has a record, or a newer one of the same peer."""
        self.counters[record.peer] = max(record.counter, int(self.counters[record.peer]))
