"""Witnessed ledgers: neighbours remember how long a peer's ledger was, so that an old copy of it is noticed.

A ledger proves what it holds, and not what it lacks: one that was restored from a backup, or begun in an empty folder,
is whole and too short, and its ε too small. So each call and each answer between neighbours carries a `LedgerReport`:
the length of the sender's ledger, with its last hash, and the longest ledger of the receiver that the sender has seen,
which it keeps in its checkpoint. From it follow three rules, without clock, socket or file:

1. A peer whose ledger is shorter than a neighbour has seen, or holds another line there, stops before another step.
2. A peer takes no private step before one neighbour has reported to it in this process (`is_witnessed`).
3. Two processes of one identity are refused, both. A *boot* is a random number that each process draws; a neighbour
   believes in a boot once it answers the neighbour's present challenge, which is drawn again for each new boot. Where
   a boot does so that another one has replaced, both are alive; a message that was late in the network cannot.

What this cannot see: releases to neighbours that have all lost their checkpoints, or that all lie, and those since the
last checkpoint of each. A neighbour that lies about a longer ledger can stop a peer, which then names it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from flower_privdec.errors import BudgetError
from flower_privdec.pushsum.exactly_once import LAST, RefusedError

Head = tuple[int, str]  # how much a ledger holds, and the hash of its last line in hexadecimal
EMPTY: Head = (0, "0" * 64)
TWICE = "two processes run as peer"


@dataclass(frozen=True)
class LedgerReport:
    """What a peer reports of its own ledger, and what it has seen of the receiver's.

    Attributes:
        sender, receiver: peers.
        boot: of the sender's process.
        challenge: what a later report to this peer has to answer.
        answers: the receiver's challenge that this answers; 0 in the first report.
        own: the head of the sender's ledger.
        seen: the longest head of the receiver's ledger that it has seen.
    """

    sender: int
    receiver: int
    boot: int
    challenge: int
    answers: int
    own: Head
    seen: Head


class LedgerWitness:
    """One peer's reports to its neighbours, and what it has seen of theirs; for any thread.

    Args:
        peer: its number.
        neighbors: of the peer.
        boot: a random number from 1 to 2^64 - 1, drawn at this start of the process.
        head: returns the head of its ledger; EMPTY where there is none.
        check: raises BudgetError unless the ledger holds what a head names.
        seen: the heads that were in the checkpoint, by neighbour.

    Attributes:
        seen: the longest head of each neighbour's ledger.
        problem: why this peer must stop, once that is so.
    """

    def __init__(
        self,
        peer: int,
        neighbors: Iterable[int],
        boot: int,
        head: Callable[[], Head],
        check: Callable[[Head], None],
        seen: Mapping[int, Head] | None = None,
    ) -> None:
        self.peer, self.boot, self._head, self._check = peer, boot, head, check
        self.neighbors = frozenset(neighbors) - {peer}
        self.seen: dict[int, Head] = {j: head for j, head in (seen or {}).items() if j in self.neighbors}
        self.problem: BudgetError | None = None
        self._reported: dict[int, Head] = {}  # by neighbour: the longest head of this peer's ledger that it reported
        self._challenges = {j: _draw() for j in self.neighbors}
        self._received: dict[int, int] = {}  # the last challenge of each neighbour
        self._boots: dict[int, int] = {}  # of each neighbour, once it has answered a challenge
        self._replaced: dict[int, set[int]] = {j: set() for j in self.neighbors}
        self._twice: set[int] = set()
        self._lock = Lock()

    def report(self, neighbor: int) -> LedgerReport:
        """Return the report that the next call or answer to a neighbour carries."""
        with self._lock:
            answers = 0 if self.problem else self._received.get(neighbor, 0)  # who is to stop has nothing to add
            challenge, seen = self._challenges[neighbor], self.seen.get(neighbor, EMPTY)
        return LedgerReport(self.peer, neighbor, self.boot, challenge, answers, self._head(), seen)

    def receive(self, report: LedgerReport) -> None:
        """Record a neighbour's report.

        Raises:
            RefusedError: its sender is no neighbour, runs twice, or has two ledgers.
        """
        j = report.sender
        if j not in self.neighbors:
            raise RefusedError(f"peer {j} reports its ledger to peer {self.peer}, who are no neighbours here")
        with self._lock:
            self._received[j] = report.challenge
            if report.answers == self._challenges[j] and self._boots.get(j) != report.boot:
                if report.boot in self._replaced[j]:
                    self._twice.add(j)
                elif j in self._boots:  # both were stopped, and one was started
                    self._twice.discard(j)
                self._replaced[j] |= {self._boots[j]} if j in self._boots else set()
                self._boots[j], self._challenges[j] = report.boot, _draw()
            is_known = report.boot in {self._boots.get(j), *self._replaced[j]}
            if j in self._twice and is_known:
                raise RefusedError(
                    f"{TWICE} {j}, each with a ledger that lacks the other's releases: stop both, and start the one "
                    "whose folder is the original; delete the copy"
                )
            before = self.seen.get(j, EMPTY)
            if report.own[0] == before[0] and report.own[1] != before[1]:
                raise RefusedError(
                    f"peer {j} reports a ledger of length {before[0]} that is not the one which peer {self.peer} has "
                    f"seen: put the newest copy of the ledger of peer {j} back"
                )
            if is_known:  # so it has received, and checked, what was seen before
                self.seen[j] = max(report.own, before, key=lambda head: head[0])
            is_new, self._reported[j] = report.seen != self._reported.get(j), report.seen
        if is_new and report.seen[0] > 0 and self.problem is None:
            try:
                self._check(report.seen)
            except BudgetError as error:
                self.problem = BudgetError(f"by peer {j}: {error}", code=error.code)

    @property
    def is_witnessed(self) -> bool:
        """Whether a neighbour has reported since the process started, or there is none."""
        return bool(self._reported) or not self.neighbors

    @property
    def longest(self) -> Head:
        """Return the longest head of this peer's own ledger that a neighbour has reported."""
        return max(self._reported.values(), default=EMPTY, key=lambda head: head[0])

    def has_heard(self, neighbor: int) -> bool:
        """Return whether a neighbour has reported since the process started."""
        return neighbor in self._reported


def _draw() -> int:
    return 1 + secrets.randbelow(LAST)
