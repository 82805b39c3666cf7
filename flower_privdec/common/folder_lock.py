"""A lock on a run's folder, so that no two processes write to it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from flower_privdec.errors import ScenarioError

NAME = ".lock"


class FolderLock:
    """Holds a folder for one process; it dies with the process, whatever ends that.

    The file stays when the lock is let go of: to delete it would let two others hold it, each by its own file.
    """

    def __init__(self, folder: Path) -> None:
        """Take nothing yet."""
        self._path = folder / NAME
        self._file: BinaryIO | None = None

    def check(self) -> None:
        """Refuse a folder that another process holds; write nothing.

        Raises:
            ScenarioError: naming the process.
        """
        if self._file is None and self._path.is_file():
            with suppress(PermissionError), self._path.open("r+b") as file:
                self._lock(file)

    def take(self) -> None:
        """Make the folder, and hold it.

        Raises:
            ScenarioError: another process holds it, or it cannot be created.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        except OSError as error:
            folder = self._path.parent
            raise ScenarioError(f"{folder}: cannot be written to ({error.strerror}); give another --out") from error
        try:
            self._lock(file)
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def release(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(20).decode(errors="replace")
            raise ScenarioError(
                f"{self._path.parent}: another run writes to it (process {holder or 'unknown'}); wait for its end, or "
                "give another --out"
            ) from error
