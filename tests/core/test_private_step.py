"""The choke point of privacy: who reads examples has paid, and who does not pay reads none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from variants import settings_for

from flower_privdec.core.cohort import Cohort, StepRequest, no_examples
from flower_privdec.data import Batch
from flower_privdec.experiment import Experiment


class Events:
    """What a cohort pays and reads, in order."""

    def __init__(self, cohort: Cohort, monkeypatch: pytest.MonkeyPatch, *, is_paid: bool = True) -> None:
        self.seen: list[tuple[str, list[int]]] = []
        self._is_paid = is_paid
        read = cohort.data.batch

        def batch(step: int, rows: np.ndarray) -> Batch:
            self.seen.append(("reads", rows.tolist()))
            return read(step, rows)

        monkeypatch.setattr(cohort.data, "batch", batch)
        monkeypatch.setattr(cohort, "ledger", self)

    def charge(self, step: int, rows: np.ndarray) -> None:
        self.seen.append(("pays", rows.tolist()))
        if not self._is_paid:
            raise ConnectionError("the disk is gone")


def request_of(cohort: Cohort, rows: list[int], **others: Any) -> StepRequest:
    out = torch.zeros(len(rows), len(cohort.initial), dtype=cohort.dtype)
    params = cohort.initial.expand(len(rows), -1)
    fields = {"sums": {"gradient": out}, "params": params, "round_index": 0, "rows": np.array(rows)}
    return StepRequest(**fields | others)


@pytest.mark.parametrize(
    ("rows", "others", "expected"),
    [
        ([0, 2, 3], {}, [("pays", [0, 2, 3]), ("reads", [0, 2, 3])]),
        ([1, 2], {"estimate": no_examples}, [("reads", [])]),
    ],
)
@pytest.mark.parametrize("batch", ["{sampling: poisson, size: 4}", "{sampling: full}"])
def test_rows_that_read_are_rows_that_pay(
    batch: str,
    rows: list[int],
    others: dict[str, Any],
    expected: list[tuple[str, list[int]]],
    build: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cohort = build("algorithm.name=d-psgd", f"data.batch={batch}").cohort()
    request = request_of(cohort, rows, **others)
    events = Events(cohort, monkeypatch)
    cohort.release_rows_(request)
    assert events.seen == expected
    assert (request.sums["gradient"] != 0).any(1).all()  # the noise is there in each case


def test_a_row_with_several_receivers_pays_once(
    build: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = build(*settings_for("algorithm.name=pdsl")).cohort()
    events = Events(cohort, monkeypatch)
    cohort.release_rows_(request_of(cohort, [1, 1, 2], receivers=np.array([0, 2, 1])))
    assert events.seen == [("pays", [1, 2]), ("reads", [1, 2])]


def test_nothing_is_read_if_the_payment_fails(
    build: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = build("algorithm.name=d-psgd").cohort()
    request = request_of(cohort, [0, 1])
    events = Events(cohort, monkeypatch, is_paid=False)
    with pytest.raises(ConnectionError):
        cohort.release_rows_(request)
    assert events.seen == [("pays", [0, 1])]
    assert not request.sums["gradient"].any()
