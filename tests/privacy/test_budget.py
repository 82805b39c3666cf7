"""Whose ledger pays for a run, what it allows, and that nothing is spent or refused in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from raising import raises
from tiny_scenario import Build, Tiny

from flower_privdec.cli import main
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import Run, run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.spent import shortfall
from flower_privdec.graph.participation import UniformParticipation, build_participation
from flower_privdec.planner.plan import make_plan
from flower_privdec.privacy.accountant.accounting import epsilon_of_runs
from flower_privdec.privacy.ledger.segments import read_chain
from flower_privdec.privacy.ledger.spending import charged_until, runs_in
from flower_privdec.scenario import to_yaml


@pytest.fixture
def privdec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process: exit status, output, errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(leaving.value.code or 0), captured.out, captured.err

    return call


def spent_in(folder: Path, source: str = "digits") -> float:
    return epsilon_of_runs(runs_in(read_chain(folder / f"{source}.jsonl")[1]).values(), 1e-3)


OTHER_CUTS = {
    "fewer examples": ["data.samples=200"],
    "all examples": ["data.samples=null"],
    "another partition": ["seed=9"],
    "fewer peers": ["n_peers=2"],
    "unequal peers": ["data.partition={kind: sizes, sizes: [100, 60, 50, 30]}"],
    "another algorithm": ["algorithm.name=dp2-sgd", "topology.name=ring"],
    "features": ["features={kind: scattering, scales: 1, angles: 4, groups: 5, pool: 2}"],
}


@pytest.mark.parametrize("other", OTHER_CUTS)
def test_one_ledger_pays_for_every_cut_of_a_dataset(build: Build, tmp_path: Path, other: str) -> None:
    ledger = f"privacy.ledger={tmp_path}/L"
    first = run(build(ledger), tmp_path / "first", lean=True)
    again = [*OTHER_CUTS[other], ledger, "privacy.epsilon=5"]
    second = run(build(*again), tmp_path / "second", lean=True)
    before = first["privacy"][0]["epsilon"]
    assert all(before < row["epsilon"] <= 5 for row in second["privacy"])
    assert max(row["epsilon"] for row in second["privacy"]) <= spent_in(tmp_path / "L") + 1e-9
    assert [path.name for path in (tmp_path / "L").iterdir()] == ["digits.jsonl"]


def own_file(path: Path, x: np.ndarray, y: np.ndarray) -> list[str]:
    np.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return [f"data={{dataset: npz, root: {path}, batch: {{size: 12}}}}", "model={name: linear}"]


@pytest.mark.parametrize("change", ["pixel", "order", "copy", "part"])
def test_a_changed_copy_is_paid_by_the_same_ledger(build: Build, tmp_path: Path, change: str) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(120, 6)).astype(np.float32), np.arange(120) % 2
    ledger = f"privacy.ledger={tmp_path}/L"
    run(build(*own_file(tmp_path / "a.npz", x, y), ledger), tmp_path / "first", lean=True)
    x = x.copy()
    if change == "pixel":
        x[3, 2] += 1e-3
    elif change == "order":
        x, y = x[::-1].copy(), y[::-1].copy()
    elif change == "part":
        x, y = x[:90], y[:90]
    again = build(*own_file(tmp_path / "b.npz", x, y), ledger, "privacy.epsilon=4.5")
    second = run(again, tmp_path / "second", lean=True)
    assert all(3.0 < row["epsilon"] <= 4.5 and row["rounds_run"] < 6 for row in second["privacy"])
    assert 3.0 < spent_in(tmp_path / "L", "own") <= 4.5


def test_a_repeated_scenario_costs_nothing_more(build: Build, tmp_path: Path) -> None:
    ledger = f"privacy.ledger={tmp_path}/L"
    first = run(build(ledger), tmp_path / "first")
    content = (tmp_path / "L" / "digits.jsonl").read_bytes()
    second = run(build(ledger, "name=again", "evaluation.every=3"), tmp_path / "second")
    assert (tmp_path / "L" / "digits.jsonl").read_bytes() == content
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert models[0] == models[1]
    assert first["privacy"] == second["privacy"]


def test_a_run_whose_ledger_allows_nothing_is_refused(
    tiny: Tiny, tmp_path: Path, privdec: Callable[..., tuple[int, str, str]]
) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(to_yaml(tiny(f"privacy.ledger={tmp_path}/L")))
    assert privdec("run", scenario, "--out", tmp_path / "first")[0] == 0
    content = (tmp_path / "L" / "digits.jsonl").read_bytes()
    code, _, error = privdec("run", scenario, "--out", tmp_path / "second", "--set", "seed=8")
    assert code == 2
    assert "other runs over the same data have spent ε = 3.00, and privacy.epsilon=3 allows this run no step" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "second").exists()
    assert (tmp_path / "L" / "digits.jsonl").read_bytes() == content


def test_a_run_allowed_some_steps_takes_those(
    tiny: Tiny, tmp_path: Path, privdec: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    scenario, more = tmp_path / "s.yaml", ["--set", "seed=8", "--set", "privacy.epsilon=4.5", "--set", "rounds=12"]
    scenario.write_text(to_yaml(tiny(f"privacy.ledger={tmp_path}/L")))
    assert privdec("run", scenario, "--out", tmp_path / "first")[0] == 0
    _, planned, _ = privdec("plan", scenario, *more)
    said = "of 12 rounds only; after them they stop training and only exchange"
    assert said in " ".join(planned.split())
    assert "ε = 3.00 before this run" in planned
    code, shown, _ = privdec("run", scenario, "--out", tmp_path / "second", *more)
    assert code == 0
    assert said in " ".join(shown.split())
    assert said in caplog.text
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert said in summary["budget_note"]
    (ran,) = {row["rounds_run"] for row in summary["privacy"]}
    assert 0 < ran < 12
    assert {row["scope"] for row in summary["privacy"]} == {f"all runs in {tmp_path}/L"}
    assert spent_in(tmp_path / "L") == pytest.approx(summary["privacy"][0]["epsilon"], rel=1e-3)
    assert spent_in(tmp_path / "L") <= 4.5
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["epsilon"] > 3.0  # of the ledger, from the first line on
    assert [line["epsilon"] for line in lines] == sorted(line["epsilon"] for line in lines)
    assert lines[-1]["epsilon"] == summary["privacy"][0]["epsilon"]


def test_a_run_with_its_own_ledger_says_so(build: Build, tmp_path: Path) -> None:
    summary = run(build(), tmp_path / "run")
    assert {row["scope"] for row in summary["privacy"]} == {"this run alone"}
    assert make_plan(build())["ledger"] is None


def test_planning_with_a_ledger_neither_locks_nor_writes_it(build: Build, tmp_path: Path) -> None:
    ledger = f"privacy.ledger={tmp_path}/L"
    assert make_plan(build(ledger))["ledger"]["epsilon_before"] == 0
    assert not (tmp_path / "L").exists()
    under_way = Run(build(ledger), tmp_path / "run")
    under_way.advance()
    found = make_plan(build(ledger, "seed=5", "privacy.epsilon=50"))["ledger"]
    assert 0 < found["epsilon_before"] <= 3 < found["epsilon_after"]
    under_way.close()


# --- a resumed run goes on with the same numbers, or not at all ---


def interrupted(experiment: Experiment, out: Path) -> None:
    under_way = Run(experiment, out)
    under_way.advance()
    under_way.close()


def test_a_run_does_not_go_on_in_another_environment(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that were paid for would be drawn again with other noise."""
    interrupted(build(), tmp_path / "run")
    monkeypatch.setattr("flower_privdec.experiment.run_key.installed_version", lambda name: "0.0.1")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with raises(ScenarioError, "checkpoint.other-environment", r"fast, .*fast, .*numba 0.0.1"):
        Run(build(), tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_does_not_go_on_with_other_data(build: Build, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32), np.arange(120) % 2
    interrupted(build(*own_file(tmp_path / "a.npz", x, y)), tmp_path / "run")
    x[0, 0] += 1
    with raises(ScenarioError, "checkpoint.other-data"):
        Run(build(*own_file(tmp_path / "a.npz", x, y)), tmp_path / "run", resume=True)


def test_a_run_resumes_within_what_another_left(build: Build, tmp_path: Path) -> None:
    """What it had reserved it may still take; and it says where its steps end."""
    ledger = f"privacy.ledger={tmp_path}/L"
    under_way = Run(build(ledger), tmp_path / "run")
    under_way.advance()
    paid = charged_until(read_chain(tmp_path / "L" / "digits.jsonl")[1], under_way.experiment.own.run.id)
    under_way.close()
    run(build(ledger, "seed=9", "privacy.epsilon=6"), tmp_path / "other", lean=True)
    resumed = Run(build(ledger), tmp_path / "run", resume=True)
    while resumed.round_index < 6:
        resumed.advance()
    summary = resumed.finish()
    resumed.close()
    assert {row["rounds_run"] for row in summary["privacy"]} == {paid}
    assert paid == 6 or f"allows steps in the first {paid} of 6 rounds only" in summary["budget_note"]


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ([5, 5, 5, 5], None),
        ([4, 5, 5, 4], "the budget of peers 0, 3 ends after 4 of their 5 rounds"),
        ([0, 1, 2, 5], "the budget of peers 0-2 ends after 0 to 2 of their 5 rounds"),
    ],
)
def test_rounds_that_a_budget_did_not_reach_are_told(ran: list[int], said: str | None) -> None:
    note = shortfall(build_participation("all", 4), ran, 5)
    assert note is None if said is None else str(note).startswith(said)


def test_rounds_without_a_peer_are_no_shortfall() -> None:
    participation = UniformParticipation(6, 2, seed=3)
    planned = np.sum([participation.active(k) for k in range(20)], axis=0)
    assert shortfall(participation, planned.tolist(), 20) is None
    planned[4] -= 1
    note = shortfall(participation, planned.tolist(), 20)
    assert str(note).startswith(f"the budget of peer 4 ends after {planned[4]} of their {planned[4] + 1} rounds")


LOCAL_STEPS = ["algorithm={name: fedavg, learning_rate: 0.1, local_steps: 4}", "data.batch={sampling: full}"]


@pytest.mark.parametrize("shared", [False, True], ids=["its own ledger", "after another run"])
def test_a_partly_affordable_round_is_neither_begun_nor_paid(build: Build, tmp_path: Path, shared: bool) -> None:
    noise = "privacy={epsilon: 6.0, delta: 1.0e-3, noise_multiplier: 2.0, ledger: %s}" % (tmp_path / "ledgers")
    if shared:
        run(build(*LOCAL_STEPS, noise, "rounds=1", "seed=9"), tmp_path / "first", lean=True)
    experiment = build(*LOCAL_STEPS, noise)
    summary = run(experiment, tmp_path / "run", lean=True)
    entries = read_chain(tmp_path / "ledgers" / "digits.jsonl")[1]
    own = [entry for entry in entries if entry.run.id == experiment.own.run.id]
    for row in summary["privacy"]:
        steps = sum(
            release.steps for entry in own for c in entry.charges if row["peer"] in c.peers for release in c.releases
        )
        assert 0 < row["rounds_run"] < 6
        assert steps == 4 * row["rounds_run"], "a step was paid and not taken"


def test_a_budget_below_one_round_is_refused(build: Build) -> None:
    with raises(ScenarioError, "privacy.budget", "first round of 4 steps costs"):
        build(*LOCAL_STEPS, "privacy={epsilon: 2.5, delta: 1.0e-3, noise_multiplier: 2.0}")
