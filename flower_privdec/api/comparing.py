"""Compare algorithms over seeds, from Python."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flower_privdec.api.argument_errors import argument_error
from flower_privdec.api.notebook_display import ShowsItself
from flower_privdec.api.pandas_frames import as_frame, flat
from flower_privdec.api.running import threads_kept
from flower_privdec.api.scenarios import as_path, as_scenario, check_everywhere, make_scenario
from flower_privdec.common.errors import RunError, ScenarioError, called_from_python
from flower_privdec.common.formatting import epsilon_text, setting, shown
from flower_privdec.core import Algorithm
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.look import drawing
from flower_privdec.reporting.plots import draw_bars, html_of, picture
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.scenario import Scenario
from flower_privdec.studies.cells import Cell, cell_key, check_builds, folder_of, is_finished, missing_cells, run_cells
from flower_privdec.studies.results import Estimate, Group, value_text
from flower_privdec.studies.spec import Reading, class_in, is_of_extreme_peers, kinds_of, metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AlgorithmChoice = str | type[Algorithm] | Mapping[str, Any]
RATE = "learning_rate"
EACH_LABELLED = "as compare({label: scenario, ...})"
SHARED = (RATE, f"{RATE}_decay", f"{RATE}_schedule", f"{RATE}_warmup")  # keys of every algorithm's section


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(ShowsItself):
    """Runs side by side; printed, a table.

    Attributes:
        rows: for each algorithm or scenario its label, its number of runs (`runs`), its largest ε of any peer in any
            run (infinity without privacy), and for each metric its `mean`, `std` (sample standard deviation, None for
            one run), `n` and how many runs `diverged`, or None if no run has it.
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
        rows = []
        for row in self.rows:
            cells = [row["label"], str(row["runs"]), epsilon_text(row["epsilon"])]
            for name, reading in self.metrics.items():
                estimate = None if row[name] is None else Estimate(**row[name])
                cells.append(value_text(reading, estimate, spread=True))
            rows.append(cells)

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
        reading = self.metrics[name]
        with drawing():
            return draw_bars(rows, reading.title, share=reading.share)


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
        seeds: the seeds of the runs; a seed decides partition, graph and initial model, and so the noise.
        metrics: of each run at its end, by the names that studies use: a metric of the task for the mean model,
            with `peer-` or `worst-peer-` before it for the peers', `loss`, `consensus`. By default the task's first,
            the same of the peers' models, and the consensus distance.
        folder: for finished runs, each cached by its scenario and the code of your own parts, so that the same
            comparison resumes after an interrupt. Runs of Python objects are cached only for this process. By default
            nothing is kept.
        jobs: processes; 1 runs all in this one.

    Raises:
        ScenarioError: when something does not fit, or a scenario cannot run; nothing was run.
        RunError: when every run failed.

    Privacy: every run is charged by itself, in its own ledger; the note has the cost of all of them together. So
        `privacy.ledger` must be left out.
    """
    variants = _variants(scenario, algorithms)
    if not isinstance(seeds, Collection) or not seeds or len(set(seeds)) < len(seeds):
        meant = ""
        if isinstance(seeds, int):
            meant = f"; write seeds=[{seeds}]"
        raise argument_error(f"seeds={shown(seeds)} must be at least one, each once, in a list{meant}")
    cells = [_cell(label, variant, seed) for label, variant in variants.items() for seed in seeds]
    if not isinstance(jobs, int) or jobs < 1:
        raise argument_error(f"jobs={shown(jobs)} must be >= 1, and a whole number")
    if len({(cell.labels, cell.key) for cell in cells}) < len(cells):
        raise ScenarioError(
            "seeds data, model and run are all given in the scenario, so that another seed changes nothing; leave out "
            "those that should vary",
            code="study.seeds-fixed",
        )
    if jobs > 1:
        for variant in variants.values():
            check_everywhere(variant, f"jobs={jobs} are processes")

    if isinstance(metrics, str):
        raise argument_error(f"metrics={shown(metrics)} must be a list, as [{shown(metrics)}]")
    cached = None if folder is None else as_path(folder, "folder")
    if cached is not None and cached.exists() and not cached.is_dir():
        raise argument_error(f"folder={shown(str(folder))} is a file: give a folder, or a path that does not exist yet")

    kinds = kinds_of(variants.values())
    first = next(iter(kinds))
    names = metrics or (first, f"peer-{first}", "consensus")
    readings = {name: metric(name, kinds) for name in names}
    for name in names:
        if class_in(name) is not None and not all(variant.evaluation.by_class for variant in variants.values()):
            raise argument_error(
                f"metrics: {name} is measured only if a scenario asks for it: give each evaluation.by_class=true"
            )

        if is_of_extreme_peers(name) and any(variant.evaluation.peers is not None for variant in variants.values()):
            raise argument_error(
                f"metrics: {name} is of all peers, and evaluation.peers tries a sample of them, whose worst and best "
                "are others: leave evaluation.peers out of each scenario"
            )

    with ExitStack() as stack:
        stack.enter_context(threads_kept())
        cache = Path(cached or stack.enter_context(TemporaryDirectory(prefix="privdec-")))
        missing = missing_cells(cells, cache)
        check_builds(missing, set(), {"": names})
        failed = run_cells(missing, cache, jobs, lambda _: None)
        finished: dict[str, list[Result]] = {label: [] for label in variants}
        for cell in cells:
            path = folder_of(cache, cell.key)
            if is_finished(path):
                finished[cell.labels[0]].append(read_result(path))

    errors = {outcome.cell.key: str(outcome.error) for outcome in failed}
    failures = {(cell.labels[0], cell.seed): errors[cell.key] for cell in cells if cell.key in errors}
    if len(failures) == len(cells):
        (label, seed), why = next(iter(failures.items()))
        raise RunError(f"every run failed; {label}, seed {seed}: {why}", code="api.all-failed")

    rows: list[dict[str, Any]] = []
    for label, runs in finished.items():
        group = Group((label,), tuple(runs), 0, kinds)
        row: dict[str, Any] = {"label": label, "runs": len(runs), "epsilon": max(map(_epsilon, runs), default=None)}
        for name in readings:
            estimate = group.final(name)
            row[name] = None if estimate is None else asdict(estimate)
        rows.append(row)

    note = _note([run for runs in finished.values() for run in runs], seeds)
    return Comparison(rows, readings, tuple(seeds), failures, note)


def _variants(
    scenario: Scenario | str | Path | Mapping[str, Scenario],
    algorithms: Iterable[str | type[Algorithm]] | Mapping[str, AlgorithmChoice] | None,
) -> dict[str, Scenario]:
    """Return the scenarios that are compared, by their labels.

    Raises:
        ScenarioError: the two arguments do not go together, or two labels are the same.
    """
    if isinstance(scenario, Mapping):
        if algorithms is not None or not scenario:
            raise argument_error("compare takes one scenario with algorithms, or only a mapping of scenarios")
        _check_labels(scenario)
        return {label: as_scenario(choice) for label, choice in scenario.items()}

    given: object = scenario
    if isinstance(given, list | tuple | set):
        raise argument_error(f"scenario={shown(scenario)} must be one, or several under labels, {EACH_LABELLED}")
    base = as_scenario(scenario)
    if algorithms is None:
        return {base.algorithm.name: base}
    if isinstance(algorithms, str | type):
        raise argument_error(f"algorithms={shown(algorithms)} must be a list, as [{shown(algorithms)}]")

    if isinstance(algorithms, Mapping):
        labelled = list(algorithms.items())
        _check_labels(algorithms)
    else:
        labelled = [(_label(choice), choice) for choice in algorithms]
    labels = [label for label, _ in labelled]
    if not labels or len(set(labels)) < len(labels):
        raise argument_error(
            f"algorithms must be at least one, and have labels that differ, not {labels}; give each a label of "
            f"its own, as algorithms={{label: algorithm, ...}}, or {EACH_LABELLED}"
        )
    return {label: make_scenario(base, algorithm=_section(base, choice)) for label, choice in labelled}


def _check_labels(labels: Iterable[object]) -> None:
    for label in labels:
        if not isinstance(label, str) or not label:
            raise argument_error(f"label {shown(label)} must be text that is not empty, {EACH_LABELLED}")


def _label(algorithm: AlgorithmChoice) -> str:
    if isinstance(algorithm, Mapping):
        raise argument_error('a whole section needs a label: algorithms={"mine": {"name": ..., ...}}')
    if not isinstance(algorithm, str | type):
        raise argument_error(f"algorithms: {shown(algorithm)} must be a name, or a subclass of Algorithm")
    return algorithm if isinstance(algorithm, str) else algorithm.__name__


def _section(base: Scenario, algorithm: AlgorithmChoice) -> dict[str, Any]:
    """Return an algorithm's section, with the base's learning rate unless it has its own."""
    if not isinstance(algorithm, Mapping):
        is_own = not isinstance(algorithm, str) or ":" in algorithm
        key = "module" if is_own else "name"
        algorithm = {key: algorithm}
    return {key: getattr(base.algorithm, key) for key in SHARED} | dict(algorithm)


def _cell(label: str, scenario: Scenario, seed: int) -> Cell:
    if scenario.private is not None and scenario.private.ledger is not None:
        raise ScenarioError(
            f"{label}: privacy.ledger must be left out of a comparison: every run has its own", code="study.ledger"
        )
    seeded = make_scenario(scenario, seed=seed)
    return Cell("", (label,), seed, seeded, cell_key(seeded))


def _epsilon(run: Result) -> float:
    return max(float(row["epsilon"]) for row in run.summary["privacy"])


def _note(runs: Sequence[Result], seeds: Sequence[int]) -> str:
    """Describe the table's spread, and the cost of all runs together: ε and δ add up, at most."""
    spread = ""
    if len(seeds) > 1:
        spread = f"Mean and standard deviation over the seeds {', '.join(map(str, seeds))}."

    private = [run for run in runs if _epsilon(run) < float("inf")]
    if not private:
        return spread

    # One run without privacy makes the sum of all infinite, as it should.
    total = sum(_epsilon(run) for run in runs)
    delta = sum(max(float(row["delta"]) for row in run.summary["privacy"]) for run in private)
    together = f"all {len(runs)} together cost up to ε = {epsilon_text(total)} at δ = {setting(delta)}"
    return f"{spread} ε is that of a run alone; {together}.".strip()
