"""Mixing of shares that a wire codec encodes, if all peers perform it together: in a simulation, or synchronously.

A sender's shares are encoded. What the codec cut off, its row less what its receivers add, stays in its row: so no mass
is lost. What a codec that sends differences has told over an edge is part of the state, as edges of it, so that a
checkpoint has everything:

    told.NAME    the model that a peer hosted here has told another; `own` is the sender
    heard.NAME   that another has told a peer hosted here; `own` is the receiver. If both are hosted, `told` is enough
    told.count   how many shares came before over the edge, [E]

All that belongs to an edge begins with its first share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.core import Edges, Exchange, State
from flower_privdec.core.exchange import Messages, Payload
from flower_privdec.core.robust_mix import is_weight
from flower_privdec.graph.mixing import Link, Mixing
from flower_privdec.pushsum.frames import TensorArithmetic

if TYPE_CHECKING:
    from torch import Tensor

TOLD = "told."
HEARD = "heard."
COUNT = "told.count"
Models: TypeAlias = "dict[Link, Mapping[str, Tensor]]"  # by sender and receiver


@dataclass(frozen=True)
class Sending:
    """The shares of the peers hosted here in one exchange.

    Attributes:
        messages: as encoded for the wire.
        parts: what their receivers add.
        lost: what stays with the senders, by the row of each.
        told: what the receivers know then.
        counts: how many shares there were then, over each edge.
    """

    messages: Messages
    parts: Messages
    lost: Mapping[int, Payload]
    told: Models
    counts: Mapping[Link, int]


class CodedMix:
    """Exchanges of shares by a wire codec.

    Args:
        arithmetic: the codec's.
    """

    def __init__(self, arithmetic: TensorArithmetic) -> None:
        self._arithmetic = arithmetic

    def send(self, exchange: Exchange, state: State, mixing: Mixing) -> Sending:
        """Return the shares that leave; the state does not change."""
        arithmetic = self._arithmetic
        row_of = {peer: row for row, peer in enumerate(state.peers.tolist())}
        told = _models(state, TOLD, exchange.names)
        counts = _counts(state)

        messages: dict[Link, Payload] = {}
        parts: dict[Link, Payload] = {}
        lost: dict[int, dict[str, Tensor]] = {}
        encoded: dict[int, tuple[Payload, Payload]] = {}  # receivers of equal messages have the same object
        for link, payload in exchange.outgoing(state, mixing).items():
            if id(payload) in encoded:
                messages[link], parts[link] = encoded[id(payload)]
            else:
                count = counts.get(link, 0)
                shared = arithmetic.freeze(payload, arithmetic.damping, told.get(link, {}), count)
                messages[link] = shared.values
                parts[link] = shared.parts
                counts[link] = count + 1
                told[link] = shared.told
                if arithmetic.shares_parts:
                    encoded[id(payload)] = shared.values, shared.parts

            row = row_of[link[0]]
            if link[0] in exchange.liars:
                own = {name: state.rows[name][row] for name in payload}
                cut_off = _kept_by_liar(own, payload, parts[link])
            else:
                cut_off = {name: whole - parts[link][name] for name, whole in payload.items()}

            kept = lost.setdefault(row, {})
            for name, value in cut_off.items():
                kept[name] = kept[name] + value if name in kept else value
        return Sending(messages, parts, lost, told, counts)

    def apply_(
        self, exchange: Exchange, state: State, mixing: Mixing, sending: Sending, parts: Messages, heard: Models
    ) -> None:
        """Mix the parts that came into the state, and remember what was told and heard."""
        exchange.incoming(state, mixing, parts).apply_(state)
        for row, cut_off in sending.lost.items():
            for name, value in cut_off.items():
                state.rows[name][row] += value

        if self._arithmetic.shares_parts:
            return
        _remember(state, TOLD, sending.told)
        _remember(state, HEARD, heard, receives=True)
        links = sorted(sending.counts)
        counted = torch.tensor([sending.counts[link] for link in links], dtype=torch.int64)
        state.edges[COUNT] = Edges(*_ends(links, receives=False), counted)

    def open(self, state: State, received: Messages) -> tuple[Messages, Models]:
        """Return the parts of encoded shares to the one peer that is hosted here, and all that it has heard then."""
        names = next(iter(received.values()), {})
        heard = _models(state, HEARD, names, receives=True)
        parts = {}
        for link, values in received.items():
            like = {name: state.rows[name][0] for name in values}
            parts[link], heard[link] = self._arithmetic.open(values, like, heard.get(link, {}))
        return parts, heard

    def together_(self, exchange: Exchange, state: State, mixing: Mixing) -> None:
        """Perform an exchange among all peers, which are all hosted here."""
        sending = self.send(exchange, state, mixing)
        self.apply_(exchange, state, mixing, sending, sending.parts, {})


def _kept_by_liar(own: Payload, told: Payload, parts: Payload) -> dict[str, Tensor]:
    """Return what stays with a liar of a share: as much of its own model as of its weight, which is not a lie.

    What is cut off the lie itself is nothing that the liar has.

    Args:
        own: its rows.
        told: the share that it sends.
        parts: what the receiver adds of it.
    """
    kept = {}
    for name, row in own.items():
        weight = name if is_weight(name) else name.removesuffix("x") + "w"
        if weight in own and float(own[weight]) > 0:
            kept[name] = row * ((told[weight] - parts[weight]) / own[weight])
    return kept


def _ends(links: list[Link], receives: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the peers hosted here, and the others."""
    ends = np.array(links, dtype=np.int64).reshape(-1, 2)
    own = int(receives)
    return ends[:, own], ends[:, 1 - own]


def _links(edges: Edges, receives: bool) -> list[Link]:
    pairs = zip(edges.own.tolist(), edges.other.tolist(), strict=True)
    return [(other, own) if receives else (own, other) for own, other in pairs]


def _models(state: State, prefix: str, names: Iterable[str], receives: bool = False) -> Models:
    models: dict[Link, dict[str, Tensor]] = {}
    for name in names:
        edges = state.edges.get(prefix + name)
        if edges is not None:
            for link, value in zip(_links(edges, receives), edges.values, strict=True):
                models.setdefault(link, {})[name] = value
    return {**models}


def _counts(state: State) -> dict[Link, int]:
    edges = state.edges.get(COUNT)
    if edges is None:
        return {}
    return dict(zip(_links(edges, receives=False), edges.values.tolist(), strict=True))


def _remember(state: State, prefix: str, models: Models, receives: bool = False) -> None:
    """Put models into the state, as edges by ascending own peers."""
    links = sorted(models, key=lambda link: (link[1], link[0]) if receives else link)
    names = models[links[0]] if links else {}
    for name in names:
        values = torch.stack([models[link][name] for link in links])
        state.edges[prefix + name] = Edges(*_ends(links, receives), values)
