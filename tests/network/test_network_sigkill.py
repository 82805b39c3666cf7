"""Processes of peers that are ended by SIGKILL between two commits pay for all that they release, in every life.

The observer is outside: it reads the ledgers, and a file to which each process writes a byte for a release.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from killed_processes import Death, run_until
from networked import LONG, devices
from tiny_scenario import Tiny

from flower_privdec.common.files import CHECKPOINTS
from flower_privdec.network.local.fork_server import IMPORTED
from flower_privdec.peer.store import read_checkpoints
from flower_privdec.privacy.ledger.segments import read_chain
from tools.mass_on_disk import mass_on_disk

ROUNDS = 8  # of which 2, 5 and 7 are committed
DEATHS = {  # of each peer, in its lives one after the other
    0: [Death("payment", "after", 1), Death("release", "after", 4), Death("commit", "before", 7)],
    1: [Death("release", "after", 1), Death("commit", "after", 2), Death("payment", "before", 5)],
}


def payments(folder: Path) -> int:
    """Return how many steps the ledger in a peer's folder pays for."""
    return sum(
        entry.to_step - entry.from_step
        for ledger in (folder / "ledger").glob("*.jsonl")
        for entry in read_chain(ledger)[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "algorithm"), [("asynchronous", "privsgp"), ("asynchronous", "d-psgd"), ("synchronous", "privsgp")]
)
def test_killed_processes_pay_for_every_release(mode: str, algorithm: str, tiny: Tiny, tmp_path: Path) -> None:
    network = f"network={{mode: {mode}, links: local, deadline: {LONG}, commit_every: 3}}"
    graph = f"algorithm.name={algorithm}", "topology.name=complete"
    privacy = "privacy={noise_multiplier: 1.0, delta: 1.0e-3}"
    scenario = tiny("n_peers=2", f"rounds={ROUNDS}", f"evaluation.every={ROUNDS}", *graph, privacy, network)
    theirs = devices(scenario, tmp_path, insecure_seeds=False)
    released = [tmp_path / f"releases-{peer}" for peer in DEATHS]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    lives = {peer: [*deaths, None] for peer, deaths in DEATHS.items()}

    def begin(peer: int) -> multiprocessing.process.BaseProcess:
        arguments = scenario, theirs[peer], released[peer], lives[peer].pop(0)
        process = context.Process(target=run_until, args=arguments)
        process.start()
        return process

    processes = {peer: begin(peer) for peer in lives}
    try:
        while running := {process.sentinel: peer for peer, process in processes.items()}:
            ended = wait(list(running), LONG)
            assert ended
            for peer in (running[sentinel] for sentinel in ended):  # type: ignore[index]
                process = processes.pop(peer)
                process.join()
                assert 0 <= released[peer].stat().st_size <= payments(theirs[peer].folder)
                assert process.exitcode == (-signal.SIGKILL if lives[peer] else 0)
                if lives[peer]:
                    processes[peer] = begin(peer)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    for peer, deaths in DEATHS.items():
        assert ROUNDS <= released[peer].stat().st_size <= payments(theirs[peer].folder) <= ROUNDS + 3 * len(deaths)
    if algorithm == "privsgp":
        assert float(weight_on_disk([device.folder for device in theirs], mode)) == pytest.approx(2.0, rel=1e-12)


def weight_on_disk(folders: list[Path], mode: str) -> float:
    """Return the push-sum weight of all peers; nothing of it is in flight after the last synchronous round."""
    if mode == "asynchronous":
        return float(mass_on_disk(folders, ["w"])["w"])
    states = [read_checkpoints(folder / CHECKPOINTS)[-1].state for folder in folders]
    return sum(float(state.rows["w"].sum()) for state in states)
