"""The peers of one node in relay mode: their state, their checkpoints and their ledger, all of which stay with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from flower_privdec.core import State
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.checkpoint import Checkpoint, check_state, load_checkpoint, save_checkpoint
from flower_privdec.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.flower.apps.own import Own
from flower_privdec.flower.apps.records import pack_state, unpack_state
from flower_privdec.scenario import scenario_hash

OWN = "own"  # of the record that says which run a kept state is of, and up to which step that has paid
KEPT = 2  # checkpoints: the server may have missed the answer that told it of the last


@dataclass(frozen=True)
class Node:
    """What a node needs to take its peers through some steps of a run.

    Attributes:
        folder: where checkpoints and ledger lie.
    """

    own: Own
    experiment: Experiment
    folder: Path

    @property
    def peers(self) -> np.ndarray:
        """Return the global ids of the peers hosted here, int64 [m]."""
        return self.experiment.own.peers

    def state(self, kept: RecordDict, begin: int) -> State | None:
        """Return the state to go on from; None at the beginning of a run.

        Args:
            kept: where the state is between two messages.
            begin: the round whose checkpoint to go on from; 0 to begin anew, -1 to go on from what is kept.

        Raises:
            RunError: where there is nothing to go on from, or it is other peers' or another run's.
        """
        if begin == 0:
            return None
        state = self._kept(kept) if begin < 0 else self._restored(begin)
        if not np.array_equal(state.peers, self.peers):
            raise RunError(f"the node hosts peers {state.peers.tolist()}, not {self.peers.tolist()}")
        return state

    def _kept(self, kept: RecordDict) -> State:
        """Return the state that the last message left: another run might send what this one keeps private."""
        state = unpack_state(kept, self.experiment.device)
        if state is None:
            raise RunError(f"the node of peers {self.peers.tolist()} has lost its state: start again with --resume")
        if kept.config_records[OWN]["run"] != self.experiment.own.run.id:
            raise RunError(f"the node of peers {self.peers.tolist()} is in the middle of another run: begin anew")
        return state

    def put_away(self, state: State, cohort: Cohort, kept: RecordDict) -> None:
        """Keep a state until the next message, with the run it is of and the step up to which that has paid."""
        pack_state(state, kept)
        paid = 0 if cohort.ledger is None else cohort.ledger.charged
        kept[OWN] = ConfigRecord({"run": self.experiment.own.run.id, "paid": paid})

    def start(self, kept: RecordDict, begin: int) -> int:
        """Return the step from which the state goes on; `begin` as in `state`.

        The ledger cannot tell: a run that was begun again has paid for later steps than it will take next.
        """
        if begin < 0:
            return int(kept.config_records[OWN]["paid"])  # type: ignore[arg-type]
        return begin * self.experiment.algorithm.steps_per_round

    def _path(self, round_index: int) -> Path:
        return self.folder / f"checkpoint-{round_index}"

    def _restored(self, round_index: int) -> State:
        path, experiment = self._path(round_index), self.experiment
        if not path.exists():
            raise RunError(f"{path} is not there, and the run is to go on from it; start anew with another out")
        head = scenario_hash(experiment.scenario)
        state = load_checkpoint(path, head, experiment.own.run, experiment.device).state
        check_state(path, state, self.peers, experiment.scenario.rounds)
        return state

    def keep(self, state: State, cohort: Cohort) -> None:
        """Write a checkpoint of everything, for this node alone; forget all but the one before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run, head = self.experiment.own.run, None if cohort.ledger is None else cohort.ledger.head
        hashed = scenario_hash(self.experiment.scenario)
        save_checkpoint(self._path(state.round_index), Checkpoint(state, hashed, run, head=head))
        for old in sorted(self.folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            old.unlink()

    @contextmanager
    def cohort(self, start: int) -> Iterator[Cohort]:
        """Yield the node's cohort with its ledger open, to go on from a step."""
        own = self.own
        budget = None if own.epsilon is None or own.delta is None else (own.epsilon, own.delta)
        cohort = self.experiment.cohort(self.folder / "ledger", budget, start)
        try:
            yield cohort
        finally:
            if cohort.ledger is not None:
                cohort.ledger.close()
