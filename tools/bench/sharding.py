"""Two shards on this machine: their rounds beside one process's, their exchanges beside bare gloo, and a forecast.

The forecast is for more peers and hosts than are here, by what was measured (`forecast`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flower_privdec.core import Mix, State
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.shards.communication_plan import Shards
from flower_privdec.engine.shards.process_group import ProcessGroup
from flower_privdec.engine.shards.rendezvous import THIS_MACHINE
from flower_privdec.engine.shards.shard_engine import ShardEngine
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import build_topology
from tools.bench.processes import some_rows
from tools.bench.together import together
from tools.bench.workloads import WORKLOADS, Setup, Workload

NAME = "sharded"
SHARDS = 2
CPU = " cpu"  # behind the name of what was timed
FEW = 4  # examples of a peer where it is the number of peers that counts
Times = dict[str, list[float]]  # milliseconds of wall time and of this process's CPU time, by what was timed

Work = Callable[[], object]
ROUNDS = {"W1": 10, "W2": 4, "W3": 1}  # of a timed stretch
EXCHANGES = {  # peers, and periods of the graph in a stretch, by parameters: rows of 8 KB, 320 KB and 44 MB
    2_000: (100, 20),
    80_000: (50, 3),
    11_000_000: (4, 1),
}
MANY = {"W4": 1000, "W1": 200}  # peers of one process, by which a host is forecast
REPEATS = 25
PEERS = 100_000
HOSTS = 64
NETWORK = 1.25e9  # bytes a second of 10 Gbit/s


def measure_sharding(repeats: int = REPEATS, sizes: Sequence[int] = tuple(EXCHANGES)) -> dict[str, Any]:
    """Time two shards.

    Args:
        repeats: timed stretches of each kind.
        sizes: parameters of the rows whose exchange is timed, of EXCHANGES.

    Returns:
        pace: by workload, ms of a round of one process and of two, and the ratio, of wall time and of a process's CPU
        time, which other work on the machine does not change; exchanges: by bytes of a row, ms of
        an exchange, of bare gloo and of mixing in memory, and the ratio of the exchange to both together; forecast: see
        `forecast`. Ratios are of the least of many short stretches.
    """
    request = {
        "repeats": repeats,
        "rounds": ROUNDS,
        "exchanges": {d: EXCHANGES[d] for d in sizes},
    }
    with tempfile.TemporaryDirectory() as folder:
        many = [MANY if shard == 0 else {} for shard in range(SHARDS)]
        shards = [(folder, shard, request | {"many": many[shard]}) for shard in range(SHARDS)]
        times = together([(run_shard, arguments) for arguments in shards])[0]

    exchanges = {str(d * 4): _exchange(times[f"exchange-{d}"]) for d in sizes}
    steps = {name: times[f"many-{name}"] / peers for name, peers in MANY.items()}
    rate = (
        1.5 * 4 * max(sizes) / exchanges[str(4 * max(sizes))]["gloo_ms"] * 1e3
    )  # of 4 peers one row crosses, then two
    return {
        "description": "two shards of one cohort, a process each, over gloo on this machine",
        "pace": {name: _pace(times[name]) for name in ROUNDS},
        "exchanges": exchanges,
        "gloo_bytes_per_second": rate,
        "forecast": {
            name: asdict(forecast(PEERS, HOSTS, Setup.build(WORKLOADS[name]).d, ms)) for name, ms in steps.items()
        },
    }


def _d(name: str) -> int:
    return Setup.build(WORKLOADS[name].resized(2)).d


def _pace(took: dict[str, list[float]]) -> dict[str, float]:
    cpu = min(took["one" + CPU]) / min(took["two" + CPU])
    return _facts(took) | {"ratio": min(took["one"]) / min(took["two"]), "cpu_ratio": cpu}


def _exchange(took: dict[str, list[float]]) -> dict[str, float]:
    ratios = {}
    for key, kind in (("ratio", ""), ("cpu_ratio", CPU)):
        shards, gloo, mixing = (min(took[name + kind]) for name in ("shards", "gloo", "mixing"))
        ratios[key] = shards / (gloo + mixing)
    return _facts(took) | ratios


def _facts(took: dict[str, list[float]]) -> dict[str, float]:
    """Return the least and the median of each: other work slows two processes that wait for each other."""
    least = {f"{name}_ms".replace(" ", "_"): min(times) for name, times in took.items()}
    return least | {f"{name}_median_ms": float(np.median(took[name])) for name in took if not name.endswith(CPU)}


@dataclass(frozen=True)
class Forecast:
    """What a round of many peers on many hosts would cost a host.

    Attributes:
        peers, hosts, d: of the whole; parameters of a model.
        step_ms: computing, of one core.
        exchanged: rows that leave a host in a round, on average over the phases of the graph.
        bytes: of these rows.
        network_ms: they take at 10 Gbit/s each way.
        state_bytes: rows of a host, with as many from elsewhere and a second buffer of both.
        collected_bytes: that the first host receives, and holds, at each evaluation.
    """

    peers: int
    hosts: int
    d: int
    step_ms: float
    exchanged: float
    bytes: float
    network_ms: float
    state_bytes: float
    collected_bytes: float


def forecast(peers: int, hosts: int, d: int, step_ms: float) -> Forecast:
    """Work out a round of push-sum on the one-peer directed exponential graph, one core of each host at work.

        m = n / hosts;  rows that leave = mean over the phases 2^j < n of min(2^j, m, n - 2^j)
        round = m t + rows · 4 d / B

    Args:
        step_ms: t, what a peer's round takes in a process that hosts many, measured.
    """
    m = math.ceil(peers / hosts)
    phases = math.ceil(math.log2(peers))
    exchanged = sum(min(2**j, m, peers - 2**j) for j in range(phases)) / phases
    size = exchanged * 4 * d
    state = 2 * (m + m) * 4 * d
    return Forecast(peers, hosts, d, m * step_ms, exchanged, size, size / NETWORK * 1e3, state, peers * 4 * d)


def sharding_lines(result: dict[str, Any]) -> list[str]:
    """Return in words what was measured, and what follows from it."""
    lines = []
    for name, pace in result["pace"].items():
        medians = f"medians {pace['one_median_ms']:.1f} and {pace['two_median_ms']:.1f}"
        lines.append(
            f"{name}: {pace['one_ms']:.1f} ms a round in one process, {pace['two_ms']:.1f} in two ({medians}): "
            f"{pace['ratio']:.2f} times as fast; a process's CPU time {pace['one_cpu_ms']:.1f} and "
            f"{pace['two_cpu_ms']:.1f}: {pace['cpu_ratio']:.2f}"
        )

    for size, took in result["exchanges"].items():
        lines.append(
            f"rows of {int(size) / 1e3:,.0f} KB, {EXCHANGES[int(size) // 4][0]} peers: an exchange "
            f"{took['shards_ms']:.3f} ms; as many bytes over bare gloo {took['gloo_ms']:.3f} and mixing in memory "
            f"{took['mixing_ms']:.3f}: {took['ratio']:.2f} times both, in CPU time {took['cpu_ratio']:.2f}"
        )

    lines.append(f"bare gloo: {result['gloo_bytes_per_second'] / 1e9:.1f} GB/s each way between two processes here")
    return lines + [_forecast_line(name, Forecast(**facts)) for name, facts in result["forecast"].items()]


def _forecast_line(name: str, facts: Forecast) -> str:
    return (
        f"on paper, {facts.peers:,} peers of {name} (d = {facts.d:,}) on {facts.hosts} hosts, a core of each: "
        f"{facts.step_ms:,.0f} ms of steps a round and {facts.network_ms:,.0f} ms for {facts.exchanged:,.0f} rows, "
        f"{facts.bytes / 1e6:,.0f} MB, that leave a host at 10 Gbit/s; {facts.state_bytes / 1e9:,.1f} GB of rows a "
        f"host; the first collects {facts.collected_bytes / 1e9:,.1f} GB at an evaluation"
    )


# --- in the processes ---


def run_shard(folder: str, shard: int, request: Mapping[str, Any]) -> dict[str, Any]:
    """Meet the other shard, and time what the request names.

    Args:
        request: repeats, `rounds` by workload, `exchanges`, peers and periods of the graph by parameters of a
            row, and `many`, peers by workload, of the first shard alone.
    """
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "rendezvous"), SHARDS)
    process_group = ProcessGroup.join(store, shard, Shards.split(SHARDS, SHARDS), THIS_MACHINE)
    repeats = request["repeats"]
    times = dict[str, Any]()
    for name, rounds in request["rounds"].items():
        times[name] = _time_rounds(_again(process_group, WORKLOADS[name].n_peers), WORKLOADS[name], rounds, repeats)
    for d, (peers, periods) in request["exchanges"].items():
        times[f"exchange-{d}"] = _time_exchanges(_again(process_group, peers), d, periods, repeats)
    for name, peers in request["many"].items():
        times[f"many-{name}"] = _alone(replace(WORKLOADS[name], examples=FEW).resized(peers))
    process_group.wait_for_all()
    process_group.close()
    return times


def _again(process_group: ProcessGroup, n_peers: int) -> ProcessGroup:
    """Return the same connections for other peers."""
    return ProcessGroup(process_group.group, process_group.shard, Shards.split(n_peers, SHARDS))


def _time_rounds(process_group: ProcessGroup, workload: Workload, rounds: int, repeats: int) -> Times:
    """Time a round of one process, while the other waits, and of both."""
    setup = Setup.build(workload)
    shard = process_group.shard
    whole = setup.engine()
    part = ShardEngine(*some_rows(setup, process_group.shards.peers(shard)), process_group)
    works: dict[str, Work] = {"one": _nothing if shard else whole.round, "two": part.round}
    return _side_by_side(process_group, works, rounds, repeats)


def _time_exchanges(process_group: ProcessGroup, d: int, periods: int, repeats: int) -> Times:
    """Time an exchange of rows, and what it is made of: as many bytes over gloo alone, and mixing as many in memory."""
    n_peers = int(process_group.shards.ends[-1])
    peers = process_group.shards.peers(process_group.shard)
    mixing = Mixing(build_topology("directed-exponential", n_peers), "column-stochastic")
    phases = mixing.topology.period or 1
    rows = {"x": torch.randn(len(peers), d), "w": torch.ones(len(peers))}
    cohort = cast(Any, SimpleNamespace(mixing=mixing))
    engine = ShardEngine(cast(Any, None), cohort, State(peers, rows=rows), process_group)
    own, other, out = (torch.randn(len(peers), d) for _ in range(3))

    def exchange() -> None:
        engine.perform(Mix(("x", "w")))
        engine.state.at = 0
        engine.state.round_index = engine.state.round_index + 1

    def mix() -> None:
        torch.lerp(own, other, 0.5, out=out)

    exchanged = [min(2**phase, len(peers)) for phase in range(phases)]
    works = {
        "shards": _times(exchange, phases),
        "gloo": _bare(process_group, d, exchanged),
        "mixing": _times(mix, phases),
    }
    return {
        name: [ms / phases for ms in took]
        for name, took in _side_by_side(process_group, works, periods, repeats).items()
    }


def _bare(process_group: ProcessGroup, d: int, rows: list[int]) -> Work:
    """Return what sends and receives so many rows one after the other, from and to the same memory."""
    ours = torch.randn(max(rows), d)
    theirs = torch.empty(max(rows), d)
    other = 1 - process_group.shard
    group = process_group.group

    def swap() -> None:
        for count in rows:
            arriving = group.recv([theirs[:count]], other, 0)
            leaving = group.send([ours[:count]], other, 0)
            arriving.wait()
            leaving.wait()

    return swap


def _side_by_side(process_group: ProcessGroup, works: Mapping[str, Work], rounds: int, repeats: int) -> Times:
    """Return milliseconds of each work, and of CPU, in turns; no shard begins before the other has come to the end."""
    times: Times = {f"{name}{kind}": [] for name in works for kind in ("", CPU)}
    for repeat in range(repeats + 1):
        for name, work in list(works.items())[:: 1 if repeat % 2 else -1]:
            process_group.wait_for_all()
            began = time.perf_counter()
            busy = time.process_time()
            for _ in range(rounds):
                work()
            process_group.wait_for_all()
            busy = time.process_time() - busy
            took = time.perf_counter() - began
            if repeat:
                times[name].append(took / rounds * 1e3)
                times[name + CPU].append(busy / rounds * 1e3)

    return times


def _alone(workload: Workload) -> float:
    """Return the milliseconds of a round of one process, the least of some."""
    engine: Engine = Setup.build(workload).engine()
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
