"""Messages in, messages out: what a peer says to its neighbours, and what it does with what they say.

A session has no socket, no clock and no thread. Whoever drives it hands it each call that came with the moment at which
it came, asks whether there is news for a neighbour, carries the calls, and hands back the answers and the failures.
All of that is for one thread at a time, except for `read` and `write`.

    receive(caller, messages, now)      a call came; returns what makes its answer
    is_answered(caller, messages)       whether the answer may leave, or will say more if it is held back a little
    has_news(neighbour, now)            whether to call a neighbour now
    calls(neighbour, now)               the calls to make
    answered(neighbour, sent, answer, now), failed(neighbour, error, now)    what became of a call

Each call and each answer begins with a report on ledgers (`LedgerWitness`). If peers share noise, session keys follow
it, how far all peers are, and what own noise they have promised (`Roster`). A call also brings what the neighbour lacks
of the list of members (`MemberNews`). `ShareSession` and `RowSession` are for
peers that nobody waits for, `SynchronousSession` is for peers that all wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.peer.driving import Content, UnreachableError
from flower_privdec.peer.extension import GAP
from flower_privdec.peer.neighbour import Neighbour
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import ENTRIES_CAP, REPORT, FrameCodec, Message
from flower_privdec.pushsum.membership import MORE_ROUNDS, SHUT_OUT, MemberEntries, MemberNews
from flower_privdec.pushsum.promises import Promises
from flower_privdec.pushsum.roster import KeyRecords, Presence, Roster
from flower_privdec.pushsum.witness import RUNS_TWICE, LedgerReport, LedgerWitness

SOON = 0.05  # seconds until a call that failed is made again, doubled each time
MOST_DOUBLINGS = 16
Messages = list[Message]


class Session:
    """A peer's side of all its conversations.

    By itself it sends only reports on ledgers, for a peer that takes no part in the run.

    Args:
        witness: its reports on ledgers.
        frames: encodes and decodes its messages.
        most: how many frames a call may have beside the report.
        cap: bytes of these frames at most.
        last_round: of the run; no message is of a later one.
        retry: seconds until what was not answered is sent again.

    Attributes:
        neighbours: what is known of each.
        fatal: why the run cannot continue, once that is so; the ledger's problem is in `witness`.
        most: how many frames a call may have.
        cap: bytes of a call at most.
        rest: seconds until a neighbour is called again from which nothing new comes, or that is not there; it is sooner
            at first.
        bytes_sent, bytes_received: of calls.
        roster: the session keys of all peers; None if no noise is shared.
        news: what it hands on of the list of members; None if there is none.
    """

    def __init__(
        self, witness: LedgerWitness, frames: FrameCodec, most: int, cap: int, last_round: int, retry: float
    ) -> None:
        self.peer = witness.peer
        self.witness = witness
        self.frames = frames
        self.last_round = last_round
        self.retry = retry
        self.rest = retry
        self.most = most + 1
        self.cap = cap + REPORT
        self.neighbours = {j: Neighbour(j) for j in sorted(witness.neighbors)}
        self.fatal: PrivdecError | None = None
        self.bytes_sent = 0
        self.bytes_received = 0
        self.roster: Roster | None = None
        self.news: MemberNews | None = None

    def join(self, roster: Roster, members: int) -> None:
        """Pass on session keys, promises and how far peers are, of a run of so many members."""
        self.roster = roster
        self.frames.members = members
        self.most += 3
        self.cap += self.frames.roster_cap

    def hand_on(self, news: MemberNews) -> None:
        """Hand on the list of members."""
        self.news = news
        self.most += 1
        self.cap += ENTRIES_CAP

    def shut_out(self, neighbor: int, why: str) -> None:
        """Take nothing from a neighbour any more, and send it nothing."""
        self.neighbours[neighbor].quarantined = why

    @property
    def problem(self) -> PrivdecError | None:
        """Return why this peer has to stop; None if it need not.

        The ledger's comes first: a ledger that is an old copy may be why the neighbours' messages do not fit.
        """
        return self.witness.problem or self.fatal

    # --- bytes, in any thread ---

    def read(self, caller: int, content: memoryview) -> Messages:
        """Decode a call or an answer.

        Raises:
            RefusedError: it breaks a rule, and changed nothing.
        """
        messages = list(self.frames.decode_all(content, self.most))
        if self.news is not None:
            messages = self._with_entries(caller, self.news, messages)
        for message in messages:
            if (message.sender, message.receiver) != (caller, self.peer):
                raise RefusedError(
                    f"peer {caller} brought a frame from peer {message.sender} to {message.receiver}, and this is peer "
                    f"{self.peer}; a peer may send only its own frames",
                    code="call.not-its-own",
                )
            round_index = getattr(message, "round_index", 0)
            if self.news is not None and round_index > self.last_round + GAP // 2:
                raise RefusedError(
                    f"peer {caller} has been given more rounds than peer {self.peer}, whose list of members has "
                    f"{self.news.height} entries",
                    code=MORE_ROUNDS,
                )
            if round_index > self.last_round:
                raise RefusedError(
                    f"a frame of peer {caller} is of round {round_index}, and the run has {self.last_round}",
                    code="peer.round",
                )

        if not messages or not isinstance(messages[0], LedgerReport):
            raise RefusedError(f"peer {caller} reports no ledger; update one of the two", code="call.no-report")

        self.witness.receive(messages[0])
        if self.news is not None:
            self.news.hear(caller, messages[0].entries)
        if self.roster is None:
            return messages
        self.roster.meet(caller, messages[0].boot)
        return [message for message in messages if not self._is_of_roster(message)]

    def _with_entries(self, caller: int, news: MemberNews, messages: Messages) -> Messages:
        """Take in what messages bring of the list of members, and return the others.

        It comes first: by what it says, the caller may be a neighbour.
        """
        others: Messages = []
        for message in messages:
            if not isinstance(message, MemberEntries):
                others.append(message)
            elif message.sender == caller:
                news.take(message)
        return others

    def _is_of_roster(self, message: Message) -> bool:
        """Take a message in that is about all peers; return whether it is one."""
        if not isinstance(message, Presence | KeyRecords | Promises):
            return False
        if self.roster is not None:
            self.roster.receive(message)
        return True

    @property
    def round_index(self) -> int:
        """Return the round that this peer reports to its neighbours, in each call and answer; 0 says nothing."""
        return 0

    def write(self, receiver: int, messages: Messages) -> tuple[Messages, Content]:
        """Return a call or an answer with the report on ledgers at its beginning; and the same encoded."""
        self.neighbours[receiver].reported_to = self.round_index
        height = 0 if self.news is None else self.news.height
        whole: Messages = [self.witness.report(receiver, self.round_index, height)]
        if self.roster is not None:
            presence = self.roster.presence_for(receiver)
            if presence is not None:
                whole.append(presence)
            promises = self.roster.promises_for(receiver)
            if promises is not None:
                whole.append(promises)
        whole += messages
        return whole, [part for message in whole for part in self.frames.encode(message)]

    # --- calls of others ---

    def receive(self, caller: int, messages: Messages, now: float) -> Callable[[], Messages]:
        """Take in a call, and return what makes the answer.

        Raises:
            RunError: a message breaks a rule, which the caller learns.
        """
        return list

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """Return whether the answer to a call is complete: to wait longer would add nothing to it."""
        return True

    # --- calls to others ---

    def has_news(self, neighbor: int, now: float) -> bool:
        """Return whether something is to be sent to a neighbour by now."""
        if now < self.neighbours[neighbor].call_again:
            return False
        return self.has_to_pass_on(neighbor, now) or not self.witness.has_heard(neighbor)

    def has_to_pass_on(self, neighbor: int, now: float) -> bool:
        """Return whether a neighbour is to be brought session keys, or entries of the list of members, by now."""
        if self.roster is not None and self.roster.has_records(neighbor, now):
            return True
        return self.news is not None and self.news.has_entries(neighbor, now)

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        """Return the calls to make now, one by one."""
        return self.passing_on([[]], neighbor, now)

    def passing_on(self, calls: list[Messages], neighbor: int, now: float) -> list[Messages]:
        """Return calls that also bring the session keys, and the entries of the list of members, that one lacks."""
        more: Messages = []
        if self.news is not None:
            entries = self.news.entries_for(neighbor, now)
            if entries is not None:
                more.append(entries)
        if self.roster is not None:
            records = self.roster.records_for(neighbor, now)
            if records is not None:
                more.append(records)
        if not more:
            return calls
        if not calls:
            return [more]
        return [[*more, *calls[0]], *calls[1:]]

    def answered(self, neighbor: int, sent: Messages, answer: Messages, now: float) -> None:
        """Take in the answer to a call."""
        known = self.neighbours[neighbor]
        known.answered += 1
        known.failures = 0
        known.trouble = ""
        known.shuts_out = False
        known.call_again = now + self.retry  # a neighbour that answers, and reports nothing new, is not asked at once
        for message in sent:
            if isinstance(message, KeyRecords) and self.roster is not None:
                self.roster.arrived(message)

    def took(self, neighbor: int, seconds: float, sending: float) -> None:
        """Record how long a call took, and how long it took to hand it over, both in seconds."""
        known = self.neighbours[neighbor]
        known.quickest = seconds if known.quickest is None else min(seconds, known.quickest)
        known.sending = sending

    def failed(self, neighbor: int, error: RunError, now: float) -> float:
        """Record that a call did not reach a neighbour, or was refused by it.

        Returns:
            The moment at which it may be called again.
        """
        known = self.neighbours[neighbor]
        pause = min(self.rest, SOON * 2 ** min(MOST_DOUBLINGS, known.failures))
        known.call_again = now + pause
        known.failed += 1
        known.failures += 1
        known.quickest = None
        known.trouble = str(error)
        if not isinstance(error, UnreachableError):
            known.trouble = f"peer {neighbor} refuses a call: {error}"

        if error.code == RUNS_TWICE:
            known.reports_twin = True
        if error.code == SHUT_OUT:
            known.shuts_out = True
        for code, reports in ((RUNS_TWICE, "reports_twin"), (SHUT_OUT, "shuts_out")):
            reporting = sum(getattr(one, reports) for one in self.neighbours.values())
            if 2 * reporting > len(self.neighbours):  # a lie of a few does not end this peer
                self.fatal = RunError(str(error), code=code)
        return known.call_again

    def message_seconds(self) -> float:
        """Return how long a message takes to the nearest neighbour, at least.

        It is the quickest answer, and what it last took to hand over a message of several pieces.
        """
        measured = [one for one in self.neighbours.values() if one.quickest is not None]
        return min((one.quickest + one.sending for one in measured if one.quickest is not None), default=0.0)
