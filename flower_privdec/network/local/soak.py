"""Run peers for minutes while something goes wrong all the time, and look whether what must hold does.

Every peer is a process of this machine that reaches the others through a proxy. What is looked at throughout:

- a peer runs, or was ended by the soak itself and is started again with --resume;
- its ledger holds together, never shrinks, pays for every step that was taken, as counted by somebody else, and for no
  more beside them than each start of its process may cost;
- some peer is further than any was before, within a time;
- after a run, the push-sum weights on the peers' disks add up to the number of peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import SystemRandom

from flower_privdec.common.formatting import duration, memory
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.network.local.fault_schedule import KINDS, check_kinds, faults
from flower_privdec.network.local.peer_processes import on_this_machine
from flower_privdec.network.local.soaked_run import SoakedRun, Tally
from flower_privdec.pushsum.timetable import Timetable
from flower_privdec.scenario import Scenario

TICK = 0.1
LINES = 20  # that are printed of a soak, beside its summary
Say = Callable[[str], None]


class Soak:
    """Peers, faults and looks at them for some minutes."""

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
        """Look at what is given, and write nothing yet.

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
            raise ScenarioError(f"{out} is there already; give another --out")
        self.scenario, self.out, self.minutes = on_this_machine(scenario), out, minutes
        self.seed = SystemRandom().getrandbits(32) if seed is None else seed
        self.tally = Tally()
        agreement = Agreement.of(self.scenario)
        timetable = Timetable(agreement)
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
            lines.append(f"mass: Σw = {tally.weight.found:.9g} of {tally.weight.wanted}")
        grown = [
            f"{peer}: {memory(first)}, at most {memory(tally.largest[peer])}" for peer, first in tally.first.items()
        ]
        return [*lines, *(f"memory of peer {each}" for each in grown)]
