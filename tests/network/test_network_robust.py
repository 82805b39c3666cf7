"""Robust mixing on a network: a member that sends anything does not take the others' models with it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
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
from flower_privdec.experiment.evaluation import public_figures
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
            ((loss, _),), ((usual, _),) = public_figures(agreement, attacked), public_figures(agreement, alone)
            assert loss is not None
            assert usual is not None
            assert loss < usual + 0.5, f"nats after {lie}"


def test_without_it_one_liar_takes_all_models(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("algorithm.name=d-psgd", *SCENARIO)
    for rows in ended(scenario, tmp_path, LIES["1e25"], memory=True):
        assert float(rows["x"].abs().max()) > 1e23


Lying = Callable[[Tensor], Tensor]
SHARE_LIES: dict[str, Lying] = {
    "scaled": lambda row: -10 * row,
    "moved far": lambda row: row + 1e4,
    "not a number": lambda row: torch.full_like(row, math.nan),
}


def lie_in_shares(peer: Any, lie: Lying) -> None:
    """Let a peer that does not wait send other shares than it subtracts, of honest weights."""
    frozen = peer.protocol._frozen

    def lying_part(weight: float, edge: Any) -> Any:
        parts = {name: lie(row) if name == "x" else row for name, row in frozen(weight, edge).values.items()}
        return Shared(parts, parts, {})

    peer.protocol._frozen = lying_part


def lie_in_lockstep(peer: Any, lie: Lying) -> None:
    """Let a peer that all wait for send other rows than it has, of honest weights."""
    arrive = peer.machine.arrive

    def arriving(place: int, outgoing: dict[int, Any], awaited: set[int]) -> None:
        for receiver, message in outgoing.items():
            values = {name: lie(row) if name == "x" else row for name, row in message.values.items()}
            outgoing[receiver] = replace(message, values=values)
        arrive(place, outgoing, awaited)

    peer.machine.arrive = arriving


def honest_after(peers: list[Any]) -> list[dict[str, Tensor]]:
    with running(peers) as futures:
        rows = [futures[peer].result(LONG) for peer in range(LIAR)]
        peers[LIAR].stop()
    return rows


@pytest.mark.parametrize("far", [1e4, 1e25])
def test_one_liar_with_push_sum_takes_all_models(far: float, tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*SCENARIO, "algorithm.learning_rate=1.0e-9")
    peers: list[Any] = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    lie_in_shares(peers[LIAR], lambda row: row + far)
    honest_after(peers)
    for peer in peers[:LIAR]:
        model = (peer.state.rows["x"][0] / peer.state.rows["w"][0]).abs()
        if far == 1e4:
            assert not any(one.quarantined for one in peer.neighbours.values())
            assert float(model.min()) > far / 100
        else:
            assert [j for j, one in peer.neighbours.items() if one.quarantined] == [LIAR]
            assert float(model.max()) < 10


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_lying_share_moves_no_model_far(
    mode: str, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = tiny(*SCENARIO, ROBUST, f"network.mode={mode}")
    agreement = Agreement.of(scenario)
    ((usual, _), *_) = public_figures(agreement, ended(scenario, tmp_path / "calm", memory=True)[0])
    assert usual is not None
    for name, lie in SHARE_LIES.items():
        peers: list[Any] = [running_peer(scenario, one) for one in devices(scenario, tmp_path / name, memory=True)]
        (lie_in_shares if mode == "asynchronous" else lie_in_lockstep)(peers[LIAR], lie)
        for rows in honest_after(peers):
            ((loss, _),) = public_figures(agreement, rows)
            assert loss is not None
            assert loss < usual + 0.5, name

        with caplog.at_level(logging.WARNING):
            statuses = [peer.status() for peer in peers[:LIAR]]
        for status in statuses:  # a share of NaN quarantines its sender, if nobody waits for it
            is_named = str(LIAR) in status["doubted"] or str(LIAR) in status["quarantined"]
            assert is_named, name
            assert set(status["doubted"]) <= {str(LIAR)}
    assert f"peer {LIAR} may lie" in caplog.text


def test_weights_stay_exact_under_a_lie(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*SCENARIO, ROBUST, "network.mode=synchronous", "compute.dtype=float64")
    peers: list[Any] = [running_peer(scenario, one) for one in devices(scenario, tmp_path, memory=True)]
    lie_in_lockstep(peers[LIAR], lambda row: -1e12 * row)
    with running(peers) as futures:
        for future in futures:
            future.result(LONG)
    total = sum(float(peer.state.rows["w"][0]) for peer in peers)
    assert total == pytest.approx(PEERS, rel=1e-12)


def test_attacks_are_refused_on_a_network(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny(*SCENARIO, f"attack={{kind: nan, peers: [{LIAR}]}}")
    with raises(ScenarioError, "attack.apart"):
        running_peer(scenario, devices(scenario, tmp_path)[0])


def test_gradients_cannot_be_judged(tiny: Tiny) -> None:
    with raises(ScenarioError, "network.robust-algorithm"):
        Agreement.of(tiny(*settings_for("algorithm.name=pdsl"), "topology.name=complete", ROBUST))
