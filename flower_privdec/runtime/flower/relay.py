"""Relay mode: each node hosts a peer or a few, and the strategy routes their rows without opening them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_privdec.algorithms import Mix, State
from flower_privdec.cohort import Cohort
from flower_privdec.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.runtime.flower.client_app import PLACE, flat_record
from flower_privdec.runtime.flower.records import pack_state, row_key, unpack_state
from flower_privdec.runtime.flower.strategy import Serverless, log_metrics
from flower_privdec.runtime.recorder import Recorder


class Relay(Serverless):
    """Each node hosts some peers (one, if there are as many nodes as peers); the strategy routes their rows.

    At every exchange a node hands in a record for each of its peers and is handed those of their
    in-neighbours. The strategy reads where a record goes, never what is in it, except when the network is
    evaluated: then the nodes hand in their whole states.

    A train message delivers the rows of one exchange, and the node goes on to the next: it finishes
    round k and takes the local step of round k + 1. So a run costs one message an exchange, and one or
    two more an evaluation.
    """

    def _hosts(self, n_nodes: int) -> int:
        return min(n_nodes, self.scenario.n_peers)

    def _prepare(self) -> int:
        self.experiment = Experiment.build(self.scenario)
        self.recorder = Recorder(self.experiment, self.out, "flower", self.resume)
        with self._ledgers() as cohort:
            self.state = self.recorder.start(cohort)
        self._round, self._waiting = self.state.round_index, False
        self._outbox: dict[str, ArrayRecord] = {}
        exchanges = sum(isinstance(item, Mix) for item in self.experiment.algorithm.program)
        left = self.scenario.rounds - self._round
        return left * exchanges + len(self._evaluations(self._round))

    @contextmanager
    def _ledgers(self) -> Iterator[Cohort]:
        """Open the whole network's ledgers for as long as no node has one open."""
        cohort = self.recorder.open_cohort()
        try:
            yield cohort
        finally:
            if cohort.ledger is not None:
                cohort.ledger.close()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Deliver to each node the rows its peers' pending exchange needs."""
        self._since = time.perf_counter()
        until = self._evaluations(self._round)[0]
        messages = []
        for node, peers in self.nodes:
            message = self._message(
                node,
                "train.relay",
                peers,
                folder=str(self.recorder.ledger_dir.absolute()),
                run_id=self.recorder.run_id,
                until=until,
            )
            for key in self._needed(peers):
                message.content[key] = self._outbox[key]
            if server_round == 1 and self.recorder.checkpoint is not None:
                pack_state(part_of(self.state, peers), message.content)
            messages.append(message)
        return messages

    def _needed(self, peers: np.ndarray) -> list[str]:
        """Return the keys of the records a node waits for: its peers' in-neighbours on other nodes."""
        if not self._waiting or self.experiment.mixing is None:
            return []
        sources = self.experiment.mixing.matrix(self._round).rows(peers).sources
        return [row_key(peer) for peer in np.setdiff1d(sources, peers).tolist()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Keep the rows for the next message; aggregate nothing."""
        answers = self._answers(replies, f"round {self._round}")
        places = {
            (int(str(place["round"])), bool(place["waiting"]))
            for place in (answer.content.config_records[PLACE] for answer in answers.values())
        }
        if len(places) != 1:
            raise RunError(f"the nodes disagree on where the run is (round, waiting): {sorted(places)}")
        ((self._round, self._waiting),) = places
        self._outbox = {
            key: record for answer in answers.values() for key, record in answer.content.array_records.items()
        }
        self.recorder.seconds += time.perf_counter() - self._since
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for the states where the scenario wants the network tried."""
        if self._waiting:
            return []
        return [Message(RecordDict(), node, "query.state") for node, _ in self.nodes]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Put the network's state together, evaluate it on the public test set, and save it."""
        if self._waiting:
            return None
        answers = self._answers(replies, f"state after round {self._round}")
        self.state = join(
            [unpack_state(answers[node].content, self.experiment.device) for node, _ in self.nodes],
        )
        metrics = flat_record(self.recorder.record(self.state.rows, self.state.round_index))
        with self._ledgers() as cohort:
            self.recorder.save(self.state, cohort)
        log_metrics(metrics)
        return metrics

    def _conclude(self) -> None:
        with self._ledgers() as cohort:
            self.recorder.finish(self.state.rows, cohort)


def part_of(state: State, peers: np.ndarray) -> State:
    """Return the rows of some peers."""
    at = torch.from_numpy(np.searchsorted(state.peers, peers))
    rows = {name: value[at.to(value.device)] for name, value in state.rows.items()}
    return State(peers, state.round_index, state.at, rows)


def join(parts: list[State | None]) -> State:
    """Return the state whose rows are those of the parts, which are in the order of their peers.

    Raises:
        RunError: when a part is missing or of another round.
    """
    states = [part for part in parts if part is not None]
    if len(states) < len(parts) or len({(part.round_index, part.at) for part in states}) != 1:
        raise RunError("the nodes' states are not of one round; start the run anew or --resume it")
    names = states[0].rows
    rows = {name: torch.cat([part.rows[name] for part in states]) for name in names}
    peers = np.concatenate([part.peers for part in states])
    return State(peers, states[0].round_index, states[0].at, rows)
