"""What a peer of a rehearsal trains: the scenario's algorithm, on a part of what all peers of one process share.

Data, model, graph and the plan of the noise are built once, as the engine builds them (`SharedParts`). A peer has one
row of them, and a ledger in memory. So a peer is cheap, and its numbers are the engine's, to the rounding of sums. If
noise cancels between peers, each process has a key of its own, and they agree on secrets as deployed ones do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.core import State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.experiment.own_parts import NETWORK
from flower_privdec.experiment.pair_plan import partners
from flower_privdec.experiment.view import pair_run
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.peer import OnRound, PeerPlace, RunningPeer, RunPlan
from flower_privdec.peer.store import MemoryStore
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import CohortTrainer, network_mixing
from flower_privdec.privacy.ledger.cohort_ledger import PlannedLedger
from flower_privdec.privacy.ledger.memory_ledger import LedgerLines, MemoryLedger
from flower_privdec.privacy.ledger.segments import Entry, Head, Totals
from flower_privdec.privacy.noise.agreed import AgreedSecrets
from flower_privdec.privacy.noise.kinds.correlated_noise import CorrelatedNoise
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise
from flower_privdec.pushsum.roster import Unsigned
from flower_privdec.pushsum.witness import draw_boot
from flower_privdec.rows.keys import digest
from flower_privdec.scenario import Scenario

if TYPE_CHECKING:
    from torch import Tensor

REHEARSED = "INSECURE: noise and batches follow from the scenario's seed; a rehearsal, not a private release"
MEASURED_ROUNDS = 5
# Called with a peer, a round (None: the last model) and its rows.
OnModel: TypeAlias = "Callable[[int, int | None, Mapping[str, Tensor]], None]"


class MemoryDisk:
    """All that a peer of a rehearsal keeps: its store and the lines of its ledger; see `virtual_network.Disk`."""

    def __init__(self, store: MemoryStore, lines: LedgerLines) -> None:
        self.store = store
        self.lines = lines

    def copy(self) -> MemoryDisk:
        return MemoryDisk(self.store.copy(), self.lines.copy())

    def fill(self, is_full: bool) -> None:
        self.store.is_full = is_full
        self.lines.is_full = is_full


class MemoryHome:
    """Makes the peers of a scenario; see `virtual_network.Home`.

    Args:
        experiment: of all peers, as the engine has it.
        on_model: called with the rows that a peer would hand in.
        on_round: see RunningPeer.

    Attributes:
        whole: the cohort of all peers, without a ledger.
        initial_rows: that a peer would hand in before round 0.
        times: how long each peer waits.
        released: by peer, what the entries of all that it really took steps for add up to, whatever became of its
            ledger.
    """

    def __init__(
        self,
        experiment: Experiment,
        on_model: OnModel = lambda peer, round_index, rows: None,
        on_round: OnRound | None = None,
    ) -> None:
        scenario = experiment.scenario
        self.peer_class: type[RunningPeer] = AsynchronousPeer
        if scenario.network.mode == "synchronous":
            self.peer_class = SynchronousPeer
        self._shared = SharedParts(experiment)
        self._on_model = on_model
        self._on_round = on_round

        self.whole = self._shared.whole
        before = experiment.initial_state(self._shared.cohort_of(0)).rows
        self.initial_rows = {name: before[name] for name in experiment.algorithm.open_rows}

        times = Times.of(scenario.network)
        self.times = replace(times, poll=times.retry)  # on a virtual clock a message wakes its receiver at once
        self.released = {peer: Totals() for peer in range(scenario.n_peers)}
        first = MemoryTrainer(self._shared, 0, LedgerLines())
        self._signatures = Unsigned()
        self.plan = RunPlan.of(first, self.peer_class.more_final_rounds, scenario.n_peers)

    def empty(self, peer: int) -> MemoryDisk:
        released = self.released[peer]

        def observe(entry: Entry) -> None:
            if not entry.witnessed:  # which pays again for what was lost
                released.count([entry])

        return MemoryDisk(MemoryStore(self.peer_class.generations), LedgerLines(observe))

    def start(self, peer: int, disk: MemoryDisk, draw: Callable[[], int]) -> RunningPeer:
        trainer = MemoryTrainer(self._shared, peer, disk.lines, self._on_model, draw)
        place = PeerPlace(peer, Path(f"peer-{peer}"), times=self.times, draw=draw, signatures=self._signatures)
        running = self.peer_class(trainer, place, disk.store, self.plan)
        running.on_round = self._on_round
        return running

    def step_seconds(self) -> float:
        """Measure how long a round of one peer takes on this machine, for each of its private steps."""
        cohort = self._shared.cohort_of(0)
        experiment = self._shared.experiment
        best = math.inf
        for _ in range(MEASURED_ROUNDS):
            best = min(best, self._time_round(cohort, experiment.initial_state(cohort)))
        return best / max(1, cohort.steps_per_round)

    def _time_round(self, cohort: Cohort, state: State) -> float:
        """Return the seconds of a round in which the peer is active, as if its neighbours sent what it has itself."""
        experiment = self._shared.experiment
        mixing = self._shared.mixing
        state.round_index = next((k for k in range(experiment.scenario.rounds) if cohort.active(k).any()), 0)
        seconds = 0.0
        while True:
            started = time.perf_counter()
            exchange = advance(experiment.algorithm, cohort, state)
            seconds += time.perf_counter() - started
            if exchange is None:
                return seconds

            own = {name: state.rows[exchange.shaped(name)][0] for name in exchange.names}
            messages = dict.fromkeys(exchange.awaited(state, mixing), own)
            exchange.incoming(state, mixing, messages).apply_(state)


def rehearsed(scenario: Scenario) -> Experiment:
    """Return the experiment of all peers of a rehearsal, planned as that of machines, which may leave."""
    agreement = Agreement.of(scenario)
    return Experiment.joined(agreement, OwnParts.of(agreement, runtime=NETWORK))


class SharedParts:
    """What all peers of a rehearsal share, to be read only.

    Args:
        experiment: of all peers, as the engine has it.

    Attributes:
        mixing: of the network.
        whole: the cohort of all peers, without a ledger.
    """

    def __init__(self, experiment: Experiment) -> None:
        torch.set_num_threads(experiment.scenario.compute.threads)
        self.experiment = experiment
        self.mixing = network_mixing(experiment)
        self.whole = experiment.cohort(None)
        self._pair_run = b""
        self._partners: dict[int, dict[int, int]] = {}

    def secrets_of(self, peer: int, draw: Callable[[], int]) -> AgreedSecrets | None:
        """Return the secrets of a new process of a peer; None if no noise cancels between peers.

        Its key follows from a number that is drawn: a rehearsal can be repeated.
        """
        protection = self.whole.protection
        if protection is None or protection.pairs is None:
            return None

        scenario = self.experiment.scenario
        if not self._pair_run:
            self._pair_run = pair_run(self.experiment)
        if peer not in self._partners:
            self._partners[peer] = partners(scenario, np.array([peer]))
        names = scenario.network.identities(scenario.name, scenario.n_peers)
        private = digest(32, "rehearsed session", draw(), peer)
        return AgreedSecrets([peer], self._pair_run, names, private, self._partners[peer])

    def cohort_of(self, peer: int) -> Cohort:
        """Return the cohort of one peer, without a ledger; it holds no copy of anything large."""
        whole = self.whole
        protection = whole.protection
        mechanism = whole.mechanism
        if isinstance(mechanism, CancellingNoise | CorrelatedNoise):
            mechanism = mechanism.of_new_process()
        return replace(
            whole,
            mechanism=mechanism,
            peers=whole.peers[peer : peer + 1],
            data=whole.data.part(peer, peer + 1),
            protection=None if protection is None else protection.part(peer, peer + 1),
        )


class MemoryTrainer(CohortTrainer):
    """One peer's part of a rehearsal; see Trainer.

    Args:
        shared: by all peers.
        peer: its number.
        lines: of its ledger, which outlast this trainer.
        on_model: called with the rows that it would hand in.
        draw: returns a random number, for the key of this process.

    Privacy: none; noise and batches follow from the scenario, from which the noise can be subtracted.
    """

    def __init__(
        self,
        shared: SharedParts,
        peer: int,
        lines: LedgerLines,
        on_model: OnModel = lambda peer, round_index, rows: None,
        draw: Callable[[], int] = draw_boot,
    ) -> None:
        super().__init__(shared.experiment, shared.mixing, peer)
        self.pair_secrets = shared.secrets_of(peer, draw)
        self._shared = shared
        self._lines = lines
        self._on_model = on_model

    @property
    def witnessed_ledger(self) -> PlannedLedger | None:
        return self.cohort.ledger

    @property
    def _noise(self) -> str:
        return REHEARSED

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer; the cohort begins with an open ledger in memory."""
        self.cohort = self._shared.cohort_of(self._peer)
        if self.pair_secrets is not None:
            self.cohort.secrets = self.pair_secrets
        if self.cohort.protection is not None:
            # As on a device, each process pays for all that it takes, under a name of its own.
            lines = self._lines
            lines.starts += 1
            fresh = replace(self.run, id=f"{self.run.id}-{lines.head[1][:16]}-{lines.starts}")
            accounts = self.cohort.protection.accounts
            self.cohort.ledger = MemoryLedger(lines, fresh, accounts, fresh=True, start=paid)
        try:
            return self._continued(state, head, Path("the ledger"))
        except BaseException:
            self.close()
            raise

    def evaluate(self, state: State) -> None:
        self._hand_in(state, state.round_index)

    def finish(self, state: State) -> None:
        self._hand_in(state, None)

    def _hand_in(self, state: State, round_index: int | None) -> None:
        rows = {name: state.rows[name].clone() for name in self.algorithm.open_rows}
        self._on_model(self._peer, round_index, rows)
