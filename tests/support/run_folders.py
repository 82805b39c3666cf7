"""Folders as a run leaves them, made up in an instant for the tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flower_privdec.scenario import Scenario, parse_scenario, to_yaml

SCENARIO = """
name: small
seed: 1
n_peers: 4
rounds: 40
data: {dataset: digits, batch: {size: 20}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 1.0}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 10}
"""


def small_scenario(*overrides: str) -> Scenario:
    return parse_scenario(SCENARIO, overrides=overrides)


def metrics_line(round_index: int, epsilon: float | str = 2.0, accuracy: float = 0.9) -> dict[str, Any]:
    return {
        "round": round_index,
        "accuracy": {
            "mean_model": accuracy,
            "peer_mean": accuracy - 0.02,
            "peer_min": accuracy - 0.05,
            "peer_max": accuracy - 0.01,
        },
        "loss": {"mean_model": 0.4},
        "consensus_distance": 1.0 / round_index,
        "epsilon": epsilon,
        "seconds": 0.1 * round_index,
    }


def privacy_row(peer: int, epsilon: float | str = 2.0, **changes: Any) -> dict[str, Any]:
    row = {
        "peer": peer,
        "epsilon": epsilon,
        "delta": 1e-3,
        "unit": "example",
        "adjacency": "zero-out",
        "calibration": "rigorous",
        "claimed_epsilon": None,
    }
    return row | changes


def summary_of(
    scenario: Scenario, privacy: list[dict[str, Any]] | None = None, accuracy: float = 0.9
) -> dict[str, Any]:
    last = metrics_line(scenario.rounds, accuracy=accuracy)
    return {
        "name": scenario.name,
        "algorithm": scenario.algorithm.name,
        "runtime": "engine",
        "n_peers": scenario.n_peers,
        "rounds": scenario.rounds,
        "seed": scenario.seed,
        "metrics": scenario.task.described(),
        **{name: last.get(name, last["accuracy"]) for name in scenario.task.kinds()},
        **{key: last[key] for key in ("accuracy", "loss", "consensus_distance")},
        "privacy": privacy or [privacy_row(peer) for peer in range(scenario.n_peers)],
        "noise": "simulated: seeded and reproducible",
        "wall_seconds": 4.0,
        "peer_steps_per_second": 40.0,
    }


def make_run(
    folder: Path,
    *overrides: str,
    done: int | None = None,
    epsilon: float | str = 2.0,
    privacy: list[dict[str, Any]] | None = None,
    accuracy: float = 0.9,
) -> Path:
    """Make a run's folder; with `done`, one that has reached only that round."""
    scenario = small_scenario(*overrides)
    folder.mkdir(parents=True)
    (folder / "scenario.yaml").write_text(to_yaml(scenario), encoding="utf-8")
    rounds = range(10, (scenario.rounds if done is None else done) + 1, 10)
    lines = [json.dumps(metrics_line(k, epsilon, accuracy)) + "\n" for k in rounds]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if done is None:
        (folder / "summary.json").write_text(json.dumps(summary_of(scenario, privacy, accuracy)), encoding="utf-8")
    return folder
