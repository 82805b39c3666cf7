"""The peers of a scenario as processes on this machine: start, watch, stop, kill and restart them.

`PeerProcesses` makes what `privdec peer` needs (certificates, a scenario with addresses) and starts it for each peer;
`Watch` asks the running peers for their status. Nothing here is part of a peer: each works as it would on a device.
"""

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
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from flower_privdec.common.errors import ArgumentError, NotAgreedError, RunError, ScenarioError
from flower_privdec.common.files import owners_file, write_atomically
from flower_privdec.common.logs import message_of
from flower_privdec.network.local.fork_server import SERVER, SMALL, Process, start_process
from flower_privdec.network.peer.status import STATUS_CAP, request_status
from flower_privdec.network.transport.in_threads import call_and_wait, evented
from flower_privdec.network.transport.named import transport_class, transport_of
from flower_privdec.network.transport.tls import credentials_of, make_certificates
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.sections import NetworkPeer, checked_address, is_loopback

STOP_SECONDS = 10.0  # between SIGTERM and SIGKILL
PRIVDEC = (sys.executable, "-m", "flower_privdec")

# Below the ports that Linux gives outgoing connections, which could otherwise take a port before its peer listens.
LEAST_PORT = 10_000
MOST_PORT = 32_000


def on_this_machine(scenario: Scenario) -> Scenario:
    """Return a scenario with an address on this machine for each peer: its own, or else free ones.

    Raises:
        ScenarioError: it has an address elsewhere, parts that other processes cannot be given, or a transport that
            does not exist.
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
    transport_class(network.transport)  # raises here, once, what each peer's process would raise
    free = iter(free_addresses(scenario.n_peers))
    peers = network.peers or [NetworkPeer(address=address) for address in free]
    # So that its status can be requested.
    peers = [
        peer.model_copy(update={"listen": next(free)}) if peer.address is None and peer.listen is None else peer
        for peer in peers
    ]
    places = [place for peer in peers for place in (peer.address, peer.listen) if place is not None]
    away = [place for place in places if not is_loopback(place)]
    if away:
        raise ScenarioError(
            f"network.peers: {away[0]} is not on this machine; start each peer on its own by `privdec peer`, or leave "
            "network.peers out",
            code="local.elsewhere",
        )

    if network.metrics is not None:
        last = metrics_of(network.metrics, scenario.n_peers - 1)
        try:
            checked_address(last)
        except ArgumentError as error:
            raise ScenarioError(f"network.metrics={last!r}, of the last peer, {error}", code=error.code) from error

    here = network.model_copy(update={"peers": peers, "hand_in": network.hands_in})
    return scenario.model_copy(update={"network": here})


def metrics_of(address: str, peer: int) -> str:
    """Return where a peer on this machine serves metrics: PORT + I."""
    before, _, port = address.rpartition(":")
    return f"{before}:{int(port) + peer}"


def free_addresses(count: int) -> list[str]:
    """Return free addresses on this machine, below the ports of outgoing connections."""
    ports: list[int] = []
    with ExitStack() as stack:  # all stay bound until the last is found, so that none is found twice
        while len(ports) < count:
            port = LEAST_PORT + secrets.randbelow(MOST_PORT - LEAST_PORT)
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # in use
                probe.bind(("127.0.0.1", port))
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
        small: Collection[int] = (),
        program: Callable[[int], Sequence[str]] = lambda peer: PRIVDEC,
    ) -> None:
        """Start and write nothing yet.

        Args:
            scenario: with an address on this machine for each peer, see `on_this_machine`.
            out: the folder.
            insecure_seeds: draw noise and batches from the scenario's seed.
            loss: share of all messages that are lost on purpose.
            small: peers that run without torch.
            program: returns, for a peer, the words of the command that takes the arguments of `privdec`.
        """
        self.scenario = scenario
        self.out = out
        self._small = frozenset(small)
        self._program = program
        self._options: list[str] = []
        if insecure_seeds:
            self._options.append("--insecure-seeds")
        if loss:
            self._options += ["--loss", str(loss)]
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

    def start(self, peer: int, *, charge_missing: bool = False) -> None:
        """Start a peer.

        Args:
            peer: its number.
            charge_missing: charge what its ledger lost, and stop.
        """
        command = [*self._program(peer), "peer", str(self.file(peer)), "--id", str(peer)]
        command += ["--out", str(self.folder(peer)), "--certs", str(self.certificates), "--with-parent"]
        command += self._options
        if self.scenario.network.metrics is not None:
            command += ["--metrics", metrics_of(self.scenario.network.metrics, peer)]
        if peer in self._small:
            command.append(SMALL)
        if charge_missing:
            command.append("--charge-missing")

        # In a process group of its own a peer gets no Ctrl-C. By --with-parent it ends with this process, even if it is
        # paused when this one is killed.
        with open(self.log(peer), "ab", opener=owners_file) as log:
            self._processes[peer] = start_process(f"privdec peer {peer}", command, log)

    def status(self, peer: int) -> int | None:
        """Return a peer's exit status; None while it runs."""
        return self._processes[peer].poll()

    def pid(self, peer: int) -> int:
        """Return the process id of a peer."""
        return self._processes[peer].pid

    def last_line(self, peer: int) -> str:
        """Return the last line of a peer's log, or its exit status if the log is empty."""
        lines = self.log(peer).read_text(errors="replace").strip().splitlines()
        if not lines:
            return f"status {self.status(peer)}"
        return message_of(lines[-1])

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
        """Send a signal to a peer; nothing if it has ended."""
        if self.status(peer) is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid(peer), number)

    def end(self, peers: Iterable[int] | None = None) -> None:
        """Terminate some peers, by default all; kill those that still run after STOP_SECONDS."""
        ending = [*self._processes] if peers is None else [*peers]
        for peer in ending:
            self.signal(peer, signal.SIGCONT)  # a peer that is paused could not end
            self.signal(peer, signal.SIGTERM)

        until = time.monotonic() + STOP_SECONDS
        for peer in ending:
            process = self._processes[peer]
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


OnStatus = Callable[[int, dict[str, Any] | None, str], None]  # called with a peer, its status and a word on it
EVERY = 0.5  # seconds between an answer and the next request
ANSWER_SECONDS = 1.0  # to wait for an answer
STARTING = "starting"
SILENT = "no answer"
DONE = "done"


class Watch:
    """Requests the status of every peer in a thread of its own; a context manager.

    Each request is made as if the peer made it itself: with its own certificate, at its own address. A peer answers its
    status only to itself.
    """

    def __init__(self, processes: PeerProcesses, on_status: OnStatus) -> None:
        """Begin to request.

        Args:
            processes: the peers.
            on_status: called in these threads with a peer, its status (None if it did not answer) and a word:
                STARTING before its first answer, SILENT if it does not answer any more, DONE at its end.
        """
        self._processes = processes
        self._on_status = on_status
        self._stopping = Event()
        self._threads = [Thread(target=self._follow, args=(peer,), daemon=True) for peer in processes.peers]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop requesting."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, peer: int) -> None:
        """Report a peer's status until its end, or until this is closed."""
        processes = self._processes
        scenario = processes.scenario
        assert scenario.network.peers is not None
        credentials = credentials_of(scenario, processes.certificates, peer)
        addresses = [other.listen or other.address for other in scenario.network.peers]
        transport = evented(transport_of(scenario, peer, addresses, credentials))
        connection = transport.connect(peer, STATUS_CAP)
        call = partial(call_and_wait, transport.turn, connection)

        word_without_answer = STARTING
        try:
            while not self._stopping.is_set() and not self._is_done(peer):
                status = None
                with contextlib.suppress(RunError):  # reported by the word instead
                    status = request_status(call, ANSWER_SECONDS)
                if status is None:
                    self._on_status(peer, None, word_without_answer)
                else:
                    word_without_answer = SILENT  # from now on it is no longer starting
                    self._on_status(peer, status, "")

                self._stopping.wait(EVERY)
            self._is_done(peer)
        finally:
            connection.close()
            transport.close()

    def _is_done(self, peer: int) -> bool:
        """Return whether a peer came to its end, and report its last status if it did."""
        status = self._processes.last_status(peer)
        if status is None:
            return False
        self._on_status(peer, status, DONE)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
