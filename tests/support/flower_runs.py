"""Runs of a scenario under Flower in this process, and whether two runs are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import Tensor

from flower_privdec.flower.apps.client_app import client_app
from flower_privdec.flower.apps.server_app import CohortRun, Relay, Sharded
from flower_privdec.flower.launch.local_grid import LocalGrid
from flower_privdec.scenario import Scenario
from tools.battery.together_grid import TogetherGrid

HOSTS = {"cohort": (CohortRun, 1), "relay": (Relay, 4), "sharded": (Sharded, 2)}


def run_under_flower(
    scenario: Scenario, out: Path, host: str, app: ClientApp | None = None, resume: bool = False
) -> Path:
    strategy, n_nodes = HOSTS[host]
    kind = TogetherGrid if host == "sharded" else LocalGrid
    grid = kind(app or client_app(), n_nodes, folder=out.with_name(out.name + "-nodes"))
    strategy(scenario, out, resume=resume).start(grid)
    return out


def final_rows(out: Path) -> dict[str, Tensor]:
    """Return the last state: the run folder's and, of relay, what each node kept for itself."""
    from safetensors.torch import load_file

    kept = sorted(out.with_name(out.name + "-nodes").glob("*/peers-*"), key=lambda path: int(path.name.split("-")[1]))
    last = [max(node.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])) for node in kept]
    rows = load_file(out / "checkpoint")
    for name, parts in (
        (name, [load_file(path)[name] for path in last]) for name in (load_file(last[0]) if last else ())
    ):
        together = torch.cat(_of_one_length(parts))
        assert name not in rows or torch.equal(rows[name], together)
        rows[name] = together
    return rows


def _of_one_length(parts: list[Tensor]) -> list[Tensor]:
    """Return tables as long as the longest: a node's are as long as its own peers need."""
    if parts[0].ndim < 3:
        return parts
    longest = max(part.shape[1] for part in parts)
    return [torch.nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1])) for part in parts]


def metrics(out: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = final_rows(one), final_rows(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])
    for line, expected in zip(metrics(one), metrics(other), strict=True):
        assert line["round"] == expected["round"]
        assert line["epsilon"] == expected["epsilon"]
        assert (line.get("shapley"), line.get("coalition_evaluations")) == (
            expected.get("shapley"),
            expected.get("coalition_evaluations"),
        )
        assert line["accuracy"] == pytest.approx(expected["accuracy"])
        assert line["consensus_distance"] == pytest.approx(expected["consensus_distance"])
