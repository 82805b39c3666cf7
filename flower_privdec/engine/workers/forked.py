"""Processes forked from a run, which end with it: orders, answers, and what became of one that is gone."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from flower_privdec import errors
from flower_privdec.common.user_code import RaisedElsewhere, raised_at
from flower_privdec.errors import PrivdecError, RunError

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
WORK_FAILED = 3  # the status of a worker whose error was told


class GoneError(RunError):
    """A process of a run ended before the run did; says which, and how."""


class Forked:
    """A process forked from this one, seen from here.

    Attributes:
        name: what to call it in an error.
        line: where orders go and answers come from; it can be read once the process is gone, too.
    """

    def __init__(self, name: str, serve: Callable[[Connection], None], leave: Iterable[Callable[[], None]]) -> None:
        """Fork.

        Args:
            name: for errors.
            serve: what it does, given its end of the line; it never comes back from it.
            leave: lets go of what it inherits and is not its own: locks, and the lines of others.
        """
        self.name = name
        self.line, theirs = Pipe()
        libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of others; it takes none of their locks
            pid = os.fork()
        if not pid:
            _be_a_worker(libc, parent, theirs, serve, (self.line.close, *leave))
        theirs.close()
        self._pid = pid
        self._process: int | None = os.pidfd_open(pid)

    def order(self, order: object) -> None:
        """Tell the process what to do.

        Raises:
            PrivdecError, RaisedElsewhere: what it has raised since the last order.
            GoneError: it is gone.
        """
        try:
            self.line.send(order)
        except OSError:
            self.fail()

    def answer(self) -> Any:
        """Return what an order came to.

        Raises:
            PrivdecError, RaisedElsewhere: what the process raised.
            GoneError: it is gone.
        """
        try:
            found, problem = self.line.recv()
        except (EOFError, OSError):
            found, problem = None, self._gone()
        if problem is not None:
            raise problem
        return found

    def fail(self) -> None:
        """Raise why the process does no more, which it has told or its end tells."""
        while True:
            self.answer()

    def _gone(self) -> GoneError:
        status = self._reaped()
        how = "was ended from outside"
        if status is not None and os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            more = ": out of memory?" if number == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(number).name}{more}"
        elif status is not None:
            how = f"ended itself with status {os.WEXITSTATUS(status)}"
        return GoneError(f"the process of {self.name} {how}")

    def _reaped(self) -> int | None:
        """Wait for the end of the process, and return its status; None where somebody else has taken it."""
        if self._process is None:
            return None
        with suppress(ChildProcessError):
            return os.waitpid(self._pid, 0)[1]
        return None

    def close(self) -> None:
        """End the process and wait until it is gone."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self._reaped()
            os.close(self._process)
            self._process = None
        self.line.close()


def _be_a_worker(
    libc: ctypes.CDLL,
    parent: int,
    line: Connection,
    serve: Callable[[Connection], None],
    leave: Iterable[Callable[[], None]],
) -> None:
    """Serve, and end whatever happens: nothing of the program that called the run goes on in this process."""
    status = WORK_FAILED
    try:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            for step in leave:
                step()
            _settle()
            serve(line)
            status = 0
    except (EOFError, BrokenPipeError):
        status = 0  # the run is gone
    except BaseException as error:
        with suppress(OSError):
            line.send((None, carried(error)))
    finally:
        os._exit(status)


def _settle() -> None:
    """Leave Ctrl-C to the run, and what it has made to memory that nobody copies."""
    gc.freeze()
    torch.set_num_threads(1)
    with suppress(ValueError):  # of a thread that is not the main one
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def carried(error: BaseException) -> Exception:
    """Return an error as another process may raise it."""
    name = type(error).__name__
    if isinstance(error, PrivdecError) and getattr(errors, name, None) is type(error):
        return type(error)(str(error))
    return RaisedElsewhere(raised_at(error), "".join(traceback.format_exception(error)))
