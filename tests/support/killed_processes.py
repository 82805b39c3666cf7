"""A networked peer as a process that kills itself where its state says, for a test that watches from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_privdec.core.cohort import Cohort
from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.store import CheckpointLog
from flower_privdec.privacy.ledger.ledger import Ledger
from flower_privdec.scenario import Scenario

METHODS: dict[str, tuple[type, str]] = {
    "payment": (Ledger, "append"),
    "release": (Cohort, "add_noise_"),
    "commit": (CheckpointLog, "write"),
}


@dataclass(frozen=True)
class Death:
    """Where a process ends: "before" or "after" a payment, release or commit, at the first from a round on."""

    what: str
    when: str
    round_index: int


def run_until(scenario: Scenario, device: PeerDevice, releases: Path, death: Death | None) -> None:
    """Run a peer to its death or its end; a byte is appended to a file for each release, which no kill undoes."""
    file = os.open(releases, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    release = Cohort.add_noise_

    def counted(*arguments: Any) -> None:
        os.write(file, b".")
        release(*arguments)

    Cohort.add_noise_ = counted  # type: ignore[method-assign]
    peer = running_peer(scenario, device)
    if death is not None:
        _end_at(death, lambda: peer.state.round_index >= death.round_index)
    driver = Driver(peer)
    try:
        driver.open()
        driver.run()
    finally:
        driver.close()


def _end_at(death: Death, is_due: Callable[[], bool]) -> None:
    owner, name = METHODS[death.what]
    method = getattr(owner, name)

    def ending(*arguments: Any, **options: Any) -> Any:
        due = is_due()
        if due and death.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*arguments, **options)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, ending)
