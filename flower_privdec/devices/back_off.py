"""Waits before a peer that ended again and again is started once more.

A unit of systemd can wait longer each time only from version 254 on, which many devices do not have, and containers are
started again by others. So the peer itself counts its starts in a row that did not last, in a file of its folder, and
waits: not after the first, 10 seconds after the second, 20 after the third, and so on. The count begins again once a
start has lasted, or the peer ended as it should. It needs no clock, which may be wrong after a start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from flower_privdec.common.errors import NotAgreedError, StoppedError
from flower_privdec.common.files import make_owners_folder, write_atomically
from flower_privdec.common.logs import event

STARTS = "starts"
FIRST = 10.0  # seconds, of the first wait
LASTED = 600.0  # seconds after which a start has lasted
MOST_DOUBLINGS = 30

_log = logging.getLogger(__name__)


def waiting_time(starts: int, most: float) -> float:
    """Return how many seconds to wait after so many starts in a row that did not last."""
    if starts < 2:
        return 0.0
    return min(most, FIRST * 2.0 ** min(starts - 2, MOST_DOUBLINGS))


@contextmanager
def backing_off(folder: Path, most: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Wait before a peer's start if its last starts did not last, and count this one until it has.

    Args:
        folder: the peer's.
        most: the longest wait in seconds.
        sleep: waits so many seconds.
    """
    path = folder / STARTS
    starts = _read(path)
    _write(path, starts + 1)

    seconds = waiting_time(starts, most)
    if seconds:
        _log.warning(
            "the last %d starts ended soon: waiting %.0f s before this one",
            starts,
            seconds,
            extra=event("back-off", starts=starts, seconds=seconds),
        )
        sleep(seconds)

    lasted = Timer(LASTED, _write, (path, 0))
    lasted.daemon = True
    lasted.start()
    try:
        yield
    except (StoppedError, NotAgreedError):
        _write(path, 0)
        raise
    else:
        _write(path, 0)
    finally:
        lasted.cancel()


def _read(path: Path) -> int:
    """Return the count in a file; 0 if it is missing or damaged: then nothing is waited for."""
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0


def _write(path: Path, starts: int) -> None:
    """Write a count. If it cannot be written, the peer says so better when it writes there itself."""
    try:
        make_owners_folder(path.parent)
        write_atomically(path, str(starts).encode(), durable=False)
    except OSError as error:
        _log.info("%s cannot be written (%s), so the next start will not wait", path, error.strerror)
