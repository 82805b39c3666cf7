"""One process for each peer, connected by torch.distributed over gloo on this machine.

Every process is a cohort of one row that runs the engine's own step, so the difference from the engine is the cost
of the processes alone. A process ends by itself when it is done, when another is gone, or when its time is up.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from flower_privdec.common.errors import RunError
from flower_privdec.core import Algorithm, Exchange, State, advance
from flower_privdec.core.cohort import Cohort
from flower_privdec.core.exchange import Payload
from tools.bench.timing import paired, quiet
from tools.bench.workloads import WORKLOADS, Setup, Workload, constant_protection, peer_data

PEERS = 8
TIMEOUT = 120
WARM_UP = 3


def gloo_rounds(workloads: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Run PEERS processes, which go through the workloads one after the other.

    Returns:
        By workload, cpu_ms: CPU time of a round, of all processes together; wall_ms: its wall time.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, str(rounds), *workloads]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * TIMEOUT)
        answers = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if done.returncode or len(answers) < PEERS:
        raise RunError(f"{PEERS} processes over gloo failed: {done.stderr.strip()[-300:]}")
    return {
        name: {
            "cpu_ms": sum(answer[name]["cpu_ms"] for answer in answers),
            "wall_ms": max(answer[name]["wall_ms"] for answer in answers),
        }
        for name in workloads
    }


def engine_ms(workload: Workload, rounds: int) -> float:
    """Return the CPU milliseconds of the engine's round with as many peers, in this process."""
    setup = Setup.build(workload.resized(PEERS))
    with quiet():
        return paired({"engine": setup.engine().round}, rounds, setup.device)["engine"].facts()["ms"]


def one_row(setup: Setup, peer: int) -> Peer:
    """Return one peer of a workload."""
    return Peer(*some_rows(setup, np.array([peer])))


def some_rows(setup: Setup, peers: np.ndarray) -> tuple[Algorithm, Cohort, State]:
    """Return some peers of a workload."""
    whole = setup.engine()
    data = peer_data(setup.workload, setup.examples, peers, setup.device, setup.dtype)
    cohort = replace(whole.cohort, peers=peers, data=data, protection=constant_protection(len(peers)))
    return whole.algorithm, cohort, State(peers, rows=whole.algorithm.initial(cohort))


@dataclass
class Peer:
    """A peer in its process, whose rank among them is its number."""

    algorithm: Algorithm
    cohort: Cohort
    state: State

    def round(self) -> None:
        """Take the step, exchange rows with the neighbours, mix."""
        while (exchange := advance(self.algorithm, self.cohort, self.state)) is not None:
            self._exchange(exchange)

    def _exchange(self, exchange: Exchange) -> None:
        mixing = self.cohort.mixing
        if mixing is None:
            raise TypeError(f"{self.algorithm.name} exchanges rows but has no mixing weights")
        sent = exchange.outgoing(self.state, mixing)
        flat = {link: torch.cat([row.reshape(-1) for row in payload.values()]) for link, payload in sent.items()}
        sending = [distributed.isend(row, receiver) for (_, receiver), row in flat.items()]
        like = {name: self.state.rows[exchange.shaped(name)][0] for name in exchange.names}
        received = {link: self._receive(link[0], like) for link in exchange.awaited(self.state, mixing)}
        for send in sending:
            if send is not None:
                send.wait()
        exchange.incoming(self.state, mixing, received).apply_(self.state)

    @staticmethod
    def _receive(sender: int, like: Payload) -> Payload:
        row = torch.cat([part.reshape(-1) for part in like.values()])
        distributed.recv(row, sender)
        parts = torch.split(row, [part.numel() for part in like.values()])
        return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def join(folder: Path, rank: int, peers: int) -> None:
    """Become one of some processes that meet in a folder; the process ends itself when its time is up."""
    signal.alarm(TIMEOUT)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    rendezvous = (folder / "rendezvous").as_uri()
    distributed.init_process_group("gloo", init_method=rendezvous, timeout=timeout, rank=rank, world_size=peers)


def _one_process(folder: Path, rounds: int, workloads: list[str], rank: int) -> None:
    join(folder, rank, PEERS)
    answer = {name: _timed(name, rounds, rank) for name in workloads}
    distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(answer))


def _timed(workload: str, rounds: int, rank: int) -> dict[str, float]:
    peer = one_row(Setup.build(WORKLOADS[workload].resized(PEERS)), rank)
    for _ in range(WARM_UP):
        peer.round()
    distributed.barrier()
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(rounds):
        peer.round()
    cpu = time.process_time() - cpu
    wall = time.perf_counter() - wall
    distributed.barrier()
    return {"cpu_ms": cpu / rounds * 1e3, "wall_ms": wall / rounds * 1e3}


def _main(folder: str, rounds: str, *workloads: str) -> None:
    """Fork the processes, for what they import need not be read PEERS times, and wait for them."""
    fork(partial(_one_process, Path(folder), int(rounds), list(workloads)), PEERS)


def fork(work: Callable[[int], None], peers: int) -> None:
    """Run some work in a process for each peer, by rank, and wait until all are done or their time is up."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=work, args=(rank,)) for rank in range(peers)]
    for child in children:
        child.start()
    for child in children:
        child.join(TIMEOUT)
    for child in children:
        if child.is_alive():
            child.terminate()


if __name__ == "__main__":
    _main(*sys.argv[1:])
