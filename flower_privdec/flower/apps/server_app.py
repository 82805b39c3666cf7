"""The ServerApp that runs a scenario, and its strategies: one node hosts all peers, each node a shard, or each a peer.

The strategies hold no model and aggregate nothing: they start the nodes' work, route rows, and record evaluations.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
import tomllib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from flower_privdec.common.catalogue import FLOWER_MODES as MODE_NAMES
from flower_privdec.common.errors import RunError, ScenarioError, did_you_mean
from flower_privdec.core import Exchange, State
from flower_privdec.engine.shards.process_group import LOST
from flower_privdec.experiment import Agreement, run_name
from flower_privdec.experiment.noise_statement import SALTED, noise_facts
from flower_privdec.experiment.pair_plan import partners, secret_pairs
from flower_privdec.experiment.recorder import (
    NODES_PLAN,
    Recorder,
    again,
    check_one_stage,
    check_own_ledgers,
    evaluation_rounds,
)
from flower_privdec.experiment.spent import Spent
from flower_privdec.flower.apps.records import (
    METRICS,
    PARTITION,
    PROGRESS,
    REQUEST,
    SPENT,
    WorkRequest,
    flat_record,
    message_key,
    row_key,
    spent_of,
    unpack_rows,
)
from flower_privdec.flower.error_formatting import one_line_failure, reason
from flower_privdec.flower.launch.local_grid import simulates
from flower_privdec.flower.node_settings import check_hosting
from flower_privdec.flower.pair_keys import KEYS, PAIRS
from flower_privdec.scenario import Scenario, load_scenario, to_yaml
from flower_privdec.scenario.loading import without_folders

log = logging.getLogger("flwr.privdec")
log.setLevel(logging.INFO)

QUERY_PARTITION = "query.partition"
A_MONTH = 30 * 86400.0
GRACE = 60.0  # seconds in which the other shards report what they saw, after the first has failed
POLL = 0.1  # seconds between two looks for replies
PROC = Path("/proc")


def find_nodes(grid: Grid, patience: float = 300.0) -> list[int]:
    """Return the ids of all nodes, in the order of the partition ids in their node-config.

    Args:
        grid: the nodes.
        patience: seconds to wait for nodes that are not there yet, and for their replies.

    Raises:
        RunError: when nodes are missing, do not reply, or claim the same partition.
    """
    deadline = time.monotonic() + patience
    by_partition: dict[int, int] = {}
    total = 1
    while len(by_partition) < total:
        nodes = sorted(set(grid.get_node_ids()) - set(by_partition.values()))
        if nodes:
            messages = [Message(RecordDict(), node, QUERY_PARTITION) for node in nodes]
            replies = grid.send_and_receive(messages, timeout=deadline - time.monotonic())
            for node, reply in all_replies(replies, {node: f"SuperNode {node}" for node in nodes}).items():
                config = reply.content.config_records[PARTITION]
                partition = int(str(config["partition-id"]))
                partitions = int(str(config["num-partitions"]))
                if not 0 <= partition < partitions:
                    raise RunError(
                        f"SuperNode {node} has partition-id={partition} of num-partitions={partitions}: give 0 to "
                        "num-partitions - 1, by --node-config 'partition-id=I num-partitions=N'",
                        code="nodes.partition",
                    )
                if partition in by_partition:
                    raise RunError(
                        f"SuperNodes {by_partition[partition]} and {node} both claim partition {partition}; "
                        "give each its own partition-id",
                        code="nodes.partition",
                    )
                by_partition[partition] = node
                total = max(total, partitions)
        elif time.monotonic() > deadline:
            raise RunError(
                f"{len(by_partition)} of {total} SuperNodes are there after {patience:.0f} s; start them all",
                code="nodes.missing",
            )
        else:
            time.sleep(0.05)
    return [by_partition[partition] for partition in range(total)]


def all_replies(replies: Iterable[Message], names: Mapping[int, str]) -> dict[int, Message]:
    """Return the replies by node id.

    Args:
        replies: those that arrived.
        names: of all nodes that must reply, by node id.

    Raises:
        RunError: when a node failed or did not reply; it names the node.
    """
    by_node = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RunError(f"{names.get(node, node)} failed: {reason(reply.error.reason)}", code="nodes.failed")
        by_node[node] = reply
    silent = [name for node, name in names.items() if node not in by_node]
    if silent:
        raise RunError(f"no answer from {', '.join(silent)}; see the SuperNode's log", code="nodes.silent")
    return by_node


class ScenarioStrategy(Strategy):
    """Runs a scenario on SuperNodes; the base of the modes: no model, no aggregation, and every node must reply.

    `result.arrays` stays empty and `evaluate_fn` is refused: there is no global model. Models, metrics,
    ledgers and the summary are in the run's folder.

    Args:
        scenario: what to train.
        out: the run's folder.
        base: the folder in which a relative `out` starts, and from which modules of the user's own are imported; by
            default the current one.
        resume: continue from the checkpoint in `out`.
    """

    MESSAGES: ClassVar[int] = 10
    """About how many train messages a run has in cohort and sharded mode: each costs some 0.2 s of polling."""

    hosts_all: ClassVar[bool] = False
    """Whether one node hosts all peers."""

    state: State  # of all peers' open rows; not in cohort mode

    numbers: ClassVar[str] = ""
    """How near the numbers are to the engine's; empty where they are equal bit for bit."""

    def __init__(self, scenario: Scenario, out: Path, *, base: Path | None = None, resume: bool = False) -> None:
        self.scenario = scenario
        self._simulated = False
        self._salt = ""
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
            initial_arrays, num_rounds, train_config, evaluate_config: unused; the scenario has them.
            timeout: seconds to wait for the replies to one message.
            evaluate_fn: must be None.

        Raises:
            RunError: when a node fails or does not reply.
        """
        if evaluate_fn is not None:
            raise RunError(
                "evaluate_fn has no global model to evaluate here; read metrics.jsonl in the folder",
                code="strategy.evaluate-fn",
            )
        nodes = find_nodes(grid)
        self._simulated = simulates(grid)
        self._text = to_yaml(self.scenario if self._simulated else without_folders(self.scenario))
        hosts = 1 if self.hosts_all else min(len(nodes), self.scenario.n_peers)
        self.nodes = list(zip(nodes, np.array_split(np.arange(self.scenario.n_peers), hosts), strict=False))
        os.chdir(self.base)
        flower = logging.getLogger("flwr")
        with ExitStack() as self._closing:
            messages = self._prepare()
            self._closing.callback(flower.setLevel, flower.level)
            flower.setLevel(logging.WARNING)  # drops the lines of Flower's base strategy on every round
            result = super().start(grid, ArrayRecord(), messages, timeout, train_config, evaluate_config)
            self._conclude()
        log.info("Done: %s", self.out / "summary.json")
        return result

    def summary(self) -> None:
        """Log what runs where, and how near its numbers are to the engine's."""
        scenario = self.scenario
        log.info("%s: %s peers on %s SuperNode(s)", type(self).__name__, scenario.n_peers, len(self.nodes))
        log.info("%s, %s rounds of %s", scenario.name, scenario.rounds, scenario.algorithm.name)
        log.info("Results: %s (there is no global model: result.arrays stays empty)", self.out)
        if self.numbers:
            log.info("Numbers: %s", self.numbers)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send nothing: nodes do not evaluate on private data, for that would be a release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    @abstractmethod
    def _prepare(self) -> int:
        """Prepare the run, and return how many train messages a node will be sent."""

    def _open_recorder(self) -> None:
        """Open the run's folder; its lock is released when `start` returns or raises."""
        check_one_stage(self.scenario, NODES_PLAN)
        check_hosting(self.scenario, simulated=self._simulated)
        self.agreement = Agreement.of(self.scenario)
        check_own_ledgers(self.agreement)
        self.recorder = Recorder(self.agreement, None, self.out, "flower", self.resume)
        self._closing.callback(self.recorder.close)
        if not self._simulated:
            self.recorder.salted_for = []  # nodes elsewhere draw from their operating systems
        elif self.recorder.salted_for:
            check_hosting(self.scenario, simulated=True, salted=True)
            self._salt = run_name.new_salt()
            log.warning(SALTED.format(parts=" and ".join(self.recorder.salted_for)))
        self._spent, self._noise = Spent([], [], [], []), list[str]()

    def _conclude(self) -> None:
        facts = {} if self.scenario.private is None else noise_facts(self._noise)
        self.recorder.finish(self.state.rows, self._spent, numbers=self.numbers, **facts)

    def _evaluations(self, after: int = 0) -> list[int]:
        """Return after which rounds, beyond `after`, the models are evaluated."""
        rounds = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        return [round_index for round_index in rounds if round_index > after]

    def _message_ends(self, evaluations: list[int]) -> list[int]:
        """Return up to which round each train message goes."""
        stride = -(-len(evaluations) // self.MESSAGES)
        return sorted({*evaluations[stride - 1 :: stride], evaluations[-1]})

    def _message(self, node: int, kind: str, peers: np.ndarray, **fields: Any) -> Message:
        base = ""
        folder = ""
        salt = ""
        if self._simulated:  # nodes elsewhere have folders and keys of their own
            base = str(self.base)
            folder = str(self.out)
            salt = self._salt
        request = WorkRequest(self._text, peers=peers.tolist(), base=base, folder=folder, salt=salt, **fields)
        return Message(RecordDict({REQUEST: request.record()}), node, kind, ttl=A_MONTH)

    def _replies(self, replies: Iterable[Message], work: str) -> list[RecordDict]:
        """Return the contents of all nodes' replies, in the order of their peers."""
        names = {node: f"the SuperNode of {_peer_range(peers)} ({work})" for node, peers in self.nodes}
        by_node = all_replies(replies, names)
        return [by_node[node].content for node, _ in self.nodes]

    def _open_rows(self, records: Mapping[str, ArrayRecord]) -> dict[str, torch.Tensor]:
        """Return the open rows of all peers, stacked, from each peer's record."""
        peers = [unpack_rows(records[row_key(peer)], self.agreement.device) for peer in range(self.scenario.n_peers)]
        return {name: torch.stack([rows[name] for rows in peers]) for name in self.agreement.algorithm.open_rows}


def _peer_range(peers: np.ndarray) -> str:
    return f"peer {peers[0]}" if len(peers) == 1 else f"peers {peers[0]} to {peers[-1]}"


def _arrays(contents: Iterable[RecordDict]) -> dict[str, ArrayRecord]:
    return {key: record for content in contents for key, record in content.array_records.items()}


def _log_metrics(metrics: MetricRecord) -> None:
    means = [key for key in sorted(metrics) if key.endswith(".mean_model")]
    log.info(
        "round %s: %s, consensus distance %.3g, epsilon %.4g",
        metrics["round"],
        ", ".join(f"{key.removesuffix('.mean_model')} {metrics[key]:.3g}" for key in means),
        metrics["consensus_distance"],
        metrics["epsilon"],
    )


class CohortRun(ScenarioStrategy):
    """All peers as rows of one computation in one node; a train message is many rounds.

    The node writes the run's folder: the state is a checkpoint on its disk, so a node that died continues
    from its last evaluation. Other nodes stay idle.
    """

    hosts_all = True

    def _prepare(self) -> int:
        self._until = self._message_ends(self._evaluations())
        return len(self._until)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Request some evaluation intervals of the node."""
        ((node, peers),) = self.nodes
        resume = self.resume or server_round > 1
        return [self._message(node, "train.cohort", peers, until=self._until[server_round - 1], resume=resume)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Log and return the node's latest metrics."""
        (content,) = self._replies(replies, f"rounds up to {self._until[server_round - 1]}")
        metrics = content.metric_records[METRICS]
        _log_metrics(metrics)
        return None, metrics

    def _conclude(self) -> None:
        """Do nothing: the node wrote the summary with its last message."""


class Relay(ScenarioStrategy):
    """Each node hosts some peers (one, if there are as many nodes as peers); the strategy routes their rows.

    At every exchange a node hands in a record for each of its peers and receives those of their
    in-neighbours. The strategy reads where a record goes, never what is in it, except when the network is
    evaluated: then the nodes hand in the rows that other peers may see. All else (tables, personalized models,
    ledgers, checkpoints of them) stays with the nodes, which continue from their own checkpoints in a resumed run.

    A train message delivers the rows of one exchange, and the node continues to the next: it finishes
    round k and takes the local step of round k + 1. So a run costs one message an exchange, and one more an
    evaluation.
    """

    numbers = "the engine's to about 1e-6 in float32: each node adds in an order of its own"

    def _prepare(self) -> int:
        self._open_recorder()
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._round = self.state.round_index
        self._at = 0
        self._waiting = False
        self._outbox: dict[str, ArrayRecord] = {}
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
        mixing = self.agreement.mixing
        exchange = self.agreement.algorithm.program[self._at]
        if self._waiting and not isinstance(exchange, Exchange):
            raise RunError(f"the nodes wait at place {self._at} of the program, where nothing is exchanged")
        messages = []
        announced = self._pair_keys(grid) if server_round == 1 else {}
        for node, peers in self.nodes:
            message = self._message(node, "train.relay", peers, until=until, begin=begin, nodes=len(self.nodes))
            if node in announced:
                message.content[PAIRS] = announced[node]
            if self._waiting and mixing is not None and isinstance(exchange, Exchange):
                links = [(a, b) for a, b in exchange.awaited(State(peers, self._round), mixing) if a not in peers]
                keys = dict.fromkeys(message_key(exchange, link) for link in links)
                message.content.update({key: self._outbox[key] for key in keys if key in self._outbox})
            messages.append(message)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the rows for the next message, or evaluate the network by them; aggregate nothing."""
        contents = self._replies(replies, f"round {self._round}")
        records = [content.config_records[PROGRESS] for content in contents]
        positions = {(int(str(p["round"])), int(str(p["at"])), bool(p["waiting"])) for p in records}
        if len(positions) != 1:
            raise RunError(f"the nodes disagree on where the run is (round, place, waiting): {sorted(positions)}")
        if {str(p["constants"]) for p in records} != {self.agreement.constants}:
            raise RunError(
                "a node's model has other frozen parameters or buffers than the server's: give all the same weights",
                code="flower.other-constants",
            )
        ((self._round, self._at, self._waiting),) = positions
        self._outbox = _arrays(contents)
        self.recorder.seconds += time.perf_counter() - self._since
        self.recorder.coalition_seconds += max(float(str(record["coalition_seconds"])) for record in records)
        return None, None if self._waiting else self._evaluate(contents)

    def _pair_keys(self, grid: Grid) -> dict[int, ConfigRecord]:
        """Return the keys that each node is to know, as the nodes announce them to it; none without noise of pairs."""
        if not len(secret_pairs(self.scenario)):
            return {}
        requests = [
            self._message(node, "query.pairs", peers, until=0, nodes=len(self.nodes)) for node, peers in self.nodes
        ]
        replies = self._replies(grid.send_and_receive(requests, timeout=A_MONTH), "their keys")
        if len({str(reply.config_records[PAIRS][KEYS]) for reply in replies}) > 1:
            raise RunError(
                "the nodes' machines draw other noise of pairs, which would not cancel: CPU, versions or data differ; "
                "set compute.generator=system, or run all nodes on machines that are alike",
                code="noise.pair-machines",
            )
        announced: dict[int, ConfigRecord] = {}
        for (_, peers), reply in zip(self.nodes, replies, strict=True):
            announced |= dict.fromkeys(peers.tolist(), reply.config_records[PAIRS])
        return {
            node: ConfigRecord(
                {
                    str(other): announced[other][str(own)]
                    for other, own in partners(self.scenario, peers).items()
                    if str(own) in announced[other]
                }
            )
            for node, peers in self.nodes
        }

    def _evaluate(self, contents: list[RecordDict]) -> MetricRecord:
        """Evaluate the open rows of all peers on the public test set, and save them."""
        self.state = State(np.arange(self.scenario.n_peers), self._round, 0, self._open_rows(self._outbox))
        self._spent, self._noise = spent_of([content.config_records[SPENT] for content in contents])
        metrics = flat_record(self.recorder.record(self.state.rows, self._round, self._spent.epsilons))
        self.recorder.save(self.state, None)
        _log_metrics(metrics)
        return metrics


class Sharded(ScenarioStrategy):
    """Each node hosts a shard of the peers, and the nodes send each other the rows that cross, directly.

    A train message is many rounds, as in cohort mode; the nodes must all run at once and reach each other. The first
    node collects the rows that other peers may see wherever the network is evaluated, and evaluates them on the public
    test set. Each writes a checkpoint of its peers at the end of a message, from which a resumed run continues; the
    strategy records which round that was, and at the end the models.
    """

    numbers = "the engine's to about 1e-6 in float32: each shard multiplies as many rows at once as it has"

    def _prepare(self) -> int:
        self._open_recorder()
        previous = self.recorder.checkpoint.transport if self.recorder.checkpoint else {}
        if previous and previous.get("shards") != len(self.nodes):
            raise RunError(
                f"{self.out} is a run on {previous.get('shards')} shards, and here are {len(self.nodes)}: start as "
                "many SuperNodes as before, or start over with another out",
                code="shards.count",
            )
        self.recorder.transport = {"shards": len(self.nodes)}
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._until = self._message_ends(self._evaluations(self.state.round_index) or [self.scenario.rounds])
        self._contents: list[RecordDict] = []
        return len(self._until)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Request some evaluation intervals of all nodes, and wait for them here: after a failure, not for long."""
        fields: dict[str, Any] = {"until": self._until[server_round - 1], "begin": self.state.round_index}
        fields |= {"shards": len(self.nodes), "token": secrets.token_hex(16)}
        replies = _send(grid, [self._message(node, "train.sharded", peers, **fields) for node, peers in self.nodes])
        if len(replies) < len(self.nodes) or any(reply.has_error() for reply in replies.values()):
            raise self._failure(replies)
        self._contents = [replies[shard].content for shard in range(len(self.nodes))]
        return []

    def _failure(self, replies: Mapping[int, Message]) -> RunError:
        """Return the error of a failed message, which names the shard at fault.

        A shard that only lost its connection to another is not at fault, unless no other has a better reason.
        """
        reasons = {shard: reason(reply.error.reason) for shard, reply in replies.items() if reply.has_error()}
        at_fault = {shard: why for shard, why in reasons.items() if LOST not in why}
        if not at_fault:
            silent = set(range(len(self.nodes))) - set(replies)
            at_fault = dict.fromkeys(silent, "it does not answer; see the SuperNode's log") or reasons
        rounds = [match[1] for why in reasons.values() if (match := re.search(r"in (round \d+) \(", why))]
        when = f" (the others lost touch in {rounds[0]})" if rounds and at_fault is not reasons else ""
        failures = "; ".join(
            f"the SuperNode of {_peer_range(self.nodes[s][1])} failed: {at_fault[s]}" for s in sorted(at_fault)
        )
        saved = f"the shards keep round {self.state.round_index}" if self.state.round_index else "nothing is kept"
        return RunError(
            f"{failures}{when}; {saved}: mend it, then run the same command {again(self.out)}", code="nodes.failed"
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the shards' evaluations and how far they are; aggregate nothing."""
        positions = [content.config_records[PROGRESS] for content in self._contents]
        rounds = {int(str(position["round"])) for position in positions}
        if rounds != {self._until[server_round - 1]}:
            raise RunError(f"the shards disagree on where the run is: rounds {sorted(rounds)}")
        self.recorder.coalition_seconds += max(float(str(position["coalition_seconds"])) for position in positions)
        metrics = self._record([content.config_records[METRICS] for content in self._contents])
        records = _arrays(self._contents)  # the open rows come with the last message
        self.state = State(
            np.arange(self.scenario.n_peers), rounds.pop(), rows=self._open_rows(records) if records else {}
        )
        self._spent, self._noise = spent_of([content.config_records[SPENT] for content in self._contents])
        self.recorder.save(self.state, None)
        return None, metrics

    def _record(self, shards: Sequence[Any]) -> MetricRecord | None:
        """Append the evaluations of one message to the metrics; the first shard's clock is the run's."""
        before = self.recorder.seconds
        metrics = None
        for index, line in enumerate(shards[0]["metrics"]):
            epsilon = max(float(shard["epsilons"][index]) for shard in shards)
            self.recorder.seconds = before + shards[0]["seconds"][index]
            metrics = flat_record(self.recorder.append(json.loads(line), epsilon))
            _log_metrics(metrics)
        return metrics


def _send(grid: Grid, messages: list[Message]) -> dict[int, Message]:
    """Send a message to each node, and return their replies by index; after a failure some may be missing."""
    indices = {name: index for index, name in enumerate(grid.push_messages(messages))}
    replies: dict[int, Message] = {}
    deadline = None if len(indices) == len(messages) and None not in indices else time.monotonic()
    while len(replies) < len(messages) and (deadline is None or time.monotonic() < deadline):
        waiting = [name for name, index in indices.items() if index not in replies]
        for reply in grid.pull_messages(waiting):
            replies[indices[reply.metadata.reply_to_message_id]] = reply
            if reply.has_error() and deadline is None:
                deadline = time.monotonic() + GRACE
        if len(replies) < len(messages):
            time.sleep(POLL)
    return replies


MODES: dict[str, type[ScenarioStrategy]] = MODE_NAMES.bind({"cohort": CohortRun, "sharded": Sharded, "relay": Relay})


def scenario_strategy(context: Context, folder: Path) -> ScenarioStrategy:
    """Return the strategy that a run-config describes, `flwr run -c 'key=value ...'`.

        scenario   a file, absolute or from the app's folder or from `base`
        set        key=value overrides, with semicolons between them
        mode       how SuperNodes host the peers: cohort, sharded or relay, see `catalogue.FLOWER_MODES`
        out        the run's folder; by default runs/NAME-RUN_ID
        base       the folder in which a relative `scenario` and `out` start, and from which modules of the user's own
                   are imported; by default the caller's, and where that is unknown the one in which the SuperLink
                   was started
        resume     continue from the checkpoint in `out`

    Args:
        context: the ServerApp's context.
        folder: the app's folder.

    Raises:
        ScenarioError: when a value is wrong.
    """
    config = {"mode": "cohort", "out": "", "base": "", "resume": False, "set": "", "scenario": ""}
    config |= context.run_config
    mode = str(config["mode"])
    resume = config["resume"]
    path = str(config["scenario"])
    base = (caller_folder(folder) or Path.cwd()) / str(config["base"])
    files = [place / path for place in (folder, base) if path and (place / path).is_file()]
    problem = ""
    if mode not in MODES:
        problem = f"mode={mode!r} must be one of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
    elif not isinstance(resume, bool):
        problem = f"resume={resume!r} must be true or false, without quotes"
    elif not base.is_dir():
        problem = f"base={config['base']!r} must be a folder; make {base}, or leave base out"
    elif not files:
        problem = f"scenario={path!r} is no file in {folder} or {base}; give an absolute path, -c 'scenario=\"PATH\"'"
    if problem:
        raise ScenarioError(problem, code="flower.run-config")
    file = files[0].absolute()
    with chdir(base):  # from where a user's own modules are imported
        scenario = load_scenario(file, [part for part in str(config["set"]).split(";") if part.strip()])
    out = Path(str(config["out"]) or f"runs/{scenario.name}-{context.run_id}")
    return MODES[mode](scenario, out, base=base, resume=resume is True)


def caller_folder(app: Path) -> Path | None:
    """Return the working folder of the latest `flwr run` of an app that is running on this machine, or None.

    A local SuperLink serves all folders of its user, and its own is that of the command that started it. But while
    `flwr run --stream` waits for a run, its working folder can be read from /proc. None where no command waits (the run
    was submitted without --stream, or from elsewhere), and where there is no /proc.

    Args:
        app: a folder with the app's pyproject.toml.
    """
    project = _project(app)
    started = [(age, cwd) for age, cwd, places in _flwr_runs() if any(_project(place) == project for place in places)]
    return max(started)[1] if project and started else None


def _project(app: Path) -> dict[str, Any] | None:
    """Return the project section of an app's pyproject.toml, by which the app is recognised."""
    with suppress(OSError, ValueError):
        return tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8")).get("project")
    return None


def _flwr_runs() -> Iterator[tuple[int, Path, list[Path]]]:
    """Yield each running `flwr run`: its start (in clock ticks since boot), its folder, and which app it may name."""
    for process in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid != os.getuid():
                continue
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "run" in words and Path(words[words.index("run") - 1]).name == "flwr":
                cwd = (process / "cwd").readlink()
                named = [cwd / Path(word).expanduser() for word in words[words.index("run") + 1 :] if word]
                start = int((process / "stat").read_text().rpartition(")")[2].split()[19])
                yield start, cwd, [*named, cwd]


def server_app(folder: Path, on_finished: Callable[[Path], object] | None = None) -> ServerApp:
    """Return the ServerApp of an app whose scenario files lie in a folder.

    Args:
        on_finished: called with the run's folder at the end, such as to draw plots.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        with one_line_failure():
            strategy = scenario_strategy(context, folder)
            strategy.start(grid)
            if on_finished is not None:
                on_finished(strategy.out)

    return server
