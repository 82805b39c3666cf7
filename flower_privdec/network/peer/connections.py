"""A peer's connections: a server for the calls that come, a thread for each neighbour, and their session."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from threading import Condition, RLock, Thread
from typing import Any

from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.peer.status import STATUS_REQUEST
from flower_privdec.network.transport.transport import Connection, Content, Transport, UnreachableError
from flower_privdec.pushsum.exactly_once import RefusedError
from flower_privdec.pushsum.frames import REPORT, FrameCodec, Message
from flower_privdec.pushsum.witness import RUNS_TWICE, LedgerReport, LedgerWitness

SOON = 0.05  # seconds until a call that failed is made again, doubled each time
Messages = list[Message]


class Session:
    """What a peer sends to its neighbours, and what it does with what they send.

    By itself it sends reports on ledgers alone, for a peer that takes no part in the run. All but `read` and `write`
    are called with the lock of `Connections` held.

    Args:
        witness: its reports on ledgers.
        frames: encodes and decodes its messages.
        most: how many frames a call may have beside the report.
        cap: bytes of these frames at most.
        last_round: of the run; no message is of a later one.

    Attributes:
        fatal: why the run cannot continue, once that is so; the ledger's problem is in `witness`.
        quarantined: why nothing is taken from, or sent to, a neighbour until this process ends.
        reported_to: the last round of this peer in a call or an answer to each neighbour; -1 for none.
        most: how many frames a call may have.
        cap: bytes of a call at most.
    """

    def __init__(self, witness: LedgerWitness, frames: FrameCodec, most: int, cap: int, last_round: int) -> None:
        self.peer = witness.peer
        self.witness = witness
        self.frames = frames
        self.last_round = last_round
        self.most = most + 1
        self.cap = cap + REPORT
        self.fatal: PrivdecError | None = None
        self.quarantined: dict[int, str] = {}
        self.reported_to = dict.fromkeys(witness.neighbors, -1)
        self._call_again: dict[int, float] = {}  # when to call a neighbour that could not be reached

    def read(self, caller: int, content: memoryview) -> Messages:
        """Decode a call or an answer.

        Raises:
            RefusedError: it breaks a rule, and changed nothing.
        """
        messages = list(self.frames.decode_all(content, self.most))
        for message in messages:
            if (message.sender, message.receiver) != (caller, self.peer):
                raise RefusedError(
                    f"peer {caller} brought a frame from peer {message.sender} to {message.receiver}, and this is peer "
                    f"{self.peer}; a peer may send its own frames alone",
                    code="call.not-its-own",
                )
            if (round_index := getattr(message, "round_index", 0)) > self.last_round:
                raise RefusedError(
                    f"a frame of peer {caller} is of round {round_index}, and the run has {self.last_round}",
                    code="peer.round",
                )
        if not messages or not isinstance(messages[0], LedgerReport):
            raise RefusedError(f"peer {caller} reports no ledger; update one of the two", code="call.no-report")
        self.witness.receive(messages[0])
        return messages

    @property
    def round_index(self) -> int:
        """Return the round that this peer reports to its neighbours, in each call and answer; 0 says nothing."""
        return 0

    def write(self, receiver: int, messages: Messages) -> tuple[Messages, Content]:
        """Return a call or an answer with what each begins with, the report on ledgers; and the same encoded."""
        self.reported_to[receiver] = self.round_index
        whole = [self.witness.report(receiver, self.round_index), *messages]
        return whole, [part for message in whole for part in self.frames.encode(message)]

    def receive(self, caller: int, messages: Messages) -> Callable[[], Messages]:
        """Take in a call, and return what makes the answer.

        Raises:
            RunError: a message breaks a rule, which the caller learns.
        """
        return list

    def is_answered(self, caller: int, messages: Messages) -> bool:
        """Return whether the answer to a call is complete: to wait longer would add nothing to it."""
        return True

    def has_news(self, neighbor: int, now: float) -> bool:
        """Return whether something is to be sent to a neighbour by now."""
        return now >= self._call_again.get(neighbor, 0.0) and not self.witness.has_heard(neighbor)

    def calls(self, neighbor: int, now: float) -> list[Messages]:
        """Return the calls to make now, one by one."""
        return [[]]

    def answered(self, neighbor: int, sent: Messages, answer: Messages) -> None:
        """Take in the answer to a call."""

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """Record that a call did not reach a neighbour, or was refused by it, and when it may be called again."""
        self._call_again[neighbor] = again


class Connections:
    """Makes a peer's calls to its neighbours, and takes theirs.

    Args:
        session: what to send and receive.
        status: what to answer a status request with.
        retry: seconds until a call that failed again and again is made again; the first time it is sooner.
        patience: seconds that a call may take.

    Attributes:
        changed: guards the session; `notify` wakes those who wait for a change of it.
        trouble: why each neighbour could not be reached, since it last could.
        refused: what was wrong with the last call of each caller that was refused.
        bytes_sent, bytes_received: of calls.
    """

    def __init__(self, session: Session, status: Callable[[], dict[str, Any]], retry: float, patience: float) -> None:
        self.session = session
        self._status = status
        self._retry = retry
        self._patience = patience
        self._holding = min(retry, patience) / 2  # seconds that an answer may be held back
        self._lock = RLock()
        self.changed = Condition(self._lock)
        self._wake: dict[int, Condition] = {}  # of the same lock: a neighbour's thread wakes up for its own news alone
        self.trouble: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self.bytes_sent = self.bytes_received = 0
        self._failures: Counter[int] = Counter()  # since the last call that was answered
        self._quickest: dict[int, float] = {}  # seconds of the quickest call to each neighbour since one failed
        self._twice: set[int] = set()  # neighbours that report two processes of this peer
        self._stopping = False
        self._threads: list[Thread] = []
        self._transport: Transport | None = None
        self._connections: dict[int, Connection] = {}

    def open(self, transport: Transport, neighbors: Iterable[int]) -> int:
        """Listen, and begin to call the neighbours; return the port that is listened on."""
        self._transport = transport
        cap = self.session.cap
        neighbors = list(neighbors)
        port = transport.serve(self._answer, cap, len(neighbors))
        self._connections = {peer: transport.connect(peer, cap) for peer in neighbors}
        self._wake = {peer: Condition(self._lock) for peer in neighbors}
        self._threads = [Thread(target=self._call_neighbor, args=(peer,), daemon=True) for peer in neighbors]
        for thread in self._threads:
            thread.start()
        return port

    def close(self) -> None:
        """Stop calling and listening."""
        with self.changed:
            self._stopping = True
            self.notify()
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            thread.join(2.0)
        if self._transport is not None:
            self._transport.close()

    def notify(self) -> None:
        """Wake all threads that a change of the session concerns; to be called with the lock held."""
        now = time.monotonic()
        self.changed.notify_all()
        for peer, wake in self._wake.items():
            if self._stopping or self.session.has_news(peer, now):
                wake.notify()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, as the session changes.

        Args:
            ready: called with the lock held.
            seconds: to wait at most.

        Returns:
            Whether it holds.

        Raises:
            RunError: what a neighbour sent makes it impossible to continue.
        """
        with self.changed:
            session = self.session  # a ledger that is an old copy may be why the neighbours' messages do not fit
            done = self.changed.wait_for(lambda: session.witness.problem or session.fatal or ready(), seconds)
            if (fatal := session.witness.problem or session.fatal) is not None:
                raise fatal
            return bool(done)

    def message_seconds(self) -> float:
        """Return how long a message takes to the nearest neighbour, at least; to be called with the lock held.

        It is the quickest answer, and what it last took to hand over a message of several pieces.
        """
        times = (least + self._connections[peer].sending for peer, least in self._quickest.items())
        return min(times, default=0.0)

    def why(self, peer: int) -> str:
        """Return in words why nothing came from a neighbour."""
        if (refused := self.refused.get(peer)) is not None:
            return refused
        if peer in self.trouble:
            return self._connections[peer].diagnosis()
        is_heard = self.session.witness.has_heard(peer)
        return f"peer {peer} is slow, or waits itself" if is_heard else f"peer {peer} has not answered yet"

    # --- calls of others ---

    def _answer(self, caller: int, content: memoryview) -> Content:
        if content == STATUS_REQUEST:
            with self.changed:
                return [json.dumps(self._status()).encode()]
        try:
            messages = self.session.read(caller, content)
            with self.changed:
                self.bytes_received += len(content)
                make_answer = self.session.receive(caller, messages)
                self.refused.pop(caller, None)
                self.notify()
                self.changed.wait_for(
                    lambda: self._stopping or self.session.is_answered(caller, messages), self._holding
                )
                answer = make_answer()
            return self.session.write(caller, answer)[1]
        except RunError as error:
            with self.changed:
                self.refused[caller] = str(error)
            raise RefusedError(str(error), code=error.code) from error

    # --- calls to others ---

    def _call_neighbor(self, peer: int) -> None:
        """Make the calls to a neighbour until the end; an unexpected error ends the run, which would wait otherwise."""
        try:
            while True:
                with self.changed:
                    wake = self._wake[peer]
                    wake.wait_for(lambda: self._stopping or self.session.has_news(peer, time.monotonic()), self._retry)
                    if self._stopping:
                        return
                    now = time.monotonic()
                    calls = self.session.calls(peer, now) if self.session.has_news(peer, now) else []
                for messages in calls:
                    if not self._call(peer, messages):
                        break
        except Exception as error:
            with self.changed:
                self.session.fatal = RunError(
                    f"nothing can be sent to peer {peer} any more ({one_line(error)})", code="network.failed"
                )
                self.session.fatal.__cause__ = error
                self.notify()

    def _call(self, peer: int, messages: Messages) -> bool:
        """Call a neighbour; return whether it answered."""
        (messages, call), began = self.session.write(peer, messages), time.monotonic()
        try:
            content = self._connections[peer].call(call, self._patience)
            took = time.monotonic() - began
            answer = self.session.read(peer, content)
            with self.changed:
                self.bytes_sent += sum(map(len, call))
                self._quickest[peer] = min(took, self._quickest.get(peer, took))
                self.trouble.pop(peer, None)
                self._failures.pop(peer, None)
                self.session.answered(peer, messages, answer)
                self.notify()
        except RunError as error:
            with self.changed:
                unreachable = isinstance(error, UnreachableError)
                self.trouble[peer] = str(error) if unreachable else f"peer {peer} refuses a call: {error}"
                pause = min(self._retry, SOON * 2 ** min(16, self._failures[peer]))
                self._failures[peer] += 1
                self._quickest.pop(peer, None)
                self.session.failed(peer, error, time.monotonic() + pause)
                self._twice |= {peer} if error.code == RUNS_TWICE else set()
                if 2 * len(self._twice) > len(self._wake):  # a lie of a few does not end this peer
                    self.session.fatal = RunError(str(error), code=RUNS_TWICE)
                self.notify()
                self._wake[peer].wait_for(lambda: self._stopping, pause)
            return False
        return True
