"""Peers that run an unmodified Flower app on a network: exact means, ledgers, kills, what is wrong named."""

from __future__ import annotations

import copy
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import privdec
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networked import devices, driver_of, finish, wait_until
from paths import ROOT
from ports import own_addresses
from raising import raises
from routing_peers import sets_its_values_once, values_of
from safetensors.numpy import load_file
from torch.nn import functional

from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.flower.launch.local_grid import opened_app
from flower_privdec.flower.serverless import (
    ClientAppRunner,
    InitialArrays,
    app_peer,
    initial_from_server_app,
    load_initial,
    node_config_of,
    save_initial,
)
from flower_privdec.peer.app_updates import SOURCE, PeerLedger, PeerSpent, update_release
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.times import Times
from flower_privdec.privacy.ledger.segments import ledger_path
from flower_privdec.scenario.app_sections import AppPrivacySection
from flower_privdec.scenario.loading import parse_app_scenario
from flower_privdec.scenario.sections import AppScenario
from tools.mass_on_disk import mass_on_disk

SIMULATIONS = ROOT / "simulations"
QUICKSTARTS = {name: SIMULATIONS / f"adapted-quickstart-{name}" for name in ("sklearn", "pytorch")}
quickstarts = pytest.mark.parametrize("folder", QUICKSTARTS.values(), ids=QUICKSTARTS)
TEXT = """
name: app
n_peers: 4
rounds: 2
privacy: none
evaluation: {every: 100}
network: {deadline: 100, links: local}
"""


FREE = (
    "network.alone=go-on",
    "network.lead=null",
)  # a peer that waits mixes, and then steps with another weight than 1


def scenario_of(*settings: str) -> AppScenario:
    return parse_app_scenario(TEXT, overrides=settings)


def client(step) -> ClientApp:
    """Return an ordinary app, with no mod, whose train function is a step."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        done = message.content["config"]["server-round"]
        trained = ArrayRecord(step(arrays, context.node_config["partition-id"], done))
        return Message(RecordDict({"arrays": trained}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        size = float(np.abs(message.content["arrays"].to_numpy_ndarrays()[0]).max())
        return Message(RecordDict({"metrics": MetricRecord({"size": size})}), reply_to=message)

    return app


def zeros(size: int = 3, dtype: type = np.float64) -> InitialArrays:
    return InitialArrays({"0": np.zeros(size, dtype)})


def peer_of(scenario, place, app, initial, **options) -> RunningPeer:
    run_config = options.pop("run_config", None)
    runner = ClientAppRunner(app, scenario, initial, place.peer, place.folder, run_config=run_config)
    return app_peer(scenario, place, initial, runner.train, runner.evaluate, **options)


def peers_of(scenario, places, step, initial=None) -> list[RunningPeer]:
    initial = initial or zeros()
    app = client(step)
    return [peer_of(scenario, place, app, initial) for place in places]


def run_all(peers: list[RunningPeer]) -> None:
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))


def models(places) -> list[dict[str, np.ndarray]]:
    return [load_file(place.folder / "model.safetensors") for place in places]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_an_unmodified_app_reaches_the_exact_mean(mode, tmp_path):
    scenario = scenario_of(f"network.mode={mode}", *FREE)
    places = devices(scenario, tmp_path, insecure_seeds=False)
    run_all(peers_of(scenario, places, sets_its_values_once))
    mean = np.mean([values_of(peer) for peer in range(4)], axis=0)
    if mode == "synchronous":
        for model in models(places):
            assert np.abs(model["0"] - mean).max() < 1e-12
    else:
        total = mass_on_disk([place.folder for place in places])
        assert float(total["w"]) == pytest.approx(4, abs=1e-12)
        assert np.abs(total["x"].numpy() / 4 - mean).max() < 1e-12


class Killed(BaseException):
    """Ends a peer in the middle of its training, as a kill would: nothing after it reaches the disk."""


def killing(step, deaths: dict[int, int]):
    """Return a step during which each of some peers dies once, in a round."""
    left = dict(deaths)

    def dying(arrays, peer, done):
        if left.get(peer) == done:
            del left[peer]
            raise Killed
        return step(arrays, peer, done)

    return dying


def run_through_deaths(scenario, places, step, initial=None) -> list[RunningPeer]:
    """Run all peers to the end, each started again where it died, and return them."""
    app = client(step)

    def live(place) -> RunningPeer:
        while True:
            peer = peer_of(scenario, place, app, initial or zeros())
            with suppress(Killed):
                finish(peer)
                return peer

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(live, places))


def test_no_kill_takes_mass_or_adds_any(tmp_path):
    scenario = scenario_of("rounds=12", *FREE)
    places = devices(scenario, tmp_path, insecure_seeds=False)
    step = killing(sets_its_values_once, {0: 3, 1: 5, 2: 8, 3: 11})
    run_through_deaths(scenario, places, step)
    total = mass_on_disk([place.folder for place in places])
    assert float(total["w"]) == pytest.approx(4, abs=1e-12)
    assert np.abs(total["x"].numpy() - sum(values_of(peer) for peer in range(4))).max() < 1e-11


@pytest.mark.slow
def test_a_killed_peers_ledger_matches_dp_accounting(tmp_path):
    scenario = scenario_of(
        "n_peers=2",
        "rounds=100",
        "network.mode=synchronous",
        "privacy={clip_norm: 1, noise_multiplier: 5, delta: 1e-3}",
    )
    places, seen = devices(scenario, tmp_path, insecure_seeds=False), []

    def step(arrays, peer, done):
        if peer == 0:
            seen.append(done)
        return arrays

    peers = run_through_deaths(scenario, places, killing(step, {0: 51}))
    assert seen == list(range(1, 101)), "it went on from the round in which it was killed"
    for peer, updates in zip(peers, (101, 100), strict=True):  # that of the round of the kill was paid for twice
        accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
        accountant.compose(dp_event.GaussianDpEvent(5.0), updates)
        status = peer.status()
        assert status["epsilon"] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-2)
        assert f"{updates} Gaussian updates" in status["privacy"]
        assert "one peer with all its data" in status["privacy"]


def test_a_spent_peer_stops_training_and_relays(tmp_path):
    budget = PeerSpent((update_release(2.0, 3),), 1e-3).epsilon
    settings = f"privacy={{clip_norm: 1, noise_multiplier: 2, epsilon: {budget * 1.0001}, delta: 1e-3}}"
    scenario = scenario_of("rounds=8", "network.mode=synchronous", settings)
    places, trained = devices(scenario, tmp_path, insecure_seeds=False), []

    def step(arrays, peer, done):
        trained.append((peer, done))
        return arrays

    peers = peers_of(scenario, places, step)
    run_all(peers)
    assert sorted(trained) == [(peer, done) for peer in range(4) for done in (1, 2, 3)]
    for peer in peers:
        assert "stops training and only exchanges" in peer.status()["idle"]
        assert peer.status()["epsilon"] <= peer.status()["budget"]
        assert not peer.trainer.is_active(3)
    rows = [peer.state.rows["x"] / peer.state.rows["w"] for peer in peers]
    assert max(float((row - rows[0]).abs().max()) for row in rows) < 1e-12, "five rounds of relaying make a mean"


def test_an_apps_spent_budget_ends_training_not_relaying(tmp_path):
    settings = ("n_peers=2", "rounds=4", "network.mode=synchronous")
    scenario = scenario_of(*settings, "privacy={clip_norm: 1, noise_multiplier: 1, delta: 1e-3}")
    places, asked = devices(scenario, tmp_path, insecure_seeds=False), []

    def step(arrays, peer, done):
        asked.append((peer, done))
        if peer == 0 and done == 2:
            raise BudgetError("a private example")
        return arrays

    peers = peers_of(scenario, places, step)
    run_all(peers)
    assert sorted(asked) == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert peers[0].status()["idle"] == "its app's own budget allows no more training; it only exchanges"
    assert "2 Gaussian updates" in peers[0].status()["privacy"], "that of the round in which it ended was paid for"
    assert not peers[0].trainer.is_active(3)


def test_earlier_unprotected_updates_are_reported(tmp_path):
    scenario = scenario_of("n_peers=2", "rounds=3")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    run_all(peers_of(scenario, places, sets_its_values_once))
    private = AppPrivacySection(clip_norm=1.0, noise_multiplier=1.0, delta=1e-3)
    peer = peer_of(scenario, places[0], client(sets_its_values_once), zeros(), private=private)
    status = peer.status()
    peer.close()
    assert "epsilon = inf" in status["privacy"]
    assert "3 updates of this run had no protection" in status["privacy"]
    assert status["epsilon"] == "inf"


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [([np.zeros(4)], r"peer 0.*\(4,\).*float64 \(3,\)"), ([np.zeros(3), np.zeros(3)], "peer 0.*array")],
)
def test_an_app_that_returns_another_model_is_named(returned, wrong, tmp_path):
    app = ClientAppRunner(client(lambda *_: returned), scenario_of(), zeros(), 0, tmp_path)
    with raises(RunError, "app.answer", names=wrong):
        app.train({"0": np.zeros(3)}, 1)


def test_an_update_moves_the_model_by_bounded_amounts(tmp_path):
    scenario = scenario_of("rounds=1", "privacy={clip_norm: 1e-3, noise_multiplier: 1, delta: 1e-3}")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    huge = {0: 1e25, 1: np.nan, 2: np.inf, 3: 0.0}
    run_all(peers_of(scenario, places, lambda arrays, peer, done: [arrays[0] + huge[peer]]))
    for model in models(places):
        assert 0 < np.abs(model["0"]).max() < 0.02


def test_counters_stay_with_their_peer_and_survive_a_kill(tmp_path):
    scenario = scenario_of("n_peers=2", "rounds=6", "network.mode=synchronous")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    initial = InitialArrays(
        {"weight": np.zeros((2, 3), np.float32), "seen": np.zeros((), np.int64), "mask": np.array([True, False])}
    )

    def step(arrays, peer, done):
        return [arrays[0] + 1, arrays[1] + 1 + peer, ~arrays[2]]

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        peer, arrays = context.node_config["partition-id"], message.content["arrays"]
        assert list(arrays) == ["weight", "seen", "mask"]
        values = [array.numpy() for array in arrays.values()]
        made = dict(zip(arrays, step(values, peer, 0), strict=True))
        if message.content["config"]["server-round"] == 4 and not (tmp_path / f"died-{peer}").exists():
            (tmp_path / f"died-{peer}").touch()
            raise Killed
        trained = ArrayRecord({name: Array(np.asarray(value)) for name, value in made.items()})
        return Message(RecordDict({"arrays": trained}), reply_to=message)

    def live(place) -> None:
        for _ in range(2):
            with suppress(Killed):
                finish(peer_of(scenario, place, app, initial))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(live, places))
    for peer, model in enumerate(models(places)):
        assert model["weight"].dtype == np.float32
        np.testing.assert_array_equal(model["weight"], np.full((2, 3), 6))
        assert model["seen"] == 6 * (1 + peer)
        assert model["seen"].shape == ()
        assert model["mask"].tolist() == [True, False]


def test_in_synchronous_mode_the_numbers_are_the_engines(build, tmp_path):
    """Stochastic Gradient Push: an app that takes one step from z on the engine's own batches."""
    experiment = build(
        "algorithm={name: sgp, learning_rate: 0.5}", "topology.name=directed-exponential", "privacy=none"
    )
    cohort, rounds = experiment.cohort(), 5
    engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
    for _ in range(rounds):
        engine.round()
    scenario = scenario_of(f"rounds={rounds}", "network.mode=synchronous", "network.final_mixing=0")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    named = {str(n): value.numpy() for n, value in enumerate(experiment.module.state_dict().values())}
    run_all(peers_of(scenario, places, stepping(experiment), InitialArrays(named)))
    rows = engine.state.rows["x"] / engine.state.rows["w"][:, None]
    for row, model in zip(rows, models(places), strict=True):
        np.testing.assert_allclose(np.concatenate([model[name].ravel() for name in named]), row, atol=1e-6)


def stepping(experiment):
    """Return an app's step that is the engine's gradient step."""
    batches = experiment.cohort().data

    def step(arrays, peer, done):
        module = copy.deepcopy(experiment.module)
        names = list(module.state_dict())
        module.load_state_dict({name: torch.from_numpy(each) for name, each in zip(names, arrays, strict=True)})
        batch = batches.batch(done - 1, [peer])
        losses = functional.cross_entropy(module(batch.x[0]), batch.y[0], reduction="none")
        gradients = torch.autograd.grad((losses * batch.weight[0]).sum() / 12, list(module.parameters()))
        with torch.no_grad():
            return [(p - 0.5 * g).numpy() for p, g in zip(module.parameters(), gradients, strict=True)]

    return step


# --- what all begin with ---


@pytest.mark.slow
@quickstarts
def test_a_quickstart_runs_unmodified_and_learns(folder, tmp_path):
    scenario = scenario_of("network.mode=synchronous", "rounds=4", "evaluation.every=4")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    with opened_app(folder / "before", {}) as app:
        initial = initial_from_server_app(app, 4, 7)
        assert initial.digest == initial_from_server_app(app, 4, 7).digest
        drawn = (random.random(), float(np.random.random()), float(torch.rand(())))  # noqa: NPY002
        random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002
        seeded = (random.random(), float(np.random.random()), float(torch.rand(())))  # noqa: NPY002
        assert all(a != b for a, b in zip(drawn, seeded, strict=True)), "an app's noise must not follow from the seed"
        run_all([peer_of(scenario, place, app.client, initial, run_config=app.run_config) for place in places])
    for place in places:
        (line,) = (place.folder / "metrics.jsonl").read_text().splitlines()
        metrics = json.loads(line)
        assert metrics["round"] == 4
        assert next(value for name, value in metrics.items() if name.endswith("accuracy")) > 0.4
        assert load_initial(place.folder / "initial.safetensors").digest == initial.digest


def test_a_server_apps_config_reaches_every_train_function(tmp_path):
    with opened_app(QUICKSTARTS["pytorch"] / "before", {}) as app:
        initial = initial_from_server_app(app, 4, 1)
    assert initial.key == "arrays"
    assert initial.configs["config"]["learning-rate"] == 0.1
    heard = {}
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        heard.update(message.content["config"])
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    scenario = scenario_of("train_config={learning-rate: 0.2, more: x}")
    runner = ClientAppRunner(app, scenario, initial, 0, tmp_path)
    runner.train({"0": np.zeros(1)}, 3)
    assert heard == {"learning-rate": 0.2, "more": "x", "server-round": 3}


def test_an_app_that_routes_shares_itself_is_refused():
    with opened_app(QUICKSTARTS["sklearn"] / "after", {}) as app, raises(RunError, "app.first-message"):
        initial_from_server_app(app, 4, 1)


def test_initial_arrays_are_written_and_read_as_they_are(tmp_path):
    names = [f"layer.{number}" for number in (10, 2, 1)]
    initial = InitialArrays({name: np.full(2, number) for number, name in enumerate(names, 1)} | {"y": np.ones(())})
    initial = replace(initial, key="model", configs={"config": {"a": 1, "b": b"\0\xff", "c": [1.5]}, "more": {}})
    save_initial(tmp_path / "initial.safetensors", initial)
    loaded = load_initial(tmp_path / "initial.safetensors")
    assert list(loaded.arrays) == [*names, "y"]
    assert (loaded.digest, loaded.key, loaded.configs) == (initial.digest, initial.key, initial.configs)


@pytest.mark.parametrize("content", [b"", b"\xff" * 200, b"{}"])
def test_a_file_that_holds_no_initial_arrays_is_named(content, tmp_path):
    path = tmp_path / "initial.safetensors"
    path.write_bytes(content)
    with raises(ScenarioError, "app.initial-file", names="initial.safetensors"):
        load_initial(path)


# --- what is wrong ---


def test_peers_that_begin_differently_refuse_each_other(tmp_path):
    scenario = scenario_of("n_peers=2")
    times = replace(Times.of(scenario.network), give_up=0.2)
    places = [replace(device, times=times) for device in devices(scenario, tmp_path, insecure_seeds=False)]
    one, other = InitialArrays({"0": np.zeros(3)}), InitialArrays({"0": np.ones(3)})
    peers = peers_of(scenario, places[:1], lambda *given: given[0], one)
    peers += peers_of(scenario, places[1:], lambda *given: given[0], other)

    try:
        for peer in peers:
            driver_of(peer).open()
        for peer in peers:
            wait_until(lambda peer=peer: "scenario" in peer.neighbours[1 - peer.device.peer].refused)
        for peer in peers:
            with raises(RunError, "network.unreachable"):
                driver_of(peer).run()
    finally:
        for peer in peers:
            driver_of(peer).close()


def test_named_initial_arrays_cannot_be_replaced(tmp_path):
    scenario = scenario_of(f"initial={'a' * 64}")
    (place, *_) = devices(scenario, tmp_path, insecure_seeds=False)
    with raises(ScenarioError, "app.initial-differs", names="a" * 64):
        peers_of(scenario, [place], sets_its_values_once)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_initial_arrays_that_are_not_finite_are_refused(value, tmp_path):
    (place, *_) = devices(scenario_of(), tmp_path, insecure_seeds=False)
    with raises(ScenarioError, "app.initial-not-finite"):
        peers_of(scenario_of(), [place], sets_its_values_once, InitialArrays({"0": np.array([value])}))


def test_seeds_of_a_test_are_refused(tmp_path):
    with raises(ScenarioError, "app.insecure-seeds", names="--insecure-seeds"):
        peers_of(scenario_of(), devices(scenario_of(), tmp_path)[:1], sets_its_values_once)


def test_a_failing_app_ends_its_peer_and_can_resume(tmp_path):
    scenario = scenario_of("n_peers=2", "rounds=3")
    places, broken = devices(scenario, tmp_path, insecure_seeds=False), [True]

    def step(arrays, peer, done):
        if peer == 0 and done == 2 and broken:
            raise ValueError("a private example")
        return arrays

    peers = peers_of(scenario, places, step)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(finish, peer) for peer in peers)
        with raises(RunError, "app.failed", names="peer 0.*ValueError.*round 2"):
            first.result()
        broken.clear()
        (again,) = peers_of(scenario, places[:1], step)
        finish(again)
        second.result()
    assert float(mass_on_disk([place.folder for place in places])["w"]) == pytest.approx(2, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["data={dataset: digits}"], ("scenario.extra_forbidden",)),
        (["privacy={clip_norm: 1, delta: 0.1}"], ("privacy.no-noise",)),
        (["privacy={epsilon: 1, delta: 0.1}"], ("scenario.missing", "clip_norm")),
        (
            ["privacy={clip_norm: 1, epsilon: 1, delta: 0.1, noise: {kind: cancelling, colluding: 1}}"],
            ("privacy.app-noise", "needs both peers to take the same step; leave it out"),
        ),
        (["privacy={clip_norm: 1, epsilon: 1, delta: 1}"], ("scenario.less_than",)),
        (["n_peers=1"], ("scenario.greater_than_equal", "n_peers")),
        (["initial=abc"], ("scenario.string_pattern_mismatch",)),
        (["network.peers=[{address: '127.0.0.1:1'}]"], ("network.peer-count",)),
    ],
)
def test_an_unsupported_key_for_apps_is_named(settings, refusal: tuple[str, ...]):
    with raises(ScenarioError, *refusal):
        scenario_of(*settings)


@pytest.mark.parametrize("value", ["{a: 1}", "[1, two]", "null"])
def test_a_config_no_message_can_carry_is_refused(value, tmp_path):
    scenario = scenario_of(f"train_config={{rate: {value}}}")
    with raises(ScenarioError, "app.config", names="train_config"):
        ClientAppRunner(client(sets_its_values_once), scenario, zeros(), 0, tmp_path)


@pytest.mark.parametrize("given", ["rate", "=1", "rate=[1]", "rate={a: 1}"])
def test_a_node_config_that_is_no_pair_is_refused(given):
    with raises(ScenarioError, "app.node-config", names=re.escape(given)):
        node_config_of([given])


def test_a_node_config_has_values_of_yaml():
    assert node_config_of(["a=1", "b=0.5", "c=data/one", "d=true"]) == {"a": 1, "b": 0.5, "c": "data/one", "d": True}


def test_a_ledger_that_was_cut_is_refused(tmp_path):
    scenario = scenario_of("n_peers=2", "rounds=2", "privacy={clip_norm: 1, noise_multiplier: 5, delta: 1e-3}")
    places = devices(scenario, tmp_path, insecure_seeds=False)
    run_all(peers_of(scenario, places, sets_its_values_once))
    path = ledger_path(places[0].folder / "ledger", SOURCE)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with raises(BudgetError, "ledger.stale"):
        peers_of(scenario, places[:1], sets_its_values_once)


def test_a_run_without_any_allowed_update_is_refused(tmp_path):
    scenario = scenario_of(
        "n_peers=2", "rounds=2", "privacy={clip_norm: 1, noise_multiplier: 5, epsilon: 0.9, delta: 1e-3}"
    )
    shared = scenario.model_copy(
        update={"privacy": scenario.private.model_copy(update={"ledger": str(tmp_path / "ledger")})}
    )
    (place, *_) = devices(scenario, tmp_path, insecure_seeds=False)
    with PeerLedger(tmp_path / "ledger", "before", 1, 0, 1e-3) as ledger:
        for round_index in range(1, 5):
            ledger.charge(round_index, 5.0)
    with raises(BudgetError, "ledger.budget-spent"):
        peers_of(shared, [place], sets_its_values_once)


# --- the command ---

FILE = "name: app\nn_peers: 2\nrounds: 1\nprivacy: none\nnetwork: {peers: [{address: A}, {address: B}]}\n"


@pytest.fixture
def scenario_file(tmp_path) -> Path:
    one, other = own_addresses(2)
    path = tmp_path / "app.yaml"
    path.write_text(FILE.replace("A", one).replace("B", other))
    assert privdec("certs", path, "--out", tmp_path / "certs") == 0
    return path


def test_certificates_are_made_for_a_scenario_without_a_model(scenario_file):
    assert (scenario_file.parent / "certs" / "peer-1.pem").exists()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--app", QUICKSTARTS["sklearn"] / "before", "--insecure-seeds"], "data and batches are the app's"),
        (["--app", QUICKSTARTS["sklearn"] / "before", "--data", "here"], "data and batches are the app's"),
        (["--initial", "initial.safetensors"], "are for --app"),
        (["--node-config", "a=1"], "are for --app"),
        ([], "'data', 'model', 'algorithm' are missing"),
        (["--app", "nowhere"], "give the folder of a Flower app"),
        (["--app", QUICKSTARTS["sklearn"] / "before", "--set", "run_config={nope: 1}"], "is not a key of the app's"),
        (["--app", QUICKSTARTS["sklearn"] / "before", "--initial", "nowhere"], "holds no initial arrays"),
        (["--app", QUICKSTARTS["sklearn"] / "before", "--set", "data={dataset: digits}"], "data"),
    ],
)
def test_contradictory_settings_are_refused_before_any_work(options, wrong, scenario_file, capsys):
    folder = scenario_file.parent
    status = privdec("peer", scenario_file, "--id", "0", "--out", folder / "0", "--certs", folder / "certs", *options)
    assert status == 2
    assert wrong in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (folder / "0").exists()
