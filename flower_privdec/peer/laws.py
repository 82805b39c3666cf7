"""What must hold in a simulated network at every event, whatever goes wrong in it.

    mass       Σ w and Σ x over all peers' disks and the shares in flight between them change only by committed steps,
               and by what is named here: a peer that begins, is reset, or whose folder is put back or lost
    progress   no peer waits unless something that it waits for can still happen: once nothing goes wrong any more, some
               peer gets on within a bound of virtual time, until all have ended
    ends       a peer ends because it is done, or with an error that has a code and says why
    bounded    queues, counters and calls stay within what the number of neighbours and the time allow

`Laws` is called after each event of a `VirtualNetwork` and raises `BrokenLawError`, which names the law.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flower_privdec.common.errors import CodedError, PrivdecError
from flower_privdec.experiment.checkpoint import Checkpoint
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.faults import Crash, FaultSchedule, Lie, Slow, WrongClock
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.pushsum.exactly_once import Durable
from flower_privdec.pushsum.frames import unpack

EXACT = 1e-9  # of the mass: what additions of floats may round
CALLS = 40.0  # to one neighbour in a second: more is a storm


class BrokenLawError(CodedError):
    """A law does not hold; the code names which. It is not an error of a peer, so no peer ends by it."""


@dataclass(frozen=True)
class _OnDisk:
    """What a peer's disk holds of push-sum.

    Attributes:
        checkpoint: of which it was read.
        durable: mass, counters and shares.
        moved: the sum of its steps so far, on disk; None if nobody counts them.
        disk: which folder it is.
    """

    checkpoint: Checkpoint
    durable: Durable[Tensor]
    moved: float | None
    disk: object

    @property
    def weight(self) -> float:
        return float(self.durable.mass["w"])

    @property
    def x(self) -> float:
        return float(self.durable.mass["x"].double().sum())


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
        moved: returns the sum of the numbers that a peer's steps have added to x up to a checkpoint, if its trainer
            counts them in its rows; without it the sum of x is not watched, only that of w.
        patience: virtual seconds in which some peer has to get on, once nothing goes wrong any more; by default, what
            the peers' own times allow.

    Attributes:
        exceptions: how often mass was begun, reset, put back or lost, by name.
    """

    def __init__(self, moved: Callable[[Checkpoint], float] | None = None, patience: float | None = None) -> None:
        self._moved = moved
        self._patience = patience
        self.exceptions: Counter[str] = Counter()
        self._held: dict[int, _OnDisk] = {}
        self._doubtful: dict[int, int] = {}  # peers whose folder was put back or lost, and their process before
        self._expected_weight = 0.0
        self._expected_x = 0.0
        self._size = 1.0  # of the mass so far, which rounding is relative to
        self._progress: dict[int, Any] = {}
        self._since = 0.0
        self._ended: set[int] = set()
        self._calls = 0
        self._looked_at = 0.0
        self._quiet_from: float | None = None
        self._lies = False

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
        changed = dict[int, _OnDisk | None]()
        for number, machine in network.machines.items():
            newest = machine.disk.store.checkpoints.newest
            before = self._held.get(number)
            if newest is None:
                if before is not None:
                    changed[number] = None
            elif before is None or before.checkpoint is not newest:
                if "shares" not in newest.transport or "w" not in newest.state.rows:
                    return  # no push-sum without waiting: there is no mass in flight
                changed[number] = self._read(number, newest, machine.disk)
        if not changed or self._lies:
            return

        for number, now in changed.items():
            before = self._held.pop(number, None)
            if now is not None:
                self._held[number] = now
            self._account(network, number, before, now)

        self._believe(network)
        if any(self._is_near_doubt(network, number) for number in changed):
            self._except("in doubt")

        weight, x = self._sums()
        self._size = max(self._size, abs(x), abs(weight))
        self._compare("w", weight, self._expected_weight, changed)
        if self._moved is not None:
            self._compare("x", x, self._expected_x, changed)

    def _believe(self, network: VirtualNetwork) -> None:
        """Doubt no longer the peers whose neighbours have all agreed with their present processes."""
        for number, before in [*self._doubtful.items()]:
            peer: Any = network.peers[number]
            boot = peer.witness.boot
            if boot == before:
                continue
            others = [j for j in peer.neighbours if j in self._held]
            if all(_has_agreed(network.peers[j], number, boot) and self._has_met(j, number) for j in others):
                self._doubtful.pop(number, None)

    def _has_met(self, peer: int, neighbor: int) -> bool:
        """Return whether a peer's disk is about the present life of a neighbour."""
        now = self._held.get(neighbor)
        return now is not None and self._held[peer].durable.edges[neighbor].incarnation == now.durable.incarnation

    def _is_near_doubt(self, network: VirtualNetwork, number: int) -> bool:
        """Return whether a peer, or a neighbour of it, has been put back, and not everybody has noticed.

        Until then shares may be under way that its folder does not remember: they add what it has too.
        """
        return number in self._doubtful or bool(self._doubtful.keys() & network.peers[number].neighbours.keys())

    def _read(self, number: int, checkpoint: Checkpoint, disk: object) -> _OnDisk:
        names = next(iter(checkpoint.transport["shares"]["edges"].values()), None)
        assert names is not None
        mass = {name: row[0] for name, row in checkpoint.state.rows.items() if name in ("x", "w")}
        durable = unpack(number, checkpoint.transport["shares"], checkpoint.carried, mass)
        moved = None if self._moved is None else self._moved(checkpoint)
        return _OnDisk(checkpoint, durable, moved, disk)

    def _account(self, network: VirtualNetwork, number: int, before: _OnDisk | None, now: _OnDisk | None) -> None:
        """Expect what a change of one peer's disk does to the sums."""
        if now is None:
            self._except("lost")
            self._doubtful[number] = network.peers[number].witness.boot
            return
        if before is None:
            self._expected_weight += now.weight
            self._expected_x += now.x
            self.exceptions["began"] += 1
            return
        if before.disk is not now.disk:
            self._except("put back")
            self._doubtful[number] = network.peers[number].witness.boot
            return

        if now.durable.incarnation != before.durable.incarnation:
            if now.weight:
                raise BrokenLawError(
                    f"peer {number} began a new life with weight {now.weight:g}, and not with 0", code="law.mass"
                )
            self._except("reset")
            return

        if before.weight == 0 and now.weight > 0:
            # A peer that was reset takes over the model of its first share, with the weight of one that begins.
            self._except("took over")
            return
        if self._moved is not None:
            assert now.moved is not None
            assert before.moved is not None
            self._expected_x += now.moved - before.moved
        if self._sends_to_a_former_life(before, now):
            self._except("to a former life")

    def _sends_to_a_former_life(self, before: _OnDisk, now: _OnDisk) -> bool:
        """Return whether a new share is for a life of its receiver that is over, of which the sender has not heard.

        Nobody can add it, and it is not taken back, since for all that the sender knows it may have arrived.
        """
        for receiver, edge in now.durable.edges.items():
            theirs = self._held.get(receiver)
            known = before.durable.edges.get(receiver)
            before_it = set() if known is None else {share.number for share in known.frozen}
            for share in edge.frozen:
                is_new = share.number not in before_it
                if theirs is not None and is_new and share.addressed < theirs.durable.incarnation:
                    return True
        return False

    def _except(self, name: str) -> None:
        """Record a change that loses or adds mass, by its name, and expect what is there now."""
        self.exceptions[name] += 1
        self._expected_weight, self._expected_x = self._sums()

    def _sums(self) -> tuple[float, float]:
        """Return Σ w and Σ x over the peers' disks, and what is in flight between them."""
        weight = 0.0
        x = 0.0
        for number, held in self._held.items():
            weight += held.weight
            x += held.x
            for receiver, edge in held.durable.edges.items():
                for share in edge.frozen:
                    if self._is_in_flight(number, receiver, share):
                        weight += float(share.values["w"])
                        x += float(share.values["x"].double().sum())
        return weight, x

    def _is_in_flight(self, sender: int, receiver: int, share: Any) -> bool:
        """Return whether a share that its sender has on disk can still be added by its receiver, which has not."""
        theirs = self._held.get(receiver)
        if theirs is None or theirs.durable.incarnation != share.addressed:
            return False
        edge = theirs.durable.edges[sender]
        incarnation = self._held[sender].durable.incarnation
        received = edge.received if edge.incarnation == incarnation else 0
        return edge.incarnation <= incarnation and share.number > received

    def _compare(self, name: str, found: float, expected: float, changed: Mapping[int, object]) -> None:
        if abs(found - expected) <= EXACT * self._size and math.isfinite(found):
            return
        raise BrokenLawError(
            f"Σ {name} is {found:.12g}, and {expected:.12g} was begun with, moved, and not lost by name; just now the "
            f"disks of peers {sorted(changed)} changed",
            code="law.mass",
        )

    # --- ends ---

    def _check_ends(self, network: VirtualNetwork) -> None:
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
            elif isinstance(error, PrivdecError) and not (error.code and str(error)):
                raise BrokenLawError(f"peer {number} ended with an error that has no code: {error}", code="law.ends")

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
            if not isinstance(peer, AsynchronousPeer):
                continue
            exchanges = len(peer.timetable.exchanges) + 1
            for known in peer.neighbours.values():
                queue = known.queue
                parts = {
                    "rows to send": len(queue.rows) - exchanges,
                    "rows received": len(known.rows) - exchanges,
                    "hellos": len(queue.hellos) - 1,
                    "acknowledgements": len(queue.acknowledgements) - 1,
                    "frozen shares": len(peer.protocol.edges[known.number].frozen) - 1,
                    "answers under way": known.answering - 64,
                }
                for name, excess in parts.items():
                    if excess > 0:
                        raise BrokenLawError(
                            f"peer {number} has {excess} {name} too many for peer {known.number}", code="law.bounded"
                        )


def _has_agreed(peer: Any, neighbor: int, boot: int) -> bool:
    """Return whether a peer has agreed with a process of a neighbour on what was sent between them."""
    agreed = peer.protocol._agreed.get(neighbor)
    return agreed is not None and agreed.boot == boot


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
