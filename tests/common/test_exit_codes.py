"""Each end of a command has one number, by which a unit restarts it or leaves it."""

from __future__ import annotations

from paths import ROOT

from flower_privdec.common import errors
from flower_privdec.common.errors import BudgetError, PrivdecError, ScenarioError
from flower_privdec.common.exit_codes import (
    EXIT_CODES,
    LEDGER_SHORT,
    NOT_VALID_NOW,
    STATUS_OF,
    WRONG_INPUT,
    Restart,
    statuses,
)


def test_each_status_stands_for_one_kind_of_end() -> None:
    numbers = [one.status for one in EXIT_CODES]
    assert numbers == sorted(set(numbers))
    assert sorted(number for restart in Restart for number in statuses(restart)) == numbers
    assert all(one.remedy for one in EXIT_CODES if one.restart is not Restart.DONE)


def test_every_error_ends_with_a_status_of_the_table() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PrivdecError)]
    assert {kind.exit_status for kind in kinds} <= {one.status for one in EXIT_CODES}
    assert BudgetError("short", code="ledger.witnessed").exit_status == LEDGER_SHORT
    assert BudgetError("spent", code="ledger.spent-elsewhere").exit_status == WRONG_INPUT
    assert ScenarioError("over", code="certificate.expired").exit_status == NOT_VALID_NOW


def test_codes_with_a_status_of_their_own_are_raised() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "flower_privdec").rglob("*.py")
        if path.stem != "exit_codes"
    )
    assert [code for code in STATUS_OF if f'"{code}"' not in sources] == []
