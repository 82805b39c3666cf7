"""Mixing: W[i, j] is the weight that receiver i gives to what j sent, by a round's graph, rule and active peers.

Each receiver's sum runs in an order that depends on its own row only (itself first, then by distance), with
every product rounded before it is added. So the rows of a few receivers give, bit for bit, what the whole
matrix gives, whichever kernel does the work and however columns are tiled.

Only speed decides between the kernels. Measured on one core in float32 (79,510 columns of 50 peers, 2,000 columns of
1,000 peers): two-slice lerp on shift graphs is as fast as a fused loop; on any other graph the fused loop (numba) takes
a fifth to a half of the time of torch's gather, multiply, add. torch's index operations are fast on whole rows only: no
tiles.

The ServerApp of a Flower app asks only for weights, in a process that may have no other use for torch and its 600 MB:
nothing of it is used before rows are summed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flower_privdec.common.catalogue import WEIGHTS
from flower_privdec.common.deferred import is_small, torch
from flower_privdec.common.errors import ArgumentError, ScenarioError
from flower_privdec.graph.participation import Absence, Participation, build_participation, leave, planned
from flower_privdec.graph.topology import CompleteTopology, EdgeArray, Peers, Topology, check_topology
from flower_privdec.rows.tensors import compiled, empty_rows, padded

if TYPE_CHECKING:
    from torch import Tensor

Link = tuple[int, int]  # sender, receiver
Term = tuple[int, int, float]  # sender, receiver, weight


@dataclass(frozen=True)
class Hosted:
    """Rows of W for the hosted peers, and their messages.

    Attributes:
        peers: the hosted peers, in their order.
        rows: the rows of W for them.
        sent: the terms of messages from them, in the order of `MixingMatrix.links`.
        heard: the links of messages to them, sorted by receiver and sender.
        answered: the links of replies to them, sorted by receiver and sender.
    """

    peers: Peers
    rows: MixingMatrix
    sent: tuple[Term, ...]
    heard: tuple[Link, ...]
    answered: tuple[Link, ...]

    @cached_property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """Return the terms of each hosted peer's own row: itself first, then by distance."""
        by_peer = []
        for peer in self.peers.tolist():
            own_row = self.rows.rows([peer])
            by_peer.append(tuple(own_row.terms()))
        return tuple(by_peer)


Array = npt.NDArray[Any]
Run = tuple[int, int, int, int]  # first receiver, its own column, its other column, how many follow one another

CHUNK_BYTES = {"cpu": 2**20}  # a temporary of some rows stays in cache
CHUNK_BYTES_ELSEWHERE = 2**28
FUSED_FROM = 2**17  # multiplications from which the fused loop pays for its compilation
FUSED_TERMS = 32  # terms of one receiver from which it does so whatever the size: each costs torch some calls
IN_PLACE_FROM = 2**16  # bytes of a row from which a call for each row costs less than a second buffer
FEW_RUNS = 4  # calls that cost less than the copies of a gather, however short the rows
BLOCK = 32  # rows summed pairwise before they join a mean
_compiled = cache(compiled)


class Slot(NamedTuple):
    """The s-th term of receivers' sums: out[rows] += weights * x[columns]; rows None means all receivers."""

    rows: Tensor | None
    columns: Tensor
    weights: Tensor


def slots(x: Tensor, out: Tensor, terms: list[Slot]) -> None:
    """Sum slot by slot in torch, on any device and dtype."""
    for s, (rows, columns, weights) in enumerate(terms):
        for chunk in _chunks(x, len(columns)):
            term = x.index_select(0, columns[chunk]).mul_(weights[chunk])
            if s == 0:
                out[chunk] = term
            elif rows is None:
                out[chunk] += term
            else:
                out.index_add_(0, rows[chunk], term)


def sum_rows(x: Tensor, members: Tensor | None) -> Tensor:
    """Return the sum of the members' rows (None: of all), pairwise in blocks."""
    count = len(x) if members is None else len(members)
    total: Tensor | None = None
    for start in range(0, count, BLOCK):
        chosen = slice(start, start + BLOCK)
        part = x[chosen] if members is None else x.index_select(0, members[chosen])
        if total is None:
            total = _pairwise_sum(part)
        else:
            total = total.add_(_pairwise_sum(part))
    if total is None:
        raise ValueError("a sum needs at least one member")
    return total


def _pairwise_sum(part: Tensor) -> Tensor:
    part = part.clone() if len(part) == 1 else part
    while len(part) > 1:
        half, odd = divmod(len(part), 2)
        summed = part[:half] + part[half : 2 * half]
        if odd:
            summed[0] += part[-1]
        part = summed
    return part[0]


def fused(x: Tensor, out: Tensor, indptr: Array, columns: Array, weights: Array) -> bool:
    """Sum all terms in one compiled loop if that is possible and pays; return whether it did.

    Args:
        x: contiguous (but for padding of the rows) on the CPU, float32 or float64, or nothing is done.
        out: likewise.
        indptr: compressed rows, as in `SparseMatrix`.
        columns: of the terms.
        weights: of the terms, in x's dtype.
    """
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not is_small()
    multiplications = len(columns) * x.shape[1]
    most_terms = np.diff(indptr).max()
    pays = multiplications >= FUSED_FROM or most_terms >= FUSED_TERMS
    if not (fits and pays):
        return False

    source = padded(x)
    target = padded(out)
    if source is None or target is None:
        return False
    _compiled(_loop)(indptr, columns, weights, source.numpy(), target.numpy(), x.shape[1])
    return True


def _loop(indptr: Array, columns: Array, weights: Array, x: Array, out: Array, width: int) -> None:
    for row in range(len(indptr) - 1):
        first = indptr[row]
        end = indptr[row + 1]
        target = out[row]
        term = x[columns[first]]
        weight = weights[first]

        # If a peer hears one other, one pass over the row will do, with the same roundings.
        if end - first == 2:
            second = x[columns[first + 1]]
            its_weight = weights[first + 1]
            for c in range(width):
                target[c] = weight * term[c] + its_weight * second[c]
            continue

        for c in range(width):
            target[c] = weight * term[c]
        for s in range(first + 1, end):
            term = x[columns[s]]
            weight = weights[s]
            for c in range(width):
                target[c] += weight * term[c]


def _chunks(x: Tensor, n_rows: int) -> Iterator[slice]:
    """Cut rows into chunks, so that a temporary of one chunk stays small."""
    budget = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES_ELSEWHERE)
    size = max(1, budget // (x.element_size() * x.shape[1]))
    for start in range(0, n_rows, size):
        yield slice(start, start + size)


class MixingMatrix(ABC):
    """The rows of W for some receivers: `dense()` is [receivers, columns] float64, a column per sender."""

    n_columns: int
    receivers: Peers

    @property
    def sources(self) -> Peers:
        """Return the sorted ids of all whose payloads these rows need."""
        return np.unique(self._columns())

    def dense(self) -> npt.NDArray[np.float64]:
        """Return the weights, [receivers, columns] float64."""
        senders, receivers, weights = self.links()
        full = np.zeros((len(self.receivers), self.n_columns))
        full[self._positions(receivers), senders] = weights
        return full

    @abstractmethod
    def links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        """Return senders, receivers and weights of all terms, by receiver: itself first, then by distance."""

    def terms(self) -> Iterator[tuple[int, int, float]]:
        """Yield (sender, receiver, weight) of all terms, in the order of `links`."""
        return zip(*(part.tolist() for part in self.links()), strict=True)

    @abstractmethod
    def rows(self, peers: npt.ArrayLike) -> MixingMatrix:
        """Return the rows of some of the receivers, in the order given.

        Args:
            peers: global ids, each one of `receivers`.

        Raises:
            ValueError: an id that is not among the receivers.
        """

    def hosted(self, peers: Peers) -> Hosted:
        """Return the rows and messages of some of the receivers; the last result is cached."""
        key = peers.tobytes()
        if key in self._last_hosted:
            return self._last_hosted[key]

        senders, receivers, weights = self._links
        if len(peers) == 1:
            # Thousands of simulated peers ask one by one: each looks at its own terms only.
            mine = self._terms_of(int(peers[0]))
            senders = senders[mine]
            receivers = receivers[mine]
            weights = weights[mine]
        between = senders != receivers  # a peer's term for itself is not a message
        here = between & np.isin(senders, peers)
        there = between & np.isin(receivers, peers)

        def by_second(first: Peers, second: Peers) -> tuple[Link, ...]:
            order = np.lexsort((first, second))
            return tuple(zip(first[order].tolist(), second[order].tolist(), strict=True))

        sent = zip(senders[here].tolist(), receivers[here].tolist(), weights[here].tolist(), strict=True)
        heard = by_second(senders[there], receivers[there])
        answered = by_second(receivers[here], senders[here])
        hosted = Hosted(peers, self.rows(peers), tuple(sent), heard, answered)

        self._last_hosted.clear()
        self._last_hosted[key] = hosted
        return hosted

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Mix: out[i] = sum_j W[i, j] x[j].

        Args:
            x: a row for each column of W, [columns, ...], floating, on any device.
            out: where to write, [receivers, ...], rows of their own and no part of x; made, aligned, if not given.

        Returns:
            out. Weights are float64 and are rounded once to x's dtype.

        Raises:
            ValueError: shapes that do not fit, an integer payload, or an out that is x.
        """
        shape = (len(self.receivers), *x.shape[1:])
        if x.shape[0] != self.n_columns or not x.is_floating_point():
            raise ArgumentError(
                f"payload {list(x.shape)} {x.dtype} must be floating, {self.n_columns} rows", code="mixing.payload"
            )

        if out is None and len(shape) == 2:
            out = empty_rows(x, *shape)
        elif out is None:
            out = x.new_empty(shape)

        if out.shape != shape or out.dtype != x.dtype or out.data_ptr() == x.data_ptr() != 0:
            raise ArgumentError(
                f"out {list(out.shape)} {out.dtype} must be {list(shape)} {x.dtype}, and not x", code="mixing.out"
            )

        if out.numel():
            self._combine(x.detach().reshape(len(x), -1), out.detach().view(len(out), -1))
        return out

    def replace(self, x: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Mix rows that may be overwritten, [columns, ...] with a receiver for each: in place, or into `spare`.

        Returns:
            The mixed rows, equal to the last bit to those of `apply`, and a buffer that is free afterwards (None if
            none was needed).
        """
        return self.apply(x, out=spare), x

    @property
    def moved(self) -> Peers | None:
        """Return the receivers whose rows are not just their own; None unless these are few."""
        return None

    def apply_sources(self, payloads: Tensor, out: Tensor | None = None) -> Tensor:
        """Mix as `apply` does, given only the rows of `sources`, stacked in that order: [sources, ...]."""
        return self._compact.apply(payloads, out)

    @cached_property
    def _compact(self) -> MixingMatrix:
        return self._relabel(self.sources)

    @cached_property
    def _last_hosted(self) -> dict[bytes, Hosted]:
        return {}

    @cached_property
    def _links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        return self.links()

    @cached_property
    def _by_end(self) -> list[tuple[Peers, Peers]]:
        """The order of the terms by sender, and by receiver, and these in that order."""
        ends = self._links[:2]
        orders = [np.argsort(end, kind="stable") for end in ends]
        return [(order, end[order]) for order, end in zip(orders, ends, strict=True)]

    def _terms_of(self, peer: int) -> Peers:
        """Return the places of all terms of which a peer is sender or receiver, ascending."""
        found = []
        for order, sorted_ends in self._by_end:
            first, last = np.searchsorted(sorted_ends, [peer, peer + 1])
            found.append(order[first:last])
        return np.unique(np.concatenate(found))

    @abstractmethod
    def _columns(self) -> Peers: ...

    @abstractmethod
    def _relabel(self, sources: Peers) -> MixingMatrix: ...

    @abstractmethod
    def _combine(self, x: Tensor, out: Tensor) -> None: ...

    @cached_property
    def _order(self) -> Peers:
        order: Peers = np.argsort(self.receivers)
        return order

    def _positions(self, peers: npt.ArrayLike) -> Peers:
        wanted = np.atleast_1d(np.asarray(peers, dtype=np.int64))
        order = self._order
        where = np.searchsorted(self.receivers, wanted, sorter=order)
        positions: Peers = order[np.minimum(where, len(order) - 1)]
        if not np.array_equal(self.receivers[positions], wanted):
            raise ArgumentError(
                f"peers {wanted.tolist()} must all be among the {len(order)} receivers", code="mixing.peers"
            )
        return positions


@dataclass(frozen=True, eq=False)
class SparseMatrix(MixingMatrix):
    """Rows in compressed form: receiver r gives weights[s] to columns[s], indptr[r] <= s < indptr[r + 1].

    `halves` marks matrices all of whose rows are half of the receiver's own and half of one other's; the mark
    passes to their slices, for it decides the rounding.
    """

    n_columns: int
    receivers: Peers
    indptr: Peers
    columns: Peers
    weights: npt.NDArray[np.float64]
    halves: bool

    def links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        return self.columns, np.repeat(self.receivers, np.diff(self.indptr)), self.weights

    def rows(self, peers: npt.ArrayLike) -> SparseMatrix:
        """Return the rows of some of the receivers, in the order given."""
        at = self._positions(peers)
        counts = np.diff(self.indptr)[at]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        take = np.repeat(self.indptr[at] - indptr[:-1], counts) + np.arange(indptr[-1])
        return SparseMatrix(
            self.n_columns, self.receivers[at], indptr, self.columns[take], self.weights[take], self.halves
        )

    @property
    def moved(self) -> Peers | None:
        return None if self._changed is None else self._changed[1].receivers

    def replace(self, x: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See MixingMatrix; in place if most rows stay, or all are long and hear the peer the same number before."""
        changed = self._changed
        if changed is not None and x.shape[0] == self.n_columns:
            rows, part = changed
            x.detach()[torch.from_numpy(rows).to(x.device)] = part.apply(x)
            return x, spare

        shift = self._shift if self.halves else None
        long = x.nbytes >= IN_PLACE_FROM * self.n_columns
        if shift is None or not long or x.device.type != "cpu" or x.shape[0] != self.n_columns:
            return super().replace(x, spare)

        # Each cycle row by row: a row is changed before the one it hears, so that only the first of a cycle is copied.
        by_peer = x.detach().unbind(0)
        for start in range(math.gcd(len(by_peer), shift)):
            first = by_peer[start].clone()
            row = start
            while (other := (row - shift) % len(by_peer)) != start:
                by_peer[row].lerp_(by_peer[other], 0.5)
                row = other
            by_peer[row].lerp_(first, 0.5)
        return x, spare

    def _columns(self) -> Peers:
        return self.columns

    def _relabel(self, sources: Peers) -> SparseMatrix:
        columns = np.searchsorted(sources, self.columns)
        return SparseMatrix(len(sources), self.receivers, self.indptr, columns, self.weights, self.halves)

    def _combine(self, x: Tensor, out: Tensor) -> None:
        long = x.device.type == "cpu" and x.nbytes >= IN_PLACE_FROM * len(x)
        if self.halves and (long or len(self._runs) <= FEW_RUNS):
            # Without a copy; shift graphs have two runs.
            for first, own, other, count in self._runs:
                torch.lerp(x[own : own + count], x[other : other + count], 0.5, out=out[first : first + count])
        elif self.halves:
            for chunk in _chunks(x, len(out)):
                own_slot, other_slot = self._slots(x)
                own_rows = x.index_select(0, own_slot.columns[chunk])
                others = x.index_select(0, other_slot.columns[chunk])
                torch.lerp(own_rows, others, 0.5, out=out[chunk])
        else:
            weights = self._float32_weights if x.dtype is torch.float32 else self.weights
            if not fused(x, out, self.indptr, self.columns, weights):
                slots(x, out, self._slots(x))

    @cached_property
    def _changed(self) -> tuple[Peers, SparseMatrix] | None:
        """The rows that are not just their receiver's own, and their weights; None if these are most rows."""
        first = self.indptr[:-1]
        own = (np.diff(self.indptr) == 1) & (self.columns[first] == self.receivers) & (self.weights[first] == 1)
        if 2 * own.sum() <= len(own):
            return None
        return np.flatnonzero(~own), self.rows(self.receivers[~own])

    @cached_property
    def _shift(self) -> int | None:
        """The h of a graph in which all rows, in order, hear the peer h before them."""
        own, other = self.columns.reshape(-1, 2).T
        shifts = (own - other) % self.n_columns
        in_order = len(own) == self.n_columns and np.array_equal(own, np.arange(self.n_columns))
        if in_order and (shifts == shifts[0]).all():
            return int(shifts[0])
        return None

    @cached_property
    def _runs(self) -> list[Run]:
        """The runs of receivers whose own and other column both go up by one."""
        pairs = self.columns.reshape(-1, 2)
        starts = np.flatnonzero(np.r_[True, (np.diff(pairs, axis=0) != 1).any(axis=1)])
        counts = np.diff(np.r_[starts, len(pairs)])
        return list(zip(starts.tolist(), *pairs[starts].T.tolist(), counts.tolist(), strict=True))

    @cached_property
    def _on_device(self) -> dict[tuple[torch.device, torch.dtype], list[Slot]]:
        return {}

    @cached_property
    def _float32_weights(self) -> npt.NDArray[np.float32]:
        return self.weights.astype(np.float32)

    def _slots(self, x: Tensor) -> list[Slot]:
        """Return the terms as slots: the first has all receivers, the s-th those with more than s terms."""
        key = (x.device, x.dtype)
        if key not in self._on_device:
            counts = np.diff(self.indptr)
            self._on_device[key] = built = []
            for s in range(int(counts.max())):
                rows = np.flatnonzero(counts > s)
                at = self.indptr[rows] + s
                receivers = None
                if len(rows) < len(counts):
                    receivers = torch.from_numpy(rows).to(x.device)
                columns = torch.from_numpy(self.columns[at]).to(x.device)
                weights = torch.from_numpy(self.weights[at]).to(x).unsqueeze(1)
                built.append(Slot(receivers, columns, weights))
        return self._on_device[key]


@dataclass(frozen=True, eq=False)
class AverageMatrix(MixingMatrix):
    """Rows that are the plain mean over `members` where `averaged`, and the receiver's own elsewhere.

    The mean is one sum divided once, so that a payload of ones stays exactly one.
    """

    n_columns: int
    receivers: Peers
    members: Peers
    own: Peers
    averaged: npt.NDArray[np.bool_]

    def links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        senders = []
        receivers = []
        weights = []
        for peer, own, averaged in zip(self.receivers, self.own, self.averaged, strict=True):
            heard = own[None]
            if averaged:
                distance = (peer - self.members) % self.n_columns
                heard = self.members[np.argsort(distance)]
            senders.append(heard)
            receivers.append(np.full(len(heard), peer))
            weights.append(np.full(len(heard), 1 / len(heard)))
        return np.concatenate(senders), np.concatenate(receivers), np.concatenate(weights)

    def rows(self, peers: npt.ArrayLike) -> AverageMatrix:
        """Return the rows of some of the receivers, in the order given."""
        at = self._positions(peers)
        return AverageMatrix(self.n_columns, self.receivers[at], self.members, self.own[at], self.averaged[at])

    def _columns(self) -> Peers:
        own = self.own[~self.averaged]
        if self.averaged.any():
            return np.concatenate([self.members, own])
        return own

    def _relabel(self, sources: Peers) -> AverageMatrix:
        members = np.searchsorted(sources, self.members)  # those not among the sources are not read
        own = np.where(self.averaged, 0, np.searchsorted(sources, self.own))
        return AverageMatrix(len(sources), self.receivers, members, own, self.averaged)

    def replace(self, x: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See MixingMatrix; in place, so that rows which stay are neither read nor copied."""
        ids = np.arange(self.n_columns)
        if x.shape[0] != self.n_columns or not np.array_equal(self.receivers, ids) or not np.array_equal(self.own, ids):
            return super().replace(x, spare)

        rows, members, _ = self._indices(x.device)
        mixed = x.detach()
        if len(rows):
            # Everything is read before anything is written.
            mean = sum_rows(mixed, members) / len(self.members)
            if len(rows) == len(mixed):
                mixed.copy_(mean)
            else:
                mixed[torch.as_tensor(rows, device=x.device)] = mean
        return x, spare

    def _combine(self, x: Tensor, out: Tensor) -> None:
        rows, members, own = self._indices(x.device)
        if len(rows) < len(out):
            torch.index_select(x, 0, own, out=out)
        if len(rows):
            mean = sum_rows(x, members) / len(self.members)
            if len(rows) == len(out):
                out.copy_(mean)
            else:
                for row in rows:
                    out[row] = mean

    def _indices(self, device: torch.device) -> tuple[list[int], Tensor | None, Tensor]:
        """Return the averaged rows, the members (None if they are all columns), and rows' own columns."""
        if device not in self._on_device:
            all_columns = np.array_equal(self.members, np.arange(self.n_columns))
            members = None
            if not all_columns:
                members = torch.from_numpy(self.members).to(device)
            rows = np.flatnonzero(self.averaged).tolist()
            self._on_device[device] = (rows, members, torch.from_numpy(self.own).to(device))
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[list[int], Tensor | None, Tensor]]:
        return {}


RULES = WEIGHTS.some("column-stochastic", "metropolis", "doubly-stochastic", "max-degree")
UNDIRECTED = ("metropolis", "max-degree")  # symmetric, and so for undirected graphs only


def mixing_matrix(
    edges: EdgeArray,
    n_peers: int,
    weights: str,
    active: npt.NDArray[np.bool_] | None = None,
    *,
    is_directed: bool = False,
) -> MixingMatrix:
    """Weigh the edges of a round between its active peers.

    column-stochastic: W[i, j] = 1 / (out_j + 1), i = j included.
    metropolis: W[i, j] = 1 / (1 + max(deg_i, deg_j)), the rest to itself (Xiao and Boyd 2004).
    doubly-stochastic: W[i, j] = 1 / (D + 1) with D the largest degree, the rest to itself; regular graphs.
    max-degree: the same on any undirected graph, W = I - L / (D + 1) with L its Laplacian.
    server: W[i, j] = 1 / m over the m active peers j, for every i.
    Degrees count active peers only; but for server, an inactive peer keeps its own.

    Args:
        edges: [m, 2] (sender, receiver), without self loops or repeats; server does not look at them.
        n_peers: how many peers there are.
        weights: one of `RULES`, or server, whose weights follow from who is active only.
        active: mask of the active peers, [n_peers]; None means all.
        is_directed: whether the graph is declared to be directed, also if all edges go both ways.

    Returns:
        The matrix of all n_peers receivers.

    Raises:
        ScenarioError: unknown weights, or weights that this graph does not have.

    Examples:
        >>> edges = np.array([[0, 1], [0, 2], [1, 0]])
        >>> mixing_matrix(edges, 3, "column-stochastic").dense().round(2).tolist()
        [[0.33, 0.5, 0.0], [0.33, 0.5, 0.0], [0.33, 0.0, 1.0]]
    """
    if weights != "server":
        RULES.check(weights, "topology.weights")
    mask = np.ones(n_peers, dtype=bool) if active is None else active
    if weights == "server":
        return average_matrix(mask, everybody_receives=True)
    _check_edges(edges, n_peers, weights, is_directed=is_directed)

    if not mask.all():
        between_active = mask[edges[:, 0]] & mask[edges[:, 1]]
        edges = edges[between_active]
    n_active = int(mask.sum())
    if len(edges) == n_active * (n_active - 1):
        return average_matrix(mask)  # a clique: each of the rules gives 1/m

    senders, receivers = edges.T
    out_degree, in_degree = _degrees(edges, n_peers)
    if weights == "column-stochastic":
        own: npt.NDArray[np.float64] = 1 / (out_degree + 1)
        shares = own[senders]
    else:
        if weights == "metropolis":
            shares = 1 / (1 + np.maximum(out_degree[senders], out_degree[receivers]))
        elif np.array_equal(out_degree, in_degree):
            shares = np.full(len(edges), 1 / (int(out_degree.max()) + 1))
        else:
            raise ScenarioError(
                "topology.weights=doubly-stochastic on a directed graph must have everybody active, for an absent peer "
                "unbalances what others send and receive; use column-stochastic with push-sum",
                code="mixing.participation",
            )
        own = np.asarray(1 - np.bincount(receivers, weights=shares, minlength=n_peers), dtype=np.float64)

    # Compressed rows: first the receiver's own term, then the others' by distance behind it.
    ids = np.arange(n_peers)
    senders = np.concatenate([ids, senders])
    receivers = np.concatenate([ids, receivers])
    values = np.concatenate([own, shares])
    distance = (receivers - senders) % n_peers
    order = np.argsort(receivers * n_peers + distance)

    counts = np.bincount(receivers, minlength=n_peers)
    halves = bool((counts == 2).all() and (values == 0.5).all())
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return SparseMatrix(n_peers, ids, indptr, senders[order], values[order], halves)


def _remedy_for_degrees(edges: EdgeArray, n_peers: int, *, is_directed: bool) -> str:
    """Return what to do about a graph whose degrees differ."""
    there = np.sort(edges @ [n_peers, 1])
    back = np.sort(edges @ [1, n_peers])
    if not np.array_equal(there, back):
        return "use a push-sum algorithm, such as privsgp, or an undirected topology"
    if is_directed:
        return "each of its edges goes both ways: set topology.directed=false, or use a push-sum algorithm"
    return "set topology.weights=metropolis, or use a push-sum algorithm"


def _check_edges(edges: EdgeArray, n_peers: int, weights: str, *, is_directed: bool) -> None:
    """Raise ScenarioError for edges [m, 2] that are wrong, or that cannot have these weights."""
    if len(edges) and (edges.min() < 0 or edges.max() >= n_peers):
        raise ScenarioError(
            f"edges must join peers 0 to {n_peers - 1}; got {edges.min()} to {edges.max()}", code="mixing.edges"
        )
    loops = edges[edges[:, 0] == edges[:, 1], 0]
    if len(loops):
        message = f"edge {loops[0]} -> {loops[0]} must be left out: self weights are implied"
        raise ScenarioError(message, code="mixing.edges")

    if weights in UNDIRECTED:
        # An edge as one number, sender * n + receiver, and its reverse likewise.
        there = np.sort(edges @ [n_peers, 1])
        back = np.sort(edges @ [1, n_peers])
        if not np.array_equal(there, back):
            sender, receiver = divmod(int(np.setdiff1d(there, back)[0]), n_peers)
            raise ScenarioError(
                f"topology.weights={weights} must have an undirected graph, but {sender} -> {receiver} has no reverse; "
                "use column-stochastic with push-sum, or an undirected topology",
                code="mixing.directed",
            )

    if weights == "doubly-stochastic":
        degrees = np.concatenate(_degrees(edges, n_peers))
        if degrees.min() != degrees.max():
            raise ScenarioError(
                f"topology.weights=doubly-stochastic must have all in- and out-degrees the same, and they are "
                f"{degrees.min()} to {degrees.max()}; {_remedy_for_degrees(edges, n_peers, is_directed=is_directed)}",
                code="mixing.degrees",
            )


def _degrees(edges: EdgeArray, n_peers: int) -> tuple[Peers, Peers]:
    return np.bincount(edges[:, 0], minlength=n_peers), np.bincount(edges[:, 1], minlength=n_peers)


def average_matrix(active: npt.NDArray[np.bool_], *, everybody_receives: bool = False) -> AverageMatrix:
    """Return the matrix by which active peers (or all) take the mean over the active ones; others keep their own."""
    n_peers = len(active)
    averaged = np.ones(n_peers, dtype=bool) if everybody_receives else active
    ids = np.arange(n_peers)
    return AverageMatrix(n_peers, ids, np.flatnonzero(active), ids, averaged)


class Mixing:
    """The sequence of mixing matrices; those of a period in which all peers are active are cached.

    With one mixing step a round the places of the sequence are the rounds. Topology server always has the weights
    `server`, which follow from who is active only.

    Args:
        weights: see `mixing_matrix`.
        participation: the active peers; all by default.
        steps: how many matrices a round has.

    Attributes:
        sends_shares: whether a message carries the sender's weighted share of its row, and not the row itself.

    Raises:
        ScenarioError: a graph that can never agree, or that does not have these weights.
    """

    def __init__(
        self, topology: Topology, weights: str, participation: Participation | None = None, steps: int = 1
    ) -> None:
        """Check the combination and start with nothing cached."""
        self.topology = topology
        self.steps = steps
        self.n_peers = topology.n_peers
        self.participation = participation or build_participation("all", self.n_peers)
        self.weights = "server" if topology.name == "server" else weights
        self.sends_shares = self.weights == "column-stochastic"
        self._by_phase: dict[int, MixingMatrix] = {}
        self._latest: tuple[int, MixingMatrix] | None = None
        self._period = topology.period
        if self.weights != "server":
            RULES.check(self.weights, "topology.weights")
        check_topology(topology)
        self._check_combination()

        # Each phase is built once with everybody active, so that edges without these weights are refused now.
        for phase in range(topology.period or 1):
            self._build(phase, np.ones(self.n_peers, dtype=bool))
        self._check_participation()

    def _check_combination(self) -> None:
        """Raise ScenarioError for a graph, weights and participation that do not go together."""
        topology = self.topology
        weights = self.weights
        kind = self.participation.kind
        if self.participation.n_peers != self.n_peers:
            raise ScenarioError(
                f"participation of {self.participation.n_peers} peers must be of n_peers={self.n_peers}, "
                f"as topology {topology.name} is; build both for the same peers",
                code="mixing.participation",
            )

        if weights == "server" and topology.name != "server":
            raise ScenarioError(
                f"topology.weights=server on topology {topology.name} must be on topology server; set topology.name",
                code="mixing.server",
            )

        if weights in UNDIRECTED and topology.directed:
            also = ""
            if topology.name == "edge-list":
                also = "; if its edges go both ways, set topology.directed=false"
            raise ScenarioError(
                f"topology.weights={weights} on topology {topology.name} must have an undirected graph; "
                f"use a push-sum algorithm (column-stochastic weights), or an undirected topology{also}",
                code="mixing.directed",
            )

        if weights == "doubly-stochastic" and topology.directed and kind != "all":
            raise ScenarioError(
                f"topology.weights=doubly-stochastic on topology {topology.name} must have participation all, "
                f"not {kind}: an absent peer unbalances what others send and receive; use push-sum",
                code="mixing.participation",
            )

    def _check_participation(self) -> None:
        """Raise ScenarioError if no two peers are ever active together."""
        if self.weights == "server":
            return
        most_active = max(int(self.participation.active(k).sum()) for k in range(8))
        if most_active < 2:
            kind = self.participation.kind
            raise ScenarioError(
                f"participation.kind={kind} leaves 1 peer of {self.n_peers} active, so no peer ever exchanges; "
                "raise fraction so that at least 2 are active",
                code="mixing.participation",
            )

    @property
    def if_all_stay(self) -> Mixing:
        """Return the mixing if no peer left, as all peers plan."""
        whole = planned(self.participation)
        if whole is self.participation:
            return self
        return Mixing(self.topology, self.weights, whole, self.steps)

    def matrix(self, place: int) -> MixingMatrix:
        """Return the W of a place, [n_peers, n_peers]; inactive rows are the identity's, except for server."""
        active = self.participation.active(place // self.steps)
        if self._period is not None and active.all():
            phase = place % self._period
            if phase not in self._by_phase:
                self._by_phase[phase] = self._build(phase, active)
            return self._by_phase[phase]

        # Steps and exchanges of one place ask for it several times.
        if self._latest is None or self._latest[0] != place:
            self._latest = (place, self._build(place, active))
        return self._latest[1]

    def links(self, place: int) -> EdgeArray:
        """Return the edges of a place, [m, 2] (sender, receiver): the off-diagonal terms of W."""
        senders, receivers, _ = self.matrix(place).links()
        links: EdgeArray = np.stack([senders, receivers], axis=1)[senders != receivers]
        return links

    def hosted(self, place: int, peers: Peers) -> Hosted:
        """Return the rows and messages of some peers at a place."""
        return self.matrix(place).hosted(peers)

    def without(self, absent: Iterable[int]) -> Mixing:
        """Return the same mixing as if some peers were never active; itself if there are none."""
        absences = [Absence(peer, 0, None) for peer in sorted(absent)]
        if not absences:
            return self
        others = copy(self)
        others.participation = leave(self.participation, absences, noticed_after=0)
        others._by_phase = {}
        others._latest = None
        return others

    def heard(self, places: int) -> npt.NDArray[np.int64]:
        """Return from how many others each peer hears at each place, [places or the graph's period, n_peers].

        It builds the matrices of these rounds; the result follows from public settings only.
        """
        if self.participation.kind == "all" and self.topology.period is not None:
            places = min(places, self.topology.period or places)

        counts = []
        for place in range(places):
            receivers = self.links(place)[:, 1]
            counts.append(np.bincount(receivers, minlength=self.n_peers))
        return np.stack(counts)

    def _build(self, round_index: int, active: npt.NDArray[np.bool_]) -> MixingMatrix:
        if isinstance(self.topology, CompleteTopology):  # without listing its n (n - 1) edges
            return average_matrix(active, everybody_receives=self.weights == "server")
        edges = self.topology.edges(round_index)
        return mixing_matrix(edges, self.n_peers, self.weights, active, is_directed=self.topology.directed)


class PartlyHeard(Mixing):
    """A mixing in which neighbours that a peer did not hear have no weight: it goes to the peer itself.

    If all were heard, it is the mixing itself, to the last bit. If some were not, it has the row of that peer only.
    """

    def __init__(self, whole: Mixing, peer: int) -> None:
        """Start with all neighbours heard."""
        vars(self).update(vars(whole))
        self._peer = peer
        self._heard: frozenset[int] | None = None

    def use_senders(self, heard: Iterable[int] | None) -> None:
        """Set which others were heard; None for all."""
        self._heard = None if heard is None else frozenset(heard)

    def matrix(self, place: int) -> MixingMatrix:
        """Return the W of a place; only the peer's row if a neighbour was not heard."""
        whole = super().matrix(place)
        if self._heard is None:
            return whole
        senders, _, weights = whole.rows([self._peer]).links()
        missed = np.array([sender not in self._heard and sender != self._peer for sender in senders.tolist()])
        if not missed.any():
            return whole

        senders = senders[~missed]
        weights = weights[~missed]
        own = senders == self._peer
        weights = np.where(own, 1 - weights[~own].sum(), weights)
        ends = np.array([0, len(senders)])
        return SparseMatrix(self.n_peers, np.array([self._peer]), ends, senders, weights, halves=False)

    def links(self, place: int) -> EdgeArray:
        """Return the edges of a place, [m, 2] (sender, receiver), of the peer with the neighbours that were heard."""
        senders, receivers, _ = super().matrix(place).links()
        links: EdgeArray = np.stack([senders, receivers], axis=1)[senders != receivers]
        if self._heard is None:
            return links
        other = np.where(links[:, 0] == self._peer, links[:, 1], links[:, 0])
        mine = (links == self._peer).any(1)
        edges: EdgeArray = links[mine & np.isin(other, list(self._heard))]
        return edges

    def hosted(self, place: int, peers: Peers) -> Hosted:
        """Return only the peer's row, and its messages with the neighbours that were heard."""
        whole = super().matrix(place).hosted(peers)
        heard = self._heard
        if heard is None:
            return whole
        return Hosted(
            peers,
            self.matrix(place).rows(peers),
            tuple(term for term in whole.sent if term[1] in heard),
            tuple(link for link in whole.heard if link[0] in heard),
            tuple(link for link in whole.answered if link[0] in heard),
        )
