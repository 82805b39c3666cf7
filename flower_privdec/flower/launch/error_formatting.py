"""A failure under Flower ends in one line, the reason, in place of the tracebacks of how it got there."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

from flwr.app import Context, Error, Message

from flower_privdec.common.formatting import one_line
from flower_privdec.errors import PrivdecError

MENDABLE = (PrivdecError, OSError)  # what a user or an administrator can act on; all else keeps its traceback
DEATHS = frozenset({"RayActorError", "ActorDiedError", "OutOfMemoryError", "WorkerCrashedError"})  # Ray's, of a process
DIED = "its process has ended (killed, or out of memory); give it more memory or fewer peers, and resume the run"
CLIENT_APP_RAISED = 2  # as Flower numbers the error of a ClientApp that raised

Handler = Callable[[Message, Context], Message]


class _LastLine(logging.Filter):
    """Lets a run's log end with the reason of its failure: one line, and nothing of Flower's after it."""

    told = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else sys.exception()
        if isinstance(error, MENDABLE) and not self.told:
            record.msg, record.args, record.exc_info, record.exc_text = said(error), (), None, None
            self.told = True
            return True
        return not (self.told or _is_death(error))


_last_line = _LastLine()


def said(error: BaseException) -> str:
    """Return what to say of a failure: its own words, which name the remedy, or its type and its text."""
    return " ".join(str(error).split()) if isinstance(error, PrivdecError) else one_line(error)


def _is_death(error: BaseException | None) -> bool:
    """Return whether Flower is reporting the end of a node's process, which the strategy reports by name."""
    return error is not None and not DEATHS.isdisjoint(kind.__name__ for kind in type(error).__mro__)


@contextmanager
def failing_plainly() -> Iterator[None]:
    """Let a ServerApp that fails inside for a reason that can be mended say that reason, once, as its last line.

    Flower logs the failure after the ServerApp has ended, so what filters its log stays until the next run.
    """
    flower = logging.getLogger("flwr")
    _last_line.told = False
    flower.addFilter(_last_line)
    yield
    flower.removeFilter(_last_line)


def answering_plainly(handler: Handler) -> Handler:
    """Return a ClientApp's handler that answers a failure that can be mended with an error message of one line."""

    @wraps(handler)
    def answer(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except MENDABLE as error:
            return Message(Error(CLIENT_APP_RAISED, said(error)), reply_to=message)

    return answer


def reason(text: str | None) -> str:
    """Return the last line of what a node says went wrong, without the traceback before it and Flower's wrapping."""
    wrapped = re.fullmatch(r"<class '([^']*)'>:<'(.*)'>", text or "", re.DOTALL)
    if wrapped and wrapped[1].removeprefix("ray.exceptions.") in DEATHS:
        return DIED
    lines = [line.strip() for line in (wrapped[2] if wrapped else text or "").splitlines() if line.strip()]
    return lines[-1].removeprefix("Exception ClientAppException occurred. Message: ") if lines else "unknown"
