"""Train from Python: run a scenario to its end, in this process or in Flower's simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch

from flower_privdec.api.argument_errors import argument_error, check_callbacks
from flower_privdec.api.run_result import RunResult, load_run
from flower_privdec.api.scenarios import as_path, as_scenario, check_everywhere, make_scenario
from flower_privdec.common.errors import ArgumentError, called_from_python
from flower_privdec.engine.run import run as run_in_process
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.recorder import with_more_rounds
from flower_privdec.scenario import Scenario

OnEvaluation = Callable[[dict[str, Any]], bool | None]
OnRound = Callable[[int], None]
OnEnd = Callable[["RunResult"], None]
RUNTIMES = ("engine", "flower")


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@called_from_python()
def run(
    scenario: Scenario | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    rounds: int | None = None,
    on_round: OnRound | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_end: OnEnd | None = None,
    runtime: Literal["engine", "flower"] = "engine",
) -> RunResult:
    """Train: run a scenario to its end.

    Args:
        scenario: a scenario, or the path of its file.
        out: the folder of the results. By default it is a temporary one, which is deleted with the result, and the
            ledger with it.
        resume: resume from the checkpoint in `out`. A run that is finished, or was stopped, goes on if `rounds` or
            the scenario's rounds, epsilon or noise_multiplier have changed: the further rounds are planned with what
            the first ones left of the budget, and its ε counts all.
        rounds: how many in all, in place of the scenario's.
        on_round: called after each round with the number of rounds that are done; only with `engine`.
        on_evaluation: called after each evaluation with its metrics (a line of metrics.jsonl). When it returns True
            the run stops: the result has the summary, privacy and models of that round, and the folder the checkpoint
            to resume from. Ctrl-C leaves the same, and raises KeyboardInterrupt as always.
        on_end: called with the result, also of a run that was stopped.
        runtime: `engine` is this process, `flower` is `flwr run` in Flower's simulation.

    Raises:
        ScenarioError: when something does not fit, or the folder holds another run; nothing was written.
        BudgetError: when a ledger cannot be trusted, is in use, or allows no step.
        RunError: when the run diverged or failed.

    Privacy: as the scenario declares. Without `privacy.ledger` each run has its own ledger, and its ε counts only
        this run.
    """
    if runtime not in RUNTIMES:
        raise argument_error(f"runtime={runtime!r} must be one of {', '.join(RUNTIMES)}")
    if out is None and resume:
        raise argument_error("resume=True needs out, the folder of the run to resume")
    check_callbacks(on_round=on_round, on_evaluation=on_evaluation, on_end=on_end)
    if on_round is not None and runtime != "engine":
        raise argument_error(f"on_round with runtime={runtime!r} must be left out: Flower reports only evaluations")

    folder = None if out is None else as_path(out, "out")
    scenario = as_scenario(scenario)
    if rounds is not None:
        scenario = make_scenario(scenario, rounds=rounds)
    if resume and folder is not None:
        scenario = with_more_rounds(scenario, folder)
    if runtime == "flower":
        check_everywhere(scenario, "Flower runs it in processes of its own")

    experiment = Experiment.build(scenario)
    on_metrics = stopping(on_evaluation, experiment.scenario.rounds)

    def train(folder: Path) -> None:
        if runtime == "engine":
            run_in_process(experiment, folder, resume=resume, on_metrics=on_metrics, on_round=on_round)
            return

        # flwr is an extra, and takes long to import.
        from flower_privdec.flower.launch.launcher import flower_run

        flower_run(experiment, folder, resume=resume, on_metrics=on_metrics)

    return train_into(train, folder, on_end)


def train_into(train: Callable[[Path], object], folder: Path | None, on_end: OnEnd | None) -> RunResult:
    """Train into a folder, by default a temporary one that is deleted with the result, and return the result."""
    temporary: str | None = None
    if folder is None:
        temporary = mkdtemp(prefix="privdec-")
        folder = Path(temporary) / "run"

    try:
        with threads_kept():
            train(folder)
        result = load_run(folder)
        if on_end is not None:
            on_end(result)
    except BaseException:
        if temporary is not None:
            rmtree(temporary, ignore_errors=True)
        raise

    if temporary is not None:
        finalize(result, rmtree, temporary, ignore_errors=True)
    return result


def stopping(callback: OnEvaluation | None, rounds: int) -> Callable[[dict[str, Any]], bool]:
    """Return a function that calls the callback, and returns True if that does before the last round."""

    def on_metrics(metrics: dict[str, Any]) -> bool:
        if callback is None:
            return False
        answer: object = callback(metrics)
        if answer is not None and not isinstance(answer, bool | np.bool):
            kind = type(answer).__name__
            raise ArgumentError(
                f"on_evaluation returned a {kind}: it must return True to stop the run, or None to go on",
                code="api.on-evaluation",
            )
        return bool(answer) and metrics["round"] < rounds

    return on_metrics
