"""Precision, recall and F1 of each class: in a run's files, in what is shown of it, and in comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from sklearn import metrics as reference
from tiny_scenario import Build, Tiny

import flower_privdec as fp
from flower_privdec import testing
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.reporting.console import print_summary
from flower_privdec.reporting.page import write_report
from flower_privdec.reporting.progress import scalars
from flower_privdec.reporting.run_folder import read_result

ASKED = "evaluation.by_class=true"
SETTINGS = ["privacy=none", "rounds=4", ASKED]


def predictions(experiment: Any, rows: Any) -> list[list[int]]:
    """What the mean model, and then each peer's, predicts of the public test set."""
    algorithm = experiment.algorithm
    models = [algorithm.mean_model(rows), *algorithm.models(rows)]
    outputs = [experiment.kernel.logits(model[None], experiment.public.x.to(model))[0] for model in models]
    return [experiment.loss.predict(one).tolist() for one in outputs]


def test_a_run_s_figures_are_those_of_its_models(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the mean model and over the peers, in metrics.jsonl, the summary, the terminal, the page and scalars."""
    experiment = build(*SETTINGS)
    summary = run(experiment, tmp_path / "run")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["by_class"] == summary["by_class"]

    of_mean, *of_peers = predictions(experiment, testing.run_rounds(build(*SETTINGS), 4).state.rows)
    y = experiment.public.y.tolist()
    digits = range(experiment.public.n_classes)
    expected = reference.f1_score(y, of_mean, labels=digits, average=None, zero_division=0)
    by_peer = [reference.f1_score(y, of_one, labels=digits, average=None, zero_division=0) for of_one in of_peers]
    for digit, values in enumerate(zip(*by_peer, strict=True)):
        of_class = summary["by_class"][str(digit)]
        assert of_class["support"] == y.count(digit)
        assert of_class["f1"]["mean_model"] == pytest.approx(expected[digit])
        assert of_class["f1"]["peer_min"] == pytest.approx(min(values))
        assert of_class["f1"]["peer_max"] == pytest.approx(max(values))
        assert summary["peers"]["by_class"][str(digit)]["f1"] == pytest.approx(values)

    result = read_result(tmp_path / "run")
    print_summary(result.summary, tmp_path / "run")
    shown = f"{100 * expected[3]:.1f} %"
    assert shown in capsys.readouterr().out
    write_report([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h4>By class</h4>" in page
    assert f"<td>{shown}</td>" in page
    assert scalars(line)["by_class/3/f1/mean_model"] == pytest.approx(expected[3])


def test_several_processes_measure_each_class_alike(build: Build, tmp_path: Path) -> None:
    alone = run(build(*SETTINGS), tmp_path / "alone", workers=1)
    together = run(build(*SETTINGS), tmp_path / "together", workers=2)
    assert together["by_class"] == alone["by_class"]


def test_a_comparison_reads_one_class(tiny: Tiny) -> None:
    scenario = tiny(*SETTINGS)
    names = ["by_class.3.f1", "by_class.3.recall.peer_min"]
    (row,) = fp.compare(scenario, metrics=names, seeds=[0]).rows
    assert all(0 <= row[name]["mean"] <= 1 for name in names)
    with raises(ScenarioError, "study.unknown-class", names="class three"):
        fp.compare(scenario, metrics=["by_class.three.f1"], seeds=[0])
    with raises(ScenarioError, "api.argument", names="evaluation.by_class=true"):
        fp.compare(tiny(), metrics=names, seeds=[0])


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["task.metrics=[accuracy, f1]"], "metrics.by-class"),
        (["data={dataset: diabetes, batch: {size: 8}}", "model={name: linear}", "task.loss=mse", ASKED], ""),
    ],
    ids=["as a metric", "numbers"],
)
def test_figures_of_classes_need_classes(tiny: Tiny, settings: list[str], code: str) -> None:
    with raises(ScenarioError, code or "evaluation.by-class", names="evaluation.by_class"):
        tiny(*settings)
