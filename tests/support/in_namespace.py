"""Run a module in a network namespace: `python -m in_namespace SPACE MODULE ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path

from tools.lab.air import enter


def watch(address: str, certificates: str, peer: str, path: str) -> None:
    """Request a peer's status again and again, and write the last one to a file."""
    from flower_privdec.common.errors import RunError
    from flower_privdec.common.files import write_atomically
    from flower_privdec.network.peer.status import STATUS_REQUEST
    from flower_privdec.network.transport.streams import StreamConnection
    from flower_privdec.network.transport.tls import Credentials, files_of, identities_of

    paths = files_of(Path(certificates), int(peer))
    (name,) = identities_of(paths[0].read_bytes())
    link = StreamConnection(address, name, Credentials.read(*paths, name), 1 << 20)
    while True:
        with suppress(RunError):
            write_atomically(Path(path), bytes(link.call([STATUS_REQUEST], 5.0)))
        time.sleep(0.1)


if __name__ == "__main__":
    _, space, module, *arguments = sys.argv
    enter(space)
    if module == "watch":
        watch(*arguments)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
