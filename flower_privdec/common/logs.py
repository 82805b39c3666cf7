"""What a process that runs for weeks says: one line a record, as text or JSON, on stderr or in files of a bounded size.

Records are those of the standard library's logging. One may carry an event and fields, see `event`:

    _log.info("round 5 of 40", extra=event("round", round=5, rounds=40))

    text    2026-05-04T10:20:30.123Z info: round 5 of 40
    json    {"time": "2026-05-04T10:20:30.123Z", "level": "info", "message": "round 5 of 40", "event": "round", ...}

A terminal shows no time, and a journal of systemd gets levels as it wants them and keeps the time itself. Whatever a
record says, it is one line without control characters: some of the text comes from other devices.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, TextIO

from flower_privdec.common.errors import ScenarioError, option
from flower_privdec.common.files import owners_file
from flower_privdec.common.formatting import printable

PACKAGE = "flower_privdec"
CLEAR_LINE = "\r\x1b[K"
SHOWN = ("round", "waiting", "done")  # events that a terminal shows in a line of its own, which is updated
MIB = 1 << 20
# A journal of systemd reads the level from the beginning of a line (sd-daemon(3)).
JOURNAL_LEVELS = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
TIMED = re.compile(r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z )?(debug|info|warning|error|critical): ")

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class LogOptions:
    """How a process logs.

    Attributes:
        format: text or json.
        level: the least that is logged.
        file: a file in place of stderr, on which only errors are said then; None for stderr.
        size: MiB of the file at which another one is begun.
        count: how many files are kept beside it, file.1 being the newest.
    """

    format: Format = "text"
    level: Level = "info"
    file: Path | None = None
    size: float = 10.0
    count: int = 5

    def __post_init__(self) -> None:
        if not 0.001 <= self.size <= 1e6:
            raise ScenarioError(
                f"{option('log-size', f'{self.size:g}')} must be 0.001 to 1,000,000 MiB: the size of one file of the "
                "log",
                code="logs.size",
            )
        if not 1 <= self.count <= 1000:
            raise ScenarioError(
                f"{option('log-count', self.count)} must be 1 to 1,000: how many full files are kept beside the log",
                code="logs.count",
            )


def event(name: str, /, **fields: Any) -> dict[str, Any]:
    """Return what `extra` of a record has to be for it to carry an event with fields."""
    return {"event": name, "fields": fields}


@contextmanager
def logging_to(options: LogOptions) -> Iterator[None]:
    """Log so while the context lasts, in all threads.

    Raises:
        ScenarioError: the log's file cannot be written.
    """
    handlers = _handlers(options)
    root = logging.getLogger()
    package = logging.getLogger(PACKAGE)
    root_level = root.level
    package_level = package.level

    # Other packages' progress is not this process's, but their warnings are.
    root.setLevel(max(logging.WARNING, _number(options.level)))
    package.setLevel(_number(options.level))
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(root_level)
        package.setLevel(package_level)


def adopt(name: str) -> None:
    """Let a package that brings handlers of its own log as this process does, if that logs by `logging_to`."""
    if any(isinstance(handler.formatter, LineFormatter) for handler in logging.getLogger().handlers):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def message_of(line: str) -> str:
    """Return the message of a line of text, without time and level."""
    return TIMED.sub("", line, count=1)


def _number(level: Level) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


def _handlers(options: LogOptions) -> list[logging.Handler]:
    formatter: LineFormatter = TextFormatter()
    if options.format == "json":
        formatter = JsonFormatter()

    if options.file is not None:
        file = BoundedFile(options.file, options)
        file.setFormatter(formatter)
        on_stderr: logging.Handler = StderrHandler()
        on_stderr.setLevel(logging.ERROR)
        on_stderr.setFormatter(formatter)
        return [file, on_stderr]

    if options.format == "text" and sys.stderr.isatty():
        handler: logging.Handler = TerminalHandler()
        handler.setFormatter(TextFormatter(timed=False))
        return [handler]

    handler = StderrHandler()
    if options.format == "text" and _is_journal(sys.stderr):
        formatter = TextFormatter(timed=False, journal=True)
    handler.setFormatter(formatter)
    return [handler]


def _is_journal(stream: TextIO) -> bool:
    """Return whether a stream leads to a journal of systemd, which names its device and inode to the process."""
    try:
        there = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


class LineFormatter(logging.Formatter):
    """Makes one line of a record."""

    @staticmethod
    def moment(record: logging.LogRecord) -> str:
        """Return when a record was made, in UTC with milliseconds."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"

    def trace(self, record: logging.LogRecord) -> str | None:
        """Return the traceback of a record; None if it has none."""
        if not record.exc_info:
            return None
        return "\n".join(printable(line) for line in self.formatException(record.exc_info).splitlines())


class TextFormatter(LineFormatter):
    """A record as `TIME level: message`; a traceback follows on lines of its own.

    Args:
        timed: whether the time stands before it.
        journal: whether the level stands before it as a journal reads it.
    """

    def __init__(self, *, timed: bool = True, journal: bool = False) -> None:
        super().__init__()
        self._timed = timed
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        message = printable(record.getMessage())
        level = record.levelname.lower()
        if self._journal:
            line = f"<{JOURNAL_LEVELS.get(record.levelno, 6)}>{message}"
        elif self._timed:
            line = f"{self.moment(record)} {level}: {message}"
        elif record.levelno == logging.INFO:
            line = message
        else:
            line = f"{level}: {message}"
        trace = self.trace(record)
        return line if trace is None else f"{line}\n{trace}"


class JsonFormatter(LineFormatter):
    """A record as one object of JSON: time, level, message, logger, and event and fields if it carries them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        content: dict[str, Any] = {
            "time": self.moment(record),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage()),
            "logger": record.name,
        }
        name = getattr(record, "event", None)
        if name is not None:
            content["event"] = name
            # A field never replaces what every record has.
            content = {**_plain(getattr(record, "fields", {})), **content}
        trace = self.trace(record)
        if trace is not None:
            content["trace"] = trace
        return json.dumps(content, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr as it is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Return stderr."""
        return sys.stderr


class TerminalHandler(StderrHandler):
    """Writes over the line that shows how the peer does, which is then shown again below."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless it is one that this line shows."""
        if getattr(record, "event", None) in SHOWN:
            return
        self.stream.write(CLEAR_LINE)
        super().emit(record)


class BoundedFile(RotatingFileHandler):
    """A log that takes (count + 1) files of its size at most, which only their owner may read.

    A disk that is full does not end the peer: that is said once on stderr, and the log goes on when there is room.

    Raises:
        ScenarioError: the file cannot be written.
    """

    def __init__(self, path: Path, options: LogOptions) -> None:
        self._has_failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, maxBytes=int(options.size * MIB), backupCount=options.count, encoding="utf-8")
        except OSError as error:
            raise ScenarioError(
                f"{option('log-file', path)} cannot be written ({error.strerror}); give another path, or leave it out "
                "to log on stderr",
                code="logs.file",
            ) from error

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=owners_file)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (a method of logging)
        """Say once that the log cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._say_once(error)

    def close(self) -> None:
        """Close the file; a last line that cannot be written does not change with which status a process ends."""
        try:
            super().close()
        except OSError as error:
            self._say_once(error)

    def _say_once(self, error: OSError) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        gaps = f"{self.baseFilename}: {error.strerror}; the log has gaps until that is mended"
        print(f"warning: {gaps}", file=sys.stderr)
