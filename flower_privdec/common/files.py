"""Files that are replaced atomically, a lock on a folder, and the cache folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from flower_privdec.common.errors import RunError, ScenarioError, option
from flower_privdec.common.formatting import shown

T = TypeVar("T")
_log = logging.getLogger(__name__)
OWNER_ONLY, EVERYBODY = 0o600, 0o666  # modes of new files, before the umask
OWNERS_FOLDER = 0o700
DESCRIPTOR_SECONDS = 20.0  # until a descriptor must be free: a server closes what strangers took of them by then


def open_file(path: Path, flags: int, mode: int = OWNER_ONLY) -> int:
    """Open a file as `os.open` does, a new one for its owner only; wait while the process or machine has no descriptor.

    Raises:
        OSError: as `os.open`; for want of a descriptor only after DESCRIPTOR_SECONDS.
    """
    until = time.monotonic() + DESCRIPTOR_SECONDS
    while True:
        try:
            return os.open(path, flags | os.O_CLOEXEC, mode)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > until:
                raise
        time.sleep(0.02)


def owners_file(path: str, flags: int) -> int:
    """Open a file that only its owner may read, whatever the umask; the `opener` of `open`.

    A file that an earlier version left open to others is closed to them.
    """
    descriptor = open_file(Path(path), flags)
    close_to_others(descriptor)
    return descriptor


def close_to_others(descriptor: int) -> None:
    """Take every right on an open file from all users but its owner."""
    mode = os.fstat(descriptor).st_mode & 0o777
    if mode & ~OWNER_ONLY:
        with suppress(PermissionError):  # it belongs to another user, who decides
            os.fchmod(descriptor, mode & OWNER_ONLY)


def make_owners_folder(folder: Path) -> None:
    """Make a folder, and those above it if they are missing, whose files only its owner may list."""
    folder.mkdir(parents=True, exist_ok=True, mode=OWNERS_FOLDER)


def tried(path: str | Path) -> str:
    """Return a path as a message shows it: as it was given, and where that is, when it is relative."""
    full = Path(path).expanduser()
    return str(path) if full == Path(path) and full.is_absolute() else f"{path} ({full.absolute()})"


AGAIN = "then run the same command again"
DISK = {
    errno.ENOSPC: ("disk.full", f"free some space on its disk, {AGAIN}"),
    errno.EDQUOT: (
        "disk.quota",
        f"this user's quota on its disk is used up: free some space, or have it raised, {AGAIN}",
    ),
    errno.EROFS: ("disk.read-only", f"its disk may only be read, often after an error: check and remount it, {AGAIN}"),
    errno.EACCES: ("disk.forbidden", f"this user may not write there: change its owner or mode, {AGAIN}"),
    errno.EPERM: ("disk.forbidden", f"this user may not write there: change its owner or mode, {AGAIN}"),
    errno.EIO: ("disk.failed", f"its disk fails: read `dmesg`, {AGAIN} from a disk that works"),
    errno.EMFILE: ("disk.few-descriptors", f"raise the limit of open files (ulimit -n), {AGAIN}"),
    errno.ENFILE: ("disk.few-descriptors", f"the machine has too many files open: end other processes, {AGAIN}"),
}


def disk_error(error: OSError) -> RunError:
    """Return an error of a file in a line: the file, the cause, and the remedy."""
    code, remedy = DISK.get(error.errno or 0, ("disk.other", "mend that, then try again"))
    path = "the output" if error.filename is None else shown(str(error.filename), 300)[1:-1]
    return RunError(f"{path}: {error.strerror or error}; {remedy}", code=code)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in an OSError that does not, as those of writing and of flushing."""
    try:
        yield
    except OSError as error:
        raise named(error, path) from error.__cause__


def named(error: OSError, path: Path) -> OSError:
    """Return an error that names a file, where it does not."""
    error.filename = str(path) if error.filename is None else error.filename
    return error


@contextmanager
def replacing(path: Path, *, public: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a new file to write, which then replaces a path atomically: a crash leaves the old or the new one.

    Where an error is raised inside, the path is unchanged and no other file is left.

    Args:
        path: in a folder that is there. Processes that write the same path at the same time do not mix: the last wins.
        public: whether the umask decides who may read the file; by default only its owner may, so that what no one
            thought about stays with the peer.
        durable: whether that holds when the machine stops too, and not only the process; it takes a few milliseconds.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    os.close(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, EVERYBODY if public else OWNER_ONLY))
    try:
        with naming(path):
            yield part
        if not public:
            part.chmod(OWNER_ONLY)  # its writer may have recreated it
        if durable:
            sync(part)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    if durable:
        sync(path.parent)


def write_atomically(path: Path, content: bytes, *, public: bool = False, durable: bool = True) -> None:
    """Write a file atomically; see `replacing`."""
    with (
        replacing(path, public=public, durable=durable) as part,
        os.fdopen(open_file(part, os.O_WRONLY), "wb") as file,
    ):
        file.write(content)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = open_file(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/flower_privdec, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flower_privdec"


def read_cached(path: Path, read: Callable[[Any], T]) -> T | None:
    """Return what `read` makes of a JSON file of the cache; None without one, or, with a warning, for a wrong one.

    Args:
        read: raises a ValueError, KeyError or TypeError for what is wrong.
    """
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s of the cache cannot be used (%s); it is computed again", path, error)
        return None


def write_cached(path: Path, content: Any) -> None:
    """Write a JSON file of the cache; where it cannot be written, that costs time alone, and is logged."""
    try:
        make_owners_folder(path.parent)
        write_atomically(path, json.dumps(content).encode())
    except OSError as error:
        _log.warning("%s of the cache cannot be written (%s); it is computed each time", path, error)


LOCK = ".lock"
CHECKPOINTS, MODEL = "checkpoints", "model.safetensors"  # of a peer of a network; its own model


class FolderLock:
    """A lock of one process on a folder; it ends with the process.

    Its file stays after release: were it deleted, two others could hold the lock, each by its own file.
    """

    def __init__(self, folder: Path) -> None:
        """Name the lock's file; `take` locks it."""
        self._path = folder / LOCK
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
            file = os.fdopen(open_file(self._path, os.O_RDWR | os.O_CREAT), "r+b")
        except OSError as error:
            folder = self._path.parent
            raise ScenarioError(
                f"{folder}: cannot be written to ({error.strerror}); give another {option('out')}",
                code="run.unwritable",
            ) from error
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
        """Release the folder."""
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
                f"give another {option('out')}",
                code="run.in-use",
            ) from error
