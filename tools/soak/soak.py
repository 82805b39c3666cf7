"""Soak test: run peers for minutes under constant fault injection and check the invariants.

Every peer is a process of this machine that reaches the others through a proxy. It checks throughout that

- a peer runs, unless the soak killed it and restarts it;
- it never made more releases that its neighbours received, in whichever of its processes, folders and copies, than its
  ledger pays for. One whose folder was restored, lost, copied or deleted is given back to the run as its owner would:
  it is started again, with --charge-missing where it asks for that, and from then on its ledger has to hold them all;
- its ledger's chain is whole, never shrinks, and pays for every step that `release_counter` counted, with at most one
  payment more per start of the process;
- some peer reaches a new round within a time limit;
- after a run, the push-sum weights on the peers' disks sum to the number of peers;
- where noise cancels between peers, a draw that two of them share is added to one release of each at most, by whichever
  of its processes, folders and copies, and every release has the noise that its ε is for, whoever was there;
- a peer that is isolated takes one private step at most beside the one under way;
- the models that the devices of a run end with agree, but for those that report that theirs does not.

In each run one peer starts late.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Self

from flower_privdec.common.errors import BudgetError, NotAgreedError, RunError, ScenarioError
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import duration, memory, peer_ranges
from flower_privdec.experiment import Agreement
from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.local.peer_processes import PeerProcesses, Watch, free_addresses, on_this_machine
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import network_mixing
from flower_privdec.pushsum.lockstep import Timetable
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.sections import NetworkPeer
from tools.soak.checks import (
    Models,
    Paid,
    Weight,
    isolated_problem,
    last_models,
    ledger_problem,
    look_at_ledger,
    models_problem,
    resident_bytes,
    weight_on_disk,
)
from tools.soak.fault_proxy import FaultProxy, LinkFaults
from tools.soak.fault_schedule import KINDS, ON_FOLDERS, Fault, Pair, check_kinds, faults
from tools.soak.release_counter import ReleaseObserver, counted_in

ENDED = (0, NotAgreedError.exit_status)
LATE_SECONDS = 2.0  # that one peer of a run starts after the others
SETTLE_SECONDS = 0.5  # until what was sent before an isolation has come
LOOK_SECONDS = 2.0  # between two looks at ledgers and memory
COUNTER = (sys.executable, "-m", "tools.soak.release_counter")
Action = Callable[[], None]
TICK = 0.1
LINES = 20  # that are printed of a soak, beside its summary
Say = Callable[[str], None]


class ProxiedProcesses(PeerProcesses):
    """A process for each peer, which reaches the others through a proxy; see PeerProcesses.

    Folder: peers/I.yaml as well, with the addresses at which a peer reaches the others.
    """

    def __init__(
        self, scenario: Scenario, out: Path, proxy: FaultProxy, program: Callable[[int], Sequence[str]]
    ) -> None:
        super().__init__(scenario, out, program=program)
        self._proxy = proxy

    def prepare(self) -> None:
        super().prepare()
        for peer in self.peers:
            write_atomically(self.file(peer), to_yaml(self.as_seen_by(peer)).encode())

    def file(self, peer: int) -> Path:
        return self.out / "peers" / f"{peer}.yaml"

    def as_seen_by(self, peer: int) -> Scenario:
        """Return the scenario with the addresses at which a peer reaches the others."""
        network = self.scenario.network
        assert network.peers is not None
        seen = self._proxy.through(peer, [one.address for one in network.peers if one.address is not None])
        there = [one.model_copy(update={"address": at}) for one, at in zip(network.peers, seen, strict=True)]
        return self.scenario.model_copy(update={"network": network.model_copy(update={"peers": there})})


@dataclass
class Tally:
    """The counts of a soak.

    Attributes:
        runs, finished: how many were begun, and came to their end.
        faults: how often each kind of fault was made.
        rounds: that the fastest peer went through, over all runs.
        by_peer: of each peer, over all runs: private steps `taken`, as counted, the releases of them that a neighbour
            `received`, and the steps `paid` by the ledger that went on; in `ledgerless` runs it had none at the end, as
            while it recovers, and the last two are not counted.
        shared, apart: draws of pairs that both ends added, and that one of them alone did.
        charged: steps that were paid for in place of lines that a ledger had lost.
        given_up: runs that ended early: peers that wait for each other cannot go on with one that lost its state.
        crashes: processes that were killed.
        first, largest: memory of each peer at the first look after its first step, and the most, in bytes.
        weight: Σw on the disks after the last run whose disks told it; None if none did.
        isolated: how often a peer was cut off for long enough to count its steps.
        not_agreed: devices that reported that their model is not the others'.
        models: of the devices of the last run that came to its end; None if none did.
    """

    runs: int = 0
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    by_peer: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    shared: int = 0
    apart: int = 0
    charged: int = 0
    given_up: int = 0
    crashes: int = 0
    first: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)
    weight: Weight | None = None
    isolated: int = 0
    not_agreed: int = 0
    models: Models | None = None

    def total(self, count: str) -> int:
        """Return one of the counts by peer, of all peers together."""
        return sum(counts[count] for counts in self.by_peer.values())


@dataclass
class Recovery:
    """How a peer whose newest ledger was taken away is given back to the run.

    Attributes:
        peer: which.
        until: when it has to take steps again.
        taken: how many it had taken by then.
        charging: whether its process charges what was lost.
        starts: how often it was started.
        ended: others that ended meanwhile.
    """

    peer: int
    until: float
    taken: int
    charging: bool = False
    starts: int = 1
    ended: set[int] = field(default_factory=set)


def copy_folder(folder: Path, copy: Path) -> None:
    """Copy a running peer's folder, its ledger last, as a careful backup does."""
    while True:
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):  # a file was replaced meanwhile
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".lock", "ledger", "*.part"))
            shutil.copytree(folder / "ledger", copy / "ledger")
            return


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
        self.scenario = scenario
        self.out = out
        self.tally = tally
        self._weighed = weighed
        self._links = links
        self._faults = faults
        self._patience = patience

        out.mkdir(parents=True)
        self._proxy = FaultProxy()
        self.processes = ProxiedProcesses(scenario, out, self._proxy, self._program)
        self._begun = self._further = self._looked = time.monotonic()
        self._due: list[tuple[float, int, Action]] = []  # what ends, and when
        self._order = count()
        self._troubled: set[Any] = set()  # peers and links with which something is wrong
        self._gone: set[int] = set()
        self._rounds = dict.fromkeys(range(scenario.n_peers), 0)
        self._best = 0
        self._lives = Counter[int]()
        self._paid = dict.fromkeys(range(scenario.n_peers), Paid())
        self._next: tuple[float, Fault] | None = None
        self._alone: dict[int, int] = {}  # peers that are cut off, and the steps that they had taken by then
        self._late = self.tally.runs % scenario.n_peers, LATE_SECONDS
        self._observer = ReleaseObserver(out / "observer")
        self._torn: set[int] = set()  # peers whose folder was not always the newest
        self._recovery: Recovery | None = None
        self._twin: Process | None = None
        self._received = dict.fromkeys(range(scenario.n_peers), 0)
        self.is_given_up = False
        (out / "observer").mkdir()
        self._log = (out / "faults.log").open("a", buffering=1)

    def __enter__(self) -> Self:
        try:
            self.processes.prepare()
            late, seconds = self._late
            for peer in self.processes.peers:
                if peer != late:
                    self._start(peer)
            time.sleep(seconds)
            self._start(late)
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
        if self._twin is not None and self._twin.poll() is None:
            os.killpg(self._twin.pid, signal.SIGKILL)
        self.processes.end()
        self._proxy.close()
        self._log.close()

    def _told(self, peer: int, status: dict[str, Any] | None, word: str) -> None:
        if status is not None:
            self._rounds[peer] = max(self._rounds[peer], status["round"])

    def _program(self, peer: int) -> tuple[str, ...]:
        return (*COUNTER, str(self._counts(peer)), str(self._events(peer)))

    def _events(self, peer: int) -> Path:
        return self.out / "observer" / f"{peer}.{self._lives[peer]}.events"

    def _start(self, peer: int, *, charge: bool = False) -> None:
        self._lives[peer] += 1
        self.processes.start(peer, charge_missing=charge)
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
        if self._recovery is not None:
            self._recover(self._recovery, now)

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
        if fault.kind in ON_FOLDERS:
            where |= {*self.processes.peers, *self._links}  # all neighbours are there to witness
            if counted_in(self._counts(fault.peer)) < 3:
                return

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
            self.processes.signal(fault.peer, signal.SIGSTOP)
        elif fault.kind in ("copy", "restore"):
            copy_folder(self.processes.folder(fault.peer), self._copy)
            self._torn.add(fault.peer)
            if fault.kind == "copy":
                self._run_copy(fault.peer)

        for pair in links:
            self._proxy.set(pair, fault.on_link)
        if fault.kind == "isolate" and fault.seconds > SETTLE_SECONDS:
            heapq.heappush(self._due, (now + SETTLE_SECONDS, next(self._order), lambda: self._count_alone(fault.peer)))
        heapq.heappush(self._due, (now + fault.seconds, next(self._order), lambda: self._mend(fault, where)))

    def _count_alone(self, peer: int) -> None:
        """Note the steps of a peer that was cut off, once what had been sent before has come."""
        self._alone[peer] = counted_in(self._counts(peer))

    def _check_alone(self, peer: int) -> None:
        """Check the steps of a peer at the end of its isolation."""
        before = self._alone.pop(peer, None)
        if before is None or self.scenario.network.alone != "wait":
            return
        self.tally.isolated += 1
        if (problem := isolated_problem(before, counted_in(self._counts(peer)))) is not None:
            raise self._broken(f"peer {peer}: {problem}", "soak.alone")

    @property
    def _copy(self) -> Path:
        return self.out / "copy"

    def _run_copy(self, peer: int) -> None:
        """Start a copy of a peer, which listens elsewhere."""
        network = self.processes.as_seen_by(peer).network
        assert network.peers is not None
        peers = [*network.peers]
        peers[peer] = NetworkPeer(address=free_addresses(1)[0])
        scenario = self.scenario.model_copy(update={"network": network.model_copy(update={"peers": peers})})
        path = self.out / "copy.yaml"
        path.write_text(to_yaml(scenario))
        self._lives[peer] += 1
        command = [
            *self._program(peer),
            "peer",
            str(path),
            "--id",
            str(peer),
            "--out",
            str(self._copy),
            "--with-parent",
        ]

        command += ["--certs", str(self.processes.certificates)]
        with (self.out / "copy.log").open("ab") as log:
            self._twin = start_process(f"privdec copy {peer}", command, log)

    def _strike(self, fault: Fault) -> None:
        """Take a peer's newest ledger away from it, and start it again."""
        peer = fault.peer
        folder = self.processes.folder(fault.peer)
        if fault.kind == "copy":
            assert self._twin is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._twin.pid, signal.SIGKILL)
            self._twin.wait()
            shutil.rmtree(self._copy)

        self.processes.kill(peer)
        if fault.kind == "restore":
            shutil.rmtree(folder)
            self._copy.rename(folder)
        elif fault.kind in ("lose", "delete"):
            shutil.rmtree(folder if fault.kind == "lose" else folder / "ledger")

        self._torn.add(peer)
        self._recovery = Recovery(peer, time.monotonic() + self._patience, counted_in(self._counts(peer)))
        self._paid[peer] = Paid()
        self._start(peer)

    def _recover(self, recovery: Recovery, now: float) -> None:
        """Do what an owner does with a peer whose ledger is not the newest, until the peer takes steps again."""
        peer = recovery.peer
        self._further = now
        for other in self.processes.peers:  # that wait for each other end with one whose state went back
            if other != peer and self.processes.status(other) not in (None, 0):
                recovery.ended.add(other)
                self._start(other)

        status = self.processes.status(peer)
        last_line = ""
        if status is None and not recovery.charging and counted_in(self._counts(peer)) > recovery.taken:
            self._recovered(recovery)
        elif status is not None:
            last_line = self.processes.last_line(peer)
            self._log.write(f"{now - self._begun:.2f} s: peer {peer} ended ({status}): {last_line}\n")
            is_over = recovery.charging and status == 0
            if not (is_over or "--charge-missing" in last_line or recovery.charging) and recovery.starts > 1:
                if self.scenario.network.mode == "synchronous":
                    return self._give_up(recovery)
                raise self._broken(f"peer {peer} cannot be started again ({last_line})", "soak.not-recovered")
            if not is_over and "--charge-missing" not in last_line:  # an older ledger than the checkpoint's
                shutil.rmtree(self.processes.folder(peer))
            recovery.charging = "--charge-missing" in last_line and not is_over
            recovery.starts += 1
            if is_over and self.scenario.network.mode == "synchronous":
                return self._give_up(recovery)
            self._start(peer, charge=recovery.charging)

        if now > recovery.until:
            raise self._broken(f"peer {peer} took no step again ({last_line or 'it runs'})", "soak.not-recovered")

        return None

    def _recovered(self, recovery: Recovery) -> None:
        self._recovery = None
        self._troubled.clear()
        self._look()

    def _give_up(self, recovery: Recovery) -> None:
        """End the run: peers that wait for each other cannot go on with one whose state is lost."""
        self.is_given_up = True
        self._recovered(recovery)

    def _mend(self, fault: Fault, where: set[Any]) -> None:
        if fault.kind in ON_FOLDERS:
            self._strike(fault)  # what is troubled stays so until the peer has recovered
            return
        self._troubled -= where
        if fault.kind == "isolate":
            self._check_alone(fault.peer)
        if fault.kind == "kill":
            self._start(fault.peer)
        elif fault.kind == "pause":
            self.processes.signal(fault.peer, signal.SIGCONT)
        else:
            for pair in where:
                self._proxy.set(pair, LinkFaults())

    # --- invariants ---

    def _broken(self, what: str, code: str) -> RunError:
        return RunError(f"{what}; its traces are in {self.out}", code=code)

    def _check_alive(self) -> None:
        for peer in self.processes.peers if self._recovery is None and not self._copy.exists() else ():
            if peer not in self._gone and self.processes.status(peer) not in (None, *ENDED):
                raise self._broken(f"peer {peer} ended by itself ({self.processes.last_line(peer)})", "soak.peer-ended")

    def _check_further(self, now: float) -> None:
        best = max(self._rounds.values())
        if best > self._best:
            self.tally.rounds += best - self._best
            self._best = best
            self._further = now
        if now - self._further > self._patience and not self._ending():
            raise self._broken(f"no peer came further than round {best} for {self._patience:g} s", "soak.no-progress")

    def _look(self) -> None:
        """Check all ledgers and note the memory of all running peers."""
        self._observer.look()
        if (problem := self._observer.pairs_problem()) is not None:
            raise self._broken(problem, "soak.pairs")

        self._received = {peer: self._observer.received(peer) for peer in self.processes.peers}
        for peer in self.processes.peers if self.scenario.private is not None else ():
            before = self._paid[peer]
            ledger = self.processes.folder(peer) / "ledger"
            if self._copy.exists() or (self._recovery is not None and self._recovery.peer == peer):
                continue
            try:
                if peer in self._torn:
                    received = self._received[peer]
                    paid = Paid.of(ledger)
                    problem = ledger_problem(paid, before, received, sys.maxsize // 2, 1)
                else:
                    paid, problem = look_at_ledger(ledger, self._counts(peer), before, self._lives[peer])
            except BudgetError as error:
                raise self._broken(f"the ledger of peer {peer}: {error}", "soak.ledger") from error
            if problem is not None:
                raise self._broken(f"the ledger of peer {peer}: {problem}", "soak.ledger")
            self._paid[peer] = paid

        for peer in self.processes.peers:
            self._weigh(peer)

    def _counts(self, peer: int) -> Path:
        return self.out / "peers" / f"{peer}.releases"

    def _weigh(self, peer: int) -> None:
        is_warm = counted_in(self._counts(peer)) > 0 or self._rounds[peer] > 0  # its modules are loaded
        if self.processes.status(peer) is None:
            resident = resident_bytes(self.processes.pid(peer))
        else:
            resident = None
        if resident is not None and is_warm:
            self.tally.first.setdefault(peer, resident)
            self.tally.largest[peer] = max(resident, self.tally.largest.get(peer, 0))

    # --- how it ends ---

    def finished(self) -> bool:
        """Return whether all peers came to their end."""
        if self.is_given_up:
            return True
        return (
            not self._gone
            and self._recovery is None
            and all(self.processes.status(peer) in ENDED for peer in self.processes.peers)
        )

    def conclude(self) -> None:
        """Stop the peers and check the invariants for the last time."""
        came_to_its_end = self.finished() and not self.is_given_up
        agreed = [peer for peer in self.processes.peers if came_to_its_end and self.processes.status(peer) == 0]
        self.processes.end()
        self.tally.given_up += self.is_given_up
        self._look()
        for peer, paid in self._paid.items():
            counts = {"taken": counted_in(self._counts(peer))}
            if paid.records:
                by_ledger = {"received": self._received[peer], "paid": paid.steps}
            else:
                by_ledger = {"ledgerless": 1}
            self.tally.by_peer[peer].update(counts | by_ledger)

        self.tally.charged += sum(paid.charged for paid in self._paid.values())
        self.tally.shared += self._observer.shared
        self.tally.apart += self._observer.apart
        self.tally.finished += came_to_its_end
        if self._weighed and not self._torn:  # what was lost with a folder is lost
            self._check_weight(came_to_its_end)
        if came_to_its_end:
            self.tally.not_agreed += self.scenario.n_peers - len(agreed)
            self._check_models([self.processes.folder(peer) for peer in agreed])

    def _check_models(self, folders: list[Path]) -> None:
        models = last_models(folders)
        if models is not None and self.scenario.network.final_mixing != 0:
            self.tally.models = models
            if (problem := models_problem(folders, models)) is not None:
                raise self._broken(problem, "soak.models")

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
        rounds = self._rounds.values()
        n_faults = sum(self.tally.faults.values())
        where = f"run {self.tally.runs}  rounds {min(rounds)} to {max(rounds)} of {self.scenario.rounds}"
        down = f"  gone: {peer_ranges(self._gone)}" if self._gone else ""
        room = ""
        if self.tally.largest:
            room = f"  memory at most {memory(max(self.tally.largest.values()))}"
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
            patience: seconds within which some peer has to be further; by default the times that peers
                wait for each other at the start and later, together.

        Raises:
            ScenarioError: a number or a name is none, the scenario cannot be run here, or the folder is there.
        """
        check_kinds(kinds)
        for name, value in {"--minutes": minutes, "--every": every, "--longest": longest}.items():
            if not 0 < value < float("inf"):
                raise ScenarioError(f"{name} {value:g} must be > 0 and finite")
        if out.exists():
            raise ScenarioError(f"{out} is there already; give another --out", code="soak.folder")

        self.scenario = on_this_machine(scenario)
        self.out = out
        self.minutes = minutes
        self.seed = SystemRandom().getrandbits(32) if seed is None else seed
        self.tally = Tally()
        agreement = Agreement.of(self.scenario)
        timetable = Timetable(agreement.algorithm, network_mixing(agreement), agreement.scenario.rounds)
        self._weighed = agreement.mixing is not None and agreement.mixing.sends_shares
        links = [(peer, other) for peer in range(scenario.n_peers) for other in timetable.neighbours(peer)]
        self._links = links
        self._faults = faults(self.seed, links, kinds, every, longest)
        times = Times.of(scenario.network)
        self._patience = times.start + times.deadline if patience is None else patience

    def run(self, say: Say = print) -> Tally:
        """Begin runs, one after the other, until the time is over, and return what was seen.

        Args:
            say: called with a line now and then.

        Raises:
            RunError: something that must hold did not; saying what, and where its traces are.
        """
        end = time.monotonic() + 60 * self.minutes
        between = 60 * self.minutes / LINES
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
        links = self._links
        wrong = self._faults
        return SoakedRun(self.scenario, out, links, wrong, self._patience, self.tally, weighed=self._weighed)

    def summary(self) -> list[str]:
        """Return what was seen, in lines."""
        tally = self.tally
        made = ", ".join(f"{many} {kind}" for kind, many in sorted(tally.faults.items())) or "none"
        lines = [
            f"seed {self.seed}: {tally.runs} runs, {tally.finished} of them to their end, {tally.rounds:,} rounds",
            f"faults: {made}",
            f"ledgers: {tally.total('taken'):,} steps taken, {tally.total('paid'):,} paid for, {tally.crashes} "
            "processes killed",
            f"releases: {tally.total('received'):,} received, {tally.charged:,} charged as witnessed",
        ]

        lines += [
            f"peer {peer}: {one['taken']:,} steps taken, {one['received']:,} received, {one['paid']:,} paid for"
            + ("; without a ledger when the time was over" if one["ledgerless"] else "")
            for peer, one in sorted(tally.by_peer.items())
        ]
        if tally.shared:
            lines.append(
                f"pairs: {tally.shared:,} draws added by both ends, {tally.apart:,} by one alone, none twice by one"
            )

        if tally.isolated:
            lines.append(f"isolation: no ε beyond one step in {tally.isolated} times")
        if tally.models is not None:
            lines.append(
                f"models: the last {tally.models.devices} devices that agreed are {tally.models.farthest:.2%} from "
                f"their mean at most; {tally.not_agreed} in all reported that theirs is not"
            )

        if tally.weight is not None:
            lines.append(f"mass: Σw = {tally.weight.total:.9g} of {tally.weight.expected}")
        grown = [
            f"{peer}: {memory(first)}, at most {memory(tally.largest[peer])}" for peer, first in tally.first.items()
        ]
        return [*lines, *(f"memory of peer {line}" for line in grown)]
