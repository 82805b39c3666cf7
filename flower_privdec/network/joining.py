"""Whether a run can go on with other members: as its operator asks before a peer is added."""

from __future__ import annotations

from flower_privdec.algorithms import build_algorithm
from flower_privdec.experiment.agreement import build_exchange
from flower_privdec.experiment.pair_plan import secret_pairs
from flower_privdec.peer.member_graph import MemberGraph, check_joins
from flower_privdec.pushsum.membership import Members
from flower_privdec.scenario import Scenario


def check_graph(scenario: Scenario, members: Members) -> None:
    """Refuse members with whom a run could not go on.

    Raises:
        ScenarioError: it takes no peer that joins, or has no such graph.
    """
    algorithm = build_algorithm(scenario.algorithm)
    check_joins(scenario, algorithm, cancels=len(secret_pairs(scenario)) > 0)
    first, _ = build_exchange(scenario, algorithm)
    if first is not None:
        MemberGraph.of(scenario, first, members)
