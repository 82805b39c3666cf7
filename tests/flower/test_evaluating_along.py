"""Evaluations that go in the message of the next round: the same run as with messages of their own, in half as many."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from routing_peers import request_in

from flower_privdec.flower import Gossip, LocalGrid, PeerMod, PushSum

ROUNDS = 4
PEERS = 4


class Watching(PushSum):
    """Reads each round's evaluation before the next begins, so that it has messages of its own."""

    def aggregate_evaluate(self, *args: Any) -> MetricRecord | None:
        return super().aggregate_evaluate(*args)


class Counting(LocalGrid):
    """Counts the messages of each kind, and keeps the answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kinds = Counter[str]()
        self.answers: list[Message] = []

    def _deliver(self, message: Message) -> Message:
        self.kinds[request_in(message).kind] += 1
        answer = super()._deliver(message)
        self.answers.append(answer)
        return answer


def answered(message: Message, context: Context, name: str) -> MetricRecord:
    """Return metrics that say what a function was given."""
    (array,) = message.content["arrays"].to_numpy_ndarrays()
    config = message.content["config"]
    given = {name: float(array.sum()), "server-round": config["server-round"], "key": config.get("key", 0)}
    return MetricRecord({**given, "num-examples": 1 + int(context.node_config["partition-id"])})


def moving_app(mods: list[Any], function_mods: list[Any] | None = None) -> ClientApp:
    """Return an app whose peer i moves half of the way to i."""
    app = ClientApp(mods=mods)

    @app.train(mods=function_mods)
    def train(message: Message, context: Context) -> Message:
        assert message.metadata.message_type == "train"
        (array,) = message.content["arrays"].to_numpy_ndarrays()
        moved = ArrayRecord([(array + context.node_config["partition-id"]) / 2])
        metrics = answered(message, context, "trained")
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    @app.evaluate(mods=function_mods)
    def evaluate(message: Message, context: Context) -> Message:
        assert message.metadata.message_type == "evaluate"
        assert set(message.content) == {"arrays", "config"}
        return Message(RecordDict({"metrics": answered(message, context, "evaluated")}), reply_to=message)

    return app


def legacy_app(mods: list[Any]) -> ClientApp:
    class Moving(NumPyClient):
        def __init__(self, peer: int) -> None:
            self.peer = peer

        def fit(self, parameters: Any, config: Any) -> Any:
            return [(parameters[0] + self.peer) / 2], 1 + self.peer, {"round": config["server-round"]}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            return float(parameters[0].sum()), 1 + self.peer, {"round": config["server-round"]}

    return ClientApp(client_fn=lambda context: Moving(int(context.node_config["partition-id"])).to_client(), mods=mods)


def start(strategy: PushSum, app: ClientApp, rounds: int = ROUNDS, **options: Any) -> tuple[Result, Counter[str]]:
    grid = Counting(app, PEERS, folder=options.pop("folder", None))
    initial = ArrayRecord([np.ones(3, np.float32)])
    configs = {"train_config": ConfigRecord({"key": 1}), "evaluate_config": ConfigRecord({"key": 2})}
    return strategy.start(grid, initial, rounds, **configs, **options), grid.kinds


def assert_alike(one: dict[int, MetricRecord], other: dict[int, MetricRecord]) -> None:
    """Compare metrics, whose averages are taken in another order."""
    assert one.keys() == other.keys()
    for at, metrics in one.items():
        assert dict(metrics) == pytest.approx(dict(other[at]), rel=1e-12)


APPS = {
    "mods of the app": lambda: moving_app([PeerMod()]),
    "mods of functions": lambda: moving_app([], [PeerMod()]),
    "a client_fn": lambda: legacy_app([PeerMod()]),
    "sealed": lambda: moving_app([PeerMod(seal=True)]),
    "counted": lambda: moving_app([PeerMod(examples=2)]),
}


@pytest.mark.versions
@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_evaluating_along_changes_nothing_but_messages(app, fraction):
    options: dict[str, Any] = {"fraction_evaluate": fraction, "min_evaluate_nodes": 1}
    along, few = start(PushSum(**options), APPS[app]())
    apart, many = start(Watching(**options), APPS[app]())

    chosen = int(PEERS * fraction)
    assert (few["round"], few["evaluate"]) == (PEERS * ROUNDS, chosen)
    assert (many["round"], many["evaluate"]) == (PEERS * ROUNDS, chosen * ROUNDS)
    assert set(along.evaluate_metrics_clientapp) == set(range(1, ROUNDS + 1))
    assert_alike(along.evaluate_metrics_clientapp, apart.evaluate_metrics_clientapp)
    assert along.train_metrics_clientapp == apart.train_metrics_clientapp
    assert along.arrays["0"].numpy().tobytes() == apart.arrays["0"].numpy().tobytes()


def test_a_named_run_goes_on_with_its_evaluations(tmp_path):
    found = []
    for kind in (PushSum, Watching):
        folder = tmp_path / kind.__name__
        start(kind(name="n"), moving_app([PeerMod()]), 2, folder=folder)
        result, _ = start(kind(name="n"), moving_app([PeerMod()]), ROUNDS, folder=folder)
        assert set(result.evaluate_metrics_clientapp) == {3, 4}
        found.append(result.evaluate_metrics_clientapp)
    assert_alike(*found)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (PushSum(fraction_train=0.5), {}),
        (PushSum(), {"evaluate_fn": lambda server_round, arrays: None}),
        (Watching(), {}),
    ],
)
def test_what_is_watched_between_rounds_is_evaluated_apart(strategy, options):
    result, kinds = start(strategy, moving_app([PeerMod()]), **options)
    assert kinds["evaluate"] == PEERS * ROUNDS
    assert set(result.evaluate_metrics_clientapp) == set(range(1, ROUNDS + 1))


def test_an_evaluation_that_fails_keeps_nobody_from_training(caplog):
    app = moving_app([PeerMod()])

    @app.evaluate("other")
    def other(message: Message, context: Context) -> Message:
        raise AssertionError

    app._registered_funcs["evaluate.default"] = app._registered_funcs.pop("evaluate.other")
    caplog.set_level("INFO")
    result, kinds = start(Gossip("ring"), app)
    assert "4 of 4 peers trained (peers 0, 1, 2, 3: cannot evaluate: its app raised AssertionError" in caplog.text
    assert set(result.train_metrics_clientapp) == set(range(1, ROUNDS + 1))
    assert not result.evaluate_metrics_clientapp
    assert kinds["evaluate"] == PEERS


def test_metrics_that_stay_are_noted_by_their_rounds(tmp_path: Path):
    grid = Counting(moving_app([PeerMod(clip_norm=1.0, noise_multiplier=1.0)]), 2, folder=tmp_path)
    result = PushSum("complete").start(grid, ArrayRecord([np.ones(3, np.float32)]), 3)
    assert not result.evaluate_metrics_clientapp
    assert not result.train_metrics_clientapp
    assert not any(answer.content.metric_records for answer in grid.answers)

    lines = [json.loads(line) for line in (tmp_path / "peer-1" / "metrics.jsonl").read_text().splitlines()]
    noted = [(line["of"], line["round"], line["server-round"]) for line in lines]
    assert noted == [(kind, at, at) for at in (1, 2, 3) for kind in ("round", "evaluate")]
    assert all(("evaluated" in line) == (line["of"] == "evaluate") for line in lines)
