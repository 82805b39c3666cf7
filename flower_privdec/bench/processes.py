"""One process for each peer, which talk by torch.distributed over gloo on this machine.

Every process is a cohort of one row that runs the engine's own step, so what differs from the engine is the price
of the processes alone. A process ends by itself when it is done, when another is gone, or when its time is up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from flower_privdec.algorithms import Mix, State, advance
from flower_privdec.bench.workloads import WORKLOADS, Setup
from flower_privdec.cohort import Cohort
from flower_privdec.errors import RunError

PEERS = 8
TIMEOUT = 120
WARM_UP = 3


def gloo_round(workload: str, generator: str, rounds: int) -> dict[str, float]:
    """Run PEERS processes.

    Returns:
        cpu_ms: CPU time of a round, of all processes together; wall_ms: its wall time.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder, workload, generator, str(rounds)]
        children = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
            for rank in range(PEERS)
        ]
        try:
            answers = [child.communicate(timeout=TIMEOUT) for child in children]
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{PEERS} processes over gloo took longer than {TIMEOUT} s") from error
        finally:
            for child in children:
                child.kill()
                child.wait()
    failed = [err.decode().strip()[-300:] for child, (_, err) in zip(children, answers, strict=True) if child.returncode]
    if failed:
        raise RunError(f"a process over gloo failed: {failed[0]}")
    times: list[dict[str, float]] = [json.loads(out.splitlines()[-1]) for out, _ in answers]
    return {
        "cpu_ms": sum(each["cpu_ms"] for each in times),
        "wall_ms": max(each["wall_ms"] for each in times),
    }


def one_row(setup: Setup, generator: str, peer: int) -> tuple[Cohort, State]:
    """Return the cohort of one peer of a workload, and its state."""
    engine = setup.engine(generator)
    engine.cohort.peers = np.array([peer])
    state = State(engine.cohort.peers, rows=engine.algorithm.initial(engine.cohort))
    return engine.cohort, state


class Peer:
    """One peer in its process."""

    def __init__(self, setup: Setup, generator: str, rank: int) -> None:
        self.rank, self.mixing = rank, setup.mixing
        self.algorithm = setup.engine(generator).algorithm
        self.cohort, self.state = one_row(setup, generator, rank)

    def round(self) -> None:
        """Take the step, exchange rows with the neighbours, mix."""
        while (exchange := advance(self.algorithm, self.cohort, self.state)) is not None:
            self._exchange(exchange)
            self.state.at += 1

    def _exchange(self, exchange: Mix) -> None:
        k, rows = self.state.round_index, self.state.rows
        payload = torch.cat([rows[name].reshape(-1) for name in exchange.names])
        matrix = self.mixing.matrix(k).rows([self.rank])
        receivers = [int(b) for a, b in self.mixing.edges(k) if a == self.rank]
        sending = [distributed.isend(payload, other) for other in receivers]
        received: dict[int, Tensor] = {self.rank: payload}
        for other in matrix.sources.tolist():
            if other != self.rank:
                received[other] = torch.empty_like(payload)
                distributed.recv(received[other], other)
        for send in sending:
            if send is not None:
                send.wait()
        mixed = matrix.apply_sources(torch.stack([received[other] for other in matrix.sources.tolist()]))
        parts = torch.split(mixed[0], [rows[name].numel() for name in exchange.names])
        for name, part in zip(exchange.names, parts, strict=True):
            rows[name] = part.view_as(rows[name])


def _main(folder: str, workload: str, generator: str, rounds: str, rank: str) -> dict[str, Any]:
    signal.alarm(TIMEOUT)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(Path(folder) / "meeting").as_uri(),
        timeout=timedelta(seconds=TIMEOUT),
        rank=int(rank),
        world_size=PEERS,
    )
    peer = Peer(Setup.build(WORKLOADS[workload].resized(PEERS)), generator, int(rank))
    for _ in range(WARM_UP):
        peer.round()
    distributed.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(rounds)):
        peer.round()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    distributed.barrier()
    distributed.destroy_process_group()
    return {"cpu_ms": cpu / int(rounds) * 1e3, "wall_ms": wall / int(rounds) * 1e3}


if __name__ == "__main__":
    print(json.dumps(_main(*sys.argv[1:])))
