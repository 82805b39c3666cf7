"""Synchronous exchanges, each message used once, without sockets, clocks or files.

`Timetable` says which exchange comes when in a run; `Lockstep` is the state machine of one peer.

The exchanges of a run are numbered. A peer's *place* is the number of the exchange that it is about to perform, once
its state there is on its disk. Its messages at a place follow from that state, so a retry is the same message. It sends
a message until the receiver is at a later place: then the receiver has used it, and has the result on disk. It follows:

- A message is used once, at its place. At a later place it is a repetition, and is ignored.
- A crash loses nothing: a message whose result the receiver did not have on disk is still at the sender, which sends it
  again.
- A peer keeps its messages of two places, and continues when those of the older one are used. So at most two messages
  are under way from one peer to another.
- A stale state is noticed, since a neighbour has used a message that the peer did not send yet.

A message to a receiver passes through these states, by the places of its sender (s) and receiver (r); it is of place p:

    s < p             not made yet
    s >= p, r < p     early: the receiver holds it until it comes to p
    s >= p, r = p     due: the receiver needs it to continue
    r > p             used: the sender forgets it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Generic, TypeVar

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError
from flower_privdec.core import Algorithm, Exchange, Reply
from flower_privdec.graph.mixing import Mixing
from flower_privdec.graph.mixing_speed import rounds_to_agree

Sent = TypeVar("Sent")  # a message as it is sent
Heard = TypeVar("Heard")  # a message as it is received
UNDER_WAY = 2  # the most messages from one peer to another that are not used
TURNS = 64  # the number of turns that are remembered
TURNS_EACH = 4  # of each peer, if there are many
WEIGHTS = 8  # the number of places of which everybody's weights are remembered


class Lockstep(Generic[Sent, Heard]):
    """One peer's messages, sent and received, and the places of other peers as far as they are known.

    Attributes:
        place: the peer's own place, on disk.
        is_at_end: whether all places are done.
    """

    def __init__(self, peer: int, receivers: Callable[[int], Collection[int]], places: int) -> None:
        """Begin before the first place.

        Args:
            peer: its number.
            receivers: returns the peers to which it sends at a place.
            places: the number of places of the run.
        """
        self.peer = peer
        self.place = -1
        self.is_at_end = False
        self._receivers = receivers
        self._places_in_all = places
        self._sent: dict[int, dict[int, Sent]] = {}  # messages by place and receiver
        self._heard: dict[int, dict[int, Heard]] = {}  # messages by place and sender
        self._awaited: frozenset[int] = frozenset()  # the senders at this place
        self._places: dict[int, int] = {}  # the places of other peers, as far as they are known
        self._waiting: dict[int, int] = {}  # for each sender, this peer's place after its last message was used

    def arrive(self, place: int, outgoing: Mapping[int, Sent], awaited: Iterable[int]) -> None:
        """Come to a place that is on disk now. A peer that was started again comes to the place before it first.

        Args:
            place: its number.
            outgoing: the messages to send, by receiver.
            awaited: the peers that send a message here.

        Raises:
            RunError: a receiver has not used the message of two places ago yet.
        """
        behind = self.behind(place - 2)
        if behind:
            raise RunError(
                f"peer {self.peer}: place {place} came before peers {sorted(behind)} were at {place - 1}",
                code="lockstep.order",
            )

        # The senders of the previous place wait to learn that their messages were used, and that is on disk now.
        self._waiting |= dict.fromkeys(self._awaited, place)
        self.place = place
        self.is_at_end = place == self._places_in_all
        self._awaited = frozenset(awaited)

        # Of what was sent, two places are kept; of what was heard, what is not used yet.
        self._sent = {at: messages for at, messages in self._sent.items() if at == place - 1}
        self._sent[place] = dict(outgoing)
        self._heard = {at: messages for at, messages in self._heard.items() if at >= place}

    def behind(self, place: int) -> set[int]:
        """Return the receivers that have not used this peer's message of a place."""
        return {receiver for receiver in self._sent.get(place, ()) if self._places.get(receiver, -1) <= place}

    def wanted(self, other: int) -> int:
        """Return the place of this peer that another peer has to learn: the end, or the one for which it waits."""
        if self.is_at_end:
            return self.place
        return self._waiting.get(other, -1)

    def before(self, place: int, others: Iterable[int]) -> set[int]:
        """Return the peers, of some others, that are not known to be at a place yet."""
        return {other for other in others if self._places.get(other, -1) < place}

    def missing(self) -> set[int]:
        """Return the peers whose messages of this place are missing."""
        heard = self._heard.get(self.place, {})
        return set(self._awaited - heard.keys())

    def received(self) -> dict[int, Heard]:
        """Return the messages of this place by sender; they stay until the next place is on disk."""
        return dict(self._heard.get(self.place, {}))

    def heard_of(self, sender: int) -> list[int]:
        """Return the places of a sender's messages that are kept: this one, and later ones."""
        return [place for place, messages in self._heard.items() if sender in messages]

    def due(self, receiver: int) -> list[tuple[int, Sent]]:
        """Return the messages that a receiver is not known to have used, each with its place, the older first."""
        known = self._places.get(receiver, -1)
        due = []
        for place, messages in sorted(self._sent.items()):
            if receiver in messages and place >= known:
                due.append((place, messages[receiver]))
        return due

    def learn(self, other: int, place: int) -> None:
        """Record that another peer is at a place, so that it has used all messages of earlier places.

        Raises:
            RunError: there is no such place, or the peer has used a message that this one did not send yet. Then this
                peer's state is an old copy.
        """
        self._check(other, place, self._places_in_all)

        later_places = range(self.place + 1, place)
        if self.place >= 0 and any(other in self._receivers(at) for at in later_places):
            raise RunError(
                f"peer {other} is at place {place} and has used what peer {self.peer}, at {self.place}, did not send "
                f"yet: the checkpoint of peer {self.peer} is an old copy; restore the newest, or start all peers again",
                code="lockstep.stale",
            )
        self._places[other] = max(place, self._places.get(other, -1))

    def take(self, sender: int, place: int, item: Heard) -> None:
        """Take a message. One that is known already, or of an earlier place, changes nothing.

        Raises:
            RunError: no peer sends it: the run has no such place, the sender sends nothing here, or too many of its
                messages are under way.
        """
        if place < self.place:
            return

        self._check(sender, place, self._places_in_all - 1)
        if place == self.place and sender not in self._awaited:
            raise RunError(
                f"peer {self.peer} awaits nothing of peer {sender} at place {place}; another graph?",
                code="lockstep.sender",
            )

        known = self.heard_of(sender)
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
    """A peer's part in one exchange of a run, and in each other one of the same graph.

    Attributes:
        exchange: the exchange, with the graph and the weights of `mixing`.
        receivers, senders: the peers to which it sends, and which send to it.
        weights: the weights of the peer's row at others, W[j, peer] by j.
        parts: the weights of all rows at the peer, W[peer, j] by j, in the order in which they are added.
    """

    exchange: Exchange
    mixing: Mixing
    receivers: set[int]
    senders: set[int]
    weights: dict[int, float]
    parts: dict[int, float]


class Timetable:
    """The places of a run: exchange e of round k is place k E + e, with E exchanges a round.

    Rounds of final mixing follow. Each is one place, among all peers, with the algorithm's last mixing at the index
    after its program. They have no steps.

    Args:
        algorithm: its program has the exchanges.
        mixing: the graph and its weights, see `network_mixing`.
        rounds: the number of rounds of the run.
        final: the number of rounds of final mixing after them.
        hosted: how many peers ask for their turns.

    Attributes:
        mixing: see above.
        exchanges: the exchanges of the program, by index.
        final_at: the index of the exchange of final mixing.
        final_exchange: that exchange.
        final_mixing: its graph and weights, with all peers active.
        end: the round after the last round of final mixing.
        places: the number of places of the run.
        cycle: after how many places of the rounds the graph begins again; if it never does, there are as many.
    """

    def __init__(self, algorithm: Algorithm, mixing: Mixing, rounds: int, final: int = 0, hosted: int = 1) -> None:
        self.exchanges = {at: item for at, item in enumerate(algorithm.program) if isinstance(item, Exchange)}
        self._at = list(self.exchanges)
        self.mixing = mixing
        self._exchanges = rounds * len(self._at)  # the places before final mixing
        self.rounds = rounds
        self.end = rounds + final
        self.places = self._exchanges + final
        self.cycle = self.places + 1
        period = mixing.topology.period
        if period and mixing.participation.kind == "all":
            self.cycle = period * len(self._at)
        self.final_at = len(algorithm.program)
        self.final_exchange = algorithm.robustly(algorithm.final_exchange)
        self.final_mixing = everybody(mixing)

        # Cached for each timetable: on the methods themselves, caches would keep all timetables alive.
        self.neighbours = cache(self._neighbours)
        self.receivers_ever = cache(self._receivers_ever)
        self._turn = lru_cache(max(TURNS, TURNS_EACH * hosted))(self._new_turn)
        self._weights = {0: np.ones(mixing.n_peers)}  # of the last places that were asked for

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

    def turn(self, peer: int, place: int) -> Turn:
        """Return a peer's part in the exchange of a place; one for all places of the same graph."""
        if place < self._exchanges:
            place %= self.cycle
        return self._turn(peer, place)

    def _new_turn(self, peer: int, place: int) -> Turn:
        exchange, mixing, round_index = self._exchange_at(place)
        hosted = mixing.hosted(exchange.place(round_index, mixing), np.array([peer]))
        weights = {receiver: weight for _, receiver, weight in hosted.sent}
        receivers = set(weights)
        senders = {sender for sender, _ in hosted.heard}

        # A reply goes back over the edges of the graph.
        if isinstance(exchange, Reply):
            receivers, senders = senders, receivers
        parts = {sender: part for sender, _, part in hosted.terms[0]}
        return Turn(exchange, mixing, receivers, senders, weights, parts)

    def _exchange_at(self, place: int) -> tuple[Exchange, Mixing, int]:
        """Return the exchange of a place, its graph and weights, and its round."""
        if place < self._exchanges:
            round_index, number = divmod(place, len(self._at))
            return self.exchanges[self._at[number]], self.mixing, round_index
        return self.final_exchange, self.final_mixing, self.rounds + place - self._exchanges

    def push_weights(self, place: int) -> np.ndarray:
        """Return the push-sum weights before the exchange of a place if all began with 1 and nobody lied, [n_peers]."""
        known = self._weights
        if self._leaves_weights:
            return known[0]
        if place not in known:
            before = max((at for at in known if at < place), default=0)
            weights = known.get(before, np.ones(self.mixing.n_peers))
            for at in range(before, place):
                weights = self._mixed(weights, at)
            for old in sorted(known)[: -WEIGHTS + 1]:
                del known[old]
            known[place] = weights
        return known[place]

    @cached_property
    def _leaves_weights(self) -> bool:
        """Return whether all weights stay 1, to the last bit, as in graphs in which all peers send and hear alike."""
        if self.cycle > self.places:
            return False
        ones = self._weights[0]
        last = min(self.places, self._exchanges + self.cycle)
        places = [*range(min(self.cycle, self._exchanges)), *range(self._exchanges, last)]
        return all(np.array_equal(self._mixed(ones, place), ones) for place in places)

    def _mixed(self, weights: np.ndarray, place: int) -> np.ndarray:
        """Return the push-sum weights after the exchange of a place."""
        exchange, mixing, round_index = self._exchange_at(place)
        if "w" not in exchange.names:
            return weights
        matrix = mixing.matrix(exchange.place(round_index, mixing))
        mixed: np.ndarray = matrix.apply(torch.from_numpy(weights)[:, None])[:, 0].numpy()
        return mixed

    def _receivers_ever(self, peer: int) -> list[int]:
        """Return the peers that a peer may ever send to."""
        edges = self._support  # by sender
        first, last = np.searchsorted(edges[:, 0], [peer, peer + 1])
        return sorted(set(edges[first:last, 1].tolist()) - {peer})

    def _neighbours(self, peer: int) -> list[int]:
        """Return the peers that a peer may ever send to, or hear."""
        backwards = self._reversed
        first, last = np.searchsorted(backwards[:, 0], [peer, peer + 1])
        return sorted({*self.receivers_ever(peer), *backwards[first:last, 1].tolist()} - {peer})

    @cached_property
    def _support(self) -> np.ndarray:
        """The edges that some round may use, by sender, [m, 2]."""
        edges = self.mixing.topology.support()
        ordered: np.ndarray = edges[np.argsort(edges[:, 0], kind="stable")]
        return ordered

    @cached_property
    def _reversed(self) -> np.ndarray:
        """The same, as (receiver, sender), by receiver."""
        turned = self._support[:, ::-1]
        ordered: np.ndarray = turned[np.argsort(turned[:, 0], kind="stable")]
        return ordered


AGREED = 1e-3  # the share of the largest distance between two models that final mixing may leave
FEWEST_AT_MOST = 256  # the rounds of final mixing that even a run with fewer rounds may have


def everybody(mixing: Mixing) -> Mixing:
    """Return the same graph and weights with all peers active, and one matrix a round."""
    is_same = mixing.participation.kind == "all" and mixing.steps == 1
    if is_same:
        return mixing
    return Mixing(mixing.topology, mixing.weights)


def final_rounds(mixing: Mixing, rounds: int, setting: int | str, damping: float = 1.0) -> tuple[int, float | None]:
    """Return how many rounds of mixing follow the last round of a run, and the share of the distance that they leave.

    One more than the peers need to agree, in which they see that they do. At most as many as the run has rounds, or
    FEWEST_AT_MOST if that is more.

    Args:
        setting: `network.final_mixing`.
        damping: which part of the graph's weights a share has; it takes as many times more rounds to agree.

    Returns:
        The rounds, and the share that is left of the largest distance between two models; None for the share if the
        setting is a number of rounds.
    """
    if setting != "auto":
        return int(setting), None
    needed, left = rounds_to_agree(everybody(mixing), rounds, max(rounds, FEWEST_AT_MOST), AGREED)
    return math.ceil(needed / damping) + 1, left
