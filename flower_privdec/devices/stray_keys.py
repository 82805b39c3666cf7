"""Private keys among files that are copied: found by what a file holds, whatever its name is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flower_privdec.network.transport.tls import AUTHORITY_KEY

PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=:,\s-]{32}")  # PEM, encrypted or not
LARGEST_KEY = 1 << 20  # bytes of a file that may be one


def is_private_key(name: str, content: bytes) -> bool:
    """Return whether a file holds a private key, or has the name of the authority's."""
    return name == AUTHORITY_KEY or PRIVATE_KEY.search(content) is not None


def private_keys(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are private keys."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size <= LARGEST_KEY and is_private_key(path.name, path.read_bytes()):
            yield path
