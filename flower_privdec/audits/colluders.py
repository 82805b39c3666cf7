"""How much cancelling noise is left against colluders who combine all that they know in the worst way.

The observer of a peer has the secrets of its colluders, so it can take the noise that they share with the honest peers
H out of these peers' sums. What is left of the sums has covariance Σ_H: each honest peer's own noise, and the noise
that it shares with other honest peers. Weighing the sums by the peer's row of Σ_H^{-1} leaves the least noise
(see `privacy.mechanism.cancelling`).
"""

from __future__ import annotations

import math
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import torch

from flower_privdec.privacy.noise import NoisedSum
from flower_privdec.privacy.noise.kinds.pair_noise import CancellingNoise

OF_NOBODY = 1e5  # own noise of a peer that releases nothing, over the largest: nothing is learnt from it
MOST_SETS = 256  # of colluders that are tried for a row


class View(NamedTuple):
    """How the worst colluders see one row.

    Attributes:
        honest: the rows whose noise they do not know, int64 [h].
        weights: what these rows' sums are multiplied by before they are added, [h]; 1 for the row itself.
        variance: the variance of the noise that is left.
    """

    honest: np.ndarray
    weights: np.ndarray
    variance: float


class Uncovered(NamedTuple):
    """The sums of some rows after colluders have removed all the noise that they can.

    Attributes:
        sums: a row's own examples and the noise that is left on them, [r, d].
        left: the standard deviation of that noise, [r].
        whole: the standard deviation of all noise of the row, its own and what it shares, [r].
    """

    sums: np.ndarray
    left: np.ndarray
    whole: np.ndarray


def worst_view(row: int, own: np.ndarray, shared: np.ndarray, colluding: int) -> View:
    """Return how colluders see a row who leave it the least noise.

    Args:
        own: variances of the rows' own noise, [m].
        shared: variances of the noise of each pair of rows, [m, m].
        colluding: how many rows' draws are known; of more than MOST_SETS sets of them the first are tried.
    """
    rows = np.arange(len(own))
    others = np.delete(rows, row).tolist()
    count = min(colluding, len(others))

    views = []
    for colluders in islice(combinations(others, count), MOST_SETS):
        honest = np.setdiff1d(rows, colluders)
        between = shared[np.ix_(honest, honest)]
        covariance = np.diag(own[honest] + between.sum(axis=1)) - between
        place = honest.tolist().index(row)
        inverse_row = np.linalg.inv(covariance)[place]
        variance = 1 / float(inverse_row[place])
        views.append(View(honest, inverse_row * variance, variance))
    return min(views, key=lambda view: view.variance)


class Colluders:
    """The worst colluders of each row of a run whose noise cancels.

    Args:
        mechanism: draws the noise that pairs share, as the run itself does.
    """

    def __init__(self, mechanism: CancellingNoise) -> None:
        mechanism.draws_apart = True  # colluders know what some pairs draw
        self._mechanism = mechanism
        self._views: dict[bytes, tuple[list[View], np.ndarray]] = {}

    def uncover(self, before: np.ndarray, after: np.ndarray, own: np.ndarray, noised: NoisedSum) -> Uncovered:
        """Take from each row's sum the noise that its worst colluders know, and what other rows' examples add.

        Args:
            before: the sums without noise, [r, d], in units of what the network conserves, as all three.
            after: the sums with it, [r, d].
            own: the standard deviation of each row's own noise, [r].
            noised: whose sums they are.
        """
        pairs = self._mechanism.plan
        count = len(own)
        weights = pairs.weights[noised.peers]
        shared = pairs.pair_std(noised.step, noised.peers, own / weights, noised.name)  # [pairs]

        # Each pair's two rows among these; -1 for a peer that has none.
        row_of = np.full(len(pairs.weights), -1)
        row_of[noised.peers] = np.arange(count)
        rows = row_of[pairs.edges]  # [pairs, 2]
        here = np.flatnonzero((rows >= 0).any(axis=1) & (shared > 0))

        # Those that left, and with whom the others still draw, stand behind the rows: they release nothing, and may
        # collude too.
        gone = np.setdiff1d(pairs.edges[here], noised.peers)
        row_of[gone] = count + np.arange(len(gone))
        ends = row_of[pairs.edges[here]]

        # Variances are over the largest own noise, so that inverting them loses no digits.
        unit = own.max()
        stds = np.concatenate([own / unit, np.full(len(gone), OF_NOBODY)])
        views, whole = self._views_of(stds, shared[here] / unit, ends, noised, count)

        uncovered = Uncovered(np.empty(after.shape), np.empty(count), whole * unit)
        for row, view in enumerate(views):
            known = here[~np.isin(ends, view.honest).all(axis=1)]
            drawn = torch.zeros(after.shape, dtype=torch.float64)
            self._mechanism.add_pairs_(drawn, noised, known, rows, shared, 1 / pairs.weights)

            others_examples = before.copy()
            others_examples[row] = 0
            rest = after - weights[:, None] * drawn.numpy() - others_examples
            released = view.honest < count
            uncovered.sums[row] = view.weights[released] @ rest[view.honest[released]]
            uncovered.left[row] = math.sqrt(view.variance) * unit
        return uncovered

    def _views_of(
        self, own: np.ndarray, shared: np.ndarray, rows: np.ndarray, noised: NoisedSum, count: int
    ) -> tuple[list[View], np.ndarray]:
        """Return the worst view of each of the first rows, and the standard deviation of all of its noise, [r].

        Most steps have the noise of the step before, so views are kept by it.
        """
        key = np.round(np.concatenate([own, shared]), 9).tobytes() + noised.peers.tobytes()
        if key not in self._views:
            squares = np.zeros((len(own), len(own)))
            squares[rows[:, 0], rows[:, 1]] = shared**2
            squares[rows[:, 1], rows[:, 0]] = shared**2
            colluding = self._mechanism.plan.colluding
            views = [worst_view(row, own**2, squares, colluding) for row in range(count)]
            self._views[key] = views, np.sqrt(own**2 + squares.sum(axis=1))[:count]
        return self._views[key]
