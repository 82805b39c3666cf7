"""How the battery reads what a refusal recommends, and follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from battery_rows import row_of

from flower_privdec.common.errors import PrivdecError, ScenarioError
from tools.battery import remedies
from tools.battery.laws import refusal_of
from tools.battery.remedies import follow
from tools.battery.rows import Case


def case_of(folder: Path, **levels: str) -> Case:
    """Return the case of a plain row but for some levels."""
    return Case.of(row_of(**levels), folder / "row")


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("--set: features.kind=scattering needs images: remove the section features", {"features": None}),
        ("scenario: algorithm: optimizer must be left out: it has one", {"algorithm.optimizer": None}),
        (
            "scenario: privacy.calibration='paper' has no formula; use calibration rigorous",
            {"privacy.calibration": "rigorous"},
        ),
        ("scenario: topology.mixing_steps=2 with algorithm.name=pdsl must be 1", {"topology.mixing_steps": 1}),
        ("scenario: data.partition.kind=shards partitions classes: use iid or sizes", {"data.partition.kind": "iid"}),
        ("s.yaml:3: unknown key 'algorithm.rho'", {"algorithm.rho": None}),
        (
            "scenario: privacy.epsilon=3 is below what a step costs; raise it or privacy.noise_multiplier",
            {"privacy.epsilon": 9.0},
        ),
        ("scenario: algorithm.name=scaffold must be on topology server: c is common", {"topology.name": "server"}),
        (
            "scenario: needs batches: set data.batch.sampling=poisson and data.batch.size",
            {"data.batch.sampling": "poisson", "data.batch.size": 5},
        ),
    ],
)
def test_a_line_is_read(tmp_path: Path, line: str, first: dict[str, Any]) -> None:
    changes = next(remedies.remedies(line, case_of(tmp_path))).changes
    assert dict(changes) == first


@pytest.mark.parametrize(
    "levels",
    [
        {"noise": "cancelling 1", "hardened": "yes", "calibration": "paper"},
        {"algorithm": "pdsl", "graph": "directed-ring", "optimizer": "adam"},
        {"algorithm": "dda", "rate": "unequal", "average": "ema", "participation": "half"},
        {"algorithm": "scaffold", "mixing": "two steps"},
        {"data": "diabetes", "partition": "shards", "model": "cnn", "features": "scattering"},
        {"sampling": "blocks"},
        {"algorithm": "pdsl", "data": "diabetes"},
    ],
    ids=str,
)
def test_remedies_are_followed_until_the_row_builds(tmp_path: Path, levels: dict[str, str]) -> None:
    case = case_of(tmp_path, **levels)
    refusal = refusal_of(case)
    assert refusal is not None
    assert follow(case, refusal) is None


def test_two_refusals_that_recommend_each_other_are_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(case: Case) -> PrivdecError:
        directed = case.data()["topology"]["name"] == "directed-ring"
        return ScenarioError(
            f"topology.name=x must be another; use {'ring' if directed else 'directed-ring'}", code="x"
        )

    monkeypatch.setattr(remedies, "refusal_of", refuse)
    case = case_of(tmp_path, graph="directed-ring")
    violation = follow(case, refuse(case))
    assert violation is not None
    assert violation.law == "remedies work"
