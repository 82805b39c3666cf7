"""Which files a run leaves open to other users of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

# What a run states of itself, and what others need to know of a peer. Nothing else is for other users.
PUBLIC = ("scenario.yaml", "network.yaml", "metrics.jsonl", "summary.json", "*.pem", "identity.pub", "*.svg", "*.png")


@contextmanager
def umask_of_none() -> Iterator[None]:
    """Take no right from new files, so that only what their writer asks for keeps them closed."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def closed_files(folder: Path) -> set[str]:
    """Return the names of the files that only their owner may read; every other file has to be a public one."""
    closed = set()
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        if path.stat().st_mode & 0o077 == 0:
            closed.add(path.name)
        else:
            assert any(fnmatch(path.name, name) for name in PUBLIC), f"{path} is open to others"
    return closed
