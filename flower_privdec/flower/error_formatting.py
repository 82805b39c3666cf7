"""One-line errors under Flower: the reason of a failure, in place of the tracebacks that led to it."""

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
DEATHS = frozenset({"RayActorError", "ActorDiedError", "OutOfMemoryError", "WorkerCrashedError"})  # Ray's, of a process
DIED = "its process has ended (killed, or out of memory); give it more memory or fewer peers, and resume the run"
CLIENT_APP_RAISED = 2  # as Flower numbers the error of a ClientApp that raised

Handler = Callable[[Message, Context], Message]

log = logging.getLogger("flwr.privdec")


class _LastLine(logging.Filter):
    """Replaces the log record of a failure by one line, and drops Flower's records after it."""

    ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else sys.exception()
        if isinstance(error, USER_ERRORS) and not self.ended:
            record.msg = error_line(error)
            record.args = ()
            record.exc_info = None
            record.exc_text = None
            self.ended = True
            return True
        died = error is not None and not DEATHS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        return not (self.ended or died)  # the strategy reports a dead process by its node's name


_last_line = _LastLine()


def error_line(error: BaseException) -> str:
    """Return a failure in one line: the message of an error of this package, else its type and text."""
    return " ".join(str(error).split()) if isinstance(error, PrivdecError) else one_line(error)


FOLDERS = re.compile(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^/\s'\"]+/)+")  # of a path, all but its name


def line_for_server(error: BaseException, context: Context) -> str:
    """Return a failure in one line for a server: without the folders of a deployed node, which its own log has."""
    line = error_line(error)
    if in_simulation(context.node_config):
        return line
    log.error("%s", line)
    own = [Path(value).expanduser() for value in map(str, context.node_config.values()) if "/" in value]
    paths = [Path.cwd(), Path.home(), *own]
    folders = {str(folder) for path in paths for folder in (path, path.absolute(), *path.absolute().parents)}
    for folder in sorted(folders - {"/", "."}, key=len, reverse=True):  # may hold blanks, unlike what FOLDERS matches
        line = line.replace(f"{folder}/", "").replace(folder, Path(folder).name)
    return FOLDERS.sub("", line)


@contextmanager
def one_line_failure() -> Iterator[None]:
    """Run a ServerApp whose log ends with one line where it fails for a reason that a user can act on.

    Flower logs the failure after the ServerApp has ended, so the filter of its log stays until the next run.
    """
    flower = logging.getLogger("flwr")
    _last_line.ended = False
    flower.addFilter(_last_line)
    yield
    flower.removeFilter(_last_line)


def one_line_replies(handler: Handler) -> Handler:
    """Return a ClientApp's handler that replies with an error of one line where it fails.

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
    wrapped = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", text or "", re.DOTALL)
    if wrapped and wrapped[1].removeprefix("ray.exceptions.") in DEATHS:
        return DIED
    lines = [line.strip() for line in (wrapped[2] if wrapped else text or "").splitlines() if line.strip()]
    return lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "unknown"
