"""Run a scenario, plan its cost, and read the folder of a run, from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flower_privdec.api.scenarios import as_path, as_scenario, check_everywhere
from flower_privdec.common.formatting import one_line, shown
from flower_privdec.common.user_code import require
from flower_privdec.engine.checkpoint import read_checkpoint
from flower_privdec.engine.recorder import model_tensors
from flower_privdec.engine.run import run as run_in_process
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.agreement import build_module, module_facts
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.console import plan_text
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.reporting.wording import headline
from flower_privdec.scenario import Scenario


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


OnEvaluation = Callable[[dict[str, Any]], bool | None]
RUNTIMES = ("engine", "flower")


class _Stopped(Exception):  # noqa: N818 (no error)
    """The callback stops the run."""


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
        out: the folder of the results. By default it is a temporary one, which is deleted with the result, and the
            ledger with it.
        resume: resume from the checkpoint in `out`.
        on_metrics: called after each evaluation with its metrics (a line of metrics.jsonl). When it returns True the
            run stops: its folder keeps the checkpoint to resume from, and the result has the models of that round.
        runtime: `engine` is this process, `flower` is `flwr run` in Flower's simulation.

    Raises:
        ScenarioError: when something does not fit, or the folder holds another run; nothing was written.
        BudgetError: when a ledger cannot be trusted, is in use, or allows no step.
        RunError: when the run diverged or failed.

    Privacy: as the scenario declares. Without `privacy.ledger` each run has its own ledger, and its ε counts this run
        alone.
    """
    if runtime not in RUNTIMES:
        raise ScenarioError(f"runtime={runtime!r} must be one of {', '.join(RUNTIMES)}", code="api.argument")
    if out is None and resume:
        raise ScenarioError("resume=True needs out, the folder of the run to resume", code="api.argument")
    if on_metrics is not None and not callable(on_metrics):
        raise ScenarioError(
            f"on_metrics={shown(on_metrics)} must be a function of an evaluation's metrics", code="api.argument"
        )
    folder = None if out is None else as_path(out, "out")
    scenario = as_scenario(scenario)
    if runtime == "flower":
        check_everywhere(scenario, "Flower runs it in processes of its own")
    experiment = Experiment.build(scenario)
    watching = _watching(on_metrics, experiment.scenario.rounds)
    temporary = mkdtemp(prefix="privdec-") if folder is None else None
    folder = folder or Path(str(temporary)) / "run"
    try:
        with threads_kept(), suppress(_Stopped):
            if runtime == "engine":
                run_in_process(experiment, folder, resume=resume, on_metrics=watching)
            else:
                from flower_privdec.flower.launch.launcher import flower_run

                flower_run(experiment, folder, resume=resume, on_metrics=watching)
        result = load_run(folder)
    except BaseException:
        if temporary is not None:
            rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        finalize(result, rmtree, temporary, ignore_errors=True)
    return result


def _watching(callback: OnEvaluation | None, rounds: int) -> Callable[[dict[str, Any]], None]:
    """Return a function that calls the callback and raises `_Stopped` if it returns True before the last round."""

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
    """The cost of a run; printed, the output of `privdec plan`.

    Attributes:
        name: of the scenario.
        algorithm: its name.
        rounds: K.
        peers: for each its noise (sigma at rounds 0, K/2 and K-1; noise_multiplier), epsilon, epsilon_after_quarters
            and delta, epsilon_of_replies_to_one (of the replies to one neighbour alone, not of all it receives; None
            where all neighbours receive the same), and the values of a paper's formulas (claimed_epsilon, mu_total,
            mu_0, mu_bar; else None).
        ledger: the folder that the scenario names, with the largest ε of any peer before and after this run; None where
            the run has its own ledger.
        optimal_rounds: K* of PrivSGP-VR's eq. 12, a guide; None where it is not known.
        memory_bytes: estimated.
        seconds: estimated on this machine from a few timed rounds; None where the run does not fit into memory.
        topology: joint connectivity and spectral gap; None where nothing is exchanged.
        warnings: each with a remedy.
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
    """Plan a run: its noise, ε over the rounds, memory and time. Nothing is charged or written.

    Raises:
        ScenarioError: when a part is missing or two parts do not fit.
    """
    with threads_kept():
        facts = make_plan(Experiment.build(as_scenario(scenario)))
    return Plan(facts=facts, **{name: facts[name] for name in Plan.__dataclass_fields__ if name != "facts"})


Metrics = dict[str, Any]
StateDict = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class RunResult(Result):
    """The contents of a run's folder, finished or not.

    Attributes:
        folder: its path. A run without `out` has a temporary one, deleted with this object.
        scenario: with every default resolved.
        metrics: a record for each evaluation, in order of the rounds: round, accuracy, loss, consensus_distance,
            epsilon (the largest of the peers; "inf" without privacy) and seconds.
        summary: summary.json; of a run that is not finished, the same keys as far as they are known.
    """

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """Each peer's guarantee: ε (a number, or "inf"), δ, unit, adjacency, a paper's claimed ε, and its scope.

        It is empty before the run is finished.
        """
        rows: list[dict[str, Any]] = self.summary["privacy"]
        return rows

    def frame(self) -> Any:
        """Return the metrics as a pandas DataFrame: a row for each evaluation, a column such as `accuracy.peer_min`.

        Raises:
            ScenarioError: when pandas is not installed.
        """
        return as_frame([flat(record) for record in self.metrics])

    @property
    def models(self) -> dict[str, StateDict]:
        """The state dicts of the mean model, `mean`, and of every peer's, `peer-0` and so on, on the CPU.

        Of a run that is not finished they are those of its checkpoint.

        Raises:
            ScenarioError: when the run kept no model, or the file is damaged.
        """
        models: dict[str, StateDict] = {}
        for key, tensor in self._tensors()[0].items():
            owner, _, name = key.partition("/")
            models.setdefault(owner, {})[name] = tensor
        return models

    def model(self, peer: int | None = None, *, into: nn.Module | None = None) -> nn.Module:
        """Return a trained model, on the CPU and in evaluation mode.

        Args:
            peer: whose; by default the mean of all peers' models, which push-sum and gossip agree on.
            into: a module to fill; by default one is built from the scenario. It is required where the model is a
                Python object of another process.

        Raises:
            ScenarioError: when there is no such peer or model, or it does not fit the module.
        """
        if into is not None and not isinstance(into, nn.Module):
            raise ScenarioError(f"into is a {type(into).__name__} and must be a torch.nn.Module", code="api.argument")
        n_peers = self.scenario.n_peers
        if peer is not None and (
            isinstance(peer, bool) or not isinstance(peer, int | np.integer) or not 0 <= peer < n_peers
        ):
            raise ScenarioError(
                f"peer={shown(peer)} must be 0 to {n_peers - 1}, or None for the mean model", code="api.argument"
            )
        tensors, facts = self._tensors("mean/" if peer is None else f"peer-{peer}/")
        module = build_module(self.scenario, **facts) if into is None else into
        state = {key.partition("/")[2]: tensor for key, tensor in tensors.items()}
        try:
            module.to(next(iter(state.values())).dtype).load_state_dict(state)
        except RuntimeError as error:
            lines = " ".join(str(error).split())
            raise ScenarioError(
                f"{self.folder}: the model does not fit the module that is given: {lines}", code="api.model-misfit"
            ) from error
        return module.eval()

    def _tensors(self, prefix: str = "") -> tuple[StateDict, dict[str, Any]]:
        """Return the tensors whose names have a prefix, and the arguments for building a module for them."""
        path = self.folder / "model.safetensors"
        if self.finished and path.is_file():
            try:
                with safe_open(path, framework="pt") as file:
                    facts = json.loads(file.metadata()["privdec"])
                    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 (not a mapping)
                    return {name: file.get_tensor(name) for name in names}, facts
            except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                raise ScenarioError(
                    f"{path}: cannot be read as models ({one_line(error)}); run the scenario again", code="api.no-model"
                ) from error
        checkpoint = self.folder / "checkpoint"
        if self.finished or not checkpoint.is_file():
            raise ScenarioError(
                f"{self.folder}: has no {path.name}: this run kept no models; run the scenario again",
                code="api.no-model",
            )
        agreement, rows = Agreement.of(self.scenario), read_checkpoint(checkpoint).state.rows
        if not rows:
            raise ScenarioError(
                f"{self.folder}: its shards hold the models until the run is done: let it finish", code="api.no-model"
            )
        tensors = {key: t for key, t in model_tensors(agreement, rows).items() if key.startswith(prefix)}
        return tensors, module_facts(agreement.public, agreement.loss)

    def __str__(self) -> str:
        """Return the run in a line: its name, its result and its ε."""
        return f"{self.scenario.name}: {headline(self.summary)}"


def load_run(folder: str | Path) -> RunResult:
    """Read a run's folder, as `run` returned it; of an unfinished run, as far as it went.

    Raises:
        ScenarioError: when it is not a run's folder, or a file in it is damaged.
    """
    return RunResult(**vars(read_result(as_path(folder, "folder"))))


def as_frame(records: Sequence[Mapping[str, Any]]) -> Any:
    """Return records as a pandas DataFrame.

    Raises:
        ScenarioError: when pandas is not installed.
    """
    return require("pandas", "a frame", "pip install pandas, or take the records").DataFrame(list(records))


def flat(record: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a record with nested keys joined: `{"loss": {"mean_model": 1}}` is `{"loss.mean_model": 1}`."""
    columns: dict[str, Any] = {}
    for name, value in record.items():
        columns |= flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {f"{path}{name}": value}
    return columns
