"""Audits of Flower apps: what is printed holds, what is broken is found by name, and a real ledger is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from raising import raises

import flower_privdec as fp
from flower_privdec.audits.app_audit import audit_app
from flower_privdec.audits.one_run import OneRun
from flower_privdec.cli.main import main
from flower_privdec.common.errors import RunError, ScenarioError
from flower_privdec.flower import LocalGrid, PeerMod, PushSum, fit_privately, peer_folder
from flower_privdec.peer import app_updates

PEERS, D = 4, 16


def app_of(train: Callable[[np.ndarray], np.ndarray], **privacy: Any) -> ClientApp:
    """Return an app that turns a model into another one by a function."""
    app = ClientApp(mods=[PeerMod(**privacy)])

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        (arrays,) = message.content["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": ArrayRecord([train(arrays)]), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def far(model: np.ndarray) -> np.ndarray:
    """Return a model that is 100 times as far away as the clip norm lets it be."""
    return model + 100 / np.sqrt(D)


def audited(app: ClientApp, trials: int = 40, one_run: int | None = None, folder: Path | None = None) -> OneRun:
    def run(own: Path) -> None:
        strategy = PushSum(fraction_evaluate=0.0)
        strategy.start(LocalGrid(app, PEERS, folder=folder or own), ArrayRecord([np.zeros(D)]), num_rounds=2)

    return audit_app(run, PEERS, trials=trials, one_run=one_run, seed=1)


def test_printed_epsilon_for_updates_holds_and_little_noise_leaks() -> None:
    little = audited(app_of(far, clip_norm=1.0, noise_multiplier=0.4, delta=1e-3), 80)
    much = audited(app_of(far, clip_norm=1.0, noise_multiplier=20.0, delta=1e-3), 16)
    for result, trials in ((little, 80), (much, 16)):
        assert result.holds, result.verdict
        assert result.canaries == trials
    assert 1 < little.epsilon_lower_bound < little.epsilon
    assert 0 <= much.epsilon_lower_bound < much.epsilon < 0.5


def half(update: np.ndarray, std: float) -> np.ndarray:
    return noised(update, std / 2)


def same(update: np.ndarray, std: float) -> np.ndarray:
    return update + std * np.random.default_rng(1).normal(size=len(update))


def unclipped(update: np.ndarray, clip_norm: float) -> np.ndarray:
    return update


noised = app_updates.exactly_noised


@pytest.mark.parametrize(
    ("name", "broken", "kind"),
    [
        ("exactly_noised", half, "noise too small"),
        ("exactly_noised", same, "noise reused"),
        ("clipped", unclipped, "not clipped"),
    ],
)
def test_broken_protections_are_found_by_name(name: str, broken: Callable[..., Any], kind: str) -> None:
    app = app_of(far, clip_norm=1.0, noise_multiplier=2.0)
    assert audited(app, 8).defects == {}
    with patch.object(app_updates, name, broken):
        result = audited(app, 8)
    assert kind in result.defects
    assert not result.holds
    assert result.defects[kind] in result.verdict


def test_a_ledger_that_charges_too_little_is_found() -> None:
    charge = app_updates.PeerLedger.charge

    def once(ledger: Any, round_index: int, noise: float) -> bool:
        return True if round_index > 1 else charge(ledger, round_index, noise)

    with patch.object(app_updates.PeerLedger, "charge", once):
        assert "ledger" in audited(app_of(far, clip_norm=1.0, noise_multiplier=2.0), 8).defects


def test_an_observer_without_noise_refutes_what_is_printed() -> None:
    with patch.object(app_updates, "exactly_noised", lambda update, std: update):
        result = audited(app_of(far, clip_norm=1.0, noise_multiplier=20.0))
    assert result.epsilon_lower_bound > result.epsilon


def test_a_real_ledger_of_updates_is_refused_uncharged(tmp_path: Path) -> None:
    app = app_of(far, clip_norm=1.0, noise_multiplier=2.0)
    PushSum(fraction_evaluate=0.0).start(
        LocalGrid(app, PEERS, folder=tmp_path), ArrayRecord([np.zeros(D)]), num_rounds=1
    )
    ledgers = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    assert len(ledgers) >= PEERS
    with raises(ScenarioError, "audit.real-ledger", "peer-updates.jsonl"):
        audited(app, 8, folder=tmp_path)
    assert {path: path.read_bytes() for path in ledgers} == ledgers


def test_an_app_that_protects_nothing_is_refused() -> None:
    with raises(RunError, "audit.no-step", "PeerMod"):
        audited(app_of(far), 8)
    with raises(RunError, "audit.no-step", "private"):
        audited(app_of(far), 8, one_run=40)
    with raises(ScenarioError, "audit.trials", "trials=7"):
        audited(app_of(far), 7)


def fitted(folder: Path | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """Return what fits a regression to random examples with little noise."""
    from sklearn.linear_model import LinearRegression

    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(90, D)), draws.normal(size=90) * 10

    def train(model: np.ndarray) -> np.ndarray:
        regression = LinearRegression(fit_intercept=False)
        regression.coef_ = model
        ledger = (folder or peer_folder()) / "examples.jsonl"
        fit_privately(
            regression, x, y, ledger=ledger, delta=1e-3, noise_multiplier=0.3, batch_size=30, report=lambda _: None
        )
        return regression.coef_

    return train


def test_examples_protected_by_an_app_are_audited_once(tmp_path: Path) -> None:
    result = audited(app_of(fitted(), share_metrics=False), one_run=30)
    assert result.holds, result.verdict
    assert result.canaries == 30 * PEERS
    assert result.right > result.guesses / 2
    ledger = tmp_path / "examples.jsonl"
    fitted(tmp_path)(np.zeros(D))
    before = ledger.read_bytes()
    with raises(ScenarioError, "audit.real-ledger", "examples.jsonl"):
        audited(app_of(fitted(tmp_path), share_metrics=False), one_run=30)
    assert ledger.read_bytes() == before


# --- the command ---

PYPROJECT = """\
[project]
name = "far"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "far_app:server"
clientapp = "far_app:client"
[tool.flwr.app.config]
noise = 0.4
rounds = 3
"""
MODULE = """\
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_privdec.flower import PeerMod, PushSum

client = ClientApp(mods=[PeerMod(clip_norm=1.0, noise_multiplier="run-config:noise", delta=1e-3)])
server = ServerApp()


@client.train()
def train(message, context):
    (model,) = message.content["arrays"].to_numpy_ndarrays()
    content = {"arrays": ArrayRecord([model + 5.0]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def run(grid, context):
    strategy = PushSum(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord([np.zeros(8)]), num_rounds=context.run_config["rounds"])
    np.save("model.npy", result.arrays.to_numpy_ndarrays()[0])
    print("saved")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "far" / "far_app.py").write_text(MODULE)
    return tmp_path / "far"


def test_the_command_audits_an_app_and_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    words = ["audit", "far", "--supernodes", "4", "--trials", "16", "-c", "rounds=1"]
    with pytest.raises(SystemExit) as done:
        main([*words, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert done.value.code == 0
    assert {"claimed_epsilon", "epsilon", "epsilon_lower_bound", "method", "trials"} <= facts.keys()
    assert facts["trials"] == 16
    assert facts["holds"] is True
    assert not (folder.parent / "model.npy").exists()
    assert fp.audit_app("far", 4, trials=16, config={"rounds": 1}).epsilon == facts["epsilon"]
    with patch.object(app_updates, "exactly_noised", half), pytest.raises(SystemExit) as done:
        main(words)
    printed = capsys.readouterr()
    assert done.value.code == 1
    assert "16 canaries" in printed.out
    assert "times as large as planned" in printed.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["far", "--set", "rounds=2"], "--set must be left out of a Flower app"),
        (["far", "--plot", "a.svg"], "--plot must be left out of a Flower app"),
        (["far", "--process", "1", "--replica", "8"], "--replica, --process must be left out of a Flower app"),
        (["far", "--one-run", "4", "--trials", "8"], "--trials must be left out of a Flower app"),
        (
            ["digits", "--process", "1", "--plot", "a.svg", "--json"],
            "--plot, --json must be left out of an audit of proc",
        ),
        (["digits", "--process", "1", "--one-run", "0"], "--one-run must be left out of an audit of processes"),
        (["digits", "--one-run", "4", "--trials", "8"], "--trials must be left out of an audit in one run"),
        (["digits", "--one-run", "4", "--plot", "a.svg"], "--plot must be left out of an audit in one run"),
        (["digits", "--out", "a"], "--out must be left out of an audit of a scenario"),
        (["digits", "--supernodes", "2"], "--supernodes must be left out of an audit of a scenario"),
        (["digits", "--process", "0"], "--process 0 must be > 0"),
        (["digits", "--process", "nan"], "--process nan must be > 0"),
        (["far", "--run-config", "noises=2"], "must be KEY=VALUE with a key of the app's: noise, rounds"),
        (
            ["digits", "--run-config", "noise=2"],
            "--run-config must be left out of an audit of a scenario, which takes --set",
        ),
    ],
)
def test_options_of_the_other_kind_are_refused(
    words: list[str],
    error: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SystemExit) as done:
        main(["audit", *words])
    assert done.value.code == 2
    assert error in capsys.readouterr().err
