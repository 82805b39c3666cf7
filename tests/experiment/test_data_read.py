"""What was read of the data: told to its owner, and not in what leaves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from raising import raises
from tiny_scenario import Tiny
from typer.testing import CliRunner

from flower_privdec.cli.main import app
from flower_privdec.common.errors import ScenarioError
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.experiment.data_read import data_of, data_read
from flower_privdec.planner.plan import make_plan
from flower_privdec.scenario import Scenario

ROWS = "id,age,ill\n" + "1,60,yes\n" * 13 + "2,40,no\n" * 27
TABLE = "{target: ill, numbers: {age: [50, 10]}}"
COUNTED = "data.root=train.csv: 40 rows, 1 column, 2 classes (no 27, yes 13); left 1 column (id)"


@pytest.fixture
def tabled(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text(ROWS)
    Path("test.csv").write_text("age,ill\n60,yes\n40,no\n40,no\n")
    data = "dataset: csv, root: train.csv, test: test.csv, labels: ['no', 'yes'], batch: {size: 2}"
    return tiny(f"data={{{data}, table: {TABLE}}}", "model.name=linear", "rounds=2")


def test_a_plan_says_what_was_read_and_left(tabled: Scenario) -> None:
    told = make_plan(Experiment.build(tabled))["data"]
    assert told["train"].endswith(COUNTED.partition("=")[2].partition("/")[2])
    assert "3 rows, 1 column, 2 classes (no 2, yes 1)" in told["test"]
    assert data_of(tabled) == told


def test_a_private_summary_counts_no_class(tabled: Scenario) -> None:
    summary = run(Experiment.build(tabled), Path("out"))
    assert summary["data"]["train"].endswith("40 rows, 1 column, 2 classes; left 1 column (id)")
    assert not any(count in Path("out/summary.json").read_text() for count in ("no 27", "yes 13"))

    # Another class of one example changes what the owner is told, and nothing of the summary's line.
    Path("train.csv").write_text(ROWS.replace("yes", "no", 1))
    assert "no 28" in data_of(tabled)["train"]
    assert run(Experiment.build(tabled), Path("again"))["data"] == summary["data"]


def test_a_summary_without_privacy_counts_classes(tabled: Scenario) -> None:
    plain = tabled.model_copy(update={"privacy": "none"})
    assert "(no 27, yes 13)" in run(Experiment.build(plain), Path("out"))["data"]["train"]


def test_one_peer_tells_its_own_file_only(tabled: Scenario) -> None:
    for peer in range(4):
        Path(f"site-{peer}.csv").write_text("age,ill\n" + "60,yes\n" * (5 + peer))
    data = tabled.data.model_copy(update={"root": "site-{peer}.csv"})
    scenario = tabled.model_copy(update={"data": data})
    experiment = Experiment.build(scenario, np.array([2]))
    told = data_read(experiment, experiment.own.examples)["train"]
    assert told == "data.root=site-2.csv: 7 rows, 1 column, 2 classes (no 0, yes 7)"


@pytest.mark.parametrize(("root", "test"), [("train.csv", "train.csv"), ("site-{peer}.csv", "site-2.csv")])
def test_a_private_file_is_no_test_set(tabled: Scenario, tiny: Tiny, root: str, test: str) -> None:
    data = f"dataset: csv, root: '{root}', test: {test}, labels: ['no', 'yes'], table: {TABLE}, batch: {{size: 2}}"
    with raises(ScenarioError, "data.test-is-private", names=test):
        tiny(f"data={{{data}}}")
    tiny(f"data={{{data}}}", "privacy=none")


def test_show_reads_the_data_on_request(tabled: Scenario) -> None:
    from flower_privdec.scenario import to_yaml

    Path("own.yaml").write_text(to_yaml(tabled))

    def shown(*more: str) -> Result:
        return CliRunner().invoke(app, ["show", "own.yaml", *more])

    assert "# train:" not in shown().output
    assert "left 1 column (id)" in shown("--data").output
    Path("train.csv").unlink()
    assert shown().exit_code == 0
    assert isinstance(shown("--data").exception, ScenarioError)


def test_frames_tell_the_columns_that_they_left() -> None:
    pandas = pytest.importorskip("pandas")
    import flower_privdec as fp

    frame = pandas.DataFrame({"id": [1, 2] * 10, "age": [60, 40] * 10, "ill": ["yes", "no"] * 10})
    table = {"target": "ill", "numbers": {"age": [50, 10]}}
    plan = fp.plan(
        fp.make_scenario(
            name="frames",
            n_peers=2,
            rounds=2,
            data={"train": frame, "test": frame, "table": table, "labels": ["no", "yes"], "batch": {"size": 2}},
            model={"name": "linear"},
            algorithm={"name": "privsgp", "learning_rate": 0.5},
            privacy="none",
        )
    )
    assert plan.facts["data"]["train"] == "data.train: 20 rows, 1 column, 2 classes (no 10, yes 10); left 1 column (id)"


def test_arrays_of_no_half_are_told(tiny: Tiny, tmp_path: Path) -> None:
    halves = {f"{name}_{part}": np.arange(8) % 2 for name in "xy" for part in ("train", "test")}
    halves |= {f"x_{part}": np.ones((8, 3)) for part in ("train", "test")}
    np.savez(tmp_path / "own.npz", **halves, x_validation=np.ones(3))
    told = data_of(tiny(f"data={{dataset: npz, root: {tmp_path}/own.npz, batch: {{size: 2}}}}"))
    assert told["train"].endswith("8 rows, 3 features, 2 classes (0 4, 1 4); left 1 array (x_validation)")
    assert json.dumps(told)
