"""Ends what takes too long, with one thread for all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Event, Lock, Thread

LOOKS = 8  # at the clock while a limit lasts


class TimeLimit:
    """Limits how long something may take.

    Args:
        seconds: that it may; it is ended up to an eighth later.
    """

    def __init__(self, seconds: float) -> None:
        """Begin to look at the clock."""
        self._seconds, self._guard, self._closed = seconds, Lock(), Event()
        self._numbers = count()
        self._under_way: dict[int, tuple[float, Callable[[], object]]] = {}
        Thread(target=self._watch, name="time-limit", daemon=True).start()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Call something once, where what is done inside takes too long."""
        with self._guard:
            number = next(self._numbers)
            self._under_way[number] = time.monotonic() + self._seconds, end
        try:
            yield
        finally:
            with self._guard:
                self._under_way.pop(number, None)

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / LOOKS):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """End what takes too long at a moment."""
        with self._guard:
            late = [number for number, (until, _) in self._under_way.items() if now >= until]
            ends = [self._under_way.pop(number)[1] for number in late]
        for end in ends:
            end()

    def close(self) -> None:
        """Look at the clock no more."""
        self._closed.set()
