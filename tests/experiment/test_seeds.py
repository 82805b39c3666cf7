"""A seed for each kind of draws: what each decides, what it leaves, and that a run's keys follow from all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from run_folders import make_run
from tiny_scenario import Build, Tiny

from flower_privdec.api.comparing import compare
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.run_folder import read_groups
from flower_privdec.scenario import numbers_hash, parse_scenario, scenario_hash, to_yaml

DRAWN = [
    "topology={name: erdos-renyi, probability: 0.5}",
    "n_peers=8",
    "participation={kind: uniform, fraction: 0.5}",
    "data.batch.size=5",
]


def drawn_by(experiment: Experiment) -> dict[str, list[Any]]:
    """Return what is drawn, by the seed that should decide it."""
    parts = experiment.own.examples.parts
    assert experiment.mixing is not None
    return {
        "data": [[part.tolist() for part in parts], experiment.public.y.tolist()],
        "model": [experiment.initial.tolist()],
        "run": [
            [experiment.own.sampler.batch(k, range(8)).index.tolist() for k in range(3)],
            [experiment.participation.active(k).tolist() for k in range(6)],
            [experiment.mixing.matrix(k).dense().tolist() for k in range(6)],
        ],
    }


@pytest.mark.parametrize("draws", ["data", "model", "run"])
def test_a_seed_changes_only_its_own_draws(build: Build, draws: str) -> None:
    """Without privacy, where batches are drawn by the seed alone."""
    before = drawn_by(build(*DRAWN, "privacy=none"))
    after = drawn_by(build(*DRAWN, "privacy=none", f"seeds.{draws}=7"))
    for name, values in before.items():
        if name == draws:
            assert all(one != other for one, other in zip(values, after[name], strict=True)), name
        else:
            assert values == after[name], name


@pytest.mark.parametrize("draws", ["data", "model", "run"])
def test_with_privacy_every_seed_is_in_the_runs_keys(build: Build, draws: str) -> None:
    before, after = build(*DRAWN), build(*DRAWN, f"seeds.{draws}=7")
    assert numbers_hash(before.scenario) != numbers_hash(after.scenario)
    assert not set(before.own.keys.values()) & set(after.own.keys.values())
    assert before.own.run.id != after.own.run.id
    kept = [name for name in ("data", "model") if name != draws]
    assert all(drawn_by(before)[name] == drawn_by(after)[name] for name in kept)


def test_seed_fills_in_for_missing_seeds_and_changes_nothing(build: Build) -> None:
    whole, spelled = build("seed=5"), build("seed=9", "seeds={data: 5, model: 5, run: 5}")
    assert spelled.scenario.all_seeds() == whole.scenario.all_seeds() == {"data": 5, "model": 5, "run": 5}
    assert build("seed=9", "seeds={model: 5}").scenario.all_seeds() == {"data": 9, "model": 5, "run": 9}
    assert scenario_hash(whole.scenario) == scenario_hash(spelled.scenario)
    assert whole.own.keys == spelled.own.keys
    states = []
    for experiment in (whole, spelled):
        cohort = experiment.cohort()
        engine = Engine(experiment.algorithm, cohort, experiment.initial_state(cohort))
        for _ in range(4):
            engine.round()
        states.append(engine.state.rows["x"])
    assert torch.equal(*states)


def test_seeds_are_read_back_and_a_later_seed_wins(tiny: Tiny) -> None:
    scenario = tiny("seed=3", "seeds.run=8")
    again = parse_scenario(to_yaml(scenario))
    assert again == scenario
    assert parse_scenario(to_yaml(scenario), overrides=["seed=4"]).all_seeds() == {"data": 4, "model": 4, "run": 8}
    assert "seeds" not in to_yaml(tiny("seed=3"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("seeds.runs=3", "unknown key 'seeds.runs'; did you mean 'run'"),
        ("seeds.run=-1", "seeds.run=-1 must be >= 0"),
        ("seeds.data=1.5", "seeds.data=1.5 must be"),
        ("seeds=3", "seeds=3 must be"),
    ],
)
def test_wrong_seeds_are_refused_in_one_line(tiny: Tiny, settings: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        tiny(settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_comparison_over_seeds_that_change_nothing_is_refused(tiny: Tiny) -> None:
    with raises(ScenarioError, "study.seeds-fixed", "seeds data, model and run"):
        compare(tiny("seeds={data: 1, model: 1, run: 1}"), seeds=[1, 2])


def test_a_summary_and_a_report_say_the_seeds(build: Build, tmp_path: Path) -> None:
    summary = run(build("seeds={run: 4, data: 2}", "rounds=2"), tmp_path / "run", lean=True)
    assert (summary["seed"], summary["seeds"]) == (3, {"data": 2, "model": 3, "run": 4})
    (group,) = read_groups([make_run(tmp_path / str(k), f"seeds.run={k}") for k in (2, 1, 3)])
    assert group.seeds == "data 1; model 1; run 1-3"
    assert [result.scenario.seed_of("run") for result in group.runs] == [1, 2, 3]
