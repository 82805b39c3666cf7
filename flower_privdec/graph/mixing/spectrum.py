"""How fast a graph agrees."""

from __future__ import annotations

import numpy as np
import torch

from flower_privdec.graph.mixing.schedule import Mixing

RANDOM_ROUNDS = 128
MOST_MEASURED = 1024  # peers: the eigenvalues of a matrix of as many rows


def spectral_gap(mixing: Mixing, horizon: int | None = None) -> float:
    """Measure how fast a graph agrees: 1 - |lambda_2(W_{K-1} ... W_0)|^(1/K), per round.

    K is the period when the graph has one and everybody is active, and the horizon otherwise. The consensus
    direction is taken out and the rest rescaled round by round, so that long products do not underflow.

    Args:
        mixing: the matrices.
        horizon: rounds of a random graph or participation to multiply; 128 when not given.

    Returns:
        The gap in [0, 1]: 1 when K rounds reach the exact mean, 0 when they leave some peers apart: a random
        graph of few edges a round needs a longer horizon than the default one.
    """
    n = mixing.n_peers
    period = mixing.topology.period if mixing.participation.kind == "all" else None
    rounds = period or horizon or RANDOM_ROUNDS
    product, log_scale = _centred(torch.eye(n, dtype=torch.float64)), 0.0
    for k in range(rounds):
        product = _centred(mixing.matrix(k).apply(product))
        scale = float(product.abs().max())
        if scale < 1e-13:
            return 1.0
        product, log_scale = product / scale, log_scale + np.log(scale)
    radius = float(np.abs(np.linalg.eigvals(product.numpy())).max())
    if radius < n * 1e-15:
        return 1.0
    return max(0.0, float(1 - np.exp((np.log(radius) + log_scale) / rounds)))


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Take the mean over rows off every column: the part that has not agreed yet."""
    return rows - rows.mean(dim=0)
