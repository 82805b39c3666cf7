"""Write a run's results: metrics, checkpoint, models, ledgers and a summary in one folder."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flower_privdec.algorithms.dual_averaging import DPDDA
from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError, ScenarioError, option
from flower_privdec.common.files import FolderLock, sync, write_atomically
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.machine import provenance
from flower_privdec.core import Algorithm, Exchange, State
from flower_privdec.core.attack import attack_note
from flower_privdec.experiment import Agreement, OwnParts
from flower_privdec.experiment.agreement import module_facts
from flower_privdec.experiment.checkpoint import (
    Checkpoint,
    check_run,
    check_state,
    read_checkpoint,
    save_checkpoint,
    tensors_file,
)
from flower_privdec.experiment.data_read import data_read
from flower_privdec.experiment.evaluation import Trial, evaluate, finite, peers_metrics, rows_of, shows_private
from flower_privdec.experiment.minimum import ConvexObjective, Minimum, find_minimum
from flower_privdec.experiment.noise_statement import SALTED, noise_facts
from flower_privdec.experiment.origin import ORIGIN, TrainedRun, origin_facts
from flower_privdec.experiment.run_key import SYSTEM
from flower_privdec.experiment.run_name import public_name, without_content
from flower_privdec.experiment.spent import Spent, json_number, last_step, privacy_rows, shortfall
from flower_privdec.graph.participation import present
from flower_privdec.models import unflatten
from flower_privdec.models.layers.one_tensor import own_model
from flower_privdec.privacy.ledger.segments import Head
from flower_privdec.pushsum.frames import TensorArithmetic
from flower_privdec.scenario import Scenario, load_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.sections import StageSection

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "metrics.jsonl"
PLOTS = "plots"
MOST_LISTED = 64  # peers whose own metrics a summary has, one by one
SINGLE = ("round", "consensus_distance", "epsilon", "seconds", "coalition_evaluations")  # entries that are one number


def append_metrics(folder: Path, line: str) -> None:
    """Write one line at the end."""
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(line)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines. A last one that is not whole is left out: its writing is under way, or was broken off.

    Raises:
        ScenarioError: a line before the last is not a record of an evaluation; with its number.
    """
    path = folder / NAME
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            last = records[-1]["round"] if records else -1

            if not isinstance(record, dict) or type(record.get("round")) is not int:
                raise ValueError("it has no round")
            if record["round"] <= last:
                raise ValueError(f"its round does not come after {last}")
            for name, value in record.items():
                if not _readable(name, value):
                    raise ValueError(f"its {name} is {shown(value, 40)}")
            records.append(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ScenarioError(
                f"{path}:{number}: is not a record of an evaluation ({one_line(error)}); the file is damaged: restore "
                "it from a copy, or move it away and lose its numbers",
                code="run.metrics-damaged",
            ) from error
    return records


def metrics_kept(folder: Path, fingerprint: tuple[int, str] | None) -> bytes:
    """Return what metrics.jsonl had when a checkpoint was written, without later lines; empty if the file is missing.

    Args:
        fingerprint: how many bytes it had, and their hash.

    Raises:
        ScenarioError: it does not begin with these bytes.
    """
    path = folder / NAME
    size, digest = fingerprint or (0, "")
    if not path.exists():
        return b""
    try:
        content = path.read_bytes()[:size]
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    if fingerprint is not None and sha256(content).hexdigest() != digest:
        raise _damaged(path, "is not as the last checkpoint left it: it was edited, cut short or replaced")
    return content


def _damaged(path: Path, problem: str) -> ScenarioError:
    remedy = f"move it away to go on without its earlier evaluations, or start again with another {option('out')}"
    return ScenarioError(f"{path}: {problem}; restore it from a copy, {remedy}", code="run.metrics-damaged")


def _readable(name: str, value: Any) -> bool:
    """Return whether a value is what a run writes under a name: a number, or for metrics a mapping to numbers."""
    if name in SINGLE or (name == "suboptimality" and value is not None):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value == "inf" or is_number
    return value is None or isinstance(value, dict)


NODES_PLAN = "the nodes of Flower's modes sharded and relay have planned, and noted, their own noise"
OnMetrics = Callable[[dict[str, Any]], object]
CHECKPOINT = "checkpoint"
SUMMARY = "summary.json"
LEAN_SECONDS = 60.0
SCENARIO = "scenario.yaml"
TRAINED = "model.safetensors"
WRITTEN = (CHECKPOINT, SCENARIO, NAME, SUMMARY, TRAINED, ORIGIN)  # files of a run's folder
COALITIONS = "coalition_evaluations"
# What only some runs have.
MEASURED_BY_SOME = ("peers_tried", "training_loss", "by_class", "personalized", "suboptimality", COALITIONS)


class Recorder:
    """Keeps the folder of one run.

    Files: scenario.yaml (with every default), metrics.jsonl (a line for each evaluation), ledger/, checkpoint,
    model.safetensors (each peer's model and the mean), summary.json. A lean run, one of many in a study, keeps no
    models, and writes a checkpoint once a minute at most.

    A run looks at the folder first (`__init__`), writes when all else is ready (`start`), and then saves checkpoints,
    records evaluations, and finishes:

        __init__ -> start -> (record, save)* -> finish

    Privacy: the numbers written are computed from noised models and the public test set, except those from private
    labels that a scenario asks for by `evaluation.private: ignored`. The checkpoint holds private rows.
    """

    def __init__(
        self,
        agreement: Agreement,
        own: OwnParts | None,
        out: Path,
        runtime: str,
        resume: bool = False,
        lean: bool = False,
    ) -> None:
        """Look at the folder, and write nothing yet.

        Args:
            own: of all peers, if they are at hand; None in a process that holds none of them.
            runtime: what the summary calls it.
            resume: continue from the folder's checkpoint.
            lean: see above.

        Raises:
            ScenarioError: the folder holds another run, or nothing to resume, or not the rounds that the scenario
                continues; or the training loss is asked for and the examples are not at hand.
        """
        if own is None:
            check_no_training_loss(agreement.scenario)

        self.agreement = agreement
        self.own = own
        self.out = out
        self.runtime = runtime
        self.lean = lean
        self.command = ""  # that started the run, if it was not typed to start this process
        self.run = public_name(agreement) if own is None else own.run
        self.salted_for: list[str] = []
        if agreement.scenario.compute.generator != SYSTEM:
            self.salted_for = without_content(agreement)
        self.scenario_hash = scenario_hash(agreement.scenario)

        self._lock = FolderLock(out)
        self._lock.check()
        check_places(out)
        self.begins_stage = False
        self.checkpoint = self._previous(resume)
        self._read_from = _identity(self.out / CHECKPOINT)

        if self.checkpoint is None:
            self._metrics = b""
        else:
            self._metrics = metrics_kept(out, self.checkpoint.metrics)
        self._metrics_hash = sha256(self._metrics)
        self._metrics_size = len(self._metrics)

        self.seconds = self.checkpoint.seconds if self.checkpoint else 0.0
        self._seconds_before = self.seconds  # of what was run before this process
        self.coalition_seconds = 0.0  # of this process
        self.balance_note: str | None = None  # about peers whose noise drowns the others
        self.doubted: dict[int, list[int]] = {}  # neighbours that stood out in most exchanges, and who saw it
        self.gone: Collection[int] = ()  # peers of a network that are lost, whose last models count no more
        self._saved = time.monotonic()
        self.ledger: tuple[Path, Head] | None = None  # and its head, where one process is charged for all peers
        self.transport: dict[str, Any] = {}  # the transport's own state, see `Checkpoint`

    def _previous(self, resume: bool) -> Checkpoint | None:
        """Return the checkpoint to continue from; None for a new run, whose folder must hold no other."""
        path = self.out / CHECKPOINT
        if resume and path.exists():
            return self._checkpoint_to_resume(path)

        if (self.out / SCENARIO).exists():
            remedy = f"give another {option('out')}"
            if path.exists():
                remedy = f"give {option('resume', True)} to go on with it, or another {option('out')}"
            kind = "a run without a checkpoint to resume from" if resume else "a run"
            raise ScenarioError(f"{self.out} already holds {kind}; {remedy}", code="run.folder-taken")
        for folder in (self.out, *self.out.parents):
            if folder.exists() and not folder.is_dir():
                raise ScenarioError(f"{folder} is not a folder; give another {option('out')}", code="run.no-folder")

        if resume:
            raise ScenarioError(
                f"{self.out} holds no checkpoint to resume from; leave {option('resume')} out", code="run.no-checkpoint"
            )
        if first := self.agreement.scenario.first_round:
            raise ScenarioError(
                f"the scenario goes on from round {first} of a run (earlier), which {self.out} does not hold: give "
                f"that run's folder and {option('resume', True)}, or remove earlier to plan all rounds at once",
                code="run.earlier",
            )
        return None

    def _checkpoint_to_resume(self, path: Path) -> Checkpoint:
        """Return the folder's checkpoint; refuse one of another run, or one that was damaged."""
        scenario = self.agreement.scenario
        checkpoint = read_checkpoint(path, self.agreement.device)

        # A run that was given more rounds begins a stage at the end of the one before.
        stages = scenario.earlier
        ended = (checkpoint.run.id, checkpoint.state.round_index)
        self.begins_stage = bool(stages and ended == (stages[-1].run, stages[-1].until))

        expected = {checkpoint.scenario}
        if self.begins_stage:  # it writes the scenario before its first checkpoint
            expected.add(self.scenario_hash)
        check_scenario_file(self.out / SCENARIO, expected, self.scenario_hash)
        if not self.begins_stage:
            check_run(path, checkpoint, self.scenario_hash, self.run)

        # A process without peers of its own has only what they show, and before the first round that is nothing.
        peers = np.arange(scenario.n_peers) if self.own is None else self.own.peers
        rows = () if self.own is None else ("x",)
        check_state(path, checkpoint.state, peers, scenario.rounds, rows)
        return checkpoint

    def start(self, initial: Callable[[], State], head: Head | None) -> State:
        """Return the state to begin with, and make the folder hold it.

        Args:
            initial: makes the state before round 0.
            head: the head of the ledger.

        Raises:
            ScenarioError: another run writes to the folder, or has written since it was looked at.
            RunError: the disk fails.
        """
        state = initial() if self.checkpoint is None else self.checkpoint.state
        self._lock.take()
        if _identity(self.out / CHECKPOINT) != self._read_from:
            raise ScenarioError(
                f"{self.out}: another run has written to it just now; run the same command again",
                code="run.folder-changed",
            )

        with _writing(self.out):
            scenario = to_yaml(self.agreement.scenario).encode()
            if self.checkpoint is None:
                self.save(state, head)
                write_atomically(self.out / SCENARIO, scenario, public=True)
                return state

            # Drop the evaluations made after the checkpoint: the resumed run makes them again.
            write_atomically(self.out / NAME, self._metrics, public=True)
            (self.out / SUMMARY).unlink(missing_ok=True)  # it is of a run that was stopped or had fewer rounds
            if self.begins_stage or not (self.out / SCENARIO).exists():
                write_atomically(self.out / SCENARIO, scenario, public=True)
            if self.begins_stage:
                self.save(state, head)
        return state

    def close(self) -> None:
        """Release the folder; in a forked process, close the inherited copy, and the lock stays with its owner."""
        self._lock.release()

    def save(self, state: State, head: Head | None) -> None:
        """Write a checkpoint of a state between two rounds, with the ledger's head."""
        if self.lean and time.monotonic() - self._saved < LEAN_SECONDS:
            return

        checkpoint = Checkpoint(
            state,
            self.scenario_hash,
            self.run,
            self.seconds,
            head,
            self.transport,
            metrics=(self._metrics_size, self._metrics_hash.hexdigest()),
        )

        with _writing(self.out):
            if self._metrics_size:
                sync(self.out / NAME)  # the checkpoint counts on its lines, whenever the machine stops
            save_checkpoint(self.out / CHECKPOINT, checkpoint)

        self._saved = time.monotonic()

    def record(
        self, rows: dict[str, Tensor], round_index: int, epsilons: Sequence[float], trial: Trial | None = None
    ) -> dict[str, Any]:
        """Evaluate the network after `round_index` rounds and append the line to metrics.jsonl.

        Args:
            rows: the state's, of all peers, at least those that others may see; those of `gone` peers do not count.
            epsilons: what each peer has spent.
            trial: tries the peers' models elsewhere.
        """
        measured = evaluate(self.agreement, self._without_gone(rows), round_index, self.own, trial)
        if self._objective is not None and self._minimum is not None:  # F(mean x̃) - F(x*)
            above = self._objective.value(self.agreement.algorithm.mean_model(rows)) - self._minimum.value
            measured["suboptimality"] = finite(above)
        return self.append(measured, max(epsilons))

    def append(self, measured: dict[str, Any], epsilon: float) -> dict[str, Any]:
        """Append a line to metrics.jsonl, and return it.

        Args:
            measured: of the network, see `evaluate`.
            epsilon: the most that a peer has spent.
        """
        metrics = measured | {"epsilon": json_number(epsilon), "seconds": round(self.seconds, 3)}
        line = json.dumps(metrics) + "\n"
        with _writing(self.out):
            append_metrics(self.out, line)
        self._metrics_hash.update(line.encode())
        self._metrics_size += len(line.encode())
        return metrics

    def _without_gone(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of the peers that are not gone."""
        if not self.gone:
            return rows
        there = np.ones(self.agreement.scenario.n_peers, dtype=bool)
        there[[*self.gone]] = False
        return rows_of(there, rows)

    @cached_property
    def _objective(self) -> ConvexObjective | None:
        """What the peers minimise; None unless it is convex, all are at hand, and private figures are wanted."""
        is_convex = isinstance(self.agreement.algorithm, DPDDA)
        if self.own is None or not is_convex or not shows_private(self.agreement.scenario):
            return None
        return ConvexObjective.of(self.agreement, self.own)

    @cached_property
    def _minimum(self) -> Minimum | None:
        return None if self._objective is None else find_minimum(self._objective)

    def finish(
        self,
        rows: dict[str, Tensor],
        spent: Spent,
        measured: dict[str, Any] | None = None,
        stopped: tuple[int, str] | None = None,
        **entries: Any,
    ) -> dict[str, Any]:
        """Write the models and the summary, and return the summary.

        Args:
            rows: the final state's, at least those that others may see.
            spent: what the peers have spent and run.
            measured: of the models, see `evaluate`, in place of the last line of metrics.jsonl.
            stopped: after which round the run ends before its plan does, and by what.
            entries: further or other entries of the summary, by name.
        """
        done = self.agreement.scenario.rounds if stopped is None else stopped[0]
        recorded = [record for record in read_metrics(self.out) if record["round"] == done]
        metrics = recorded[-1] if recorded else self.record(rows, done, spent.epsilons)
        metrics |= measured or {}
        summary = self._summary(rows, spent, metrics, done, stopped, entries)

        with _writing(self.out):
            if not self.lean:
                self._write_models(rows, done)
            # Last: a folder with a summary holds a finished run.
            write_atomically(self.out / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode(), public=True)
        self.close()
        return summary

    def _summary(
        self,
        rows: dict[str, Tensor],
        spent: Spent,
        metrics: dict[str, Any],
        done: int,
        stopped: tuple[int, str] | None,
        entries: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the summary, its entries in the order in which they are read."""
        scenario = self.agreement.scenario
        participation = self.agreement.participation
        if stopped is None:
            last = last_step(participation, spent.rounds_run, done)
            if last is not None:
                stopped = (last, "budget")

        summary: dict[str, Any] = {
            "name": scenario.name,
            "algorithm": scenario.algorithm.name,
            "runtime": self.runtime,
            "n_peers": scenario.n_peers,
            "rounds": scenario.rounds,
        }
        if stopped is not None:
            summary |= {"rounds_done": done, "stopped_at": stopped[0], "stopped_by": stopped[1]}
        summary["seed"] = scenario.seed
        if scenario.seeds is not None:
            summary["seeds"] = scenario.all_seeds()

        # How many private examples are of each class is covered by no ε.
        examples = None if self.own is None else self.own.examples
        summary["data"] = data_read(self.agreement, examples, counts=scenario.private is None)
        summary["metrics"] = scenario.task.described()
        for name in scenario.task.described():
            summary[name] = metrics[name]
        summary["loss"] = metrics["loss"]
        summary["consensus_distance"] = metrics["consensus_distance"]
        for name in MEASURED_BY_SOME:
            if name in metrics:
                summary[name] = metrics[name]
        if self._minimum is not None:
            summary["optimum"] = asdict(self._minimum)
        if COALITIONS in metrics:
            seconds_here = self.seconds - self._seconds_before
            summary["coalition_share_of_wall_time"] = round(self.coalition_seconds / max(seconds_here, 1e-9), 4)

        lies = attack_note(scenario.attack)
        if lies is not None:
            summary["attack"] = lies
        if self.doubted:
            named = []
            for liar, by in self.doubted.items():
                named.append(f"peer {liar} stood out in most exchanges, as {len(by)} of its neighbours saw it")
            summary["doubted"] = "; ".join(named)
        summary["traffic"] = traffic(self.agreement.algorithm, rows, self.agreement.arithmetic)
        summary["privacy"] = privacy_rows(scenario, spent, participation, done, self.agreement.inherited)
        note = spent.note or shortfall(participation, spent.rounds_run, done)
        if note:
            summary["budget_note"] = note
        summary |= self._privacy_notes(spent)

        is_whole = "peers_tried" not in metrics  # of a sample there is no list of all peers
        if not self.lean and scenario.n_peers <= MOST_LISTED and is_whole:
            summary["peers"] = peers_metrics(self.agreement, rows)
        if not self.lean:
            summary["made"] = provenance(self.command)
        if self.agreement.origin is not None:
            summary["started_from"] = str(self.agreement.origin.folder)

        steps = sum(spent.rounds_run) * self.agreement.algorithm.steps_per_round
        summary |= entries
        summary["wall_seconds"] = round(self.seconds, 3)
        summary["peer_steps_per_second"] = round(steps / max(self.seconds, 1e-9), 1)
        return summary

    def _privacy_notes(self, spent: Spent) -> dict[str, Any]:
        """Return the caveats that must be read with the ε of a private run."""
        scenario = self.agreement.scenario
        if scenario.private is None:
            return {}

        notes: dict[str, Any] = {}
        if shows_private(scenario):
            notes["evaluation_private"] = "ignored: figures on the peers' own examples are covered by no ε"
        if spent.breaches:
            notes["claim_note"] = " ".join(spent.breaches.values())
        if spent.counted is not None:
            notes["noise_counted"] = spent.counted
        if self.balance_note is not None:
            notes["balance_note"] = self.balance_note
        if self.salted_for:
            notes["noise_note"] = SALTED.format(parts=" and ".join(self.salted_for))
        if self.own is not None:
            notes |= noise_facts([self.own.source])
        return notes

    def _write_models(self, rows: dict[str, Tensor], done: int) -> None:
        """Write the peers' models and the mean, and the runs behind them, by which another run can start from here."""
        agreement = self.agreement
        models = model_tensors(agreement, rows, done, self.gone)
        facts = json.dumps(module_facts(agreement.public, agreement.loss))

        folder, head = self.ledger or (None, None)
        runs = [] if agreement.origin is None else list(agreement.origin.runs)
        runs.append(TrainedRun.of(agreement.scenario, agreement.public, folder, head))

        write_atomically(self.out / TRAINED, tensors_file(models, {"privdec": facts}))
        write_atomically(self.out / ORIGIN, origin_facts(runs, models).encode())


def check_places(out: Path) -> None:
    """Refuse a folder with something else in the place of a run's files.

    Raises:
        ScenarioError: the message names it.
    """
    for name in WRITTEN:
        path = out / name
        if os.path.lexists(path) and not path.is_file():  # a folder, or a link that leads nowhere
            raise ScenarioError(
                f"{path}: is not a file, and a run's {name} goes there; move it away, or give another {option('out')}",
                code="run.place-taken",
            )
    plots = out / PLOTS
    if os.path.lexists(plots) and not plots.is_dir():
        raise ScenarioError(
            f"{plots}: is not a folder, and a run's plots go there; move it away, or give another {option('out')}",
            code="run.place-taken",
        )


def check_scenario_file(path: Path, expected: Collection[str], given: str) -> None:
    """Refuse a folder whose scenario file is not that of its checkpoint.

    Args:
        path: the path of the file; it may be missing.
        expected: hashes of the scenarios that it may be.
        given: hash of the scenario with which the run is to continue.

    Raises:
        ScenarioError: it is damaged, or another scenario's.
    """
    if not path.exists():
        return

    # A missing file is written again, if the scenario that was given is the same.
    away = "move it away, " if given in expected else ""
    remedy = f"restore it from a copy, {away}or start again with another {option('out')}"
    try:
        hash_on_disk = scenario_hash(load_scenario(path))
    except ScenarioError as error:
        raise ScenarioError(f"{path}: is damaged ({one_line(error)}); {remedy}", code="run.scenario-damaged") from error
    if hash_on_disk == given and given not in expected:
        checkpoint = path.with_name(CHECKPOINT)
        raise ScenarioError(
            f"{checkpoint}: is a checkpoint of another scenario than the {SCENARIO} beside it; {remedy}",
            code="checkpoint.other-scenario",
        )
    if hash_on_disk not in expected:
        raise ScenarioError(
            f"{path}: is another scenario than that of the checkpoint beside it; {remedy}",
            code="run.scenario-damaged",
        )


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn an error of the disk into one line with the remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or out} could not be written ({error.strerror or error}); nothing that was kept is lost: "
            f"make room, then run the same command {again(out)}",
            code="run.unwritable",
        ) from error


def with_more_rounds(scenario: Scenario, out: Path) -> Scenario:
    """Return the scenario of a run that continues from what its folder holds, with what it did before.

    If it has another number of rounds than the folder's scenario, or another budget or noise, and all else is equal,
    the rounds that are done become a stage of their own: the others are planned beside what these cost.

    Raises:
        ScenarioError: the checkpoint is damaged, or so many rounds are done already.
    """
    if not ((out / SCENARIO).is_file() and (out / CHECKPOINT).is_file()) or scenario.earlier:
        return scenario
    try:
        previous = load_scenario(out / SCENARIO)
    except ScenarioError:
        return scenario  # `Recorder` says that the file is damaged
    if scenario_hash(_planned_as(scenario, previous)) != scenario_hash(previous):
        return scenario  # of another run, which `Recorder` refuses

    going_on = scenario.model_copy(update={"earlier": previous.earlier})
    if scenario_hash(going_on) == scenario_hash(previous):
        return going_on
    checkpoint = read_checkpoint(out / CHECKPOINT)
    done = checkpoint.state.round_index
    if not 0 < done < scenario.rounds:
        remedy = "" if done else f": it has none yet, so give another {option('out')}"
        raise ScenarioError(
            f"rounds={scenario.rounds} must be > {done}, the rounds that {out} has done{remedy}", code="run.rounds-done"
        )

    private = previous.private
    stage = StageSection(
        until=done,
        rounds=previous.rounds,
        epsilon=None if private is None else private.epsilon,
        noise_multiplier=None if private is None else private.noise_multiplier,
        run=checkpoint.run.id,
    )
    return scenario.model_copy(update={"earlier": [*(previous.earlier or ()), stage]})


def check_one_stage(scenario: Scenario, why: str) -> None:
    """Refuse more rounds if a run cannot be planned again.

    Raises:
        ScenarioError: with the reason.
    """
    if scenario.earlier:
        raise ScenarioError(
            f"rounds={scenario.rounds}: a run with more rounds than its first {scenario.first_round} goes on in one "
            f"process (`privdec run`), for {why}: start another run with all rounds",
            code="run.more-rounds",
        )


def check_no_training_loss(scenario: Scenario) -> None:
    """Refuse the training loss if no process has all peers' examples.

    Raises:
        ScenarioError: the scenario asks for it.
    """
    if scenario.evaluation.training_loss:
        raise ScenarioError(
            "evaluation.training_loss needs all peers' examples in one process, and here peers keep theirs: leave it "
            "out, or use `privdec run`",
            code="evaluation.no-examples",
        )


def check_own_ledgers(agreement: Agreement) -> None:
    """Refuse a start from a run on the same data if each peer has a ledger of its own, which does not count that run.

    Raises:
        ScenarioError: the message names the run.
    """
    if agreement.origin is not None and agreement.inherited is not None:
        raise ScenarioError(
            f"model.from={agreement.origin.folder}: was trained on the same data, and the peers' own ledgers do not "
            "count that: run it in one process (`privdec run`), or start from a run on other data",
            code="origin.own-ledgers",
        )


def _planned_as(scenario: Scenario, other: Scenario) -> Scenario:
    """Return a scenario with another's rounds, budget and noise: what may change when a run continues."""
    changed: dict[str, Any] = {"rounds": other.rounds, "earlier": other.earlier}
    if scenario.private is not None and other.private is not None:
        noise = {"epsilon": other.private.epsilon, "noise_multiplier": other.private.noise_multiplier}
        changed["privacy"] = scenario.private.model_copy(update=noise)
    return scenario.model_copy(update=changed)


def again(out: Path) -> str:
    """Return how to run the command of a run that broke off again: to resume, if there is a checkpoint."""
    if (out / CHECKPOINT).exists():
        return f"with {option('resume', True)}"
    return "again"


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, which its replacement does not have; None if the file is missing."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_ino, known.st_mtime_ns


def model_tensors(
    agreement: Agreement, rows: dict[str, Tensor], done: int, gone: Collection[int] = ()
) -> dict[str, Tensor]:
    """Return the state dicts of the mean model and of every peer's, as `mean/NAME` and `peer-3/NAME`.

    Args:
        rows: the state's, of all peers, at least those that others may see.
        done: rounds done. The mean is of the peers that are still there, as all printed figures are.
        gone: peers of a network that were lost.
    """
    there = present(agreement.participation, done)
    there[[*gone]] = False
    models = {"mean": agreement.algorithm.mean_model(rows_of(there, rows))}
    for peer, row in enumerate(agreement.algorithm.models(rows)):
        models[f"peer-{peer}"] = row

    # One copy of the module takes each row in turn: copying it for each of many peers would take longer than a run.
    module = copy.deepcopy(agreement.module)
    tensors = {}
    for owner, row in models.items():
        for name, value in _state_dict(module, row).items():
            tensors[f"{owner}/{name}"] = value
    return tensors


def state_dict_of(agreement: Agreement, model: Tensor) -> dict[str, Tensor]:
    """Return a model [d] by the names of its module's parameters and buffers, on the CPU."""
    return _state_dict(copy.deepcopy(agreement.module), model)


def _state_dict(module: nn.Module, model: Tensor) -> dict[str, Tensor]:
    """Return copies of a model's tensors, see `state_dict_of`; the module's parameters are overwritten."""
    state = own_model(unflatten(module, model)).state_dict()
    tensors = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors


def traffic(
    algorithm: Algorithm, rows: dict[str, Tensor], arithmetic: TensorArithmetic | None = None
) -> dict[str, int]:
    """Return what an active peer sends in a round to each of its receivers, from the program's exchanges.

    Args:
        arithmetic: that of the network's wire codec; None sends rows as they are.

    Returns:
        vectors: how many are as long as the model; bytes: of these vectors.
    """
    d = rows["x"].shape[1]
    vectors = 0
    n_bytes = 0
    for item in algorithm.program:
        if not isinstance(item, Exchange):
            continue
        for name in item.names:
            row = rows[item.shaped(name)]
            if row.ndim == 2 and row.shape[1] == d:
                vectors += 1
                sent = row[0] if arithmetic is None else arithmetic.encode(row[0])
                n_bytes += sent.nbytes
    return {"vectors": vectors, "bytes": n_bytes}


def evaluation_rounds(rounds: int, every: int) -> list[int]:
    """Return the numbers of rounds after which the models are tried: every so many, and at the end."""
    return sorted({*range(every, rounds + 1, every), rounds})
