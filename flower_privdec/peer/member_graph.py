"""The graph of a federation whose members changed: that of its scenario, over those who take part now.

A run keeps its name, whoever joins and leaves: checkpoints and messages are of the scenario with which it began. So a
peer that has another list of members than its neighbour is understood all the same, and mass is conserved, since each
sender's weights add up to one by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_privdec.common.errors import ScenarioError
from flower_privdec.core import Algorithm, Exchange, Mix
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.topology import MemberTopology, build_topology
from flower_privdec.peer.extension import no_extension
from flower_privdec.pushsum.membership import Members
from flower_privdec.scenario import Scenario


@dataclass(frozen=True)
class MemberGraph:
    """The graph over the members of a federation.

    Attributes:
        scenario: with which the federation began.
        first: its mixing then, of all peers of the scenario.
        members: who takes part.
        mixing: among them, by the numbers of all that there ever were.
        among: the same, of as many peers as there are members.
        rounds: how many the run had at first, and after each entry of the list that gave it more.
    """

    scenario: Scenario
    first: Mixing
    members: tuple[int, ...]
    mixing: Mixing
    among: Mixing
    rounds: tuple[int, ...]

    @classmethod
    def of(cls, scenario: Scenario, first: Mixing, members: Members, is_extended: bool = True) -> MemberGraph:
        """Return the graph over those who take part.

        Args:
            is_extended: whether the list may give the run more rounds, see `what_stays`.

        Raises:
            ScenarioError: the scenario has no such graph.
        """
        present = members.present
        rounds = (scenario.rounds, *members.rounds[1:])
        if not is_extended:
            rounds = (scenario.rounds,)
        if present == tuple(range(scenario.n_peers)) == tuple(one.number for one in members.all):
            return cls(scenario, first, present, first, first, rounds)

        # No graph may keep an operator from shutting a peer out. If there is none of those who are left, as a grid of a
        # prime number of peers, who was shut out last keeps its place, and is passed over as one that is gone.
        revoked = sorted((one for one in members.all if one.revoked), key=lambda one: -one.revoked)
        for kept in range(len(revoked) + 1):
            places = tuple(sorted([*present, *(one.number for one in revoked[:kept])]))
            try:
                return cls._over(places, scenario, first, members, rounds)
            except ScenarioError:
                if len(members.all) == scenario.n_peers:
                    break
                if kept == len(revoked):
                    raise

        # A graph that only so many peers have, as a list of edges: who left is passed over, too.
        return cls(scenario, first, present, first, first, rounds)

    @classmethod
    def _over(
        cls, places: tuple[int, ...], scenario: Scenario, first: Mixing, members: Members, rounds: tuple[int, ...]
    ) -> MemberGraph:
        """Return the graph in which peers have places.

        Raises:
            ScenarioError: there is none of so many.
        """
        section = scenario.topology
        topology = build_topology(section.name, len(places), seed=scenario.seed_of("run"), **section.options())
        among = Mixing(topology, first.weights, None, first.steps)
        numbered = MemberTopology(topology, places, len(members.all))
        mixing = Mixing(numbered, first.weights, None, first.steps)
        return cls(scenario, first, members.present, mixing, among, rounds)


def no_join(scenario: Scenario, algorithm: Algorithm, cancels: bool) -> str:
    """Return why a network takes no peer that joins, and keeps its graph when one leaves; "" if it takes some.

    Args:
        cancels: whether noise is shared between peers.
    """
    if scenario.network.mode == "synchronous":
        return "network.mode=synchronous: all peers would have to take the new graph in the same round"
    if cancels:
        return "privacy.noise.kind=cancelling: who shares noise with whom was planned, and charged, for those who began"
    if scenario.participation.kind != "all":
        return f"participation.kind={scenario.participation.kind}: who is active was drawn for those who began"
    exchanges = [item for item in algorithm.program if isinstance(item, Exchange)]
    if not all(isinstance(exchange, Mix) for exchange in exchanges):
        return f"algorithm.name={algorithm.name}: what a peer answers was charged for the neighbours that it had"
    if type(algorithm).exchange is not Algorithm.exchange:
        return f"algorithm.name={algorithm.name}: it makes a graph of its own, for those who began"
    return ""


def what_stays(scenario: Scenario, algorithm: Algorithm, cancels: bool) -> dict[str, str]:
    """Return which kinds of changes a network cannot follow, each with the reason.

    The operator is refused them before they are signed. A peer that gets one all the same, as of a list that was signed
    for another scenario of this name, names it and goes on as before.
    """
    stays = {}
    why = no_join(scenario, algorithm, cancels)
    if why:
        stays["add"] = why
    if scenario.network.mode == "synchronous":
        stays["leave"] = "network.mode=synchronous: its peers wait for each other"
    why = no_extension(scenario, cancels) or why
    if why:
        stays["extend"] = why
    return stays


def check_extension(scenario: Scenario, algorithm: Algorithm, cancels: bool) -> None:
    """Refuse more rounds for a network that cannot have them.

    Raises:
        ScenarioError: says why.
    """
    why = what_stays(scenario, algorithm, cancels).get("extend")
    if why:
        raise ScenarioError(
            f"no more rounds can be given to a run with {why}; begin another run, with the same privacy.ledger, which "
            "counts both",
            code="members.no-extension",
        )


def check_joins(scenario: Scenario, algorithm: Algorithm, cancels: bool) -> None:
    """Refuse a peer that joins a network which takes none, see `no_join`.

    Raises:
        ScenarioError: says why.
    """
    why = no_join(scenario, algorithm, cancels)
    if why:
        raise ScenarioError(f"no peer can join a run with {why}; begin another run with it", code="members.no-join")
