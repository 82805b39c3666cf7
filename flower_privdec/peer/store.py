"""The one door from a network peer to its disk: checkpoints, and what it has counted of its neighbours' ledgers.

A `Store` keeps both whole or not at all. `FolderStore` is a folder on a disk, held against a second process;
`MemoryStore` is for simulations and tests, and can be copied and put back, as an operator restores a backup.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import CHECKPOINTS, FolderLock, write_atomically
from flower_privdec.experiment.checkpoint import CARRIED, DTYPES, Checkpoint, described, restored
from flower_privdec.peer.record_log import DamagedLogError, Facts, NamedArrays, RecordLog, read_records
from flower_privdec.pushsum.witness import WitnessFile
from flower_privdec.rows.tensors import bits_of

if TYPE_CHECKING:
    from torch import Tensor

SCENARIO = "scenario.yaml"
WITNESSED = "neighbour-ledgers"


class Checkpoints(Protocol):
    """The last checkpoints of a peer; `CheckpointLog` has them on disk."""

    def read(self, device: torch.device) -> list[Checkpoint]:
        """Return the checkpoints to continue from, the older first; none at the beginning of a run.

        Raises:
            ScenarioError: there are some, and none can be read.
        """

    def write(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint in place of the oldest.

        Raises:
            OSError: the disk fails; the checkpoints before are whole.
        """


class LineCounts(Protocol):
    """How many ledger lines each start of each neighbour has, as far as was counted; `WitnessFile` has them on disk."""

    def read(self, more: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
        """Return the counts by neighbour and start; `more` is what the last checkpoint holds."""

    def write(self, neighbor: int, boot: int, lines: int) -> None:
        """Record a count, before anything follows from it.

        Raises:
            OSError: the disk fails.
        """

    def unsynced(self) -> dict[str, dict[str, int]]:
        """Return what only a checkpoint makes safe against a stop of the machine."""


class Store(Protocol):
    """What a peer keeps between two processes; see the module.

    Attributes:
        path: names it in errors.
        checkpoints, counts: its two parts.
    """

    path: Path

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def counts(self) -> LineCounts: ...

    def open(self) -> None:
        """Hold it against other processes.

        Raises:
            ScenarioError: another process holds it, or it cannot be written to.
        """

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
        self.checkpoints = CheckpointLog(self.path, generations)
        self.counts = WitnessFile(counts or folder / WITNESSED)
        self._folder = folder
        self._lock = FolderLock(folder)

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()

    def name_scenario(self, text: Callable[[], str]) -> None:
        path = self._folder / SCENARIO
        if not path.exists():
            write_atomically(path, text().encode(), public=True)

    def close(self) -> None:
        self.counts.close()
        self.checkpoints.close()
        self._lock.release()


class CheckpointLog:
    """The checkpoints of a network peer as records of one file; see Checkpoints and `record_log`.

    Args:
        path: the path of the file, made by the first checkpoint.
        count: how many of the last checkpoints remain readable, 1 or 2.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._records = RecordLog(path, count)
        self._copies: dict[tuple[int, int], tuple[Tensor, np.ndarray]] = {}  # of a GPU's, by address and size

    def read(self, device: torch.device) -> list[Checkpoint]:
        """See Checkpoints.

        Raises:
            ScenarioError: the file has no readable checkpoint.
        """
        try:
            return self._records.read(lambda facts, arrays: _checkpoint(facts, arrays, device))
        except DamagedLogError as error:
            raise _damaged(self._path, error) from error

    def write(self, checkpoint: Checkpoint) -> None:
        """See Checkpoints; what the checkpoint carries never changes."""
        facts, tensors = described(checkpoint)
        arrays = {name: self._bits(tensor) for name, tensor in tensors.items()}
        carried = [name for name in tensors if name.startswith(CARRIED)]
        self._records.write(facts, arrays, carried)
        if self._copies:
            memories = {_memory_of(tensors[name]) for name in carried}
            self._copies = {memory: copy for memory, copy in self._copies.items() if memory in memories}

    def _bits(self, tensor: Tensor) -> np.ndarray:
        """Return the bits of a tensor in the CPU's memory: of one that stays, at the same place each time.

        The log writes what lies at one place once.
        """
        if tensor.device.type == "cpu":
            return bits_of(tensor)
        memory = _memory_of(tensor)
        if memory not in self._copies:
            self._copies[memory] = tensor, bits_of(tensor)
        return self._copies[memory][1]

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def read_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the readable checkpoints of a network peer's file, the older first, to look at.

    Raises:
        ScenarioError: there is none.
    """
    cpu = torch.device("cpu")
    try:
        return read_records(path, lambda facts, arrays: _checkpoint(facts, arrays, cpu))
    except DamagedLogError as error:
        raise _damaged(path, error) from error


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _checkpoint(facts: Facts, arrays: NamedArrays, device: torch.device) -> Checkpoint:
    tensors = {}
    for name, numbers in arrays.items():
        dtype, *shape = facts["tensors"][name]
        flat = torch.from_numpy(numbers).view(DTYPES[dtype])
        tensors[name] = flat.to(device).reshape(shape)
    return restored(facts, tensors)


def _damaged(path: Path, error: DamagedLogError) -> ScenarioError:
    return ScenarioError(
        f"{path}: cannot be read as checkpoints ({error}); restore it from a copy, or start again with another "
        f"{option('out')}",
        code="checkpoints.damaged",
    )


class MemoryStore:
    """A store that lasts as long as its object, with which a simulated peer is killed and started again.

    Args:
        generations: how many of the last checkpoints stay, 1 or 2.

    Attributes:
        is_full: whether nothing can be written, as on a full disk.
    """

    path = Path("memory")

    def __init__(self, generations: int) -> None:
        self.checkpoints = MemoryCheckpoints(generations)
        self.counts = MemoryCounts()
        self._is_open = False

    @property
    def is_full(self) -> bool:
        return self.counts.is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        self.checkpoints.is_full = is_full
        self.counts.is_full = is_full

    def open(self) -> None:
        if self._is_open:
            raise RuntimeError("a store is for one peer at a time: close the other first")
        self._is_open = True

    def name_scenario(self, text: Callable[[], str]) -> None:
        """See Store; nobody reads it here."""

    def close(self) -> None:
        self._is_open = False

    def copy(self) -> MemoryStore:
        """Return a backup, with which a peer can be started later."""
        backup = MemoryStore(self.checkpoints.generations)
        for checkpoint in self.checkpoints.read(torch.device("cpu")):
            backup.checkpoints.write(checkpoint)
        for neighbor, starts in self.counts.read({}).items():
            for start, lines in starts.items():
                backup.counts.write(neighbor, start, lines)
        return backup


class MemoryCheckpoints:
    """The last checkpoints, in memory; see Checkpoints.

    Attributes:
        is_full: whether nothing can be written.
        is_torn: whether the process dies in the write under way, which leaves the checkpoints before.
    """

    def __init__(self, generations: int) -> None:
        self.generations = generations
        self.is_full = False
        self.is_torn = False
        self._kept = deque[Checkpoint](maxlen=generations)

    @property
    def newest(self) -> Checkpoint | None:
        """Return the last checkpoint, which nothing may change; None if there is none."""
        return self._kept[-1] if self._kept else None

    def read(self, device: torch.device) -> list[Checkpoint]:
        return [_copied(checkpoint) for checkpoint in self._kept]

    def write(self, checkpoint: Checkpoint) -> None:
        if self.is_full or self.is_torn:
            raise full_disk()
        self._kept.append(_copied(checkpoint))


class MemoryCounts:
    """Counts of ledger lines, in memory; see LineCounts."""

    def __init__(self) -> None:
        self.is_full = False
        self._lines: dict[int, dict[int, int]] = {}

    def read(self, more: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
        return {neighbor: dict(lines) for neighbor, lines in self._lines.items()}

    def write(self, neighbor: int, boot: int, lines: int) -> None:
        if self.is_full:
            raise full_disk()
        self._lines.setdefault(neighbor, {})[boot] = lines

    def unsynced(self) -> dict[str, dict[str, int]]:
        return {}


def full_disk() -> OSError:
    """Return the error of a full disk, for what is kept in memory."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "memory")


def _copied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose rows no step writes over; what is carried never changes."""
    rows: dict[str, Tensor] = {name: row.clone() for name, row in checkpoint.state.rows.items()}
    state = replace(checkpoint.state, rows=rows, edges=dict(checkpoint.state.edges))
    return replace(checkpoint, state=state)
