"""The planner: noise and ε of every peer, cost, warnings; nothing is charged or written."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hosting import hosting
from raising import raises
from tiny_scenario import Build

from flower_privdec.cli import main
from flower_privdec.common import machine
from flower_privdec.common.errors import ScenarioError
from flower_privdec.experiment import memory_estimate
from flower_privdec.experiment.memory_estimate import memory_need, outputs_per_example, table_bytes
from flower_privdec.models import build_model
from flower_privdec.planner.pairs import pair_facts
from flower_privdec.planner.peers import noise_std, peer_rows
from flower_privdec.planner.plan import make_plan
from flower_privdec.planner.timing import estimate_seconds
from flower_privdec.planner.warnings import best_signal, cost_warnings, network_warnings, privacy_warnings
from flower_privdec.privacy.mechanism.paper import gdp_mu, gdp_mu_0
from flower_privdec.reporting import console
from flower_privdec.scenario import parse_scenario, scenario_hash, to_yaml

PAPER = "privacy.calibration=paper"


def vr(table: str, *options: str) -> str:
    """Return the setting of PrivSGP-VR with a kind of table."""
    return "algorithm={name: privsgp-vr, learning_rate: 0.5, table: " + ", ".join((table, *options)) + "}"


def named(algorithm: str) -> str:
    """Return the setting of an algorithm with its defaults."""
    return "algorithm={name: " + algorithm + ", learning_rate: 0.5}"


def test_plan_has_the_documented_shape_and_writes_nothing(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(build())
    assert set(plan) >= {"peers", "optimal_rounds", "memory_bytes", "seconds", "topology", "warnings"}
    keys = {"peer", "sigma", "noise_multiplier", "epsilon", "epsilon_after_quarters"}
    assert set(plan["peers"][0]) >= keys | {"claimed_epsilon", "mu_total", "mu_0", "mu_bar"}
    assert plan["topology"] == {"joint_connectivity": 2, "spectral_gap": pytest.approx(1.0), "final_mixing": 3}
    assert plan["seconds"] > 0
    assert json.loads(json.dumps(plan, allow_nan=False))["rounds"] == 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("algorithm", ["privsgp", "fedavg, local_steps: 3"])
def test_sigma_depends_on_rounds_not_steps(build: Build, algorithm: str) -> None:
    settings = [f"algorithm={{name: {algorithm}, learning_rate: 0.5}}", "privacy.schedule={rho_c: 1.5, rho_mu: 3.0}"]
    experiment = build(*settings)
    protection = experiment.own.protection
    assert protection is not None
    each = experiment.algorithm.steps_per_round
    shape = np.array([(1.5 * 3.0) ** (-k / 6) for k in (0, 3, 5)])  # C_k and σ_k / C_k fall together
    for row in peer_rows(experiment):
        first = protection.clip_norm(0)[row["peer"]] * protection.noise_multiplier(0)[row["peer"]] / 12
        assert row["sigma"] == pytest.approx((first * shape).tolist())
    assert len(protection.clip_norms) == 6 * each


def test_a_signal_counts_the_steps_of_all_rounds(build: Build) -> None:
    """At one noise, τ steps a round add up to what τ rounds of one step do."""
    given = "privacy={noise_multiplier: 2.0, delta: 1.0e-3}"
    tau = best_signal(build("algorithm={name: fedavg, learning_rate: 0.5, local_steps: 3}", given))
    one = best_signal(build("algorithm={name: fedavg, learning_rate: 0.5, local_steps: 1}", given, "rounds=18"))
    assert tau == pytest.approx(one)


def test_sigma_is_the_noise_of_the_averaged_gradient(build: Build) -> None:
    experiment = build("privacy.clip_norm=[1,2,3,4]")
    assert experiment.own.protection is not None
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
    console.print_plan(plan, as_json=False, verbose=True)
    assert "∞" in capsys.readouterr().out


def test_equal_peers_are_one_row_of_text(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(build("privacy.epsilon=[1,1,1,3]"))
    console.print_plan(plan, as_json=False, verbose=True)
    shown = capsys.readouterr().out
    assert "\n 0-2 " in shown
    assert "\n 3 " in shown
    console.print_plan(plan, as_json=True)
    assert json.loads(capsys.readouterr().out) == plan


def test_memory_counts_state_and_data(build: Build) -> None:
    small, large = memory_need(build()), memory_need(build("n_peers=8"))
    experiment = build()
    d, each, x_train = experiment.initial.numel(), 8, experiment.own.examples.x
    assert small.state == 3 * 4 * d * each
    assert large.state == 2 * small.state
    assert small.data == x_train.nbytes + x_train.numel() * each + 100 * (64 * 4 + 8) + 240 * 8
    assert memory_need(build("compute.dtype=float32")).data == small.data - x_train.numel() * each  # no copy
    assert small.total == sum(dataclasses.asdict(small).values())


def test_every_table_is_listed_and_the_chosen_one_counted(build: Build) -> None:
    experiment = build(vr("snapshot"), "model={name: mlp, hidden: [20]}")
    n, J, d, b, each = 4, 60, 64 * 20 + 20 + 20 * 10 + 10, 12, 8
    sizes = table_bytes(experiment)
    assert sizes == {
        "factored": each * n * (J * (20 + 10 + 20) + d),
        "blocks": each * n * (J // b + 1) * d,
        "snapshot": each * n * (2 * d + 1),
        "dense": each * n * (J + 1) * d,
    }
    assert memory_need(experiment).table == sizes["snapshot"]
    assert memory_need(build()).table == 0
    rows = experiment.initial_state(experiment.cohort()).rows
    assert sum(rows[name].nbytes for name in ("snapshot", "anchor", "anchored")) == sizes["snapshot"]
    dense = build(vr("dense"))
    table = dense.initial_state(dense.cohort()).rows
    assert table["table"].nbytes + table["table.mean"].nbytes == table_bytes(dense)["dense"]


def test_convolutions_have_no_factored_table(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = build(vr("snapshot"), "model={name: cnn-pdsl}", "rounds=2")
    assert table_bytes(experiment)["factored"] is None
    console.print_plan(make_plan(experiment), as_json=False, verbose=True)
    assert "tables       factored –, blocks" in capsys.readouterr().out


def test_steps_and_models_too_large_are_refused_by_estimate(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda _device: 1 << 30)
    with raises(ScenarioError, "memory.short", "^--set: rounds=3000000: "):
        build("rounds=3000000")
    with raises(ScenarioError, "memory.short", "798,761,010"):
        build("model={name: mlp, hidden: [750000, 1000]}", "privacy=none")
    assert build("rounds=3000000", "privacy=none").scenario.rounds == 3_000_000


def test_a_run_that_does_not_fit_is_refused_first(
    build: Build, tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = build(vr("dense"))
    need = memory_need(experiment)
    free = int((need.state + need.data + need.checkpoint) / memory_estimate.HEADROOM)
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _device: free)
    plan = make_plan(experiment)
    assert plan["seconds"] is None
    told = plan["warnings"][-1]
    assert told.startswith("a run would be refused here: algorithm.table='dense' needs about")
    assert "use factored (" in told
    assert "or snapshot (" in told
    file, out = tmp_path / "tiny.yaml", tmp_path / "run"
    file.write_text(tiny_text)
    with pytest.raises(SystemExit) as leaving:
        main.main(["run", str(file), "--out", str(out), "--set", vr("dense")])
    assert leaving.value.code == 2
    assert "algorithm.table='dense' needs about" in capsys.readouterr().err
    assert not out.exists()
    monkeypatch.setattr(memory_estimate, "available_bytes", lambda _device: 1000)
    with raises(ScenarioError, "memory.short", "n_peers=1"):
        hosting(build(), [2]).cohort()


@pytest.mark.parametrize(("hidden", "outputs"), [([100], 784 + 100 + 100 + 10), ([5, 6], 784 + 5 + 5 + 6 + 6 + 10)])
def test_outputs_of_all_layers_are_counted(hidden: list[int], outputs: int) -> None:
    module = build_model("mlp", (1, 28, 28), 10, seed=1, hidden=hidden)
    assert outputs_per_example(module, torch.zeros(1, 1, 28, 28)) == outputs


def test_best_signal_follows_its_formula(build: Build) -> None:
    experiment = build()
    sigma, d = float(noise_std(experiment, 0)[0]), experiment.initial.numel()
    assert best_signal(experiment) == pytest.approx(math.sqrt(4 * 6) / (sigma * math.sqrt(d)))
    alone = build("algorithm.name=local")
    assert best_signal(alone) == pytest.approx(best_signal(experiment) / 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["privacy.delta=0.02"], "δ = 0.02 >= 1/60 (peers 0-3): revealing one example outright would be allowed"),
        (["privacy.epsilon=20"], "ε reaches 20.0, above 10"),
        (["privacy.epsilon=0.05"], "signal to noise over the whole run is"),
        (["privacy=none"], "privacy is none"),
        ([PAPER, vr("factored"), "privacy.paper.c_2=0.3"], "calibration paper claims ε = 3; the accountant gives ε = "),
        ([PAPER, named("dyn-d2p")], "eq. 8 of Dyn-D2P is a limit for K far above (J/b)² = 25, and rounds=6 is 4 times"),
        (
            [PAPER, "privacy.schedule={noise: [2, 1]}", "privacy.epsilon=0.3"],
            "Proposition 4 of Dyn-D2P is a limit for K far above",
        ),
        (["data.batch.sampling=uniform"], "uniform costs ε = 3.00, and poisson at the same noise costs 1.22"),
    ],
)
def test_unsound_privacy_is_warned_of(build: Build, settings: list[str], expected: str) -> None:
    assert any(expected in warning for warning in privacy_warnings(build(*settings)))


def test_sound_settings_are_not_warned_of(build: Build) -> None:
    experiment = build("rounds=40", "data.samples=1440", "data.batch.size=90")
    assert privacy_warnings(experiment) == []
    assert network_warnings(experiment, {"joint_connectivity": 2}) == []
    assert cost_warnings(None, 1000.0, 0.1) == []
    assert cost_warnings(None, 0.3, 0.9) == []  # a third of nothing
    assert cost_warnings(None, None, 0.9) == []


def test_network_and_cost_are_warned_of(build: Build) -> None:
    partial = build("participation={kind: uniform, fraction: 0.5}")
    assert "2 of 4 peers are active" in network_warnings(partial, {"joint_connectivity": 2})[0]
    assert "raise it" in network_warnings(build(), {"joint_connectivity": 9})[0]
    large, slow = cost_warnings("it is too large", 100.0, 0.9)
    assert slow == (
        "evaluation takes 90 % of the time, about 1 min 30 s; raise evaluation.every, or try a sample of the peers "
        "(evaluation.peers)"
    )
    assert large == "a run would be refused here: it is too large"


def test_claims_of_privsgp_vr_stand_beside_the_exact_epsilon(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = build(PAPER, vr("factored"), "privacy.epsilon=[1,2,3,3]", "privacy.paper.c_2=0.5")
    rows = peer_rows(experiment)
    assert [row["claimed_epsilon"] for row in rows] == [1, 2, 3, 3]
    assert all(row["epsilon"] > row["claimed_epsilon"] for row in rows)
    assert all(row["mu_total"] is row["mu_0"] is row["mu_bar"] is None for row in rows)
    console.print_plan(make_plan(experiment), as_json=False, verbose=True)
    shown = capsys.readouterr().out
    assert "claimed ε" in shown
    assert "the accountant gives ε = " in shown


def test_mu_of_dyn_d2p(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    total, rate = gdp_mu(3.0, 1e-3), 12 / 60
    row = peer_rows(build(PAPER, named("dyn-d2p")))[0]
    assert row["claimed_epsilon"] == 3
    assert row["mu_total"] == pytest.approx(total)
    assert (
        row["mu_0"]
        == pytest.approx(gdp_mu_0(total, rate, 2.0 ** (np.arange(6) / 3)))
        == pytest.approx(1 / row["noise_multiplier"])
    )
    assert row["mu_bar"] is None
    constant = build(PAPER, named("dyn-c-d2p"))
    row = peer_rows(constant)[0]
    assert row["mu_bar"] == row["mu_0"] == pytest.approx(gdp_mu_0(total, rate, np.ones(6)))
    console.print_plan(make_plan(constant), as_json=False, verbose=True)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("claimed ε", "μ_tot", "μ̄"))
    rigorous = peer_rows(build(named("dyn-mu-d2p")))[0]
    assert rigorous["claimed_epsilon"] is rigorous["mu_total"] is None
    assert rigorous["mu_0"] == pytest.approx(1 / rigorous["noise_multiplier"])


def test_the_plan_section_is_strict_and_changes_no_run(tiny_text: str) -> None:
    bare = parse_scenario(tiny_text)
    given = parse_scenario(tiny_text, overrides=["plan={smoothness: 25, gradient_bound: 10}"])
    assert scenario_hash(given) == scenario_hash(bare)
    assert parse_scenario(to_yaml(given)) == given
    assert "plan" not in to_yaml(bare)
    for setting, code in (("plan.smoothness=0", "greater_than"), ("plan.smoothnes=1", "extra_forbidden")):
        with raises(ScenarioError, f"scenario.{code}"):
            parse_scenario(tiny_text, overrides=[setting])


def test_text_shows_best_rounds_curve_and_tables(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    console.print_plan(make_plan(build(vr("factored"), "rounds=1")), as_json=False, verbose=True)
    shown = capsys.readouterr().out
    for text in (
        "best rounds  K* = ",
        "by eq. 12 of PrivSGP-VR; here K = 1",
        "G = 1 (the clip norm)",
        "by ε ",
        "(chosen)",
    ):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 130
    assert not any(line != line.rstrip() for line in shown.splitlines())


def test_a_compiling_first_round_does_not_distort_the_estimate(build, monkeypatch):
    """A new user's first plan compiles kernels: 5 s once, and not in each of a hundred rounds."""
    takes = iter([100.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25])
    monkeypatch.setattr("flower_privdec.planner.timing._timed", lambda experiment, work: (work(), next(takes))[1])
    seconds, share = estimate_seconds(build("rounds=100", "evaluation.every=50"))
    assert seconds == pytest.approx(100 * 0.5 + 2 * 0.25)
    assert share == pytest.approx(0.5 / 50.5)


CANCELLING = "privacy.noise={kind: cancelling, colluding: 1, strength: 2.0, secrets: complete}"


@pytest.mark.parametrize("table", ["snapshot", "factored", "dense", "blocks"])
@pytest.mark.parametrize("rates", ["0.5", "[0.1, 0.5, 0.5, 1.0]"], ids=["one rate", "four rates"])
def test_time_is_estimated_with_pairs_for_other_batches(build: Build, table: str, rates: str) -> None:
    """A table is filled from a part of the examples, with batches of one size that the noise of pairs was not for."""
    sizes = "data.partition={kind: sizes, sizes: [20, 40, 60, 80]}"
    lines = [vr(table), f"algorithm.learning_rate={rates}", sizes, CANCELLING, "data.batch={rate: 0.2}"]
    if table == "blocks":
        lines[-1] = "data.batch={sampling: blocks, size: 4}"
    seconds, _ = estimate_seconds(build(*lines))
    assert seconds > 0


def test_noise_in_the_mean_is_nearly_minimal(build: Build) -> None:
    """Budgets that differ: the solver and the linear programs of the plan know nothing of each other."""
    experiment = build("privacy.epsilon=[1, 2, 4, 8]", CANCELLING)
    facts = pair_facts(experiment)
    assert facts["least_mean_noise"] <= facts["mean_noise"] <= 1.05 * facts["least_mean_noise"]
    assert "these pairs allow no less than" in console.plan_text(make_plan(experiment), verbose=True)


def test_a_plan_shows_what_absent_peers_cost(build: Build) -> None:
    """As much noise as planned for up to `absent` of them, more for more, and all of it for the last one."""
    experiment = build(CANCELLING, "privacy.noise.absent=1", "n_peers=8", "privacy.noise.strength=3.0")
    facts = pair_facts(experiment)
    assert facts["accounting"] == "partners"
    rows = facts["by_absent"]
    assert [row["absent"] for row in rows] == [0, 1, 2, 3, 4, 6]
    noise = [row["mean_noise"] for row in rows]
    assert noise[:2] == pytest.approx([facts["mean_noise"]] * 2)
    assert noise[1] < noise[2] < noise[3] < noise[4] < noise[5]
    assert noise[5] == pytest.approx(1)
    text = console.plan_text(make_plan(experiment), verbose=True)
    assert "counted by each peer's own partners, for privacy.noise.absent=1" in text
    assert "partners away" in text


def test_a_plan_shows_the_price_of_a_degree(build: Build) -> None:
    """More secrets, more draws and less noise in the mean; fifteen are those that this plan has."""
    experiment = build(CANCELLING, "privacy.noise.absent=1", "n_peers=16", "privacy.noise.strength=3.0")
    facts = pair_facts(experiment)
    rows = facts["by_degree"]
    assert [row["draws"] for row in rows] == [row["degree"] + 1 for row in rows]
    noise = [row["mean_noise"] for row in rows]
    assert noise == sorted(noise, reverse=True)
    own = next(row for row in rows if row["degree"] == 15)
    assert own["mean_noise"] == pytest.approx(facts["mean_noise"])
    assert all(row["mean_noise"] <= row["noise_against_more"] < 1 for row in rows)


@pytest.mark.parametrize("table", ["snapshot", "factored"])
def test_a_first_step_of_less_noise_has_its_bound(build: Build, table: str) -> None:
    """The step that fills a table has 1/√2 of the noise, so that it differs from the plan's unit."""
    settings = ["algorithm.learning_rate=[0.1, 0.5, 0.5, 1.0]", "data.batch={size: 1}", CANCELLING]
    facts = pair_facts(build(vr(table), *settings))
    assert facts["least_mean_noise"] <= facts["mean_noise"] * (1 + 1e-9)


def test_a_bound_over_too_many_sets_is_left_out(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flower_privdec.planner.pairwise.LARGEST_SHAPED", 0)
    assert pair_facts(build(CANCELLING))["least_mean_noise"] is None
