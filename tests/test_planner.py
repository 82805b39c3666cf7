"""The planner: noise and ε of every peer, cost, warnings; nothing is charged or written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_privdec import console
from flower_privdec.experiment import Experiment
from flower_privdec.models import build_model
from flower_privdec.planner import (
    best_signal,
    cost_warnings,
    make_plan,
    memory_bytes,
    network_warnings,
    noise_std,
    outputs_per_example,
    peer_rows,
    privacy_warnings,
)

Build = Callable[..., Experiment]


def test_plan_has_the_documented_shape_and_writes_nothing(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(build())
    assert set(plan) >= {"peers", "optimal_rounds", "memory_bytes", "seconds", "topology", "warnings"}
    keys = {"peer", "sigma", "noise_multiplier", "epsilon", "epsilon_after_quarters"}
    assert set(plan["peers"][0]) >= keys | {"claimed_epsilon", "mu_total", "mu_0", "mu_bar"}
    assert plan["topology"] == {"joint_connectivity": 2, "spectral_gap": pytest.approx(1.0)}
    assert plan["seconds"] > 0
    assert json.loads(json.dumps(plan, allow_nan=False))["rounds"] == 6
    assert list(tmp_path.iterdir()) == []


def test_sigma_is_the_noise_of_the_averaged_gradient(build: Build) -> None:
    experiment = build("privacy.clip_norm=[1,2,3,4]")
    assert experiment.plan is not None
    for row in peer_rows(experiment):
        clip, batch = row["peer"] + 1, 12
        assert row["sigma"] == pytest.approx([row["noise_multiplier"] * clip / batch] * 3)
    assert noise_std(experiment, 0) == pytest.approx([row["sigma"][0] for row in peer_rows(experiment)])


def test_epsilon_grows_by_quarters_up_to_the_budget(build: Build) -> None:
    for row, budget in zip(peer_rows(build("privacy.epsilon=[0.5,1,2,3]")), (0.5, 1, 2, 3), strict=True):
        quarters = row["epsilon_after_quarters"]
        assert quarters == sorted(quarters)
        assert quarters[-1] == row["epsilon"] <= budget
        assert row["epsilon"] == pytest.approx(budget, rel=0.01)
        assert row["delta"] == 1e-3


def test_without_privacy_epsilon_is_infinite_and_said(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(build("privacy=none", "algorithm.name=local"))
    assert plan["peers"][0]["epsilon"] == "inf"
    assert plan["peers"][0]["sigma"] == [0.0, 0.0, 0.0]
    assert plan["topology"] is None
    assert "privacy is none" in plan["warnings"][0]
    console.print_plan(plan, as_json=False)
    assert "∞" in capsys.readouterr().out


def test_equal_peers_are_one_row_of_text(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(build("privacy.epsilon=[1,1,1,3]"))
    console.print_plan(plan, as_json=False)
    shown = capsys.readouterr().out
    assert "\n 0-2 " in shown
    assert "\n 3 " in shown
    console.print_plan(plan, as_json=True)
    assert json.loads(capsys.readouterr().out) == plan


def test_memory_counts_state_and_data(build: Build) -> None:
    small, large = build(), build("n_peers=8")
    d, each = small.initial.numel(), 8
    data = small.dataset.x_train.nbytes + small.dataset.x_test.nbytes
    assert memory_bytes(small) >= 3 * 4 * d * each + data
    assert memory_bytes(large) - memory_bytes(small) >= 3 * 4 * d * each


@pytest.mark.parametrize(("hidden", "outputs"), [([100], 784 + 100 + 100 + 10), ([5, 6], 784 + 5 + 5 + 6 + 6 + 10)])
def test_outputs_of_all_layers_are_counted(hidden: list[int], outputs: int) -> None:
    module = build_model("mlp", (1, 28, 28), 10, seed=1, hidden=hidden)
    assert outputs_per_example(module, (1, 28, 28)) == outputs


def test_best_signal_follows_its_formula(build: Build) -> None:
    experiment = build()
    sigma, d = float(noise_std(experiment, 0)[0]), experiment.initial.numel()
    assert best_signal(experiment) == pytest.approx(math.sqrt(4 * 6) / (sigma * math.sqrt(d)))
    alone = build("algorithm.name=local")
    assert best_signal(alone) == pytest.approx(best_signal(experiment) / 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["privacy.delta=0.02"], "δ = 0.02 >= 1/J = 1/60 (peers 0-3)"),
        (["privacy.epsilon=20"], "ε reaches 20.0, above 10"),
        (["privacy.epsilon=0.05"], "signal to noise over the whole run is"),
        (["privacy=none"], "privacy is none"),
    ],
)
def test_unsound_privacy_is_warned_of(build: Build, settings: list[str], expected: str) -> None:
    assert any(expected in warning for warning in privacy_warnings(build(*settings)))


def test_sound_settings_are_not_warned_of(build: Build) -> None:
    experiment = build("rounds=40", "data.samples=1440", "data.batch.size=90")
    assert privacy_warnings(experiment) == []
    assert network_warnings(experiment, {"joint_connectivity": 2}) == []
    assert cost_warnings(1 << 20, 0.1) == []


def test_network_and_cost_are_warned_of(build: Build) -> None:
    partial = build("participation={kind: uniform, fraction: 0.5}")
    assert "2 of 4 peers are active" in network_warnings(partial, {"joint_connectivity": 2})[0]
    assert "raise it" in network_warnings(build(), {"joint_connectivity": 9})[0]
    slow, large = cost_warnings(1 << 60, 0.9)
    assert slow == "evaluation takes 90 % of the time; raise evaluation.every"
    assert large.startswith("needs about 1.05e+06 TiB and this machine has ")
