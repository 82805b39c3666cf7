"""All peers of a scenario as processes on this machine: how a newcomer tries a network, and what it comes to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flower_privdec.algorithms import State
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.files import write_atomically
from flower_privdec.runtime.network.certificates import make_certificates
from flower_privdec.runtime.network.peer import noise_said, rows_path
from flower_privdec.runtime.network.timetable import Timetable
from flower_privdec.runtime.recorder import OnMetrics, Recorder, evaluation_rounds
from flower_privdec.runtime.spent import Spent
from flower_privdec.scenario import Scenario, to_yaml
from flower_privdec.scenario.network_section import NetworkPeer, is_loopback

POLL = 0.1
STOP_SECONDS = 10.0  # until a peer that was asked to stop is made to
NUMBERS = "the engine's to about 1e-6 in float32 with --insecure-seeds: each peer adds in an order of its own"


def on_this_machine(scenario: Scenario) -> Scenario:
    """Return a scenario with an address on this machine for each peer, free ones where it has none.

    Raises:
        ScenarioError: it has an address elsewhere.
    """
    network = scenario.network
    peers = network.peers or [NetworkPeer(address=address) for address in _free(scenario.n_peers)]
    away = [peer.address for peer in peers if not is_loopback(peer.address)]
    if away:
        raise ScenarioError(
            f"network.peers: {away[0]} is not on this machine; start each peer on its own by `privdec peer`, or leave "
            "network.peers out"
        )
    here = network.model_copy(update={"peers": peers, "hand_in": network.hands_in})
    return scenario.model_copy(update={"network": here})


def _free(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


class Up:
    """The peers of a scenario as processes, and the run's folder that is kept of what they hand in.

    Folder: what a run leaves (metrics, summary, models), certs/, network.yaml with the addresses, and for each peer
    peers/I/ (its own folder) and peers/I.log.
    """

    def __init__(self, scenario: Scenario, out: Path, *, resume: bool = False, insecure_seeds: bool = False) -> None:
        """Look at the scenario and the folder, and write nothing yet.

        Raises:
            ScenarioError: a part cannot be had, or the folder holds another run, or nothing to resume.
        """
        self.scenario, self.out = on_this_machine(scenario), out
        self._resume, self._insecure = resume, insecure_seeds
        if scenario.given:
            raise ScenarioError(
                "parts that are given as Python objects cannot be handed to other processes: use a file"
            )
        if scenario.private is not None and scenario.private.ledger is not None:
            raise ScenarioError(
                f"privacy.ledger={scenario.private.ledger!r} is one process's at a time, and here each peer keeps a "
                "ledger of its own: leave it out, or start each peer on its device by `privdec peer`"
            )
        if not scenario.network.hands_in:
            raise ScenarioError(
                "network.hand_in=false: the peers leave their models for nobody, and this command compares them; set "
                "it to true, or start each peer by `privdec peer`, whose own loss `privdec status` tells"
            )
        self.agreement = Agreement.of(self.scenario)
        Timetable(self.agreement)
        self.recorder = Recorder(self.agreement, None, out, "network", resume)
        self._spent = Spent([], [], [], [])

    def run(self, on_metrics: OnMetrics | None = None) -> dict[str, Any]:
        """Start the peers, follow them to the end, and return the summary.

        Raises:
            RunError: a peer failed; naming it, with its last words.
        """
        state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._prepare()
        every = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        try:
            with self._peers() as children:
                for round_index in [each for each in every if each > state.round_index]:
                    metrics = self._evaluation(round_index, children)
                    if on_metrics is not None:
                        on_metrics(metrics)
                self._wait(children)
            noise = {"noise": noise_said(self._insecure), "numbers": NUMBERS}
            return self.recorder.finish(self._rows(self.scenario.rounds), self._spent, **noise)
        finally:
            self.recorder.close()

    def _prepare(self) -> None:
        make_certificates(self.scenario, self.out / "certs")
        (self.out / "peers").mkdir(exist_ok=True)
        write_atomically(self.out / "network.yaml", to_yaml(self.scenario).encode())

    def folder(self, peer: int) -> Path:
        """Return a peer's own folder."""
        return self.out / "peers" / str(peer)

    # --- processes ---

    @contextmanager
    def _peers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        with ExitStack() as stack:
            logs = [stack.enter_context(self._log(peer).open("ab")) for peer in range(self.scenario.n_peers)]
            children = [self._start(peer, log) for peer, log in enumerate(logs)]
            try:
                yield children
            finally:
                _end(children)

    def _log(self, peer: int) -> Path:
        return self.out / "peers" / f"{peer}.log"

    def _start(self, peer: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flower_privdec", "peer", str(self.out / "network.yaml"), "--id", str(peer)]
        command += ["--out", str(self.folder(peer)), "--certs", str(self.out / "certs"), "--with-parent"]
        command += ["--resume"] * (self._resume and any(self.folder(peer).glob("checkpoint-*")))
        command += ["--insecure-seeds"] * self._insecure
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)

    def _wait(self, children: list[subprocess.Popen[bytes]]) -> None:
        while not all(child.poll() == 0 for child in children):
            self._check(children)
            time.sleep(POLL)

    def _check(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Raise the last words of the peer that failed first, if one did."""
        failed = [peer for peer, child in enumerate(children) if child.poll() not in (None, 0)]
        if failed:
            words = self._log(failed[0]).read_text(errors="replace").strip().splitlines()
            last = words[-1].removeprefix("error: ") if words else f"status {children[failed[0]].returncode}"
            raise RunError(f"peer {failed[0]} ended ({last}); its log is {self._log(failed[0])}")

    # --- what they hand in ---

    def _evaluation(self, round_index: int, children: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
        since = time.perf_counter()
        paths = [rows_path(self.folder(peer), round_index) for peer in range(self.scenario.n_peers)]
        while not all(path.exists() for path in paths):
            self._check(children)
            time.sleep(POLL)
        self.recorder.seconds += time.perf_counter() - since
        rows, self._spent = self._rows(round_index), self._told(round_index)
        metrics = self.recorder.record(rows, round_index, self._spent.epsilons)
        self.recorder.save(State(np.arange(self.scenario.n_peers), round_index, rows=rows), None)
        return metrics

    def _rows(self, round_index: int) -> dict[str, torch.Tensor]:
        each = [load_file(rows_path(self.folder(peer), round_index)) for peer in range(self.scenario.n_peers)]
        return {name: torch.cat([rows[name] for rows in each]) for name in each[0]}

    def _told(self, round_index: int) -> Spent:
        """Return what the peers say that they have spent."""
        said: dict[str, list[Any]] = {"epsilons": [], "deltas": [], "claimed": [], "rounds_run": [], "replies": []}
        notes = []
        for peer in range(self.scenario.n_peers):
            with safe_open(rows_path(self.folder(peer), round_index), framework="pt") as file:
                facts = json.loads(file.metadata()["privdec"])
            notes += [facts["note"]] * bool(facts["note"])
            for name, column in said.items():
                column += facts[name]
        return Spent(**said, note="; ".join(dict.fromkeys(notes)) or None)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to stop, and make them after a while."""
    for child in children:
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        if child.poll() is None:
            child.terminate()
    until = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
