"""Kernels of the sparse apply, giving the same bits, so that speed alone decides between them.

Measured on one core in float32 (79,510 columns of 50 peers, 2,000 columns of 1,000 peers): two-slice lerp on
shift graphs is as fast as a fused loop; on any other graph the fused loop (numba) takes a fifth to a half of
the time of torch's gather, multiply, add. torch's index operations are fast on whole rows only: no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flower_privdec.rows.aligned import padded

Array = npt.NDArray[Any]
Run = tuple[int, int, int, int]  # first receiver, its own column, its other column, how many follow one another

CHUNK_BYTES = {"cpu": 2**20}  # a temporary of some rows stays in cache
CHUNK_BYTES_ELSEWHERE = 2**28
FUSED_FROM = 2**17  # multiplications from which the fused loop pays for its compilation
FUSED_TERMS = 32  # terms of one receiver from which it does so whatever the size: each costs torch some calls
IN_PLACE_FROM = 2**16  # bytes of a row from which a call for each row costs less than a second buffer
FEW_RUNS = 4  # calls that cost less than the copies of a gather, however short the rows
BLOCK = 32  # rows summed pairwise before they join a mean


class Slot(NamedTuple):
    """The s-th term of receivers' sums: out[rows] += weights * x[columns]; rows None means all receivers."""

    rows: Tensor | None
    columns: Tensor
    weights: Tensor


def build_slots(indptr: Array, columns: Array, weights: Array, device: torch.device, dtype: torch.dtype) -> list[Slot]:
    """Turn compressed rows into slots; the first has all receivers, the s-th those with more than s terms."""
    counts = np.diff(indptr)
    built = []
    for s in range(int(counts.max())):
        rows = np.flatnonzero(counts > s)
        at = indptr[rows] + s
        built.append(
            Slot(
                None if len(rows) == len(counts) else torch.from_numpy(rows).to(device),
                torch.from_numpy(columns[at]).to(device),
                torch.from_numpy(weights[at]).to(device, dtype).unsqueeze(1),
            )
        )
    return built


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


def halves(x: Tensor, out: Tensor, terms: list[Slot]) -> None:
    """Take half of the receiver's own and half of one other's, row by row."""
    for chunk in _chunks(x, len(out)):
        own, other = (x.index_select(0, term.columns[chunk]) for term in terms)
        torch.lerp(own, other, 0.5, out=out[chunk])


def halves_in_runs(x: Tensor, out: Tensor, runs: list[Run]) -> None:
    """Do the same run by run, without a copy: two on shift graphs."""
    for first, own, other, count in runs:
        torch.lerp(x[own : own + count], x[other : other + count], 0.5, out=out[first : first + count])


def runs_of(columns: Array) -> list[Run]:
    """Return the runs of receivers whose own and other column both go up by one, from pairs (own, other) in turn."""
    pairs = columns.reshape(-1, 2)
    starts = np.flatnonzero(np.r_[True, (np.diff(pairs, axis=0) != 1).any(axis=1)])
    counts = np.diff(np.r_[starts, len(pairs)])
    return list(zip(starts.tolist(), *pairs[starts].T.tolist(), counts.tolist(), strict=True))


def halves_shifted_(x: Tensor, shift: int) -> None:
    """Take half of the row's own and half of the row's `shift` before it, cyclically, in place.

    It goes row after row round each cycle, and every row is read and written once: a row is changed before the one it
    hears, so that only the first of a cycle has to be kept.
    """
    rows = x.unbind(0)
    for start in range(math.gcd(len(rows), shift)):
        first, row = rows[start].clone(), start
        while (other := (row - shift) % len(rows)) != start:
            rows[row].lerp_(rows[other], 0.5)
            row = other
        rows[row].lerp_(first, 0.5)


def mean_row(x: Tensor, members: Tensor | None) -> Tensor:
    """Return the mean of the members' rows (None: of all), summed pairwise in blocks and divided once."""
    return sum_rows(x, members) / (len(x) if members is None else len(members))


def sum_rows(x: Tensor, members: Tensor | None) -> Tensor:
    """Return the sum of the members' rows (None: of all), pairwise in blocks."""
    count = len(x) if members is None else len(members)
    total: Tensor | None = None
    for start in range(0, count, BLOCK):
        chosen = slice(start, start + BLOCK)
        part = x[chosen] if members is None else x.index_select(0, members[chosen])
        total = _pairwise_sum(part) if total is None else total.add_(_pairwise_sum(part))
    if total is None:
        raise ValueError("a sum needs at least one member")
    return total


def _pairwise_sum(part: Tensor) -> Tensor:
    if len(part) == 1:
        return part[0].clone()
    while len(part) > 1:
        half, odd = divmod(len(part), 2)
        summed = part[:half] + part[half : 2 * half]
        if odd:
            summed[0] += part[-1]
        part = summed
    return part[0]


def fused(x: Tensor, out: Tensor, indptr: Array, columns: Array, weights: Array, widest: int) -> bool:
    """Sum all terms in one compiled loop where that can be done and pays; say whether it was.

    Args:
        x: contiguous (but for padding of the rows) on the CPU, float32 or float64, or nothing is done.
        out: likewise.
        indptr: compressed rows, as in `SparseMatrix`.
        columns: of the terms.
        weights: of the terms, in x's dtype.
        widest: the most terms of one receiver.
    """
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    pays = widest >= FUSED_TERMS or len(columns) * x.shape[1] >= FUSED_FROM
    source, target = padded(x), padded(out)
    if not (fits and pays) or source is None or target is None:
        return False
    _compiled_loop()(indptr, columns, weights, source.numpy(), target.numpy(), x.shape[1])
    return True


@cache
def _compiled_loop() -> Callable[..., None]:
    """Compile the fused loop when it is first needed."""
    from flower_privdec.rows.compiling import compiled

    loop: Callable[..., None] = compiled(_loop)
    return loop


def _loop(indptr: Array, columns: Array, weights: Array, x: Array, out: Array, width: int) -> None:
    for row in range(len(indptr) - 1):
        first, end = indptr[row], indptr[row + 1]
        target, term, weight = out[row], x[columns[first]], weights[first]
        if end - first == 2:  # in one pass, with the same roundings
            second, its_weight = x[columns[first + 1]], weights[first + 1]
            for c in range(width):
                target[c] = weight * term[c] + its_weight * second[c]
            continue
        for c in range(width):
            target[c] = weight * term[c]
        for s in range(first + 1, end):
            term, weight = x[columns[s]], weights[s]
            for c in range(width):
                target[c] += weight * term[c]


def _chunks(x: Tensor, n_rows: int) -> Iterator[slice]:
    """Cut rows into chunks, so that a temporary of one chunk stays small."""
    budget = CHUNK_BYTES.get(x.device.type, CHUNK_BYTES_ELSEWHERE)
    size = max(1, budget // (x.element_size() * x.shape[1]))
    for start in range(0, n_rows, size):
        yield slice(start, start + size)
