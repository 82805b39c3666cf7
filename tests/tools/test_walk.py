"""The profiler that counts the files and functions of an operation."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.walk import WALKS, Walk, main, measure


@pytest.mark.parametrize("name", ["step", "payment"])
def test_a_walk_is_reproducible_and_spans_its_operation(name: str) -> None:
    functions = measure(name).functions
    assert functions == measure(name).functions
    files = {file for file, _ in functions}
    assert "privacy/ledger/ledger.py" in files  # it pays
    assert any(file.startswith("training_loop/") for file in files) == (name == "step")
    assert not any(function == "private" for _, function in functions), "what came before the step is counted"


def test_the_table_counts_what_names_lists(capsys: pytest.CaptureFixture[str]) -> None:
    main(["payment", "--names"])
    _, _, row, *listing = capsys.readouterr().out.splitlines()
    files = [line.split()[0] for line in listing if line.startswith("    ")]
    returns = [int(line.split()[0]) for line in listing if "returns between" in line]
    assert row == f"| {WALKS['payment'][0]} | {len(set(files))} | {len(files)} | {max(returns, default=0)} |"
    assert all(file.endswith(".py") for file in files)


def test_an_unknown_walk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stroll"])
    assert "NAME=stroll must be one of engine, step" in capsys.readouterr().err


def test_only_a_call_back_counts_as_return(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        "def run(inner):\n    inner.step(back)\n    inner.step(int)\n\ndef back():\n    pass\n"
    )
    (tmp_path / "inner.py").write_text("def step(call):\n    call()\n    helper()\n\ndef helper():\n    pass\n")
    modules = {name: runpy.run_path(str(tmp_path / f"{name}.py")) for name in ("outer", "inner")}
    with Walk(tmp_path).watching() as walk, walk.recording():
        modules["outer"]["run"](SimpleNamespace(**modules["inner"]))
    assert walk.functions == [("inner.py", "helper"), ("inner.py", "step"), ("outer.py", "back"), ("outer.py", "run")]
    assert walk.returns == [("inner.py", "outer.py", 1)]
