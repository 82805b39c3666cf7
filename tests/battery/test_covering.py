"""Arrays that cover all tuples, around what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest

from tools.battery.covering import Array, Part, cause

SIZES = (3, 2, 4, 3, 2, 5)


def everything(chosen: Mapping[int, int]) -> list[int]:
    return list(chosen)


def grown(array: Array, refused: list[Part]) -> list[tuple[int, ...]]:
    """Return the rows that an array accepts where some sets of levels are refused, which it has to find out."""
    accepted = []
    for row in array.rows():
        parts = [part for part in refused if part <= set(enumerate(row))]
        if parts:
            array.refuse(parts[0])
        else:
            array.accept(row)
            accepted.append(row)
    return accepted


def tuples_of(rows: list[tuple[int, ...]], strength: int) -> set[Part]:
    return {
        frozenset((factor, row[factor]) for factor in factors)
        for row in rows
        for factors in combinations(range(len(SIZES)), strength)
    }


@pytest.mark.parametrize(("strength", "most"), [(2, 30), (3, 120)])
def test_every_tuple_is_in_a_short_array(strength: int, most: int) -> None:
    array = Array(SIZES, everything, strength)
    total = len(array.uncovered)
    rows = grown(array, [])
    assert len(tuples_of(rows, strength)) == array.covered == total
    assert len(rows) <= most


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_refused_tuple_hides_no_other(seed: int) -> None:
    refused = [frozenset({(0, 1), (2, 3)}), frozenset({(5, 4)}), frozenset({(1, 0), (3, 2), (4, 1)})]
    array = Array(SIZES, everything, seed=seed)
    wanted = {part for part in array.uncovered if not any(one <= part for one in refused)}
    rows = grown(array, refused)
    covered = tuples_of(rows, 2)
    assert not any(part <= set(enumerate(row)) for part in refused for row in rows)
    assert wanted <= covered


def test_rows_follow_from_the_seed() -> None:
    first, again, other = (grown(Array(SIZES, everything, seed=seed), []) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_levels_that_mean_nothing_beside_others_count_for_nothing() -> None:
    def applies(chosen: Mapping[int, int]) -> list[int]:
        return [factor for factor in chosen if factor != 4 or chosen.get(0, 1) == 1]

    array = Array(SIZES, applies, decisive=[0])
    assert not any({(4, 0), (0, 2)} <= part for part in array.uncovered)
    rows = grown(array, [])
    assert not array.uncovered
    assert {row[4] for row in rows if row[0] == 1} == {0, 1}


@pytest.mark.parametrize(
    "guilty", [frozenset({(0, 2)}), frozenset({(1, 1), (5, 4)}), frozenset({(0, 2), (3, 1), (4, 1)})]
)
def test_the_cause_is_the_smallest_refused_set_of_levels(guilty: Part) -> None:
    row, plain, builds = (2, 1, 3, 1, 1, 4), (0,) * 6, []

    def still(other: tuple[int, ...]) -> bool:
        builds.append(other)
        return guilty <= set(enumerate(other))

    assert cause(row, plain, still) == guilty
    assert len(builds) <= 16
