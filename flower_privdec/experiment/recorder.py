"""What a run leaves behind: metrics, checkpoint, models, ledgers and a summary in one folder."""

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
from typing import Any

import numpy as np
from safetensors.torch import save
from torch import Tensor

from flower_privdec.algorithms.dual_averaging import DPDDA
from flower_privdec.common.errors import RunError, ScenarioError, option
from flower_privdec.common.files import FolderLock, sync, write_atomically
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.machine import provenance
from flower_privdec.core import Algorithm, Exchange, State
from flower_privdec.experiment import Agreement, OwnParts
from flower_privdec.experiment.agreement import module_facts
from flower_privdec.experiment.checkpoint import (
    Checkpoint,
    check_run,
    check_state,
    read_checkpoint,
    save_checkpoint,
)
from flower_privdec.experiment.evaluation import Trial, evaluate, finite, peers_metrics, shows_private
from flower_privdec.experiment.minimum import ConvexObjective, Minimum, find_minimum
from flower_privdec.experiment.noise_statement import SALTED, noise_facts
from flower_privdec.experiment.origin import ORIGIN, TrainedRun, origin_facts
from flower_privdec.experiment.run_name import public_name, without_content
from flower_privdec.experiment.spent import Spent, json_number, last_step, privacy_rows, shortfall
from flower_privdec.models import unflatten
from flower_privdec.privacy.ledger.segments import Head
from flower_privdec.scenario import Scenario, load_scenario, scenario_hash, to_yaml
from flower_privdec.scenario.sections import StageSection

NAME = "metrics.jsonl"
PLOTS = "plots"
MOST_LISTED = 64  # peers whose own metrics a summary has, one by one
SINGLE = ("round", "consensus_distance", "epsilon", "seconds", "coalition_evaluations")  # values that are one number


def append_metrics(folder: Path, line: str) -> None:
    """Write one line at the end."""
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(line)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines, without a last one that is not whole: its writing is under way, or was broken off.

    Raises:
        ScenarioError: a line before the last is no record of an evaluation; with its number.
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
            if odd := [name for name, value in record.items() if not _readable(name, value)]:
                raise ValueError(f"its {odd[0]} is {shown(record[odd[0]], 40)}")
            records.append(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise ScenarioError(
                f"{path}:{number}: is no record of an evaluation ({one_line(error)}); the file is damaged: restore it "
                "from a copy, or move it away, whose numbers are lost",
                code="run.metrics-damaged",
            ) from error
    return records


def metrics_kept(folder: Path, fingerprint: tuple[int, str] | None) -> bytes:
    """Return what metrics.jsonl had when a checkpoint was written, without what came after it; empty without the file.

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
    """Return whether a value is what a run writes under a name: a number, or of metrics a mapping to numbers."""
    if name in SINGLE or (name == "suboptimality" and value is not None):
        return value == "inf" or (isinstance(value, int | float) and not isinstance(value, bool))
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
MEASURED_BY_SOME = ("training_loss", "personalized", "suboptimality", COALITIONS)  # what some runs alone have


class Recorder:
    """Keeps the folder of one run.

    Files: scenario.yaml (every default visible), metrics.jsonl (a line an evaluation), ledger/,
    checkpoint, model.safetensors (each peer and the mean), summary.json. A lean run, one of many
    in a study, keeps no models and writes a checkpoint once a minute at most.

    Privacy: the numbers written are computed from noised models and the public test set, but for those from private
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
            own: of all peers, where they are at hand; None in a process that holds none of them.
            runtime: what the summary calls it.
            resume: go on from the folder's checkpoint.
            lean: see above.

        Raises:
            ScenarioError: when the folder holds another run, or nothing to resume, or not the rounds that the scenario
                goes on from; or the training loss is asked for and the examples are not at hand.
        """
        if own is None:
            check_no_training_loss(agreement.scenario)
        self.agreement = agreement
        self.own = own
        self.out = out
        self.runtime = runtime
        self.lean = lean
        self.run = public_name(agreement) if own is None else own.run
        self.salted_for = [] if agreement.scenario.compute.generator == "system" else without_content(agreement)
        self._saved = time.monotonic()
        self.begins_stage = False
        self.scenario_hash = scenario_hash(agreement.scenario)
        self._lock = FolderLock(out)
        self._lock.check()
        check_places(out)
        self.checkpoint, self._read_from = self._previous(resume), _identity(self.out / CHECKPOINT)
        self._metrics = b"" if self.checkpoint is None else metrics_kept(out, self.checkpoint.metrics)
        self._metrics_hash = sha256(self._metrics)
        self._metrics_size = len(self._metrics)
        self.seconds = self.checkpoint.seconds if self.checkpoint else 0.0
        self._before, self.coalition_seconds = self.seconds, 0.0  # the latter of the rounds since then
        self.ledger: tuple[Path, Head] | None = None  # and its head, where one process is charged for all peers
        self.transport: dict[str, Any] = {}  # the transport's own state, see `Checkpoint`

    def _previous(self, resume: bool) -> Checkpoint | None:
        path = self.out / CHECKPOINT
        if resume and path.exists():
            peers = np.arange(self.agreement.scenario.n_peers) if self.own is None else self.own.peers
            checkpoint = read_checkpoint(path, self.agreement.device)
            stages = self.agreement.scenario.earlier
            ended = (checkpoint.run.id, checkpoint.state.round_index)
            self.begins_stage = bool(stages and ended == (stages[-1].run, stages[-1].until))
            # A run that was given more rounds writes the file before its first checkpoint.
            theirs = {checkpoint.scenario, self.scenario_hash} if self.begins_stage else {checkpoint.scenario}
            check_scenario_file(self.out / SCENARIO, theirs, self.scenario_hash)
            if not self.begins_stage:
                check_run(path, checkpoint, self.scenario_hash, self.run)
            rows = () if self.own is None else ("x",)  # who holds no peers keeps what they show, and nothing before
            check_state(path, checkpoint.state, peers, self.agreement.scenario.rounds, rows)
            return checkpoint
        if (self.out / SCENARIO).exists():
            remedy = f"give another {option('out')}"
            if path.exists():
                remedy = f"give {option('resume', True)} to go on with it, or another {option('out')}"
            kind = "a run without a checkpoint to resume from" if resume else "a run"
            raise ScenarioError(f"{self.out} already holds {kind}; {remedy}", code="run.folder-taken")
        if self.out.exists() and not self.out.is_dir():
            raise ScenarioError(f"{self.out} is not a folder; give another {option('out')}", code="run.no-folder")
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

    def start(self, initial: Callable[[], State], head: Head | None) -> State:
        """Return the state to begin with, and make the folder say so.

        Args:
            initial: makes the state before round 0.
            head: of the ledger.

        Raises:
            ScenarioError: when another run writes to the folder, or has since it was looked at.
            RunError: when the disk fails.
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
            write_atomically(self.out / NAME, self._metrics, public=True)
            (self.out / SUMMARY).unlink(missing_ok=True)  # of a run that was stopped, or had fewer rounds
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
            rows: the state's, at least those that others may see.
            epsilons: what each peer has spent.
            trial: tries the peers' models elsewhere.
        """
        measured = evaluate(self.agreement, rows, round_index, self.own, trial)
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

    @cached_property
    def _objective(self) -> ConvexObjective | None:
        """What the peers minimise, where it is convex, all are at hand, and figures on private examples are wanted."""
        convex = isinstance(self.agreement.algorithm, DPDDA) and shows_private(self.agreement.scenario)
        return ConvexObjective.of(self.agreement, self.own) if convex and self.own is not None else None

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
        scenario = self.agreement.scenario
        participation = self.agreement.participation
        done = scenario.rounds if stopped is None else stopped[0]
        known = [record for record in read_metrics(self.out) if record["round"] == done]
        metrics = known[-1] if known else self.record(rows, done, spent.epsilons)
        metrics |= measured or {}
        note = spent.note or shortfall(participation, spent.rounds_run, done)
        if stopped is None and (last := last_step(participation, spent.rounds_run, done)) is not None:
            stopped = last, "budget"
        steps = sum(spent.rounds_run) * self.agreement.algorithm.steps_per_round
        optional: dict[str, Any] = {name: metrics[name] for name in MEASURED_BY_SOME if name in metrics}
        if self._minimum is not None:
            optional["optimum"] = asdict(self._minimum)
        if COALITIONS in metrics:
            share = self.coalition_seconds / max(self.seconds - self._before, 1e-9)
            optional["coalition_share_of_wall_time"] = round(share, 4)
        protected: dict[str, Any] = {"budget_note": note} if note else {}
        if scenario.private is not None:
            if shows_private(scenario):  # beside a finite ε, which does not cover it
                protected["evaluation_private"] = "ignored: figures on the peers' own examples are covered by no ε"
            if spent.breaches:
                protected["claim_note"] = " ".join(spent.breaches.values())
            if self.salted_for:
                protected["noise_note"] = SALTED.format(parts=" and ".join(self.salted_for))
            if self.own is not None:
                protected |= noise_facts([self.own.source])
        summary = {
            "name": scenario.name,
            "algorithm": scenario.algorithm.name,
            "runtime": self.runtime,
            "n_peers": scenario.n_peers,
            "rounds": scenario.rounds,
            **({} if stopped is None else {"rounds_done": done, "stopped_at": stopped[0], "stopped_by": stopped[1]}),
            "seed": scenario.seed,
            **({} if scenario.seeds is None else {"seeds": scenario.all_seeds()}),
            "metrics": scenario.task.described(),
            **{name: metrics[name] for name in scenario.task.described()},
            "loss": metrics["loss"],
            "consensus_distance": metrics["consensus_distance"],
            **optional,
            "traffic": traffic(self.agreement.algorithm, rows),
            "privacy": privacy_rows(scenario, spent, participation, done, self.agreement.inherited),
            **protected,
            **({} if self.lean or scenario.n_peers > MOST_LISTED else {"peers": peers_metrics(self.agreement, rows)}),
            **({} if self.lean else {"made": provenance()}),
            **({} if self.agreement.origin is None else {"started_from": str(self.agreement.origin.folder)}),
            **entries,
            "wall_seconds": round(self.seconds, 3),
            "peer_steps_per_second": round(steps / max(self.seconds, 1e-9), 1),
        }
        with _writing(self.out):
            if not self.lean:
                facts = json.dumps(module_facts(self.agreement.public, self.agreement.loss))
                models = model_tensors(self.agreement, rows)
                origin = self.agreement.origin
                this = TrainedRun.of(scenario, self.agreement.public, *(self.ledger or (None, None)))
                runs = [*(() if origin is None else origin.runs), this]
                write_atomically(self.out / TRAINED, save(models, {"privdec": facts}))
                write_atomically(self.out / ORIGIN, origin_facts(runs, models).encode())
            write_atomically(self.out / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode(), public=True)
        self.close()
        return summary


def check_places(out: Path) -> None:
    """Refuse a folder in which something else lies where a run's files go.

    Raises:
        ScenarioError: naming it.
    """
    for name in WRITTEN:
        path = out / name
        if os.path.lexists(path) and not path.is_file():  # a folder, or a link that leads nowhere
            raise ScenarioError(
                f"{path}: is no file, and a run's {name} goes there; move it away, or give another {option('out')}",
                code="run.place-taken",
            )
    plots = out / PLOTS
    if os.path.lexists(plots) and not plots.is_dir():
        raise ScenarioError(
            f"{plots}: is no folder, and a run's plots go there; move it away, or give another {option('out')}",
            code="run.place-taken",
        )


def check_scenario_file(path: Path, expected: Collection[str], given: str) -> None:
    """Refuse a folder whose scenario file is not that of its checkpoint.

    Args:
        path: of the file; it may be missing.
        expected: hashes of the scenarios that it may be.
        given: that of the scenario with which the run is to go on.

    Raises:
        ScenarioError: it is damaged, or another scenario's.
    """
    if not path.exists():
        return
    # One that is missing is written again, if the scenario that was given is the same.
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
    """Say in one line that the disk fails."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or out} could not be written ({error.strerror or error}); nothing that was kept is lost: "
            f"make room, then run the same command {again(out)}",
            code="run.unwritable",
        ) from error


def with_more_rounds(scenario: Scenario, out: Path) -> Scenario:
    """Return the scenario of a run that goes on from what its folder holds, with what it did before.

    Where it has another number of rounds than the folder's scenario, or another budget or noise, and all else is equal,
    the rounds that are done become a stage of its own: the others are planned beside what they cost.

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
        raise ScenarioError(
            f"rounds={scenario.rounds} must be > {done}, the rounds that {out} has done"
            + ("" if done else ": it has none yet, so give another " + option("out")),
            code="run.rounds-done",
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
    """Refuse more rounds where a run cannot be planned again.

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
    """Refuse the training loss where no process has all peers' examples.

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
    """Refuse a start from a run on the same data where each peer has a ledger of its own, which does not count that.

    Raises:
        ScenarioError: naming the run.
    """
    if agreement.origin is not None and agreement.inherited is not None:
        raise ScenarioError(
            f"model.from={agreement.origin.folder}: was trained on the same data, and the peers' own ledgers do not "
            "count that: run it in one process (`privdec run`), or start from a run on other data",
            code="origin.own-ledgers",
        )


def _planned_as(scenario: Scenario, other: Scenario) -> Scenario:
    """Return a scenario with what may change in a run that goes on, rounds, budget and noise, as another has it."""
    privacy = scenario.privacy
    changed = {"rounds": other.rounds, "earlier": other.earlier}
    if scenario.private is not None and other.private is not None:
        noise = {"epsilon": other.private.epsilon, "noise_multiplier": other.private.noise_multiplier}
        privacy = scenario.private.model_copy(update=noise)
    return scenario.model_copy(update=changed | {"privacy": privacy})


def again(out: Path) -> str:
    """Return how the command of a run that broke off goes on, which depends on what its folder keeps."""
    return f"with {option('resume', True)}" if (out / CHECKPOINT).exists() else "again"


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, which its replacement does not have; None where there is none."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_ino, known.st_mtime_ns


def model_tensors(agreement: Agreement, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dicts of the mean model and of every peer's, as `mean/NAME` and `peer-3/NAME`.

    Args:
        rows: the state's, at least those that others may see.
    """
    models = {"mean": agreement.algorithm.mean_model(rows)}
    models |= {f"peer-{i}": row for i, row in enumerate(agreement.algorithm.models(rows))}
    return {
        f"{owner}/{name}": value
        for owner, row in models.items()
        for name, value in state_dict_of(agreement, row).items()
    }


def state_dict_of(agreement: Agreement, model: Tensor) -> dict[str, Tensor]:
    """Return a model, shape (d,), by the names of its module's parameters and buffers, on the CPU."""
    state = unflatten(copy.deepcopy(agreement.module), model).state_dict()
    return {
        name: value.detach().cpu().contiguous().clone() for name, value in state.items() if isinstance(value, Tensor)
    }


def traffic(algorithm: Algorithm, rows: dict[str, Tensor]) -> dict[str, int]:
    """Return what an active peer sends in a round to each of its receivers, from the program's exchanges.

    Returns:
        vectors: how many as long as the model; bytes: of these vectors.
    """
    d = rows["x"].shape[1]
    exchanges = (item for item in algorithm.program if isinstance(item, Exchange))
    names = [exchange.shaped(name) for exchange in exchanges for name in exchange.names]
    sent = [rows[name] for name in names if rows[name].ndim == 2 and rows[name].shape[1] == d]
    return {"vectors": len(sent), "bytes": sum(d * row.element_size() for row in sent)}


def evaluation_rounds(rounds: int, every: int) -> list[int]:
    """Return after how many rounds the models are tried: every so many, and at the end."""
    return sorted({*range(every, rounds + 1, every), rounds})
