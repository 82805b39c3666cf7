"""What own noise peers promise to add while somebody is gone, passed on from neighbour to neighbour.

If a partner is gone, each peer tops up its own noise. All of them do, so each may count on more noise of the others
than was planned, and add less itself: but only on what they have promised (`privacy.mechanism.partners` has the proof).
So a peer that misses a partner makes a *promise*, signed by the identity that its session key is signed by:

    signed     PURPOSE, the run, peer, number, session key, first step, end, level

From the first step until before the end it adds own noise of so many UNITs of what it would need by itself. It binds
itself before anyone hears of it, in steps that it has not taken yet. It promises for LASTS rounds at a time, and anew
when half of them are over and somebody is still gone. So once all are back, everybody soon adds what was planned.

| a promise is | it |
|---|---|
| signed by the peer, for the session key that is known of it | counts, in its steps |
| for another session key: of a process before this one, or not heard of yet | counts for nothing, and is not kept |
| lower in number than one that is known | is not kept; it holds, but says less |
| not signed by the peer, or for another run | is refused and named; who brings several is not listened to |

No one waits for a promise, or asks for one. Who withholds promises, or repeats old ones, costs accuracy, never ε: old
ones are still true, in their steps. A member that promises and adds less has its noise in common with an adversary: it
is one of the colluders. A process that is started again, from whichever folder, has another session key, and nothing
that was promised for the old one counts for it.

A promise is sent to a neighbour up to SENT times, in messages that leave anyway, until it is heard from that neighbour.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

PURPOSE = b"flower_privdec own noise 1"
UNITS = 2**20  # of a level: in so many parts of the noise that a peer would need by itself
LASTS = 8  # rounds for which a peer promises, besides those that news takes to the farthest peer and back
SENT = 3  # times: messages may be lost
MOST_VAIN = 4  # promises of one peer that one neighbour may bring in vain
MOST_STEP = 2**62
PROMISES_AT_ONCE = 2**16  # bytes of a message; one that is larger is sent by itself
PROMISE = struct.Struct("<II4Q32s")  # peer, bytes of the signature, number, first step, end, level, session key


@dataclass(frozen=True, slots=True)
class Promise:
    """What own noise a process of a peer adds at least, signed by the peer's identity.

    Attributes:
        peer: whose.
        number: higher than those of the process's earlier promises, at least 1.
        public: the session key of the process.
        first, end: the steps [first, end) for which it holds.
        level: the noise, in UNITS of what the peer would need by itself, from 1 to UNITS.
        signature: of the peer's identity, see `signed_promise`.
    """

    peer: int
    number: int
    public: bytes
    first: int
    end: int
    level: int
    signature: bytes = b""

    @property
    def is_possible(self) -> bool:
        """Return whether all numbers are in range."""
        is_of_steps = 0 <= self.first < self.end <= MOST_STEP
        return is_of_steps and 1 <= self.level <= UNITS and 1 <= self.number <= MOST_STEP


@dataclass(frozen=True)
class Promises:
    """Promises that one neighbour passes on to another.

    Attributes:
        sender, receiver: peers.
        promises: by ascending peer, at most one of each.
    """

    sender: int
    receiver: int
    promises: tuple[Promise, ...]


class NoisePlan(Protocol):
    """Says what is worth promising."""

    def worth_promising(self, peer: int, gone: Collection[int], first: int, end: int) -> float:
        """Return what own noise a peer had better promise for steps [first, end) if some peers are gone.

        Returns:
            It over the noise that the peer would need by itself, in [0, 1]; 0 if what was planned is enough.
        """


def signed_promise(run: bytes, promise: Promise) -> bytes:
    """Return what the signature of a promise is of; no signature of anything else begins with its purpose."""
    numbers = (promise.peer, promise.number, promise.first, promise.end, promise.level)
    parts = (PURPOSE, run, promise.public, *(number.to_bytes(8, "little") for number in numbers))
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class PromiseBook:
    """The newest promise of each peer's present process, and who has been sent it; one thread at a time.

    Args:
        neighbours: whom promises are passed on to.

    Attributes:
        newest: by peer.
    """

    def __init__(self, neighbours: Collection[int]) -> None:
        self.newest: dict[int, Promise] = {}
        self._sent: dict[int, dict[int, tuple[int, int]]] = {j: {} for j in neighbours}  # number and times, by peer
        self._vain: dict[tuple[int, int], int] = {}

    def meet(self, neighbour: int) -> None:
        """Record that a process of a neighbour is new, which has been sent nothing."""
        self._sent[neighbour] = {}

    def forget(self, peer: int) -> None:
        """Forget what a peer's last process has promised: it has another key now."""
        self.newest.pop(peer, None)
        for sent in self._sent.values():
            sent.pop(peer, None)

    def keep(self, promise: Promise) -> None:
        """Keep a promise, which goes to every neighbour."""
        self.newest[promise.peer] = promise

    def take(self, neighbour: int, promise: Promise, public: bytes, problem: Callable[[Promise], str | None]) -> str:
        """Take in what a neighbour passes on.

        Args:
            public: the session key of the peer, as far as it is known.
            problem: says why a promise is not signed by its peer.

        Returns:
            Why it is refused; "" if it is not, whether it is new or not.
        """
        peer = promise.peer
        if promise.public != public:
            return ""
        known = self.newest.get(peer)
        if known is not None and promise.number <= known.number:
            if promise.number == known.number:
                self._sent[neighbour][peer] = (promise.number, SENT)
            return ""

        if self._vain.get((neighbour, peer), 0) >= MOST_VAIN:
            return ""
        why = problem(promise)
        if why is not None:
            self._vain[neighbour, peer] = self._vain.get((neighbour, peer), 0) + 1
            return why
        self._sent[neighbour][peer] = (promise.number, SENT)
        self.keep(promise)
        return ""

    def due(self, neighbour: int, step: int) -> tuple[Promise, ...]:
        """Return what to send to a neighbour in the next message, and count it as sent.

        Args:
            step: that of this peer; what was promised for earlier ones only is not sent.
        """
        if not self.newest:
            return ()
        sent = self._sent[neighbour]
        found: list[Promise] = []
        size = 0
        for peer in sorted(self.newest):
            promise = self.newest[peer]
            number, times = sent.get(peer, (0, 0))
            if number != promise.number:
                times = 0
            if times >= SENT or promise.end <= step or peer == neighbour:
                continue
            size += PROMISE.size + len(promise.signature)
            if found and size > PROMISES_AT_ONCE:
                break
            sent[peer] = (promise.number, times + 1)
            found.append(promise)
        return tuple(found)


@dataclass
class OwnPromise:
    """What a process has promised last, and for how long it promises at a time.

    Attributes:
        lasts: for how many steps.
        first, end, level: see Promise; of nothing at first.
    """

    lasts: int
    first: int = 0
    end: int = 0
    level: int = 0

    def renewed(self, step: int, wanted: float, last: int) -> bool:
        """Promise anew if that is due before a step, and return whether it is.

        Args:
            step: the next that the process takes.
            wanted: see `NoisePlan.worth_promising`.
            last: how many steps the run has.
        """
        level = min(UNITS, math.ceil(wanted * UNITS))
        is_over = self.end <= step
        half_is_left = self.end - step >= min(self.lasts, last - step) / 2
        if level < 1 or step >= last:
            return False
        if not is_over and level <= self.level and half_is_left:
            return False

        # The last promise is kept, so a lower one may be said to hold since then: who is behind counts on it.
        if is_over or level > self.level:
            self.first = step
        self.end = min(step + self.lasts, last)
        self.level = level
        return True
