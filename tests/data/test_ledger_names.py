"""The ledger of a dataset: one for the same rows, in whichever format and from wherever they are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raising import raises
from tiny_scenario import TINY

import flower_privdec as fp
from flower_privdec.common.catalogue import DATASETS
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.scenario import parse_scenario

X = np.arange(120, dtype=np.float32).reshape(60, 2) / 60 + 0.5
Y = np.arange(60) % 2
ROWS = [(float(a), float(b), int(y)) for (a, b), y in zip(X, Y, strict=True)]
TABLE = {"target": "y", "numbers": {"a": [0, 1], "b": [0, 1]}}


def npz(folder: Path) -> dict[str, Any]:
    np.savez(folder / "rows.npz", x_train=X, y_train=Y, x_test=X[:9], y_test=Y[:9])
    return {"dataset": "npz", "root": str(folder / "rows.npz")}


def _places(rows: Path) -> dict[str, str]:
    """Return the rows' file as the private data, and a copy of it as the public test set."""
    copy = rows.with_stem("public")
    shutil.copyfile(rows, copy)
    return {"root": str(rows), "test": str(copy)}


def csv(folder: Path) -> dict[str, Any]:
    lines = ["a,b,y", *(f"{a!r},{b!r},{'yes' if y else 'no'}" for a, b, y in ROWS)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    return {"dataset": "csv", **_places(folder / "rows.csv"), "table": TABLE, "labels": ["no", "yes"]}


def parquet(folder: Path) -> dict[str, Any]:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "y": ["yes" if y else "no" for y in Y]}
    files.write_table(arrow.table(columns), folder / "rows.parquet")
    return {"dataset": "parquet", **_places(folder / "rows.parquet"), "table": TABLE, "labels": ["no", "yes"]}


def svmlight(folder: Path) -> dict[str, Any]:
    (folder / "rows.svm").write_text("".join(f"{y} 1:{a!r} 2:{b!r}\n" for a, b, y in ROWS))
    return {"dataset": "svmlight", **_places(folder / "rows.svm"), "n_features": 2}


def function(folder: Path) -> dict[str, Any]:
    (folder / "rows_of_ones_own.py").write_text(
        f"import numpy as np\ndef rows(part):\n    half = np.load({str(folder / 'rows.npz')!r})\n"
        "    return half['x_' + part], half['y_' + part]\n"
    )
    npz(folder)
    return {"dataset": {"module": "rows_of_ones_own:rows"}}


FORMATS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "npz": npz,
    "csv": csv,
    "parquet": parquet,
    "svmlight": svmlight,
    "function": function,
}


def scenario_of(data: dict[str, Any], ledger: Path) -> fp.Scenario:
    base = parse_scenario(TINY, overrides=["model.name=linear", "rounds=1", "data={dataset: digits, batch: {size: 3}}"])
    privacy = {"noise_multiplier": 2.0, "delta": 1e-3, "ledger": str(ledger)}
    return fp.make_scenario(base, data={**data, "batch": {"size": 3}}, privacy=privacy)


OWN_DATA = [name for name, part in DATASETS.items() if part.own_files]


@pytest.mark.parametrize("named", [False, True], ids=["own", "data.source"])
def test_the_same_rows_have_one_ledger_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    assert {*FORMATS, "image-folder"} == {*OWN_DATA, "function"}
    monkeypatch.syspath_prepend(str(tmp_path))
    spent = [0.0]
    for kind, written in FORMATS.items():
        data = written(tmp_path) | ({"source": "ward"} if named else {})
        experiment = Experiment.build(scenario_of(data, tmp_path / "ledger"))
        summary = run(experiment, tmp_path / f"run-{kind}", lean=True)
        spent.append(summary["privacy"][0]["epsilon"])
    arrays = {"train": (X, Y), "test": (X[:9], Y[:9]), "source": "ward" if named else "own"}
    spent.append(fp.run(scenario_of(arrays, tmp_path / "ledger")).privacy[0]["epsilon"])
    assert sorted(set(spent)) == spent
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["ward.jsonl" if named else "own.jsonl"]


def test_a_dataset_that_has_a_name_takes_no_other(tmp_path: Path) -> None:
    for dataset in set(DATASETS) - set(OWN_DATA):
        with raises(fp.ScenarioError, "data.source", dataset):
            scenario_of({"dataset": dataset, "source": "mine"}, tmp_path)
