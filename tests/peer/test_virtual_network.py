"""Peers on a virtual clock: no thread, no socket, and the same events each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec import testing
from flower_privdec.common.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.faults import FaultSchedule
from flower_privdec.peer.peer import PeerPlace, RunningPeer
from flower_privdec.peer.store import MemoryStore
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.times import Times
from flower_privdec.peer.trainer import ScenarioTrainer
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.scenario import Scenario

MODES: dict[str, type[RunningPeer]] = {"asynchronous": AsynchronousPeer, "synchronous": SynchronousPeer}
SLOW_DISKS = "{train: 0.3, save: 0.02}"


class FolderDisk:
    """A peer's folder: its store in memory, and what its trainer keeps on disk."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.folder = folder
        self.store = store

    def copy(self) -> FolderDisk:
        raise NotImplementedError("no test restores one")

    def fill(self, is_full: bool) -> None:
        self.store.is_full = is_full


class ScenarioHome:
    """Peers of a scenario, as they are deployed."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
        self.times: Times | None = None

    def empty(self, peer: int) -> FolderDisk:
        folder = self.folder / f"peer-{peer}"
        folder.mkdir(parents=True, exist_ok=True)
        return FolderDisk(folder, MemoryStore(MODES[self.scenario.network.mode].generations))

    def start(self, peer: int, disk: FolderDisk, draw: Callable[[], int]) -> RunningPeer:
        place = PeerPlace(peer, disk.folder, insecure_seeds=True, draw=draw, times=self.times)
        trainer = ScenarioTrainer(self.scenario, peer, disk.folder, insecure_seeds=True)
        return MODES[self.scenario.network.mode](trainer, place, disk.store)


def network_of(scenario: Scenario, folder: Path, schedule: str = "{}") -> VirtualNetwork:
    return VirtualNetwork(ScenarioHome(scenario, folder), range(scenario.n_peers), FaultSchedule.parse(schedule))


def run_virtually(scenario: Scenario, folder: Path, loss: float = 0.0, seed: int = 0) -> tuple[VirtualNetwork, Tensor]:
    """Run all peers to their ends; return the network and their rows x, [n_peers, d]."""
    links = f"{{latency: 0.01, jitter: 0.05, loss: {loss}}}"
    network = network_of(scenario, folder, f"{{seed: {seed}, links: {links}, work: {SLOW_DISKS}}}")
    try:
        network.run()
    finally:
        network.close()
    assert network.ends == dict.fromkeys(range(scenario.n_peers))
    return network, torch.cat([peer.state.rows["x"] for _, peer in sorted(network.peers.items())])


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_synchronous_peers_follow_the_engine(name: str, loss: float, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        *settings_for(f"algorithm.name={name}"), "network={mode: synchronous, deadline: 20.0, final_mixing: 0}"
    )
    _, rows = run_virtually(scenario, tmp_path, loss)
    wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds)
    torch.testing.assert_close(rows, wanted.state.rows["x"])


@pytest.mark.parametrize("steps", [2, 3])
def test_peers_on_time_follow_the_engine_without_waiting(steps: int, tiny: Tiny, tmp_path: Path) -> None:
    """Several exchanges in a round, whose shares come in any order: none is late, and none is added too early."""
    topology = f"topology={{name: directed-exponential, mixing_steps: {steps}}}"
    scenario = tiny(topology, "network={deadline: 20.0, final_mixing: 0, alone: go-on}")
    _, rows = run_virtually(scenario, tmp_path)
    wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds)
    torch.testing.assert_close(rows, wanted.state.rows["x"])


@pytest.mark.parametrize("moment", [1.31, 1.45, 1.62, 1.71, 1.83, 1.96])
def test_a_kill_within_a_round_loses_no_mass(moment: float, tiny: Tiny, tmp_path: Path) -> None:
    """Wherever it dies in the round: between splitting and committing, before or after one of three exchanges."""
    graph = "topology={name: directed-exponential, mixing_steps: 3}"
    network = "network={deadline: 20.0}"
    scenario = tiny("algorithm={name: sgp, learning_rate: 1.0e-12}", "privacy=none", graph, network)
    crash = f"{{kind: crash, peer: 1, at: {moment}, down: 0.05}}"
    virtual = network_of(scenario, tmp_path, f"{{work: {{train: 0.1, save: 0.05}}, faults: [{crash}]}}")
    virtual.run()
    virtual.close()
    assert virtual.faults["crash"] == 1
    assert virtual.ends == dict.fromkeys(range(scenario.n_peers))
    assert weight_of(virtual) == pytest.approx(scenario.n_peers, rel=1e-12)


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
def test_the_same_seed_gives_the_same_events(name: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        *settings_for(f"algorithm.name={name}"),
        "privacy={noise_multiplier: 1.0, delta: 1.0e-3}",
        "network={deadline: 20.0}",
    )
    first, rows = run_virtually(scenario, tmp_path / "first", loss=0.1, seed=5)
    again, rows_again = run_virtually(scenario, tmp_path / "again", loss=0.1, seed=5)
    assert first.events == again.events
    assert first.now == again.now
    assert torch.equal(rows, rows_again)


def test_lost_calls_lose_no_mass(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm={name: sgp, learning_rate: 1.0e-12}", "privacy=none", "network={deadline: 20.0}")
    network, _ = run_virtually(scenario, tmp_path, loss=0.2, seed=1)
    assert network.faults["loss"] > 10
    assert weight_of(network) == pytest.approx(scenario.n_peers, rel=1e-12)


def test_shares_of_a_final_round_take_one_write(tiny: Tiny, tmp_path: Path) -> None:
    """Each peer hears three others in each of eight rounds: a write for what came, and one for what it sends."""
    scenario = tiny("privacy=none", "topology={name: complete}", "network={deadline: 20.0, final_mixing: 8}")
    network = network_of(scenario, tmp_path, "{links: {latency: 0.05, jitter: 0.02}, work: {train: 0.1, save: 0.001}}")
    network.run()
    final = network.peers[0].final
    saved = [machine.performed["save"] for machine in network.machines.values()]
    assert max(saved) < 3 * scenario.rounds + 2.5 * final, saved


def test_a_peer_that_is_alone_waits_without_real_time(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny()
    home = ScenarioHome(scenario, tmp_path)
    home.times = replace(Times.of(scenario.network), give_up=3600.0)
    alone = VirtualNetwork(home, [0])
    alone.run()
    assert alone.now > 3600
    assert isinstance(alone.ends[0], RunError)
    assert alone.ends[0].code == "network.unreachable"


def test_a_peer_killed_in_memory_continues_from_its_store(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm={name: sgp, learning_rate: 1.0e-12}", "privacy=none", "network={deadline: 20.0}")
    crash = "{kind: crash, peer: 1, at: 1.5, down: 0.0}"
    network = network_of(scenario, tmp_path, f"{{work: {SLOW_DISKS}, faults: [{crash}]}}")
    network.run(until=1.49)
    before = network.peers[1]
    assert 0 < before.state.round_index < scenario.rounds
    network.run()
    assert network.peers[1] is not before
    assert network.ends == dict.fromkeys(range(scenario.n_peers))
    assert weight_of(network) == pytest.approx(scenario.n_peers, rel=1e-12)
    network.close()


CODECS = ["int8", "int4", "top-k", "random-k"]
CRASHES = "[{kind: crash, peer: 1, at: 1.5, down: 0.0}, {kind: crash, peer: 2, at: 2.5, down: 0.4}]"
FAULTS = f"{{links: {{latency: 0.01, jitter: 0.05, loss: 0.1}}, work: {SLOW_DISKS}, faults: {CRASHES}}}"


@pytest.mark.parametrize("codec", CODECS)
def test_no_codec_loses_mass_when_peers_are_killed(codec: str, tiny: Tiny, tmp_path: Path) -> None:
    settings = ("privacy=none", f"network={{codec: {codec}, deadline: 20.0}}")
    scenario = tiny("algorithm={name: sgp, learning_rate: 1.0e-12}", *settings)
    network = network_of(scenario, tmp_path, FAULTS)
    network.run()
    network.close()
    assert network.ends == dict.fromkeys(range(scenario.n_peers))
    assert network.faults["crash"] == 2
    assert weight_of(network) == pytest.approx(scenario.n_peers, rel=1e-12)
    start = scenario.n_peers * Experiment.build(scenario).initial
    torch.testing.assert_close(mass_of(network), start, rtol=0, atol=1e-9)


@pytest.mark.parametrize("codec", CODECS)
def test_killed_synchronous_peers_round_as_the_engine(codec: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(f"network={{mode: synchronous, codec: {codec}, deadline: 20.0, final_mixing: 0}}")
    network = network_of(scenario, tmp_path, FAULTS)
    network.run()
    network.close()
    assert network.faults["crash"] == 2
    rows = torch.cat([peer.state.rows["x"] for _, peer in sorted(network.peers.items())])
    wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds)
    torch.testing.assert_close(rows, wanted.state.rows["x"])


def mass_of(network: VirtualNetwork) -> Tensor:
    """Return x of all asynchronous peers together, with that of the shares that their receivers do not have."""
    peers: dict[int, Any] = dict(network.peers)
    parts = [peer.protocol.mass["x"].clone() for peer in peers.values()]
    for number, peer in peers.items():
        for receiver, edge in peer.protocol.edges.items():
            back = peers[receiver].protocol.edges[number]
            for share in edge.frozen:
                if share.number > back.received:
                    opened, _ = peer.arithmetic.open(share.values, peer.protocol.mass, back.heard)
                    parts.append(opened["x"])
    return torch.stack(parts).sum(0)


def weight_of(network: VirtualNetwork) -> float:
    """Return the push-sum weight of all asynchronous peers, and of the shares that their receivers do not have."""
    peers: dict[int, Any] = dict(network.peers)
    total = sum(float(peer.protocol.mass["w"]) for peer in peers.values())
    for number, peer in peers.items():
        for receiver, edge in peer.protocol.edges.items():
            received = peers[receiver].protocol.edges[number].received
            total += sum(float(share.values["w"]) for share in edge.frozen if share.number > received)
    return total
