"""Peers in network namespaces of their own, joined by a network that can drop everything of one of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from networked import wait_until
from paths import TESTS

from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.transport.streams import CONNECT_SECONDS, KEEPALIVE, SILENT_SECONDS
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import parse_scenario, to_yaml
from tools.lab.__main__ import Lab
from tools.lab.air import SUBNET, Air, Line, UnavailableError, enter

PEERS = 3
NOTICED, HEALED = 10.0, 5.0  # seconds
SETTINGS = (
    f"n_peers={PEERS}",
    "rounds=1000000",
    "privacy=none",
    "topology.name=complete",
    "evaluation.every=300000",
    "network={peers: [" + ", ".join(f"{{address: '{SUBNET}{i + 1}:7100'}}" for i in range(PEERS)) + "]}",
)


@pytest.fixture
def air() -> Iterator[Air]:
    try:
        with Air(PEERS, Line(delay=0.05)) as air:  # peers that are not as fast as this machine
            yield air
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED: a real network of namespaces: {error}")


@dataclass
class Run:
    """Peers as processes in their namespaces."""

    air: Air
    folder: Path
    processes: list[Process] = field(default_factory=list)

    def start(self, peer: int) -> None:
        words = ["peer", str(self.folder / "lan.yaml"), "--id", str(peer), "--out", str(self.folder / f"{peer}")]
        self._inside(peer, "flower_privdec", *words, "--certs", str(self.folder / "certs"))

    def watch(self, peer: int) -> None:
        """Ask a peer again and again, by a process in its namespace, which writes down what it says."""
        words = [f"{SUBNET}{peer + 1}:7100", str(self.folder / "certs"), str(peer), str(self.folder / f"{peer}.status")]
        self._inside(peer, "watch", *words)

    def _inside(self, peer: int, *words: str) -> None:
        command = (sys.executable, "-m", "in_namespace", self.air.spaces[peer], *words)
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            self.processes.append(start_process("in a namespace", command, log))

    def status(self, peer: int) -> dict[str, Any]:
        """Return what a peer said last."""
        path = self.folder / f"{peer}.status"
        return json.loads(path.read_bytes()) if path.exists() else {}

    def when(self, ready: Callable[[], bool], seconds: float) -> float:
        """Return after how long something was so."""
        since = time.monotonic()
        while not ready():
            for process in self.processes:
                assert process.poll() is None, [path.read_text() for path in self.folder.glob("*.log")]
            assert time.monotonic() - since < seconds, {peer: self.status(peer) for peer in range(PEERS)}
            time.sleep(0.05)
        return time.monotonic() - since

    def is_down(self, peer: int, seen_by: int) -> bool:
        return str(peer) in self.status(seen_by).get("down", {"?": ""})

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def started(air: Air, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]))
    scenario = parse_scenario(tiny_text, overrides=SETTINGS)
    make_certificates(scenario, tmp_path / "certs")
    (tmp_path / "lan.yaml").write_text(to_yaml(scenario))
    run = Run(air, tmp_path)
    try:
        for peer in range(PEERS):
            run.start(peer)
            run.watch(peer)
        run.when(lambda: all(run.status(peer).get("round", 0) for peer in range(PEERS)), 200)
        yield run
    finally:
        run.stop()


@pytest.mark.slow
def test_a_black_hole_is_noticed_and_healed(air: Air, started: Run) -> None:
    air.partition((0, 1))
    noticed = started.when(lambda: started.is_down(2, seen_by=0), 200)
    before = started.status(0)["round"]
    started.when(lambda: started.status(0)["round"] > before, 200)
    time.sleep(8)  # longer than any connection waits
    air.heal()
    healed = started.when(lambda: not (started.is_down(2, seen_by=0) or started.is_down(0, seen_by=2)), 200)
    print(f"noticed after {noticed:.1f} s, healed after {healed:.1f} s")


def test_noticing_and_healing_follow_from_connection_settings() -> None:
    """Seconds: until what was sent counts as lost, or the other side does, and until the next connection stands."""
    alive = KEEPALIVE["TCP_KEEPIDLE"] + KEEPALIVE["TCP_KEEPINTVL"] * KEEPALIVE["TCP_KEEPCNT"]
    assert alive <= SILENT_SECONDS < NOTICED
    assert CONNECT_SECONDS < HEALED


def udp(space: str, address: str) -> socket.socket:
    """Return a socket of a namespace."""

    def opened() -> socket.socket:
        enter(space)
        own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        own.bind((address, 7000))
        own.settimeout(20)
        return own

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(opened).result()


def test_a_labs_network_delays_loses_throttles_parts_and_moves(air: Air) -> None:
    first, second = (udp(air.spaces[device], f"{SUBNET}{device + 1}") for device in (0, 1))
    with first, second:
        air.line = Line(delay=0.2)
        since = time.monotonic()
        first.sendto(b"late", (f"{SUBNET}2", 7000))
        assert second.recv(100) == b"late"
        assert time.monotonic() - since >= 0.2
        air.line = Line(rate=8_000)  # a packet of 500 bytes takes half a second
        since = time.monotonic()
        first.sendto(bytes(472), (f"{SUBNET}2", 7000))
        assert len(second.recv(1000)) == 472
        assert time.monotonic() - since >= 0.5
        air.line = Line(loss=1.0)
        lost = air.lost
        first.sendto(b"lost", (f"{SUBNET}2", 7000))
        wait_until(lambda: air.lost == lost + 1)
        air.line = Line()
        air.partition((0,), (1, 2))
        first.sendto(b"apart", (f"{SUBNET}2", 7000))
        second.sendto(b"together", (f"{SUBNET}3", 7000))
        wait_until(lambda: air.packets >= 4)  # those that crossed, or would have: the one between the two sides is none
        air.heal()
        air.move(1, f"{SUBNET}9")
        first.sendto(b"to the old address", (f"{SUBNET}2", 7000))
        with udp(air.spaces[1], f"{SUBNET}9") as moved:
            first.sendto(b"to the new one", (f"{SUBNET}9", 7000))
            assert moved.recv(100) == b"to the new one"
        second.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            second.recv(100)


def test_a_lab_without_root_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError), Air(1, Line()):
        raise AssertionError


def test_a_labs_scenario_is_one(tmp_path: Path) -> None:
    """Each device's copy lists all others by name, and its own file of data."""
    lab = Lab(Air(6, Line()), tmp_path, 10, None)
    for device in range(6):
        scenario = parse_scenario(lab.scenario(device))
        assert [peer.address.partition(":")[0] == "0.0.0.0" for peer in scenario.network.peers or []] == [
            other == device for other in range(6)
        ]
