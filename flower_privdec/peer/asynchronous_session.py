"""The messages of peers that nobody waits for: hellos, shares that count once, and rows of which the newest counts.

What a peer keeps of one neighbour is in one of these states (`PushSumProtocol` holds the edge, `Neighbour` the rest):

| state | entered when | what is sent | left when |
|---|---|---|---|
| closed | this process or the neighbour's begins; a call is refused, or LOST in a row are | hellos | it greets back |
| open | a hello answers this process's challenge, neither side is behind | all, and hellos | see closed |
| stale | a neighbour has seen more of this peer than its store holds | nothing at all | `reset`: all closed |
| quarantined | the neighbour sent a share that no working device sends | nothing | this process ends |

A hello is sent every `retry` seconds until an edge is open, and while this peer lacks weight; else it is twice as long
each time until the next, up to `rest`, and none is needed while both exchange something, for every message reports
this peer's round. A neighbour that may soon wait for that round, and to which nothing else is to be sent, is called
with the report and nothing else. Shares and acknowledgements are sent once they follow from what is on disk, and a
share again if the neighbour reports that it has not come. Rows of an exchange are replaced by newer ones until they are
sent: a slow neighbour gets only the newest.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from flower_privdec.common.errors import RunError
from flower_privdec.peer.driving import NO_STREAM, UnreachableError
from flower_privdec.peer.neighbour import Neighbour
from flower_privdec.peer.pace import Want
from flower_privdec.peer.session import Messages, Session
from flower_privdec.peer.soundness import SURPLUS, what_is_wrong
from flower_privdec.pushsum.exactly_once import (
    Acknowledgement,
    FrozenShare,
    Hello,
    PushSumProtocol,
    RefusedError,
    StaleStateError,
)
from flower_privdec.pushsum.frames import SMALL, FrameCodec, Message, RowMessage, frame_size
from flower_privdec.pushsum.witness import LedgerReport, LedgerWitness

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

MANY = 16  # frames that a call with rows carries beside them, at most

# A neighbour counts as lost after so many calls in a row that did not reach it.
LOST = 4


class AsynchronousSession(Session):
    """What `ShareSession` and `RowSession` have in common.

    Args:
        protocol: this peer's shares; without mass in a `RowSession`, which uses only its hellos.
        witness, frames, retry: see Session.
        replies: the exchanges in which a neighbour is answered, whose round the rows are then for.
        rounds: of the run.
        n_peers: of the run, which is the push-sum weight of all of them together; inf if no peer knows that.
        silent: neighbours that never send shares or rows to this peer.

    Attributes:
        is_new: whether this peer has nothing of the run yet; then it joins late if a neighbour is under way.
        joins: whether it does.
        stale: why this peer must be reset, until it is.
        resumed_at: the round from which this process continues.
        steps: of this peer so far, which `Neighbour.met` refers to.
        want: what this peer lacks of push-sum weight while it waits, which its hellos report.
        level: how often its weight floor sank, which they report too.
        parting: neighbours from which this peer parts, as one of the two leaves for good: they get no new share.
    """

    def __init__(
        self,
        protocol: PushSumProtocol[Tensor],
        witness: LedgerWitness,
        frames: FrameCodec,
        replies: Collection[int],
        retry: float,
        rounds: int,
        n_peers: float,
        silent: Collection[int] = (),
    ) -> None:
        sizes = [frame_size(formats) for formats in (frames.shares or {}, *frames.exchanges.values())]
        super().__init__(witness, frames, MANY + len(sizes), sum(sizes) + MANY * SMALL, rounds, retry)
        self.protocol = protocol
        self.is_new = False
        self.joins = False
        self.stale: str | None = None
        self.resumed_at = 0
        self.steps = 0
        self.want = Want.UNKNOWN
        self.level = 0
        self.parting = set[int]()
        self._announced = Want.UNKNOWN
        self._replies = replies
        self._silent = silent
        self._most_weight = SURPLUS * n_peers

    def shut_out(self, neighbor: int, why: str) -> None:
        super().shut_out(neighbor, why)
        self.protocol.close(neighbor)

    def part(self, neighbor: int) -> None:
        """Give a neighbour no new share, and tell it so once it has taken the last one."""
        if neighbor not in self.parting:
            self.parting.add(neighbor)
            self.neighbours[neighbor].queue.hello_at = 0.0

    def has_parted(self, neighbor: int) -> bool:
        """Return whether nothing is on its way between this peer and a neighbour, and nothing will be."""
        known = self.neighbours[neighbor]
        is_held = neighbor in self.protocol.waiting_rounds()
        return known.want == Want.PARTED and not (is_held or self.protocol.owes(neighbor))

    # --- for the peer's rounds ---

    def committed(self, wanted: Collection[int], waiting: Collection[int] = ()) -> None:
        """Send what follows from a commit.

        Args:
            wanted: neighbours that may wait for a share of this round: one that gets none is sent a hello.
            waiting: those that may wait until this peer is in the round that is on disk: one to which nothing is sent
                is called all the same, for every call reports the round.
        """
        for neighbor in waiting:
            self.neighbours[neighbor].queue.report = self.round_index
        for acknowledgement in self.protocol.acknowledgements():
            self.neighbours[acknowledgement.receiver].queue.acknowledgements = [acknowledgement]

        for neighbor in wanted:
            if not self.protocol.shares_for(neighbor):
                self.neighbours[neighbor].queue.hello_at = 0.0

    def senders(self, at: int, since: int = 0) -> set[int]:
        """Return whose rows of an exchange have come, of a round or a later one, and were not collected."""
        return {j for j, one in self.neighbours.items() if at in one.rows and one.rows[at].round_index >= since}

    def collect(self, at: int, senders: Iterable[int]) -> dict[int, RowMessage]:
        """Return the newest rows of an exchange from each of some neighbours, and forget them."""
        return {j: self.neighbours[j].rows.pop(at) for j in sorted(senders) if at in self.neighbours[j].rows}

    def report(self, want: Want, level: int) -> None:
        """Report what this peer lacks: at once if somebody waits for weight, and else with the next hello."""
        self.want = want
        self.level = level
        self._announced = min(want, self._announced)
        if self.has_report():
            self._announced = want
            for one in self.neighbours.values():
                one.queue.hello_at = 0.0

    def has_report(self) -> bool:
        """Return whether there is something to report at once."""
        if self.want <= self._announced:
            return False
        return Want.WAITS in (self.want, *(one.want for one in self.neighbours.values()))

    def is_informed(self, neighbor: int, round_index: int) -> bool:
        """Return whether nothing is left to send to a neighbour, which knows of a round."""
        known = self.neighbours[neighbor]
        has_to_send = known.queue.hellos or known.queue.acknowledgements
        return not has_to_send and known.informed is not None and known.informed >= round_index

    def is_lost(self, neighbor: int) -> bool:
        """Return whether a neighbour has not been reached for some calls; one that refuses them is there."""
        return self.neighbours[neighbor].unreached >= LOST

    # --- what comes: see Session ---

    @property
    def round_index(self) -> int:
        return self.protocol.round_index

    def receive(self, caller: int, messages: Messages, now: float) -> Callable[[], Messages]:
        """See Session; the answer to a share acknowledges it, if that is on disk by then."""
        replies = self._received(caller, messages, now)
        known = self.neighbours[caller]
        is_held_back = not self.is_answered(caller, messages)
        known.answering += is_held_back

        def answer() -> Messages:
            known.answering -= is_held_back
            if not self.protocol.is_open(caller):
                return [*replies]
            acknowledgements = known.queue.acknowledgements
            known.queue.acknowledgements = []
            return [*replies, *acknowledgements]

        return answer

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """See Session: the answer to a share that is held waits for the next commit, which acknowledges it."""
        return FrozenShare not in map(type, messages) or not self.protocol.is_held(caller)

    def _received(self, caller: int, messages: Messages, now: float) -> list[Hello]:
        """Take messages in and return the hellos that answer them."""
        known = self.neighbours[caller]
        if known.quarantined:
            raise RefusedError(
                f"peer {self.peer} takes nothing from peer {caller} any more: {known.quarantined}",
                code="peer.quarantined",
            )

        known.heard_at = now
        replies: list[Hello] = []
        for message in messages:
            if isinstance(message, Hello):
                reply = self._receive_hello(message)
                if reply is not None:
                    replies.append(reply)
            elif isinstance(message, LedgerReport):
                if message.boot == known.boot:
                    known.round_index = max(message.round_index, known.round_index)
            elif isinstance(message, Acknowledgement):
                self._receive_acknowledgement(known, message, now)
            elif isinstance(message, FrozenShare):
                self._receive_share(known, message, now)
            elif isinstance(message, RowMessage) and self.protocol.is_open(caller):
                self._receive_rows(known, message, now)
            else:
                raise RefusedError(
                    f"peer {caller} must greet peer {self.peer} first, which has started since", code="edge.closed"
                )
        return replies

    def _receive_acknowledgement(self, known: Neighbour, message: Acknowledgement, now: float) -> None:
        if not self.protocol.acknowledge(message):
            return
        if known.number in self.parting:
            known.queue.hello_at = 0.0  # which says that it was the last
        self._meet(known, now)
        if known.number in self._silent:
            known.reached = known.reached_round

    def _receive_share(self, known: Neighbour, message: FrozenShare[Tensor], now: float) -> None:
        self._check_share(message)
        if not self.protocol.receive(message):
            return
        self._meet(known, now)
        known.is_ahead(message.round_index + 1)
        known.want = Want.UNKNOWN

    def _receive_rows(self, known: Neighbour, message: RowMessage, now: float) -> None:
        known.rows[message.at] = message
        self._meet(known, now)
        if message.at not in self._replies:
            known.is_ahead(message.round_index)
            known.stepped = message.round_index + 1
            known.place = message.round_index, message.at

    def _check_share(self, share: FrozenShare[Tensor]) -> None:
        """Quarantine the sender of a share that no working device sends, which would replace each model it reaches."""
        why = self._wrong_share(share)
        if not why:
            return
        self.neighbours[share.sender].quarantined = why
        self.protocol.close(share.sender)
        _log.warning("peer %s is quarantined: %s; restart this peer to take it back", share.sender, why)
        raise RefusedError(f"peer {share.sender} is quarantined by peer {self.peer}: {why}", code="peer.quarantined")

    def _wrong_share(self, share: FrozenShare[Tensor]) -> str:
        """Return what is wrong with a share's numbers in words; empty if nothing is."""
        values = self.protocol.opened(share)
        if values is None:
            return ""
        return what_is_wrong(values, self.protocol.mass, self._most_weight)

    # --- hellos ---

    def _receive_hello(self, hello: Hello) -> Hello | None:
        """Take a hello in, and return the one that answers it; None if nothing is left to say."""
        if self.stale is not None:
            return None
        reported = hello
        hello = self._for_protocol(hello)
        self.protocol.check_hello(hello)

        known = self.neighbours[hello.sender]
        began_without_this_peer = hello.round_index > 0 and not hello.knows
        if self.is_new and began_without_this_peer:
            self.is_new = False
            self.joins = True
            if self.protocol.mass:  # which has to come with the shares of others
                self.stale = f"peer {known.number} is in round {hello.round_index} already"
                return None

        try:
            reply = self.protocol.receive_hello(hello)
        except StaleStateError as error:
            self.stale = str(error)
            return None

        if known.boot != hello.boot:
            known.restart(hello.boot, hello.round_index)
        known.round_index = max(hello.round_index, known.round_index)
        known.want = hello.want
        known.level = hello.level
        queue = known.queue
        if queue.share is not None and queue.share.number > hello.seen:
            queue.share = None  # it did not come
        self._check_memory(known, reported)
        return None if reply is None else self._completed(reply)

    @abstractmethod
    def _for_protocol(self, hello: Hello) -> Hello:
        """Return a hello as `PushSumProtocol` reads it.

        Raises:
            RefusedError: it reports what cannot be.
        """

    @abstractmethod
    def _check_memory(self, known: Neighbour, hello: Hello) -> None:
        """Become stale if a neighbour's first hello shows that it has more of this peer than this peer remembers."""

    @abstractmethod
    def _completed(self, hello: Hello) -> Hello:
        """Return a hello that reports what this peer lacks of weight, or which rows of a neighbour were the last."""

    # --- what is sent: see Session ---

    def has_news(self, neighbor: int, now: float) -> bool:
        known = self.neighbours[neighbor]
        if self.stale is not None or not self.protocol.can_greet or known.quarantined:
            return False
        if now >= known.queue.hello_at or known.queue.hellos:
            return True
        if self.has_to_pass_on(neighbor, now):
            return True
        if known.reported_to < known.queue.report:
            return True
        return bool(self._due(known))

    def _due(self, known: Neighbour) -> list[Message]:
        """Return what a call has to bring: acknowledgements if no answer will, a share, and rows."""
        if not self.protocol.is_open(known.number):
            return []
        queue = known.queue
        acknowledgements = [] if known.answering else queue.acknowledgements
        due: list[Message] = []
        if self.protocol.owes(known.number):
            due += [share for share in self.protocol.shares_for(known.number) if share is not queue.share]
        return [*acknowledgements, *due, *queue.rows.values()]

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        """See Session: one call with everything, hellos first, for without them the rest may be refused."""
        known = self.neighbours[neighbor]
        messages: list[Message] = [*known.queue.hellos]
        if now >= known.queue.hello_at:
            messages.append(self._completed(self.protocol.hello(neighbor)))
        messages += self._due(known)

        # An acknowledgement that is lost with its call is made up for by the next hello, which must not be put off.
        if not all(isinstance(message, Acknowledgement) for message in messages):
            known.queue.hello_at = now + self._pause(known)
        has_to_report = known.reported_to < known.queue.report
        calls = []
        if messages or has_to_report:
            calls.append(messages)

        return self.passing_on(calls, neighbor, now)

    def _pause(self, known: Neighbour) -> float:
        """Return for how many seconds a neighbour is not greeted again."""
        if self.want or not self.protocol.is_open(known.number):
            known.pause = 0.0
        return known.pause_again(self.retry, self.rest)

    def _meet(self, known: Neighbour, now: float) -> None:
        """Record that something was exchanged with a neighbour, which then needs no greeting for a while."""
        known.meet(self.steps, now)
        if known.queue.hello_at > now:
            known.queue.hello_at = now + self.retry

    def answered(self, neighbor: int, sent: Messages, answer: Messages, now: float) -> None:
        super().answered(neighbor, sent, answer, now)
        known = self.neighbours[neighbor]
        queue = known.queue
        known.unreached = 0
        for message in sent:
            if isinstance(message, LedgerReport):
                known.informed = message.round_index
            elif isinstance(message, FrozenShare):
                queue.share = message
            elif isinstance(message, Hello) and message.want == Want.PARTED:
                known.has_told = True
            elif isinstance(message, RowMessage):
                self._meet(known, now)
                if queue.rows.get(message.at) is message:
                    del queue.rows[message.at]
        queue.hellos = [hello for hello in queue.hellos if hello not in sent]
        queue.acknowledgements = [ack for ack in queue.acknowledgements if ack not in sent]
        replies = self._received(neighbor, answer, now)
        queue.hellos = [*queue.hellos, *replies][-1:]

    def failed(self, neighbor: int, error: RunError, now: float) -> float:
        """See Session: what was lost with the call is sent again, and one that is lost or refuses it is greeted."""
        again = super().failed(neighbor, error, now)
        known = self.neighbours[neighbor]
        was_reached = not isinstance(error, UnreachableError)
        self._count_unreached(known, error, now)
        if was_reached or self.is_lost(neighbor):
            self.protocol.close(neighbor)
            known.queue.acknowledgements.clear()  # the counters of a hello hold them
        known.queue.hellos.clear()
        known.queue.share = None
        known.queue.hello_at = again
        return again

    def _count_unreached(self, known: Neighbour, error: RunError, now: float) -> None:
        """Count how many calls in a row did not reach a neighbour."""
        if not isinstance(error, UnreachableError):
            known.unreached = 0
            return

        # Without a stream of a device that only dials out a call fails at once: as many as are made within the time in
        # which it opens another say no more than one.
        is_counted = known.unreached > 0 and now < known.unreached_at + self.retry
        if error.code == NO_STREAM and is_counted:
            return
        known.unreached += 1
        known.unreached_at = now


class ShareSession(AsynchronousSession):
    """Of push-sum: hellos report what a peer lacks of weight, and `PushSumProtocol` knows what came."""

    def _for_protocol(self, hello: Hello) -> Hello:
        return hello

    def _check_memory(self, known: Neighbour, hello: Hello) -> None:
        """See AsynchronousSession: the counters of shares have shown it already."""

    def _completed(self, hello: Hello) -> Hello:
        if hello.receiver in self.parting and not self.protocol.owes(hello.receiver):
            return replace(hello, want=int(Want.PARTED))
        if not self.want:
            return hello
        return replace(hello, want=int(self.want), level=self.level)


class RowSession(AsynchronousSession):
    """Of gossip: hellos report which rows of a neighbour were the last, in the field that counts shares elsewhere.

    Attributes:
        ahead: the last round of which a neighbour reports that it had rows of this peer before; -1 if none does.
    """

    ahead = -1

    def _for_protocol(self, hello: Hello) -> Hello:
        if hello.seen > self.last_round + 1:
            raise RefusedError(
                f"peer {hello.sender} reports rows of round {hello.seen - 1} of peer {self.peer}, and the run has "
                f"{self.last_round}",
                code="peer.round",
            )
        return replace(hello, seen=0)

    def _check_memory(self, known: Neighbour, hello: Hello) -> None:
        if known.is_checked or not self.protocol.is_open(known.number):
            return
        known.is_checked = True
        last = hello.seen - 1
        if last > max(self.resumed_at, self.ahead):
            self.ahead = last
            self.joins |= self.is_new  # it has lost all it had
            self.stale = f"peer {known.number} has rows of round {last} of this peer, which remembers {self.resumed_at}"

    def _completed(self, hello: Hello) -> Hello:
        place = self.neighbours[hello.receiver].place
        return replace(hello, seen=0 if place is None else place[0] + 1)
