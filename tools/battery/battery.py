"""Grow an array, and try each of its rows."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from flower_privdec.common.errors import PrivdecError
from tools.battery.covering import Array, Part, Row, cause
from tools.battery.laws import Outcome, Violation, refusal_of, try_case
from tools.battery.levels import DECISIVE, FACTORS, LEVELS, NAMES, applies
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
            f"{self.ran} rows ran and {self.refused} were refused ({len(self.refusals)} reasons); {self.tuples:,} tuples "
            f"covered, {self.left:,} left; {len(self.violations)} violations; {self.seconds:.1f} CPU seconds"
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
    array = Array([len(FACTORS[name]) for name in NAMES], applies, strength, seed, DECISIVE)
    report, started = Report(), time.process_time()
    for part in known:
        array.refuse(part)
    with tempfile.TemporaryDirectory(prefix="battery-") as folder, patch.object(os, "fsync", os.fstat):
        for number, row in enumerate(array.rows()):
            if (rows is not None and number >= rows) or until():
                break
            case = Case.of(row, Path(folder).resolve() / "row", number)
            outcome = Outcome(refusal_of(case)) if builds_only else try_case(case)
            _count(report, outcome, say)
            if outcome.refusal is None:
                report.ran += 1
                array.accept(row)
                continue
            report.refused += 1
            report.refusals[outcome.refusal.code] += 1
            first = outcome.refusal if builds_only else refusal_of(case)
            before_runtime = first is not None and first.code == outcome.refusal.code
            parts = causes(case, row, outcome.refusal, before_runtime=before_runtime)
            for part in parts:
                array.refuse(part)
                report.reasons[part] = outcome.refusal.code
            more = f" (and {len(parts) - 1} others alike)" if len(parts) > 1 else ""
            say(f"refused: {text_of(parts[0])}{more}: {outcome.refusal.code}: {outcome.refusal}")
            if outcome.is_late:
                continue
            followed = follow(case, outcome.refusal, before_runtime=before_runtime)
            if followed is not None:
                report.violations.append(followed)
                say(str(followed))
    report.tuples, report.left = array.covered, len(array.uncovered)
    report.seconds = time.process_time() - started
    return report


def _count(report: Report, outcome: Outcome, say: Callable[[str], None]) -> None:
    report.violations += outcome.violations
    for violation in outcome.violations:
        say(str(violation))


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
