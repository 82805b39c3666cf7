"""Run a scenario in process, from its beginning or from a checkpoint, to its summary.

A `Run` alternates rounds of an engine with evaluations:

    open      The recorder takes the run's folder, and the cohort its ledger. A checkpoint must fit the ledger: its
              head is a record of the ledger that was there when the checkpoint was written.
    advance   Rounds up to the next evaluation, then a line of metrics and a checkpoint.
    finish    Models and summary, after the last round. `stop` writes them as of the last checkpoint instead.
    close     Workers end; folder and ledger are free again.

The ledger is always ahead of the checkpoint: steps are paid before they are taken, and only taken steps are saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flower_privdec.common.errors import RAISED_BY_USERS, PrivdecError, RunError
from flower_privdec.common.fields import own_modules
from flower_privdec.common.user_code import raised_at
from flower_privdec.core.attack import attack_note
from flower_privdec.core.robust_mix import doubted
from flower_privdec.engine.workers import GoneError, start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.noise_balance import balance_note, balance_of, cap_note
from flower_privdec.experiment.noise_statement import SALTED
from flower_privdec.experiment.recorder import CHECKPOINT, OnMetrics, Recorder, again
from flower_privdec.experiment.spent import Spent, check_budget, epsilons, ledger_folder
from flower_privdec.privacy.ledger.segments import Head, check_ledger_there
from flower_privdec.scenario.unused_keys import unused_keys

SYSTEM = (
    "compute.generator=system: noise and batches come from the operating system, so the models may be published under "
    "their ε; no run repeats this one, and steps that --resume takes again are charged again"
)

_log = logging.getLogger(__name__)


class Run:
    """A run in this process: rounds, evaluations and checkpoints, then the summary.

    Args:
        experiment: the scenario, built.
        out: the run's folder.
        runtime: its name in the summary.
        resume: continue from the folder's checkpoint.
        lean: save no models, and few checkpoints.
        workers: the number of processes, in place of the scenario's.

    Raises:
        ScenarioError: the folder holds another run, or nothing to resume.
        BudgetError: a ledger cannot be trusted, or is in use.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        *,
        runtime: str = "engine",
        resume: bool = False,
        lean: bool = False,
        workers: int | None = None,
    ) -> None:
        torch.set_num_threads(experiment.scenario.compute.threads)

        # A user's own code may compute something else than when this folder, or a copy of it, was begun. With a new
        # salt the noise differs too, so that no difference of two models shows an example.
        experiment = replace(experiment, own=experiment.own.with_new_salt())
        self.experiment = experiment
        self._rounds_here = 0  # that this process has run
        self._seconds_after_first = 0.0  # of all of these but the first
        self._evaluation_seconds = 0.0  # of the last one
        self.recorder = Recorder(experiment, experiment.own, out, runtime, resume, lean)
        lies = attack_note(experiment.scenario.attack)
        if lies is not None:
            _log.warning("attack: %s", lies)
        if experiment.own.from_system:
            _log.warning(SYSTEM)
        elif self.recorder.salted_for:
            _log.warning(SALTED.format(parts=" and ".join(self.recorder.salted_for)))
        self.recorder.balance_note = balance_note(experiment.scenario, balance_of(experiment))
        if not lean:
            notes = [self.recorder.balance_note, cap_note(experiment), *unused_keys(experiment.scenario)]
            for note in notes:
                if note is not None:
                    _log.warning("%s", note)

        checkpoint = self.recorder.checkpoint
        ledger = ledger_folder(experiment.scenario, out, experiment.inherited)
        steps = experiment.algorithm.steps_per_round
        first_step = 0
        if checkpoint is not None:
            check_ledger_there(ledger, experiment.public.name, checkpoint.head)
            first_step = checkpoint.state.round_index * steps

        # One entry of the ledger pays for the steps between two checkpoints.
        block = min(experiment.scenario.evaluation.every, experiment.scenario.rounds) * steps
        self.cohort = experiment.cohort(ledger, start=first_step, block=block)
        try:
            # A forked worker has copies of the descriptors whose locks this process holds; it calls these to close
            # them.
            leave = [self.recorder.close]
            if self.cohort.ledger is not None:
                leave.append(partial(self.cohort.ledger.close, unlock=False))
                if checkpoint is not None:
                    self.cohort.ledger.check_head(checkpoint.head)
                if checkpoint is None or self.recorder.begins_stage:
                    check_budget(self.cohort, ledger)

            with self._formatting_errors():
                state = self.recorder.start(lambda: experiment.initial_state(self.cohort), self._head)
            self.engine = start_engine(experiment, self.cohort, state, leave, workers)
        except BaseException:
            self.close()
            raise

    @property
    def _head(self) -> Head | None:
        """The last record of the ledger; None without privacy."""
        return None if self.cohort.ledger is None else self.cohort.ledger.head

    @property
    def _charged(self) -> tuple[Path, Head] | None:
        """The folder of the ledger, and its last record."""
        ledger = self.cohort.ledger
        return None if ledger is None else (ledger.path.parent, ledger.head)

    @property
    def round_index(self) -> int:
        """The number of rounds that are done."""
        return self.engine.state.round_index

    def advance(self, on_round: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Run up to the next evaluation, record it with a checkpoint, and return its metrics.

        Args:
            on_round: called after each round, with the number of rounds that are done.
        """
        scenario = self.experiment.scenario
        every = scenario.evaluation.every
        next_evaluation = (self.round_index // every + 1) * every
        until = min(scenario.rounds, next_evaluation)

        while self.round_index < until:
            # All rounds at once, unless the caller wants to see each: workers then synchronize less often. The first
            # one by itself: it compiles and fills caches, and says nothing about the time of the others.
            count = until - self.round_index
            is_first = self._rounds_here == 0
            if on_round is not None or is_first:
                count = 1

            started = time.perf_counter()
            with self._formatting_errors():
                self.engine.rounds(count)
            seconds = time.perf_counter() - started
            self.recorder.seconds += seconds
            self._rounds_here += count
            if not is_first:
                self._seconds_after_first += seconds

            if on_round is not None:
                on_round(self.round_index)

        # Collecting the rows of workers is part of training, evaluating them is not.
        started = time.perf_counter()
        with self._formatting_errors():
            state = self.engine.collected()
            self.recorder.seconds += time.perf_counter() - started
            spent = epsilons(self.cohort, state.round_index)
            metrics = self.recorder.record(state.rows, state.round_index, spent, self.engine.trial)
        self.recorder.save(state, self._head)
        self._evaluation_seconds = time.perf_counter() - started
        return metrics

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take, with its evaluations; None as long as only the first round is done."""
        if self._rounds_here < 2:
            return None
        scenario = self.experiment.scenario
        rounds_left = scenario.rounds - self.round_index
        evaluations_left = math.ceil(rounds_left / scenario.evaluation.every)
        a_round = self._seconds_after_first / (self._rounds_here - 1)
        return rounds_left * a_round + evaluations_left * self._evaluation_seconds

    @contextmanager
    def _formatting_errors(self) -> Iterator[None]:
        """Turn an exception of a user's code into a one-line error."""
        try:
            yield
        except GoneError as error:
            remedy = f"everything up to the last checkpoint is saved: run the same command {again(self.recorder.out)}"
            raise RunError(f"round {self.round_index}: {error}; {remedy}", code="run.worker-ended") from error
        except PrivdecError:
            raise
        except RAISED_BY_USERS as error:
            # What fails is the user's own module if there is one. A full disk is not its fault.
            own = [f"{key}={module!r}" for key, module in own_modules(self.experiment.scenario)]
            if not own or isinstance(error, OSError):
                raise

            when = "before round 0"
            if hasattr(self, "engine"):
                when = f"round {self.round_index}"
            raise RunError(
                f"{when}: {' or '.join(own)} raised {raised_at(error)}; its message is withheld because it may tell of "
                f"data: mend the code, then run the same command {again(self.recorder.out)}",
                code="run.own-code",
            ) from error

    def finish(self) -> dict[str, Any]:
        """Write models and summary after the last round; return the summary."""
        spent = Spent.of(self.cohort, self.experiment.scenario.rounds)
        self.recorder.ledger = self._charged
        self.recorder.coalition_seconds = self.cohort.game_seconds
        self.recorder.doubted = doubted(self.engine.state.edges)
        return self.recorder.finish(self.engine.state.rows, spent)

    def stop(self, why: str) -> dict[str, Any] | None:
        """Write models and summary as of the last checkpoint, from which the run can be resumed.

        Args:
            why: what stopped the run, `callback` or `interrupt`.

        Returns:
            The summary; None if no round is recorded yet, or the run is lean.
        """
        path = self.recorder.out / CHECKPOINT
        if self.recorder.lean or not path.is_file():
            return None

        state = read_checkpoint(path, self.experiment.device).state
        done = state.round_index
        if not 0 < done < self.experiment.scenario.rounds:
            return None

        cohort = self.cohort
        spent = Spent.of(cohort, done)
        if self.experiment.own.draws_anew and cohort.ledger is not None:
            # No later run repeats these draws, so the steps after the checkpoint stay charged.
            charged_rounds = math.ceil(cohort.ledger.charged / cohort.steps_per_round)
            spent = replace(Spent.of(cohort, charged_rounds), rounds_run=spent.rounds_run)

        self.recorder.ledger = self._charged
        return self.recorder.finish(state.rows, spent, stopped=(done, why))

    def close(self) -> None:
        """End the workers, and release the folder and the ledger."""
        if hasattr(self, "engine"):
            self.engine.close()
        self.recorder.close()
        if self.cohort.ledger is not None:
            self.cohort.ledger.close()


def run(
    experiment: Experiment,
    out: Path,
    *,
    runtime: str = "engine",
    resume: bool = False,
    lean: bool = False,
    on_metrics: OnMetrics | None = None,
    on_round: Callable[[int], None] | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Run a scenario to its end, or until a callback or Ctrl-C stops it.

    Args:
        lean: save no models, and few checkpoints.
        on_metrics: called with the metrics of each evaluation; the run stops if it returns True. If it has a method
            `expect`, that is called before with the seconds that are left, None if they are not known.
        on_round: called after each round, with the number of rounds that are done.
        workers: the number of processes, in place of the scenario's.

    Returns:
        The summary, as written to summary.json.

    Raises:
        KeyboardInterrupt: after the summary of what is done is written.
    """
    under_way = Run(experiment, out, runtime=runtime, resume=resume, lean=lean, workers=workers)
    try:
        while under_way.round_index < experiment.scenario.rounds:
            metrics = under_way.advance(on_round)
            expect = getattr(on_metrics, "expect", None)
            if expect is not None:
                expect(under_way.seconds_left)
            is_to_stop = on_metrics is not None and on_metrics(metrics) is True
            if is_to_stop:
                # There is nothing to stop after the last round, or if no checkpoint was written.
                summary = under_way.stop("callback")
                if summary:
                    return summary
        return under_way.finish()
    except KeyboardInterrupt:
        under_way.stop("interrupt")
        raise
    finally:
        under_way.close()
