"""The training loss: what it is, and where no one may have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from raising import raises
from tiny_scenario import Build, Tiny

from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement
from flower_privdec.experiment.recorder import Recorder
from flower_privdec.models import unflatten
from flower_privdec.peer.trainer import network_mixing

ASKED = "evaluation.training_loss=true"
UNEQUAL = "data.partition={kind: sizes, sizes: [20, 30, 40, 50]}"
HINGE = ["data={dataset: breast-cancer, batch: {size: 8}}", "model={name: linear}", "task.loss=hinge"]


@pytest.mark.parametrize("settings", [["model={name: mlp, hidden: [6]}"], HINGE], ids=["mlp", "hinge"])
def test_training_loss_is_the_mean_of_peers_means(build: Build, tmp_path: Path, settings: list[str]) -> None:
    """In a run's lines, its summary and a plain computation; of peers that have unequally many examples."""
    settings = [*settings, UNEQUAL, "privacy=none", "rounds=4"]
    experiment = build(*settings, ASKED)
    summary = run(experiment, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["training_loss"] == summary["training_loss"]
    assert lines[0]["training_loss"] != lines[-1]["training_loss"]
    rows = testing.run_rounds(build(*settings), 4).state.rows
    module, own = unflatten(experiment.module.double(), experiment.algorithm.mean_model(rows)), experiment.own.examples
    with torch.no_grad():
        losses = experiment.loss.value(module(own.x.double()), own.y)
    expected = sum(float(losses[part].mean()) for part in own.parts) / 4
    assert lines[-1]["training_loss"]["mean_model"] == pytest.approx(expected, rel=1e-9)


def test_beside_privacy_it_is_refused_unless_ignored(tiny: Tiny, build: Build, tmp_path: Path) -> None:
    with raises(ScenarioError, "evaluation.training-loss", names="evaluation.private=ignored"):
        tiny(ASKED)
    experiment = build(ASKED, "evaluation.private=ignored")
    with raises(testing.BrokenLaw, "law.leak"):
        testing.assert_nothing_else_leaves(experiment)
    assert "are covered by no ε" in run(experiment, tmp_path / "run")["evaluation_private"]
    assert "training_loss" not in run(build(), tmp_path / "without")


def test_it_is_refused_if_no_process_has_everything(tiny: Tiny, tmp_path: Path) -> None:
    agreement = Agreement.of(tiny(ASKED, "evaluation.private=ignored"))
    for refusing in (lambda: Recorder(agreement, None, tmp_path, "flower"), lambda: network_mixing(agreement)):
        with raises(ScenarioError, "evaluation.no-examples", names="evaluation.training_loss"):
            refusing()
