"""The state of a cohort, and the three ways in which peers exchange it, without I/O.

An exchange is two pure functions: `outgoing`, what the peers hosted here send, by (sender, receiver), and `incoming`,
what their rows and edges become once they have what was sent to them. A transport (Flower's relay,
processes, a network) calls the two; the engine, which hosts all peers, takes the short cut `together`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import RunError
from flower_privdec.graph.mixing import Link, Mixing
from flower_privdec.rows.tensors import aligned, all_finite, is_aligned


@dataclass(frozen=True)
class Edges:
    """A tensor with a row for each of some pairs of peers.

    Attributes:
        own: int64 [E], the peer of each pair that is hosted here, ascending.
        other: int64 [E], the neighbour it heard from or answers, ascending for each own.
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
        peers: int64 [m], the global id of each row.
        round_index: the round under way, from 0.
        at: the place in the algorithm's program that comes next.
        rows: named tensors whose first axis is the peer, each [m, ...]; they are aligned, long rows [m, d] for speed,
            and all because the bits of a product depend on how its operands lie: a state read back has to lie as the
            first did.
        edges: named tensors with a row for each of some pairs of peers, one of them hosted here.
        waiting: whether what comes next is an exchange whose messages are on their way.
    """

    peers: np.ndarray
    round_index: int = 0
    at: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)
    edges: dict[str, Edges] = field(default_factory=dict)
    waiting: bool = False

    def __post_init__(self) -> None:
        """Align the rows."""
        self.rows = {name: part if is_aligned(part) else aligned(part) for name, part in self.rows.items()}


Payload = Mapping[str, Tensor]  # one row of each name
Messages = Mapping[Link, Payload]
Spares = dict[str, Tensor | None]


@dataclass(frozen=True)
class Changed:
    """What an exchange makes of a state: its new rows and edges, by name."""

    rows: Mapping[str, Tensor]
    edges: Mapping[str, Edges]

    def apply_(self, state: State) -> None:
        """Put them into the state, which then goes on."""
        state.rows.update(self.rows)
        state.edges.update(self.edges)
        state.at = state.at + 1
        state.waiting = False


@dataclass(frozen=True)
class InReach:
    """Rows and edges of all peers in one address space.

    Attributes:
        rows: of all peers, in their order.
        edges: by name, in parts whose own peers follow one another.
    """

    rows: Mapping[str, Tensor]
    edges: Mapping[str, Sequence[Edges]]


@dataclass(frozen=True)
class Exchange(ABC):
    """An exchange of some named rows or edges of the state.

    Attributes:
        names: which.
        mixing_step: the number of the mixing step in its round, where a round has several.
        differs: whether a peer sends each receiver something of its own.
    """

    names: tuple[str, ...]
    mixing_step: int = field(default=0, kw_only=True)
    differs: ClassVar[bool] = False

    def place(self, round_index: int, mixing: Mixing) -> int:
        """Return the place of this exchange in the sequence of mixing matrices."""
        return round_index * mixing.steps + self.mixing_step

    def shaped(self, name: str) -> str:
        """Return the row that what is sent under a name has the shape of."""
        return name

    @abstractmethod
    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        """Return what the peers hosted here send to others; the same object where receivers get the same."""

    @abstractmethod
    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        """Return what the state of the peers hosted here becomes.

        Args:
            messages: all that were sent to them, also by each other.

        Raises:
            RunError: a message is missing, or does not fit.
        """

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        """Return what the state of some of the peers becomes where everybody's rows and edges can be read.

        Raises:
            TypeError: an exchange that writes into everybody's rows itself, as `Mix` does.
        """
        raise TypeError(f"{type(self).__name__} has no edges that could be made for some peers alone")

    @abstractmethod
    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        """Return the same where everybody is hosted here.

        Args:
            spares: buffers to write into, by name; kept between calls.
        """

    def awaited(self, state: State, mixing: Mixing) -> list[Link]:
        """Return which messages the peers hosted here wait for, in the order of receiver and sender."""
        return list(mixing.hosted(self.place(state.round_index, mixing), state.peers).heard)


@dataclass(frozen=True)
class Mix(Exchange):
    """Each named row i becomes Σ_j W[i, j] row_j, with the mixing matrix W of its place.

    For column-stochastic weights a message is the sender's weighted share, W[i, j] row_j, so that a sender alone
    decides its split; for others it is the row, which the receiver weighs.
    """

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        outgoing: dict[Link, Payload] = {}
        scaled: dict[tuple[int, float], Payload] = {}
        at = {peer: row for row, peer in enumerate(state.peers.tolist())}
        for sender, receiver, weight in mixing.hosted(self.place(state.round_index, mixing), state.peers).sent:
            factor = weight if mixing.sends_shares else 1.0
            if (sender, factor) not in scaled:
                scaled[sender, factor] = {name: state.rows[name][at[sender]] * factor for name in self.names}
            outgoing[sender, receiver] = scaled[sender, factor]
        return outgoing

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        like = {name: state.rows[name][0] for name in self.names}
        hosted = mixing.hosted(self.place(state.round_index, mixing), state.peers)
        received = checked(messages, list(hosted.heard), like, state.round_index)
        rows = {name: torch.empty_like(state.rows[name]) for name in self.names}
        if mixing.sends_shares:  # a receiver's own share first, then the others' by distance
            for row, terms in enumerate(hosted.terms):
                for name in self.names:
                    out = rows[name][row]
                    own_row = state.rows[name][row]
                    for number, (sender, receiver, weight) in enumerate(terms):
                        share = own_row * weight if sender == receiver else received[sender, receiver][name]
                        if number:
                            out.add_(share)
                        else:
                            out.copy_(share)
            return Changed(rows, {})
        own = {peer: row for row, peer in enumerate(state.peers.tolist())}
        heard = {sender: payload for (sender, _), payload in received.items()}
        for name in self.names:
            parts = [state.rows[name][own[s]] if s in own else heard[s][name] for s in hosted.rows.sources.tolist()]
            hosted.rows.apply_sources(torch.stack(parts), out=rows[name])
        return Changed(rows, {})

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        """See Exchange; writes into one spare buffer a name, which then changes places with the row, or in place."""
        matrix = mixing.matrix(self.place(state.round_index, mixing))
        rows = {}
        for name in self.names:
            rows[name], spares[name] = matrix.replace(state.rows[name], spares.get(name))
        return Changed(rows, {})


@dataclass(frozen=True)
class Gather(Exchange):
    """Each peer gets its in-neighbours' named rows unmixed: edges of the same names, own the one that heard."""

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        rows = {
            peer: {name: state.rows[name][row].clone() for name in self.names}
            for row, peer in enumerate(state.peers.tolist())
        }
        sent = mixing.hosted(self.place(state.round_index, mixing), state.peers).sent
        return {(sender, receiver): rows[sender] for sender, receiver, _ in sent}

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
    """Each named edge goes back to the peer it was heard from: afterwards own asked and other answered.

    Attributes:
        like: the row that each of them has the shape of.
    """

    like: str = "x"
    differs = True

    def shaped(self, name: str) -> str:
        return self.like

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        first = state.edges[self.names[0]]
        pairs = enumerate(zip(first.own.tolist(), first.other.tolist(), strict=True))
        return {pair: {name: state.edges[name].values[e].clone() for name in self.names} for e, pair in pairs}

    def awaited(self, state: State, mixing: Mixing) -> list[Link]:
        """Return which answers the peers hosted here wait for: one from each peer that they sent to."""
        return list(mixing.hosted(self.place(state.round_index, mixing), state.peers).answered)

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        links = self.awaited(state, mixing)
        like = dict.fromkeys(self.names, state.rows[self.like][0])
        return Changed({}, _edges(links, checked(messages, links, like, state.round_index), like))

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        return Changed({}, {name: _turned(reach.edges[name], state.peers) for name in self.names})

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        return self.among(state, mixing, InReach({}, {name: [state.edges[name]] for name in self.names}))


def _turned(parts: Sequence[Edges], peers: np.ndarray) -> Edges:
    """Return the edges whose other is one of some peers, as that peer's own."""
    own, other = (np.concatenate(ends) for ends in zip(*((part.own, part.other) for part in parts), strict=True))
    chosen = np.flatnonzero(np.isin(other, peers))
    order = chosen[np.lexsort((own[chosen], other[chosen]))]
    values = parts[0].values.new_empty((len(order), *parts[0].values.shape[1:]))
    first = 0
    for part in parts:
        here = np.flatnonzero((order >= first) & (order < first + len(part.own)))
        values[torch.from_numpy(here)] = part.values[torch.from_numpy(order[here] - first)]
        first += len(part.own)
    return Edges(other[order], own[order], values)


def _columns(links: list[Link]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(links, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _edges(links: list[Link], messages: Messages, like: Payload) -> dict[str, Edges]:
    """Return edges of some links, in their order, from what came over each."""
    senders, receivers = _columns(links)
    replies = {}
    for name, part in like.items():
        values = part.new_empty((len(links), *part.shape))
        for value, link in zip(values, links, strict=True):
            value.copy_(messages[link][name])
        replies[name] = Edges(receivers, senders, values)
    return replies


def checked(messages: Messages, links: list[Link], like: Payload, round_index: int) -> Messages:
    """Return messages that are there and fit; nothing else is looked at.

    Args:
        links: which have to be there.
        like: a row of each name, as it should be.
        round_index: for errors.

    Raises:
        RunError: naming the sender, what is wrong, and where the run is.
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
            if not all_finite(theirs):
                raise RunError(
                    f"{what} is not finite; a peer diverged, or it was changed in transit", code="exchange.not-finite"
                )
    return messages
