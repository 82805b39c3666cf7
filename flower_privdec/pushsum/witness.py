"""Witnessed ledgers: neighbours remember how long a peer's ledger was, so that an old copy of it is noticed.

A ledger proves what it holds, but not what it lacks. If it is restored from a backup, or begun in an empty folder, it
is whole but too short, and its ε is too small. So neighbours count its lines:

- Each process of a peer draws a random number, its *boot*. Every line that it writes into the ledger names the boot.
- Each call and each answer between neighbours carries a `LedgerReport`. It counts the sender's lines of each boot that
  the receiver has not counted yet.
- A neighbour keeps the counts of all boots on its disk (`WitnessFile`), and reports them back. So a count that only one
  neighbour had is known to the others once the lines are charged.

From this follow three rules, without clock or socket:

1. A peer whose ledger lacks lines that a neighbour has counted, of any boot, stops before another step. So the lines
   that an old copy, a lost ledger or a copy that ran beside it lacks are each missed, and can be charged, once.
2. A peer takes no private step before a neighbour has answered a report of this process (`is_witnessed`).
3. Two processes of one identity are both refused. A neighbour believes in a boot once it answers the neighbour's
   present challenge, which is drawn again for each new boot. If a boot that was replaced by another one does so, both
   are alive: a message that was late in the network cannot. Counts are kept even if their report is refused.

This cannot see releases to neighbours that have all lost their folders since, or that all lie. A neighbour that lies
about more lines can stop a peer, which then names it.
"""

from __future__ import annotations

import errno
import math
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
    from flower_privdec.privacy.ledger.ledger import WitnessedLedger

MANY = 4096  # the most boots of one peer
SLOT = struct.Struct("<QQQI")  # neighbour, boot, lines, CRC-32
RUNS_TWICE = "network.runs-twice"  # the code of a refusal


@dataclass(frozen=True)
class LedgerReport:
    """What a peer reports of its own ledger, and what it has counted of the receiver's.

    Attributes:
        sender, receiver: peers.
        boot: the boot of the sender's process.
        challenge: the number that a later report to the sender has to answer.
        answers: the receiver's challenge that this answers; 0 in the first report.
        own: (boot, lines) of the sender, by ascending boot; only those with lines that the receiver has not counted.
        seen: (boot, lines) of the receiver, by ascending boot: the most lines that the sender has counted of each.
        round_index: the sender's round on disk; 0 if it does not say.
        entries: how many entries of the list of members the sender has, see `membership`.
    """

    sender: int
    receiver: int
    boot: int
    challenge: int
    answers: int
    own: tuple[tuple[int, int], ...]
    seen: tuple[tuple[int, int], ...]
    round_index: int = 0
    entries: int = 0


class LedgerWitness:
    """One peer's reports to its neighbours, and its counts of theirs; any thread may call it.

    Args:
        peer: its number.
        neighbors: the peer's neighbours.
        boot: a random number from 1 to 2^64 - 1, drawn at this start of the process.
        ledger: the peer's own ledger; None without privacy.
        seen: the lines of each neighbour that it has counted before, by boot.
        remember: called with a neighbour, a boot and its lines, before anything follows from them.
        draw: returns a challenge; a random number by default. If several processes share a boot and a challenge, they
            cannot be told apart, which is right for peers that a directory keeps from running twice.

    Attributes:
        seen: the most lines of each neighbour's boots.
        problem: the reason why this peer must stop; None while there is none.
        is_charging: whether this process takes no step, and only charges what its ledger lacks.
    """

    def __init__(
        self,
        peer: int,
        neighbors: Iterable[int],
        boot: int,
        ledger: WitnessedLedger | None = None,
        seen: Mapping[int, Mapping[int, int]] | None = None,
        remember: Callable[[int, int, int], None] = lambda neighbor, boot, lines: None,
        draw: Callable[[], int] | None = None,
    ) -> None:
        self.peer = peer
        self.boot = boot
        self.neighbors = frozenset(neighbors) - {peer}
        self._ledger = ledger
        self._remember = remember
        self._draw = draw or draw_boot
        self._lock = Lock()

        # Lines of ledgers, by neighbour and boot.
        self.seen: dict[int, dict[int, int]] = {j: dict((seen or {}).get(j, {})) for j in self.neighbors}
        self._reported: dict[int, dict[int, int]] = {}  # this peer's own lines, as each neighbour counted them
        self.problem: BudgetError | None = None
        self.is_charging = False

        # The present boot of each neighbour, once it has answered a challenge of this process.
        self._challenges = {j: self._draw() for j in self.neighbors}
        self._received: dict[int, int] = {}  # the last challenge of each neighbour
        self._boots: dict[int, int] = {}
        self._replaced: dict[int, set[int]] = {j: set() for j in self.neighbors}  # boots that another one replaced
        self._twice: set[int] = set()  # neighbours that run twice

    def report(self, neighbor: int, round_index: int = 0, entries: int = 0) -> LedgerReport:
        """Return the report that the next call or answer to a neighbour carries.

        Args:
            round_index: this peer's round on disk; 0 says nothing.
            entries: how many entries of the list of members this peer has.
        """
        with self._lock:
            challenge = self._challenges[neighbor]
            seen = tuple(sorted(self.seen[neighbor].items()))
            counted = self._reported.get(neighbor, {})
            # A peer that has to stop answers no challenge, so that no neighbour believes in this process. One that only
            # charges what is missing takes no step: peers whose folders are all old copies have to hear each other.
            answers = 0
            if self.problem is None or self.is_charging:
                answers = self._received.get(neighbor, 0)

        own = []
        if self._ledger is not None:
            for boot, lines in sorted(dict(self._ledger.lines).items()):
                if lines > counted.get(boot, 0):
                    own.append((boot, lines))

        return LedgerReport(
            sender=self.peer,
            receiver=neighbor,
            boot=self.boot,
            challenge=challenge,
            answers=answers,
            own=tuple(own[:MANY]),
            seen=seen,
            round_index=round_index,
            entries=entries,
        )

    def receive(self, report: LedgerReport) -> None:
        """Record a neighbour's report.

        Raises:
            RefusedError: its sender is not a neighbour, runs twice, or was started too often.
        """
        neighbor = report.sender
        if neighbor not in self.neighbors:
            raise RefusedError(
                f"peer {neighbor} reports its ledger to peer {self.peer}, who are not neighbours here",
                code="witness.neighbor",
            )

        with self._lock:
            # Counts are kept first: they are true even if the report is refused.
            self._count(neighbor, report.own)
            self._received[neighbor] = report.challenge
            self._meet(report)

            reported = dict(report.seen)
            is_new = reported != self._reported.get(neighbor)
            self._reported[neighbor] = reported

        if is_new and self._ledger is not None and self.problem is None:
            try:
                self._ledger.check_witnessed(reported)
            except BudgetError as error:
                self.problem = BudgetError(f"by peer {neighbor}: {error}", code=error.code)

    def _count(self, neighbor: int, own: Iterable[tuple[int, int]]) -> None:
        """Count the lines of a neighbour's boots, each on disk before it is counted here."""
        counted = self.seen[neighbor]
        for boot, lines in own:
            if lines <= counted.get(boot, 0):
                continue
            if len(counted) >= MANY and boot not in counted:
                raise RefusedError(
                    f"peer {neighbor} has been started more than {MANY} times, with ledger lines of each start",
                    code="witness.boots",
                )
            self._remember(neighbor, boot, lines)
            counted[boot] = lines

    def _meet(self, report: LedgerReport) -> None:
        """Believe in a boot that answers the present challenge; refuse a neighbour that runs twice."""
        neighbor = report.sender
        present = self._boots.get(neighbor)
        replaced = self._replaced[neighbor]

        if report.answers == self._challenges[neighbor] and report.boot != present:
            if report.boot in replaced:
                self._twice.add(neighbor)
            elif present is not None:
                self._twice.discard(neighbor)  # a new boot: both were stopped, and one was started

            if present is not None:
                replaced.add(present)
            self._boots[neighbor] = report.boot
            self._challenges[neighbor] = self._draw()

        # A boot that has answered no challenge yet may be the one that was started after both were stopped.
        is_known = report.boot == self._boots.get(neighbor) or report.boot in replaced
        if neighbor in self._twice and is_known:
            raise RefusedError(
                f"two processes run as peer {neighbor}, each with a ledger that lacks the other's releases: stop both, "
                "and start the one whose folder is the original; delete the copy",
                code=RUNS_TWICE,
            )

    @property
    def is_witnessed(self) -> bool:
        """Whether a neighbour has answered a report of this process, or there are no neighbours."""
        return bool(self._boots) or not self.neighbors

    @property
    def reported(self) -> dict[int, int]:
        """The most lines of each boot of this peer that any neighbour has counted."""
        most: dict[int, int] = {}
        for counts in self._reported.values():
            for boot, lines in counts.items():
                most[boot] = max(lines, most.get(boot, 0))
        return most

    def confirmed(self, witnesses: int) -> dict[int, int]:
        """Return the lines of each boot of this peer that at least so many neighbours have counted."""
        counts: dict[int, list[int]] = {}
        for boots in self._reported.values():
            for boot, lines in boots.items():
                counts.setdefault(boot, []).append(lines)

        known = {}
        for boot, lines_counted in counts.items():
            if len(lines_counted) >= witnesses:
                known[boot] = sorted(lines_counted, reverse=True)[witnesses - 1]
        return known

    def beyond(self, known: Mapping[int, int]) -> list[int]:
        """Return which neighbours report more lines of this peer than are known."""
        return [
            neighbor
            for neighbor, boots in sorted(self._reported.items())
            if any(lines > known.get(boot, 0) for boot, lines in boots.items())
        ]

    def has_heard(self, neighbor: int) -> bool:
        """Return whether a neighbour has answered a report of this process."""
        return neighbor in self._boots


def draw_boot() -> int:
    """Return a random number from 1 to 2^64 - 1."""
    return 1 + secrets.randbelow(LAST)


class WitnessFile:
    """The counts of a `LedgerWitness` on disk: a slot for each boot of each neighbour.

    A count is written over the previous one, in one write, before anything follows from it. From then on it outlasts
    the process. It outlasts the machine after the next checkpoint, which holds the counts that were not flushed here.

    Args:
        path: the path of the file, which is made by the first count.
        durable: whether counts have to outlast the machine.
        in_memory: whether only this object holds the counts, and no file.

    Attributes:
        seen: the lines of each neighbour's boots, after `read`.
    """

    def __init__(self, path: Path, *, durable: bool = True, in_memory: bool = False) -> None:
        self._path = path
        self._file = -1
        self._durable = durable
        self._in_memory = in_memory
        self.seen: dict[int, dict[int, int]] = {}
        self._slots: dict[tuple[int, int], int] = {}
        self._unsynced: dict[tuple[int, int], int] = {}

    def read(self, more: Mapping[str, Mapping[str, int]] | None = None) -> dict[int, dict[int, int]]:
        """Return the lines of each neighbour's boots.

        A slot may be torn, if the machine stopped while it was written. It is left out: the checkpoint has its count.

        Args:
            more: the counts that the last checkpoint holds, see `unsynced`.
        """
        content = b""
        if self._path.exists():
            content = self._path.read_bytes()

        self.seen = {}
        for slot in range(math.ceil(len(content) / SLOT.size)):
            record = content[slot * SLOT.size : (slot + 1) * SLOT.size]
            neighbor, boot, lines, check = SLOT.unpack(record.ljust(SLOT.size, b"\0"))
            is_whole = check == crc32(record[: SLOT.size - 4])
            if is_whole:
                self._slots[neighbor, boot] = slot
                self.seen.setdefault(neighbor, {})[boot] = lines
            else:
                self._slots[-1, slot] = slot  # so that no other count is given the place

        for neighbor_name, boots in (more or {}).items():
            for boot_name, lines in boots.items():
                neighbor = int(neighbor_name)
                boot = int(boot_name)
                if lines > self.seen.get(neighbor, {}).get(boot, 0):
                    self.write(neighbor, boot, lines)

        if content and self._durable:
            # A process that was killed may have left counts that it did not flush.
            if self._file < 0:
                self._file = open_file(self._path, os.O_WRONLY)
            os.fdatasync(self._file)
        return self.seen

    def write(self, neighbor: int, boot: int, lines: int) -> None:
        """Record the line count of a neighbour's boot.

        Raises:
            OSError: the disk is full.
        """
        if self._in_memory:
            self.seen.setdefault(neighbor, {})[boot] = lines
            return

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
        """Return the counts that may not be flushed to disk yet, for a checkpoint to hold."""
        unsynced: dict[str, dict[str, int]] = {}
        for (neighbor, boot), lines in list(self._unsynced.items()):
            unsynced.setdefault(str(neighbor), {})[str(boot)] = lines
        return unsynced

    def sync(self) -> None:
        """Flush all counts to disk."""
        if self._unsynced and self._durable:
            with naming(self._path):
                os.fdatasync(self._file)
        self._unsynced.clear()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
