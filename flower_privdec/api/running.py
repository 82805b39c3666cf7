"""Run a scenario, or plan its cost, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch

from flower_privdec.api.objects import check_everywhere
from flower_privdec.api.result import RunResult, load_run
from flower_privdec.api.scenarios import as_path, as_scenario
from flower_privdec.common.formatting import shown
from flower_privdec.engine.run import run as run_in_process
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Experiment
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.console import plan_text
from flower_privdec.scenario import Scenario


@contextmanager
def threads_kept() -> Iterator[None]:
    """Give torch its number of threads back at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


OnEvaluation = Callable[[dict[str, Any]], bool | None]
RUNTIMES = ("engine", "flower")


class _Stopped(Exception):  # noqa: N818 (no error)
    """A callback has had enough."""


def run(
    scenario: Scenario | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    on_metrics: OnEvaluation | None = None,
    runtime: Literal["engine", "flower"] = "engine",
) -> RunResult:
    """Train: run a scenario to its end.

    Args:
        scenario: a scenario, or the path of its file.
        out: the folder of the results. By default it is a temporary one, which lives as long as the result does, with
            the ledger in it.
        resume: go on from the checkpoint in `out`.
        on_metrics: called after each evaluation with its metrics (a line of metrics.jsonl). When it returns True the
            run stops there: its folder keeps the checkpoint to resume from, and the result has the models of then.
        runtime: `engine` is this process, `flower` is `flwr run` in Flower's simulation.

    Raises:
        ScenarioError: when something does not fit, or the folder holds another run; nothing was written.
        BudgetError: when a ledger cannot be trusted, is in use, or allows no step.
        RunError: when the run diverged or failed.

    Privacy: what the scenario says. Without `privacy.ledger` each run has a ledger of its own, and its ε counts this
        run alone.
    """
    if runtime not in RUNTIMES:
        raise ScenarioError(f"runtime={runtime!r} must be one of {', '.join(RUNTIMES)}")
    if out is None and resume:
        raise ScenarioError("resume=True needs out, the folder of the run to go on with")
    if on_metrics is not None and not callable(on_metrics):
        raise ScenarioError(f"on_metrics={shown(on_metrics)} must be a function of an evaluation's metrics")
    folder = None if out is None else as_path(out, "out")
    scenario = as_scenario(scenario)
    if runtime == "flower":
        check_everywhere(scenario, "Flower runs it in processes of its own")
    experiment = Experiment.build(scenario)
    watching = _watching(on_metrics, experiment.scenario.rounds)
    if folder is not None:
        return _run(experiment, folder, resume, watching, runtime)
    temporary = mkdtemp(prefix="privdec-")
    try:
        result = _run(experiment, Path(temporary) / "run", False, watching, runtime)
    except BaseException:
        rmtree(temporary, ignore_errors=True)
        raise
    finalize(result, rmtree, temporary, ignore_errors=True)
    return result


def _run(
    experiment: Experiment, folder: Path, resume: bool, on_metrics: Callable[[dict[str, Any]], None], runtime: str
) -> RunResult:
    with threads_kept(), suppress(_Stopped):
        if runtime == "engine":
            run_in_process(experiment, folder, resume=resume, on_metrics=on_metrics)
        else:
            from flower_privdec.flower.launch.launcher import flower_run

            flower_run(experiment, folder, resume=resume, on_metrics=on_metrics)
    return load_run(folder)


def _watching(callback: OnEvaluation | None, rounds: int) -> Callable[[dict[str, Any]], None]:
    """Return what hands metrics to a user's callback, and raises `_Stopped` when it says so before the last round."""

    def on_metrics(metrics: dict[str, Any]) -> None:
        answer: object = None if callback is None else callback(metrics)
        if answer is not None and not isinstance(answer, bool | np.bool):
            kind = type(answer).__name__
            raise TypeError(f"on_metrics returned a {kind}: it must return True to stop the run, or None to go on")
        if answer and metrics["round"] < rounds:
            raise _Stopped

    return on_metrics


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run would cost; printed, it reads as `privdec plan` does.

    Attributes:
        name: of the scenario.
        algorithm: its name.
        rounds: K.
        peers: for each its noise (sigma at rounds 0, K/2 and K-1; noise_multiplier), epsilon, epsilon_after_quarters
            and delta, epsilon_of_replies_to_one (of what one neighbour is sent alone, not of all it hears; None where
            messages go to everybody), and what a paper's formulas say (claimed_epsilon, mu_total, mu_0, mu_bar; else
            None).
        ledger: the folder that the scenario names, with the largest ε of any peer before and after this run; None where
            the run has a ledger of its own.
        optimal_rounds: K* of PrivSGP-VR's eq. 12, a guide; None where it is not known.
        memory_bytes: about what a run takes.
        seconds: about how long it takes here, from a few timed rounds; None where it does not fit into memory.
        topology: how well the graph connects; None where nothing is exchanged.
        warnings: what looks unsound.
        facts: all of it, as `privdec plan --json` prints it.
    """

    name: str
    algorithm: str
    rounds: int
    peers: list[dict[str, Any]]
    ledger: dict[str, Any] | None
    optimal_rounds: int | None
    memory_bytes: int
    seconds: float | None
    topology: dict[str, Any] | None
    warnings: list[str]
    facts: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """The largest ε of any peer at the end; infinity without privacy."""
        return max(float(row["epsilon"]) for row in self.peers)

    def __str__(self) -> str:
        """Return the plan as `privdec plan` prints it."""
        return plan_text(self.facts)


def plan(scenario: Scenario | str | Path) -> Plan:
    """Say what a run would cost: noise, ε over the rounds, memory and time. Nothing is charged or written.

    Args:
        scenario: a scenario, or the path of its file.

    Raises:
        ScenarioError: when a part cannot be had or two parts do not fit.
    """
    with threads_kept():
        facts = make_plan(Experiment.build(as_scenario(scenario)))
    return Plan(facts=facts, **{name: facts[name] for name in Plan.__dataclass_fields__ if name != "facts"})
