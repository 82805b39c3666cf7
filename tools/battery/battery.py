"""Grow an array, and try each of its rows."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

from flower_privdec.common.errors import PrivdecError
from tools.battery.covering import Array, Part, Row, cause
from tools.battery.laws import Outcome, Violation, refusal_of, try_case, trying
from tools.battery.levels import DECISIVE, FACTORS, LEVELS, NAMES, applies
from tools.battery.refused import Line
from tools.battery.remedies import follow
from tools.battery.rows import Case

PLAIN: Row = (0,) * len(NAMES)


@dataclass
class Report:
    """What an array showed.

    Attributes:
        ran, refused: how many rows.
        refusals: by their code, how many.
        violations: of all rows.
        seconds: of the processor.
    """

    ran: int = 0
    refused: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    tuples: int = 0
    left: int = 0
    reasons: dict[Part, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.ran} rows ran and {self.refused} were refused ({len(self.refusals)} reasons); {self.tuples:,} "
            f"tuples covered, {self.left:,} left; {len(self.violations)} violations; {self.seconds:.1f} CPU seconds"
        )


def text_of(part: frozenset[tuple[int, int]]) -> str:
    """Return levels by their names."""
    return ", ".join(f"{NAMES[factor]}: {LEVELS[NAMES[factor]][level]}" for factor, level in sorted(part))


def sweep(
    strength: int = 2,
    seed: int = 1,
    *,
    rows: int | None = None,
    known: Iterable[Part] = (),
    builds_only: bool = False,
    until: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Grow an array and try its rows.

    Args:
        rows: how many to try at most.
        known: levels that are known to be refused together, of which no row has all.
        builds_only: whether rows are built and not run.
        until: returns whether to end.
        say: takes a line for each refusal and each violation.
    """
    array, report, started = new_array(strength, seed, known), Report(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="battery-") as temporary, patch.object(os, "fsync", os.fstat):
        folder = Path(temporary).resolve() / "row"
        for number, row in enumerate(array.rows()):
            if (rows is not None and number >= rows) or until():
                break
            case = Case.of(row, folder, number)
            outcome = _built(case) if builds_only else try_row(row, folder, number)
            report.violations += outcome.violations
            for violation in outcome.violations:
                say(str(violation))
            if outcome.refusal is None:
                report.ran += 1
                array.accept(row)
                continue
            report.refused += 1
            report.refusals[outcome.refusal.code] += 1
            parts = causes(case, row, outcome.refusal, before_runtime=is_refused_before_runtime(case, outcome.refusal))
            for part in parts:
                array.refuse(part)
                report.reasons[part] = outcome.refusal.code
            more = f" (and {len(parts) - 1} others alike)" if len(parts) > 1 else ""
            say(f"refused: {text_of(parts[0])}{more}: {outcome.refusal.code}: {outcome.refusal}")
    report.tuples, report.left = array.covered, len(array.uncovered)
    report.seconds = time.process_time() - started
    return report


def new_array(strength: int, seed: int, known: Iterable[Part] = ()) -> Array:
    """Return an array over all factors.

    Args:
        known: see `sweep`.
    """
    array = Array([len(FACTORS[name]) for name in NAMES], applies, strength, seed, DECISIVE)
    for part in known:
        array.refuse(part)
    return array


def try_row(row: Row, folder: Path, number: int = 0) -> Outcome:
    """Run a row by all laws; if it is refused, follow the remedies.

    Args:
        folder: the row's own, which is removed first.
        number: of the row, which the name of its module has.
    """
    case = Case.of(row, folder, number)
    outcome = try_case(case)
    if outcome.refusal is not None and not outcome.is_late:
        before_runtime = is_refused_before_runtime(case, outcome.refusal)
        violation = follow(case, outcome.refusal, before_runtime=before_runtime)
        outcome.violations += [] if violation is None else [violation]
    return outcome


def is_stale(part: Part, code: str, folder: Path) -> bool:
    """Return whether levels that are known to be refused are not, beside plain ones, or are for another reason."""
    levels = dict(part)
    row = tuple(levels.get(factor, PLAIN[factor]) for factor in range(len(PLAIN)))
    case = Case.of(row, folder)
    shutil.rmtree(folder, ignore_errors=True)
    refusal = refusal_of(case)
    if refusal is None:
        refusal = try_case(case).refusal  # a runtime may refuse what builds
    return refusal is None or refusal.code != code


def stale_lines(lines: Iterable[Line], seed: int) -> list[Line]:
    """Return the lines of which a part, drawn by a seed, is not refused as the line says."""
    draw = Random(seed)
    with tempfile.TemporaryDirectory(prefix="battery-") as temporary, patch.object(os, "fsync", os.fstat):
        folder = Path(temporary).resolve() / "row"
        return [line for line in lines if is_stale(draw.choice(line.parts), line.code, folder)]


def is_refused_before_runtime(case: Case, refusal: PrivdecError) -> bool:
    """Return whether a row that is refused is refused before anything runs."""
    first = refusal_of(case)
    return first is not None and first.code == refusal.code


def _built(case: Case) -> Outcome:
    """Build a row, and do not run it."""
    outcome = Outcome()
    with trying(case, outcome):
        outcome.refusal = refusal_of(case)
    return outcome


def causes(case: Case, row: Row, refusal: PrivdecError, *, before_runtime: bool) -> list[Part]:
    """Return the least levels of a row that are refused as the row is, and those of the same factors that are too.

    Args:
        before_runtime: whether the row is refused before anything runs.
    """

    def still(other: Row) -> bool:
        tried = Case.of(other, case.folder, case.number)
        other_refusal = refusal_of(tried) if before_runtime else try_case(tried).refusal
        return other_refusal is not None and other_refusal.code == refusal.code

    part = cause(row, PLAIN, still)
    if len(part) == 1 and before_runtime:
        part = _widened(part, lambda other: refusal_of(Case.of(other, case.folder, case.number)) is None)
    alike = [part]
    if not before_runtime:
        return alike
    for factor, level in part:
        for another in range(len(FACTORS[NAMES[factor]])):
            changed = frozenset({*(part - {(factor, level)}), (factor, another)})
            levels = dict(changed)
            if another != level and still(tuple(levels.get(number, PLAIN[number]) for number in range(len(row)))):
                alike.append(changed)
    return alike


def _widened(part: Part, fits: Callable[[Row], bool]) -> Part:
    """Return a level that is refused beside plain ones, with the plain one that it cannot be beside."""
    for name in ("graph", "calibration", "algorithm", "noise", "data", "model", "sampling"):
        factor = NAMES.index(name)
        if factor in dict(part):
            continue
        for level in range(1, len(FACTORS[name])):
            levels = {**dict(part), factor: level}
            if len(applies(levels)) == 2 and fits(tuple(levels.get(one, PLAIN[one]) for one in range(len(PLAIN)))):
                return part | {(factor, PLAIN[factor])}
    return part
