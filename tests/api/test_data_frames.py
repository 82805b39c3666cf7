"""Tables in memory, of pandas and of Hugging Face's datasets, given to the API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from api_sections import SECTIONS
from raising import raises

import flower_privdec as fp

pd = pytest.importorskip("pandas", reason="an extra: tables")
TABLE = {"target": "outcome", "numbers": {"age": [60, 12]}, "categories": {"ward": ["A", "B"]}, "missing": "flag"}


def frame(**columns: Any) -> Any:
    """Return 60 rows with one value missing; columns replace those that there are."""
    random = np.random.default_rng(1)
    age = random.normal(60, 12, 60)
    whole = {"age": age, "ward": np.where(age > 50, "A", "B"), "outcome": np.where(age > 60, "ill", "well")} | columns
    table = pd.DataFrame(whole)
    table.loc[7, "age"] = None if "age" not in columns else table.loc[7, "age"]
    return table


def scenario(train: Any, test: Any = None, **others: Any) -> fp.Scenario:
    data = {"train": train, "test": frame() if test is None else test, "table": TABLE, "labels": ["well", "ill"]}
    sections = SECTIONS | {"model": {"name": "linear"}, "privacy": "none"}
    return fp.make_scenario(sections, data=data | {"batch": {"size": 5}} | others)


def test_a_frame_reads_like_the_same_table_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame().to_csv("rows.csv", index=False)
    file = {"dataset": "csv", "root": "rows.csv", "test": "rows.csv", "table": TABLE, "labels": ["well", "ill"]}
    sections = SECTIONS | {"model": {"name": "linear"}, "privacy": "none"}
    of_file = fp.run(fp.make_scenario(sections, data=file | {"batch": {"size": 5}}))
    of_frame = fp.run(scenario(frame()))
    assert of_frame.model()[1].weight.shape == (2, 5)  # age, two wards, and two flags of what is missing
    assert torch.equal(of_frame.model()[1].weight != 0, of_file.model()[1].weight != 0)
    assert of_frame.metrics[0]["accuracy"].keys() == of_file.metrics[0]["accuracy"].keys()


def test_each_peer_may_have_a_frame_of_its_own() -> None:
    rows = frame()
    assert fp.run(scenario([rows[:10], rows[10:25], rows[25:45], rows[45:]])).finished


def test_a_hugging_face_dataset_is_read_by_its_columns() -> None:
    datasets = pytest.importorskip("datasets", reason="an extra: simulation")
    table = datasets.Dataset.from_pandas(frame())
    result = fp.run(scenario(table, table))
    assert result.model()[1].weight.shape == (2, 5)


def pictures(count: int = 60, mode: str = "L", sizes: tuple[int, ...] = (8,)) -> Any:
    """Return a Hugging Face dataset of images, dark or light by their label."""
    datasets = pytest.importorskip("datasets", reason="an extra: simulation")
    image = pytest.importorskip("PIL.Image", reason="an extra: images")
    labels = [i % 2 for i in range(count)]
    sides = [sizes[i % len(sizes)] for i in range(count)]
    images = [image.new("L", (n, n), 40 + 150 * y).convert(mode) for n, y in zip(sides, labels, strict=True)]
    features = datasets.Features({"pixels": datasets.Image(), "shade": datasets.ClassLabel(names=["dark", "light"])})
    return datasets.Dataset.from_dict({"pixels": images, "shade": labels}, features=features)


def of_pictures(rows: Any) -> fp.Scenario:
    data = {"train": rows, "test": rows, "batch": {"size": 5}}
    return fp.make_scenario(SECTIONS, data=data, model={"name": "linear"}, privacy="none")


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_a_hugging_face_dataset_of_images_becomes_pixels(mode: str, channels: int) -> None:
    rows = pictures(mode=mode)
    result = fp.run(of_pictures(rows))
    weight = result.model()[1].weight
    assert weight.shape == (2, channels * 64)
    assert result.metrics[-1]["accuracy"]["mean_model"] == 1


def test_images_of_other_sizes_or_modes_are_refused() -> None:
    with raises(fp.ScenarioError, "api.data", r"data\.train: column 'pixels' has shapes"):
        of_pictures(pictures(sizes=(8, 9)))
    with raises(fp.ScenarioError, "api.data", r"data\.train: column 'pixels' has images of mode \['P'\]"):
        of_pictures(pictures(mode="P"))
    with raises(fp.ScenarioError, "api.data", "name its columns in data.table"):
        of_pictures(pictures().remove_columns("shade"))


def test_regression_takes_the_target_as_a_number() -> None:
    rows = frame(outcome=np.arange(60.0))
    table = TABLE | {"target_scale": [30, 10]}
    sections = SECTIONS | {"model": {"name": "linear"}, "privacy": "none", "task": {"loss": "mse"}}
    data = {"train": rows, "test": rows, "table": table, "batch": {"size": 5}}
    assert fp.run(fp.make_scenario(sections, data=data)).finished


@pytest.mark.parametrize(
    ("columns", "others", "code", "place"),
    [
        ({"ward": "C"}, {}, "data.category", r"data\.train:0: column 'ward'"),
        ({"age": ["old"] * 60}, {}, "data.no-number", r"data\.train:0: column 'age'"),
        ({}, {"labels": ["well", "sick"]}, "data.labels", r"data\.train:\d+: column 'outcome'"),
        ({}, {"table": None}, "api.data", "data.train is a DataFrame: name its columns in data.table"),
        ({}, {"table": TABLE | {"target": "outcom"}}, "data.column", r"data\.train: has no column 'outcom'"),
        ({}, {"table": TABLE | {"missing": "refused"}}, "data.missing", r"data\.train:7: column 'age'"),
        ({}, {"table": TABLE | {"numbrs": {}}}, "scenario.extra_forbidden", "numbrs"),
    ],
)
def test_a_wrong_frame_is_refused_by_column_and_row(
    columns: dict[str, Any], others: dict[str, Any], code: str, place: str
) -> None:
    with raises(fp.ScenarioError, code, place) as error:
        scenario(frame(**columns), **others)
    assert "\n" not in str(error.value)


def test_wrong_arrays_are_named_as_they_were_given() -> None:
    x, y = np.zeros((60, 4), np.float32), np.arange(60) % 2
    sections = SECTIONS | {"model": {"name": "linear"}}

    def check(train: Any, test: Any, code: str, names: str) -> None:
        with raises(fp.ScenarioError, code, names) as error:
            fp.plan(fp.make_scenario(sections, data={"train": train, "test": test, "batch": {"size": 5}}))
        assert "__python__" not in str(error.value)

    check((x, y), (x, y + 0.5), "data.labels", r"data\.test: y is float64 .*task: \{loss: mse\}")
    check((x, y), (x[:, :3], y), "data.shapes", r"data\.train has training examples of shape \[4\]")
    check((x, y), (x, y[:50]), "data.lengths", r"data\.test: x has 60 rows for 50 labels")
