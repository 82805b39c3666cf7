"""A graph of a user's own: a function that gives a networkx graph, out-neighbour lists, or a topology."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flower_privdec.common.formatting import one_line
from flower_privdec.common.user_code import load_own
from flower_privdec.errors import RAISED_BY_USERS, PrivdecError, ScenarioError
from flower_privdec.graph.topology.graphs import StaticTopology, Topology, edge_array, networkx


def build_own_topology(target: str, n_peers: int, seed: int, arguments: Mapping[str, Any] | None = None) -> Topology:
    """Call a user's function with n_peers and its arguments, and take what it gives for a graph.

    Args:
        target: where the function lies, `package.module:name`.
        seed: given to a parameter of this name, unless the arguments have one.
        arguments: by name.

    Returns:
        The graph that it gives: a networkx graph or digraph on the nodes 0 to n_peers - 1, for each peer those it
        sends to (a list of lists, or a mapping), or a `Topology`, which may change from round to round.

    Raises:
        ScenarioError: the function cannot be had, fails, or gives something else.
    """
    arguments = arguments or {}
    function, where = load_own(target, "topology.module"), f"topology.module={target!r}"
    seed_option = {"seed": seed} if "seed" in _parameters(function) else {}
    try:
        graph = function(n_peers, **{**seed_option, **arguments})
    except PrivdecError:
        raise
    except RAISED_BY_USERS as error:  # a user's own function may raise anything
        raise ScenarioError(f"{where} could not be built with {dict(arguments)}: {one_line(error)}") from error
    return as_topology(graph, n_peers, target, where)


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return ()


def as_topology(made: Any, n_peers: int, name: str, where: str) -> Topology:
    """Return what a user's function gave as a topology.

    Args:
        made: see `build_own_topology`.
        name: what to call the topology.
        where: what to call the function in an error.

    Raises:
        ScenarioError: it is no graph of these peers.
    """
    if isinstance(made, Topology):
        if made.n_peers != n_peers:
            raise ScenarioError(f"{where} gives a graph of {made.n_peers} peers: it must have n_peers={n_peers}")
        return made
    if isinstance(made, networkx().Graph):
        pairs, symmetric = _pairs_of(made, n_peers, where), not made.is_directed()
    else:
        pairs, symmetric = _pairs_in(made, n_peers, where), False
    loops = [sender for sender, receiver in pairs if sender == receiver]
    if loops:
        raise ScenarioError(f"{where}: peer {loops[0]} sends to itself; leave it out, self weights are implied")
    edges = edge_array(np.array(pairs, dtype=np.int64).reshape(-1, 2), n_peers, symmetric=symmetric)
    directed = len(edge_array(edges, n_peers, symmetric=True)) > len(edges)
    return StaticTopology(name, n_peers, directed, edges)


def _pairs_of(graph: Any, n_peers: int, where: str) -> list[tuple[int, int]]:
    nodes = list(graph.nodes)
    if len(nodes) != n_peers or not all(_is_peer(node, n_peers) for node in nodes):
        some = ", ".join(map(repr, nodes[:3]))
        raise ScenarioError(
            f"{where} gives a graph of {len(nodes)} nodes ({some}, ...): they must be 0 to {n_peers - 1}; "
            "networkx.convert_node_labels_to_integers numbers them"
        )
    return [(int(sender), int(receiver)) for sender, receiver in graph.edges()]


def _pairs_in(made: Any, n_peers: int, where: str) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of out-neighbour lists, in order of the peers or by peer."""
    rule = "it must be a networkx graph, or for each peer a list of those it sends to"
    if isinstance(made, Mapping):
        made = [made.get(peer) for peer in range(n_peers)] if set(made) == set(range(n_peers)) else None
    if not isinstance(made, Sequence) or len(made) != n_peers:
        raise ScenarioError(f"{where} gives no lists for {n_peers} peers: {rule}")
    for peer, receivers in enumerate(made):
        right = isinstance(receivers, Sequence | set | frozenset | np.ndarray) and not isinstance(receivers, str)
        if not right or not all(_is_peer(receiver, n_peers) for receiver in receivers):
            raise ScenarioError(f"{where}: peer {peer} sends to {receivers!r}, not peers of 0 to {n_peers - 1}: {rule}")
    return [(peer, int(receiver)) for peer, receivers in enumerate(made) for receiver in receivers]


def _is_peer(value: object, n_peers: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and 0 <= int(value) < n_peers  # type: ignore[call-overload]
