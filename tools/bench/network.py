"""`privdec network-bench`: rounds per second of real peers on this machine, beside what their transport alone takes.

For each size of model and each mode, in one run: private peers as processes with their folders on the disk, ledgers
included; the same bytes over bare gRPC with TLS between as many processes, along the same links, without computing,
checking, copying or disk; and peers with their folders in memory. The baseline takes no steps, so the ratios are of all
that a peer does to that; the CPU time is also compared without the steps, which are timed in this process.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.core import advance
from flower_privdec.experiment import Agreement, Experiment, OwnParts
from flower_privdec.network.local.peer_processes import on_this_machine
from flower_privdec.network.peer.driver import Driver, PeerDevice
from flower_privdec.network.peer.foreground import running_peer
from flower_privdec.network.transport.tls import credentials_of, make_certificates
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.trainer import network_mixing
from flower_privdec.pushsum.lockstep import Timetable
from flower_privdec.scenario import Scenario, load_scenario, parse_scenario, to_yaml
from tools.bench import transport_baseline
from tools.bench.timing import quiet
from tools.bench.together import together

BASE = """\
name: network-bench
n_peers: 8
rounds: 12
data: {dataset: digits, batch: {size: 20}}
model: {name: mlp, hidden: [1060]}
algorithm: {name: sgp, learning_rate: 0.01}
privacy: {epsilon: 3.0, delta: 1.0e-3, clip_norm: 1.0}
topology: {name: directed-exponential}
evaluation: {every: 100000}
network: {deadline: 60.0}
"""
SIZES = {  # what it is called, the model, and rounds that are counted
    "small": ("79,510 parameters", "model.hidden=[1060]", 40),
    "large": ("11 million parameters", "model.hidden=[3280,3280]", 8),
}
MODES = ("asynchronous", "synchronous")
WARM_UP = 3  # rounds that are not counted, and the last one, after which a peer hands in its model
MEMORY = Path("/dev/shm")
STEPS = 7  # timed in this process


@dataclass(frozen=True)
class NetworkPace:
    """What the rounds of some processes took, on average, after the first ones.

    Attributes:
        rounds_per_second: of a process.
        cpu_ms: CPU time of a round, of all processes together.
        sync_ms, syncs: how long a process waited for the disk in a round, and how often, by fsync or fdatasync.
        bytes: that a process sent in a round.
        written: bytes that a process gave the disk in a round, as the kernel counts them (in pages, and 0 in memory).
    """

    rounds_per_second: float
    cpu_ms: float
    sync_ms: float = 0.0
    syncs: float = 0.0
    bytes: float = 0.0
    written: float = 0.0

    @classmethod
    def of(cls, stamps: Sequence[Sequence[Sequence[float]]], counted: slice) -> NetworkPace:
        """Return the pace of processes from their stamps, [clock, CPU seconds, ...] after each round."""
        spans = [np.subtract(process[counted][-1], process[counted][0]) for process in stamps]
        rounds = len(stamps[0][counted]) - 1
        clock, cpu, *others = np.transpose(spans)
        sync, *counts = (float(column.mean()) / rounds for column in others) if others else (0.0,)
        return cls(float((rounds / clock).mean()), float(cpu.sum()) / rounds * 1e3, sync * 1e3, *counts)


def measure_network(
    sizes: Sequence[str],
    modes: Sequence[str],
    settings: Sequence[str],
    out: Path,
    rounds: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure some sizes and modes, and report each figure as soon as it is measured.

    Args:
        sizes: of SIZES.
        modes: of MODES.
        settings: laid over the scenario, as network.commit_every=4.
        out: a folder on the disk that is meant.
        rounds: that are counted; as many as SIZES says when not given.
        say: takes a line.

    Returns:
        By size and mode, `small asynchronous`: `floor`, `disk` and `memory` (absent if there is no /dev/shm) as
        NetworkPace, `messages` of a peer in a round, and `computing_ms`, CPU time of all peers' private steps of a
        round, up to its first exchange, without their ledgers.
    """
    results: dict[str, Any] = {}
    for size in sizes:
        name, model, usual = SIZES[size]
        for mode in modes:
            chosen = [model, f"network.mode={mode}", *settings, f"rounds={(rounds or usual) + WARM_UP + 2}"]
            scenario = parse_scenario(BASE, overrides=chosen)
            say(f"{name}, {scenario.n_peers} peers, network.mode={mode}")
            results[f"{size} {mode}"] = _measure(scenario, out, say)
    return results


def _measure(scenario: Scenario, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the peers on the disk, then the same bytes over bare gRPC, and the peers in memory."""
    receivers = _receivers(scenario)
    messages = sum(len(peers) for place in receivers for peers in place) / scenario.rounds / scenario.n_peers
    result: dict[str, Any] = {"messages": messages, "computing_ms": _computing(scenario)}
    computing = result["computing_ms"]
    say(f"  {'steps of all peers':<20}{'':18} {computing:9.1f} ms CPU")
    disk = _peers(scenario, out)
    floor = replace(_floor(scenario, receivers, round(disk.bytes / messages)), bytes=disk.bytes)
    say(f"  {'bare gRPC with TLS':<20}{_rate(floor)}; {disk.bytes / 1e6:.2f} MB in {messages:g} messages a round")
    say(line("peers, disk", disk, floor, computing))
    result |= {"floor": floor, "disk": disk}
    if MEMORY.is_dir():
        result["memory"] = _peers(scenario, MEMORY)
        say(line("peers, memory", result["memory"], floor, computing))
    return result


def _computing(scenario: Scenario) -> float:
    """Return the CPU milliseconds of all peers' steps of a round, up to its first exchange, with deployed noise."""
    agreement = Agreement.of(scenario)
    experiment = Experiment.joined(agreement, OwnParts.of(agreement, np.arange(1), secrets.token_bytes(32)))
    cohort = experiment.cohort()
    times = []
    with quiet():
        for _ in range(STEPS):
            state = experiment.initial_state(cohort)
            began = time.process_time()
            advance(experiment.algorithm, cohort, state)
            times.append(time.process_time() - began)
    return float(np.median(times)) * scenario.n_peers * 1e3


def _receivers(scenario: Scenario) -> list[list[list[int]]]:
    """Return the receivers of every peer at every place of the timetable."""
    agreement = Agreement.of(scenario)
    table = Timetable(agreement.algorithm, network_mixing(agreement), scenario.rounds)
    return [[sorted(table.turn(peer, at).receivers) for peer in range(scenario.n_peers)] for at in range(table.places)]


def _peers(scenario: Scenario, where: Path) -> NetworkPace:
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        placed = _placed(scenario, Path(name))
        file = str(folder / "network.yaml")
        certs = str(folder / "certs")
        peers = [(file, peer, str(folder / str(peer)), certs) for peer in range(placed.n_peers)]
        stamps = together([(run_peer, arguments) for arguments in peers])
        return NetworkPace.of(stamps, slice(WARM_UP, -1))


def _floor(scenario: Scenario, receivers: list[list[list[int]]], size: int, kind: str = "pieces") -> NetworkPace:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        placed = _placed(scenario, Path(name))
        assert placed.network.peers is not None
        plan = {
            "addresses": [peer.address for peer in placed.network.peers],
            "identities": placed.network.identities(placed.name, placed.n_peers),
            "certs": str(folder / "certs"),
            "bytes": size,
            "kind": kind,
            "receivers": receivers,
        }
        (folder / "plan.json").write_text(json.dumps(plan))

        peers = [(str(folder / "plan.json"), peer) for peer in range(placed.n_peers)]
        stamps = together([(transport_baseline.run_peer, arguments) for arguments in peers])
        per_round = len(receivers) // scenario.rounds
        return NetworkPace.of([process[per_round - 1 :: per_round] for process in stamps], slice(WARM_UP, -1))


def _placed(scenario: Scenario, folder: Path) -> Scenario:
    """Return the scenario with free addresses on this machine, and put it and its certificates into a folder."""
    placed = on_this_machine(scenario)
    make_certificates(placed, folder / "certs")
    (folder / "network.yaml").write_text(to_yaml(placed))
    return placed


def line(name: str, pace: NetworkPace, floor: NetworkPace, computing_ms: float) -> str:
    """Return in words what some peers took, beside the floor.

    Args:
        computing_ms: CPU time of all steps of a round.
    """
    times = f"{floor.rounds_per_second / pace.rounds_per_second:.2f} times the floor"
    rest = max(0.0, pace.cpu_ms - computing_ms) / floor.cpu_ms
    cpu = f"{pace.cpu_ms / floor.cpu_ms:.2f} times its CPU ({rest:.2f} without the steps)"
    if pace.bytes == floor.bytes:
        share = ""
    else:
        share = f" at {pace.bytes / floor.bytes:.2f} of its bytes"
    disk = f"{pace.syncs:.1f} syncs of a peer, {pace.sync_ms:.1f} ms, {pace.written / 1e6:.2f} MB written"
    return f"  {name:<20}{_rate(pace)}; {times}, {cpu}{share}; {disk}"


def _rate(pace: NetworkPace) -> str:
    return f"{pace.rounds_per_second:9.2f} rounds/s {pace.cpu_ms:9.1f} ms CPU"


def as_json(results: dict[str, Any]) -> str:
    """Return what was measured as JSON."""
    return json.dumps(results, default=asdict, indent=2)


class TimedSync:
    """Counts the seconds that this process waits in os.fsync and os.fdatasync."""

    def __init__(self) -> None:
        """Take their places."""
        self.seconds = 0.0
        self.count = 0
        os.fsync = self._timed(os.fsync)  # type: ignore[assignment]
        os.fdatasync = self._timed(os.fdatasync)  # type: ignore[assignment]

    def _timed(self, sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(descriptor: Any) -> None:
            began = time.monotonic()
            sync(descriptor)
            self.seconds += time.monotonic() - began
            self.count += 1

        return timed


def _written() -> int:
    """Return how many bytes this process has given the disk; 0 if the system does not count them."""
    counts = Path("/proc/self/io")
    lines = counts.read_text().splitlines() if counts.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def run_peer(scenario: str, peer: int, folder: str, certificates: str) -> list[tuple[float, ...]]:
    """Run the peer; return, for every round, [clock, CPU seconds, seconds of syncs, syncs, bytes sent, written]."""
    loaded = load_scenario(Path(scenario))
    assert loaded.network.peers is not None
    addresses = tuple(peer.address for peer in loaded.network.peers)
    device = PeerDevice(peer, Path(folder), credentials_of(loaded, Path(certificates), peer), addresses)
    timed = TimedSync()
    rounds = list[tuple[float, ...]]()

    def note(running: RunningPeer) -> None:
        sent = running.session.bytes_sent
        rounds.append((time.monotonic(), time.process_time(), timed.seconds, timed.count, sent, _written()))

    driver = Driver(running_peer(loaded, device))
    try:
        driver.open()
        driver.run(note)
    finally:
        driver.close()
    return rounds
