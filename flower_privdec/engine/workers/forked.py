"""Worker processes forked from a run: commands and replies over a pipe, a barrier, shared memory, and failures.

The classes of `multiprocessing` do less than a run needs. Its barrier takes locks and wakes one process after another,
which costs more than a short round, and one that waits at it does not hear that another has died. Its processes are
joined when the interpreter exits, so that a run that fails would hang, or else are daemons, whose code may start no
process. A worker here also dies with its parent, and closes the locks that it inherited before it does anything else.
"""

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

from flower_privdec.common import errors
from flower_privdec.common.errors import PrivdecError, RunError
from flower_privdec.common.user_code import RaisedElsewhere, raised_at
from flower_privdec.core import Edges
from flower_privdec.rows.tensors import BOUNDARY, aligned

SPIN = 50e-6  # seconds of polling before a process sleeps
TURNS = 2  # a process may be one wait ahead of another, and no more


class Barrier:
    """A reusable barrier of processes, by eventfds.

    Each member has two counters, used in turn. A member arrives by incrementing the counters of all others. It then
    waits for theirs: it spins for SPIN seconds, and after that sleeps in poll(), which leaves a busy machine to others.
    """

    def __init__(self, members: int) -> None:
        """Create the counters, before the fork; a single member needs none."""
        self._counters = list[list[int]]()
        if members > 1:
            for _ in range(members):
                self._counters.append([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(TURNS)])
        self._me = 0
        self._turn = 0
        self._alarm: Callable[[int], None] | None = None
        self._sleeps: list[select.poll] = []

    def join(self, me: int, alarms: Sequence[int], event: int, alarm: Callable[[int], None]) -> None:
        """Set which member this process is.

        Args:
            me: its number among the members.
            alarms: file descriptors that become ready if another process fails or ends.
            event: the poll event to wait for on these; the closing of the other end always counts.
            alarm: called with the descriptor that became ready; it raises.
        """
        self._me = me
        self._alarm = alarm
        for own in self._counters[me]:
            sleep = select.poll()
            sleep.register(own, select.POLLIN)
            for file in alarms:
                sleep.register(file, event)
            self._sleeps.append(sleep)

    def wait(self) -> None:
        """Wait until all members have arrived."""
        turn = self._turn
        self._turn = (self._turn + 1) % TURNS
        for number, counters in enumerate(self._counters):
            if number != self._me:
                os.eventfd_write(counters[turn], 1)

        missing = len(self._counters) - 1
        while missing:
            missing -= self._arrived(turn)

    def _arrived(self, turn: int) -> int:
        """Return how many members have arrived since the last call, at least one."""
        own = self._counters[self._me][turn]
        sleep = self._sleeps[turn]

        until = time.perf_counter() + SPIN
        while not (ready := sleep.poll(0)):
            if time.perf_counter() > until:
                ready = sleep.poll()
                break

        for file, _ in ready:
            if file != own and self._alarm is not None:
                self._alarm(file)
        return os.eventfd_read(own)

    def close(self) -> None:
        """Close the counters."""
        for counters in self._counters:
            for counter in counters:
                os.close(counter)
        self._counters = []


LENGTH = 8  # bytes of the number with which a box begins: the length of its header


def shared_copy(rows: Tensor, *, filled: bool = True) -> Tensor:
    """Return a copy in shared memory with the strides of the rows, so that products of either have the same bits.

    Args:
        filled: copy the numbers; otherwise the memory is only allocated.
    """
    # Rows that are dense, or padded at their ends, keep their strides. Others are laid out as a state lays them out.
    is_row_after_row = rows.numel() > 0 and rows[0].is_contiguous() and rows.stride(0) >= rows[0].numel()
    if not is_row_after_row:
        rows = aligned(rows)

    count = 1  # an empty mapping is an error
    if rows.ndim > 0:
        count = max(1, len(rows) * rows.stride(0))
    memory = mmap.mmap(-1, count * rows.element_size())
    with suppress(OSError, ValueError, AttributeError):  # a kernel without huge pages for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)

    flat = torch.frombuffer(memory, dtype=rows.dtype, count=count)
    copy = flat.as_strided(rows.shape, rows.stride())
    if filled:
        copy.copy_(rows)
    return copy


class EdgeBox:
    """Shared memory in which one process publishes edges for the others to read.

    It holds the length of a header, the header, which is a pickle without the values, and the values, each aligned.
    """

    def __init__(self) -> None:
        """Create it empty, before the fork."""
        self._file = os.memfd_create("edges", os.MFD_CLOEXEC)

    def put(self, edges: Sequence[Mapping[str, Edges]]) -> None:
        """Replace the content by the edges of some blocks; no process may be reading it."""
        parts = []
        for block in edges:
            parts.append({name: (edge.own, edge.other, edge.values.numpy()) for name, edge in block.items()})

        # Protocol 5 hands over the arrays' buffers, so that no value is copied into the pickle.
        buffers: list[pickle.PickleBuffer] = []
        payload = pickle.dumps(parts, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        sizes = [view.nbytes for view in views]
        head = pickle.dumps((payload, sizes))

        places = _places(len(head), sizes)
        _write(self._file, len(head).to_bytes(LENGTH, "little") + head, 0)
        for view, place in zip(views, places, strict=False):
            _write(self._file, view, place)

    def look(self) -> list[dict[str, Edges]]:
        """Return the edges of each block, as views that are valid until the next `put`."""
        memory = memoryview(mmap.mmap(self._file, 0))
        stop = LENGTH + int.from_bytes(memory[:LENGTH], "little")
        payload, sizes = pickle.loads(memory[LENGTH:stop])  # safe: a process of this run wrote it

        places = _places(stop - LENGTH, sizes)
        views = [memory[place : place + size] for place, size in zip(places, sizes, strict=False)]
        parts = pickle.loads(payload, buffers=views)

        blocks = []
        for part in parts:
            blocks.append(
                {name: Edges(own, other, torch.from_numpy(rows)) for name, (own, other, rows) in part.items()}
            )
        return blocks

    def close(self) -> None:
        """Close the memory's file."""
        os.close(self._file)


def _places(head: int, sizes: list[int]) -> list[int]:
    """Return the offset of each buffer behind a header, and the end of the last."""
    offsets = [-(-(LENGTH + head) // BOUNDARY) * BOUNDARY]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // BOUNDARY) * BOUNDARY)
    return offsets


def _write(file: int, content: bytes | memoryview, place: int) -> None:
    """Write all of some content at an offset of a file; one call of pwrite may write a part only."""
    left = memoryview(content).cast("B")
    while left.nbytes:
        written = os.pwrite(file, left, place)
        left = left[written:]
        place = place + written


DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
WORK_FAILED = 3  # exit status of a worker that has sent its error


class GoneError(RunError):
    """A worker ended before the run did; the message names it and how it ended."""


class Forked:
    """The parent's handle of a worker process.

    Attributes:
        name: its name in errors.
        line: the pipe of commands and replies, which can still be read after the process has ended.
    """

    def __init__(self, name: str, serve: Callable[[Connection], None], leave: Iterable[Callable[[], None]]) -> None:
        """Fork.

        Args:
            name: its name in errors.
            serve: the worker's main function, given its end of the pipe; the process ends when it returns.
            leave: functions that close what the worker inherits and must not hold: locks, and other workers' pipes.
        """
        self.name = name
        self.line, theirs = Pipe()
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getpid()

        # Else both processes would write what is in the buffers.
        sys.stdout.flush()
        sys.stderr.flush()

        with warnings.catch_warnings():
            # Python warns of forks beside other threads. The worker takes none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_a_worker(libc, parent, theirs, serve, (self.line.close, *leave))

        theirs.close()
        self._pid = pid
        self._process: int | None = os.pidfd_open(pid)

    def order(self, order: object) -> None:
        """Send the worker a command.

        Raises:
            PrivdecError, RaisedElsewhere: an error that the worker raised since the last command.
            GoneError: it has ended.
        """
        try:
            self.line.send(order)
        except OSError:
            self.fail()

    def answer(self) -> Any:
        """Return the reply to a command.

        Raises:
            PrivdecError, RaisedElsewhere: an error that the worker raised.
            GoneError: it has ended.
        """
        try:
            answer, problem = self.line.recv()
        except (EOFError, OSError):
            answer = None
            problem = self._gone()
        if problem is not None:
            raise problem
        return answer

    def fail(self) -> None:
        """Raise the error that the process sent, or one that says how it ended."""
        while True:  # answers that were on their way when it failed come first
            self.answer()

    def _gone(self) -> GoneError:
        """Return an error that says how the process ended."""
        status = self._reaped()
        if status is None:
            how = "was ended from outside"
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            how = f"was ended by {signal.Signals(number).name}"
            if number == signal.SIGKILL:
                how += ": out of memory?"
        else:
            how = f"ended itself with status {os.WEXITSTATUS(status)}"
        return GoneError(f"the process of {self.name} {how}")

    def _reaped(self) -> int | None:
        """Wait for the end of the process, and return its status; None if another waiter has taken it."""
        if self._process is None:
            return None
        with suppress(ChildProcessError):
            return os.waitpid(self._pid, 0)[1]
        return None

    def close(self) -> None:
        """Kill the process and wait for its end."""
        if self._process is not None:
            # A pidfd names this process only. Its number may be another process's by now.
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
    """Run the worker's main function and exit, so that nothing of the calling program continues in this process."""
    # Nothing inherited is freed here: its finalizers may wait for threads that this process does not have, and freeing
    # would copy the pages.
    gc.freeze()

    status = WORK_FAILED
    try:
        # The parent may have ended before prctl, which then comes too late.
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            for step in leave:
                step()
            _settle()
            serve(line)
            status = 0
    except (EOFError, BrokenPipeError):
        status = 0  # the run has ended
    except BaseException as error:
        with suppress(OSError):
            line.send((None, carried(error)))
    finally:
        os._exit(status)


def _settle() -> None:
    """Take one thread, and ignore Ctrl-C, which the main process handles."""
    torch.set_num_threads(1)
    with suppress(ValueError):  # signals can be set in the main thread only, and the fork may be of another
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def carried(error: BaseException) -> Exception:
    """Return an error in a form that the main process can unpickle and raise."""
    # An error of ours takes one string. The constructor of any other may take anything, so it goes as text.
    name = type(error).__name__
    if isinstance(error, PrivdecError) and getattr(errors, name, None) is type(error):
        return type(error)(str(error))
    return RaisedElsewhere(raised_at(error), "".join(traceback.format_exception(error)))
