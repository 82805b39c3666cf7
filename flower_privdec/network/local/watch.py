"""Watch peers that are processes of this machine by asking each of them how it does, again and again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from flower_privdec.errors import RunError
from flower_privdec.network.local.peer_processes import PeerProcesses
from flower_privdec.network.peer.status_request import Asker
from flower_privdec.network.transport.certificates import credentials_of, identities

OnStatus = Callable[[int, dict[str, Any] | None, str], None]  # of a peer, what it says, and what is to be said of it
EVERY = 0.5  # seconds
ANSWER_SECONDS = 1.0
STARTING, SILENT, DONE = "starting", "no answer", "done"


class Watch:
    """Asks every peer in a thread of its own; a context manager.

    Each of them is asked as if it asked itself: with its own certificate, at its own address.
    """

    def __init__(self, processes: PeerProcesses, on_status: OnStatus, every: float = EVERY) -> None:
        """Begin to ask.

        Args:
            processes: the peers.
            on_status: called in these threads with a peer, its status (None where it did not answer) and a word:
                STARTING before its first answer, SILENT where it does not answer any more, DONE at its end.
            every: seconds between an answer and the next question.
        """
        self._processes, self._on_status, self._every, self._stopping = processes, on_status, every, Event()
        self._threads = [Thread(target=self._follow, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ask no more; of those at their end it is told, and then nothing."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, peer: int) -> None:
        scenario, processes = self._processes.scenario, self._processes
        assert scenario.network.peers is not None
        credentials = credentials_of(scenario, processes.certificates, peer)
        asker = Asker(scenario.network.peers[peer].address, identities(scenario)[peer], credentials)
        word = STARTING
        try:
            while not self._stopping.is_set() and not self._is_done(peer):
                status = self._asked(asker)
                word = SILENT if status is not None else word  # from now on
                self._on_status(peer, status, word if status is None else "")
                self._stopping.wait(self._every)
            self._is_done(peer)
        finally:
            asker.close()

    def _is_done(self, peer: int) -> bool:
        """Tell what a peer said at its end, if it came there."""
        status = self._processes.told(peer)
        if status is not None:
            self._on_status(peer, status, DONE)
        return status is not None

    def _asked(self, asker: Asker) -> dict[str, Any] | None:
        try:
            return asker.ask(ANSWER_SECONDS)
        except RunError:  # said by the word that is told instead
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
