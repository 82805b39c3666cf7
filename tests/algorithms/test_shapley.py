"""Shapley values: the four laws that define them, ties, what estimates come to, and which coalitions are tried."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_privdec.algorithms.shapley import Game, aggregation_weights, circular, exact, monte_carlo, normalized

Hits = Callable[[np.ndarray], np.ndarray]
Solve = Callable[[Game], np.ndarray]


EXAMPLES = 1000


def table_game(seed: int, n: int, most: int = EXAMPLES) -> Hits:
    """Return a game whose coalitions hit random numbers of examples."""
    hits = np.random.default_rng(seed).integers(0, most + 1, size=2**n)
    return lambda coalitions: hits[coalitions @ (1 << np.arange(n))]


def game_of(n: int, hits: Hits) -> Game:
    return Game(n, hits, EXAMPLES)


def by_permutation(seed: int) -> Solve:
    return lambda game: monte_carlo(game, 7, np.random.default_rng(seed))


SOLVERS: dict[str, Solve] = {
    "exact": exact,
    "monte carlo": by_permutation(3),
    "circular": lambda game: circular(game, 2, np.random.default_rng(3)),
}
players, seeds = st.integers(1, 7), st.integers(0, 10**6)


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=players, seed=seeds)
@settings(max_examples=40)
def test_balance_the_values_share_what_all_are_worth(solver: str, n: int, seed: int) -> None:
    hits = table_game(seed, n)
    total = hits(np.ones((1, n), dtype=bool))[0] / EXAMPLES
    assert SOLVERS[solver](game_of(n, hits)).sum() == pytest.approx(total, abs=1e-12)


@given(n=st.integers(2, 9), seed=seeds)
@settings(max_examples=40)
def test_symmetry_two_that_add_the_same_get_the_same(n: int, seed: int) -> None:
    hits = table_game(seed, n)

    def symmetric(coalitions: np.ndarray) -> np.ndarray:  # the last two players count together
        swapped = coalitions[:, [*range(n - 2), n - 1, n - 2]]
        return hits(coalitions) + hits(swapped)

    values = exact(game_of(n, symmetric))
    assert values[-1] == values[-2]  # to the last bit: eq. 19 would make 0 and 1 of a difference


def fraction_values(n: int, hits: np.ndarray, examples: int) -> list[Fraction]:
    """Return the Shapley values by eq. 7, over all permutations, as fractions."""
    values = [Fraction(0)] * n
    for order in permutations(range(n)):
        before = 0
        for player in order:
            after = before | 1 << player
            values[player] += Fraction(int(hits[after] - hits[before]), factorial(n) * examples)
            before = after
    return values


@given(n=st.integers(1, 4), seed=seeds, examples=st.sampled_from([3, 7, 14, 50, 300]))
@settings(max_examples=150)
def test_values_tie_if_and_only_if_fractions_do(n: int, seed: int, examples: int) -> None:
    """Few hits of few examples, as models that are much alike have: ties are common."""
    hits = np.random.default_rng(seed).integers(0, 3, size=2**n)
    hits[0] = 0
    wanted = fraction_values(n, hits, examples)

    values = exact(Game(n, lambda coalitions: hits[coalitions @ (1 << np.arange(n))], examples))

    assert values.tolist() == [float(value) for value in wanted]
    spread = max(wanted) - min(wanted)
    shares = [float((value - min(wanted)) / spread) if spread else 1.0 for value in wanted]
    np.testing.assert_allclose(normalized(values), shares, rtol=1e-12, atol=1e-12)


@given(n=st.integers(2, 6), seed=seeds, permutation_count=st.integers(1, 9))
@settings(max_examples=60)
def test_permutations_tie_when_all_players_are_alike(n: int, seed: int, permutation_count: int) -> None:
    """Every coalition hits as many as it has members, times seven: every order gives every player seven."""
    game = Game(n, lambda coalitions: 7 * coalitions.sum(1), 7 * n + 3)
    values = monte_carlo(game, permutation_count, np.random.default_rng(seed))
    np.testing.assert_array_equal(values, 7 / (7 * n + 3))


@pytest.mark.parametrize(("truncation", "hits"), [(0.07, 7), (0.29, 29), (0.57, 57), (0.1, 10), (0.0, 0)])
def test_truncation_counts_whole_examples(truncation: float, hits: int) -> None:
    """A permutation goes on if the first player leaves one of 100 examples more than `truncation` says."""

    second = np.random.default_rng(0).permutation(2)[1]

    def second_adds(left: int) -> float:
        game = Game(2, lambda coalitions: np.where(coalitions.all(1), 100, 100 - left), 100)
        return float(monte_carlo(game, 1, np.random.default_rng(0), truncation)[second])

    assert second_adds(hits) == 0
    assert second_adds(hits + 1) == (hits + 1) / 100


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=st.integers(2, 7), seed=seeds)
@settings(max_examples=40)
def test_zero_element_who_adds_nothing_gets_nothing(solver: str, n: int, seed: int) -> None:
    hits = table_game(seed, n)

    def idle(coalitions: np.ndarray) -> np.ndarray:
        without = coalitions & (np.arange(n) > 0)
        return np.where(without.any(1), hits(without), 0)

    assert SOLVERS[solver](game_of(n, idle))[0] == 0


@pytest.mark.parametrize("solver", SOLVERS)
@given(n=players, seed=seeds)
@settings(max_examples=40)
def test_additivity_values_of_a_sum_of_games_are_sums(solver: str, n: int, seed: int) -> None:
    one, other = table_game(seed, n), table_game(seed + 1, n)
    both = SOLVERS[solver](game_of(n, lambda coalitions: one(coalitions) + other(coalitions)))
    apart = SOLVERS[solver](game_of(n, one)) + SOLVERS[solver](game_of(n, other))
    np.testing.assert_allclose(both, apart, atol=1e-12)


@given(n=st.integers(1, 6), seed=seeds)
@settings(max_examples=20)
def test_exact_is_the_mean_over_all_permutations(n: int, seed: int) -> None:
    """Eq. 7: by loops."""
    hits = table_game(seed, n)
    numbers = np.arange(2**n)
    table = hits((numbers[:, None] >> np.arange(n)) & 1 == 1)
    table[0] = 0

    game = game_of(n, hits)
    assert exact(game).tolist() == [float(value) for value in fraction_values(n, table, EXAMPLES)]
    assert game.evaluations == 2**n - 1


def test_six_members_take_63_coalitions_not_720_times_6() -> None:
    tried: list[int] = []
    hits = table_game(1, 6)

    def counted(coalitions: np.ndarray) -> np.ndarray:
        assert coalitions.any(1).all()
        tried.append(len(coalitions))
        return hits(coalitions)

    game = game_of(6, counted)
    exact(game)
    assert tried == [63]
    monte_carlo(game, 50, np.random.default_rng(0))
    assert tried == [63]  # whose coalitions are all known


@given(n=st.integers(1, 8), seed=seeds)
@settings(max_examples=30)
def test_a_circle_tries_its_arcs_once(n: int, seed: int) -> None:
    game = game_of(n, table_game(seed, n))
    circular(game, 1, np.random.default_rng(seed))
    assert game.evaluations == n * (n - 1) + 1


@given(n=st.integers(1, 3), seed=seeds)
@settings(max_examples=30)
def test_circles_of_three_are_exact(n: int, seed: int) -> None:
    hits = table_game(seed, n)
    values = circular(game_of(n, hits), 1, np.random.default_rng(seed))
    np.testing.assert_allclose(values, exact(game_of(n, hits)), rtol=1e-12, atol=1e-15)


def test_circles_converge_to_exact() -> None:
    hits = table_game(5, 6)
    wanted = exact(game_of(6, hits))
    runs = [circular(game_of(6, hits), 160, np.random.default_rng(seed)) for seed in range(8)]
    np.testing.assert_allclose(np.mean(runs, axis=0), wanted, atol=0.01)


def test_monte_carlo_converges_to_exact() -> None:
    hits = table_game(5, 6)
    wanted = exact(game_of(6, hits))
    errors = []
    for count in (10, 160, 2560):
        runs = [monte_carlo(game_of(6, hits), count, np.random.default_rng(seed)) for seed in range(8)]
        errors.append(float(np.sqrt(np.mean((np.stack(runs) - wanted) ** 2))))
    assert errors[1] < 0.45 * errors[0]  # 1 / sqrt(16), and room for chance
    assert errors[2] < 0.45 * errors[1]
    np.testing.assert_allclose(np.mean(runs, axis=0), wanted, atol=0.05)


@given(n=st.integers(1, 8), seed=seeds, tolerance=st.floats(0, 1))
@settings(max_examples=60)
def test_truncated_permutations_try_fewer_and_keep_the_balance(n: int, seed: int, tolerance: float) -> None:
    hits = table_game(seed, n)
    whole, cut = game_of(n, hits), game_of(n, hits)
    monte_carlo(whole, 9, np.random.default_rng(seed))
    values = monte_carlo(cut, 9, np.random.default_rng(seed), truncation=tolerance)
    total = hits(np.ones((1, n), dtype=bool))[0] / EXAMPLES
    assert cut.evaluations <= whole.evaluations
    assert abs(values.sum() - total) <= tolerance + 1e-12
    never = monte_carlo(game_of(n, hits), 9, np.random.default_rng(seed), truncation=-1.0)
    np.testing.assert_allclose(never, monte_carlo(whole, 9, np.random.default_rng(seed)), atol=1e-12)


def test_a_truncated_permutation_ends_when_nothing_is_left() -> None:
    game = Game(8, lambda coalitions: coalitions[:, 0].astype(np.int64), 1)  # player 0 is all there is
    values = monte_carlo(game, 6, np.random.default_rng(2), truncation=1e-9)
    np.testing.assert_array_equal(values, np.eye(8)[0])
    whole = Game(8, lambda coalitions: coalitions[:, 0].astype(np.int64), 1)
    monte_carlo(whole, 6, np.random.default_rng(2))
    assert game.evaluations < whole.evaluations


def test_weights_follow_the_paper_and_are_even_at_zero() -> None:
    np.testing.assert_allclose(normalized(np.array([1.0, 3.0, 2.0])), [0, 1, 0.5])
    np.testing.assert_allclose(
        aggregation_weights(np.array([1.0, 3.0, 2.0]), [0.5, 0.25, 0.25]), [0, 1 / 0.25 / 1.5, 0.5 / 0.25 / 1.5]
    )
    np.testing.assert_allclose(aggregation_weights(np.full(4, 0.2), [0.25] * 4), np.ones(4))
    np.testing.assert_allclose(aggregation_weights(np.zeros(1), [1.0]), [1.0])
