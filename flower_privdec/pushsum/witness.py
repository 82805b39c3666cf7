"""Witnessed ledgers: neighbours remember how long a peer's ledger was, so that an old copy of it is noticed.

A ledger proves what it holds, and not what it lacks: one that was restored from a backup, or begun in an empty folder,
is whole and too short, and its ε too small. So each call and each answer between neighbours carries a `LedgerReport`.
Each process of a peer draws a random number, its *boot*, which every line that it writes into the ledger names. A
report counts the sender's lines of each boot, as far as the receiver has not; a neighbour keeps the counts of all boots
on its disk, and reports them back. So what one neighbour alone had counted is known to the others once it is charged.
From it follow three rules, without clock or socket (`WitnessFile` keeps the counts):

1. A peer whose ledger lacks lines that a neighbour has counted, of whichever boot, stops before another step. So the
   lines of an old copy, of a lost ledger, and of a copy that ran beside it are each missed, and can be charged, once.
2. A peer takes no private step before one neighbour has answered a report of this process (`is_witnessed`).
3. Two processes of one identity are refused, both. A neighbour believes in a boot once it answers the neighbour's
   present challenge, which is drawn again for each new boot. Where a boot does so that another one has replaced, both
   are alive; a message that was late in the network cannot. Even what a refused report counts is kept.

What this cannot see: releases to neighbours that have all lost their folders since, or that all lie. One that lies
about more lines can stop a peer, which then names it.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING
from zlib import crc32

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.files import named, naming, open_file
from flower_privdec.pushsum.exactly_once import LAST, RefusedError

if TYPE_CHECKING:
    from flower_privdec.privacy.ledger.ledger import Ledger
    from flower_privdec.privacy.noise.agreed import AgreedSecrets

MANY = 4096  # boots of one peer at most
NO_KEY = bytes(32)
SLOT = struct.Struct("<QQQI")  # neighbour, boot, lines, CRC-32
RUNS_TWICE = "network.runs-twice"  # the code of a refusal


@dataclass(frozen=True)
class LedgerReport:
    """What a peer reports of its own ledger, and what it has seen of the receiver's.

    Attributes:
        sender, receiver: peers.
        boot: of the sender's process.
        challenge: what a later report to this peer has to answer.
        answers: the receiver's challenge that this answers; 0 in the first report.
        own: boots of the sender in ascending order, each with its lines, as far as the receiver has not counted them.
        seen: boots of the receiver in ascending order, each with the most lines that the sender has counted.
        public_key: of the sender's process, for secrets of pairs; 32 zeros where it has none.
        round_index: the sender's round on disk, where it says it.
    """

    sender: int
    receiver: int
    boot: int
    challenge: int
    answers: int
    own: tuple[tuple[int, int], ...]
    seen: tuple[tuple[int, int], ...]
    public_key: bytes = NO_KEY
    round_index: int = 0


class LedgerWitness:
    """One peer's reports to its neighbours, and what it has seen of theirs; for any thread.

    Args:
        peer: its number.
        neighbors: of the peer.
        boot: a random number from 1 to 2^64 - 1, drawn at this start of the process.
        ledger: its own; None where no noise depends on it.
        seen: the lines of each neighbour that it has counted before, by boot.
        remember: called with a neighbour, a boot and its lines before anything follows from them.
        draw: returns a challenge. One that is drawn once for a boot that several processes share tells no two of them
            apart; it is for peers that a directory keeps from running twice.
        pairs: the keys that its reports carry; None where noise does not cancel between peers.

    Attributes:
        seen: the most lines of each neighbour's boots.
        problem: why this peer must stop, once that is so.
    """

    def __init__(
        self,
        peer: int,
        neighbors: Iterable[int],
        boot: int,
        ledger: Ledger | None = None,
        seen: Mapping[int, Mapping[int, int]] | None = None,
        remember: Callable[[int, int, int], None] = lambda neighbor, boot, lines: None,
        draw: Callable[[], int] | None = None,
        pairs: AgreedSecrets | None = None,
    ) -> None:
        self.peer = peer
        self.boot = boot
        self._ledger = ledger
        self._remember = remember
        self._pairs = pairs
        self.neighbors = frozenset(neighbors) - {peer}
        self.seen: dict[int, dict[int, int]] = {j: dict((seen or {}).get(j, {})) for j in self.neighbors}
        self.problem: BudgetError | None = None
        self._reported: dict[int, dict[int, int]] = {}  # by neighbour: the lines of this peer's boots that it counted
        self._draw = draw or draw_boot
        self._challenges = {j: self._draw() for j in self.neighbors}
        self._received: dict[int, int] = {}  # the last challenge of each neighbour
        self._boots: dict[int, int] = {}  # of each neighbour, once it has answered a challenge
        self._replaced: dict[int, set[int]] = {j: set() for j in self.neighbors}
        self._twice: set[int] = set()
        self._lock = Lock()

    def report(self, neighbor: int, round_index: int = 0) -> LedgerReport:
        """Return the report that the next call or answer to a neighbour carries.

        Args:
            round_index: this peer's on disk; 0 says nothing.
        """
        with self._lock:
            answers = 0 if self.problem else self._received.get(neighbor, 0)  # who is to stop has nothing to add
            challenge = self._challenges[neighbor]
            seen = tuple(sorted(self.seen[neighbor].items()))
            counted = self._reported.get(neighbor, {})
        lines = {} if self._ledger is None else dict(self._ledger.lines)
        own = tuple(sorted(item for item in lines.items() if item[1] > counted.get(item[0], 0)))
        public = NO_KEY if self._pairs is None else self._pairs.public
        return LedgerReport(self.peer, neighbor, self.boot, challenge, answers, own[:MANY], seen, public, round_index)

    def receive(self, report: LedgerReport) -> None:
        """Record a neighbour's report.

        Raises:
            RefusedError: its sender is no neighbour, runs twice, or has had too many boots.
        """
        j = report.sender
        if j not in self.neighbors:
            raise RefusedError(
                f"peer {j} reports its ledger to peer {self.peer}, who are no neighbours here", code="witness.neighbor"
            )
        with self._lock:
            counted = self.seen[j]
            for boot, lines in report.own:
                if lines <= counted.get(boot, 0):
                    continue
                if len(counted) >= MANY and boot not in counted:
                    raise RefusedError(
                        f"peer {j} has been started more than {MANY} times, with lines of each", code="witness.boots"
                    )
                self._remember(j, boot, lines)
                counted[boot] = lines
            self._received[j] = report.challenge
            if report.answers == self._challenges[j] and self._boots.get(j) != report.boot:
                if report.boot in self._replaced[j]:
                    self._twice.add(j)
                elif j in self._boots:  # both were stopped, and one was started
                    self._twice.discard(j)
                self._replaced[j] |= {self._boots[j]} if j in self._boots else set()
                self._boots[j], self._challenges[j] = report.boot, self._draw()
            is_known = report.boot in {self._boots.get(j), *self._replaced[j]}
            if j in self._twice and is_known:
                raise RefusedError(
                    f"two processes run as peer {j}, each with a ledger that lacks the other's releases: stop both, "
                    "and start the one whose folder is the original; delete the copy",
                    code=RUNS_TWICE,
                )
            if self._pairs is not None and report.boot == self._boots.get(j):
                try:
                    self._pairs.learn(j, report.public_key)
                except ValueError as error:
                    raise RefusedError(
                        f"peer {j} sent a key of which no secret can be made ({error})", code="witness.key"
                    ) from error
            reported = dict(report.seen)
            is_new = reported != self._reported.get(j)
            self._reported[j] = reported
        if is_new and self._ledger is not None and self.problem is None:
            try:
                self._ledger.check_witnessed(reported)
            except BudgetError as error:
                self.problem = BudgetError(f"by peer {j}: {error}", code=error.code)

    @property
    def is_witnessed(self) -> bool:
        """Whether a neighbour has answered a report of this process, or there is none."""
        return bool(self._boots) or not self.neighbors

    @property
    def reported(self) -> dict[int, int]:
        """Return the most lines of each boot of this peer that a neighbour has counted."""
        boots = {boot for reported in self._reported.values() for boot in reported}
        return {boot: max(reported.get(boot, 0) for reported in self._reported.values()) for boot in boots}

    def has_heard(self, neighbor: int) -> bool:
        """Return whether a neighbour has answered a report of this process."""
        return neighbor in self._boots


def draw_boot() -> int:
    """Return a random number from 1 to 2^64 - 1."""
    return 1 + secrets.randbelow(LAST)


class WitnessFile:
    """How many ledger lines a peer has counted of its neighbours' boots, as `LedgerWitness` keeps them, on its disk.

    A number is written over the one before it, whole, before anything follows from it: it survives the process at once,
    and the machine from the next checkpoint on, which holds what was not synced here.

    Args:
        path: of the file, made when something is counted.
        durable: whether it is to survive the machine.

    Attributes:
        seen: the lines of each neighbour's boots, once it was read.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        self._file = -1
        self._durable = durable
        self.seen: dict[int, dict[int, int]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._unsynced: dict[tuple[int, int], int] = {}

    def read(self, more: Mapping[str, Mapping[str, int]] | None = None) -> dict[int, dict[int, int]]:
        """Return the lines of each neighbour's boots; a slot that was torn as the machine stopped has none.

        Args:
            more: what the last checkpoint holds, see `unsynced`.
        """
        self.seen = seen = dict[int, dict[int, int]]()
        content = self._path.read_bytes() if self._path.exists() else b""
        for slot in range(-(-len(content) // SLOT.size)):
            record = content[slot * SLOT.size : (slot + 1) * SLOT.size]
            neighbor, boot, lines, check = SLOT.unpack(record.ljust(SLOT.size, b"\0"))
            is_whole = check == crc32(record[: SLOT.size - 4])
            self._slots[(neighbor, boot) if is_whole else (-1, slot)] = slot
            if is_whole:
                seen.setdefault(neighbor, {})[boot] = lines
        for name, boots in (more or {}).items():
            for boot_name, lines in boots.items():
                neighbor = int(name)
                boot = int(boot_name)
                if lines > seen.setdefault(neighbor, {}).get(boot, 0):
                    seen[neighbor][boot] = lines
                    self.write(neighbor, boot, lines)
        if content and self._durable:
            self._file = open_file(self._path, os.O_WRONLY)
            os.fdatasync(self._file)  # a process that was killed may have left what it did not sync
        return seen

    def write(self, neighbor: int, boot: int, lines: int) -> None:
        """Put down how many lines a neighbour's boot has.

        Raises:
            OSError: the disk is full.
        """
        if self._file < 0:
            self._file = open_file(self._path, os.O_WRONLY | os.O_CREAT)
        slot = self._slots.setdefault((neighbor, boot), len(self._slots))
        record = SLOT.pack(neighbor, boot, lines, 0)[:-4]
        record += crc32(record).to_bytes(4, "little")
        try:
            written = os.pwrite(self._file, record, slot * SLOT.size)
        except OSError as error:
            raise named(error, self._path) from error.__cause__
        if written < SLOT.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.seen.setdefault(neighbor, {})[boot] = lines
        self._unsynced[neighbor, boot] = lines

    def unsynced(self) -> dict[str, dict[str, int]]:
        """Return what was written and may not be on disk yet, for a checkpoint to hold."""
        unsynced: dict[str, dict[str, int]] = {}
        for (neighbor, boot), lines in list(self._unsynced.items()):
            unsynced.setdefault(str(neighbor), {})[str(boot)] = lines
        return unsynced

    def sync(self) -> None:
        """Flush it to disk."""
        if self._unsynced and self._durable:
            with naming(self._path):
                os.fdatasync(self._file)
        self._unsynced.clear()

    def close(self) -> None:
        """Close it."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
