"""A barrier among processes that were forked from one: it costs microseconds, and never outlasts a partner's death."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence

SPIN = 50e-6  # seconds of looking before a process sleeps until it is called
TURNS = 2  # a process may be one meeting ahead of another, and no more


class Meeting:
    """Where all members wait for one another, again and again.

    A member calls the others through a counter that each of them has for every other turn. Who comes last finds all
    calls there; who waits looks for a moment and then sleeps in the kernel, which leaves a busy machine to others.
    """

    def __init__(self, members: int) -> None:
        """Make the counters, before the processes are forked; who is alone needs none."""
        several = members if members > 1 else 0
        self._calls = [[os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(TURNS)] for _ in range(several)]
        self._me, self._turn = 0, 0
        self._alarms: Callable[[int], None] | None = None
        self._sleeps: list[select.poll] = []

    def join(self, me: int, alarms: Sequence[int], event: int, alarm: Callable[[int], None]) -> None:
        """Say who this process is.

        Args:
            me: its number among the members.
            alarms: files on which something happens once a partner is gone or has failed.
            event: what that is, as `select.poll` takes it; that the other end is closed always counts.
            alarm: called with the one on which it did; it raises.
        """
        self._me, self._alarms = me, alarm
        for own in self._calls[me]:
            sleep = select.poll()
            sleep.register(own, select.POLLIN)
            for file in alarms:
                sleep.register(file, event)
            self._sleeps.append(sleep)

    def meet(self) -> None:
        """Wait until all members are here."""
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        for number, calls in enumerate(self._calls):
            if number != self._me:
                os.eventfd_write(calls[turn], 1)
        missing = len(self._calls) - 1
        while missing:
            missing -= self._called(turn)

    def _called(self, turn: int) -> int:
        """Return how many have called since the last time, at least one."""
        own, sleep, until = self._calls[self._me][turn], self._sleeps[turn], time.perf_counter() + SPIN
        while not (ready := sleep.poll(0)):
            if time.perf_counter() > until:
                ready = sleep.poll()
                break
        for file, _ in ready:
            if file != own and self._alarms is not None:
                self._alarms(file)
        return os.eventfd_read(own)

    def close(self) -> None:
        """Let go of the counters."""
        for calls in self._calls:
            for call in calls:
                os.close(call)
        self._calls = []
