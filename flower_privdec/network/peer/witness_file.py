"""The file of the ledger lines that a peer has counted of its neighbours."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

from flower_privdec.common.files import named, naming, open_file

SLOT = struct.Struct("<QQQI")  # neighbour, boot, lines, CRC-32


class WitnessFile:
    """How many ledger lines a peer has counted of its neighbours' boots, as `LedgerWitness` keeps them, on its disk.

    A number is written over the one before it, whole, before anything follows from it: it survives the process at once,
    and the machine from the next checkpoint on, which holds what was not synced here.

    Args:
        path: of the file, made when something is counted.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1
        self._slots: dict[tuple[int, int], int] = {}
        self._unsynced: dict[tuple[int, int], int] = {}

    def read(self, more: Mapping[str, Mapping[str, int]] | None = None) -> dict[int, dict[int, int]]:
        """Return the lines of each neighbour's boots; a slot that was torn as the machine stopped has none.

        Args:
            more: what the last checkpoint holds, see `unsynced`.
        """
        seen: dict[int, dict[int, int]] = {}
        content = self._path.read_bytes() if self._path.exists() else b""
        for slot in range(-(-len(content) // SLOT.size)):
            record = content[slot * SLOT.size : (slot + 1) * SLOT.size]
            neighbor, boot, lines, check = SLOT.unpack(record.ljust(SLOT.size, b"\0"))
            is_whole = check == crc32(record[: SLOT.size - 4])
            self._slots[(neighbor, boot) if is_whole else (-1, slot)] = slot
            if is_whole:
                seen.setdefault(neighbor, {})[boot] = lines
        for name, boots in (more or {}).items():
            for boot_name, lines in boots.items():
                neighbor, boot = int(name), int(boot_name)
                if lines > seen.setdefault(neighbor, {}).get(boot, 0):
                    seen[neighbor][boot] = lines
                    self.write(neighbor, boot, lines)
        if content:
            self._file = open_file(self._path, os.O_WRONLY)
            os.fdatasync(self._file)  # a process that was killed may have left what it did not sync
        return seen

    def write(self, neighbor: int, boot: int, lines: int) -> None:
        """Put down how many lines a neighbour's boot has.

        Raises:
            OSError: the disk is full.
        """
        if self._file < 0:
            self._file = open_file(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        slot = self._slots.setdefault((neighbor, boot), len(self._slots))
        record = SLOT.pack(neighbor, boot, lines, 0)[:-4]
        record += crc32(record).to_bytes(4, "little")
        try:
            written = os.pwrite(self._file, record, slot * SLOT.size)
        except OSError as error:
            raise named(error, self._path) from error.__cause__
        if written < SLOT.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._unsynced[neighbor, boot] = lines

    def unsynced(self) -> dict[str, dict[str, int]]:
        """Return what was written and may not be on disk yet, for a checkpoint to hold."""
        unsynced: dict[str, dict[str, int]] = {}
        for (neighbor, boot), lines in list(self._unsynced.items()):
            unsynced.setdefault(str(neighbor), {})[str(boot)] = lines
        return unsynced

    def sync(self) -> None:
        """Flush it to disk."""
        if self._unsynced:
            with naming(self._path):
                os.fdatasync(self._file)
            self._unsynced.clear()

    def close(self) -> None:
        """Close it."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
