"""SuperNodes that talk to each other directly inside one train message: who is introduced, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ports import own_addresses
from raising import raises
from routing_peers import Step, client, first, sets_its_values_once, values_of, zeros

from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import LocalGrid, Mesh
from flower_privdec.flower.node_settings import PeerSettings
from flower_privdec.flower.serverless import InitialArrays, _checked_scenario, run_mesh
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.peer.times import LINKS
from flower_privdec.scenario.loading import parse_app_scenario
from tools.battery.together_grid import TogetherGrid


def grid_of(
    folder: Path, n_peers: int, *, without: tuple[int, ...] = (), step: Step = sets_its_values_once, **options
) -> LocalGrid:
    """Return nodes with an address and certificates each, but for some; where rounds are relayed they take turns."""
    scenario = parse_app_scenario(f"{{name: mesh, n_peers: {n_peers}, rounds: 1, privacy: none}}")
    make_certificates(scenario, folder / "certs")
    config = {
        peer: {"address": address, "certificates": str(folder / "certs")}
        for peer, address in enumerate(own_addresses(n_peers))
        if peer not in without
    }
    kind = LocalGrid if without else TogetherGrid
    return kind(client(step, **options), n_peers, folder=folder, config=config)


def mean_of(n_peers: int) -> np.ndarray:
    return np.mean([values_of(peer) for peer in range(n_peers)], axis=0)


def test_a_mesh_reaches_the_mean_without_the_server(tmp_path):
    grid = grid_of(tmp_path, 4)
    result = Mesh(name="mesh", mode="synchronous").start(grid, zeros(), 2)
    assert np.abs(first(result.arrays) - mean_of(4)).max() < 1e-12
    assert result.evaluate_metrics_clientapp[2]["size"] == pytest.approx(mean_of(4).max())
    for peer in range(4):
        (line,) = (tmp_path / f"peer-{peer}" / "mesh-mesh" / "scenario.yaml").read_text().splitlines()[:1]
        assert line == "name: mesh"


def test_a_finished_mesh_is_not_rerun_after_relayed_rounds(tmp_path):
    grid = grid_of(tmp_path, 2)
    once = Mesh(name="mesh", mode="synchronous").start(grid, zeros(), 2)
    again = Mesh(name="mesh", mode="synchronous").start(grid, zeros(), 2)
    np.testing.assert_array_equal(first(once.arrays), first(again.arrays))
    with raises(RunError, "nodes.all-failed", "give the run another name"):
        Mesh(name="mesh", mode="synchronous").start(grid, zeros(), 3)


def test_a_lost_peer_finishes_when_its_run_restarts(tmp_path):
    """The others are done, and train no more: they run on from their checkpoints so that it reaches them."""
    trained, is_off = [], [True]

    def step(arrays, peer, server_round):
        trained.append((peer, server_round))
        if peer == 2 and server_round == 3 and is_off[0]:
            raise RuntimeError("the device is off")
        return [arrays[0] + 1]

    def start():
        strategy = Mesh("complete", name="mesh", deadline=2.0, fraction_evaluate=0.0)
        strategy.start(grid_of(tmp_path, 3, step=step), zeros(), 6)
        return strategy

    with raises(RunError, "mesh.unfinished", names=r"peers \[2\]"):
        start()
    is_off[0] = False
    strategy = start()
    assert {report.round_index for report in strategy.reports.values()} == {6}
    assert sorted(trained) == sorted([(peer, k) for peer in range(3) for k in range(1, 7)] + [(2, 3)])


def test_nodes_without_address_fall_back_to_relaying(tmp_path, caplog):
    grid = grid_of(tmp_path, 4, without=(2,))
    result = Mesh(name="mesh").start(grid, zeros(), 2)
    assert np.abs(first(result.arrays) - mean_of(4)).max() < 1e-12
    assert "Peers [2] have no address: all rounds are relayed" in caplog.text
    assert not list(tmp_path.glob("peer-?/mesh-*"))


def test_a_meshs_ledger_holds_its_owners_budget(tmp_path):
    grid = grid_of(tmp_path, 2, clip_norm=1.0, noise_multiplier=5.0, delta=1e-3)
    grid.contexts[100].node_config["epsilon"] = 0.8
    strategy = Mesh(name="mesh", mode="synchronous")
    strategy.start(grid, zeros(), 4)
    assert 0 < strategy.reports[0].epsilon <= 0.8 < strategy.reports[1].epsilon
    assert "4 Gaussian updates" in strategy.reports[1].spent
    assert len((tmp_path / "peer-1" / "peer-updates.jsonl").read_text().splitlines()) == 5


def scenario_text(**changes) -> str:
    sections = {"name": "mesh", "n_peers": 2, "rounds": 3, "privacy": "none"}
    sections["network"] = {"peers": [{"address": "127.0.0.1:7100"}, {"address": "127.0.0.1:7101"}], "hand_in": False}
    return json.dumps(sections | changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"topology": {"name": "edge-list", "file": "/etc/passwd"}}, "mesh.scenario: .*topology"),
        ({"topology": {"module": "os:system"}}, "mesh.scenario: .*topology"),
        (
            {"privacy": {"clip_norm": 1e9, "noise_multiplier": 1e-9, "delta": 0.1}},
            "mesh.scenario: .*hand_in or run_config",
        ),
        ({"run_config": {"a": 1}}, "mesh.scenario: .*hand_in or run_config"),
        ({"network": {"hand_in": False, "retry": 1e-9}}, "retry"),
        ({"network": {"hand_in": False, "codec": "os:system"}}, "mesh.scenario: .*names code"),
        ({"network": {"hand_in": False, "transport": "os:system"}}, "mesh.scenario: .*names code"),
        ({"name": "other"}, "mesh.scenario: .*'other'"),
        ({"name": "../../etc"}, "name"),
        ({"n_peers": 3, "network": {"hand_in": False}}, "mesh.scenario: .* 3 peers"),
        (
            {"network": {"hand_in": False, "peers": [{"address": "0.0.0.0:7100"}, {"address": "127.0.0.1:7101"}]}},
            "mesh.scenario: .* 0.0.0.0:7100",
        ),
    ],
)
def test_a_server_decides_only_graph_and_addresses(changes, wrong, tmp_path):
    settings = PeerSettings(0, 2, tmp_path, False, float("inf"), None, None, "127.0.0.1:7100", tmp_path)
    with pytest.raises((RunError, ScenarioError)) as error:
        _checked_scenario("mesh", scenario_text(**changes), settings)
    assert re.search(wrong, f"{error.value.code}: {error.value}")


def test_a_node_without_address_or_certificate_gets_a_remedy(tmp_path):
    settings, initial = PeerSettings(0, 2, tmp_path, False, float("inf"), None, None), InitialArrays({})
    with raises(RunError, "mesh.address", names="--node-config"):
        run_mesh("mesh", scenario_text(), initial, settings, None, lambda arrays, server_round: arrays)


def test_a_stranger_that_the_server_introduces_gets_nowhere(tmp_path, monkeypatch):
    """Whoever introduces the nodes may put its own address in the place of another: it has no certificate for it."""
    monkeypatch.setitem(LINKS, "lan", replace(LINKS["lan"], start=1.0, deadline=1.0))
    grid = grid_of(tmp_path, 2)
    scenario = parse_app_scenario("{name: mesh, n_peers: 2, rounds: 1, privacy: none}")
    make_certificates(scenario, tmp_path / "strangers")
    grid.contexts[101].node_config["certificates"] = str(tmp_path / "strangers")
    with raises(RunError, "nodes.all-failed", "could be greeted"):
        Mesh(name="mesh").start(grid, zeros(), 2)


@pytest.mark.parametrize(
    "options",
    [{"mode": "sometimes"}, {"links": "moon"}, {"deadline": -1.0}, {"name": "a/b"}, {"topology": object()}],
    ids=lambda options: next(iter(options)),
)
def test_an_impossible_mesh_is_refused_before_the_run(options):
    with raises(ScenarioError, "mesh.setting", next(iter(options))):
        Mesh(**{"name": "mesh", **options})
