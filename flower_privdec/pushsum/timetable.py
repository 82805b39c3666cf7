"""The exchanges of a run in order: which peers send and receive in each."""

from __future__ import annotations

from functools import cache

import numpy as np

from flower_privdec.core import Algorithm, Exchange, Reply
from flower_privdec.errors import ScenarioError
from flower_privdec.experiment import Agreement
from flower_privdec.graph.mixing import Mixing


class Timetable:
    """The places of a run: exchange e of round k is place k E + e, with E exchanges a round.

    Args:
        algorithm: whose program has the exchanges.
        mixing: the graph and its weights, see `network_mixing`.
        rounds: of the run.

    Attributes:
        exchanges: by index in the program.
        places: how many the run has.
    """

    def __init__(self, algorithm: Algorithm, mixing: Mixing, rounds: int) -> None:
        self.exchanges = {at: item for at, item in enumerate(algorithm.program) if isinstance(item, Exchange)}
        self._at = list(self.exchanges)
        self.rounds, self.places = rounds, rounds * len(self._at)
        self._mixing = mixing
        self.neighbours = cache(self._neighbours)

    def place(self, round_index: int, at: int) -> int:
        """Return the place of the exchange at an index of the program, in a round."""
        return round_index * len(self._at) + self._at.index(at)

    def round_and_exchange(self, place: int) -> tuple[int, int]:
        """Return the round of a place, and the index of its exchange in the program."""
        return place // len(self._at), self._at[place % len(self._at)]

    def exchange(self, place: int) -> Exchange:
        """Return the exchange of a place."""
        return self.exchanges[self._at[place % len(self._at)]]

    def receivers(self, peer: int, place: int) -> set[int]:
        """Return the peers that a peer sends to at a place."""
        return self._others(peer, place, receives=False)

    def senders(self, peer: int, place: int) -> set[int]:
        """Return the peers that send to a peer at a place."""
        return self._others(peer, place, receives=True)

    def column(self, peer: int, round_index: int) -> dict[int, float]:
        """Return the weights that a peer's row has at others in a round, W[j, peer] by j."""
        hosted = self._mixing.hosted(round_index, np.array([peer]))
        return {receiver: weight for _, receiver, weight in hosted.sent}

    def _neighbours(self, peer: int) -> list[int]:
        """Return the peers that a peer may ever send to, or hear."""
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


def network_mixing(agreement: Agreement) -> Mixing:
    """Return the mixing of an agreement, for a network of peers.

    Raises:
        ScenarioError: the algorithm exchanges nothing, or averages at a server, which a network of peers does not have.
    """
    mixing = agreement.mixing
    if mixing is None:
        raise ScenarioError(
            f"algorithm.name={agreement.algorithm.name} exchanges nothing, so there is no network: use `privdec run`"
        )
    if agreement.scenario.topology.name == "server":
        raise ScenarioError(
            "topology.name='server' averages at a server, and a network has peers alone: use complete, the "
            "graph in which all peers are neighbours"
        )
    return mixing
