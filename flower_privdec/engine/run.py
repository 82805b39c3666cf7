"""Run a scenario in process, from its beginning or from a checkpoint, to its summary."""

from __future__ import annotations

import logging
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
from flower_privdec.engine.workers import GoneError, start_engine
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.noise_statement import SALTED
from flower_privdec.experiment.recorder import CHECKPOINT, OnMetrics, Recorder, again
from flower_privdec.experiment.spent import Spent, check_budget, epsilons, ledger_folder
from flower_privdec.privacy.ledger.segments import Head, check_ledger_there

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
        runtime: what the summary calls it.
        resume: continue from the folder's checkpoint.
        lean: save no models, and few checkpoints.
        workers: how many processes, in place of the scenario's.

    Raises:
        ScenarioError: when the folder holds another run, or nothing to resume.
        BudgetError: when a ledger cannot be trusted or is in use.
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
        # Code of a user's own may compute something else than when this folder, or a copy of it, was begun.
        experiment = replace(experiment, own=experiment.own.with_new_salt())
        self.experiment = experiment
        self.recorder = Recorder(experiment, experiment.own, out, runtime, resume, lean)
        if experiment.own.from_system:
            _log.warning(SYSTEM)
        elif self.recorder.salted_for:
            _log.warning(SALTED.format(parts=" and ".join(self.recorder.salted_for)))
        ledger = ledger_folder(experiment.scenario, out, experiment.inherited)
        checkpoint = self.recorder.checkpoint
        steps = experiment.algorithm.steps_per_round
        every = experiment.scenario.evaluation.every
        if checkpoint is not None:
            check_ledger_there(ledger, experiment.public.name, checkpoint.head)
        first = 0 if checkpoint is None else checkpoint.state.round_index * steps
        self.cohort = experiment.cohort(ledger, start=first, block=min(every, experiment.scenario.rounds) * steps)
        try:
            leave = [self.recorder.close]  # closes, in a forked worker, its copies of the locks that this process holds
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
        return None if self.cohort.ledger is None else self.cohort.ledger.head

    @property
    def _charged(self) -> tuple[Path, Head] | None:
        """The folder of the ledger, and its head."""
        ledger = self.cohort.ledger
        return None if ledger is None else (ledger.path.parent, ledger.head)

    @property
    def round_index(self) -> int:
        """Return how many rounds are done."""
        return self.engine.state.round_index

    def advance(self, on_round: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Run up to the next evaluation, record it with a checkpoint, and return its metrics.

        Args:
            on_round: called after each round, with the number of rounds that are done.
        """
        scenario = self.experiment.scenario
        every = self.experiment.scenario.evaluation.every
        until = min(scenario.rounds, (self.round_index // every + 1) * every)
        while self.round_index < until:
            started = time.perf_counter()
            with self._formatting_errors():
                self.engine.rounds(until - self.round_index if on_round is None else 1)
            self.recorder.seconds += time.perf_counter() - started
            if on_round is not None:
                on_round(self.round_index)
        started = time.perf_counter()
        with self._formatting_errors():
            state = self.engine.collected()
            self.recorder.seconds += time.perf_counter() - started
            spent = epsilons(self.cohort, state.round_index)
            metrics = self.recorder.record(state.rows, state.round_index, spent, self.engine.trial)
        self.recorder.save(state, self._head)
        return metrics

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
            own = [f"{key}={module!r}" for key, module in own_modules(self.experiment.scenario)]
            if not own or isinstance(error, OSError):
                raise
            when = f"round {self.round_index}" if hasattr(self, "engine") else "before round 0"
            raise RunError(
                f"{when}: {' or '.join(own)} raised {raised_at(error)}; its message is withheld, for it may tell of "
                f"data: mend the code, then run the same command {again(self.recorder.out)}",
                code="run.own-code",
            ) from error

    def finish(self) -> dict[str, Any]:
        """Write models and summary of a run whose rounds are done; return the summary."""
        spent = Spent.of(self.cohort, self.experiment.scenario.rounds)
        self.recorder.ledger = self._charged
        self.recorder.coalition_seconds = self.cohort.game_seconds
        return self.recorder.finish(self.engine.state.rows, spent)

    def stop(self, why: str) -> dict[str, Any] | None:
        """Write models and summary of a run that ends here, as of its last checkpoint, from which it can go on.

        Args:
            why: what stopped it, `callback` or `interrupt`.

        Returns:
            The summary; None where no round was recorded yet, or the run is lean.
        """
        path = self.recorder.out / CHECKPOINT
        if self.recorder.lean or not path.is_file():
            return None
        state = read_checkpoint(path, self.experiment.device).state
        cohort = self.cohort
        done = state.round_index
        if not 0 < done < self.experiment.scenario.rounds:
            return None
        spent = Spent.of(cohort, done)
        if self.experiment.own.draws_anew and cohort.ledger is not None:  # steps after it are charged for good
            charged = Spent.of(cohort, -(-cohort.ledger.charged // cohort.steps_per_round))
            spent = replace(charged, rounds_run=spent.rounds_run)
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
        on_metrics: called with each evaluation's metrics; the run stops where it returns True.
        workers: how many processes, in place of the scenario's.

    Returns:
        The summary, as written to summary.json.

    Raises:
        KeyboardInterrupt: after the summary of what is done is written.
    """
    under_way = Run(experiment, out, runtime=runtime, resume=resume, lean=lean, workers=workers)
    try:
        while under_way.round_index < experiment.scenario.rounds:
            metrics = under_way.advance(on_round)
            if on_metrics is not None and on_metrics(metrics) is True and (summary := under_way.stop("callback")):
                return summary
        return under_way.finish()
    except KeyboardInterrupt:
        under_way.stop("interrupt")
        raise
    finally:
        under_way.close()
