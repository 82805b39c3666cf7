"""The command line in this process, and in one that is forked from it, which has imported all already."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from flower_privdec.cli import main

LONG = 300.0  # seconds that nothing takes, however busy the machine is


def privdec(*arguments: object) -> int:
    """Run a command and return its exit status."""
    try:
        main.main([str(argument) for argument in arguments])
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("privdec does not exit")


def forked(work: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a forked process that calls a function, whose result is its exit status.

    Garbage is freed here before: a process group of PyTorch's, freed in a forked process, waits for threads for ever
    that the fork has left behind.
    """
    gc.collect()
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(work(*arguments)))
    process.start()
    return process


def status_of(process: BaseProcess) -> int:
    """Wait for a forked process and return its exit status, or minus the signal that killed it."""
    process.join(LONG)
    assert process.exitcode is not None
    return process.exitcode
