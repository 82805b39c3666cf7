"""`privdec run` as a user meets it: its files, its refusals, and a run killed in the middle."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
from command_line import forked, privdec, status_of
from safetensors.torch import load_file
from tiny_scenario import Build

from flower_privdec.engine import run as run_module
from flower_privdec.engine.engine import Engine
from flower_privdec.engine.run import Run
from flower_privdec.privacy.ledger.segments import read_chain

SCENARIO = """\
name: tiny
seed: 3
n_peers: 4
rounds: 8
data: {dataset: digits, samples: 240, test_samples: 100, batch: {sampling: poisson, size: 12}}
model: {name: softmax}
algorithm: {name: privsgp, learning_rate: 0.5}
privacy: {epsilon: 3.0, delta: 1.0e-3}
evaluation: {every: 2}
"""


@pytest.fixture
def scenario(tmp_path):
    """Return a scenario file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_what_it_promises(scenario, tmp_path, capsys):
    out = tmp_path / "run"
    assert privdec("run", scenario, "--out", out) == 0
    assert "ε" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert {"scenario.yaml", "metrics.jsonl", "ledger", "checkpoint", "model.safetensors", "summary.json"} <= names
    assert list((out / "plots").iterdir())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["name"] == "tiny"
    assert summary["runtime"] == "engine"
    assert (summary["n_peers"], summary["rounds"], summary["seed"]) == (4, 8, 3)
    assert set(summary["accuracy"]) == {"mean_model", "peer_mean", "peer_min", "peer_max"}
    assert [row["peer"] for row in summary["privacy"]] == [0, 1, 2, 3]
    for row in summary["privacy"]:
        assert 0.995 * 3 <= row["epsilon"] <= 3
        assert (row["unit"], row["adjacency"], row["calibration"]) == ("example", "zero-out", "rigorous")
    rounds = [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [2, 4, 6, 8]
    models = load_file(out / "model.safetensors")
    assert models["mean/1.weight"].shape == models["peer-3/1.weight"].shape == (10, 64)


def test_no_privacy_says_that_epsilon_has_no_bound(scenario, tmp_path, capsys):
    out = tmp_path / "run"
    assert privdec("run", scenario, "--out", out, "--set", "privacy=none") == 0
    assert "∞" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert {row["epsilon"] for row in summary["privacy"]} == {"inf"}
    assert not (out / "ledger").exists()


@pytest.mark.slow
def test_given_noise_stops_at_the_budget_and_says_so(scenario, tmp_path, capsys):
    out = tmp_path / "run"
    assert privdec("run", scenario, "--out", out, "--set", "privacy.noise_multiplier=0.9") == 0
    summary = json.loads((out / "summary.json").read_text())
    ran = {row["rounds_run"] for row in summary["privacy"]}
    assert len(ran) == 1
    assert 0 < max(ran) < 8
    said = f"the budget of peers 0-3 ends after {max(ran)} of their 8 rounds, and they stop training: raise"
    assert summary["budget_note"].startswith(said)
    assert said in " ".join(capsys.readouterr().out.splitlines()[-2:])
    assert privdec("plan", scenario, "--set", "privacy.noise_multiplier=0.9") == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert privdec("report", out, "--out", tmp_path / "page.html") == 0
    assert said in (tmp_path / "page.html").read_text()
    assert all(2 < row["epsilon"] <= 3 for row in summary["privacy"])
    for path in (out / "ledger").rglob("*.jsonl"):
        _, payments = read_chain(path)
        assert max(payment.to_step for payment in payments) < 8


WRONG = {
    "unknown key": "algorithm.learnig_rate=1",
    "wrong type": "rounds=many",
    "one peer on a graph": "n_peers=1",
    "no rounds": "rounds=0",
    "epsilon": "privacy.epsilon=-1",
    "delta": "privacy.delta=1",
    "clip norm": "privacy.clip_norm=0",
    "data root": "data={dataset: mnist, root: /nowhere, batch: {size: 8}}",
    "empty peer": "data.partition={kind: dirichlet, alpha: 0.0001}",
    "batch above what a peer has": "data.batch.size=1000",
    "edge list that is not there": "topology={name: edge-list, file: /nowhere.txt}",
    "directed gossip without balance": "algorithm.name=d-psgd",
}


@pytest.mark.parametrize("setting", WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(scenario, tmp_path, capsys, setting):
    extra = ["--set", "topology={name: star}"] if "d-psgd" in setting else []
    extra += ["--set", "topology.weights=column-stochastic"] if "d-psgd" in setting else []
    extra += ["--set", "n_peers=12"] if "dirichlet" in setting else []  # more peers than classes
    out = tmp_path / "run"
    assert privdec("run", scenario, "--out", out, "--set", setting, *extra) == 2
    errors = capsys.readouterr().err.strip()
    assert errors.startswith("error: ")
    assert "\n" not in errors
    assert not out.exists()


def test_a_missing_gpu_is_refused(scenario, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert privdec("run", scenario, "--out", tmp_path / "run", "--set", "compute.device=cuda") == 2
    assert "compute.device='cuda'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten_or_resumed_as_another(scenario, tmp_path, capsys):
    out = tmp_path / "run"
    assert privdec("run", scenario, "--out", out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert privdec("run", scenario, "--out", out) == 2
    assert "--resume" in capsys.readouterr().err
    assert privdec("run", scenario, "--out", out, "--resume", "--set", "algorithm.learning_rate=0.4") == 2
    assert "another scenario" in capsys.readouterr().err
    assert privdec("run", scenario, "--out", tmp_path / "other", "--resume") == 2
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", [0, 5])
def test_a_killed_run_resumes_to_the_same_summary(scenario, tmp_path, monkeypatch, killed_in):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert privdec("run", scenario, "--out", whole) == 0
    take_round = Engine.round

    def dying(engine):
        if engine.state.round_index == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        take_round(engine)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "round", dying)
        assert status_of(forked(privdec, "run", scenario, "--out", parted)) == -signal.SIGKILL
    for path in (parted / "ledger").rglob("*.jsonl") if killed_in else ():
        _, payments = read_chain(path)
        assert max(payment.to_step for payment in payments) >= killed_in
    assert privdec("run", scenario, "--out", parted, "--resume") == 0
    first, second = (json.loads((out / "summary.json").read_text()) for out in (whole, parted))
    for summary in (first, second):
        summary.pop("wall_seconds")
        summary.pop("peer_steps_per_second")
    assert first == second
    assert (whole / "model.safetensors").read_bytes() == (parted / "model.safetensors").read_bytes()
    seen = [json.loads(line)["round"] for line in (parted / "metrics.jsonl").read_text().splitlines()]
    assert seen == [2, 4, 6, 8]


def test_show_prints_what_reads_back(scenario, tmp_path, capsys):
    assert privdec("show", scenario) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert privdec("show", tmp_path / "again.yaml") == 0


def test_a_mistyped_command_gets_a_hint(capsys):
    assert privdec("rum") == 2
    assert "run" in capsys.readouterr().err


def test_time_left_counts_evaluations_and_no_warm_up(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks once at each look: what a round takes is told without the first, which compiles."""
    under_way = Run(build("rounds=9", "evaluation.every=3"), tmp_path / "run")
    assert under_way.seconds_left is None
    ticks = itertools.count()
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: float(next(ticks)))
    try:
        under_way.advance()
        seconds = under_way._seconds_after_first
        assert seconds > 0  # of two rounds at once, after the first
        evaluation = under_way._evaluation_seconds
        assert evaluation > 0
        assert under_way.seconds_left == 6 * seconds / 2 + 2 * evaluation
        under_way.advance()
        under_way.advance()
        assert under_way.seconds_left == 0
    finally:
        under_way.close()
