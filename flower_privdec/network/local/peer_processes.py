"""The peers of a scenario as processes on this machine: start, watch, stop, kill and restart them."""

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
from threading import Event, Thread
from typing import Any, Self

from flower_privdec.common.errors import NotAgreedError, RunError, ScenarioError
from flower_privdec.common.files import owners_file, write_atomically
from flower_privdec.network.local.fork_server import SERVER, Process, start_process
from flower_privdec.network.peer.status import STATUS_CAP, request_status
from flower_privdec.network.transport.grpc_transport import GrpcConnection
from flower_privdec.network.transport.tls import credentials_of, identities, make_certificates
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.sections import NetworkPeer, is_loopback

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
PRIVDEC = (sys.executable, "-m", "flower_privdec")

LEAST_PORT, MOST_PORT = 10_000, 32_000  # below those that outgoing connections are given


def on_this_machine(scenario: Scenario) -> Scenario:
    """Return a scenario with an address on this machine for each peer, free ones where it has none.

    Raises:
        ScenarioError: it has an address elsewhere, or what other processes cannot be given.
    """
    if scenario.given:
        raise ScenarioError(
            "parts that are given as Python objects cannot be handed to other processes: use a file",
            code="local.objects",
        )
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"privacy.ledger={scenario.private.ledger!r} is one process's at a time, and here each peer keeps a "
            "ledger of its own: leave it out, or start each peer on its device by `privdec peer`",
            code="local.one-ledger",
        )
    network = scenario.network
    peers = network.peers or [NetworkPeer(address=address) for address in free_addresses(scenario.n_peers)]
    away = [peer.address for peer in peers if not is_loopback(peer.address)]
    if away:
        raise ScenarioError(
            f"network.peers: {away[0]} is not on this machine; start each peer on its own by `privdec peer`, or leave "
            "network.peers out",
            code="local.elsewhere",
        )
    here = network.model_copy(update={"peers": peers, "hand_in": network.hands_in})
    return scenario.model_copy(update={"network": here})


def free_addresses(count: int) -> list[str]:
    """Return free addresses on this machine, below the ports of outgoing connections."""
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            port = LEAST_PORT + secrets.randbelow(MOST_PORT - LEAST_PORT)
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]


class PeerProcesses:
    """A process for each peer; a context manager that leaves none behind.

    Folder: certs/, network.yaml with the addresses, and for each peer peers/I/ (its own folder) and peers/I.log.
    """

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        insecure_seeds: bool = False,
        loss: float = 0.0,
        program: Callable[[int], Sequence[str]] = lambda peer: PRIVDEC,
    ) -> None:
        """Start and write nothing yet.

        Args:
            scenario: with an address on this machine for each peer, see `on_this_machine`.
            out: the folder.
            insecure_seeds: draw noise and batches from the scenario's seed.
            loss: share of all messages that are lost on purpose.
            program: of a peer: what takes the arguments of `privdec`.
        """
        self.scenario = scenario
        self.out = out
        self._program = program
        self._options = ["--insecure-seeds"] * insecure_seeds + ["--loss", str(loss)] * bool(loss)
        self._processes: dict[int, Process] = {}

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
        """Return a peer's log file."""
        return self.out / "peers" / f"{peer}.log"

    def prepare(self) -> None:
        """Write what the peers need, while the process that they are forked from imports it."""
        SERVER.begin()
        make_certificates(self.scenario, self.certificates)
        (self.out / "peers").mkdir(exist_ok=True)
        write_atomically(self.out / "network.yaml", to_yaml(self.scenario).encode(), public=True)

    def file(self, peer: int) -> Path:
        """Return the file of the scenario as a peer is given it."""
        return self.out / "network.yaml"

    def start(self, peer: int, *, charge_witnessed: bool = False) -> None:
        """Start a peer.

        Args:
            peer: which.
            charge_witnessed: charge what its ledger lost, and stop.
        """
        command = [*self._program(peer), "peer", str(self.file(peer)), "--id", str(peer)]
        command += ["--out", str(self.folder(peer)), "--certs", str(self.certificates), "--with-parent"]
        command += self._options + ["--charge-witnessed"] * charge_witnessed
        with open(self.log(peer), "ab", opener=owners_file) as log:
            # A process group of its own gets no Ctrl-C; a peer that is paused when this process is killed ends with it.
            self._processes[peer] = start_process(f"privdec peer {peer}", command, log)

    def status(self, peer: int) -> int | None:
        """Return a peer's exit status; None while it runs."""
        return self._processes[peer].poll()

    def pid(self, peer: int) -> int:
        """Return the number of a peer's process."""
        return self._processes[peer].pid

    def last_line(self, peer: int) -> str:
        """Return the last line of a peer's log, or its exit status where the log is empty."""
        lines = self.log(peer).read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"status {self.status(peer)}"

    def last_status(self, peer: int) -> dict[str, Any] | None:
        """Return the last status of a peer that finished; None for others."""
        path = self.folder(peer) / "summary.json"
        if self.status(peer) not in (0, NotAgreedError.exit_status) or not path.exists():
            return None
        status: dict[str, Any] = json.loads(path.read_text())
        return status

    def kill(self, peer: int) -> None:
        """Kill a peer by SIGKILL."""
        self.signal(peer, signal.SIGKILL)
        self._processes[peer].wait()

    def signal(self, peer: int, number: signal.Signals) -> None:
        """Send a signal to a peer that runs."""
        if self.status(peer) is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid(peer), number)

    def end(self) -> None:
        """Terminate all peers; kill those that still run after STOP_SECONDS."""
        for peer in self._processes:
            self.signal(peer, signal.SIGCONT)
            self.signal(peer, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        for peer, process in self._processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


OnStatus = Callable[[int, dict[str, Any] | None, str], None]  # of a peer: its status and a word on it
EVERY = 0.5  # seconds between an answer and the next request
ANSWER_SECONDS = 1.0
STARTING = "starting"
SILENT = "no answer"
DONE = "done"


class Watch:
    """Requests the status of every peer in a thread of its own; a context manager.

    Each request is made as if the peer made it itself: with its own certificate, at its own address.
    """

    def __init__(self, processes: PeerProcesses, on_status: OnStatus) -> None:
        """Begin to request.

        Args:
            processes: the peers.
            on_status: called in these threads with a peer, its status (None where it did not answer) and a word:
                STARTING before its first answer, SILENT where it does not answer any more, DONE at its end.
        """
        self._processes, self._on_status, self._stopping = processes, on_status, Event()
        self._threads = [Thread(target=self._follow, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop requesting."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, peer: int) -> None:
        scenario = self._processes.scenario
        processes = self._processes
        assert scenario.network.peers is not None
        credentials = credentials_of(scenario, processes.certificates, peer)
        address = scenario.network.peers[peer].address
        name = identities(scenario)[peer]
        connection = GrpcConnection(address, name, credentials, STATUS_CAP)
        word = STARTING
        try:
            while not self._stopping.is_set() and not self._is_done(peer):
                status = None
                with contextlib.suppress(RunError):  # reported by the word instead
                    status = request_status(connection, ANSWER_SECONDS)
                word = SILENT if status is not None else word  # from now on
                self._on_status(peer, status, word if status is None else "")
                self._stopping.wait(EVERY)
            self._is_done(peer)
        finally:
            connection.close()

    def _is_done(self, peer: int) -> bool:
        """Report a peer's last status, if it came to its end."""
        status = self._processes.last_status(peer)
        if status is not None:
            self._on_status(peer, status, DONE)
        return status is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
