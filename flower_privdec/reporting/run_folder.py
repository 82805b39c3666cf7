"""Read back the folder a run left, finished or still under way."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_privdec.common.formatting import one_line, shown
from flower_privdec.engine.recorder import read_metrics
from flower_privdec.errors import ScenarioError
from flower_privdec.scenario import Scenario, load_scenario

NEEDED = (
    *("name", "algorithm", "runtime", "n_peers", "rounds", "seed", "loss", "consensus_distance", "privacy"),
    *("wall_seconds", "peer_steps_per_second"),
)


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
    metrics = read_metrics(folder)
    summary = _read_summary(folder / "summary.json", scenario) or _unfinished(scenario, metrics)
    summary["metrics"] = scenario.task.described()
    return Result(folder, scenario, metrics, summary)


def _read_summary(path: Path, scenario: Scenario) -> dict[str, Any] | None:
    """Return what a finished run says of itself; None of one that has not come so far."""
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_bytes())
        missing = [key for key in [*NEEDED, *scenario.task.kinds()] if key not in summary]
        if not isinstance(summary, dict) or missing:
            raise ValueError(f"it lacks {', '.join(missing)}" if missing else "it is no mapping")
        _check_summary(summary, scenario)
    except (ValueError, TypeError, RecursionError) as error:
        raise ScenarioError(
            f"{path}: is damaged ({one_line(error)}); `privdec run {path.parent}/scenario.yaml --out {path.parent} "
            "--resume` writes it again"
        ) from error
    return {**summary, "finished": True}


def _check_summary(summary: dict[str, Any], scenario: Scenario) -> None:
    """Refuse what no run of a scenario says of itself.

    Raises:
        ValueError: naming what is wrong.
    """
    expected = {"name": scenario.name, "algorithm": scenario.algorithm.name, "n_peers": scenario.n_peers}
    expected |= {"rounds": scenario.rounds, "seed": scenario.seed}
    for name, value in expected.items():
        if summary[name] != value:
            raise ValueError(f"its {name} is {shown(summary[name], 40)} and the scenario's {shown(value, 40)}")
    for name in ("loss", *scenario.task.kinds()):
        if not isinstance(summary[name], dict):
            raise ValueError(f"its {name} is {shown(summary[name], 40)}")
    rows = summary["privacy"]
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"epsilon", "delta"} <= set(row) for row in rows
    ):
        raise ValueError(f"its privacy is {shown(rows, 40)}")


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
