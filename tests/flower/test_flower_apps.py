"""Whole Flower apps: the adapted quickstarts, in this process and by a real `flwr run`."""

from __future__ import annotations

import difflib
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import privdec
from flwr.serverapp.strategy import FedAvg
from paths import ROOT
from raising import raises

from flower_privdec.common.errors import ScenarioError
from flower_privdec.flower import PushSum, run_in_process
from flower_privdec.flower.launch.launcher import _round_poll, run_flower_app
from flower_privdec.privacy.ledger.segments import read_chain

SIMULATIONS = ROOT / "simulations"
QUICKSTARTS = {name: SIMULATIONS / f"adapted-quickstart-{name}" for name in ("sklearn", "pytorch")}
ADAPTED = {  # and how many lines may differ from the app before
    **{name: (folder, "after", 4) for name, folder in QUICKSTARTS.items()},
    "pytorch-examples": (QUICKSTARTS["pytorch"], "after-examples", 8),
}
adapted = pytest.mark.parametrize(("folder", "to", "most"), ADAPTED.values(), ids=ADAPTED)


def changed_lines(folder: Path, to: str) -> list[str]:
    """Return the lines that the adapted app has and the other has not, blank ones aside."""
    changed = []
    for path in sorted((folder / "before").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            after = folder / to / path.relative_to(folder / "before")
            both = (each.read_text().splitlines() for each in (path, after))
            changed += [line[2:] for line in difflib.ndiff(*both) if line.startswith("+ ") and line[2:].strip()]
    return changed


def unprotected(folder: Path, to: Path) -> Path:
    """Return a copy of the adapted app whose peers are not protected."""
    shutil.copytree(folder / "after", to, ignore=shutil.ignore_patterns("__pycache__"))
    (client,) = to.glob("*/client_app.py")
    text = re.sub(r"PeerMod\(.*\)\]", "PeerMod()]", client.read_text())
    assert "PeerMod()]" in text
    client.write_text(text)
    return to


@pytest.fixture
def accuracy(monkeypatch, tmp_path):
    """Return a function that runs an app and returns the accuracy of its last round."""
    results = []

    def keeping(start):
        def started(*given, **options):
            results.append(start(*given, **options))
            return results[-1]

        return started

    for strategy in (FedAvg, PushSum):
        monkeypatch.setattr(strategy, "start", keeping(strategy.start))
    monkeypatch.chdir(tmp_path)

    def run(app: Path, rounds: int) -> float:
        torch.manual_seed(1)  # by which the apps' loaders shuffle
        random.seed(1)  # by which Flower draws the order of its nodes
        run_in_process(app, 4, config={"num-server-rounds": rounds})
        measured = results[-1].evaluate_metrics_serverapp
        assert list(measured) == list(range(rounds + 1))
        return measured[rounds]["accuracy"]

    return run


@adapted
def test_a_few_lines_make_a_quickstart_private_and_serverless(folder, to, most):
    changed = changed_lines(folder, to)
    assert len(changed) <= most
    assert any("PeerMod(" in line for line in changed)
    before, after = (
        {path.relative_to(folder / part) for path in (folder / part).rglob("*.*") if path.suffix != ".pyc"}
        for part in ("before", to)
    )
    assert before == after


@adapted
def test_the_readme_shows_the_lines_that_change(folder, to, most):
    readme = (folder / "README.md").read_text()
    assert all(f"+{line}" in readme for line in changed_lines(folder, to))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rounds"), [("sklearn", 6), ("pytorch", 8)])
@pytest.mark.versions
def test_without_noise_a_quickstart_is_as_good_as_fedavg(name, rounds, accuracy, tmp_path):
    before = accuracy(QUICKSTARTS[name] / "before", rounds)
    after = accuracy(unprotected(QUICKSTARTS[name], tmp_path / "app"), rounds)
    assert before > 0.85
    assert abs(before - after) <= 0.03


def test_the_adapted_apps_last_lines_save_the_networks_mean(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    run_in_process(QUICKSTARTS["sklearn"] / "after", 4, config={"num-server-rounds": 2})
    saved = np.load("final_model.npz")
    assert [saved[name].shape for name in saved] == [(10, 64), (10,)]
    assert all(saved[name].any() for name in saved)
    (said,) = [record.message for record in caplog.records if record.message.startswith("Privacy of peers 0, 1, 2, 3")]
    assert "unit: one peer with all its data" in said


def test_a_torch_network_keeps_its_names_and_is_saved(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_in_process(QUICKSTARTS["pytorch"] / "after", 2, config={"num-server-rounds": 1})
    saved = torch.load("final_model.pt")
    assert list(saved)[:2] == ["conv1.weight", "conv1.bias"]
    assert all(value.dtype == torch.float32 for value in saved.values())


@pytest.mark.slow
def test_examples_are_protected_over_all_rounds_without_their_loss(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    strategies, start = [], PushSum.start

    def keeping(self, *given, **options):
        self.result = start(self, *given, **options)
        strategies.append(self)
        return self.result

    monkeypatch.setattr(PushSum, "start", keeping)
    run_in_process(QUICKSTARTS["pytorch"] / "after-examples", 4, config={"num-server-rounds": 2}, folder=tmp_path)
    (strategy,) = strategies
    assert strategy.result.train_metrics_clientapp == strategy.result.evaluate_metrics_clientapp == {}
    for peer in (0, 3):
        payments = read_chain(tmp_path / f"peer-{peer}" / "examples.jsonl")[1]
        releases = [each for payment in payments for share in payment.charges for each in share.releases]
        assert {each.sampling for each in releases} == {"poisson"}
        assert sum(each.steps for each in releases) == 2 * 18  # two rounds of a pass over 287 digits by 16
        assert "train_loss" in (tmp_path / f"peer-{peer}" / "metrics.jsonl").read_text()


# What is wrong, named.


def test_a_folder_without_an_app_is_refused(tmp_path):
    with raises(ScenarioError, "app.pyproject", names="pyproject.toml"):
        run_in_process(tmp_path, 2)
    with raises(ScenarioError, "app.pyproject", names="pyproject.toml"):
        run_flower_app(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_run_config_is_refused(tmp_path):
    app = QUICKSTARTS["sklearn"] / "before"
    with raises(ScenarioError, "flower.run-config", names="'num-server-round' .*num-server-rounds"):
        run_in_process(app, 2, config={"num-server-round": 3})
    for given in ("rounds=3", "num-server-rounds"):
        with raises(ScenarioError, "flower.run-config", names=given):
            run_flower_app(app, tmp_path / "out", run_config=[given])
    with raises(ScenarioError, "flower.supernodes", names="n_supernodes=0"):
        run_flower_app(app, tmp_path / "out", n_supernodes=0)
    with raises(ScenarioError, "flower.resources", names="cpus=100000"):
        run_flower_app(app, tmp_path / "out", cpus=100_000)
    assert not (tmp_path / "out").exists()


def test_the_round_of_a_log_is_passed_on(tmp_path):
    seen = []
    rounds, log = _round_poll(lambda *both: seen.append(both)), tmp_path / "log"
    for text in (None, "starting", "[ROUND 1/3]", "[ROUND 1/3] x", "[ROUND 1/3]\n[ROUND 2/3]\n[ROUND 3/3] done"):
        if text is not None:
            log.write_text(text)
        rounds(log)
    assert seen == [(1, 3), (3, 3)]


# Really.


@pytest.mark.slow
def test_a_failing_flwr_run_exits_1_naming_its_log(tmp_path, monkeypatch, capsys):
    app = tmp_path / "app"
    shutil.copytree(QUICKSTARTS["sklearn"] / "before", app)
    server = app / "sklearn_digits" / "server_app.py"
    server.write_text(
        server.read_text().replace("    strategy = ", '    raise ValueError("the disk is on fire")\n    strategy = ')
    )
    monkeypatch.chdir(tmp_path)
    assert privdec("flower-run", "app", "--supernodes", "2") == 1
    errors = capsys.readouterr().err
    assert "the Flower run ended as finished:failed" in errors
    assert "the disk is on fire; its log is " in errors
    assert len(errors.splitlines()) == 1
