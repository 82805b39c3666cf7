"""A peer that ends again and again is started later each time, and at once after it has lasted or was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_privdec.common.errors import NotAgreedError, RunError, StoppedError
from flower_privdec.devices.back_off import FIRST, backing_off, waiting_time


def waits(folder: Path, ends: list[BaseException | None], most: float = 900.0) -> list[float]:
    """Return how long each of some starts waited, which end with an error or well."""
    waited: list[float] = []
    for error in ends:
        total: list[float] = []
        try:
            with backing_off(folder, most, total.append):
                if error is not None:
                    raise error
        except (RunError, StoppedError, KeyboardInterrupt):
            pass
        waited.append(sum(total))
    return waited


def test_each_failed_start_is_waited_for_longer(tmp_path: Path) -> None:
    failures: list[BaseException | None] = [RunError("a port is in use")] * 10
    assert waits(tmp_path, failures) == [0, 0, 10, 20, 40, 80, 160, 320, 640, 900]


@pytest.mark.parametrize("end", [None, StoppedError("Ctrl-C"), NotAgreedError("apart")])
def test_an_end_that_is_no_failure_begins_again(end: BaseException | None, tmp_path: Path) -> None:
    failure = RunError("no neighbour")
    assert waits(tmp_path, [failure, failure, failure, end, failure, failure, failure]) == [0, 0, 10, 20, 0, 0, 10]


def test_a_kill_counts_as_a_failure(tmp_path: Path) -> None:
    assert waits(tmp_path, [KeyboardInterrupt(), KeyboardInterrupt(), None]) == [0, 0, 10]


def test_a_damaged_or_unwritable_count_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "starts").write_text("many\x00")
    assert waits(tmp_path, [None]) == [0]
    (tmp_path / "file").write_text("")
    assert waits(tmp_path / "file", [RunError("not a folder"), None]) == [0, 0]


def test_no_wait_is_longer_than_asked_for() -> None:
    assert waiting_time(10**9, 60.0) == 60.0
    assert waiting_time(2, 60.0) == FIRST
