"""The two ways in which the peers of a network go on together."""

from __future__ import annotations

from flower_privdec.network.peer.asynchronous_peer import AsynchronousPeer
from flower_privdec.network.peer.peer import PeerDevice, RunningPeer
from flower_privdec.network.peer.synchronous_peer import SynchronousPeer
from flower_privdec.scenario import Scenario

MODES: dict[str, type[RunningPeer]] = {"asynchronous": AsynchronousPeer, "synchronous": SynchronousPeer}


def running_peer(scenario: Scenario, device: PeerDevice, resume: bool = False) -> RunningPeer:
    """Return a peer that runs as the scenario's network says; see RunningPeer."""
    return MODES[scenario.network.mode](scenario, device, resume)
