"""The pace of peers beside one that is dead, late, lost or silent: what arrives drives them, and no timer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from networked import LONG, Killed, devices, mortal, running, wait_until
from tiny_scenario import Tiny
from variants import settings_for

from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.driving import performed
from flower_privdec.peer.pace import Want
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.privacy.ledger.segments import read_chain

ENDLESS = ("rounds=30000", "evaluation.every=30000", "privacy={noise_multiplier: 1.0, delta: 1.0e-3}")
QUICK = f"network={{links: local, deadline: {LONG}}}"
FURTHER = 60  # rounds


def all_stop(peers: list[RunningPeer], futures: list[Future[Any]]) -> None:
    for peer in peers:
        peer.stop()
    for future in futures:
        assert future.exception(LONG) is not None


def without_timer(peers: list[RunningPeer]) -> None:
    """Let whatever a timer drives take for ever."""
    for peer in peers:
        peer.times = replace(peer.times, retry=LONG)
        peer.session.retry = LONG


@pytest.mark.parametrize(
    ("name", "graph"),
    [("privsgp", "directed-exponential"), ("privsgp", "complete"), ("d-psgd", "ring"), ("d-psgd", "random-edges")],
)
def test_peers_continue_beside_a_dead_one(name: str, graph: str, tiny: Tiny, tmp_path: Path) -> None:
    topology = "topology={name: random-edges, edges: 2}" if graph == "random-edges" else f"topology.name={graph}"
    scenario = tiny(*settings_for(f"algorithm.name={name}"), topology, *ENDLESS, QUICK)
    peers = [running_peer(scenario, device) for device in devices(scenario, tmp_path, memory=True)]
    mortal(peers[3], ("commit", "after"), 8)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[3].result(LONG)
        wait_until(lambda: not any(peer.protocol.is_open(3) for peer in peers[:3]))  # type: ignore[attr-defined]
        without_timer(peers[:3])
        rounds = [peer.state.round_index for peer in peers[:3]]
        wait_until(lambda: all(p.state.round_index >= k + FURTHER for p, k in zip(peers[:3], rounds, strict=True)))
        all_stop(peers[:3], futures[:3])


# --- members that lie about what they lack and where they are ---


def test_a_member_that_waits_forever_delays_no_peer(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("topology.name=complete", *ENDLESS, QUICK)
    theirs = devices(scenario, tmp_path, insecure_seeds=False, memory=True)
    peers = [running_peer(scenario, device) for device in theirs]
    liar: Any = peers[3]
    completed = liar.session._completed
    liar.session._completed = lambda hello: replace(completed(hello), want=int(Want.WAITS))
    with running(peers) as futures:
        wait_until(lambda: all(peer.state.round_index >= FURTHER for peer in peers[:3]))
        all_stop(peers, futures)
    for peer in peers[:3]:
        assert float(peer.state.rows["w"]) > 0
        (ledger,) = (peer.device.folder / "ledger").glob("*.jsonl")
        paid = sum(payment.to_step - payment.from_step for payment in read_chain(ledger)[1])
        assert peer.state.round_index <= paid <= peer.state.round_index + 2  # the step under way, and one reserved


def test_greetings_and_waiting_reports_allow_no_step(tiny: Tiny, tmp_path: Path) -> None:
    scenario = tiny("topology.name=complete", QUICK)
    peer: Any = running_peer(scenario, devices(scenario, tmp_path, memory=True)[0])
    peer.session.steps, peer.protocol._open = 5, {1, 2, 3}
    for known in peer.neighbours.values():
        known.want = Want.WAITS
        known.met_at = LONG
    peer.state.rows["w"].fill_(0.1)
    peer.session.want = Want.WAITS
    assert peer._must_wait(3)
    floor = peer.floor.value
    performed(peer.exchanges.relay(3, 3))
    assert peer.floor.value < floor
    assert peer._must_wait(3)  # however low its floor is
    peer.close()
