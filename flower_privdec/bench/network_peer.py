"""One peer in a process of its own that notes when its rounds end: `... network_peer SCENARIO ID FOLDER CERTS`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

from flower_privdec.runtime.network.certificates import credentials_of
from flower_privdec.runtime.network.modes import running_peer
from flower_privdec.runtime.network.peer import PeerDevice
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


def main(scenario: str, number: str, folder: str, certificates: str) -> None:
    """Run the peer; prints, as JSON, for every round [clock, CPU seconds, seconds of syncs, syncs, bytes sent]."""
    loaded, peer = load_scenario(Path(scenario)), int(number)
    assert loaded.network.peers is not None
    addresses = tuple(each.address for each in loaded.network.peers)
    device = PeerDevice(peer, Path(folder), credentials_of(loaded, Path(certificates), peer), addresses)
    timed, stamps = TimedSync(), []

    def note(status: dict[str, Any]) -> None:
        stamps.append((time.monotonic(), time.process_time(), timed.seconds, timed.count, status["bytes_sent"]))

    running = running_peer(loaded, device)
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        running.open()
        running.run(note)
    finally:
        running.close()
    print(json.dumps(stamps), flush=True)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
