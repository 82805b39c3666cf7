"""Apps whose clients are peers: exact means, no mass lost, restarts, and what is wrong named."""

from __future__ import annotations

import copy
import logging
import random
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM
from peer_states import state_in
from raising import raises
from routing_peers import (
    LossyGrid,
    client,
    failing,
    first,
    frozen_share,
    receive,
    request_in,
    sets_its_values_once,
    values_of,
    zeros,
)
from torch.nn import functional

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.flower import Gossip, LocalGrid, PeerMod, PushSum
from flower_privdec.flower.strategies import peer_network
from flower_privdec.flower.strategies.peer_network import answers
from flower_privdec.peer.app_state import PeerState, run_frames, state_path


def mean_of(n_peers: int, size: int = 3) -> np.ndarray:
    return np.mean([values_of(peer, size) for peer in range(n_peers)], axis=0)


def states(folder: Path, n_peers: int, run: str) -> list[PeerState]:
    return [state_in(folder / f"peer-{peer}", run) for peer in range(n_peers)]


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("n_peers", [8, 16])
def test_push_sum_reaches_the_mean_in_log2_n_rounds(n_peers, seal, tmp_path):
    rounds = n_peers.bit_length() - 1
    grid = LocalGrid(client(sets_its_values_once, seal=seal), n_peers, folder=tmp_path)
    result = PushSum(name="mean", fraction_evaluate=0.0).start(grid, zeros(), rounds)
    for state in states(tmp_path, n_peers, "mean"):
        assert np.abs(state.model() - mean_of(n_peers)).max() < 1e-12
    assert np.abs(first(result.arrays) - mean_of(n_peers)).max() < 1e-12


def test_one_round_less_is_not_enough():
    strategy = PushSum(fraction_evaluate=0.0)
    strategy.start(LocalGrid(client(sets_its_values_once), 8), zeros(), 2)
    assert max(np.abs(first(each) - mean_of(8)).max() for each in strategy.peer_arrays.values()) > 1


def test_a_gradient_step_matches_the_engine(build):
    """Stochastic Gradient Push: an app that takes one step from z on the engine's own batches."""
    experiment = build(
        "algorithm={name: sgp, learning_rate: 0.5}", "topology.name=directed-exponential", "privacy=none"
    )
    cohort, rounds = experiment.cohort(), 5
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer, done = context.node_config["partition-id"], message.content["config"]["server-round"]
        batch = experiment.cohort().data.batch(done - 1, [peer])
        x, y, weight = batch.x[0], batch.y[0], batch.weight[0]
        module = copy.deepcopy(experiment.module)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = (functional.cross_entropy(module(x), y, reduction="none") * weight).sum() / 12
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
        return Message(RecordDict({"arrays": ArrayRecord(module.state_dict())}), reply_to=message)

    strategy = PushSum(fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 4), ArrayRecord(experiment.module.state_dict()), rounds)
    rows = engine.state.rows["x"]
    for peer, arrays in strategy.peer_arrays.items():
        state = arrays.to_torch_state_dict()
        got = torch.cat([state[name].reshape(-1) for name, _ in experiment.module.named_parameters()])
        torch.testing.assert_close(got, rows[peer], rtol=1e-9, atol=1e-11)


def test_gossip_keeps_every_weight_at_one_and_agrees(tmp_path):
    grid = LocalGrid(client(sets_its_values_once), 5, folder=tmp_path)
    strategy = Gossip(topology="ring", name="g", fraction_evaluate=0.0)
    result = strategy.start(grid, zeros(), 60)
    assert all(abs(state.w - 1) < 1e-12 for state in states(tmp_path, 5, "g"))
    np.testing.assert_allclose(first(result.arrays), mean_of(5), rtol=1e-12)
    for arrays in strategy.peer_arrays.values():
        np.testing.assert_allclose(first(arrays), mean_of(5), rtol=1e-6)


@pytest.mark.parametrize("strategy", [PushSum, Gossip])
def test_only_sampled_peers_train_and_mass_is_conserved(strategy, tmp_path):
    trained = []

    def step(arrays, peer, server_round):
        trained.append((server_round, peer))
        return [arrays[0] + 1.0]

    graph = "erdos-renyi" if strategy is Gossip else "directed-exponential"
    grid = LocalGrid(client(step), 6, folder=tmp_path)
    strategy(graph, fraction_train=0.5, name="p", fraction_evaluate=0.0).start(grid, zeros(), 8)
    assert [sum(done == k for done, _ in trained) for k in range(1, 9)] == [3] * 8
    assert len({peer for _, peer in trained}) > 3
    assert abs(sum(state.w for state in states(tmp_path, 6, "p")) - 6) < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_no_mass_is_lost_or_added_whatever_messages_are(seed, tmp_path):
    """Σ (x, w) of all peers and of the shares on their way is what it was, whichever messages are lost or late."""
    draw = random.Random(seed)
    fates = [draw.choice(["ok", "ok", "ok", "lost", "unanswered", "late"]) for _ in range(400)]
    app, graph = (
        client(sets_its_values_once, seal=seed % 2 == 0),
        "complete" if seed % 3 == 0 else "directed-exponential",
    )

    def run(rounds, fate, patience):
        strategy = (Gossip if seed % 3 == 0 else PushSum)(graph, name="l", patience=patience)
        strategy.start(LossyGrid(fate, app, 4, folder=tmp_path), zeros(), rounds, timeout=0.01)
        return strategy

    run(1, lambda *_: "ok", 10)
    for rounds in (6, 12):  # each a ServerApp that has forgotten all that was on its way
        with suppress(RunError):  # as when nobody answers
            run(rounds, lambda count, _, rounds=rounds: fates[count * rounds % len(fates)], 0.02)
    strategy = run(30, lambda *_: "ok", 10)
    found = states(tmp_path, 4, "l")
    assert sum(state.w for state in found) == pytest.approx(4, abs=1e-9)
    np.testing.assert_allclose(sum(state.x for state in found), 4 * mean_of(4), rtol=1e-9)
    for arrays in strategy.peer_arrays.values():
        np.testing.assert_allclose(first(arrays), mean_of(4), rtol=1e-6)


def test_a_silent_peer_delays_others_only_once(monkeypatch):
    def fate(count, message):
        asked = request_in(message)
        late = asked.round_index > 1 or asked.kind == "deliver"
        return "lost" if message.metadata.dst_node_id == 103 and late else "ok"

    waited_for = []

    def noting(grid, asked, wanted, *others):
        waited_for.append(len(wanted))
        return answers(grid, asked, wanted, *others)

    monkeypatch.setattr(peer_network, "answers", noting)
    strategy = PushSum(fraction_evaluate=0.0)
    result = strategy.start(LossyGrid(fate, client(sets_its_values_once), 4), zeros(), 12, timeout=0.5)
    assert set(strategy.peer_arrays) == {0, 1, 2}
    assert "peer 3: no answer" in strategy.network.troubles()
    asked = [count for count in waited_for if count]
    assert asked == [4, 4, 4, 4] + [3] * 11  # who is there, the beginning, rounds 1 and 2; then 3 to 12, and the end
    np.testing.assert_allclose(first(result.arrays), first(strategy.peer_arrays[0]), rtol=1e-2)


def test_a_lost_node_is_told_once_in_our_words(tmp_path, caplog):
    """Flower's SuperLink answers for a node that it has lost, under its own id."""

    class Losing(LocalGrid):
        def _deliver(self, message):
            asked = request_in(message)
            if message.metadata.dst_node_id != 103 or asked.round_index not in (3, 4):
                return super()._deliver(message)
            reply = Message(Error(5, "Error: Node Unavailable - it failed to report a heartbeat"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply

    caplog.set_level(logging.INFO)
    strategy = PushSum(name="lost")
    strategy.start(Losing(client(sets_its_values_once), 4, folder=tmp_path), zeros(), 8)
    told = [record.getMessage() for record in caplog.records if "lost since" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("peer 3 (SuperNode 103) is lost since round 3: its")
    assert "its SuperNode gives no sign of life. The others go on without it" in told[0]
    assert "takes part again once it answers, or when a SuperNode with partition-id=3 is there" in told[0]
    assert told[1].startswith("peer 3 is back in round 5, lost since round 3, ")
    assert "heartbeat" not in caplog.text
    assert sum(state.w for state in states(tmp_path, 4, "lost")) == pytest.approx(4, abs=1e-12)
    np.testing.assert_allclose(sum(state.x for state in states(tmp_path, 4, "lost")), 4 * mean_of(4), rtol=1e-12)


def test_a_node_that_is_gone_is_not_waited_for(monkeypatch, caplog):
    """A SuperLink of Flower 1.43 does not answer for a node that it has lost."""
    is_off = []

    def fate(count, message):
        if message.metadata.dst_node_id == 103 and request_in(message).round_index == 3:
            is_off.append(True)
        return "lost" if is_off and message.metadata.dst_node_id == 103 else "ok"

    class Silent(LossyGrid):
        def get_node_ids(self):
            return [node for node in super().get_node_ids() if node != 103 or not is_off]

    monkeypatch.setattr(peer_network, "LOOK", 0.0)
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    PushSum(fraction_evaluate=0.0).start(Silent(fate, client(sets_its_values_once), 4), zeros(), 5, timeout=60.0)
    assert time.monotonic() - began < 60  # the timeout, which it would wait for
    (told,) = [record.getMessage() for record in caplog.records if "is lost since" in record.getMessage()]
    assert "is lost since round 3: its SuperNode gives no sign of life" in told


def test_a_stopped_run_resumes_there(tmp_path):
    done = []

    def step(arrays, peer, server_round):
        done.append((peer, server_round))
        return [arrays[0] + 1.0]

    def start(rounds):
        strategy = PushSum(name="again", fraction_evaluate=0.0)
        return strategy.start(
            LocalGrid(client(step), 4, run_id=random.getrandbits(60), folder=tmp_path), zeros(), rounds
        )

    start(3)
    np.testing.assert_allclose(first(start(5).arrays), 5.0)
    assert sorted(done) == [(peer, k) for peer in range(4) for k in range(1, 6)]
    np.testing.assert_allclose(first(start(5).arrays), 5.0)  # nothing is left to do
    assert len(done) == 20


def test_a_killed_peer_repeats_its_round_and_others_wait(tmp_path):
    done, killed = [], {(2, 3)}

    def step(arrays, peer, server_round):
        if (peer, server_round) in killed:
            raise KeyboardInterrupt
        done.append((peer, server_round))
        return [arrays[0] + 1.0]

    def start(rounds):
        grid = LocalGrid(client(step), 4, folder=tmp_path)
        return PushSum(name="killed", fraction_evaluate=0.0).start(grid, zeros(), rounds)

    with pytest.raises(KeyboardInterrupt):
        start(5)
    killed.clear()
    start(5)
    assert sorted(done) == [(peer, k) for peer in range(4) for k in range(1, 6)]
    assert sum(state.w for state in states(tmp_path, 4, "killed")) == pytest.approx(4, abs=1e-12)


def test_peers_keep_identities_when_node_ids_change(tmp_path):
    def start(rounds, ids):
        grid = LocalGrid(client(sets_its_values_once), 4, folder=tmp_path)
        grid.contexts = dict(zip(ids, grid.contexts.values(), strict=True))
        strategy = PushSum(name="ids", fraction_evaluate=0.0)
        strategy.start(grid, zeros(), rounds)
        return strategy

    start(1, [5, 9, 7, 3])
    strategy = start(2, [30, 10, 20, 40])
    assert strategy.network.node_of == {0: 30, 1: 10, 2: 20, 3: 40}
    for arrays in strategy.peer_arrays.values():
        np.testing.assert_allclose(first(arrays), mean_of(4), rtol=1e-12)


def test_a_stale_state_is_detected_and_restarts_empty(tmp_path, caplog):
    def start(rounds):
        PushSum(name="old", fraction_evaluate=0.0).start(
            LocalGrid(client(sets_its_values_once), 2, folder=tmp_path), zeros(), rounds
        )

    start(2)
    path = state_path(tmp_path / "peer-1", "old")
    copy = path.read_bytes()
    start(6)
    path.write_bytes(copy)
    strategy = PushSum(name="old", fraction_evaluate=0.0)
    strategy.start(LocalGrid(client(sets_its_values_once), 2, folder=tmp_path), zeros(), 9)
    assert "peer 1 begins again without a model: peer 0 acknowledged share 6" in caplog.text
    assert "0 of 2 peers trained (peer 1: it holds 0 of the mass" in caplog.text.lower()
    assert sum(state.w for state in states(tmp_path, 2, "old")) == pytest.approx(2, abs=1e-12)
    assert strategy.reports[1].trained or strategy.reports[1].round_index == 9


@pytest.mark.parametrize("seed", range(4))
def test_the_weight_recovers_from_lost_stale_or_late_states(seed, tmp_path):
    """Σ w is the number of peers, or of their examples, and every model is within the hull of what the app set."""
    draw, late, counts = random.Random(seed), seed if seed % 2 else None, [(1, 1, 1, 1), (10, 20, 30, 40)][seed // 2]
    paths = [state_path(tmp_path / f"peer-{peer}", "whole") for peer in range(4)]
    mod = PeerMod(examples=lambda context: float(counts[context.node_config["partition-id"]]))
    rounds = 0

    def run(more, is_there):
        nonlocal rounds
        rounds += more
        grid = LocalGrid(client(sets_its_values_once, mod=mod), 4, folder=tmp_path)
        grid.contexts = {node: own for node, own in grid.contexts.items() if is_there(node - 100)}
        strategy = PushSum("complete", name="whole", fraction_evaluate=0.0, patience=0.0)
        strategy.start(grid, zeros(), rounds)

    for _ in range(3):
        run(2, lambda peer: peer != late)
        old = {path: path.read_bytes() for path in paths if path.exists()}
        run(3, lambda _: True)
        for path in draw.sample(list(old), 2):
            path.unlink()
            if draw.random() < 0.5:
                path.write_bytes(old[path])
    run(4, lambda _: True)
    ended = states(tmp_path, 4, "whole")
    assert [state.w for state in ended] == pytest.approx(counts, rel=1e-9)
    for state in ended:
        assert (state.model() >= values_of(0) * (1 - 1e-9)).all()
        assert (state.model() <= values_of(3) * (1 + 1e-9)).all()


# What the app sees.


def test_evaluate_fn_and_quickstart_code_get_the_mean():
    seen = []

    def evaluate_fn(server_round, arrays):
        seen.append((server_round, first(arrays).copy()))
        return MetricRecord({"size": float(first(arrays).max())})

    strategy = PushSum()
    result = strategy.start(LocalGrid(client(sets_its_values_once), 8), zeros(), 2, evaluate_fn=evaluate_fn)
    assert [server_round for server_round, _ in seen] == [0, 1, 2]
    assert not seen[0][1].any()
    np.testing.assert_allclose(seen[1][1], mean_of(8), rtol=1e-12)
    np.testing.assert_allclose(first(result.arrays), mean_of(8), rtol=1e-12)
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 2}
    assert result.train_metrics_clientapp[1] == {"loss": 0.25}
    assert result.evaluate_metrics_clientapp[2]["size"] > 0


def test_one_mod_serves_the_decorators_as_well():
    app, mod = ClientApp(), PeerMod()

    @app.train(mods=[mod])
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"model": message.content["arrays"]}), reply_to=message)

    @app.evaluate(mods=[mod])
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"m": MetricRecord({"one": 1.0})}), reply_to=message)

    result = PushSum().start(LocalGrid(app, 4), ArrayRecord([np.ones(2)]), 1)
    assert first(result.arrays).tolist() == [1.0, 1.0]
    assert result.evaluate_metrics_clientapp[1] == {"one": 1.0}


def test_an_app_that_cannot_evaluate_trains_all_the_same(caplog):
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = [first(message.content["arrays"]) + 1]
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    result = PushSum().start(LocalGrid(app, 4), zeros(), 3)
    assert first(result.arrays).tolist() == [3.0, 3.0, 3.0]
    assert "4 of 4 peers trained (peers 0, 1, 2, 3: cannot evaluate: No evaluate function registered" in caplog.text


def test_integers_are_neither_mixed_nor_noised():
    given = {
        "z": np.zeros((2, 2), np.float32),
        "count": np.array(0),
        "a": np.zeros(3, np.float16),
        "on": np.ones(2, bool),
    }
    app = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier=0.5)])
    seen = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        seen.append((context.node_config["partition-id"], arrays))
        arrays = arrays | {"count": np.asarray(arrays["count"] + 5 + context.node_config["partition-id"])}
        return Message(RecordDict({"arrays": ArrayRecord({n: Array(v) for n, v in arrays.items()})}), reply_to=message)

    start = ArrayRecord({name: Array(value) for name, value in given.items()})
    result = PushSum(fraction_evaluate=0.0).start(LocalGrid(app, 4), start, 3)
    for peer, arrays in seen[-4:]:
        assert list(arrays) == list(given)
        assert [value.dtype for value in arrays.values()] == [value.dtype for value in given.values()]
        assert arrays["count"] == 2 * (5 + peer)  # its own, of the two rounds before
        assert arrays["on"].all()
    assert result.arrays["count"].numpy() == 0
    assert result.arrays["z"].numpy().any()


# What is wrong, named.


def run_with(step, n_peers=3, start=None, **options):
    strategy = PushSum(fraction_evaluate=0.0)
    strategy.start(LocalGrid(client(step, **options), n_peers), start or zeros(), 2)
    return strategy


def answering(content):
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict(content), reply_to=message)

    return app


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (
            {},
            (
                "nodes.all-failed",
                "its app returned no model.*'arrays'",
            ),
        ),
        ({"m": MetricRecord({"loss": 1.0})}, ("nodes.all-failed", "answer has no ArrayRecord")),
        (
            {"a": ArrayRecord([np.ones(3)]), "b": ArrayRecord([np.ones(3)])},
            ("nodes.all-failed", "answer has 2 ArrayRecords and none named"),
        ),
        (
            {"arrays": ArrayRecord([np.ones(4)])},
            ("nodes.all-failed", r"other arrays.*'0' is float64 \(4,\) and must be float64 \(3,\)"),
        ),
        (
            {"arrays": ArrayRecord({"w": Array(np.ones(3))})},
            ("nodes.all-failed", "array '0' is missing and must be float64"),
        ),
        (
            {"arrays": ArrayRecord([np.ones(3), np.ones(1)])},
            ("nodes.all-failed", "array '1' is float64 .* and must be missing"),
        ),
        ({"arrays": ArrayRecord([np.ones(3, int)])}, ("nodes.all-failed", "array '0' is int64 .* and must be float64")),
    ],
)
def test_arrays_that_do_not_fit_are_named(content, refusal: tuple[str, ...]):
    with raises(RunError, *refusal) as error:
        PushSum(fraction_evaluate=0.0).start(LocalGrid(answering(content), 3), zeros(), 2)
    assert "\n" not in str(error.value)


def test_one_peer_with_another_model_is_named(caplog):
    def step(arrays, peer, server_round):
        return [np.ones(5)] if peer == 1 else [arrays[0] + 1]

    strategy = run_with(step)
    assert "2 of 3 peers trained (peer 1: its app returned other arrays" in caplog.text
    assert first(strategy.peer_arrays[0]).tolist() == [2.0, 2.0, 2.0]


def test_peers_with_unlike_models_refuse_shares(tmp_path):
    """As when one SuperNode has another version of the app: its share is refused by name, and nothing else happens."""
    grid = LocalGrid(client(sets_its_values_once), 2, folder=tmp_path)
    PushSum(name="x", fraction_evaluate=0.0).start(grid, zeros(), 1)
    first_state, _ = states(tmp_path, 2, "x")
    other = PeerState.begun("x", 1, {"1": np.zeros(3)}, founding=True, incarnation=2**63)
    frames, theirs = (run_frames("x", state.layout) for state in (first_state, other))
    first_state.shares.introduce(1, other.shares.incarnation)
    with raises(RunError, "frame.run"):
        receive(first_state, frames, frozen_share(other, first_state, theirs))
    assert first_state.w == states(tmp_path, 2, "x")[0].w


def test_two_nodes_that_claim_one_peer_are_named():
    grid = LocalGrid(client(sets_its_values_once), 3)
    grid.contexts[102].node_config["partition-id"] = 1
    with raises(RunError, "nodes.repeated-peer", "peer 1"):
        PushSum(patience=0.2).start(grid, zeros(), 1)


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"partition-id": 9}, ("flower.node-failed", "partition-id=9 must be 0 to 2")),
        ({"partition-id": "two"}, ("flower.node-failed", "partition-id='two' must be a whole number")),
        ({"num-partitions": 7}, ("nodes.partition-count", "num-partitions=7")),
        ({"epsilon": "much"}, ("flower.node-failed", "epsilon='much' of the node-config must be a number")),
        ({"epsilon": 1.0}, ("flower.node-failed", "epsilon=1.0 of the node-config needs clip_norm and noise")),
    ],
)
def test_a_wrong_node_config_is_named(config, refusal: tuple[str, ...]):
    grid = LocalGrid(client(sets_its_values_once), 3)
    grid.contexts[102].node_config.update(config)
    with raises(RunError, *refusal):
        PushSum(patience=0.2).start(grid, zeros(), 1)


def test_gossip_refuses_a_directed_graph_at_once():
    with raises(ScenarioError, "mixing.directed", "'directed-ring'"):
        Gossip(topology="directed-ring")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"topology": "dodecahedron"}, ("catalogue.unknown", "topology.name='dodecahedron'")),
        ({"fraction_train": 0.0}, ("flower.option", "fraction_train=0.0")),
        ({"fraction_evaluate": 1.5}, ("flower.option", "fraction_evaluate=1.5")),
        ({"topology": "ring", "topology_options": {"degree": 3}}, ("topology.unknown-option", "topology.degree")),
    ],
)
def test_wrong_options_are_refused_at_once(options, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal):
        PushSum(**options)


def test_an_app_without_the_mod_gets_a_remedy():
    app = ClientApp()
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    with raises(RunError, "flower.no-peer-mod", names=r"mods=\[PeerMod"):
        PushSum(patience=0.2).start(LocalGrid(app, 2), zeros(), 1)


def test_the_mod_without_our_strategy_says_so():
    grid = LocalGrid(client(sets_its_values_once), 2)
    (reply,) = grid.send_and_receive([Message(RecordDict({"arrays": zeros()}), 100, "train")])
    assert "comes from no strategy of flower_privdec" in reply.content["flower_privdec"]["flower_privdec"]


@pytest.mark.parametrize("strategy", [FedAvg, FedAvgM, FedAdam])
def test_the_mod_ends_a_run_of_flowers_strategies(strategy):
    with pytest.raises(InconsistentMessageReplies):
        strategy().start(LocalGrid(client(sets_its_values_once), 2), zeros(), num_rounds=2)


def test_the_mod_on_a_whole_app_answers_no_query(caplog):
    app = client(sets_its_values_once)
    app.query()(lambda message, context: Message(message.content, reply_to=message))
    (reply,) = LocalGrid(app, 1).send_and_receive(
        [Message(RecordDict({"asked": MetricRecord({"n": 1})}), 100, "query")]
    )
    assert "asked" not in reply.content
    assert "query message refused" in caplog.text


def test_a_strategy_of_flowers_before_ours_is_refused():
    with raises(ScenarioError, "flower.strategy-class", names="FedAvg stands before PushSum"):
        type("Both", (FedAvg, PushSum), {})
    assert issubclass(type("Ours", (PushSum, FedAvg), {}), PushSum)


def test_arrays_without_numbers_are_refused():
    with raises(ScenarioError, "flower.start", names="no numbers"):
        PushSum().start(LocalGrid(client(sets_its_values_once), 2), zeros(0), 1)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_mean_that_a_subclass_changes_is_told(factor, caplog):
    class Own(PushSum):
        def aggregate_train(self, server_round, replies):
            mean, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord([factor * value for value in mean.to_numpy_ndarrays()]), metrics

    Own().start(LocalGrid(client(sets_its_values_once), 2), zeros(), 2)
    assert caplog.text.count("Own.aggregate_train returns other arrays") == (factor != 1)


def test_if_all_nodes_fail_the_run_ends_with_reason():
    def step(arrays, peer, server_round):
        raise ValueError("the disk is on fire")

    with raises(RunError, "nodes.all-failed", "no peer could go on: peers 0, 1, 2: .*the disk is on fire"):
        run_with(step)


@pytest.mark.parametrize("start", [ArrayRecord([np.array([1, 2])]), ArrayRecord([np.zeros(2, complex)])])
def test_unmixable_initial_arrays_are_refused(start):
    with raises(RunError, "app.arrays"):
        run_with(sets_its_values_once, start=start)


def test_initial_arrays_that_are_not_finite_are_refused():
    with raises(RunError, "nodes.all-failed", "initial_arrays are not finite"):
        run_with(sets_its_values_once, start=ArrayRecord([np.array([1.0, np.nan])]))


def test_an_own_graph_must_join_all_peers():
    from flower_privdec.graph.topology import build_topology

    with raises(ScenarioError, "nodes.graph"):
        Gossip(topology=build_topology("ring", 5)).start(LocalGrid(client(sets_its_values_once), 3), zeros(), 1)


def test_failing_nodes_are_said_with_flowers_words():
    app = ClientApp()
    app.train()(failing)
    with raises(RunError, "flower.no-peer-mod", names="the disk is on fire"):
        PushSum(patience=0.2).start(LocalGrid(app, 2), zeros(), 1)
