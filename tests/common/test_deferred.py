"""A module that is imported when something of it is first used."""

from __future__ import annotations

import statistics
from types import ModuleType

import pytest

from flower_privdec.common.deferred import _Deferred


def test_a_deferred_module_becomes_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading from it then costs no more than from the module: steps read from torch all the time."""
    deferred = _Deferred("statistics")
    assert deferred.mean is statistics.mean
    kind: type = type(deferred)
    assert kind is ModuleType

    # As a submodule is, which is imported later.
    monkeypatch.setattr(statistics, "later", 1, raising=False)
    assert deferred.later == 1
    with pytest.raises(AttributeError):
        _ = deferred.missing
