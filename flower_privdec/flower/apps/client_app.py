"""The ClientApp that hosts peers: all of them, a shard, or one.

The ServerApp deals out shares, and in a simulation says in which file the shards meet. Outside a simulation a node
hosts the share that its own node-config makes its own, and listens and connects where that says, nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.core import Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.checkpoint import Checkpoint, check_state, load_checkpoint, save_checkpoint
from flower_privdec.engine.recorder import evaluation_rounds, measure
from flower_privdec.engine.run import Run
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.engine.spent import epsilons
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.own_parts import public_name
from flower_privdec.flower.apps.records import (
    METRICS,
    PLACE,
    SPENT,
    Order,
    flat_record,
    pack_messages,
    pack_peers,
    pack_state,
    spent_record,
    unpack_message,
    unpack_state,
)
from flower_privdec.flower.launch.error_formatting import one_line_replies
from flower_privdec.flower.node_settings import HostSettings, in_simulation
from flower_privdec.scenario import Scenario, parse_scenario, scenario_hash, to_yaml

OWN = "own"  # of the record that says which run a kept state is of, and up to which step that has paid
KEPT = 2  # checkpoints: the server may have missed the answer that told it of the last


@dataclass(frozen=True)
class Node:
    """What a node needs to take its peers through some steps of a run.

    Attributes:
        folder: where checkpoints and ledger lie.
    """

    own: HostSettings
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


_building = Lock()  # models are drawn by torch's one generator


@dataclass
class ShardLines:
    """What a shard says of the evaluations of one message, each list in their order.

    Attributes:
        metrics: of the whole network, as JSON; on the first shard alone.
        epsilons: the most that a peer hosted here had spent.
        seconds: of training since the message began.
    """

    metrics: list[str] = field(default_factory=list)
    epsilons: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train_sharded(message: Message, context: Context) -> Message:
    """Run this node's share of the peers up to a round, together with the other shards.

    Privacy: rows go to other shards as the algorithm's exchanges say, and to the first shard those that it declares
    open, where they are tried on the public test set; these go to the ServerApp with the last round. All else stays.
    """
    order = Order.of(message.content)
    own = HostSettings.of(context, order.folder)
    scenario = own.scenario(order)
    shards = Shards.deal(scenario.n_peers, order.shards)
    shard, place = int(shards.of(np.array(order.peers[:1]))[0]), own.meeting(order)
    with place.store(shard, shards, order.token) as store:
        wires = ProcessGroup.meet(store, shard, shards, place.address)
        try:
            content = _train(own, order, wires)
            wires.part()
        finally:
            wires.close()
    return Message(content, reply_to=message)


def _train(own: HostSettings, order: Order, wires: ProcessGroup) -> RecordDict:
    """Go through the rounds, and return what to answer."""
    with _building:
        experiment = _hosted(own, order.scenario, tuple(order.peers), order.base, order.shards)
    torch.set_num_threads(experiment.scenario.compute.threads)
    wires.agree(_digest(order, experiment))
    node, content = Node(own, experiment, own.run_folder(experiment, order)), RecordDict()
    state = node.state(RecordDict(), order.begin)
    with node.cohort(order.begin * experiment.algorithm.steps_per_round) as cohort:
        engine = ShardEngine(experiment.algorithm, cohort, state or experiment.initial_state(cohort), wires)
        lines = _rounds(engine, experiment, order.until)
        state = engine.state
        node.keep(state, cohort)
        content[SPENT] = spent_record(cohort, state.round_index)
        content[PLACE] = ConfigRecord({"round": state.round_index, "coalition_seconds": cohort.game_seconds})
    content[METRICS] = ConfigRecord(vars(lines))
    if state.round_index == experiment.scenario.rounds:
        content.update(pack_peers(state, experiment.algorithm.open_rows))
    return content


@lru_cache(maxsize=2)
def _hosted(own: HostSettings, text: str, peers: tuple[int, ...], base: str, shards: int) -> Experiment:
    """Build a node's view once a process, with nothing that another node of this process has."""
    with own.allowing():
        agreement = Agreement.of(own.scenario(Order(text, 0, list(peers), base=base, shards=shards)))
        return Experiment.joined(agreement, own.parts(agreement, peers))


def _digest(order: Order, experiment: Experiment) -> bytes:
    """Return a hash of what all shards have to have alike."""
    made = public_name(experiment, experiment.own.source)
    facts = [order.scenario, order.begin, order.until, order.shards, made.environment, experiment.device.type]
    found = hashlib.sha256(json.dumps(facts).encode())
    found.update(experiment.initial.detach().cpu().contiguous().numpy().tobytes())
    return found.digest()


def _rounds(engine: ShardEngine, experiment: Experiment, until: int) -> ShardLines:
    """Run the rounds; at each evaluation the first shard tries the rows that others may see."""
    lines, seconds, state = ShardLines(), 0.0, engine.state
    for stop in _stops(experiment.scenario, state, until):
        began = time.perf_counter()
        while state.round_index < stop:
            engine.round()
        seconds += time.perf_counter() - began
        rows = engine.collect()
        if rows is not None:
            measured: dict[str, Any] = measure(experiment, rows, stop)
            lines.metrics.append(json.dumps(measured))
        lines.epsilons.append(max(epsilons(engine.cohort, stop)))
        lines.seconds.append(seconds)
    return lines


def _stops(scenario: Scenario, state: State, until: int) -> list[int]:
    rounds = evaluation_rounds(scenario.rounds, scenario.evaluation.every)
    return [stop for stop in rounds if state.round_index < stop <= until]


@lru_cache(maxsize=2)
def _agreement(scenario: str) -> Agreement:
    return Agreement.of(parse_scenario(scenario))


@lru_cache(maxsize=128)
def _build(own: HostSettings, text: str, peers: tuple[int, ...], base: str) -> Experiment:
    """Build a node's view once a process, as far as the node goes along with the scenario."""
    with own.allowing():
        scenario = own.scenario(Order(text, 0, list(peers), base=base))
        agreement = _agreement(to_yaml(scenario))
        return Experiment.joined(agreement, own.parts(agreement, peers))


def _experiment(own: HostSettings, order: Order) -> Experiment:
    experiment = _build(own, order.scenario, tuple(order.peers), order.base)
    torch.set_num_threads(experiment.scenario.compute.threads)
    return experiment


def answer_place(message: Message, context: Context) -> Message:
    """Say which partition of how many this node is."""
    place = ConfigRecord()
    for name in ("partition-id", "num-partitions"):
        place[name] = int(context.node_config.get(name, -1))
    return Message(RecordDict({PLACE: place}), reply_to=message)


def train_cohort(message: Message, context: Context) -> Message:
    """Run many rounds of the whole network; the state is kept in the run's folder, not in the context.

    Raises:
        RunError: outside a simulation, for no node may hold what is every peer's own.
    """
    order = Order.of(message.content)
    if not in_simulation():
        raise RunError("cohort mode hosts all peers in one node, which is for simulation: set mode to relay")
    os.chdir(order.base)
    experiment = _whole(order.scenario)
    torch.set_num_threads(experiment.scenario.compute.threads)
    run = Run(experiment, Path(order.folder), runtime="flower", resume=order.resume, workers=1)
    try:
        while run.round_index < order.until:
            run.advance()
        if run.round_index == run.experiment.scenario.rounds:
            run.finish()
        metrics = flat_record(run.recorder.last_metrics())
    finally:
        run.close()
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


@lru_cache(maxsize=2)
def _whole(scenario: str) -> Experiment:
    return Experiment.build(parse_scenario(scenario))


def train_relay(message: Message, context: Context) -> Message:
    """Finish the pending exchange with the neighbours' rows, go on to the next, and hand out one's own.

    Between two evaluations the answer holds what the exchange sends; at one, the rows that others may see, what was
    spent and run, and the node keeps a checkpoint of everything else for itself.
    """
    order = Order.of(message.content)
    own = HostSettings.of(context, order.folder)
    experiment = _experiment(own, order)
    node = Node(own, experiment, own.run_folder(experiment, order))
    state = node.state(context.state, order.begin)
    with node.cohort(node.start(context.state, order.begin)) as cohort:
        if state is None:
            state = experiment.initial_state(cohort)
        _finish_exchange(experiment, state, message.content)
        exchange = _proceed(experiment, cohort, state, order.until)
        content = RecordDict()
        place = {"round": state.round_index, "at": state.at, "waiting": exchange is not None}
        content[PLACE] = ConfigRecord({**place, "coalition_seconds": cohort.game_seconds})
        if exchange is None:
            node.keep(state, cohort)
            content[SPENT] = spent_record(cohort, state.round_index)
        node.put_away(state, cohort, context.state)
    if exchange is None or experiment.mixing is None:
        content.update(pack_peers(state, experiment.algorithm.open_rows))
    else:
        content.update(pack_messages(exchange, exchange.outgoing(state, experiment.mixing)))
    return Message(content, reply_to=message)


def _finish_exchange(experiment: Experiment, state: State, content: RecordDict) -> None:
    """Give a waiting state what it was promised: what its peers send each other, and what is in the message."""
    exchange = experiment.algorithm.program[state.at] if state.waiting else None
    if not isinstance(exchange, Exchange) or experiment.mixing is None:
        return
    device = state.rows["x"].device
    among = exchange.outgoing(state, experiment.mixing)
    messages = {
        link: among[link] if link in among else unpack_message(exchange, content, link, device)
        for link in exchange.awaited(state, experiment.mixing)
    }
    there = {link: payload for link, payload in messages.items() if payload is not None}
    exchange.incoming(state, experiment.mixing, there).apply_(state)


def _proceed(experiment: Experiment, cohort: Cohort, state: State, until: int) -> Exchange | None:
    """Run to the next exchange, which is returned, or until so many rounds are done."""
    while state.round_index < until:
        exchange = advance(experiment.algorithm, cohort, state)
        if exchange is not None:
            return exchange
    return None


def client_app() -> ClientApp:
    """Return the ClientApp that hosts peers in whichever mode the ServerApp's strategy asks for.

    Messages: `query.place`, `train.cohort` (simulation alone), `train.relay` and `train.sharded`.

    Privacy: what leaves a node is the rows that its algorithm declares open, functions of what was clipped and noised;
    every step is charged to the node's ledger, a file, before an example is read. Folder, budget, keys and data are
    the node's own (`own`).
    """
    client = ClientApp()
    client.query("place")(one_line_replies(answer_place))
    client.train("cohort")(one_line_replies(train_cohort))
    client.train("relay")(one_line_replies(train_relay))
    client.train("sharded")(one_line_replies(train_sharded))
    return client
