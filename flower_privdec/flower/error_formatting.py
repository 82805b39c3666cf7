"""One-line errors under Flower: the reason for a failure, in place of the tracebacks that led to it.

A failure passes three places, each with its function here:

- a ClientApp's handler (`one_line_replies`) replies with an error of one line. On a deployed node that line goes to a
  server, so it names no folder (`line_for_server`), and an error of other code, which may quote data, only by its type;
- the strategy takes the line out of Flower's wrapping (`reason`);
- the ServerApp's last log record becomes that line (`one_line_failure`).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

from flwr.app import Context, Error, Message

from flower_privdec.common.errors import PrivdecError
from flower_privdec.common.formatting import one_line
from flower_privdec.flower.node_settings import in_simulation

USER_ERRORS = (PrivdecError, OSError)  # that a user or an administrator can act on; others keep their traceback

# Ray's errors (2.55) for a process that has ended, by name: this module must not import ray.
DEATHS = frozenset({"RayActorError", "ActorDiedError", "OutOfMemoryError", "WorkerCrashedError"})
DIED = "its process has ended (killed, or out of memory); give it more memory or fewer peers, and resume the run"

CLIENT_APP_RAISED = 2  # Flower's number (ErrorCode) for the error of a ClientApp that raised
FOLDERS = re.compile(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^/\s'\"]+/)+")  # in a path, everything but its name

Handler = Callable[[Message, Context], Message]

log = logging.getLogger("flwr.privdec")


class _LastLine(logging.Filter):
    """Replaces the log record of a failure by one line, and drops Flower's records after it."""

    has_ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        # Flower (1.41 to 1.43) logs some failures with `exc_info`, and some in an `except` clause without it.
        error = record.exc_info[1] if record.exc_info else sys.exception()
        if self.has_ended:
            return False

        if isinstance(error, USER_ERRORS):
            record.msg = error_line(error)
            record.args = ()
            record.exc_info = None
            record.exc_text = None
            self.has_ended = True
            return True

        # Ray's record for a dead process is dropped too: the strategy reports it with its node's name.
        kinds = {kind.__name__ for kind in type(error).__mro__}
        return DEATHS.isdisjoint(kinds)


_last_line = _LastLine()


def error_line(error: BaseException) -> str:
    """Return a failure in one line: the message of an error of this package, else its type and text."""
    if isinstance(error, PrivdecError):
        return " ".join(str(error).split())
    return one_line(error)


def line_for_server(error: BaseException, context: Context) -> str:
    """Return a failure in one line for a server: without the folders of a deployed node, which its own log has."""
    line = error_line(error)
    if in_simulation(context.node_config):
        return line
    log.error("%s", line)

    # Those that the node has may hold blanks, which FOLDERS takes for a path's end.
    own = [Path(value).expanduser() for value in map(str, context.node_config.values()) if "/" in value]
    folders: set[str] = set()
    for path in (Path.cwd(), Path.home(), *own):
        absolute = path.absolute()
        folders |= {str(path), str(absolute), *map(str, absolute.parents)}
    for folder in sorted(folders - {"/", "."}, key=len, reverse=True):  # the longest first, as others begin it
        line = line.replace(f"{folder}/", "").replace(folder, Path(folder).name)

    return FOLDERS.sub("", line)


@contextmanager
def one_line_failure() -> Iterator[None]:
    """Run a ServerApp whose log ends with one line if it fails for a reason that a user can act on."""
    flower = logging.getLogger("flwr")
    _last_line.has_ended = False
    flower.addFilter(_last_line)
    yield
    # Only after a success: Flower (1.41 to 1.43) logs a failure once the ServerApp has ended, so that after one the
    # filter must stay until the next run.
    flower.removeFilter(_last_line)


def one_line_replies(handler: Handler) -> Handler:
    """Return a ClientApp's handler that replies with an error of one line if it fails.

    The message of an error that other code raised may contain private data: it stays in the node's log.
    """

    @wraps(handler)
    def reply(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except USER_ERRORS as error:
            line = line_for_server(error, context)
        except Exception as error:
            log.exception("the ClientApp failed")
            line = f"the ClientApp raised {type(error).__name__}; its message may contain data: see the node's own log"
        return Message(Error(CLIENT_APP_RAISED, line), reply_to=message)

    return reply


def reason(text: str | None) -> str:
    """Return the last line of a node's error, without the traceback before it and Flower's wrapping."""
    words = text or ""

    # Flower's simulation (1.41 to 1.43) puts an exception as <class 'TYPE'>:<'TEXT'>.
    wrapped = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", words, re.DOTALL)
    if wrapped:
        if wrapped[1].removeprefix("ray.exceptions.") in DEATHS:
            return DIED
        words = wrapped[2]

    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if not lines:
        return "unknown"
    return lines[-1].removeprefix("Exception ClientAppException occurred. Message: ")
