"""Tables as hospitals export them: each kind is read by a key, or refused with the key that reads it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from own_files import followed, read, scenario_of
from raising import raises

from flower_privdec.common.errors import ScenarioError

HEADER = "age,sex,bmi,ill\n"
ROWS = ("60,f,25,yes\n", "40,m,30,no\n", "50,f,20,no\n")
GOOD = HEADER + "".join(ROWS)
X = [[1, 0, 1, 0], [-1, 1, 0, 1], [0, -1, 1, 0]]
SECRETS = ("elderly", "x7", "perhaps", "1961", "60.5", "60,5", "1,234", "-999")  # of rows, which no error quotes
Keys = dict[str, Any]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(content: str | bytes, labels: list[str] | None = None, dataset: str = "csv", **keys: Any) -> dict[str, Any]:
    """Return data of one file, which is the test set, too; keys are of `data.table`."""
    raw = content if isinstance(content, bytes) else content.encode()
    for name in ("train", "test"):
        Path(f"{name}.{dataset}").write_bytes(raw)
    columns = {"target": "ill", "numbers": {"age": [50, 10], "bmi": [25, 5]}, "categories": {"sex": ["f", "m"]}}
    files = {"root": f"train.{dataset}", "test": f"test.{dataset}"}
    data = {"dataset": dataset, **files, "table": {**columns, **keys}, "batch": {"size": 1}}
    if labels != []:
        data["labels"] = labels or ["no", "yes"]
    return data


def parquet(**columns: list[Any]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    file = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), file)
    return file.getvalue()


def with_age(*ages: str) -> str:
    rows = [f"{age},{row.partition(',')[2]}" for age, row in zip(ages, ROWS, strict=False)]
    return HEADER + "".join(rows)


READ: dict[str, tuple[str | bytes, Keys]] = {
    "plain": (GOOD, {}),
    "columns in another order": ("ill,bmi,sex,age\nyes,25,f,60\nno,30,m,40\nno,20,f,50\n", {}),
    "columns of no use": ("id,age,sex,bmi,ill\n1,60,f,25,yes\n2,40,m,30,no\n3,50,f,20,no\n", {}),
    "spaces around": (GOOD.replace(",", " , "), {}),
    "a mark of the byte order": (b"\xef\xbb\xbf" + GOOD.encode(), {}),
    "lines of Windows": (GOOD.replace("\n", "\r\n"), {}),
    "lines of an old Mac": (GOOD.replace("\n", "\r"), {}),
    "empty rows of a spreadsheet": (GOOD + ",,,\n\n,,,\n", {}),
    "quotes": (GOOD.replace("60", '"60"').replace("yes", '"yes"'), {}),
    "renamed": (GOOD.replace("age", "AGE (y)"), {"rename": {"AGE (y)": "age"}}),
    "tabs": (GOOD.replace(",", "\t"), {"delimiter": "\\t"}),
    "whichever delimiter": (GOOD.replace(",", "|"), {"delimiter": "auto"}),
    "decimal commas": (GOOD.replace(",", ";").replace("25", "25,0"), {"delimiter": ";", "decimal": ","}),
    "either mark": (with_age('"60,0"', "40.0", "50"), {"decimal": "either"}),
    "thousands": (
        GOOD.replace("60", "1.060,0")
        .replace("40", "1040")
        .replace("50", "1050")
        .replace(",", ";")
        .replace(";0;", ",0;"),
        {"numbers": {"age": [1050, 10], "bmi": [25, 5]}, "delimiter": ";", "decimal": ",", "thousands": "."},
    ),
    "thousands apart by a space": (
        with_age("1\u00a0060", "1040", "1 050"),
        {"numbers": {"age": [1050, 10], "bmi": [25, 5]}, "thousands": " "},
    ),
    "another minus": (with_age("\u221260", "\u221240", "-50"), {"numbers": {"age": [-50, 10], "bmi": [25, 5]}}),
    "another case": (GOOD.replace("f", "F").replace("yes", "YES"), {"ignore_case": True}),
    "other spellings": (
        GOOD.replace(",f,", ",female,").replace("yes", "ja"),
        {"spellings": {"sex": {"female": "f"}, "ill": {"ja": "yes"}}},
    ),
    "codes with a point": (GOOD.replace(",f,", ",1.0,").replace(",m,", ",2,"), {"categories": {"sex": ["1", "2"]}}),
    "bounds": (GOOD, {"bounds": {"age": [40, 60]}}),
    "accents in two signs": (
        GOOD.replace("sex", "Gescha\u0308ft").replace(",f,", ",fu\u0308r,"),
        {"categories": {"Gesch\u00e4ft": ["f\u00fcr", "m"]}},
    ),
    "gz": (gzip.compress(GOOD.encode(), mtime=0), {}),
    "bz2": (bz2.compress(GOOD.encode()), {}),
    "utf-16": (GOOD.encode("utf-16"), {"encoding": "utf-16"}),
    "cp1252": (
        GOOD.replace(",f,", ",für,").encode("cp1252"),
        {"encoding": "cp1252", "categories": {"sex": ["für", "m"]}},
    ),
}


def expected(kind: str) -> torch.Tensor:
    x = torch.tensor(X, dtype=torch.float32)
    if kind == "another minus":
        x[:, 0] *= -1
    return x


@pytest.mark.parametrize("kind", READ)
def test_a_table_is_read(kind: str) -> None:
    content, keys = READ[kind]
    result = read(table(content, **keys))
    torch.testing.assert_close(result.x, expected(kind))
    assert result.y.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", [kind for kind, (content, _) in READ.items() if isinstance(content, str)])
def test_a_row_is_read_whatever_the_others_are(kind: str) -> None:
    content, keys = READ[kind]
    assert isinstance(content, str)
    data = table(content, **keys)
    whole = read(data)
    lines = content.splitlines(keepends=True)
    Path("train.csv").write_text("".join([*lines[:2], lines[3]]), newline="")
    assert torch.equal(read(data).x, whole.x[[0, 2]])


REFUSED: dict[str, tuple[str | bytes, Keys, str, str]] = {
    "capitals": (GOOD.replace("age", "Age"), {}, "data.column", "'Age'"),
    "capitals, missing allowed": (GOOD.replace("age", "Age"), {"missing": "flag"}, "data.column", "'Age'"),
    "a unit in the name": (GOOD.replace("bmi", "bmi (kg/m2)"), {"missing": "flag"}, "data.column", "kg/m2"),
    "another column of the name": (GOOD.replace("age", "age_group"), {"missing": "flag"}, "data.column", "age_group"),
    "a sign that is not seen": (GOOD.replace("age", "\u200bage"), {}, "data.column", "u200bage"),
    "a name of two lines": (GOOD.replace("age", '"age\nin years"'), {}, "data.column", "in years"),
    "semicolons": (GOOD.replace(",", ";"), {}, "data.column", "delimiter"),
    "tabs": (GOOD.replace(",", "\t"), {}, "data.column", "delimiter"),
    "decimal commas": (with_age('"60,5"', "40", "50"), {}, "data.no-number", "data.table.decimal"),
    "decimal commas in a line of semicolons": (
        GOOD.replace(",", ";").replace("60", "60,5"),
        {"delimiter": ";"},
        "data.no-number",
        "data.table.decimal",
    ),
    "thousands": (with_age('"1,234.5"', "40", "50"), {}, "data.no-number", "data.table.thousands"),
    "thousands of a kind": (
        with_age('"1.234,5"', "40", "50"),
        {},
        "data.no-number",
        "decimal=',' with .*thousands='.'",
    ),
    "a point if commas are read": (with_age("60.5", '"40,5"'), {"decimal": ","}, "data.no-number", "decimal='either'"),
    "another mark at the next site": (with_age('"60,5"', "40"), {}, "data.no-number", "decimal='either' if sites"),
    "thousands or decimals": (with_age('"1,234"', "40", "50"), {}, "data.no-number", "decimal=',', or .*thousands=','"),
    "thousands where either mark is read": (
        with_age('"1,234"', "40", "50"),
        {"decimal": "either"},
        "data.no-number",
        "thousands",
    ),
    "Swiss thousands": (with_age("1'234.50", "40", "50"), {}, "data.no-number", 'thousands="\'"'),
    "N/A beside codes of one's own": (with_age("N/A", "40"), {"missing_values": ["-999"]}, "data.no-number", "'N/A'"),
    "unknown": (with_age("unknown", "40", "50"), {}, "data.no-number", "missing_values"),
    "a capital": (GOOD.replace("f", "F", 1), {}, "data.category", "ignore_case"),
    "cp1252": (
        GOOD.replace(",f,", ",für,").encode("cp1252"),
        {"categories": {"sex": ["für", "m"]}},
        "data.unreadable",
        "encoding=cp1252",
    ),
    "utf-16": (GOOD.encode("utf-16"), {}, "data.unreadable", "encoding=utf-16"),
    "a missing value": (with_age("", "40", "50"), {}, "data.missing", "missing=flag"),
    "a category like a missing value": (
        GOOD.replace(",f,", ",NA,"),
        {"categories": {"sex": ["NA", "m"]}},
        "table.missing-values",
        "missing_values",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_table_is_read_after_its_remedies(kind: str) -> None:
    content, keys, code, names = REFUSED[kind]
    data = table(content, **keys)
    with raises(ScenarioError, code, names=names) as caught:
        read(data)
    message = str(caught.value)
    assert "\n" not in message
    assert not any(secret in message.partition("missing_values=")[0] for secret in SECRETS)
    assert followed(data)


@pytest.mark.parametrize("labels", ["1 2", "-1 1", "1.0 2.0"])
def test_numbered_classes_are_named(labels: str) -> None:
    first, second = labels.split()
    data = table(GOOD.replace("no", first).replace("yes", second), labels=[])
    with raises(ScenarioError, "data.labels", names="data.labels"):
        read(data)
    data["labels"] = [str(int(float(first))), str(int(float(second)))]
    assert read(data).y.tolist() == [1, 0, 0]


@pytest.mark.parametrize("labels", ["0.0 1.0", "0 1", "0 1.0"])
def test_classes_0_and_1_need_no_names(labels: str) -> None:
    first, second = labels.split()
    assert read(table(GOOD.replace("no", first).replace("yes", second), labels=[])).y.tolist() == [1, 0, 0]


WRONG: list[tuple[str | bytes, Keys, str, str]] = [
    (with_age("1961-03-05", "40"), {}, "data.no-number", "date"),
    (with_age("60 years", "40"), {}, "data.no-number", "unit"),
    (with_age("<60", "40"), {}, "data.no-number", "sign"),
    (with_age("1_000", "40"), {}, "data.no-number", "'age'"),
    (with_age("\uff16\uff10", "40"), {}, "data.no-number", "'age'"),
    (with_age("1e400", "40"), {}, "data.no-number", "float32"),
    (with_age("-999", "40"), {"bounds": {"age": [0, 120]}}, "data.bounds", "csv:2.*missing_values"),
    (GOOD.replace("sex", "sex ").replace("bmi", "sex"), {}, "data.column", "2 columns 'sex'"),
    ("age,Age,sex,bmi,ill\n1,2,f,3,yes\n", {"rename": {"Age": "age"}}, "data.column", "'age', 'Age'"),
    ("60,f,25,yes\n40,m,30,no\n", {}, "data.column", "header"),
    ("Report of ward 3\n" + GOOD, {}, "data.column", "header"),
    ("sep=;\n" + GOOD, {}, "data.column", "Excel"),
    ("\n\n", {}, "data.empty", "empty"),
    (HEADER, {}, "data.empty", "no row"),
    (b"PK\x03\x04" + bytes(40), {}, "data.unreadable", "xlsx.*CSV"),
    (b"\xd0\xcf\x11\xe0" + bytes(40), {}, "data.unreadable", "Excel"),
    (b"<html><body>Login</body></html>", {}, "data.unreadable", "login"),
    ('{"age": 60}', {}, "data.unreadable", "JSON"),
    (gzip.compress(GOOD.encode(), mtime=0)[:-9], {}, "data.unreadable", "whole"),
    (HEADER + ",f,25,yes\n,m,30,no\n", {"missing": "flag"}, "data.empty-column", "'age'"),
    (HEADER + "60,f,25,yes\n", {}, "data.empty-class", "'no'"),
    (GOOD + "Total,,150,\n", {}, "data.missing", "csv:5.*target"),
    (GOOD, {"spellings": {"sx": {"female": "f"}}}, "table.spellings", "'sex'"),
    (GOOD, {"spellings": {"sex": {"female": "fem"}}}, "table.spellings", "fem"),
    (GOOD, {"rename": {"Age": "aeg"}}, "table.rename", "'age'"),
    (GOOD, {"rename": {"age": "bmi"}}, "table.rename", "age"),
    (GOOD, {"missing_codes": {"aeg": ["9"]}}, "table.missing-values", "'age'"),
    (GOOD, {"missing_codes": {"sex": ["f"]}}, "table.missing-values", "'f'"),
    (GOOD, {"bounds": {"sex": [0, 1]}}, "table.bounds", "sex"),
    (GOOD, {"bounds": {"age": [1, 1]}}, "table.bounds", "age"),
    (GOOD, {"decimal": ",", "thousands": ","}, "table.marks", "same mark"),
    (GOOD, {"ignore_case": True, "categories": {"sex": ["f", "F"]}}, "table.categories", "sex"),
]


@pytest.mark.parametrize(("content", "keys", "code", "names"), WRONG)
def test_a_wrong_table_is_one_line_without_values(content: str | bytes, keys: Keys, code: str, names: str) -> None:
    with raises(ScenarioError, code, names=names) as caught:
        read(table(content, **keys))
    message = str(caught.value)
    assert "\n" not in message
    assert not any(secret in message for secret in SECRETS)


@pytest.mark.parametrize("code", ["-999", "-999.0", " -999.00 "])
def test_a_number_that_is_a_code_is_missing(code: str) -> None:
    data = table(with_age(code, "40", "50"), missing="flag", missing_values=["-999"])
    assert read(data).x[0].tolist() == [0, 0, 1, 0, 1, 0, 0]


def test_a_code_may_be_missing_in_one_column_only() -> None:
    content = HEADER + "9,9,25,yes\n40,m,30,no\n"
    result = read(table(content, missing="center", missing_codes={"sex": ["9"]}))
    assert result.x[0].tolist() == pytest.approx([-4.1, 0, 0, 0])


PARQUET: dict[str, tuple[dict[str, list[Any]], Keys, list[str]]] = {
    "texts": ({"sex": ["f", "m"], "ill": ["yes", "no"]}, {}, ["no", "yes"]),
    "truth values": ({"sex": ["f", "m"], "ill": [True, False]}, {}, ["0", "1"]),
    "named truth values": ({"sex": ["f", "m"], "ill": [True, False]}, {}, ["False", "True"]),
    "whole numbers": ({"sex": [1, 2], "ill": [1, 0]}, {"categories": {"sex": ["1", "2"]}}, ["0", "1"]),
    "numbers with a point": ({"sex": [1.0, 2.0], "ill": [1.0, 0.0]}, {"categories": {"sex": ["1", "2"]}}, ["0", "1"]),
    "bytes": ({"sex": [b"f", b"m"], "ill": [b"yes", b"no"]}, {}, ["no", "yes"]),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_types_of_parquet_are_read_alike(kind: str) -> None:
    columns, keys, labels = PARQUET[kind]
    content = parquet(**{" age ": [60, 40], "bmi": ["25", "30"]}, **columns)
    result = read(table(content, labels, "parquet", **keys))
    assert result.x.tolist() == X[:2]
    assert result.y.tolist() == [1, 0]


def test_a_file_of_the_other_format_names_it() -> None:
    content = parquet(age=[60, 40], sex=["f", "m"], bmi=[25, 30], ill=["yes", "no"])
    with raises(ScenarioError, "data.unreadable", names="data.dataset=parquet"):
        read(table(content))
    with raises(ScenarioError, "data.unreadable", names="data.dataset=csv"):
        read(table(GOOD, dataset="parquet"))


def test_sites_that_write_differently_share_one_scenario() -> None:
    data = table(
        GOOD,
        rename={"Alter": "age", "AGE": "age"},
        spellings={"sex": {"female": "f", "male": "m", "1": "f", "2": "m"}, "ill": {"1": "yes", "0": "no"}},
        ignore_case=True,
        delimiter="auto",
        decimal="either",
        missing="flag",
        missing_values=["NA", "-999"],
        bounds={"age": [0, 120], "bmi": [10, 80]},
    )
    Path("site-0.csv").write_text(GOOD)
    Path("site-1.csv").write_text("Alter;bmi;sex;ill\n60,0;25,0;Female;YES\n-999;30;male;no\n")
    Path("site-2.csv").write_text("patient\tAGE\tsex\till\nA1\t60\t1\t1.0\nA2\t40\t2.0\t0\n")
    data["root"] = "site-{peer}.csv"
    result = read(data, 3)
    assert result.sizes == [3, 2, 2]
    assert result.x[[3, 4, 5, 6]].tolist() == [
        [1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [-1, 0, 0, 1, 0, 1, 0],
    ]
    assert result.y.tolist() == [1, 0, 0, 1, 0, 1, 0]
    assert "3 files, 7 rows (2 to 3 at a peer), 2 to 3 columns, 2 classes (no 4, yes 3)" in result.line
    assert "left 1 column (patient)" in result.line
    assert "site-2.csv: no value in bmi" in result.line


def test_a_line_says_what_was_left_and_is_far() -> None:
    content = "id," + HEADER + "1,60,f,25,yes\n2,4000,m,30,no\n,,,,\n"
    line = read(table(content)).line
    assert "2 rows, 3 columns, 2 classes (no 1, yes 1); left 1 column (id), 1 row without a value" in line
    assert "1 value of 'age' beyond 10 scales" in line
    assert "bounds" in line


def test_keys_of_a_table_survive_a_scenario_file() -> None:
    scenario = scenario_of(table(GOOD.replace(",", "\t"), delimiter="\t", thousands=" "))
    assert scenario.data.table is not None
    assert (scenario.data.table.delimiter, scenario.data.table.thousands) == ("\t", " ")
    assert next(csv.reader(["a\tb"], delimiter=scenario.data.table.delimiter)) == ["a", "b"]
