"""Read back the folder a run left, finished or still under way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario, load_scenario


@dataclass(frozen=True)
class Result:
    """What one run's folder says.

    Attributes:
        folder: where it lies.
        scenario: with every default visible.
        metrics: the lines of metrics.jsonl, in order of the rounds.
        summary: summary.json; of an unfinished run, the same keys as far as they are known, with
            `finished` False, `rounds_done` and `epsilon_so_far` (largest of the peers).
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
        ScenarioError: when it is not a run's folder, naming what is missing, or a file in it is damaged.
    """
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: is not a folder; give a folder that `privdec run` left")
    if not (folder / "scenario.yaml").is_file():
        raise ScenarioError(
            f"{folder}: has no scenario.yaml, so it is not a run; give a folder that `privdec run` left"
        )
    scenario = load_scenario(folder / "scenario.yaml")
    metrics = _read_metrics(folder / "metrics.jsonl")
    summary = _read_summary(folder / "summary.json") or _unfinished(scenario, metrics)
    summary["metrics"] = scenario.task.described()
    return Result(folder, scenario, metrics, summary)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl; a last line that is being written is left for the next time."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    metrics = []
    for i, line in enumerate(lines):
        try:
            metrics.append(json.loads(line))
        except ValueError as error:
            if i < len(lines) - 1:
                raise ScenarioError(f"{path}:{i + 1}: is not a line of JSON ({error}); the file is damaged") from error
    return metrics


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ScenarioError(f"{path}: is not JSON ({error}); the file is damaged: run again") from error
    return {**summary, "finished": True}


def _unfinished(scenario: Scenario, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = metrics[-1] if metrics else {}
    return {
        "name": scenario.name,
        "algorithm": scenario.algorithm.name,
        "runtime": None,
        "n_peers": scenario.n_peers,
        "rounds": scenario.rounds,
        "rounds_done": last.get("round", 0),
        "seed": scenario.seed,
        **({} if scenario.seeds is None else {"seeds": scenario.all_seeds()}),
        **{name: last.get(name) for name in scenario.task.kinds()},
        "loss": last.get("loss"),
        "consensus_distance": last.get("consensus_distance"),
        "privacy": [],
        "epsilon_so_far": last.get("epsilon"),
        "wall_seconds": last.get("seconds"),
        "peer_steps_per_second": None,
        "finished": False,
    }
