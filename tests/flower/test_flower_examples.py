"""Examples and baselines that Flower publishes: each row of the table in docs/reference/flower.md names a test here.

The apps have the shapes of the originals, with tiny models and random data. Libraries that are not installed are stood
in for by what they exchange.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from raising import raises
from torch import nn
from torch.nn import functional

from flower_privdec.common.errors import RunError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum

pytestmark = pytest.mark.versions


def data_of(peer: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight examples of two classes, which differ in their mean."""
    drawn = torch.Generator().manual_seed(peer)
    labels = torch.arange(8) % 2
    ones = torch.ones(8, *shape)
    noise = torch.randn(8, *shape, generator=drawn)
    return noise / 8 + ones * (labels * 2.0 - 1).reshape(-1, *[1] * len(shape)), labels


def learning(
    model: Callable[[], nn.Module],
    *shape: int,
    mods: Iterable[Any],
    part: Callable[[nn.Module], nn.Module] = lambda m: m,
) -> ClientApp:
    """Return an app that trains a part of a torch model by a few steps; what is not of the part is its frozen base."""
    app = ClientApp(mods=list(mods))

    def loaded(message: Message) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        whole = model()
        trained = part(whole)
        trained.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        return whole, trained

    @app.train()
    def train(message: Message, context: Context) -> Message:
        whole, trained = loaded(message)
        inputs, labels = data_of(int(context.node_config["partition-id"]), *shape)
        optimizer = torch.optim.SGD([each for each in trained.parameters() if each.requires_grad], lr=0.1)
        for _ in range(8):
            optimizer.zero_grad()
            functional.cross_entropy(whole(inputs), labels).backward()
            optimizer.step()
        answer = {name: trained.state_dict()[name] for name in message.content["arrays"]}
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"arrays": ArrayRecord(answer), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        whole, _ = loaded(message)
        inputs, labels = data_of(int(context.node_config["partition-id"]), *shape)
        right = float((whole.eval()(inputs).argmax(1) == labels).float().mean())
        return Message(RecordDict({"metrics": MetricRecord({"right": right, "num-examples": 8})}), reply_to=message)

    return app


def right_after(app: ClientApp, start: ArrayRecord, rounds: int = 3) -> float:
    result = PushSum("complete").start(LocalGrid(app, 3), start, num_rounds=rounds)
    assert list(result.arrays) == list(start)
    right = result.evaluate_metrics_clientapp[rounds]["right"]
    assert isinstance(right, float)
    return right


# --- what works ---


def image_model() -> nn.Module:
    """Return a small DenseNet in kind: convolutions, and batch normalization with its counter."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    return nn.Sequential(*layers)


def test_image_models_with_batch_normalization_work():
    start = ArrayRecord(image_model().state_dict())
    assert right_after(learning(image_model, 3, 8, 8, mods=[PeerMod()]), start) == 1


class Audio(nn.Module):
    """A frozen encoder of sequences, and a classifier: in whisper-federated-finetuning only the second travels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GELU())
        self.classifier = nn.Linear(8, 2)
        self.encoder.requires_grad_(False)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(self.encoder(waves).mean(-1))
        assert isinstance(logits, torch.Tensor)
        return logits


def test_a_frozen_encoder_stays_out_of_the_record():
    app = learning(Audio, 4, 16, mods=[PeerMod()], part=lambda whole: whole.classifier)  # type: ignore[arg-type,return-value]
    start = ArrayRecord(Audio().classifier.state_dict())
    assert sorted(start) == ["bias", "weight"]
    assert right_after(app, start) == 1


class Adapted(nn.Module):
    """A linear layer W with a LoRA adapter: W + B A."""

    def __init__(self, n_in: int, n_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, n_in) / n_in**0.5, requires_grad=False)
        self.lora_B = nn.Parameter(torch.zeros(n_out, rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raised = self.base(inputs) + inputs @ self.lora_A.T @ self.lora_B.T
        assert isinstance(raised, torch.Tensor)
        return raised


def language_model() -> nn.Module:
    return nn.Sequential(Adapted(6, 8), nn.Tanh(), Adapted(8, 2))


def adapters(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: value for name, value in model.state_dict().items() if "lora" in name})


@pytest.mark.parametrize("privacy", [{}, {"clip_norm": 1.0, "noise_multiplier": 1e-3, "share_metrics": True}], ids=str)
def test_a_frozen_factor_of_lora_is_not_touched(privacy):
    torch.manual_seed(1)
    start = adapters(language_model())
    app = learning(language_model, 6, mods=[PeerMod(local="*lora_A", **privacy)])
    assert right_after(app, start) == 1
    result = PushSum("complete").start(LocalGrid(app, 3), start, num_rounds=1)
    for name, array in result.arrays.items():
        assert np.array_equal(array.numpy(), start[name].numpy()) is ("lora_A" in name)


def test_a_logging_mod_works_on_either_side():
    logged: dict[str, list[tuple[int, bool]]] = {"outside": [], "inside": []}

    def logging_as(place: str) -> Callable[..., Message]:
        def mod(message: Message, context: Context, app: Callable[..., Message]) -> Message:
            server_round = message.content["config"]["server-round"]
            reply = app(message, context)
            if reply.has_content():
                logged[place].append((server_round, "metrics" in reply.content.metric_records))
            return reply

        return mod

    mods = [logging_as("outside"), PeerMod(), logging_as("inside")]
    right_after(learning(lambda: nn.Linear(4, 2), 4, mods=mods), ArrayRecord(nn.Linear(4, 2).state_dict()), rounds=1)
    assert logged["inside"] == [(1, True)] * 6  # three peers train and evaluate
    assert set(logged["inside"]) < set(logged["outside"])


# --- Flower's clients ---


class Adding(NumPyClient):
    def fit(self, parameters, config):
        return [value + 1 for value in parameters], 5, {"train_loss": 1.0}

    def evaluate(self, parameters, config):
        return 0.5, 5, {"accuracy": 1.0}


def legacy_app(*mods: Any) -> ClientApp:
    return ClientApp(client_fn=lambda context: Adding().to_client(), mods=list(mods))


def test_an_aggregation_example_works_without_its_mods():
    privacy = {"clip_norm": 10.0, "noise_multiplier": 1e-6, "seal": True, "share_metrics": True}
    strategy = PushSum("complete")
    result = strategy.start(LocalGrid(legacy_app(PeerMod(**privacy)), 4), ArrayRecord([np.zeros(3)]), num_rounds=2)
    assert result.arrays["0"].numpy() == pytest.approx(2, abs=1e-3)
    assert dict(result.evaluate_metrics_clientapp[2]) == {"accuracy": 1.0, "loss": 0.5}
    assert all(report.sealed and report.spent for report in strategy.reports.values())


@pytest.mark.parametrize("mod", [secaggplus_mod, fixedclipping_mod], ids=["secure aggregation", "clipping"])
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_flowers_mods_are_named_as_what_to_remove(mod, first):
    mods = [mod, PeerMod()] if first else [PeerMod(), mod]
    code = "flower.no-peer-mod" if first else "nodes.all-failed"
    with raises(RunError, code, names="take Flower's clipping and secure aggregation mods out"):
        PushSum().start(LocalGrid(legacy_app(*mods), 4), ArrayRecord([np.zeros(3)]), num_rounds=1)


# --- what is refused ---


def refused(reply: Message) -> bool:
    return set(reply.content) == {"flower_privdec"}


def test_trees_of_a_loop_are_refused(caplog):
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise AssertionError("no peer trains for a message that is not a strategy's")

    grid = LocalGrid(app, 2)
    content = RecordDict({"gmodel": ConfigRecord({"model": json.dumps({"oblivious_trees": []}).encode()})})
    replies = grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()])
    assert len(replies) == 2
    assert all(map(refused, replies))
    assert "start PushSum or Gossip" in caplog.text


def test_survival_times_are_not_sent_past_the_mod():
    app = ClientApp(mods=[PeerMod()])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        times = ArrayRecord({"T": Array(np.array([1.5, 2.5])), "E": Array(np.array([1, 0]))})
        return Message(RecordDict({"survival-data": times}), reply_to=message)

    grid = LocalGrid(app, 2)
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
    assert all(map(refused, replies))
