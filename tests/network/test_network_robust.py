"""Clipped gossip: a member that sends anything does not take the others' models with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asynchronous_network import AGREEING
from networked import LONG, devices, running
from raising import raises
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.evaluation import public_losses
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.pushsum.exactly_once import Shared

PEERS, LIAR = 5, 4
ROBUST = "network.robust={kind: clipped, byzantine: 1}"
SCENARIO = (f"n_peers={PEERS}", "topology.name=complete", "rounds=6", AGREEING)
LIES = {
    "1e25": lambda row: torch.full_like(row, 1e25),
    "the largest number": lambda row: torch.full_like(row, torch.finfo(row.dtype).max),
    "the other direction": lambda row: -50 * row,
}


def lying(peer: RunningPeer, lie: Any) -> None:
    """Let a peer send its neighbours something else than its rows, each time."""
    post = peer.exchanges.post  # type: ignore[attr-defined]

    def posting(at: int, round_index: int, rows: dict[int, dict[str, Tensor]]) -> None:
        lies = {j: {name: lie(row) for name, row in values.items()} for j, values in rows.items()}
        post(at, round_index, lies)

    peer.exchanges.post = posting  # type: ignore[attr-defined]


def ended(scenario: Any, folder: Path, lie: Any = None, memory: bool = False) -> list[dict[str, Tensor]]:
    """Run a scenario and return the rows of the honest peers."""
    peers = [running_peer(scenario, device) for device in devices(scenario, folder, memory=memory)]
    if lie is not None:
        lying(peers[LIAR], lie)
    with running(peers) as futures:
        honest = [futures[peer].result(LONG) for peer in range(PEERS) if peer != LIAR]
    if scenario.network.robust is not None:  # a liar does not make honest devices report that they disagree
        assert not any(peers[peer].shortcoming() for peer in range(PEERS) if peer != LIAR)
    return honest


@pytest.mark.parametrize("name", ["d-psgd", "dp2-sgd"])
def test_a_lying_neighbour_moves_no_model_far(name: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(f"algorithm.name={name}"), *SCENARIO, ROBUST)
    agreement, calm = Agreement.of(scenario), ended(scenario, tmp_path / "calm", memory=True)
    for lie in LIES:
        honest = ended(scenario, tmp_path / lie, LIES[lie], memory=lie != "1e25")
        for attacked, alone in zip(honest, calm, strict=True):
            (loss,), (usual,) = public_losses(agreement, attacked), public_losses(agreement, alone)
            assert loss is not None
            assert usual is not None
            assert loss < usual + 0.5, f"nats after {lie}"


def test_without_it_one_liar_takes_all_models(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm.name=d-psgd", *SCENARIO)
    for rows in ended(scenario, tmp_path, LIES["1e25"], memory=True):
        assert float(rows["x"].abs().max()) > 1e23


@pytest.mark.parametrize("far", [1e4, 1e25])
def test_one_liar_with_push_sum_takes_all_models(far: float, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*SCENARIO, "algorithm.learning_rate=1.0e-9")
    peers: list[Any] = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    liar = peers[LIAR].protocol
    frozen = liar._frozen

    def lie(weight: float, edge: Any) -> Any:
        parts = {name: row + far * (name == "x") for name, row in frozen(weight, edge).values.items()}
        return Shared(parts, parts, {})

    liar._frozen = lie
    with running(peers) as futures:
        for peer in range(LIAR):
            futures[peer].result(LONG)
        peers[LIAR].stop()
    for peer in peers[:LIAR]:
        model = (peer.state.rows["x"][0] / peer.state.rows["w"][0]).abs()
        if far == 1e4:
            assert not any(one.quarantined for one in peer.neighbours.values())
            assert float(model.min()) > far / 100
        else:
            assert [j for j, one in peer.neighbours.items() if one.quarantined] == [LIAR]
            assert float(model.max()) < 10


def test_rows_are_clipped_to_the_distance_of_the_next(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm.name=d-psgd", *SCENARIO, ROBUST)
    peer = running_peer(scenario, devices(scenario, tmp_path)[0])
    own = peer.state.rows["x"][0]
    step = torch.zeros_like(own)
    step[0] = 1.0
    received = {(j, 0): {"x": own + far * step} for j, far in ((1, 1.0), (2, -3.0), (3, 2.0))}
    clipped = peer._clipped(received)
    for j, far in ((1, 1.0), (2, -2.0), (3, 2.0)):  # the farthest of three counts as the second
        torch.testing.assert_close(clipped[j, 0]["x"], own + far * step)
    only = peer._clipped({(2, 0): {"x": own + 3 * step}})
    torch.testing.assert_close(only[2, 0]["x"], own)  # who alone has sent may be the liar
    peer.close()


@pytest.mark.parametrize("name", ["privsgp", "pdsl"])
def test_robust_mixing_is_refused_for_other_algorithms(name: str, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*settings_for(f"algorithm.name={name}"), "topology.name=complete", ROBUST)
    with raises(ScenarioError, "network.robust-without-gossip"):
        running_peer(scenario, devices(scenario, tmp_path)[0])
