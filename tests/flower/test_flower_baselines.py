"""Baselines that Flower publishes: each has a NumPyClient here that keeps, reads and returns what the original does.

Their arithmetic is a step in place of a network's training. What they reach under `PushSum` on a complete graph is held
against FedAvg's weighted mean of the same clients, computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from raising import raises

from flower_privdec.common.errors import RunError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum

pytestmark = pytest.mark.versions

PEERS = 4
ROUNDS = 3
BODY = np.arange(3, dtype=np.float32)
HEAD = np.ones(2, dtype=np.float32)
Arrays = list[np.ndarray]


class Client(NumPyClient):
    """A client of FedAvg, which moves both arrays halfway to its own number.

    Args:
        context: what its client_fn is given.
    """

    def __init__(self, context: Context) -> None:
        self.state = context.state
        self.peer = int(context.node_config["partition-id"])

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        return [self.step(value) for value in parameters], 1, {}

    def evaluate(self, parameters: Arrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        return 0.0, 1, {"kept": self.kept(), "peer": self.peer}

    def step(self, value: np.ndarray) -> np.ndarray:
        return value + np.float32(0.5) * (np.float32(self.peer) - value)

    def kept(self) -> float:
        """Return a number of what the client keeps for itself."""
        return 0.0


class FedProxClient(Client):
    """Reads the round in its config, and is held back by the model that it was given."""

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        strength = np.float32(0.1 * config["current_round"])
        held = [value + (self.step(value) - value) / (1 + strength) for value in parameters]
        return held, 1, {"is_straggler": False}


class HeadKeepingClient(Client):
    """FedBN's and FedRep's: it is given the body, and keeps its own layers in its context."""

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        head = HEAD
        if "own" in self.state.array_records:
            head = self.state.array_records["own"]["head"].numpy()
        (body,) = parameters
        self.state.array_records["own"] = ArrayRecord({"head": Array(self.step(head))})
        return [self.step(body) + head.sum()], 1, {}

    def kept(self) -> float:
        return float(self.state.array_records["own"]["head"].numpy()[0])


class SavingClient(Client):
    """FedPer's and MOON's: it saves its model to a file of its own, and trains away from the previous one."""

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        previous = parameters
        if self.path.exists():
            previous = list(np.load(self.path).values())
        trained = [
            self.step(value) + np.float32(0.1) * (value - before)
            for value, before in zip(parameters, previous, strict=True)
        ]
        np.savez(self.path, *trained)
        return trained, 1, {}

    def kept(self) -> float:
        return float(np.load(self.path)["arr_1"][0])

    @property
    def path(self) -> Path:
        return Path(f"previous-{self.peer}.npz")


class MixtureClient(Client):
    """FedPFT's: it answers with Gaussian mixtures of its features, of no examples."""

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        return [np.zeros((1, 3)), np.ones((1, 3)), np.ones(1)], 0, {}


class WithRound(PushSum):
    """The subclass of docs/reference/flower.md, for a client that reads the round."""

    def configure_train(self, server_round, arrays, config, grid):
        config["current_round"] = server_round
        return super().configure_train(server_round, arrays, config, grid)


def fedavg(client: Callable[[Context], Client], start: Arrays) -> tuple[Arrays, list[float]]:
    """Return the model of FedAvg with the same clients, and what each has kept."""
    contexts = [Context(1, peer, {"partition-id": peer}, RecordDict(), {}) for peer in range(PEERS)]
    model = start
    for number in range(1, ROUNDS + 1):
        answers = [client(context).fit([*model], {"current_round": number})[0] for context in contexts]
        model = [np.mean(values, axis=0, dtype=np.float64) for values in zip(*answers, strict=True)]
        model = [value.astype(np.float32) for value in model]
    return model, [client(context).kept() for context in contexts]


def app_of(client: Callable[[Context], Client], **mod: Any) -> ClientApp:
    return ClientApp(client_fn=lambda context: client(context).to_client(), mods=[PeerMod(**mod)])


@pytest.mark.parametrize(
    ("client", "names"),
    [
        (Client, ["body", "head"]),
        (FedProxClient, ["body", "head"]),
        (HeadKeepingClient, ["body"]),
        (SavingClient, ["body", "head"]),
    ],
)
def test_a_baselines_client_reaches_fedavgs_mean(client, names, tmp_path, monkeypatch):
    start = ArrayRecord({name: Array({"body": BODY, "head": HEAD}[name]) for name in names})
    kept: dict[int, float] = {}

    def note(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        for content in contents:
            (metrics,) = content.metric_records.values()
            kept[int(metrics["peer"])] = float(metrics["kept"])  # type: ignore[arg-type]
        return MetricRecord()

    (tmp_path / "fedavg").mkdir()
    monkeypatch.chdir(tmp_path / "fedavg")
    model, expected = fedavg(client, [value.numpy() for value in start.values()])

    (tmp_path / "peers").mkdir()
    monkeypatch.chdir(tmp_path / "peers")
    strategy = WithRound("complete", evaluate_metrics_aggr_fn=note)
    result = strategy.start(LocalGrid(app_of(client), PEERS), start, ROUNDS)
    for ours, theirs in zip(result.arrays.to_numpy_ndarrays(), model, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert kept == pytest.approx(dict(enumerate(expected)))


def test_answers_of_other_arrays_are_refused():
    start = ArrayRecord({"body": Array(BODY), "head": Array(HEAD)})
    with raises(RunError, "nodes.all-failed", names="3 for 2"):
        WithRound("complete").start(LocalGrid(app_of(MixtureClient), PEERS), start, ROUNDS)
