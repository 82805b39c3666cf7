"""Tasks beyond classes follow one trajectory in the engine and in Flower's relay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flower_runs import final_rows, metrics, run_under_flower
from tasks import TASKS

from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario


@pytest.mark.parametrize("host", ["cohort", "relay"])
@pytest.mark.parametrize("task", TASKS)
def test_engine_and_flower_agree_on_every_task(
    tiny: Callable[..., Scenario], tmp_path: Path, task: str, host: str
) -> None:
    scenario = tiny(*TASKS[task], "algorithm={name: privsgp-vr, learning_rate: 0.2, table: dense}")
    run(Experiment.build(scenario), tmp_path / "engine")
    run_under_flower(scenario, tmp_path / "flower", host)
    ours, theirs = final_rows(tmp_path / "flower"), final_rows(tmp_path / "engine")
    assert ours.keys() == theirs.keys()
    for name, rows in ours.items():
        torch.testing.assert_close(rows, theirs[name], rtol=0, atol=1e-12)
    for line, expected in zip(metrics(tmp_path / "flower"), metrics(tmp_path / "engine"), strict=True):
        assert line.keys() == expected.keys()
        for name in scenario.task.metrics:
            assert line[name] == pytest.approx(expected[name])
