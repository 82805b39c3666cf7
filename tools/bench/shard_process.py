"""One of two shards, in a process of its own, that times its rounds and its exchanges beside what they are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flower_privdec.core import Mix, State
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.shards.process_group import Wires
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE
from flower_privdec.engine.shards.shard_assignment import Shards
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from tools.bench.processes import some_rows
from tools.bench.workloads import WORKLOADS, Setup, Workload

SHARDS = 2
CPU = " cpu"  # behind the name of what was timed
FEW = 4  # examples of a peer where it is the number of peers that counts
Times = dict[str, list[float]]  # milliseconds of wall time and of this process's CPU time, by what was timed

Work = Callable[[], object]


def stamps(folder: str, shard: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Meet the other shard, and time what is asked.

    Args:
        asked: generator, repeats, `rounds` by workload, `exchanges`, peers and periods of the graph by parameters of a
            row, and `many`, peers by workload, of the first shard alone.
    """
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "meeting"), SHARDS)
    wires = Wires.meet(store, shard, Shards.deal(SHARDS, SHARDS), THIS_MACHINE)
    generator, repeats, found = asked["generator"], asked["repeats"], dict[str, Any]()
    for name, rounds in asked["rounds"].items():
        found[name] = _pace(_again(wires, WORKLOADS[name].n_peers), WORKLOADS[name], generator, rounds, repeats)
    for d, (peers, periods) in asked["exchanges"].items():
        found[f"exchange-{d}"] = _exchanges(_again(wires, peers), d, periods, repeats)
    for name, peers in asked["many"].items():
        found[f"many-{name}"] = _alone(replace(WORKLOADS[name], examples=FEW).resized(peers), generator)
    wires.part()
    wires.close()
    return found


def _again(wires: Wires, n_peers: int) -> Wires:
    """Return the same connections for other peers."""
    return Wires(wires.group, wires.shard, Shards.deal(n_peers, SHARDS))


def _pace(wires: Wires, workload: Workload, generator: str, rounds: int, repeats: int) -> Times:
    """Time a round of one process, while the other waits, and of both."""
    setup, shard = Setup.build(workload), wires.shard
    whole = setup.engine(generator)
    part = ShardEngine(*some_rows(setup, generator, wires.shards.peers(shard)), wires)
    works: dict[str, Work] = {"one": _nothing if shard else whole.round, "two": part.round}
    return _side_by_side(wires, works, rounds, repeats)


def _exchanges(wires: Wires, d: int, periods: int, repeats: int) -> Times:
    """Time an exchange of rows, and what it is made of: as many bytes over gloo alone, and mixing as many in memory."""
    n_peers, peers = int(wires.shards.ends[-1]), wires.shards.peers(wires.shard)
    mixing = Mixing(build_topology("directed-exponential", n_peers), "column-stochastic")
    phases = mixing.topology.period or 1
    rows = {"x": torch.randn(len(peers), d), "w": torch.ones(len(peers))}
    cohort = cast(Any, SimpleNamespace(mixing=mixing))
    engine = ShardEngine(cast(Any, None), cohort, State(peers, rows=rows), wires)
    own, other, out = (torch.randn(len(peers), d) for _ in range(3))

    def exchange() -> None:
        engine.perform(Mix(("x", "w")))
        engine.state.at, engine.state.round_index = 0, engine.state.round_index + 1

    def mix() -> None:
        torch.lerp(own, other, 0.5, out=out)

    crossing = [min(2**phase, len(peers)) for phase in range(phases)]
    works = {"shards": _times(exchange, phases), "gloo": _bare(wires, d, crossing), "mixing": _times(mix, phases)}
    return {name: [ms / phases for ms in took] for name, took in _side_by_side(wires, works, periods, repeats).items()}


def _bare(wires: Wires, d: int, rows: list[int]) -> Work:
    """Return what sends and receives so many rows one after the other, from and to the same memory."""
    ours, theirs = torch.randn(max(rows), d), torch.empty(max(rows), d)
    other, group = 1 - wires.shard, wires.group

    def swap() -> None:
        for count in rows:
            arriving = group.recv([theirs[:count]], other, 0)
            leaving = group.send([ours[:count]], other, 0)
            arriving.wait()
            leaving.wait()

    return swap


def _side_by_side(wires: Wires, works: Mapping[str, Work], rounds: int, repeats: int) -> Times:
    """Return milliseconds of each work, and of CPU, in turns; no shard begins before the other has come to the end."""
    found: Times = {f"{name}{kind}": [] for name in works for kind in ("", CPU)}
    for repeat in range(repeats + 1):
        for name, work in list(works.items())[:: 1 if repeat % 2 else -1]:
            wires.part()
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                work()
            wires.part()
            busy, took = time.process_time() - busy, time.perf_counter() - began
            if repeat:
                found[name].append(took / rounds * 1e3)
                found[name + CPU].append(busy / rounds * 1e3)
    return found


def _alone(workload: Workload, generator: str) -> float:
    """Return the milliseconds of a round of one process, the least of some."""
    engine: Engine = Setup.build(workload).engine(generator)
    took = []
    for _ in range(8):
        began = time.perf_counter()
        engine.round()
        took.append((time.perf_counter() - began) * 1e3)
    return min(took)


def _times(work: Work, count: int) -> Work:
    def run() -> None:
        for _ in range(count):
            work()

    return run


def _nothing() -> None:
    pass
