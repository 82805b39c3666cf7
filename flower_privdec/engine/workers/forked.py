"""Processes forked from a run, which end with it: orders, answers, and what became of one that is gone."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from flower_privdec import errors
from flower_privdec.common.user_code import RaisedElsewhere, raised_at
from flower_privdec.core import Edges
from flower_privdec.errors import PrivdecError, RunError
from flower_privdec.rows.tensors import BOUNDARY, aligned

SPIN = 50e-6  # seconds of looking before a process sleeps until it is called
TURNS = 2  # a process may be one wait ahead of another, and no more


class Barrier:
    """Where all members wait for one another, again and again.

    A member calls the others through a counter that each of them has for every other turn. Who comes last finds all
    calls there; who waits looks for a moment and then sleeps in the kernel, which leaves a busy machine to others.
    """

    def __init__(self, members: int) -> None:
        """Make the counters, before the processes are forked; who is alone needs none."""
        several = members if members > 1 else 0
        self._calls = [[os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(TURNS)] for _ in range(several)]
        self._me, self._turn = 0, 0
        self._alarms: Callable[[int], None] | None = None
        self._sleeps: list[select.poll] = []

    def join(self, me: int, alarms: Sequence[int], event: int, alarm: Callable[[int], None]) -> None:
        """Say who this process is.

        Args:
            me: its number among the members.
            alarms: files on which something happens once a partner is gone or has failed.
            event: what that is, as `select.poll` takes it; that the other end is closed always counts.
            alarm: called with the one on which it did; it raises.
        """
        self._me, self._alarms = me, alarm
        for own in self._calls[me]:
            sleep = select.poll()
            sleep.register(own, select.POLLIN)
            for file in alarms:
                sleep.register(file, event)
            self._sleeps.append(sleep)

    def wait(self) -> None:
        """Wait until all members are here."""
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        for number, calls in enumerate(self._calls):
            if number != self._me:
                os.eventfd_write(calls[turn], 1)
        missing = len(self._calls) - 1
        while missing:
            missing -= self._called(turn)

    def _called(self, turn: int) -> int:
        """Return how many have called since the last time, at least one."""
        own, sleep, until = self._calls[self._me][turn], self._sleeps[turn], time.perf_counter() + SPIN
        while not (ready := sleep.poll(0)):
            if time.perf_counter() > until:
                ready = sleep.poll()
                break
        for file, _ in ready:
            if file != own and self._alarms is not None:
                self._alarms(file)
        return os.eventfd_read(own)

    def close(self) -> None:
        """Let go of the counters."""
        for calls in self._calls:
            for call in calls:
                os.close(call)
        self._calls = []


LENGTH = 8  # bytes of the number before a box's contents


def shared_copy(rows: Tensor, *, filled: bool = True) -> Tensor:
    """Return a copy in shared memory that lies as the rows do, by which products of either have the same bits.

    Args:
        filled: whether the numbers are copied, and not the room for them alone.
    """
    if not _padded_or_dense(rows):
        rows = aligned(rows)
    count = max(1, len(rows) * rows.stride(0)) if rows.ndim else 1
    memory = mmap.mmap(-1, count * rows.element_size())
    with suppress(OSError, ValueError, AttributeError):  # a kernel that has no huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=rows.dtype, count=count)
    copy = flat.as_strided(rows.shape, rows.stride())
    return copy.copy_(rows) if filled else copy


def _padded_or_dense(rows: Tensor) -> bool:
    """Return whether each row is contiguous, and they follow one another without overlap."""
    return rows.numel() > 0 and rows[0].is_contiguous() and rows.stride(0) >= rows[0].numel()


class EdgeBox:
    """Edges that one process puts where the others can read them."""

    def __init__(self) -> None:
        """Make an empty box, before the processes are forked."""
        self._file = os.memfd_create("edges", os.MFD_CLOEXEC)

    def put(self, edges: Sequence[Mapping[str, Edges]]) -> None:
        """Put in the edges of some blocks, in place of what was there, which no process may be reading."""
        buffers: list[pickle.PickleBuffer] = []
        parts = [{name: (e.own, e.other, e.values.numpy()) for name, e in block.items()} for block in edges]
        payload = pickle.dumps(parts, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        head = pickle.dumps((payload, [view.nbytes for view in views]))
        places = _places(len(head), [view.nbytes for view in views])
        _write(self._file, len(head).to_bytes(LENGTH, "little") + head, 0)
        for view, place in zip(views, places, strict=False):
            _write(self._file, view, place)

    def look(self) -> list[dict[str, Edges]]:
        """Return what is in the box, as views that hold until something else is put in."""
        memory = memoryview(mmap.mmap(self._file, 0))
        stop = LENGTH + int.from_bytes(memory[:LENGTH], "little")
        payload, sizes = pickle.loads(memory[LENGTH:stop])  # of a process of one's own
        places = _places(stop - LENGTH, sizes)
        views = [memory[place : place + size] for place, size in zip(places, sizes, strict=False)]
        parts = pickle.loads(payload, buffers=views)
        return [{name: Edges(e[0], e[1], torch.from_numpy(e[2])) for name, e in block.items()} for block in parts]

    def close(self) -> None:
        """Let go of the box."""
        os.close(self._file)


def _places(head: int, sizes: list[int]) -> list[int]:
    """Return where each of some contents begins behind a head, and where the last ends."""
    offsets = [-(-(LENGTH + head) // BOUNDARY) * BOUNDARY]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // BOUNDARY) * BOUNDARY)
    return offsets


def _write(file: int, content: bytes | memoryview, place: int) -> None:
    left = memoryview(content).cast("B")
    while left.nbytes:
        written = os.pwrite(file, left, place)
        left, place = left[written:], place + written


DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
WORK_FAILED = 3  # the status of a worker whose error was sent


class GoneError(RunError):
    """A process of a run ended before the run did; names which, and how."""


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
        """Send the process an order.

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
            answer, problem = self.line.recv()
        except (EOFError, OSError):
            answer, problem = None, self._gone()
        if problem is not None:
            raise problem
        return answer

    def fail(self) -> None:
        """Raise why the process stopped: by the error that it sent, or by its exit status."""
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
        """Wait for the end of the process, and return its status; None where another waiter has taken it."""
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
    """Leave Ctrl-C to the run, and freeze its objects, so that their pages are not copied."""
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
