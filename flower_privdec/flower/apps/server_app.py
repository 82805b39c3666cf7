"""The ServerApp that runs a scenario, and the three ways in which SuperNodes may host its peers.

How a run goes:

1. `server_app` reads the run-config (`scenario_strategy`) and chooses a strategy for the grid it was given.
2. `ScenarioStrategy.start` finds the nodes, divides the peers among them, opens the run's folder, and hands over to
   Flower's own loop, in which a "round" is one train message to each node.
3. The nodes do all the work (`client_app`). The strategies hold no model and aggregate nothing: they start the nodes'
   work, route rows, and record evaluations.

| strategy | how peers are hosted | a train message is |
|---|---|---|
| `CohortRun` | one node has all peers as rows of one computation; only in a simulation | many rounds |
| `Sharded` | each node has a shard of the peers; the nodes send each other rows directly | many rounds |
| `Relay` | each node has one peer, or some; rows pass through the ServerApp | one exchange |

No user has to name one of them: see `hosting`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from flower_privdec.common.catalogue import FLOWER_MODES
from flower_privdec.common.errors import RunError, ScenarioError, did_you_mean
from flower_privdec.common.fields import own_modules
from flower_privdec.common.machine import COMMAND
from flower_privdec.core import Exchange, Mix, State
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
from flower_privdec.flower.apps.caller_folder import find_caller
from flower_privdec.flower.apps.records import (
    METRICS,
    PARTITION,
    PROGRESS,
    REQUEST,
    SHARDS,
    SPENT,
    WorkRequest,
    flat_record,
    message_key,
    row_key,
    spent_of,
    unpack_rows,
)
from flower_privdec.flower.error_formatting import one_line_failure, only_our_lines, reason_of
from flower_privdec.flower.launch.local_grid import simulates
from flower_privdec.flower.node_settings import VISIBLE_GPUS, check_hosting
from flower_privdec.flower.pair_keys import KEYS, PAIRS
from flower_privdec.scenario import Scenario, load_scenario, to_yaml
from flower_privdec.scenario.loading import without_folders

log = logging.getLogger("flwr.privdec")

QUERY_PARTITION = "query.partition"
# Flower drops a message, and its answer, at the end of its time to live. A message of many rounds may take days.
A_MONTH = 30 * 86400.0
GRACE = 60.0  # seconds in which the other shards report what they saw, after the first has failed
SILENT = "no answer; see the SuperNode's log"
GONE_WORDS = "their models and epsilons are of the evaluation before, and their own ledgers hold what came after it"
POLL = 0.1  # seconds between two looks for replies

# --- the nodes ---


def find_nodes(grid: Grid, patience: float = 300.0) -> dict[int, ConfigRecord]:
    """Return what each node says of itself (`reply_partition`), by node id, in the order of their partition ids.

    Args:
        grid: the nodes.
        patience: seconds to wait for nodes that are not there yet, and for their replies.

    Raises:
        RunError: nodes are missing, do not reply, or claim the same partition.
    """
    deadline = time.monotonic() + patience
    node_of: dict[int, int] = {}  # by partition
    config_of: dict[int, ConfigRecord] = {}  # by node
    total = 1  # until the first node says how many there are
    while len(node_of) < total:
        new = sorted(set(grid.get_node_ids()) - config_of.keys())
        if not new:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{len(node_of)} of {total} SuperNodes are there after {patience:.0f} s; start them all",
                    code="nodes.missing",
                )
            time.sleep(0.05)
            continue

        messages = [Message(RecordDict(), node, QUERY_PARTITION) for node in new]
        replies = grid.send_and_receive(messages, timeout=deadline - time.monotonic())
        for node, reply in all_replies(replies, {node: f"SuperNode {node}" for node in new}).items():
            config = reply.content.config_records[PARTITION]
            partition = int(str(config["partition-id"]))
            partitions = int(str(config["num-partitions"]))
            if not 0 <= partition < partitions:
                raise RunError(
                    f"SuperNode {node} has partition-id={partition} of num-partitions={partitions}: give 0 to "
                    "num-partitions - 1, by --node-config 'partition-id=I num-partitions=N'",
                    code="nodes.partition",
                )
            if partition in node_of:
                raise RunError(
                    f"SuperNodes {node_of[partition]} and {node} both claim partition {partition}; give each its own "
                    "partition-id",
                    code="nodes.partition",
                )
            node_of[partition] = node
            config_of[node] = config
            total = max(total, partitions)
    return {node_of[partition]: config_of[node_of[partition]] for partition in range(total)}


def all_replies(replies: Iterable[Message], names: Mapping[int, str]) -> dict[int, Message]:
    """Return the replies by node id.

    Args:
        replies: those that arrived.
        names: the names of all nodes that must reply, by node id.

    Raises:
        RunError: a node failed or did not reply; the error names the node.
    """
    by_node = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise RunError(f"{names.get(node, node)} failed: {reason_of(reply.error)}", code="nodes.failed")
        by_node[node] = reply

    silent = [name for node, name in names.items() if node not in by_node]
    if silent:
        raise RunError(f"no answer from {', '.join(silent)}; see the SuperNode's log", code="nodes.silent")
    return by_node


# --- the strategies ---


class ScenarioStrategy(Strategy):
    """Runs a scenario on SuperNodes: no model and no aggregation here.

    `result.arrays` stays empty and `evaluate_fn` is refused: there is no global model. Models, metrics,
    ledgers and the summary are in the run's folder.

    A subclass says how nodes work together: `_prepare` before the first message, `configure_train` and
    `aggregate_train` for each message, `_conclude` after the last.

    Args:
        scenario: what to train.
        out: the run's folder.
        base: the folder in which a relative `out` starts, and from which modules of the user's own are imported; by
            default the current one.
        resume: continue from the checkpoint in `out`.
        discovered: the nodes, as `find_nodes` returns them, if the caller has found them already.
    """

    MESSAGES: ClassVar[int] = 10
    """About how many train messages a run has if a message is many rounds: each costs some 0.2 s of polling."""

    hosts_all: ClassVar[bool] = False
    """Whether one node hosts all peers."""

    state: State  # of all peers' open rows; CohortRun has none

    numbers: ClassVar[str] = ""
    """How near the numbers are to the engine's; empty if they are equal bit for bit."""

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        base: Path | None = None,
        resume: bool = False,
        discovered: Mapping[int, ConfigRecord] | None = None,
    ) -> None:
        if not self.hosts_all and scenario.network.codec.name != "exact":
            raise ScenarioError(
                f"network.codec={scenario.network.codec.name}: SuperNodes that host a part of the peers send rows as "
                "they are: leave it out, or run the scenario by `privdec run` or on a network",
                code="flower.codec",
            )

        if not self.hosts_all and scenario.attack is not None:
            raise ScenarioError(
                "attack: liars know all models, and each of these SuperNodes has some peers' only: leave it out, or "
                "run the scenario by `privdec run`, or in a simulation of Flower with mode auto",
                code="attack.apart",
            )

        self.scenario = scenario
        self.base = (base or Path.cwd()).absolute()
        self.out = (self.base / out).absolute()
        self.resume = resume
        self.command = os.environ.get(COMMAND) or "flwr run"
        self.nodes: list[tuple[int, np.ndarray]] = []  # each node's id and the global ids of its peers
        self._discovered = discovered
        self._simulated = False
        self._text = ""  # the scenario as the nodes are given it, YAML
        self._salt = ""
        self._closing = ExitStack()  # what is released when `start` returns or raises
        self._spent = Spent([], [], [], [])
        self._noise: list[str] = []  # the sources of the peers' noise

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = A_MONTH,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run the scenario to its end; Flower's rounds are messages here, as many as it takes.

        Args:
            grid: the nodes.
            initial_arrays, num_rounds, train_config, evaluate_config: unused; the scenario has them.
            timeout: seconds to wait for the replies to one message.
            evaluate_fn, should_stop: must be None. (flwr before 1.43 has no should_stop.)

        Raises:
            RunError: a node fails or does not reply.
        """
        if should_stop is not None:
            raise RunError(
                "should_stop has no rounds to stop after here: the noise was solved for all of the scenario, and "
                "a message is many of them; set rounds in the scenario",
                code="strategy.should-stop",
            )
        if evaluate_fn is not None:
            raise RunError(
                "evaluate_fn has no global model to evaluate here; read metrics.jsonl in the folder",
                code="strategy.evaluate-fn",
            )

        nodes = list(self._discovered or find_nodes(grid))
        self._simulated = simulates(grid)
        self._text = to_yaml(self.scenario if self._simulated else without_folders(self.scenario))

        # More nodes than peers: the last ones stay idle.
        n_hosts = 1 if self.hosts_all else min(len(nodes), self.scenario.n_peers)
        shares = np.array_split(np.arange(self.scenario.n_peers), n_hosts)
        self.nodes = list(zip(nodes, shares, strict=False))

        os.chdir(self.base)
        with self._closing:
            messages = self._prepare()

            # Flower's base strategy logs several lines on every "round", which is only a message here.
            self._closing.enter_context(only_our_lines())
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
        """Send nothing: an evaluation on private data would be a release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    @abstractmethod
    def _prepare(self) -> int:
        """Prepare the run, and return how many train messages a node will be sent."""

    def _conclude(self) -> None:
        """Write models and summary."""
        self._finish()

    def _finish(self, **facts: Any) -> None:
        """Write models and summary, with further facts that are not None."""
        given = {name: value for name, value in facts.items() if value is not None}
        if self.scenario.private is not None:
            given |= noise_facts(self._noise)
        self.recorder.finish(self.state.rows, self._spent, numbers=self.numbers, **given)

    # --- what the strategies share ---

    def _open_recorder(self) -> None:
        """Open the run's folder; its lock is released when `start` returns or raises."""
        check_one_stage(self.scenario, NODES_PLAN)
        check_hosting(self.scenario, simulated=self._simulated)
        self.agreement = Agreement.of(self.scenario)
        check_own_ledgers(self.agreement)
        self.recorder = Recorder(self.agreement, None, self.out, "flower", self.resume)
        self.recorder.command = self.command
        self._closing.callback(self.recorder.close)

        if not self._simulated:
            self.recorder.salted_for = []  # nodes elsewhere draw from their operating systems
        elif self.recorder.salted_for:
            check_hosting(self.scenario, simulated=True, salted=True)
            self._salt = run_name.new_salt()
            log.warning(SALTED.format(parts=" and ".join(self.recorder.salted_for)))

    def _evaluations(self, after: int = 0) -> list[int]:
        """Return after which rounds, beyond `after`, the models are evaluated."""
        rounds = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        return [round_index for round_index in rounds if round_index > after]

    def _message_ends(self, evaluations: list[int]) -> list[int]:
        """Return up to which round each train message goes: every so many evaluations, and the last."""
        stride = -(-len(evaluations) // self.MESSAGES)  # rounded up
        return sorted({*evaluations[stride - 1 :: stride], evaluations[-1]})

    def _message(self, node: int, kind: str, peers: np.ndarray, **fields: Any) -> Message:
        here: dict[str, Any] = {}
        if self._simulated:  # nodes elsewhere have folders, keys and GPUs of their own
            here = {"base": str(self.base), "folder": str(self.out), "salt": self._salt}
            here["command"] = self.command
            here["gpus"] = os.environ.get(VISIBLE_GPUS, "all")
        request = WorkRequest(self._text, peers=peers.tolist(), **here, **fields)
        return Message(RecordDict({REQUEST: request.record()}), node, kind, ttl=A_MONTH)

    def _replies(self, replies: Iterable[Message], work: str) -> list[RecordDict]:
        """Return the contents of all nodes' replies, in the order of their peers."""
        names = {node: f"the SuperNode of {_peer_range(peers)} ({work})" for node, peers in self.nodes}
        by_node = all_replies(replies, names)
        return [by_node[node].content for node, _ in self.nodes]

    def _open_rows(self, records: Mapping[str, ArrayRecord]) -> dict[str, torch.Tensor]:
        """Return the open rows of all peers, each [n_peers, ...], from each peer's record."""
        peers = [unpack_rows(records[row_key(peer)], self.agreement.device) for peer in range(self.scenario.n_peers)]
        return {name: torch.stack([rows[name] for rows in peers]) for name in self.agreement.algorithm.open_rows}


def _peer_range(peers: np.ndarray) -> str:
    if len(peers) == 1:
        return f"peer {peers[0]}"
    return f"peers {peers[0]} to {peers[-1]}"


def _arrays(contents: Iterable[RecordDict]) -> dict[str, ArrayRecord]:
    """Return the array records of several messages together."""
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

        # A node that draws anew, as it does with a user's own code, shuffles anew in each message, and would pay for an
        # epoch under way, or a turn of groups, once more. So it gets one message.
        private = self.scenario.private
        is_correlated = private is not None and private.correlated_noise is not None
        is_paid_together = is_correlated or self.scenario.data.batch.sampling == "shuffle"
        if is_paid_together and self._draws_anew():
            self._until = self._until[-1:]
        return len(self._until)

    def _draws_anew(self) -> bool:
        """Return whether the node draws numbers of its own in each message."""
        if self.scenario.compute.generator == "system":
            return True
        # Building the agreement reads data, so it is left out for scenarios without anybody's code.
        return any(own_modules(self.scenario)) and bool(run_name.without_content(Agreement.of(self.scenario)))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Request some evaluation intervals of the node."""
        ((node, peers),) = self.nodes
        until = self._until[server_round - 1]
        resume = self.resume or server_round > 1
        return [self._message(node, "train.cohort", peers, until=until, resume=resume)]

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

    A deployed SuperNode that fails or is silent after the first evaluation is *gone*: the others finish the exchange
    without its rows and go on without it (`WorkRequest.absent`), and what the strategy has of its models and its ε is
    of the last evaluation that it was in. One that is there again after an evaluation continues with its newest state
    from the next round on. In a simulation, and if the algorithm does more than mix, a failure ends the run.
    """

    numbers = "the engine's to about 1e-6 in float32: each node adds in an order of its own"

    def _prepare(self) -> int:
        self._open_recorder()
        before: dict[str, Any] = {}
        if self.recorder.checkpoint is not None:
            before = dict(self.recorder.checkpoint.transport)
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)

        # Where all nodes are: the round, the place in the algorithm's program, whether they wait for rows there.
        self._round = self.state.round_index
        self._at = 0
        self._waiting = False
        self._outbox: dict[str, ArrayRecord] = {}  # what the last replies sent, by `message_key`

        # Nodes by their place in `nodes`: why and when one was gone, and what is known of each.
        self._gone: dict[int, tuple[int, str]] = {}
        self._sent: list[Message] = []  # the messages of the round
        self._lost: set[int] = set()  # those that were there at the message before
        self._evaluated: dict[int, RecordDict] = {}  # the replies to the last evaluation of each
        self._answers: list[Message] = []  # to the last messages
        self._announced: dict[int, ConfigRecord] = {}  # each one's announcement of its key
        self._back = {int(place) for place in before.get("gone", {})}  # that go on from whatever state they have

        exchanges = sum(isinstance(item, Exchange) for item in self.agreement.algorithm.program)
        rounds_left = self.scenario.rounds - self._round
        return rounds_left * exchanges + len(self._evaluations(self._round))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Deliver to each node the rows that its peers' pending exchange needs, and wait for the replies here.

        Flower's loop would wait until its timeout for a node that has left.
        """
        self._answers = list(_sent_to_each(grid, self._messages(server_round, grid)).values())
        return []

    def _messages(self, server_round: int, grid: Grid) -> list[Message]:
        """Return the message to each node that is there."""
        self._since = time.perf_counter()
        until = self._evaluations(self._round)[0]
        beginning: set[int] = set()  # nodes that go on from what is on their disk
        if server_round == 1:
            beginning = set(range(len(self.nodes)))
            self._announced = self._announcements(grid, beginning)
        elif not self._waiting:
            beginning = self._returned(grid)
            self._back = beginning

        absent = self._peers_of(self._gone)
        lost = self._peers_of(self._lost & self._gone.keys())
        messages = []
        for place in self._there():
            node, peers = self.nodes[place]
            fields: dict[str, Any] = {"until": until, "nodes": len(self.nodes), "absent": absent, "lost": lost}
            if place in beginning:
                fields |= {"begin": self._round, "rejoin": place in self._back}
            message = self._message(node, "train.relay", peers, **fields)

            # A node that begins has to hear of all others, and they of it.
            news = self._there() if place in beginning else beginning
            keys = self._keys_for(peers, news)
            if keys:
                message.content[PAIRS] = keys
            message.content.update(self._rows_for(peers))
            messages.append(message)
        self._lost = set()
        self._sent = messages
        return messages

    def _there(self) -> list[int]:
        """Return the places of the nodes that are there."""
        return [place for place in range(len(self.nodes)) if place not in self._gone]

    def _peers_of(self, places: Iterable[int]) -> list[int]:
        """Return the peers of some nodes."""
        return sorted(peer for place in places for peer in self.nodes[place][1].tolist())

    def _returned(self, grid: Grid) -> set[int]:
        """Return the places of nodes that were gone and are there again, after they announced their keys."""
        if not self._gone:
            return set()

        # A SuperNode that was started again has another id and the same partition.
        known = {self.nodes[place][0] for place in self._there()}
        asked = [Message(RecordDict(), node, QUERY_PARTITION) for node in grid.get_node_ids() if node not in known]
        back: dict[int, int] = {}
        for reply in grid.send_and_receive(asked, timeout=GRACE) if asked else []:
            if not reply.has_error():
                place = int(str(reply.content.config_records[PARTITION]["partition-id"]))
                if place in self._gone:
                    back[place] = reply.metadata.src_node_id

        returned = set()
        for place, node in back.items():
            self.nodes[place] = (node, self.nodes[place][1])
            try:
                self._announced |= self._announcements(grid, {place})
            except RunError as error:
                log.warning("%s is there again, and cannot go on: %s", self._name(place), error)
                continue
            log.info("%s is there again: it goes on with round %s", self._name(place), self._round)
            del self._gone[place]
            returned.add(place)
        return returned

    def _name(self, place: int) -> str:
        return f"the SuperNode of {_peer_range(self.nodes[place][1])}"

    def _rows_for(self, peers: np.ndarray) -> dict[str, ArrayRecord]:
        """Return what the pending exchange has for some peers from those of other nodes."""
        if not self._waiting:
            return {}
        exchange = self.agreement.algorithm.program[self._at]
        if not isinstance(exchange, Exchange):
            raise RunError(f"the nodes wait at place {self._at} of the program, where nothing is exchanged")
        if self.agreement.mixing is None:
            return {}

        rows = {}
        for sender, receiver in exchange.awaited(State(peers, self._round), self.agreement.mixing):
            key = message_key(exchange, (sender, receiver))
            if sender not in peers and key in self._outbox:
                rows[key] = self._outbox[key]
        return rows

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the rows for the next message, or evaluate the network by them; aggregate nothing."""
        contents = self._contents_of(self._answers)
        progress = [content.config_records[PROGRESS] for content in contents]

        positions = {(int(str(node["round"])), int(str(node["at"])), bool(node["waiting"])) for node in progress}
        if len(positions) != 1:
            raise RunError(f"the nodes disagree on where the run is (round, place, waiting): {sorted(positions)}")
        if {str(node["constants"]) for node in progress} != {self.agreement.constants}:
            raise RunError(
                "a node's model has other frozen parameters or buffers than the server's: give all the same weights",
                code="flower.other-constants",
            )
        ((self._round, self._at, self._waiting),) = positions

        self._outbox = _arrays(contents)
        self.recorder.seconds += time.perf_counter() - self._since
        self.recorder.coalition_seconds += max(float(str(node["coalition_seconds"])) for node in progress)
        if self._waiting:
            return None, None
        return None, self._evaluate(contents)

    def _contents_of(self, replies: Iterable[Message]) -> list[RecordDict]:
        """Return the contents of the replies of the nodes that are there, and note those that are not any more.

        Raises:
            RunError: a node failed, and the run cannot go on without it.
        """
        place_of_node = {self.nodes[place][0]: place for place in self._there()}
        # By its message, because the answer of a SuperLink for a lost node is not from that node.
        place_of = {sent.metadata.message_id: place_of_node[sent.metadata.dst_node_id] for sent in self._sent}
        work = f"round {self._round}"
        contents: dict[int, RecordDict] = {}
        failures = dict.fromkeys(self._there(), SILENT)
        for reply in replies:
            place = place_of[reply.metadata.reply_to_message_id]
            if reply.has_error():
                failures[place] = reason_of(reply.error)
            else:
                contents[place] = reply.content
                del failures[place]

        for place, why in failures.items():
            why_needed = self._why_needed(len(contents))
            if why_needed is not None:
                code = "nodes.silent" if why == SILENT else "nodes.failed"
                raise RunError(f"{self._name(place)} ({work}) failed: {why}{why_needed}", code=code)
            log.warning(
                "%s is gone in %s, and the others go on without it: %s. It takes part again when a SuperNode with its "
                "partition-id is there",
                self._name(place),
                work,
                why,
            )
            self._gone[place] = (self._round, why)
            self._lost.add(place)
        return [contents[place] for place in sorted(contents)]

    def _why_needed(self, left: int) -> str | None:
        """Return why the run cannot go on without a node, in further words of its error; None if it can.

        Args:
            left: how many nodes are there without it.
        """
        algorithm = self.agreement.algorithm
        mixing = self.agreement.mixing
        if self._simulated or mixing is None or not self._evaluated:
            return ""
        exchanges = [item for item in algorithm.program if isinstance(item, Exchange)]
        if not all(isinstance(exchange, Mix) for exchange in exchanges):
            return f", and {algorithm.name} needs all"
        if mixing.weights == "doubly-stochastic" and mixing.topology.directed:
            return f", and weights {mixing.weights} need all"
        if left < 2:
            return ", and fewer than two others are there"
        return None

    def _announcements(self, grid: Grid, places: Iterable[int]) -> dict[int, ConfigRecord]:
        """Return the keys that some nodes announce, by place; none without noise of pairs.

        Raises:
            RunError: one failed, or its seeded noise would not cancel that of the others.
        """
        if not len(secret_pairs(self.scenario)):
            return {}

        asked = sorted(places)
        requests = []
        names = {}
        for place in asked:
            node, peers = self.nodes[place]
            requests.append(self._message(node, "query.pairs", peers, until=0, nodes=len(self.nodes)))
            names[node] = f"{self._name(place)} (their keys)"
        by_node = all_replies(grid.send_and_receive(requests, timeout=A_MONTH), names)
        announced = {place: by_node[self.nodes[place][0]].content.config_records[PAIRS] for place in asked}

        if len({str(record[KEYS]) for record in {**self._announced, **announced}.values()}) > 1:
            raise RunError(
                "the nodes' machines draw other noise of pairs, which would not cancel: CPU, versions or data differ; "
                "set compute.generator=system, or run all nodes on machines that are alike",
                code="noise.pair-machines",
            )
        return announced

    def _keys_for(self, peers: np.ndarray, places: Iterable[int]) -> ConfigRecord:
        """Return what some nodes announced to the node of some peers; each announcement is sealed for one peer."""
        announced_by: dict[int, ConfigRecord] = {}
        for place in places:
            if place in self._announced:
                announced_by |= dict.fromkeys(self.nodes[place][1].tolist(), self._announced[place])
        keys = ConfigRecord()
        for other, own in partners(self.scenario, peers).items():
            if other in announced_by and str(own) in announced_by[other]:
                keys[str(other)] = announced_by[other][str(own)]
        return keys

    def _evaluate(self, contents: list[RecordDict]) -> MetricRecord:
        """Evaluate the open rows of all peers on the public test set, and save them."""
        there = self._there()
        self._evaluated |= dict(zip(there, contents, strict=True))
        known = [self._evaluated[place] for place in range(len(self.nodes))]
        self.state = State(np.arange(self.scenario.n_peers), self._round, 0, self._open_rows(_arrays(known)))
        self._spent, self._noise = spent_of([content.config_records[SPENT] for content in known])

        # The network is what is there; of the others only the last models are known.
        of_those_there = torch.tensor(self._peers_of(there))
        rows = {name: row[of_those_there.to(row.device)] for name, row in self.state.rows.items()}
        epsilons = [self._spent.epsilons[peer] for peer in of_those_there.tolist()]
        metrics = flat_record(self.recorder.record(rows, self._round, epsilons))
        self.recorder.transport = {}
        if self._gone:
            self.recorder.transport = {"gone": {str(place): 1 for place in sorted(self._gone)}}
        self.recorder.save(self.state, None)
        _log_metrics(metrics)
        return metrics

    def _conclude(self) -> None:
        """Write models and summary, which says whose are not there."""
        gone = []
        for place, (round_index, why) in sorted(self._gone.items()):
            gone.append(f"{_peer_range(self.nodes[place][1])} in round {round_index} ({why})")
        self._finish(gone=f"{', '.join(gone)}; {GONE_WORDS}" if gone else None)


class Sharded(ScenarioStrategy):
    """Each node hosts a shard of the peers, and the nodes send each other the rows that cross, directly.

    A train message is many rounds, as of `CohortRun`; the nodes must all run at once and reach each other. The first
    node collects the rows that other peers may see whenever the network is evaluated, and evaluates them on the public
    test set. Each writes a checkpoint of its peers at the end of a message, from which a resumed run continues; the
    strategy records which round that was, and at the end the models.
    """

    numbers = "the engine's to about 1e-6 in float32: each shard multiplies as many rows at once as it has"

    def _prepare(self) -> int:
        self._open_recorder()
        n_shards = len(self.nodes)
        previous = self.recorder.checkpoint.transport if self.recorder.checkpoint else {}
        if previous and previous.get("shards") != n_shards:
            raise RunError(
                f"{self.out} is a run on {previous.get('shards')} shards, and here are {n_shards}: start as "
                "many SuperNodes as before, or start over with another out",
                code="shards.count",
            )

        self.recorder.transport = {"shards": n_shards}
        self.state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._until = self._message_ends(self._evaluations(self.state.round_index) or [self.scenario.rounds])
        self._contents: list[RecordDict] = []  # the contents of the last replies, one for each shard in order
        return len(self._until)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Request some evaluation intervals of all nodes, and wait for them here.

        Flower's loop would wait for all replies until the timeout; after a failure this waits only for GRACE seconds.
        """
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

        Args:
            replies: by shard; those of silent shards are missing.
        """
        reasons = {shard: reason_of(reply.error) for shard, reply in replies.items() if reply.has_error()}
        at_fault = {shard: why for shard, why in reasons.items() if LOST not in why}
        if not at_fault:
            silent = set(range(len(self.nodes))) - replies.keys()
            at_fault = dict.fromkeys(silent, "it does not answer; see the SuperNode's log") or reasons

        # Which round it was, only those say that lost their connection in it.
        rounds = [match[1] for why in reasons.values() if (match := re.search(r"in (round \d+) \(", why))]
        when = ""
        if rounds and at_fault is not reasons:
            when = f" (the others lost touch in {rounds[0]})"

        failures = []
        for shard in sorted(at_fault):
            _, peers = self.nodes[shard]
            failures.append(f"the SuperNode of {_peer_range(peers)} failed: {at_fault[shard]}")
        saved = "nothing is kept"
        if self.state.round_index:
            saved = f"the shards keep round {self.state.round_index}"
        return RunError(
            f"{'; '.join(failures)}{when}; {saved}: mend it, then run the same command {again(self.out)}",
            code="nodes.failed",
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Record the shards' evaluations and how far they are; aggregate nothing."""
        progress = [content.config_records[PROGRESS] for content in self._contents]
        rounds = {int(str(shard["round"])) for shard in progress}
        if rounds != {self._until[server_round - 1]}:
            raise RunError(f"the shards disagree on where the run is: rounds {sorted(rounds)}")
        (round_index,) = rounds

        self.recorder.coalition_seconds += max(float(str(shard["coalition_seconds"])) for shard in progress)
        metrics = self._record([content.config_records[METRICS] for content in self._contents])

        records = _arrays(self._contents)  # empty before the last message, with which the open rows come
        rows = self._open_rows(records) if records else {}
        self.state = State(np.arange(self.scenario.n_peers), round_index, rows=rows)
        self._spent, self._noise = spent_of([content.config_records[SPENT] for content in self._contents])
        self.recorder.save(self.state, None)
        return None, metrics

    def _record(self, shards: Sequence[Any]) -> MetricRecord | None:
        """Append the evaluations of one message to the metrics; the first shard's clock is the run's."""
        first = shards[0]
        seconds_before = self.recorder.seconds
        metrics = None
        for index, line in enumerate(first["metrics"]):
            epsilon = max(float(shard["epsilons"][index]) for shard in shards)
            self.recorder.seconds = seconds_before + first["seconds"][index]
            metrics = flat_record(self.recorder.append(json.loads(line), epsilon))
            _log_metrics(metrics)
        return metrics


def _sent_to_each(grid: Grid, messages: list[Message]) -> dict[int, Message]:
    """Send a message to each node, and return the replies by index, without those of nodes that have left.

    Flower's own `send_and_receive` (1.41 to 1.43) waits for a message that could not be sent until its timeout.
    """
    names = list(grid.push_messages(messages))
    waiting = {name: index for index, name in enumerate(names) if name is not None}
    replies: dict[int, Message] = {}
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            replies[waiting.pop(reply.metadata.reply_to_message_id)] = reply
        if waiting:
            time.sleep(POLL)
    return replies


def _send(grid: Grid, messages: list[Message]) -> dict[int, Message]:
    """Send a message to each node, and return their replies by index; after a failure some may be missing."""
    # Flower returns None for a message that it could not send. Then it is a failure already, and no time is left.
    indices = {name: index for index, name in enumerate(grid.push_messages(messages))}
    all_sent = len(indices) == len(messages) and None not in indices
    deadline = None if all_sent else time.monotonic()

    replies: dict[int, Message] = {}
    while len(replies) < len(messages) and (deadline is None or time.monotonic() < deadline):
        waiting = [name for name, index in indices.items() if index not in replies]
        for reply in grid.pull_messages(waiting):
            replies[indices[reply.metadata.reply_to_message_id]] = reply
            if reply.has_error() and deadline is None:
                deadline = time.monotonic() + GRACE
        if len(replies) < len(messages):
            time.sleep(POLL)
    return replies


# --- the run-config ---


def hosting(mode: str, grid: Grid) -> tuple[type[ScenarioStrategy], Mapping[int, ConfigRecord] | None]:
    """Return the strategy of a mode on a grid, and the nodes if it depends on them.

    In mode auto, which no user has to name:

    - a simulation has all peers as rows of one computation;
    - deployed SuperNodes send each other rows directly if a node-config has the address for it, which only its owner
      can give. Otherwise they may not reach each other, and the ServerApp relays.

    The other two do in a simulation what deployed nodes would do, one peer or one shard on each.

    Raises:
        RunError: see `find_nodes`.
    """
    if mode == "relay":
        return Relay, None
    if mode == "sharded":
        return Sharded, None
    if simulates(grid):
        return CohortRun, None
    discovered = find_nodes(grid)
    if any(config.get(SHARDS) for config in discovered.values()):
        return Sharded, discovered
    return Relay, discovered


def scenario_strategy(grid: Grid, context: Context, folder: Path) -> ScenarioStrategy:
    """Return the strategy that a run-config describes, `flwr run -c 'key=value ...'`.

        scenario   a file, absolute or from the app's folder or from `base`
        set        key=value overrides, with semicolons between them
        mode       how SuperNodes host the peers: auto, sharded or relay, see `hosting`
        out        the run's folder; by default runs/NAME-RUN_ID
        base       the folder in which a relative `scenario` and `out` start, and from which modules of the user's own
                   are imported; by default the caller's, and if that is unknown the one in which the SuperLink
                   was started
        resume     continue from the checkpoint in `out`

    Args:
        grid: the nodes.
        context: the ServerApp's context.
        folder: the app's folder.

    Raises:
        ScenarioError: a value is wrong.
        RunError: see `hosting`.
    """
    config = {"mode": "auto", "out": "", "base": "", "resume": False, "set": "", "scenario": ""}
    config |= context.run_config
    mode = str(config["mode"])
    resume = config["resume"]
    path = str(config["scenario"])
    caller = find_caller(folder)
    base = (Path.cwd() if caller is None else caller.folder) / str(config["base"])

    files = [place / path for place in (folder, base) if path and (place / path).is_file()]
    problem = ""
    if mode not in FLOWER_MODES:
        problem = f"mode={mode!r} must be one of {', '.join(FLOWER_MODES)}{did_you_mean(mode, FLOWER_MODES)}"
    elif not isinstance(resume, bool):
        problem = f"resume={resume!r} must be true or false, without quotes"
    elif not base.is_dir():
        problem = f"base={config['base']!r} must be a folder; make {base}, or leave base out"
    elif not files:
        problem = (
            f"scenario={path!r} is not a file in {folder} or {base}; give an absolute path, -c 'scenario=\"PATH\"'"
        )
    if problem:
        raise ScenarioError(problem, code="flower.run-config")

    file = files[0].absolute()
    overrides = [part for part in str(config["set"]).split(";") if part.strip()]
    with chdir(base):  # from where a user's own modules are imported
        scenario = load_scenario(file, overrides)
    out = Path(str(config["out"]) or f"runs/{scenario.name}-{context.run_id}")

    strategy, discovered = hosting(mode, grid)
    made = strategy(scenario, out, base=base, resume=resume is True, discovered=discovered)
    if caller is not None and not os.environ.get(COMMAND):  # which `privdec run` sets, for it calls `flwr run` itself
        made.command = caller.command
    return made


def server_app(folder: Path, on_finished: Callable[[Path], object] | None = None) -> ServerApp:
    """Return the ServerApp of an app whose scenario files lie in a folder.

    Args:
        on_finished: called with the run's folder at the end, for example to draw plots.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        with one_line_failure():
            strategy = scenario_strategy(grid, context, folder)
            strategy.start(grid)
            if on_finished is not None:
                on_finished(strategy.out)

    return server
