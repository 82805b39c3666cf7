"""One-line errors under Flower: the reason for a failure instead of the tracebacks that led to it.

An error that a peer's ClientApp raises takes this way, each step with its function here:

1. The peer's handler (`one_line_replies`) answers with an error of one line. If the peer is deployed, the line leaves
   its machine: it then names no folder (`line_for_server`). An error that is not one of ours may quote private data, so
   only its type is sent.
2. The strategy on the server takes the line out of Flower's wrapping (`reason`) and raises it.
3. The line becomes the last record in the ServerApp's log (`one_line_failure`).
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

# Errors that a user or an administrator can act on. All others are bugs and keep their traceback.
USER_ERRORS = (PrivdecError, OSError)

# Ray's errors (2.55) for a process that has ended, by name, because this module must not import ray.
DEATHS = frozenset({"RayActorError", "ActorDiedError", "OutOfMemoryError", "WorkerCrashedError"})
DIED = "its process has ended (killed, or out of memory); give it more memory or fewer peers, and resume the run"

# What a SuperLink (1.41 to 1.43) answers in place of a node that it has lost, by the code of the error. Such an answer
# names the SuperLink, and no node, as its sender.
LOST_NODE = {
    3: "its SuperNode did not take the message, or its answer was lost on the way",
    4: "its answer came too late",
    5: "its SuperNode gives no sign of life",
}

CLIENT_APP_RAISED = 2  # Flower's ErrorCode for a ClientApp that raised

# The folders of an absolute, relative or home path in a text, without its last part: "/a/b/" of "/a/b/c". A slash
# inside a word, such as that of "steps/s" or a URL, does not start a path.
FOLDERS = re.compile(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^/\s'\"]+/)+")

Handler = Callable[[Message, Context], Message]

log = logging.getLogger("flwr.privdec")


class _LastLine(logging.Filter):
    """Replaces the log record of a failure with one line, and drops what Flower logs after it."""

    has_ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self.has_ended:
            return False

        # Flower (1.41 to 1.43) logs some failures with `exc_info`, and others inside an `except` clause without it.
        error = record.exc_info[1] if record.exc_info else sys.exception()

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


# One filter for the process. `one_line_failure` may leave it in place, and must find it to start over.
_last_line = _LastLine()


def error_line(error: BaseException) -> str:
    """Return a failure in one line: only the message of one of our own errors, type and message of any other."""
    if isinstance(error, PrivdecError):
        return " ".join(str(error).split())
    return one_line(error)


def line_for_server(error: BaseException, context: Context) -> str:
    """Return a failure in one line that may be sent to a server.

    The line of a deployed peer names no folder of its machine. The full line goes to its own log.
    """
    line = error_line(error)
    if in_simulation(context.node_config):
        return line
    log.error("%s", line)

    # Known folders are removed by name first: they may contain blanks, at which FOLDERS would take a path to end.
    config_values = map(str, context.node_config.values())
    config_paths = [Path(value).expanduser() for value in config_values if "/" in value]
    folders: set[str] = set()
    for path in (Path.cwd(), Path.home(), *config_paths):
        absolute = path.absolute()
        folders |= {str(path), str(absolute), *map(str, absolute.parents)}

    # Longest first: if /a went before /a/b, the rest "b/" would stay.
    for folder in sorted(folders - {"/", "."}, key=len, reverse=True):
        line = line.replace(f"{folder}/", "").replace(folder, Path(folder).name)

    return FOLDERS.sub("", line)


@contextmanager
def only_our_lines() -> Iterator[None]:
    """Quiet what Flower logs below warnings; this package's lines keep the level that a user gave them, or Flower's."""
    flower = logging.getLogger("flwr")
    before = [(logger, logger.level) for logger in (flower, log)]
    log.setLevel(log.getEffectiveLevel())
    flower.setLevel(max(flower.level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


@contextmanager
def one_line_failure() -> Iterator[None]:
    """Run a ServerApp; if it fails for a reason that a user can act on, its log ends with one line."""
    flower = logging.getLogger("flwr")
    _last_line.has_ended = False
    flower.addFilter(_last_line)
    yield

    # No try/finally: Flower (1.41 to 1.43) logs a failure only after the ServerApp has ended, so after a failure the
    # filter must stay until the next run.
    flower.removeFilter(_last_line)


def one_line_replies(handler: Handler) -> Handler:
    """Wrap a ClientApp's handler so that it replies with an error of one line if it fails.

    Privacy: only the messages of USER_ERRORS are sent. Any other may quote private data and stays in the node's log.
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


def reason_of(error: Error) -> str:
    """Return why a node did not do what it was asked for, in one line."""
    return LOST_NODE.get(error.code) or reason(error.reason)


def reason(text: str | None) -> str:
    """Return the last line of a node's error, without the traceback above it or Flower's wrapping around it."""
    unwrapped = text or ""

    # Flower's simulation (1.41 to 1.43) formats an exception as <class 'TYPE'>:<'TEXT'>.
    wrapped = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", unwrapped, re.DOTALL)
    if wrapped:
        error_type, error_text = wrapped.groups()
        if error_type.removeprefix("ray.exceptions.") in DEATHS:
            return DIED
        unwrapped = error_text

    lines = [line.strip() for line in unwrapped.splitlines() if line.strip()]
    if not lines:
        return "unknown"
    return lines[-1].removeprefix("Exception ClientAppException occurred. Message: ")
