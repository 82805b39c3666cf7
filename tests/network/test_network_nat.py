"""Devices behind routers of their own, which nobody can dial: their packets are translated, and others' dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import TESTS

from flower_privdec.network.local.fork_server import Process, start_process
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import parse_scenario, to_yaml
from tools.lab.air import SUBNET, Air, Line, UnavailableError
from tools.lab.nat import _sum
from tools.soak.checks import Paid, weight_on_disk

ROUNDS = 60
SETTINGS = (
    "n_peers=3",
    f"rounds={ROUNDS}",
    "topology.name=star",
    "evaluation.every=5",
    f"network={{peers: [{{address: '{SUBNET}1:7100', listen: '0.0.0.0:7100'}}, {{dial: out}}, {{dial: out}}]}}",
)


@pytest.fixture
def air() -> Iterator[Air]:
    try:
        with Air(3, Line(delay=0.01), hidden=(1, 2)) as air:
            yield air
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED: a real network of namespaces: {error}")


class Run:
    """Peers as processes in their namespaces."""

    def __init__(self, air: Air, folder: Path) -> None:
        self.air = air
        self.folder = folder
        self.processes: dict[int, Process] = {}

    def start(self, peer: int) -> None:
        words = ["peer", str(self.folder / "nat.yaml"), "--id", str(peer), "--out", str(self.folder / f"{peer}")]
        words += ["--certs", str(self.folder / "certs")]
        command = (sys.executable, "-m", "in_namespace", self.air.spaces[peer], "flower_privdec", *words)
        with self.log(peer).open("ab") as log:
            self.processes[peer] = start_process("in a namespace", command, log)

    def log(self, peer: int) -> Path:
        return self.folder / f"{peer}.log"

    def round(self, peer: int) -> int:
        """Return the last round that a peer has logged."""
        words = self.log(peer).read_text().split("round ")
        return int(words[-1].split("/")[0]) if words[1:] else 0

    def until(self, ready: Callable[[], bool]) -> None:
        since = time.monotonic()
        while not ready():
            assert time.monotonic() - since < 200, [self.log(peer).read_text()[-600:] for peer in self.processes]
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def run(air: Air, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]))
    scenario = parse_scenario(tiny_text, overrides=SETTINGS)
    make_certificates(scenario, tmp_path / "certs")
    (tmp_path / "nat.yaml").write_text(to_yaml(scenario))
    run = Run(air, tmp_path)
    try:
        yield run
    finally:
        run.stop()


@pytest.mark.slow
def test_two_devices_behind_nat_train_with_a_public_one(air: Air, run: Run) -> None:
    """One is killed and comes back, and all routers forget their connections meanwhile, without a word to anybody."""
    for peer in range(3):
        run.start(peer)
    run.until(lambda: all(run.round(peer) >= 5 for peer in range(3)))
    air.nat.forget()
    os.kill(run.processes[2].pid, signal.SIGKILL)
    run.processes[2].wait()
    run.start(2)
    run.until(lambda: all(process.poll() is not None for process in run.processes.values()))
    for peer, process in run.processes.items():
        assert process.poll() == 0, run.log(peer).read_text()
        assert ROUNDS <= Paid.of(run.folder / f"{peer}" / "ledger").steps <= ROUNDS + 2
    weight = weight_on_disk([run.folder / f"{peer}" for peer in range(3)], at_the_end=True)
    assert weight is not None
    assert weight.is_right


def test_nobody_dials_a_device_behind_a_router(air: Air) -> None:
    """And what it sends arrives from its router, under sums that the kernel of the other side accepts."""
    serve = "import socket; s = socket.create_server(('', 7000)); c, a = s.accept(); c.sendall(a[0].encode())"
    dial = "import socket, sys; c = socket.create_connection((sys.argv[1], 7000), 2); print(c.recv(99).decode())"
    for listening, dialling, address, wanted in ((0, 1, f"{SUBNET}1", f"{SUBNET}129"), (1, 0, f"{SUBNET}2", "")):
        server = subprocess.Popen(air.command(listening, sys.executable, "-c", serve))
        try:
            heard = ""
            for _ in range(3 if not wanted else 50):
                command = air.command(dialling, sys.executable, "-c", dial, address)
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                heard = done.stdout.strip()
                if heard:
                    break
            assert heard == wanted
        finally:
            server.kill()
            server.wait()


def test_a_sum_of_the_internet_is_right() -> None:
    """The example of RFC 1071, section 3."""
    assert _sum(bytes.fromhex("0001f203f4f5f6f7")) == ~0xDDF2 & 0xFFFF
