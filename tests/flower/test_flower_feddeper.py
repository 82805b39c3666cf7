"""FedDeper as a strategy of peers: the engine's numbers, peer-level and example-level privacy, and what leaves."""

from __future__ import annotations

import importlib
import tomllib

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from paths import ROOT
from peer_states import state_in
from raising import raises
from routing_peers import LossyGrid, ReadingGrid, client, first, zeros
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.flower import FedDeper, LocalGrid, PeerMod, PushSum, peer_folder, personalized, train_two_models
from flower_privdec.models import flatten
from flower_privdec.peer import app_updates
from flower_privdec.privacy.ledger.segments import read_chain

SETTINGS = {"learning_rate": 0.5, "rho": 0.1, "mixing_rate": 0.6, "local_steps": 3}
SCENARIO = [
    "algorithm.name=feddeper",
    "privacy=none",
    *(f"algorithm.{name}={value}" for name, value in SETTINGS.items()),
]


def weighted_loss(outputs, targets, weight):
    """Return the sum over a Poisson batch, over its expected size, as the engine has it."""
    return (functional.cross_entropy(outputs, targets, reduction="none") * weight).sum() / 12


def client_app(experiment, **privacy):
    """Return an app whose peers replay the engine's batches."""
    app, data = ClientApp(mods=[PeerMod(**privacy)]), experiment.cohort().data

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        done = message.content.config_records["config"]["server-round"] - 1
        drawn = [data.batch(done * 3 + step, [peer]) for step in range(3)]
        batches = [(batch.x[0], batch.y[0], batch.weight[0]) for batch in drawn]
        return train_two_models(message, experiment.module, weighted_loss, batches)

    return app


def flat(module, state):
    return torch.cat([torch.as_tensor(state[name]).reshape(-1) for name, _ in module.named_parameters()])


def state_of(folder, peer, run="run"):
    return state_in(folder / f"peer-{peer}", run)


def run(grid, experiment, rounds, *topology, **options):
    strategy = FedDeper(*topology, **SETTINGS, name="run", fraction_evaluate=0.0, **options)
    return strategy.start(grid, ArrayRecord(experiment.module.state_dict()), num_rounds=rounds), strategy


def engine_after(experiment, rounds):
    cohort = experiment.cohort()
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    return engine.state.rows


def assert_personal_models_are(rows, experiment, folder):
    for peer in range(4):
        personal = flat(experiment.module, state_of(folder, peer).local_arrays)
        torch.testing.assert_close(personal, rows["personal"][peer], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"seal": True}])
@pytest.mark.parametrize("participation", [{}, {"fraction_train": 0.5, "seed": 7}], ids=["everybody", "half"])
def test_over_a_server_it_has_the_engines_numbers(build, tmp_path, participation, options):
    """Peers that are sampled late begin with v = x^0, and the round's peers alone count."""
    sampled = ["participation={kind: uniform, fraction: 0.5}", "seed=7"] if participation else []
    experiment = build(*SCENARIO, "topology.name=server", *sampled)
    grid = LocalGrid(client_app(experiment, **options), 4, folder=tmp_path)
    before = flatten(experiment.module).clone()
    result, strategy = run(grid, experiment, 6, **participation)
    if participation:
        drawn = [experiment.participation.active(k).tolist() for k in range(6)]
        assert drawn == [strategy._run.participation.active(k).tolist() for k in range(6)]
        assert not all(map(any, zip(*drawn[:1], strict=True)))  # some take part late
    rows = engine_after(experiment, 6)
    x = flat(experiment.module, result.arrays.to_torch_state_dict())
    torch.testing.assert_close(x, rows["x"][0], rtol=1e-9, atol=1e-11)
    assert_personal_models_are(rows, experiment, tmp_path)
    assert torch.equal(flatten(experiment.module), before)  # the user's module is only the architecture


def test_over_a_graph_it_has_the_engines_numbers(build, tmp_path):
    experiment = build(*SCENARIO, "topology.name=directed-exponential")
    grid = LocalGrid(client_app(experiment), 4, folder=tmp_path)
    _, strategy = run(grid, experiment, 5, "directed-exponential")
    rows = engine_after(experiment, 5)
    for peer, arrays in strategy.peer_arrays.items():
        z = flat(experiment.module, arrays.to_torch_state_dict())
        torch.testing.assert_close(z, rows["x"][peer] / rows["w"][peer], rtol=1e-9, atol=1e-11)
    assert len(strategy.peer_arrays) == 4
    assert_personal_models_are(rows, experiment, tmp_path)


@pytest.mark.parametrize("seal", [False, True])
def test_over_a_server_a_named_run_continues(build, tmp_path, seal):
    experiment = build(*SCENARIO, "topology.name=server")
    run(LocalGrid(client_app(experiment, seal=seal), 4, folder=tmp_path), experiment, 2)
    result, _ = run(LocalGrid(client_app(experiment, seal=seal), 4, folder=tmp_path), experiment, 5)
    rows = engine_after(experiment, 5)
    x = flat(experiment.module, result.arrays.to_torch_state_dict())
    torch.testing.assert_close(x, rows["x"][0], rtol=1e-9, atol=1e-11)
    assert_personal_models_are(rows, experiment, tmp_path)


def test_a_sealed_round_with_missing_answers_changes_nothing(build, tmp_path):
    experiment = build(*SCENARIO, "topology.name=server")
    lost = []

    def fate(number, message):
        is_third = message.metadata.message_type == "train" and "privdec.model" in message.content
        if is_third and message.metadata.dst_node_id == 102:
            lost.append(number)
            return "unanswered"
        return "ok"

    grid = LossyGrid(fate, client_app(experiment, seal=True), 4, folder=tmp_path)
    strategy = FedDeper(**SETTINGS, name="run", fraction_evaluate=0.0)
    start = ArrayRecord(experiment.module.state_dict())
    result = strategy.start(grid, start, num_rounds=1, timeout=0.5)
    assert lost
    for name, array in start.items():
        np.testing.assert_array_equal(result.arrays[name].numpy(), array.numpy())


# Privacy.


class Sets(nn.Module):
    """A model of one number for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)


def learning_app(peer_mod, seen=None, **options):
    """Return an app whose peers learn quickly and far: what leaves must be clipped."""
    app = ClientApp(mods=[peer_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer = context.node_config["partition-id"]
        inputs = torch.full((12, 3), 10.0 * (peer + 1))
        data = DataLoader(TensorDataset(inputs, torch.zeros(12).long()), batch_size=4)
        privacy = options and {"ledger": peer_folder() / "examples.jsonl", "report": lambda line: None, **options}
        reply = train_two_models(message, Sets(), functional.cross_entropy, data, privacy=privacy or None)
        if seen is not None:
            seen.append({name: reply.content[name].to_torch_state_dict() for name in reply.content.array_records})
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        own = sum(float(value.abs().sum()) for value in personalized(message).values())
        return Message(RecordDict({"metrics": MetricRecord({"own": own, "num-examples": 1})}), reply_to=message)

    return app


def zero_model():
    return ArrayRecord({name: torch.zeros_like(value) for name, value in Sets().state_dict().items()})


def composed(noise, rounds, delta):
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), rounds))
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("topology", ["server", "directed-exponential"])
def test_every_round_is_charged_and_noised_before_anything_leaves(tmp_path, topology):
    options = {"clip_norm": 1.0, "noise_multiplier": 5.0, "delta": 1e-5}
    grid = LocalGrid(learning_app(PeerMod(**options)), 2, folder=tmp_path)
    strategy = FedDeper(topology, **SETTINGS, name="run", fraction_evaluate=0.0)
    strategy.start(grid, zero_model(), num_rounds=3)
    for peer in (0, 1):
        assert strategy.reports[peer].epsilon == pytest.approx(composed(5.0, 3, 1e-5), rel=2e-3)


@pytest.mark.parametrize("topology", ["server", "directed-exponential"])
def test_messages_of_a_peer_respect_the_clip_norm(tmp_path, topology, monkeypatch):
    """Sensitivity: the update before noise has at most norm C, whatever data and v are, in every round."""
    norms, noised = [], app_updates.exactly_noised

    def recorded(update, std):
        norms.append(float(np.linalg.norm(update)))
        return noised(update, std)

    monkeypatch.setattr(app_updates, "exactly_noised", recorded)
    mod = PeerMod(clip_norm=0.25, noise_multiplier=2.0)
    grid = LocalGrid(learning_app(mod), 2, folder=tmp_path)
    FedDeper(topology, **SETTINGS | {"learning_rate": 50.0}, name="run", fraction_evaluate=0.0).start(
        grid, zero_model(), num_rounds=3
    )
    assert len(norms) == 6
    assert max(norms) <= 0.25 * (1 + 1e-12)
    assert max(norms) > 0.2499  # the clip is what holds them


@pytest.mark.parametrize("topology", ["server", "directed-exponential"])
def test_the_server_reads_neither_of_the_models(tmp_path, topology):
    answers: list[dict] = []
    grid = ReadingGrid(
        learning_app(PeerMod(clip_norm=0.5, noise_multiplier=2.0, seal=True), answers), 3, folder=tmp_path
    )
    strategy = FedDeper(topology, **SETTINGS, name="run")
    strategy.start(grid, zero_model(), num_rounds=2)
    wire = b"".join(grid.seen)
    states = [state_of(tmp_path, peer) for peer in range(3)]
    private = [value.tobytes() for state in states for value in state.local_arrays.values()]
    private += [
        value.numpy().tobytes() for answer in answers for record in answer.values() for value in record.values()
    ]
    private += [state.x.tobytes() for state in states]
    assert len(private) > 30
    assert not [value for value in private if value in wire]
    assert "own" not in repr(grid.seen)  # nor a metric of it


def test_the_personalized_model_reaches_evaluation_and_survives_restarts(tmp_path):
    def own_after(folder, rounds):
        grid = LocalGrid(learning_app(PeerMod()), 2, folder=tmp_path / folder)
        result = FedDeper(**SETTINGS, name="run").start(grid, zero_model(), num_rounds=rounds)
        return result.evaluate_metrics_clientapp[rounds]["own"]

    first = own_after("restarted", 1)
    assert 0 < first != own_after("restarted", 3) == own_after("at-once", 3)


def test_a_spent_budget_keeps_the_personalized_model(tmp_path):
    mod = PeerMod(clip_norm=0.5, noise_multiplier=2.0, epsilon=composed(2.0, 2, 1e-5) * 1.01)
    strategy = FedDeper(**SETTINGS, name="run", fraction_evaluate=0.0)
    strategy.start(LocalGrid(learning_app(mod), 2, folder=tmp_path), zero_model(), num_rounds=5)
    assert all(told.exhausted for told in strategy.reports.values())
    ledger = (tmp_path / "peer-0" / "peer-updates.jsonl").read_text().splitlines()
    assert len(ledger) == 3  # a header and two rounds


def test_private_protects_examples_over_all_rounds(tmp_path):
    privacy = {"noise_multiplier": 2.0, "delta": 1e-3, "clip_norm": 0.1}
    answers: list[dict] = []
    app = learning_app(PeerMod(share_metrics=False), answers, **privacy)
    strategy = FedDeper(**SETTINGS, name="run", fraction_evaluate=0.0)
    strategy.start(LocalGrid(app, 2, folder=tmp_path), zero_model(), num_rounds=2)
    entries = read_chain(tmp_path / "peer-0" / "examples.jsonl")[1]
    assert sum(entry.to_step - entry.from_step for entry in entries) == 2 * 3
    zeros = zero_model().to_torch_state_dict()
    for record in answers[0].values():
        assert all(not torch.equal(record[name], zeros[name]) for name in zeros)


def test_one_example_moves_both_gradients_by_at_most_c(tmp_path):
    """Sensitivity: y's and v's gradients of one example are clipped as one vector."""
    from flower_privdec.flower.strategies.feddeper_strategy import TwoModelLoss, TwoModels
    from flower_privdec.models.layers.model_outputs import Output
    from flower_privdec.training_loop.clipped_sum import ClippedSum

    module = Sets()
    pair = TwoModels(module, module.state_dict(), {name: 2 * value for name, value in module.state_dict().items()})
    summed = ClippedSum(pair, dict(pair.named_parameters()), TwoModelLoss(functional.cross_entropy), 0.1)
    for scale in (1.0, 1e3):
        total, _ = summed((torch.full((1, 3), scale),), {}, (Output(), torch.tensor([1])))
        assert float(total.norm()) <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_a_servers_mean_covers_peers_that_stepped(seal, tmp_path, monkeypatch):
    """Also after a restart; a peer whose budget is spent neither moves the mean nor draws it back to x."""
    monkeypatch.setattr(app_updates, "exactly_noised", lambda update, std: update)
    options = {"seal": seal, "clip_norm": 9.0, "noise_multiplier": 1.0}
    budgets = ({}, {}, {"epsilon": 1e-3})
    apps = [client(lambda arrays, *_: [arrays[0] + 0.1], **options, **budget) for budget in budgets]

    def app(message, context):
        return apps[context.node_config["partition-id"]](message, context)

    for rounds in (1, 2, 3):
        strategy = FedDeper(name="run", fraction_evaluate=0.0)
        result = strategy.start(LocalGrid(app, 3, folder=tmp_path), zeros(), rounds)
        np.testing.assert_allclose(first(result.arrays), 0.1 * rounds, rtol=1e-9)
    assert strategy.reports[2].exhausted


@pytest.mark.parametrize("seal", [False, True], ids=["open", "sealed"])
def test_a_fully_spent_run_keeps_its_model_after_restart(seal, tmp_path):
    app = client(lambda arrays, *_: [arrays[0] + 0.1], seal=seal, clip_norm=9.0, noise_multiplier=2.0, epsilon=3.0)
    models = []
    for rounds in (4, 6):
        strategy = FedDeper(name="run", fraction_evaluate=0.0)
        models.append(first(strategy.start(LocalGrid(app, 2, folder=tmp_path), zeros(), rounds).arrays))
    assert all(told.exhausted for told in strategy.reports.values())
    np.testing.assert_allclose(*models, rtol=1e-12)
    assert np.abs(models[0]).max() > 0


def test_no_message_replaces_a_peers_mass(tmp_path):
    grid = LocalGrid(client(lambda arrays, *_: arrays), 2, folder=tmp_path)
    PushSum(name="run", fraction_evaluate=0.0).start(grid, zeros(), 1)
    state = state_of(tmp_path, 0)
    with raises(RunError, "flower.model-in-a-graph", names="peer 0"):
        state.adopt({name: np.zeros(shape) for name, _, shape in state.layout.parts})


# Refusals.


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"mixing_rate": 0.3}, ("feddeper.mixing-rate", "mixing_rate=0.3")),
        ({"rho": -0.1}, ("scenario.greater_than_equal", "rho=-0.1")),
        ({"local_steps": 0}, ("scenario.greater_than_equal", "local_steps=0")),
        ({"learning_rate": 0.0}, ("scenario.not-positive", "learning_rate=0.0")),
        ({"fraction_train": 0.0}, ("flower.option", "fraction_train=0.0")),
        ({"topology": "nowhere"}, ("catalogue.unknown",)),
    ],
)
def test_bad_settings_are_refused_at_once(wrong, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal) as error:
        FedDeper(**wrong)
    assert "\n" not in str(error.value)


def test_any_mixing_rate_is_an_explicit_choice():
    assert FedDeper(mixing_rate=0.3, any_mixing_rate=True).settings["mixing_rate"] == 0.3


def test_an_app_without_the_mod_is_refused(build):
    experiment = build(*SCENARIO, "topology.name=server")
    app = ClientApp()
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    with raises(RunError, "flower.no-peer-mod"):
        run(LocalGrid(app, 4), experiment, 1)


def order(module, **config):
    arrays = ArrayRecord(module.state_dict())
    content = RecordDict({"arrays": arrays, "feddeper.personal": arrays, "config": ConfigRecord(config)})
    return Message(content, 1, "train")


SENT = {f"feddeper.{name}": value for name, value in SETTINGS.items()}
LINEAR = nn.Linear(4, 2)
BATCH = (torch.ones(3, 4), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize(
    ("module", "config", "batches", "code"),
    [
        (LINEAR, {}, [BATCH], "feddeper.no-settings"),
        (LINEAR, SENT, [], "feddeper.no-batches"),
        (LINEAR, SENT, iter([BATCH]), "feddeper.no-batches"),
        (nn.Linear(4, 3), SENT, [BATCH], "feddeper.other-module"),
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), SENT, [BATCH], "feddeper.buffers"),
    ],
)
def test_unsupported_settings_are_refused(module, config, batches, code):
    with raises(RunError, code):
        train_two_models(order(LINEAR, **config), module, functional.cross_entropy, batches)


def test_a_message_without_a_personalized_model_is_refused():
    message = order(LINEAR, **SENT)
    del message.content["feddeper.personal"]
    with raises(RunError, "feddeper.no-models", names="feddeper.personal"):
        train_two_models(message, LINEAR, functional.cross_entropy, [BATCH])


APP = ROOT / "simulations" / "feddeper"


def test_the_example_app_learns_global_and_personalized_models(monkeypatch, tmp_path):
    """Ten peers with one digit each: a model per peer is certain of its own digit, the common one is not."""
    monkeypatch.syspath_prepend(str(APP))
    client, server = (importlib.import_module(f"feddeper.{name}").app for name in ("client_app", "server_app"))
    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-rounds": 4, "fraction-train": 1.0}
    grid, results = LocalGrid(client, 10, folder=tmp_path), []
    start = FedDeper.start
    monkeypatch.setattr(FedDeper, "start", lambda *args, **options: results.append(start(*args, **options)))
    for context in grid.contexts.values():
        context.run_config.update(config)
    server(grid, Context(1, 0, {}, RecordDict(), config))
    (result,) = results
    common = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
    assert common[4] > 0.4 > 2 * common[0]
    own = result.evaluate_metrics_clientapp[4]
    assert own["personalized-model"] > max(0.9, own["global-model"])
