"""A SuperNode's part in a sharded run: many rounds inside one train message, over direct connections to other nodes.

The ServerApp deals out shares, and in a simulation says in which file the shards meet. Outside a simulation a node
hosts the share that its own node-config makes its own, and listens and connects where that says, nowhere else.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_privdec.core import State
from flower_privdec.engine.recorder import evaluation_rounds, measure
from flower_privdec.engine.shards.process_group import Wires
from flower_privdec.engine.shards.shard_assignment import Shards
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.engine.spent import epsilons
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.own_parts import public_name
from flower_privdec.flower.apps.answers import METRICS, PLACE, SPENT, spent_record
from flower_privdec.flower.apps.node import Node
from flower_privdec.flower.apps.own import Own
from flower_privdec.flower.apps.records import Order, pack_peers
from flower_privdec.scenario import Scenario

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
    own = Own.of(context, order.folder)
    scenario = own.scenario(order)
    shards = Shards.deal(scenario.n_peers, order.shards)
    shard, place = int(shards.of(np.array(order.peers[:1]))[0]), own.meeting(order)
    with place.store(shard, shards, order.token) as store:
        wires = Wires.meet(store, shard, shards, place.address)
        try:
            content = _train(own, order, wires)
            wires.part()
        finally:
            wires.close()
    return Message(content, reply_to=message)


def _train(own: Own, order: Order, wires: Wires) -> RecordDict:
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
def _hosted(own: Own, text: str, peers: tuple[int, ...], base: str, shards: int) -> Experiment:
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
