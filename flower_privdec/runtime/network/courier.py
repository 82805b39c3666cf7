"""Carries what a peer and its neighbours say: a server for what comes, and a thread for each neighbour."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from threading import Condition, Thread
from typing import Any

from torch import Tensor

from flower_privdec.errors import RunError
from flower_privdec.runtime.network.channel import Link, Server, UnreachableError
from flower_privdec.runtime.network.identity import Credentials
from flower_privdec.runtime.network.letters import ASKING, CARRYING, PLACE, Letter, sealed
from flower_privdec.runtime.network.lockstep import Lockstep
from flower_privdec.runtime.network.share_protocol import RefusedError

Rows = Mapping[str, Tensor]
THREADS = 4  # of the server beside one for each neighbour


class Courier:
    """Takes a peer's letters to its neighbours until they have used them, and takes in theirs.

    Attributes:
        changed: guards the machine, and is told when it changes.
        trouble: why each neighbour could not be reached, since it last could.
        refused: what was wrong with the last letter of each caller that was refused.
        sent, heard: bytes.
    """

    def __init__(
        self,
        machine: Lockstep[bytes],
        run: bytes,
        unpack: Callable[[int, bytes], None],
        status: Callable[[], dict[str, Any]],
        retry: float,
        patience: float,
    ) -> None:
        """Carry nothing yet.

        Args:
            machine: what to carry.
            run: what tells this run from others, in every letter.
            unpack: checks what a letter holds for a place; raises RunError.
            status: what to say to who asks.
            retry: seconds until what was not used is sent again.
            patience: seconds that a call may take.
        """
        self.machine, self._run, self._unpack, self._status = machine, run, unpack, status
        self._retry, self._patience = retry, patience
        self.changed = Condition()
        self.trouble: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self.sent = self.heard = 0
        self._said: dict[int, int] = {}  # the place that each neighbour knows this peer to be at
        self._again: dict[int, float] = {}  # when to send again what a neighbour has not used
        self._fatal: RunError | None = None
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
            cap: bytes of a letter at most.

        Returns:
            The port that is listened on.
        """
        names = {peer: identity for identity, peer in members.items()}
        self._server = Server(address, credentials, members, self._answer, cap, len(others) + THREADS)
        self._links = {peer: Link(where, names[peer], credentials, cap) for peer, where in others.items()}
        self._threads = [Thread(target=self._serve, args=(peer,), daemon=True) for peer in self._links]
        for thread in self._threads:
            thread.start()
        return self._server.port

    def close(self) -> None:
        """Stop calling and listening."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        for link in self._links.values():
            link.close()
        for thread in self._threads:
            thread.join(2.0)
        if self._server is not None:
            self._server.close()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, as the machine changes.

        Args:
            ready: asked with the lock held.
            seconds: to wait at most.

        Returns:
            Whether it is so.

        Raises:
            RunError: what a neighbour said makes it impossible to go on.
        """
        with self.changed:
            done = self.changed.wait_for(lambda: self._fatal is not None or ready(), seconds)
            if self._fatal is not None:
                raise self._fatal
            return done

    def over(self) -> bool:
        """Return whether this peer and its neighbours know each other to be at the end; asked with the lock."""
        place = self.machine.place
        return not self.machine.before(place, self._links) and all(
            self._said.get(peer, -1) >= place for peer in self._links
        )

    def why(self, peer: int) -> str:
        """Say why a neighbour is not heard."""
        if peer in self.refused:
            return self.refused[peer]
        return self._links[peer].diagnosis() if peer in self.trouble else f"peer {peer} is slow, or waits itself"

    # --- what comes ---

    def _answer(self, caller: int, content: bytes) -> bytes:
        """Take a letter in; the answer says where this peer is."""
        try:
            letter = Letter.opened(content, self._run, caller)
            with self.changed:
                return self._taken(letter)
        except RunError as error:
            with self.changed:
                self.refused[caller] = str(error)
            raise RefusedError(str(error)) from error

    def _taken(self, letter: Letter) -> bytes:
        machine, caller = self.machine, letter.sender
        if letter.kind == ASKING:
            return json.dumps(self._status()).encode()
        self.heard += len(letter.content)
        if letter.kind == CARRYING and letter.place >= machine.place:
            self._unpack(letter.place, letter.content)
            machine.take(caller, letter.place, letter.content)
        self._told(caller, letter.sender_place)
        self._said[caller] = machine.place
        self.changed.notify_all()
        return sealed(PLACE, machine.peer, self._run, machine.place, machine.place)

    def _told(self, other: int, place: int) -> None:
        if place < 0:
            return  # it has begun to listen, and is nowhere yet
        try:
            self.machine.told(other, place)
        except RunError as error:
            self._fatal = error
            raise

    # --- what goes ---

    def _serve(self, peer: int) -> None:
        """Take what is due to a neighbour, as long as there is something, and say where this peer is."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._stopping or self._news(peer), self._retry)
                if self._stopping:
                    return
                if not self._news(peer):
                    continue
                place, due = self.machine.place, self.machine.due(peer)
            if self._bring(peer, place, due):
                self._again[peer] = time.monotonic() + self._retry

    def _news(self, peer: int) -> bool:
        """Return whether a neighbour does not know where this peer is, or has not used what it was sent a while ago."""
        new = self.machine.place > self._said.get(peer, -1)
        return new or (bool(self.machine.due(peer)) and time.monotonic() >= self._again.get(peer, 0.0))

    def _bring(self, peer: int, place: int, due: list[tuple[int, bytes]]) -> bool:
        """Call a neighbour; return whether it answered."""
        machine = self.machine
        letters = [sealed(CARRYING, machine.peer, self._run, at, place, content) for at, content in due]
        try:
            for letter in letters or [sealed(PLACE, machine.peer, self._run, place, place)]:
                self._answered(peer, place, letter, self._links[peer].call(letter, self._patience))
        except UnreachableError as error:
            with self.changed:
                self.trouble[peer] = str(error)
                self.changed.wait_for(lambda: self._stopping, self._retry)
            return False
        except RunError as error:
            with self.changed:
                self._fatal = self._fatal or RunError(f"peer {peer} says: {error}")
                self.changed.notify_all()
            return False
        return True

    def _answered(self, peer: int, place: int, letter: bytes, answer: bytes) -> None:
        its_place = Letter.opened(answer, self._run, peer).sender_place
        with self.changed:
            self.sent += len(letter)
            self._said[peer] = max(place, self._said.get(peer, -1))
            self.trouble.pop(peer, None)
            self._told(peer, its_place)
            self.changed.notify_all()
