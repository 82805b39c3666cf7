"""Shapes of app by real `flwr run`, and by `privdec peer --app` with protection: processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import forked, privdec, status_of
from paths import ROOT
from ports import own_addresses

from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.ledger.spending import releases_in

pytestmark = pytest.mark.slow

PROJECT = """\
[project]
name = "shapes"
version = "0.1.0"
description = "A strategy with a start of its own that saves its model, and peers of unequal weight"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "privdec"

[tool.flwr.app.components]
serverapp = "shapes.server_app:app"
clientapp = "shapes.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
"""
CLIENT = """\
from flwr.app import ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flower_privdec.flower import PeerMod

app = ClientApp(mods={mods})


@app.train()
def train(message, context):
    peer, first = context.node_config["partition-id"], message.content["config"]["server-round"] == 1
    moved = [array + peer * first for array in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({{"num-examples": 10 + 20 * peer}})
    return Message(RecordDict({{"arrays": ArrayRecord(moved), "metrics": metrics}}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    (array,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({{"value": float(array[0]), "num-examples": 1}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""
SERVER = """\
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from flower_privdec.flower import Gossip

app = ServerApp()


class Custom({base}):
    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, train_config=None, **options):
        result, arrays = Result(), initial_arrays
        for current in range(1, num_rounds + 1):
            print(f"[ROUND {{current}}/{{num_rounds}}]", flush=True)
            messages = self.configure_train(current, arrays, train_config or ConfigRecord(), grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(current, replies)
            result.train_metrics_clientapp[current] = metrics
        result.arrays = arrays
        return result

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        np.savez(f"round-{{server_round}}.npz", *arrays.to_numpy_ndarrays())
        return arrays, metrics


@app.main()
def main(grid, context):
    result = Custom({options}).start(grid, ArrayRecord([np.zeros(3)]), context.run_config["num-server-rounds"])
    np.savez("final.npz", *result.arrays.to_numpy_ndarrays())
"""


def app_in(folder: Path, base: str, options: str, mods: str) -> Path:
    (folder / "shapes").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "shapes" / "__init__.py").write_text("")
    (folder / "shapes" / "client_app.py").write_text(CLIENT.format(mods=mods))
    (folder / "shapes" / "server_app.py").write_text(SERVER.format(base=base, options=options))
    return folder


def test_flower_run_runs_any_app_and_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An app with a start of its own that saves and weighs, over gossip on two peers, with next to no noise."""
    mods = "[PeerMod(clip_norm=9.0, noise_multiplier=1e-4, delta=1e-3, share_metrics=True)]"
    app = app_in(tmp_path / "app", "Gossip", '"complete"', mods)
    monkeypatch.chdir(tmp_path)
    status = privdec("flower-run", app, "--supernodes", "2", "-c", "num-server-rounds=4", "--out", "out")
    out, errors = capsys.readouterr()
    assert status == 0, errors
    assert "charged: 4 Gaussian updates" in out
    assert "app: round 4/4" in errors
    for name in ("round-4", "final"):  # 10 and 30 examples, whose peers moved by 0 and 1
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}.npz")["arr_0"], 0.75, atol=0.1)
    ledgers = sorted((tmp_path / "out" / "peers").glob("*/peer-*/peer-updates.jsonl"))
    assert [len(ledger.read_text().splitlines()) for ledger in ledgers] == [5] * 2
    assert not list(app.rglob("*.fab"))


@pytest.mark.parametrize("shape", ["start", "sklearn"])
def test_a_peer_runs_an_unmodified_app_with_protection(shape: str, tmp_path: Path) -> None:
    before = ROOT / "simulations" / "adapted-quickstart-sklearn" / "before"
    app = before if shape == "sklearn" else app_in(tmp_path / "app", "FedAvg", "", "[]")
    scenario = tmp_path / "app.yaml"
    one, other = own_addresses(2)
    scenario.write_text(
        "name: app\nn_peers: 2\nrounds: 2\nprivacy: {clip_norm: 0.5, epsilon: 20, delta: 1.0e-2}\n"
        f"network: {{deadline: 120, peers: [{{address: '{one}'}}, {{address: '{other}'}}]}}\n"
    )
    assert privdec("certs", scenario, "--out", tmp_path / "certs") == 0
    folders = [tmp_path / str(peer) for peer in range(2)]
    common = ("--app", app, "--certs", tmp_path / "certs")
    peers = [
        forked(privdec, "peer", scenario, "--id", peer, "--out", folder, *common) for peer, folder in enumerate(folders)
    ]
    assert [status_of(peer) for peer in peers] == [0, 0]
    for folder in folders:
        assert (folder / "model.safetensors").is_file()
        assert (folder / "metrics.jsonl").read_text().count("\n") >= 1
        (ledger,) = (folder / "ledger").glob("*.jsonl")
        (release,) = releases_in(read_chain(ledger)[1])
        assert (release.sampling, release.steps) == ("full", 2)


def test_noise_cancels_in_flowers_own_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session outlives a message in the node's context, whichever process of Ray answers the next one."""
    noise = "noise={'kind': 'cancelling', 'colluding': 1}"
    mods = f"[PeerMod(clip_norm=1.0, noise_multiplier=3.0, delta=1e-3, {noise})]"
    app = app_in(tmp_path / "app", "PushSum", '"complete", fraction_evaluate=0.0', mods)
    server = app / "shapes" / "server_app.py"
    text = server.read_text().replace("import Gossip", "import PushSum").replace("np.zeros(3)", "np.zeros(4000)")
    server.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert privdec("flower-run", app, "--supernodes", "6", "--out", "out") == 0
    left = np.load(tmp_path / "out" / "final.npz")["arr_0"].std()
    server_alone = 3.0 * 3**0.5 / 6  # of three rounds; independent noise leaves 2.4 times as much
    assert server_alone < left < 1.4 * server_alone
