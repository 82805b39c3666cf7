"""What all know, and what is a peer's own: nobody reads, hashes or counts what is another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hosting import hosting
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Tiny

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import Relay
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.scenario import Scenario

FEDAVG = ["algorithm={name: fedavg, learning_rate: 0.3, local_steps: 2}", "topology.name=server"]
SHARES = "data.partition={kind: sizes, sizes: [40, 20, 25, 35]}"
NPZ = ["data.dataset=npz", "data.test_samples=null", "data.samples=null", "data.batch.size=4"]
SMALL = ["data.samples=120", "data.batch.size=4"]


@pytest.fixture
def files(tiny: Tiny, tmp_path: Path) -> Path:
    """A folder with peer-I.npz of every peer, as the tiny scenario partitions digits, and test.npz."""
    return write_files(Experiment.build(tiny(*SMALL, SHARES)), tmp_path / "data")


def write_files(experiment: Experiment, folder: Path) -> Path:
    folder.mkdir()
    examples, public = experiment.own.examples, experiment.public
    np.savez(folder / "test.npz", x_test=public.x.numpy(), y_test=public.y.numpy())
    for peer, rows in enumerate(examples.parts):
        np.savez(folder / f"peer-{peer}.npz", x_train=examples.x[rows].numpy(), y_train=examples.y[rows].numpy())
    return folder


def own_files(tiny: Tiny, folder: Path, *settings: str) -> Scenario:
    places = [f"data.root={folder}/peer-{{peer}}.npz", f"data.test={folder}/test.npz"]
    return tiny(
        "data.dataset=npz", "data.test_samples=null", "data.samples=null", *places, "data.batch.size=4", *settings
    )


@pytest.mark.parametrize("peer", range(4))
def test_a_peer_needs_no_file_but_its_own(tiny: Tiny, files: Path, peer: int) -> None:
    agreement = Agreement.of(own_files(tiny, files))
    whole = OwnParts.of(agreement)
    assert hosting(agreement, [peer]).own.keys == {peer: whole.keys[peer]}
    for other in set(range(4)) - {peer}:
        (files / f"peer-{other}.npz").unlink()
    own = OwnParts.of(agreement, np.array([peer]), b"a deployed peer's secret", runtime="network")
    assert torch.equal(own.examples.x, whole.examples.x[whole.examples.parts[peer]])
    assert own.protection is not None
    assert whole.protection is not None
    assert own.protection.accounts[0] == whole.protection.accounts[peer]
    with raises(ScenarioError, "data.no-file"):
        hosting(agreement, [peer, (peer + 1) % 4])


def test_the_agreement_is_made_without_any_training_example(tiny: Tiny, files: Path) -> None:
    for file in files.glob("peer-*.npz"):
        file.unlink()
    agreement = Agreement.of(own_files(tiny, files))
    assert agreement.public.n_classes == 10
    with raises(ScenarioError, "data.no-file"):
        OwnParts.of(agreement)


def test_peers_own_files_give_the_same_bits(tiny: Tiny, tmp_path: Path) -> None:
    digits = Experiment.build(tiny(*SMALL))
    folder = write_files(digits, tmp_path / "data")
    x, y = digits.own.examples.x.numpy(), digits.own.examples.y.numpy()
    np.savez(folder / "whole.npz", x_train=x, y_train=y)
    partitioned = tiny(*NPZ, f"data.root={folder}/whole.npz", f"data.test={folder}/test.npz")
    for out, scenario in (("partitioned", partitioned), ("own", own_files(tiny, folder))):
        run(Experiment.build(scenario), tmp_path / out)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("own", "partitioned"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("algorithm", [["algorithm.name=sgp"], FEDAVG], ids=["sgp", "fedavg"])
def test_deployed_nodes_need_no_other_peers_file(tiny: Tiny, files: Path, tmp_path: Path, algorithm: list[str]) -> None:
    full = "data.batch={sampling: full}"  # for else a deployed peer draws its examples afresh
    scenario = own_files(tiny, files, "privacy=none", "compute.dtype=float64", full, *algorithm)
    run(Experiment.build(scenario), tmp_path / "engine")
    config = {}
    for peer in range(4):
        home = tmp_path / f"home-{peer}"
        home.mkdir()
        (files / f"peer-{peer}.npz").rename(home / "mine.npz")
        config[peer] = {
            "ledger": str(home / "ledger"),
            "epsilon": float("inf"),
            "delta": 1e-5,
            "data-root": str(home / "mine.npz"),
            "data-test": str(files / "test.npz"),
        }
    Relay(scenario, tmp_path / "relay").start(LocalGrid(client_app(), 4, config=config))
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("engine", "relay"))
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-9, atol=1e-12)


def test_a_deployed_node_must_name_its_own_file(tiny: Tiny, files: Path, tmp_path: Path) -> None:
    config = {0: {"ledger": str(tmp_path / "ledger"), "epsilon": float("inf"), "delta": 1e-5}}
    scenario = own_files(tiny, files, "n_peers=1", "privacy=none", "algorithm={name: local, learning_rate: 0.1}")
    with raises(RunError, "nodes.failed", "data-root"):
        Relay(scenario, tmp_path / "run").start(LocalGrid(client_app(), 1, config=config))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.test=null", "data: test is missing: if root has {peer}, name the test set that all peers share"),
        ("data.samples=40", "data: samples is for one dataset that is partitioned, and root has {peer}"),
        ("data.partition={kind: dirichlet, alpha: 1.0}", "data: partition is for one dataset that is partitioned"),
    ],
)
def test_settings_for_a_shared_dataset_are_refused(tiny: Tiny, files: Path, setting: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        own_files(tiny, files, setting)
    assert said in str(caught.value)


def test_files_that_do_not_fit_are_named(tiny: Tiny, files: Path) -> None:
    scenario = own_files(tiny, files)
    np.savez(files / "peer-2.npz", x_train=np.zeros((30, 1, 8, 7)), y_train=np.arange(30) % 10)
    with raises(ScenarioError, "data.shapes", r"\[\(1, 8, 7\), \(1, 8, 8\)\]"):
        Experiment.build(scenario)
    with raises(ScenarioError, "data.shapes", r"\[1, 8, 7\]"):
        hosting(Agreement.of(scenario), [2])
    np.savez(files / "peer-2.npz", x_train=np.zeros((30, 1, 8, 8)), y_train=np.arange(30) % 12)
    with raises(ScenarioError, "data.labels", "label 11"):
        hosting(Agreement.of(scenario), [2])
    Experiment.build(scenario.model_copy(update={"data": scenario.data.model_copy(update={"classes": 12})}))
