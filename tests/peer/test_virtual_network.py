"""Peers on a virtual clock: no thread, no socket, and the same events each time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from asynchronous_network import check_mass, initial
from raising import raises
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec import testing
from flower_privdec.common.errors import RunError
from flower_privdec.experiment import Experiment
from flower_privdec.peer.asynchronous import AsynchronousPeer
from flower_privdec.peer.peer import PeerPlace, RunningPeer
from flower_privdec.peer.store import MemoryStore
from flower_privdec.peer.synchronous import SynchronousPeer
from flower_privdec.peer.trainer import ScenarioTrainer
from flower_privdec.peer.virtual_network import VirtualNetwork
from flower_privdec.scenario import Scenario

MODES: dict[str, type[RunningPeer]] = {"asynchronous": AsynchronousPeer, "synchronous": SynchronousPeer}
PRIVACY = "privacy={noise_multiplier: 1.0, delta: 1.0e-3}"
SLOW_DISKS = {"train": 0.3, "save": 0.02}


def peers_of(
    scenario: Scenario, folder: Path, stores: Mapping[int, MemoryStore] | None = None
) -> dict[int, RunningPeer]:
    made = dict[int, RunningPeer]()
    for number in range(scenario.n_peers):
        place = PeerPlace(number, folder / f"peer-{number}", insecure_seeds=True)
        trainer = ScenarioTrainer(scenario, number, place.folder, insecure_seeds=True)
        place.folder.mkdir(parents=True, exist_ok=True)  # for what it trains, also if its store is in memory
        store = None if stores is None else stores[number]
        made[number] = MODES[scenario.network.mode](trainer, place, store)
    return made


def run_virtually(scenario: Scenario, folder: Path, loss: float = 0.0, seed: int = 0) -> tuple[VirtualNetwork, Tensor]:
    """Run all peers to their ends; return the network and their rows x, [n_peers, d]."""
    draw = Random(seed)

    def latency(sender: int, receiver: int) -> float | None:
        return None if draw.random() < loss else 0.01 + 0.05 * draw.random()

    peers = peers_of(scenario, folder)
    network = VirtualNetwork(peers, latency, SLOW_DISKS)
    try:
        network.run()
    finally:
        for peer in peers.values():
            peer.close()
    assert network.ends == dict.fromkeys(peers)
    return network, torch.cat([peer.state.rows["x"] for peer in peers.values()])


@pytest.mark.parametrize("name", ["privsgp", "d-psgd"])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_synchronous_peers_follow_the_engine(name: str, loss: float, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(
        *settings_for(f"algorithm.name={name}"), "network={mode: synchronous, deadline: 20.0, final_mixing: 0}"
    )
    _, rows = run_virtually(scenario, tmp_path, loss)
    wanted = testing.run_rounds(Experiment.build(scenario), scenario.rounds)
    torch.testing.assert_close(rows, wanted.state.rows["x"])


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
    run_virtually(scenario, tmp_path, loss=0.2, seed=1)
    check_mass(tmp_path, initial(scenario))


def test_a_peer_that_is_alone_waits_without_real_time(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny()
    peers = peers_of(scenario, tmp_path)
    peers[0].times = replace(peers[0].times, give_up=3600.0)
    alone = VirtualNetwork({0: peers[0]})
    alone.run()
    assert isinstance(alone.ends[0], RunError)
    assert alone.now > 3600
    for peer in peers.values():
        peer.close()
    with raises(RunError, "network.unreachable"):
        raise alone.ends[0]


def test_a_peer_killed_in_memory_continues_from_its_store(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm={name: sgp, learning_rate: 1.0e-12}", "privacy=none", "network={deadline: 20.0}")
    stores = {number: MemoryStore(1) for number in range(scenario.n_peers)}
    peers = peers_of(scenario, tmp_path, stores)
    network = VirtualNetwork(peers, seconds=SLOW_DISKS)
    network.run(until=1.5)
    assert 0 < peers[1].state.round_index < scenario.rounds
    peers[1].close()
    place = PeerPlace(1, tmp_path / "peer-1", insecure_seeds=True)
    trainer = ScenarioTrainer(scenario, 1, place.folder, insecure_seeds=True)
    network.restart(AsynchronousPeer(trainer, place, stores[1]))
    network.run()
    assert network.ends == dict.fromkeys(peers)
    last: list[Any] = [network.hosts[number].peer for number in range(scenario.n_peers)]
    assert weight_of(last) == pytest.approx(scenario.n_peers, rel=1e-12)
    for peer in last:
        peer.close()


def weight_of(peers: list[Any]) -> float:
    """Return the push-sum weight of all asynchronous peers, and of the shares that their receivers do not have."""
    total = sum(float(peer.protocol.mass["w"]) for peer in peers)
    for peer in peers:
        for receiver, edge in peer.protocol.edges.items():
            received = peers[receiver].protocol.edges[peer.device.peer].received
            total += sum(float(share.values["w"]) for share in edge.frozen if share.number > received)
    return total
