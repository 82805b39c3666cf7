"""Relay mode: each node hosts a peer or a few, and the strategy routes their rows without opening them."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_privdec.core import Exchange, State
from flower_privdec.engine.recorder import Recorder
from flower_privdec.engine.spent import Spent
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement
from flower_privdec.flower.apps.answers import PLACE, SPENT, flat_record, spent_of
from flower_privdec.flower.apps.records import message_key, row_key, unpack_rows
from flower_privdec.flower.apps.strategy import Serverless, log, log_metrics

NUMBERS = "the engine's to about 1e-6 in float32: each node adds in an order of its own"


class Relay(Serverless):
    """Each node hosts some peers (one, if there are as many nodes as peers); the strategy routes their rows.

    At every exchange a node hands in a record for each of its peers and is handed those of their
    in-neighbours. The strategy reads where a record goes, never what is in it, except when the network is
    evaluated: then the nodes hand in the rows that other peers may see. All else (tables, personalized models,
    ledgers, checkpoints of them) stays with the nodes, which go on from their own checkpoints in a resumed run.

    A train message delivers the rows of one exchange, and the node goes on to the next: it finishes
    round k and takes the local step of round k + 1. So a run costs one message an exchange, and one more an
    evaluation.
    """

    def summary(self) -> None:
        """Log what runs where, and how near its numbers are to the engine's."""
        super().summary()
        log.info("Numbers: %s", NUMBERS)

    def _hosts(self, n_nodes: int) -> int:
        return min(n_nodes, self.scenario.n_peers)

    def _prepare(self) -> int:
        self.agreement = Agreement.of(self.scenario)
        self.recorder = Recorder(self.agreement, None, self.out, "flower", self.resume)
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._round, self._at, self._waiting = self.state.round_index, 0, False
        self._outbox: dict[str, ArrayRecord] = {}
        self._spent = Spent([], [], [], [])
        exchanges = sum(isinstance(item, Exchange) for item in self.agreement.algorithm.program)
        left = self.scenario.rounds - self._round
        return left * exchanges + len(self._evaluations(self._round))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Deliver to each node the rows its peers' pending exchange needs."""
        self._since = time.perf_counter()
        until = self._evaluations(self._round)[0]
        begin = self._round if server_round == 1 else -1
        messages = []
        for node, peers in self.nodes:
            message = self._message(node, "train.relay", peers, folder=str(self.out), until=until, begin=begin)
            message.content.update(self._for(peers))
            messages.append(message)
        return messages

    def _for(self, peers: np.ndarray) -> dict[str, ArrayRecord]:
        """Return the records that a node's peers wait for, and no others."""
        mixing = self.agreement.mixing
        if not self._waiting or mixing is None:
            return {}
        exchange = self.agreement.algorithm.program[self._at]
        if not isinstance(exchange, Exchange):
            raise RunError(f"the nodes wait at place {self._at} of the program, where nothing is exchanged")
        links = [(a, b) for a, b in exchange.awaited(State(peers, self._round), mixing) if a not in peers]
        keys = dict.fromkeys(message_key(exchange, link) for link in links)
        return {key: self._outbox[key] for key in keys if key in self._outbox}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Keep the rows for the next message, or evaluate the network by them; aggregate nothing."""
        answers = self._answers(replies, f"round {self._round}")
        said = [answer.content.config_records[PLACE] for answer in answers.values()]
        places = {(int(str(place["round"])), int(str(place["at"])), bool(place["waiting"])) for place in said}
        if len(places) != 1:
            raise RunError(f"the nodes disagree on where the run is (round, place, waiting): {sorted(places)}")
        ((self._round, self._at, self._waiting),) = places
        self._outbox = {
            key: record for answer in answers.values() for key, record in answer.content.array_records.items()
        }
        self.recorder.seconds += time.perf_counter() - self._since
        self.recorder.coalition_seconds += max(float(str(place["coalition_seconds"])) for place in said)
        return None, None if self._waiting else self._evaluate([answers[node] for node, _ in self.nodes])

    def _evaluate(self, answers: list[Message]) -> MetricRecord:
        """Put the rows together that others may see, evaluate them on the public test set, and save them."""
        peers = np.arange(self.scenario.n_peers)
        rows = [unpack_rows(self._outbox[row_key(peer)], self.agreement.device) for peer in peers.tolist()]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in self.agreement.algorithm.open_rows}
        self.state = State(peers, self._round, 0, stacked)
        self._spent = spent_of([answer.content.config_records[SPENT] for answer in answers])
        metrics = flat_record(self.recorder.record(self.state.rows, self._round, self._spent.epsilons))
        self.recorder.save(self.state, None)
        log_metrics(metrics)
        return metrics

    def _conclude(self) -> None:
        self.recorder.finish(self.state.rows, self._spent, numbers=NUMBERS)
