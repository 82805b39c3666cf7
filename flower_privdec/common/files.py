"""Files that are replaced atomically, a lock on a folder, and the cache folder.

What a peer writes is for its owner only, unless its writer says `public`. A file is written under another name, flushed
to disk and renamed, and then its folder is flushed: after a crash, of the process or the machine, there is the old file
or the new one, never a part.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from flower_privdec.common.errors import RunError, ScenarioError, option
from flower_privdec.common.formatting import shown

T = TypeVar("T")
_log = logging.getLogger(__name__)
OWNER_ONLY = 0o600  # modes of new files, before the umask
EVERYBODY = 0o666
OWNERS_FOLDER = 0o700
DESCRIPTOR_SECONDS = 20.0  # how long to wait for a free descriptor: a server has closed idle connections by then


def open_file(path: Path, flags: int, mode: int = OWNER_ONLY) -> int:
    """Open a file as `os.open` does, a new one for its owner only; wait if process or machine have no descriptor free.

    Raises:
        OSError: as `os.open`; if no descriptor is free, after DESCRIPTOR_SECONDS.
    """
    until = time.monotonic() + DESCRIPTOR_SECONDS
    while True:
        try:
            return os.open(path, flags | os.O_CLOEXEC, mode)
        except OSError as error:
            has_no_descriptor = error.errno in (errno.EMFILE, errno.ENFILE)
            if not has_no_descriptor or time.monotonic() > until:
                raise
        time.sleep(0.02)


def owners_file(path: str, flags: int) -> int:
    """Open a file that only its owner may read, whatever the umask; an `opener` for `open`.

    If others may read a file that is there, they no longer may.
    """
    descriptor = open_file(Path(path), flags)
    close_to_others(descriptor)
    return descriptor


def close_to_others(descriptor: int) -> None:
    """Take every right on an open file from all users but its owner."""
    mode = os.fstat(descriptor).st_mode & 0o777
    if mode & ~OWNER_ONLY:
        with suppress(PermissionError):  # the file of another user, whose decision it is
            os.fchmod(descriptor, mode & OWNER_ONLY)


def make_owners_folder(folder: Path) -> None:
    """Make a folder whose files only its owner may list, and the folders above it if they are missing."""
    folder.mkdir(parents=True, exist_ok=True, mode=OWNERS_FOLDER)


def tried(path: str | Path) -> str:
    """Return a path for a message: as it was given, followed by the absolute path if it is relative."""
    full = Path(path).expanduser()
    if full == Path(path) and full.is_absolute():
        return str(path)
    return f"{path} ({full.absolute()})"


AGAIN = "then run the same command again"
DISK = {
    errno.ENOSPC: ("disk.full", f"free some space on its disk, {AGAIN}"),
    errno.EDQUOT: (
        "disk.quota",
        f"this user's quota on its disk is used up: free some space, or have it raised, {AGAIN}",
    ),
    errno.EROFS: ("disk.read-only", f"its disk may only be read, often after an error: check and remount it, {AGAIN}"),
    errno.EACCES: ("disk.forbidden", f"this user may not read or write it: change its owner or mode, {AGAIN}"),
    errno.EPERM: ("disk.forbidden", f"this user may not read or write it: change its owner or mode, {AGAIN}"),
    errno.EISDIR: ("disk.is-folder", f"a folder is there, and a file is wanted: give another path, {AGAIN}"),
    errno.ENOTDIR: ("disk.no-folder", f"a file is there, and a folder is wanted: give another path, {AGAIN}"),
    errno.EEXIST: ("disk.no-folder", f"a file is there, and a folder is wanted: give another path, {AGAIN}"),
    errno.ENOENT: ("disk.missing", f"nothing is there: correct the path, {AGAIN}"),
    errno.ENAMETOOLONG: ("disk.long-name", f"no disk takes so long a name: give a shorter path, {AGAIN}"),
    errno.EIO: ("disk.failed", f"its disk fails: read `dmesg`, {AGAIN} from a disk that works"),
    errno.EMFILE: ("disk.few-descriptors", f"raise the limit of open files (ulimit -n), {AGAIN}"),
    errno.ENFILE: ("disk.few-descriptors", f"the machine has too many files open: end other processes, {AGAIN}"),
}


def disk_error(error: OSError) -> RunError:
    """Return an error of a file in one line: the file, the cause and the remedy."""
    code, remedy = DISK.get(error.errno or 0, ("disk.other", "mend that, then try again"))

    path = "the output"
    if error.filename is not None:
        path = shown(str(error.filename), 300)[1:-1]  # without the quotes
    return RunError(f"{path}: {error.strerror or error}; {remedy}", code=code)


def check_file_place(name: str, path: Path) -> None:
    """Refuse a path at which no file can be written, before the work whose result it is for.

    Args:
        name: of the option that gave it.

    Raises:
        ScenarioError: a folder is there, or a file in the place of its folder.
    """
    if path.is_dir():
        raise ScenarioError(f"{option(name, path)}: is a folder; give the path of a file", code="path.is-folder")
    file = next((above for above in path.parents if above.exists()), path)
    if not file.is_dir() and file != path:
        raise ScenarioError(f"{option(name, path)}: {file} is no folder; give another path", code="path.no-folder")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in each OSError that names none; those of writing and flushing do not."""
    try:
        yield
    except OSError as error:
        raise named(error, path) from error.__cause__


def named(error: OSError, path: Path) -> OSError:
    """Return an error that names a file: the one that it names, or else this one."""
    if error.filename is None:
        error.filename = str(path)
    return error


@contextmanager
def replacing(path: Path, *, public: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a new file to write, which then replaces a path atomically: a crash leaves the old file or the new one.

    If an error is raised inside, the path is unchanged and no other file is left.

    Args:
        path: a file, in a folder that exists. If processes write the same path at the same time, the last one wins.
        public: let the umask decide who may read the file. By default only its owner may, so that a file about which
            nothing was decided stays with the peer.
        durable: hold this also if the machine stops, not only the process; it takes a few milliseconds.
    """
    mode = EVERYBODY if public else OWNER_ONLY
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    os.close(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode))
    try:
        with naming(path):
            yield part
        if not public:
            part.chmod(OWNER_ONLY)  # its writer may have replaced it by a file of another mode

        # The content must be on disk before the name is: else a crash could leave the new name on an empty file.
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
    if os.path.isabs(base):
        return Path(base) / "flower_privdec"
    return Path.home() / ".cache" / "flower_privdec"


def read_cached(path: Path, read: Callable[[Any], T]) -> T | None:
    """Return a JSON file of the cache, converted by `read`; None if it is missing, or, with a warning, damaged.

    Args:
        read: converts the content; raises ValueError, KeyError or TypeError if it is damaged.
    """
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("%s of the cache cannot be used (%s); it is computed again", path, error)
        return None


_keeps_cache: ContextVar[bool] = ContextVar("keeps_cache", default=True)


@contextmanager
def keeping_no_cache() -> Iterator[None]:
    """Write nothing to the cache inside; what is there is read."""
    token = _keeps_cache.set(False)
    try:
        yield
    finally:
        _keeps_cache.reset(token)


def keeps_cache() -> bool:
    """Return whether what is computed may be written to the cache."""
    return _keeps_cache.get()


def write_cached(path: Path, content: Any) -> None:
    """Write a JSON file of the cache. If it cannot be written, that is logged, and only costs time."""
    if not keeps_cache():
        return
    try:
        make_owners_folder(path.parent)
        write_atomically(path, json.dumps(content).encode())
    except OSError as error:
        _log.warning("%s of the cache cannot be written (%s); it is computed each time", path, error)


LOCK = ".lock"
CHECKPOINTS = "checkpoints"  # the folder of a network peer's states
MODEL = "model.safetensors"  # a network peer's own model


class FolderLock:
    """A lock of one process on a folder; it ends with the process.

    Its file stays after release. If it were deleted, two others could hold the lock, each by a file of its own.

    Why not the package filelock: it would replace the one call of flock below. The number of the holder in the file,
    for the error, and a check that creates nothing would stay our own. On a file system without flock it falls back to
    a marker file, which a killed process leaves behind.
    """

    def __init__(self, folder: Path) -> None:
        """Remember the path of the lock's file; `take` locks it."""
        self._path = folder / LOCK
        self._file: BinaryIO | None = None

    def check(self) -> None:
        """Refuse a folder that another process holds; write nothing.

        Raises:
            ScenarioError: another process holds it; the message names it.
        """
        if self._file is None and self._path.is_file():
            with suppress(PermissionError), self._path.open("r+b") as file:
                self._lock(file)

    def take(self) -> None:
        """Make the folder, and lock it.

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
        """Lock the file without waiting, or raise an error that names its holder."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = file.read(20).decode(errors="replace")
            raise ScenarioError(
                f"{self._path.parent}: another run writes to it (process {holder or 'unknown'}); wait for its end, or "
                f"give another {option('out')}",
                code="run.in-use",
            ) from error
