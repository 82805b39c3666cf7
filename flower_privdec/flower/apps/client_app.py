"""The ClientApp that hosts peers: all of them, a share, or one."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_privdec.core import Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.engine.run import Run
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.flower.apps.answers import METRICS, PLACE, SPENT, flat_record, spent_record
from flower_privdec.flower.apps.node import Node
from flower_privdec.flower.apps.own import Own, in_simulation
from flower_privdec.flower.apps.records import Order, pack_messages, pack_peers, unpack_message
from flower_privdec.flower.apps.shard_app import train_sharded
from flower_privdec.flower.launch.error_formatting import answering_plainly
from flower_privdec.scenario import parse_scenario, to_yaml


@lru_cache(maxsize=2)
def _agreement(scenario: str) -> Agreement:
    return Agreement.of(parse_scenario(scenario))


@lru_cache(maxsize=128)
def _build(own: Own, text: str, peers: tuple[int, ...], base: str) -> Experiment:
    """Build a node's view once a process, as far as the node goes along with the scenario."""
    with own.allowing():
        scenario = own.scenario(Order(text, 0, list(peers), base=base))
        agreement = _agreement(to_yaml(scenario))
        return Experiment.joined(agreement, own.parts(agreement, peers))


def _experiment(own: Own, order: Order) -> Experiment:
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
    own = Own.of(context, order.folder)
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
    client.query("place")(answering_plainly(answer_place))
    client.train("cohort")(answering_plainly(train_cohort))
    client.train("relay")(answering_plainly(train_relay))
    client.train("sharded")(answering_plainly(train_sharded))
    return client
