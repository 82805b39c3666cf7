"""The strategies that run a scenario on SuperNodes: one node hosts all peers, each a shard, or each a peer."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_privdec.core import Exchange, State
from flower_privdec.engine.recorder import Recorder, again, evaluation_rounds
from flower_privdec.engine.shards.process_group import LOST
from flower_privdec.engine.spent import Spent
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement
from flower_privdec.flower.apps.records import (
    METRICS,
    ORDER,
    PLACE,
    SPENT,
    Order,
    flat_record,
    message_key,
    row_key,
    spent_of,
    unpack_rows,
)
from flower_privdec.flower.launch.error_formatting import reason
from flower_privdec.scenario import Scenario, to_yaml

log = logging.getLogger("flwr.privdec")
log.setLevel(logging.INFO)

QUERY_PLACE = "query.place"


def find_nodes(grid: Grid, patience: float = 300.0) -> list[int]:
    """Return the ids of all nodes, in the order of their partition ids.

    A node says in its node-config which partition it is and how many there are (in a simulation Flower
    sets both).

    Args:
        grid: where to look.
        patience: seconds to wait for nodes that are not there yet, and for their answers.

    Raises:
        RunError: when nodes are missing, do not answer, or claim the same partition.
    """
    deadline = time.monotonic() + patience
    partitions: dict[int, int] = {}
    wanted = 1
    while len(partitions) < wanted:
        new = sorted(set(grid.get_node_ids()) - set(partitions))
        if new:
            places = _ask_places(grid, new, deadline - time.monotonic())
            partitions |= {node: place for node, (place, _) in places.items()}
            wanted = max(total for _, total in places.values())
        elif time.monotonic() > deadline:
            raise RunError(f"{len(partitions)} of {wanted} SuperNodes are there after {patience:.0f} s; start them all")
        else:
            time.sleep(0.05)
    return _in_order(partitions, wanted)


def _ask_places(grid: Grid, nodes: list[int], timeout: float) -> dict[int, tuple[int, int]]:
    messages = [Message(RecordDict(), node, QUERY_PLACE) for node in nodes]
    replies = answered(grid.send_and_receive(messages, timeout=timeout), {node: f"SuperNode {node}" for node in nodes})
    places = {}
    for node, reply in replies.items():
        place = reply.content.config_records[PLACE]
        places[node] = (int(str(place["partition-id"])), int(str(place["num-partitions"])))
        if places[node][0] < 0 or places[node][1] < 1:
            raise RunError(
                f"SuperNode {node} does not say which partition it is; "
                "start it with --node-config 'partition-id=I num-partitions=N'"
            )
    return places


def _in_order(partitions: Mapping[int, int], total: int) -> list[int]:
    by_partition: dict[int, int] = {}
    for node, partition in partitions.items():
        if partition in by_partition:
            raise RunError(
                f"SuperNodes {by_partition[partition]} and {node} both claim partition {partition}; "
                "give each its own partition-id"
            )
        by_partition[partition] = node
    if sorted(by_partition) != list(range(total)):
        raise RunError(f"partition ids {sorted(by_partition)} must be 0 to {total - 1}, each once")
    return [by_partition[partition] for partition in range(total)]


def answered(replies: Iterable[Message], expected: Mapping[int, str]) -> dict[int, Message]:
    """Return the replies by node id, all of them.

    Args:
        replies: what came back.
        expected: what to call each node that was asked.

    Raises:
        RunError: when a node failed or did not answer; it names the node.
    """
    by_node = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RunError(f"{expected.get(node, node)} failed: {reason(reply.error.reason)}")
        by_node[node] = reply
    silent = [name for node, name in expected.items() if node not in by_node]
    if silent:
        raise RunError(f"no answer from {', '.join(silent)}; see the SuperNode's log")
    return by_node


A_MONTH = 30 * 86400.0


@contextmanager
def _short_logs() -> Iterator[None]:
    """Silence the lines that Flower's base strategy logs every round; ours go on."""
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(level)


class Serverless(Strategy):
    """What the strategies share: no model, no aggregation, and no node whose failure goes unnoticed.

    `result.arrays` stays empty and `evaluate_fn` is refused: there is no global model. Models, metrics,
    ledgers and the summary are in the run's folder.

    Args:
        scenario: what to train.
        out: the run's folder.
        base: the folder from which the scenario's relative paths start; by default the current one.
        resume: go on from the checkpoint in `out`.
    """

    def __init__(self, scenario: Scenario, out: Path, *, base: Path | None = None, resume: bool = False) -> None:
        self.scenario, self._text = scenario, to_yaml(scenario)
        self.base = (base or Path.cwd()).absolute()
        self.out = (self.base / out).absolute()
        self.resume = resume
        self.nodes: list[tuple[int, np.ndarray]] = []

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = A_MONTH,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the scenario to its end; Flower's rounds are messages here, as many as it takes.

        Args:
            grid: the nodes.
            initial_arrays, num_rounds, train_config, evaluate_config: unused; the scenario says it all.
            timeout: seconds to wait for the answers to one message.
            evaluate_fn: must be None.

        Raises:
            RunError: when a node fails or does not answer.
        """
        if evaluate_fn is not None:
            raise RunError("evaluate_fn has no global model to evaluate here; read metrics.jsonl in the folder")
        found = find_nodes(grid)
        shares = np.array_split(np.arange(self.scenario.n_peers), self._hosts(len(found)))
        self.nodes = list(zip(found, shares, strict=False))
        os.chdir(self.base)
        messages = self._prepare()
        with _short_logs():
            result = super().start(grid, ArrayRecord(), messages, timeout, train_config, evaluate_config)
        self._conclude()
        log.info("Done: %s", self.out / "summary.json")
        return result

    def summary(self) -> None:
        """Log what runs where."""
        scenario = self.scenario
        log.info("%s: %s peers on %s SuperNode(s)", type(self).__name__, scenario.n_peers, len(self.nodes))
        log.info("%s, %s rounds of %s", scenario.name, scenario.rounds, scenario.algorithm.name)
        log.info("Results: %s (there is no global model: result.arrays stays empty)", self.out)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nothing: nodes do not evaluate on private data, for that would be a release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    @abstractmethod
    def _hosts(self, n_nodes: int) -> int:
        """Return on how many of the nodes peers are hosted."""

    @abstractmethod
    def _prepare(self) -> int:
        """Get ready, and return how many train messages a node will be sent."""

    @abstractmethod
    def _conclude(self) -> None:
        """Write what is left to write."""

    def _evaluations(self, after: int = 0) -> list[int]:
        """Return after which rounds, beyond `after`, the models are tried."""
        rounds = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        return [round_index for round_index in rounds if round_index > after]

    def _message(self, node: int, kind: str, peers: np.ndarray, **fields: Any) -> Message:
        order = Order(self._text, peers=peers.tolist(), base=str(self.base), **fields)
        return Message(RecordDict({ORDER: order.record()}), node, kind, ttl=A_MONTH)

    def _answers(self, replies: Iterable[Message], asked: str) -> dict[int, Message]:
        names = {node: f"the SuperNode of {name_peers(peers)} ({asked})" for node, peers in self.nodes}
        return answered(replies, names)


def name_peers(peers: np.ndarray) -> str:
    """Return what a message calls a share of peers."""
    return f"peer {peers[0]}" if len(peers) == 1 else f"peers {peers[0]} to {peers[-1]}"


def log_metrics(metrics: MetricRecord) -> None:
    """Log one line about an evaluation."""
    means = [key for key in sorted(metrics) if key.endswith(".mean_model")]
    log.info(
        "round %s: %s, consensus distance %.3g, epsilon %.4g",
        metrics["round"],
        ", ".join(f"{key.removesuffix('.mean_model')} {metrics[key]:.3g}" for key in means),
        metrics["consensus_distance"],
        metrics["epsilon"],
    )


class CohortRun(Serverless):
    """All peers as rows of one computation in one node; a train message is many rounds.

    The node keeps the run's folder: the state is a checkpoint on its disk, so a node that died goes on
    where its last evaluation was. Other nodes stay idle.
    """

    MESSAGES: ClassVar[int] = 10
    """About how many messages a run is cut into: each costs some 0.2 s of polling."""

    def _hosts(self, n_nodes: int) -> int:
        return 1

    def _prepare(self) -> int:
        evaluations = self._evaluations()
        stride = -(-len(evaluations) // self.MESSAGES)
        self._until = sorted({*evaluations[stride - 1 :: stride], evaluations[-1]})
        return len(self._until)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the node to go on for some evaluation intervals."""
        (node, peers) = self.nodes[0]
        return [
            self._message(
                node,
                "train.cohort",
                peers,
                folder=str(self.out),
                until=self._until[server_round - 1],
                resume=self.resume or server_round > 1,
            )
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass the node's latest metrics on."""
        node, _ = self.nodes[0]
        reply = self._answers(replies, f"rounds up to {self._until[server_round - 1]}")[node]
        metrics = reply.content.metric_records[METRICS]
        log_metrics(metrics)
        return None, metrics

    def _conclude(self) -> None:
        """Leave it to the node, which wrote the summary with its last message."""


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


SHARD_NUMBERS = "the engine's to about 1e-6 in float32: each shard multiplies as many rows at once as it has"
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
        log.info("Numbers: %s", SHARD_NUMBERS)

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
        self.recorder.finish(self.state.rows, self._spent, numbers=SHARD_NUMBERS)


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
