"""Carries what a peer and its neighbours say: a server for what comes, and a thread for each neighbour."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Condition, RLock, Thread
from typing import Any, Protocol

from flower_privdec.common.formatting import one_line
from flower_privdec.errors import RunError
from flower_privdec.network.transport.channel import Content, Link, Server, UnreachableError
from flower_privdec.network.transport.identity import Credentials
from flower_privdec.pushsum.share_protocol import RefusedError

THREADS = 4  # of the server beside one for each neighbour
SOON = 0.05  # seconds until a call that failed is made again, doubled each time
ASKING = b"privdec: how do you do?"  # a call that any peer of the scenario may make


class Mail(Protocol):
    """What a courier carries: what to say to whom, and what to make of what is said.

    All but `read` and `written` are called with the courier's lock held.

    Attributes:
        fatal: why the run cannot go on, once that is so.
    """

    fatal: RunError | None

    def read(self, caller: int, content: memoryview) -> Any:
        """Return what a call says.

        Raises:
            RunError: it breaks a rule, which is told to the caller, and changed nothing.
        """

    def take(self, caller: int, said: Any) -> Callable[[], Any]:
        """Take in what was read, and return what makes the answer, to be written."""

    def is_answered(self, caller: int, said: Any) -> bool:
        """Return whether there is no use in waiting with the answer, so that it may say more."""

    def has_news(self, neighbor: int, now: float) -> bool:
        """Return whether something is to be said to a neighbour by now."""

    def news(self, neighbor: int, now: float) -> list[Any]:
        """Return the calls to make now, to be written one by one."""

    def written(self, neighbor: int, words: Any) -> Content:
        """Return a call, or an answer, as bytes."""

    def answered(self, neighbor: int, words: Any, said: Any) -> None:
        """Take in what was read from the answer to a call."""

    def failed(self, neighbor: int, error: RunError, again: float) -> None:
        """Take note that a call did not reach a neighbour, or was refused by it, and when it may be called again."""


class Courier:
    """Makes a peer's calls to its neighbours, and takes theirs.

    Attributes:
        changed: guards the mail; `tell` lets those who wait for it know that it changed.
        trouble: why each neighbour could not be reached, since it last could.
        refused: what was wrong with the last call of each caller that was refused.
        sent, heard: bytes.
    """

    def __init__(self, mail: Mail, status: Callable[[], dict[str, Any]], retry: float, patience: float) -> None:
        """Carry nothing yet.

        Args:
            mail: what to carry.
            status: what to say to who asks.
            retry: seconds until a call that failed again and again is made anew; the first time it is sooner.
            patience: seconds that a call may take.
        """
        self.mail, self._status, self._retry, self._patience = mail, status, retry, patience
        self._holding = min(retry, patience) / 2  # seconds that an answer may be waited with
        self._lock = RLock()
        self.changed = Condition(self._lock)
        self._ears: dict[int, Condition] = {}  # of the same lock: a neighbour's thread wakes up for its own news alone
        self.trouble: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self.sent = self.heard = 0
        self._failures: Counter[int] = Counter()  # since the last call that was answered
        self._least: dict[int, float] = {}  # seconds of the quickest call to each neighbour since one failed
        self._stopping = False
        self._threads: list[Thread] = []
        self._server: Server | None = None
        self._links: dict[int, Link] = {}

    def open(
        self, address: str, credentials: Credentials, members: Mapping[str, int], others: Mapping[int, str], cap: int
    ) -> int:
        """Listen, and begin to call.

        Args:
            address: HOST:PORT to listen on.
            members: the number of every peer by its identity.
            others: the address of every neighbour by its number.
            cap: bytes of a call at most.

        Returns:
            The port that is listened on.
        """
        names = {peer: identity for identity, peer in members.items()}
        self._server = Server(address, credentials, members, self._answer, cap, len(others) + THREADS)
        self._links = {peer: Link(where, names[peer], credentials, cap) for peer, where in others.items()}
        self._ears = {peer: Condition(self._lock) for peer in self._links}
        self._threads = [Thread(target=self._serve_on, args=(peer,), daemon=True) for peer in self._links]
        for thread in self._threads:
            thread.start()
        return self._server.port

    def close(self) -> None:
        """Stop calling and listening."""
        with self.changed:
            self._stopping = True
            self.tell()
        for link in self._links.values():
            link.close()
        for thread in self._threads:
            thread.join(2.0)
        if self._server is not None:
            self._server.close()

    def tell(self) -> None:
        """Let everybody whom it concerns know that the mail changed; to be called with the lock held."""
        now = time.monotonic()
        self.changed.notify_all()
        for peer, ear in self._ears.items():
            if self._stopping or self.mail.has_news(peer, now):
                ear.notify()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, as the mail changes.

        Args:
            ready: asked with the lock held.
            seconds: to wait at most.

        Returns:
            Whether it is so.

        Raises:
            RunError: what a neighbour said makes it impossible to go on.
        """
        with self.changed:
            done = self.changed.wait_for(lambda: self.mail.fatal is not None or ready(), seconds)
            if self.mail.fatal is not None:
                raise self.mail.fatal
            return done

    def message_seconds(self) -> float:
        """Return how long a message takes to the neighbour that is nearest, at least; to be called with the lock held.

        It is the quickest answer, and what it last took to hand over a message of several pieces.
        """
        return min((least + self._links[peer].sending for peer, least in self._least.items()), default=0.0)

    def why(self, peer: int) -> str:
        """Say why a neighbour is not heard."""
        refused = self.refused.get(peer)
        if refused is not None:
            return refused
        return self._links[peer].diagnosis() if peer in self.trouble else f"peer {peer} is slow, or waits itself"

    # --- what comes ---

    def _answer(self, caller: int, content: memoryview) -> Content:
        if content == ASKING:
            with self.changed:
                return json.dumps(self._status()).encode()
        try:
            return self._taken(caller, content)
        except RunError as error:
            with self.changed:
                self.refused[caller] = str(error)
            raise RefusedError(str(error)) from error

    def _taken(self, caller: int, content: memoryview) -> Content:
        said = self.mail.read(caller, content)
        with self.changed:
            self.heard += len(content)
            answer = self.mail.take(caller, said)
            self.refused.pop(caller, None)
            self.tell()
            self.changed.wait_for(lambda: self._stopping or self.mail.is_answered(caller, said), self._holding)
            words = answer()
        return self.mail.written(caller, words)

    # --- what goes ---

    def _serve_on(self, peer: int) -> None:
        """Serve a neighbour; what nobody thought of ends the run, which would wait for ever otherwise."""
        try:
            self._serve(peer)
        except Exception as error:
            with self.changed:
                self.mail.fatal = RunError(f"nothing can be said to peer {peer} any more ({one_line(error)})")
                self.mail.fatal.__cause__ = error
                self.tell()

    def _serve(self, peer: int) -> None:
        """Take what is to be said to a neighbour, as long as there is something."""
        while True:
            with self.changed:
                self._ears[peer].wait_for(lambda: self._stopping or self._has_news(peer), self._retry)
                if self._stopping:
                    return
                calls = self.mail.news(peer, time.monotonic()) if self._has_news(peer) else []
            for words in calls:
                if not self._brought(peer, words):
                    break

    def _has_news(self, peer: int) -> bool:
        return self.mail.has_news(peer, time.monotonic())

    def _brought(self, peer: int, words: Any) -> bool:
        """Call a neighbour; return whether it answered."""
        call, began = self.mail.written(peer, words), time.monotonic()
        try:
            answer = self._links[peer].call(call, self._patience)
            took = time.monotonic() - began
            said = self.mail.read(peer, answer)
            with self.changed:
                self.sent += len(call)
                self._least[peer] = min(took, self._least.get(peer, took))
                self.trouble.pop(peer, None)
                self._failures.pop(peer, None)
                self.mail.answered(peer, words, said)
                self.tell()
        except RunError as error:
            self._failed(peer, error)
            return False
        return True

    def _failed(self, peer: int, error: RunError) -> None:
        """Let the mail know, and wait a while before the next call."""
        with self.changed:
            self.trouble[peer] = str(error) if isinstance(error, UnreachableError) else f"peer {peer} says: {error}"
            wait = min(self._retry, SOON * 2 ** min(16, self._failures[peer]))
            self._failures[peer] += 1
            self._least.pop(peer, None)
            self.mail.failed(peer, error, time.monotonic() + wait)
            self.tell()
            self._ears[peer].wait_for(lambda: self._stopping, wait)
