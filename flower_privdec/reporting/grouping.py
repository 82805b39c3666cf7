"""Runs that differ in their seeds alone, as one with mean and spread; runs of unlike budgets, apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from flower_privdec.common.formatting import peer_ranges, setting
from flower_privdec.reporting.run_folder import Result, read_result
from flower_privdec.reporting.wording import main_metric
from flower_privdec.scenario import seedless_hash

AVERAGED = ("loss", "consensus_distance", "wall_seconds", "peer_steps_per_second", "personalized")
EXTREMES: dict[str, Callable[[Iterable[float]], float]] = {"peer_min": min, "peer_max": max}


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds alone.

    Attributes:
        label: what to call them among others; unlike any other label.
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
        """Return the runs' seeds: `1-3, 7`, or of what differs: `run 1-3`."""
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
        """Return the summary of a run; of several, means, the range of all their peers, and each peer's largest ε.

        `spread` has, of the first metric, the sample standard deviations over the seeds.
        """
        first, *others = [run.summary for run in self.runs]
        named = first | {"label": self.label, "budget": self.budget}
        if not others:
            return named
        summaries = [first, *others]
        for key in (*first["metrics"], *AVERAGED):
            if key in first:
                named[key] = _mean([summary[key] for summary in summaries])
        values = [summary[main_metric(first)[0]] for summary in summaries]
        named["spread"] = {which: _deviation([value[which] for value in values]) for which in values[0]}
        return named | {"privacy": _most_spent(summaries), "n_runs": len(summaries)}

    def curve(self, read: Callable[[dict[str, Any], str], float | None]) -> tuple[list[int], np.ndarray]:
        """Return the rounds at which every run has a finite value [T], and the values [n_runs, T].

        Args:
            read: a value from a line of metrics.jsonl of a run of an algorithm, or None.
        """
        by_round = [{line["round"]: read(line, self.algorithm) for line in run.metrics} for run in self.runs]
        finite = [{k: v for k, v in values.items() if v is not None and math.isfinite(v)} for values in by_round]
        rounds = sorted(set(finite[0]).intersection(*finite))
        return rounds, np.array([[values[k] for k in rounds] for values in finite], dtype=float)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of what mappings of the same keys hold; None where one has none."""
    if any(value is None for value in values):
        return None
    if not isinstance(values[0], dict):
        return float(np.mean([float(value) for value in values]))
    return {
        key: EXTREMES[key](value[key] for value in values)
        if key in EXTREMES and all(value[key] is not None for value in values)
        else _mean([value.get(key) for value in values])
        for key in values[0]
    }


def _deviation(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.std(present, ddof=1)) if len(present) == len(values) else None


def _most_spent(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each peer's guarantee in the run in which it spent most."""
    rows = zip(*(summary["privacy"] for summary in summaries), strict=True)
    return [max(peer, key=lambda row: float(row["epsilon"])) for peer in rows]


def read_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """Read runs, and put those together that differ in their seeds alone; ascending by budget, then as given.

    Raises:
        ScenarioError: as `read_result`.
    """
    groups: list[tuple[Any, list[Result]]] = []
    for result in map(read_result, folders):
        key = _key(result)
        alike = [runs for group_key, runs in groups if group_key == key and _seeds(result) not in map(_seeds, runs)]
        if alike and result.finished:
            alike[0].append(result)
        else:
            groups.append((key, [result]))
    together = [RunGroup("", tuple(sorted(runs, key=_seeds))) for _, runs in groups]
    return _labelled(sorted(together, key=lambda group: group.budget))


def _key(result: Result) -> tuple[Any, ...]:
    """Return what runs have in common that differ in their seeds alone."""
    return seedless_hash(result.scenario), result.summary["runtime"], result.finished


def _seeds(result: Result) -> list[int]:
    return list(result.scenario.all_seeds().values())


def _labelled(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """Give each group a label: its name, with its budget where names repeat, or its folder where these do."""
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
    return [replace(group, label=_counted(label, group)) for label, group in zip(labels, groups, strict=True)]


def _counted(label: str, group: RunGroup) -> str:
    return label if len(group.runs) == 1 else f"{label} ({len(group.runs)} seeds)"


def _name(group: RunGroup) -> str:
    """Return the runs' name, or what their names begin with in common: `digits` of `digits-s1` and `digits-s2`."""
    names = [run.scenario.name for run in group.runs]
    if len(set(names)) == 1:
        return names[0]
    letters = takewhile(lambda characters: len(set(characters)) == 1, zip(*names, strict=False))
    return re.sub(r"[-_. ]*(s|seed)?[-_. ]*$", "", "".join(characters[0] for characters in letters)) or names[0]


def budget_name(budget: float) -> str:
    """Say a budget in a heading."""
    return "no privacy" if math.isinf(budget) else f"ε = {setting(budget)}"
