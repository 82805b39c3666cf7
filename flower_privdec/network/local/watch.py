"""Watch peers that are processes of this machine by requesting their status, again and again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from flower_privdec.errors import RunError
from flower_privdec.network.local.peer_processes import PeerProcesses
from flower_privdec.network.peer.status import STATUS_CAP, request_status
from flower_privdec.network.transport.grpc_transport import GrpcConnection
from flower_privdec.network.transport.tls import credentials_of, identities

OnStatus = Callable[[int, dict[str, Any] | None, str], None]  # of a peer: its status and a word on it
EVERY = 0.5  # seconds
ANSWER_SECONDS = 1.0
STARTING, SILENT, DONE = "starting", "no answer", "done"


class Watch:
    """Requests the status of every peer in a thread of its own; a context manager.

    Each request is made as if the peer made it itself: with its own certificate, at its own address.
    """

    def __init__(self, processes: PeerProcesses, on_status: OnStatus, every: float = EVERY) -> None:
        """Begin to request.

        Args:
            processes: the peers.
            on_status: called in these threads with a peer, its status (None where it did not answer) and a word:
                STARTING before its first answer, SILENT where it does not answer any more, DONE at its end.
            every: seconds between an answer and the next request.
        """
        self._processes, self._on_status, self._every, self._stopping = processes, on_status, every, Event()
        self._threads = [Thread(target=self._follow, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Request no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, peer: int) -> None:
        scenario, processes = self._processes.scenario, self._processes
        assert scenario.network.peers is not None
        credentials = credentials_of(scenario, processes.certificates, peer)
        address, name = scenario.network.peers[peer].address, identities(scenario)[peer]
        connection = GrpcConnection(address, name, credentials, STATUS_CAP)
        word = STARTING
        try:
            while not self._stopping.is_set() and not self._is_done(peer):
                status = self._request(connection)
                word = SILENT if status is not None else word  # from now on
                self._on_status(peer, status, word if status is None else "")
                self._stopping.wait(self._every)
            self._is_done(peer)
        finally:
            connection.close()

    def _is_done(self, peer: int) -> bool:
        """Report a peer's last status, if it came to its end."""
        status = self._processes.told(peer)
        if status is not None:
            self._on_status(peer, status, DONE)
        return status is not None

    def _request(self, connection: GrpcConnection) -> dict[str, Any] | None:
        try:
            return request_status(connection, ANSWER_SECONDS)
        except RunError:  # reported by the word instead
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
