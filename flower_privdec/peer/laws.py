"""What must hold in a simulated network at every event, whatever goes wrong in it.

    mass       Σ w and Σ x over all peers' disks, and what is on its way between them, change only by committed steps,
               and by exactly what is named: see `mass_of_shares`, and `mass_of_rows` of peers that wait for each other
    progress   no peer waits unless something that it waits for can still happen: once nothing goes wrong any more, some
               peer gets on within a bound of virtual time, until all have ended
    ends       a peer ends because it is done, or with an error that has a code and says why; one that is done, and that
               others wait for, stays as long as it would have waited for them
    bounded    queues, counters and calls stay within what the number of neighbours and the time allow

`Laws` is called after each event of a `VirtualNetwork` and raises `BrokenLawError`, which names the law.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from flower_privdec.common.errors import PrivdecError
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.faults import Crash, FaultSchedule, Lie, Lose, Restore, Slow, WrongClock
from flower_privdec.peer.mass_law import BrokenLawError, MassLaw, Moved
from flower_privdec.peer.mass_of_rows import MassOfRows
from flower_privdec.peer.mass_of_shares import MassOfShares
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.pushsum.lockstep import UNDER_WAY

CALLS = 40.0  # to one neighbour in a second: more is a storm
MOST_ANSWERS = 64  # to one neighbour that are not sent yet
CLOSE = 1e-6  # of a deadline: what moments of it may round


def _slowest_factor(schedule: FaultSchedule) -> float:
    """Return how many times as long as usual work may take at the slowest peer, if all that slows it meets."""
    factors: dict[int, float] = {}
    for fault in schedule.faults:
        if isinstance(fault, Slow):
            factors[fault.peer] = factors.get(fault.peer, 1.0) * max(1.0, fault.factor)
    return max(factors.values(), default=1.0)


class Laws:
    """The laws of a network; see the module.

    Args:
        moved: see MassLaw.
        patience: virtual seconds in which some peer has to get on, once nothing goes wrong any more; by default, what
            the peers' own times allow.
    """

    def __init__(self, moved: Moved | None = None, patience: float | None = None) -> None:
        self._moved = moved
        self._patience = patience
        self._mass: MassLaw | None = None  # None before the first peer starts
        self._progress: dict[int, Any] = {}
        self._since = 0.0
        self._ended: set[int] = set()
        self._at_end_since: dict[int, float] = {}
        self._calls = 0
        self._looked_at = 0.0
        self._quiet_from: float | None = None
        self._lies = False

    @property
    def named(self) -> Counter[str]:
        """Return how often mass was begun, reset, put back or lost, by name; see MassLaw."""
        return Counter() if self._mass is None else self._mass.named

    def __call__(self, network: VirtualNetwork) -> None:
        """Check all laws after an event.

        Raises:
            BrokenLawError: one does not hold.
        """
        if self._quiet_from is None:
            self._quiet_from = _quiet_from(network)
            self._lies = any(isinstance(fault, Lie) for fault in network.schedule.faults)
        self._check_mass(network)
        self._check_ends(network)
        self._check_progress(network)
        self._check_bounds(network)

    # --- mass ---

    def _check_mass(self, network: VirtualNetwork) -> None:
        if self._lies:
            return
        if self._mass is None:
            started = next(iter(network.peers.values()), None)
            if started is None:
                return
            if isinstance(started, AsynchronousPeer):
                self._mass = MassOfShares(self._moved)
            else:
                self._mass = MassOfRows(self._moved)
        self._mass.check(network)

    # --- ends ---

    def _check_ends(self, network: VirtualNetwork) -> None:
        self._note_ends(network)
        self._ended &= network.ends.keys()
        for number in network.ends.keys() - self._ended:
            self._ended.add(number)
            error = network.ends[number]
            if error is None:
                peer: Any = network.peers[number]
                if peer.state.round_index < peer.rounds:
                    raise BrokenLawError(
                        f"peer {number} ended without an error in round {peer.state.round_index} of {peer.rounds}",
                        code="law.ends",
                    )
                if isinstance(peer, SynchronousPeer):
                    self._check_leaving(network, number, peer)
            elif isinstance(error, PrivdecError) and not (error.code and str(error)):
                raise BrokenLawError(f"peer {number} ended with an error that has no code: {error}", code="law.ends")

    def _note_ends(self, network: VirtualNetwork) -> None:
        """Note since when processes of synchronous peers are at the last place."""
        for number, peer in network.peers.items():
            is_at_end = isinstance(peer, SynchronousPeer) and peer.machine.is_at_end
            if not is_at_end:
                self._at_end_since.pop(number, None)
            elif number not in self._at_end_since:
                self._at_end_since[number] = network.now

    def _check_leaving(self, network: VirtualNetwork, number: int, peer: SynchronousPeer) -> None:
        """Check that a peer that ended has no message that a neighbour may still need, or waited for it long enough.

        A message is used once its receiver is on disk at a later place.
        """
        last = peer.timetable.places
        if _place(network, number) != last:
            raise BrokenLawError(
                f"peer {number} ended at place {_place(network, number)} of {last}, as its disk has it", code="law.ends"
            )
        came_here = self._at_end_since.get(number, network.now)
        has_wrong_clock = any(isinstance(one, WrongClock) and one.peer == number for one in network.schedule.faults)
        if has_wrong_clock or network.now - came_here >= peer.times.deadline * (1 - CLOSE):
            return
        # One whose folder was put back or lost after it was at the end needs nothing that the others know of.
        put_back = {one.peer for one in network.schedule.faults if isinstance(one, Lose | Restore)}
        for place in range(max(0, last - UNDER_WAY), last):
            receivers = peer.timetable.turn(number, place).receivers - put_back
            behind = [j for j in sorted(receivers) if _place(network, j) <= place]
            if behind:
                raise BrokenLawError(
                    f"peer {number} left {network.now - came_here:.3g} s after its last exchange, and peers {behind} "
                    f"had not used what it sent them at place {place}",
                    code="law.ends",
                )

    # --- progress ---

    def _check_progress(self, network: VirtualNetwork) -> None:
        progress = dict[int, Any]()
        for number, machine in network.machines.items():
            process = machine.process
            if number in network.ends:
                progress[number] = "ended"
            elif process is None or process.is_over:
                progress[number] = "down"
            else:
                peer: Any = process.peer
                progress[number] = (id(process), peer.state.round_index, peer.state.at)
        if progress != self._progress:
            self._progress = progress
            self._since = network.now
            return

        since = max(self._since, self._quiet_from or 0.0)
        if network.now - since > self._patience_of(network):
            raise BrokenLawError(
                f"no peer got on for {network.now - since:.0f} s, and nothing goes wrong any more: "
                + "; ".join(network.waiting()),
                code="law.progress",
            )

    def _patience_of(self, network: VirtualNetwork) -> float:
        if self._patience is None:
            times = [peer.times for peer in network.peers.values()]
            longest = 0.0
            for one in times:
                standstill = one.standstill if math.isfinite(one.standstill) else 0.0
                longest = max(longest, one.start + 10 * one.deadline + standstill)
            slowest = max(network.schedule.work.values(), default=0.0) * _slowest_factor(network.schedule)
            # A clock that goes slowly lets its peer wait longer.
            rates = [fault.rate for fault in network.schedule.faults if isinstance(fault, WrongClock)]
            self._patience = (longest + 200 * slowest) / min([1.0, *rates])
        return self._patience

    # --- bounds ---

    def _check_bounds(self, network: VirtualNetwork) -> None:
        if network.now - self._looked_at < 10.0:
            return
        seconds = network.now - self._looked_at
        calls = network.calls - self._calls
        self._looked_at = network.now
        self._calls = network.calls
        links = sum(len(peer.neighbours) for peer in network.peers.values())
        if calls > CALLS * seconds * max(1, links):
            raise BrokenLawError(f"{calls} calls over {links} links in {seconds:.0f} s", code="law.bounded")

        for number, peer in network.peers.items():
            for neighbor, parts in _kept_for(peer):
                for name, excess in parts.items():
                    if excess > 0:
                        raise BrokenLawError(
                            f"peer {number} has {excess} {name} too many for peer {neighbor}", code="law.bounded"
                        )


def _kept_for(peer: Any) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield for each neighbour how much more than it may a peer keeps for it, of each kind."""
    if isinstance(peer, AsynchronousPeer):
        exchanges = len(peer.timetable.exchanges) + 1
        for known in peer.neighbours.values():
            queue = known.queue
            yield (
                known.number,
                {
                    "rows to send": len(queue.rows) - exchanges,
                    "rows received": len(known.rows) - exchanges,
                    "hellos": len(queue.hellos) - 1,
                    "acknowledgements": len(queue.acknowledgements) - 1,
                    "frozen shares": len(peer.protocol.edges[known.number].frozen) - 1,
                    "answers under way": known.answering - MOST_ANSWERS,
                },
            )
    elif isinstance(peer, SynchronousPeer):
        for known in peer.neighbours.values():
            yield (
                known.number,
                {
                    "rows to send": len(peer.machine.due(known.number)) - UNDER_WAY,
                    "rows received": len(peer.machine.heard_of(known.number)) - UNDER_WAY,
                    "moments to send again": len(known.again) - UNDER_WAY - 1,  # answers overtake each other
                    "answers under way": known.answering - MOST_ANSWERS,
                },
            )


def _place(network: VirtualNetwork, peer: int) -> int:
    """Return the place of a synchronous peer that its disk has; -1 if it has none."""
    newest = network.machines[peer].disk.store.checkpoints.newest
    return -1 if newest is None else int(newest.transport["place"])


def _quiet_from(network: VirtualNetwork) -> float:
    """Return when nothing goes wrong any more; of what lasts to the end, when it began."""
    moments = [0.0]
    for fault in network.schedule.faults:
        if isinstance(fault, Crash) and fault.at is None:
            continue
        end = getattr(fault, "end", math.inf)
        at: float = getattr(fault, "at", 0.0) or 0.0
        moment = at if math.isinf(end) else end
        moments.append(moment + (getattr(fault, "down", None) or 0.0))
    return max(moments)
