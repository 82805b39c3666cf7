"""FedDeper as ordinary Flower classes: the engine's numbers, and clear refusals."""

from __future__ import annotations

import importlib
import tomllib

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from paths import ROOT
from torch import nn
from torch.nn import functional

from flower_privdec.engine.engine import Engine
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.flower.strategies.feddeper_strategy import FedDeperStrategy, personalized, train_two_models
from flower_privdec.models import flatten

SETTINGS = {"learning_rate": 0.5, "rho": 0.1, "mixing_rate": 0.6, "local_steps": 3}
SCENARIO = ["algorithm.name=feddeper", "topology.name=server", "privacy=none"]


@pytest.fixture
def experiment(build):
    return build(*SCENARIO, *(f"algorithm.{name}={value}" for name, value in SETTINGS.items()))


def weighted_loss(model, batch):
    """Return the sum over a Poisson batch, over its expected size, as the engine has it."""
    x, y, weight = batch
    return (functional.cross_entropy(model(x), y, reduction="none") * weight).sum() / 12


def client_app(experiment):
    """Return a plain ClientApp that replays the engine's batches."""
    app, data = ClientApp(), experiment.cohort().data

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        done = message.content.config_records["config"]["server-round"] - 1
        drawn = [data.batch(done * 3 + step, [peer]) for step in range(3)]
        batches = [(batch.x[0], batch.y[0], batch.weight[0]) for batch in drawn]
        return train_two_models(message, context, experiment.module, weighted_loss, batches)

    return app


def flat(module, state):
    return torch.cat([torch.as_tensor(state[name]).reshape(-1) for name, _ in module.named_parameters()])


def test_a_plain_flower_app_has_the_engines_numbers(experiment):
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    grid = LocalGrid(client_app(experiment), 4)
    strategy = FedDeperStrategy(**SETTINGS, fraction_evaluate=0.0)
    before = flatten(experiment.module).clone()
    result = strategy.start(grid, ArrayRecord(experiment.module.state_dict()), num_rounds=2)
    for _ in range(2):
        engine.round()
    rows = engine.state.rows
    got = flat(experiment.module, result.arrays.to_torch_state_dict())
    torch.testing.assert_close(got, rows["x"][0], rtol=1e-9, atol=1e-11)
    for peer, context in enumerate(grid.contexts.values()):
        kept = flat(experiment.module, personalized(context))
        torch.testing.assert_close(kept, rows["personal"][peer], rtol=1e-9, atol=1e-11)
    assert torch.equal(flatten(experiment.module), before)  # the user's module is only the architecture


def test_sampled_clients_alone_count_and_train(experiment):
    grid = LocalGrid(client_app(experiment), 4)
    strategy = FedDeperStrategy(**SETTINGS, fraction_train=0.5, fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(experiment.module.state_dict()), num_rounds=1)
    assert sum(personalized(context) is not None for context in grid.contexts.values()) == 2


def test_a_client_that_is_sampled_late_starts_its_own_model_at_x_0(build):
    """The engine's peers all begin with v = x^0; a client that first takes part in round 3 does as well."""
    half = "participation={kind: uniform, fraction: 0.5}"
    experiment = build(*SCENARIO, half, *(f"algorithm.{name}={value}" for name, value in SETTINGS.items()))
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))

    class Scheduled(FedDeperStrategy):
        def configure_train(self, server_round, arrays, config, grid):
            active = experiment.participation.active(server_round - 1)
            chosen = [node for node, wanted in zip(grid.contexts, active, strict=True) if wanted]
            messages = super().configure_train(server_round, arrays, config, grid)
            return [message for message in messages if message.metadata.dst_node_id in chosen]

    grid, rounds = LocalGrid(client_app(experiment), 4), 6
    strategy = Scheduled(**SETTINGS, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(experiment.module.state_dict()), num_rounds=rounds)
    for _ in range(rounds):
        engine.round()
    first = [next(k for k in range(99) if experiment.participation.active(k)[peer]) for peer in range(4)]
    assert max(first) in range(1, rounds)  # somebody is late
    got = flat(experiment.module, result.arrays.to_torch_state_dict())
    torch.testing.assert_close(got, engine.state.rows["x"][0], rtol=1e-9, atol=1e-11)
    for peer, context in enumerate(grid.contexts.values()):
        kept = flat(experiment.module, personalized(context))
        torch.testing.assert_close(kept, engine.state.rows["personal"][peer], rtol=1e-9, atol=1e-11)


def test_a_client_that_lost_its_model_says_so_and_gets_x_0_again(experiment):
    grid = LocalGrid(client_app(experiment), 4)
    strategy = FedDeperStrategy(**SETTINGS, fraction_evaluate=0.0)
    start = ArrayRecord(experiment.module.state_dict())
    strategy.start(grid, start, num_rounds=1)
    grid.contexts[102].state = RecordDict()
    messages = list(strategy.configure_train(2, start, ConfigRecord({"server-round": 2}), grid))
    assert not [message for message in messages if "feddeper.start" in message.content]
    replies = grid.send_and_receive(messages)
    assert ["personalized model is lost" in reply.error.reason for reply in replies if reply.has_error()] == [True]
    strategy.aggregate_train(2, replies)
    again = strategy.configure_train(3, start, ConfigRecord({"server-round": 3}), grid)
    assert [message.metadata.dst_node_id for message in again if "feddeper.start" in message.content] == [102]


def test_clients_count_alike_whatever_they_say_of_their_examples(experiment):
    start = ArrayRecord(experiment.module.state_dict())
    grid = LocalGrid(ClientApp(), 4)
    strategy = FedDeperStrategy(**SETTINGS)
    sent = list(strategy.configure_train(1, start, ConfigRecord(), grid))[:3]
    names = list(start)
    replies = []
    for size, message in enumerate(sent, start=1):
        message.metadata.__dict__["_message_id"] = str(size)
        change = ArrayRecord({name: Array(np.full_like(start[name].numpy(), size)) for name in names})
        content = RecordDict({"arrays": change, "metrics": MetricRecord({"num-examples": 10**size})})
        replies.append(Message(content, reply_to=message))
    moved, _ = strategy.aggregate_train(1, replies)
    for name in names:
        np.testing.assert_allclose(moved[name].numpy(), start[name].numpy() + 2.0, rtol=1e-6)


def test_a_round_in_which_every_client_fails_keeps_the_model(experiment):
    grid = LocalGrid(ClientApp(), 4)  # it knows no message
    start = ArrayRecord(experiment.module.state_dict())
    strategy = FedDeperStrategy(**SETTINGS, fraction_evaluate=0.0)
    assert not strategy.start(grid, start, num_rounds=1).arrays


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mixing_rate": 0.3}, r"mixing_rate=0.3 must be in \[1/2, 1\]"),
        ({"rho": -0.1}, "rho=-0.1 must be >= 0"),
        ({"local_steps": 0}, "local_steps=0 must be >= 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be > 0"),
    ],
)
def test_bad_settings_are_refused_at_once(wrong, said):
    with pytest.raises(ScenarioError, match=said) as error:
        FedDeperStrategy(**wrong)
    assert "\n" not in str(error.value)


def test_any_mixing_rate_is_an_explicit_choice():
    assert FedDeperStrategy(mixing_rate=0.3, any_mixing_rate=True).settings["mixing_rate"] == 0.3


def order(module, **config):
    arrays = ArrayRecord(module.state_dict())
    content = RecordDict({"arrays": arrays, "feddeper.start": arrays, "config": ConfigRecord(config)})
    return Message(content, 1, "train"), Context(1, 1, {}, RecordDict(), {})


SENT = {f"feddeper.{name}": value for name, value in SETTINGS.items()}
LINEAR = nn.Linear(4, 2)
BATCH = (torch.ones(3, 4), torch.tensor([0, 1, 0]))


def mean_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("module", "config", "batches", "said"),
    [
        (LINEAR, {}, [BATCH], "send it with the strategy FedDeperStrategy"),
        (LINEAR, SENT, [], "no batches for 3 more local steps"),
        (LINEAR, SENT, iter([BATCH]), "no batches for 2 more local steps"),
        (nn.Linear(4, 3), SENT, [BATCH], "are not the module's parameters"),
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), SENT, [BATCH], "use GroupNorm"),
    ],
)
def test_what_cannot_work_is_said(module, config, batches, said):
    message, context = order(LINEAR, **config)
    with pytest.raises(RunError, match=said):
        train_two_models(message, context, module, mean_loss, batches)
    assert personalized(context) is None


APP = ROOT / "simulations" / "feddeper-plain"


def test_the_example_app_learns_a_global_and_better_personalized_models(monkeypatch):
    """Ten clients with one digit each: a model per client is certain of its own digit, the common one is not."""
    monkeypatch.syspath_prepend(str(APP))
    client, server = (importlib.import_module(f"feddeper_plain.{name}").app for name in ("client_app", "server_app"))
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-rounds": 4, "fraction-train": 1.0}  # Flower's sampling of clients has no seed
    grid, results = LocalGrid(client, 10), []
    start = FedDeperStrategy.start
    monkeypatch.setattr(FedDeperStrategy, "start", lambda *given, **options: results.append(start(*given, **options)))
    for context in grid.contexts.values():
        context.run_config.update(config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    (result,) = results
    common = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
    assert common[4] > 0.4 > 2 * common[0]
    own = result.evaluate_metrics_clientapp[4]
    assert own["personalized-model"] > max(0.9, own["global-model"])
