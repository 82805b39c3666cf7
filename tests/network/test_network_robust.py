"""Clipped gossip: a member that sends anything does not take the others' models with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asynchronous_network import AGREEING
from networked import LONG, devices, running
from tiny_scenario import Tiny
from torch import Tensor
from variants import settings_for

from flower_privdec.experiment import Agreement
from flower_privdec.experiment.evaluation import public_losses
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.peer import RunningPeer

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
