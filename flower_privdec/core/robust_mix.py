"""Mixing in which a peer does not believe everything: the exchange of scenarios with `network.robust` or `attack`.

`RobustMix` takes the place of `Mix` in an algorithm's program. It mixes the same rows with the same weights, but each
receiver first measures what came and asks a `RobustRule` how much of it counts (`core.robust_rule`). A scenario with an
`attack` has it too, since there the liars' rows are replaced before they are sent (`core.attack`).

What a peer measures of a neighbour is kept until that neighbour comes again, in edges of the state, one for each pair
of a peer and a neighbour that it may ever hear (`TABLE`). So a peer that hears one neighbour a round compares it with
what the others sent in earlier rounds.

Of a neighbour's model it also keeps a running average of its difference from the peer's own. Noise is drawn anew in
each round and averages out, while a lie that is to get anywhere has to point the same way again and again. Averages of
whole models would need a model for each neighbour, so it keeps SKETCH sums of the numbers, each with a random sign:
they are as long as the difference, to some 9 %. The signs are secret: who knew them could lie so that all sums are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flower_privdec.common.deferred import torch
from flower_privdec.common.errors import RunError
from flower_privdec.core.attack import Attack
from flower_privdec.core.exchange import Changed, Edges, InReach, Messages, Mix, Payload, Spares, State, checked
from flower_privdec.core.robust_rule import RobustRule, Seen
from flower_privdec.graph.mixing import Hosted, Link, Mixing

if TYPE_CHECKING:
    from torch import Tensor


TABLE = "robust."  # begins the names of the edges that hold what was measured of each row
COLUMNS = 8
DISTANCE, FROM_ZERO, FROM_START, AHEAD_OF_ZERO, AHEAD_OF_START, HEARD, DOUBTED, SIGNS = range(COLUMNS)
SKETCH = 64  # more columns, of the model only: the average difference
MEMORY = 20  # exchanges with a neighbour over which differences are averaged
LARGEST = 3.0  # times the usual distance: no single difference counts more in an average
DOUBTFUL = 1 / 3  # a neighbour of which less is kept stood out
FEW = 5  # exchanges with a neighbour, before which none is called a liar
START_OF = ("x", "average.x")  # rows that begin at the initial model; the others begin at zero

Share = Callable[[int, int, float], Payload]  # the message by sender, receiver and weight


@dataclass(frozen=True)
class RobustMix(Mix):
    """A `Mix` whose receivers judge what came, see the module.

    Attributes:
        rule: how much of each neighbour counts; None for all of everybody.
        attack: what liars send; None if nobody lies.
        start: the model with which all began, [d]; None if it is not known here.
        seed: what the liars draw follows from it.
    """

    rule: RobustRule | None = None
    attack: Attack | None = None
    start: Tensor | None = field(default=None, compare=False, repr=False)
    seed: int = 0
    by_matrix: ClassVar[bool] = False

    @property
    def judged(self) -> tuple[str, ...]:
        """The names of the rows that are judged: all but weights."""
        return tuple(name for name in self.names if not is_weight(name))

    @property
    def liars(self) -> Collection[int]:
        return () if self.attack is None else self.attack.peers

    def first_edges(self, peers: np.ndarray, mixing: Mixing, secret: int | None = None) -> dict[str, Edges]:
        """Return the edges before round 0, on which nothing was measured.

        Args:
            secret: from which the signs of sketches follow, below 2^53; by default they follow from the seed, which in
                a simulation no liar knows.
        """
        if self.rule is None:
            return {}
        if secret is None:
            secret = self.seed % 2**53

        pairs = mixing.topology.support()
        mine = pairs[np.isin(pairs[:, 1], peers) & (pairs[:, 0] != pairs[:, 1])]
        mine = mine[np.lexsort((mine[:, 0], mine[:, 1]))]

        edges = {}
        for name in self.judged:
            is_model = name == self.judged[0]
            values = torch.zeros(len(mine), COLUMNS + SKETCH * is_model, dtype=torch.float64)
            values[:, DISTANCE] = torch.nan
            values[:, SIGNS] = secret
            edges[TABLE + name] = Edges(mine[:, 1].copy(), mine[:, 0].copy(), values)
        return edges

    # --- the exchange ---

    def outgoing(self, state: State, mixing: Mixing) -> dict[Link, Payload]:
        told = replace(state, rows={**state.rows, **self._told(state.rows, state, mixing)})
        return super().outgoing(told, mixing)

    def incoming(self, state: State, mixing: Mixing, messages: Messages) -> Changed:
        hosted = mixing.hosted(self.place(state.round_index, mixing), state.peers)
        like = {name: state.rows[name][0] for name in self.names}
        must_be_finite = [name for name in self.names if self.rule is None or is_weight(name)]
        received = checked(messages, list(hosted.heard), like, state.round_index, finite=must_be_finite)
        return self._mixed(state, mixing, hosted, lambda sender, receiver, weight: received[sender, receiver])

    def among(self, state: State, mixing: Mixing, reach: InReach) -> Changed:
        """Return the new rows of some peers, given everybody's."""
        hosted = mixing.hosted(self.place(state.round_index, mixing), state.peers)
        told = {**reach.rows, **self._told(reach.rows, state, mixing)}

        def share(sender: int, receiver: int, weight: float) -> Payload:
            factor = weight if mixing.sends_shares else 1.0
            return {name: told[name][sender] * factor for name in self.names}

        return self._mixed(state, mixing, hosted, share)

    def together(self, state: State, mixing: Mixing, spares: Spares) -> Changed:
        return self.among(state, mixing, InReach(state.rows, {}))

    def _told(self, rows: Mapping[str, Tensor], state: State, mixing: Mixing) -> dict[str, Tensor]:
        """Return the rows that the peers say they have, if some lie."""
        if self.attack is None:
            return {}
        if len(rows[self.names[0]]) != mixing.n_peers:
            raise RunError(
                "attack: liars know all models, and this process has some peers' only: leave attack out, or run it in "
                "one process, with privdec run",
                code="attack.apart",
            )

        told = {}
        for number, name in enumerate(self.judged):
            weights = _weights(rows, name)
            key = (self.seed, self.place(state.round_index, mixing), number)
            lies = self.attack.told(rows[name] / weights, key)
            told[name] = rows[name].clone()
            for peer, lie in lies.items():
                told[name][peer] = lie * weights[peer]
        return told

    def _mixed(self, state: State, mixing: Mixing, hosted: Hosted, share: Share) -> Changed:
        """Return the new rows of the hosted peers, each of what its neighbours sent as far as that counts."""
        tables = self._tables(state)
        rows = {name: torch.empty_like(state.rows[name]) for name in self.names}

        for row, terms in enumerate(hosted.terms):
            peer = int(hosted.peers[row])
            own = {name: state.rows[name][row] for name in self.names}
            received = {sender: share(sender, peer, weight) for sender, _, weight in terms if sender != peer}
            counted = self.judge(tables, peer, own, received)

            # The order of the terms makes these the numbers of `Mix`, to the last bit, if all of everybody counts.
            for name in self.names:
                out = rows[name][row]
                if mixing.sends_shares:
                    for number, (sender, _, weight) in enumerate(terms):
                        part = own[name] * weight if sender == peer else counted[sender][name]
                        if number == 0:
                            out.copy_(part)
                        else:
                            out.add_(part)
                else:
                    weights = hosted.rows.rows([peer])
                    parts = [own[name] if j == peer else counted[j][name] for j in weights.sources.tolist()]
                    weights.apply_sources(torch.stack(parts), out=rows[name][row : row + 1])
        return Changed(rows, tables)

    def _tables(self, state: State) -> dict[str, Edges]:
        """Return copies of what was measured, which `judge` may change."""
        if self.rule is None:
            return {}
        tables = {}
        for name in self.judged:
            edges = state.edges[TABLE + name]
            tables[TABLE + name] = replace(edges, values=edges.values.cpu().clone())
        return tables

    # --- what a receiver believes ---

    def judge(
        self, tables: Mapping[str, Edges], peer: int, own: Payload, received: Mapping[int, Payload]
    ) -> dict[int, Payload]:
        """Return what each neighbour's rows count as at a peer; their weights are as they came.

        Args:
            tables: what was measured so far, by TABLE and the name of the row; what is measured now is put there.
            own: the peer's own rows. One that has no weight yet, as it lost all, takes what comes.
            received: rows or shares of its neighbours, decoded, by sender.
        """
        counted = {sender: dict(payload) for sender, payload in received.items()}
        if self.rule is None or not received:
            return dict(counted)

        senders = sorted(received)
        is_left_out = np.zeros(len(senders), dtype=bool)
        for name in self.judged:
            own_weight = _weight(own, name)
            if not float(own_weight) > 0:
                continue
            model = own[name].double() / own_weight
            theirs = [received[j][name].double() / _weight(received[j], name) for j in senders]
            kept = self._kept(tables[TABLE + name].of(peer), name, model, senders, theirs)

            # Who is left out with its model is left out with all that it sends.
            if name == self.names[0]:
                is_left_out = kept == 0
            kept = np.where(is_left_out, 0.0, kept)
            for sender, part, their_model in zip(senders, kept.tolist(), theirs, strict=True):
                if part < 1:
                    counts_as = model if part == 0 else torch.lerp(model, their_model, part)
                    counted[sender][name] = (counts_as * _weight(received[sender], name)).to(own[name])
        return dict(counted)

    def _kept(
        self, table: Edges, name: str, model: Tensor, senders: Collection[int], theirs: Collection[Tensor]
    ) -> np.ndarray:
        """Return how much of each sender's model counts, after what it is goes into the peer's part of the table."""
        start = torch.zeros_like(model)
        if self.start is not None and name in START_OF:
            start = self.start.to(model)
        way = model - start

        values = table.values
        places = np.searchsorted(table.other, [*senders])
        for place, their_model in zip(places.tolist(), theirs, strict=True):
            values[place, DISTANCE] = _finite((their_model - model).norm(), torch.inf)
            values[place, FROM_ZERO] = _finite(_projection(their_model, model), -torch.inf)
            values[place, FROM_START] = _finite(_projection(their_model - start, way), -torch.inf)
            values[place, HEARD] += 1

        known = np.flatnonzero(~torch.isnan(values[:, DISTANCE]).numpy())
        numbers = values.numpy()[known]
        progress = numbers[:, [FROM_ZERO, FROM_START]].T
        ahead = numbers[:, [AHEAD_OF_ZERO, AHEAD_OF_START]].T
        steady = np.zeros(len(known))
        if name == self.names[0]:
            usual = float(np.median(numbers[:, DISTANCE]))
            for place, their_model in zip(places.tolist(), theirs, strict=True):
                _remember(values[place], their_model - model, (model, way), usual)
            numbers = values.numpy()[known]
            ahead = numbers[:, [AHEAD_OF_ZERO, AHEAD_OF_START]].T
            steady = _steady(numbers)
        else:
            # Rows beside the model, such as corrections, have no way that all share, and may differ for ever.
            progress = progress[:0]
            ahead = ahead[:0]

        assert self.rule is not None
        seen = Seen(numbers[:, DISTANCE], progress, float(way.norm()), ahead, steady)
        kept = np.clip(np.nan_to_num(self.rule.kept(seen)), 0.0, 1.0)[np.searchsorted(known, places)]
        values[torch.from_numpy(places), DOUBTED] += torch.from_numpy((kept < DOUBTFUL).astype(np.float64))
        return kept


def _remember(values: Tensor, difference: Tensor, ways: tuple[Tensor, Tensor], usual: float) -> None:
    """Put a neighbour's difference from the peer's own model into its averages.

    Args:
        values: the neighbour's line of the table, which is changed.
        difference: their model less the peer's own, [d].
        ways: that the peer has come, from zero and from the start, [d] each.
        usual: the distance of neighbours from the peer.
    """
    distance = float(values[DISTANCE])
    if not (math.isfinite(distance) and math.isfinite(usual)):
        return

    # One number of 1e25 would stay in an average for hundreds of rounds.
    shrunk = difference
    if distance > LARGEST * usual:
        shrunk = difference * (LARGEST * usual / distance)

    # Of the first exchanges it is the plain average.
    part = 1 / min(MEMORY, float(values[HEARD]))
    for column, way in zip((AHEAD_OF_ZERO, AHEAD_OF_START), ways, strict=True):
        length = float(way.norm())
        along = 0.0
        if 0 < length < math.inf:
            along = float(shrunk.dot(way)) / length
        values[column] += part * (along - values[column])
    values[COLUMNS:] += part * (sketch(shrunk, int(values[SIGNS])) - values[COLUMNS:])


def _steady(numbers: np.ndarray) -> np.ndarray:
    """Return how far each neighbour's average difference is from the median of all, [N].

    If differences are random, their average over many exchanges is shorter than over few. So each distance is divided
    by the length that an average of as many random differences of length 1 has.
    """
    averages = numbers[:, COLUMNS:]
    with_own = np.vstack([averages, np.zeros(averages.shape[1])])
    middle = np.median(with_own, axis=0)
    from_middle = np.linalg.norm(averages - middle, axis=1)

    # An average that forgets 1/M of it in each exchange becomes as exact as one of 2 M - 1.
    heard = numbers[:, HEARD]
    exchanges = np.clip(heard, 1, 2 * MEMORY - 1)
    steady: np.ndarray = from_middle * np.sqrt(exchanges)
    return steady


def sketch(values: Tensor, secret: int) -> Tensor:
    """Return SKETCH sums of some numbers, each number with a sign that follows from a secret: about as long as they."""
    signed = values * _signs(len(values), secret, values.device)
    missing = -len(values) % SKETCH
    return torch.nn.functional.pad(signed, (0, missing)).view(-1, SKETCH).sum(0).cpu()


@lru_cache(maxsize=4)
def _signs(count: int, secret: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(secret)
    signs = torch.randint(0, 2, (count,), generator=generator, dtype=torch.int8) * 2 - 1
    return signs.to(device)


def is_weight(name: str) -> bool:
    """Return whether a row is of push-sum weights."""
    return name in ("w", "average.w")


def doubted(edges: Mapping[str, Edges]) -> dict[int, list[int]]:
    """Return the neighbours that stood out in most exchanges, each with the peers that say so."""
    found: dict[int, set[int]] = {}
    for name, table in edges.items():
        if not name.startswith(TABLE):
            continue
        often = (table.values[:, HEARD] >= FEW) & (table.values[:, DOUBTED] > table.values[:, HEARD] / 2)
        for place in np.flatnonzero(often.numpy()):
            found.setdefault(int(table.other[place]), set()).add(int(table.own[place]))
    return {liar: sorted(found[liar]) for liar in sorted(found)}


def _weight(payload: Payload, name: str) -> Tensor:
    """Return the push-sum weight of a row; 1 if it has none."""
    weight = payload.get(name.removesuffix("x") + "w")
    if weight is None or not name.endswith("x"):
        return torch.ones((), dtype=torch.float64)
    return weight.double()


def _weights(rows: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the push-sum weights of all rows of a name, [n, 1]."""
    weights = rows.get(name.removesuffix("x") + "w")
    if weights is None or not name.endswith("x"):
        return torch.ones(len(rows[name]), 1).to(rows[name])
    return weights[:, None]


def _projection(other: Tensor, way: Tensor) -> Tensor:
    """Return how far another model has come along a way, over the length of that; 0 if it has none."""
    length = way.dot(way)
    return other.dot(way) / torch.where(length > 0, length, torch.inf)


def _finite(value: Tensor, otherwise: float) -> float:
    number = float(value)
    return number if np.isfinite(number) else otherwise
