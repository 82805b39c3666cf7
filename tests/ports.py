"""Ports of this machine that no two processes of the tests are given at once, nor the system gives to who calls."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from itertools import cycle

EACH = 1_000  # ports of a process of the tests
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_LEAST, _FIRST = 10_000 + EACH * (_WORKER % 20), random.randrange(EACH)
_ports = cycle([_LEAST + (_FIRST + number) % EACH for number in range(EACH)])


def own_addresses(count: int) -> list[str]:
    """Return addresses that nobody listens on, each of which is not given again for long."""
    found = list[str]()
    while len(found) < count:
        port = next(_ports)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(f"127.0.0.1:{port}")
    return found
