"""Files that are whole whatever happens, and where what can be made again is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a new file to write, which then takes a path's place: after a crash the old or the new is there, whole.

    Where something fails inside, the path is as it was and nothing is left beside it.

    Args:
        path: in a folder that is there. Processes that write the same path at the same time do not mix: the last wins.
        private: whether the file is for its owner alone.
        durable: whether that holds when the machine stops too, and not only the process; it takes a few milliseconds.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666))
    try:
        yield part
        if private:
            part.chmod(0o600)  # its writer may have recreated it
        if durable:
            _sync(part)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def write_atomically(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Write a file so that after a crash either the old or the new content is there, never a part; see `replacing`."""
    with replacing(path, private=private, durable=durable) as part:
        part.write_bytes(content)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder safe on disk."""
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return where what can be made again is kept: $XDG_CACHE_HOME/flower_privdec, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flower_privdec"
