"""Compare algorithms, or scenarios, over seeds: a table with mean and spread."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flower_privdec.api.running import as_frame, flat, threads_kept
from flower_privdec.api.scenarios import as_scenario, check_everywhere, make_scenario
from flower_privdec.common.formatting import NOTHING, epsilon_text, setting, shown
from flower_privdec.common.user_code import Given
from flower_privdec.core import Algorithm
from flower_privdec.errors import RunError, ScenarioError
from flower_privdec.experiment.run_key import code_of
from flower_privdec.reporting.console import comparison_text
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.reporting.wording import measured
from flower_privdec.scenario import Scenario, own_parts, scenario_hash
from flower_privdec.study.cells import Cell, folder_of, is_finished, missing_cells, run_cells
from flower_privdec.study.results import Group
from flower_privdec.study.spec import Reading, kinds_of, metric

AlgorithmChoice = str | type[Algorithm] | Mapping[str, Any]
SHARED = ("learning_rate", "learning_rate_decay")  # keys of every algorithm's section


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs side by side; printed, a table.

    Attributes:
        rows: for each algorithm or scenario its label, its number of runs (`runs`), its largest ε of any peer in any
            run (infinity without privacy), and for each metric its `mean`, `std` (sample standard deviation, None for
            one run) and `n`, or None where no run has it.
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
                NOTHING if (own := row[name]) is None else measured(own["mean"], {"share": reading.share}, own["std"])
                for name, reading in self.metrics.items()
            ]
            for row in self.rows
        ]
        failed = [f"{label}, seed {seed}, failed: {why}" for (label, seed), why in self.failures.items()]
        return comparison_text(headings, rows, "\n".join([self.note, *failed]))


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
            raise _argument_error("compare takes one scenario with algorithms, or a mapping of scenarios alone")
        variants = {label: as_scenario(choice) for label, choice in scenario.items()}
    elif algorithms is None:
        variants = {as_scenario(scenario).algorithm.name: as_scenario(scenario)}
    else:
        base = as_scenario(scenario)
        given = algorithms if isinstance(algorithms, Mapping) else [(_label(choice), choice) for choice in algorithms]
        named = list(given.items()) if isinstance(given, Mapping) else given
        labels = [label for label, _ in named]
        if not labels or len(set(labels)) < len(labels):
            raise _argument_error(f"algorithms must be at least one, and have labels that differ, not {labels}")
        variants = {label: make_scenario(base, algorithm=_section(base, choice)) for label, choice in named}
    if not isinstance(seeds, Collection) or not seeds or len(set(seeds)) < len(seeds):
        raise _argument_error(f"seeds={shown(seeds)} must be at least one, each once, in a list")
    cells = [_cell(label, variant, seed) for label, variant in variants.items() for seed in seeds]
    if not isinstance(jobs, int) or jobs < 1:
        raise _argument_error(f"jobs={shown(jobs)} must be >= 1, and a whole number")
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
        raise _argument_error('a whole section needs a label: algorithms={"mine": {"name": ..., ...}}')
    if not isinstance(algorithm, str | type):
        raise _argument_error(f"algorithms: {shown(algorithm)} must be a name, or a subclass of Algorithm")
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
    parts = own_parts(seeded, metrics=True)
    named = [part for part in parts if not isinstance(part, Given)]
    targets = [part.target.encode() for part in parts if isinstance(part, Given)]
    key = hashlib.sha256(scenario_hash(seeded).encode())
    for code in (*code_of(named), *targets):
        key.update(len(code).to_bytes(8, "little") + code)
    return Cell("comparison", (label,), seed, seeded, key.hexdigest())


def _argument_error(message: str) -> ScenarioError:
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
    total, delta = sum(epsilons), sum(max(float(row["delta"]) for row in rows) for rows in private)
    together = f"all {len(runs)} together cost up to ε = {epsilon_text(total)} at δ = {setting(delta)}"
    return f"{spread} ε is that of a run alone; {together}.".strip()
