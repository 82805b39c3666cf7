"""A run that starts from another run's model: what fits, and which ledger counts both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from raising import raises
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_scenario import Tiny

from flower_privdec.common.errors import BudgetError, ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Agreement, Experiment
from flower_privdec.models import flatten
from flower_privdec.network.local.up import Up
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.ledger.spending import releases_in, runs_in
from flower_privdec.scenario import Scenario, parse_scenario, to_yaml

Start = Callable[..., Scenario]


@pytest.fixture
def first(tiny: Tiny, tmp_path: Path) -> Path:
    """Return the folder of a private run."""
    run(Experiment.build(tiny()), tmp_path / "first")
    return tmp_path / "first"


@pytest.fixture
def start(tiny: Tiny) -> Start:
    """Return what makes a scenario that starts from a run."""
    return lambda folder, *more: tiny(f"model={{from: {folder}}}", "privacy.epsilon=8", *more)


def entries(folder: Path) -> list[Any]:
    """Return what is charged in a run's folder."""
    return read_chain(folder / "ledger" / "digits.jsonl")[1]


def test_a_run_continues_anothers_model_in_its_ledger(first: Path, start: Start, tmp_path: Path) -> None:
    experiment = Experiment.build(start(first))
    mean = load_file(first / "model.safetensors")
    assert torch.equal(experiment.initial, torch.cat([mean["mean/1.weight"].flatten(), mean["mean/1.bias"]]))
    summary = run(experiment, tmp_path / "second")
    assert not (tmp_path / "second" / "ledger").exists()
    assert len(runs_in(entries(first))) == 2
    row = summary["privacy"][0]
    assert row["epsilon"] == pytest.approx(epsilon(releases_in(entries(first)), 1e-3), rel=1e-6)
    assert row["epsilon"] > 3
    assert row["scope"] == f"all runs in {first / 'ledger'}"
    assert summary["started_from"] == str(first)
    third = run(Experiment.build(start(tmp_path / "second", "privacy.epsilon=20")), tmp_path / "third")
    assert third["privacy"][0]["epsilon"] > row["epsilon"]
    assert len(runs_in(entries(first))) == 3


def test_a_scenario_starting_from_a_run_round_trips(first: Path, start: Start) -> None:
    scenario = start(first)
    assert "from: " in to_yaml(scenario)
    assert parse_scenario(to_yaml(scenario)) == scenario


def test_a_budget_already_spent_takes_no_step(first: Path, start: Start, tmp_path: Path) -> None:
    with raises(BudgetError, "ledger.spent-elsewhere"):
        run(Experiment.build(start(first, "privacy.epsilon=3")), tmp_path / "second")


def test_a_copied_run_is_charged_in_the_originals_ledger(first: Path, start: Start, tmp_path: Path) -> None:
    copytree(first, tmp_path / "copy")
    run(Experiment.build(start(tmp_path / "copy")), tmp_path / "second")
    assert (len(runs_in(entries(first))), len(runs_in(entries(tmp_path / "copy")))) == (2, 1)
    with raises(ScenarioError, "origin.ledger", names="privacy.ledger"):
        Experiment.build(start(first, f"privacy.ledger={tmp_path / 'copy' / 'ledger'}"))
    first.rename(tmp_path / "moved")  # and is found beside a run that was moved
    run(Experiment.build(start(tmp_path / "moved", "privacy.epsilon=20")), tmp_path / "third")
    assert len(runs_in(entries(tmp_path / "moved"))) == 3


def test_a_run_without_its_ledger_is_not_started_from(first: Path, start: Start, tmp_path: Path) -> None:
    rmtree(first / "ledger")
    with raises(ScenarioError, "origin.ledger", names=str(first)):
        Experiment.build(start(first))
    run(Experiment.build(start(tmp_path / "first", "privacy=none")), tmp_path / "open")  # claims no ε
    with raises(ScenarioError, "origin.not-private"):
        Experiment.build(start(tmp_path / "open"))


def test_a_ledger_begun_again_is_refused(first: Path, tiny: Tiny, start: Start, tmp_path: Path) -> None:
    rmtree(first / "ledger")
    run(Experiment.build(tiny("seed=9")), tmp_path / "other")
    copytree(tmp_path / "other" / "ledger", first / "ledger")
    with raises(ScenarioError, "origin.ledger"):
        Experiment.build(start(first))


def test_an_edited_model_is_not_started_from(first: Path, start: Start) -> None:
    path = first / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    models = load_file(path)
    models["mean/1.bias"][0] += 1e-6
    save_file(models, path, facts)
    with raises(ScenarioError, "origin.edited"):
        Experiment.build(start(first))
    (first / "origin.json").unlink()
    with raises(ScenarioError, "origin.edited"):
        Experiment.build(start(first))


def test_other_data_have_a_ledger_of_their_own(first: Path, start: Start, tmp_path: Path) -> None:
    labels = "data={dataset: breast-cancer, batch: {size: 12}}"
    with raises(ScenarioError, "origin.misfit", names="1.weight"):
        Experiment.build(start(first, labels))
    experiment = Experiment.build(start(first))
    assert experiment.origin is not None
    renamed = [
        replace(one, source="else", tested=tested) for one in experiment.origin.runs for tested in (one.tested, "")
    ]
    with raises(ScenarioError, "origin.renamed", names="else"):
        replace(experiment.origin, runs=tuple(renamed[:1])).ledger(experiment.scenario, experiment.public)
    assert replace(experiment.origin, runs=tuple(renamed[1:])).ledger(experiment.scenario, experiment.public) is None


def test_weights_without_privacy_need_other_data(tiny: Tiny, start: Start, tmp_path: Path) -> None:
    run(Experiment.build(tiny("privacy=none")), tmp_path / "open")
    with raises(ScenarioError, "origin.not-private", names="digits"):
        Experiment.build(start(tmp_path / "open"))
    other = Agreement.of(start(tmp_path / "open", "privacy=none"))
    assert other.inherited is None


def test_an_unusable_start_is_refused_in_one_line(first: Path, tiny: Tiny, start: Start, tmp_path: Path) -> None:
    with raises(ScenarioError, "origin.not-a-run", names="absent"):
        Agreement.of(start(tmp_path / "absent"))
    with raises(ScenarioError, "origin.misfit", names="mlp|weight"):
        Agreement.of(tiny(f"model={{from: {first}, name: mlp}}", "privacy.epsilon=8"))
    run(Experiment.build(tiny("privacy=none")), tmp_path / "half", on_metrics=lambda metrics: metrics["round"] == 2)
    assert flatten(Agreement.of(start(tmp_path / "half", "privacy=none")).module).any()  # one that was stopped is whole
    (tmp_path / "half" / "summary.json").unlink()
    with raises(ScenarioError, "origin.unfinished", names="half"):
        Agreement.of(start(tmp_path / "half", "privacy=none"))


def test_peers_with_own_ledgers_refuse_the_same_data(first: Path, start: Start, tmp_path: Path) -> None:
    with raises(ScenarioError, "origin.own-ledgers", names=str(first)):
        Up(start(first), tmp_path / "network")


def test_a_run_that_went_on_is_another_start(first: Path, tiny: Tiny, start: Start) -> None:
    before = Experiment.build(start(first)).own.run.id
    facts = json.loads((first / "summary.json").read_text())
    assert facts["rounds"] == 6
    from flower_privdec.experiment.recorder import with_more_rounds

    run(Experiment.build(with_more_rounds(tiny("rounds=8", "privacy.epsilon=4"), first)), first, resume=True)
    assert Experiment.build(start(first)).own.run.id != before
