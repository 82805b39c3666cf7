"""The exchanges of a run in order: which one a place is, who sends there, and who waits."""

from __future__ import annotations

from functools import cache

import numpy as np

from flower_privdec.core import Exchange, Reply
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.graph.mixing import Mixing


class Timetable:
    """The places of a run: exchange e of round k is place k E + e, with E exchanges a round.

    Attributes:
        places: how many the run has.

    Raises:
        ScenarioError: the algorithm averages at a server, which a network of peers does not have.
    """

    def __init__(self, agreement: Agreement) -> None:
        program = agreement.algorithm.program
        self.exchanges = {at: item for at, item in enumerate(program) if isinstance(item, Exchange)}
        self._at = list(self.exchanges)
        self.places = agreement.scenario.rounds * len(self._at)
        self._mixing = _of_a_graph(agreement)
        self.neighbours = cache(self._neighbours)

    def place(self, round_index: int, at: int) -> int:
        """Return the number of the exchange at some place of the program in a round."""
        return round_index * len(self._at) + self._at.index(at)

    def at(self, place: int) -> int:
        """Return where in the program the exchange of a place is."""
        return self._at[place % len(self._at)]

    def exchange(self, place: int) -> Exchange:
        """Return the exchange of a place."""
        return self.exchanges[self.at(place)]

    def receivers(self, peer: int, place: int) -> set[int]:
        """Return to whom a peer sends at a place."""
        return self._others(peer, place, receives=False)

    def senders(self, peer: int, place: int) -> set[int]:
        """Return who sends to a peer at a place."""
        return self._others(peer, place, receives=True)

    def column(self, peer: int, round_index: int) -> dict[int, float]:
        """Return the weights that a peer's row has at others in a round, W[j, peer] by j."""
        hosted = self._mixing.hosted(round_index, np.array([peer]))
        return {receiver: weight for _, receiver, weight in hosted.sent}

    def _neighbours(self, peer: int) -> list[int]:
        """Return whom a peer may ever send to, or hear."""
        edges = self._mixing.topology.support()
        mine = edges[(edges == peer).any(1)]
        return sorted(set(mine.flatten().tolist()) - {peer})

    def _others(self, peer: int, place: int, *, receives: bool) -> set[int]:
        if not 0 <= place < self.places:
            return set()
        hosted = self._mixing.hosted(place // len(self._at), np.array([peer]))
        if receives == isinstance(self.exchange(place), Reply):
            return {receiver for _, receiver, _ in hosted.sent}
        return {sender for sender, _ in hosted.heard}


def _of_a_graph(agreement: Agreement) -> Mixing:
    mixing = agreement.mixing
    if mixing is None:
        raise ScenarioError(
            f"algorithm.name={agreement.algorithm.name} exchanges nothing, so there is no network: use `privdec run`"
        )
    if agreement.scenario.topology.name == "server":
        raise ScenarioError(
            "topology.name='server' averages at a server, and on a network there are peers alone: use complete, the "
            "graph in which everybody is everybody's neighbour"
        )
    return mixing
