"""Peers that do not wait for each other: settings, mass on disk, and how they are stopped, started and joined."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from networked import LONG, begin_without, running, wait_until

from flower_privdec.common.errors import StoppedError
from flower_privdec.experiment import Experiment
from flower_privdec.network.peer.driver import PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.scenario import Scenario
from tools.mass_on_disk import mass_on_disk

AGREEING = f"network={{links: local, deadline: {LONG}}}"
QUICK = AGREEING.replace("}", ", final_mixing: 0}")  # final mixing takes more rounds than these networks train


STILL = (
    "algorithm={name: sgp, learning_rate: 1.0e-12}"  # whose steps move next to nothing, so that Σ x stays what it was
)


FOLDERS = [f"peer-{peer}" for peer in range(4)]


def check_mass(folder: Path, start: torch.Tensor, codec: str = "exact") -> None:
    found = mass_on_disk([folder / name for name in FOLDERS], codec=codec)
    torch.testing.assert_close(found["w"], torch.tensor(4.0, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(found["x"], 4 * start, rtol=0, atol=1e-9)


def initial(scenario: Scenario) -> torch.Tensor:
    return Experiment.build(scenario).initial


POINTS = {  # before and after everything that is put on disk, sent or used
    "before a commit": ("_save", "before"),
    "after a commit, before it says so": ("_save", "after"),
    "after a commit": ("commit", "after"),
    "after it took its shares from itself": ("exchanges.split", "after"),
    "before it adds what came": ("exchanges.absorb", "before"),
    "after it added what came": ("exchanges.absorb", "after"),
    "before it hands in": ("trainer.evaluate", "before"),
    "at the end": ("_leave", "before"),
    "in the last commit": ("_is_over", "before"),
}


def again(scenario: Scenario, device: PeerDevice) -> RunningPeer:
    return running_peer(scenario, device)


def join_late(peers: list[RunningPeer], rounds: int = 3) -> None:
    """Run peers, of which the last comes when the others are under way, until it was in some rounds; stop them."""
    begin_without(peers[:3], 3)
    with running(peers[:3]) as futures:
        wait_until(lambda: peers[0].state.round_index >= 2)
        with running(peers[3:]) as (joining,):
            wait_until(lambda: peers[3].state.round_index >= rounds or joining.done())
            stop_all(peers, [*futures, joining])


def stop_all(peers: list[RunningPeer], futures: list[Future[Any]]) -> None:
    for peer in peers:
        peer.stop()
    for future in futures:
        with pytest.raises(StoppedError):
            future.result(LONG)
