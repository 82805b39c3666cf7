"""What other commands do, from Python: networks, graphs, reports, ledgers, studies, and how results show themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_sections import SECTIONS
from pages import fences
from paths import ROOT
from raising import raises

import flower_privdec as fp
from flower_privdec.scenario import parse_scenario


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fp.RunResult:
    return fp.run(fp.make_scenario(SECTIONS), out=tmp_path_factory.mktemp("runs") / "tiny")


def test_a_printed_scenario_is_yaml_of_the_same_scenario() -> None:
    scenario = fp.make_scenario(SECTIONS)
    assert parse_scenario(str(scenario)) == scenario


def test_results_show_themselves_in_a_notebook(result: fp.RunResult) -> None:
    pytest.importorskip("matplotlib")
    shown: list[Any] = [result, fp.plan(result.scenario), fp.topology(result.scenario)]
    for one in shown:
        page = one._repr_html_()
        assert page.count("<svg") == page.count("</svg>") == 1
        assert "var(--series-0)" in page
        assert "[data-jp-theme-light=false]" in page
        assert repr(one) == str(one)
    picture = result.plot("loss")
    assert picture.axes[0].get_lines()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert "Consensus distance" in result.plot("consensus").axes[0].get_title(loc="left")
    with raises(fp.ScenarioError, "api.argument", "accuracy, loss"):
        result.plot("acuracy")


def test_a_comparison_plots_a_point_for_each_row() -> None:
    pytest.importorskip("matplotlib")
    table = fp.compare(fp.make_scenario(SECTIONS, rounds=2), ["sgp", "local"], seeds=[1])
    labels = [text.get_text() for text in table.plot().axes[0].get_xticklabels()]
    assert labels == ["sgp", "local"]
    assert "sgp" in table._repr_html_()


def test_a_graph_is_described_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    graph = fp.topology(fp.make_scenario(SECTIONS), out=tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().count("<svg")
    assert "directed-exponential: 4 peers" in str(graph)
    assert graph.facts["n_peers"] == 4
    assert len(graph.plot().axes) == 2
    alone = fp.topology(fp.make_scenario(SECTIONS, algorithm={"name": "local", "learning_rate": 0.5}))
    assert "exchanges nothing" in str(alone)
    assert "<svg" not in alone._repr_html_()
    with raises(fp.ScenarioError, "api.argument", "exchanges nothing"):
        alone.plot()


def test_a_report_takes_results_folders_and_a_ledger(result: fp.RunResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = fp.report(result, tmp_path / "one.html")
    assert page.read_text() == fp.report([str(result.folder)], tmp_path / "two.html").read_text()
    (facts,) = fp.ledger(result.folder, 1e-3, epsilon=5)
    assert facts["epsilon"] == pytest.approx(result.privacy[0]["epsilon"])
    assert facts["left"] == pytest.approx(5 - facts["epsilon"])


STUDY = (
    "name: sweep\nbase: base.yaml\nparts: [{name: budgets, axes: {epsilon: {key: privacy.epsilon, values: [1, 3]}}}]"
)


def test_a_study_from_python_runs_and_has_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(str(fp.make_scenario(SECTIONS)))
    Path("sweep.yaml").write_text(STUDY)
    study = fp.study("sweep.yaml", settings={"rounds": 2})
    assert study.folder == Path("results/sweep")
    assert (study.folder / "README.md").is_file()
    assert (study.failures, study.verdicts) == ({}, {"budgets": []})
    assert "test accuracy" in str(study)
    again = fp.study("sweep.yaml", jobs=0, settings={"rounds": 2})
    assert str(again) == str(study)
    with raises(fp.ScenarioError, "api.argument", "'main'"):
        study.frame("main")


@pytest.mark.slow
def test_peers_on_this_machine_train_as_by_the_command(tmp_path: Path) -> None:
    rounds: list[int] = []
    scenario = fp.make_scenario(SECTIONS, {"network.mode": "synchronous"}, n_peers=2)
    result = fp.up(
        scenario,
        out=tmp_path / "up",
        insecure_seeds=True,
        on_evaluation=lambda metrics: rounds.append(metrics["round"]),
        on_end=lambda one: rounds.append(-1),
    )
    assert result.finished
    assert rounds == [2, 4, 6, -1]
    assert result.summary["runtime"] == "network"
    stopped = fp.up(scenario, out=tmp_path / "stopped", on_evaluation=lambda metrics: metrics["round"] == 4)
    assert not stopped.finished
    assert (stopped.summary["stopped_at"], stopped.summary["stopped_by"]) == (4, "callback")
    assert stopped.model(0)[1].weight.shape == stopped.model()[1].weight.shape
    assert fp.up(scenario, out=tmp_path / "stopped", resume=True).finished


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda s, out: fp.run(s, out=out), "run.folder-taken", "resume=True"),
        (lambda s, out: fp.run(s, out=out / "new", resume=True), "run.no-checkpoint", "leave resume out"),
        (lambda s, out: fp.up(s, loss=2), "up.loss", "^loss=2 "),
        (lambda s, out: fp.up(s, loss="all"), "api.argument", "loss='all'"),
        (lambda s, out: fp.up(s, kill=[3]), "api.argument", r"kill=\[3\]"),
        (lambda s, out: fp.up(s, kill={1: 100}), "up.kill", "^kill=1@100"),
        (lambda s, out: fp.up(s, on_end=3), "api.argument", "on_end=3"),
        (lambda s, out: fp.report(out, "page.txt"), "reporting.suffix", "^out=page.txt"),
        (lambda s, out: fp.report([]), "api.argument", "runs is empty"),
        (lambda s, out: fp.topology(s, out="graph.xls"), "reporting.suffix", "^out=graph.xls"),
        (lambda s, out: fp.ledger(out, 1e-3, epsilon=-1), "ledger.budget", "^epsilon=-1"),
        (lambda s, out: fp.ledger(out / "nothing", 1e-3), "ledger.none", "nothing"),
        (lambda s, out: fp.study(3), "api.argument", "name=3"),
        (lambda s, out: fp.study("digits", only="main"), "api.argument", "only='main'"),
        (lambda s, out: fp.compare(s, "privsgp"), "api.argument", r"\['privsgp'\]"),
    ],
)
def test_errors_of_python_are_one_line_in_pythons_words(
    result: fp.RunResult, call: Callable[[fp.Scenario, Path], object], code: str, words: str
) -> None:
    with raises(fp.ScenarioError, code, words) as error:
        call(result.scenario, result.folder)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)


# --- loggers ---


def logger_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `run_logged` of a page's logger, its files going to a folder."""
    (fence,) = [fence for fence in fences(ROOT / "docs/how-to/python.md") if fence.title == f"log_{name}.py"]
    assert len([line for line in fence.text.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(fence.text, fence.title or "", "exec"), names)
    return names["run_logged"]


def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not a dependency: its logger is tried where it is installed")
    logged: list[tuple[int, dict[str, float]]] = []
    actual = wandb.Run.log

    def log(run: Any, values: dict[str, float], step: int) -> None:
        logged.append((step, values))
        actual(run, values, step=step)

    monkeypatch.setattr(wandb.Run, "log", log)
    result = logger_of("wandb", tmp_path, monkeypatch)(fp.make_scenario(SECTIONS))
    assert result.finished
    assert logged == [(record["round"], fp.scalars(record)) for record in result.metrics]
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_logs_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip(
        "mlflow", reason="mlflow is not a dependency: its logger is tried where it is installed"
    )
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    result = logger_of("mlflow", tmp_path, monkeypatch)(fp.make_scenario(SECTIONS))
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "accuracy/mean_model")
    assert [(point.step, point.value) for point in history] == [
        (record["round"], record["accuracy"]["mean_model"]) for record in result.metrics
    ]
    assert run.data.params["n_peers"] == "4"
