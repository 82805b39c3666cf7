"""The noise of a simulation: counter-based normal numbers, Philox4x32-7 and Box-Muller, compiled by numba.

Import this module only where noise is drawn: numba takes long to import.

A row is cut into tiles of 4 * LANES elements; element 4*LANES*j + LANES*w + t is made from word w of the Philox block
with counter (LANES*j + t, step, receiver, 0) under the row's key, so a value depends on nothing but these and its
column. Both precisions draw the same uniforms. Seven rounds are the fewest that pass BigCrush (section 4.3 of the
source); ten, the usual margin on top, take a sixth longer.

A radius has 32 bits, which would end the normals at 6.8. Words below REFINED, one in 2**16, get 64 bits more from the
block with counter (LANES*j + t, step, receiver, 1): they end at 11.6, and no cell of the 32-bit grid that is left holds
more than 2**-16 of the tail beyond it.

From the inside out: `philox` encrypts a counter, `normals32` and `normals64` make two normals of two words,
`_fill_tile` fills a tile, `_add_tiles` adds tiles to rows, and `PhiloxNoise` shares the tiles out to threads.
`gpu_philox` draws the same numbers on a GPU.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from flower_privdec.common.errors import ArgumentError
from flower_privdec.privacy.noise.source import NO_RECEIVER, check_call
from flower_privdec.rows.keys import checked_key, digest
from flower_privdec.rows.tensors import compiled, inlined

LANES = 32  # elements that are computed side by side
ROUNDS = 7
TILE = 4 * LANES
BLOCK = 8  # tiles of a row that stay in the cache while all pairs are added to them
REFINED = np.uint32(2**16)

# The constants of Philox4x32: its multipliers, and by how much a key grows in each round.
_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_FLOAT = {"contract", "nnan", "ninf", "nsz"}
_f4 = np.float32
_u4 = np.uint32
_i4 = np.int32
_f8 = np.float64
_u8 = np.uint64
_i8 = np.int64


_inline = partial(inlined, fastmath=_FLOAT)
_entry = partial(compiled, fastmath=_FLOAT)


@_inline
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Encrypt one counter; all words are uint64 holding 32 bits, the results uint32."""
    for _ in range(ROUNDS):
        p0 = (c0 & _LOW) * _M0
        p1 = (c2 & _LOW) * _M1
        c0 = (p1 >> _32) ^ c1 ^ k0
        c1 = p1 & _LOW
        c2 = (p0 >> _32) ^ c3 ^ k1
        c3 = p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return _u4(c0), _u4(c1), _u4(c2), _u4(c3)


@_inline
def normals32(x, y):  # type: ignore[no-untyped-def]
    """Two float32 normals of two words: radius sqrt(-2 ln((x + 1/2) / 2^32)), quadrant and angle from y."""
    # ln by a polynomial of the mantissa, which is brought to [sqrt(1/2), sqrt(2)) first.
    bits = _f4(_f4(x) + _f4(0.5)).view(_i4)
    exponent = (bits - _i4(0x3F3504F3)) >> _i4(23)
    m = _i4(bits - (exponent << _i4(23))).view(_f4) - _f4(1)
    p = _f4(0.08722349142904505) * m + _f4(-0.14366839931705258)
    p = (p * m + _f4(0.1495226761942918)) * m + _f4(-0.16562393578805937)
    p = (p * m + _f4(0.1995683350825593)) * m + _f4(-0.25002074045861866)
    p = (p * m + _f4(0.3333418562664761)) * m + _f4(-0.499999879644504)
    p = p * m + _f4(0.9999999741895687)
    log = p * m + _f4(_i4(exponent - _i4(32))) * _f4(0.6931471805599453)

    # The second bit of y is the sign.
    sign = _u4(_u4(y) << _u4(1)) & _u4(0x80000000)
    radius = _u4(_f4(math.sqrt(_f4(-2) * log)).view(_u4) ^ sign).view(_f4)

    # Sine and cosine of an angle in [-π/4, π/4), by polynomials; its 30 bits are the last ones of y.
    t = _f4(_i4(_u4(y) << _u4(2))) * _f4(2.0**-31)
    z = t * t
    s = (_f4(-3.5954507782564404e-05) * z + _f4(0.0024900071270947304)) * z + _f4(-0.08074543483021228)
    s = t * (s * z + _f4(0.7853981609834044))
    c = (_f4(-0.0003188805083843841) * z + _f4(0.015849915256886133)) * z + _f4(-0.30842425356194936)
    c = c * z + _f4(0.9999999724233212)

    # The first bit of y says which normal gets the sine.
    swap = (_u4(y) & _u4(0x80000000)) != _u4(0)
    return radius * (s if swap else c), radius * (c if swap else s)


@_inline
def normals64(x, y):  # type: ignore[no-untyped-def]
    """The same two normals in float64."""
    return polar64(_f8(x) + _f8(0.5), y)


@_inline
def refined(x, x1, x2):  # type: ignore[no-untyped-def]
    """Return where in its cell of the 32-bit grid a radius lies: the word x and 64 bits behind its point."""
    return _f8(x) + (_f8(x1) + (_f8(x2) + 0.5) * 2.0**-32) * 2.0**-32


@_inline
def polar64(v, y):  # type: ignore[no-untyped-def]
    """Two normals of radius sqrt(-2 ln(v / 2^32)), to about 1e-15: ln by the atanh series, the rest by Taylor."""
    # As in `normals32`, but for the series.
    bits = _f8(v).view(_i8)
    exponent = (bits - _i8(0x3FE6A09E667F3BCD)) >> _i8(52)
    m = _i8(bits - (exponent << _i8(52))).view(_f8) - 1.0
    q = m / (2.0 + m)
    w = q * q
    p = 1.0 / 21.0
    for k in (19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        p = p * w + 1.0 / k
    log = 2.0 * q * p + _f8(exponent - _i8(32)) * 0.6931471805599453

    radius = math.sqrt(-2.0 * log)
    radius = -radius if (_u4(y) & _u4(0x40000000)) != _u4(0) else radius

    t = _f8(_i4(_u4(y) << _u4(2))) * (2.0**-31 * 0.7853981633974483)
    z = t * t
    s = 1.0
    c = 1.0
    for k in (14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0):
        s = 1.0 - s * z / (k * (k + 1.0))
        c = 1.0 - c * z / (k * (k - 1.0))
    s = s * t

    swap = (_u4(y) & _u4(0x80000000)) != _u4(0)
    return radius * (s if swap else c), radius * (c if swap else s)


@_inline
def _fill_tile(normals, tile, first, step, receiver, k0, k1):  # type: ignore[no-untyped-def]
    """Fill a tile from 32-bit words; return the smallest word of any radius."""
    least = _u4(0xFFFFFFFF)
    for t in range(LANES):
        x0, x1, x2, x3 = philox(first + _u8(t), step, receiver, _u8(0), k0, k1)
        least = min(least, min(x0, x2))
        n0, n1 = normals(x0, x1)
        n2, n3 = normals(x2, x3)
        tile[t] = n0
        tile[LANES + t] = n1
        tile[2 * LANES + t] = n2
        tile[3 * LANES + t] = n3
    return least


@numba.njit(fastmath=_FLOAT, error_model="numpy")
def _refine_tile(tile, first, step, receiver, k0, k1):  # type: ignore[no-untyped-def]
    """Replace the pairs of a tile whose radius is below REFINED."""
    for t in range(LANES):
        x0, x1, x2, x3 = philox(first + _u8(t), step, receiver, _u8(0), k0, k1)
        if min(x0, x2) < REFINED:
            more = philox(first + _u8(t), step, receiver, _u8(1), k0, k1)
            if x0 < REFINED:
                tile[t], tile[LANES + t] = polar64(refined(x0, more[0], more[1]), x1)
            if x2 < REFINED:
                tile[2 * LANES + t], tile[3 * LANES + t] = polar64(refined(x2, more[2], more[3]), x3)


@_inline
def _add_scaled(row, tile, scale, length):  # type: ignore[no-untyped-def]
    for t in range(length):
        row[t] += scale * tile[t]


@_inline
def _add_tiles(normals, out, shape, std, keys, receivers, step, start, stop):  # type: ignore[no-untyped-def]
    """Add to tiles start..stop, counted row by row.

    out is flat, shape = (columns, elements from row to row); std, keys and receivers have a number for each row.
    """
    d, stride = shape
    tiles = (d + TILE - 1) // TILE  # of a row
    tile = np.empty(TILE, out.dtype)

    for i in range(start // tiles, (stop + tiles - 1) // tiles):
        scale = std[i]
        receiver = receivers[i]
        k0 = keys[i] & _LOW
        k1 = keys[i] >> _32
        if scale == 0:
            continue

        # The tiles of row i that are among start..stop.
        for j in range(max(0, start - i * tiles), min(tiles, stop - i * tiles)):
            if _fill_tile(normals, tile, _u8(j * LANES), step, receiver, k0, k1) < REFINED:
                _refine_tile(tile, _u8(j * LANES), step, receiver, k0, k1)
            row = out[i * stride + j * TILE : i * stride + min(d, (j + 1) * TILE)]
            if row.size == TILE:
                _add_scaled(row, tile, scale, TILE)  # a length the compiler knows
            else:
                _add_scaled(row, tile, scale, row.size)


@_entry
def add_normals32(out, shape, std, keys, receivers, step, start, stop):  # type: ignore[no-untyped-def]
    """Add std[i] * N(0, I) to tiles start..stop of float32 rows."""
    _add_tiles(normals32, out, shape, std, keys, receivers, step, start, stop)


@_entry
def add_normals64(out, shape, std, keys, receivers, step, start, stop):  # type: ignore[no-untyped-def]
    """Add std[i] * N(0, I) to tiles start..stop of float64 rows."""
    _add_tiles(normals64, out, shape, std, keys, receivers, step, start, stop)


@_inline
def _add_shared_tiles(normals, out, shape, ends, scales, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Draw tiles start..stop of each pair's row once, and add them to the rows of its two ends.

    ends and scales, [pairs, 2], have the row and the factor of each end; a row below 0 is not there.
    """
    d, stride = shape
    tile = np.empty(TILE, out.dtype)
    receiver = _u8(NO_RECEIVER)

    # Block by block, so that the rows' parts stay in the cache while every pair adds to them.
    for block in range(start, stop, BLOCK):
        for e in range(len(keys)):
            k0 = keys[e] & _LOW
            k1 = keys[e] >> _32
            for j in range(block, min(stop, block + BLOCK)):
                if _fill_tile(normals, tile, _u8(j * LANES), step, receiver, k0, k1) < REFINED:
                    _refine_tile(tile, _u8(j * LANES), step, receiver, k0, k1)
                for end in range(2):
                    if ends[e, end] >= 0:
                        first = ends[e, end] * stride
                        row = out[first + j * TILE : first + min(d, (j + 1) * TILE)]
                        if row.size == TILE:
                            _add_scaled(row, tile, scales[e, end], TILE)
                        else:
                            _add_scaled(row, tile, scales[e, end], row.size)


@_entry
def add_shared32(out, shape, ends, scales, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Add the draws of pairs to tiles start..stop of float32 rows."""
    _add_shared_tiles(normals32, out, shape, ends, scales, keys, step, start, stop)


@_entry
def add_shared64(out, shape, ends, scales, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Add the draws of pairs to tiles start..stop of float64 rows."""
    _add_shared_tiles(normals64, out, shape, ends, scales, keys, step, start, stop)


@_inline
def _add_common_tiles(normals, out, shape, rows, factors, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Draw tiles start..stop of each member's row once, and add to rows what `add_common_` says.

    rows has the row of each member, below 0 if it is not there; factors, [3, members], are gains, shares and parts.
    """
    d, stride = shape
    tile = np.empty(TILE, out.dtype)
    total = np.empty(BLOCK * TILE, out.dtype)
    receiver = _u8(NO_RECEIVER)

    # Block by block, as pairs are drawn: what all drew stays in the cache until every row has its part.
    for block in range(start, stop, BLOCK):
        end = min(stop, block + BLOCK)
        total[:] = 0
        for m in range(len(keys)):
            k0 = keys[m] & _LOW
            k1 = keys[m] >> _32
            for j in range(block, end):
                if _fill_tile(normals, tile, _u8(j * LANES), step, receiver, k0, k1) < REFINED:
                    _refine_tile(tile, _u8(j * LANES), step, receiver, k0, k1)
                _add_scaled(total[(j - block) * TILE : (j - block + 1) * TILE], tile, factors[1, m], TILE)
                if rows[m] >= 0:
                    first = rows[m] * stride
                    row = out[first + j * TILE : first + min(d, (j + 1) * TILE)]
                    if row.size == TILE:
                        _add_scaled(row, tile, factors[0, m], TILE)
                    else:
                        _add_scaled(row, tile, factors[0, m], row.size)

        for m in range(len(keys)):
            if rows[m] >= 0:
                first = rows[m] * stride
                row = out[first + block * TILE : first + min(d, end * TILE)]
                _add_scaled(row, total, -factors[2, m], row.size)


@_entry
def add_common32(out, shape, rows, factors, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Add common draws to tiles start..stop of float32 rows."""
    _add_common_tiles(normals32, out, shape, rows, factors, keys, step, start, stop)


@_entry
def add_common64(out, shape, rows, factors, keys, step, start, stop):  # type: ignore[no-untyped-def]
    """Add common draws to tiles start..stop of float64 rows."""
    _add_common_tiles(normals64, out, shape, rows, factors, keys, step, start, stop)


_KERNELS: dict[torch.dtype, Any] = {torch.float32: add_normals32, torch.float64: add_normals64}
_SHARED: dict[torch.dtype, Any] = {torch.float32: add_shared32, torch.float64: add_shared64}
_COMMON: dict[torch.dtype, Any] = {torch.float32: add_common32, torch.float64: add_common64}


class PhiloxNoise:
    """Simulated Gaussian noise: Philox4x32-7 keyed by 64 bits of (peer's key, purpose), for rows on any device.

    The counter is (block, step, receiver, 0). A value depends only on its key, counter and column, not on the cohort, a
    slice of it or the number of threads (torch.get_num_threads()). float64 rows get the numbers of float32 rows,
    computed more precisely. Rows on another device are copied to the CPU and back.
    """

    def __init__(self, keys: Mapping[int, bytes]) -> None:
        """Copy the keys of the peers that this process hosts.

        Args:
            keys: from global peer id to key.

        Raises:
            ValueError: a key is not a key.
        """
        self._peers = np.array(sorted(keys), dtype=np.int64)
        self._keys = [checked_key(keys[peer]) for peer in self._peers.tolist()]
        self._tables: dict[str, np.ndarray] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

    def table(self, purpose: str) -> np.ndarray:
        """Return 64 bits that follow from each peer's key, id and a purpose, uint64 [peers], by ascending id."""
        if purpose not in self._tables:
            pairs = zip(self._keys, self._peers.tolist(), strict=True)
            hashes = b"".join(digest(8, key, "noise", purpose, peer) for key, peer in pairs)
            self._tables[purpose] = np.frombuffer(hashes, np.uint64)
        return self._tables[purpose]

    def add_(
        self,
        out: Tensor,
        std: Tensor,
        step: int,
        peers: np.ndarray,
        purpose: str = "noise",
        receivers: np.ndarray | None = None,
    ) -> None:
        """Add noise in place; see NoiseSource."""
        check_call(out, std, step, peers, receivers)
        keys, words = self._words(purpose, peers, receivers)
        if out.numel():
            with self._reachable(out) as rows:
                self._draw_(rows, std.detach().to(rows).contiguous(), keys, words, step)

    def add_shared_(
        self, out: Tensor, ends: np.ndarray, scales: np.ndarray, step: int, pairs: np.ndarray, purpose: str
    ) -> None:
        """Add what each pair draws to the rows of its two ends, the same numbers to both.

        Args:
            out: rows [m, d], float32 or float64.
            ends: the rows of both ends, int64 [P, 2]; below 0 if an end is not hosted here.
            scales: what each end multiplies the normals by, float64 [P, 2].
            step, purpose: see NoiseSource.add_.
            pairs: numbers of the pairs, whose keys these normals have, int64 [P].
        """
        keys, _ = self._words(purpose, pairs, None)
        if out.numel() and len(pairs):
            with self._reachable(out) as rows:
                flat, shape = _flat(rows)
                factors = scales.astype(flat.dtype)
                kernel = _SHARED[rows.dtype]
                self._share_out(partial(kernel, flat, shape, ends, factors, keys, np.uint64(step)), rows, 1)

    def add_common_(
        self, out: Tensor, rows: np.ndarray, factors: np.ndarray, step: int, members: np.ndarray, purpose: str
    ) -> None:
        """Add one draw g of each member to its own row, less its part of what all of them drew.

            out[rows[i]] += gains[i] g_i - parts[i] Σ_j shares[j] g_j

        Args:
            out: rows [m, d], float32 or float64.
            rows: the row of each member, int64 [M]; below 0 if it is not hosted here.
            factors: gains, shares and parts, float64 [3, M].
            step, purpose: see NoiseSource.add_.
            members: the peers, whose keys these normals have, int64 [M].
        """
        keys, _ = self._words(purpose, members, None)
        if out.numel() and len(members):
            with self._reachable(out) as reached:
                flat, shape = _flat(reached)
                scaled = factors.astype(flat.dtype)
                kernel = _COMMON[reached.dtype]
                self._share_out(partial(kernel, flat, shape, rows, scaled, keys, np.uint64(step)), reached, 1)

    @contextmanager
    def _reachable(self, out: Tensor) -> Iterator[Tensor]:
        """Give rows on the device that computes the noise, with adjacent columns, and copy them back."""
        rows = self._on_device(out.detach())
        if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
            rows = rows.contiguous()
        yield rows
        if rows.data_ptr() != out.data_ptr():
            out.detach().copy_(rows)

    def _on_device(self, rows: Tensor) -> Tensor:
        """Return rows on the device that computes the noise."""
        return rows.cpu()

    def _words(self, purpose: str, peers: np.ndarray, receivers: np.ndarray | None) -> tuple[Any, Any]:
        """Return the words of rows' keys and receivers, uint64 [m] each; raise ValueError for a peer without a key."""
        slots = self._peers.searchsorted(peers)
        if len(self._peers):
            held = self._peers.take(slots, mode="clip")
        else:
            held = np.full(len(slots), -1)
        if (held != peers).any():
            raise ArgumentError(
                f"peers {peers[held != peers].tolist()} have no key here: draw only for peers hosted here",
                code="keys.missing",
            )

        if receivers is None:
            words = np.full(len(peers), NO_RECEIVER, np.uint64)
        else:
            words = receivers.astype(np.uint64)
        return self.table(purpose)[slots], words

    def _draw_(self, rows: Tensor, std: Tensor, keys: Any, words: Any, step: int) -> None:
        """Add noise to rows whose columns are adjacent."""
        flat, shape = _flat(rows)
        fill = partial(_KERNELS[rows.dtype], flat, shape, std.numpy(), keys, words, np.uint64(step))
        self._share_out(fill, rows, len(rows))

    def _share_out(self, fill: Callable[[int, int], None], rows: Tensor, repeats: int) -> None:
        """Call a kernel on all tiles of a row, `repeats` times as many, by as many threads as torch has."""
        tiles_of_row = -(-rows.shape[1] // TILE)  # rounded up
        tiles = repeats * tiles_of_row
        # A thread is worth its start from 2^16 elements on.
        threads = min(torch.get_num_threads(), max(1, tiles * TILE // 2**16))
        if threads == 1:
            fill(0, tiles)
            return

        if self._pool is None or self._pool_size < threads:
            self._pool = ThreadPoolExecutor(threads, "noise")
            self._pool_size = threads
        bounds = [tiles * part // threads for part in range(threads + 1)]
        parts = [self._pool.submit(fill, start, stop) for start, stop in pairwise(bounds)]
        for part in parts:
            part.result()


def _flat(rows: Tensor) -> tuple[np.ndarray, tuple[int, int]]:
    """Return rows as one array, with their columns and the elements from row to row."""
    m, d = rows.shape
    stride = rows.stride(0)
    flat = rows.as_strided(((m - 1) * stride + d,), (1,))
    return flat.numpy(), (d, stride)
