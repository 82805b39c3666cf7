"""What a peer of a rehearsal trains: the scenario's algorithm, on a part of what all peers of one process share.

Data, model, graph and the plan of the noise are built once, as the engine builds them (`SharedParts`). A peer has one
row of them, and a ledger in memory. So a peer is cheap, and its numbers are the engine's, to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.experiment import Experiment
from flower_privdec.peer.trainer import CohortTrainer, network_mixing
from flower_privdec.privacy.ledger.cohort_ledger import PlannedLedger
from flower_privdec.privacy.ledger.memory_ledger import LedgerLines, MemoryLedger
from flower_privdec.privacy.ledger.segments import Head

REHEARSED = "INSECURE: noise and batches follow from the scenario's seed; a rehearsal, not a private release"
OnModel = Callable[[int, int | None, Mapping[str, Tensor]], None]  # peer, round (None: the last model), its rows


class SharedParts:
    """What all peers of a rehearsal share, to be read only.

    Args:
        experiment: of all peers, as the engine has it.
    """

    def __init__(self, experiment: Experiment) -> None:
        torch.set_num_threads(experiment.scenario.compute.threads)
        self.experiment = experiment
        self.mixing = network_mixing(experiment)
        self._whole = experiment.cohort(None)

    def cohort_of(self, peer: int) -> Cohort:
        """Return the cohort of one peer, without a ledger; it holds no copy of anything large."""
        whole = self._whole
        protection = whole.protection
        return replace(
            whole,
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
        keep: called before a ledger line counts; raises what a disk would raise.

    Privacy: none; noise and batches follow from the scenario, from which the noise can be subtracted.
    """

    def __init__(
        self,
        shared: SharedParts,
        peer: int,
        lines: LedgerLines,
        on_model: OnModel = lambda peer, round_index, rows: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(shared.experiment, shared.mixing, peer)
        self._shared = shared
        self._lines = lines
        self._on_model = on_model
        self._keep = keep

    @property
    def witnessed_ledger(self) -> PlannedLedger | None:
        return self.cohort.ledger

    @property
    def _noise(self) -> str:
        return REHEARSED

    def open(self, state: State | None, paid: int, head: Head | None) -> State:
        """See Trainer; the cohort begins with an open ledger in memory."""
        self.cohort = self._shared.cohort_of(self._peer)
        if self.cohort.protection is not None:
            # As on a device, each process pays for all that it takes, under a name of its own.
            lines = self._lines
            lines.starts += 1
            fresh = replace(self.run, id=f"{self.run.id}-{lines.head[1][:16]}-{lines.starts}")
            accounts = self.cohort.protection.accounts
            self.cohort.ledger = MemoryLedger(lines, fresh, accounts, fresh=True, start=paid, keep=self._keep)
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
