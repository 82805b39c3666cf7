"""`privdec rehearse`: all peers of a scenario in one process, on a virtual clock.

The peers are those of a deployment, with their protocol, ledgers and waits; data, model and graph are built once for
all. A `Rehearsal` lets a `VirtualNetwork` perform their events, and looks at it from outside:

    when a peer hands in a model       once all that are left have, the round is evaluated as `privdec up` does
    when a peer has done a round       now and then a `Moment`: how far the peers are, and how good their models
    at the end                         each peer's end, ε, weight, waits and traffic

The folder has what a run leaves (metrics.jsonl, summary.json), in which `seconds` are those of the virtual clock,
and beside it faults.yaml, with which the same rehearsal can be repeated, timeline.csv, peers.csv and waits.csv. It has
no models: their noise follows from the scenario's seed, so nothing here is a private release.
"""

from __future__ import annotations

import csv
import gc
import io
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import PrivdecError, RunError, ScenarioError, option
from flower_privdec.common.files import write_atomically
from flower_privdec.common.formatting import memory, one_line, peer_ranges, peers_named
from flower_privdec.common.machine import HEADROOM, available_bytes
from flower_privdec.core import State
from flower_privdec.core.robust_mix import doubted
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.evaluation import evaluate, try_mean_model, try_models
from flower_privdec.experiment.recorder import OnMetrics, Recorder, evaluation_rounds
from flower_privdec.experiment.spent import Spent, rounds_run, shortfall
from flower_privdec.graph.topology import CompleteTopology
from flower_privdec.peer.faults import FaultSchedule, Lie
from flower_privdec.peer.memory_trainer import REHEARSED, MemoryDisk, MemoryHome, rehearsed
from flower_privdec.peer.peer import RunningPeer
from flower_privdec.peer.virtual_network import Machine, VirtualNetwork
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import Entry, merged
from flower_privdec.privacy.ledger.spending import costs_in
from flower_privdec.privacy.mechanism.events import Adversary
from flower_privdec.pushsum.attendance import left_out_text
from flower_privdec.rehearsal.weather import slowest_work
from flower_privdec.scenario import Scenario

RUNTIME = "rehearsal"
FAULTS = "faults.yaml"
TIMELINE = "timeline.csv"
PEERS = "peers.csv"
WAITS = "waits.csv"
MOMENTS = 60  # lines of the timeline, about
TRIED = 100  # peers whose models a moment tries, at most
LISTED_WAITS = 10_000  # pairs of peers, at most
LISTED_LIES = 10  # in the summary
# What a peer takes, as measured: objects, and models in its state, its store, its shares and what is under way.
PEER_BYTES = 200_000
MODELS_EACH = 8.0
MODELS_FOR_NEIGHBOUR = 3.0
MOST_UNDER_WAY = 16.0  # neighbours, even on a graph of more

# Who logs what each peer has to say of each neighbour.
WARNING_OF_PEERS = (
    "flower_privdec.peer.asynchronous_session",
    "flower_privdec.peer.peer",
    "flower_privdec.peer.synchronous",
    "flower_privdec.pushsum.attendance",
    "flower_privdec.pushsum.roster",
)
OBJECTS = 100_000  # new ones, until garbage is looked for
FINISHED = "finished"
NUMBERS = "only of this rehearsal: they follow from the scenario and its faults.yaml"


class _StoppedByCallback(Exception):  # noqa: N818 (no error)
    """The caller wants no more of it."""


@dataclass(frozen=True)
class Moment:
    """How far the network was at a moment.

    Attributes:
        seconds: of the virtual clock.
        rounds: done by all peers together.
        round_min, round_median, round_max: of the peers that have not ended.
        finished, failed: how many peers had ended, well or with an error.
        accuracy_mean_model: the first metric, of the mean of all peers' models.
        accuracy_peer_mean, accuracy_peer_min: the same of the peers' models, of 100 of them at most.
        epsilon_max: the largest ε that a peer had spent.
        calls, bytes: sent so far.
    """

    seconds: float
    rounds: int
    round_min: int
    round_median: float
    round_max: int
    finished: int
    failed: int
    accuracy_mean_model: float | None
    accuracy_peer_mean: float | None
    accuracy_peer_min: float | None
    epsilon_max: float
    calls: int
    bytes: int


@dataclass(frozen=True)
class PeerEnd:
    """What became of a peer.

    Attributes:
        peer: its number.
        end: finished, the code of the error that ended it, or waiting.
        ended_at: seconds of the virtual clock; None if it had not ended.
        round: that it reached.
        epsilon: of all that its ledger has; inf without privacy.
        epsilon_released: of all that it really took steps for: more than `epsilon` only if a ledger was lost.
        push_weight: of its model; 1 if the algorithm has none.
        worked, waited: seconds.
        longest_for, longest: for whose message it waited longest in all, and how long.
        calls, bytes_sent: of its calls, and of calls and answers.
        why: in words, if it did not finish.
    """

    peer: int
    end: str
    ended_at: float | None
    round: int
    epsilon: float
    epsilon_released: float
    push_weight: float
    worked: float
    waited: float
    longest_for: int | None
    longest: float
    calls: int
    bytes_sent: int
    why: str


class Rehearsal:
    """A rehearsal, and the folder that it leaves.

    Args:
        scenario: with as many peers as are to be rehearsed.
        out: the folder.
        schedule: links, durations and faults, see `weather`.
        measure: whether a private step takes as long as on this machine, in place of the schedule's.

    Attributes:
        network: the peers on their clock.
        moments: so far, about MOMENTS in all.
        ends: of each peer, once it is over.
        diverged: after which round an evaluation found no sound model; "" if all did.
        stuck: what peers still waited for when nothing happened any more; "" if all had ended.

    Raises:
        ScenarioError: a part cannot be had, the folder holds another run, or no network can run the algorithm.

    Privacy: none. Noise and batches follow from the scenario's seed.
    """

    def __init__(self, scenario: Scenario, out: Path, schedule: FaultSchedule, *, measure: bool = False) -> None:
        if scenario.compute.generator == "system":
            # What is drawn from the operating system could not be repeated, and nothing here is published.
            compute = scenario.compute.model_copy(update={"generator": None})
            scenario = scenario.model_copy(update={"compute": compute})
        self.scenario = scenario
        self.out = out
        experiment = rehearsed(scenario)
        self._experiment = experiment
        _check_memory(experiment)
        self.recorder = Recorder(experiment, None, out, RUNTIME, lean=True)

        self._home = MemoryHome(experiment, self._hand_in, self._note_round)
        if measure:
            seconds = float(f"{self._home.step_seconds() * scenario.algorithm.steps_per_round:.2g}")
            schedule = schedule.model_copy(update={"work": {**schedule.work, "train": seconds}})
        self.schedule = schedule
        self.network = VirtualNetwork(self._home, range(scenario.n_peers), schedule)
        self.moments: list[Moment] = []
        self.ends: list[PeerEnd] = []

        everybody = range(scenario.n_peers)
        self._tried = sorted(Random(schedule.seed).sample(everybody, min(TRIED, scenario.n_peers)))
        self._left = list(evaluation_rounds(scenario.rounds, scenario.evaluation.every))
        self._handed_in: dict[int, dict[int, Mapping[str, Tensor]]] = {number: {} for number in self._left}
        self._last: dict[int, Mapping[str, Tensor]] = {}  # of each peer, what it handed in last
        self._final: dict[int, Mapping[str, Tensor]] = {}
        self._rounds_done = 0
        self._evaluated = 0
        self._metrics: dict[str, Any] = {}
        self._known_epsilons: dict[tuple[object, ...], float] = {}
        self.diverged = ""
        self.stuck = ""
        self._on_metrics: OnMetrics | None = None
        self._is_stopped = False

    # --- a run ---

    def run(self, on_metrics: OnMetrics | None = None) -> dict[str, Any]:
        """Let the clock run until all peers have ended, or nothing happens any more, and write the folder.

        Args:
            on_metrics: called with each evaluation's metrics; the rehearsal ends if it returns True.

        Returns:
            The summary.

        Raises:
            RunError: no peer came through a round that is evaluated; peers.csv says what became of each.
        """
        self._on_metrics = on_metrics
        with _few_collections(), _one_line_of_each_kind():
            return self._run()

    def _run(self) -> dict[str, Any]:
        network = self.network
        self.recorder.start(lambda: State(np.arange(self.scenario.n_peers)), None)
        try:
            write_atomically(self.out / FAULTS, self.schedule.to_yaml().encode(), public=True)
            self._look()

            try:
                self.stuck = self._to_the_end()
                self._evaluate_due()
            except _StoppedByCallback:
                self._is_stopped = True

            self._look()
            self.ends = [self._end_of(machine) for machine in network.machines.values()]
            self._write_tables()
            return self._finish()
        finally:
            network.close()
            self.recorder.close()

    def _to_the_end(self) -> str:
        """Perform the events; return in words why nothing happens any more, if peers still wait."""
        network = self.network
        times = self._home.times
        patience = 3 * (max(times.start, times.deadline) + slowest_work(self.schedule))
        if times.standstill < math.inf:  # after which peers end by themselves, and say why
            patience = max(patience, 1.5 * times.standstill)
        last_fault = self.schedule.last_moment
        if math.isinf(last_fault):
            last_fault = 0.0

        progress = (-1, -1)
        while not network.is_over:
            has_progressed = progress != (self._rounds_done, len(network.ends))
            if not has_progressed and network.now > last_fault:
                return "; ".join(network.waiting()[:3])
            progress = (self._rounds_done, len(network.ends))
            try:
                network.run(until=network.now + patience)
            except RunError as error:
                if error.code != "virtual.stuck":
                    raise
                return str(error)
            self._evaluate_due()
        return ""

    # --- what is seen of it ---

    def _hand_in(self, peer: int, round_index: int | None, rows: Mapping[str, Tensor]) -> None:
        self._last[peer] = rows
        if round_index is None:
            self._final[peer] = rows
            return
        if round_index in self._handed_in:
            self._handed_in[round_index][peer] = rows
            self._evaluate_due()

    def _note_round(self, peer: RunningPeer) -> None:
        self._rounds_done += 1
        in_all = self.scenario.n_peers * self.scenario.rounds
        if self._rounds_done * MOMENTS >= len(self.moments) * in_all:
            self._look()

    def _evaluate_due(self) -> None:
        """Evaluate the rounds of which all peers that are left have handed in their models."""
        ended = self.network.ends
        while self._left:
            round_index = self._left[0]
            handed_in = self._handed_in[round_index]
            if not handed_in or len(handed_in) + len(ended) < len(self.network.machines):
                return  # some are missing: with thousands of peers, who they are is not asked each time
            missing = [peer for peer in self.network.machines if peer not in handed_in and peer not in ended]
            if missing:
                return
            self._left.pop(0)
            del self._handed_in[round_index]

            rows = self._stacked({**self._last, **handed_in})
            self.recorder.seconds = self.network.now
            epsilons = [self._epsilon(peer) for peer in self.network.machines]
            self.recorder.gone = {peer for peer in self._failed() if peer not in handed_in}
            try:
                self._metrics = self.recorder.record(rows, round_index, epsilons)
            except RunError as error:  # the models diverged: a rehearsal shows to what end
                self.diverged = f"round {round_index}: {error}"
                continue
            self._evaluated = round_index
            if self._on_metrics is not None and self._on_metrics(self._metrics) is True:
                raise _StoppedByCallback

    def _stacked(self, handed_in: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the rows of all peers; of one that never handed any in, those before round 0."""
        initial = self._home.initial_rows
        one_by_one = [handed_in.get(peer, initial) for peer in self.network.machines]
        return {name: torch.cat([rows[name] for rows in one_by_one]) for name in initial}

    def _look(self) -> None:
        """Record how far the network is."""
        network = self.network
        running = [one.process.peer for one in network.machines.values() if one.process and not one.process.is_over]
        rounds = [min(peer.state.round_index, self.scenario.rounds) for peer in running]
        if not rounds:
            rounds = [self.scenario.rounds if network.ends else 0]
        finished = sum(error is None for error in network.ends.values())

        failed = self._failed()
        there = [peer for peer in network.machines if peer not in failed] or [*network.machines]
        name = next(iter(self.scenario.task.described()))
        now: dict[int, Mapping[str, Tensor]] = dict(self._last)
        for peer in running:
            now[peer.device.peer] = peer.state.rows
        rows = self._stacked(now)
        tried = {key: values[[peer for peer in self._tried if peer in there]] for key, values in rows.items()}
        of_peers = [value for value in try_models(self._experiment, tried)[name] if math.isfinite(value)]

        moment = Moment(
            seconds=round(network.now, 6),
            rounds=self._rounds_done,
            round_min=min(rounds),
            round_median=float(median(rounds)),
            round_max=max(rounds),
            finished=finished,
            failed=len(network.ends) - finished,
            accuracy_mean_model=try_mean_model(self._experiment, rows)[name],
            accuracy_peer_mean=sum(of_peers) / len(of_peers) if of_peers else None,
            accuracy_peer_min=min(of_peers, default=None),
            epsilon_max=max((self._epsilon(peer) for peer in self._tried), default=0.0),
            calls=network.calls,
            bytes=sum(machine.bytes_sent for machine in network.machines.values()),
        )
        self.moments.append(moment)

    # --- ε ---

    def _epsilon(self, peer: int, adversary: Adversary | None = None, released: bool = False) -> float:
        """Return ε of all that a peer's ledger has, or of all that it really took steps for."""
        protection = self._home.whole.protection
        if protection is None:
            return math.inf
        account = protection.accounts[peer]
        disk = self.network.machines[peer].disk
        assert isinstance(disk, MemoryDisk)
        totals = self._home.released[peer] if released else disk.lines.totals
        entries = merged(totals.entries)
        towards = adversary or account.adversary

        # Peers that were charged the same for the same steps have the same ε. The key is a hash: there are many.
        charged = [(entry.from_step, entry.to_step, [charge.parts for charge in entry.charges]) for entry in entries]
        key = (account.delta, towards, sha256(repr(charged).encode()).digest())
        if key not in self._known_epsilons:
            self._known_epsilons[key] = self._composed(entries, account.delta, towards)
        return self._known_epsilons[key]

    @staticmethod
    def _composed(entries: Iterable[Entry], delta: float, adversary: Adversary) -> float:
        return epsilon_of_runs(costs_in(entries, adversary), delta)

    # --- the end ---

    def _end_of(self, machine: Machine) -> PeerEnd:
        """Return what became of a peer."""
        network = self.network
        peer = machine.number
        process = machine.process
        round_index = 0
        weight = 1.0
        why = ""
        end = "waiting"
        if process is not None:
            state = process.peer.state
            round_index = min(state.round_index, self.scenario.rounds)
            if "w" in state.rows:
                weight = float(state.rows["w"].reshape(-1)[0])
            if peer not in network.ends:
                why = process.peer.waiting()
        if peer in network.ends:
            error = network.ends[peer]
            end = FINISHED
            if error is not None:
                end = getattr(error, "code", "") or type(error).__name__
                why = one_line(error)
                if isinstance(error, PrivdecError):
                    why = " ".join(str(error).split())

        by_whom = {j: seconds for j, seconds in machine.waited.items() if j is not None}
        longest_for = max(by_whom, key=by_whom.__getitem__, default=None)
        ended_at = None
        if machine.ended_at is not None and end != "waiting":
            ended_at = round(machine.ended_at, 6)
        return PeerEnd(
            peer=peer,
            end=end,
            ended_at=ended_at,
            round=round_index,
            epsilon=self._epsilon(peer),
            epsilon_released=self._epsilon(peer, released=True),
            push_weight=weight,
            worked=round(machine.worked, 6),
            waited=round(sum(machine.waited.values()), 6),
            longest_for=longest_for,
            longest=0.0 if longest_for is None else round(by_whom[longest_for], 6),
            calls=machine.calls,
            bytes_sent=machine.bytes_sent,
            why=why,
        )

    def _write_tables(self) -> None:
        """Write timeline.csv, peers.csv and waits.csv."""
        self._write_table(TIMELINE, [one.name for one in fields(Moment)], map(_values, self.moments))
        self._write_table(PEERS, [one.name for one in fields(PeerEnd)], map(_values, self.ends))

        waits = []
        for machine in self.network.machines.values():
            for other, seconds in machine.waited.items():
                waits.append((-round(seconds, 6), machine.number, -1 if other is None else other))
        rows = [(peer, "" if other < 0 else other, -seconds) for seconds, peer, other in sorted(waits)[:LISTED_WAITS]]
        self._write_table(WAITS, ["peer", "waited_for", "seconds"], rows)

    def _write_table(self, name: str, header: list[str], rows: Iterable[Iterable[Any]]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        write_atomically(self.out / name, text.getvalue().encode(), public=True)

    def _finish(self) -> dict[str, Any]:
        """Write the summary, of the models that the devices ended with."""
        there = [end.peer for end in self.ends if end.peer in self._final]
        if not self._evaluated:
            first = next((end.why for end in self.ends if end.why), self.diverged)
            raise RunError(
                f"no round was evaluated, for no peer came so far: {first or 'nothing happened'}; {self.out / PEERS} "
                "says what became of each",
                code="rehearse.nothing",
            )

        stopped = None
        measured: dict[str, Any] | None = None
        if there:
            rows = {name: torch.cat([self._final[peer][name] for peer in there]) for name in self._final[there[0]]}
            try:
                measured = evaluate(self._experiment, rows, self.scenario.rounds)
            except RunError as error:
                self.diverged = f"at the end: {error}"
        if self._evaluated < self.scenario.rounds:
            stopped = (self._evaluated, "callback" if self._is_stopped else "faults")
        self.recorder.seconds = self.network.now
        self.recorder.doubted = self._doubted()
        everybody = self._stacked({**self._last, **self._final})
        return self.recorder.finish(everybody, self._spent(), measured, stopped, **self._facts())

    def _doubted(self) -> dict[int, list[int]]:
        """Return the peers that stood out in most exchanges, each with the neighbours that say so."""
        found: dict[int, list[int]] = {}
        for peer, running in self.network.peers.items():
            for liar in doubted(running.state.edges):
                found.setdefault(liar, []).append(peer)
        return found

    def _quarantined(self) -> str:
        """Return in words from whom nothing was taken any more, as it sent what no working device sends."""
        found: dict[int, list[str]] = {}
        for running in self.network.peers.values():
            for neighbor, known in running.neighbours.items():
                if known.quarantined:
                    found.setdefault(neighbor, []).append(known.quarantined)
        words = [f"peer {liar}, by {len(whys)} of its neighbours: {whys[0]}" for liar, whys in sorted(found.items())]
        return "; ".join(words[:LISTED_LIES])

    def _spent(self) -> Spent:
        whole = self._home.whole
        rounds = self.scenario.rounds
        possible = rounds_run(whole, rounds)
        done = [min(end.round, count) for end, count in zip(self.ends, possible, strict=True)]
        planned = Spent.of(whole, rounds)
        if whole.protection is None:
            return replace(planned, rounds_run=done)

        # Peers that faults ended took fewer steps than planned, and no budget is to blame for it.
        gone = self._gone()
        ran = [rounds if end.peer in gone else count for end, count in zip(self.ends, done, strict=True)]
        notes = [shortfall(whole.participation, ran, rounds)]
        if gone:
            charged = "their ε is of all that ledgers were"
            if len(gone) == 1:
                charged = "its ε is of all that its ledger was"
            notes.append(f"{peers_named(gone)} did not get to the end, and {charged} charged")
        note = "; ".join(filter(None, notes)) or None

        others: dict[str, Any] = {}
        for name, adversary in whole.protection.others.items():
            others[name] = [self._epsilon(end.peer, adversary) for end in self.ends]
        return replace(planned, epsilons=[end.epsilon for end in self.ends], rounds_run=done, note=note, **others)

    def _failed(self) -> set[int]:
        """Return the peers that have ended, and not well."""
        return {peer for peer, error in self.network.ends.items() if error is not None}

    def _gone(self) -> list[int]:
        """Return the peers that did not get to the end, which others did."""
        if self._is_stopped:
            return sorted(self._failed())
        return [end.peer for end in self.ends if end.end != FINISHED]

    def _facts(self) -> dict[str, Any]:
        """Return what only a rehearsal's summary has."""
        ends = Counter(end.end for end in self.ends)
        ended = [end.ended_at for end in self.ends if end.ended_at is not None]
        network = self.network
        facts: dict[str, Any] = {
            "noise": REHEARSED,
            "publishable": False,
            "numbers": NUMBERS,
            "virtual_seconds": round(network.now, 6),
            "first_ended_at": min(ended, default=None),
            "last_ended_at": max(ended, default=None),
            "ends": dict(sorted(ends.items())),
            "faults": dict(sorted(network.faults.items())),
            "waiting_share": self._waiting_share(),
            "calls": network.calls,
            "bytes": sum(end.bytes_sent for end in self.ends),
            "events": network.events,
        }

        rosters = {peer: running.roster for peer, running in network.peers.items() if running.roster is not None}
        finished = {end.peer for end in self.ends if end.end == FINISHED}
        left_out = left_out_text({j: one.attendance.since.items() for j, one in rosters.items() if j in finished})
        if left_out:
            facts["left_out"] = left_out

        gone = self._gone()
        if gone:
            facts["gone"] = f"{len(gone):,} of {len(self.ends):,} peers, see below; the models above are the others'"

        lies = [_lie_text(fault) for fault in self.schedule.faults if isinstance(fault, Lie)]
        if lies:
            facts["lied"] = "; ".join(lies[:LISTED_LIES])
            if len(lies) > LISTED_LIES:
                facts["lied"] += f"; and {len(lies) - LISTED_LIES} more"

        quarantined = self._quarantined()
        if quarantined:
            facts["quarantined"] = quarantined

        short = [end.peer for end in self.ends if end.epsilon_released > end.epsilon]
        if short:
            facts["ledgers_short"] = peer_ranges(short)

        if self.stuck:
            facts["stuck"] = self.stuck
        if self.diverged:
            facts["diverged"] = self.diverged
        return facts

    def _waiting_share(self) -> float | None:
        """Return which share of the peers' time was spent on waiting."""
        waited = sum(end.waited for end in self.ends)
        worked = sum(end.worked for end in self.ends)
        return round(waited / (waited + worked), 4) if waited + worked > 0 else None


def _lie_text(lie: Lie) -> str:
    """Return in words who lies, how and when."""
    factor = f"{lie.factor:g}"
    what = {
        "scaled": f"its own numbers times {factor}",
        "constant": f"{factor} in place of each number",
        "noise": f"normal numbers of {factor} in place of its own",
        "nan": "NaN in place of its numbers",
        "weight": f"its push-sum weight times {factor}",
    }[lie.says]
    until = "" if math.isinf(lie.end) else f" until {lie.end:g} s"
    return f"peer {lie.peer} sent {what}, from {lie.at:g} s on{until}"


def _check_memory(experiment: Experiment) -> None:
    """Refuse more peers than there is room for.

    Raises:
        ScenarioError: with the value and what would fit.
    """
    peers = experiment.scenario.n_peers
    numbers = experiment.initial.numel()
    neighbors = 0.0
    if experiment.mixing is not None:
        topology = experiment.mixing.topology
        is_complete = isinstance(topology, CompleteTopology)  # whose edges would not fit into memory themselves
        neighbors = peers - 1.0 if is_complete else len(topology.support()) / peers

    models = MODELS_EACH + MODELS_FOR_NEIGHBOUR * min(neighbors, MOST_UNDER_WAY)
    each = PEER_BYTES + models * numbers * experiment.initial.element_size()
    free = HEADROOM * available_bytes(torch.device("cpu"))
    if peers * each <= free:
        return
    raise ScenarioError(
        f"n_peers={peers} with models of {numbers:,} parameters and {neighbors:.0f} neighbours each need about "
        f"{memory(peers * each)} in one process, and {memory(free)} are free: rehearse fewer peers "
        f"({option('peers', max(2, int(free / each)))}), a smaller model or a graph of fewer neighbours",
        code="rehearse.memory",
    )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let Python look for garbage rarely.

    Thousands of peers are millions of objects that stay, all of which it would look through again and again; what an
    event leaves behind is freed without that.
    """
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Repeats(logging.Filter):
    """Keeps lines back, and counts those of each kind.

    Attributes:
        lines: by kind, the first one and how many there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[Any]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        if kind not in self.lines:
            self.lines[kind] = [record, 0]
        self.lines[kind][1] += 1
        return False


@contextmanager
def _one_line_of_each_kind() -> Iterator[None]:
    """Let peers warn in one line of each kind, at the end: each of them would say the same of each neighbour."""
    repeats = _Repeats()
    loggers = [logging.getLogger(name) for name in WARNING_OF_PEERS]
    for logger in loggers:
        logger.addFilter(repeats)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(repeats)
        for first, count in repeats.lines.values():
            others = f" (and {count - 1:,} more lines like this)" if count > 1 else ""
            logging.getLogger(first.name).log(first.levelno, "%s%s", first.getMessage(), others)


def _values(record: Any) -> Iterable[Any]:
    """Return the values of a line of a table; an empty text for None."""
    return ["" if value is None else value for value in vars(record).values()]
