"""Apps of the shapes that Flower publishes, before (FedAvg) and after (PushSum and PeerMod), in process.

The subclasses override hooks as users of Flower's strategies do; each runs over FedAvg too, so that what it is given
by ours is compared with what it is used to.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedProx,
    Result,
    Strategy,
)
from paths import ROOT
from raising import raises
from routing_peers import request_in
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import Gossip, LocalGrid, PeerMod, PushSum, peer_folder, private
from flower_privdec.flower.error_formatting import only_our_lines

COUNTS = (10, 20, 30, 40)


def halving(mods: list[Any], counts: tuple[int, ...] = (1, 1, 1, 1), reads_rate: bool = False) -> ClientApp:
    """Return an app whose peer i moves half of the way to i; NumPy alone, as in quickstart-numpy and quickstart-jax."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        rate = message.content["config"]["lr"] if reads_rate else 0.5
        params = message.content["arrays"].to_numpy_ndarrays()
        moved = [value + rate * (peer - value) for value in params]
        metrics = {"train_loss": float(np.abs(params[0] - peer).mean()), "num-examples": counts[peer]}
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        params = message.content["arrays"].to_numpy_ndarrays()
        metrics = {"eval_loss": float(np.abs(params[0] - peer).mean()), "num-examples": counts[peer]}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


ROWS: dict[str, list[Callable[..., None]]] = {}  # of the table in the docs: the tests that hold each


def holds(*rows: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Note which rows of the table a test holds."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        for row in rows:
            ROWS.setdefault(row, []).append(test)
        return test

    return note


def zeros() -> ArrayRecord:
    return ArrayRecord([np.zeros((2, 3)), np.zeros(3)])


def value_of(arrays: ArrayRecord) -> float:
    """Return the one number that all of halving's parameters have."""
    first, second = arrays.to_numpy_ndarrays()
    assert np.ptp(first) == np.ptp(second) == 0
    return float(first[0, 0])


both = pytest.mark.parametrize(("base", "mods"), [(FedAvg, []), (PushSum, [PeerMod()])], ids=["before", "after"])
options_of = {FedAvg: {}, PushSum: {"topology": "complete"}}


@pytest.mark.versions
@both
def test_a_numpy_app_reaches_what_it_did(base, mods):
    result = base(**options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 6)
    assert value_of(result.arrays) == pytest.approx(1.5 * (1 - 0.5**6))
    assert sorted(result.train_metrics_clientapp) == sorted(result.evaluate_metrics_clientapp) == [1, 2, 3, 4, 5, 6]


# --- a start of one's own ---


def with_own_start(base: type) -> type:
    """Return a subclass in the shape of advanced-pytorch: a copy of Flower's loop that saves what a round gave."""

    class Custom(base):  # type: ignore[misc,valid-type]
        def use_folder(self, folder: Path) -> None:
            self.folder_of_results, self.best = folder, np.inf

        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 3:
                config["lr"] *= 0.5
            return super().configure_train(server_round, arrays, config, grid)

        def start(
            self,
            grid,
            initial_arrays,
            num_rounds=3,
            timeout=3600,
            train_config=None,
            evaluate_config=None,
            evaluate_fn=None,
        ):
            self.summary()
            train_config = ConfigRecord() if train_config is None else train_config
            evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
            result = Result()
            if evaluate_fn and (metrics := evaluate_fn(0, initial_arrays)) is not None:
                result.evaluate_metrics_serverapp[0] = metrics
            arrays = initial_arrays
            for current in range(1, num_rounds + 1):
                replies = grid.send_and_receive(
                    messages=self.configure_train(current, arrays, train_config, grid), timeout=timeout
                )
                aggregated, metrics = self.aggregate_train(current, replies)
                if aggregated is not None:
                    result.arrays = arrays = aggregated
                if metrics is not None:
                    result.train_metrics_clientapp[current] = metrics
                replies = grid.send_and_receive(
                    messages=self.configure_evaluate(current, arrays, evaluate_config, grid), timeout=timeout
                )
                if (metrics := self.aggregate_evaluate(current, replies)) is not None:
                    result.evaluate_metrics_clientapp[current] = metrics
                if evaluate_fn and (metrics := evaluate_fn(current, arrays)) is not None:
                    result.evaluate_metrics_serverapp[current] = metrics
                    if metrics["loss"] < self.best:
                        self.best = metrics["loss"]
                        np.savez(self.folder_of_results / f"best-{current}.npz", *arrays.to_numpy_ndarrays())
                line = {"round": current, **dict(result.train_metrics_clientapp.get(current, {}))}
                with (self.folder_of_results / "results.json").open("a") as file:
                    file.write(json.dumps(line) + "\n")
            for _ in io.StringIO(str(result)):
                pass
            return result

    return Custom


@holds("start", "evaluate_fn")
@both
@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_a_start_of_ones_own_works_as_it_did(base, mods, seal, tmp_path):
    mods = [PeerMod(seal=seal)] if mods else []
    strategy = with_own_start(base)(fraction_train=1.0, fraction_evaluate=0.5, **options_of[base])
    strategy.use_folder(tmp_path)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 1.5 - value_of(arrays)})

    grid, config = LocalGrid(halving(mods, reads_rate=True), 4), ConfigRecord({"lr": 0.5})
    result = strategy.start(grid=grid, initial_arrays=zeros(), num_rounds=4, train_config=config, evaluate_fn=evaluate)
    reached = [1.5 * (1 - left) for left in (1, 0.5, 0.25, 0.25 * 0.75, 0.25 * 0.75**2)]
    assert [1.5 - m["loss"] for m in result.evaluate_metrics_serverapp.values()] == pytest.approx(reached)
    assert value_of(result.arrays) == pytest.approx(reached[-1])
    assert sorted(path.name for path in tmp_path.glob("best-*")) == [f"best-{k}.npz" for k in range(1, 5)]
    lines = [json.loads(line) for line in (tmp_path / "results.json").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all("train_loss" in line for line in lines)


def test_an_own_start_may_wrap_flowers_with_other_defaults(tmp_path):
    class Longer(PushSum):
        def start(self, grid, initial_arrays, num_rounds=5, **options):
            return super().start(grid, initial_arrays, num_rounds, **options)

    strategy = Longer("complete")
    mod = PeerMod(clip_norm=10.0, epsilon=50.0, delta=1e-3, share_metrics=True)
    strategy.start(LocalGrid(halving([mod]), 4, folder=tmp_path), zeros())
    assert {report.round_index for report in strategy.reports.values()} == {5}
    assert {report.spent.split("; charged: ")[1][:2] for report in strategy.reports.values()} == {"5 "}
    assert all(49 < report.epsilon <= 50 for report in strategy.reports.values())  # solved for five rounds


def test_each_class_runs_its_own_start_once():
    class First(PushSum):
        def start(self, *args, **options):
            self.loops = [*getattr(self, "loops", []), First]
            return super().start(*args, **options)

    class Second(First):
        def start(self, *args, **options):
            self.loops = [Second]
            return super().start(*args, **options)

    strategy = Second("complete")
    copied = copy.deepcopy(strategy)
    copied.start(LocalGrid(halving([PeerMod()]), 4), zeros(), 2)
    assert copied.loops == [Second, First]
    assert {report.round_index for report in copied.reports.values()} == {2}
    with raises(RunError, "flower.not-started"):
        _ = strategy.reports


def test_more_rounds_than_planned_are_refused():
    class Endless(PushSum):
        def start(self, grid, initial_arrays, num_rounds=3):
            return super().start(grid, initial_arrays, num_rounds=num_rounds + 1)

    with raises(RunError, "flower.more-rounds", names="round 4 .*num_rounds=3"):
        Endless("complete").start(LocalGrid(halving([PeerMod()]), 4), zeros())


@holds("start")
@both
def test_a_second_start_trains_from_given_arrays(base, mods):
    grid = LocalGrid(halving(mods), 4)
    begun = base(**options_of[base]).start(grid, zeros(), 2)
    ended = base(**options_of[base]).start(grid, begun.arrays, 3)
    assert value_of(ended.arrays) == pytest.approx(1.5 * (1 - 0.5**5))
    assert sorted(ended.train_metrics_clientapp) == [1, 2, 3]


def test_unnamed_starts_share_the_budget_named_ones_finish(tmp_path, caplog):
    mod = PeerMod(clip_norm=1.0, noise_multiplier=5.0, delta=1e-3)
    for rounds in (2, 3):  # each as from a script of its own
        strategy = PushSum("complete")
        strategy.start(LocalGrid(halving([mod]), 4, folder=tmp_path), zeros(), rounds)
    assert all("5 Gaussian updates" in report.spent for report in strategy.reports.values())
    assert strategy.network.common["folder"].endswith("privdec-peers/run-1")
    for _ in range(2):
        PushSum("complete", name="done").start(LocalGrid(halving([PeerMod()]), 4, folder=tmp_path), zeros(), 2)
    assert caplog.text.count("Run 'done' has its 2 rounds already: give a larger num_rounds, or another name") == 1


# --- other strategies and functions ---


@holds("FedProx")
@pytest.mark.parametrize(("base", "mods"), [(FedProx, []), (PushSum, [PeerMod()])], ids=["before", "after"])
def test_a_fedprox_client_reads_its_strength(base, mods):
    app, strengths = ClientApp(mods=mods), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        strengths.append(message.content["config"]["proximal-mu"])
        content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    own = {FedProx: {"proximal_mu": 0.1}, PushSum: {}}[base]
    config = None if base is FedProx else ConfigRecord({"proximal-mu": 0.1})
    base(fraction_evaluate=0.0, **own).start(LocalGrid(app, 3), zeros(), 2, train_config=config)
    assert strengths == [0.1] * 6


@pytest.mark.versions
@holds("FedXgbBagging")
def test_trees_are_refused_because_they_have_no_mean():
    with raises(RunError, "app.arrays", names="real-valued"):
        PushSum().start(LocalGrid(halving([PeerMod()]), 3), ArrayRecord([np.frombuffer(b"{}", np.uint8)]), 1)


@holds("@app.query")
@pytest.mark.parametrize("everywhere", [False, True], ids=["train alone", "everywhere"])
def test_queries_are_answered_if_only_train_has_the_mod(everywhere):
    peer = PeerMod()
    app = ClientApp(mods=[peer] if everywhere else [])

    @app.train(mods=[] if everywhere else [peer])
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord([value + 1 for value in message.content["arrays"].to_numpy_ndarrays()])
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"counted": MetricRecord({"rows": 7})}), reply_to=message)

    grid = LocalGrid(app, 3)
    replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
    if everywhere:
        assert {"@app.train(mods=[peer])" in str(reply.content) for reply in replies} == {True}
    else:
        assert [reply.content["counted"]["rows"] for reply in replies] == [7, 7, 7]
    assert value_of(PushSum(fraction_evaluate=0.0).start(grid, zeros(), 2).arrays) == 2


# --- hooks ---


def saving(base: type, folder: Path) -> type:
    """Return a subclass that saves each round's model in aggregate_train, as Flower's documentation does."""

    class Saving(base):  # type: ignore[misc,valid-type]
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is not None:
                np.savez(folder / f"round-{server_round}.npz", *arrays.to_numpy_ndarrays())
            return arrays, metrics

    return Saving


@holds("aggregate_train")
@both
@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_a_strategy_saving_in_aggregate_train_gets_the_mean(base, mods, seal, tmp_path):
    mods = [PeerMod(seal=seal)] if mods else []
    saving(base, tmp_path)(**options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 3)
    saved = [np.load(tmp_path / f"round-{k}.npz")["arr_0"][0, 0] for k in (1, 2, 3)]
    assert saved == pytest.approx([0.75, 1.125, 1.3125])


@holds("configure_train", "configure_evaluate", "aggregate_evaluate")
@both
def test_every_hook_gets_the_rounds_mean_as_arrays(base, mods):
    given = []

    class Noting(base):  # type: ignore[misc,valid-type]
        def configure_train(self, server_round, arrays, config, grid):
            given.append(("train", server_round, value_of(arrays)))
            return super().configure_train(server_round, arrays, config, grid)

        def configure_evaluate(self, server_round, arrays, config, grid):
            given.append(("evaluate", server_round, value_of(arrays)))
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round, replies):
            received = list(replies)
            given.append(("evaluated", server_round, float(len(received))))
            return super().aggregate_evaluate(server_round, received)

    Noting(**options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 2)
    assert given == [
        *(("train", 1, 0.0), ("evaluate", 1, 0.75), ("evaluated", 1, 4.0)),
        *(("train", 2, 0.75), ("evaluate", 2, 1.125), ("evaluated", 2, 4.0)),
    ]


def median(base: type) -> type:
    class Median(base):  # type: ignore[misc,valid-type]
        def aggregate_train(self, server_round, replies):
            received = list(replies)
            models = [reply.content["arrays"].to_numpy_ndarrays() for reply in received]
            assert all(reply.content["metrics"]["num-examples"] == 1 for reply in received)
            super().aggregate_train(server_round, received)
            middle = [np.median(np.stack(parts), axis=0) for parts in zip(*models, strict=True)]
            return ArrayRecord(middle), None

    return Median


@both
def test_an_aggregating_hook_gets_each_peers_model(base, mods):
    evaluated = []
    median(base)(**options_of[base]).start(
        LocalGrid(halving(mods), 4), zeros(), 1, evaluate_fn=lambda k, arrays: evaluated.append(value_of(arrays))
    )
    assert evaluated == [0.0, 0.75]


def test_a_hook_reading_sealed_models_is_refused():
    with raises(RunError, "flower.sealed-model", names="'arrays'"):
        median(PushSum)("complete").start(LocalGrid(halving([PeerMod(seal=True)]), 4), zeros(), 1)


@both
def test_messages_that_a_hook_leaves_out_are_not_sent(base, mods):
    class Fewer(base):  # type: ignore[misc,valid-type]
        def configure_train(self, server_round, arrays, config, grid):
            messages = super().configure_train(server_round, arrays, config, grid)
            return [message for message in messages if message.metadata.dst_node_id != 103]

    result = Fewer(**options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 1)
    assert result.train_metrics_clientapp[1]["train_loss"] == 1.0  # of 0, 1 and 2


def test_messages_made_by_a_hook_are_refused():
    class Own(PushSum):
        def configure_train(self, server_round, arrays, config, grid):
            return [Message(RecordDict({"arrays": arrays}), node, "train") for node in grid.get_node_ids()]

    with raises(RunError, "flower.own-message", names="Own"):
        Own("complete").start(LocalGrid(halving([PeerMod()]), 4), zeros(), 1)


@holds("DifferentialPrivacy...")
@pytest.mark.parametrize(
    "wrapper", [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyClientSideFixedClipping]
)
def test_flowers_privacy_wrappers_are_refused(wrapper):
    wrapped = wrapper(PushSum("complete"), noise_multiplier=1.0, clipping_norm=1.0, num_sampled_clients=4)
    with raises(RunError, "flower.not-started", names="PeerMod"):
        wrapped.start(LocalGrid(halving([PeerMod()]), 4), zeros(), 1)


# --- weights ---


@holds("weighted_by_key")
def test_peers_count_by_their_examples_as_in_fedavg():
    """Counts 10 to 40 and targets 0 to 3: FedAvg's 1.75 after three rounds, where peers that count alike reach 1.31."""
    results = {}
    for name, strategy, mods in (
        ("before", FedAvg(), []),
        ("after", Gossip("complete"), [PeerMod()]),
        ("push", PushSum("complete"), [PeerMod()]),
        ("alike", PushSum("complete", weighted_by_key=""), [PeerMod()]),
        ("private", PushSum("complete"), [PeerMod(share_metrics=False)]),
        ("stated", PushSum("complete"), [PeerMod(share_metrics=False, examples=lambda c: COUNTS[peer_of(c)])]),
    ):
        grid = LocalGrid(halving(mods, COUNTS), 4)
        results[name] = value_of(strategy.start(grid, zeros(), 3).arrays)
    assert results["before"] == pytest.approx(1.75)
    assert [results[name] for name in ("after", "push", "stated")] == pytest.approx([1.75] * 3)
    assert [results[name] for name in ("alike", "private")] == pytest.approx([1.3125] * 2)


def peer_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


@pytest.mark.parametrize(("strategy", "graph"), [(PushSum, "directed-exponential"), (Gossip, "ring")])
@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_unequal_peers_reach_the_weighted_mean(strategy, graph, seal):
    """Counts from 1 to 90: peers whose steps were as many times as long would overshoot."""
    counts = (1, 3, 2, 6, 20, 90)
    before = FedAvg(fraction_evaluate=0.0).start(LocalGrid(settling([], counts), 6), zeros(), 40)
    grid = LocalGrid(settling([PeerMod(seal=seal)], counts), 6)
    after = strategy(graph, fraction_evaluate=0.0).start(grid, zeros(), 40)
    assert value_of(before.arrays) > 4.4  # and 2.4 where all count alike
    assert value_of(after.arrays) == pytest.approx(value_of(before.arrays), abs=0.1)


def settling(mods: list[Any], counts: tuple[int, ...]) -> ClientApp:
    """Return an app whose peers move to their targets by ever smaller steps, as a falling learning rate does."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer, rate = peer_of(context), 1 / (1 + message.content["config"]["server-round"])
        moved = [value + rate * (peer - value) for value in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": counts[peer]})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app


def test_the_log_warns_about_weighting_by_private_counts(caplog):
    caplog.set_level(logging.INFO)
    mod = PeerMod(clip_norm=1.0, noise_multiplier=1.0)
    PushSum("complete").start(LocalGrid(halving([mod], COUNTS), 4), zeros(), 2)
    (line,) = [r.getMessage() for r in caplog.records if "metrics.jsonl" in r.getMessage()]
    assert "train_metrics_aggr_fn" in line
    assert "how many examples a peer has" in line


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), 1e300])
def test_a_missing_count_counts_as_one_with_warning(count, caplog):
    counts = (1, 1, count, 1)
    result = PushSum("complete").start(LocalGrid(halving([PeerMod()], counts), 4), zeros(), 1)
    assert value_of(result.arrays) == 0.75
    assert "peer 2: num-examples" in caplog.text
    assert "peer 1: num-examples" not in caplog.text


# --- mods ---


def test_numbers_of_numpy_are_numbers(tmp_path):
    def run(number, whole, folder):
        mod = PeerMod(
            clip_norm=lambda context: number(1), noise_multiplier=number(2), epsilon=number(9), examples=whole(3)
        )
        strategy = PushSum(seed=whole(1), fraction_train=number(1), min_train_nodes=whole(2), name="numbers")
        strategy.start(LocalGrid(halving([mod]), whole(4), folder=str(folder)), zeros(), whole(2))
        return {peer: (report.epsilon, report.examples) for peer, report in strategy.reports.items()}

    assert run(np.float32, np.int64, tmp_path / "numpy") == run(float, int, tmp_path / "python")


def test_a_mod_that_stands_twice_is_named():
    inner, outer = PeerMod(clip_norm=1.0, noise_multiplier=1.0), PeerMod()
    for mods in ([inner, inner], [outer, inner], [inner, outer]):
        with raises(RunError, "nodes.all-failed", names="PeerMod stands twice"):
            PushSum().start(LocalGrid(halving(mods), 2), zeros(), 1)


def test_a_failing_context_function_is_named_without_its_message(caplog):
    def rate(context: Context) -> float:
        raise ValueError("patient 17 has it")

    mod = PeerMod(clip_norm=rate, noise_multiplier=1.0)
    with raises(
        RunError, "flower.node-failed", names="clip_norm: the function that gives it raised ValueError"
    ) as error:
        PushSum().start(LocalGrid(halving([mod]), 2), zeros(), 1)
    assert f"{Path(__file__).name}, line" in str(error.value)
    assert "patient" not in str(error.value)
    assert "patient 17 has it" in caplog.text


def test_an_app_naming_its_only_train_function_gets_remedy():
    app = ClientApp(mods=[PeerMod()])

    @app.train("special")
    def train(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    with raises(RunError, "flower.no-train", names="without a name"):
        PushSum().start(LocalGrid(app, 2), zeros(), 1)


def test_evaluate_fn_may_return_a_dict():
    result = PushSum().start(LocalGrid(halving([PeerMod()]), 2), zeros(), 1, evaluate_fn=lambda *_: {"accuracy": 0.5})
    assert dict(result.evaluate_metrics_serverapp[1]) == {"accuracy": 0.5}


# --- frameworks ---


class Words(nn.Module):
    """A classifier that takes and returns dicts, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits, labels)}
        return {"logits": logits, **loss}


def sentences(peer: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of dicts: sentences of words below ten are of class 0, the others of class 1."""
    generator = torch.Generator().manual_seed(peer)
    labels = torch.randint(2, (24,), generator=generator)
    words = torch.randint(10, (24, 5), generator=generator) + 10 * labels[:, None]
    return [{"input_ids": words[at : at + 8], "labels": labels[at : at + 8]} for at in (0, 8, 16)]


@both
def test_a_model_of_dict_batches_learns_as_it_did(base, mods):
    """As in quickstart-huggingface: model(**batch) and an evaluate reply that has the model too."""
    app = ClientApp(mods=mods)

    def model_of(message: Message) -> Words:
        model = Words()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = model_of(message)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for batch in sentences(peer_of(context)):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, batches = model_of(message), sentences(peer_of(context))
        right = sum(int((model(**b)["logits"].argmax(-1) == b["labels"]).sum()) for b in batches)
        metrics = MetricRecord({"num-examples": 3, "accuracy": right / 24})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    torch.manual_seed(0)
    result = base(**options_of[base]).start(LocalGrid(app, 4), ArrayRecord(Words().state_dict()), 4)
    assert result.evaluate_metrics_clientapp[4]["accuracy"] > 0.95
    model = Words()
    model.load_state_dict(result.arrays.to_torch_state_dict(), strict=True)


@both
def test_a_keras_app_reaches_what_it_did(base, mods, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="Keras is not installed: its apps are not tried here")
    app = ClientApp(mods=mods)

    def model_of(arrays: ArrayRecord | None) -> Any:
        keras.backend.clear_session()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
        if arrays is not None:
            model.set_weights(arrays.to_numpy_ndarrays())
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = model_of(message.content["arrays"])
        history = model.fit(np.eye(2), np.ones(2), epochs=1, verbose=0)
        metrics = {"num-examples": 2, "train_loss": history.history["loss"][-1]}
        content = {"arrays": ArrayRecord(model.get_weights()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    result = base(**options_of[base], fraction_evaluate=0.0).start(
        LocalGrid(app, 2), ArrayRecord(model_of(None).get_weights()), 2
    )
    assert result.train_metrics_clientapp[2]["train_loss"] < result.train_metrics_clientapp[1]["train_loss"]


# --- arguments ---


@holds("fraction_train", "min_train_nodes", "fraction_evaluate", "min_evaluate_nodes")
@pytest.mark.parametrize(
    ("options", "trained"), [({}, 4), ({"fraction_train": 0.1}, 2), ({"fraction_train": 0.5, "min_train_nodes": 3}, 3)]
)
@both
def test_fractions_and_floors_are_fedavgs(base, mods, options, trained):
    result = base(**options, **options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 2)
    seen = []

    class Counting(base):  # type: ignore[misc,valid-type]
        def aggregate_train(self, server_round, replies):
            received = list(replies)
            seen.append(len(received))
            return super().aggregate_train(server_round, received)

        def aggregate_evaluate(self, server_round, replies):
            received = list(replies)
            seen.append(len(received))
            return super().aggregate_evaluate(server_round, received)

    evaluated = {"fraction_evaluate": 0.1, "min_evaluate_nodes": 3}
    Counting(**options, **evaluated, **options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 1)
    assert seen == [trained, 3]
    assert len(result.train_metrics_clientapp) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"fraction_train": 0.0},
        {"fraction_train": 1.5},
        {"fraction_evaluate": -0.1},
        {"min_train_nodes": -1},
        {"min_available_nodes": None},
    ],
)
def test_arguments_out_of_range_are_named(options):
    (name, value), *_ = options.items()
    with raises(ScenarioError, "flower.option", names=f"{name}={value}"):
        PushSum(**options)


@holds("min_available_nodes")
def test_a_run_begins_with_min_available_nodes():
    class Missing(LocalGrid):
        def get_node_ids(self):
            return [node for node in self.contexts if node != 103]

    grid = Missing(halving([PeerMod()]), 4)
    with raises(RunError, "flower.too-few-nodes", names="3 of 4"):
        PushSum("complete", min_available_nodes=4, patience=0.0).start(grid, zeros(), 1)
    strategy = PushSum("complete", min_available_nodes=3, patience=0.0)
    strategy.start(grid, zeros(), 1)
    assert sorted(strategy.reports) == [0, 1, 2]


# --- run config ---


def test_settings_come_from_run_config_or_context(tmp_path):
    mod = PeerMod(clip_norm="run-config:clip", epsilon="run-config:epsilon", delta=lambda context: 1e-3)
    for epsilon in (5.0, 10.0):
        folder = tmp_path / str(epsilon)
        grid = LocalGrid(halving([mod]), 4, folder=folder, run_config={"epsilon": epsilon, "clip": 1})
        strategy = PushSum("complete")
        strategy.start(grid, zeros(), 2)
        assert all(0.95 * epsilon < report.epsilon <= epsilon for report in strategy.reports.values())
        assert all("delta = 0.001" in report.spent for report in strategy.reports.values())


@pytest.mark.parametrize(
    ("setting", "names"),
    [("run-config:epsilom", "'run-config:epsilom' .*'epsilon'"), (lambda c: "5", "'5'")],
)
def test_a_setting_that_no_run_config_has_is_named(setting, names):
    grid = LocalGrid(halving([PeerMod(clip_norm=1.0, epsilon=setting)]), 2, run_config={"epsilon": 5.0})
    with raises(RunError, "flower.node-failed", names=names):
        PushSum("complete").start(grid, zeros(), 1)


# --- mistakes ---


def logging_mod(message: Message, context: Context, app: Any) -> Message:
    """Read what Flower's example of custom mods reads."""
    assert message.content["config"]["server-round"] >= 0
    reply = app(message, context)
    assert reply.has_content()
    dict(reply.content.metric_records.get("metrics") or {})
    return reply


@holds("PeerMod")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_mod_that_only_reads_may_stand_anywhere(before):
    mods = [logging_mod, PeerMod()] if before else [PeerMod(), logging_mod]
    result = PushSum("complete").start(LocalGrid(halving(mods), 4), zeros(), 2)
    assert value_of(result.arrays) == 1.125


def test_a_mod_that_needs_the_model_is_named():
    def needs_model(message: Message, context: Context, app: Any) -> Message:
        message.content["arrays"].to_numpy_ndarrays()
        return app(message, context)

    with raises(RunError, "flower.no-peer-mod", names="put PeerMod first"):
        PushSum("complete").start(LocalGrid(halving([needs_model, PeerMod()]), 4), zeros(), 1)


def test_an_app_without_the_mod_is_named():
    with raises(RunError, "flower.no-peer-mod", names=r"ClientApp\(mods=\[PeerMod"):
        PushSum("complete").start(LocalGrid(halving([]), 4), zeros(), 1)


def test_a_model_without_parameters_is_named():
    with raises(ScenarioError, "flower.start", names="parameters"):
        PushSum("complete").start(LocalGrid(halving([PeerMod()]), 4), ArrayRecord(nn.ReLU().state_dict()), 1)


@holds("client_fn", "NumPyClient")
@both
@pytest.mark.versions
def test_an_app_of_client_fn_works_unchanged(base, mods):
    from flwr.client import NumPyClient

    made = []

    class Legacy(NumPyClient):
        def __init__(self, peer):
            self.peer = peer

        def fit(self, parameters, config):
            assert config["server-round"] > 0
            return [value + 0.5 * (self.peer - value) for value in parameters], self.peer + 1, {"fitted": True}

        def evaluate(self, parameters, config):
            return float(np.abs(parameters[0] - self.peer).mean()), 10, {"accuracy": 0.5}

    def client_fn(context):
        made.append(context.node_config["partition-id"])
        return Legacy(made[-1]).to_client()

    if base is FedAvg:
        app = halving([], counts=(1, 2, 3, 4))  # what the client does, written for messages
    else:
        app = ClientApp(client_fn=client_fn, mods=mods)
    result = base(**options_of[base]).start(LocalGrid(app, 4), zeros(), 8)
    assert value_of(result.arrays) == pytest.approx(2.0, abs=0.03)
    if base is PushSum:
        assert result.train_metrics_clientapp[8]["fitted"] == 1
        assert result.evaluate_metrics_clientapp[8]["accuracy"] == 0.5
        assert result.evaluate_metrics_clientapp[8]["loss"] == pytest.approx(1.0, abs=0.1)
        assert len(made) == 1 + 8 * 4 * 2  # the first one was made to see what the app is


def test_a_client_that_fails_is_named():
    from flwr.client import NumPyClient

    class Broken(NumPyClient):
        def fit(self, parameters, config):
            raise KeyError("fitins.of my own")

    app = ClientApp(client_fn=lambda context: Broken().to_client(), mods=[PeerMod()])
    with raises(RunError, "nodes.all-failed", names="KeyError"):
        PushSum("complete").start(LocalGrid(app, 2), zeros(), 1)


@holds("server_fn")
def test_a_server_fn_is_told_how_to_port():
    from flwr.server import ServerAppComponents, ServerConfig

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=PushSum("complete"), config=ServerConfig(num_rounds=1))

    grid = LocalGrid(halving([PeerMod()]), 2)
    with raises(RunError, "flower.server-fn", names=r"@app.main\(\)"):
        ServerApp(server_fn=server_fn)(grid, Context(1, 0, {}, RecordDict(), {}))


# --- what the log and the result report ---


def test_shared_metrics_reach_log_and_final_table(caplog):
    caplog.set_level(logging.INFO)
    random.seed(0)
    PushSum("complete").start(LocalGrid(halving([PeerMod()]), 4), zeros(), 2)
    assert caplog.text.count("Aggregated MetricRecord: ") == 4
    assert "Final results:" in caplog.text
    assert "train_loss" in caplog.text.split("Final results:")[1]


@pytest.mark.parametrize("seeded", [False, True])
def test_a_run_that_protects_examples_ends_with_their_epsilon(seeded, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    app = ClientApp(mods=[PeerMod(share_metrics=False)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = nn.Linear(2, 2)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, data = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            TensorDataset(torch.ones(20, 2), torch.arange(20) % 2),
        )
        loader = DataLoader(data, batch_size=5)
        budget = {"epsilon": 4.0, "delta": 1e-2, "rounds": 2, "insecure_seed": 1 if seeded else None}
        wrapped = private(
            model, optimizer, loader, nn.CrossEntropyLoss(), ledger=peer_folder() / "examples.jsonl", **budget
        )
        module, step, batches, loss = wrapped
        for inputs, labels in batches:
            step.zero_grad()
            loss(module(inputs), labels).backward()
            step.step()
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)

    strategy = PushSum("complete", fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 2, folder=tmp_path), ArrayRecord(nn.Linear(2, 2).state_dict()), 2)
    for report in strategy.reports.values():
        assert "unit: one example" in report.app_spent
        assert report.epsilon == np.inf if seeded else 3.5 < report.epsilon <= 4.0
        assert ("INSECURE" in report.app_spent) == seeded
    assert "Privacy of peers 0, 1: epsilon = " in caplog.text
    assert "epsilon = inf" not in caplog.text


def test_messages_are_grouped_by_round():
    groups: dict[str, set[str]] = {}

    class Noting(LocalGrid):
        def _deliver(self, message: Message) -> Message:
            kind = request_in(message).kind
            groups.setdefault(kind, set()).add(message.metadata.group_id)
            return super()._deliver(message)

    PushSum("complete").start(Noting(halving([PeerMod()]), 2), zeros(), 2)
    assert (groups["round"], groups["evaluate"]) == ({"1", "2"}, {"2"})  # the first goes with the second round


@pytest.mark.parametrize(("folder", "words"), [(None, "only this run"), ("kept", "ledgers in ")])
def test_the_log_says_where_ledgers_lie_and_last(folder, words, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    where = None if folder is None else tmp_path / folder
    PushSum("complete").start(LocalGrid(halving([PeerMod()]), 2, folder=where), zeros(), 1)
    (line,) = [r.getMessage() for r in caplog.records if "state and ledgers" in r.getMessage()]
    assert words in line
    assert where is None or str(where) in line


def test_arrays_of_other_types_keep_them():
    """Of a JAX or TensorFlow model: float32 and whole numbers, by position."""
    app = ClientApp(mods=[PeerMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        kernel, steps = message.content["arrays"].to_numpy_ndarrays()
        moved = [kernel + np.float32(1), np.asarray(steps + 1)]
        return Message(RecordDict({"arrays": ArrayRecord(moved)}), reply_to=message)

    initial = ArrayRecord({"0": Array(np.zeros(3, np.float32)), "1": Array(np.zeros((), np.int64))})
    result = PushSum("complete", fraction_evaluate=0.0).start(LocalGrid(app, 2), initial, 2)
    assert [str(array.numpy().dtype) for array in result.arrays.values()] == ["float32", "int64"]


@holds("arrayrecord_key", "configrecord_key")
@both
def test_records_are_found_under_their_keys(base, mods):
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert message.content["settings"]["server-round"] == 1
        arrays = ArrayRecord([value + 1 for value in message.content["model"].to_numpy_ndarrays()])
        return Message(RecordDict({"model": arrays, "m": MetricRecord({"n": 1})}), reply_to=message)

    keys = {"arrayrecord_key": "model", "configrecord_key": "settings", "weighted_by_key": "n"}
    strategy = base(fraction_evaluate=0.0, **keys, **options_of[base])
    assert value_of(strategy.start(LocalGrid(app, 2), zeros(), 1).arrays) == 1.0


@holds("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")
@both
@pytest.mark.parametrize("shared", [True, False])
def test_functions_of_metrics_are_called_where_metrics_are_shared(base, mods, shared):
    mods = [PeerMod(share_metrics=shared)] if mods else []

    def largest(contents: list[RecordDict], key: str) -> MetricRecord:
        assert key == "num-examples"
        return MetricRecord({"most": max(next(iter(m.values())) for c in contents for m in c.metric_records.values())})

    functions = {"train_metrics_aggr_fn": largest, "evaluate_metrics_aggr_fn": largest}
    result = base(**functions, **options_of[base]).start(LocalGrid(halving(mods), 4), zeros(), 1)
    reported = [
        dict(m) for m in (result.train_metrics_clientapp.get(1, {}), result.evaluate_metrics_clientapp.get(1, {}))
    ]
    assert reported == ([{"most": 3.0}, {"most": 2.25}] if shared or not mods else [{}, {}])


@holds("summary")
@both
def test_a_summary_can_be_overridden_and_called_early(base, mods):
    called = []

    class Own(base):  # type: ignore[misc,valid-type]
        def summary(self):
            super().summary()
            called.append(1)

    strategy = Own(**options_of[base])
    strategy.summary()
    strategy.start(LocalGrid(halving(mods), 4), zeros(), 1)
    assert len(called) == 2


@holds("should_stop")
@both
def test_a_run_stops_early_if_flower_can(base, mods):
    seen = []

    def should_stop(number: int, result: Result) -> bool:
        seen.append(number)
        return number == 2

    start = partial(base(**options_of[base]).start, LocalGrid(halving(mods), 4), zeros(), 5, should_stop=should_stop)
    if "should_stop" in inspect.signature(Strategy.start).parameters:
        result = start()
        assert seen == [1, 2]
        assert value_of(result.arrays) == pytest.approx(1.5 * (1 - 0.5**2))
    else:
        with pytest.raises(TypeError):
            start()


def test_every_argument_of_fedavg_has_a_tested_row():
    page = (ROOT / "docs/reference/flower.md").read_text()
    table = page.split("## FedAvg's arguments and hooks")[1].split("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|") and "---" not in line][1:]
    named = [name.strip("`") for cell in cells for name in re.findall("`[^`]+`", cell)]
    assert sorted(named) == sorted(ROWS)
    arguments = set(inspect.signature(FedAvg.__init__).parameters) - {"self"}
    hooks = {name for name in vars(Strategy) if not name.startswith("_")}
    assert arguments | hooks | {"evaluate_fn"} <= set(named)


IN_A_PROCESS = """
import sys
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flower_privdec.flower import LocalGrid, PeerMod
from flower_privdec.flower.mods.peer_messages import PeerReport, PeerRequest

app = ClientApp(mods=[PeerMod(clip_norm=1.0, epsilon=8.0, delta=1e-3, seal=True)])

@app.train()
def train(message, context):
    arrays = ArrayRecord([value + 1 for value in message.content["arrays"].to_numpy_ndarrays()])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

def ask(kind, **fields):
    content = RecordDict({"privdec.says": PeerRequest(kind, run="r", folder=sys.argv[1], **fields).record()})
    content["privdec.initial"] = ArrayRecord([np.zeros(3)])
    [reply] = grid.send_and_receive([Message(content, 100, "train")])
    assert reply.has_content(), reply.error
    return reply.content

grid = LocalGrid(app, 1)
for kind, fields in (("introduce", {}), ("join", {"founding": True}), ("greet", {}), ("round", {"round_index": 1})):
    answer = ask(kind, peer=0, rounds=3, **fields)
report = PeerReport.of(answer, "it is no report", "test")
assert "1 Gaussian update" in report.spent, report.stopped
heavy = {"torch", "numba", "ray", "sklearn", "pandas"} & sys.modules.keys()
print(sorted(heavy))
"""


def test_a_client_without_torch_imports_no_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS, tmp_path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_without_flower_the_import_names_the_extra(monkeypatch):
    import flower_privdec.flower

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.reload(flower_privdec.flower)
    assert "flower-privdec[flower]" in str(error.value)


@pytest.mark.parametrize("sends_frozen", [True, False])
def test_a_frozen_part_is_noised_only_if_sent(sends_frozen: bool) -> None:
    """As the page says: a record holds the trained arrays alone, and the app loads them into its model."""
    app = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier=1.0, delta=1e-3)])
    used = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        nn.init.ones_(model[0].requires_grad_(False).weight)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        used.append(model[0].weight.detach().clone())
        sent = {name: value for name, value in model.state_dict(keep_vars=True).items() if is_sent(value)}
        content = RecordDict({"arrays": ArrayRecord(sent), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    def is_sent(value: torch.Tensor) -> bool:
        return sends_frozen or value.requires_grad

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.ones_(model[0].requires_grad_(False).weight)
    initial = ArrayRecord({name: v for name, v in model.state_dict(keep_vars=True).items() if is_sent(v)})
    result = PushSum(fraction_evaluate=0.0).start(LocalGrid(app, 2), initial, 2)
    assert ("0.weight" in result.arrays) == sends_frozen
    assert all(bool((weight == 1).all()) for weight in used) == (not sends_frozen)
    assert not np.array_equal(result.arrays["1.weight"].numpy(), model[1].weight.detach().numpy())


@pytest.mark.parametrize("counts", [(0, 1, 3, 2), (0, 0, 4, 1)])
def test_a_peer_without_examples_counts_for_nothing(counts):
    """As in FedAvg; the complete graph means all at once, from the first round on."""
    reached = {}
    for base, mods in ((FedAvg, []), (PushSum, [PeerMod()])):
        start = base(**options_of[base]).start
        reached[base] = value_of(start(LocalGrid(halving(mods, counts), 4), zeros(), 8).arrays)
    assert reached[PushSum] == pytest.approx(reached[FedAvg], abs=0.02)


def test_the_log_keeps_to_the_level_of_its_user(monkeypatch, caplog):
    assert logging.getLogger("flwr.privdec").level == logging.NOTSET
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "level", logging.ERROR)
    logging.getLogger("flwr.privdec")._cache.clear()
    with only_our_lines():
        logging.getLogger("flwr.privdec").info("not asked for")
    assert (flower.level, caplog.text) == (logging.ERROR, "")
