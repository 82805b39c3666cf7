"""The one door from a peer to its disk: checkpoints, and what it has counted of its neighbours' ledgers.

A `Store` keeps both whole or not at all. `FolderStore` is a folder on a disk, held against a second process;
`MemoryStore` is for simulations and tests, and can be copied and put back, as an operator restores a backup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from flower_privdec.common.files import CHECKPOINTS, FolderLock, write_atomically
from flower_privdec.experiment.checkpoint import Checkpoint, CheckpointLog
from flower_privdec.pushsum.witness import WitnessFile

SCENARIO = "scenario.yaml"
WITNESSED = "neighbour-ledgers"

LineCounts = Mapping[str, Mapping[str, int]]  # ledger lines by neighbour and life, as JSON has them


class Store(Protocol):
    """What a peer keeps between two processes; see the module.

    Attributes:
        path: names it in errors.
    """

    path: Path

    def open(self) -> None:
        """Hold it against other processes.

        Raises:
            ScenarioError: another process holds it, or it cannot be written to.
        """

    def checkpoints(self, device: torch.device) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none at the beginning of a run.

        Raises:
            ScenarioError: there are some, and none can be read.
        """

    def write(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in place of the oldest; it holds what was counted since the last one too.

        Raises:
            OSError: the disk fails; the checkpoints before are whole.
        """

    def counted(self, more: LineCounts) -> Mapping[int, Mapping[int, int]]:
        """Return the ledger lines counted of each neighbour's lives; `more` is what the last checkpoint holds."""

    def count(self, neighbor: int, life: int, lines: int) -> None:
        """Record how many ledger lines a neighbour's life has, before anything follows from it.

        Raises:
            OSError: the disk fails.
        """

    def uncheckpointed(self) -> dict[str, dict[str, int]]:
        """Return what was counted and only a checkpoint makes safe against a stop of the machine."""

    def name_scenario(self, text: Callable[[], str]) -> None:
        """Keep the scenario for people to read, unless it is there."""

    def close(self) -> None:
        """Release it."""


class FolderStore:
    """A peer's folder; see Store.

    Args:
        folder: the peer's.
        generations: how many of the last checkpoints stay readable, 1 or 2.
        counts: the file of what was counted; by default one in the folder. Runs of one identity share it.
    """

    def __init__(self, folder: Path, generations: int, counts: Path | None = None) -> None:
        self.path = folder / CHECKPOINTS
        self._folder = folder
        self._lock = FolderLock(folder)
        self._log = CheckpointLog(self.path, generations)
        self._counts = WitnessFile(counts or folder / WITNESSED)

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()

    def checkpoints(self, device: torch.device) -> list[Checkpoint]:
        return self._log.read(device)

    def write(self, checkpoint: Checkpoint) -> None:
        self._log.write(checkpoint)

    def counted(self, more: LineCounts) -> Mapping[int, Mapping[int, int]]:
        return self._counts.read(more)

    def count(self, neighbor: int, life: int, lines: int) -> None:
        self._counts.write(neighbor, life, lines)

    def uncheckpointed(self) -> dict[str, dict[str, int]]:
        return self._counts.unsynced()

    def name_scenario(self, text: Callable[[], str]) -> None:
        path = self._folder / SCENARIO
        if not path.exists():
            write_atomically(path, text().encode(), public=True)

    def close(self) -> None:
        self._counts.close()
        self._log.close()
        self._lock.release()


class MemoryStore:
    """A store that lasts as long as its object, which a peer of a simulation is killed and started again with.

    Args:
        generations: how many of the last checkpoints stay, 1 or 2.
    """

    path = Path("memory")

    def __init__(self, generations: int) -> None:
        self._kept = deque[Checkpoint](maxlen=generations)
        self._lines: dict[int, dict[int, int]] = {}
        self._is_open = False

    def open(self) -> None:
        if self._is_open:
            raise RuntimeError("a store is for one peer at a time: close the other first")
        self._is_open = True

    def checkpoints(self, device: torch.device) -> list[Checkpoint]:
        return [_copied(checkpoint) for checkpoint in self._kept]

    def write(self, checkpoint: Checkpoint) -> None:
        self._kept.append(_copied(checkpoint))

    def counted(self, more: LineCounts) -> Mapping[int, Mapping[int, int]]:
        return {neighbor: dict(lines) for neighbor, lines in self._lines.items()}

    def count(self, neighbor: int, life: int, lines: int) -> None:
        self._lines.setdefault(neighbor, {})[life] = lines

    def uncheckpointed(self) -> dict[str, dict[str, int]]:
        return {}

    def name_scenario(self, text: Callable[[], str]) -> None:
        """See Store; nobody reads it here."""

    def close(self) -> None:
        self._is_open = False

    def copy(self) -> MemoryStore:
        """Return a backup, with which a peer can be started later."""
        backup = MemoryStore(self._kept.maxlen or 1)
        backup._kept.extend(self._kept)
        backup._lines = {neighbor: dict(lines) for neighbor, lines in self._lines.items()}
        return backup


def _copied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose rows no step writes over; what is carried never changes."""
    rows: dict[str, Any] = {name: row.clone() for name, row in checkpoint.state.rows.items()}
    return replace(checkpoint, state=replace(checkpoint.state, rows=rows))
