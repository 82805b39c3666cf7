"""Processes that start with all imports done: they are forked from one that does nothing but import and fork.

    this process                        the server                      a peer
    ------------                        ----------                      ------
    begin(): starts it ───────────────> imports
    start(): sends a request, 4 files ─> forks ───────────────────────> puts the files in place, runs its module
    wait():  reads its exit status <─── waits for it, reports <──────── ends
    ends, or is killed ───────────────> reads the end of the line, ends
                     └────────────────────────────────────────────────> reads the end of its stdin, ends

Once the server has imported, eight peers start in 0.2 to 0.3 s (2 cores); each would otherwise import for seconds. The
server runs no tensor operation, because its thread pool does not survive a fork.

Why not the forkserver of multiprocessing, with its set_forkserver_preload? It was tried (Python 3.11), and does
not hold what a peer needs:

- It imports the caller's `__main__` again in every child. A script or notebook cell that calls `up(...)` without
  `if __name__ == "__main__":` would fail with "safe importing of main module"; here a peer is `python -m MODULE`.
- There is one server in a process, which has the environment of its first use. If the caller's own code (such as a
  DataLoader of torch) has started it, ours could not preload anything; and ours would be that code's.
- A child that is not a daemon is waited for when this process exits, and a daemon may have no children of its own.
- Starting 8 peers took 0.46 and 0.55 s with it, and 0.20, 0.26 and 0.30 s with this (in alternation, 2 cores).

Process groups, names, logs and a stdin that ends with this process would have to be set up in the child either way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import wait
from threading import Lock
from typing import IO, Any

import numpy as np
import torch

from flower_privdec.common.errors import RunError
from flower_privdec.common.machine import can_fork

# What a peer imports until its first round is over. Some of it a peer would import only when it is needed.
IMPORTED = [
    "flower_privdec.cli.main",
    "flower_privdec.network.peer.foreground",
    "flower_privdec.network.transport.stream_server",
    "charset_normalizer",
    "numpy.ctypeslib",
    "scipy.fft",
    "scipy.linalg",
    "scipy.sparse.csgraph",
    "scipy.special",
    "torch.utils.mkldnn",
]
SMALL = "--small"  # of `privdec peer`
PROCESS_NAME = 15  # PR_SET_NAME of prctl
NUMBER = struct.Struct("q")  # in a report: a process's id, or minus an errno if none was forked; then its exit status


class ForkedProcess:
    """A process that the server has forked, which waits for it and reports its exit status; as `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], report: IO[bytes]) -> None:
        """Take the write end of its stdin, which stays open as long as this object, and the report of its end."""
        self.pid = pid
        self._stdin = stdin
        self._report = report
        self._status: int | None = None
        self._lock = Lock()  # several threads may wait for one process

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None while it runs."""
        return self._after(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises subprocess.TimeoutExpired after so many seconds."""
        status = self._after(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def _after(self, timeout: float | None) -> int | None:
        if self._status is None and wait([self._report.fileno()], timeout):
            with self._lock:  # the first thread reads the report, the others find its status
                if self._status is None:
                    self._status = self._reported()
        return self._status

    def _reported(self) -> int:
        report = self._report.read(NUMBER.size)
        if report:
            return int(NUMBER.unpack(report)[0])

        # The server was killed, so no exit status will ever come. A process that nobody waits for must not go on.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


Process = subprocess.Popen[bytes] | ForkedProcess


class ForkServer:
    """Starts the server at its first use, and again if it was killed; it ends with this process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Let the server import while this process goes on, unless it is there or nothing can be forked here."""
        is_running = self._server is not None and self._server.poll() is None
        if is_running or not can_fork():
            return

        # A packet is received whole, and together with its files.
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "flower_privdec.network.local.fork_server"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for this process, which then ends the others in order
            )

    def end(self) -> None:
        """End the server. The processes that it has forked read the end of their stdin when this one ends."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def start(self, name: str, module: str, arguments: Sequence[str], log: IO[bytes]) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS` as a group of its own, in the environment and folder of this process.

        Args:
            name: by which the system lists it.
            log: its output and its errors.

        Raises:
            RunError: the server ended.
            OSError: this machine has no room for another process.
        """
        self.begin()
        request: dict[str, Any] = {
            "name": name,
            "module": module,
            "arguments": list(arguments),
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        its_stdin, stdin = _pipe()
        report, its_report = _pipe()
        # The request is a file in memory, since an environment may be larger than a packet.
        with its_stdin, its_report, open(os.memfd_create("request"), "wb", buffering=0) as message:
            message.write(json.dumps(request).encode())
            files = [file.fileno() for file in (its_stdin, log, message, its_report)]
            with contextlib.suppress(ConnectionError):  # the server ended, as the missing answer below shows
                socket.send_fds(self._line, [b"fork"], files)

        answer = report.read(NUMBER.size)
        if not answer:
            raise RunError("the process that peers are forked from ended; its error is above", code="local.fork-server")
        pid = int(NUMBER.unpack(answer)[0])
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(pid, stdin, report)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return open(read, "rb", buffering=0), open(write, "wb", buffering=0)


SERVER = ForkServer()
atexit.register(SERVER.end)


def start_process(name: str, command: Sequence[str], log: IO[bytes]) -> Process:
    """Start a command as a group of its own, whose stdin ends when this process does; see `ForkServer.start`.

    What this Python runs by -m is forked if that is safe here. Any other command is executed, and a small peer's too.

    Raises:
        RunError, OSError: see `ForkServer.start`.
    """
    is_small = SMALL in command  # the server has imported torch, which such a peer is to do without
    if tuple(command[:2]) == (sys.executable, "-m") and can_fork() and not is_small:
        return SERVER.start(name, command[2], command[3:], log)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)


# --- in the server ---


def _serve(line: socket.socket) -> list[int]:
    """Fork a process at each request; exit when the other end of the line is closed.

    Returns:
        In a process that it forked: stdin, log and request, open files.
    """
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the process's id, and the report of its end
    while True:
        ready = wait([line, *running])

        for pidfd in running.keys() & set(ready):
            pid, report = running.pop(pidfd)
            _report(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(report)
            os.close(pidfd)

        if line not in ready:
            continue
        message, files, _, _ = socket.recv_fds(line, 4, 4)
        if not message:
            sys.exit()
        *own, report = files
        try:
            pid = os.fork()
        except OSError as error:
            _report(report, -int(error.errno or 1))
            own.append(report)
        else:
            if pid == 0:
                # The files of other processes stay here; an open report would hide another's end.
                for file in (report, *running, *(other for _, other in running.values())):
                    os.close(file)
                return own

            os.setpgid(pid, pid)  # before anybody knows its id, and could send the group a signal
            _report(report, pid)
            running[os.pidfd_open(pid)] = (pid, report)
        for file in own:
            os.close(file)


def _report(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # its owner has ended
        os.write(report, NUMBER.pack(number))


def main() -> None:
    """Import, then serve on stdin; in a process that was forked, run its module as `python -m` would."""
    # Objects that are frozen are not touched by the collector of a forked process, so their memory stays shared.
    gc.disable()
    for module in IMPORTED:
        with contextlib.suppress(ImportError):  # not in every version of its package; then a peer imports what it needs
            import_module(module)
    gc.freeze()

    with socket.socket(fileno=os.dup(0)) as line:
        stdin, log, message = _serve(line)

    # From here on this is a forked process.
    with open(message, "rb", buffering=0) as file:
        file.seek(0)  # the writer's position is shared
        request = json.loads(file.readall())
    _put_in_place(stdin, log)
    gc.enable()
    _become(request)
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _put_in_place(stdin: int, log: int) -> None:
    """Make two open files the process's stdin, and its output and errors."""
    os.dup2(stdin, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(stdin)
    os.close(log)


def _become(request: dict[str, Any]) -> None:
    """Take a request's folder, name and environment, and draws of one's own."""
    if sys.path[0] == os.getcwd():  # as `python -m` sets it
        sys.path[0] = request["folder"]
    os.chdir(request["folder"])
    ctypes.CDLL(None).prctl(PROCESS_NAME, request["name"].encode())

    os.environ.clear()
    os.environ.update(request["environment"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = added

    # These two generators begin in the server's state, which all its processes share.
    np.random.seed()  # noqa: NPY002
    torch.default_generator.seed()


if __name__ == "__main__":
    main()
