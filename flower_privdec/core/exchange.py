"""The state of a cohort, and the three ways in which peers exchange it, without I/O.

`Mix` averages rows over neighbours, `Gather` hands them over unmixed, and `Reply` answers what was gathered.

An exchange is two pure functions. `outgoing` returns the messages of the peers hosted here, by (sender, receiver).
`incoming` returns what their rows and edges become once the messages to them are there. A carrier of messages
(Flower's relay, worker processes, a network) calls both. The engine hosts all peers, so it calls `together`, which
computes the same without messages; sharded engines, which can read everybody's rows but change some only, call `among`.

No exchange changes a state. Each returns a `Changed`, and its caller decides when to apply it: a network peer does so
after the messages are on its disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError
from flower_privdec.graph.mixing import Link, Mixing
from flower_privdec.rows.tensors import aligned, all_finite, is_aligned

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Edges:
    """A tensor with a row for each of E pairs of peers.

    Attributes:
        own: the peer of each pair that is hosted here, int64 [E], ascending.
        other: the neighbour that it heard from or answers, int64 [E], ascending for each own.
        values: [E, ...].
    """

    own: np.ndarray
    other: np.ndarray
    values: Tensor

    def of(self, peer: int) -> Edges:
        """Return the pairs of one hosted peer, as views."""
        start, stop = np.searchsorted(self.own, [peer, peer + 1])
        return Edges(self.own[start:stop], self.other[start:stop], self.values[start:stop])


@dataclass
class State:
    """Everything a cohort remembers between two steps; complete at every exchange.

    Attributes:
        peers: the global id of each row, int64 [m].
        round_index: the round under way, from 0.
        at: the place in the algorithm's program that comes next.
        rows: named tensors [m, ...], one row a peer. They are aligned in memory: long rows for speed, and all because
            the bits of a product depend on the alignment of its operands, which a state read back must reproduce.
        edges: named tensors with a row for each of some pairs of peers, one of them hosted here.
        waiting: whether the next item is an exchange whose messages are on their way.
    """

    peers: np.ndarray
    round_index: int = 0
    at: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Edges] = field(default_factory=dict)
    waiting: bool = False

    def __post_init__(self) -> None:
        """Align the rows."""
        self.rows = {name: row if is_aligned(row) else aligned(row) for name, row in self.rows.items()}


Payload: TypeAlias = "Mapping[str, Tensor]"  # one row of each name
Messages: TypeAlias = "Mapping[Link, Payload]"  # by (sender, receiver)
Spares: TypeAlias = "dict[str, Tensor | None]"  # buffers to mix into, by the name of the row


@dataclass(frozen=True)
class Changed:
    """The rows and edges of a state after an exchange, by name."""

    rows: Mapping[str, Tensor]
    edges: Mapping[str, Edges]

    def apply_(self, state: State) -> None:
        """Put them into the state, whose program then continues after the exchange."""
        state.rows.update(self.rows)
        state.edges.update(self.edges)
        state.at = state.at + 1
        state.waiting = False


@dataclass(frozen=True)
class InReach:
    """Rows and edges of all peers in one address space.

    Attributes:
        rows: the rows of all peers, in their order, by name.
        edges: the edges of all peers by name, in parts whose own peers follow one another.
    """

    rows: Mapping[str, Tensor]
    edges: Mapping[str, Sequence[Edges]]


@dataclass(frozen=True)
class Exchange(ABC):
    """An exchange of some named rows or edges of the state.

    Attributes:
        names: the names of the rows or edges.
        mixing_step: the number of the mixing step in its round, if a round has several.
        differs: whether a peer sends something different to each receiver.
    """

    names: tuple[str, ...]
    mixing_step: int = field(default=0, kw_only=True)
    differs: ClassVar[bool] = False

    def place(self, round_index: int, mixing: Mixing) -> int:
        """Return the place of this exchange in the sequence of mixing matrices."""
        return round_index * mixing.steps + self.mixing_step

    def shaped(self, name: str) -> str:
        """Return the name of the row whose shape a message has under a name."""
        return name

    @property
    def liars(self) -> Collection[int]:
        """Return the peers that send what they do not have, in a simulated attack."""
        return ()

    @abstractmethod
    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        """Return the messages of the peers hosted here; receivers of equal messages get the same object."""

    @abstractmethod
    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        """Return the new state of the peers hosted here.

        Args:
            messages: all messages to them, also those of each other.

        Raises:
            RunError: a message is missing, or does not fit.
        """

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        """Return the new state of some peers, given everybody's rows and edges.

        Raises:
            TypeError: the exchange writes into everybody's rows itself, as `Mix` does.
        """
        raise TypeError(f"{type(self).__name__} makes no edges, so it cannot be performed for some peers only")

    @abstractmethod
    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        """Return the new state if all peers are hosted here.

        Args:
            spares: buffers to write into, by name; kept between calls.
        """

    def awaited(self, state: State, mixing: Mixing) -> list[Link]:
        """Return the links whose messages the peers hosted here wait for, by receiver and then by sender."""
        place = self.place(state.round_index, mixing)
        return list(mixing.hosted(place, state.peers).heard)


@dataclass(frozen=True)
class Mix(Exchange):
    """Each named row i becomes Σ_j W[i, j] row_j, with the mixing matrix W of its place in the sequence.

    With column-stochastic weights a message is the sender's weighted share W[i, j] row_j, so the sender decides how it
    splits its mass. With other weights a message is the row, and the receiver weighs it.

    Attributes:
        by_matrix: whether all rows at once are a product with the matrix.
    """

    by_matrix: ClassVar[bool] = True

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        place = self.place(state.round_index, mixing)
        row_of = {peer: row for row, peer in enumerate(state.peers.tolist())}

        outgoing: dict[Link, Payload] = {}
        scaled: dict[tuple[int, float], Payload] = {}  # by sender and factor: receivers with equal weights share one
        for sender, receiver, weight in mixing.hosted(place, state.peers).sent:
            factor = weight if mixing.sends_shares else 1.0
            if (sender, factor) not in scaled:
                scaled[sender, factor] = {name: state.rows[name][row_of[sender]] * factor for name in self.names}
            outgoing[sender, receiver] = scaled[sender, factor]
        return outgoing

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        hosted = mixing.hosted(self.place(state.round_index, mixing), state.peers)
        like = {name: state.rows[name][0] for name in self.names}
        received = checked(messages, list(hosted.heard), like, state.round_index)
        rows = {name: torch.empty_like(state.rows[name]) for name in self.names}

        if mixing.sends_shares:
            # A receiver's own share comes first in its terms, then the others' by distance. Sums of floats depend on
            # their order, so this order makes a network's numbers those of the engine.
            for row, terms in enumerate(hosted.terms):
                for name in self.names:
                    out = rows[name][row]
                    for number, (sender, receiver, weight) in enumerate(terms):
                        if sender == receiver and number == 0:
                            torch.mul(state.rows[name][row], weight, out=out)
                            continue
                        if sender == receiver:
                            share = state.rows[name][row] * weight
                        else:
                            share = received[sender, receiver][name]
                        if number == 0:
                            out.copy_(share)
                        else:
                            out.add_(share)
            return Changed(rows, {})

        # Without shares each sender sends the same row to all, so the rows of all senders are stacked and multiplied.
        row_of = {peer: row for row, peer in enumerate(state.peers.tolist())}
        heard = {sender: payload for (sender, _), payload in received.items()}
        for name in self.names:
            parts = []
            for sender in hosted.rows.sources.tolist():
                if sender in row_of:
                    parts.append(state.rows[name][row_of[sender]])
                else:
                    parts.append(heard[sender][name])
            hosted.rows.apply_sources(torch.stack(parts), out=rows[name])
        return Changed(rows, {})

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        """See Exchange. Each row is mixed into a spare buffer, with which it then swaps places, or in place."""
        matrix = mixing.matrix(self.place(state.round_index, mixing))
        rows = {}
        for name in self.names:
            rows[name], spares[name] = matrix.replace(state.rows[name], spares.get(name))
        return Changed(rows, {})


@dataclass(frozen=True)
class Gather(Exchange):
    """Each peer gets its in-neighbours' named rows unmixed, as edges of the same names; `own` is who heard."""

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        payloads = dict[int, Payload]()
        for row, peer in enumerate(state.peers.tolist()):
            payloads[peer] = {name: state.rows[name][row].clone() for name in self.names}

        sent = mixing.hosted(self.place(state.round_index, mixing), state.peers).sent
        return {(sender, receiver): payloads[sender] for sender, receiver, _ in sent}

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        links = self.awaited(state, mixing)
        like = {name: state.rows[name][0] for name in self.names}
        return Changed({}, _edges(links, checked(messages, links, like, state.round_index), like))

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        senders, receivers = _columns(self.awaited(state, mixing))
        return Changed({}, {name: Edges(receivers, senders, reach.rows[name][senders]) for name in self.names})

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        return self.among(state, mixing, InReach(state.rows, {}))


@dataclass(frozen=True)
class Reply(Exchange):
    """Each named edge goes back to the peer that it was heard from: afterwards `own` asked and `other` answered.

    Attributes:
        like: the name of the row whose shape they have.
    """

    like: str = "x"
    differs = True

    def shaped(self, name: str) -> str:
        return self.like

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        outgoing: dict[Link, Payload] = {}
        edges = state.edges[self.names[0]]  # those of the other names are between the same pairs
        for number, pair in enumerate(zip(edges.own.tolist(), edges.other.tolist(), strict=True)):
            outgoing[pair] = {name: state.edges[name].values[number].clone() for name in self.names}
        return outgoing

    def awaited(self, state: State, mixing: Mixing) -> list[Link]:
        """Return the links of the answers that the peers hosted here wait for: one from each peer that they asked."""
        place = self.place(state.round_index, mixing)
        return list(mixing.hosted(place, state.peers).answered)

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        links = self.awaited(state, mixing)
        like = dict.fromkeys(self.names, state.rows[self.like][0])
        return Changed({}, _edges(links, checked(messages, links, like, state.round_index), like))

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        return Changed({}, {name: _turned(reach.edges[name], state.peers) for name in self.names})

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        return self.among(state, mixing, InReach({}, {name: [state.edges[name]] for name in self.names}))


def _turned(parts: Sequence[Edges], peers: np.ndarray) -> Edges:
    """Return the edges whose other end is among some peers, turned round: that end is then their own."""
    own = np.concatenate([part.own for part in parts])
    other = np.concatenate([part.other for part in parts])

    # The edges to keep, as places in the parts one after the other, in the order of their new ends.
    chosen = np.flatnonzero(np.isin(other, peers))
    order = chosen[np.lexsort((own[chosen], other[chosen]))]

    # Values are long, so they are copied once, from each part to where they belong, and never concatenated.
    values = parts[0].values.new_empty((len(order), *parts[0].values.shape[1:]))
    first = 0
    for part in parts:
        is_here = (order >= first) & (order < first + len(part.own))
        here = np.flatnonzero(is_here)
        values[torch.from_numpy(here)] = part.values[torch.from_numpy(order[here] - first)]
        first += len(part.own)
    return Edges(other[order], own[order], values)


def _columns(links: list[Link]) -> tuple[np.ndarray, np.ndarray]:
    """Return the senders and the receivers of some links, int64 [E] each."""
    array = np.array(links, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _edges(links: list[Link], messages: Messages, like: Payload) -> dict[str, Edges]:
    """Return the edges of some links, in their order, from the messages over them."""
    senders, receivers = _columns(links)
    edges = {}
    for name, row in like.items():
        values = row.new_empty((len(links), *row.shape))
        for value, link in zip(values, links, strict=True):
            value.copy_(messages[link][name])
        edges[name] = Edges(receivers, senders, values)
    return edges


def checked(
    messages: Messages,
    links: list[Link],
    like: Payload,
    round_index: int,
    finite: Collection[str] | None = None,
) -> Messages:
    """Return messages after a check that those of some links are there, fit and are finite.

    Args:
        links: the links to check; others are ignored.
        like: a row of each name with the right shape and type.
        round_index: the round, for errors.
        finite: the names of the rows that have to be finite; by default all.

    Raises:
        RunError: names the sender, the fault and the round.
    """
    for sender, receiver in links:
        here = f"peer {receiver}, round {round_index}"
        if (sender, receiver) not in messages:
            raise RunError(
                f"{here}: the message of peer {sender} is missing: the transport has to deliver it",
                code="exchange.missing",
            )

        payload = messages[sender, receiver]
        for name, ours in like.items():
            what = f"{here}: {name!r} of peer {sender}"
            if name not in payload:
                raise RunError(f"{what} is missing; all peers must run one scenario", code="exchange.row-missing")

            theirs = payload[name]
            if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
                raise RunError(
                    f"{what} is {list(theirs.shape)} {theirs.dtype}, not {list(ours.shape)} {ours.dtype}; "
                    "all peers must run one scenario",
                    code="exchange.shape",
                )
            must_be_finite = finite is None or name in finite
            if must_be_finite and not all_finite(theirs):
                raise RunError(
                    f"{what} is not finite; a peer diverged, or it was changed in transit", code="exchange.not-finite"
                )
    return messages
