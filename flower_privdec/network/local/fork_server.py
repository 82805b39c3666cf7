"""Processes that start with all imports done: they are forked from one that does nothing but import and fork.

The server runs no tensor operation and no gRPC call, whose thread pools do not survive a fork.
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

# What a peer imports until its first round is over, as it would import it itself: some of it only when it is needed.
IMPORTED = ["flower_privdec.cli.main", "flower_privdec.network.peer.foreground", "grpc.experimental"]
IMPORTED += ["charset_normalizer", "numpy.ctypeslib", "scipy.fft", "scipy.linalg", "scipy.sparse.csgraph"]
IMPORTED += ["scipy.special", "torch.utils.mkldnn"]
PROCESS_NAME = 15  # PR_SET_NAME
NUMBER = struct.Struct("q")  # a process, or minus an errno where none was forked; then its exit status


class ForkedProcess:
    """A process that the server has forked, which waits for it and reports its exit status; as `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], report: IO[bytes]) -> None:
        """Take the write end of its stdin, which stays open as long as this object, and the report of its end."""
        self.pid, self._stdin, self._report, self._lock = pid, stdin, report, Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended it; None while it runs."""
        return self._after(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; subprocess.TimeoutExpired after so many seconds."""
        status = self._after(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def _after(self, timeout: float | None) -> int | None:
        if self._status is None and wait([self._report.fileno()], timeout):
            with self._lock:  # of threads that were all woken
                if self._status is None:
                    self._status = self._reported()
        return self._status

    def _reported(self) -> int:
        end = self._report.read(NUMBER.size)
        if end:
            return int(NUMBER.unpack(end)[0])
        with contextlib.suppress(ProcessLookupError):  # the server was killed, so that no exit status will come
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL


Process = subprocess.Popen[bytes] | ForkedProcess


class ForkServer:
    """Starts the server at its first use and again where it was killed; it ends with this process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Let the server import while this process goes on, unless it is there or nothing can be forked here."""
        if not can_fork() or (self._server is not None and self._server.poll() is None):
            return
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "flower_privdec.network.local.fork_server"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,  # without Ctrl-C
            )

    def end(self) -> None:
        """End the server; a process that it has forked reads the end of its stdin when this one ends."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def start(self, name: str, module: str, arguments: Sequence[str], log: IO[bytes]) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS` as a group of its own, in the environment and folder of this process.

        Args:
            name: which the system lists it by.
            log: its output and its errors.

        Raises:
            RunError: the server ended.
            OSError: this machine has no room for another process.
        """
        self.begin()
        request: dict[str, Any] = {"name": name, "module": module, "arguments": list(arguments)}
        request |= {"folder": os.getcwd(), "environment": dict(os.environ)}
        (its_stdin, stdin), (report, its_report) = _pipe(), _pipe()
        with its_stdin, its_report, open(os.memfd_create("request"), "wb", buffering=0) as message:
            message.write(json.dumps(request).encode())
            with contextlib.suppress(ConnectionError):  # seen below
                files = [file.fileno() for file in (its_stdin, log, message, its_report)]
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

    What this Python runs by -m is forked where that is safe, and any other command is executed.

    Raises:
        RunError, OSError: see `ForkServer.start`.
    """
    if tuple(command[:2]) == (sys.executable, "-m") and can_fork():
        return SERVER.start(name, command[2], command[3:], log)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)


def _serve(line: socket.socket) -> list[int]:
    """Fork a process at each request; exit when the other end of the line is closed.

    Returns:
        In a process that it forked: stdin, log and request, open files.
    """
    running: dict[int, tuple[int, int]] = {}  # a process by its pidfd, with the report of its end
    while True:
        ready = wait([line, *running])
        for process in running.keys() & set(ready):
            pid, report = running.pop(process)
            _report(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(report)
            os.close(process)
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
            if not pid:
                for file in (report, *running, *(other for _, other in running.values())):
                    os.close(file)
                return own
            os.setpgid(pid, pid)  # before its number is known
            _report(report, pid)
            running[os.pidfd_open(pid)] = pid, report
        for file in own:
            os.close(file)


def _report(report: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # its owner ended
        os.write(report, NUMBER.pack(number))


def main() -> None:
    """Import, then serve on stdin; in a process that was forked, run its module as `python -m` would."""
    gc.disable()
    for module in IMPORTED:
        with contextlib.suppress(ImportError):  # not in every version of its package; then imported where it is needed
            import_module(module)
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as line:
        stdin, log, message = _serve(line)
    with open(message, "rb", buffering=0) as file:
        file.seek(0)
        request = json.loads(file.readall())
    for file_number, source in ((0, stdin), (1, log), (2, log)):
        os.dup2(source, file_number)
    os.close(stdin)
    os.close(log)
    gc.enable()
    if sys.path[0] == os.getcwd():
        sys.path[0] = request["folder"]
    os.chdir(request["folder"])
    ctypes.CDLL(None).prctl(PROCESS_NAME, request["name"].encode())
    os.environ.clear()
    os.environ.update(request["environment"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = added
    np.random.seed()  # noqa: NPY002 (these two start with the state of the server, which all its processes share)
    torch.default_generator.seed()
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
