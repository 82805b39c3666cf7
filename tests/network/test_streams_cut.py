"""Streams that are cut before, within and after messages, at places that a seed draws: each share counts once."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from asynchronous_network import STILL, initial
from networked import LONG, devices, finish
from tiny_scenario import Tiny

from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport import streams
from flower_privdec.peer.peer import RunningPeer
from tools.mass_on_disk import mass_on_disk
from tools.soak.fault_proxy import CutPlace, Direction, FaultProxy, LinkFaults, RecordCut

ROUNDS = 20

# Four calls in a row that miss a device that only dials out take seconds, as it is asked for once in a second.
NETWORK = f"network={{links: lan, deadline: {LONG}, final_mixing: 0}}"
HANDSHAKE = 6  # records in a direction, at most, before the first call

GRAPHS = {
    "a star whose leaves only dial": ("star", 4, (1, 2, 3)),
    "two addresses for three": ("complete", 3, (2,)),
}
KINDS: list[tuple[Direction, CutPlace]] = [
    ("there", "before"),
    ("back", "after"),
    ("there", "within"),
    ("back", "before"),
    ("there", "after"),
    ("back", "within"),
]


def cut_often(proxy: FaultProxy, name: Hashable, seed: int) -> None:
    """Cut the next connections of a link, some of them in their handshake: each place in both directions in turn."""
    draw = Random(f"{seed} {name!r}")
    first = draw.randrange(len(KINDS))
    kinds = [KINDS[(first + number) % len(KINDS)] for number in range(4)]
    cuts = [RecordCut(direction, draw.randrange(2, 3 * HANDSHAKE), place) for direction, place in kinds]
    proxy.set(name, LinkFaults(cuts=tuple(cuts)))


def cut_at_the_end(proxy: FaultProxy, seed: int, running: RunningPeer) -> None:
    """Cut the links of a peer that is about to finish, and what it opens instead within its first calls.

    They are fewer than the calls in a row after which a peer is taken for lost, and nobody is left to tell it.
    """
    if running.state.round_index != ROUNDS - 1:
        return
    draw = Random(f"{seed} {running.device.peer}")
    for name in proxy.names:
        if isinstance(name, tuple) and name[0] == running.device.peer:
            direction, place = draw.choice(KINDS)
            proxy.set(name, LinkFaults(cuts=(RecordCut(direction, HANDSHAKE + draw.randrange(3), place),)))
            proxy.cut(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("graph", GRAPHS)
def test_cut_streams_cost_no_mass(
    graph: str, seed: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "REOPEN_SECONDS", 0.01)
    topology, n_peers, dials_out = GRAPHS[graph]
    scenario = tiny(STILL, f"topology.name={topology}", f"n_peers={n_peers}", f"rounds={ROUNDS}", NETWORK)
    theirs = devices(scenario, tmp_path, dials_out=dials_out)

    with FaultProxy(seed) as proxy, ThreadPoolExecutor(n_peers) as pool:
        peers = []
        for device in theirs:
            seen = proxy.through(device.peer, device.addresses)
            peers.append(running_peer(scenario, replace(device, addresses=seen)))
        for name in proxy.names:
            cut_often(proxy, name, seed)
        for finished in [pool.submit(finish, peer, partial(cut_at_the_end, proxy, seed)) for peer in peers]:
            finished.result(LONG)
        assert sum(proxy.counts(name)["cuts"] for name in proxy.names) >= 5

    found = mass_on_disk([device.folder for device in theirs])
    torch.testing.assert_close(found["w"], torch.tensor(float(n_peers), dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(found["x"], n_peers * initial(scenario), rtol=0, atol=1e-9)
