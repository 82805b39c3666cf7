"""Weights for the edges of one round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from flower_privdec.catalogue import WEIGHTS
from flower_privdec.common.formatting import did_you_mean
from flower_privdec.errors import ScenarioError
from flower_privdec.graph.mixing.matrix import AverageMatrix, MixingMatrix, SparseMatrix
from flower_privdec.graph.topology.graphs import EdgeArray

Degrees = npt.NDArray[np.int64]
Rule = Callable[[EdgeArray, int], npt.NDArray[np.float64]]  # a weight for each peer itself, then for each edge


def mixing_matrix(
    edges: EdgeArray, n_peers: int, weights: str, active: npt.NDArray[np.bool_] | None = None
) -> MixingMatrix:
    """Weigh the edges of a round between its active peers.

    column-stochastic: W[i, j] = 1 / (out_j + 1), i = j included.
    metropolis: W[i, j] = 1 / (1 + max(deg_i, deg_j)), the rest to itself (Xiao and Boyd 2004).
    doubly-stochastic: W[i, j] = 1 / (D + 1) with D the largest degree, the rest to itself; regular graphs.
    max-degree: the same on any undirected graph, W = I - L / (D + 1) with L its Laplacian.
    server: W[i, j] = 1 / m over the m active peers j, for every i.
    Degrees count active peers only; but for server, an inactive peer keeps its own.

    Args:
        edges: [m, 2] (sender, receiver), without self loops or repeats; server does not look at them.
        n_peers: how many peers there are.
        weights: a key of `RULES`, or server, of which only who is active decides the weights.
        active: mask of the active peers, [n_peers]; None means all.

    Returns:
        The matrix of all n_peers receivers.

    Raises:
        ScenarioError: unknown weights, or weights that this graph does not have.

    Examples:
        >>> edges = np.array([[0, 1], [0, 2], [1, 0]])
        >>> mixing_matrix(edges, 3, "column-stochastic").dense().round(2).tolist()
        [[0.33, 0.5, 0.0], [0.33, 0.5, 0.0], [0.33, 0.0, 1.0]]
    """
    check_weights(weights)
    mask = np.ones(n_peers, dtype=bool) if active is None else active
    if weights == "server":
        return average_matrix(mask, everybody_receives=True)
    _check_edges(edges, n_peers)
    if weights in UNDIRECTED:
        _require_symmetric(edges, n_peers, weights)
    if weights == "doubly-stochastic":
        _require_regular(edges, n_peers)
    active_edges = edges if mask.all() else edges[mask[edges[:, 0]] & mask[edges[:, 1]]]
    n_active = int(mask.sum())
    if len(active_edges) == n_active * (n_active - 1):
        return average_matrix(mask)  # a clique: each of the rules gives 1/m
    return _sparse(active_edges, n_peers, RULES[weights])


def check_weights(weights: str) -> None:
    """Refuse weights that have no rule here."""
    if weights not in RULES and weights != "server":
        raise ScenarioError(
            f"topology.weights={weights!r} must be one of {', '.join(RULES)}{did_you_mean(weights, RULES)}"
        )


def average_matrix(active: npt.NDArray[np.bool_], *, everybody_receives: bool = False) -> AverageMatrix:
    """Give every active peer (or everybody) the mean over the active ones; the others keep their own."""
    n_peers = len(active)
    averaged = np.ones(n_peers, dtype=bool) if everybody_receives else active
    ids = np.arange(n_peers)
    return AverageMatrix(n_peers, ids, np.flatnonzero(active), ids, averaged)


def _sparse(edges: EdgeArray, n_peers: int, rule: Rule) -> SparseMatrix:
    """Assemble compressed rows: first the receiver's own term, then the others' by distance behind it."""
    ids = np.arange(n_peers)
    senders, receivers = np.concatenate([ids, edges[:, 0]]), np.concatenate([ids, edges[:, 1]])
    values = rule(edges, n_peers)
    order = np.argsort(receivers * n_peers + (receivers - senders) % n_peers)
    counts = np.bincount(receivers, minlength=n_peers)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    halves = bool((counts == 2).all() and (values == 0.5).all())
    return SparseMatrix(n_peers, ids, indptr, senders[order], values[order], halves)


def _column_stochastic(edges: EdgeArray, n_peers: int) -> npt.NDArray[np.float64]:
    share = 1 / (np.bincount(edges[:, 0], minlength=n_peers) + 1)
    return np.concatenate([share, share[edges[:, 0]]])


def _metropolis(edges: EdgeArray, n_peers: int) -> npt.NDArray[np.float64]:
    degree = np.bincount(edges[:, 0], minlength=n_peers)
    return _rest_to_itself(edges, n_peers, 1 / (1 + np.maximum(degree[edges[:, 0]], degree[edges[:, 1]])))


def _uniform(edges: EdgeArray, n_peers: int) -> npt.NDArray[np.float64]:
    out_degree, in_degree = _degrees(edges, n_peers)
    if not np.array_equal(out_degree, in_degree):
        raise ScenarioError(
            "topology.weights=doubly-stochastic on a directed graph must have everybody active, for an absent peer "
            "unbalances what others send and receive; use column-stochastic with push-sum"
        )
    largest = int(out_degree.max())
    return _rest_to_itself(edges, n_peers, np.full(len(edges), 1 / (largest + 1)))


def _rest_to_itself(edges: EdgeArray, n_peers: int, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.concatenate([1 - np.bincount(edges[:, 1], weights=share, minlength=n_peers), share])


def _degrees(edges: EdgeArray, n_peers: int) -> tuple[Degrees, Degrees]:
    return np.bincount(edges[:, 0], minlength=n_peers), np.bincount(edges[:, 1], minlength=n_peers)


def _check_edges(edges: EdgeArray, n_peers: int) -> None:
    if len(edges) and (edges.min() < 0 or edges.max() >= n_peers):
        raise ScenarioError(f"edges must join peers 0 to {n_peers - 1}; got {edges.min()} to {edges.max()}")
    loops = edges[edges[:, 0] == edges[:, 1], 0]
    if len(loops):
        raise ScenarioError(f"edge {loops[0]} -> {loops[0]} must be left out: self weights are implied")


def _require_symmetric(edges: EdgeArray, n_peers: int, weights: str) -> None:
    there, back = np.sort(edges @ [n_peers, 1]), np.sort(edges @ [1, n_peers])
    if not np.array_equal(there, back):
        alone = np.setdiff1d(there, back)
        sender, receiver = divmod(int(alone[0]), n_peers)
        raise ScenarioError(
            f"topology.weights={weights} must have an undirected graph, but {sender} -> {receiver} has no reverse; "
            "use column-stochastic with push-sum, or an undirected topology"
        )


def _require_regular(edges: EdgeArray, n_peers: int) -> None:
    degrees = np.concatenate(_degrees(edges, n_peers))
    if degrees.min() != degrees.max():
        raise ScenarioError(
            f"topology.weights=doubly-stochastic must have all in- and out-degrees the same, and they are "
            f"{degrees.min()} to {degrees.max()}; use max-degree or metropolis (undirected graphs), or push-sum"
        )


RULES: dict[str, Rule] = WEIGHTS.some("column-stochastic", "metropolis", "doubly-stochastic", "max-degree").bind(
    {
        "column-stochastic": _column_stochastic,
        "metropolis": _metropolis,
        "doubly-stochastic": _uniform,
        "max-degree": _uniform,
    }
)
UNDIRECTED = ("metropolis", "max-degree")  # symmetric, and so for undirected graphs alone
