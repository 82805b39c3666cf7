"""`privdec network-bench`: rounds per second of real peers on this machine, beside what their transport alone takes.

For each size of model, in one run: peers as processes with their folders on the disk; the same messages over bare gRPC
with TLS between as many processes, along the same links, without computing, checking, copying or disk; peers with their
folders in memory; and the bare transport again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.algorithms import advance
from flower_privdec.bench.timing import quiet
from flower_privdec.data.readers import require
from flower_privdec.errors import RunError
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.scenario import Scenario, parse_scenario, to_yaml

BASE = """\
name: network-bench
n_peers: 8
rounds: 12
data: {dataset: digits, batch: {sampling: uniform, size: 1}}
model: {name: mlp, hidden: [1060]}
algorithm: {name: sgp, learning_rate: 0.01}
privacy: none
topology: {name: directed-exponential}
evaluation: {every: 100000}
network: {start: 120.0, deadline: 60.0}
"""
SIZES = {"79,510 parameters": "model.hidden=[1060]", "11 million parameters": "model.hidden=[3280,3280]"}
WARM_UP = 3  # rounds that are not counted, and the last one, after which a peer hands in its model
MEMORY = Path("/dev/shm")
STEPS = 7  # timed in this process


@dataclass(frozen=True)
class NetworkPace:
    """What the rounds of some processes took, on average, after the first ones.

    Attributes:
        rounds_per_second: of a process.
        cpu_ms: CPU time of a round, of all processes together.
        sync_ms, syncs: how long a process waited for the disk in a round, and how often.
        bytes: that a process sent in a round.
    """

    rounds_per_second: float
    cpu_ms: float
    sync_ms: float = 0.0
    syncs: float = 0.0
    bytes: float = 0.0

    @classmethod
    def of(cls, stamps: Sequence[Sequence[Sequence[float]]], counted: slice) -> NetworkPace:
        """Return the pace of processes from their stamps, [clock, CPU seconds, ...] after each round."""
        spans = [np.subtract(each[counted][-1], each[counted][0]) for each in stamps]
        rounds = len(stamps[0][counted]) - 1
        clock, cpu, *others = np.transpose(spans)
        sync, syncs, sent = (float(each.mean()) / rounds for each in others) if others else (0.0, 0.0, 0.0)
        return cls(float((rounds / clock).mean()), float(cpu.sum()) / rounds * 1e3, sync * 1e3, syncs, sent)


def measure_network(rounds: int, settings: Sequence[str], out: Path) -> dict[str, Any]:
    """Measure every size.

    Args:
        rounds: that are counted.
        settings: laid over the scenario, as network.mode=synchronous.
        out: a folder on the disk that is meant.

    Returns:
        By size: `floor`, `disk` and `memory` (absent where there is no /dev/shm) as NetworkPace, `messages` of a peer
        in a round, and `computing_ms`, CPU time of all peers' steps of a round, up to its first exchange.
    """
    found: dict[str, Any] = {}
    for size, model in SIZES.items():
        chosen = [model, *settings, f"rounds={rounds + WARM_UP + 2}"]
        scenario = parse_scenario(BASE, overrides=chosen)
        _say(f"{size}: {scenario.n_peers} peers, network.mode={scenario.network.mode}")
        found[size] = _measure(scenario, out)
    return found


def _measure(scenario: Scenario, out: Path) -> dict[str, Any]:
    receivers = _receivers(scenario)
    messages = sum(len(each) for place in receivers for each in place) / scenario.rounds / scenario.n_peers
    disk = _peers(scenario, out)
    floors = [_floor(scenario, receivers, round(disk.bytes / messages))]
    result = {"messages": messages, "computing_ms": _computing(scenario), "disk": disk}
    if MEMORY.is_dir():
        result["memory"] = _peers(scenario, MEMORY)
        floors.append(_floor(scenario, receivers, round(disk.bytes / messages)))
    rates, cpu = ([getattr(floor, name) for floor in floors] for name in ("rounds_per_second", "cpu_ms"))
    return result | {"floor": NetworkPace(float(np.mean(rates)), float(np.mean(cpu)), bytes=disk.bytes)}


def _computing(scenario: Scenario) -> float:
    """Return the CPU milliseconds of all peers' steps of a round, up to its first exchange."""
    experiment = Experiment.build(scenario, np.arange(1))
    cohort, times = experiment.cohort(), []
    with quiet():
        for _ in range(STEPS):
            state, began = experiment.initial_state(cohort), time.process_time()
            advance(experiment.algorithm, cohort, state)
            times.append(time.process_time() - began)
    return float(np.median(times)) * scenario.n_peers * 1e3


def _receivers(scenario: Scenario) -> list[list[list[int]]]:
    """Return to whom every peer sends, at every place."""
    timetable = require("flower_privdec.runtime.network.timetable", "privdec network-bench", "pip install grpcio")
    table = timetable.Timetable(Agreement.of(scenario))
    return [[sorted(table.receivers(peer, at)) for peer in range(scenario.n_peers)] for at in range(table.places)]


def _peers(scenario: Scenario, where: Path) -> NetworkPace:
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder, placed = Path(name), _placed(scenario, Path(name))
        words = ["flower_privdec.bench.network_peer", str(folder / "network.yaml")]
        commands = [
            [*words, str(peer), str(folder / str(peer)), str(folder / "certs")] for peer in range(placed.n_peers)
        ]
        return NetworkPace.of(_together(commands), slice(WARM_UP, -1))


def _floor(scenario: Scenario, receivers: list[list[list[int]]], size: int) -> NetworkPace:
    with tempfile.TemporaryDirectory() as name:
        folder, placed = Path(name), _placed(scenario, Path(name))
        assert placed.network.peers is not None
        plan = {
            "addresses": [peer.address for peer in placed.network.peers],
            "identities": placed.network.identities(placed.name, placed.n_peers),
            "certs": str(folder / "certs"),
            "bytes": size,
            "receivers": receivers,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        words = ["flower_privdec.runtime.network.floor", str(folder / "plan.json")]
        stamps = _together([[*words, str(peer)] for peer in range(placed.n_peers)])
        each_round = len(receivers) // scenario.rounds
        return NetworkPace.of([each[each_round - 1 :: each_round] for each in stamps], slice(WARM_UP, -1))


def _placed(scenario: Scenario, folder: Path) -> Scenario:
    """Return the scenario with free addresses on this machine, and put it and its certificates into a folder."""
    network = require("flower_privdec.runtime.network.peer_processes", "privdec network-bench", "pip install grpcio")
    certificates = require("flower_privdec.runtime.network.certificates", "privdec network-bench", "pip install grpcio")
    placed: Scenario = network.on_this_machine(scenario)
    certificates.make_certificates(placed, folder / "certs")
    (folder / "network.yaml").write_text(to_yaml(placed))
    return placed


def _together(commands: list[list[str]]) -> list[Any]:
    """Run some modules as processes, and return what each of them prints; whatever happens, none stays."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-m", *words], text=True, **pipes) for words in commands]  # type: ignore[call-overload]
    try:
        return [_answer(child) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _answer(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    assert child.stderr is not None
    line = child.stdout.readline()
    if not line:
        raise RunError(f"a process of the benchmark failed: {child.stderr.read().strip()[-500:]}")
    return json.loads(line)


def lines(found: dict[str, Any]) -> list[str]:
    """Return what was measured, in lines."""
    said = []
    for size, result in found.items():
        floor = result["floor"]
        said.append(f"{size}: {floor.bytes / 1e6:.2f} MB a round from each peer, {result['messages']:g} messages")
        said.append(f"  {'bare gRPC with TLS':<20}{floor.rounds_per_second:9.2f} rounds/s {floor.cpu_ms:9.1f} ms CPU")
        said.append(f"  {'steps of all peers':<20}{'':18} {result['computing_ms']:9.1f} ms CPU")
        for name in ("disk", "memory"):
            if name in result:
                said.append(_line(f"peers, {name}", result[name], floor))
    return said


def _line(name: str, pace: NetworkPace, floor: NetworkPace) -> str:
    rate = f"{pace.rounds_per_second:9.2f} rounds/s {pace.cpu_ms:9.1f} ms CPU"
    times = f"{floor.rounds_per_second / pace.rounds_per_second:.2f} times the floor"
    return f"  {name:<20}{rate}  {times}; {pace.syncs:.1f} syncs of a peer's disk, {pace.sync_ms:.1f} ms a round"


def as_json(found: dict[str, Any]) -> str:
    """Return what was measured as JSON."""
    return json.dumps(found, default=asdict, indent=2)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
