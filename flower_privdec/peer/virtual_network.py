"""A whole network of peers in one thread, on a virtual clock: the second driver, beside threads and sockets.

It does what `network.peer.driver` does in real time, event by event: it lets a peer go on, carries its calls, holds
answers back that will say more soon, and gives each work its duration. Beside that it does to peers what the world does
(`faults.FaultSchedule`): it loses and doubles calls, kills processes at any work, puts back old folders, fills disks,
stops clocks. All that is random is drawn from the schedule's seed, in the order of events, so the same peers under the
same schedule go through the same events, whatever the machine is doing: what was seen once is seen again.

    home      makes a peer's folder (`Disk`), and starts processes on it: see `Home`
    machine   one peer's device, which outlasts its processes: its disk, its clock, how fast it is, whether it is frozen
    process   one life of a peer, from its start to its end or its death
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, Protocol, Self

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import BudgetError, MembersChangedError, PrivdecError, RunError
from flower_privdec.peer.driving import Pause, UnreachableError, Wait, Work
from flower_privdec.peer.faults import (
    Crash,
    FaultSchedule,
    Freeze,
    FullDisk,
    Join,
    Lie,
    Lose,
    Restore,
    Slow,
    WrongClock,
)
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.session import Messages
from flower_privdec.peer.store import MemoryStore
from flower_privdec.peer.virtual_links import VirtualLinks
from flower_privdec.pushsum.exactly_once import LAST, FrozenShare, RefusedError
from flower_privdec.pushsum.frames import RowMessage

INSTANT = 1e-3  # seconds until a call to a peer that is not there fails
LOST_AFTER = 1.0  # seconds until a caller learns that its call, or the answer, is lost
KILLED = "virtual.killed"
TICK = 1e-6  # seconds of a wrong clock, below which nothing is measured
RIGHT = (0.0, 0.0, 1.0)  # a clock that shows the true time
ALL_NEWS = 10  # times in `retry` seconds that it is looked for news for all neighbours
OPERATOR = 0.5  # seconds until an operator has charged what a restored ledger lacks


class Disk(Protocol):
    """All that a peer's folder keeps, in memory: its store, its ledger, and what else its trainer keeps.

    Attributes:
        store: what it keeps of the run.
    """

    @property
    def store(self) -> MemoryStore: ...

    def copy(self) -> Self:
        """Return a backup, which later writes do not change."""

    def fill(self, is_full: bool) -> None:
        """Let every write fail from now on as on a full disk, or no longer."""


class Home(Protocol):
    """Makes the folders and the processes of a simulated network's peers."""

    def empty(self, peer: int) -> Disk:
        """Return a new folder of a peer."""

    def start(self, peer: int, disk: Any, draw: Callable[[], int]) -> RunningPeer:
        """Start a process of a peer on a folder that an earlier one, which is closed, may have left.

        Args:
            draw: see PeerPlace.

        Raises:
            PrivdecError: it cannot start, as a real process would not.
        """


class VirtualNetwork:
    """Peers that call each other's functions, one event after the other.

    Args:
        home: makes the peers.
        peers: their numbers.
        schedule: what goes wrong, and how long things take; nothing, and no time but that of links, by default.
        watch: called after each event; what it raises ends the run.

    Attributes:
        now: the virtual clock, in seconds.
        events: how many were performed.
        ends: of each peer whose last process is over and that nobody starts again: None if it came to its end, else the
            error that ended it. A process that was killed has "killed".
        machines: by peer.
        faults: how many faults of each kind took effect.
        calls: how many calls were made.

    Raises:
        ScenarioError: the schedule names a peer that does not exist.
    """

    def __init__(
        self,
        home: Home,
        peers: Iterable[int],
        schedule: FaultSchedule | None = None,
        watch: Callable[[VirtualNetwork], None] | None = None,
    ) -> None:
        numbers = [*peers]
        self.schedule = schedule or FaultSchedule()
        self.schedule.check(max(numbers) + 1)
        self.home = home
        self.now = 0.0
        self.events = 0
        self.calls = 0
        self.ends: dict[int, Exception | None] = {}
        self.faults: Counter[str] = Counter()
        self._random = Random(self.schedule.seed)
        self.links = VirtualLinks(self.schedule, self._random)
        self._watch = watch
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()  # events of one moment are performed in the order in which they were put down
        self.machines = {number: Machine(self, number, home.empty(number)) for number in numbers}
        self._begin()

    def _begin(self) -> None:
        """Put down the first starts, and all faults that have a moment."""
        joins = {fault.peer: fault.at for fault in self.schedule.faults if isinstance(fault, Join)}
        for number, machine in self.machines.items():
            if number in joins:
                self.faults["join"] += 1
            machine.start_at(joins.get(number, 0.0))
        for fault in self.schedule.faults:
            if not isinstance(fault, Join) and getattr(fault, "peer", None) in self.machines:
                self.machines[fault.peer].expect(fault)  # type: ignore[union-attr]

    @property
    def peers(self) -> dict[int, RunningPeer]:
        """Return the last process of each peer that ever started."""
        return {number: one.process.peer for number, one in self.machines.items() if one.process is not None}

    @property
    def is_over(self) -> bool:
        """Return whether all peers have ended, and none will be started again."""
        return len(self.ends) == len(self.machines)

    def run(self, until: float = math.inf) -> None:
        """Perform events until all peers have ended, or the clock is at a moment.

        Raises:
            RunError: no event is left, and peers still wait: they would wait for ever.
        """
        while not self.is_over:
            if not self._due:
                raise RunError(f"nothing can happen any more: {'; '.join(self.waiting())}", code="virtual.stuck")
            moment, order, perform = heapq.heappop(self._due)
            if moment > until:
                heapq.heappush(self._due, (moment, order, perform))
                self.now = until
                return
            self.now = moment
            self.events += 1
            perform()
            if self._watch is not None:
                self._watch(self)

    def waiting(self) -> list[str]:
        """Return in words what each peer that has not ended waits for."""
        words = []
        for number, machine in self.machines.items():
            if number in self.ends:
                continue
            if machine.process is None or machine.process.is_over:
                words.append(f"peer {number} is not running")
            else:
                words.append(machine.process.peer.waiting() or f"peer {number} works")
        return words

    def close(self) -> None:
        """Close all processes."""
        for machine in self.machines.values():
            machine.kill()

    def at(self, moment: float, perform: Callable[[], None]) -> None:
        """Put an event down for a moment; one at infinity never comes."""
        if moment < math.inf:
            heapq.heappush(self._due, (moment, next(self._order), perform))

    def draw(self) -> int:
        """Return a random number from 1 to 2^64 - 1."""
        return 1 + self._random.randrange(LAST)


class KilledError(RunError):
    """A process was killed, and nobody starts another one."""


class Machine:
    """A peer's device.

    Attributes:
        number: the peer's.
        disk: its folder.
        process: the one that runs, or ran last; None before the first.
        performed: how many works of each kind were begun on it.
        worked: seconds that its works took.
        waited: the other seconds of its processes, by the neighbour whose message ended the wait; None if time did.
        calls: how many calls it made.
        bytes_sent: of its calls and answers.
        ended_at: when its last process was over; None before.
    """

    def __init__(self, network: VirtualNetwork, number: int, disk: Disk) -> None:
        self.network = network
        self.number = number
        self.disk = disk
        self.process: Process | None = None
        self.performed: Counter[str] = Counter()
        self.worked = 0.0
        self.waited: dict[int | None, float] = {}
        self.calls = 0
        self.bytes_sent = 0
        self.ended_at: float | None = None
        self._starts = 0  # that are put down and have not come
        self._crashes: list[Crash] = []
        self._slow: list[Slow] = []
        self._lies: list[Lie] = []
        self._frozen_until = 0.0
        self._full: list[FullDisk] = []
        self._charges = False

        # The clock: (moment, what it showed then, its rate from then on).
        self._clock = RIGHT

    # --- its clock and its speed ---

    @property
    def local(self) -> float:
        """Return what the peer's clock shows."""
        if self._clock is RIGHT:  # as nearly always, and asked many times an event
            return self.network.now
        since, shown, rate = self._clock
        return shown + rate * (self.network.now - since)

    def moment(self, local: float) -> float:
        """Return when the peer's clock will show something, or a little later: rounding must not make it earlier."""
        if self._clock is RIGHT:
            return local
        since, shown, rate = self._clock
        return since + (local - shown) / rate + TICK

    def duration(self, kind: str) -> float:
        """Return how long a work takes that begins now, in seconds."""
        now = self.network.now
        seconds: float = self.network.schedule.work.get(kind, 0.0)  # type: ignore[call-overload]
        for fault in self._slow:
            if fault.at <= now < fault.end:
                seconds *= fault.factor
        return seconds

    @property
    def is_frozen(self) -> bool:
        """Return whether its processes stand still."""
        return self.network.now < self._frozen_until

    def when_awake(self, perform: Callable[[], None]) -> None:
        """Perform something of a process, once it does not stand still any more."""
        if self.is_frozen:
            self.network.at(self._frozen_until, lambda: self.when_awake(perform))
        else:
            perform()

    # --- its processes ---

    def start_at(self, moment: float) -> None:
        """Start a process at a moment."""
        self._starts += 1

        def start() -> None:
            self._starts -= 1
            self.start()

        self.network.at(moment, start)

    def start(self, charging: bool = False) -> None:
        """Start a process, in the place of one that may be there."""
        network = self.network
        self.kill()
        if math.isinf(self._frozen_until):
            return  # nothing starts there any more
        network.ends.pop(self.number, None)
        try:
            peer = network.home.start(self.number, self.disk, network.draw)
        except (PrivdecError, OSError) as error:
            self.ended(error)
            return
        self.process = Process(self, peer, charging)
        self.process.begin()

    def kill(self) -> None:
        """End the process at once, if one is there: nothing that it was about to do happens any more."""
        if self.process is not None and not self.process.is_over:
            self.process.is_over = True
            self.process.count_wait()
            self.process.hang_up()
            self.process.peer.close()

    def ended(self, error: Exception | None) -> None:
        """Record the end of a process, or that none could be started; an operator may act on it."""
        network = self.network
        if isinstance(error, MembersChangedError):
            self.kill()
            self.start_at(network.now)
            return
        if self.process is not None and not self.process.is_over:
            was_charging = self.process.is_charging
            self.kill()
            if error is None and was_charging:
                self.start_at(network.now + OPERATOR)
                return

        is_short = isinstance(error, BudgetError) and error.code == "ledger.witnessed"
        if is_short and self._charges:
            self._charges = False
            self._starts += 1

            def charge() -> None:
                self._starts -= 1
                self.start(charging=True)

            network.at(network.now + OPERATOR, charge)
            return
        if _is_full(error):
            again = [fault.end + fault.down for fault in self._full if fault.down is not None]
            if again and max(again) < math.inf:
                self.start_at(max(again))
        if not self._starts:
            self._stay_ended(error)

    # --- what is done to it ---

    def expect(self, fault: Any) -> None:
        """Put down a fault of this peer."""
        at = self.network.at
        if isinstance(fault, Crash):
            # A crash without a moment is at a work, and waits for that.
            if fault.at is None:
                self._crashes.append(fault)
            else:
                at(fault.at, lambda: self.crash(fault))
        elif isinstance(fault, Restore):
            backup: list[Disk] = []
            at(fault.copied_at, lambda: backup.append(self.disk.copy()))
            at(fault.at, lambda: self._replace(fault, backup[0]))
        elif isinstance(fault, Lose):
            at(fault.at, lambda: self._replace(fault, self.network.home.empty(self.number)))
        elif isinstance(fault, Freeze):
            at(fault.at, lambda: self._freeze(fault))
        elif isinstance(fault, WrongClock):
            at(fault.at, lambda: self._set_clock(fault))
        elif isinstance(fault, FullDisk):
            at(fault.at, lambda: self._fill(fault))
            at(fault.end, lambda: self._make_room(fault))
        elif isinstance(fault, Slow):
            self._slow.append(fault)
            at(fault.at, lambda: self._count(fault))
        elif isinstance(fault, Lie):
            self._lies.append(fault)
            at(fault.at, lambda: self._count(fault))

    def _count(self, fault: Any) -> None:
        self.network.faults[fault.kind] += 1

    def crash(self, fault: Crash | Restore | Lose) -> None:
        """Kill the process, and start another one later if the fault says so; nothing if none runs."""
        if self.process is None or self.process.is_over:
            return
        self._count(fault)
        self.kill()
        self._come_back(fault.down)

    def _come_back(self, down: float | None) -> None:
        if down is not None:
            self.start_at(self.network.now + down)
        elif not self._starts:
            self._stay_ended(KilledError("killed, and nobody starts it again", code=KILLED))

    def _stay_ended(self, error: Exception | None) -> None:
        """Record that nobody starts another process."""
        self.network.ends[self.number] = error
        self.ended_at = self.network.now

    def _replace(self, fault: Restore | Lose, disk: Disk) -> None:
        """Kill the process, and put another folder in place of the disk's."""
        if self.process is None:
            return  # it has not joined yet, and there is no folder
        self._count(fault)
        was_over = self.process.is_over
        self.kill()
        self.disk = disk.copy()
        self.disk.fill(bool(self._full))
        self._charges = fault.charges
        if fault.down is not None and was_over:
            # Whoever puts a folder back starts the peer too, even if it had ended.
            self.network.ends.pop(self.number, None)
        if not (was_over and self._starts):
            self._come_back(fault.down)

    def _freeze(self, fault: Freeze) -> None:
        self._count(fault)
        self._frozen_until = max(self._frozen_until, fault.end)
        if math.isinf(self._frozen_until):
            self._stay_ended(KilledError("stands still for good", code=KILLED))

    def _set_clock(self, fault: WrongClock) -> None:
        self._count(fault)
        self._clock = (self.network.now, self.local + fault.jump, fault.rate)
        if self.process is not None:
            self.process.wake()

    def _fill(self, fault: FullDisk) -> None:
        self._count(fault)
        self._full.append(fault)
        self.disk.fill(True)

    def _make_room(self, fault: FullDisk) -> None:
        self._full.remove(fault)
        if not self._full:
            self.disk.fill(False)

    def crash_at(self, kind: str) -> Crash | None:
        """Return the crash that comes at this work, which begins now, of a kind; None if none does."""
        self.performed[kind] += 1
        for fault in self._crashes:
            if fault.work == kind and fault.nth == self.performed[kind]:
                return fault
        return None

    # --- what it sends ---

    def told(self, messages: Messages) -> Messages:
        """Return messages as this member sends them: as they are, unless it lies."""
        if not self._lies:
            return messages
        now = self.network.now
        for lie in self._lies:
            if lie.at <= now < lie.end:
                messages = [self._lied(message, lie) for message in messages]
        return messages

    def _lied(self, message: Any, lie: Lie) -> Any:
        if not isinstance(message, FrozenShare | RowMessage):
            return message

        values = dict(message.values)
        for name, value in values.items():
            if (name == "w") != (lie.says == "weight"):
                continue
            if lie.says in ("scaled", "weight"):
                values[name] = (value * lie.factor).to(value.dtype)
            elif lie.says == "constant":
                values[name] = torch.full_like(value, lie.factor)
            elif lie.says == "nan":
                values[name] = torch.full_like(value, math.nan)
            else:
                generator = torch.Generator().manual_seed(self.network.draw() % 2**63)
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                values[name] = (lie.factor * noise).to(value.dtype)

        return replace(message, values=values)


def _is_full(error: Exception | None) -> bool:
    """Return whether an error, or what caused it, is that of a disk."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__  # type: ignore[assignment]
    return False


class Process:
    """One life of a peer, with the calls that it makes and the answers that it holds back.

    Attributes:
        peer: what runs in it.
        is_charging: whether it only charges what its ledger lacks.
        is_over: whether it has ended, or was killed.
    """

    def __init__(self, machine: Machine, peer: RunningPeer, charging: bool) -> None:
        self.machine = machine
        self.network = machine.network
        self.peer = peer
        self.is_charging = charging
        self.is_over = False
        self._patience = peer.times.deadline / 2  # seconds that a call may take
        self._holding = min(peer.times.retry, self._patience) / 2  # seconds that an answer may be held back
        self._is_listening = False
        self._is_working = False
        self._calling: set[int] = set()
        self._under_way: dict[int, _Call] = {}  # the last call to each neighbour
        self._timed: set[int] = set()  # neighbours whose call is looked at when its patience is over
        self._held: list[_HeldAnswer] = []
        self._looks_at = math.inf  # when it is looked at next, if nothing comes
        self._idle_since = self.network.now
        self._heard: int | None = None  # whose message is being looked at
        self._pause: Pause | None = None  # where the peer is
        self._looks_at_all = 0.0  # when it is looked for news for all neighbours, whoever was heard

    @property
    def is_there(self) -> bool:
        """Return whether the peer answers calls."""
        return self._is_listening and not self.is_over

    def begin(self) -> None:
        """Start the peer; it listens once it waits for the first time."""
        if self.is_charging:
            self.peer.begin_charging()
        else:
            self.peer.begin()
        self.look()

    def after(self, seconds: float, perform: Callable[[], None]) -> None:
        """Perform something of this process after a time, once it does not stand still, unless it is over by then."""

        def perform_if_alive() -> None:
            if not self.is_over:
                perform()

        self.network.at(self.network.now + seconds, lambda: self.machine.when_awake(perform_if_alive))

    def wake(self) -> None:
        """Look again soon: the clock was set."""
        self._looks_at = math.inf
        self.after(0.0, self.look)

    def look(self, heard: int | None = None) -> None:
        """Let the peer go on, answer what can be answered, and make the calls that are due.

        Args:
            heard: whose message came. If the peer did not go on by it, there is news for that neighbour alone, but for
                what only time brings, which is looked for every so often.
        """
        if self.is_over:
            return
        self._heard = heard
        has_gone_on = self._go_on()
        self._heard = None
        if not self.is_there:
            return
        self._answer_held()

        session = self.peer.conversation
        local = self.machine.local
        neighbors: Iterable[int] = self.peer.neighbours
        is_news_for_one = heard in self.peer.neighbours and not has_gone_on and self.network.now < self._looks_at_all
        if is_news_for_one:
            neighbors = [heard]  # type: ignore[list-item]
        else:
            self._looks_at_all = self.network.now + self.peer.times.retry / ALL_NEWS
        for neighbor in neighbors:
            if neighbor not in self._calling and session.has_news(neighbor, local):
                self._call_all(neighbor, session.calls(neighbor, local))

    def _look_at(self, moment: float) -> None:
        if moment >= self._looks_at:
            return
        self._looks_at = moment

        def look() -> None:
            if self._looks_at == moment:
                self._looks_at = math.inf
                self.look()

        self.after(max(0.0, moment - self.network.now), look)

    def _go_on(self) -> bool:
        """Let the peer go on, and return whether it did."""
        if self._is_working:
            return False

        local = self.machine.local
        before = self._pause
        try:
            pause = self.peer.on_tick(local)
            self._pause = pause
            if isinstance(pause, Work):
                self._work(pause)
            elif isinstance(pause, Wait):
                self._is_listening = True
                self._look_at(self.machine.moment(min(pause.until, local + self.peer.times.retry)))
            else:
                self.machine.ended(None)
        except (PrivdecError, OSError) as error:
            self.machine.ended(error)

        return self._pause is not before

    def count_wait(self) -> None:
        """Count the time since its last work, which waited for the message that is being looked at."""
        waited = self.network.now - self._idle_since
        if waited > 0:
            by_whom = self.machine.waited
            by_whom[self._heard] = by_whom.get(self._heard, 0.0) + waited
            self._idle_since = self.network.now

    def _work(self, work: Work) -> None:
        self.count_wait()
        crash = self.machine.crash_at(work.kind)
        if crash is not None and crash.point == "before":
            self.machine.crash(crash)
            return
        if crash is not None and crash.point == "within":
            self._tear(work)
            self.machine.crash(crash)
            return

        self._is_working = True
        duration = self.machine.duration(work.kind)
        if work.kind == "train":
            result, steps = self._train(work)
            # The seconds are those of a round's private steps; the rest of its program is little beside them.
            duration *= steps / self.peer.trainer.algorithm.steps_per_round
        else:
            result = work.do()
        self.machine.worked += duration
        self._idle_since = self.network.now + duration

        def done() -> None:
            if crash is not None:
                self.machine.crash(crash)
                return
            self._is_working = False
            self._idle_since = self.network.now
            work.result = result
            work.is_done = True
            self.look()

        self.after(duration, done)

    def _train(self, work: Work) -> tuple[Any, int]:
        """Perform a work of training; return its result, and how many private steps it took."""
        trainer = self.peer.trainer
        before = trainer.steps_taken
        result = work.do()
        return result, trainer.steps_taken - before

    def _tear(self, work: Work) -> None:
        """Perform a work in part: a step is paid for, and a checkpoint not written."""
        checkpoints = self.machine.disk.store.checkpoints
        checkpoints.is_torn = True
        try:
            work.do()
        except OSError:
            pass  # as a process that dies in a write learns nothing of it
        finally:
            checkpoints.is_torn = False

    # --- calls to others ---

    def _call_all(self, neighbor: int, calls: Sequence[Messages]) -> None:
        """Make calls to a neighbour, one after the other, and none after one that failed."""
        if not calls:
            self._calling.discard(neighbor)
            return
        self._calling.add(neighbor)
        network = self.network
        network.calls += 1
        whole, call = self._written(neighbor, calls[0])
        self.machine.calls += 1
        self.machine.bytes_sent += len(call)
        under_way = _Call(self, neighbor, whole, calls[1:], self.machine.local)
        self._under_way[neighbor] = under_way
        answered = under_way.answered

        other = network.machines.get(neighbor)
        passage = network.links.passage(network.now, self.machine.number, neighbor, len(call))
        if passage.seconds is not None:
            if other is None or other.process is None or not other.process.is_there:
                answered_at = max(INSTANT, passage.seconds)
                network.at(network.now + answered_at, lambda: answered(_not_there(neighbor)))
            else:
                _deliver(other, passage.seconds, self.machine.number, call, answered)
                if passage.again is not None:
                    network.faults["duplicate"] += 1
                    _deliver(other, passage.again, self.machine.number, call, lambda answer: None)
        elif not passage.cut:
            self._lose(neighbor, answered)
        if neighbor not in self._timed:
            self._watch_patience(under_way)

    def _watch_patience(self, call: _Call) -> None:
        """Look at a call when the patience with it is over; one event for each neighbour, whichever call it is then."""
        neighbor = call.neighbor
        self._timed.add(neighbor)

        def look() -> None:
            self._timed.discard(neighbor)
            now = self._under_way[neighbor]
            if now.is_over:
                return
            if self.machine.local < now.began + self._patience:
                self._watch_patience(now)
                return
            now.end(UnreachableError(f"peer {neighbor} did not answer in time", code="call.unanswered"))

        self.after(self.machine.moment(call.began + self._patience) - self.network.now, look)

    def _written(self, neighbor: int, messages: Messages) -> tuple[Messages, bytearray]:
        """Return a call or an answer, and the bytes that leave; a liar believes itself."""
        session = self.peer.conversation
        whole, content = session.write(neighbor, messages)
        told = self.machine.told(whole)
        if told is not whole:
            content = [part for message in told for part in session.frames.encode(message)]
        call = bytearray().join(content)
        return whole, call

    def finish(
        self, neighbor: int, sent: Messages, answer: bytearray | RunError, began: float, others: Sequence[Messages]
    ) -> None:
        """Take in what became of a call, and make the others."""
        if self.is_over:
            return

        session = self.peer.conversation
        local = self.machine.local
        if isinstance(answer, RunError):
            self._fail(neighbor, answer)
            return
        try:
            messages = session.read(neighbor, memoryview(answer))
            session.took(neighbor, local - began, 0.0)
            session.answered(neighbor, sent, messages, local)
        except RunError as error:
            self._fail(neighbor, error)
            return
        except OSError as error:
            self.machine.ended(error)
            return

        self._call_all(neighbor, others)
        self.look(neighbor)

    def _fail(self, neighbor: int, error: RunError) -> None:
        if self.is_over:
            return
        again = self.peer.conversation.failed(neighbor, error, self.machine.local)

        def call_again() -> None:
            self._calling.discard(neighbor)
            self.look(neighbor)

        self.after(self.machine.moment(again) - self.network.now, call_again)
        self.look(neighbor)

    # --- calls of others ---

    def receive(self, caller: int, call: bytearray, answered: Callable[[bytearray | RunError], None]) -> None:
        """Take a call; `answered` is to be called with the answer, or with why the call is refused."""
        session = self.peer.conversation
        known = session.neighbours.get(caller)
        local = self.machine.local
        try:
            messages = session.read(caller, memoryview(call))
            session.bytes_received += len(call)
            make_answer = session.receive(caller, messages, local)
        except RunError as error:
            if known is not None:
                known.refused = str(error)
            self._send(caller, RefusedError(str(error), code=error.code), answered)
        except OSError:
            # A server's thread that fails answers nothing, and the peer goes on.
            self._send(caller, _not_there(self.machine.number), answered)
        else:
            session.neighbours[caller].refused = ""
            until = local + self._holding
            self._held.append(_HeldAnswer(caller, messages, make_answer, answered, until))
            self._look_at(self.machine.moment(until))
        self.look(caller)

    def _answer_held(self) -> None:
        session = self.peer.conversation
        for held in [*self._held]:
            if self.machine.local >= held.until or session.is_answered(held.caller, held.messages):
                self._held.remove(held)
                _, answer = self._written(held.caller, held.make_answer())
                self._send(held.caller, answer, held.answered)

    def hang_up(self) -> None:
        """Let those whose calls it has not answered learn that it ended: its system closes the connections."""
        for held in self._held:
            self._send(held.caller, _not_there(self.machine.number), held.answered)
        self._held.clear()

    def _send(
        self, caller: int, answer: bytearray | RunError, answered: Callable[[bytearray | RunError], None]
    ) -> None:
        network = self.network
        size = 0 if isinstance(answer, RunError) else len(answer)
        self.peer.conversation.bytes_sent += size
        self.machine.bytes_sent += size
        passage = network.links.passage(network.now, self.machine.number, caller, size)
        if passage.seconds is not None:
            network.at(network.now + passage.seconds, lambda: answered(answer))
        elif not passage.cut:
            self._lose(self.machine.number, answered)

    def _lose(self, callee: int, answered: Callable[[bytearray | RunError], None]) -> None:
        """Let the caller learn that its call to a peer, or the answer, was lost."""
        self.network.faults["loss"] += 1
        lost = UnreachableError(f"a call to peer {callee}, or its answer, was lost", code="call.lost")
        self.network.at(self.network.now + LOST_AFTER, lambda: answered(lost))


def _deliver(
    machine: Machine,
    seconds: float,
    caller: int,
    call: bytearray,
    answered: Callable[[bytearray | RunError], None],
) -> None:
    """Bring a call to whatever process a machine runs by then; a call may be older than the process."""
    network = machine.network

    def take() -> None:
        process = machine.process
        if process is None or not process.is_there:
            network.at(network.now + INSTANT, lambda: answered(_not_there(machine.number)))
        else:
            process.receive(caller, call, answered)

    network.at(network.now + seconds, lambda: machine.when_awake(take))


class _Call:
    """A call to a neighbour: answered, or lost, or given up, whichever comes first."""

    def __init__(
        self, process: Process, neighbor: int, sent: Messages, others: Sequence[Messages], began: float
    ) -> None:
        self.neighbor = neighbor
        self.began = began
        self.is_over = False
        self._process = process
        self._sent = sent
        self._others = others

    def answered(self, answer: bytearray | RunError) -> None:
        """Take the answer, or why there is none, once the caller does not stand still."""
        self._process.machine.when_awake(lambda: self.end(answer))

    def end(self, answer: bytearray | RunError) -> None:
        """Hand over what became of the call, unless that is known."""
        if self.is_over:
            return
        sent = self._sent
        others = self._others
        self.is_over = True
        self._sent = []  # what was sent is large, and this is kept until its patience would be over
        self._others = []
        self._process.finish(self.neighbor, sent, answer, self.began, others)


class _HeldAnswer:
    """An answer that would say more if it waited a little."""

    def __init__(
        self,
        caller: int,
        messages: Messages,
        make_answer: Callable[[], Messages],
        answered: Callable[[bytearray | RunError], None],
        until: float,
    ) -> None:
        self.caller = caller
        self.messages = messages
        self.make_answer = make_answer
        self.answered = answered
        self.until = until


def _not_there(peer: int) -> UnreachableError:
    return UnreachableError(f"peer {peer} is not there", code="call.unanswered")
