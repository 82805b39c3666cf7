"""Sharded mode: each node hosts a share of the rows, and the nodes send each other what crosses, without a server."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_privdec.core import State
from flower_privdec.engine.recorder import Recorder, again
from flower_privdec.engine.shards.process_group import LOST
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement
from flower_privdec.flower.apps.answers import METRICS, PLACE, SPENT, flat_record, spent_of
from flower_privdec.flower.apps.cohort_run import CohortRun
from flower_privdec.flower.apps.nodes import reason
from flower_privdec.flower.apps.records import row_key, unpack_rows
from flower_privdec.flower.apps.strategy import Serverless, log, log_metrics, name_peers

NUMBERS = "the engine's to about 1e-6 in float32: each shard multiplies as many rows at once as it has"
GRACE = 60.0  # seconds in which the other shards say what they saw, after the first has failed
POLL = 0.1  # seconds between two looks for answers


class Sharded(Serverless):
    """Each node hosts a share of the peers, and the nodes send each other the rows that cross, directly.

    A train message is many rounds, as in cohort mode; the nodes must all run at once and reach each other. The first
    node collects the rows that other peers may see wherever the network is evaluated, and tries them on the public test
    set. Each keeps a checkpoint of all its own at the end of a message, from which a resumed run goes on; the
    strategy keeps which round that was, and at the end the models.
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
        self._check_shards(self.recorder.checkpoint.transport if self.recorder.checkpoint else {})
        self.recorder.transport = {"shards": len(self.nodes)}
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        stops = self._evaluations(self.state.round_index) or [self.scenario.rounds]
        stride = -(-len(stops) // CohortRun.MESSAGES)
        self._until = sorted({*stops[stride - 1 :: stride], stops[-1]})
        self._answered: list[Message] = []
        return len(self._until)

    def _check_shards(self, before: Mapping[str, Any]) -> None:
        """Refuse to go on with another number of shards: each has a checkpoint of the peers it had.

        Raises:
            RunError: naming both.
        """
        if before and before.get("shards") != len(self.nodes):
            raise RunError(
                f"{self.out} is a run on {before.get('shards')} shards, and here are {len(self.nodes)}: start as many "
                "SuperNodes as before, or start anew with another out"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let all nodes go on for some evaluation intervals, and wait for them here: where one fails, not for long."""
        until, token = self._until[server_round - 1], secrets.token_hex(16)
        said: dict[str, Any] = {"folder": str(self.out), "until": until, "begin": self.state.round_index}
        said |= {"shards": len(self.nodes), "token": token}
        messages = [self._message(node, "train.sharded", peers, **said) for node, peers in self.nodes]
        answers = _ask(grid, messages)
        if len(answers) < len(self.nodes) or any(answer.has_error() for answer in answers.values()):
            self.recorder.close()
            raise self._failure(answers)
        self._answered = [answers[shard] for shard in range(len(self.nodes))]
        return []

    def _failure(self, answers: Mapping[int, Message]) -> RunError:
        """Return the error of a message that failed, which names the shard whose fault it was.

        A shard that only lost touch with another is not to blame, unless nobody is who says more.
        """
        said = {shard: reason(answer.error.reason) for shard, answer in answers.items() if answer.has_error()}
        blamed = {shard: why for shard, why in said.items() if LOST not in why}
        if not blamed:
            silent = set(range(len(self.nodes))) - set(answers)
            blamed = dict.fromkeys(silent, "it does not answer; see the SuperNode's log") or said
        seen = [found[0] for why in said.values() if (found := re.findall(r"in (round \d+) \(", why))]
        when = f" (the others lost touch in {seen[0]})" if seen and blamed is not said else ""
        whose = "; ".join(
            f"the SuperNode of {name_peers(self.nodes[s][1])} failed: {blamed[s]}" for s in sorted(blamed)
        )
        kept = f"the shards keep round {self.state.round_index}" if self.state.round_index else "nothing is kept"
        return RunError(f"{whose}{when}; {kept}: mend it, then run the same command {again(self.out)}")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Write down what the evaluations said, and that all shards are so far; aggregate nothing."""
        content = [answer.content for answer in self._answered]
        places = {int(str(each.config_records[PLACE]["round"])) for each in content}
        if places != {self._until[server_round - 1]}:
            raise RunError(f"the shards disagree on where the run is: rounds {sorted(places)}")
        games = [float(str(each.config_records[PLACE]["coalition_seconds"])) for each in content]
        self.recorder.coalition_seconds += max(games)
        metrics = self._write_lines([each.config_records[METRICS] for each in content])
        self.state = State(np.arange(self.scenario.n_peers), places.pop(), rows=self._rows())
        self._spent = spent_of([each.config_records[SPENT] for each in content])
        self.recorder.save(self.state, None)
        return None, metrics

    def _write_lines(self, told: list[ConfigRecord]) -> MetricRecord | None:
        """Append what each evaluation said to the metrics; the first shard's clock is the run's."""
        before, metrics = self.recorder.seconds, None
        lines: Any = told[0]["metrics"]
        for index, line in enumerate(lines):
            epsilon = max(each["epsilons"][index] for each in told)  # type: ignore[index]
            self.recorder.seconds = before + told[0]["seconds"][index]  # type: ignore[index,operator]
            metrics = flat_record(self.recorder.append(json.loads(line), float(str(epsilon))))
            log_metrics(metrics)
        return metrics

    def _rows(self) -> dict[str, torch.Tensor]:
        """Return the open rows of all peers, which come with the last answers; none before."""
        records = {key: record for each in self._answered for key, record in each.content.array_records.items()}
        if not records:
            return {}
        peers = [unpack_rows(records[row_key(peer)], self.agreement.device) for peer in range(self.scenario.n_peers)]
        return {name: torch.stack([rows[name] for rows in peers]) for name in self.agreement.algorithm.open_rows}

    def _conclude(self) -> None:
        self.recorder.finish(self.state.rows, self._spent, numbers=NUMBERS)


def _ask(grid: Grid, messages: list[Message]) -> dict[int, Message]:
    """Send a message to each node, and return their answers by place; after a failure some may be missing."""
    places = {name: place for place, name in enumerate(grid.push_messages(messages))}
    answers: dict[int, Message] = {}
    deadline = None if len(places) == len(messages) and None not in places else time.monotonic()
    while len(answers) < len(messages) and (deadline is None or time.monotonic() < deadline):
        waiting = [name for name, place in places.items() if place not in answers]
        for answer in grid.pull_messages(waiting):
            answers[places[answer.metadata.reply_to_message_id]] = answer
            if answer.has_error() and deadline is None:
                deadline = time.monotonic() + GRACE
        if len(answers) < len(messages):
            time.sleep(POLL)
    return answers
