"""Some work in processes that begin and end together, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from flower_privdec.errors import RunError

PRELOADED = "tools.bench.network_peer"  # is read once, and not by every process
Work = tuple[str, tuple[Any, ...]]  # a module, whose `stamps` is called, and with what


def together(work: Sequence[Work]) -> list[Any]:
    """Do each piece of work in a process of its own; return what they found. They go on until all have.

    Raises:
        RunError: one of them failed; whatever happens, no process stays.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    pipes = [context.Pipe() for _ in work]
    children = [
        context.Process(target=_child, args=(theirs, *each)) for each, (_, theirs) in zip(work, pipes, strict=True)
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
        found, problem = pipe.recv()
    except EOFError:
        found, problem = None, "it was killed"
    if problem:
        raise RunError(f"a process of the benchmark failed: {problem}")
    return found


def _child(pipe: Connection, module: str, words: tuple[Any, ...]) -> None:
    watch = Thread(target=_end_with_parent, args=(pipe,), daemon=True)
    watch.start()
    try:
        answer = import_module(module).stamps(*words), ""
    except BaseException as error:
        answer = None, f"{type(error).__name__}: {error}"[-500:]
    pipe.send(answer)
    watch.join()


def _end_with_parent(pipe: Connection) -> None:
    """Wait until nobody is at the other end."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(0)
