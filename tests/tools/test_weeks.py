"""What a network of weeks grows by, from samples."""

from __future__ import annotations

import os

import pytest

from tools.weeks import THINGS, growth, processes, table


def samples(per_round: float, began: float = 0.0) -> list[dict[str, float]]:
    """Return samples of what grows steadily after a beginning in which it leaps."""
    rounds = range(0, 10_000, 500)
    return [{"round": k, **dict.fromkeys(THINGS, began * (k >= 2_000) + per_round * k)} for k in rounds]


def test_growth_leaves_out_how_a_peer_begins() -> None:
    assert growth(samples(0.0, began=1e9), "resident") == pytest.approx(0.0, abs=1e-3)
    assert growth(samples(0.7, began=1e9), "log") == pytest.approx(0.7e6)


def test_a_table_of_growth_has_every_thing() -> None:
    lines = table(samples(1.0)).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [*THINGS.values()]
    assert all(line.endswith("| +1,000,000 |") for line in lines[2:])


def test_without_a_round_nothing_is_said_to_grow() -> None:
    assert growth([{"round": 5, "log": 1.0}, {"round": 5, "log": 2.0}], "log") == 0.0


def test_a_process_that_is_no_peer_is_not_sampled() -> None:
    assert processes(os.getpid()) == {}
