"""Run scenarios, plan their cost, read the folders of runs, and compare algorithms over seeds, from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, Literal
from weakref import finalize

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flower_privdec.api.scenarios import as_path, as_scenario, check_everywhere, make_scenario
from flower_privdec.common.errors import ArgumentError, RunError, ScenarioError, called_from_python
from flower_privdec.common.formatting import epsilon_text, one_line, setting, shown
from flower_privdec.common.user_code import require
from flower_privdec.core import Algorithm
from flower_privdec.engine.run import run as run_in_process
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.experiment.agreement import build_module, module_facts
from flower_privdec.experiment.checkpoint import read_checkpoint
from flower_privdec.experiment.recorder import model_tensors, with_more_rounds
from flower_privdec.planner.plan import make_plan
from flower_privdec.reporting.console import comparison_row, comparison_text, plan_text
from flower_privdec.reporting.plots import curves_of, draw_bars, draw_budget, draw_curve, drawing, html_of, picture
from flower_privdec.reporting.run_folder import Result, RunGroup, read_result
from flower_privdec.reporting.wording import headline
from flower_privdec.scenario import Scenario
from flower_privdec.studies.cells import Cell, cell_key, folder_of, is_finished, missing_cells, run_cells
from flower_privdec.studies.results import Estimate, Group, value_text
from flower_privdec.studies.spec import Reading, kinds_of, metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


OnEvaluation = Callable[[dict[str, Any]], bool | None]
OnRound = Callable[[int], None]
OnEnd = Callable[["RunResult"], None]
RUNTIMES = ("engine", "flower")


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
        resume: resume from the checkpoint in `out`. A run that is finished, or was stopped, goes on where `rounds` or
            the scenario's rounds, epsilon or noise_multiplier are others: the further rounds are planned with what the
            first ones left of the budget, and its ε counts all.
        rounds: how many in all, in place of the scenario's.
        on_round: called after each round with the number of rounds that are done; of `engine` alone.
        on_evaluation: called after each evaluation with its metrics (a line of metrics.jsonl). When it returns True
            the run stops: the result has the summary, privacy and models of that round, and the folder the checkpoint
            to resume from. So it is after Ctrl-C, which raises KeyboardInterrupt as always.
        on_end: called with the result, also of a run that was stopped.
        runtime: `engine` is this process, `flower` is `flwr run` in Flower's simulation.

    Raises:
        ScenarioError: when something does not fit, or the folder holds another run; nothing was written.
        BudgetError: when a ledger cannot be trusted, is in use, or allows no step.
        RunError: when the run diverged or failed.

    Privacy: as the scenario declares. Without `privacy.ledger` each run has its own ledger, and its ε counts this run
        alone.
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
    watching = stopping(on_evaluation, experiment.scenario.rounds)

    def train(folder: Path) -> None:
        if runtime == "engine":
            run_in_process(experiment, folder, resume=resume, on_metrics=watching, on_round=on_round)
        else:
            from flower_privdec.flower.launch.launcher import flower_run

            flower_run(experiment, folder, resume=resume, on_metrics=watching)

    return train_into(train, folder, on_end)


def check_callbacks(**callbacks: object) -> None:
    """Raise if a callback can not be called.

    Raises:
        ScenarioError: naming it.
    """
    for name, callback in callbacks.items():
        if callback is not None and not callable(callback):
            raise argument_error(f"{name}={shown(callback)} must be a function")


def train_into(train: Callable[[Path], object], folder: Path | None, on_end: OnEnd | None) -> RunResult:
    """Train into a folder, a temporary one where none is given, and return the result."""
    temporary = mkdtemp(prefix="privdec-") if folder is None else None
    folder = folder or Path(str(temporary)) / "run"
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
        answer: object = None if callback is None else callback(metrics)
        if answer is not None and not isinstance(answer, bool | np.bool):
            kind = type(answer).__name__
            raise ArgumentError(
                f"on_evaluation returned a {kind}: it must return True to stop the run, or None to go on",
                code="api.on-evaluation",
            )
        return bool(answer) and metrics["round"] < rounds

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
        topology: joint connectivity, spectral gap, and the rounds of final mixing on a network; None where nothing is
            exchanged.
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

    def details(self) -> str:
        """Return all of it as text, as `privdec plan --verbose` prints it."""
        return plan_text(self.facts, verbose=True)

    def _repr_html_(self) -> str:
        return html_of(str(self), picture("ε", self.plot) if self.epsilon < float("inf") else [])

    def plot(self) -> Figure:
        """Return a figure of each peer's ε over the rounds, after each quarter.

        Raises:
            ScenarioError: matplotlib is not installed.
        """
        with drawing():
            return draw_budget(self.rounds, [row["epsilon_after_quarters"] for row in self.peers])


@called_from_python()
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
        summary: summary.json; of a run that was stopped, with `stopped_at` and `stopped_by`; of a run under way, the
            same keys as far as they are known.
    """

    @property
    def privacy(self) -> list[dict[str, Any]]:
        """Each peer's guarantee: ε (a number, or "inf"), δ, unit, adjacency, a paper's claimed ε, and its scope.

        It is empty while the run is under way.
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

        Of a run under way they are those of its checkpoint.

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
            raise argument_error(f"into is a {type(into).__name__} and must be a torch.nn.Module")
        n_peers = self.scenario.n_peers
        if peer is not None and (isinstance(peer, bool) or peer not in range(n_peers)):
            raise argument_error(f"peer={shown(peer)} must be 0 to {n_peers - 1}, or None for the mean model")
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
        if self.privacy and path.is_file():
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
        if self.privacy or not checkpoint.is_file():
            raise ScenarioError(
                f"{self.folder}: has no {path.name}: this run kept no models; run the scenario again",
                code="api.no-model",
            )
        agreement = Agreement.of(self.scenario)
        rows = read_checkpoint(checkpoint).state.rows
        if not rows:
            raise ScenarioError(
                f"{self.folder}: its shards hold the models until the run is done: let it finish", code="api.no-model"
            )
        tensors = {key: t for key, t in model_tensors(agreement, rows).items() if key.startswith(prefix)}
        return tensors, module_facts(agreement.public, agreement.loss)

    def __str__(self) -> str:
        """Return the run in a line: its name, its result and its ε."""
        return f"{self.scenario.name}: {headline(self.summary)}"

    def _repr_html_(self) -> str:
        facts = "\n".join(f"{key}: {value}" for key, value in comparison_row(self.summary).items() if key != "run")
        return html_of(f"{self}\n{facts}", picture("the run", self.plot) if self.metrics else [])

    def plot(self, metric: str | None = None) -> Figure:
        """Return a figure of one quantity over the rounds.

        Args:
            metric: of the task, or loss, consensus, epsilon; by default the task's first.

        Raises:
            ScenarioError: the run has no such quantity, or matplotlib is not installed.
        """
        groups = [RunGroup(self.scenario.name, (self,))]
        curves = {curve.name: curve for curve in curves_of(groups)}
        name = next(iter(curves)) if metric is None else metric
        with drawing():
            figure = draw_curve(curves[name], groups) if name in curves else None
        if figure is None:
            raise argument_error(f"metric={shown(name)} must be one that the run has, of {', '.join(curves)}")
        return figure


@called_from_python()
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


AlgorithmChoice = str | type[Algorithm] | Mapping[str, Any]
RATE = "learning_rate"
SHARED = (RATE, f"{RATE}_decay", f"{RATE}_schedule", f"{RATE}_warmup")  # keys of every algorithm's section


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side; printed, a table.

    Attributes:
        rows: for each algorithm or scenario its label, its number of runs (`runs`), its largest ε of any peer in any
            run (infinity without privacy), and for each metric its `mean`, `std` (sample standard deviation, None for
            one run), `n` and how many runs `diverged`, or None where no run has it.
        failures: the errors of failed runs, by label and seed.
        note: the ε of all runs together.
    """

    rows: list[dict[str, Any]]
    metrics: dict[str, Reading]
    seeds: tuple[int, ...]
    failures: dict[tuple[str, int], str]
    note: str

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, with a column such as `accuracy.mean`.

        Raises:
            ScenarioError: when pandas is not installed.
        """
        return as_frame([flat(row) for row in self.rows])

    def __str__(self) -> str:
        """Return the table, and its note and the failed runs below it."""
        headings = ["", "runs", "ε", *(reading.title for reading in self.metrics.values())]
        rows = [
            [row["label"], str(row["runs"]), epsilon_text(row["epsilon"])]
            + [
                value_text(reading, row[name] and Estimate(**row[name]), spread=True)
                for name, reading in self.metrics.items()
            ]
            for row in self.rows
        ]
        failed = [f"{label}, seed {seed}, failed: {why}" for (label, seed), why in self.failures.items()]
        return comparison_text(headings, rows, "\n".join([self.note, *failed]))

    def _repr_html_(self) -> str:
        return html_of(str(self), picture("the comparison", self.plot))

    def plot(self, metric: str | None = None) -> Figure:
        """Return a figure of one metric, by default the first: the mean of each row, and its deviation over the seeds.

        Raises:
            ScenarioError: there is no such metric, or matplotlib is not installed.
        """
        name = next(iter(self.metrics)) if metric is None else metric
        if name not in self.metrics:
            raise argument_error(f"metric={shown(metric)} must be one of {', '.join(self.metrics)}")
        rows = {row["label"]: row[name] for row in self.rows if row[name] is not None}
        with drawing():
            return draw_bars(rows, self.metrics[name].title, share=self.metrics[name].share)


@called_from_python()
def compare(
    scenario: Scenario | str | Path | Mapping[str, Scenario],
    algorithms: Iterable[str | type[Algorithm]] | Mapping[str, AlgorithmChoice] | None = None,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    metrics: Sequence[str] | None = None,
    folder: str | Path | None = None,
    jobs: int = 1,
) -> Comparison:
    """Run algorithms on one scenario, or several scenarios, with several seeds each.

    Args:
        scenario: the scenario of all algorithms, or scenarios by their labels.
        algorithms: names, classes of your own, or by label one of these or a whole section `{"name": ..., ...}`. A
            learning rate that is not given is the scenario's.
        seeds: of the runs; a seed decides partition, graph and initial model, and so the noise.
        metrics: of each run at its end, by the names that studies use: a metric of the task for the mean model,
            with `peer-` or `worst-peer-` before it for the peers', `loss`, `consensus`. By default the task's first,
            the same of the peers' models, and the consensus distance.
        folder: for finished runs, each cached by its scenario and the code of your own parts, so that the same
            comparison resumes after an interrupt. Runs of Python objects are cached for this process alone. By default
            nothing is kept.
        jobs: processes; 1 runs all in this one.

    Raises:
        ScenarioError: when something does not fit; nothing was run.
        RunError: when every run failed.

    Privacy: every run is charged alone, in its own ledger; the note has the cost of all of them together. So
        `privacy.ledger` must be left out.
    """
    if isinstance(scenario, Mapping):
        if algorithms is not None or not scenario:
            raise argument_error("compare takes one scenario with algorithms, or a mapping of scenarios alone")
        variants = {label: as_scenario(choice) for label, choice in scenario.items()}
    elif algorithms is None:
        variants = {as_scenario(scenario).algorithm.name: as_scenario(scenario)}
    else:
        base = as_scenario(scenario)
        if isinstance(algorithms, str | type):
            raise argument_error(f"algorithms={shown(algorithms)} must be a list, as [{shown(algorithms)}]")
        named = list(algorithms.items()) if isinstance(algorithms, Mapping) else [(_label(c), c) for c in algorithms]
        labels = [label for label, _ in named]
        if not labels or len(set(labels)) < len(labels):
            raise argument_error(f"algorithms must be at least one, and have labels that differ, not {labels}")
        variants = {label: make_scenario(base, algorithm=_section(base, choice)) for label, choice in named}
    if not isinstance(seeds, Collection) or not seeds or len(set(seeds)) < len(seeds):
        raise argument_error(f"seeds={shown(seeds)} must be at least one, each once, in a list")
    cells = [_cell(label, variant, seed) for label, variant in variants.items() for seed in seeds]
    if not isinstance(jobs, int) or jobs < 1:
        raise argument_error(f"jobs={shown(jobs)} must be >= 1, and a whole number")
    if len({(cell.labels, cell.key) for cell in cells}) < len(cells):
        raise ScenarioError(
            "seeds data, model and run are all given in the scenario, so that another seed changes nothing; leave out "
            "those that should vary",
            code="study.seeds-fixed",
        )
    for variant in variants.values() if jobs > 1 else ():
        check_everywhere(variant, f"jobs={jobs} are processes")
    kinds = kinds_of(variants.values())
    first = next(iter(kinds))
    readings = {name: metric(name, kinds) for name in metrics or (first, f"peer-{first}", "consensus")}
    with ExitStack() as stack:
        stack.enter_context(threads_kept())
        cache = Path(folder or stack.enter_context(TemporaryDirectory(prefix="privdec-")))
        failed = run_cells(missing_cells(cells, cache), cache, jobs, lambda _: None)
        errors = {outcome.cell.key: str(outcome.error) for outcome in failed}
        runs: dict[str, list[Result]] = {label: [] for label in variants}
        for cell in cells:
            path = folder_of(cache, cell.key)
            if is_finished(path):
                runs[cell.labels[0]].append(read_result(path))
    failures = {(cell.labels[0], cell.seed): errors[cell.key] for cell in cells if cell.key in errors}
    if len(failures) == len(cells):
        (label, seed), why = next(iter(failures.items()))
        raise RunError(f"every run failed; {label}, seed {seed}: {why}", code="api.all-failed")
    groups = [Group((label,), tuple(finished), 0, kinds) for label, finished in runs.items()]
    note = _note([run for group in groups for run in group.runs], seeds)
    rows: list[dict[str, Any]] = []
    for group in groups:
        estimates = {name: group.final(name) for name in readings}
        largest = max(map(_epsilon, group.runs), default=None)
        row = {"label": group.labels[0], "runs": len(group.runs), "epsilon": largest}
        rows.append(row | {name: estimate and asdict(estimate) for name, estimate in estimates.items()})
    return Comparison(rows, readings, tuple(seeds), failures, note)


def _label(algorithm: AlgorithmChoice) -> str:
    if isinstance(algorithm, Mapping):
        raise argument_error('a whole section needs a label: algorithms={"mine": {"name": ..., ...}}')
    if not isinstance(algorithm, str | type):
        raise argument_error(f"algorithms: {shown(algorithm)} must be a name, or a subclass of Algorithm")
    return algorithm if isinstance(algorithm, str) else algorithm.__name__


def _section(base: Scenario, algorithm: AlgorithmChoice) -> dict[str, Any]:
    """Return an algorithm's section, with the learning rate of the base where it has none."""
    if not isinstance(algorithm, Mapping):
        own = not isinstance(algorithm, str) or ":" in algorithm
        algorithm = {"module" if own else "name": algorithm}
    return {key: getattr(base.algorithm, key) for key in SHARED} | dict(algorithm)


def _cell(label: str, scenario: Scenario, seed: int) -> Cell:
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"{label}: privacy.ledger must be left out of a comparison: every run has its own", code="study.ledger"
        )
    seeded = make_scenario(scenario, seed=seed)
    return Cell("comparison", (label,), seed, seeded, cell_key(seeded))


def argument_error(message: str) -> ScenarioError:
    """Return the error of an argument that breaks a rule."""
    return ScenarioError(message, code="api.argument")


def _epsilon(run: Result) -> float:
    return max(float(row["epsilon"]) for row in run.summary["privacy"])


def _note(runs: Sequence[Result], seeds: Sequence[int]) -> str:
    """Describe the table's spread, and the cost of all runs together: ε and δ add up, at most."""
    spread = f"Mean and standard deviation over the seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else ""
    epsilons = [_epsilon(run) for run in runs]
    private = [run.summary["privacy"] for run, epsilon in zip(runs, epsilons, strict=True) if epsilon < float("inf")]
    if not private:
        return spread
    total = sum(epsilons)
    delta = sum(max(float(row["delta"]) for row in rows) for rows in private)
    together = f"all {len(runs)} together cost up to ε = {epsilon_text(total)} at δ = {setting(delta)}"
    return f"{spread} ε is that of a run alone; {together}.".strip()
