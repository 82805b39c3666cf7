"""Shapley values of a game whose coalitions are dear to try: exactly, or over random permutations; nothing private.

A game gives every coalition of n players a worth v, with v(∅) = 0 (PDSL, Definition 3). Player i's Shapley value is

    φ_i = Σ over S without i of (v(S with i) - v(S)) / (n binom(n - 1, |S|))              (PDSL, eq. 8 and 18)

Monte Carlo takes the mean of v(i and all before it) - v(all before i) over R random permutations (PDSL, eq. 26).
Either way every coalition is tried once at most, however many terms it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb

import numpy as np

LARGEST_EXACT = 12  # players whose 2^n - 1 coalitions are tried one and all

Worth = Callable[[np.ndarray], np.ndarray]  # of coalitions bool [c, n], float64 [c]


class Game:
    """A game that remembers what its coalitions are worth.

    Attributes:
        n_players: n.
        evaluations: how many coalitions have been tried; the empty one is worth 0 and is never tried.
    """

    def __init__(self, n_players: int, worth: Worth) -> None:
        """Take a game.

        Args:
            worth: the worth of some coalitions together, none of them empty.
        """
        self.n_players = n_players
        self._worth = worth
        self._known: dict[bytes, float] = {bytes(n_players): 0.0}

    @property
    def evaluations(self) -> int:
        """Return how many coalitions have been tried."""
        return len(self._known) - 1

    def values(self, coalitions: np.ndarray) -> np.ndarray:
        """Return what coalitions bool [c, n] are worth, float64 [c]; those that are not known are tried together."""
        keys = [row.tobytes() for row in coalitions]
        new = {key: row for key, row in zip(keys, coalitions, strict=True) if key not in self._known}
        if new:
            values = self._worth(np.stack(list(new.values())))
            self._known.update(zip(new, values.tolist(), strict=True))
        return np.array([self._known[key] for key in keys])


def exact(game: Game) -> np.ndarray:
    """Return the Shapley values [n] by eq. 18, from the worth of all 2^n - 1 coalitions.

    Examples:
        >>> exact(Game(2, lambda coalitions: coalitions @ [1.0, 3.0])).tolist()
        [1.0, 3.0]
    """
    n = game.n_players
    numbers = np.arange(2**n)
    coalitions = (numbers[:, None] >> np.arange(n)) & 1 == 1
    worth = game.values(coalitions)
    sizes = coalitions.sum(1)
    shares = np.array([1 / (n * comb(n - 1, size)) if size < n else 0.0 for size in range(n + 1)])
    values = np.empty(n)
    for player in range(n):
        without = numbers[~coalitions[:, player]]
        values[player] = (shares[sizes[without]] * (worth[without | 1 << player] - worth[without])).sum()
    return values


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
    n = game.n_players
    orders = np.stack([generator.permutation(n) for _ in range(permutations)])
    prefixes = np.zeros((permutations, n + 1, n), dtype=bool)  # before any, after the first, ..., after all
    for place in range(n):
        prefixes[:, place + 1] = prefixes[:, place]
        prefixes[np.arange(permutations), place + 1, orders[:, place]] = True

    if truncation is None:
        gains = _gains(game, prefixes)
    else:
        gains = _truncated_gains(game, prefixes, truncation)

    values = np.zeros(n)
    np.add.at(values, orders.ravel(), gains.ravel())
    return values / permutations


def _gains(game: Game, prefixes: np.ndarray) -> np.ndarray:
    """Return what each place adds in each permutation, [R, n]."""
    worth = game.values(prefixes.reshape(-1, game.n_players)).reshape(prefixes.shape[:2])
    return np.diff(worth, axis=1)


def _truncated_gains(game: Game, prefixes: np.ndarray, truncation: float) -> np.ndarray:
    """Return the same, place by place, of the permutations that have not ended."""
    total = game.values(np.ones((1, game.n_players), dtype=bool))[0]
    worth = np.zeros(prefixes.shape[:2])
    for place in range(1, game.n_players + 1):
        going = np.abs(total - worth[:, place - 1]) > truncation
        worth[:, place] = worth[:, place - 1]
        if going.any():
            worth[going, place] = game.values(prefixes[going, place])
    return np.diff(worth, axis=1)


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
