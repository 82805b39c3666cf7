"""Whether a run can go on with other members, or more rounds: as its operator asks before anything is signed."""

from __future__ import annotations

from flower_privdec.algorithms import build_algorithm
from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Algorithm
from flower_privdec.experiment.agreement import build_exchange, check_reach
from flower_privdec.experiment.pair_plan import secret_pairs
from flower_privdec.graph.mixing import Mixing
from flower_privdec.peer.member_graph import MemberGraph, check_extension, check_joins, no_join
from flower_privdec.pushsum.membership import Members
from flower_privdec.scenario import Scenario


def check_graph(scenario: Scenario, members: Members) -> None:
    """Refuse members with whom a run could not go on.

    Raises:
        ScenarioError: it takes no peer that joins, has no such graph, or one with an edge over which neither end could
            dial the other.
    """
    algorithm = build_algorithm(scenario.algorithm)
    if scenario.private is not None and isinstance(scenario.private.epsilon, tuple):
        raise ScenarioError(
            f"privacy.epsilon lists a budget for each of the {scenario.n_peers} peers that began, and who joins has "
            "none: a run that peers join has one for all; begin another run with it",
            code="members.budget",
        )
    check_joins(scenario, algorithm, cancels=len(secret_pairs(scenario)) > 0)
    _check_edges(scenario, algorithm, members)


def check_who_is_left(scenario: Scenario, members: Members) -> None:
    """Refuse that somebody leaves if the others could not go on.

    Raises:
        ScenarioError: see `check_graph`.
    """
    if len(members.all) > scenario.n_peers:
        check_graph(scenario, members)
        return
    algorithm = build_algorithm(scenario.algorithm)
    if no_join(scenario, algorithm, cancels=len(secret_pairs(scenario)) > 0):
        # It keeps its graph, in which who left is passed over.
        build_exchange(scenario, algorithm)
    else:
        _check_edges(scenario, algorithm, members)


def _check_edges(scenario: Scenario, algorithm: Algorithm, members: Members) -> None:
    """Refuse a graph over some members that does not exist, or whose edges cannot all be dialled."""
    first: Mixing | None
    first, _ = build_exchange(scenario, algorithm)
    if first is not None:
        graph = MemberGraph.of(scenario, first, members)
        check_reach(members.dialling([place.address for place in scenario.network.peers or ()]), graph.mixing)


def check_rounds(scenario: Scenario) -> None:
    """Refuse more rounds for a run that cannot have them.

    Raises:
        ScenarioError: says why.
    """
    check_extension(scenario, build_algorithm(scenario.algorithm), cancels=len(secret_pairs(scenario)) > 0)
