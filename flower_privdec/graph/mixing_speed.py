"""How fast peers agree by mixing, from the products of the rounds' matrices.

Mixing k times multiplies the models by P = W_{k-1} ... W_0, so each peer then has a weighted mean of all, with the
weights in its row of P. Once all rows are alike, the peers agree. With push-sum each row is divided by its push weight,
which is its sum.

If a round has several mixing steps, each has a matrix of its own, at its *place* in the sequence of all matrices: the
places of round k are k steps, k steps + 1, ....

    spectral_gap         per round, in the long run
    disagreement_left    what is left of noise that sums to 0 and is added in every round
    rounds_to_agree      how many rounds leave no more than a tolerance
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import ScenarioError
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.participation import Absence, leave

if TYPE_CHECKING:
    from torch import Tensor


RANDOM_ROUNDS = 128  # of a random graph that are multiplied, if nobody says how many
MEASURED_PLACES = 4096  # whose noise is added up, at most
NEGLIGIBLE = 1e-4  # of the sum so far: a smaller term ends it
MOST_MEASURED = 1024  # peers: larger matrices take too long to multiply and to find the eigenvalues of


def disagreement_left(mixing: Mixing, absent: int = 0) -> float:
    """Return the variance, at the beginning of a round, that noise which sums to 0 over the peers has in their models.

    Every round adds such noise, of variance 1 at each peer. That of j rounds ago has been mixed by P_j, the product of
    the matrices of j rounds, each row divided by its push weight. So this is Σ_j |P_j - mean row|² / n. It is 0 if the
    mixing of one round reaches the mean.

    Args:
        absent: how many peers, evenly spaced, are away all the time: n is the number of the others.

    Raises:
        ScenarioError: there are too many peers to multiply matrices of as many rows.
    """
    n = mixing.n_peers
    if n > MOST_MEASURED:
        raise ScenarioError(
            f"n_peers={n} must be <= {MOST_MEASURED} to measure how fast noise mixes: give privacy.noise.strength",
            code="noise.strength",
        )

    mixing = mixing.if_all_stay  # nobody knows beforehand who leaves
    there = np.ones(n, dtype=bool)
    if absent:
        absent_peers = np.arange(absent) * n // absent  # evenly spaced
        there[absent_peers] = False
        away = [Absence(peer, 0, None) for peer in absent_peers.tolist()]
        mixing = Mixing(mixing.topology, mixing.weights, leave(mixing.participation, away, 0), mixing.steps)

    total = 0.0
    for place, rows in enumerate(_weighted_means(mixing, 0, MEASURED_PLACES)):
        ends_round = (place + 1) % mixing.steps == 0
        if not ends_round:
            continue

        left = float(_centred(rows[there][:, there]).square().sum()) / (n - absent)
        total += left
        if left <= NEGLIGIBLE * total:
            break
    return total


def rounds_to_agree(mixing: Mixing, first: int, most: int, tolerance: float) -> tuple[int, float]:
    """Return after how many rounds of only mixing the peers agree, whatever their models were.

    Such a round has one mixing step.

    Args:
        first: the place of the first of these rounds.
        most: stop after so many.
        tolerance: how far apart two models may still be, as a part of the largest distance between two at first.

    Returns:
        The rounds, at most `most`; and the part that may be left after them.

    Raises:
        ScenarioError: there are too many peers to multiply matrices of as many rows.
    """
    n = mixing.n_peers
    if n > MOST_MEASURED:
        raise ScenarioError(
            f"network.final_mixing=auto must have {MOST_MEASURED} peers at most, not n_peers={n}: give it a number",
            code="network.final-mixing",
        )

    left = 1.0
    for count, rows in enumerate(_weighted_means(mixing, first, most), start=1):
        left = float(_centred(rows).abs().sum(1).max())
        if left <= tolerance:
            return count, left
    return most, left


def _weighted_means(mixing: Mixing, first: int, count: int) -> Iterator[Tensor]:
    """Yield the product of the matrices of one place, of two, ..., from `first` on, [n, n], each row over its sum."""
    product = torch.eye(mixing.n_peers, dtype=torch.float64)
    for place in range(first, first + count):
        product = mixing.matrix(place).apply(product)
        yield product / product.sum(1, keepdim=True)


def spectral_gap(mixing: Mixing, horizon: int | None = None) -> float:
    """Measure how fast a graph agrees: 1 - |lambda_2(W_{K-1} ... W_0)|^(1/K), per round.

    K is the period if the graph has one and everybody is active, and the horizon otherwise.

    Args:
        horizon: rounds of a random graph or participation to multiply; by default 128.

    Returns:
        The gap in [0, 1]: 1 when K rounds reach the exact mean, 0 when they leave some peers disconnected: a random
        graph of few edges a round needs a longer horizon than the default one.
    """
    n = mixing.n_peers
    mixing = mixing.if_all_stay
    rounds = horizon or RANDOM_ROUNDS
    if mixing.participation.kind == "all" and mixing.topology.period:
        rounds = mixing.topology.period

    # Take out the part on which all agree, whose eigenvalue is 1: the largest that is left is lambda_2. Rescale in
    # every round, and keep count, or long products would underflow.
    product = _centred(torch.eye(n, dtype=torch.float64))
    log_scale = 0.0
    for k in range(rounds):
        product = _centred(mixing.matrix(k).apply(product))
        scale = float(product.abs().max())
        if scale < 1e-13:  # nothing but rounding is left: this is the exact mean
            return 1.0
        product = product / scale
        log_scale = log_scale + np.log(scale)

    radius = float(np.abs(np.linalg.eigvals(product.numpy())).max())
    if radius < n * 1e-15:  # rounding again
        return 1.0
    return max(0.0, float(1 - np.exp((np.log(radius) + log_scale) / rounds)))


def _centred(rows: Tensor) -> Tensor:
    """Subtract the mean over rows from every column: what is left is disagreement."""
    return rows - rows.mean(dim=0)
