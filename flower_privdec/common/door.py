"""The door at which an observer of private steps stands: an audit, a law of privacy, or a test of either."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

Observer = TypeVar("Observer")


class Door(Generic[Observer]):
    """Lets one observer see the private steps of one kind, and nobody where none was let in.

    What an observer may do is a protocol beside the steps: `core.cohort.StepObserver`, `training_loop.LoopObserver` and
    `privacy.updates.UpdateObserver`. It is there for what runs inside `open_to` in the same thread, so that a run in
    another one is never watched by mistake.

    Args:
        name: of the steps.
    """

    def __init__(self, name: str) -> None:
        self._observer: ContextVar[Observer | None] = ContextVar(f"observer of {name}", default=None)

    @property
    def observer(self) -> Observer | None:
        """Return who stands here now."""
        return self._observer.get()

    @contextmanager
    def open_to(self, observer: Observer) -> Iterator[None]:
        """Let an observer stand here inside, in the place of one that does already."""
        token = self._observer.set(observer)
        try:
            yield
        finally:
            self._observer.reset(token)
