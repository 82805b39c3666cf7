"""The profiler that counts the files and functions of an operation."""

from __future__ import annotations

import pytest

from tools.walk import WALKS, main, measure


@pytest.mark.parametrize("name", ["step", "payment"])
def test_a_walk_is_reproducible_and_spans_its_operation(name: str) -> None:
    functions = measure(name)
    assert functions == measure(name)
    files = {file for file, _ in functions}
    assert "privacy/ledger/ledger.py" in files  # it pays
    assert any(file.startswith("training_loop/") for file in files) == (name == "step")
    assert not any(function == "private" for _, function in functions), "what came before the step is counted"


def test_the_table_counts_what_names_lists(capsys: pytest.CaptureFixture[str]) -> None:
    main(["payment", "--names"])
    _, _, row, *listing = capsys.readouterr().out.splitlines()
    files = [line.split()[0] for line in listing]
    assert row == f"| {WALKS['payment'][0]} | {len(set(files))} | {len(files)} |"
    assert all(file.endswith(".py") for file in files)


def test_an_unknown_walk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["stroll"])
    assert "NAME=stroll must be one of engine, step" in capsys.readouterr().err
