"""What a peer and its driver hand to each other: waits and work, and what may become of a call.

A program is a generator. It runs until it has nothing to do, yields a `Wait` or a `Work`, and goes on when its driver
sends it the result. So a peer has neither a clock nor a thread: a driver with sockets sleeps in a wait, and a simulator
turns a virtual clock forward to its end.

Between two yields nothing else happens at the peer: a driver with threads holds one lock then. During a `Work`, as
during a `Wait`, messages may come. All that a crash can tear apart is between two yields' works, so a simulator that
kills a peer before and after each work has tried every place where it could die.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flower_privdec.common.errors import RunError

T = TypeVar("T")
Content = Sequence[bytes | bytearray | memoryview]  # of a call or an answer, to be sent one after the other


CALL_FAILED = "call.failed"  # the code of an answer from a peer that has trouble of its own, such as a full disk
NO_STREAM = "call.dials-out"  # the code of a call to a device that only dials out, and has no stream open to this one


class UnreachableError(RunError):
    """A call was not answered; the message has the reason."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do until something is so, or a moment has come; the program is sent whether it is so.

    Attributes:
        ready: what has to be so; asked again whenever a message came.
        until: the moment, in seconds of the driver's clock.
        despite_problems: whether to wait even when what neighbours sent makes it impossible to continue the run.
    """

    ready: Callable[[], bool]
    until: float
    despite_problems: bool = False


@dataclass
class Work:
    """Something that takes long: training, evaluation, a write to the disk; the program is sent its result.

    Attributes:
        kind: train, save, evaluate, report or finish; a simulator gives each its duration.
        do: the work.
        is_done, result: for the driver to set, once it was performed: True, and what it returned.
    """

    kind: str
    do: Callable[[], Any]
    is_done: bool = field(default=False, init=False)
    result: Any = field(default=None, init=False)


Pause = Wait | Work
Program = Generator[Pause, Any, T]


def performed(program: Program[T]) -> T:
    """Perform a program that never waits, work included, and return its result.

    Raises:
        RuntimeError: it waits.
    """
    answer = None
    while True:
        try:
            pause = program.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        if isinstance(pause, Wait):
            raise RuntimeError("the program waits, and nobody is there to send it anything")
        answer = pause.do()
