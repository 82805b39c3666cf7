"""Soak test: run peers for minutes under constant fault injection and check the invariants.

Every peer is a process of this machine that reaches the others through a proxy. It checks throughout that

- a peer runs, unless the soak killed it and restarts it with --resume;
- its ledger's chain is whole, never shrinks, and pays for every step that `release_counter` counted, with at most one
  payment more per start of the process;
- some peer reaches a new round within a time limit;
- after a run, the push-sum weights on the peers' disks sum to the number of peers.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Self

from flower_privdec.common.formatting import duration, memory, peer_ranges
from flower_privdec.errors import BudgetError, RunError, ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.network.local.fault_proxy import FaultProxy, Faults
from flower_privdec.network.local.peer_processes import PeerProcesses, Watch, on_this_machine
from flower_privdec.pushsum.lockstep import Timetable, network_mixing
from flower_privdec.scenario import Scenario
from tools.soak.checks import Paid, Weight, look_at_ledger, resident_bytes, weight_on_disk
from tools.soak.fault_schedule import KINDS, Fault, Pair, check_kinds, faults
from tools.soak.release_counter import counted_in

LOOK_SECONDS = 2.0  # between two looks at ledgers and memory
COUNTER = (sys.executable, "-m", "tools.soak.release_counter")
Action = Callable[[], None]
TICK = 0.1
LINES = 20  # that are printed of a soak, beside its summary
Say = Callable[[str], None]


@dataclass
class Tally:
    """The counts of a soak.

    Attributes:
        runs, finished: how many were begun, and came to their end.
        faults: how often each kind of fault was made.
        rounds: that the fastest peer went through, over all runs.
        taken, paid: private steps as counted, and as the ledgers have them, of all peers and finished looks.
        crashes: processes that were killed.
        first, largest: memory of each peer at the first look after its first step, and the most, in bytes.
        weight: Σw on the disks after the last run whose disks told it; None where none did.
    """

    runs: int = 0
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    taken: int = 0
    paid: int = 0
    crashes: int = 0
    first: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)
    weight: Weight | None = None


class SoakedRun:
    """One run of a soak: its processes, what is wrong with them now, and when that is over."""

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        links: Sequence[Pair],
        faults: Iterator[Fault],
        patience: float,
        tally: Tally,
        *,
        weighed: bool,
    ) -> None:
        """Start nothing yet.

        Args:
            scenario: with an address on this machine for each peer.
            out: a new folder.
            links: (sender, receiver) of those that carry anything.
            faults: what goes wrong.
            patience: seconds within which some peer has to be further.
            tally: where to count.
            weighed: whether the peers have push-sum weights, whose sum nothing may change.
        """
        self.scenario, self.out, self.tally, self._weighed = scenario, out, tally, weighed
        self._links, self._faults, self._patience = links, faults, patience
        out.mkdir(parents=True)
        self._proxy = FaultProxy()
        self.processes = PeerProcesses(scenario, out, proxy=self._proxy, program=self._program)
        self._begun = self._further = self._looked = time.monotonic()
        self._due: list[tuple[float, int, Action]] = []  # what ends, and when
        self._order = count()
        self._troubled: set[Any] = set()  # peers and links with which something is wrong
        self._gone: set[int] = set()
        self._rounds = dict.fromkeys(range(scenario.n_peers), 0)
        self._best, self._lives = 0, Counter[int]()
        self._paid = dict.fromkeys(range(scenario.n_peers), Paid())
        self._next: tuple[float, Fault] | None = None
        self._log = (out / "faults.log").open("a", buffering=1)

    def __enter__(self) -> Self:
        try:
            self.processes.prepare()
            for peer in self.processes.peers:
                self._start(peer)
            self._watch = Watch(self.processes, self._told)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        self._end()

    def _end(self) -> None:
        self.processes.end()
        self._proxy.close()
        self._log.close()

    def _told(self, peer: int, status: dict[str, Any] | None, word: str) -> None:
        if status is not None:
            self._rounds[peer] = max(self._rounds[peer], status["round"])

    def _program(self, peer: int) -> tuple[str, ...]:
        return (*COUNTER, str(self._counts(peer)))

    def _start(self, peer: int) -> None:
        self._lives[peer] += 1
        self.processes.start(peer, resume=True)
        self._gone.discard(peer)

    # --- faults ---

    def step(self) -> None:
        """Inject and end the faults that are due, and check the invariants."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        if self._next is None:
            fault = next(self._faults)
            self._next = now + fault.after, fault
        if now >= self._next[0]:
            self._make(self._next[1], now)
            self._next = None
        self._check_alive()
        self._check_further(now)
        if now - self._looked >= LOOK_SECONDS:
            self._look()
            self._looked = now

    def _ending(self) -> bool:
        """Return whether a peer is at the end of its rounds, and the others are nearly there."""
        return max(self._rounds.values()) >= self.scenario.rounds

    def _make(self, fault: Fault, now: float) -> None:
        """Inject a fault, unless its peer or link has one already or the run is about to end."""
        links = [pair for pair in self._links if fault.other is None and fault.peer in pair]
        links = links if fault.kind == "isolate" else [] if fault.other is None else [(fault.peer, fault.other)]
        where: set[Any] = set(links) or {fault.peer}
        over = fault.other is None and self.processes.status(fault.peer) is not None
        if where & self._troubled or over or self._ending():
            return
        self._log.write(f"{now - self._begun:.2f} s: {fault}\n")
        self.tally.faults[fault.kind] += 1
        self._troubled |= where
        if fault.kind == "cut":
            self._proxy.cut(links[0])
        elif fault.kind == "kill":
            self.processes.kill(fault.peer)
            self._gone.add(fault.peer)
            self.tally.crashes += 1
        elif fault.kind == "pause":
            self.processes.pause(fault.peer)
        for pair in links:
            self._proxy.set(pair, fault.on_link)
        heapq.heappush(self._due, (now + fault.seconds, next(self._order), lambda: self._mend(fault, where)))

    def _mend(self, fault: Fault, where: set[Any]) -> None:
        self._troubled -= where
        if fault.kind == "kill":
            self._start(fault.peer)
        elif fault.kind == "pause":
            self.processes.unpause(fault.peer)
        else:
            for pair in where:
                self._proxy.set(pair, Faults())

    # --- invariants ---

    def _broken(self, what: str, code: str) -> RunError:
        return RunError(f"{what}; its traces are in {self.out}", code=code)

    def _check_alive(self) -> None:
        for peer in self.processes.peers:
            if peer not in self._gone and self.processes.status(peer) not in (None, 0):
                raise self._broken(f"peer {peer} ended by itself ({self.processes.last_line(peer)})", "soak.peer-ended")

    def _check_further(self, now: float) -> None:
        best = max(self._rounds.values())
        if best > self._best:
            self.tally.rounds += best - self._best
            self._best, self._further = best, now
        if now - self._further > self._patience and not self._ending():
            raise self._broken(f"no peer came further than round {best} for {self._patience:g} s", "soak.no-progress")

    def _look(self) -> None:
        """Check all ledgers and note the memory of all running peers."""
        for peer in self.processes.peers if self.scenario.private is not None else ():
            before = self._paid[peer]
            try:
                paid, problem = look_at_ledger(
                    self.processes.folder(peer) / "ledger", self._counts(peer), before, self._lives[peer]
                )
            except BudgetError as error:
                raise self._broken(f"the ledger of peer {peer}: {error}", "soak.ledger") from error
            if problem is not None:
                raise self._broken(f"the ledger of peer {peer}: {problem}", "soak.ledger")
            self._paid[peer] = paid
            self.tally.paid += paid.steps - before.steps
        for peer in self.processes.peers:
            self._weigh(peer)

    def _counts(self, peer: int) -> Path:
        return self.out / "peers" / f"{peer}.releases"

    def _weigh(self, peer: int) -> None:
        is_warm = counted_in(self._counts(peer)) > 0 or self._rounds[peer] > 0  # its modules are loaded
        resident = resident_bytes(self.processes.pid(peer)) if self.processes.status(peer) is None else None
        if resident is not None and is_warm:
            self.tally.first.setdefault(peer, resident)
            self.tally.largest[peer] = max(resident, self.tally.largest.get(peer, 0))

    # --- how it ends ---

    def finished(self) -> bool:
        """Return whether all peers came to their end."""
        return not self._gone and all(self.processes.status(peer) == 0 for peer in self.processes.peers)

    def conclude(self) -> None:
        """Stop the peers and check the invariants for the last time."""
        came_to_its_end = self.finished()
        self.processes.end()
        self._look()
        self.tally.taken += sum(counted_in(self._counts(peer)) for peer in self.processes.peers)
        self.tally.finished += came_to_its_end
        if self._weighed:
            self._check_weight(came_to_its_end)

    def _check_weight(self, came_to_its_end: bool) -> None:
        weight = weight_on_disk([self.processes.folder(peer) for peer in self.processes.peers], came_to_its_end)
        if weight is not None:
            self.tally.weight = weight
            if not weight.is_right:
                raise self._broken(
                    f"Σw = {weight.total!r} on the peers' disks and must be {weight.expected}", "soak.mass"
                )

    def line(self) -> str:
        """Return a line on the progress."""
        rounds, n_faults = self._rounds.values(), sum(self.tally.faults.values())
        where = f"run {self.tally.runs}  rounds {min(rounds)} to {max(rounds)} of {self.scenario.rounds}"
        down = f"  gone: {peer_ranges(self._gone)}" if self._gone else ""
        room = f"  memory at most {memory(max(self.tally.largest.values()))}" if self.tally.largest else ""
        return f"{where}  {n_faults} faults{down}{room}"


class Soak:
    """Runs of all peers under faults for some minutes."""

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        minutes: float,
        seed: int | None = None,
        kinds: tuple[str, ...] = tuple(KINDS),
        every: float = 3.0,
        longest: float = 2.0,
        patience: float | None = None,
    ) -> None:
        """Check the arguments; write nothing yet.

        Args:
            scenario: that all runs are of.
            out: a folder for runs that is not there yet.
            minutes: how long.
            seed: of the faults; one of the system's by default, which is printed.
            kinds: of the faults.
            every: seconds between two faults, on average.
            longest: seconds that a fault lasts at most. Where peers wait for each other, `network.deadline` has to be
                longer than a few of them, and than a peer takes to start.
            patience: seconds within which some peer has to be further; by default `network.start` and
                `network.deadline` together.

        Raises:
            ScenarioError: a number or a name is none, the scenario cannot be run here, or the folder is there.
        """
        check_kinds(kinds)
        for name, value in {"--minutes": minutes, "--every": every, "--longest": longest}.items():
            if not 0 < value < float("inf"):
                raise ScenarioError(f"{name} {value:g} must be > 0 and finite")
        if out.exists():
            raise ScenarioError(f"{out} is there already; give another --out", code="soak.folder")
        self.scenario, self.out, self.minutes = on_this_machine(scenario), out, minutes
        self.seed = SystemRandom().getrandbits(32) if seed is None else seed
        self.tally = Tally()
        agreement = Agreement.of(self.scenario)
        timetable = Timetable(agreement.algorithm, network_mixing(agreement), agreement.scenario.rounds)
        self._weighed = agreement.mixing is not None and agreement.mixing.sends_shares
        links = [(peer, other) for peer in range(scenario.n_peers) for other in timetable.neighbours(peer)]
        self._links, self._faults = links, faults(self.seed, links, kinds, every, longest)
        network = scenario.network
        self._patience = network.start + network.deadline if patience is None else patience

    def run(self, say: Say = print) -> Tally:
        """Begin runs, one after the other, until the time is over, and return what was seen.

        Args:
            say: called with a line now and then.

        Raises:
            RunError: something that must hold did not; saying what, and where its traces are.
        """
        end, between = time.monotonic() + 60 * self.minutes, 60 * self.minutes / LINES
        next_line = time.monotonic() + between
        for number in count(1):
            if time.monotonic() >= end:
                return self.tally
            self.tally.runs = number
            with self._run(number) as run:
                while not run.finished() and time.monotonic() < end:
                    run.step()
                    if time.monotonic() >= next_line:
                        next_line += between
                        say(f"{duration(60 * self.minutes - (end - time.monotonic()))}  {run.line()}")
                    time.sleep(TICK)
                run.conclude()
        raise AssertionError("there is always another number")

    def _run(self, number: int) -> SoakedRun:
        out = self.out / f"run-{number}"
        links, wrong = self._links, self._faults
        return SoakedRun(self.scenario, out, links, wrong, self._patience, self.tally, weighed=self._weighed)

    def summary(self) -> list[str]:
        """Return what was seen, in lines."""
        tally = self.tally
        made = ", ".join(f"{many} {kind}" for kind, many in sorted(tally.faults.items())) or "none"
        lines = [
            f"seed {self.seed}: {tally.runs} runs, {tally.finished} of them to their end, {tally.rounds:,} rounds",
            f"faults: {made}",
            f"ledgers: {tally.taken:,} steps taken, {tally.paid:,} paid for, {tally.crashes} processes killed",
        ]
        if tally.weight is not None:
            lines.append(f"mass: Σw = {tally.weight.total:.9g} of {tally.weight.expected}")
        grown = [
            f"{peer}: {memory(first)}, at most {memory(tally.largest[peer])}" for peer, first in tally.first.items()
        ]
        return [*lines, *(f"memory of peer {line}" for line in grown)]
