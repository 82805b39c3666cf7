"""Personal layers: arrays that `PeerMod(local=...)` keeps in their peer, and what ε says beside them.

Peer i of the app moves its body half of the way to i, and adds SECRET + i to its head, so that a head is told from
every other number wherever it appears.
"""

from __future__ import annotations

import json
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from networked import devices, finish
from raising import raises
from safetensors.numpy import load_file

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import DualAveraging, FedDeper, Gossip, LocalGrid, PeerMod, PushSum
from flower_privdec.flower.launch.guard import Guard, Policy
from flower_privdec.flower.mods.peer_messages import EVALUATE, INITIAL, JOIN, MODEL, SAYS, PeerRequest, record_of
from flower_privdec.flower.mods.peer_mod import append_metrics
from flower_privdec.flower.serverless import ClientAppRunner, InitialArrays, app_peer
from flower_privdec.peer.app_state import load_state, names_matched, state_path
from flower_privdec.scenario.loading import parse_app_scenario

SECRET = 123456.78125  # exact in float32
HEAD = "head.weight"
NAMES = ("body.weight", HEAD, "head.count")


def initial() -> ArrayRecord:
    arrays = {"body.weight": np.zeros(3, np.float32), HEAD: np.zeros(2, np.float32), "head.count": np.zeros(1, int)}
    return record_of(arrays)


def step(arrays: dict[str, np.ndarray], peer: int) -> dict[str, np.ndarray]:
    body = arrays["body.weight"]
    return {
        "body.weight": body + 0.5 * (peer - body),
        HEAD: arrays[HEAD] + np.float32(SECRET + peer),
        "head.count": arrays["head.count"] + 1,
    }


def learning(*mods: PeerMod, change: Any = step) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = {name: array.numpy() for name, array in message.content["arrays"].items()}
        trained = record_of(change(given, context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        given = message.content["arrays"]
        seen = {"head": float(given[HEAD].numpy()[0]), "peer": context.node_config["partition-id"], "num-examples": 1}
        return Message(RecordDict({"metrics": MetricRecord(seen)}), reply_to=message)

    return app


def heads(folder: Path, run: str = "run", peers: int = 4) -> list[float]:
    """Return what is left of each peer's head on disk if what it began with is taken away."""
    found = []
    for peer in range(peers):
        saved = load_state(state_path(folder / f"peer-{peer}", run))
        assert saved is not None
        found.append(float(saved.state.unmixed[HEAD][0]))
    return found


class Watched(LocalGrid):
    """A grid that keeps every byte that nodes send."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[bytes] = []

    def pull_messages(self, *args: Any, **options: Any) -> Any:
        replies = list(super().pull_messages(*args, **options))
        for reply in replies:
            if reply.has_error():
                continue
            for record in reply.content.array_records.values():
                self.sent += [array.data for array in record.values()]
            self.sent.append(repr(dict(reply.content.config_records)).encode())
        return replies

    def shows_a_head(self, rounds: int, peers: int = 4) -> bool:
        sums = [(SECRET + peer) * count for peer in range(peers) for count in range(1, rounds + 1)]
        marks = [kind(value).tobytes() for value in sums for kind in (np.float32, np.float64)]
        everything = b"\0".join(self.sent)
        return any(mark in everything for mark in marks)


@pytest.mark.parametrize("local", [(), "head.*", [HEAD], ["head.w*", "*.count"]], ids=str)
@pytest.mark.parametrize("strategy", [PushSum, Gossip])
def test_local_arrays_never_leave(strategy, local, tmp_path):
    grid = Watched(learning(PeerMod(local=local)), 4, folder=tmp_path)
    started = strategy("complete", name="run")
    arrays = started.start(grid, initial(), num_rounds=3, evaluate_fn=lambda *given: None).arrays
    assert grid.shows_a_head(3) is not bool(local)
    assert list(arrays) == list(NAMES)
    if local:
        assert arrays[HEAD].numpy().tolist() == [0, 0]
        assert heads(tmp_path) == [3 * np.float32(SECRET + peer) for peer in range(4)]
    assert arrays["body.weight"].numpy() == pytest.approx(1.5 * (1 - 0.5**3))


def sees_its_own(metrics: list[RecordDict], key: str) -> MetricRecord:
    """Return how many peers evaluated a model with their own head in it."""
    records = [next(iter(content.metric_records.values())) for content in metrics]
    own = [record["head"] == float(np.float32(SECRET + record["peer"])) for record in records]
    return MetricRecord({"own": sum(own), "all": len(own)})


@pytest.mark.parametrize(
    "strategy",
    [
        PushSum,
        partial(Gossip, "ring"),
        partial(FedDeper, "server"),
        partial(DualAveraging, "ring", regularizer={"kind": "none"}, schedule="convex", gamma=1.0),
    ],
    ids=["push-sum", "gossip", "a server's model", "dual averaging"],
)
def test_each_peer_evaluates_with_its_own_head(strategy):
    grid = LocalGrid(learning(PeerMod(local="head.*")), 4)
    result = strategy(evaluate_metrics_aggr_fn=sees_its_own).start(grid, initial(), num_rounds=1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"own": 4, "all": 4}


def test_deployed_peers_go_on_with_their_heads(tmp_path):
    config = {peer: {"folder": str(tmp_path / "nodes")} for peer in range(4)}
    for rounds in (2, 4):
        grid = LocalGrid(learning(PeerMod(local="head.*")), 4, config=config)
        PushSum("complete", name="run").start(grid, initial(), num_rounds=rounds)
        assert heads(tmp_path / "nodes") == pytest.approx([rounds * (SECRET + peer) for peer in range(4)])


def test_the_shared_part_is_clipped_by_itself(tmp_path):
    def tiny(arrays, peer):
        moved = step(arrays, peer)
        return {**moved, "body.weight": arrays["body.weight"] + np.float32(0.25)}

    mod = PeerMod(local="head.*", clip_norm=0.5, noise_multiplier=1e-6, delta=1e-3)
    strategy = PushSum("complete", name="run")
    arrays = strategy.start(LocalGrid(learning(mod, change=tiny), 4, folder=tmp_path), initial(), num_rounds=2).arrays

    # The norm of the body's update is 0.43, so that nothing is clipped; the head's is 174,594.
    assert arrays["body.weight"].numpy() == pytest.approx(0.5, abs=1e-4)
    assert heads(tmp_path) == [2 * np.float32(SECRET + peer) for peer in range(4)]
    for report in strategy.reports.values():
        assert report.spent.endswith("head.weight, head.count never leave the peer, and no noise covers them")
    kept = [json.loads(line) for line in (tmp_path / "peer-1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["head"] for line in kept if line["of"] == "evaluate"] == pytest.approx([SECRET + 1, 2 * (SECRET + 1)])


def test_metrics_that_cannot_be_written_stop_nothing(tmp_path, caplog):
    (tmp_path / "peer-1" / "metrics.jsonl").mkdir(parents=True)
    grid = LocalGrid(learning(PeerMod(local="head.*", share_metrics=False)), 4, folder=tmp_path)
    PushSum("complete", name="run").start(grid, initial(), num_rounds=2)
    assert heads(tmp_path) == [2 * np.float32(SECRET + peer) for peer in range(4)]
    assert (tmp_path / "peer-0" / "metrics.jsonl").read_text().count("\n") >= 2
    assert "metrics.jsonl cannot be written (Is a directory)" in caplog.text


def test_a_full_disk_keeps_whole_lines_of_metrics(tmp_path, caplog):
    append_metrics(tmp_path, ["first\n"])
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited[1]))  # as a disk with room for four more bytes
    try:
        append_metrics(tmp_path, ["second\n"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "metrics.jsonl cannot be written (No space left on device)" in caplog.text
    append_metrics(tmp_path, ["third\n"])
    assert (tmp_path / "metrics.jsonl").read_text() == "first\nthird\n"


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_head_that_is_not_finite_is_not_kept(value, tmp_path, caplog):
    def broken(arrays, peer):
        moved = step(arrays, peer)
        return {**moved, HEAD: np.full(2, value)} if peer == 1 else moved

    grid = LocalGrid(learning(PeerMod(local="head.*"), change=broken), 4, folder=tmp_path)
    PushSum("complete", name="run").start(grid, initial(), num_rounds=2)
    assert heads(tmp_path)[1] == 0
    assert "'head.weight' is not finite, so its update counts as zero" in caplog.text


# --- patterns ---


@pytest.mark.parametrize(
    ("local", "named"),
    [
        ("hed.*", "'hed.\\*'.*body.weight, head.weight, head.count"),
        (["head.*", "Head.*"], "'Head.\\*'"),
        ("*", "'\\*'"),
        (["body*", "*weight"], "body.weight"),
    ],
    ids=str,
)
def test_patterns_of_no_or_all_arrays_are_refused(local, named, tmp_path):
    grid = LocalGrid(learning(PeerMod(local=local, clip_norm=1.0, noise_multiplier=1.0)), 4, folder=tmp_path)
    with raises(RunError, "app.local", names=named):
        PushSum().start(grid, initial(), num_rounds=1)
    assert not list(tmp_path.glob("peer-*/peer-updates.jsonl"))


@pytest.mark.parametrize("local", ["", [""], 3, [3], b"head", {"head": 1}], ids=repr)
def test_what_is_no_pattern_is_refused(local):
    with raises(ScenarioError, "app.local", names="local="):
        PeerMod(local=local)


def test_peers_that_keep_other_arrays_are_refused(tmp_path):
    mods = {True: PeerMod(local="head.*"), False: PeerMod()}

    def either(message, context):
        app = learning(mods[context.node_config["partition-id"] == 2])
        return app(message, context)

    with raises(RunError, "nodes.local", names="SuperNode 102.*head"):
        PushSum().start(LocalGrid(either, 4, folder=tmp_path), initial(), num_rounds=1)


def test_renamed_arrays_get_a_server_no_head(tmp_path):
    grid = LocalGrid(learning(PeerMod(local="head.*")), 2, folder=tmp_path)
    renamed = record_of({"body.weight": np.zeros(3), "top.weight": np.zeros(2)})
    request = PeerRequest(JOIN, run="run", peer=0, folder=str(tmp_path), founding=True)
    content = RecordDict({SAYS: request.record(), INITIAL: renamed})
    [reply] = grid.send_and_receive([Message(content, 100, "train")])
    assert "matches none" in reply.error.reason
    assert not state_path(tmp_path / "peer-0", "run").exists()


def test_a_server_has_no_other_model_evaluated(tmp_path):
    grid = LocalGrid(learning(PeerMod(local="head.*")), 4, folder=tmp_path)
    PushSum("complete", name="run").start(grid, initial(), num_rounds=1)
    other = record_of({"body.weight": np.zeros(3, np.float32)})
    cut = record_of({**{name: array.numpy() for name, array in initial().items()}, HEAD: np.zeros(3, np.float32)})
    for arrays in (other, cut):
        request = PeerRequest(EVALUATE, run="run", peer=0, folder=str(tmp_path))
        [reply] = grid.send_and_receive([Message(RecordDict({SAYS: request.record(), MODEL: arrays}), 100, "evaluate")])
        assert "the model to evaluate is another than peer 0's: array 'head.weight'" in reply.error.reason


def test_a_name_with_brackets_means_itself():
    """As JAX writes names: a pattern would read the brackets as a choice of characters."""
    names = ["['body']", "['head']", "layers[0].w", "layers0.w", "layers1.w"]
    assert names_matched(names, ["['head']", "layers[0].w"]) == ("['head']", "layers[0].w")
    assert names_matched(names, ["layers[01].w"]) == ("layers0.w", "layers1.w")


def test_a_model_without_numbers_is_refused(tmp_path):
    empty = record_of({"body.weight": np.zeros((0, 3), np.float32), "head.count": np.zeros(1, int)})
    with raises(RunError, "app.arrays", names="body.weight.*have no numbers"):
        PushSum().start(LocalGrid(learning(PeerMod()), 2, folder=tmp_path), empty, num_rounds=1)


def test_a_run_keeps_its_local_arrays(tmp_path):
    PushSum(name="run").start(LocalGrid(learning(PeerMod()), 4, folder=tmp_path), initial(), num_rounds=1)
    with raises(RunError, "flower.node-failed", names="head.weight.*another name"):
        grid = LocalGrid(learning(PeerMod(local="head.*")), 4, folder=tmp_path)
        PushSum(name="run").start(grid, initial(), num_rounds=2)


@pytest.mark.parametrize(("value", "kept"), [("head.*", True), ("", False)])
def test_the_run_config_says_what_is_local(value, kept):
    app = learning(PeerMod(local="run-config:personal"))
    arrays = PushSum("complete").start(LocalGrid(app, 4, run_config={"personal": value}), initial(), 1).arrays
    assert bool(arrays[HEAD].numpy()[0] == 0) is kept
    with raises(RunError, "flower.node-failed", names="run-config:KEY"):
        PushSum().start(LocalGrid(app, 4, run_config={"personal": 3}), initial(), 1)


# --- other ways to run an app ---


class HeadClient(NumPyClient):
    def __init__(self, peer: int) -> None:
        self.peer = peer

    def fit(self, parameters, config):
        return list(step(dict(zip(NAMES, parameters, strict=True)), self.peer).values()), 1, {}

    def evaluate(self, parameters, config):
        return 0.0, 1, {"head": float(parameters[1][0]), "peer": self.peer}


@pytest.mark.versions
def test_a_client_fn_has_personal_layers():
    app = ClientApp(
        client_fn=lambda context: HeadClient(int(context.node_config["partition-id"])).to_client(),
        mods=[PeerMod(local="head.*")],
    )
    strategy = PushSum("complete", evaluate_metrics_aggr_fn=sees_its_own)
    result = strategy.start(LocalGrid(app, 4), initial(), num_rounds=1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"own": 4, "all": 4}


class OwnHeadClient(HeadClient):
    """Keeps its head by itself, as the clients of FedPer and FedRep in Flower's baselines do: it returns its body."""

    def fit(self, parameters, config):
        return [parameters[0] + 1], 1, {}

    def evaluate(self, parameters, config):
        return 0.0, 1, {}


@pytest.mark.versions
def test_clients_that_return_a_body_are_told_more():
    app = ClientApp(client_fn=lambda context: OwnHeadClient(0).to_client(), mods=[PeerMod()])
    with raises(RunError, "nodes.all-failed", names="1 for 3 .*ArrayRecord of only"):
        PushSum().start(LocalGrid(app, 4), initial(), num_rounds=1)
    body = ArrayRecord({"body.weight": initial()["body.weight"]})
    assert PushSum().start(LocalGrid(app, 4), body, num_rounds=2).arrays["body.weight"].numpy().tolist() == [2, 2, 2]


@pytest.mark.versions
def test_a_guarded_node_keeps_what_its_owner_says(tmp_path):
    def guard_of(peer: int) -> Guard:
        numbers = {"epsilon": 1e9, "delta": 1e-5, "clip_norm": 10.0, "noise_multiplier": 1e-3, "apps": "any"}
        policy = Policy(folder=str(tmp_path / f"device-{peer}"), local=["head.*"], **numbers)
        return Guard(policy, lambda: learning(PeerMod(local="head.*")))

    guards = [guard_of(peer) for peer in range(4)]

    def guarded(message, context):
        peer = context.node_config["partition-id"]
        context.node_config.pop("folder", None)
        return guards[peer](message, context)

    PushSum("complete", name="run").start(LocalGrid(guarded, 4, config={}), initial(), num_rounds=3)
    for peer in range(4):
        saved = load_state(state_path(tmp_path / f"device-{peer}" / f"peer-{peer}", "run"))
        assert saved is not None
        assert saved.state.unmixed[HEAD] == pytest.approx(3 * (SECRET + peer))


SERVERLESS = """
name: run
n_peers: 2
rounds: 2
topology: {name: complete}
privacy: none
local: [head.*]
network: {mode: synchronous}
"""


def test_a_serverless_peer_keeps_its_head(tmp_path):
    scenario = parse_app_scenario(SERVERLESS)
    arrays = {name: array.numpy() for name, array in initial().items()}
    begun = InitialArrays(arrays, local=scenario.local)
    assert begun.digest != replace(begun, local=()).digest  # peers that differ refuse each other
    places = devices(scenario, tmp_path, insecure_seeds=False)
    peers = []
    for place in places:
        runner = ClientAppRunner(learning(), scenario, begun, place.peer, place.folder)
        peers.append(app_peer(scenario, place, begun, runner.train, runner.evaluate))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(finish, peers))
    models = [load_file(place.folder / "model.safetensors") for place in places]
    assert [model[HEAD][0] for model in models] == pytest.approx([2 * SECRET, 2 * (SECRET + 1)])
    assert models[0]["body.weight"] == pytest.approx(models[1]["body.weight"])
