"""The verdicts on the papers' claims: what is published follows from the published tables."""

from __future__ import annotations

import dataclasses

import pytest
from paths import ROOT

from flower_privdec.studies.results import Finding, judge
from tools.docs import claims


def test_page_and_verdicts_are_what_the_tables_say() -> None:
    """`python -m tools.docs.claims` changes nothing; and a row that is missing is not judged."""
    written = claims.written()
    assert len(written) == 1 + len(claims.PUBLISHED)
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run python -m tools.docs.claims"
    study, _, _, parts = next(claims.results())
    result = next(part for part in parts if part.part.name == "cnn")
    assert study.name == "feddeper"
    check = result.part.checks[0]
    assert [case.outcome for case in judge(check, result).cases] == [Finding.SHOWN]
    gone = tuple(dataclasses.replace(group, cells=None) for group in result.groups)  # type: ignore[call-arg]
    assert [case.outcome for case in judge(check, dataclasses.replace(result, groups=gone)).cases] == [Finding.NOT_RUN]


def test_what_the_rounds_are_in_proportion_to_is_the_peers() -> None:
    """Final values show a speed-up only where n times more peers have n times fewer rounds."""
    for name in ("privsgp-vr", "privsgp-vr-resnet18"):
        study, _ = claims.load_study(name)
        part = next(part for part in study.parts if part.name == "speedup")
        for size in study.sizes or [None]:
            keys = [
                dict(line.split("=") for line in point.settings) for point in part.axes_at(size)["peers"].all_points()
            ]
            totals = [int(point["n_peers"]) * int(point["rounds"]) for point in keys]
            assert totals == [pytest.approx(totals[0], rel=0.01)] * len(totals)
