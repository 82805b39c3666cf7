"""More rounds of a run, planned beside what the first ones cost; and runs that end before their plan does."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from command_line import privdec
from raising import raises
from safetensors.torch import load_file
from tiny_scenario import TINY, Tiny

from flower_privdec.audits.audit import audit
from flower_privdec.common.errors import BudgetError, RunError, ScenarioError
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Experiment, recorder
from flower_privdec.experiment.recorder import Recorder, with_more_rounds
from flower_privdec.experiment.spent import Spent
from flower_privdec.network.local.up import Up
from flower_privdec.privacy.accountant.accounting import epsilon
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.ledger.spending import releases_in, runs_in
from flower_privdec.reporting.run_folder import read_result
from flower_privdec.scenario import Scenario, load_scenario

MORE = ("rounds=10", "privacy.epsilon=4")


def more(scenario: Scenario, out: Path, **options: Any) -> dict[str, Any]:
    """Go on with a run by another scenario."""
    return run(Experiment.build(with_more_rounds(scenario, out)), out, resume=True, **options)


def rows(out: Path) -> dict[str, torch.Tensor]:
    """Return what a run's checkpoint has."""
    return load_file(out / "checkpoint")


def same(one: Path, other: Path) -> bool:
    """Return whether two runs have the same checkpoint, bit for bit."""
    first, second = rows(one), rows(other)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_more_rounds_without_privacy_equal_one_long_run(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny("privacy=none")), tmp_path / "run")
    more(tiny("privacy=none", "rounds=10"), tmp_path / "run")
    run(Experiment.build(tiny("privacy=none", "rounds=10")), tmp_path / "long")
    assert same(tmp_path / "run", tmp_path / "long")
    lines = [json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [2, 4, 6, 8, 10]


def test_epsilon_of_more_rounds_covers_all_releases(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    summary = more(tiny(*MORE), tmp_path / "run")
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert len(runs_in(entries)) == 2
    assert sum(release.steps for release in releases_in(entries)) == 10
    for row in summary["privacy"]:
        assert row["epsilon"] == pytest.approx(epsilon(releases_in(entries), row["delta"]), rel=1e-6)
        assert 0.99 * 4 < row["epsilon"] <= 4
        assert (row["rounds_run"], row["expected_rounds"]) == (10, 10)
    assert summary["rounds"] == 10
    assert read_result(tmp_path / "run").finished


def test_more_rounds_draw_noise_of_no_other_run(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    stages, whole = Experiment.build(with_more_rounds(tiny(*MORE), tmp_path / "run")), Experiment.build(tiny(*MORE))
    first = Experiment.build(tiny())
    keys = {experiment.own.keys[peer] for experiment in (stages, whole, first) for peer in range(4)}
    assert len(keys) == 12


def test_a_spent_budget_is_refused_before_anything_is_written(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    before = (tmp_path / "run" / "ledger" / "digits.jsonl").read_bytes()
    with raises(ScenarioError, "run.budget-spent", names="epsilon"):
        more(tiny("rounds=10"), tmp_path / "run")
    with raises(ScenarioError, "run.rounds-done", names="rounds=5"):
        more(tiny("rounds=5"), tmp_path / "run")
    assert read_result(tmp_path / "run").finished
    assert (tmp_path / "run" / "ledger" / "digits.jsonl").read_bytes() == before


def test_each_peer_goes_on_within_its_own_budget(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny("privacy.epsilon=[1, 2, 3, 4]")), tmp_path / "run")
    summary = more(tiny("privacy.epsilon=[2, 3, 4, 5]", "rounds=9"), tmp_path / "run")
    spent = [row["epsilon"] for row in summary["privacy"]]
    assert all(0.97 * budget < value <= budget for value, budget in zip(spent, (2, 3, 4, 5), strict=True)), spent


def test_given_noise_continues_until_the_budget_ends(tiny: Tiny, tmp_path: Path) -> None:
    noise = ("privacy.noise_multiplier=1.5", "privacy.epsilon=3")
    first = run(Experiment.build(tiny(*noise)), tmp_path / "run")["privacy"][0]["epsilon"]
    row = more(tiny(*noise, "rounds=40"), tmp_path / "run")["privacy"][0]
    assert first < row["epsilon"] <= 3
    assert 6 < row["rounds_run"] < 40
    long = run(Experiment.build(tiny(*noise, "rounds=40")), tmp_path / "long")["privacy"][0]
    assert row == long  # one mechanism, however it is laid out


def test_a_partial_epoch_costs_a_whole_one(tiny: Tiny, tmp_path: Path) -> None:
    shuffled = ("data.batch={sampling: shuffle, size: 12}", "privacy={noise_multiplier: 2.0, delta: 1.0e-3}")
    run(Experiment.build(tiny(*shuffled, "rounds=7")), tmp_path / "run")  # an epoch has 5 steps
    summary = more(tiny(*shuffled, "rounds=10"), tmp_path / "run")
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert sum(release.steps for release in releases_in(entries)) == 3  # epochs: 0 to 5, 5 to 7, and 7 to 10
    assert summary["privacy"][0]["epsilon"] == pytest.approx(epsilon(releases_in(entries), 1e-3), rel=1e-6)


def test_a_run_may_be_given_more_rounds_twice(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    more(tiny("rounds=8", "privacy.epsilon=4"), tmp_path / "run")
    summary = more(tiny("rounds=10", "privacy.epsilon=5"), tmp_path / "run")
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert len(runs_in(entries)) == 3
    assert summary["privacy"][0]["epsilon"] == pytest.approx(epsilon(releases_in(entries), 1e-3), rel=1e-6)


def test_interrupted_extra_rounds_end_with_the_same_bits(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("run", "whole"):
        run(Experiment.build(tiny()), tmp_path / name)
    more(tiny(*MORE), tmp_path / "whole")

    def crash(self: Recorder, *arguments: Any) -> None:
        raise OSError

    with monkeypatch.context() as patch:  # between the two files that say what the run is now
        patch.setattr(Recorder, "save", crash)
        with raises(RunError, "run.unwritable"):
            more(tiny(*MORE), tmp_path / "run")
    more(tiny(*MORE), tmp_path / "run", on_metrics=lambda metrics: metrics["round"] == 8)
    assert read_result(tmp_path / "run").summary["stopped_at"] == 8
    more(tiny(*MORE), tmp_path / "run")
    assert same(tmp_path / "run", tmp_path / "whole")
    more(tiny(*MORE), tmp_path / "run")  # is done: nothing is taken again
    assert same(tmp_path / "run", tmp_path / "whole")


def test_more_rounds_need_the_ledger_of_the_first(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    rmtree(tmp_path / "run" / "ledger")
    with raises(BudgetError, "ledger.stale"):
        more(tiny(*MORE), tmp_path / "run")


def test_noise_of_the_operating_system_goes_on_too(tiny: Tiny, tmp_path: Path) -> None:
    system = ("compute.generator=system",)
    run(Experiment.build(tiny(*system)), tmp_path / "run")
    summary = more(tiny(*system, *MORE), tmp_path / "run")
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert summary["privacy"][0]["epsilon"] == pytest.approx(epsilon(releases_in(entries), 1e-3), rel=1e-6)
    assert summary["privacy"][0]["epsilon"] <= 4


def test_a_scenario_of_more_rounds_starts_no_run(tiny: Tiny, tmp_path: Path) -> None:
    """Elsewhere its first rounds would be taken again, with noise of the first plan, and without a charge."""
    first = tiny("rounds=4", "privacy.epsilon=2")
    run(Experiment.build(first), tmp_path / "run")
    more(tiny("rounds=6", "privacy.epsilon=4"), tmp_path / "run")
    experiment = Experiment.build(load_scenario(tmp_path / "run" / "scenario.yaml"))
    with raises(ScenarioError, "run.earlier", "from round 4"):
        run(experiment, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    cohort = experiment.cohort(tmp_path / "ledger")
    with raises(BudgetError, "ledger.before-start", "step 0 is before 4"):
        Engine(experiment.algorithm, cohort, experiment.initial_state(cohort)).round()
    with raises(ScenarioError, "audit.earlier"):
        audit(experiment, trials=8, replica=8)


def test_more_rounds_refuse_a_checkpoint_of_another_run(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    run(Experiment.build(tiny("seed=4")), tmp_path / "other")
    experiment = Experiment.build(with_more_rounds(tiny(*MORE), tmp_path / "run"))
    with raises(ScenarioError, "checkpoint.other-scenario"):
        run(experiment, tmp_path / "other", resume=True)


def test_steps_charged_twice_count_twice_for_more_rounds(tiny: Tiny, tmp_path: Path) -> None:
    system = ("compute.generator=system", "privacy={noise_multiplier: 2.0, delta: 1.0e-3}")
    broken_off = Run(Experiment.build(tiny(*system)), tmp_path / "run")
    broken_off.advance()
    broken_off.engine.round()  # charged, and released, after the checkpoint
    broken_off.close()
    run(Experiment.build(tiny(*system)), tmp_path / "run", resume=True)
    row = more(tiny(*system, "rounds=10"), tmp_path / "run")["privacy"][0]
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert sum(release.steps for release in releases_in(entries)) > 10
    assert row["epsilon"] >= epsilon(releases_in(entries), 1e-3) * (1 - 1e-9)


def test_runs_that_cannot_be_replanned_say_so(tiny: Tiny, tmp_path: Path) -> None:
    paper = ("privacy.calibration=paper",)
    run(Experiment.build(tiny(*paper)), tmp_path / "run")
    with raises(ScenarioError, "run.more-rounds", names="calibration"):
        more(tiny(*paper, "rounds=10"), tmp_path / "run")
    (tmp_path / "run" / "scenario.yaml").rename(tmp_path / "scenario.yaml")
    with raises(ScenarioError, "checkpoint.other-scenario"):
        more(tiny(*MORE, "seed=4"), tmp_path / "run")


def test_peers_of_a_network_are_given_no_more_rounds(tiny: Tiny, tmp_path: Path) -> None:
    run(Experiment.build(tiny()), tmp_path / "run")
    with raises(ScenarioError, "run.more-rounds", names="rounds=10"):
        Up(tiny(*MORE), tmp_path / "run", resume=True)


def test_the_command_line_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = ("run", tmp_path / "tiny.yaml", "--out", tmp_path / "run", "--rounds", 4)
    assert privdec(*command) == 0
    assert privdec(*command[:-1], 6, "--resume") == 2
    assert "--set privacy.epsilon=6" in capsys.readouterr().err
    assert privdec(*command[:-1], 6, "--resume", "--set", "privacy.epsilon=6") == 0
    assert privdec("plan", tmp_path / "run" / "scenario.yaml") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 6
    assert 5 < summary["privacy"][0]["epsilon"] <= 6


# --- runs that are stopped ---


def check_stopped(out: Path, whole: dict[str, Any], why: str) -> None:
    """Check that a run that stopped at round 4 has what one of 4 rounds has."""
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["stopped_at"], summary["stopped_by"], summary["rounds_done"]) == (4, why, 4)
    assert summary.keys() - {"stopped_at", "stopped_by", "rounds_done"} == whole.keys()
    for row in summary["privacy"]:
        assert (row["rounds_run"], row["expected_rounds"]) == (4, 4)
        assert 0 < row["epsilon"] < 3
    models, checkpoint = load_file(out / "model.safetensors"), load_file(out / "checkpoint")
    assert torch.equal(models["peer-1/1.weight"].flatten(), (checkpoint["x"][1] / checkpoint["w"][1])[:640])
    result = read_result(out)
    assert (result.finished, result.summary["accuracy"]) == (False, result.metrics[1]["accuracy"])


def test_a_callback_stops_a_run(tiny: Tiny, tmp_path: Path) -> None:
    whole = run(Experiment.build(tiny()), tmp_path / "whole")
    run(Experiment.build(tiny()), tmp_path / "run", on_metrics=lambda metrics: metrics["round"] == 4)
    check_stopped(tmp_path / "run", whole, "callback")
    run(Experiment.build(tiny()), tmp_path / "run", resume=True)
    assert same(tmp_path / "run", tmp_path / "whole")
    assert "stopped_at" not in json.loads((tmp_path / "run" / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_ctrl_c_stops_a_run(tiny: Tiny, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    whole, out = run(Experiment.build(tiny()), tmp_path / "whole"), tmp_path / "run"
    (tmp_path / "tiny.yaml").write_text(TINY)
    original = Engine.round

    def interrupted(self: Engine) -> None:
        original(self)
        if self.state.round_index == 5:  # after the checkpoint of round 4
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "round", interrupted)
        assert privdec("run", tmp_path / "tiny.yaml", "--out", out) == 130
    assert "--resume" in capsys.readouterr().err
    check_stopped(out, whole, "interrupt")
    assert list((out / "plots").iterdir())
    assert privdec("report", out, "--out", tmp_path / "page.html") == 0
    assert privdec("run", tmp_path / "tiny.yaml", "--out", out, "--resume") == 0
    assert same(out, tmp_path / "whole")


def test_a_spent_budget_ends_the_training_of_all(tiny: Tiny, tmp_path: Path) -> None:
    summary = run(Experiment.build(tiny("privacy.noise_multiplier=0.9", "rounds=8")), tmp_path / "run")
    ran = {row["rounds_run"] for row in summary["privacy"]}
    assert (summary["stopped_at"], summary["stopped_by"]) == (max(ran), "budget")
    assert max(ran) < 8
    assert summary["budget_note"]
    assert read_result(tmp_path / "run").finished
    one_more = tiny("privacy.noise_multiplier=0.9", "rounds=8", "privacy.epsilon=[3, 3, 3, 30]")
    some = run(Experiment.build(one_more), tmp_path / "some")
    assert "stopped_at" not in some  # one peer trains to the end


def test_a_stopped_run_counts_every_charged_step(tiny: Tiny, tmp_path: Path) -> None:
    experiment = Experiment.build(tiny("compute.generator=system"))
    stopped = Run(experiment, tmp_path / "run")
    stopped.advance()
    stopped.engine.round()  # charged, and released, after the checkpoint
    summary = stopped.stop("interrupt")
    stopped.close()
    assert summary is not None
    entries = read_chain(tmp_path / "run" / "ledger" / "digits.jsonl")[1]
    assert summary["stopped_at"] == 2
    assert summary["privacy"][0]["epsilon"] == pytest.approx(epsilon(releases_in(entries), 1e-3), rel=1e-6)


def test_a_run_stopped_before_its_checkpoint_has_no_summary(tiny: Tiny, tmp_path: Path) -> None:
    stopped = Run(Experiment.build(tiny()), tmp_path / "run")
    assert stopped.stop("interrupt") is None
    stopped.close()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_lean_run_that_stops_has_no_summary(tiny: Tiny, tmp_path: Path, monkeypatch: Any) -> None:
    """A study's cell is a lean run: one that was stopped must not pass for finished."""
    monkeypatch.setattr(recorder, "LEAN_SECONDS", 0)
    stopped = Run(Experiment.build(tiny()), tmp_path / "run", lean=True)
    stopped.advance()
    stopped.recorder.save(stopped.engine.state, None)
    assert stopped.stop("interrupt") is None
    stopped.close()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_all_others_epsilon_of_a_stopped_run_counts_everything(tiny: Tiny, tmp_path: Path) -> None:
    noise = "privacy.noise={kind: cancelling, colluding: 1, secrets: complete, strength: 2.0}"
    experiment = Experiment.build(tiny("compute.generator=system", noise))
    stopped = Run(experiment, tmp_path / "run")
    stopped.advance()
    stopped.engine.round()
    summary = stopped.stop("interrupt")
    assert summary is not None
    assert stopped.cohort.ledger is not None
    charged = Spent.of(stopped.cohort, stopped.cohort.ledger.charged)
    stopped.close()
    row = summary["privacy"][0]
    assert (row["epsilon"], row["epsilon_if_all_collude"]) == (charged.epsilons[0], charged.if_all_collude[0])
    assert row["rounds_run"] == 2
