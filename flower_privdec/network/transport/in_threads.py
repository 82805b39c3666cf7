"""A transport whose calls block, for a peer that never does: a thread for each connection, and one for each call.

A `Transport` is easy to write: a call returns its answer. A peer is one thread, to which what comes is told in `turn`.
Here threads wait in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, cast

from flower_privdec.common.errors import RunError
from flower_privdec.common.formatting import one_line
from flower_privdec.network.transport.transport import (
    Connection,
    Content,
    Done,
    EventConnection,
    EventTransport,
    Take,
    Transport,
    UnreachableError,
)

JOIN_SECONDS = 2.0  # for a connection's thread to end; it is a daemon and holds nothing
LOOK_SECONDS = 0.2  # for which nothing comes, until a waiting caller looks again
CALL_SECONDS = 120.0  # for a call to be answered; the peer's thread ended if it takes longer
CLOSED = UnreachableError("this peer ends", code="call.closed")


def evented(transport: Transport | EventTransport) -> EventTransport:
    """Return a transport for a peer; its own threads wait if the calls of the given one block."""
    if hasattr(transport, "turn"):
        return cast(EventTransport, transport)
    return InThreads(transport)


def call_and_wait(
    turn: Callable[[float], None], connection: EventConnection, content: Content, seconds: float
) -> memoryview:
    """Make a call and return its answer, for a caller that has nothing else to do; see `Connection.call`.

    Args:
        turn: of the connection's transport.
    """
    answers: list[memoryview | RunError] = []
    connection.post(content, seconds, answers.append)
    while not answers:
        turn(LOOK_SECONDS)
    (answer,) = answers
    if isinstance(answer, RunError):
        raise answer
    return answer


class InThreads:
    """A transport whose calls are made and answered in threads; see EventTransport.

    Args:
        transport: which carries the calls.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._came = deque[Callable[[], None]]()
        self._changed = Condition()
        self._unanswered = set[SimpleQueue[Content | RunError]]()
        self._is_woken = False
        self._is_closed = False

    def listen(self, take: Take, cap: int, callers: int) -> int:
        def answer(caller: int, content: memoryview) -> Content:
            """Wait until the peer's thread has answered."""
            answers = SimpleQueue[Content | RunError]()
            with self._changed:
                if self._is_closed:
                    raise CLOSED
                self._unanswered.add(answers)
            self.tell(lambda: take(caller, content, answers.put))
            try:
                found = answers.get(timeout=CALL_SECONDS)
            finally:
                with self._changed:
                    self._unanswered.discard(answers)
            if isinstance(found, RunError):
                raise found
            return found

        return self.transport.serve(answer, cap, callers)

    def connect(self, peer: int, cap: int) -> ThreadConnection:
        return ThreadConnection(self.transport.connect(peer, cap), self)

    def update(self, directory: Any, credentials: Any) -> None:
        """Let the transport know of a change, if it wants to."""
        if hasattr(self.transport, "update"):
            self.transport.update(directory, credentials)

    def tell(self, callback: Callable[[], None]) -> None:
        """Have something called by `turn`, in any thread."""
        with self._changed:
            self._came.append(callback)
            self._changed.notify_all()

    def turn(self, seconds: float) -> None:
        with self._changed:
            if not (self._came or self._is_woken) and seconds > 0:
                self._changed.wait(seconds)
            self._is_woken = False
        while self._came:
            self._came.popleft()()

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """See EventTransport; calls that were not answered fail."""
        with self._changed:
            self._is_closed = True
            for answers in self._unanswered:
                answers.put(CLOSED)
        self.transport.close()


class ThreadConnection:
    """Calls to one peer that a thread makes; see EventConnection."""

    def __init__(self, connection: Connection, threads: InThreads) -> None:
        self.connection = connection
        self._threads = threads
        self._calls = SimpleQueue[tuple[Content, float, Done] | None]()
        self._thread = Thread(target=self._call_all, daemon=True)
        self._thread.start()

    @property
    def sending(self) -> float:
        """Return how long the last call took to hand over; see Connection."""
        return self.connection.sending

    def post(self, content: Content, seconds: float, done: Done) -> None:
        self._calls.put((content, seconds, done))

    def _call_all(self) -> None:
        while True:
            asked = self._calls.get()
            if asked is None:
                return
            content, seconds, done = asked
            answer: memoryview | RunError
            try:
                answer = self.connection.call(content, seconds)
            except RunError as error:
                answer = error
            except Exception as error:  # of a user's own transport: the call was not answered, whatever it is
                answer = UnreachableError(f"the transport failed ({one_line(error)})", code="call.failed")
                answer.__cause__ = error
            self._threads.tell(lambda done=done, answer=answer: done(answer))  # type: ignore[misc]

    def diagnosis(self) -> str:
        return self.connection.diagnosis()

    def close(self) -> None:
        self._calls.put(None)
        self.connection.close()
        self._thread.join(JOIN_SECONDS)
