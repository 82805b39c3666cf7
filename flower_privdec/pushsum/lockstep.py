"""Synchronous exchanges, each message used once: their order in a run (`Timetable`), and a state machine (`Lockstep`)
without sockets, clocks or files.

The exchanges of a run are numbered; a peer's *place* is the number of the one that it is about to perform, once that
is on its disk. What it sends at a place follows from its state there, so a retry is the same message. It sends it until
the receiver is at a later place, which means that it has used it and has that on disk. Then:

- A message is used once: at its place, where it is awaited; at a later place it is a repetition, and is ignored.
- Nothing is lost by a crash: what the receiver did not have on disk, the sender still has, and sends again.
- A peer keeps what it sent at two places, and continues when the older was used; so at most two messages are under way
  from one peer to another.
- A stale state is noticed: a neighbour has used what the peer did not send yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Generic, TypeVar

import numpy as np

from flower_privdec.common.errors import RunError
from flower_privdec.core import Algorithm, Exchange, Reply
from flower_privdec.graph.mixing import Mixing, rounds_to_agree

Sent = TypeVar("Sent")  # a message as it is sent
Heard = TypeVar("Heard")  # and as it is received
UNDER_WAY = 2  # messages from one peer to another
TURNS = 64  # that are remembered


class Lockstep(Generic[Sent, Heard]):
    """One peer's messages, sent and received, and the places of others as far as they are known.

    Attributes:
        place: its own, on disk.
        is_at_end: whether all places are done.
    """

    def __init__(self, peer: int, receivers: Callable[[int], Collection[int]], places: int) -> None:
        """Begin before the first place.

        Args:
            peer: its number.
            receivers: the peers that it sends to at a place.
            places: how many the run has.
        """
        self.peer = peer
        self.place = -1
        self._receivers = receivers
        self._places_in_all = places
        self.is_at_end = False
        self._sent: dict[int, dict[int, Sent]] = {}  # by place and receiver
        self._heard: dict[int, dict[int, Heard]] = {}  # by place and sender
        self._awaited: frozenset[int] = frozenset()
        self._places: dict[int, int] = {}  # of the others, as far as they are known
        self._waiting: dict[int, int] = {}  # from which place of this peer on its message was used, for each that sent

    def arrive(self, place: int, outgoing: Mapping[int, Sent], awaited: Iterable[int]) -> None:
        """Come to a place that is on disk now; where the peer was started again, to the one before it first.

        Args:
            place: its number.
            outgoing: what to send, by receiver.
            awaited: the peers that send something here.

        Raises:
            RunError: what was sent two places ago was not used by all receivers yet.
        """
        if behind := self.behind(place - 2):
            raise RunError(
                f"peer {self.peer}: place {place} came before peers {sorted(behind)} were at {place - 1}",
                code="lockstep.order",
            )
        self._waiting |= dict.fromkeys(self._awaited, place)
        self.place, self._awaited, self.is_at_end = place, frozenset(awaited), place == self._places_in_all
        self._sent = {at: items for at, items in self._sent.items() if at == place - 1} | {place: dict(outgoing)}
        self._heard = {at: items for at, items in self._heard.items() if at >= place}

    def behind(self, place: int) -> set[int]:
        """Return the receivers that have not used what was sent at a place."""
        return {receiver for receiver in self._sent.get(place, ()) if self._places.get(receiver, -1) <= place}

    def wanted(self, other: int) -> int:
        """Return which place of this peer another has to learn: one for which it waits, or at the end the end."""
        return self.place if self.is_at_end else self._waiting.get(other, -1)

    def before(self, place: int, others: Iterable[int]) -> set[int]:
        """Return which of some others are not known to be at a place."""
        return {other for other in others if self._places.get(other, -1) < place}

    def missing(self) -> set[int]:
        """Return the peers whose messages of this place have not come."""
        return set(self._awaited - self._heard.get(self.place, {}).keys())

    def received(self) -> dict[int, Heard]:
        """Return the messages of this place by sender; they stay until the next place is on disk."""
        return dict(self._heard.get(self.place, {}))

    def due(self, receiver: int) -> list[tuple[int, Sent]]:
        """Return what a receiver has not used as far as is known, with its place, the older first."""
        known = self._places.get(receiver, -1)
        return [
            (place, items[receiver])
            for place, items in sorted(self._sent.items())
            if receiver in items and place >= known
        ]

    def learn(self, other: int, place: int) -> None:
        """Record that another peer is at a place, so that all before was used.

        Raises:
            RunError: there is no such place, or it has used what this peer did not send yet, which must have gone back.
        """
        self._check(other, place, self._places_in_all)
        if self.place >= 0 and any(other in self._receivers(at) for at in range(self.place + 1, place)):
            raise RunError(
                f"peer {other} is at place {place} and has used what peer {self.peer}, at {self.place}, did not send "
                f"yet: the checkpoint of peer {self.peer} is an old copy; restore the newest, or start all peers again",
                code="lockstep.stale",
            )
        self._places[other] = max(place, self._places.get(other, -1))

    def take(self, sender: int, place: int, item: Heard) -> None:
        """Take a message; one that is known already, or that a later place has used, changes nothing.

        Raises:
            RunError: no peer sends it: the run has no such place, the sender has nothing to send at this one, or too
                much of it is under way.
        """
        if place < self.place:
            return
        self._check(sender, place, self._places_in_all - 1)
        if place == self.place and sender not in self._awaited:
            raise RunError(
                f"peer {self.peer} awaits nothing of peer {sender} at place {place}; another graph?",
                code="lockstep.sender",
            )
        known = [at for at, items in self._heard.items() if sender in items]
        if place not in known and len(known) == UNDER_WAY:
            raise RunError(
                f"peer {sender} sends for place {place} before {known} were used; another version?",
                code="lockstep.too-many",
            )
        self._heard.setdefault(place, {}).setdefault(sender, item)

    def _check(self, other: int, place: int, most: int) -> None:
        if not 0 <= place <= most:
            raise RunError(
                f"peer {other} reports place {place}, and the last is {most}; another scenario?", code="lockstep.place"
            )


@dataclass(frozen=True)
class Turn:
    """A peer's part in one exchange of a run.

    Attributes:
        round_index, at: of the run, and of the exchange in the program.
        exchange: what is performed, with the graph and the weights of `mixing`.
        receivers, senders: the peers that it sends to, and that send to it.
        weights: those that a row of the peer has at others, W[j, peer] by j.
    """

    round_index: int
    at: int
    exchange: Exchange
    mixing: Mixing
    receivers: set[int]
    senders: set[int]
    weights: dict[int, float]


class Timetable:
    """The places of a run: exchange e of round k is place k E + e, with E exchanges a round.

    Rounds of final mixing follow: each is one place, with the algorithm's last mixing, at the index after its program,
    among all peers. They have no steps.

    Args:
        algorithm: whose program has the exchanges.
        mixing: the graph and its weights, see `network_mixing`.
        rounds: of the run.
        final: rounds of final mixing after them.

    Attributes:
        exchanges: by index in the program.
        final_at: the index of the exchange of final mixing.
        final_exchange: that exchange.
        final_mixing: its graph and weights, with all peers active.
        end: the round after the last of final mixing.
        places: how many the run has.
    """

    def __init__(self, algorithm: Algorithm, mixing: Mixing, rounds: int, final: int = 0) -> None:
        self.exchanges = {at: item for at, item in enumerate(algorithm.program) if isinstance(item, Exchange)}
        self._at = list(self.exchanges)
        self.rounds, self.end, self._exchanges = rounds, rounds + final, rounds * len(self._at)
        self.places = self._exchanges + final
        self.final_at = len(algorithm.program)
        self.final_exchange = algorithm.final_exchange
        self.final_mixing = everybody(mixing)
        self._mixing = mixing
        self.neighbours, self.receivers_ever = cache(self._neighbours), cache(self._receivers_ever)
        self.turn = lru_cache(TURNS)(self._turn)

    def place(self, round_index: int, at: int) -> int:
        """Return the place of the exchange at an index of the program, in a round.

        Raises:
            RunError: the round has no such exchange.
        """
        if round_index >= self.rounds:
            return self._exchanges + min(round_index, self.end) - self.rounds
        if at not in self.exchanges:
            raise RunError(f"round {round_index} has no exchange {at}; another version?", code="lockstep.exchange")
        return round_index * len(self._at) + self._at.index(at)

    def _turn(self, peer: int, place: int) -> Turn:
        """Return a peer's part in the exchange of a place."""
        per_round = len(self._at)
        round_index = self.rounds + place - self._exchanges
        at = self.final_at
        exchange: Exchange = self.final_exchange
        mixing = self.final_mixing
        if place < self._exchanges:
            round_index = place // per_round
            at = self._at[place % per_round]
            exchange = self.exchanges[at]
            mixing = self._mixing
        hosted = mixing.hosted(exchange.place(round_index, mixing), np.array([peer]))
        weights = {receiver: weight for _, receiver, weight in hosted.sent}
        senders = {j for j, _ in hosted.heard}
        ends = (senders, {*weights}) if isinstance(exchange, Reply) else ({*weights}, senders)
        return Turn(round_index, at, exchange, mixing, *ends, weights)

    def _receivers_ever(self, peer: int) -> list[int]:
        """Return the peers that a peer may ever send to."""
        edges = self._mixing.topology.support()
        return sorted(set(edges[edges[:, 0] == peer, 1].tolist()) - {peer})

    def _neighbours(self, peer: int) -> list[int]:
        """Return the peers that a peer may ever send to, or hear."""
        edges = self._mixing.topology.support()
        mine = edges[(edges == peer).any(1)]
        return sorted(set(mine.flatten().tolist()) - {peer})


AGREED = 1e-3  # of the largest distance between two models before final mixing: what may be left
FEWEST_AT_MOST = 256  # rounds of final mixing, also of a run with fewer rounds


def everybody(mixing: Mixing) -> Mixing:
    """Return the same graph and weights with all peers active in every round, which has one matrix."""
    is_same = mixing.participation.kind == "all" and mixing.steps == 1
    return mixing if is_same else Mixing(mixing.topology, mixing.weights)


def final_rounds(mixing: Mixing, rounds: int, setting: int | str) -> tuple[int, float | None]:
    """Return how many rounds of mixing follow the last round of a run, and which part of the distance they leave.

    One more than the peers need to agree, in which they see that they do; at most as many as the run has rounds, or
    FEWEST_AT_MOST.

    Args:
        setting: `network.final_mixing`.

    Returns:
        The rounds; and the part that is left of the largest distance between two models, None where it was not asked.
    """
    if setting != "auto":
        return int(setting), None
    needed, left = rounds_to_agree(everybody(mixing), rounds, max(rounds, FEWEST_AT_MOST), AGREED)
    return needed + 1, left
