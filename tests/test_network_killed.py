"""Peers of every family that die and go on, of which nobody waits: what they paid for, and what they end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from networked import devices, finish
from test_network import Killed, Tiny
from test_network_asynchronous import QUICK, again, running
from variants import settings_for

from flower_privdec.algorithms.cohort import Cohort
from flower_privdec.privacy.ledger_format import read_chain
from flower_privdec.runtime.network.durable_mass import mass_on_disk
from flower_privdec.runtime.network.modes import running_peer
from flower_privdec.runtime.network.peer import RunningPeer

POINTS = {  # around everything that is put on disk, sent or used
    "before a commit": ("_save", "before"),
    "after a commit": ("_save", "after"),
    "before rows leave": ("_post", "before"),
    "after rows left": ("_post", "after"),
    "before it mixes": ("_mix", "before"),
    "after it mixed": ("_mix", "after"),
    "after it split": ("_split", "after"),
    "after it added what came": ("_absorb", "after"),
    "before it hands in": ("_look", "before"),
    "in the last commit": ("_is_over", "before"),
}
ROWS = [
    "before a commit",
    "after a commit",
    "before rows leave",
    "after rows left",
    "before it mixes",
    "after it mixed",
]
SHARES = ["after a commit", "after it split", "after it added what came", "before it hands in", "in the last commit"]
GOSSIP = ["d-psgd", "pdsl", "dp-cga", "dp-dda"]
PUSH = ["privsgp", "privsgp-vr", "feddeper"]
GRAPHS = {"pdsl": "star", "dp-cga": "ring", "d-psgd": "complete", "dp-dda": "ring"}
OTHERS = ["directed-exponential-full", "complete", "directed-ring"]
CASES = [
    *((name, GRAPHS[name], point, 1 + (i + j) % 4) for i, name in enumerate(GOSSIP) for j, point in enumerate(ROWS)),
    *(
        (name, OTHERS[(i + j) % 3], point, 1 + (i + j) % 3)
        for i, name in enumerate(PUSH)
        for j, point in enumerate(SHARES)
    ),
]


def mortal(peer: RunningPeer, point: str, moment: int) -> None:
    """Make a peer die at a point, when it comes there for the so many-th time."""
    name, when = POINTS[point]
    method, left = getattr(peer, name), [moment]

    def dying(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            raise Killed
        found = method(*arguments)
        if left[0] == 0:
            raise Killed
        return found

    setattr(peer, name, dying)


def choosing(name: str) -> str:
    return f"algorithm={{name: {name}}}" if name == "dp-dda" else f"algorithm.name={name}"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of every peer, from outside."""
    found, release = list[int](), Cohort.release_rows_

    def counting(cohort: Cohort, *arguments: Any, **options: Any) -> None:
        found.append(int(cohort.peers[0]))
        release(cohort, *arguments, **options)

    monkeypatch.setattr(Cohort, "release_rows_", counting)
    return found


def check_ledgers(folder: Path, taken: list[int], least: int) -> None:
    for peer in range(4):
        (ledger,) = (folder / f"peer-{peer}" / "ledger").glob("*.jsonl")
        paid = sum(payment.to_step - payment.from_step for payment in read_chain(ledger)[1])
        assert paid >= taken.count(peer) >= least, f"peer {peer}"


def check_weight(folder: Path, wanted: float = 4.0) -> None:
    total = mass_on_disk([folder / f"peer-{peer}" for peer in range(4)], ["w"])["w"]
    assert float(total) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("name", "graph", "point", "moment"), CASES)
def test_whoever_dies_wherever_goes_on(
    name: str, graph: str, point: str, moment: int, tiny: Tiny, tmp_path: Path, taken: list[int]
) -> None:
    every = 1 if moment % 2 else 2
    scenario = tiny(
        *settings_for(choosing(name)),
        f"topology.name={graph}",
        "rounds=4",
        QUICK.replace("}", f", commit_every: {every}}}"),
    )
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    peers = [running_peer(scenario, device) for device in theirs]
    mortal(peers[1], point, 1 if point in ("before it hands in", "in the last commit") else moment)
    with running(peers) as futures:
        with pytest.raises(Killed):
            futures[1].result(60)
        last = again(scenario, theirs[1])
        finish(last)
        for peer in (0, 2, 3):
            futures[peer].result(60)
    for peer in [last, peers[0], *peers[2:]]:  # type: ignore[assignment]
        assert peer.state.round_index == 4  # type: ignore[attr-defined]
        assert bool(peer.state.rows["x"].isfinite().all())  # type: ignore[attr-defined]
    check_ledgers(tmp_path, taken, 1)
    if name in PUSH:
        check_weight(tmp_path)
