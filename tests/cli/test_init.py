"""`privdec init` and `privdec schema`."""

from __future__ import annotations

import csv
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


def test_every_section_of_a_file_is_a_section() -> None:
    assert all(issubclass(model, Section) for model in FILES.values())
