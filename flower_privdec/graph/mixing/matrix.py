"""Mixing matrices: W[i, j] is the weight that receiver i gives to what j sent.

Each receiver's sum runs in an order that depends on its own row alone (itself first, then by distance), with
every product rounded before it is added. So the rows of a few receivers give, bit for bit, what the whole
matrix gives, whichever kernel does the work and however columns are tiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flower_privdec.graph.mixing import kernels
from flower_privdec.graph.topology.graphs import Peers
from flower_privdec.rows.aligned import empty_rows


class MixingMatrix(ABC):
    """The rows of W for some receivers: `dense()` is [receivers, columns] float64, a column per sender."""

    n_columns: int
    receivers: Peers

    @property
    def sources(self) -> Peers:
        """Return the sorted ids of all whose payloads these rows need."""
        return np.unique(self._columns())

    @abstractmethod
    def dense(self) -> npt.NDArray[np.float64]:
        """Return the weights, [receivers, columns] float64."""

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
        """Return what these weights say of some of the receivers; kept for those who were asked for last."""
        key = peers.tobytes()
        hosted = self._last_hosted.get(key)
        if hosted is None:
            hosted = Hosted.of(self, peers)
            self._last_hosted.clear()
            self._last_hosted[key] = hosted
        return hosted

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Mix: out[i] = sum_j W[i, j] x[j].

        Args:
            x: a row for each column of W, [columns, ...], floating, on any device.
            out: where to write, [receivers, ...], rows of their own and no part of x; made, aligned, when not given.

        Returns:
            out. Weights are float64 and are rounded once to x's dtype.

        Raises:
            ValueError: shapes that do not fit, an integer payload, or an out that is x.
        """
        shape = (len(self.receivers), *x.shape[1:])
        if x.shape[0] != self.n_columns or not x.is_floating_point():
            raise ValueError(f"payload {list(x.shape)} {x.dtype} must be floating, {self.n_columns} rows")
        if out is None:
            out = empty_rows(x, *shape) if len(shape) == 2 else x.new_empty(shape)
        if out.shape != shape or out.dtype != x.dtype or out.data_ptr() == x.data_ptr() != 0:
            raise ValueError(f"out {list(out.shape)} {out.dtype} must be {list(shape)} {x.dtype}, and not x")
        if out.numel():
            self._combine(x.detach().reshape(len(x), -1), out.detach().view(len(out), -1))
        return out

    def replace(self, x: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Mix rows that are needed no more, [columns, ...] with a receiver for each: in place, or into `spare`.

        Returns:
            The mixed rows, equal to the last bit to those of `apply`, and a buffer that is free afterwards
            (None where none was needed).
        """
        return self.apply(x, out=spare), x

    @property
    def moved(self) -> Peers | None:
        """Return the receivers whose rows are not just their own, where these are few; else None."""
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

    @abstractmethod
    def _columns(self) -> Peers: ...

    @abstractmethod
    def _relabel(self, sources: Peers) -> MixingMatrix: ...

    @abstractmethod
    def _combine(self, x: Tensor, out: Tensor) -> None: ...

    def _positions(self, peers: npt.ArrayLike) -> Peers:
        wanted = np.atleast_1d(np.asarray(peers, dtype=np.int64))
        order = np.argsort(self.receivers)
        where = np.searchsorted(self.receivers, wanted, sorter=order)
        positions: Peers = order[np.minimum(where, len(order) - 1)]
        if not np.array_equal(self.receivers[positions], wanted):
            raise ValueError(f"peers {wanted.tolist()} must all be among the {len(order)} receivers")
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

    def dense(self) -> npt.NDArray[np.float64]:
        """Return the weights, [receivers, columns] float64."""
        full = np.zeros((len(self.receivers), self.n_columns))
        full[np.repeat(np.arange(len(self.receivers)), np.diff(self.indptr)), self.columns] = self.weights
        return full

    def links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        """See MixingMatrix."""
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
        """See MixingMatrix."""
        return None if self._changed is None else self._changed[1].receivers

    def replace(self, x: Tensor, spare: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See MixingMatrix; in place where most rows stay, or are long and all hear the peer the same number before."""
        changed = self._changed
        if changed is not None and x.shape[0] == self.n_columns:
            rows, part = changed
            x.detach()[torch.from_numpy(rows).to(x.device)] = part.apply(x)
            return x, spare
        shift, long = self._shift if self.halves else None, x.nbytes >= kernels.IN_PLACE_FROM * self.n_columns
        if shift is None or not long or x.device.type != "cpu" or x.shape[0] != self.n_columns:
            return super().replace(x, spare)
        kernels.halves_shifted_(x.detach(), shift)
        return x, spare

    def _columns(self) -> Peers:
        return self.columns

    def _relabel(self, sources: Peers) -> SparseMatrix:
        columns = np.searchsorted(sources, self.columns)
        return SparseMatrix(len(sources), self.receivers, self.indptr, columns, self.weights, self.halves)

    def _combine(self, x: Tensor, out: Tensor) -> None:
        long = x.device.type == "cpu" and x.nbytes >= kernels.IN_PLACE_FROM * len(x)
        if self.halves and (long or len(self._runs) <= kernels.FEW_RUNS):
            kernels.halves_in_runs(x, out, self._runs)
        elif self.halves:
            kernels.halves(x, out, self._slots(x))
        elif not kernels.fused(x, out, self.indptr, self.columns, self._cast(x), self._widest):
            kernels.slots(x, out, self._slots(x))

    @cached_property
    def _changed(self) -> tuple[Peers, SparseMatrix] | None:
        """The rows that are not just their receiver's own, and their weights; None where these are most rows."""
        first = self.indptr[:-1]
        own = (np.diff(self.indptr) == 1) & (self.columns[first] == self.receivers) & (self.weights[first] == 1)
        if 2 * own.sum() <= len(own):
            return None
        return np.flatnonzero(~own), self.rows(self.receivers[~own])

    @cached_property
    def _widest(self) -> int:
        return int(np.diff(self.indptr).max())

    @cached_property
    def _shift(self) -> int | None:
        """The h of a graph in which all rows, in order, hear the peer h before them."""
        own, other = self.columns.reshape(-1, 2).T
        shifts = (own - other) % self.n_columns
        in_order = len(own) == self.n_columns and np.array_equal(own, np.arange(self.n_columns))
        return int(shifts[0]) if in_order and (shifts == shifts[0]).all() else None

    @cached_property
    def _runs(self) -> list[kernels.Run]:
        return kernels.runs_of(self.columns)

    @cached_property
    def _on_device(self) -> dict[tuple[torch.device, torch.dtype], list[kernels.Slot]]:
        return {}

    @cached_property
    def _cast_weights(self) -> dict[torch.dtype, npt.NDArray[np.floating]]:
        return {torch.float64: self.weights, torch.float32: self.weights.astype(np.float32)}

    def _cast(self, x: Tensor) -> npt.NDArray[np.floating]:
        return self._cast_weights.get(x.dtype, self.weights)

    def _slots(self, x: Tensor) -> list[kernels.Slot]:
        key = (x.device, x.dtype)
        if key not in self._on_device:
            self._on_device[key] = kernels.build_slots(self.indptr, self.columns, self.weights, *key)
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

    def dense(self) -> npt.NDArray[np.float64]:
        """Return the weights, [receivers, columns] float64."""
        full = np.zeros((len(self.receivers), self.n_columns))
        full[np.ix_(self.averaged, self.members)] = 1 / len(self.members)
        others = np.flatnonzero(~self.averaged)
        full[others, self.own[others]] = 1
        return full

    def links(self) -> tuple[Peers, Peers, npt.NDArray[np.float64]]:
        """See MixingMatrix."""
        senders, receivers, weights = [], [], []
        for peer, own, averaged in zip(self.receivers, self.own, self.averaged, strict=True):
            heard = self.members[np.argsort((peer - self.members) % self.n_columns)] if averaged else own[None]
            senders.append(heard)
            receivers.append(np.full(len(heard), peer))
            weights.append(np.full(len(heard), 1 / len(heard)))
        return np.concatenate(senders), np.concatenate(receivers), np.concatenate(weights)

    def rows(self, peers: npt.ArrayLike) -> AverageMatrix:
        """Return the rows of some of the receivers, in the order given."""
        at = self._positions(peers)
        return AverageMatrix(self.n_columns, self.receivers[at], self.members, self.own[at], self.averaged[at])

    def _columns(self) -> Peers:
        members = self.members[: None if self.averaged.any() else 0]
        return np.concatenate([members, self.own[~self.averaged]])

    def _relabel(self, sources: Peers) -> AverageMatrix:
        members = np.searchsorted(sources, self.members)  # those not among the sources are not looked at
        own = np.where(self.averaged, 0, np.searchsorted(sources, self.own))
        return AverageMatrix(len(sources), self.receivers, members, own, self.averaged)

    def _combine(self, x: Tensor, out: Tensor) -> None:
        rows, members, own = self._indices(x.device)
        if len(rows) < len(out):
            torch.index_select(x, 0, own, out=out)
        if len(rows):
            mean = kernels.mean_row(x, members)
            if len(rows) == len(out):
                out.copy_(mean)
            else:
                for row in rows:
                    out[row] = mean

    def _indices(self, device: torch.device) -> tuple[list[int], Tensor | None, Tensor]:
        """Return the averaged rows, the members (None when they are all columns), and rows' own columns."""
        if device not in self._on_device:
            everybody = np.array_equal(self.members, np.arange(self.n_columns))
            members = None if everybody else torch.from_numpy(self.members).to(device)
            rows = np.flatnonzero(self.averaged).tolist()
            self._on_device[device] = (rows, members, torch.from_numpy(self.own).to(device))
        return self._on_device[device]

    @cached_property
    def _on_device(self) -> dict[torch.device, tuple[list[int], Tensor | None, Tensor]]:
        return {}


if TYPE_CHECKING:
    from flower_privdec.graph.mixing.matrix import MixingMatrix

Link = tuple[int, int]  # sender, receiver
Term = tuple[int, int, float]  # sender, receiver, weight


@dataclass(frozen=True)
class Hosted:
    """Rows of W for some peers, and what passes between them and others or each other.

    Attributes:
        peers: who is hosted, in their order.
        rows: of W for them.
        sent: the terms that stand for messages from them, in the order of `MixingMatrix.links`.
        heard: the messages to them, by receiver and sender.
        answered: the answers to what they sent, (who answers, who sent), by who sent and who answers.
    """

    peers: Peers
    rows: MixingMatrix
    sent: tuple[Term, ...]
    heard: tuple[Link, ...]
    answered: tuple[Link, ...]

    @classmethod
    def of(cls, matrix: MixingMatrix, peers: Peers) -> Hosted:
        """Look at a matrix once, for peers among its receivers."""
        senders, receivers, weights = matrix.links()
        between = senders != receivers
        here, there = between & np.isin(senders, peers), between & np.isin(receivers, peers)
        sent = zip(senders[here].tolist(), receivers[here].tolist(), weights[here].tolist(), strict=True)
        heard, answered = _by_second(senders[there], receivers[there]), _by_second(receivers[here], senders[here])
        return cls(peers, matrix.rows(peers), tuple(sent), heard, answered)

    @cached_property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """Return the terms of each hosted peer's own row: itself first, then by distance."""
        return tuple(tuple(self.rows.rows([peer]).terms()) for peer in self.peers.tolist())


def _by_second(first: Peers, second: Peers) -> tuple[Link, ...]:
    order = np.lexsort((first, second))
    return tuple(zip(first[order].tolist(), second[order].tolist(), strict=True))
