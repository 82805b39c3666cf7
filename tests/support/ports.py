"""Ports of this machine that no two processes of any tests are given at once, nor the system gives to who calls."""

from __future__ import annotations

import socket
from contextlib import suppress
from itertools import cycle

EACH = 1_000  # ports of a process of the tests
BLOCKS = range(10_000, 32_000, EACH)


def _taken() -> socket.socket:
    """Take a block of ports for as long as this process lasts, by listening on its first."""
    for first in BLOCKS:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", first))
    raise RuntimeError(f"all {len(BLOCKS)} blocks of ports are in use by other tests; wait for them")


_guard = _taken()
_first = _guard.getsockname()[1]
_ports = cycle(range(_first + 1, _first + EACH))


def own_addresses(count: int) -> list[str]:
    """Return addresses that nobody listens on, each of which is not given again for long."""
    found = list[str]()
    while len(found) < count:
        port = next(_ports)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(f"127.0.0.1:{port}")
    return found
