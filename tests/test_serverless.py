"""Peers that run an unmodified Flower app on a network: exact means, ledgers, kills, what is wrong named."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networked import devices, finish
from routing_peers import sets_its_values_once, values_of
from safetensors.numpy import load_file

from flower_privdec.errors import BudgetError, RunError, ScenarioError
from flower_privdec.runtime.network.durable_mass import mass_on_disk
from flower_privdec.runtime.serverless.app_peer import AppPeer, app_peer
from flower_privdec.runtime.serverless.driven_app import DrivenApp
from flower_privdec.runtime.serverless.initial_arrays import InitialArrays, load_initial, save_initial
from flower_privdec.scenario.app_scenario import AppScenario, parse_app_scenario

TEXT = """
name: app
n_peers: 4
rounds: 2
privacy: none
evaluation: {every: 100}
network: {deadline: 10, retry: 0.05, start: 30}
"""


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


def peers_of(scenario, places, step, initial=None, resume=False) -> list[AppPeer]:
    initial = initial or zeros()
    app = client(step)
    return [
        app_peer(
            scenario,
            place,
            initial,
            DrivenApp(app, initial, place.peer, scenario.n_peers, place.folder),
            resume,
        )
        for place in places
    ]


def run_all(peers: list[AppPeer]) -> None:
    with ThreadPoolExecutor(len(peers)) as pool:
        list(pool.map(finish, peers))


def models(places) -> list[dict[str, np.ndarray]]:
    return [load_file(place.folder / "model.safetensors") for place in places]


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_an_unmodified_app_reaches_the_exact_mean_in_log2_n_rounds(mode, tmp_path):
    scenario = scenario_of(f"network.mode={mode}")
    places = devices(scenario.as_scenario, tmp_path, insecure_seeds=False)
    run_all(peers_of(scenario, places, sets_its_values_once))
    mean = np.mean([values_of(peer) for peer in range(4)], axis=0)
    if mode == "synchronous":
        for model in models(places):
            assert np.abs(model["0"] - mean).max() < 1e-12
    else:
        total = mass_on_disk([place.folder for place in places])
        assert float(total["w"]) == pytest.approx(4, abs=1e-12)
        assert np.abs(total["x"].numpy() / 4 - mean).max() < 1e-12
