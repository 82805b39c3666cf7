"""`privdec`, and `python -m flower_privdec`."""

from __future__ import annotations

import os
import signal
from types import FrameType


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End while modules are imported, some of which would turn the exception of Ctrl-C into another."""
    os.write(2, b"interrupted: nothing has begun; run the same command again\n")
    os._exit(130)


def main() -> None:
    """Run the command line."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, _interrupted)
    from flower_privdec.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    run_command()


if __name__ == "__main__":
    main()
