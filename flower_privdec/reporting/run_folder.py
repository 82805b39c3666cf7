"""Read the folders of runs, finished or under way, and group runs that differ only in their seeds."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.errors import ScenarioError
from flower_privdec.common.formatting import one_line, peer_ranges, setting, shown
from flower_privdec.experiment.noise_statement import MAY
from flower_privdec.experiment.recorder import read_metrics
from flower_privdec.reporting.wording import main_metric
from flower_privdec.scenario import Scenario, load_scenario, seedless_hash

NEEDED = (
    *("name", "algorithm", "runtime", "n_peers", "rounds", "seed", "loss", "consensus_distance", "privacy"),
    *("wall_seconds", "peer_steps_per_second"),
)
MOST_NAMED = 3  # runs in an error about a folder of several
AVERAGED = ("loss", "consensus_distance", "wall_seconds", "peer_steps_per_second", "personalized", "by_class")
EXTREMES: dict[str, Callable[[Iterable[float]], float]] = {"peer_min": min, "peer_max": max}


@dataclass(frozen=True)
class Result:
    """The contents of a run's folder.

    Attributes:
        scenario: with every default resolved.
        metrics: the lines of metrics.jsonl, in order of the rounds.
        summary: summary.json; for a run that was stopped with `stopped_at` and `stopped_by` (callback, interrupt,
            budget, or nobody left of the peers of a network). For a run under way the same keys as far as they are
            known, with `finished` False, `rounds_done` and `epsilon_so_far` (largest of the peers).
    """

    folder: Path
    scenario: Scenario
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Return whether the run reached its end."""
        return bool(self.summary["finished"])


def read_result(folder: Path) -> Result:
    """Read a run's folder.

    Raises:
        ScenarioError: it is not a run's folder, naming what is missing, or a file in it is damaged.
    """
    remedy = "give a folder that `privdec run` wrote"
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: is not a folder; {remedy}", code="reporting.not-a-run")
    if not (folder / "scenario.yaml").is_file():
        inner = sorted(path.parent for path in folder.glob("*/scenario.yaml"))
        if inner:
            named = ", ".join(shown(str(run))[1:-1] for run in inner[:MOST_NAMED])
            remedy = f"give one of the {len(inner)} runs in it, such as {named}"
        raise ScenarioError(f"{folder}: has no scenario.yaml, so it is not a run; {remedy}", code="reporting.not-a-run")

    scenario = load_scenario(folder / "scenario.yaml")
    metrics = read_metrics(folder)
    summary = _read_summary(folder / "summary.json", scenario) or _unfinished(scenario, metrics)
    summary["metrics"] = scenario.task.described()
    return Result(folder, scenario, metrics, summary)


def _read_summary(path: Path, scenario: Scenario) -> dict[str, Any] | None:
    """Return a finished run's summary; None if the run is not finished."""
    if not path.is_file():
        return None

    try:
        summary = json.loads(path.read_bytes())
        if isinstance(summary, dict) and "peer" in summary and "privacy" not in summary:
            return _of_one_peer(summary, scenario)

        missing = [key for key in [*NEEDED, *scenario.task.kinds()] if key not in summary]
        if not isinstance(summary, dict) or missing:
            raise ValueError(f"it lacks {', '.join(missing)}" if missing else "it is not a mapping")

        expected = {
            "name": scenario.name,
            "algorithm": scenario.algorithm.name,
            "n_peers": scenario.n_peers,
            "rounds": scenario.rounds,
            "seed": scenario.seed,
        }
        for name, value in expected.items():
            if summary[name] != value:
                raise ValueError(f"its {name} is {shown(summary[name], 40)} and the scenario's {shown(value, 40)}")
        for name in ("loss", *scenario.task.kinds()):
            if not isinstance(summary[name], dict):
                raise ValueError(f"its {name} is {shown(summary[name], 40)}")
        rows = summary["privacy"]
        if not isinstance(rows, list) or not all(map(_is_guarantee, rows)):
            raise ValueError(f"its privacy is {shown(rows, 40)}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ScenarioError(
            f"{path}: is damaged ({one_line(error)}); `privdec run {path.parent}/scenario.yaml --out {path.parent} "
            "--resume` writes it again",
            code="reporting.summary-damaged",
        ) from error
    return {**summary, "finished": summary.get("stopped_by", "budget") == "budget"}


def _of_one_peer(status: dict[str, Any], scenario: Scenario) -> dict[str, Any]:
    """Return a summary from that of a deployed peer, which knows its own ε and nothing of the others' models.

    Raises:
        ValueError, TypeError: it is not a peer's.
    """
    peer = status["peer"]
    done = status.get("round")
    if type(peer) is not int or not 0 <= peer < scenario.n_peers or type(done) is not int:
        raise ValueError(f"its peer is {shown(peer, 40)} and its round {shown(done, 40)}")
    summary = _unfinished(scenario, [])
    summary |= {"runtime": "network", "rounds_done": done, "finished": done >= scenario.rounds}
    if "noise" in status:
        summary |= {"noise": status["noise"], "publishable": MAY in str(status["noise"])}

    private = scenario.private
    row: dict[str, Any] = {"peer": peer, "epsilon": status.get("epsilon"), "delta": 0.0}
    row |= {"unit": "example", "adjacency": "zero-out", "calibration": "none", "claimed_epsilon": None}
    if private is None:
        row["epsilon"] = "inf"
    else:
        delta = np.broadcast_to(np.asarray(private.delta, dtype=float), (scenario.n_peers,))[peer]
        row |= {"delta": float(delta), "calibration": private.calibration}
        row["scope"] = f"all runs in {private.ledger}" if private.ledger else "this run alone"
    if status.get("colluding") is not None:
        row |= {name: status[name] for name in ("colluding", "epsilon_if_all_collude")}
    if not _is_guarantee(row):
        raise ValueError(f"its epsilon is {shown(row['epsilon'], 40)}")
    return summary | {"privacy": [row]}


def _is_guarantee(row: Any) -> bool:
    """Return whether a row of a summary has an ε and a δ of at least 0, which NaN is not; ε may be "inf"."""
    if not isinstance(row, dict):
        return False
    epsilon = math.inf if row.get("epsilon") == "inf" else row.get("epsilon")
    return all(isinstance(number, int | float) and number >= 0 for number in (epsilon, row.get("delta")))


def _unfinished(scenario: Scenario, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the summary of a run under way would have, as far as it is known."""
    last: dict[str, Any] = metrics[-1] if metrics else {}
    summary: dict[str, Any] = {
        "name": scenario.name,
        "algorithm": scenario.algorithm.name,
        "runtime": None,
        "n_peers": scenario.n_peers,
        "rounds": scenario.rounds,
        "rounds_done": last.get("round", 0),
        "seed": scenario.seed,
    }
    if scenario.seeds is not None:
        summary["seeds"] = scenario.all_seeds()
    for name in (*scenario.task.kinds(), "loss", "consensus_distance"):
        summary[name] = last.get(name)
    for name in ("by_class", "peers_tried"):
        if name in last:
            summary[name] = last[name]

    return summary | {
        "privacy": [],
        "epsilon_so_far": last.get("epsilon"),
        "wall_seconds": last.get("seconds"),
        "peer_steps_per_second": None,
        "finished": False,
    }


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds.

    Attributes:
        label: their name among other groups, unique there.
        runs: one or several, ascending by their seeds.
    """

    label: str
    runs: tuple[Result, ...]

    @property
    def algorithm(self) -> str:
        """Return the name of the runs' algorithm."""
        return self.runs[0].scenario.algorithm.name

    @property
    def seeds(self) -> str:
        """Return the runs' seeds: `1-3, 7`, or if `data`, `model` and `run` have their own: `run 1-3`."""
        if all(run.scenario.seeds is None for run in self.runs):
            return peer_ranges(run.scenario.seed for run in self.runs)
        distinct = {name: {run.scenario.all_seeds()[name] for run in self.runs} for name in ("data", "model", "run")}
        return "; ".join(f"{name} {peer_ranges(seeds)}" for name, seeds in distinct.items())

    @property
    def budget(self) -> float:
        """Return the largest ε that a peer may reach: what the noise was solved for, or else what was spent; or ∞."""
        private = self.runs[0].scenario.private
        if private is None:
            return math.inf
        if private.epsilon is None or private.calibration == "paper":
            spent = [float(row["epsilon"]) for run in self.runs for row in run.summary["privacy"]]
            return max(spent or [float(self.runs[0].summary["epsilon_so_far"] or 0)])
        return float(np.max(private.epsilon))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return the summary of a run; for several, means, the range of all their peers, and each peer's largest ε.

        `spread` has the sample standard deviations of the first metric over the seeds.
        """
        summaries = [run.summary for run in self.runs]
        combined = summaries[0] | {"label": self.label, "budget": self.budget}
        if len(summaries) == 1:
            return combined

        for key in (*combined["metrics"], *AVERAGED):
            if key in combined:
                combined[key] = _mean([summary[key] for summary in summaries])
        values = [summary[main_metric(combined)[0]] for summary in summaries]
        combined["spread"] = {which: _deviation([value[which] for value in values]) for which in values[0]}

        largest = []
        for rows_of_peer in zip(*(summary["privacy"] for summary in summaries), strict=True):
            largest.append(max(rows_of_peer, key=lambda row: float(row["epsilon"])))
        return combined | {"privacy": largest, "n_runs": len(summaries)}

    def curve(self, read: Callable[[dict[str, Any], str], float | None]) -> tuple[list[int], np.ndarray]:
        """Return the rounds at which every run has a finite value [T], and the values [n_runs, T].

        Args:
            read: returns a value from a line of metrics.jsonl and the algorithm's name, or None.
        """
        by_round: list[dict[int, float]] = []  # of each run
        for run in self.runs:
            values = {}
            for line in run.metrics:
                value = read(line, self.algorithm)
                if value is not None and math.isfinite(value):
                    values[line["round"]] = value
            by_round.append(values)

        rounds = sorted(set(by_round[0]).intersection(*by_round))
        return rounds, np.array([[values[k] for k in rounds] for values in by_round], dtype=float)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of each value of mappings with the same keys; None if one value is missing."""
    if any(value is None for value in values):
        return None
    if not isinstance(values[0], dict):
        return float(np.mean([float(value) for value in values]))

    means = {}
    for key in values[0]:
        numbers = [value.get(key) for value in values]
        # The worst and the best peer of all runs, and not of an average run.
        if key in EXTREMES and all(number is not None for number in numbers):
            means[key] = EXTREMES[key](numbers)
        else:
            means[key] = _mean(numbers)
    return means


def _deviation(values: Sequence[float | None]) -> float | None:
    """Return the sample standard deviation; None if a value is missing."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    return float(np.std(present, ddof=1))


def read_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """Read runs and group those that differ only in their seeds; ascending by budget, then in the caller's order.

    Raises:
        ScenarioError: as `read_result`.
    """

    def seeds(run: Result) -> list[int]:
        return list(run.scenario.all_seeds().values())

    runs_by_key: list[tuple[Any, list[Result]]] = []
    for result in map(read_result, folders):
        key = seedless_hash(result.scenario), result.summary["runtime"], result.finished
        alike = [runs for other, runs in runs_by_key if other == key and seeds(result) not in map(seeds, runs)]
        if alike and result.finished:
            alike[0].append(result)
        else:
            runs_by_key.append((key, [result]))

    groups = [RunGroup("", tuple(sorted(runs, key=seeds))) for _, runs in runs_by_key]
    groups.sort(key=lambda group: group.budget)
    return _labelled(groups)


def _labelled(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Return groups with labels that differ: by the first of some namings that gives each another name."""
    namings: list[Callable[[RunGroup], str]] = [
        _name,
        lambda group: f"{_name(group)}, {budget_name(group.budget)}",
        lambda group: group.runs[0].folder.resolve().name,
        lambda group: str(group.runs[0].folder),
    ]
    for naming in namings:
        labels = [naming(group) for group in groups]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{label} #{i}" for i, label in enumerate(labels, 1)]

    labelled = []
    for group, label in zip(groups, labels, strict=True):
        if len(group.runs) > 1:
            label = f"{label} ({len(group.runs)} seeds)"
        labelled.append(replace(group, label=label))
    return labelled


def _name(group: RunGroup) -> str:
    """Return the runs' name, or the common prefix of their names: `digits` of `digits-s1` and `digits-s2`."""
    names = [run.scenario.name for run in group.runs]
    if len(set(names)) == 1:
        return names[0]
    common = os.path.commonprefix(names)  # noqa: RUF071 (of letters, which is meant)
    return re.sub(r"[-_. ]*(s|seed)?[-_. ]*$", "", common) or names[0]


def budget_name(budget: float) -> str:
    """Return a budget as a heading: `ε = 3`."""
    return "no privacy" if math.isinf(budget) else f"ε = {setting(budget)}"
