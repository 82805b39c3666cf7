"""Run functions in processes of their own that start together and end together."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from flower_privdec.common.errors import RunError

PRELOADED = "tools.bench.network"  # imported once, in the process that the others are forked from
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of a module and its arguments


def together(calls: Sequence[Call]) -> list[Any]:
    """Make each call in a process of its own and return the results; no process ends before all have returned.

    Raises:
        RunError: a call raised or its process was killed. No process is left behind in any case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])

    pipes = [context.Pipe() for _ in calls]
    children = [
        context.Process(target=_child, args=(theirs, *call)) for call, (_, theirs) in zip(calls, pipes, strict=True)
    ]
    try:
        for child, (_, theirs) in zip(children, pipes, strict=True):
            child.start()
            theirs.close()
        return [_answer(ours) for ours, _ in pipes]
    finally:
        for ours, theirs in pipes:
            ours.close()
            theirs.close()
        for child in children:
            if child.pid is not None:
                child.kill()
                child.join()


def _answer(pipe: Connection) -> Any:
    try:
        result, problem = pipe.recv()
    except EOFError:
        result = None
        problem = "it was killed"
    if problem:
        raise RunError(f"a process of the benchmark failed: {problem}", code="bench.process-failed")
    return result


def _child(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    watch = Thread(target=_end_with_parent, args=(pipe,), daemon=True)
    watch.start()
    try:
        answer = function(*arguments), ""
    except BaseException as error:
        answer = None, f"{type(error).__name__}: {error}"[-500:]
    pipe.send(answer)
    watch.join()


def _end_with_parent(pipe: Connection) -> None:
    """Exit as soon as the parent has closed the pipe."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(0)
