"""Peers in network namespaces of their own, joined by a bridge that can swallow everything of one of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from paths import TESTS

from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.transport.grpc_transport import ALIVE, CALLING
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import parse_scenario, to_yaml

PEERS = 3
NOTICED, HEALED = 10.0, 5.0  # seconds
SETTINGS = (
    f"n_peers={PEERS}",
    "rounds=1000000",
    "privacy=none",
    "topology.name=complete",
    "evaluation.every=1000000",
    "network={peers: [" + ", ".join(f"{{address: '10.77.0.{i + 1}:7100'}}" for i in range(PEERS)) + "]}",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass
class Lan:
    """A namespace for each peer, and one for the bridge between them."""

    prefix: str
    made: list[str] = field(default_factory=list)

    def space(self, peer: int) -> str:
        return f"{self.prefix}-{peer}"

    @property
    def bridge(self) -> str:
        return f"{self.prefix}-bridge"

    def make(self) -> None:
        for name in (self.bridge, *(self.space(peer) for peer in range(PEERS))):
            ip("netns", "add", name)
            self.made.append(name)
        ip("-n", self.bridge, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge0", "up")
        for peer in range(PEERS):
            space, port = self.space(peer), f"port{peer}"
            ends = ["eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self.bridge]
            ip("link", "add", *ends)
            ip("-n", self.bridge, "link", "set", port, "master", "bridge0", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{peer + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def swallow(self, peer: int) -> None:
        """Let nothing through any more, without a word to either side."""
        ip("-n", self.bridge, "link", "set", f"port{peer}", "nomaster")

    def heal(self, peer: int) -> None:
        ip("-n", self.bridge, "link", "set", f"port{peer}", "master", "bridge0")

    def remove(self) -> None:
        for name in self.made:
            with suppress(subprocess.SubprocessError):
                ip("netns", "del", name)


@pytest.fixture
def lan() -> Iterator[Lan]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("NOT TESTED: a real black hole needs root and `ip netns`")
    found = Lan(f"privdec{os.getpid()}")
    try:
        try:
            found.make()
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            pytest.skip(f"NOT TESTED: a real black hole needs network namespaces, veth and bridges ({said or error})")
        yield found
    finally:
        found.remove()


@dataclass
class Run:
    """Peers as processes in their namespaces."""

    lan: Lan
    folder: Path
    processes: list[Process] = field(default_factory=list)

    def start(self, peer: int) -> None:
        words = ["peer", str(self.folder / "lan.yaml"), "--id", str(peer), "--out", str(self.folder / f"{peer}")]
        self._inside(peer, "flower_privdec", *words, "--certs", str(self.folder / "certs"))

    def watch(self, peer: int) -> None:
        """Ask a peer again and again, by a process in its namespace, which writes down what it says."""
        words = [f"10.77.0.{peer + 1}:7100", str(self.folder / "certs"), str(peer), str(self.folder / f"{peer}.status")]
        self._inside(peer, "watch", *words)

    def _inside(self, peer: int, *words: str) -> None:
        command = (sys.executable, "-m", "in_namespace", self.lan.space(peer), *words)
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
def started(lan: Lan, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]))
    scenario = parse_scenario(tiny_text, overrides=SETTINGS)
    make_certificates(scenario, tmp_path / "certs")
    (tmp_path / "lan.yaml").write_text(to_yaml(scenario))
    run = Run(lan, tmp_path)
    try:
        for peer in range(PEERS):
            run.start(peer)
            run.watch(peer)
        run.when(lambda: all(run.status(peer).get("round", 0) for peer in range(PEERS)), 200)
        yield run
    finally:
        run.stop()


@pytest.mark.slow
def test_a_black_hole_is_noticed_and_healed_and_the_others_go_on(lan: Lan, started: Run) -> None:
    lan.swallow(2)
    noticed = started.when(lambda: started.is_down(2, seen_by=0), 200)
    before = started.status(0)["round"]
    started.when(lambda: started.status(0)["round"] > before, 200)
    time.sleep(8)  # longer than any connection waits
    lan.heal(2)
    healed = started.when(lambda: not (started.is_down(2, seen_by=0) or started.is_down(0, seen_by=2)), 200)
    print(f"noticed after {noticed:.1f} s, healed after {healed:.1f} s")


def test_how_soon_it_is_noticed_and_healed_follows_from_what_connections_are_told() -> None:
    """Milliseconds: two looks whether the other side is there, and an attempt under way before the next one."""
    alive, calling = dict(ALIVE), dict(CALLING)
    assert alive["grpc.keepalive_time_ms"] + alive["grpc.keepalive_timeout_ms"] < 1000 * NOTICED
    assert calling["grpc.min_reconnect_backoff_ms"] + calling["grpc.max_reconnect_backoff_ms"] < 1000 * HEALED
