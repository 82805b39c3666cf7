"""PrivSGP-VR's best number of rounds: eq. 12 from given constants, and constants estimated on public data."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from paths import ROOT
from tiny_scenario import Build

from flower_privdec.experiment import Experiment
from flower_privdec.models import build_model
from flower_privdec.planner.optimal_rounds import (
    Objective,
    find_constants,
    heterogeneity,
    optimum,
    public_sample,
    smoothness,
)
from flower_privdec.planner.peers import noise_std
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.mechanism.paper import moments_sigma
from flower_privdec.reporting import console
from flower_privdec.scenario import load_scenario

SCENARIOS = ROOT / "scenarios"


def test_the_papers_resnet_18_has_3120_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    d = sum(p.numel() for p in build_model("resnet18-gn", (3, 32, 32), 10, seed=1).parameters())
    stand_in = ["data={dataset: digits, batch: {sampling: poisson, size: 9}}", "model={name: softmax}"]
    settings = [*stand_in, f"plan.dimension={d}", f"plan.dataset_size={50000 // 16}", "algorithm.table=factored"]
    scenario = load_scenario(SCENARIOS / "privsgp-vr-resnet18.yaml", [*settings, "compute.device=cpu", "rounds=4"])
    assert (d, scenario.n_peers) == (11173962, 16)
    found = optimum(Experiment.build(scenario))
    assert found["optimal_rounds"] == 3120
    assert [3.0, 3120] in found["optimal_rounds_curve"]
    assert found["optimal_rounds_constants"]["heterogeneity"] == {"value": 500000, "from": "given"}
    assert found["accountant"] is None
    epsilons, best = zip(*found["optimal_rounds_curve"], strict=True)
    assert (epsilons[0], epsilons[-1]) == (0.25, 8)
    assert np.allclose(np.array(best), 3120.06 * np.array(epsilons) ** 2 / 9, atol=0.51)


def test_constants_are_estimated_only_on_public_data(build: Build) -> None:
    experiment = build()
    found = find_constants(experiment)
    examples = experiment.own.examples
    blind = dataclasses.replace(examples, x=torch.full_like(examples.x, math.nan))
    own = dataclasses.replace(experiment.own, examples=blind)
    assert find_constants(dataclasses.replace(experiment, own=own)) == found
    x0 = experiment.initial
    assert found["initial_norm_squared"] == (pytest.approx(float(x0 @ x0)), "scenario")
    assert found["dimension"] == (650, "scenario")
    assert found["dataset_size"] == (60, "scenario")
    assert found["gradient_bound"] == (1, "clip norm")
    zeros = find_constants(build("model.init=zeros", "plan={smoothness: 2}"))
    assert zeros["initial_gap"] == (pytest.approx(math.log(10)), "estimated")
    assert zeros["smoothness"] == (2, "given")


def test_smoothness_is_the_largest_eigenvalue_of_the_hessian(build: Build) -> None:
    experiment = build("model={name: mlp, hidden: [3], activation: tanh}", "data.test_samples=40")
    objective = public_sample(experiment)
    assert len(objective.y) == 40
    names = [name for name, _ in experiment.module.named_parameters()]
    shapes = [p.shape for p in experiment.module.parameters()]

    def loss(row: torch.Tensor) -> torch.Tensor:
        parts = row.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        outputs = torch.func.functional_call(experiment.module, named, (objective.x,))
        return torch.nn.functional.cross_entropy(outputs, objective.y)

    hessian = torch.autograd.functional.hessian(loss, experiment.initial)
    largest = float(torch.linalg.eigvalsh(hessian).abs().max())
    assert smoothness(experiment, objective) == pytest.approx(largest, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("label_partitions")
def test_heterogeneity_measures_skew_not_noise_of_small_shares(build: Build) -> None:
    def of(*settings: str) -> float:
        experiment = build("data.test_samples=357", *settings)
        return heterogeneity(experiment, public_sample(experiment))

    skewed = of("data.partition={kind: shards, shards_per_peer: 2}")
    assert skewed > 0.1
    assert of() < 0.05 * skewed
    assert of("data.partition={kind: sizes, sizes: [90, 60, 60, 30]}") < 0.05 * skewed


@pytest.mark.parametrize(
    "setting",
    [
        "privacy=none",
        "algorithm={name: d-psgd, learning_rate: 0.5}",
        "privacy={noise_multiplier: 1.0, delta: 1e-3}",
    ],
)
def test_no_budget_or_no_push_sum_no_optimum(build: Build, setting: str) -> None:
    found = optimum(build(setting))
    assert found["optimal_rounds"] is None
    assert found["optimal_rounds_curve"] == []
    assert found["optimal_rounds_note"] is None


def test_a_constant_that_cannot_be_estimated_is_asked_for(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = build("data.test_samples=6")
    found = optimum(experiment)
    assert found["optimal_rounds"] is None
    assert found["optimal_rounds_note"].startswith("plan.heterogeneity is missing and 6 test examples are too few")
    console.print_plan(make_plan(experiment), as_json=False, verbose=True)
    assert "best rounds  not known: plan.heterogeneity" in capsys.readouterr().out
    hinge = build(
        "data={dataset: breast-cancer, batch: {sampling: poisson, size: 12}}",
        "model={name: linear}",
        "task={loss: hinge}",
    )
    assert "no curvature" in optimum(hinge)["optimal_rounds_note"]


def test_unequal_peers_count_as_eq_11_makes_their_noise(build: Build) -> None:
    settings = ["data.partition={kind: sizes, sizes: [120, 60, 30, 30]}", "privacy.epsilon=[1,2,3,3]"]
    J = find_constants(build(*settings))["dataset_size"][0]
    epsilons, sizes = np.array([1, 2, 3, 3]), np.array([120, 60, 30, 30])
    assert (epsilons**-2.0).sum() / J**2 == pytest.approx((epsilons**-2.0 * sizes**-2.0).sum())


def test_the_accountants_c_2_makes_eq_11_its_noise(build: Build) -> None:
    experiment = build("privacy.clip_norm=2")
    found = optimum(experiment)
    sigma = moments_sigma(3, 1e-3, rounds=6, dataset_size=60, clip_norm=2, c_2=found["accountant"]["c_2"])
    assert sigma == pytest.approx(noise_std(experiment, 0)[0])
    assert found["optimal_rounds_constants"]["c_2"]["value"] == 1


def test_the_curvature_of_attention_is_estimated(build: Build) -> None:
    found = optimum(build("model={module: 'user_models:attending'}"))
    assert found["optimal_rounds_note"] is None
    assert found["optimal_rounds_constants"]["smoothness"]["from"] == "estimated"


def test_a_failing_estimate_is_one_line_of_the_plan(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Objective, start: torch.Tensor) -> float:
        raise RuntimeError("derivative for aten::some_backward is not implemented\nand more")

    monkeypatch.setattr(Objective, "curvature", fails)
    note = make_plan(build())["optimal_rounds_note"]
    assert note.startswith("plan.smoothness is missing and cannot be estimated (RuntimeError: derivative for aten::")
    assert "\n" not in note
