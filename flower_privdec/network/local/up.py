"""`privdec up`: all peers of a scenario as processes on this machine, their evaluation, and injected faults.

The peers run as on devices, and know nothing of this. After each round that is evaluated, and at the end, each writes
its model to its own folder (`network.hand_in`). `Up` waits for these files, evaluates them together, and writes the
run folder that a simulation would leave. A peer may meanwhile have

| | ended with | what `Up` does |
|---|---|---|
| ended well | status 0 | reads its last files |
| been killed, or injected to be (*gone*) | a signal | goes on with its last files, unless the others wait for it |
| ended at a standstill (*gone*) | StandstillError's status | goes on with its last files |
| been cut off by peers that are gone (*gone*) | SIGTERM of `Up` | goes on with its last files |
| not agreed on the last model (*apart*) | NotAgreedError's status | reads its files, and says so in the summary |
| failed | any other status | raises RunError with the last line of its log |

A peer is cut off if so many of its neighbours are gone that it can never have its quorum again. On a device it waits,
for they may come back. Here nobody starts them again, so that it would wait for ever: `Up` ends it, and says so.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flower_privdec.common.errors import NotAgreedError, RunError, ScenarioError, StandstillError, option
from flower_privdec.core import State
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.evaluation import evaluate
from flower_privdec.experiment.noise_balance import balance_note, public_balance
from flower_privdec.experiment.noise_statement import noise_facts
from flower_privdec.experiment.recorder import OnMetrics, Recorder, evaluation_rounds, with_more_rounds
from flower_privdec.experiment.spent import Spent, ledger_folder
from flower_privdec.network.local.peer_processes import OnStatus, PeerProcesses, Watch, on_this_machine
from flower_privdec.network.peer.small_peer import check_small
from flower_privdec.peer.trainer import INSECURE, network_mixing, rows_path
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import read_entries
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import EVERYBODY, ONE_NEIGHBOUR, Adversary
from flower_privdec.pushsum.attendance import left_out_text
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.unused_keys import unused_keys

_log = logging.getLogger(__name__)

POLL = 0.1  # seconds between two looks at the peers
SAY_SECONDS = 10.0  # without an evaluation, until it is said which peers wait for whom; and between two of these lines
ENDED = (0, NotAgreedError.exit_status)  # the statuses of a peer that has written its last model
NUMBERS = {
    "synchronous": "the engine's to about 1e-6 in float32 with --insecure-seeds: each peer adds in an order of its own",
    "asynchronous": "only of this run: they depend on which messages arrived in time",
}
WAITING = re.compile(r"peer [0-9]+ waits for (?P<what>[^(]+?)(?P<why> \(.+)?")  # a peer's line that says so
FORM = re.compile(r"(?P<peer>[0-9]{1,9})@(?P<round>[0-9]{1,9})")  # of --kill and --restart


class Up:
    """The peers of a scenario as processes, and the run folder made of the models that they hand in.

    metrics.jsonl has the models after each evaluated round, as a simulation has them; summary and models are of what
    the devices end with, after final mixing.

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
        loss: float = 0.0,
        kills: Sequence[InjectedKill] = (),
        small: Collection[int] = (),
    ) -> None:
        """Check the scenario and the folder; write nothing yet.

        Args:
            resume: continue from the folder's checkpoints.
            insecure_seeds: draw noise and batches from the scenario's seed.
            loss: share of all messages that are lost on purpose.
            kills: faults to inject.
            small: peers that run without torch.

        Raises:
            ScenarioError: a part cannot be had, or the folder holds another run, or nothing to resume; or --kill would
                leave the others waiting, or all messages would be lost.
        """
        if not 0 <= loss < 1:
            raise ScenarioError(
                f"{option('loss', f'{loss:g}')} must be a share, from 0 to below 1: of 1 no message would arrive",
                code="up.loss",
            )
        wrong = [peer for peer in small if not 0 <= peer < scenario.n_peers]
        if wrong:
            raise ScenarioError(
                f"{option('small', str(wrong[0]))} must be 0 to {scenario.n_peers - 1}: n_peers={scenario.n_peers}",
                code="up.small",
            )
        if small:
            check_small(scenario)
        if resume:
            scenario = with_more_rounds(scenario, out)
        self.scenario = on_this_machine(scenario)
        self.out = out
        self._kills = list(kills)
        self._insecure = insecure_seeds

        if scenario.network.mode == "synchronous" and not all(kill.comes_back for kill in kills):
            raise ScenarioError(
                "network.mode=synchronous ends with a peer that is gone, for the others wait for it: use asynchronous, "
                f"or {option('restart')}",
                code="up.kill",
            )
        if not scenario.network.hands_in:
            raise ScenarioError(
                "network.hand_in=false: the peers hand in no models, which this command compares; set it to true, or "
                "start each peer by `privdec peer`, whose own loss `privdec status` shows",
                code="up.hand-in",
            )

        self.agreement = Agreement.of(self.scenario)
        mixing = network_mixing(self.agreement)  # raises if its graph and algorithm are not for a network
        self._links = mixing.topology.support()
        self.recorder = Recorder(self.agreement, None, out, "network", resume)
        self.recorder.balance_note = balance_note(self.scenario, public_balance(self.agreement))
        if self.recorder.balance_note is not None:
            _log.warning("%s", self.recorder.balance_note)
        for unused in unused_keys(self.scenario):
            _log.warning("%s", unused)
        self._processes = PeerProcesses(self.scenario, out, insecure_seeds=insecure_seeds, loss=loss, small=small)
        self._spent = Spent([], [], [], [])
        self._noise: list[str] = []  # the source of each peer's noise
        self._left_out: dict[int, list[tuple[int, int]]] = {}  # with whom each peer shares no noise, and since when
        self._evaluated = 0  # the round of the last evaluation of this process
        self._gone: dict[int, str] = {}  # peers that take no part any more, and why
        self._waits = _Waits(self._processes)
        self._apart: dict[int, str] = {}  # peers whose model is not the one that the others agreed on, and why

    def run(self, on_metrics: OnMetrics | None = None, on_status: OnStatus | None = None) -> dict[str, Any]:
        """Start the peers, follow them to the end, and return the summary.

        If Ctrl-C or the callback stops them, the summary is of the last evaluation, with the ε of all that their
        ledgers were charged until then.

        Args:
            on_metrics: called with each evaluation's metrics; the peers stop if it returns True.
            on_status: called with the status of each peer, see `Watch`; without it no status is requested.

        Raises:
            RunError: a peer failed; with the last line of its log. In asynchronous mode the others continue without
                one that was killed by a signal.
        """
        state = self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        self._processes.prepare()
        left = [number for number in self._evaluation_rounds() if number > state.round_index]
        stopped = False
        try:
            with ExitStack() as stack:
                stack.enter_context(self._processes)
                for peer in self._processes.peers:
                    self._processes.start(peer)
                if on_status is not None:
                    stack.enter_context(Watch(self._processes, on_status))
                for round_index in left:
                    metrics = self._evaluation(round_index)
                    stopped = on_metrics is not None and on_metrics(metrics) is True
                    if stopped:
                        break
                    self._inject(round_index)
                if not stopped:
                    self._wait()

            # The peers have ended, so that their ledgers and last models are complete.
            if stopped:
                return self._stop("callback")
            self.recorder.gone = [*self._gone]
            return self._finish(self._last_rows(), self._spent, self._measured())
        except KeyboardInterrupt:
            self._stop("interrupt")
            raise
        finally:
            self.recorder.close()

    # --- the end ---

    def _stop(self, why: str) -> dict[str, Any]:
        """Write models and summary as of the last evaluation, with what the peers' ledgers were charged since."""
        done = self._evaluated
        if not 0 < done < self.scenario.rounds:
            return {}
        spent = self._with_charges(self._spent, range(self.scenario.n_peers))
        return self._finish(self._rows(done), spent, stopped=(done, why))

    def _with_charges(self, spent: Spent, peers: Iterable[int]) -> Spent:
        """Return what was spent, with the ε of some peers of all that their ledgers were charged.

        It may be more than a peer reported last, and is no less: it may have taken steps since.
        """
        if self.scenario.private is None:
            return spent

        adversaries = {
            "epsilons": Adversary(spent.colluding),
            "replies": ONE_NEIGHBOUR,
            "if_all_collude": EVERYBODY,
        }
        charged: dict[str, Any] = {}
        for towards in adversaries:
            charged[towards] = [*getattr(spent, towards)]

        for peer in peers:
            ledger = ledger_folder(self.scenario, self._processes.folder(peer))
            entries = read_entries(ledger, self.agreement.public.name)
            for towards, adversary in adversaries.items():
                if not charged[towards]:
                    continue  # in scenarios without such an adversary
                of_ledger = epsilon_of_runs(costs_in(entries, adversary), spent.deltas[peer])
                charged[towards][peer] = max(charged[towards][peer], of_ledger)
        return replace(spent, **charged)

    def _finish(
        self,
        rows: dict[str, torch.Tensor],
        spent: Spent,
        measured: dict[str, Any] | None = None,
        stopped: tuple[int, str] | None = None,
    ) -> dict[str, Any]:
        """Write models and summary; see `Recorder.finish`."""
        facts: dict[str, Any] = {}
        if self.scenario.private and self._insecure:
            facts = {"noise": INSECURE, "publishable": False}
        elif self.scenario.private:
            facts = noise_facts(self._noise)
        facts["numbers"] = NUMBERS[self.scenario.network.mode]
        facts |= self._exceptions()
        return self.recorder.finish(rows, spent, measured, stopped, **facts)

    # --- processes ---

    def _wait(self) -> None:
        while not all(self._processes.status(peer) in ENDED for peer in self._alive()):
            self._look()

    def _look(self) -> None:
        """Look at the peers, deal with those that have ended or can never go on, and pause."""
        self._check()
        self._end_those_cut_off()
        self._waits.say(self._alive())
        time.sleep(POLL)

    def _alive(self) -> list[int]:
        return [peer for peer in self._processes.peers if peer not in self._gone]

    def _check(self) -> None:
        """Raise the error of the first peer that failed, if one did or none is left."""
        for peer in self._alive():
            status = self._processes.status(peer)
            if status in (None, 0) or peer in self._apart:
                continue

            if status == NotAgreedError.exit_status:
                self._apart[peer] = self._processes.last_line(peer)
                if not self._path(peer, self.scenario.rounds).exists():
                    self._gone[peer] = "it did not agree with the others"
                continue

            if status == StandstillError.exit_status:
                self._gone[peer] = self._processes.last_line(peer)
                _log.warning("peer %s ended: %s; the others go on", peer, self._gone[peer])
                continue

            # A positive status is the peer's own; a negative one is the signal that killed it.
            is_last = len(self._alive()) == 1
            if status > 0 or self.scenario.network.mode == "synchronous" or is_last:
                last = self._processes.last_line(peer)
                log = self._processes.log(peer)
                raise RunError(f"peer {peer} ended ({last}); its log is {log}", code="up.peer-ended")
            self._gone[peer] = f"killed by signal {-status}"
            _log.warning("peer %s was killed (signal %s); the others go on", peer, -status)
            self._say_parts()

    def _end_those_cut_off(self) -> None:
        """End peers that can never have their quorum again, one after the other: each may cut off others.

        Raises:
            RunError: no peer is left.
        """
        waits_for_quorum = self.scenario.network.alone == "wait"
        for peer in self._alive() if waits_for_quorum and self._gone else ():
            neighbors = self._neighbors(peer)
            left = [one for one in neighbors if self._is_there(one)]
            quorum = min(self.scenario.network.quorum, len(neighbors))
            has_all_rounds = self._path(peer, self.scenario.rounds).exists()  # and ends by itself
            if len(left) >= quorum or has_all_rounds or not self._is_there(peer):
                continue

            missing = sorted(set(neighbors) - set(left))
            why = f"cut off: its neighbours {missing} are gone, and it waits for {quorum} of {neighbors}"
            self._processes.end([peer])
            self._gone[peer] = why
            _log.warning("peer %s is %s; it was ended, and its folder holds all that it has", peer, why)

        if not self._alive():
            self._stop("nobody left")
            each = "; ".join(f"peer {peer}: {why}" for peer, why in sorted(self._gone.items()))
            raise RunError(
                f"no peer is left that could go on ({each}); the same command with --resume starts all of them again",
                code="up.nobody-left",
            )

    def _neighbors(self, peer: int) -> list[int]:
        """Return the peers that a peer exchanges with in some round."""
        own = self._links[(self._links == peer).any(axis=1)]
        return sorted(set(own.reshape(-1).tolist()) - {peer})

    def _is_there(self, peer: int) -> bool:
        return peer not in self._gone and self._processes.status(peer) is None

    def _say_parts(self) -> None:
        """Say so if the peers that are left do not all reach each other any more."""
        import networkx as nx  # which takes long, and is needed when a peer is gone

        graph = nx.Graph(self._links.tolist())
        graph.remove_nodes_from(self._gone)
        parts = sorted(sorted(part) for part in nx.connected_components(graph))
        if len(parts) > 1:
            each = ", ".join(map(str, parts))
            _log.warning("the peers that are left are in %s parts that do not reach each other: %s", len(parts), each)

    def _inject(self, round_index: int) -> None:
        """Kill the peers whose round has come."""
        due = [kill for kill in self._kills if kill.round_index <= round_index]
        self._kills = [kill for kill in self._kills if kill not in due]
        for kill in due:
            self._processes.kill(kill.peer)
            if kill.comes_back:
                self._processes.start(kill.peer)

    def _exceptions(self) -> dict[str, str]:
        """Return which peers are gone, and whose model is not the one that the others have."""
        exceptions = {}
        gone = [f"peer {peer} after round {self._last_round(peer)} ({why})" for peer, why in sorted(self._gone.items())]
        if gone:
            exceptions["gone"] = f"{', '.join(gone)}; the models above are the others'"
        apart = [f"peer {peer}: {why}" for peer, why in sorted(self._apart.items())]
        if apart:
            exceptions["not_agreed"] = "; ".join(apart)
        left_out = left_out_text({peer: self._left_out.get(peer, ()) for peer in self._alive()})
        if left_out:
            exceptions["left_out"] = left_out
        return exceptions

    # --- models that the peers hand in ---

    def _evaluation_rounds(self) -> list[int]:
        """Return after which rounds the models are evaluated."""
        return list(evaluation_rounds(self.scenario.rounds, self.scenario.evaluation.every))

    def _evaluation(self, round_index: int) -> dict[str, Any]:
        """Wait until all peers have handed in a round, and evaluate and record it."""
        since = time.perf_counter()
        self._waits.progress()
        while not all(self._path(peer, round_index).exists() for peer in self._alive()):
            self._look()
        self.recorder.seconds += time.perf_counter() - since

        # A peer that was lost after it handed this round in still counts, later no more.
        self.recorder.gone = [peer for peer in self._gone if not self._path(peer, round_index).exists()]
        rows = self._rows(round_index)
        self._spent = self._reported(round_index)
        metrics = self.recorder.record(rows, round_index, self._spent.epsilons)
        self._evaluated = round_index
        self.recorder.save(State(np.arange(self.scenario.n_peers), round_index, rows=rows), None)

        # The files of the evaluation before are recorded, and not read again.
        earlier = [number for number in self._evaluation_rounds() if number < round_index]
        for before in earlier[-1:]:
            for peer in self._alive():
                self._path(peer, before).unlink(missing_ok=True)
        return metrics

    def _path(self, peer: int, round_index: int) -> Path:
        return rows_path(self._processes.folder(peer), round_index)

    def _handed_in(self, peer: int, round_index: int) -> Path:
        """Return the file that a peer handed in for a round; for one that is gone, its last."""
        if peer in self._gone:
            round_index = min(round_index, self._last_round(peer))
        return self._path(peer, round_index)

    def _last_round(self, peer: int) -> int:
        """Return the last round of which a peer handed something in.

        Raises:
            RunError: it handed in nothing.
        """
        present = [number for number in self._evaluation_rounds() if self._path(peer, number).exists()]
        if not present:
            raise RunError(
                f"peer {peer} was gone before it handed in a model; its log is {self._processes.log(peer)}",
                code="up.peer-ended",
            )
        return max(present)

    def _rows(self, round_index: int) -> dict[str, torch.Tensor]:
        return _stacked([self._handed_in(peer, round_index) for peer in range(self.scenario.n_peers)])

    def _last_rows(self) -> dict[str, torch.Tensor]:
        """Return the rows of the devices' last models; for a peer that is gone, those that it handed in last."""
        paths = []
        for peer in range(self.scenario.n_peers):
            if peer in self._gone:
                paths.append(self._handed_in(peer, self.scenario.rounds))
            else:
                paths.append(rows_path(self._processes.folder(peer), None))
        return _stacked(paths)

    def _measured(self) -> dict[str, Any]:
        """Evaluate the devices' last models, without those of peers that are gone."""
        alive = torch.tensor(self._alive())
        rows = {name: values[alive] for name, values in self._last_rows().items()}
        return evaluate(self.agreement, rows, self.scenario.rounds)

    def _reported(self, round_index: int) -> Spent:
        """Return the ε that the peers report; keep the sources of their noise."""
        names = ("epsilons", "deltas", "claimed", "rounds_run", "replies", "if_all_collude")
        columns: dict[str, Any] = {name: [] for name in names}
        colluding = None
        counted = None
        breaches: dict[str, str] = {}
        notes: list[str] = []
        self._noise = []

        for peer in range(self.scenario.n_peers):
            with safe_open(self._handed_in(peer, round_index), framework="pt") as file:
                facts = json.loads(file.metadata()["privdec"])

            if facts["note"]:
                notes.append(facts["note"])
            self._noise.append(facts["noise"])
            self._left_out[peer] = [(partner, since) for partner, since in facts.get("left_out", ())]
            colluding = facts["colluding"]
            counted = facts["counted"]
            for condition, words in facts["breaches"].items():
                breaches.setdefault(condition, words)  # if several peers break one, the words are the first one's
            for name, column in columns.items():
                column += facts[name]

        for peer in sorted(self._gone):
            notes.append(f"peer {peer} is gone, and its ε is of all that its ledger was charged")
        note = "; ".join(dict.fromkeys(notes)) or None  # each once
        spent = Spent(**columns, note=note, colluding=colluding, breaches=breaches, counted=counted)
        return self._with_charges(spent, self._gone)


class _Waits:
    """Says which peers wait for whom, while nothing else happens.

    Each peer writes to its log what it waits for, once it has waited for some seconds.
    """

    def __init__(self, processes: PeerProcesses) -> None:
        self._processes = processes
        self._said = ""
        self._say_at = math.inf

    def progress(self) -> None:
        """Note that the run went on."""
        self._said = ""
        self._say_at = time.monotonic() + SAY_SECONDS

    def say(self, peers: Iterable[int]) -> None:
        """Say what peers wait for, if it is time and something else than what was said last."""
        if time.monotonic() < self._say_at:
            return
        self._say_at = time.monotonic() + SAY_SECONDS

        waiting: dict[str, dict[str, str]] = {}  # for what, who, and why
        for peer in peers:
            if self._processes.status(peer) is not None:
                continue
            line = WAITING.fullmatch(self._processes.last_line(peer))
            if line is not None:
                waiting.setdefault(line["what"], {})[str(peer)] = line["why"] or ""

        text = "; ".join(_waiting_text(what, why) for what, why in waiting.items())
        if text and text != self._said:
            _log.warning("%s", text)
        self._said = text


def _waiting_text(what: str, why: Mapping[str, str]) -> str:
    """Return who waits for something, with the reason if all have the same; a peer's log has its own.

    Args:
        why: the reasons, by peer.
    """
    reasons = set(why.values())
    reason = reasons.pop() if len(reasons) == 1 else ""
    return f"waiting for {what}{reason}: peers {', '.join(why)}"


def _stacked(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the rows of one-row files, each [n_peers, ...]."""
    models = [load_file(path) for path in paths]
    return {name: torch.cat([rows[name] for rows in models]) for name in models[0]}


@dataclass(frozen=True)
class InjectedKill:
    """A peer is killed by SIGKILL once all peers have handed in a round.

    Attributes:
        peer: which.
        round_index: the round.
        comes_back: whether it is started again and resumes from its disk.
    """

    peer: int
    round_index: int
    comes_back: bool


def injected_kills(kill: Iterable[str], restart: Iterable[str], n_peers: int, rounds: int) -> tuple[InjectedKill, ...]:
    """Parse the options --kill and --restart, each PEER@ROUND.

    Args:
        kill: those after which the peer does not come back.
        restart: those after which it does.

    Raises:
        ScenarioError: one names no peer or no round before the last, or no peer would be left.
    """
    kills = [_injected_kill("kill", text, n_peers, rounds, comes_back=False) for text in kill]
    restarts = [_injected_kill("restart", text, n_peers, rounds, comes_back=True) for text in restart]
    gone = {one.peer for one in kills}
    if len(gone) >= n_peers:
        raise ScenarioError(
            f"{option('kill')} ends all {n_peers} peers: leave one, or more that can still train together",
            code="up.kill",
        )
    return (*kills, *restarts)


def _injected_kill(name: str, text: str, n_peers: int, rounds: int, *, comes_back: bool) -> InjectedKill:
    form = FORM.fullmatch(text)
    if form is None:
        raise ScenarioError(f"{option(name, repr(text))} must be PEER@ROUND, as 3@100", code="up.kill")

    peer = int(form["peer"])
    round_index = int(form["round"])
    if peer >= n_peers:
        raise ScenarioError(f"{option(name, text)}: there are the peers 0 to {n_peers - 1}", code="up.kill")
    if not round_index < rounds:
        raise ScenarioError(f"{option(name, text)}: the round must be before the last, {rounds}", code="up.kill")
    return InjectedKill(peer, round_index, comes_back)
