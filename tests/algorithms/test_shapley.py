"""Shapley values: the four laws that define them, what Monte Carlo comes to, and how often a coalition is tried."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_privdec.algorithms.shapley import Game, aggregation_weights, exact, monte_carlo, normalized

Worth = Callable[[np.ndarray], np.ndarray]
Solve = Callable[[Game], np.ndarray]


def table_game(seed: int, n: int) -> Worth:
    """Return a game whose coalitions are worth random numbers."""
    worth = np.random.default_rng(seed).normal(size=2**n)
    return lambda coalitions: worth[coalitions @ (1 << np.arange(n))]


def by_permutation(seed: int) -> Solve:
    return lambda game: monte_carlo(game, 7, np.random.default_rng(seed))


SOLVERS: dict[str, Solve] = {"exact": exact, "monte carlo": by_permutation(3)}
players, seeds = st.integers(1, 7), st.integers(0, 10**6)


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=players, seed=seeds)
@settings(max_examples=40)
def test_balance_the_values_share_what_all_are_worth(solver: str, n: int, seed: int) -> None:
    worth = table_game(seed, n)
    total = worth(np.ones((1, n), dtype=bool))[0]
    assert SOLVERS[solver](Game(n, worth)).sum() == pytest.approx(total, abs=1e-12)


@given(n=st.integers(2, 7), seed=seeds)
@settings(max_examples=40)
def test_symmetry_two_that_add_the_same_get_the_same(n: int, seed: int) -> None:
    worth = table_game(seed, n)

    def symmetric(coalitions: np.ndarray) -> np.ndarray:  # the last two players count together
        swapped = coalitions[:, [*range(n - 2), n - 1, n - 2]]
        return worth(coalitions) + worth(swapped)

    values = exact(Game(n, symmetric))
    assert values[-1] == pytest.approx(values[-2], abs=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=st.integers(2, 7), seed=seeds)
@settings(max_examples=40)
def test_zero_element_who_adds_nothing_gets_nothing(solver: str, n: int, seed: int) -> None:
    worth = table_game(seed, n)

    def idle(coalitions: np.ndarray) -> np.ndarray:
        without = coalitions & (np.arange(n) > 0)
        return np.where(without.any(1), worth(without), 0.0)

    assert abs(SOLVERS[solver](Game(n, idle))[0]) < 1e-12


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=players, seed=seeds)
@settings(max_examples=40)
def test_additivity_values_of_a_sum_of_games_are_sums(solver: str, n: int, seed: int) -> None:
    one, other = table_game(seed, n), table_game(seed + 1, n)
    both = SOLVERS[solver](Game(n, lambda coalitions: one(coalitions) + other(coalitions)))
    apart = SOLVERS[solver](Game(n, one)) + SOLVERS[solver](Game(n, other))
    np.testing.assert_allclose(both, apart, atol=1e-12)


@given(n=st.integers(1, 5), seed=seeds)
@settings(max_examples=20)
def test_exact_is_the_mean_over_all_permutations(n: int, seed: int) -> None:
    """Eq. 7: by loops."""
    game, values = Game(n, table_game(seed, n)), np.zeros(n)
    for order in permutations(range(n)):
        before = np.zeros((1, n), dtype=bool)
        for player in order:
            after = before.copy()
            after[0, player] = True
            values[player] += (game.values(after) - game.values(before))[0] / factorial(n)
            before = after
    np.testing.assert_allclose(exact(game), values, atol=1e-12)
    assert game.evaluations == 2**n - 1


def test_six_members_take_63_coalitions_not_720_times_6() -> None:
    tried: list[int] = []
    worth = table_game(1, 6)

    def counted(coalitions: np.ndarray) -> np.ndarray:
        assert coalitions.any(1).all()
        tried.append(len(coalitions))
        return worth(coalitions)

    game = Game(6, counted)
    exact(game)
    assert tried == [63]
    monte_carlo(game, 50, np.random.default_rng(0))
    assert tried == [63]  # whose coalitions are all known


def test_monte_carlo_converges_to_exact() -> None:
    worth = table_game(5, 6)
    wanted = exact(Game(6, worth))
    errors = []
    for count in (10, 160, 2560):
        runs = [monte_carlo(Game(6, worth), count, np.random.default_rng(seed)) for seed in range(8)]
        errors.append(float(np.sqrt(np.mean((np.stack(runs) - wanted) ** 2))))
    assert errors[1] < 0.45 * errors[0]  # 1 / sqrt(16), and room for chance
    assert errors[2] < 0.45 * errors[1]
    np.testing.assert_allclose(np.mean(runs, axis=0), wanted, atol=0.05)


@given(n=st.integers(1, 8), seed=seeds, tolerance=st.floats(0, 3))
@settings(max_examples=60)
def test_truncated_permutations_try_fewer_and_keep_the_balance(n: int, seed: int, tolerance: float) -> None:
    worth = table_game(seed, n)
    whole, cut = Game(n, worth), Game(n, worth)
    monte_carlo(whole, 9, np.random.default_rng(seed))
    values = monte_carlo(cut, 9, np.random.default_rng(seed), truncation=tolerance)
    total = worth(np.ones((1, n), dtype=bool))[0]
    assert cut.evaluations <= whole.evaluations
    assert abs(values.sum() - total) <= tolerance + 1e-12
    never = monte_carlo(Game(n, worth), 9, np.random.default_rng(seed), truncation=-1.0)
    np.testing.assert_allclose(never, monte_carlo(whole, 9, np.random.default_rng(seed)), atol=1e-12)


def test_a_truncated_permutation_ends_when_nothing_is_left() -> None:
    game = Game(8, lambda coalitions: coalitions[:, 0] * 1.0)  # player 0 is all there is
    values = monte_carlo(game, 6, np.random.default_rng(2), truncation=1e-9)
    np.testing.assert_array_equal(values, np.eye(8)[0])
    whole = Game(8, lambda coalitions: coalitions[:, 0] * 1.0)
    monte_carlo(whole, 6, np.random.default_rng(2))
    assert game.evaluations < whole.evaluations


def test_weights_follow_the_paper_and_are_even_at_zero() -> None:
    np.testing.assert_allclose(normalized(np.array([1.0, 3.0, 2.0])), [0, 1, 0.5])
    np.testing.assert_allclose(
        aggregation_weights(np.array([1.0, 3.0, 2.0]), [0.5, 0.25, 0.25]), [0, 1 / 0.25 / 1.5, 0.5 / 0.25 / 1.5]
    )
    np.testing.assert_allclose(aggregation_weights(np.full(4, 0.2), [0.25] * 4), np.ones(4))
    np.testing.assert_allclose(aggregation_weights(np.zeros(1), [1.0]), [1.0])
