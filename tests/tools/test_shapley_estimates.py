"""The command that compares cheap Shapley values with exact ones."""

from __future__ import annotations

import numpy as np

from flower_privdec.algorithms.shapley import Game, exact
from tools.shapley_estimates import estimates


def test_in_additive_games_untruncated_estimates_are_exact() -> None:
    hits = np.array([1, 4, 2, 3])

    def game(share: int) -> Game:
        return Game(4, lambda coalitions: coalitions @ hits, 10 * share)

    values = estimates(game, 1)
    for name, scale in {"exact on 1/4 of the examples": 4, "10 permutations": 1, "1 circle": 1}.items():
        np.testing.assert_allclose(values[name], exact(game(1)) / scale)
    assert len(values) == 7
