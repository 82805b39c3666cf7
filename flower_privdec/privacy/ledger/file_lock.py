"""The lock on a ledger: at most one process, and one `Ledger` in it, may append to a file.

The lock is one `flock` on the descriptor that the lines are written through, so it is a lock on the file itself:

- The system releases it when the process ends, however it ends. Nothing is left behind that could be stale.
- Two opens of one file are two locks, so two threads of one process exclude each other too.
- Whatever path leads to the file (a symbolic link, a mount), it is one lock. A copy of a ledger is another file with a
  lock of its own; that it was continued beside the original is found by other means (see `ledger`).
- A forked child shares the lock of its parent, and may close its descriptor without releasing it.

Why not the package filelock: its FileLock opens a descriptor of its own. A lock file beside the ledger could be deleted
while it is held, and two paths to one ledger would have two of them. On a file system without `flock` it falls back to
a marker file, which a killed process leaves behind. It does not say who holds a native lock either. What it has for a
descriptor that is open already is the one call of `flock` below.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from flower_privdec.common.errors import BudgetError
from flower_privdec.common.files import make_owners_folder, open_file, sync


def open_locked(path: Path, durable: bool = True) -> int:
    """Open a ledger's file, created with its folder if missing, and lock it.

    Args:
        durable: whether the name of a new folder has to outlast a stop of the machine.

    Returns:
        A descriptor that appends. Closing it releases the lock.

    Raises:
        BudgetError: the file cannot be created, is no regular file, is in use, or its file system has no locks.
    """
    try:
        make_owners_folder(path.parent)
        if durable:
            sync(path.parent.parent)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        message = f"{error.filename or path} cannot be created ({error.strerror}); give another ledger folder"
        raise BudgetError(message, code="ledger.folder") from error

    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        message = f"{path} is not a regular file, so what is written to it may be lost; give another ledger folder"
        raise BudgetError(message, code="ledger.not-a-file")

    try:
        is_ours = _lock(fd, path)
    except OSError as error:
        os.close(fd)
        message = f"{path} cannot be locked ({error.strerror}); give a ledger folder on a file system that has locks"
        raise BudgetError(message, code="ledger.no-locks") from error
    if not is_ours:
        os.close(fd)
        message = f"{path} is in use by another run; wait for it to end, or give another ledger folder"
        raise BudgetError(message, code="ledger.in-use")
    return fd


def _lock(fd: int, path: Path) -> bool:
    """Lock an open file, without waiting, and return whether that succeeded; raises OSError if it has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    # Between open and flock, the last holder may have sealed its segment and put a new file under this path, or taken
    # the file away. The lock would then be on a file that no process appends to.
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def release_lock(fd: int) -> None:
    """Release the lock of an open file, for every process that shares it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
