"""A sample of peers that is evaluated: who is in it, what is said of it, and what it leaves alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import Build, Tiny

from flower_privdec.api.comparing import compare
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment.evaluation import evaluate, peers_metrics, sampled
from flower_privdec.graph.participation import present
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.reporting.wording import peers_values, sample_error

SEVEN = ["n_peers=7", "rounds=4", "evaluation.every=2", "topology.name=ring", "algorithm.name=d-psgd"]
THREE = "evaluation.peers=3"


def lines(folder: Path) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read]


def test_figures_are_those_of_the_sampled_peers(build: Build) -> None:
    """Also if classes are measured: the mean, least and greatest of their values, and the error of that mean."""
    experiment = build(*SEVEN, THREE, "evaluation.by_class=true")
    rows = experiment.initial_state(experiment.cohort()).rows
    rows["x"] += torch.from_numpy(np.random.default_rng(0).normal(size=tuple(rows["x"].shape)))

    everybody = np.ones(7, dtype=bool)
    places = sampled(experiment, everybody, 7)
    each = peers_metrics(experiment, rows)
    found = evaluate(experiment, rows, 2)
    values = np.array(each["accuracy"])[places]
    assert found["peers_tried"] == {"peers": 3, "of": 7}
    assert found["accuracy"]["peer_mean"] == pytest.approx(values.mean(), abs=1e-12)
    assert (found["accuracy"]["peer_min"], found["accuracy"]["peer_max"]) == (values.min(), values.max())
    error = math.sqrt(values.var(ddof=1) / 3 * (1 - 3 / 7))
    assert found["accuracy"]["peer_error"] == pytest.approx(error, abs=1e-12)
    of_class = np.array(next(iter(each["by_class"].values()))["f1"])[places]
    assert next(iter(found["by_class"].values()))["f1"]["peer_max"] == of_class.max()

    whole = evaluate(build(*SEVEN), rows, 2)
    assert found["accuracy"]["mean_model"] == whole["accuracy"]["mean_model"]
    assert (found["loss"], found["consensus_distance"]) == (whole["loss"], whole["consensus_distance"])


def test_all_samples_together_err_as_is_said(build: Build) -> None:
    """Over many seeds the squared error of a sample's mean is the square of its standard error."""
    experiment = build(*SEVEN, THREE)
    everybody = np.ones(7, dtype=bool)
    values = np.arange(7.0) ** 2
    squares = []
    counts = np.zeros(7)
    for seed in range(400):
        other = experiment.scenario.model_copy(update={"seed": seed})
        places = sampled(replace(experiment, scenario=other), everybody, 7)
        counts[places] += 1
        squares.append((values[places].mean() - values.mean()) ** 2)
    assert counts == pytest.approx(np.full(7, 400 * 3 / 7), rel=0.25)
    assert np.mean(squares) == pytest.approx(values.var(ddof=1) / 3 * (1 - 3 / 7), rel=0.25)


def test_those_that_left_are_not_sampled(build: Build) -> None:
    """The others of the sample stay in it."""
    experiment = build(*SEVEN, THREE)
    everybody = np.ones(7, dtype=bool)
    before = sampled(experiment, everybody, 7)
    left = everybody.copy()
    left[before[0]] = False
    after = np.flatnonzero(left)[sampled(experiment, left, 6)]
    assert len(set(after) & set(before)) == 2
    assert before[0] not in after
    assert present(experiment.participation, 0).all()
    assert sampled(build(*SEVEN, "evaluation.peers=7"), everybody, 7) is None


def test_a_sample_changes_nothing_else_and_resumes(build: Build, tmp_path: Path) -> None:
    run(build(*SEVEN), tmp_path / "all")
    run(build(*SEVEN, THREE), tmp_path / "some")
    run(build(*SEVEN, THREE), tmp_path / "resumed", on_metrics=lambda metrics: metrics["round"] == 2)
    run(build(*SEVEN, THREE), tmp_path / "resumed", resume=True)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "some")
    every_model = load_file(tmp_path / "all" / "model.safetensors")
    same_models = load_file(tmp_path / "some" / "model.safetensors")
    assert every_model.keys() == same_models.keys()
    assert all(torch.equal(every_model[name], same_models[name]) for name in every_model)
    assert [line["loss"] for line in lines(tmp_path / "all")] == [line["loss"] for line in lines(tmp_path / "some")]

    summary = read_result(tmp_path / "some").summary
    assert "peers" not in summary
    assert "3 of 7 peers" in peers_values(summary)
    assert "standard error" in (sample_error(summary) or "")
    assert sample_error(read_result(tmp_path / "all").summary) is None


@pytest.mark.parametrize("name", ["worst-peer-accuracy", "accuracy.peer_max"])
def test_a_sample_has_no_worst_peer(tiny: Tiny, name: str) -> None:
    with raises(ScenarioError, "api.argument", name):
        compare(tiny(*SEVEN, THREE), metrics=[name], seeds=[1])
