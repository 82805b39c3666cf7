"""One peer, in a process of its own, that notes when its rounds end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flower_privdec.network.peer.modes import running_peer
from flower_privdec.network.peer.peer import PeerDevice
from flower_privdec.network.transport.certificates import credentials_of
from flower_privdec.scenario import load_scenario


class TimedSync:
    """Counts the seconds that this process waits in os.fsync."""

    def __init__(self) -> None:
        """Take its place."""
        self.seconds, self.count, sync = 0.0, 0, os.fsync

        def timed(descriptor: Any) -> None:
            began = time.monotonic()
            sync(descriptor)
            self.seconds += time.monotonic() - began
            self.count += 1

        os.fsync = timed  # type: ignore[assignment]


def stamps(scenario: str, peer: int, folder: str, certificates: str) -> list[tuple[float, ...]]:
    """Run the peer; return, for every round, [clock, CPU seconds, seconds of syncs, syncs, bytes sent]."""
    loaded = load_scenario(Path(scenario))
    assert loaded.network.peers is not None
    addresses = tuple(each.address for each in loaded.network.peers)
    device = PeerDevice(peer, Path(folder), credentials_of(loaded, Path(certificates), peer), addresses)
    timed, found = TimedSync(), list[tuple[float, ...]]()

    def note(status: dict[str, Any]) -> None:
        found.append((time.monotonic(), time.process_time(), timed.seconds, timed.count, status["bytes_sent"]))

    running = running_peer(loaded, device)
    try:
        running.open()
        running.run(note)
    finally:
        running.close()
    return found
