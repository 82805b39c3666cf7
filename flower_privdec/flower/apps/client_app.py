"""The ClientApp that hosts a scenario's peers: all of them, a shard, or one.

The ServerApp assigns peers to nodes, and in a simulation names the file through which the shards connect. Outside a
simulation a node hosts the peers that its own node-config assigns to it, and uses no other address than its own.

Each message is answered by a function below, which may run in a process of its own: on a deployed SuperNode every
message starts one (flwr 1.41 to 1.43), in a simulation it is any actor of Ray's. So nothing of a run is kept in memory:

| message | its function | where the state is until the next message |
|---|---|---|
| `query.partition` | `reply_partition` | |
| `query.pairs` | `announce_pair_keys` | the context: the session's private key |
| `train.cohort` | `train_cohort` | the run's folder |
| `train.sharded` | `train_sharded` | a checkpoint in the node's folder |
| `train.relay` | `train_relay` | the context, and at each evaluation a checkpoint |

The context's state lives in the SuperNode's memory. It dies with the SuperNode, so no budget is kept there: a ledger
is a file. What is built from a scenario (data, model, graph) is cached in a process, since an actor is asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.common.errors import RAISED_BY_USERS, RunError
from flower_privdec.common.files import make_owners_folder
from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Payload
from flower_privdec.engine.run import Run
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.checkpoint import Checkpoint, check_state, load_checkpoint, save_checkpoint
from flower_privdec.experiment.data_read import data_read
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.recorder import evaluation_rounds, read_metrics
from flower_privdec.experiment.run_name import public_name
from flower_privdec.experiment.spent import epsilons
from flower_privdec.flower.apps.records import (
    METRICS,
    PARTITION,
    PROGRESS,
    SHARDS,
    SPENT,
    WorkRequest,
    flat_record,
    pack_messages,
    pack_peers,
    pack_state,
    spent_record,
    unpack_message,
    unpack_state,
)
from flower_privdec.flower.error_formatting import one_line_replies
from flower_privdec.flower.node_settings import HostSettings, has_shard_addresses, in_simulation, see_gpus
from flower_privdec.flower.pair_keys import KEYS, PAIRS, agrees, open_session, session_secrets, shard_secrets
from flower_privdec.graph.mixing import Link, Mixing
from flower_privdec.scenario import parse_scenario, scenario_hash, to_yaml

log = logging.getLogger("flwr.privdec")

RUN = "run"  # the record of a context's state that names its run and the steps that are paid for
OPEN_CODES = ("data.no-file", "data.no-root", "code.not-allowed")  # of errors that reveal nothing about data
GENERATIONS = 2  # checkpoints: the server may have lost the reply to the last message


@dataclass(frozen=True)
class Node:
    """A node's peers in one run: their experiment, and their state between two messages.

    Attributes:
        folder: the folder of its checkpoints and its ledger.
    """

    settings: HostSettings
    experiment: Experiment
    folder: Path

    @classmethod
    def of(cls, settings: HostSettings, request: WorkRequest) -> Node:
        """Build the peers of a request, once in a process."""
        facts = (request.base, request.shards, request.nodes, request.salt)
        with _building:
            experiment = _build(settings, request.scenario, tuple(request.peers), *facts)
        torch.set_num_threads(experiment.scenario.compute.threads)
        return cls(settings, experiment, settings.run_folder(experiment, request))

    def state(self, stored: RecordDict, begin: int) -> State | None:
        """Load the state to continue from; None at the start of a run.

        Args:
            stored: the context's state, which `store` wrote.
            begin: see `WorkRequest`.

        Raises:
            RunError: there is none, or it is another run's or of other peers.
        """
        if begin == 0:
            return None

        experiment = self.experiment
        peers = experiment.own.peers
        if begin > 0:
            path = self._checkpoint(begin)
            if not path.exists():
                raise RunError(f"{path} is not there, and the run continues from it; start over with another out")
            digest = scenario_hash(experiment.scenario)
            state = load_checkpoint(path, digest, experiment.own.run, experiment.device).state
            check_state(path, state, peers, experiment.scenario.rounds)
        else:
            unpacked = unpack_state(stored, experiment.device)
            if unpacked is None:
                raise RunError(f"the node of peers {peers.tolist()} has lost its state: start again with --resume")
            # Another run's algorithm may publish a row that is private in this one.
            if stored.config_records[RUN]["id"] != experiment.own.run.id:
                raise RunError(f"the node of peers {peers.tolist()} is in the middle of another run: start over")
            state = unpacked

        if not np.array_equal(state.peers, peers):
            raise RunError(f"the node hosts peers {state.peers.tolist()}, not {peers.tolist()}")
        return state

    def state_after_absence(self, stored: RecordDict, begin: int) -> State | None:
        """Load the newest state of the run that the node has, for it to continue with a round; None if it has none.

        What it waited for is given up: the others have gone on without it.

        Args:
            stored, begin: see `state`.
        """
        state = None
        names = [path.name.removeprefix("checkpoint-") for path in self.folder.glob("checkpoint-*")]
        saved = max((int(name) for name in names if name.isdigit() and int(name) <= begin), default=0)
        if RUN in stored.config_records and stored.config_records[RUN]["id"] == self.experiment.own.run.id:
            state = self.state(stored, -1)
        if state is None or state.round_index < saved:
            state = self.state(stored, saved)
        if state is not None:
            state.round_index = begin
            state.at = 0
            state.waiting = False
        return state

    def store(self, state: State, cohort: Cohort, stored: RecordDict) -> None:
        """Keep a state until the next message, with its run and the number of steps that are paid for."""
        pack_state(state, stored)
        paid = 0 if cohort.ledger is None else cohort.ledger.charged
        stored[RUN] = ConfigRecord({"id": self.experiment.own.run.id, "paid": paid})

    def _checkpoint(self, round_index: int) -> Path:
        return self.folder / f"checkpoint-{round_index}"

    def save(self, state: State, cohort: Cohort) -> None:
        """Write a checkpoint of the whole state, which stays on this node; remove all but the one before."""
        make_owners_folder(self.folder)
        run = self.experiment.own.run
        head = None if cohort.ledger is None else cohort.ledger.head
        checkpoint = Checkpoint(state, scenario_hash(self.experiment.scenario), run, head=head)
        save_checkpoint(self._checkpoint(state.round_index), checkpoint)

        # The newest by round, not by age: a clock may be set back. Those of later rounds are of a run started over.
        paths = {path.name.removeprefix("checkpoint-"): path for path in self.folder.glob("checkpoint-*")}
        rounds = sorted(int(name) for name in paths if name.isdigit() and int(name) <= state.round_index)
        for name in paths.keys() - {str(number) for number in rounds[-GENERATIONS:]}:
            paths[name].unlink()

    @contextmanager
    def cohort(self, stored: RecordDict, begin: int) -> Iterator[Cohort]:
        """Yield the node's cohort with its ledger open.

        Its first step is the first that is not paid for, as the state has it: the ledger of a run that was started over
        has charges for later steps than those that come next.
        """
        if begin < 0:
            first_step = int(str(stored.config_records[RUN]["paid"]))
        else:
            first_step = begin * self.experiment.algorithm.steps_per_round

        settings = self.settings
        budget = None
        if settings.epsilon is not None and settings.delta is not None:
            budget = (settings.epsilon, settings.delta)

        cohort = self.experiment.cohort(self.folder / "ledger", budget, first_step)
        try:
            yield cohort
        finally:
            if cohort.ledger is not None:
                cohort.ledger.close()


_building = Lock()  # models are drawn by torch's one generator


@lru_cache(maxsize=128)
def _build(
    settings: HostSettings, text: str, peers: tuple[int, ...], base: str, shards: int, nodes: int, salt: str
) -> Experiment:
    """Build a node's experiment, if the node permits the scenario."""
    request = WorkRequest(text, 0, list(peers), base=base, shards=shards, nodes=nodes, salt=salt)
    with settings.allowing():
        scenario = settings.scenario(request)
        try:
            # Shards share no model: they compute at the same time, in threads if all are in one process.
            agreement = Agreement.of(scenario) if shards else _agreement(to_yaml(scenario))
            own = settings.parts(agreement, request)
            if not settings.simulated:
                # For the node's owner: it stays in the node's log.
                for half, line in data_read(agreement, own.examples).items():
                    log.info("%s: %s", half, line)
            return Experiment.joined(agreement, own)
        except RAISED_BY_USERS as error:
            if settings.simulated or getattr(error, "code", "") in OPEN_CODES:
                raise
            # The error may quote a row or a value of the node's own data. It stays in the node's log.
            log.exception("peers %s cannot be built", list(peers))
    raise RunError(
        f"the SuperNode of peers {list(peers)} cannot build them from the scenario and its own data: see its own log",
        code="node.data",
    )


@lru_cache(maxsize=2)
def _agreement(scenario: str) -> Agreement:
    return Agreement.of(parse_scenario(scenario))


@lru_cache(maxsize=2)
def _whole(scenario: str) -> Experiment:
    return Experiment.build(parse_scenario(scenario))


def reply_partition(message: Message, context: Context) -> Message:
    """Reply which partition of how many this node is (-1 if its node-config has none), and if it can be a shard."""
    config = ConfigRecord({SHARDS: has_shard_addresses(context.node_config)})
    for name in ("partition-id", "num-partitions"):
        config[name] = int(context.node_config.get(name, -1))
    return Message(RecordDict({PARTITION: config}), reply_to=message)


def train_cohort(message: Message, context: Context) -> Message:
    """Run many rounds of the whole network; the state is stored in the run's folder, not in the context.

    Raises:
        RunError: this is not a simulation, and outside one no node may hold every peer's private part.
    """
    request = WorkRequest.of(message.content)
    if not in_simulation(context.node_config):
        raise RunError(
            "one node hosts all peers only in a simulation: start SuperNodes, of one peer or one shard each, and set "
            "mode to relay or sharded",
            code="node.cohort",
        )

    see_gpus(request.gpus)
    os.chdir(request.base)
    experiment = _whole(request.scenario)
    torch.set_num_threads(experiment.scenario.compute.threads)
    run = Run(experiment, Path(request.folder), runtime="flower", resume=request.resume, workers=1)
    run.recorder.command = request.command
    try:
        while run.round_index < request.until:
            run.advance()
        if run.round_index == run.experiment.scenario.rounds:
            run.finish()
        metrics = flat_record(read_metrics(run.recorder.out)[-1])
    finally:
        run.close()
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def train_sharded(message: Message, context: Context) -> Message:
    """Run this node's shard up to a round, together with the other shards.

    Privacy: rows go to other shards as the algorithm's exchanges declare, and to the first shard those that it declares
    open, which it evaluates on the public test set; these go to the ServerApp with the last round. All else stays.
    """
    request = WorkRequest.of(message.content)
    settings = HostSettings.of(context, request.folder)
    shards = Shards.split(settings.scenario(request).n_peers, request.shards)
    shard = int(shards.of(np.array(request.peers[:1]))[0])

    place = settings.rendezvous(request)
    with place.store(shard, shards, request.token) as store:
        group = ProcessGroup.join(store, shard, shards, place.address)
        try:
            content = _train_shard(Node.of(settings, request), request, group)
            group.wait_for_all()
        finally:
            group.close()
    return Message(content, reply_to=message)


def _train_shard(node: Node, request: WorkRequest, group: ProcessGroup) -> RecordDict:
    """Run the rounds, and return the content of the reply.

    METRICS has lists with an entry for each evaluation: `metrics`, of the whole network as JSON, only on the first
    shard; `epsilons`, the largest of the peers hosted here; `seconds` of training since the message began.
    """
    experiment = node.experiment
    group.agree(_shared_facts(experiment, request))

    # A shard's state is on its disk between two messages, not in the context.
    state = node.state(RecordDict(), request.begin)
    content = RecordDict()
    metrics = []
    largest_epsilons = []
    clock = []
    seconds = 0.0
    with node.cohort(RecordDict(), request.begin) as cohort:
        if agrees(experiment):
            cohort.secrets = shard_secrets(node.settings, experiment, group)
        engine = ShardEngine(experiment.algorithm, cohort, state or experiment.initial_state(cohort), group)
        state = engine.state

        for stop in evaluation_rounds(experiment.scenario.rounds, experiment.scenario.evaluation.every):
            if not state.round_index < stop <= request.until:
                continue

            began = time.perf_counter()
            while state.round_index < stop:
                engine.round()
            seconds += time.perf_counter() - began

            rows = engine.collect()  # None but on the first shard
            if rows is not None:
                metrics.append(json.dumps(evaluate(experiment, rows, stop)))
            largest_epsilons.append(max(epsilons(cohort, stop)))
            clock.append(seconds)

        node.save(state, cohort)
        content[SPENT] = spent_record(cohort, state.round_index, experiment.own.source)
        content[PROGRESS] = ConfigRecord({"round": state.round_index, "coalition_seconds": cohort.game_seconds})

    content[METRICS] = ConfigRecord({"metrics": metrics, "epsilons": largest_epsilons, "seconds": clock})
    if state.round_index == experiment.scenario.rounds:
        content.update(pack_peers(state, experiment.algorithm.open_rows))
    return content


def _shared_facts(experiment: Experiment, request: WorkRequest) -> bytes:
    """Return a digest of what all shards must have alike, or their rows would not belong together."""
    name = public_name(experiment, experiment.own.source)
    facts = [request.scenario, request.begin, request.until, request.shards, name.environment, experiment.device.type]
    digest = hashlib.sha256(json.dumps(facts).encode())
    digest.update(f"{experiment.constants} {experiment.own.pairs_id}".encode())
    digest.update(experiment.initial.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def announce_pair_keys(message: Message, context: Context) -> Message:
    """Reply with this node's key for secrets of pairs, which the first train message brings to the others."""
    request = WorkRequest.of(message.content)
    settings = HostSettings.of(context, request.folder)
    node = Node.of(settings, request)
    announced = ConfigRecord()
    if agrees(node.experiment):
        announced = open_session(node, context.state)
    announced[KEYS] = node.experiment.own.pairs_id
    return Message(RecordDict({PAIRS: announced}), reply_to=message)


def train_relay(message: Message, context: Context) -> Message:
    """Finish the pending exchange with the neighbours' rows, continue to the next, and reply with one's own rows.

    Between two evaluations the reply holds what the exchange sends; at one, the rows that others may see, what was
    spent and run, and the node writes a checkpoint of everything else for itself.
    """
    request = WorkRequest.of(message.content)
    settings = HostSettings.of(context, request.folder)
    node = Node.of(settings, request)
    experiment = node.experiment
    algorithm = node.experiment.algorithm
    mixing = experiment.mixing
    before = mixing
    if mixing is not None:
        _check_absent(experiment, request)
        before = mixing.without(set(request.absent) - set(request.lost))
        mixing = mixing.without(request.absent)
    if request.rejoin:
        state = node.state_after_absence(context.state, request.begin)
    else:
        state = node.state(context.state, request.begin)

    content = RecordDict()
    exchange: Exchange | None = None  # what the peers wait at, after this message
    session = None
    with node.cohort(context.state, request.begin) as cohort:
        if agrees(experiment):
            cohort.secrets, session = session_secrets(node, request, message.content, context.state)
        if state is None:
            state = experiment.initial_state(cohort)
            state.round_index = max(0, request.begin)

        if state.waiting and mixing is not None and before is not None:
            if mixing.sends_shares:
                _take_shares(algorithm, state, before, request.lost, message.content)
            else:
                _take_rows(algorithm, state, mixing, message.content)
        while exchange is None and state.round_index < request.until:
            exchange = advance(algorithm, cohort, state)

        content[PROGRESS] = ConfigRecord(
            {
                "round": state.round_index,
                "at": state.at,
                "waiting": exchange is not None,
                "constants": experiment.constants,
                "coalition_seconds": cohort.game_seconds,
            }
        )
        if exchange is None:
            node.save(state, cohort)
            content[SPENT] = spent_record(cohort, state.round_index, experiment.own.source)
        node.store(state, cohort, context.state)
        if session is not None:
            context.state[PAIRS] = session

    if exchange is None or mixing is None:
        content.update(pack_peers(state, algorithm.open_rows))
    else:
        content.update(pack_messages(exchange, exchange.outgoing(state, mixing)))
    return Message(content, reply_to=message)


def _check_absent(experiment: Experiment, request: WorkRequest) -> None:
    """Refuse a server's word that peers are gone which are hosted here, or are none.

    Raises:
        RunError: naming them.
    """
    own = set(experiment.own.peers.tolist())
    others = set(range(experiment.scenario.n_peers)) - own
    absent = set(request.absent)
    if not absent <= others or not set(request.lost) <= absent:
        raise RunError(
            f"the server says that peers {sorted(absent | set(request.lost))} are gone, and this node hosts "
            f"{sorted(own)} of {experiment.scenario.n_peers}: start again with --resume",
            code="nodes.absent",
        )


def _take_rows(algorithm: Algorithm, state: State, mixing: Mixing, content: RecordDict) -> None:
    """Finish the exchange at which a state waits with the rows that came, weighed by the receiver."""
    exchange = algorithm.program[state.at]
    assert isinstance(exchange, Exchange)
    messages = _messages_to(exchange, state, mixing, content)
    exchange.incoming(state, mixing, messages).apply_(state)


def _take_shares(
    algorithm: Algorithm, state: State, mixing: Mixing, lost: Collection[int], content: RecordDict
) -> None:
    """Finish the exchange at which a state waits with the shares that came, weighed by the sender.

    Args:
        mixing: as the shares were weighed.
        lost: peers that will neither receive nor send theirs: what a peer here weighed for them it keeps itself, so
            that no mass is lost but theirs.
    """
    exchange = algorithm.program[state.at]
    assert isinstance(exchange, Exchange)
    messages = _messages_to(exchange, state, mixing, content)
    for link in exchange.awaited(state, mixing):
        if link[0] in lost and link not in messages:
            messages[link] = {name: torch.zeros_like(state.rows[name][0]) for name in exchange.names}

    changed = exchange.incoming(state, mixing, messages)
    row_of = {peer: row for row, peer in enumerate(state.peers.tolist())}
    for sender, receiver, weight in mixing.hosted(exchange.place(state.round_index, mixing), state.peers).sent:
        if receiver in lost:
            for name in exchange.names:
                changed.rows[name][row_of[sender]].add_(state.rows[name][row_of[sender]], alpha=weight)
    changed.apply_(state)


def _messages_to(exchange: Exchange, state: State, mixing: Mixing, content: RecordDict) -> dict[Link, Payload]:
    """Return the messages to the peers hosted here: those between them, and those that a message brings."""
    messages = exchange.outgoing(state, mixing)
    for link in exchange.awaited(state, mixing):
        if link in messages:
            continue
        payload = unpack_message(exchange, content, link, state.rows["x"].device)
        if payload is not None:
            messages[link] = payload
    return messages


def client_app() -> ClientApp:
    """Return the ClientApp that hosts peers as the ServerApp's strategy asks for it.

    Privacy: what leaves a node is the rows that its algorithm declares open, functions of what was clipped and noised;
    every step is charged to the node's ledger, a file, before an example is read. Folder, budget, keys and data are
    the node's own (`node_settings`).
    """
    client = ClientApp()
    client.query("partition")(one_line_replies(reply_partition))
    client.query("pairs")(one_line_replies(announce_pair_keys))
    client.train("cohort")(one_line_replies(train_cohort))
    client.train("relay")(one_line_replies(train_relay))
    client.train("sharded")(one_line_replies(train_sharded))
    return client
