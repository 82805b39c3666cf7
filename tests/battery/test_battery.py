"""Rows of a covering array over everything that a scenario can choose; `python -m tools.battery` tries all pairs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from battery_rows import row_of

from tools.battery.battery import PLAIN, new_array, stale_lines, try_row
from tools.battery.covering import Row
from tools.battery.laws import Outcome, try_case
from tools.battery.levels import NAMES, applies
from tools.battery.refused import Line, known, read
from tools.battery.rows import Case

CASES, ROWS = 40, 1  # of each case


@cache
def rows() -> list[Row]:
    """Return the first rows of an array, as if none were refused beside what is known to be."""
    array, some = new_array(2, seed=1, known=known()), []
    for row in islice(array.rows(), CASES * ROWS):
        array.accept(row)
        some.append(row)
    return some


@pytest.mark.parametrize("number", range(CASES))
def test_rows_obey_all_laws_or_are_refused_with_remedy(number: int, tmp_path: Path) -> None:
    violations = []
    for row in rows()[number * ROWS : (number + 1) * ROWS]:
        outcome = try_row(row, tmp_path / "row", number)
        violations += outcome.violations
    assert not violations, "\n".join(map(str, violations))


def test_known_refusals_are_still_refused() -> None:
    lines = read()
    assert len(lines) > 50
    assert not stale_lines(lines[::8], seed=1)


def test_a_line_that_is_not_true_is_stale() -> None:
    true, untrue = [line for line in read() if line.code == "batch.blocks"][:2]
    lines = [true, replace(untrue, code="another.code"), Line("no.refusal", [frozenset({(0, 1)})])]
    assert stale_lines(lines, seed=1) == lines[1:]


def test_the_plain_row_runs(tmp_path: Path) -> None:
    outcome = try_case(Case.of(PLAIN, tmp_path / "row"))
    assert outcome == Outcome()


@pytest.mark.slow
def test_what_is_paid_together_ends_with_its_message(tmp_path: Path) -> None:
    """`bands: auto` may turn out to be 1; a cohort with code of its own gets all rounds in one message all the same."""
    row = row_of(algorithm="own", noise="correlated auto", sampling="rate", runtime="cohort", ending="killed")
    assert try_case(Case.of(row, tmp_path / "row")) == Outcome()


def test_meaningless_levels_count_for_nothing() -> None:
    row = row_of(noise="none", calibration="paper", hardened="yes")
    meaning = {NAMES[factor] for factor in applies(dict(enumerate(row)))}
    assert not meaning & {"calibration", "hardened", "second", "edit"}
    assert {"noise", "algorithm", "place"} <= meaning
