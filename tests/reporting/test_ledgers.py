"""`privdec ledger`: what an owner reads of a ledger is what the runs that were charged to it spent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import privdec
from dp_accounting.pld import PLDAccountant
from tiny_scenario import Tiny

from flower_privdec.common.exit_codes import LEDGER_SHORT
from flower_privdec.common.formatting import epsilon_text
from flower_privdec.engine.run import run
from flower_privdec.experiment import Experiment
from flower_privdec.reporting.ledgers import ledger_facts


@pytest.fixture
def two_runs(tiny: Tiny, tmp_path: Path) -> list[float]:
    """Charge two runs to one ledger; return the largest ε that each stated for itself, and at its end for all."""
    stated = []
    for seed in (1, 2):
        scenario = tiny(f"seed={seed}", f"privacy.ledger={tmp_path / 'ledger'}", f"privacy.epsilon={2 + seed}")
        summary = run(Experiment.build(scenario), tmp_path / f"run-{seed}")
        stated.append(max(float(row["epsilon"]) for row in summary["privacy"]))
    return stated


def test_it_prints_the_epsilon_of_the_runs(two_runs: list[float], tmp_path: Path) -> None:
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    facts = ledger_facts(path, 1e-3, budget=4.5)
    assert [one["peers"] for one in facts["runs"]] == [4, 4]
    assert facts["epsilon"] == pytest.approx(two_runs[-1], abs=1e-9)  # the last run states ε of all over its data
    assert facts["left"] == pytest.approx(max(0.0, 4.5 - two_runs[-1]))
    assert max(one["epsilon"] for one in facts["runs"]) < facts["epsilon"]


def test_the_command_prints_each_ledger_below_a_folder(
    two_runs: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert privdec("ledger", str(tmp_path), "--delta", "1e-3", "--epsilon", "1e9") == 0
    printed = capsys.readouterr().out
    assert "lines, verified" in printed
    assert f"all together: ε = {epsilon_text(two_runs[-1])} at" in printed
    assert "left of" in printed
    assert privdec("ledger", str(tmp_path), "--delta", "1e-3", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_delta_is_that_of_the_run_around_a_ledger(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Experiment.build(tiny("privacy.delta=2e-3")), tmp_path / "run")
    (path,) = (tmp_path / "run" / "ledger").glob("*.jsonl")
    for place in (tmp_path / "run", path):
        assert privdec("ledger", str(place)) == 0
        assert "δ = 0.002" in capsys.readouterr().out


def test_dp_accounting_composes_the_same_events_and_stands_beside(
    two_runs: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    facts = ledger_facts(path, 1e-3, check=True)
    for one in (facts, *facts["runs"]):
        assert one["dp_accounting"] == pytest.approx(one["epsilon"], rel=1e-3)
    assert "dp_accounting" not in ledger_facts(path, 1e-3)
    assert privdec("ledger", str(path), "--delta", "1e-3", "--check") == 0
    assert f"(dp-accounting's ε: {epsilon_text(facts['dp_accounting'])})" in capsys.readouterr().out


def test_the_other_epsilon_is_dp_accountings_own(
    two_runs: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    monkeypatch.setattr(PLDAccountant, "get_epsilon", lambda *_: 47.11)
    facts = ledger_facts(path, 1e-3, check=True)
    assert {one["dp_accounting"] for one in (facts, *facts["runs"])} == {47.11}
    assert 47.11 not in {one["epsilon"] for one in (facts, *facts["runs"])}


def test_a_dash_stands_for_events_dp_accounting_lacks(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Experiment.build(tiny("rounds=1", "data.batch.sampling=uniform")), tmp_path / "run")
    assert privdec("ledger", str(tmp_path), "--delta", "1e-3", "--check") == 0
    assert "(dp-accounting's ε: –)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace('"to_step":', '"to_step": ', 1), "its hash does not match"),
        (lambda text: "".join(text.splitlines(True)[:1] + text.splitlines(True)[2:]), "line 2"),
    ],
    ids=["edited", "a line less"],
)
def test_a_changed_ledger_is_an_error_with_its_line(
    two_runs: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, why: str
) -> None:
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    path.write_text(change(path.read_text()))  # type: ignore[operator]
    assert privdec("ledger", str(path), "--delta", "1e-3") == 2
    assert re.search(why, capsys.readouterr().err)


def test_an_unfinished_last_line_is_named_and_not_counted(
    two_runs: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*whole, last[:100]]))
    assert ledger_facts(path, 1e-3)["epsilon"] < two_runs[-1]
    assert privdec("ledger", str(path), "--delta", "1e-3") == 0
    assert "unfinished last line of 100 bytes" in capsys.readouterr().out
    path.write_bytes(b"".join(whole))
    assert ledger_facts(path, 1e-3)["unfinished"] == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "missing or empty: nothing was spent"),
        (b"hello", "its 5 bytes were cut from a ledger, or are of another file"),
        (bytes(3000), "its 3,000 bytes were cut"),
        (b'{"format":"flower-privdec-ledger-4"', "its 35 bytes were cut"),
        (b'{"format":"flower-privdec-ledger-4"}\n', "line 1"),
        (b"{}\n", "line 1: not a record"),
        (b"[" * 100_000 + b"\n", "line 1: not a record"),
        (b'{"a":' + b"9" * 5000 + b"}\n", "line 1: not a record"),
        (b"\xff\xfe\n", "line 1: not a record"),
        (bytes(range(256)) * 9, "line 1: not a record"),
    ],
    ids=["empty", "a word", "zeros", "half a line", "a header alone", "no record", "deep", "long", "no text", "bytes"],
)
def test_a_broken_ledger_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, why: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(content)
    assert privdec("ledger", path, "--delta", "1e-3") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {path}")
    assert why in printed.err
    assert printed.err.count("\n") == 1


def test_a_folder_passes_over_no_ledger_in_silence(
    two_runs: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one whose first line was lost, nor one that has nothing but what was sealed."""
    (path,) = (tmp_path / "ledger").glob("*.jsonl")
    other = path.with_name("other.jsonl")
    other.write_bytes(b"lost\n" + path.read_bytes().partition(b"\n")[2])
    assert privdec("ledger", tmp_path, "--delta", "1e-3") == 0
    assert "lines, verified" in capsys.readouterr().out
    assert [record.getMessage() for record in caplog.records] == [
        f"{other} does not begin as a ledger does, and is not counted"
    ]
    path.rename(path.with_name("a.b.000000.sealed"))
    assert privdec("ledger", tmp_path, "--delta", "1e-3") == LEDGER_SHORT
    assert f"error: {path.with_name('a.b.jsonl')} is an old copy, cut short or empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--delta", "2"), "must be in"),
        (("--delta", "1e-3", "--epsilon", "nan"), "must be a budget"),
        (("--delta", "1e-3", "--epsilon", "0"), "must be a budget"),
        (("--delta", "1e-3", "--epsilon", "inf"), "must be a budget"),
        ((), "--delta is missing"),
    ],
)
def test_bad_words_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    (tmp_path / "some.jsonl").write_text('{"format":"flower-privdec-ledger-4"}')
    assert privdec("ledger", str(tmp_path), *words) == 2
    assert why in capsys.readouterr().err
    (tmp_path / "some.jsonl").unlink()
    assert privdec("ledger", str(tmp_path), "--delta", "1e-3") == 2
    assert "has no ledger" in capsys.readouterr().err
