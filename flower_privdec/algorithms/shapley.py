"""Shapley values of a game whose coalitions are dear to try: exactly, or over random permutations; nothing private.

A game gives every coalition of n players a worth v, with v(∅) = 0 (PDSL, Definition 3). Here v is an accuracy: so many
hits of so many examples. Player i's Shapley value is

    φ_i = Σ over S without i of (v(S with i) - v(S)) / (n binom(n - 1, |S|))              (PDSL, eq. 8 and 18)

Monte Carlo takes the mean of v(i and all before it) - v(all before i) over R random permutations (PDSL, eq. 26).
`circular` takes R circles of players, gone round from everyone and both ways, in place of R permutations.
Each way tries every coalition once at most, however many terms it is in.

Values are often equal, since hits are few and coalitions alike, and eq. 19 stretches whatever differs to 0 and 1. Sums
of floating-point shares would differ in their last bit, and make weights (0, 0, 3) of what should be (1, 1, 1). So all
sums are of whole numbers, over one denominator by which they are divided last: n! times the examples for eq. 18,
R times the examples for eq. 26.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from math import factorial, floor

import numpy as np

LARGEST_EXACT = 12  # players whose 2^n - 1 coalitions are tried one and all

Hits = Callable[[np.ndarray], np.ndarray]  # of coalitions bool [c, n], int64 [c]


class Game:
    """A game that remembers how many examples its coalitions hit.

    Attributes:
        n_players: n.
        examples: by how many examples a coalition is judged; it is worth its hits / examples.
        evaluations: how many coalitions have been tried; the empty one hits none and is never tried.
    """

    def __init__(self, n_players: int, hits: Hits, examples: int) -> None:
        """Take a game.

        Args:
            hits: how many examples each of some coalitions hits; they are given together, none of them empty.
        """
        self.n_players = n_players
        self.examples = examples
        self._try = hits
        self._known: dict[bytes, int] = {bytes(n_players): 0}

    @property
    def evaluations(self) -> int:
        """Return how many coalitions have been tried."""
        return len(self._known) - 1

    def hits(self, coalitions: np.ndarray) -> np.ndarray:
        """Return the hits of coalitions bool [c, n], int64 [c]; those that are not known are tried together."""
        keys = [row.tobytes() for row in coalitions]
        new = {key: row for key, row in zip(keys, coalitions, strict=True) if key not in self._known}
        if new:
            hits = self._try(np.stack(list(new.values())))
            self._known.update(zip(new, hits.tolist(), strict=True))
        return np.array([self._known[key] for key in keys], dtype=np.int64)


def exact(game: Game) -> np.ndarray:
    """Return the Shapley values [n] by eq. 18, from the hits of all 2^n - 1 coalitions.

    Examples:
        >>> exact(Game(2, lambda coalitions: coalitions @ [1, 3], examples=4)).tolist()
        [0.25, 0.75]
    """
    n = game.n_players
    numbers = np.arange(2**n)
    coalitions = (numbers[:, None] >> np.arange(n)) & 1 == 1
    hits = game.hits(coalitions)
    sizes = coalitions.sum(1)

    # 1 / (n binom(n - 1, s)) = s! (n - 1 - s)! / n!: in how many of the n! orders the s players come before i, the
    # others after it.
    orders = np.array([factorial(size) * factorial(n - 1 - size) for size in range(n)], dtype=np.int64)

    sums = np.empty(n, dtype=np.int64)
    for player in range(n):
        without = numbers[~coalitions[:, player]]
        gains = hits[without | 1 << player] - hits[without]
        sums[player] = (orders[sizes[without]] * gains).sum()
    return sums / (factorial(n) * game.examples)


def monte_carlo(
    game: Game, permutations: int, generator: np.random.Generator, truncation: float | None = None
) -> np.ndarray:
    """Return Shapley values [n] estimated over random permutations (eq. 26, Algorithm 2).

    Args:
        permutations: R.
        generator: draws them.
        truncation: a permutation ends once what has come so far is worth as much as all together, to within this; who
            would come later adds nothing to it. None ends none. Values then sum up to v(all) to within `truncation`.
    """
    orders = np.stack([generator.permutation(game.n_players) for _ in range(permutations)])
    if truncation is None:
        return _mean_gains(game, orders, _gains(game, _prefixes(orders)))

    # In decimals as they were written: in binary 0.07 of 100 examples is more than seven of them, 0.29 less than 29.
    most_hits = floor(Decimal(str(truncation)) * game.examples)
    return _mean_gains(game, orders, _truncated_gains(game, _prefixes(orders), most_hits))


def circular(game: Game, circles: int, generator: np.random.Generator) -> np.ndarray:
    """Return Shapley values [n] estimated over random circles, each gone round from every player, both ways.

    A circle gives 2n permutations, in which every player comes at each place twice. So what a player adds to nobody,
    most of v as v(∅) = 0, and to all others is exact, and no player gains by coming first by chance. All of them are of
    n (n - 1) + 1 coalitions, the arcs of the circle: a permutation of its own would try n.

    Args:
        circles: how many.
        generator: draws them.
    """
    n = game.n_players
    orders = []
    for _ in range(circles):
        circle = generator.permutation(n)
        for start in range(n):
            orders.append(np.roll(circle, start))
            orders.append(np.roll(circle[::-1], start))

    stacked = np.stack(orders)
    return _mean_gains(game, stacked, _gains(game, _prefixes(stacked)))


def _prefixes(orders: np.ndarray) -> np.ndarray:
    """Return who is there before any, after the first, ..., after all of some orders [R, n], bool [R, n + 1, n]."""
    count, n = orders.shape
    prefixes = np.zeros((count, n + 1, n), dtype=bool)
    for place in range(n):
        prefixes[:, place + 1] = prefixes[:, place]
        prefixes[np.arange(count), place + 1, orders[:, place]] = True
    return prefixes


def _mean_gains(game: Game, orders: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Return each player's mean gain, [n].

    Args:
        orders: who comes at each place, [R, n].
        gains: how many hits it adds there, int64 [R, n].
    """
    sums = np.zeros(game.n_players, dtype=np.int64)
    np.add.at(sums, orders.ravel(), gains.ravel())
    return sums / (len(orders) * game.examples)


def _gains(game: Game, prefixes: np.ndarray) -> np.ndarray:
    """Return how many hits each place adds in each permutation, int64 [R, n]."""
    hits = game.hits(prefixes.reshape(-1, game.n_players)).reshape(prefixes.shape[:2])
    return np.diff(hits, axis=1)


def _truncated_gains(game: Game, prefixes: np.ndarray, most_hits: int) -> np.ndarray:
    """Return the same, place by place, of the permutations that have not come to within `most_hits` of all."""
    total = game.hits(np.ones((1, game.n_players), dtype=bool))[0]
    hits = np.zeros(prefixes.shape[:2], dtype=np.int64)
    for place in range(1, game.n_players + 1):
        going = np.abs(total - hits[:, place - 1]) > most_hits
        hits[:, place] = hits[:, place - 1]
        if going.any():
            hits[going, place] = game.hits(prefixes[going, place])
    return np.diff(hits, axis=1)


def normalized(values: np.ndarray) -> np.ndarray:
    """Return (φ - min φ) / (max φ - min φ), [n] (PDSL, eq. 19); if all are equal, 0/0, all are 1."""
    spread = np.ptp(values)
    return (values - values.min()) / spread if spread > 0 else np.ones_like(values)


def aggregation_weights(values: np.ndarray, mixing_weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return π = φ̂ / (ω Σ φ̂), [n] (PDSL, eq. 20).

    Args:
        values: φ, [n].
        mixing_weights: ω > 0 of each player, [n].
    """
    shares = normalized(values)
    return np.asarray(shares / (np.asarray(mixing_weights) * shares.sum()))
