"""All peers of a scenario as processes on this machine: how a newcomer tries a network, and what it comes to."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flower_privdec.core import State
from flower_privdec.engine.recorder import OnMetrics, Recorder, evaluation_rounds
from flower_privdec.engine.spent import Spent
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.network.local.fault_injection import Mishap, mishaps
from flower_privdec.network.local.fault_proxy import FaultProxy, Faults
from flower_privdec.network.local.peer_processes import PeerProcesses, on_this_machine
from flower_privdec.network.local.watch import OnStatus, Watch
from flower_privdec.network.peer.trainer import noise_source, rows_path
from flower_privdec.pushsum.lockstep import network_mixing
from flower_privdec.scenario import Scenario

_log = logging.getLogger(__name__)

POLL = 0.1
NUMBERS = {
    "synchronous": "the engine's to about 1e-6 in float32 with --insecure-seeds: each peer adds in an order of its own",
    "asynchronous": "of this run alone: who was heard in time decides them",
}


@contextmanager
def losing(share: float) -> Iterator[FaultProxy | None]:
    """Yield a proxy that loses a share of all messages, and a connection with each; None where it loses none.

    Raises:
        ScenarioError: the share is none.
    """
    if not 0 <= share <= 1:
        raise ScenarioError(f"--loss {share:g} must be a share, from 0 to 1")
    if not share:
        yield None
        return
    with FaultProxy(faults=Faults(lose=share)) as proxy:
        yield proxy


__all__ = ["Up", "losing", "mishaps"]


class Up:
    """The peers of a scenario as processes, and the run's folder that is kept of what they hand in.

    Folder: what a run leaves (metrics, summary, models), certs/, network.yaml with the addresses, and for each peer
    peers/I/ (its own folder) and peers/I.log.
    """

    def __init__(
        self,
        scenario: Scenario,
        out: Path,
        *,
        resume: bool = False,
        insecure_seeds: bool = False,
        proxy: FaultProxy | None = None,
        mishaps: Sequence[Mishap] = (),
    ) -> None:
        """Look at the scenario and the folder, and write nothing yet.

        Args:
            resume: go on from the folder's checkpoints.
            insecure_seeds: draw noise and batches from the scenario's seed.
            proxy: through which each peer reaches each other; by default directly.
            mishaps: what is done to the peers on the way.

        Raises:
            ScenarioError: a part cannot be had, or the folder holds another run, or nothing to resume; or a peer is to
                be killed for good for which all others would wait.
        """
        self.scenario, self.out, self._mishaps = on_this_machine(scenario), out, list(mishaps)
        if scenario.network.mode == "synchronous" and not all(each.comes_back for each in mishaps):
            raise ScenarioError(
                "network.mode=synchronous ends with a peer that is gone, for the others wait for it: use asynchronous, "
                "or --restart"
            )
        self._resume, self._insecure = resume, insecure_seeds
        if not scenario.network.hands_in:
            raise ScenarioError(
                "network.hand_in=false: the peers leave their models for nobody, and this command compares them; set "
                "it to true, or start each peer by `privdec peer`, whose own loss `privdec status` tells"
            )
        self.agreement = Agreement.of(self.scenario)
        network_mixing(self.agreement)
        self.recorder = Recorder(self.agreement, None, out, "network", resume)
        self._processes = PeerProcesses(self.scenario, out, insecure_seeds=insecure_seeds, proxy=proxy)
        self._spent = Spent([], [], [], [])
        self._gone: set[int] = set()

    def run(self, on_metrics: OnMetrics | None = None, on_status: OnStatus | None = None) -> dict[str, Any]:
        """Start the peers, follow them to the end, and return the summary.

        Args:
            on_metrics: called with each evaluation's metrics.
            on_status: called with what each peer says of itself, see `Watch`; nobody asks them without.

        Raises:
            RunError: a peer failed; naming it, with its last words. In asynchronous mode one that was killed by
                somebody else is gone, and the others go on.
        """
        state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._processes.prepare()
        every = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        try:
            with self._running(on_status):
                for round_index in [each for each in every if each > state.round_index]:
                    metrics = self._evaluation(round_index)
                    if on_metrics is not None:
                        on_metrics(metrics)
                    self._do_mishaps(round_index)
                self._wait()
            facts = {
                "noise": noise_source(self._insecure, self._is_hardened()),
                "numbers": NUMBERS[self.scenario.network.mode],
            }
            return self.recorder.finish(self._rows(self.scenario.rounds), self._spent, **facts, **self._casualties())
        finally:
            self.recorder.close()

    def _is_hardened(self) -> bool:
        private = self.scenario.private
        return private is not None and bool(private.hardened)

    # --- processes ---

    @contextmanager
    def _running(self, on_status: OnStatus | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._processes)
            for peer in self._processes.peers:
                self._processes.start(peer, resume=self._resume)
            if on_status is not None:
                stack.enter_context(Watch(self._processes, on_status))
            yield

    def _wait(self) -> None:
        while not all(self._processes.status(peer) == 0 for peer in self._alive()):
            self._check()
            time.sleep(POLL)

    def _alive(self) -> list[int]:
        return [peer for peer in self._processes.peers if peer not in self._gone]

    def _check(self) -> None:
        """Raise the last words of the peer that failed first, if one did, or if none is left."""
        for peer in self._alive():
            status = self._processes.status(peer)
            if status in (None, 0):
                continue
            if status > 0 or self.scenario.network.mode == "synchronous" or len(self._alive()) == 1:
                last, log = self._processes.last_words(peer), self._processes.log(peer)
                raise RunError(f"peer {peer} ended ({last}); its log is {log}")
            self._gone.add(peer)
            _log.warning("peer %s was killed (signal %s); the others go on", peer, -status)

    def _do_mishaps(self, round_index: int) -> None:
        """Do what is due by a round."""
        due = [each for each in self._mishaps if each.round_index <= round_index]
        self._mishaps = [each for each in self._mishaps if each not in due]
        for each in due:
            self._processes.kill(each.peer)
            if each.comes_back:
                self._processes.start(each.peer, resume=True)

    def _casualties(self) -> dict[str, str]:
        """Say who is gone, and of when its models are that count on."""
        last = [f"peer {peer} after round {self._last_round(peer)}" for peer in sorted(self._gone)]
        return {"gone": f"{', '.join(last)}: its last model is among those above"} if last else {}

    # --- what they hand in ---

    def _evaluation(self, round_index: int) -> dict[str, Any]:
        since = time.perf_counter()
        while not all(self._path(peer, round_index).exists() for peer in self._alive()):
            self._check()
            time.sleep(POLL)
        self.recorder.seconds += time.perf_counter() - since
        rows, self._spent = self._rows(round_index), self._told(round_index)
        metrics = self.recorder.record(rows, round_index, self._spent.epsilons)
        self.recorder.save(State(np.arange(self.scenario.n_peers), round_index, rows=rows), None)
        return metrics

    def _path(self, peer: int, round_index: int) -> Path:
        return rows_path(self._processes.folder(peer), round_index)

    def _handed_in(self, peer: int, round_index: int) -> Path:
        """Return what a peer handed in of a round; of one that is gone, the last that it did."""
        return self._path(peer, min(round_index, self._last_round(peer)) if peer in self._gone else round_index)

    def _last_round(self, peer: int) -> int:
        """Return the last round of which a peer handed something in.

        Raises:
            RunError: it handed in nothing.
        """
        every = evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every)
        found = [each for each in every if self._path(peer, each).exists()]
        if not found:
            raise RunError(
                f"peer {peer} was killed before it handed in a model; its log is {self._processes.log(peer)}"
            )
        return max(found)

    def _rows(self, round_index: int) -> dict[str, torch.Tensor]:
        each = [load_file(self._handed_in(peer, round_index)) for peer in range(self.scenario.n_peers)]
        return {name: torch.cat([rows[name] for rows in each]) for name in each[0]}

    def _told(self, round_index: int) -> Spent:
        """Return what the peers say that they have spent."""
        said: dict[str, list[Any]] = {"epsilons": [], "deltas": [], "claimed": [], "rounds_run": [], "replies": []}
        notes = []
        for peer in range(self.scenario.n_peers):
            with safe_open(self._handed_in(peer, round_index), framework="pt") as file:
                facts = json.loads(file.metadata()["privdec"])
            notes += [facts["note"]] * bool(facts["note"])
            for name, column in said.items():
                column += facts[name]
        notes += [
            f"peer {peer} was killed, and took no step after round {self._last_round(peer)}" for peer in self._gone
        ]
        return Spent(**said, note="; ".join(dict.fromkeys(notes)) or None)
