"""A door through which an observer sees private steps: an audit, a law of privacy, or a test of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Observer = TypeVar("Observer")


class Door(Generic[Observer]):
    """Lets one observer see the private steps of one kind.

    A protocol beside the steps says what an observer does: `core.cohort.StepObserver`, `training_loop.LoopObserver` and
    `privacy.updates.UpdateObserver`. An observer sees the steps that are taken inside `open_to` in the same thread, and
    none of another thread.

    Args:
        name: the name of the steps.

    Attributes:
        observer: returns the observer of this thread; None if no one observes it.
    """

    def __init__(self, name: str) -> None:
        self._observer: ContextVar[Observer | None] = ContextVar(f"observer of {name}", default=None)
        self.observer: Callable[[], Observer | None] = self._observer.get

    @contextmanager
    def open_to(self, observer: Observer) -> Iterator[None]:
        """Let an observer see the steps inside the block, in place of the previous observer."""
        token = self._observer.set(observer)
        try:
            yield
        finally:
            self._observer.reset(token)
