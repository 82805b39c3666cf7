"""`privdec init` and `privdec schema`."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_line import privdec
from paths import ROOT

from flower_privdec.cli.init_command import FILES, schema_text
from flower_privdec.common.fields import Section
from flower_privdec.experiment import Agreement
from flower_privdec.scenario import load_scenario
from flower_privdec.scenario.loading import read_plain

SCENARIOS = [
    *sorted((ROOT / "scenarios").glob("*.yaml")),
    *(ROOT / "simulations" / name for name in ("compared/cifar.yaml", "traffic/mnist.yaml", "adapters/scenario.yaml")),
]
STUDIES = [*sorted((ROOT / "scenarios" / "studies").glob("*.yaml")), ROOT / "simulations" / "cancelling" / "study.yaml"]


def _schema(kind: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads(schema_text(kind)))


@pytest.fixture(scope="module")
def scenario_schema() -> Any:
    return _schema("scenario")


def test_schemas_accept_every_file_that_is_shipped(scenario_schema: Any) -> None:
    study_schema = _schema("study")
    for files, schema in ((SCENARIOS, scenario_schema), (STUDIES, study_schema)):
        for path in files:
            mistakes = list(schema.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8"))))
            assert not mistakes, f"{path}: {mistakes[0].message}"


@pytest.mark.parametrize(
    "change",
    [
        {"rouds": 3},
        {"rounds": "many"},
        {"rounds": 0},
        {"data": {"dataset": "digits"}},
        {"topology": {"name": "rign"}},
        {"privacy": {"epsilon": 3.0}},
        {"algorithm": {"name": "privsgp", "learning_rat": 1.0}},
    ],
)
def test_the_schema_marks_mistakes(scenario_schema: Any, change: dict[str, Any]) -> None:
    right = yaml.safe_load((ROOT / "scenarios" / "digits.yaml").read_text(encoding="utf-8"))
    assert scenario_schema.is_valid(right)
    assert not scenario_schema.is_valid({**right, **change})


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield schema["title"], schema
    yield from schema["$defs"].items()


@pytest.mark.parametrize("kind", FILES)
def test_every_key_is_explained_to_editors(kind: str) -> None:
    schema = json.loads(schema_text(kind))
    mute = [
        f"{name}.{key}"
        for name, section in _sections(schema)
        for key, part in section.get("properties", {}).items()
        if not part.get("description") and key not in ("name", "kind", "module", "arguments")
    ]
    assert not mute


def test_schema_prints_what_the_file_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert privdec("schema", "study") == 0
    assert capsys.readouterr().out == schema_text("study")


# --- init ---


def _table(rows: int, seed: int) -> str:
    draw = random.Random(seed)
    text = StringIO()
    writer = csv.writer(text, delimiter=";")
    writer.writerow(["id", "age", "pressure", "ward", "outcome"])
    for row in range(rows):
        age = draw.gauss(60, 12)
        pressure = "" if row % 9 == 0 else round(draw.gauss(130, 15))
        writer.writerow([f"p{seed}-{row}", round(age), pressure, draw.choice("ABC"), "ill" if age > 60 else "well"])
    return text.getvalue()


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for peer in range(3):
        (tmp_path / f"site-{peer}.csv").write_text(_table(60, peer), encoding="utf-8")
    (tmp_path / "public.csv").write_text(_table(90, 7), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


OWN_TABLE = ("--data", "csv", "--root", "site-{peer}.csv", "--test", "public.csv", "--peers", 3, "--rounds", 2)


@pytest.mark.parametrize(
    "options",
    [
        ("--rounds", 2),
        ("--rounds", 2, "--epsilon", "none"),
        ("--rounds", 2, "--colluding", 1),
        (*OWN_TABLE, "--target", "outcome"),
        (*OWN_TABLE, "--target", "outcome", "--colluding", 0, "--at-least", 50),
        (*OWN_TABLE, "--target", "age"),
    ],
)
def test_what_init_writes_runs(options: tuple[object, ...], tables: Path, scenario_schema: Any) -> None:
    assert privdec("init", "first.yaml", "--yes", *options) == 0
    text = (tables / "first.yaml").read_text(encoding="utf-8")
    assert scenario_schema.is_valid(yaml.safe_load(text))
    named = text.partition("$schema=")[2].splitlines()[0]
    assert json.loads((tables / named).read_text(encoding="utf-8")) == json.loads(schema_text("scenario"))
    assert privdec("run", "first.yaml", "--out", "run") == 0


def test_a_tables_constants_are_of_the_public_set(tables: Path) -> None:
    """Other private rows, the same scenario."""
    assert privdec("init", "first.yaml", "--yes", *OWN_TABLE, "--target", "outcome") == 0
    for peer in range(3):
        (tables / f"site-{peer}.csv").unlink()
    assert privdec("init", "again.yaml", "--yes", *OWN_TABLE, "--target", "outcome") == 0
    first = yaml.safe_load((tables / "first.yaml").read_text(encoding="utf-8"))
    again = yaml.safe_load((tables / "again.yaml").read_text(encoding="utf-8"))
    assert {**first, "name": ""} == {**again, "name": ""}
    assert set(first["data"]["table"]["numbers"]) == {"age", "pressure"}
    assert first["data"]["table"]["categories"] == {"ward": ["A", "B", "C"]}
    assert first["data"]["table"]["missing"] == "flag"


def test_wrong_answers_are_asked_again(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["xls", "digits", "one", "5", "-1", "2", "9", "1", "10"]
    monkeypatch.setattr("sys.stdin", StringIO("\n".join(answers) + "\n"))
    assert privdec("init", "asked.yaml") == 0
    written = yaml.safe_load((tables / "asked.yaml").read_text(encoding="utf-8"))
    assert (written["n_peers"], written["rounds"]) == (5, 10)
    assert written["privacy"]["epsilon"] == 2
    assert written["privacy"]["noise"] == {"kind": "cancelling", "colluding": 1}
    said = capsys.readouterr()
    assert "9" in said.err
    assert "scenario: asked.yaml" in said.out


def test_a_slip_about_a_table_is_asked_again(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the number of peers is by default that of the files here."""
    answers = ["csv", "*.csv", "site-{peer}.csv", "publc.csv", "public.csv", "outcom", "outcome", "", "", "", ""]
    monkeypatch.setattr("sys.stdin", StringIO("\n".join(answers) + "\n"))
    assert privdec("init", "asked.yaml") == 0
    said = capsys.readouterr().err
    assert "ln -s public.csv site-0.csv" in said
    assert "'publc.csv' does not exist" in said
    assert "did you mean 'outcome'" in said
    assert load_scenario("asked.yaml").n_peers == 3


def test_a_rare_class_is_measured_by_its_ranking(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{age},{'yes' if age % 20 == 0 else 'No'}\n" for age in range(100))
    (tables / "public.csv").write_text("age,back\n" + rows)
    assert privdec("init", "rare.yaml", "--yes", *OWN_TABLE, "--target", "back") == 0
    assert "'yes' is rare, 5 of 100 rows" in capsys.readouterr().err
    scenario = load_scenario("rare.yaml")
    assert scenario.task.metrics[0] == "roc-auc"
    assert scenario.evaluation.by_class
    assert scenario.compute.generator == "system"


def test_an_input_that_ends_is_one_line(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("digits\n"))
    assert privdec("init", "asked.yaml") == 2
    assert "--peers" in capsys.readouterr().err.splitlines()[-1]
    assert not (tables / "asked.yaml").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("first.yaml", "--data", "csv"), "--root"),
        (("first.yaml", *OWN_TABLE, "--target", "outcom"), "outcome"),
        (("first.yaml", *OWN_TABLE[:-2], "--test", "absent.csv", "--target", "outcome"), "absent.csv"),
        (("first.yaml", "--data", "image-folder", "--root", "a-{peer}", "--test", "."), "folders"),
        (("first.yaml", "--data", "csv", "--root", "site.csv"), "{peer}"),
        (("first.yaml", "--peers", 3, "--colluding", 2), "0 to 1"),
        (("first.txt",), "first.yaml"),
        (("site-0.csv",), "site-0.yaml"),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: tuple[object, ...], named: str, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tables.iterdir())
    assert privdec("init", "--yes", *options) == 2
    assert named in capsys.readouterr().err
    assert sorted(tables.iterdir()) == before


def test_nothing_is_overwritten(tables: Path) -> None:
    (tables / "mine.yaml").write_text("mine", encoding="utf-8")
    assert privdec("init", "mine.yaml", "--yes") == 2
    assert (tables / "mine.yaml").read_text(encoding="utf-8") == "mine"


# --- tables as people have them ---


def _written(text: str | bytes, *options: object, path: str = "first.yaml") -> dict[str, Any]:
    """Let init write a scenario for a public table, read the table by it, and return its section data."""
    content = text
    if isinstance(content, str):
        content = content.encode()
    Path("given.csv").write_bytes(content)
    places = ("--root", "their-{peer}.csv", "--test", "given.csv")
    assert privdec("init", path, "--yes", "--data", "csv", *places, "--target", "y", *options) == 0
    Agreement.of(load_scenario(path))
    section: dict[str, Any] = read_plain(Path(path).read_text(encoding="utf-8"), path)[0]["data"]
    return section


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("1e5,yes,y\n1,2e5,1e7\n2,x,2e7\n", {"categories": {"yes": ["2e5", "x"]}}),
        (" a , b: c,  y,\n1,2,A,\n3,4,B,\n", {"numbers": {"a": [2.0, 1.0], "b: c": [3.0, 1.0]}}),
        ("a;b;y\n1,5;1.234,5;A\n3,5;2.345,5;B\n", {"delimiter": ";", "decimal": ",", "thousands": "."}),
        ("a,b,y\n1,,A\n3,,B\n", {"numbers": {"a": [2.0, 1.0]}}),
        ("a,b,y\n1,1e300,A\n3,1,B\n", {"numbers": {"a": [2.0, 1.0]}}),
        ("a,y\n1,A\n3,B\n".encode("utf-16"), {"encoding": "utf-16"}),
        ("größe,y\n1,A\n3,B\n", {"numbers": {"größe": [2.0, 1.0]}}),
        (gzip.compress(b"a,y\n0.1,A\n0.1,B\n", mtime=0), {"numbers": {"a": [0.1, 1.0]}}),
    ],
)
def test_a_table_is_read_as_a_run_reads_it(tables: Path, table: str | bytes, keys: dict[str, Any]) -> None:
    found = _written(table)["table"]
    assert {key: found.get(key) for key in keys} == keys
    assert "missing" not in found


@pytest.mark.parametrize(
    ("cells", "feature", "said"),
    [
        (["2024-01-02", "2024-02-03"], None, "it has dates or times, such as '2024-01-02'"),
        (["02.01.2024", "13:40"], None, "it has dates or times"),
        ([f"{k}.5 kg" for k in range(40)], None, "without units and signs"),
        ([*(str(k) for k in range(39)), "high"], None, "most of it are numbers, and 'high' is none"),
        ([*(str(k) for k in range(39)), "<5"], None, "and '<5' is none"),
        ([*(str(20 + k % 7) for k in range(38)), "-999", "-999"], "numbers", "has -999 in 2 rows, far from the others"),
        ([str(7 * k % 40) for k in range(40)], "numbers", "counts rows, as an id does"),
        ([*(str(k % 5) for k in range(39)), "-9"], "numbers", "has -9 in 1 rows"),
        ([*(str(k % 20) for k in range(39)), "-1"], "numbers", None),
        (["18-25", "26-40"], "categories", None),
    ],
)
def test_what_a_column_may_be_is_said(
    cells: list[str], feature: str | None, said: str | None, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{cells[k % len(cells)]},{k % 3}.5,{'AB'[k % 2]}" for k in range(40)]
    table = _written("\n".join(["x,a,y", *rows, ""]))["table"]
    assert [key for key in ("numbers", "categories") if "x" in table.get(key, {})] == ([feature] if feature else [])
    notes = [line for line in capsys.readouterr().err.splitlines() if "'x'" in line]
    assert len(notes) == (said is not None)
    assert all(str(said) in note for note in notes)


def test_an_id_is_no_feature(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{5000 + 3 * k},{k % 3},{'AB'[k % 2]}" for k in range(40)]
    assert set(_written("\n".join(["patientId,a,y", *rows, ""]))["table"]["numbers"]) == {"a"}
    assert "'patientId' is left out" in capsys.readouterr().err


def test_classes_that_differ_in_capitals_are_one(tables: Path) -> None:
    rows = [f"{k % 3},{'Aa'[k % 2]}{k % 4 // 2}" for k in range(40)]
    data = _written("\n".join(["a,y", *rows, ""]))
    assert data["labels"] == ["A0", "A1"]
    assert data["table"]["ignore_case"] is True


def test_centers_are_exact_for_years(tables: Path) -> None:
    years = [2010 + row % 9 for row in range(90)]
    center, scale = _written("t,y\n" + "".join(f"{year},{year % 2}\n" for year in years))["table"]["numbers"]["t"]
    assert abs(center - sum(years) / len(years)) < 0.01 * scale


def test_classes_that_are_numbers_keep_their_order(tables: Path) -> None:
    rows = "".join(f"{row},{row % 12}\n" for row in range(24))
    assert _written("a,y\n" + rows)["labels"] == [str(number) for number in range(12)]


@pytest.mark.parametrize("path", ["first.yaml", "new/folder/first.yaml"])
@pytest.mark.parametrize("root", ["their-{peer}.csv", "{peer}", "~{peer}/{peer}.csv"])
def test_paths_begin_where_the_command_runs(tables: Path, path: str, root: str) -> None:
    _written("a,y\n1,A\n3,B\n", "--root", root, path=path)
    data = load_scenario(path).data
    assert (data.root, data.test) == (str(tables / root), str(tables / "given.csv"))


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("a,a,y\n1,2,A\n3,4,B\n", "2 columns"),
        ("a,b,y\n1,2,A,9\n3,4,B\n", "given.csv:2"),
        ("a,y\n1,A\n3,\n4,B\n", "no target"),
        ("a,y\n1,A\n3,A\n", "has 1 classes"),
        ("id,y\n" + "".join(f"p{row},{row % 2}\n" for row in range(40)), "40 different"),
        ("sep=;\na;y\n1;A\n", "sep="),
        ("a,b,y\n1,x\0,A\n3,z,B\n", "given.csv: column 'b' holds the control character"),
        ("a,y\n", "no row"),
        ("", "is empty"),
        (b"a,y\n\xe4,A\n", "save it as UTF-8"),
        (b"\xe4,y\n1,A\n", "UTF-8"),
        (b"PK\x03\x04", "workbook"),
    ],
)
def test_tables_that_no_run_reads_are_refused(
    tables: Path, table: str | bytes, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        _written(table)
    said = capsys.readouterr().err
    assert named in said
    assert "Traceback" not in said
    assert not (tables / "first.yaml").exists()


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--target", "y"), "--data"),
        (("--root", "a-{peer}"), "--data"),
        (("--epsilon", "none", "--colluding", 1), "--epsilon"),
        ((*OWN_TABLE, "--target", "outcome", "--at-least", 9), "--colluding"),
    ],
)
def test_options_without_use_are_refused(
    tables: Path, options: tuple[object, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert privdec("init", "first.yaml", "--yes", *options) == 2
    assert remedy in capsys.readouterr().err.partition("change")[2]


def test_every_section_of_a_file_is_a_section() -> None:
    assert all(issubclass(model, Section) for model in FILES.values())
