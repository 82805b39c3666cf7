"""Tables: what becomes of each column, and one line for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises
from tiny_scenario import Tiny

from flower_privdec import testing
from flower_privdec.common.catalogue import Targets
from flower_privdec.common.errors import ScenarioError
from flower_privdec.data.table_columns import from_frame
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import Scenario
from flower_privdec.scenario.file_sections import TableSection

TEST = "age,sex,bmi,ill\n60,f,25,yes\n40,m,30,no\n50,f,20,no\n"
ROWS = "age,sex,bmi,ill\n" + "70,m,35,yes\n30,f,20,no\n" * 10
TABLE = "target: ill, numbers: {age: [50, 10], bmi: [25.0, 5]}, categories: {sex: [f, m]}"
Tabled = Callable[..., Scenario]


@pytest.fixture
def tabled(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tabled:
    """Return a function that writes files and makes a scenario over them."""
    monkeypatch.chdir(tmp_path)

    def make(train: str = ROWS, test: str = TEST, more: str = "", *settings: str, root: str = "train.csv") -> Scenario:
        (tmp_path / "train.csv").write_text(train)
        (tmp_path / "test.csv").write_text(test)
        data = f"dataset: csv, root: '{root}', test: test.csv, labels: ['no', 'yes'], batch: {{size: 2}}"
        return tiny(f"data={{{data}, table: {{{TABLE}{more}}}}}", "model.name=linear", *settings)

    return make


def read(scenario: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    public = Experiment.build(scenario).public
    return public.x, public.y


def test_columns_become_numbers_by_the_scenario_s_constants(tabled: Tabled) -> None:
    x, y = read(tabled())
    assert x.tolist() == [[1, 0, 1, 0], [-1, 1, 0, 1], [0, -1, 1, 0]]
    assert y.tolist() == [1, 0, 0]
    testing.run_rounds(Experiment.build(tabled()), 2)


def test_features_depend_only_on_their_own_row(tabled: Tabled) -> None:
    one = Experiment.build(tabled()).own.examples
    other = Experiment.build(tabled(ROWS.replace("70,m,35,yes", "99,f,99,no", 1))).own.examples
    assert (one.x != other.x).any(1).sum() == 1


@pytest.mark.parametrize(("missing", "width"), [("center", 4), ("flag", 7)])
def test_missing_values_become_centers_or_have_flags(missing: str, width: int, tabled: Tabled) -> None:
    test = "sex,age,bmi,ill\nm, NA ,?,yes\n,50,25,no\n"
    x, _ = read(tabled(test=test, more=f", missing: {missing}"))
    assert x[:, :4].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert x.shape == (2, width)
    if missing == "flag":
        assert x[:, 4:].tolist() == [[1, 1, 0], [0, 0, 1]]


def test_hospitals_with_unequal_columns_train_together(tabled: Tabled, tmp_path: Path) -> None:
    for peer, text in enumerate((ROWS, ROWS.replace("bmi", "weight"), ROWS.replace("35", ""), ROWS)):
        (tmp_path / f"hospital-{peer}.csv").write_text(text)
    experiment = Experiment.build(tabled(root="hospital-{peer}.csv", more=", missing: flag"))
    assert experiment.own.examples.sizes.tolist() == [20] * 4
    flags = [experiment.own.examples.x[part][:, 5].sum().item() for part in experiment.own.examples.parts]
    assert flags == [0, 20, 10, 0]


def test_a_number_is_learned_in_its_scale(tabled: Tabled) -> None:
    text = TEST.replace("yes", "200").replace("no", "100")
    scenario = tabled(
        ROWS.replace("yes", "200").replace("no", "100"), text, ", target_scale: [150, 50]", "task.loss=mse"
    )
    data = scenario.data.model_copy(update={"labels": None})
    _, y = read(scenario.model_copy(update={"data": data}))
    assert y.tolist() == [[1], [-1], [-1]]


def test_parquet_is_read_as_csv_is(tabled: Tabled, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    scenario = tabled()
    expected = read(scenario)
    columns = {"age": [60, 40, 50], "sex": ["f", "m", "f"], "bmi": [25.0, 30.0, 20.0], "ill": ["yes", "no", "no"]}
    parquet.write_table(arrow.table(columns), tmp_path / "test.parquet")
    data = scenario.data.model_copy(update={"dataset": "parquet", "test": "test.parquet", "root": "test.parquet"})
    settings = scenario.model_copy(update={"data": data, "n_peers": 2})
    from flower_privdec.data import read_public

    public = read_public(settings.data, 1)
    assert torch.equal(public.x, expected[0])
    assert torch.equal(public.y, expected[1])
    (tmp_path / "test.parquet").write_text("no parquet")
    with raises(ScenarioError, "data.unreadable", names="test.parquet"):
        read_public(settings.data, 1)


@pytest.mark.parametrize(
    ("test", "code", "names"),
    [
        ("age,sex,ill\n60,f,yes\n", "data.column", "test.csv.*'bmi'.*missing"),
        ("age,sex,bmi,sick\n60,f,25,yes\n", "data.column", "'ill'"),
        ("age,sex,bmi,ill,age\n60,f,25,yes,1\n", "data.column", "2 columns 'age'"),
        ("age,sex,bmi,ill\n60,f,25,yes\nelderly,f,25,yes\n", "data.no-number", "test.csv:3.*'age'"),
        ("age,sex,bmi,ill\n60,f,nan5,yes\n", "data.no-number", "test.csv:2.*'bmi'"),
        ("age,sex,bmi,ill\n60,f,inf,yes\n", "data.no-number", "test.csv:2.*'bmi'"),
        ("age,sex,bmi,ill\n60,f,,yes\n", "data.missing", "test.csv:2.*'bmi'"),
        ("age,sex,bmi,ill\n60,x7,25,yes\n", "data.category", "test.csv:2.*'sex'"),
        ("age,sex,bmi,ill\n60,f,25,perhaps\n", "data.labels", "test.csv:2.*'ill'"),
        ("age,sex,bmi,ill\n60,f,25,\n", "data.missing", "test.csv:2.*'ill'"),
        ("age,sex,bmi,ill\n60,f,25\n", "data.line", "test.csv:2.*3 values"),
        ("a\0g\0e\0,\0s\0e\0x\0,\0b\0m\0i\0,\0i\0l\0l\0\n\0", "data.unreadable", "test.csv.*save it as UTF-8"),
        ("age,sex,bmi,ill\n1,60,f,25,yes\n", "data.line", "test.csv:2.*row.names=FALSE"),
        ("age,sex,bmi,ill\n60,f,25,yes\n60,f,2,5,yes\n", "data.line", "test.csv:3.*5 values.*needs quotes\\)$"),
        ("age,sex,bmi,ill\n", "data.empty", "test.csv"),
        ('age,sex,bmi,ill\n60,f,25,yes\n60,"f,25,yes\n60,m,25,yes\n', "data.line", "test.csv:3.*quotes"),
        ("", "data.empty", "test.csv"),
        ("age;sex;bmi;ill\n60;f;25;yes\n", "data.column", "delimiter.*';'"),
        ("age\tsex\tbmi\till\n60\tf\t25\tyes\n", "data.column", r"delimiter.*'\\t'"),
    ],
)
def test_a_wrong_table_names_row_and_column_never_values(test: str, code: str, names: str, tabled: Tabled) -> None:
    with raises(ScenarioError, code, names=names) as caught:
        read(tabled(test=test))
    message = str(caught.value)
    assert "\n" not in message
    assert not any(secret in message for secret in ("elderly", "nan5", "x7", "perhaps"))


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (", target_scale: [0, 0]", "table.scale"),
        (", target_scale: [60]", "table.scaling"),
        (", target_scale: 60", "table.scaling"),
        (", target_scale: [60, 1, 2]", "table.scaling"),
        (", numbers: {ill: [0, 1]}", "table.columns"),
        (", numbers: {age: [60]}", "table.scaling"),
    ],
)
def test_a_table_without_public_constants_is_refused(more: str, code: str, tabled: Tabled, tiny: Tiny) -> None:
    table = TABLE if "numbers" not in more else "target: ill"
    with raises(ScenarioError, code):
        tiny(f"data={{dataset: csv, test: t.csv, root: r.csv, batch: {{size: 2}}, table: {{{table}{more}}}}}")


def test_boolean_columns_are_classes_0_and_1() -> None:
    table = TableSection(target="ill", numbers={"age": (50.0, 10.0)})
    frame: dict[str, list[Any]] = {"age": [60, 40], "ill": [True, False]}
    _, y, _ = from_frame(list(frame), frame.__getitem__, "data.train", table, None, "classes")
    assert y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("scale", "labels", "targets", "key"),
    [((0.0, 2.0), None, "classes", "target_scale"), (None, ["no", "yes"], "numbers", "data.labels")],
)
def test_an_unused_key_for_targets_is_refused(
    scale: tuple[float, float] | None, labels: list[str] | None, targets: Targets, key: str
) -> None:
    table = TableSection(target="ill", numbers={"age": (50.0, 10.0)}, target_scale=scale)
    frame: dict[str, list[Any]] = {"age": [60, 40], "ill": [1, 0]}
    with raises(ScenarioError, "data.targets", names=key):
        from_frame(list(frame), frame.__getitem__, "data.train", table, labels, targets)


def test_classes_with_a_decimal_point_suggest_regression(tiny: Tiny, tmp_path: Path) -> None:
    arrays = {
        "x_train": np.ones((40, 3)),
        "x_test": np.ones((9, 3)),
        "y_train": np.full(40, 0.5),
        "y_test": np.full(9, 0.5),
    }
    np.savez(tmp_path / "own.npz", **arrays)
    with raises(ScenarioError, "data.labels", names=r"task: \{loss: mse\}"):
        Experiment.build(tiny(f"data={{dataset: npz, root: {tmp_path / 'own.npz'}, batch: {{size: 2}}}}"))
