"""The peers of a scenario as processes on this machine: started, watched, stopped, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flower_privdec.common.files import write_atomically
from flower_privdec.errors import ScenarioError
from flower_privdec.network.local.fault_proxy import FaultProxy
from flower_privdec.network.transport.tls import make_certificates
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.network_section import NetworkPeer, is_loopback

STOP_SECONDS = 10.0  # until a peer that was asked to stop is made to
PRIVDEC = (sys.executable, "-m", "flower_privdec")

LEAST_PORT, MOST_PORT = 10_000, 32_000  # below those that outgoing connections are given


def on_this_machine(scenario: Scenario) -> Scenario:
    """Return a scenario with an address on this machine for each peer, free ones where it has none.

    Raises:
        ScenarioError: it has an address elsewhere, or what other processes cannot be given.
    """
    if scenario.given:
        raise ScenarioError("parts that are given as Python objects cannot be handed to other processes: use a file")
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"privacy.ledger={scenario.private.ledger!r} is one process's at a time, and here each peer keeps a "
            "ledger of its own: leave it out, or start each peer on its device by `privdec peer`"
        )
    network = scenario.network
    peers = network.peers or [NetworkPeer(address=address) for address in free_addresses(scenario.n_peers)]
    away = [peer.address for peer in peers if not is_loopback(peer.address)]
    if away:
        raise ScenarioError(
            f"network.peers: {away[0]} is not on this machine; start each peer on its own by `privdec peer`, or leave "
            "network.peers out"
        )
    here = network.model_copy(update={"peers": peers, "hand_in": network.hands_in})
    return scenario.model_copy(update={"network": here})


def free_addresses(count: int) -> list[str]:
    """Return addresses on this machine that nobody listens on, of ports that no system lends to those who call."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port, one = LEAST_PORT + secrets.randbelow(MOST_PORT - LEAST_PORT), stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
    return [f"127.0.0.1:{port}" for port in found]


class PeerProcesses:
    """A process for each peer; a context manager that leaves none behind.

    Folder: certs/, network.yaml with the addresses, and for each peer peers/I/ (its own folder) and peers/I.log; behind
    a proxy peers/I.yaml as well, with the addresses at which that peer reaches the others.
    """

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        insecure_seeds: bool = False,
        proxy: FaultProxy | None = None,
        program: Callable[[int], Sequence[str]] = lambda peer: PRIVDEC,
    ) -> None:
        """Start and write nothing yet.

        Args:
            scenario: with an address on this machine for each peer, see `on_this_machine`.
            out: the folder.
            insecure_seeds: draw noise and batches from the scenario's seed.
            proxy: through which each peer reaches each other; by default directly.
            program: of a peer: what takes the arguments of `privdec`.
        """
        self.scenario, self.out, self.proxy, self._program = scenario, out, proxy, program
        self._insecure = insecure_seeds
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def peers(self) -> range:
        """Return the numbers of all peers."""
        return range(self.scenario.n_peers)

    @property
    def certificates(self) -> Path:
        """Return the folder of certificates."""
        return self.out / "certs"

    def folder(self, peer: int) -> Path:
        """Return a peer's own folder."""
        return self.out / "peers" / str(peer)

    def log(self, peer: int) -> Path:
        """Return where a peer's words go."""
        return self.out / "peers" / f"{peer}.log"

    def prepare(self) -> None:
        """Write what the peers need."""
        make_certificates(self.scenario, self.certificates)
        (self.out / "peers").mkdir(exist_ok=True)
        write_atomically(self.out / "network.yaml", to_yaml(self.scenario).encode())
        for peer in self.peers if self.proxy is not None else ():
            write_atomically(self._file(peer), to_yaml(self._as_seen_by(peer)).encode())

    def _file(self, peer: int) -> Path:
        return self.out / "network.yaml" if self.proxy is None else self.out / "peers" / f"{peer}.yaml"

    def _as_seen_by(self, peer: int) -> Scenario:
        network = self.scenario.network
        assert self.proxy is not None
        assert network.peers is not None
        seen = self.proxy.through(peer, [each.address for each in network.peers])
        there = [each.model_copy(update={"address": at}) for each, at in zip(network.peers, seen, strict=True)]
        return self.scenario.model_copy(update={"network": network.model_copy(update={"peers": there})})

    def start(self, peer: int, *, resume: bool = False) -> None:
        """Start a peer.

        Args:
            peer: which.
            resume: go on from its checkpoint, where there is one.
        """
        command = [*self._program(peer), "peer", str(self._file(peer)), "--id", str(peer)]
        command += ["--out", str(self.folder(peer)), "--certs", str(self.certificates), "--with-parent"]
        command += ["--resume"] * (resume and any(self.folder(peer).glob("checkpoint-?")))
        command += ["--insecure-seeds"] * self._insecure
        with self.log(peer).open("ab") as log:
            # A group of its own has no part in Ctrl-C; one that is paused when this process is killed is ended with it.
            self._processes[peer] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
            )

    def status(self, peer: int) -> int | None:
        """Return a peer's exit status; None while it runs."""
        return self._processes[peer].poll()

    def pid(self, peer: int) -> int:
        """Return the number of a peer's process."""
        return self._processes[peer].pid

    def last_words(self, peer: int) -> str:
        """Return the last line of a peer's log, or its exit status where it left without a word."""
        words = self.log(peer).read_text(errors="replace").strip().splitlines()
        return words[-1].removeprefix("error: ") if words else f"status {self.status(peer)}"

    def told(self, peer: int) -> dict[str, Any] | None:
        """Return what a peer that came to its end said last; None where it did not."""
        path = self.folder(peer) / "summary.json"
        if self.status(peer) != 0 or not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def kill(self, peer: int) -> None:
        """End a peer without a warning."""
        self._signal(peer, signal.SIGKILL)
        self._processes[peer].wait()

    def pause(self, peer: int) -> None:
        """Stop a peer in the middle of whatever it does."""
        self._signal(peer, signal.SIGSTOP)

    def go_on(self, peer: int) -> None:
        """Let a peer that was paused go on."""
        self._signal(peer, signal.SIGCONT)

    def _signal(self, peer: int, number: signal.Signals) -> None:
        if self.status(peer) is None:
            os.killpg(self.pid(peer), number)

    def end(self) -> None:
        """Ask those that still run to stop, and make them after a while."""
        for peer, process in self._processes.items():
            self._signal(peer, signal.SIGCONT)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            self._signal(peer, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        for peer, process in self._processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
