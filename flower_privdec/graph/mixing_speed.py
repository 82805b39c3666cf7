"""How fast peers agree by mixing, from the products of the rounds' matrices.

A product of matrices makes of the peers' models weighted means of all; once its rows are alike, so are the models. With
push-sum each row is divided by its weight, the product applied to ones.

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


RANDOM_ROUNDS = 128  # of a random graph, if nobody says how many
MEASURED_PLACES = 4096
NEGLIGIBLE = 1e-4  # of the sum so far
MOST_MEASURED = 1024  # peers: the eigenvalues of a matrix of as many rows


def disagreement_left(mixing: Mixing, absent: int = 0) -> float:
    """Return how much of the variance of noise that sums to 0 is in the peers' models before each round's steps.

    Every round adds such noise of variance 1; that of j rounds ago was mixed j times as often as a round mixes. With
    P_j the product of these matrices, each row divided by its push-sum weight, this is the sum over j of
    |P_j - mean row|² / n. It is 0 if a round reaches the mean.

    Args:
        absent: how many peers, evenly spaced, are away all the time: n is the number of the others.

    Raises:
        ScenarioError: there are too many peers to multiply matrices of as many rows.
    """
    n = mixing.n_peers
    mixing = mixing.if_all_stay  # nobody knows beforehand who leaves
    there = np.ones(n, dtype=bool)
    there[np.arange(absent) * n // max(absent, 1)] = False
    if absent:
        away = [Absence(int(peer), 0, None) for peer in np.flatnonzero(~there)]
        mixing = Mixing(mixing.topology, mixing.weights, leave(mixing.participation, away, 0), mixing.steps)
    if n > MOST_MEASURED:
        raise ScenarioError(
            f"n_peers={n} must be <= {MOST_MEASURED} to measure how fast noise mixes: give privacy.noise.strength",
            code="noise.strength",
        )

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

    Args:
        first: the first of the rounds.
        most: rounds at most.
        tolerance: the part of the largest distance between two models that may be left.

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
    """Yield the products of the matrices from a place on, [n, n], each row divided by its push-sum weight."""
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

    # Long products would underflow: the direction of agreement is removed and the rest rescaled in every round.
    product = _centred(torch.eye(n, dtype=torch.float64))
    log_scale = 0.0
    for k in range(rounds):
        product = _centred(mixing.matrix(k).apply(product))
        scale = float(product.abs().max())
        if scale < 1e-13:  # the exact mean, but for rounding
            return 1.0
        product = product / scale
        log_scale = log_scale + np.log(scale)

    radius = float(np.abs(np.linalg.eigvals(product.numpy())).max())
    if radius < n * 1e-15:
        return 1.0
    return max(0.0, float(1 - np.exp((np.log(radius) + log_scale) / rounds)))


def _centred(rows: Tensor) -> Tensor:
    """Subtract the mean over rows from every column: what is left is disagreement."""
    return rows - rows.mean(dim=0)
