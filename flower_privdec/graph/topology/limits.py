"""Refuse a graph that is too large to list, or almost never connected, before it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from flower_privdec.errors import ScenarioError

MOST_EDGES = 4_000_000  # in both directions; networkx takes a minute and 2 GiB for them
ALMOST_NEVER = 8.0  # expected peers without an edge at which one draw of 3,000 is connected

_PROBABILITY, _DEGREE = 0.5, 4  # where the scenario says none
_COUNTS: dict[str, Callable[[int, Mapping[str, Any]], float]] = {
    "directed-exponential": lambda n, _: n * math.log2(n),
    "directed-exponential-full": lambda n, _: n * math.log2(n),
    "directed-ring": lambda n, _: n,
    "ring": lambda n, _: 2 * n,
    "bipartite": lambda n, _: n * n / 2,
    "star": lambda n, _: 2 * n,
    "torus": lambda n, _: 4 * n,
    "random-regular": lambda n, options: n * options.get("degree", _DEGREE),
    "small-world": lambda n, options: n * options.get("degree", _DEGREE),
    "erdos-renyi": lambda n, options: n * n * options.get("probability", _PROBABILITY),
}


def check_size(name: str, n_peers: int, options: Mapping[str, Any]) -> None:
    """Refuse a named graph that would have more edges than can be listed.

    Raises:
        ScenarioError: with the estimate.
    """
    if name in _COUNTS:
        check_edges(_COUNTS[name](n_peers, options), name, n_peers)


def check_edges(count: float, name: str, n_peers: int) -> None:
    """Refuse more edges than can be listed.

    Raises:
        ScenarioError: with how many there are.
    """
    if count > MOST_EDGES:
        raise ScenarioError(
            f"topology.name={name} has about {count:.2g} edges with n_peers={n_peers}, and at most {MOST_EDGES:,} "
            "can be listed; take fewer peers, a sparser graph, or complete, which needs no list"
        )


def check_probability(n_peers: int, probability: float, remedy: str) -> None:
    """Refuse a random graph that leaves so many peers without an edge that no draw is ever connected.

    Of n peers n (1 - p)^(n-1) have no edge on average, and about e to minus that many draws leave none without.

    Raises:
        ScenarioError: with the average.
    """
    alone = n_peers * (1 - probability) ** (n_peers - 1)
    if alone > ALMOST_NEVER:
        raise ScenarioError(
            f"topology.probability={probability} leaves about {alone:.3g} of n_peers={n_peers} without an edge, so "
            f"that no draw is connected; {remedy}"
        )
