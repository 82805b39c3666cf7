"""What becomes of a message in a simulated network: how long it takes, or that it is lost."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from flower_privdec.peer.faults import FaultSchedule, LinkFault, Links, Partition

LATER = 3.0  # seconds after which the second copy of a message comes, at most


class Passage(NamedTuple):
    """How a message travels.

    Attributes:
        seconds: how long it takes; None if it does not arrive.
        cut: whether nothing at all passes, so that the sender learns it only by waiting.
        again: seconds after which it comes a second time; None if it does not.
    """

    seconds: float | None
    cut: bool = False
    again: float | None = None


class VirtualLinks:
    """All links of a simulated network.

    Args:
        schedule: of the faults.
        draw: what is random.

    Attributes:
        faults: how many messages were delayed, lost, cut off or doubled by each kind.
    """

    def __init__(self, schedule: FaultSchedule, draw: Random) -> None:
        self._usual = schedule.links
        self._draw = draw
        self._weather = [fault for fault in schedule.faults if isinstance(fault, LinkFault)]
        self._partitions = [fault for fault in schedule.faults if isinstance(fault, Partition)]
        self._busy_until: dict[tuple[int, int], float] = {}
        self._sending_until: dict[int, float] = {}
        self._receiving_until: dict[int, float] = {}
        is_limited = [fault.device_bandwidth is not None for fault in self._weather]
        self._limits_devices = schedule.links.device_bandwidth is not None or any(is_limited)

    def passage(self, now: float, sender: int, receiver: int, size: int) -> Passage:
        """Return how a message travels that leaves now.

        Args:
            size: bytes.
        """
        if self._partitions and any(
            fault.at <= now < fault.end and fault.group_of(sender) != fault.group_of(receiver)
            for fault in self._partitions
        ):
            return Passage(None, cut=True)

        link = self._now(now, sender, receiver)
        if link.loss and self._draw.random() < link.loss:
            return Passage(None)

        leaves = now
        if link.bandwidth is not None:
            # A direction of a link carries one message after the other.
            leaves = max(now, self._busy_until.get((sender, receiver), 0.0)) + 8 * size / link.bandwidth
            self._busy_until[sender, receiver] = leaves
        if self._limits_devices:
            leaves = max(leaves, self._through_devices(now, sender, receiver, size))
        seconds = leaves - now + link.latency
        if link.jitter:
            seconds += link.jitter * self._draw.random()

        again = None
        if link.duplicates and self._draw.random() < link.duplicates:
            again = seconds + LATER * self._draw.random()
        return Passage(seconds, again=again)

    def _through_devices(self, now: float, sender: int, receiver: int, size: int) -> float:
        """Return when a message is through the lines of both devices, each of which carries one after the other."""
        through = now
        for device, busy in ((sender, self._sending_until), (receiver, self._receiving_until)):
            bandwidth = self._usual.device_bandwidth
            for fault in self._weather:
                is_now = fault.at <= now < fault.end and fault.device_bandwidth is not None
                if is_now and (fault.peers is None or device in fault.peers):
                    bandwidth = fault.device_bandwidth
            if bandwidth is not None:
                busy[device] = max(now, busy.get(device, 0.0)) + 8 * size / bandwidth
                through = max(through, busy[device])
        return through

    def _now(self, now: float, sender: int, receiver: int) -> Links:
        """Return what a link is like at a moment: later faults of the list count more."""
        link = self._usual
        for fault in self._weather:
            if not (fault.at <= now < fault.end and fault.concerns(sender, receiver)):
                continue
            changed = fault.model_dump(include=set(Links.model_fields), exclude_none=True)
            link = link.model_copy(update=changed)
        return link
