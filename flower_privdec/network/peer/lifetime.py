"""What a peer's folder says of the processes that ran there: `process.json`, written when one begins and when it ends.

A process that was killed, or whose machine stopped, wrote no end: the next one finds that, and says so. It is for
people and for monitoring; nothing of the run depends on it.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import printable

_log = logging.getLogger(__name__)

FILE = "process.json"
KILLED = "killed"  # the reason of an end that nobody wrote
DONE = "done"
MOST_STARTS = 2**53


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        reason: `done`, the code of an error, or `killed`.
        status: its exit status; None if nobody wrote it.
        message: what it said.
        at: when, in UTC; "" if nobody wrote it.
    """

    reason: str
    status: int | None = None
    message: str = ""
    at: str = ""


class Lifetime:
    """The process that runs in a peer's folder, whose lock it holds.

    Attributes:
        starts: how many processes have begun there, this one included.
        before: how the one before this ended; None for the first.
    """

    def __init__(self, folder: Path) -> None:
        """Write that a process begins."""
        self._path = folder / FILE
        self._began = now()
        known = read_process(self._path)
        self.starts = 1
        self.before: End | None = None
        if known is not None:
            self.starts = known["starts"] + 1
            self.before = known["end"] or End(KILLED)
        self._write(None)

    def end(self, end: End) -> None:
        """Write how this process ends."""
        self._write(end)

    def _write(self, end: End | None) -> None:
        content = {
            "starts": self.starts,
            "began": self._began,
            "process": os.getpid(),
            "end": None if end is None else asdict(end),
        }
        try:
            write_atomically(self._path, json.dumps(content, indent=2).encode(), durable=False)
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s); how this process ends will not be known", self._path, error.strerror
            )


def now() -> str:
    """Return the time in UTC, to a second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_process(path: Path) -> dict[str, Any] | None:
    """Return starts, began, process and end (None for a process without one); None if the file is missing or torn."""
    try:
        content = json.loads(path.read_bytes())
        end = content["end"]
        if end is not None:
            status = end["status"]
            end = End(
                printable(str(end["reason"])),
                None if status is None else int(status),
                printable(str(end["message"])),
                printable(str(end["at"])),
            )
        starts = min(MOST_STARTS, max(0, int(content["starts"])))
        return {
            "starts": starts,
            "began": printable(str(content["began"])),
            "process": int(content["process"]),
            "end": end,
        }
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
